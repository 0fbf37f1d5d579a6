use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::app::App;
use crate::client::Client;
use crate::proxy::{Proxy, Recipe, changed, deployed};
use crate::support::{Redis, Response, Service};

pub(crate) const ENVOY: Recipe<'static> = Recipe {
    program: "envoy",
    arguments: &[
        "-c",
        "envoy.yaml",
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "--log-level",
        "warning",
    ],
    files: &["envoy/envoy.yaml"],
    // A short timeout for Tidegate is right in production, but the test machine may be busy.
    changes: &[("0.25s", "10s")],
    environment: &[],
};

/// Three requests per second and address, two per minute for logins, ten bytes per hour.
const LIMITS: [(&str, &str); 3] = [
    ("hour, requests_per_unit: 100000000}", "hour, requests_per_unit: 10}"),
    ("minute, requests_per_unit: 100}", "second, requests_per_unit: 3}"),
    ("minute, requests_per_unit: 5}", "minute, requests_per_unit: 2}"),
];
const WINDOW: Duration = Duration::from_secs(1);

/// Returns the deployed configuration with changes, and with free ports.
fn deployed_config(changes: &[(&str, &str)]) -> String {
    let config = changed(&deployed("envoy/tidegate.yaml"), changes);
    let ports = ["127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8082"];
    ports.iter().fold(config, |config, address| config.replace(address, "127.0.0.1:0"))
}

fn tidegate(more: &str) -> Service {
    tidegate_with(&[], more)
}

/// Starts Tidegate with changes in its file and more sections.
fn tidegate_with(changes: &[(&str, &str)], more: &str) -> Service {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let config = deployed_config(changes);
    let file = folder.path().join("tidegate.yaml");
    fs::write(&file, format!("{config}\n{more}")).expect("written");
    let rules = changed(&deployed("envoy/ratelimit.yaml"), &LIMITS);
    fs::write(folder.path().join("ratelimit.yaml"), rules).expect("written");
    Service::start_on(folder, &file, &[])
}

fn start(recipe: &Recipe<'_>, app: &App, tidegate: &Service) -> Proxy {
    Proxy::start(recipe, app.port, (8081, tidegate.grpc.as_deref().expect("an address")))
}

fn retry_after(response: &Response) -> u64 {
    assert_eq!(response.status, 429, "{response:?}");
    response.header("retry-after").and_then(|wait| wait.parse().ok()).expect("a wait in seconds")
}

/// Three requests of an address are allowed, the fourth is denied, and one is allowed again after
/// its `Retry-After`.
fn limits_each_address(app: &App, envoy: &Proxy) {
    for attempt in 0..8 {
        let (client, path) = (Client(10 + attempt), format!("/items/{attempt}"));
        let start = Instant::now();
        // An address in a header of the client is ignored.
        let send = |hop: usize| {
            client.get(envoy.address, &path, &[("X-Forwarded-For", &format!("192.0.2.{hop}"))])
        };
        let responses: Vec<_> = (0..4).map(send).collect();
        if start.elapsed() >= WINDOW {
            // The machine was busy, and the first request has left the window.
            continue;
        }
        for (number, response) in responses.iter().take(3).enumerate() {
            assert_eq!(response.status, 200, "{response:?}");
            assert_eq!(response.header("x-ratelimit-limit"), Some("3, 3;w=1"));
            assert_eq!(
                response.header("x-ratelimit-remaining"),
                Some((2 - number).to_string().as_str())
            );
            assert_eq!(response.header("x-ratelimit-reset"), Some("1"));
            assert_eq!(response.header("retry-after"), None);
        }
        let wait = retry_after(&responses[3]);
        assert_eq!(wait, 1);
        assert_eq!(responses[3].header("x-ratelimit-remaining"), Some("0"));
        assert_eq!(app.requests(&path).len(), 3);
        assert_eq!(
            Client(20 + attempt).get(envoy.address, "/", &[]).status,
            200,
            "another address is not affected"
        );
        std::thread::sleep(Duration::from_secs(wait));
        assert_eq!(client.get(envoy.address, "/", &[]).status, 200, "it waited {wait} s");
        return;
    }
    panic!("four requests took longer than {WINDOW:?}, eight times");
}

