use serde_json::json;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::control_plane::ControlPlane;
use crate::program::{Program, Variables, get, program_in};
use crate::support::{Redis, TEST_TIMEOUT};
use crate::{descriptor, limited, node, rules_of, send, start};

#[tokio::test(flavor = "multi_thread")]
async fn health_needs_redis_once_and_ends_with_the_signal() {
    let plane = ControlPlane::start().await;
    let mut redis = Redis::start();
    redis.kill();
    let mut program = Program::start(&Variables::of_gateway(&plane.address.to_string(), &redis));
    assert_eq!(program.health(), (500, String::new()), "Redis was never there");
    redis.restart();
    program.wait_until("Redis is reached", || program.health().0 == 200);
    assert_eq!(program.health().1, "OK");
    redis.kill();
    program.wait_until("the outage is noticed", || program.metric("tidegate_store_up") == 0);
    assert_eq!(program.health().0, 200, "it decides without Redis");

    // A call in flight, whose request never ends, keeps the process until its timeout.
    let half = half_a_call(&program.grpc).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", program.grpc));
    let channel = channel.expect("an address").connect().await.expect("it listens");
    let request = HealthCheckRequest { service: "ratelimit".to_owned() };
    let status = HealthClient::new(channel).check(request).await.expect("health of gRPC");
    assert_eq!(status.into_inner().status, 1, "serving");
    program.terminate();
    program.wait_until("it is unhealthy", || program.health().0 == 500);
    drop(half);
    assert!(program.wait_for_exit().success());
}

