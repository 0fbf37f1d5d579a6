//! HTTP client of the trace exporter, for OTLP over HTTP.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use opentelemetry_http::{HttpClient, HttpError};
use tokio::runtime::Handle;

use super::traces::variable;
use tidegate_net::tls::{self, ClientTlsFiles};

/// Timeout of an export, unless a variable sets another, as OpenTelemetry specifies.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a collector's response, which only reports rejected spans.
const MAX_RESPONSE_BYTES: usize = 1024 * 1024;

/// Client that runs on the Tokio runtime. The exporter calls it from a thread of its own.
#[derive(Debug)]
pub(super) struct OtlpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    runtime: Handle,
    timeout: Duration,
}

impl OtlpClient {
    /// Creates the client. Must be called inside the Tokio runtime.
    pub(super) fn new() -> anyhow::Result<Self> {
        let certificate = variable("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE")
            .or_else(|| variable("OTEL_EXPORTER_OTLP_CERTIFICATE"))
            .map(PathBuf::from);
        let files = ClientTlsFiles::of_ca(certificate.as_deref());
        let tls = tls::client(&files).map_err(anyhow::Error::msg)?;
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector.build());
        let timeout = variable("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
            .or_else(|| variable("OTEL_EXPORTER_OTLP_TIMEOUT"))
            .and_then(|millis| millis.parse().ok());
        Ok(Self {
            client,
            runtime: Handle::current(),
            timeout: timeout.map_or(DEFAULT_TIMEOUT, Duration::from_millis),
        })
    }
}

#[tonic::async_trait]
impl HttpClient for OtlpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let exchange = async move {
            let (head, body) = client.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await?;
            Ok(Response::from_parts(head, body.to_bytes()))
        };
        let timeout = self.timeout;
        self.runtime.spawn(async move { tokio::time::timeout(timeout, exchange).await }).await??
    }
}