#[test]
fn envoy_limits_by_descriptors_and_fails_open() {
    let (app, tidegate) = (App::start(), tidegate(""));
    let mut envoy = start(&ENVOY, &app, &tidegate);
    limits_each_address(&app, &envoy);

    // 20 per minute and API key: an export has a hits_addend of 10.
    let export = |key: &str| Client(40).get(envoy.address, "/export", &[("X-Api-Key", key)]);
    for left in ["10", "0"] {
        let response = export("silver");
        assert_eq!(
            (response.status, response.header("x-ratelimit-remaining")),
            (200, Some(left)),
            "{response:?}"
        );
        assert_eq!(response.header("x-ratelimit-limit"), Some("20, 20;w=60"));
    }
    assert!((30..=60).contains(&retry_after(&export("silver"))));
    let usual = Client(41).get(envoy.address, "/", &[("X-Api-Key", "silver")]);
    assert!(
        (30..=60).contains(&retry_after(&usual)),
        "the same key elsewhere, from another address"
    );
    assert_eq!(export("bronze").status, 200, "another key has its own limit");
    let gold = export("gold");
    assert_eq!(
        gold.header("x-ratelimit-limit"),
        Some("1000, 1000;w=60"),
        "this key has a greater limit: {gold:?}"
    );
    assert_eq!(gold.header("x-ratelimit-remaining"), Some("990"));
    let free = Client(42).get(envoy.address, "/export", &[]);
    assert_eq!(
        (free.status, free.header("x-ratelimit-limit")),
        (200, None),
        "no key, no descriptor"
    );

    // By method, path and address. There is no wait for the limit of the address: denials cost
    // nothing.
    let login = || Client(43).post(envoy.address, "/login", &[], "name=ann");
    assert_eq!([login().status, login().status], [200, 200]);
    assert!((30..=60).contains(&retry_after(&login())));
    let otherwise_written = Client(43).post(envoy.address, "//x/../%6Cogin", &[], "name=ann");
    assert!((30..=60).contains(&retry_after(&otherwise_written)));
    assert_eq!(Client(44).post(envoy.address, "/login", &[], "name=bob").status, 200);
    assert_eq!(app.requests("/login").len(), 3);

    drop(tidegate);
    let send = |envoy: &Proxy| Client(40).get(envoy.address, "/export", &[("X-Api-Key", "silver")]);
    envoy.wait_until("failure_mode_deny: false allows requests", |envoy| send(envoy).status == 200);
    assert_eq!(send(&envoy).header("x-ratelimit-limit"), None);
}

/// Sends eight requests with one API key, which has a limit of 3, and returns their statuses.
fn send_eight(envoy: &Proxy, key: &str) -> Vec<u16> {
    // Each request has another address, because addresses have a limit, too.
    let send = |client| Client(client).get(envoy.address, "/items", &[("X-Api-Key", key)]).status;
    (70..78).map(send).collect()
}

fn passed(statuses: &[u16]) -> usize {
    statuses.iter().filter(|status| **status == 200).count()
}

const THREE_PER_KEY: (&str, &str) =
    ("minute, requests_per_unit: 20}", "hour, requests_per_unit: 3}");

#[test]
fn store_failures_are_decided_as_configured() {
    for (mode, fails_closed, expected) in [
        ("local", false, [vec![200; 3], vec![429; 5]].concat()),
        ("allow", false, vec![200; 8]),
        ("deny", false, vec![429; 8]),
        ("error", false, vec![200; 8]),
        ("error", true, vec![500; 8]),
    ] {
        let (app, redis) = (App::start(), Redis::start());
        let mode_line = format!("envoy:\n  on_store_failure: {mode}");
        let changes = if mode == "local" { vec![] } else { vec![("envoy:", mode_line.as_str())] };
        let store = format!("store: {{redis: '{}', instances: 1}}", redis.url());
        let tidegate = tidegate_with(&changes, &store);
        let rules = tidegate.folder().join("ratelimit.yaml");
        let text = fs::read_to_string(&rules).expect("rules");
        fs::write(&rules, changed(&text, &[THREE_PER_KEY])).expect("written");
        tidegate.wait_until("the new rules apply", |tidegate| {
            tidegate.output().contains("configuration reloaded")
        });
        let failure_mode = format!("failure_mode_deny: {fails_closed}");
        let changes = [("failure_mode_deny: false", failure_mode.as_str()), ENVOY.changes[0]];
        let envoy = start(&Recipe { changes: &changes, ..ENVOY }, &app, &tidegate);
        assert_eq!(passed(&send_eight(&envoy, "bronze")), 3, "Redis decides");
        drop(redis);
        let started = Instant::now();
        assert_eq!(send_eight(&envoy, "silver"), expected, "{mode}");
        // Envoy waits up to ten seconds, Tidegate for at most 100 ms per request.
        assert!(started.elapsed() < Duration::from_secs(8), "{mode}: {:?}", started.elapsed());
        assert!(!tidegate.output().contains("panicked"));
    }
}

