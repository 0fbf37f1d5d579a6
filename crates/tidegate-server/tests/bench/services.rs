//! A running service by HTTP and gRPC.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;

use crate::support::Service;
use crate::{
    HUNDRED_FOR_ONE_KEY, TEN_PER_HOUR, allowed_by, assert_ten_of_a_hundred, bench, count, report,
    text,
};

const CONFIG: &str = "
policies:
  - {name: per-user, match: {path: '/api/**'}, key: [header.x-user-id], limit: 10, window: 1h}
  - {name: shop, match: {domain: shop}, key: [descriptor.user], limit: 10, window: 1h}
";

fn urls(service: &Service) -> (String, String) {
    (format!("http://{}", service.http), service.grpc.clone().expect("an address for gRPC"))
}

#[test]
fn counts_by_http_are_exact_for_each_form_of_request() {
    let service = Service::start(CONFIG);
    let (url, _) = urls(&service);
    let attributes =
        ["--attribute", "path=/api/items", "--attribute", "header.x-user-id={key}"].as_slice();
    for form in [&TEN_PER_HOUR[..], &["--policy", "per-user"], attributes] {
        for pace in [["--concurrency", "8"], ["--rate", "500"]] {
            let result =
                report(&[&HUNDRED_FOR_ONE_KEY, &["--http", &url][..], form, &pace].concat());
            assert_ten_of_a_hundred(&result);
            assert_eq!(
                (count(&result, "unlimited"), &result["target"]["kind"]),
                (0, &"http".into())
            );
        }
    }
    // Ten in each of the four runs by policy or attributes: the first request spends nothing.
    assert_eq!(allowed_by(&service, "per-user"), 40);
}

#[test]
fn counts_by_grpc_are_exact() {
    let service = Service::start(CONFIG);
    let (_, address) = urls(&service);
    for pace in [["--concurrency", "8"], ["--rate", "500"]] {
        let target = ["--grpc", &address, "--domain", "shop", "--descriptor", "user={key}"];
        let result = report(&[&HUNDRED_FOR_ONE_KEY, &target[..], &pace].concat());
        assert_ten_of_a_hundred(&result);
        assert_eq!((count(&result, "unlimited"), &result["target"]["kind"]), (0, &"grpc".into()));
    }
}

#[test]
fn requests_without_a_policy_are_counted_and_warned_about() {
    let service = Service::start(CONFIG);
    let (url, address) = urls(&service);
    let other_path = ["--http", &url, "--attribute", "path=/other/{key}"];
    let other_domain = ["--grpc", &address, "--domain", "none", "--descriptor", "user={key}"];
    for target in [&other_path[..], &other_domain] {
        let result = report(&[&["--requests", "20"], target].concat());
        assert_eq!((count(&result, "allowed"), count(&result, "unlimited")), (20, 20), "{result}");
        // On a busy machine, another warning is about the load generator.
        let warnings = result["warnings"].as_array().expect("a list");
        let is_expected = |warning: &serde_json::Value| {
            warning.as_str().is_some_and(|text| text.contains("no policy applied to 20 requests"))
        };
        assert!(warnings.iter().any(is_expected), "{result}");
    }
}

#[test]
fn token_and_certificates_are_those_of_the_files() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let write = |name: &str, content: &str| {
        std::fs::write(path(name), content).expect("written");
        path(name)
    };
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("made");
    let certificate = write("cert.pem", &made.cert.pem());
    let key = write("key.pem", &made.signing_key.serialize_pem());
    let (token, wrong) = (write("token", "t0ken-of-the-api\n"), write("wrong", "another\n"));
    let config = format!(
        "tls: {{certificate: '{certificate}', key: '{key}'}}\n\
         auth: {{api_token: t0ken-of-the-api}}\n{CONFIG}"
    );
    let service = Service::start(&config);
    let port = |address: &str| address.rsplit_once(':').expect("a port").1.to_owned();
    let http = format!("https://localhost:{}", port(&service.http));
    let grpc = format!("grpcs://localhost:{}", port(service.grpc.as_deref().expect("gRPC")));
    let by_http = ["--http", &http, "--policy", "per-user"];
    let by_grpc = ["--grpc", &grpc, "--domain", "shop", "--descriptor", "user={key}"];
    for target in [&by_http[..], &by_grpc] {
        let trusted = [&HUNDRED_FOR_ONE_KEY, target, &["--ca", &certificate]].concat();
        assert_ten_of_a_hundred(&report(&[&trusted[..], &["--token-file", &token]].concat()));
        for (flags, message) in [
            (&["--ca", certificate.as_str()][..], "--token-file"),
            (&["--ca", &certificate, "--token-file", &wrong], "the token is wrong"),
            (&["--token-file", &token], "certificate"),
        ] {
            let output = bench(&[&HUNDRED_FOR_ONE_KEY, target, flags].concat());
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains(message) && error.lines().count() == 1, "{flags:?}: {error}");
            assert!(!error.contains("t0ken"), "{error}");
        }
    }
}

