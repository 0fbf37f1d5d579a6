//! Traces as an OpenTelemetry collector receives them, enabled by the standard variables.

mod support;

#[path = "support/collector.rs"]
mod collector;

#[allow(dead_code, reason = "each test binary uses its own part")]
#[path = "gateway/upstream.rs"]
mod upstream;

use std::sync::Arc;

use collector::Collector;
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;
use support::{Service, request};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tonic::Request;

impl Collector {
    /// Returns the trace and the parent of each `decide`; 0 for no parent.
    fn parents(&self) -> Vec<(u128, u128)> {
        let number =
            |bytes: &[u8]| bytes.iter().fold(0, |number, byte| (number << 8) | u128::from(*byte));
        let decisions = self.spans().into_iter().filter(|span| span.name == "decide");
        decisions.map(|span| (number(&span.trace_id), number(&span.parent_span_id))).collect()
    }

    fn service_names(&self) -> Vec<String> {
        let received = self.0.lock().expect("no panic");
        let resources = received
            .iter()
            .flat_map(|request| &request.resource_spans)
            .filter_map(|spans| spans.resource.as_ref());
        let names = resources
            .flat_map(|resource| &resource.attributes)
            .filter(|attribute| attribute.key == "service.name");
        names.map(|attribute| format!("{:?}", attribute.value)).collect()
    }
}

const POLICY: &str = "policies:\n  - {name: p, limit: 5, window: 1h}\n";