/// Envoy passes requests whose call fails, so no value of a client may make it fail.
#[test]
fn unusual_values_of_clients_do_not_open_the_limits() {
    let by_policy = "
policies:
  - {name: by-tenant, match: {domain: edge}, key: [descriptor.tenant], limit: 3, window: 1h}
";
    let (app, tidegate) = (App::start(), tidegate(by_policy));
    let rules = tidegate.folder().join("ratelimit.yaml");
    let text = fs::read_to_string(&rules).expect("rules");
    fs::write(&rules, changed(&text, &[THREE_PER_KEY])).expect("written");
    tidegate.wait_until("the new rules apply", |tidegate| {
        tidegate.output().contains("configuration reloaded")
    });
    let with_tenant = "descriptor_key: api_key }
              - actions:
                - request_headers: { header_name: x-tenant, descriptor_key: tenant }
              - actions:
                - header_value_match";
    let usual = "descriptor_key: api_key }
              - actions:
                - header_value_match";
    let changes = [(usual, with_tenant), ENVOY.changes[0]];
    let envoy = start(&Recipe { changes: &changes, ..ENVOY }, &app, &tidegate);
    let long = "k".repeat(50_000);
    let longer_tab = format!("{long}\tx");
    for key in ["a\tb", "caf\u{e9}", &long, &longer_tab] {
        assert_eq!(passed(&send_eight(&envoy, key)), 3, "{:?}", &key[..3]);
    }
    // Not UTF-8, which Envoy sends as it is. The application does not understand it.
    let send = |client| {
        let head = b"GET /items HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Api-Key: ";
        Client(client).send_bytes(envoy.address, &[head, &b"\xff\xfe\r\n\r\n"[..]].concat())
    };
    let statuses: Vec<u16> = (80..88).map(|client| send(client).status).collect();
    let denied = statuses.iter().filter(|status| **status == 429).count();
    assert_eq!(denied, 5, "{statuses:?}");
    // Policies of Tidegate count short keys without control characters, and deny all others.
    let tenant = |tenant: &str| {
        let send = |client| Client(client).get(envoy.address, "/items", &[("X-Tenant", tenant)]);
        (90..98).map(send).filter(|response| response.status == 200).count()
    };
    assert_eq!([tenant("short"), tenant("a\tb"), tenant(&long)], [3, 0, 0]);
}

/// Envoy reaches Tidegate through a Unix socket, with a `pipe` address.
#[test]
fn envoy_uses_a_unix_socket() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let socket = folder.path().join("grpc.sock");
    let address = format!("unix:{}", socket.display());
    let tidegate = tidegate_with(&[("127.0.0.1:8081", &address)], "");
    assert_eq!(tidegate.grpc.as_deref(), Some(address.as_str()));
    let pipe = format!("pipe: {{ path: {} }}", socket.display());
    let tcp = "socket_address: { address: 127.0.0.1, port_value: 1 }";
    let changes = [(tcp, pipe.as_str()), ENVOY.changes[0]];
    let app = App::start();
    let envoy =
        Proxy::start(&Recipe { changes: &changes, ..ENVOY }, app.port, (8081, "127.0.0.1:1"));
    let export = || Client(50).get(envoy.address, "/export", &[("X-Api-Key", "silver")]).status;
    assert_eq!([export(), export(), export()], [200, 200, 429]);
}

