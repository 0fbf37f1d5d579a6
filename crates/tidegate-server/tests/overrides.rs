//! Overrides through the binary: the admin API, its tokens, the command line, several instances.

mod support;

use std::process::Command;

use serde_json::{Value, json};
use support::{Redis, Response, Service, request};

const POLICIES: &str = "policies:
  - {name: per-user, key: [header.x-user-id], limit: 10, window: 1h,
     overrides: [{key: bob, limit: 5}]}
  - {name: per-key, key: [header.x-api-key], limit: 10, window: 1h}
  - {name: per-ip, key: [ip], limit: 10, window: 1h}
";

fn send(service: &Service, method: &str, path: &str, body: &Value, token: &str) -> Response {
    let authorization = format!("Bearer {token}");
    let mut headers = vec![("content-type", "application/json")];
    if !token.is_empty() {
        headers.push(("authorization", &authorization));
    }
    request(&service.admin, method, path, &headers, body.to_string().as_bytes())
}

fn set(service: &Service, body: &Value) -> Response {
    send(service, "PUT", "/v1/overrides", body, "")
}

fn raise(policy: &str, key: &str, limit: u64) -> Value {
    json!({"policy": policy, "key": key, "limit": limit, "expires_in": "2h", "reason": "launch"})
}

fn limit(service: &Service, policy: &str, key: &str) -> u64 {
    let body = json!({"policy": policy, "key": key}).to_string();
    service.post("/v1/peek", &body).json()["limit"].as_u64().expect("a limit")
}

fn run(service: &Service, arguments: &[&str]) -> (i32, String) {
    run_command(service, &[&["override"], arguments].concat())
}

fn run_command(service: &Service, arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .args(["--admin", &format!("http://{}", service.admin)])
        .output()
        .expect("the binary runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().expect("a code"), String::from_utf8(text).expect("UTF-8"))
}

#[test]
fn override_is_set_listed_looked_up_and_removed() {
    let service = Service::start(POLICIES);
    let answer = set(&service, &raise("per-user", "ann", 5_000));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["by"], "127.0.0.1");
    assert_eq!(
        [limit(&service, "per-user", "ann"), limit(&service, "per-user", "bob")],
        [5_000, 5]
    );
    let looked_up = service.admin("/v1/lookup?key=ann&policy=per-user").json();
    let result = &looked_up["results"][0];
    assert_eq!((&result["limit"], &result["override"]), (&json!(5_000), &json!(true)));
    assert_eq!(result["run_time"]["reason"], "launch");
    let (_, text) = run_command(&service, &["lookup", "ann"]);
    assert!(text.contains("changed at run time by 127.0.0.1: launch"), "{text}");
    service.wait_until_logged("override set");

    let block = json!({"policy": "per-user", "key": "*", "mode": "block", "expires_in": "never",
                       "reason": "incident"});
    assert_eq!(set(&service, &block).json()["until_ms"], Value::Null);
    let denied = service.acquire(&json!({"policy": "per-user", "key": "bob"}));
    assert_eq!((denied.status, &denied.json()["source"]), (429, &json!("override")));
    assert_eq!(denied.header("retry-after"), None, "no wait helps");
    let attributes = json!({"header.x-user-id": "bob"});
    let explained =
        service.post("/v1/peek?explain", &json!({"attributes": attributes}).to_string());
    assert!(explained.body.contains("a run-time override blocks it"), "{explained:?}");
    let reason = service.admin("/v1/lookup?key=bob&policy=per-user").json();
    assert_eq!(reason["results"][0]["reason"], "An override blocks the key.");
    let network = raise("per-ip", "10.0.0.0/8", 77);
    assert_eq!(set(&service, &network).status, 200);
    let looked_up = service.admin("/v1/lookup?key=10.1.2.3&policy=per-ip").json();
    let result = &looked_up["results"][0];
    assert_eq!((&result["limit"], &result["run_time"]["key"]), (&json!(77), &json!("10.0.0.0/8")));
    let path = "/v1/overrides?policy=per-ip&key=10.0.0.0/8";
    assert_eq!(send(&service, "DELETE", path, &Value::Null, "").status, 204);
    let listed = service.admin("/v1/overrides").json();
    assert_eq!(listed["scope"], "this-process");
    assert_eq!(listed["overrides"].as_array().map(Vec::len), Some(2));
    let page = service.admin("/v1/overrides?limit=1").json();
    let cursor = page["cursor"].as_str().expect("more").replace('"', "%22").replace(',', "%2C");
    let cursor = cursor.replace('[', "%5B").replace(']', "%5D");
    let second = service.admin(&format!("/v1/overrides?limit=1&cursor={cursor}")).json();
    assert_eq!((&second["overrides"][0]["key"], &second["cursor"]), (&json!("ann"), &Value::Null));
    let metrics = service.admin("/metrics").body;
    assert!(metrics.contains("\ntidegate_overrides 2\n"), "{metrics}");

    let path = "/v1/overrides?policy=per-user&key=*&reason=over";
    assert_eq!(send(&service, "DELETE", path, &Value::Null, "").status, 204);
    assert_eq!(send(&service, "DELETE", path, &Value::Null, "").status, 404);
    assert_eq!(limit(&service, "per-user", "bob"), 5);
    let audit = service.admin("/v1/overrides/audit").json();
    assert_eq!(audit["changes"][0]["reason"], "over");
    assert_eq!(audit["changes"][0]["before"]["mode"], "block");
    assert_eq!(audit["changes"][4]["after"]["limit"], 5_000);
}

