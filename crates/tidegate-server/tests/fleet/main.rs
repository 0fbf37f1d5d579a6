//! All instances on one page, and what happened to them: the real binary on a real Redis.

#[path = "../../../tidegate/tests/support/sentinel.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod sentinel;
#[path = "../support/mod.rs"]
mod support;
/// Servers of `sentinel`.
mod server {
    pub(crate) use crate::support::{Redis, folder_in_memory, free_port};
}

use std::process::{Command, Output, Stdio};

use sentinel::{NAME, Sentinels};
use serde_json::{Value, json};
use support::{Redis, Service, request, with_free_ports};

fn config(store: &str, limit: u32) -> String {
    format!(
        "store: {{{store}, timeout: 2s}}\npolicies:\n  \
         - {{name: per-user, key: [header.x-user-id], limit: {limit}, window: 1h}}\n"
    )
}

fn url(redis: &Redis) -> String {
    format!("redis: '{}'", redis.url())
}

/// Runs a command on the admin listener of a service.
fn tidegate(service: &Service, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .args(["--admin", &format!("http://{}", service.admin)])
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs")
}

fn text(output: &Output) -> String {
    let [out, errors] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    format!("{out}{errors}")
}

fn fleet(service: &Service) -> Value {
    service.admin("/v1/fleet").json()
}

fn instances(fleet: &Value) -> &Vec<Value> {
    fleet["instances"].as_array().expect("instances")
}

/// Returns the name of an instance, which ends with its admin port.
fn name(service: &Service) -> String {
    service.admin("/v1/status").json()["instance"].as_str().expect("a name").to_owned()
}

/// Waits until an instance knows as many instances, each by its name.
fn wait_for_fleet(service: &Service, size: usize) {
    service.wait_until("all instances are known", |service| {
        let fleet = fleet(service);
        let known = instances(&fleet).iter().filter(|instance| instance["name"].is_string());
        known.count() == size
    });
}

/// Returns the texts of the events of all instances, the oldest first.
fn events(service: &Service) -> Vec<String> {
    let body = service.admin("/v1/events?limit=1000").json();
    let events = body["events"].as_array().expect("events").iter().rev();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    events.map(|event| format!("{} {}", text(&event["instance"]), text(&event["text"]))).collect()
}

/// Waits until these events have happened, in this order, beside others.
fn wait_for_story(service: &Service, story: &[String]) {
    service.wait_until(&format!("the events are {story:#?}"), |service| {
        let events = events(service);
        let mut events = events.iter();
        let happened = |part: &String| events.any(|event| event.starts_with(part.as_str()));
        story.iter().all(happened)
    });
}

fn acquire(service: &Service, key: &str, cost: u32) -> u16 {
    service.acquire(&json!({"policy": "per-user", "key": key, "cost": cost})).status
}

fn deny(service: &Service, key: &str, times: usize) {
    for _ in 0..times {
        assert_eq!(acquire(service, key, 1), 429);
    }
}

#[test]
fn an_instance_with_another_file_stands_out() {
    let redis = Redis::start();
    let services = [100, 100, 200].map(|limit| Service::start(&config(&url(&redis), limit)));
    let [one, two, other] = &services;
    let names = [one, two, other].map(name);
    for service in &services {
        wait_for_fleet(service, 3);
    }
    let body = fleet(one);
    assert_eq!((&body["size"], &body["configurations"]), (&json!(3), &json!(2)), "{body}");
    assert_eq!((&body["instance"], &body["error"]), (&json!(names[0]), &Value::Null));
    let first = &instances(&body)[0];
    assert_eq!(first["name"], names[2], "the one that differs is first");
    assert_eq!(first["differs"], json!(["configuration"]));
    let change = json!({"policy": "per-user", "field": "limit", "old": "100", "new": "200",
                        "text": "per-user: limit 100 → 200"});
    assert_eq!(first["changes"], json!([change]));
    for instance in &instances(&body)[1..] {
        assert_eq!((&instance["differs"], &instance["changes"]), (&json!([]), &json!([])));
        assert_eq!(instance["this"], instance["name"] == *names[0]);
    }

    // The commands say the same, also by the instance that differs.
    for service in [one, other] {
        let output = tidegate(service, &["fleet"]);
        let shown = text(&output);
        assert_eq!(output.status.code(), Some(1), "{shown}");
        let differing = format!("{} per-user: limit 100 → 200", names[2]);
        assert!(shown.contains(&differing), "{shown}");
        assert!(shown.lines().nth(1).expect("a row").contains("configuration"), "{shown}");
        let shown = text(&tidegate(service, &["top", "--once"]));
        for part in ["3 instances", "1 DIFFER", "DIFFERS in configuration"] {
            assert!(shown.contains(part), "{part:?} in\n{shown}");
        }
        assert!(shown.contains("\n  per-user: limit 100 → 200\n"), "{shown}");
    }

    // With the same file, it no longer differs.
    std::fs::write(other.file(), with_free_ports(&config(&url(&redis), 100))).expect("written");
    one.wait_until("the configurations are equal", |one| {
        tidegate(one, &["fleet"]).status.code() == Some(0)
    });
    let reloaded = format!("{} configuration reloaded: per-user: limit 200 → 100", names[2]);
    wait_for_story(two, &[reloaded]);
    redis_keys_expire(&redis);
}

