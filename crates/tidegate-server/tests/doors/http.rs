//! The front doors that speak HTTP: the API, forward-auth and the gateway.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use axum::Router;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use serde_json::json;

use crate::cases::Case;
use crate::collector::Collector;
use crate::door::{Answer, DecideSpan, Door, Record, http_answer, read_admin};
use crate::support::{Service, raw, request};

/// Service that sends its spans to its own collector.
pub(crate) struct Process {
    pub(crate) service: Service,
    collector: Collector,
}

impl Process {
    pub(crate) async fn serve(config: String) -> Self {
        Self::start(move |environment| Service::start_with_environment(&config, environment)).await
    }

    async fn start(start: impl FnOnce(&[(&str, &str)]) -> Service + Send + 'static) -> Self {
        let collector = Collector::default();
        let endpoint = collector.start().await;
        let start = move || start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]);
        let service = tokio::task::spawn_blocking(start).await.expect("no panic");
        Self { service, collector }
    }

    pub(crate) async fn finish(mut self, answers: Vec<(&'static str, Answer)>) -> Record {
        let (service, (keys, metrics)) = tokio::task::spawn_blocking(move || {
            let recorded = read_admin(&self.service);
            self.service.signal("TERM");
            assert_eq!(self.service.wait_for_exit().code(), Some(0));
            (self.collector, recorded)
        })
        .await
        .expect("no panic");
        Record { answers, keys, metrics, spans: decide_spans(&service) }
    }
}

fn decide_spans(collector: &Collector) -> Vec<DecideSpan> {
    let mut spans = collector.spans();
    spans.retain(|span| span.name == "decide");
    spans.sort_by_key(|span| span.start_time_unix_nano);
    let attribute = |span: &opentelemetry_proto::tonic::trace::v1::Span, name: &str| {
        let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
        found.value.clone()?.value
    };
    let text = |span: &_, name: &str| match attribute(span, name)? {
        Value::StringValue(text) => Some(text),
        other => panic!("{name} is {other:?}"),
    };
    let span = |span: &_| DecideSpan {
        action: text(span, "action").expect("an action"),
        allowed: match attribute(span, "allowed") {
            Some(Value::BoolValue(allowed)) => Some(allowed),
            _ => None,
        },
        policies: text(span, "policies").expect("names"),
        denied_by: text(span, "denied_by"),
    };
    spans.iter().map(span).collect()
}

/// Returns the configuration for doors that read HTTP requests.
pub(crate) fn config(cases: &[Case]) -> String {
    let mut yaml = "client_ip: {trusted_proxies: [127.0.0.1/32]}\npolicies:\n".to_owned();
    for case in cases {
        let matches = format!("{{header.x-case: '{}'}}", case.number);
        yaml.push_str(&case.yaml(&matches, &case.sources.join(", "), "header.x-cost"));
    }
    yaml
}

/// Returns the head of a request, with its own headers and those of the case.
pub(crate) fn request_head(
    method: &str,
    target: &str,
    host: &str,
    case: &Case,
    more: &[(&str, &str)],
) -> Vec<u8> {
    let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
    let _ = write!(head, "X-Case: {}\r\n", case.number);
    for (name, value) in more {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    let mut head = head.into_bytes();
    for (name, value) in &case.headers {
        head.extend_from_slice(name.as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value);
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// Sends bytes from a thread that may block.
pub(crate) async fn exchange(address: &str, bytes: Vec<u8>) -> Answer {
    let address = address.to_owned();
    let exchange = move || http_answer(&raw(&address, &bytes));
    tokio::task::spawn_blocking(exchange).await.expect("no panic")
}

/// The HTTP API, with attributes.
pub(crate) struct Api(Process);

impl Api {
    pub(crate) async fn start(cases: &[Case]) -> Self {
        Self(Process::serve(config(cases)).await)
    }
}

impl Door for Api {
    async fn send(&mut self, case: &Case) -> Answer {
        let number = case.number.to_string();
        let mut attributes = BTreeMap::from([("header.x-case", number.as_str())]);
        attributes.extend(case.sources.iter().copied().zip(case.values.iter().map(String::as_str)));
        attributes.extend(case.cost.map(|cost| ("header.x-cost", cost)));
        let body = json!({"attributes": attributes}).to_string();
        let forwarded = case.headers.iter().find(|(name, _)| *name == "X-Forwarded-For");
        let forwarded = forwarded.map(|(name, value)| (*name, String::from_utf8_lossy(value)));
        let address = self.0.service.http.clone();
        let headers: Vec<(String, String)> =
            forwarded.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        let exchange = move || {
            let headers: Vec<(&str, &str)> =
                headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            http_answer(&request(&address, "POST", "/v1/acquire", &headers, body.as_bytes()))
        };
        tokio::task::spawn_blocking(exchange).await.expect("no panic")
    }

    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record {
        self.0.finish(answers).await
    }
}

/// `/v1/forward-auth`, called like a proxy does.
pub(crate) struct ForwardAuth(Process);

impl ForwardAuth {
    pub(crate) async fn start(cases: &[Case]) -> Self {
        Self(Process::serve(config(cases)).await)
    }
}

impl Door for ForwardAuth {
    async fn send(&mut self, case: &Case) -> Answer {
        let forwarded = [
            ("X-Forwarded-Method", "GET"),
            ("X-Forwarded-Uri", case.target),
            ("X-Forwarded-Host", case.host),
        ];
        let head = request_head("GET", "/v1/forward-auth", "tidegate", case, &forwarded);
        exchange(&self.0.service.http, head).await
    }

    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record {
        self.0.finish(answers).await
    }
}

/// The gateway, in front of an application that allows everything.
pub(crate) struct Gateway(Process);

impl Gateway {
    pub(crate) async fn start(cases: &[Case]) -> Self {
        let upstream = serve_app(Router::new().fallback(async || "ok")).await;
        let config = config(cases);
        let start = move |environment: &[(&str, &str)]| {
            Service::gateway_with_env(&config, &[&format!("http://{upstream}")], environment)
        };
        Self(Process::start(start).await)
    }
}

impl Door for Gateway {
    async fn send(&mut self, case: &Case) -> Answer {
        let head = request_head("GET", case.target, case.host, case, &[]);
        exchange(&self.0.service.http, head).await
    }

    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record {
        self.0.finish(answers).await
    }
}

/// Serves an application on a free port, until the test ends.
pub(crate) async fn serve_app(app: Router) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let app = app.into_make_service_with_connect_info::<std::net::SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}