#[test]
fn wrong_overrides_are_refused_with_what_would_be_right() {
    let service = Service::start(POLICIES);
    for (change, status, message) in [
        (json!({"policy": "per-usr"}), 404, "per-user"),
        (json!({"limit": 0}), 400, "limit 0"),
        (json!({"expires_in": "2 fortnights"}), 400, "expires_in"),
        (json!({"expires_in": null}), 400, "expires_in"),
        (json!({"reason": ""}), 400, "reason"),
        (json!({"key": ["a", "b"]}), 400, "only by"),
        (json!({"mode": "block"}), 400, "a mode or numbers"),
        (json!({"until": "2h"}), 400, "until"),
        (json!({"policy": "per-ip", "key": "10.0.0.0/33"}), 400, "neither an address"),
    ] {
        let mut body = raise("per-user", "ann", 5_000);
        let fields = change.as_object().expect("fields").clone();
        body.as_object_mut().expect("fields").extend(fields);
        let answer = set(&service, &body);
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        assert!(answer.body.contains(message), "{answer:?}");
    }
    let form =
        request(&service.admin, "PUT", "/v1/overrides", &[("content-type", "text/plain")], b"{}");
    assert_eq!(form.status, 415);
}

#[test]
fn tokens_have_scopes_and_names_and_credentials_stay_hidden() {
    let auth = "auth:
  tokens:
    - {name: grafana, token: reads-0123456789abcdef, scopes: [read]}
    - {name: on-call, token: resets-0123456789abcde, scopes: [read, reset]}
";
    let service = Service::start(&format!("{auth}{POLICIES}"));
    let (reads, resets) = ("reads-0123456789abcdef", "resets-0123456789abcde");
    let body = raise("per-key", "secret-key", 50);
    for (token, status) in [("", 401), ("wrong", 401), (reads, 403), (resets, 200)] {
        assert_eq!(send(&service, "PUT", "/v1/overrides", &body, token).status, status);
    }
    assert_eq!(send(&service, "GET", "/v1/overrides", &Value::Null, "").status, 401);
    let listed = send(&service, "GET", "/v1/overrides", &Value::Null, reads);
    let audit = send(&service, "GET", "/v1/overrides/audit", &Value::Null, reads);
    for response in [&listed, &audit] {
        assert!(response.body.contains("\"by\":\"on-call\""), "{response:?}");
        assert!(!response.body.contains("secret-key"), "{response:?}");
    }
    assert!(!service.output().contains("secret-key"), "{}", service.output());
    let hash = listed.json()["overrides"][0]["key"].as_str().expect("a key").to_owned();
    assert!(hash.starts_with("sha256:"), "{hash}");
    let path = format!("/v1/overrides?policy=per-key&key={}", hash.replace(':', "%3A"));
    assert_eq!(send(&service, "DELETE", &path, &Value::Null, reads).status, 403);
    assert_eq!(send(&service, "DELETE", &path, &Value::Null, resets).status, 204);
    assert_eq!(limit(&service, "per-key", "secret-key"), 10);
}