/// Envoy opens another connection and loses no call: with `failure_mode_deny`, a lost one is a 500.
#[test]
fn old_connections_of_envoy_are_replaced() {
    let with_age = ("listen:", "listen:\n  max_connection_age: 1s");
    let (app, tidegate) = (App::start(), tidegate_with(&[with_age], ""));
    let changes = [("failure_mode_deny: false", "failure_mode_deny: true"), ENVOY.changes[0]];
    let envoy = start(&Recipe { changes: &changes, ..ENVOY }, &app, &tidegate);
    let started = Instant::now();
    let (mut requests, mut denied) = (0, 0);
    while started.elapsed() < Duration::from_secs(5) {
        let key = format!("k{}", requests / 4);
        let status = Client(61).get(envoy.address, "/export", &[("X-Api-Key", &key)]).status;
        assert!([200, 429].contains(&status), "{status} after {:?}", started.elapsed());
        requests += 1;
        denied += usize::from(status == 429);
    }
    assert!(requests >= 8 && denied.abs_diff(requests / 2) <= 2, "{denied} of {requests} denied");
}

/// Envoy reports the bytes of each response at the end of the stream, and ignores our response.
#[test]
fn bytes_reported_by_envoy_exhaust_a_budget() {
    let (app, tidegate) = (App::start(), tidegate(""));
    let mut envoy = start(&ENVOY, &app, &tidegate);
    let download = |envoy: &Proxy, key: &str| {
        Client(60).get(envoy.address, "/download", &[("X-Api-Key", key)])
    };
    // Each response has four bytes: 4, 8, 12 of 10. A request may overtake the previous report.
    envoy.wait_until("the budget is used up", |envoy| download(envoy, "silver").status == 429);
    let passed = app.requests("/download").len();
    assert!((3..=10).contains(&passed), "{passed} responses of 4 bytes, limit 10");
    assert!(retry_after(&download(&envoy, "silver")) > 0);
    assert_eq!(download(&envoy, "bronze").status, 200, "another key has its own budget");
}

/// Returns what is left of a rule for the key `silver`.
fn left(tidegate: &Service, rule: &str) -> u64 {
    let found = tidegate.admin(&format!("/v1/lookup?key=silver&policy={rule}")).json();
    found["results"][0]["remaining"].as_u64().expect("a number")
}

/// Envoy says when a request has ended, also that of a client that has gone, and of one that was
/// denied.
#[test]
fn envoy_limits_requests_in_flight() {
    let (app, tidegate) = (App::start(), tidegate(""));
    let mut envoy = start(&ENVOY, &app, &tidegate);
    let address = envoy.address;
    let report = move |client: u8| {
        // An id of the client has no effect.
        let headers = [("X-Api-Key", "silver"), ("X-Hold-Id", "mine"), ("X-Request-Id", "mine")];
        Client(client).get(address, "/reports", &headers)
    };
    app.delay_reports(true);
    let in_flight: Vec<_> =
        [80, 81].map(|client| std::thread::spawn(move || report(client).status)).into();
    envoy.wait_until("two are in flight", |_| app.requests("/reports").len() == 2);
    for client in 82..87 {
        let denied = report(client);
        assert_eq!(retry_after(&denied), 1);
        assert_eq!(denied.header("x-ratelimit-limit"), Some("2"), "it has no window");
    }
    let other = move || Client(87).get(address, "/reports", &[("X-Api-Key", "bronze")]).status;
    let other = std::thread::spawn(other);
    envoy.wait_until("another key is not affected", |_| app.requests("/reports").len() == 3);
    app.delay_reports(false);
    let statuses = in_flight.into_iter().chain([other]).map(|it| it.join().expect("no panic"));
    assert_eq!(statuses.collect::<Vec<_>>(), [200; 3]);
    envoy.wait_until("both have ended", |_| left(&tidegate, "edge.report") == 2);

    app.delay_reports(true);
    let mut gone = TcpStream::connect(address).expect("Envoy listens");
    let head = b"GET /reports HTTP/1.1\r\nHost: x\r\nX-Api-Key: silver\r\n\r\n";
    gone.write_all(head).expect("sent");
    envoy.wait_until("the request is in flight", |_| left(&tidegate, "edge.report") == 1);
    drop(gone);
    envoy.wait_until("the client has gone", |_| left(&tidegate, "edge.report") == 2);
}