fn redis_keys_expire(redis: &Redis) {
    redis.assert_every_key_expires();
    let keys: Vec<String> = redis.query(&["KEYS", "rate_limit:{%alive}:*"]);
    assert!(keys.iter().any(|key| key.contains(":list:events")), "{keys:?}");
}

/// Other releases publish other texts, or none.
#[test]
fn an_instance_of_another_release_is_shown() {
    let redis = Redis::start();
    let service = Service::start(&config(&url(&redis), 5));
    wait_for_fleet(&service, 1);
    let (seconds, _): (u64, u64) = redis.query(&["TIME"]);
    let later = ((seconds + 60) * 1_000_000).to_string();
    for id in ["newer", "silent", "damaged"] {
        redis.query::<()>(&["ZADD", "rate_limit:{%alive}", &later, id]);
    }
    let publish = |id: &str, text: &str| {
        let key = format!("rate_limit:{{%alive}}:instance:{id}");
        redis.query::<()>(&["SET", &key, text, "EX", "60"]);
    };
    let hash = service.admin("/v1/status").json()["reload"]["config_hash"].clone();
    let newer = json!({"name": "web-9:8082", "version": "9.0.0", "format": 2, "config_hash": hash,
                       "field_of_a_later_release": {}});
    publish("newer", &newer.to_string());
    publish("damaged", "[\u{1b}[2J");
    service.wait_until("all members are listed", |service| fleet(service)["size"] == 4);
    let body = fleet(&service);
    let shown: Vec<(&Value, &Value)> =
        instances(&body).iter().map(|it| (&it["name"], &it["differs"])).collect();
    let own = json!(name(&service));
    assert_eq!(shown[0], (&json!("web-9:8082"), &json!(["version", "format"])));
    assert_eq!(shown[1], (&own, &json!([])));
    assert_eq!(shown[2..], [(&Value::Null, &json!([])); 2]);
    let output = tidegate(&service, &["fleet"]);
    let printed = text(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("version, format") && printed.contains("(not known)"), "{printed}");
}

#[test]
fn rates_and_hot_keys_are_summed_and_the_last_denial_has_its_instance() {
    let redis = Redis::start();
    let [one, two] = [5, 5].map(|limit| Service::start(&config(&url(&redis), limit)));
    wait_for_fleet(&one, 2);
    assert_eq!(acquire(&one, "mallory", 5), 200);
    deny(&one, "mallory", 12);
    one.wait_until("the denials of the first instance are known", |one| {
        fleet(one)["hot_keys"]["denied"][0]["count"] == 12
    });
    let lookup = |service: &Service| {
        let body = service.admin("/v1/lookup?key=mallory").json();
        body["results"][0]["last_denial"]["instance"].clone()
    };
    assert_eq!(lookup(&two), json!(name(&one)));
    deny(&two, "mallory", 15);
    for service in [&one, &two] {
        service.wait_until("the denials are summed", |service| {
            let body = fleet(service);
            let hot = &body["hot_keys"]["denied"][0];
            hot["key"] == "mallory" && hot["count"] == 27
        });
        let last = name(&two);
        service.wait_until("the last denial is that of the second", |service| {
            lookup(service) == json!(last)
        });
    }
    let shown = text(&tidegate(&one, &["lookup", "mallory"]));
    assert!(shown.contains(&format!("denied last by {}", name(&two))), "{shown}");
    one.wait_until("the rates of a busy second are summed", |one| {
        deny(one, "mallory", 20);
        let body = fleet(one);
        let sum: f64 = instances(&body).iter().filter_map(|it| it["denied"].as_f64()).sum();
        let denied = body["rates"]["denied"].as_f64().expect("a rate");
        assert!((denied - sum).abs() < 0.01, "{body}");
        denied > 0.0 && body["rates"]["policies"]["per-user"][1].as_f64() > Some(0.0)
    });
    let started = [name(&one), name(&two)].map(|name| format!("{name} per-user denies mallory"));
    for event in started {
        wait_for_story(&one, &[event]);
    }
}