/// Sends one request and shuts the service down, which flushes the traces. Returns its log.
async fn request_and_shut_down(environment: Vec<(&'static str, String)>) -> String {
    let run = move || {
        let environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let mut service = Service::start_with_environment(POLICY, &environment);
        let payload = json!({"policy": "p", "key": "secret-user"}).to_string();
        let sent = request(
            &service.http,
            "POST",
            "/v1/acquire",
            &[("traceparent", PARENT)],
            payload.as_bytes(),
        );
        assert_eq!(sent.status, 200);
        service.signal("TERM");
        assert_eq!(service.wait_for_exit().code(), Some(0));
        service.output()
    };
    tokio::task::spawn_blocking(run).await.expect("no panic")
}

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Sends a request of a domain without rules to Envoy's rate limit service.
async fn send_envoy_request(service: &Service) {
    let channel = tonic::transport::Endpoint::new(format!(
        "http://{}",
        service.grpc.as_deref().expect("an address")
    ));
    let client = channel.expect("an address").connect().await.expect("the service listens");
    let mut client =
        tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient::new(client);
    let mut request = Request::new(RateLimitRequest {
        domain: "edge".to_owned(),
        descriptors: vec![RateLimitDescriptor::default()],
        hits_addend: 0,
    });
    request.metadata_mut().insert("traceparent", PARENT.parse().expect("ascii"));
    client.should_rate_limit(request).await.expect("a response");
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_and_store_calls_are_traced() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let name = ("OTEL_SERVICE_NAME", "limits-of-ours".to_owned());
    request_and_shut_down(vec![("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), name]).await;
    let spans: Vec<String> = collector.spans().into_iter().map(|span| span.name).collect();
    assert!(
        spans.contains(&"decide".to_owned()) && spans.contains(&"store".to_owned()),
        "{spans:?}"
    );
    assert!(
        collector.service_names()[0].contains("limits-of-ours"),
        "{:?}",
        collector.service_names()
    );
    let all = format!("{:?}", collector.0.lock().expect("no panic"));
    assert!(!all.contains("secret-user"), "no key is traced");
}

#[tokio::test(flavor = "multi_thread")]
async fn tracing_is_off_by_default() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    request_and_shut_down(vec![]).await;
    let switched_off = ("OTEL_SDK_DISABLED", "true".to_owned());
    request_and_shut_down(vec![("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), switched_off]).await;
    assert!(collector.spans().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_join_the_trace_of_their_request() {
    let collector = Collector::default();
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start().await);
    let parent = (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7);
    request_and_shut_down(vec![endpoint.clone()]).await;
    assert_eq!(collector.parents(), [parent]);

    let mut service = Service::start_with_environment(POLICY, &[(endpoint.0, &endpoint.1)]);
    send_envoy_request(&service).await;
    assert_eq!(service.acquire(&json!({"policy": "p", "key": "u"})).status, 200);
    service.signal("TERM");
    assert_eq!(
        tokio::task::spawn_blocking(move || service.wait_for_exit().code())
            .await
            .expect("no panic"),
        Some(0)
    );
    let parents = collector.parents();
    assert_eq!((parents.len(), &parents[1]), (3, &parent), "over gRPC as well");
    assert_eq!(parents[2].1, 0, "a request without a trace starts one");
    assert_ne!(parents[2].0, parent.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn collector_outage_and_recovery_are_logged_once() {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a free port")
        .local_addr()
        .expect("bound");
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{free}"));
    let service = Service::start_with_environment(
        POLICY,
        &[(endpoint.0, &endpoint.1), ("OTEL_BSP_SCHEDULE_DELAY", "1")],
    );
    let send_until = |what: &str, happened: &dyn Fn() -> bool| {
        service.wait_until(what, |service| {
            service.post("/v1/peek", &json!({"policy": "p", "key": "u"}).to_string());
            happened()
        });
    };
    let logged = |words: &str| service.output().matches(words).count();
    send_until("it is logged", &|| logged("exporting traces failed") > 0);
    let sent = std::cell::Cell::new(0);
    send_until("many exports have failed", &|| sent.replace(sent.get() + 1) == 30);
    let collector = Collector::default();
    collector.start_on(tokio::net::TcpListener::bind(free).await.expect("still free"));
    send_until("it is logged", &|| logged("exporting traces succeeded again") > 0);
    assert_eq!(logged("exporting traces failed"), 1, "{}", service.output());
    assert!(!collector.spans().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_protocol_is_logged() {
    let collector = Collector::default();
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start().await);
    for (name, protocol, warned) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "kafka", true),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", false),
    ] {
        let output =
            request_and_shut_down(vec![endpoint.clone(), (name, protocol.to_owned())]).await;
        let words = format!(
            "{name} is {protocol:?}, but only grpc and http/protobuf are supported: traces are \
             sent over grpc"
        );
        assert_eq!(
            (output.contains(&words), output.contains("WARN")),
            (warned, warned),
            "{output}"
        );
    }
    assert_eq!(collector.parents().len(), 2, "traces are sent over grpc anyway");
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_can_be_sent_over_http() {
    let tenant = ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours".to_owned());
    for (endpoint, path, suffix) in [
        // The path of the signal is appended to the common endpoint only.
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/traces", ""),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/base/v1/traces", "/base/"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/elsewhere", "/elsewhere"),
    ] {
        let collector = Collector::default();
        let address = collector.start_http(path).await;
        let output = request_and_shut_down(vec![
            (endpoint, format!("{address}{suffix}")),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf".to_owned()),
            tenant.clone(),
        ])
        .await;
        let parent = (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7);
        assert_eq!(collector.parents(), [parent], "{output}");
        assert!(!output.contains("WARN"), "{output}");
    }
    // JSON is not supported, but its collectors also accept protobuf.
    let collector = Collector::default();
    let output = request_and_shut_down(vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start_http("/v1/traces").await),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json".to_owned()),
        tenant,
    ])
    .await;
    assert_eq!(collector.parents().len(), 1);
    assert!(output.contains("traces are sent over http/protobuf"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_can_be_sent_over_https() {
    use tokio_rustls::rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer};
    let certified =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
    let tls = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("a configuration");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, certified.cert.pem()).expect("written");
    let collector = Collector::default();
    let environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start_https("/v1/traces", tls).await),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf".to_owned()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours".to_owned()),
    ];
    let output = request_and_shut_down(environment.clone()).await;
    assert!(collector.parents().is_empty(), "the certificate is not trusted: {output}");
    let trusted = ("OTEL_EXPORTER_OTLP_CERTIFICATE", file.display().to_string());
    let output = request_and_shut_down(environment.into_iter().chain([trusted]).collect()).await;
    assert_eq!(collector.parents().len(), 1, "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_export_over_http_is_logged() {
    let collector = Collector::default();
    let output = request_and_shut_down(vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start_http("/v1/traces").await),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf".to_owned()),
    ])
    .await;
    assert!(output.contains("exporting traces failed") && output.contains("401"), "{output}");
}

/// Returns an attribute of a span; numbers and booleans as text.
fn attribute(span: &Span, name: &str) -> Option<String> {
    let value = &span.attributes.iter().find(|attribute| attribute.key == name)?.value;
    Some(match value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => text.clone(),
        any_value::Value::IntValue(number) => number.to_string(),
        any_value::Value::BoolValue(is_true) => is_true.to_string(),
        other => panic!("{other:?}"),
    })
}

fn attributes<const N: usize>(span: &Span, names: [&str; N]) -> [Option<String>; N] {
    names.map(|name| attribute(span, name))
}

fn hex(bytes: &[u8]) -> String {
    let text = |byte: &u8| {
        [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]))
    };
    bytes.iter().flat_map(text).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_name_their_policies_and_never_keys() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let config = "attributes: [tenant]\npolicies:\n  - {name: everyone, limit: 9, window: 1h}\n  \
                  - {name: tenants, key: [tenant], limit: 1, window: 1h}\n  \
                  - {name: other, match: {tenant: none}, limit: 1, window: 1h}\n";
    let mut service =
        Service::start_with_environment(config, &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]);
    let query = json!({"attributes": {"ip": "203.0.113.9", "tenant": "secret-tenant"}});
    tokio::task::block_in_place(|| {
        assert_eq!(service.acquire(&query).status, 200);
        assert_eq!(service.acquire(&query).status, 429);
        let own = json!({"key": "secret-key", "quota": {"limit": 5, "window": "1h"}});
        assert_eq!(service.acquire(&own).status, 200);
        service.signal("TERM");
        service.wait_for_exit();
    });
    let decisions: Vec<_> = collector
        .spans()
        .iter()
        .filter(|span| span.name == "decide")
        .map(|span| {
            attributes(span, ["policies", "allowed", "denied_by"]).map(Option::unwrap_or_default)
        })
        .collect();
    assert_eq!(decisions[0], ["everyone,tenants", "true", ""]);
    assert_eq!(decisions[1], ["everyone,tenants", "false", "tenants"]);
    assert!(decisions[2][0].starts_with("sliding-log"), "{decisions:?}");
    let all = format!("{:?}", collector.0.lock().expect("no panic"));
    assert!(!all.contains("secret"), "{all}");
}