/// The application says how many tokens each request used; one that says nothing stays charged.
#[test]
fn envoy_settles_the_tokens_of_a_request() {
    let (app, tidegate) = (App::start(), tidegate(""));
    let mut envoy = start(&ENVOY, &app, &tidegate);
    for (path, expected) in [
        ("/chat/700", 99_300),
        ("/chat/0", 99_300),
        ("/chat/3000", 96_300),
        ("/chat", 94_300),
        ("/chat/10", 94_290),
    ] {
        let response = Client(90).get(envoy.address, path, &[("X-Api-Key", "silver")]);
        assert_eq!(response.status, 200, "{path}");
        envoy.wait_until(path, |_| left(&tidegate, "edge.chat_tokens") == expected);
    }
}

#[test]
fn envoy_sends_a_token_and_can_fail_closed() {
    let (app, tidegate) = (App::start(), tidegate("auth: {api_token: change-me}"));
    let changes = [
        ("failure_mode_deny: false", "failure_mode_deny: true"),
        ("# initial_metadata:", "initial_metadata:"),
    ];
    let recipe = Recipe { changes: &changes, ..ENVOY };
    let mut envoy = start(&recipe, &app, &tidegate);
    let export =
        |envoy: &Proxy| Client(50).get(envoy.address, "/export", &[("X-Api-Key", "silver")]).status;
    assert_eq!([export(&envoy), export(&envoy), export(&envoy)], [200, 200, 429]);
    drop(tidegate);
    envoy.wait_until("failure_mode_deny: true denies requests", |envoy| export(envoy) == 500);
    assert_eq!(app.requests("/export").len(), 2);
}

/// Two files of one domain in a folder. Envoy's access logs and headers can show the metadata.
#[test]
fn envoy_gets_metadata_and_shadow_mode_denies_nothing() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let options = "files: [limits/]\n  shadow_mode: true\n  dynamic_metadata: true";
    // Its own rules have no name.
    let changes = [
        ("files: [ratelimit.yaml]", options),
        ("{bytes: token-bucket, reports: concurrency}", "{}"),
        ("    reports: {ttl: 10m}", "#"),
        ("    chat-tokens: {reserve: 2000, ttl: 10m}", "#"),
    ];
    let config = changed(&deployed_config(&[]), &changes);
    let file = folder.path().join("tidegate.yaml");
    fs::write(&file, config).expect("written");
    fs::create_dir(folder.path().join("limits")).expect("a directory");
    for (name, key, requests) in [("one", "remote_address", 2), ("two", "api_key", 3)] {
        let rules = format!(
            "domain: edge\ndescriptors:\n- key: {key}\n  metadata: {{{name}: {{left: yes}}}}\n  \
             rate_limit: {{unit: hour, requests_per_unit: {requests}}}\n"
        );
        fs::write(folder.path().join(format!("limits/{name}.yaml")), rules).expect("written");
    }
    let (app, tidegate) = (App::start(), Service::start_on(folder, &file, &[]));
    let show = r#"domains: ["*"]
              response_headers_to_add:
              - header: { key: x-domain, value: "%DYNAMIC_METADATA(envoy.filters.http.ratelimit:domain)%" }
              - header: { key: x-one, value: "%DYNAMIC_METADATA(envoy.filters.http.ratelimit:metadata:one:left)%" }
              - header: { key: x-two, value: "%DYNAMIC_METADATA(envoy.filters.http.ratelimit:metadata:two:left)%" }"#;
    let changes = [("0.25s", "10s"), (r#"domains: ["*"]"#, show)];
    let envoy = start(&Recipe { changes: &changes, ..ENVOY }, &app, &tidegate);
    let shown: Vec<(u16, [Option<String>; 3])> = (0..4)
        .map(|_| {
            let response = Client(70).get(envoy.address, "/", &[("X-Api-Key", "silver")]);
            let header = |name: &str| response.header(name).map(str::to_owned);
            (response.status, ["x-domain", "x-one", "x-two"].map(header))
        })
        .collect();
    let expected = [(true, true), (true, true), (false, true), (false, false)].map(|(one, two)| {
        let shown = |is_left: bool| is_left.then(|| "true".to_owned());
        (200, [Some("edge".to_owned()), shown(one), shown(two)])
    });
    assert_eq!(shown, expected);
    let metrics = tidegate.admin("/metrics").body;
    for line in [
        r#"tidegate_decisions_total{policy="edge.remote_address",outcome="shadow_denied"} 2"#,
        r#"tidegate_decisions_total{policy="edge.api_key",outcome="shadow_denied"} 1"#,
        r#"tidegate_near_limit_total{policy="edge.api_key"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}