#[test]
fn command_line_sets_lists_exports_and_removes() {
    let service = Service::start(POLICIES);
    let raised =
        ["set", "per-user", "ann", "--limit", "5000", "--expires-in", "2h", "--reason", "launch"];
    let (code, text) = run(&service, &raised);
    assert!(code == 0 && text.starts_with("ann of per-user: 5,000 until 20"), "{text}");
    let halved =
        ["set", "per-user", "*", "--limit", "5", "--expires-in", "never", "--reason", "incident"];
    assert_eq!(run(&service, &halved).0, 0);
    assert_eq!([limit(&service, "per-user", "ann"), limit(&service, "per-user", "x")], [5_000, 5]);
    let (code, text) = run(&service, &["list"]);
    assert!(code == 0 && text.contains("launch") && text.contains("only this instance"), "{text}");
    let (_, text) = run(&service, &["list", "per-user", "--json"]);
    let first: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&first["key"], &first["limit"]), (&json!("*"), &json!(5)));
    let (code, text) = run(&service, &["export"]);
    assert!(code == 0 && text.contains("- {key: \"ann\", limit: 5000}"), "{text}");
    assert_eq!(run(&service, &["rm", "per-user", "*", "--reason", "over"]).0, 0);
    let (code, text) = run(&service, &["rm", "per-user", "*"]);
    assert!(code == 2 && text.contains("there is no override"), "{text}");
    let (code, text) = run(&service, &["set", "per-user", "ann", "--limit", "1", "--reason", "x"]);
    assert!(code == 2 && text.contains("--expires-in"), "{text}");
}

#[test]
fn instances_share_overrides_and_a_new_one_has_them_from_its_first_request() {
    let redis = Redis::start();
    let config = format!("store: {{redis: '{}', timeout: 2s}}\n{POLICIES}", redis.url());
    let [here, there] = [Service::start(&config), Service::start(&config)];
    assert_eq!(set(&here, &raise("per-user", "ann", 5_000)).status, 200);
    assert_eq!(limit(&here, "per-user", "ann"), 5_000, "at once where it was set");
    assert_eq!(here.admin("/v1/overrides").json()["scope"], "all-instances");
    there.wait_until("the other has it", |it| limit(it, "per-user", "ann") == 5_000);
    let third = Service::start(&config);
    assert_eq!(limit(&third, "per-user", "ann"), 5_000);
    // A restart of all instances keeps them.
    drop((here, there, third));
    let again = Service::start(&config);
    assert_eq!(limit(&again, "per-user", "ann"), 5_000);
    drop(redis);
    again.wait_until("a change fails without Redis", |it| {
        set(it, &raise("per-user", "ann", 7)).status == 503
    });
    assert_eq!(again.admin("/v1/overrides").json()["overrides"][0]["limit"], 5_000);
}

#[test]
fn a_commit_after_an_override_of_the_window_keeps_the_count() {
    let policies = "policies:
  - {name: hourly, key: [header.x-user-id], algorithm: fixed-window, limit: 10, window: 1h}
";
    let redis = Redis::start();
    for store in [String::new(), format!("store: {{redis: '{}', timeout: 2s}}\n", redis.url())] {
        let service = Service::start(&format!("{store}{policies}"));
        let daily = json!({"policy": "hourly", "key": "ann", "window": "366d", "limit": 10,
                           "expires_in": "2h", "reason": "launch"});
        assert_eq!(set(&service, &daily).status, 200);
        let send = |operation: &str, fields: Value| {
            let mut body = json!({"policy": "hourly", "key": "ann"});
            let fields = fields.as_object().expect("fields").clone();
            body.as_object_mut().expect("fields").extend(fields);
            let answer = service.post(&format!("/v1/{operation}"), &body.to_string());
            assert_eq!(answer.status, 200, "{answer:?}");
            answer.json()["remaining"].as_u64().expect("units")
        };
        assert_eq!(send("acquire", json!({"cost": 5})), 5);
        assert_eq!(send("reserve", json!({"cost": 2, "id": "a"})), 3);
        assert_eq!(send("commit", json!({"actual": 4, "id": "a"})), 1);
        assert_eq!(send("peek", json!({})), 0, "one more is left");
        assert_eq!(send("refund", json!({"cost": 1, "age_ms": 500})), 2);
        assert_eq!(send("peek", json!({})), 1);
    }
}
