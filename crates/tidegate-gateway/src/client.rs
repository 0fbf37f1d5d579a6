//! Clients of upstreams: pooled connections, with a connect timeout and optional TLS.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::either::Either;

use super::body::{IdleTimer, UpstreamRequestBody};
use super::connection::{CallProgress, UpstreamStream};
use super::upstreams::{Upstream, Upstreams};
use tidegate_config::UpstreamProtocol as Protocol;
use tidegate_net::tls::UpstreamTls;
use tidegate_service::state::ServerState;

/// Idle connections are closed before most servers close them, after five seconds: a request that
/// meets a connection closed by the server must be sent again, or fails.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
const MAX_IDLE_CONNECTIONS: usize = 1024;
/// Maximum number of headers in a response over HTTP/1.1.
const MAX_HEADERS: usize = 256;
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(20);
/// Time after which a Unix socket with a full queue is tried again.
const QUEUE_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum size of the headers in an HTTP/2 response: as much as hyper accepts over HTTP/1.1.
const MAX_HEADER_BYTES: u32 = 400 * 1024;

/// TLS settings for the next connection.
#[derive(Clone)]
pub(super) struct CurrentTls {
    state: Arc<ServerState>,
    /// Settings without `gateway.ca`.
    system: UpstreamTls,
}

impl CurrentTls {
    pub(super) fn new(state: Arc<ServerState>) -> Result<Self, String> {
        Ok(Self { state, system: UpstreamTls::load(None)? })
    }

    fn get(&self, protocol: Protocol) -> Arc<ClientConfig> {
        let active = self.state.active();
        let tls = active.upstream_tls.as_ref().unwrap_or(&self.system);
        Arc::clone(if protocol == Protocol::Http1 { &tls.http1 } else { &tls.http2 })
    }
}

type UpstreamClient = Client<TimeoutConnector, UpstreamRequestBody>;

/// Clients of both protocols.
#[derive(Clone)]
pub(super) struct Clients {
    http1: UpstreamClient,
    /// Client that opens a connection for each request.
    http1_unpooled: UpstreamClient,
    http2: UpstreamClient,
    header_timeout: Duration,
}

/// Reason why a request to an upstream has no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    #[error("no response in time")]
    Timeout,
    #[error("the request failed")]
    Failed(#[from] legacy::Error),
}

impl ClientError {
    pub(super) fn is_connect(&self) -> bool {
        matches!(self, Self::Failed(error) if error.is_connect())
    }

    /// Returns the progress of the connection on which the request failed.
    pub(super) fn progress(&self) -> Option<CallProgress> {
        match self {
            Self::Failed(error) => CallProgress::of(error),
            Self::Timeout => None,
        }
    }

    /// Makes sure that no other request uses the connection. Requests in flight on it continue.
    pub(super) fn forget_connection(&self) {
        if let Self::Failed(error) = self
            && let Some(connection) = error.connect_info()
        {
            connection.poison();
        }
    }
}

impl Clients {
    pub(super) fn new(
        tls: &CurrentTls,
        connect_timeout: Duration,
        header_timeout: Duration,
        upstreams: &Arc<Upstreams>,
    ) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let http1 = TimeoutConnector {
            tcp,
            tls: tls.clone(),
            protocol: Protocol::Http1,
            timeout: connect_timeout,
            upstreams: Arc::clone(upstreams),
        };
        let http2 = TimeoutConnector { protocol: Protocol::Http2, ..http1.clone() };
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .set_host(false)
            .http1_max_headers(MAX_HEADERS)
            // A proxy corrects these two in responses (RFC 9112, 5.1 and 5.2).
            .http1_allow_spaces_after_header_name_in_responses(true)
            .http1_allow_obsolete_multiline_headers_in_responses(true)
            .pool_max_idle_per_host(0);
        let http1_unpooled = builder.build(http1.clone());
        builder.pool_max_idle_per_host(MAX_IDLE_CONNECTIONS);
        let http1 = builder.build(http1);
        builder
            .http2_only(true)
            .http2_keep_alive_interval(HTTP2_PING_INTERVAL)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .http2_adaptive_window(true);
        Self { http1, http1_unpooled, http2: builder.build(http2), header_timeout }
    }

    /// Sends a request. If it `is_repeated` over HTTP/1.1, it gets a new connection: the idle ones
    /// may be closed, too. Requests over HTTP/2 share one connection.
    pub(super) async fn send(
        &self,
        upstream: &Upstream,
        request: Request<UpstreamRequestBody>,
        is_repeated: bool,
        timer: &IdleTimer,
    ) -> Result<Response<Incoming>, ClientError> {
        let client = match upstream.url.protocol {
            Protocol::Http2 => &self.http2,
            // Idle connections may have all permits. A pooled one is better than the wait for a permit.
            Protocol::Http1 if is_repeated && upstream.connections.available_permits() > 0 => {
                &self.http1_unpooled
            }
            Protocol::Http1 => &self.http1,
        };
        let response = tokio::select! {
            response = NEEDS_CONNECTION.scope((), client.request(request)) => response?,
            () = timer.expired(self.header_timeout) => return Err(ClientError::Timeout),
        };
        if let Some(progress) = response.extensions().get::<CallProgress>() {
            progress.record_response();
        }
        Ok(response)
    }
}

