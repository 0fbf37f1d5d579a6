//! Clients of upstreams: pooled connections, with a connect timeout and optional TLS.

use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use http_body::Body as _;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::either::Either;

use super::body::{IdleTimer, UpstreamRequestBody};
use super::connection::{Progress, UpstreamStream};
use super::http1::{Failure, Http1Connection, UpstreamBody};
use super::pool::Connections;
use super::upstreams::Upstream;
use tidegate_config::UpstreamProtocol as Protocol;
use tidegate_net::tls::UpstreamTls;
use tidegate_service::state::ServerState;

const HTTP2_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
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

/// Clients of both protocols.
#[derive(Clone)]
pub(super) struct Clients {
    http1: TimeoutConnector,
    http2: Client<TimeoutConnector, UpstreamRequestBody>,
    header_timeout: Duration,
}

/// Reason why a request to an upstream has no response.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    #[error("no connection")]
    Connect(#[source] axum::BoxError),
    #[error("no response in time")]
    Timeout,
    /// The response to a safe request needs a connection that takes more headers.
    #[error("the response has more than 100 headers")]
    ManyHeaders,
    #[error("the request failed")]
    Http1 {
        source: hyper::Error,
        /// Progress of the connection.
        progress: Progress,
    },
    #[error("the request failed")]
    Http2(#[from] legacy::Error),
}

impl ClientError {
    pub(super) fn is_connect(&self) -> bool {
        match self {
            Self::Connect(_) => true,
            Self::Http2(error) => error.is_connect(),
            Self::Timeout | Self::ManyHeaders | Self::Http1 { .. } => false,
        }
    }

    /// Returns the progress of the connection on which the request failed.
    pub(super) fn progress(&self) -> Option<Progress> {
        match self {
            Self::Http1 { progress, .. } => Some(progress.clone()),
            Self::Http2(error) => Progress::of(error),
            Self::Connect(_) | Self::Timeout | Self::ManyHeaders => None,
        }
    }

    /// Makes sure that no other request uses the connection. Requests in flight on it continue.
    pub(super) fn forget_connection(&self) {
        if let Self::Http2(error) = self
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
    ) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let http1 = TimeoutConnector {
            tcp,
            tls: tls.clone(),
            protocol: Protocol::Http1,
            timeout: connect_timeout,
        };
        let http2 = TimeoutConnector { protocol: Protocol::Http2, ..http1.clone() };
        let http2 = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(HTTP2_IDLE_TIMEOUT)
            .set_host(false)
            .http2_only(true)
            .http2_keep_alive_interval(HTTP2_PING_INTERVAL)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .http2_adaptive_window(true)
            .build(http2);
        Self { http1, http2, header_timeout }
    }

    /// Sends a request. If it `is_repeated` over HTTP/1.1, it gets a new connection: the idle ones
    /// may be closed, too. Requests over HTTP/2 share one connection.
    pub(super) async fn send(
        &self,
        upstream: &Upstream,
        request: Request<UpstreamRequestBody>,
        is_repeated: bool,
        timer: &IdleTimer,
    ) -> Result<Response<UpstreamBody>, ClientError> {
        if upstream.url.protocol == Protocol::Http1 {
            return self.send_http1(upstream, request, is_repeated, timer).await;
        }
        let response = tokio::select! {
            response = self.http2.request(request) => response?,
            () = timer.expired(self.header_timeout) => return Err(ClientError::Timeout),
        };
        if let Some(progress) = response.extensions().get::<Progress>() {
            progress.record_response();
        }
        Ok(response.map(UpstreamBody::detached))
    }

    async fn send_http1(
        &self,
        upstream: &Upstream,
        mut request: Request<UpstreamRequestBody>,
        is_repeated: bool,
        timer: &IdleTimer,
    ) -> Result<Response<UpstreamBody>, ClientError> {
        let connections = &upstream.connections;
        // Only a safe request may be sent again for the sake of its response.
        let is_safe = request.method().is_safe() && request.body().is_end_stream();
        let many_headers = is_repeated || !is_safe || connections.has_many_headers();
        loop {
            let idle = if is_repeated { None } else { connections.take(many_headers) };
            let (connection, is_idle) = match idle {
                Some(connection) => (connection, true),
                None => tokio::select! {
                    connected = self.connect(upstream, is_repeated, many_headers) => {
                        connected.map_err(ClientError::Connect)?
                    }
                    () = timer.expired(self.header_timeout) => return Err(ClientError::Timeout),
                },
            };
            let progress = connection.progress.clone();
            match connection.send(request, timer, self.header_timeout).await {
                Ok(response) => {
                    progress.record_response();
                    return Ok(response);
                }
                // The upstream closed the connection while it was idle.
                Err(Failure::Unsent(unsent, _)) if is_idle => request = *unsent,
                Err(Failure::Failed(error)) if error.is_parse_too_large() && !many_headers => {
                    connections.set_many_headers();
                    return Err(ClientError::ManyHeaders);
                }
                Err(Failure::Unsent(_, source) | Failure::Failed(source)) => {
                    return Err(ClientError::Http1 { source, progress });
                }
                Err(Failure::Timeout) => return Err(ClientError::Timeout),
            }
        }
    }

    /// Opens a connection, or returns one that has become idle while the limit was reached, and
    /// whether it did.
    async fn connect(
        &self,
        upstream: &Upstream,
        is_repeated: bool,
        many_headers: bool,
    ) -> Result<(Box<Http1Connection>, bool), axum::BoxError> {
        let connections = &upstream.connections;
        let free = match connections.try_permit() {
            Some(permit) => Free::Permit(permit),
            None => {
                let free = Free::wait(connections, is_repeated, many_headers);
                tokio::time::timeout(self.http1.timeout, free)
                    .await
                    .map_err(|_| NoFreeConnection)?
            }
        };
        let permit = match free {
            Free::Permit(permit) => permit,
            Free::Connection(connection) => return Ok((connection, true)),
        };
        let stream = match &upstream.url.socket {
            Some(path) => self.http1.connect_unix(path).await?,
            None => {
                let uri = upstream.uri(PathAndQuery::from_static("/")).ok_or("no URI")?;
                tower::Service::call(&mut self.http1.clone(), uri).await?.into_inner()
            }
        };
        let stream = stream.with_permit(permit);
        let pool = Arc::clone(connections);
        let connection =
            Http1Connection::handshake(stream, pool, many_headers, self.header_timeout).await?;
        Ok((connection, false))
    }
}

/// Connection that a request may use.
enum Free {
    /// Permit to open one.
    Permit(OwnedSemaphorePermit),
    Connection(Box<Http1Connection>),
}

impl Free {
    /// Waits until a connection is closed or becomes idle. If none of those that are idle suits the
    /// request, they are closed.
    async fn wait(connections: &Connections, is_repeated: bool, many_headers: bool) -> Self {
        let mut permit = pin!(connections.permit());
        loop {
            let returned = connections.returned();
            let idle = if is_repeated { None } else { connections.take(many_headers) };
            if let Some(connection) = idle {
                return Self::Connection(connection);
            }
            connections.clear();
            tokio::select! {
                Some(permit) = &mut permit => return Self::Permit(permit),
                () = returned => {}
            }
        }
    }
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
        let mut connector = HttpsConnector::from((self.tcp.clone(), self.tls.get(self.protocol)));
        let connecting = tower::Service::call(&mut connector, uri);
        let timeout = self.timeout;
        Box::pin(async move {
            match tokio::time::timeout(timeout, connecting).await {
                Ok(result) => result.map(|stream| {
                    TokioIo::new(UpstreamStream::new(Either::Left(TokioIo::new(stream))))
                }),
                Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            }
        })
    }
}
