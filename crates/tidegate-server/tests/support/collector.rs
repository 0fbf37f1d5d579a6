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

    /// Starts for OTLP over HTTP, on a free port and this path, and returns the address. Requests
    /// without the header `x-tenant: ours` are rejected.
    #[allow(dead_code, reason = "each test binary uses its own part")]
    pub(crate) async fn start_http(&self, path: &'static str) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(axum::serve(listener, self.router(path)).into_future());
        format!("http://{address}")
    }

    /// Starts for OTLP over HTTPS.
    #[allow(dead_code, reason = "each test binary uses its own part")]
    pub(crate) async fn start_https(
        &self,
        path: &'static str,
        tls: tokio_rustls::rustls::ServerConfig,
    ) -> String {
        use hyper_util::rt::{TokioExecutor, TokioIo};
        use hyper_util::service::TowerToHyperService;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let service = TowerToHyperService::new(self.router(path));
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (service, acceptor) = (service.clone(), acceptor.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        format!("https://localhost:{}", address.port())
    }

    fn router(&self, path: &str) -> axum::Router {
        use axum::body::Bytes;
        use http::{HeaderMap, StatusCode};
        use prost::Message as _;
        let collector = self.clone();
        let export = async move |headers: HeaderMap, body: Bytes| {
            if headers.get("x-tenant").is_none_or(|tenant| tenant != "ours") {
                return (StatusCode::UNAUTHORIZED, Vec::new());
            }
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let request = ExportTraceServiceRequest::decode(body).expect("a message");
            collector.0.lock().expect("no panic").push(request);
            (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
        };
        axum::Router::new().route(path, axum::routing::post(export))
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
