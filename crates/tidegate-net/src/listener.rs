//! Listeners: limit connections, streams, and the time without progress; shut down gracefully.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use http_body::Body;
use hyper::service::Service as HyperService;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use ipnet::IpNet;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tower::util::MapRequest;
use tower::{BoxError, Service, ServiceExt as _};

use crate::LogThrottle;

mod authority;
mod buffers;
mod closed;
mod connection;
mod drain;
mod executor;
mod frames;
mod framing;
mod guarded_stream;
mod http2;
mod lingering;
mod proxy_header;
mod service;
mod session;
mod slots;
mod socket;
mod wakers;

pub use buffers::{BufferBudget, BufferShare, MIN_BUFFER};
pub use closed::{CloseReason, ClosedConnections};
use connection::{Connection, HEADER_TIMEOUT, Timeouts, Watcher};
pub use drain::MaxAge;
use executor::StreamExecutor;
use guarded_stream::GuardedStream;
pub use lingering::LingeringBody;
use service::ConnectionService;
pub use session::{CommandBudget, Input, Session, SessionStep, serve_session};
pub use slots::Accepted;
use slots::ConnectionSlots;
pub use socket::Socket;
use socket::{SocketStream, UNIX_PEER};
use wakers::{ConnectionWaker, Wrapped};

const MAX_HEADER_BYTES: u32 = 64 * 1024;
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Response to a connection for which there is no slot.
const REFUSAL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n\
    Content-Type: text/plain\r\nContent-Length: 21\r\n\r\ntoo many connections\n";
/// Maximum number of refused connections that are kept until the client has the response.
const MAX_REFUSALS: usize = 256;
/// Wait after a failed accept. The cause is mostly a lack of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// Client side of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Address; 127.0.0.1 on a Unix socket; that of the client if a balancer names it.
    pub address: SocketAddr,
    /// Whether the connection uses TLS.
    pub tls: bool,
}

/// Behaviour of one listener.
#[derive(Debug, Clone)]
pub struct ListenerConfig {
    pub max_connections: usize,
    /// Maximum number of connections from one address, or network of IPv6 addresses.
    pub max_connections_per_address: usize,
    /// Networks of the balancers whose connections start with a PROXY header.
    pub proxy_protocol: Vec<IpNet>,
    /// Maximum number of parallel HTTP/2 streams of a connection.
    pub max_streams: u32,
    /// Time without a request after which a connection is closed.
    pub idle_timeout: Duration,
    pub closed: Arc<ClosedConnections>,
    /// Time that in-flight requests have to complete during shutdown.
    pub drain_timeout: Duration,
    pub max_age: Option<MaxAge>,
    /// Maximum time a client may go without reading any of its response.
    pub write_timeout: Duration,
    /// Rejects requests that another server could parse differently (request smuggling).
    pub reject_ambiguous: bool,
    /// Runs HTTP/2 streams on the connection's task. Suits handlers that need little CPU time.
    pub inline_streams: bool,
}

