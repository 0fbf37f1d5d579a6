//! [`Discovery`]: the rules of Envoy from a control plane, by a stream of aggregated discovery (ADS).
//!
//! Each response has all rules. It is accepted (ACK) once they are in use, or rejected with the
//! reason (NACK), and then the rules before it stay. They stay as well while the stream is closed.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http::Uri;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::{Code, Streaming};
use tower::{ServiceExt as _, service_fn};

use crate::journal::bounded;
use crate::metrics::{Metrics, MetricsSection, write_numbers};
use tidegate_api::envoy::config::core::v3::Node;
use tidegate_api::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use tidegate_api::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tidegate_api::google::rpc::Status;
use tidegate_config::XdsConfig;
use tidegate_config::envoy::RateLimitConfig;
use tidegate_net::tls::{self, ClientTlsFiles};

/// Maximum size of all rules: those of thousands of routes. Larger ones are rejected; the stream
/// ends only if a response has twice as much, so that its nonce is not known.
const MAX_RULES_BYTES: usize = 64 * 1024 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Waits between two connections, varied by a half.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Time in which rules that were rejected are not tried again when they are sent again, as control
/// planes do at once: files of this instance may have changed after it.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Idle time after which the system probes the connection. Pings of HTTP/2 would be simpler, but
/// servers in Go close a connection that has more than one in five minutes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// All rules that a control plane has sent, in the order of their names.
pub(super) type DiscoveredRules = Arc<[RateLimitConfig]>;

/// Rules to apply, and where the result is expected.
pub(super) struct RulesUpdate {
    pub(super) rules: DiscoveredRules,
    /// Whether they differ from those in use, or the reason why they are not applied.
    pub(super) reply: oneshot::Sender<Result<bool, String>>,
}

/// Client of a control plane.
pub(super) struct Discovery {
    config: XdsConfig,
    updates: mpsc::Sender<RulesUpdate>,
    status: Arc<DiscoveryStatus>,
    /// Version of the rules in use; empty before the first ones.
    version: String,
    /// Whether the current stream has brought a response.
    has_answered: bool,
    rejection: Option<Rejection>,
    hasher: RandomState,
}

/// Rules that were rejected.
struct Rejection {
    hash: u64,
    reason: String,
    at: Instant,
}

/// State of the stream, for metrics.
#[derive(Debug, Default)]
struct DiscoveryStatus {
    is_connected: AtomicBool,
}

impl MetricsSection for DiscoveryStatus {
    fn write_metrics(&self, text: &mut String) {
        let help = "Whether the control plane that sends the rules of Envoy is connected.";
        let is_connected = u64::from(self.is_connected.load(Ordering::Relaxed));
        write_numbers(text, &[("tidegate_xds_connected", "gauge", help, is_connected)]);
    }
}

impl Discovery {
    pub(super) fn new(
        config: XdsConfig,
        updates: mpsc::Sender<RulesUpdate>,
        metrics: &Metrics,
    ) -> Self {
        let status = Arc::<DiscoveryStatus>::default();
        metrics.register(Arc::clone(&status) as Arc<dyn MetricsSection>);
        Self {
            config,
            updates,
            status,
            version: String::new(),
            has_answered: false,
            rejection: None,
            hasher: RandomState::new(),
        }
    }

    /// Applies the rules of one stream after the other, until the process ends.
    pub(super) async fn run(mut self) {
        let mut backoff = MIN_BACKOFF;
        let mut logged_reason = None;
        loop {
            let start = Instant::now();
            let result = self.follow_stream().await;
            self.status.is_connected.store(false, Ordering::Relaxed);
            let has_answered = std::mem::take(&mut self.has_answered);
            if has_answered || start.elapsed() > MAX_BACKOFF {
                (backoff, logged_reason) = (MIN_BACKOFF, None);
            }
            let reason = result.map_or_else(|error| format!("{error:#}"), |()| "closed".to_owned());
            if logged_reason.as_ref() != Some(&reason) {
                tracing::warn!(
                    server = %self.config.server,
                    reason,
                    "the control plane is not connected, keeping the current rules"
                );
                logged_reason = Some(reason);
            }
            tokio::time::sleep(jittered(backoff)).await;
            backoff = MAX_BACKOFF.min(backoff * 2);
        }
    }

    /// Opens a stream, and applies its responses until it ends.
    async fn follow_stream(&mut self) -> anyhow::Result<()> {
        let (requests, receiver) = mpsc::channel(1);
        // Without a version: another control plane may have used the same one for other rules.
        self.version.clear();
        requests.send(self.request("", None)).await?;
        let mut responses = self.open_stream(receiver).await?;
        while let Some(response) = responses.message().await.map_err(|status| readable(&status))? {
            if !std::mem::replace(&mut self.has_answered, true) {
                tracing::info!(server = %self.config.server, "control plane connected");
            }
            if response.type_url == RateLimitConfig::TYPE_URL {
                let answer = self.answer(&response).await;
                requests.send(answer).await?;
            }
        }
        Ok(())
    }