#[test]
fn a_rolling_change_a_failover_and_a_reset_read_as_a_story() {
    let mut sentinels = Sentinels::start();
    let nodes: Vec<String> = sentinels.urls().iter().map(|url| format!("'{url}'")).collect();
    let store = format!("sentinel: {{master: {NAME}, nodes: [{}]}}", nodes.join(", "));
    let one = Service::start(&config(&store, 5));
    let mut two = Service::start(&config(&store, 5));
    let [first, second] = [&one, &two].map(name);
    wait_for_fleet(&one, 2);
    for (service, name) in [(&one, &first), (&two, &second)] {
        std::fs::write(service.file(), with_free_ports(&config(&store, 7))).expect("written");
        wait_for_story(&one, &[format!("{name} configuration reloaded")]);
    }
    assert_eq!(acquire(&one, "ann", 2), 200);
    let output = tidegate(&two, &["reset", "ann"]);
    assert!(output.status.success(), "{}", text(&output));
    let output = tidegate(&two, &["reset", "ann"]);
    assert_eq!(output.status.code(), Some(1), "no units are in use: {}", text(&output));
    let reset = format!("{second} count of ann under per-user reset by 127.0.0.1");
    wait_for_story(&one, std::slice::from_ref(&reset));
    let raise = ["override", "set", "per-user", "ann", "--limit", "9", "--expires-in", "1h"];
    let output = tidegate(&one, &[&raise[..], &["--reason", "ticket 7"]].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert!(tidegate(&two, &["override", "rm", "per-user", "ann"]).status.success());
    let raised = format!(
        "{first} override of ann under per-user set by 127.0.0.1 to {{\"limit\":9}}: ticket 7"
    );
    let removed = format!("{second} override of ann under per-user removed by 127.0.0.1");
    wait_for_story(&one, &[raised.clone(), removed.clone()]);
    let replicated = |index: usize| {
        let events: Vec<String> = sentinels.servers()[index].query(&[
            "ZRANGE",
            "rate_limit:{%alive}:list:events",
            "0",
            "-1",
        ]);
        events.iter().any(|event| event.contains("removed by"))
    };
    one.wait_until("the replicas have the events", |_| replicated(1) && replicated(2));

    let old = sentinels.servers()[0].port();
    sentinels.server_mut(0).kill();
    one.wait_until("the outage starts", |one| {
        acquire(one, "bob", 1);
        one.admin("/v1/events?scope=instance").body.contains("\"outage-started\"")
    });
    let failover = format!("{first} failover from 127.0.0.1:{old} to 127.0.0.1:");
    let recovered = format!("{first} store recovered after ");
    for event in [&failover, &recovered] {
        one.wait_until(event, |one| events(one).iter().any(|it| it.starts_with(event.as_str())));
    }
    two.signal("TERM");
    assert!(two.wait_for_exit().success());
    wait_for_story(
        &one,
        &[
            format!("{first} started, version 0.1.0"),
            format!("{first} configuration reloaded: per-user: limit 5 → 7"),
            format!("{second} configuration reloaded: per-user: limit 5 → 7"),
            reset,
            raised,
            removed,
            format!("{first} store failed, falling back"),
            recovered,
            format!("{second} stopping after "),
        ],
    );
    let shown = text(&tidegate(&one, &["events"]));
    for part in [&failover, "reset by 127.0.0.1", "stopping after"] {
        let part = part.split_once(' ').map_or(part.as_ref(), |(_, rest)| rest);
        assert!(shown.contains(part), "{part:?} in\n{shown}");
    }
}

#[test]
fn an_outage_without_requests_is_an_event_and_an_emptied_redis_gets_the_events_again() {
    let mut redis = Redis::start_with(&["--appendonly", "no", "--save", ""]);
    let services = [5, 5].map(|limit| Service::start(&config(&url(&redis), limit)));
    let [one, two] = &services;
    let names = [one, two].map(name);
    wait_for_fleet(one, 2);
    one.wait_until("all is well", |one| tidegate(one, &["fleet"]).status.code() == Some(0));
    redis.kill();
    for service in &services {
        service.wait_until("the outage is an event", |it| {
            it.admin("/v1/events?scope=instance").body.contains("\"outage-started\"")
        });
    }
    let output = tidegate(one, &["fleet"]);
    assert_eq!(output.status.code(), Some(1), "others are not known: {}", text(&output));
    redis.restart();
    // The events of before, too, and of the other instance.
    for name in &names {
        let events = ["started, version", "store failed, falling back", "store recovered after"];
        wait_for_story(one, &events.map(|event| format!("{name} {event}")));
    }
    one.wait_until("all is well", |one| tidegate(one, &["fleet"]).status.code() == Some(0));
}

#[test]
fn a_service_in_memory_knows_itself() {
    let config = "auth:\n  tokens:\n    - {name: viewer, token: see-s3cret, scopes: [read]}\n    \
                  - {name: ops, token: ops-s3cret, scopes: [read, reset]}\n\
                  policies:\n  - {name: per-user, limit: 5, window: 1h}\n";
    let service = Service::start_with(config, &["--log-format", "json"]);
    let get = |path: &str, token: &str| {
        let token = format!("Bearer {token}");
        request(&service.admin, "GET", path, &[("Authorization", &token)], b"")
    };
    service.wait_until("the instance has a state", |_| {
        get("/v1/fleet", "see-s3cret").json()["instances"][0]["name"].is_string()
    });
    let body = get("/v1/fleet", "see-s3cret").json();
    assert_eq!((&body["size"], &body["error"]), (&json!(1), &Value::Null), "{body}");
    assert_eq!(body["instances"][0]["name"], body["instance"]);
    let port = service.admin.rsplit(':').next().expect("a port");
    assert!(
        body["instance"].as_str().is_some_and(|it| it.ends_with(&format!(":{port}"))),
        "{body}"
    );
    for path in ["/v1/fleet", "/v1/events"] {
        assert_eq!(get(path, "wrong").status, 401);
        assert_eq!(request(&service.admin, "GET", path, &[], b"").status, 401);
    }
    for query in ["limit=many", "scope=world", "x=1"] {
        assert_eq!(get(&format!("/v1/events?{query}"), "see-s3cret").status, 400, "{query}");
    }

    let reset = json!({"policy": "per-user", "key": "ann"}).to_string();
    let headers = [("Authorization", "Bearer ops-s3cret"), ("Content-Type", "application/json")];
    let response = request(&service.admin, "POST", "/v1/reset", &headers, reset.as_bytes());
    assert_eq!(response.status, 204);
    let event = &get("/v1/events?limit=1", "see-s3cret").json()["events"][0];
    assert_eq!(event["event"], "reset");
    assert_eq!(event["details"], json!({"policy": "per-user", "key": "ann", "by": "ops"}));
    assert_eq!(event["text"], "count of ann under per-user reset by ops");
    // The log has the same.
    service.wait_until_logged("count of ann under per-user reset by ops");
    let logged = service.output();
    let line =
        logged.lines().find(|line| line.contains("under per-user reset by")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&line["fields"]["event"], &line["level"]), (&json!("reset"), &json!("INFO")));
    assert_eq!(line["fields"]["instance"], body["instance"]);
    let details = line["fields"]["details"].as_str().expect("a text");
    assert_eq!(serde_json::from_str::<Value>(details).expect("JSON"), event["details"]);
    let metrics = get("/metrics", "see-s3cret").body;
    assert!(metrics.contains("tidegate_events_total{kind=\"reset\"} 1\n"), "{metrics}");
}
