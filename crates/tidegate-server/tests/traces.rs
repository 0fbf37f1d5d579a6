//! Traces, as an OpenTelemetry collector gets them: asked for by the standard variables, and only then.

mod support;

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use serde_json::json;
use support::Service;
use tonic::{Request, Response, Status};

/// The receiving end of OTLP.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().expect("no panic").push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        format!("http://{address}")
    }

    /// Each span's name, and the names of its parents' spans are there too.
    fn spans(&self) -> Vec<String> {
        let received = self.0.lock().expect("no panic");
        let scopes = received.iter().flat_map(|request| &request.resource_spans).flat_map(|spans| &spans.scope_spans);
        scopes.flat_map(|scope| &scope.spans).map(|span| span.name.clone()).collect()
    }

    fn service_names(&self) -> Vec<String> {
        let received = self.0.lock().expect("no panic");
        let resources =
            received.iter().flat_map(|request| &request.resource_spans).filter_map(|spans| spans.resource.as_ref());
        let names =
            resources.flat_map(|resource| &resource.attributes).filter(|attribute| attribute.key == "service.name");
        names.map(|attribute| format!("{:?}", attribute.value)).collect()
    }
}

const POLICY: &str = "policies:\n  - {name: p, limit: 5, window: 1h}\n";

/// Asks once, and ends the service, which sends what it has gathered.
async fn ask_and_end(environment: Vec<(&'static str, String)>) {
    let run = move || {
        let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let mut service = Service::start_in(POLICY, &environment);
        assert_eq!(service.acquire(&json!({"policy": "p", "key": "secret-user"})).status, 200);
        service.signal("TERM");
        assert_eq!(service.ended().code(), Some(0));
    };
    tokio::task::spawn_blocking(run).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_and_its_call_to_the_store_are_traced_if_a_collector_is_named() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    let name = ("OTEL_SERVICE_NAME", "limits-of-ours".to_owned());
    ask_and_end(vec![("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), name]).await;
    let spans = collector.spans();
    assert!(spans.contains(&"decide".to_owned()) && spans.contains(&"store".to_owned()), "{spans:?}");
    assert!(collector.service_names()[0].contains("limits-of-ours"), "{:?}", collector.service_names());
    let all = format!("{:?}", collector.0.lock().expect("no panic"));
    assert!(!all.contains("secret-user"), "no key is traced");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_traced_unless_it_is_asked_for() {
    let collector = Collector::default();
    let endpoint = collector.start().await;
    ask_and_end(vec![]).await;
    let switched_off = ("OTEL_SDK_DISABLED", "true".to_owned());
    ask_and_end(vec![("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), switched_off]).await;
    assert!(collector.spans().is_empty());
}