    /// Applies the rules of a response, and returns the request that accepts or rejects it.
    async fn answer(&mut self, response: &DiscoveryResponse) -> DiscoveryRequest {
        let version = &response.version_info;
        let parts = response.resources.iter().map(|it| (&it.type_url, &it.value[..]));
        let hash = self.hasher.hash_one(parts.collect::<Vec<_>>());
        let is_same = |it: &&Rejection| it.hash == hash && it.at.elapsed() < RETRY_INTERVAL;
        if let Some(Rejection { reason, .. }) = self.rejection.as_ref().filter(is_same) {
            tokio::time::sleep(jittered(MIN_BACKOFF)).await;
            return self.request(&response.nonce, Some(reason.clone()));
        }
        self.rejection = None;
        match self.apply(response).await {
            Ok(is_changed) => {
                let domains = response.resources.len();
                if is_changed {
                    tracing::info!(version, domains, "rules of the control plane applied");
                } else {
                    tracing::debug!(version, domains, "rules of the control plane are unchanged");
                }
                self.version.clone_from(version);
                self.request(&response.nonce, None)
            }
            Err(reason) => {
                tracing::error!(
                    version,
                    reason,
                    "rules of the control plane rejected, keeping the current ones"
                );
                let reason = bounded(reason);
                self.rejection =
                    Some(Rejection { hash, reason: reason.clone(), at: Instant::now() });
                self.request(&response.nonce, Some(reason))
            }
        }
    }

    /// Returns whether the rules differ from those in use.
    async fn apply(&self, response: &DiscoveryResponse) -> Result<bool, String> {
        let size: usize = response.resources.iter().map(|resource| resource.value.len()).sum();
        if size > MAX_RULES_BYTES {
            return Err(format!("the rules have {size} bytes: at most 64 MiB are allowed"));
        }
        let rules = response.resources.iter().map(|resource| {
            if resource.type_url != RateLimitConfig::TYPE_URL {
                return Err(format!("a resource has the type {:?}", resource.type_url));
            }
            RateLimitConfig::decode(&*resource.value).map_err(|error| error.to_string())
        });
        let mut rules = rules.collect::<Result<Vec<_>, String>>()?;
        // Control planes send them in any order.
        rules.sort_by(|one, other| one.name.cmp(&other.name));
        let (reply, applied) = oneshot::channel();
        let sent = self.updates.send(RulesUpdate { rules: rules.into(), reply }).await;
        sent.map_err(|_| "the process is shutting down".to_owned())?;
        applied.await.unwrap_or_else(|_| Err("loading the rules panicked".to_owned()))
    }

    fn request(&self, nonce: &str, rejected: Option<String>) -> DiscoveryRequest {
        let error = |message| Status { code: Code::InvalidArgument as i32, message };
        DiscoveryRequest {
            version_info: self.version.clone(),
            node: Some(Node {
                id: self.config.node_id.clone(),
                user_agent_name: "tidegate".to_owned(),
                user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            }),
            type_url: RateLimitConfig::TYPE_URL.to_owned(),
            response_nonce: nonce.to_owned(),
            error_detail: rejected.map(error),
        }
    }

    /// Opens a stream. Servers answer the call with their first response, which may be much later.
    async fn open_stream(
        &self,
        requests: mpsc::Receiver<DiscoveryRequest>,
    ) -> anyhow::Result<Streaming<DiscoveryResponse>> {
        let scheme = if self.config.tls.is_some() { "https" } else { "http" };
        let origin = Uri::builder()
            .scheme(scheme)
            .authority(self.config.server.clone())
            .path_and_query("/")
            .build()?;
        let connection = timeout(CONNECT_TIMEOUT, self.connect(origin.clone())).await;
        let connection = connection.context("connecting timed out")??;
        let service = service_fn(move |request| connection.clone().send_request(request));
        let mut client = AggregatedDiscoveryServiceClient::with_origin(service, origin)
            .max_decoding_message_size(2 * MAX_RULES_BYTES);
        let requests = futures_util::stream::unfold(requests, |mut requests| async move {
            Some((requests.recv().await?, requests))
        });
        self.status.is_connected.store(true, Ordering::Relaxed);
        let call = client.stream_aggregated_resources(requests).await;
        Ok(call.map_err(|status| readable(&status))?.into_inner())
    }

    /// Opens a connection, with the certificates that are in the files now.
    async fn connect(&self, origin: Uri) -> anyhow::Result<SendRequest<tonic::body::Body>> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE_INTERVAL));
        tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        let tls = self.config.tls.as_ref();
        let files = tls.map_or_else(ClientTlsFiles::default, |tls| tls.files.clone());
        let config = tls::client(&files).map_err(anyhow::Error::msg)?;
        let mut connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http();
        if let Some(name) = tls.and_then(|tls| tls.server_name.clone()) {
            connector = connector.with_server_name_resolver(FixedServerNameResolver::new(name));
        }
        let connector = connector.enable_http2().wrap_connector(tcp);
        let stream = connector.oneshot(origin).await.map_err(anyhow::Error::from_boxed)?;
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        let (sender, connection) = http2.timer(TokioTimer::new()).handshake(stream).await?;
        tokio::spawn(connection);
        Ok(sender)
    }
}

/// Returns the error of a call for the log, without its metadata.
fn readable(status: &tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}: {}", status.code(), status.message())
}

/// Returns a random duration from 0.5 to 1.5 times this one: all instances have lost the same
/// control plane.
fn jittered(duration: Duration) -> Duration {
    let [byte, ..] = RandomState::new().hash_one(()).to_le_bytes();
    duration / 2 + duration * u32::from(byte) / 256
}
