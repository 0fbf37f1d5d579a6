//! Traces as an OpenTelemetry collector receives them, enabled by the standard variables.

mod support;

#[path = "../src/envoy/proto.rs"]
mod proto;

#[path = "support/collector.rs"]
mod collector;

use collector::Collector;
use proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use proto::envoy::service::ratelimit::v3::RateLimitRequest;
use serde_json::json;
use support::{Service, request};
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
        proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient::new(client);
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
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", true),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", true),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", false),
    ] {
        let output =
            request_and_shut_down(vec![endpoint.clone(), (name, protocol.to_owned())]).await;
        let words = format!(
            "{name} is {protocol:?}, but only grpc is supported: traces are sent over grpc"
        );
        assert_eq!(
            (output.contains(&words), output.contains("WARN")),
            (warned, warned),
            "{output}"
        );
    }
    assert_eq!(collector.parents().len(), 3, "traces are sent over grpc anyway");
}