/// Starts an HTTP/2 connection with a call of which the message is missing.
async fn half_a_call(address: &str) -> TcpStream {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let mut head = vec![0x83, 0x86, 0x41, 0x01, b'a'];
    let path = b"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    for (name, value) in [(&[0x04][..], &path[..]), (&[0x0f, 0x10], b"application/grpc")] {
        head.extend_from_slice(name);
        head.push(u8::try_from(value.len()).expect("short"));
        head.extend_from_slice(value);
    }
    bytes.extend([0, 0, u8::try_from(head.len()).expect("short"), 1, 4, 0, 0, 0, 1]);
    bytes.extend(head);
    bytes.extend(*b"\0\0\x08\x06\0\0\0\0\0ping-pon");
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(&bytes).await.expect("sent");
    // The answer to the ping shows that the call before it has arrived.
    let mut received = Vec::new();
    while !received.windows(8).any(|part| part == b"ping-pon") {
        let read = tokio::time::timeout(TEST_TIMEOUT, stream.read_buf(&mut received)).await;
        assert_ne!(read.expect("an answer in time").expect("an answer"), 0);
    }
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn without_forced_start_it_is_unhealthy_until_it_has_rules() {
    let (redis, mut plane) = (Redis::start(), ControlPlane::start().await);
    let variables = Variables::of_gateway(&plane.address.to_string(), &redis)
        .with("FORCE_START_WITHOUT_INITIAL_CONFIG", "false");
    let program = Program::start(&variables);
    plane.request().await;
    program.wait_until("Redis is reached", || program.metric("tidegate_store_up") == 1);
    assert_eq!(program.health().0, 500);
    let mut client = program.client().await;
    let request = RateLimitRequest {
        domain: "edge".to_owned(),
        descriptors: vec![descriptor(&[("user", "ann")])],
        hits_addend: 0,
    };
    let error = client.should_rate_limit(request).await.expect_err("no rules yet");
    assert_eq!(error.code(), tonic::Code::Unavailable);
    let query = r#"{"domain": "edge", "descriptors": [{"entries": [{"key": "user"}]}]}"#;
    assert_eq!(program.json(query).status, 400);
    plane.accept("1", &[]).await;
    program.wait_until("it is healthy", || program.health().0 == 200);
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (true, None));
    assert_eq!(program.json(query).status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn json_decides_as_grpc_does() {
    let (_redis, mut plane, program) = start().await;
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 2)])]).await;
    let query = json!({
        "domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "ann"}]}]
    });
    let allowed = program.json(&query.to_string());
    assert_eq!(allowed.status, 200, "{allowed:?}");
    let status = &allowed.json()["statuses"][0];
    assert_eq!(status["currentLimit"], json!({"requestsPerUnit": 2, "unit": "HOUR"}));
    assert_eq!(status["limitRemaining"], 1);
    // The same count as over gRPC.
    let mut client = program.client().await;
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (true, Some(2)));
    let denied = program.json(&query.to_string());
    assert_eq!((denied.status, &denied.json()["overallCode"]), (429, &json!("OVER_LIMIT")));
    for invalid in ["", "{}", r#"{"domain": "edge"}"#, r#"{"x": 1}"#] {
        assert_eq!(program.json(invalid).status, 400, "{invalid}");
    }
    let large = format!(r#"{{"domain": "{}"}}"#, "x".repeat(70_000));
    assert_eq!(program.json(&large).status, 400);
    // Nothing else is served where clients may reach it.
    for path in ["/v1/acquire", "/metrics", "/"] {
        assert_eq!(get(&program.http, path).status, 404, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_units_by_the_names_of_ratelimit() {
    let (_redis, mut plane, program) = start().await;
    let mut shadow = limited("shadow", "", 1);
    shadow.shadow_mode = true;
    let chain = node("route", "a", vec![node("user", "", vec![limited("path", "", 10)])]);
    plane.accept("1", &[rules_of("edge", vec![chain, shadow])]).await;
    let mut client = program.client().await;
    let entries = [("route", "a"), ("user", "ann"), ("path", "/x")];
    for hits_addend in [6, 3, 2] {
        let request = RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![descriptor(&entries)],
            hits_addend,
        };
        client.should_rate_limit(request).await.expect("a response");
    }
    for _ in 0..3 {
        assert_eq!(send(&mut client, "edge", &[("shadow", "x")]).await, (true, Some(1)));
    }
    let metric = |name: &str, labels: &str| {
        program.metric(&format!("ratelimit_service_rate_limit_{name}{{domain=\"edge\",{labels}}}"))
    };
    let chain = "key1=\"route_a\",key2=\"user\"";
    let counts = ["total_hits", "within_limit", "near_limit", "over_limit", "shadow_mode"];
    assert_eq!(counts.map(|name| metric(name, chain)), [11, 9, 1, 2, 0]);
    assert_eq!(counts.map(|name| metric(name, "key1=\"shadow\"")), [3, 1, 1, 2, 2]);
    let calls = "{grpc_method=\"ShouldRateLimit\"}";
    assert_eq!(program.metric(&format!("ratelimit_service_total_requests{calls}")), 6);
    let seconds = format!("ratelimit_service_response_time_seconds_count{calls}");
    assert_eq!(program.metric(&seconds), 6);
    let errors = "ratelimit_service_should_rate_limit_error{err_type=\"redis_error\"}";
    assert_eq!(program.metric(errors), 0);
    assert_eq!(program.metric("tidegate_config_reloads_total{outcome=\"success\"}"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_of_removed_domains_stay() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    let domain = "www.example.com";
    plane.accept("1", &[rules_of(domain, vec![limited("user", "", 10)])]).await;
    send(&mut client, domain, &[("user", "ann")]).await;
    let name = "ratelimit_service_rate_limit_total_hits{domain=\"www.example.com\",key1=\"user\"}";
    assert_eq!(program.metric(name), 1);
    plane.accept("2", &[rules_of("www", vec![limited("user", "", 0)])]).await;
    assert_eq!(program.metric(name), 1);
    // A limit of 0 counts what it denies.
    assert_eq!(send(&mut client, "www", &[("user", "ann")]).await, (false, Some(0)));
    let denied = "ratelimit_service_rate_limit_over_limit{domain=\"www\",key1=\"user\"}";
    assert_eq!((program.metric(name), program.metric(denied)), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_is_answered_after_the_signal() {
    let (_redis, _plane, mut program) = start().await;
    let body = r#"{"domain": "edge", "descriptors": [{"entries": [{"key": "user"}]}]}"#;
    let head = format!(
        "POST /json HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(&program.http).await.expect("it listens");
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut wait = [0; 25];
    stream.read_exact(&mut wait).await.expect("it waits for the body");
    assert_eq!(&wait, b"HTTP/1.1 100 Continue\r\n\r\n");
    program.terminate();
    program.wait_until_logged("shutting down, draining in-flight requests");
    stream.write_all(body.as_bytes()).await.expect("sent");
    let mut response = String::new();
    let read = tokio::time::timeout(TEST_TIMEOUT, stream.read_to_string(&mut response)).await;
    read.expect("an answer in time").expect("an answer");
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(program.wait_for_exit().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_of_files_are_loaded_and_watched() {
    let (redis, data) = (Redis::start(), tempfile::tempdir().expect("a temporary directory"));
    let folder = data.path().join("ratelimit/config");
    std::fs::create_dir_all(&folder).expect("created");
    let write = |requests: u32| {
        let rule =
            format!("{{key: user, rate_limit: {{unit: hour, requests_per_unit: {requests}}}}}");
        std::fs::write(folder.join("edge.yml"), format!("domain: edge\ndescriptors: [{rule}]\n"))
            .expect("written");
    };
    write(4);
    let variables = Variables::of_gateway("127.0.0.1:1", &redis)
        .with("CONFIG_TYPE", "FILE")
        .with("RUNTIME_ROOT", data.path().to_str().expect("UTF-8"))
        .with("TIDEGATE_ENVOY_ALGORITHM", "sliding-log");
    let program = Program::start(&variables);
    let mut client = program.client().await;
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (true, Some(4)));
    assert_eq!(program.metric("ratelimit_service_config_load_success"), 1);
    write(9);
    program.wait_until("the file is reloaded", || program.rules().contains("requests_per_unit=9"));
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (true, Some(9)));
}

#[test]
fn settings_that_cannot_hold_end_the_start() {
    for (name, value, expected) in [
        (
            "REDIS_PERSECOND",
            "true",
            "REDIS_PERSECOND=\"true\": a second Redis for limits per second",
        ),
        ("BACKEND_TYPE", "memcache", "BACKEND_TYPE=\"memcache\": is not supported"),
        ("TIDEGATE_ENVOY_ALGORITHM", "exact", "TIDEGATE_ENVOY_ALGORITHM=\"exact\": must be one of"),
        ("NEAR_LIMIT_RATIO", "2", "NEAR_LIMIT_RATIO=\"2\": must be a number from 0 to 1\n"),
        ("REDIS_TIMEOUT", "2m", "REDIS_TIMEOUT=\"2m\": must be from 1ms to 1m\n"),
        (
            "RUNTIME_ROOT",
            "/nowhere",
            "RUNTIME_ROOT=\"/nowhere\": /nowhere/config/*: no file matches",
        ),
    ] {
        let expected = format!("error: {expected}");
        let folder = tempfile::tempdir().expect("a temporary directory");
        let output = program_in(folder.path()).env_clear().env(name, value).output();
        let output = output.expect("the binary starts");
        let error = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(output.status.code() == Some(2) && error.starts_with(&expected), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_without_effect_are_logged_once() {
    let (redis, plane) = (Redis::start(), ControlPlane::start().await);
    let variables = Variables::of_gateway(&plane.address.to_string(), &redis)
        .with("REDIS_POOL_SIZE", "20")
        .with("USE_STATSD", "true")
        .with("LOG_FORMAT", "json");
    let program = Program::start(&variables);
    let output = program.output();
    for name in ["REDIS_POOL_SIZE: ", "USE_STATSD: "] {
        assert_eq!(output.matches(name).count(), 1, "{output}");
    }
    let first = output.lines().next().expect("a line");
    assert!(first.starts_with("{\""), "JSON: {first}");
}
