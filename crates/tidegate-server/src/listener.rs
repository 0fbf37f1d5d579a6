//! A listener that hostile clients cannot wear out: bounded in connections, header time and streams; ends gracefully.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::{Service, ServiceExt as _};

/// Connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 16_384;
/// For the head of a request to come, also the first after a pause.
const HEADER_TIME: Duration = Duration::from_secs(10);
const MAX_STREAMS: u32 = 256;

/// The address of the other end of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Serves until `stop` says so, then answers what is under way, for `drain` at most.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    tls: impl Fn() -> Option<Arc<ServerConfig>>,
    mut stop: watch::Receiver<bool>,
    drain: Duration,
) {
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Some((stream, peer, place)) = accepted else { continue };
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let service = tower::service_fn(move |mut request: Request| {
            request.extensions_mut().insert(Peer(peer));
            let router = router.clone();
            async move { Ok::<_, Infallible>(router.oneshot(request).await.unwrap_or_else(|never| match never {})) }
        });
        let (tls, watcher) = (tls(), graceful.watcher());
        tokio::spawn(async move {
            // A connection that breaks is the client's affair.
            match tls {
                None => answer(stream, service, watcher).await,
                Some(config) => {
                    let handshake = TlsAcceptor::from(config).accept(stream);
                    if let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIME, handshake).await {
                        answer(stream, service, watcher).await;
                    }
                }
            }
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(drain, graceful.shutdown()).await;
}

/// Answers what comes on one connection, HTTP/1.1 or HTTP/2.
async fn answer<S, F>(stream: S, service: tower::util::ServiceFn<F>, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    tower::util::ServiceFn<F>:
        Service<Request, Response = axum::response::Response, Error = Infallible> + Clone + Send + 'static,
    <tower::util::ServiceFn<F> as Service<Request>>::Future: Send,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_buf_size(64 * 1024);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_STREAMS).max_header_list_size(64 * 1024);
    builder.http2().keep_alive_interval(Duration::from_secs(30)).keep_alive_timeout(HEADER_TIME);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).into_owned();
    let _ = watcher.watch(connection).await;
}

type Request = hyper::Request<hyper::body::Incoming>;

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, peer)) => Some((stream, peer, place)),
        Err(error) => {
            // Out of file descriptors, most likely: it passes.
            tracing::warn!(%error, "a connection could not be accepted");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}
