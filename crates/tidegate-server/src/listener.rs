//! HTTP listener: limits connections, streams and the time for a request head; shuts down
//! gracefully.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body::Body;
use hyper::service::Service as HyperService;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::util::MapRequest;
use tower::{Service, ServiceExt as _};

use crate::logs::LogThrottle;

mod drain;
mod executor;
mod framing;
mod guarded_stream;
mod lingering;
mod socket;
mod stall;

pub(crate) use drain::MaxAge;
use drain::{ConnectionState, OpenConnections};
use executor::StreamExecutor;
use guarded_stream::GuardedStream;
use lingering::ConnectionService;
pub(crate) use lingering::LingeringBody;
pub(crate) use socket::Socket;
use socket::Stream;
pub(crate) use stall::WriteProgress;

/// Maximum number of open connections; further clients wait in the accept queue.
const MAX_CONNECTIONS: usize = 16_384;
/// Time limit for a TLS handshake, for a complete request head (also on an idle keep-alive
/// connection), and for the reply to an HTTP/2 ping.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_STREAMS: u32 = 256;
const MAX_HEADER_BYTES: u32 = 64 * 1024;
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// Wait after a failed accept, which is usually caused by a lack of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// Client side of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// Address; 127.0.0.1 on a Unix socket.
    pub(crate) address: SocketAddr,
    /// Whether the connection uses TLS.
    pub(crate) tls: bool,
}

/// Behaviour of one listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListenerConfig {
    /// Time that in-flight requests have to complete during shutdown.
    pub(crate) drain_timeout: Duration,
    pub(crate) max_age: Option<MaxAge>,
    /// Maximum time a client may go without reading any of its response.
    pub(crate) write_timeout: Duration,
    /// Rejects requests that another server could parse differently (request smuggling).
    pub(crate) reject_ambiguous: bool,
    /// Runs HTTP/2 streams on the connection's task. Suits handlers that need little CPU time.
    pub(crate) inline_streams: bool,
}

/// Wraps a Tower service so that every request carries its [`Peer`] as an extension.
pub(crate) fn with_peer<S, B>(
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

/// Serves until `stop` turns true, then drains in-flight requests. `service` is called once per
/// connection.
pub(crate) async fn serve<S, B>(
    listener: Socket,
    service: impl Fn(Peer) -> S,
    tls: impl Fn() -> Option<Arc<ServerConfig>>,
    mut stop: watch::Receiver<bool>,
    config: ListenerConfig,
) where
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<axum::BoxError>,
{
    let open = OpenConnections::new();
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &connections) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Some((stream, address, permit)) = accepted else { continue };
        let tls = tls();
        let guard = open.guard();
        let stop = stop.clone();
        let service = service(Peer { address, tls: tls.is_some() });
        tokio::spawn(async move {
            let _guard = guard;
            // Connection errors are the client's, so they are not logged.
            match tls {
                None => serve_connection(stream, permit, service, stop, config).await,
                Some(tls) => {
                    let handshake = TlsAcceptor::from(tls).accept(stream);
                    if let Ok(Ok(stream)) = tokio::time::timeout(HEADER_TIMEOUT, handshake).await {
                        serve_connection(stream, permit, service, stop, config).await;
                    }
                }
            }
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(config.drain_timeout, open.closed()).await;
}

/// Serves one HTTP/1.1 or HTTP/2 connection until it closes.
async fn serve_connection<I, S, B>(
    stream: I,
    permit: OwnedSemaphorePermit,
    service: S,
    stop: watch::Receiver<bool>,
    config: ListenerConfig,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<axum::BoxError>,
{
    let stream = GuardedStream::new(stream, permit, HEADER_TIMEOUT, config);
    let executor = if config.inline_streams {
        StreamExecutor::inline()
    } else {
        StreamExecutor::Spawn { write_timeout: config.write_timeout }
    };
    let mut builder = auto::Builder::new(executor.clone());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES as usize);
    // For small responses, copying the body behind the head is cheaper than a vectored write.
    builder.http1().writev(!config.inline_streams);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_BYTES)
        .keep_alive_interval(HTTP2_PING_INTERVAL)
        .keep_alive_timeout(HEADER_TIMEOUT);
    let state = Arc::new(ConnectionState::default());
    let service = ConnectionService { service, state: Arc::clone(&state) };
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let start_drain = |connection: Pin<&mut auto::UpgradeableConnection<'_, _, _, _>>| {
        connection.graceful_shutdown();
    };
    executor.drive(drain::drive(connection, start_drain, stop, config.max_age, &state)).await;
}

pub(crate) type Request = hyper::Request<LingeringBody>;

async fn accept(
    listener: &Socket,
    connections: &Arc<Semaphore>,
) -> Option<(Stream, SocketAddr, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, address)) => Some((stream, address, permit)),
        Err(error) => {
            static THROTTLE: LogThrottle = LogThrottle::new();
            if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
                tracing::warn!(
                    %error,
                    suppressed,
                    "accepting a connection failed (logged once per minute)"
                );
            }
            tokio::time::sleep(ACCEPT_BACKOFF).await;
            None
        }
    }
}