tokio::task_local! {
    /// Set while a request waits for a connection.
    static NEEDS_CONNECTION: ();
}

/// Waits for the permit to open a connection, which another one leaves when it is closed.
async fn connection_permit(
    permits: Arc<Semaphore>,
    timeout: Duration,
) -> Result<OwnedSemaphorePermit, NoFreeConnection> {
    let mut permit = pin!(tokio::time::timeout(timeout, permits.acquire_owned()));
    poll_fn(|cx| {
        // hyper-util goes on connecting in the background once the request has got an idle
        // connection.
        if NEEDS_CONNECTION.try_with(|()| ()).is_err() {
            return Poll::Ready(Err(NoFreeConnection));
        }
        permit
            .as_mut()
            .poll(cx)
            .map(|permit| permit.ok().and_then(Result::ok).ok_or(NoFreeConnection))
    })
    .await
}

/// Error of a request that found no idle connection and may not open another one.
#[derive(Debug, thiserror::Error)]
#[error("all connections to the upstream are in use")]
pub(super) struct NoFreeConnection;

/// Connector with a timeout that includes the TLS handshake.
#[derive(Clone)]
pub(super) struct TimeoutConnector {
    tcp: HttpConnector,
    tls: CurrentTls,
    protocol: Protocol,
    timeout: Duration,
    /// Upstreams, which limit their connections over HTTP/1.1 and may be Unix sockets.
    upstreams: Arc<Upstreams>,
}

impl TimeoutConnector {
    /// Connects to a Unix socket. While its queue is full, the system fails at once and announces
    /// no room, so it is tried again.
    async fn connect_unix(&self, path: &Path) -> io::Result<UpstreamStream> {
        let connecting = async {
            loop {
                match UnixStream::connect(path).await {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        tokio::time::sleep(QUEUE_RETRY_INTERVAL).await;
                    }
                    connected => break connected,
                }
            }
        };
        let stream = tokio::time::timeout(self.timeout, connecting).await??;
        Ok(UpstreamStream::new(Either::Right(stream)))
    }
}

impl tower::Service<Uri> for TimeoutConnector {
    type Response = TokioIo<UpstreamStream>;
    type Error = axum::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        tower::Service::poll_ready(&mut self.tcp, cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            // All requests over HTTP/2 share one connection.
            let upstream =
                connector.upstreams.http1(&uri).filter(|_| connector.protocol == Protocol::Http1);
            let mut permit = None;
            if let Some(upstream) = upstream {
                let permits = Arc::clone(&upstream.connections);
                permit = Some(connection_permit(permits, connector.timeout).await?);
            }
            let stream = match upstream.and_then(|upstream| upstream.url.socket.as_deref()) {
                Some(path) => connector.connect_unix(path).await?,
                None => {
                    let tls = connector.tls.get(connector.protocol);
                    let mut https = HttpsConnector::from((connector.tcp.clone(), tls));
                    let connecting = tower::Service::call(&mut https, uri);
                    match tokio::time::timeout(connector.timeout, connecting).await {
                        Ok(stream) => UpstreamStream::new(Either::Left(TokioIo::new(stream?))),
                        Err(_) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
                    }
                }
            };
            Ok(TokioIo::new(stream.with_permit(permit)))
        })
    }
}
