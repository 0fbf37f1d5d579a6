//! Pooled connections to upstreams, with a connect timeout and optional TLS.

use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::body::UpstreamRequestBody;
use super::connection::UpstreamStream;
use super::upstreams::{Protocol, Upstreams};

/// Idle connections are closed before most servers close them: a request that meets a connection
/// closed by the server must be sent again, or fails.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
const MAX_IDLE_CONNECTIONS: usize = 1024;
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(20);
/// Maximum number of headers in an HTTP/1.1 response. hyper prepares space for all of them with
/// each response.
const MAX_HEADERS: usize = 256;
/// Maximum size of the headers in an HTTP/2 response: as much as hyper accepts over HTTP/1.1.
const MAX_HEADER_BYTES: u32 = 400 * 1024;

type UpstreamClient = Client<TimeoutConnector, UpstreamRequestBody>;

/// One HTTP client per protocol.
#[derive(Debug, Clone)]
pub(super) struct Clients {
    http1: UpstreamClient,
    /// Client that opens a connection for each request.
    http1_unpooled: UpstreamClient,
    http2: UpstreamClient,
}

impl Clients {
    pub(super) fn new(
        tls_config: ClientConfig,
        connect_timeout: Duration,
        upstreams: &Arc<Upstreams>,
    ) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let tls = |tls| HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        let http1 = TimeoutConnector {
            connector: tls(tls_config.clone()).enable_http1().wrap_connector(tcp.clone()),
            timeout: connect_timeout,
            limits: Some(Arc::clone(upstreams)),
        };
        let http2 = TimeoutConnector {
            connector: tls(tls_config).enable_http2().wrap_connector(tcp),
            timeout: connect_timeout,
            // All requests to an upstream share one connection.
            limits: None,
        };
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).timer(TokioTimer::new());
        builder
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
        Self { http1, http1_unpooled, http2: builder.build(http2) }
    }

    pub(super) fn get(&self, protocol: Protocol) -> &UpstreamClient {
        match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
        }
    }

    /// Returns the client for a request that failed on a pooled connection. For HTTP/1.1 it avoids
    /// the other pooled connections, which may be closed as well. Requests over HTTP/2 share one
    /// new connection.
    pub(super) fn for_retry(&self, protocol: Protocol) -> &UpstreamClient {
        match protocol {
            Protocol::Http1 => &self.http1_unpooled,
            Protocol::Http2 => &self.http2,
        }
    }
}

/// Returns the TLS settings towards upstreams. Their certificates must be signed by one of `ca`, or
/// by a root that the system trusts.
pub(crate) fn tls(ca: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(file) => {
            for certificate in crate::tls::certificates(file)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(builder
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

tokio::task_local! {
    static NEEDS_CONNECTION: ();
}

/// Runs a request, for which connections may be opened.
pub(super) fn with_connection<F: Future>(request: F) -> impl Future<Output = F::Output> {
    NEEDS_CONNECTION.scope((), request)
}

/// Error of a request that found no idle connection and may not open another one.
#[derive(Debug, thiserror::Error)]
#[error("all connections to the upstream are in use")]
pub(super) struct NoFreeConnection;

/// Waits for the permit to open a connection, which another one leaves when it is closed.
async fn connection_permit(
    connections: Arc<Semaphore>,
    timeout: Duration,
) -> Result<OwnedSemaphorePermit, NoFreeConnection> {
    let mut permit = Box::pin(tokio::time::timeout(timeout, connections.acquire_owned()));
    poll_fn(|cx| {
        // hyper goes on connecting in the background once the request has got an idle connection.
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

/// Connector with a timeout that includes the TLS handshake, and a limit of connections.
#[derive(Debug, Clone)]
pub(super) struct TimeoutConnector {
    connector: HttpsConnector<HttpConnector>,
    timeout: Duration,
    /// Upstreams that limit their connections.
    limits: Option<Arc<Upstreams>>,
}

impl tower::Service<Uri> for TimeoutConnector {
    type Response = TokioIo<UpstreamStream>;
    type Error = axum::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        tower::Service::poll_ready(&mut self.connector, cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connections = self.limits.as_ref().and_then(|limits| limits.connections(&uri));
        let connecting = tower::Service::call(&mut self.connector, uri);
        let timeout = self.timeout;
        Box::pin(async move {
            let permit = match connections {
                Some(connections) => Some(connection_permit(connections, timeout).await?),
                None => None,
            };
            match tokio::time::timeout(timeout, connecting).await {
                Ok(result) => {
                    result.map(|stream| TokioIo::new(UpstreamStream::new(stream, permit)))
                }
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }
        })
    }
}