/// Answers the first request like the service, and all others with an error.
fn failing_service() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
                let mut stream = stream;
                loop {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        if reader.read_until(b'\n', &mut head).unwrap_or(0) == 0 {
                            return;
                        }
                    }
                    let head = String::from_utf8_lossy(&head).to_lowercase();
                    let length =
                        head.lines().find_map(|line| line.strip_prefix("content-length: "));
                    let length = length.and_then(|length| length.parse().ok()).expect("a length");
                    reader.read_exact(&mut vec![0; length]).expect("a body");
                    let (status, body) = if head.starts_with("post /v1/peek") {
                        ("200 OK", "{\"allowed\":true}")
                    } else {
                        ("503 Service Unavailable", "{\"detail\":\"the store is unavailable\"}")
                    };
                    let length = body.len();
                    let _ = write!(
                        stream,
                        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}"
                    );
                }
            });
        }
    });
    address
}

#[test]
fn exit_code_is_1_if_all_requests_fail() {
    let url = format!("http://{}", failing_service());
    let output = bench(&["--http", &url, "--requests", "30", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((count(&result, "answered"), count(&result, "failed")), (0, 30), "{result}");
    let expected = serde_json::json!([{
        "kind": "HTTP 503",
        "count": 30,
        "example": "HTTP 503 Service Unavailable: the store is unavailable",
    }]);
    assert_eq!(result["errors"], expected);
    assert!(result["latency_us"].is_null());
    let output = bench(&["--http", &url, "--requests", "30"]);
    assert!(text(&output.stdout).contains("HTTP 503: 30, such as"), "{}", text(&output.stdout));
}

#[test]
fn a_service_that_ends_during_the_run_is_counted_as_errors() {
    let mut service = Service::start(CONFIG);
    let (url, address) = urls(&service);
    let runs = [
        vec!["--http", &url, "--policy", "per-user"],
        vec!["--grpc", &address, "--domain", "shop", "--descriptor", "user={key}"],
    ];
    let runs = runs.map(|target| {
        crate::spawn(
            &[&target[..], &["--requests", "100000000", "--duration", "4s", "--json"]].concat(),
        )
    });
    service.wait_until("both are loaded", |service| {
        ["per-user", "shop"].into_iter().all(|policy| allowed_by(service, policy) > 10)
    });
    service.signal("KILL");
    service.wait_for_exit();
    for run in runs {
        let output = run.wait_with_output().expect("it ends");
        let result = crate::json_of(&output);
        assert!(count(&result, "answered") > 0 && count(&result, "failed") > 0, "{result}");
        let kinds: Vec<&str> = result["errors"]
            .as_array()
            .expect("errors")
            .iter()
            .map(|error| error["kind"].as_str().expect("a kind"))
            .collect();
        assert!(kinds.contains(&"connect"), "{kinds:?}");
    }
}

#[test]
fn counts_by_the_redis_protocol_are_exact() {
    let service = Service::start_with(CONFIG, &["--resp", "127.0.0.1:0"]);
    let output = service.output();
    let (_, resp) = output.split_once(" resp=").expect("the address in the log");
    let resp = resp.split([' ', '\n']).next().expect("an address");
    for form in [&TEN_PER_HOUR[..], &["--policy", "per-user"]] {
        for pace in [["--concurrency", "8"], ["--rate", "500"]] {
            let target = [&["--resp", resp], form, &pace].concat();
            let result = report(&[&HUNDRED_FOR_ONE_KEY, &target[..]].concat());
            assert_ten_of_a_hundred(&result);
            assert_eq!(result["target"]["kind"], "resp");
        }
    }
    for (target, message) in [
        (["--resp", resp, "--policy", "other"], "no policy"),
        (["--resp", "127.0.0.1:1", "--policy", "per-user"], "Connection refused"),
        (["--resp", "http://h:1", "--policy", "per-user"], "it must look like"),
    ] {
        let output = bench(&target);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(message) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn counts_by_forward_auth_and_a_gateway_are_exact() {
    let service = Service::start(CONFIG);
    let (url, _) = urls(&service);
    let upstream = Service::start(CONFIG);
    let gateway = Service::gateway(CONFIG, &[&format!("http://{}", upstream.http)]);
    let gateway_url = format!("http://{}", gateway.http);
    let user = ["--attribute", "path=/api/items?page=2", "--attribute", "header.x-user-id={key}"];
    for target in [["--forward-auth", &url], ["--gateway", &gateway_url]] {
        let result = report(&[&HUNDRED_FOR_ONE_KEY[..], &target, &user].concat());
        assert_ten_of_a_hundred(&result);
    }
    let by_policy = ["--forward-auth", &url, "--policy", "per-user"];
    let header = ["--attribute", "header.x-user-id={key}"];
    assert_ten_of_a_hundred(&report(&[&HUNDRED_FOR_ONE_KEY[..], &by_policy, &header].concat()));
    for (flags, message) in [
        (
            &["--gateway", &url, "--attribute", "colour={key}"][..],
            "--attribute colour: requests have",
        ),
        (&["--gateway", &url, "--attribute", "path=/"], "no --attribute contains {key}"),
        (&["--gateway", &url, "--policy", "per-user"], "cannot be used with"),
    ] {
        let error = text(&bench(flags).stderr);
        assert!(error.contains(message) && error.lines().count() == 1, "{flags:?}: {error}");
    }
}

#[test]
fn log_is_replayed_at_a_multiple_of_its_pace() {
    let config = format!(
        "client_ip: {{trusted_proxies: [127.0.0.1]}}\n{CONFIG}  - {{name: per-ip, \
                          match: {{method: POST}}, key: [ip], limit: 2, window: 1h}}\n"
    );
    let service = Service::start(&config);
    let (url, _) = urls(&service);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let log = folder.path().join("access.log");
    // Thirty seconds: each of five addresses sends six requests, and claims to be another one.
    let line = |number: usize| {
        let (address, method) = (number % 5, if number < 20 { "POST" } else { "GET" });
        format!(
            "203.0.113.{address} - - [16/Nov/2026:07:00:{number:02} +0000] \
             \"{method} /items?n={number} HTTP/1.1\" 200 5 \"-\" \"curl\" \"198.51.100.{number}\"\n"
        )
    };
    std::fs::write(&log, (0..30).map(line).collect::<String>()).expect("written");
    let log = log.to_str().expect("UTF-8");
    let replay = ["--forward-auth", &url, "--access-log", log, "--speed", "60"];
    let result = report(&replay);
    let counts = ["requests", "allowed", "denied", "failed"].map(|name| count(&result, name));
    // Twenty are posts, of which each address may send two.
    assert_eq!(counts, [30, 20, 10, 0], "{result}");
    assert_eq!(
        (&result["loop"]["kind"], &result["loop"]["speed"]),
        (&"replay".into(), &60.0.into())
    );
    let seconds = result["load_seconds"].as_f64().expect("a number");
    assert!(seconds >= 29.0 / 60.0, "{result}");
    for (flags, message) in [
        (&["--http", &url, "--access-log", log][..], "--access-log is only for"),
        (&["--forward-auth", &url, "--access-log", log, "--rate", "5"], "cannot be used with"),
        (
            &["--forward-auth", &url, "--access-log", log, "--speed", "0"],
            "--speed 0 is out of range",
        ),
        (&["--forward-auth", &url, "--speed", "2"], "--access-log"),
    ] {
        let error = text(&bench(flags).stderr);
        assert!(error.contains(message) && error.lines().count() == 1, "{flags:?}: {error}");
    }
}
