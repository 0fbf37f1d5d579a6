//! A control plane: a server of aggregated discovery, whose responses a test writes one by one.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use prost::Message as _;
use prost_types::Any;
use tidegate_api::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use tidegate_api::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tidegate_config::envoy::RateLimitConfig;
use tidegate_net::tls::{self, TlsFiles};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use crate::support::TEST_TIMEOUT;

type Responses = mpsc::UnboundedSender<Result<DiscoveryResponse, Status>>;

/// Running control plane.
pub(crate) struct ControlPlane {
    pub(crate) address: SocketAddr,
    requests: mpsc::UnboundedReceiver<DiscoveryRequest>,
    /// Responses of the stream that was opened last.
    responses: Arc<Mutex<Option<Responses>>>,
    tasks: JoinSet<()>,
}

#[derive(Clone)]
struct Handler {
    requests: mpsc::UnboundedSender<DiscoveryRequest>,
    responses: Arc<Mutex<Option<Responses>>>,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Handler {
    type StreamAggregatedResourcesStream =
        Pin<Box<dyn Stream<Item = Result<DiscoveryResponse, Status>> + Send>>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let (responses, receiver) = mpsc::unbounded_channel();
        *self.responses.lock().expect("no panic") = Some(responses);
        let (mut stream, requests) = (request.into_inner(), self.requests.clone());
        tokio::spawn(async move {
            while let Some(Ok(request)) = stream.next().await {
                let _ = requests.send(request);
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }
}

impl ControlPlane {
    pub(crate) async fn start() -> Self {
        Self::start_on("127.0.0.1:0", None).await
    }

    /// Starts on an address, with TLS if there are files.
    pub(crate) async fn start_on(address: &str, files: Option<TlsFiles>) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (sender, requests) = mpsc::unbounded_channel();
        let responses = Arc::default();
        let handler = Handler { requests: sender, responses: Arc::clone(&responses) };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, files.clone(), handler.clone()));
            }
        });
        Self { address, requests, responses, tasks }
    }

    /// Returns the next request of the client.
    pub(crate) async fn request(&mut self) -> DiscoveryRequest {
        let request = tokio::time::timeout(TEST_TIMEOUT, self.requests.recv()).await;
        request.expect("a request in time").expect("the control plane runs")
    }

    /// Sends rules on the current stream.
    pub(crate) fn send(&self, version: &str, nonce: &str, configs: &[RateLimitConfig]) {
        let resource = |config: &RateLimitConfig| Any {
            type_url: RateLimitConfig::TYPE_URL.to_owned(),
            value: config.encode_to_vec(),
        };
        self.respond(DiscoveryResponse {
            version_info: version.to_owned(),
            resources: configs.iter().map(resource).collect(),
            type_url: RateLimitConfig::TYPE_URL.to_owned(),
            nonce: nonce.to_owned(),
        });
    }

    pub(crate) fn respond(&self, response: DiscoveryResponse) {
        let responses = self.responses.lock().expect("no panic");
        let responses = responses.as_ref().expect("a stream");
        responses.send(Ok(response)).expect("the client reads");
    }

    /// Sends rules, and waits until they are accepted.
    pub(crate) async fn accept(&mut self, version: &str, configs: &[RateLimitConfig]) {
        self.send(version, version, configs);
        let answer = self.request().await;
        assert_eq!(answer.error_detail, None);
        assert_eq!((&*answer.version_info, &*answer.response_nonce), (version, version));
    }

    /// Ends all connections at once, and frees the port.
    pub(crate) async fn kill(mut self) {
        self.tasks.shutdown().await;
    }

    /// Ends the current stream in good order.
    pub(crate) fn close_stream(&self) {
        *self.responses.lock().expect("no panic") = None;
    }
}

async fn serve(stream: TcpStream, files: Option<TlsFiles>, handler: Handler) {
    let server = TowerToHyperService::new(AggregatedDiscoveryServiceServer::new(handler));
    let http2 = http2::Builder::new(TokioExecutor::new());
    match files {
        None => {
            let _ = http2.serve_connection(TokioIo::new(stream), server).await;
        }
        Some(files) => {
            let acceptor = TlsAcceptor::from(tls::load(&files).expect("certificates"));
            // Without a valid client certificate, there is no connection.
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let _ = http2.serve_connection(TokioIo::new(stream), server).await;
        }
    }
}
