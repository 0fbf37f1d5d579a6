//! Connections to upstreams: kept and used again, made within a time, over TLS where the URL says
//! so.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;

use super::body::Sent;
use super::upstreams::Speaks;

/// A connection that is not used is closed before most servers would: one that is closed under a
/// request fails it.
const IDLE_CONNECTION: Duration = Duration::from_secs(4);
const IDLE_CONNECTIONS: usize = 1024;

/// The two ways to speak to upstreams.
#[derive(Debug, Clone)]
pub(super) struct Clients {
    http1: Client<Patient, Sent>,
    http2: Client<Patient, Sent>,
}

impl Clients {
    pub(super) fn new(tls_config: ClientConfig, connect_timeout: Duration) -> Self {
        let connector = || {
            let mut tcp = HttpConnector::new();
            tcp.enforce_http(false);
            tcp.set_nodelay(true);
            tcp
        };
        let tls = |tls| HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        let http1 = tls(tls_config.clone()).enable_http1().wrap_connector(connector());
        let http2 = tls(tls_config).enable_http2().wrap_connector(connector());
        let patient = |connector| Patient { connector, patience: connect_timeout };
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).timer(TokioTimer::new());
        builder
            .pool_idle_timeout(IDLE_CONNECTION)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .set_host(false);
        let http1 = builder.build(patient(http1));
        builder
            .http2_only(true)
            .http2_keep_alive_interval(Duration::from_secs(20))
            .http2_adaptive_window(true);
        Self { http1, http2: builder.build(patient(http2)) }
    }

    pub(super) fn of(&self, speaks: Speaks) -> &Client<Patient, Sent> {
        match speaks {
            Speaks::Http1 => &self.http1,
            Speaks::Http2 => &self.http2,
        }
    }
}

/// TLS to upstreams: signed by one of `ca`, or by one that the system trusts.
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

/// A connector that gives up after a while, in the middle of a TLS handshake as well.
#[derive(Debug, Clone)]
pub(super) struct Patient {
    connector: HttpsConnector<HttpConnector>,
    patience: Duration,
}

impl tower::Service<Uri> for Patient {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = axum::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        tower::Service::poll_ready(&mut self.connector, cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connecting, patience) =
            (tower::Service::call(&mut self.connector, uri), self.patience);
        Box::pin(async move {
            match tokio::time::timeout(patience, connecting).await {
                Ok(result) => result,
                Err(_) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }
        })
    }
}
