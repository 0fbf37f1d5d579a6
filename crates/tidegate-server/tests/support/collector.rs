//! An OpenTelemetry collector for tests: keeps the spans that it receives.

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use tonic::{Request, Response, Status};

/// The receiving end of OTLP.
#[derive(Clone, Default)]
pub(crate) struct Collector(pub(crate) Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

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
    /// Starts on a free port and returns the endpoint.
    pub(crate) async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        self.start_on(listener);
        format!("http://{address}")
    }

    pub(crate) fn start_on(&self, listener: tokio::net::TcpListener) {
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let server =
            tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
    }

    /// Returns the spans so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let received = self.0.lock().expect("no panic");
        let scopes = received
            .iter()
            .flat_map(|request| &request.resource_spans)
            .flat_map(|spans| &spans.scope_spans);
        scopes.flat_map(|scope| &scope.spans).cloned().collect()
    }
}
