//! A listener that hostile clients cannot wear out: bounded in connections, header time and
//! streams; ends gracefully.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body::Body;
use hyper::service::Service as HyperService;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::util::MapRequest;
use tower::{Service, ServiceExt as _};

use crate::logs::Seldom;

mod framing;
mod incoming;
mod streams;
mod taking;
mod wire;

pub(crate) use incoming::Incoming;
use incoming::Lingering;
use streams::Streams;
pub(crate) use taking::Taking;
use wire::Wire;

/// Connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 16_384;
/// For the head of a request to come, also the first after a pause.
const HEADER_TIME: Duration = Duration::from_secs(10);
const MAX_STREAMS: u32 = 256;

/// The other end of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// By TLS.
    pub(crate) secured: bool,
}

/// How a listener behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// What is under way at the end may take so long.
    pub(crate) drain: Duration,
    /// A client that takes nothing of what it is sent is cut off.
    pub(crate) write_time: Duration,
    /// Requests that another server could read otherwise are refused.
    pub(crate) strict: bool,
    /// Answers take little of a processor: those of one connection need no tasks of their own.
    pub(crate) light: bool,
}

/// A service of Tower's, which finds the [`Peer`] among a request's extensions.
pub(crate) fn told_the_peer<S, B>(
    service: &S,
    peer: Peer,
) -> TowerToHyperService<MapRequest<S, impl FnMut(Request) -> Request + Clone + use<S, B>>>
where
    S: Service<Request, Response = http::Response<B>, Error = Infallible> + Clone,
{
    TowerToHyperService::new(service.clone().map_request(move |mut request: Request| {
        request.extensions_mut().insert(peer);
        request
    }))
}

/// Serves until `stop` says so, then answers what is under way. `service` makes one for each
/// connection.
pub(crate) async fn serve<S, B>(
    listener: TcpListener,
    service: impl Fn(Peer) -> S,
    tls: impl Fn() -> Option<Arc<ServerConfig>>,
    mut stop: watch::Receiver<bool>,
    manner: Manner,
) where
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<axum::BoxError>,
{
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Some((stream, address, place)) = accepted else { continue };
        let _ = stream.set_nodelay(true);
        let (tls, watcher) = (tls(), graceful.watcher());
        let peer = Peer { address, secured: tls.is_some() };
        let service = service(peer);
        tokio::spawn(async move {
            // A connection that breaks is the client's affair.
            match tls {
                None => answer(stream, place, service, watcher, manner).await,
                Some(config) => {
                    let handshake = TlsAcceptor::from(config).accept(stream);
                    if let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIME, handshake).await {
                        answer(stream, place, service, watcher, manner).await;
                    }
                }
            }
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(manner.drain, graceful.shutdown()).await;
}

/// Answers what comes on one connection, HTTP/1.1 or HTTP/2.
async fn answer<I, S, B>(
    stream: I,
    place: OwnedSemaphorePermit,
    service: S,
    watcher: Watcher,
    manner: Manner,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<axum::BoxError>,
{
    let stream = Wire::new(stream, place, HEADER_TIME, manner);
    let streams =
        if manner.light { Streams::together() } else { Streams::Apart(manner.write_time) };
    let mut builder = auto::Builder::new(streams.clone());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(64 * 1024);
    // A small answer is sooner copied behind its head than told to the system in two pieces.
    builder.http1().writev(!manner.light);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(64 * 1024);
    builder.http2().keep_alive_interval(Duration::from_secs(30)).keep_alive_timeout(HEADER_TIME);
    let service = Lingering(service);
    let connection =
        builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
    let _ = streams.answer(watcher.watch(connection)).await;
}

pub(crate) type Request = hyper::Request<Incoming>;

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, peer)) => Some((stream, peer, place)),
        Err(error) => {
            // Out of file descriptors, most likely: it passes.
            static FAILURES: Seldom = Seldom::new();
            if let Some(untold) = FAILURES.to_tell(Instant::now()) {
                tracing::warn!(%error, untold, "a connection could not be accepted; told once a minute");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}