/// Returns whether an address is in one of these networks.
fn is_in(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// Wraps a Tower service so that every request carries its [`Peer`] as an extension.
pub fn with_peer<S, B>(
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

/// Protocol of one connection.
pub trait Protocol: Send + 'static {
    /// Bytes to a client for whose connection there is no slot.
    const REFUSAL: &'static [u8];

    /// Serves the connection until it closes, and returns why, if this side closed it early.
    fn serve<I>(
        self,
        stream: I,
        accepted: Accepted,
        stop: watch::Receiver<bool>,
        config: &ListenerConfig,
    ) -> impl Future<Output = Option<CloseReason>> + Send
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static;
}

/// HTTP/1.1 or HTTP/2, with the service of one connection.
struct Http<S>(S);

impl<S, B> Protocol for Http<S>
where
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    const REFUSAL: &'static [u8] = REFUSAL;

    async fn serve<I>(
        self,
        stream: I,
        accepted: Accepted,
        stop: watch::Receiver<bool>,
        config: &ListenerConfig,
    ) -> Option<CloseReason>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let connection = Arc::clone(&accepted.connection);
        let stream = GuardedStream::new(stream, accepted, config);
        let executor =
            if config.inline_streams { StreamExecutor::inline() } else { StreamExecutor::Spawn };
        let mut builder = auto::Builder::new(executor.clone());
        builder.http1().max_buf_size(MAX_HEADER_BYTES as usize);
        // For small responses, copying the body behind the head is cheaper than a vectored write.
        builder.http1().writev(!config.inline_streams);
        // hyper would look for the end of the connection while it has a request, whose bytes take
        // up the buffer, and allocate another. Requests that are answered soon need not be
        // cancelled.
        builder.http1().half_close(config.inline_streams);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(config.max_streams)
            .max_header_list_size(MAX_HEADER_BYTES)
            .keep_alive_interval(HTTP2_PING_INTERVAL)
            .keep_alive_timeout(HTTP2_PING_TIMEOUT);
        let timeouts = Timeouts { idle: config.idle_timeout, write: config.write_timeout };
        let mut watcher = Watcher::new(Arc::clone(&connection), timeouts);
        let service = ConnectionService {
            service: self.0,
            connection: Arc::clone(&connection),
            inline_streams: config.inline_streams,
        };
        let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        let start_drain = |connection: Pin<&mut auto::UpgradeableConnection<'_, _, _, _>>| {
            connection.graceful_shutdown();
        };
        let watch = |cx: &mut Context<'_>| watcher.poll(cx);
        let drained =
            drain::drive(served, start_drain, stop, config.max_age, &connection.age, watch);
        let mut driven = executor.drive(drained);
        let mut waker: Option<Wrapped<ConnectionWaker>> = None;
        poll_fn(|cx| {
            connection.reset_budget();
            let waker = &Wrapped::of(&mut waker, cx).waker;
            Pin::new(&mut driven).poll(&mut Context::from_waker(waker))
        })
        .await;
        drop(driven);
        watcher.close_reason()
    }
}

/// Serves HTTP until `stop` turns true, then drains in-flight requests. `service` is called once
/// per connection. `network` names the network of a client's address, by which connections are
/// limited, if they are.
pub async fn serve<S, B>(
    listener: Socket,
    service: impl Fn(Peer) -> S,
    tls: impl Fn() -> Option<Arc<ServerConfig>>,
    network: impl Fn(IpAddr) -> Option<String>,
    stop: watch::Receiver<bool>,
    config: ListenerConfig,
) where
    S: HyperService<Request, Response = http::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    serve_protocol(listener, |peer| Http(service(peer)), tls, network, stop, config).await;
}