const GATEWAY: &str = "policies: [{name: p, limit: 2, window: 1h}]\n";

/// Sends requests with these trace headers through a gateway, shuts it down, and returns what the
/// upstream received.
fn through_gateway(
    environment: &[(&str, &str)],
    upstreams: &[&str],
    requests: &[(&str, &[(&str, &str)])],
) -> Vec<u16> {
    tokio::task::block_in_place(|| {
        let mut gateway = Service::gateway_with_env(GATEWAY, upstreams, environment);
        let send = |(path, headers): &(&str, &[(&str, &str)])| {
            request(&gateway.http, "GET", path, headers, b"").status
        };
        let statuses = requests.iter().map(send).collect();
        gateway.signal("TERM");
        assert_eq!(gateway.wait_for_exit().code(), Some(0));
        statuses
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_continues_the_trace_to_the_upstream() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let app = upstream::Upstream::responding_with(
        b"HTTP/1.1 503 Unavailable\r\nContent-Length: 2\r\n\r\nno",
    );
    let headers = [
        ("traceparent", PARENT),
        ("tracestate", "vendor=1"),
        ("User-Agent", "agent"),
        ("Cookie", "secret"),
    ];
    let statuses = through_gateway(
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)],
        &[&app.url()],
        &[("/a?token=secret", &headers), ("/b", &[]), ("/c", &[])],
    );
    assert_eq!(statuses, [503, 503, 429]);
    let spans = collector.spans();
    let of_kind = |kind: SpanKind| {
        spans.iter().filter(move |span| span.kind == kind as i32).collect::<Vec<&Span>>()
    };
    let (servers, clients) = (of_kind(SpanKind::Server), of_kind(SpanKind::Client));
    assert_eq!((servers.len(), clients.len()), (3, 2), "{spans:?}");

    let (server, client) = (servers[0], clients[0]);
    assert_eq!((server.name.as_str(), client.name.as_str()), ("GET", "GET"));
    assert_eq!(hex(&server.trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(hex(&server.parent_span_id), "00f067aa0ba902b7");
    assert_eq!(client.parent_span_id, server.span_id);
    assert_eq!(client.trace_id, server.trace_id);
    let decide = spans.iter().find(|span| span.name == "decide").expect("a decision");
    assert_eq!(decide.parent_span_id, server.span_id);
    assert_eq!(attribute(decide, "policies").as_deref(), Some("p"));

    let received = app.received();
    let expected = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", hex(&client.span_id));
    assert_eq!(received[0].header("traceparent"), Some(expected.as_str()));
    assert_eq!(received[0].header("tracestate"), Some("vendor=1"));
    let expected = format!("00-{}-{}-01", hex(&servers[1].trace_id), hex(&clients[1].span_id));
    assert_eq!(received[1].header("traceparent"), Some(expected.as_str()), "a new trace");
    assert_eq!(received[1].header("tracestate"), None);

    let common = ["http.request.method", "http.response.status_code", "error.type"];
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(attributes(server, common), ["GET", "503", "503"].map(some));
    assert_eq!(attributes(client, common), ["GET", "503", "503"].map(some));
    assert_eq!(
        attributes(
            server,
            ["url.path", "url.scheme", "client.address", "user_agent.original", "server.address"]
        ),
        ["/a", "http", "127.0.0.1", "agent", "127.0.0.1"].map(some)
    );
    let (address, port) = app.address.split_once(':').expect("a port");
    assert_eq!(
        attributes(client, ["server.address", "server.port", "url.full"]),
        [some(address), some(port), some(&format!("{}/a", app.url()))]
    );
    let denied = servers[2];
    assert_eq!(attributes(denied, common), [some("GET"), some("429"), None]);
    let is_error = |span: &Span| {
        span.status.as_ref().is_some_and(|status| status.code == StatusCode::Error as i32)
    };
    assert_eq!([is_error(server), is_error(client), is_error(denied)], [true, true, false]);
    let all = format!("{:?}", collector.0.lock().expect("no panic"));
    assert!(!all.contains("secret"), "{all}");
    assert_numbers_are_integers(&spans);
}

/// Backends compare numbers only if they are numbers, as OpenTelemetry specifies these attributes.
fn assert_numbers_are_integers(spans: &[Span]) {
    let mut found = std::collections::BTreeSet::new();
    for attribute in spans.iter().flat_map(|span| &span.attributes) {
        let (name, value) = (attribute.key.as_str(), attribute.value.as_ref());
        if ["code", "port", "count", "charges"].iter().any(|end| name.ends_with(end)) {
            let value = value.and_then(|value| value.value.as_ref());
            assert!(matches!(value, Some(any_value::Value::IntValue(_))), "{name}: {value:?}");
            found.insert(name);
        }
    }
    for name in ["http.response.status_code", "server.port", "charges"] {
        assert!(found.contains(name), "{name} is not in {found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_traces_each_try() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let app = upstream::Upstream::responding_with(upstream::OK);
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let dead = format!("http://{}", free.local_addr().expect("bound"));
    drop(free);
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str())];
    let statuses = through_gateway(&environment, &[&dead, &app.url()], &[("/", &[])]);
    assert_eq!(statuses, [200]);
    let spans = collector.spans();
    let tries: Vec<_> = spans
        .iter()
        .filter(|span| span.kind == SpanKind::Client as i32)
        .map(|span| {
            attributes(span, ["error.type", "http.request.resend_count"])
                .map(Option::unwrap_or_default)
        })
        .collect();
    assert_eq!(tries, [["connect", ""], ["", "1"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn trace_that_is_not_sampled_is_not_exported_but_propagated() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let app = upstream::Upstream::responding_with(upstream::OK);
    let unsampled = PARENT.replace("-01", "-00");
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str())];
    through_gateway(&environment, &[&app.url()], &[("/", &[("traceparent", &unsampled)])]);
    assert!(collector.spans().is_empty(), "{:?}", collector.spans());
    let received = app.received();
    let sent = received[0].header("traceparent").expect("a trace");
    assert!(sent.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"), "{sent}");
    assert!(sent.ends_with("-00") && sent != unsampled, "{sent}");
}

#[tokio::test(flavor = "multi_thread")]
async fn trace_headers_pass_unchanged_without_a_collector() {
    let app = upstream::Upstream::responding_with(upstream::OK);
    let headers = [("traceparent", PARENT), ("tracestate", "vendor=1"), ("baggage", "a=b")];
    through_gateway(&[], &[&app.url()], &[("/", &headers)]);
    let received = app.received();
    for (name, value) in headers {
        assert_eq!(received[0].header(name), Some(value));
    }
}