/// Serves another protocol in the same way. `protocol` is called once per connection.
pub async fn serve_protocol<P: Protocol>(
    listener: Socket,
    protocol: impl Fn(Peer) -> P,
    tls: impl Fn() -> Option<Arc<ServerConfig>>,
    network: impl Fn(IpAddr) -> Option<String>,
    mut stop: watch::Receiver<bool>,
    config: ListenerConfig,
) {
    // Closed when all connections have dropped their receivers.
    let open = watch::Sender::new(());
    let is_unix = matches!(listener, Socket::Unix(..));
    let slots = ConnectionSlots::new(config.max_connections, config.max_connections_per_address);
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let config = Arc::new(config);
    let network_of = |peer: SocketAddr| if peer == UNIX_PEER { None } else { network(peer.ip()) };
    let mut headers = JoinSet::new();
    loop {
        let (stream, address, accepted) = tokio::select! {
            accepted = accept(&listener, &slots) => {
                let Some((stream, peer)) = accepted else { continue };
                let sends_header = is_in(&config.proxy_protocol, peer.ip());
                // The header names the client whose share of the slots is used.
                match slots.take(if sends_header { None } else { network_of(peer) }) {
                    Ok(accepted) if sends_header => {
                        let closed = Arc::clone(&config.closed);
                        headers.spawn(read_header(stream, peer, accepted, closed));
                        continue;
                    }
                    accepted => (stream, peer, accepted),
                }
            }
            Some(read) = headers.join_next() => {
                let Ok(Some((stream, client, accepted))) = read else { continue };
                let entered = accepted.enter(network_of(client));
                (stream, client, entered.map(|()| accepted))
            }
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let tls = tls();
        let mut accepted = match accepted {
            Ok(accepted) => accepted,
            Err(reason) => {
                config.closed.count(reason);
                refuse(stream, P::REFUSAL, tls.is_some(), &refusals);
                continue;
            }
        };
        accepted.is_unix = is_unix;
        let guard = open.subscribe();
        let stop = stop.clone();
        let protocol = protocol(Peer { address, tls: tls.is_some() });
        let config = Arc::clone(&config);
        tokio::spawn(async move {
            let _guard = guard;
            // Connection errors are the client's, so they are not logged.
            let closed = match tls {
                None => protocol.serve(stream, accepted, stop, &config).await,
                // Boxed, because a connection without TLS would carry its large state.
                Some(tls) => {
                    let handshake =
                        async { TlsAcceptor::from(tls).accept(stream).await.map_err(|_| None) };
                    match Box::pin(in_time(handshake, &accepted.connection)).await {
                        Ok(stream) => {
                            Box::pin(protocol.serve(stream, accepted, stop, &config)).await
                        }
                        Err(reason) => reason,
                    }
                }
            };
            if let Some(reason) = closed {
                config.closed.count(reason);
            }
        });
    }
    drop((listener, headers));
    let _ = tokio::time::timeout(config.drain_timeout, open.closed()).await;
}

/// Reads the PROXY header of a balancer, and returns the connection with the address of its client.
async fn read_header(
    mut stream: SocketStream,
    peer: SocketAddr,
    accepted: Accepted,
    closed: Arc<ClosedConnections>,
) -> Option<(SocketStream, SocketAddr, Accepted)> {
    static THROTTLE: LogThrottle = LogThrottle::new();
    let header = async {
        let is_invalid = |error: io::Error| error.kind() == io::ErrorKind::InvalidData;
        let header = proxy_header::read(&mut stream).await;
        header.map_err(|error| is_invalid(error).then_some(CloseReason::ProxyHeader))
    };
    let reason = match in_time(header, &accepted.connection).await {
        Ok(client) => return Some((stream, client.unwrap_or(peer), accepted)),
        Err(reason) => reason?,
    };
    if reason == CloseReason::ProxyHeader
        && let Some(suppressed) = THROTTLE.should_log(Instant::now())
    {
        tracing::warn!(
            %peer,
            suppressed,
            "connection closed: it is from listen.proxy_protocol and has no valid PROXY header \
             (logged once per minute)"
        );
    }
    closed.count(reason);
    None
}

/// Completes the start of a connection, before its first request. The error is the reason why this
/// side closed the connection, if it did.
async fn in_time<T>(
    start: impl Future<Output = Result<T, Option<CloseReason>>>,
    connection: &Connection,
) -> Result<T, Option<CloseReason>> {
    tokio::select! {
        started = start => started,
        () = tokio::time::sleep(HEADER_TIMEOUT) => Err(Some(CloseReason::HeaderTimeout)),
        () = poll_fn(|cx| connection.poll_closing(cx)) => Err(connection.closing()),
    }
}

/// Closes a connection for which there is no slot. Without TLS, the client gets a response.
fn refuse(stream: SocketStream, last: &'static [u8], is_tls: bool, refusals: &Arc<Semaphore>) {
    let Ok(permit) = Arc::clone(refusals).try_acquire_owned() else { return };
    if !is_tls {
        tokio::spawn(async move {
            guarded_stream::linger(stream, last).await;
            drop(permit);
        });
    }
}

pub type Request = hyper::Request<LingeringBody>;

async fn accept(listener: &Socket, slots: &ConnectionSlots) -> Option<(SocketStream, SocketAddr)> {
    match listener.accept().await {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            static THROTTLE: LogThrottle = LogThrottle::new();
            if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
                tracing::warn!(
                    %error,
                    suppressed,
                    "accepting a connection failed (logged once per minute)"
                );
            }
            // Without free file descriptors, clients would wait in the queue.
            if is_out_of_files(&error) {
                slots.evict_idle();
            }
            tokio::time::sleep(ACCEPT_BACKOFF).await;
            None
        }
    }
}

fn is_out_of_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| code == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn balancer_has_limited_time_for_its_header() {
        let closed: Arc<ClosedConnections> = Arc::default();
        let (mut balancer, stream) = UnixStream::pair().expect("a socket");
        balancer.write_all(b"PROXY TCP4 203.0.113.9").await.expect("sent");
        let accepted = ConnectionSlots::new(1, 1).take(None).expect("a slot");
        let stream = SocketStream::Right(stream);
        let start = tokio::time::Instant::now();
        assert!(read_header(stream, UNIX_PEER, accepted, Arc::clone(&closed)).await.is_none());
        assert_eq!(start.elapsed().as_secs(), HEADER_TIMEOUT.as_secs());
        let counted: Vec<_> = closed.counts().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("header_timeout", 1)]);
    }
}
