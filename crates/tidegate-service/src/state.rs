//! State that all front doors share: the active configuration, the store, metrics and hot keys.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use arc_swap::{ArcSwap, Guard};
use http::HeaderMap;
use tidegate::{
    Action, Charge, ClientIp, KeySource, Limiter, OverrideKey, Policies, PolicyDecisions,
    PolicyLimiter, Progress, Query, QueryError, ShowKeys, Store as _, StoreError, Timestamp,
};

use crate::auth::AuthListener;
use crate::backend::Backend;
use crate::config_summary::{ConfigChange, ConfigSummary};
use crate::forward_auth_parts::UsedParts;
use crate::hot_keys::{self, HotKeys};
use crate::journal::{EventKind, Journal};
use crate::logs::{self, DenialLog};
use crate::metrics::{Metrics, MetricsSection};
use crate::observer::DecisionObserver;
use crate::overrides::Overrides;
use tidegate_api::admin::{OverrideAuthor, OverrideBody, UpstreamHealth};
use tidegate_config::envoy::{Limit, Rule, Unit, override_name};
use tidegate_config::key_hash;
use tidegate_config::{AuthError, Scope, Token, Tokens};
use tidegate_config::{Config, EnvoyConfig};
use tidegate_net::listener::Peer;
use tidegate_net::tls::{ListenerTls, UpstreamTls};

mod reload_history;

pub use reload_history::{ReloadError, ReloadHistory};

pub struct ServerState {
    active: ArcSwap<ActiveConfig>,
    pub backend: Arc<Backend>,
    pub metrics: Arc<Metrics>,
    pub hot_keys: Arc<HotKeys>,
    /// Set by `tidegate gateway`.
    proxy: OnceLock<Arc<dyn Proxy>>,
    started: Instant,
    started_at: SystemTime,
    pub reloads: ReloadHistory,
    pub overrides: Arc<Overrides>,
    pub journal: Arc<Journal>,
}

/// Reverse proxy of this process, as the admin API shows it.
pub trait Proxy: Send + Sync {
    /// Returns the health of each upstream, in the order of the configuration.
    fn upstreams(&self) -> Vec<UpstreamHealth>;
}

/// Configuration that a reload replaces as a whole.
pub struct ActiveConfig {
    pub client_ip: ClientIp,
    pub envoy: EnvoyConfig,
    pub tls: Option<ListenerTls>,
    /// TLS towards upstreams, unless they are trusted by the roots of the system.
    pub upstream_tls: Option<UpstreamTls>,
    pub limiter: PolicyLimiter<Arc<Backend>, Arc<DecisionObserver>>,
    pub forward_auth_parts: UsedParts,
    /// Whether a policy depends on the method.
    pub reads_method: bool,
    pub x_ratelimit_headers: bool,
    pub partition_keys: bool,
    pub tokens: Tokens,
    pub hash: String,
    pub summary: ConfigSummary,
    journal: Arc<Journal>,
}

/// Client that changes counts, for the log.
#[derive(Debug, Clone)]
pub struct Caller {
    pub peer: SocketAddr,
    pub token: Option<Arc<Token>>,
}

impl Caller {
    /// Returns the author of a change of an override.
    pub fn author(&self, reason: &str) -> OverrideAuthor {
        let from = self.peer.ip().to_string();
        let by = self.token.as_deref().map_or_else(|| from.clone(), |it| it.name().to_owned());
        OverrideAuthor { by, from, reason: reason.to_owned() }
    }
}

impl ServerState {
    /// Connects to the store and activates the configuration.
    pub async fn start(config: Config) -> Result<Self, StoreError> {
        let metrics = Arc::new(Metrics::default());
        let backend = Arc::new(Backend::start(&config.store, &metrics).await?);
        Ok(Self::new(config, backend, metrics))
    }

    /// Activates the configuration on a memory store, whose clock a test drives.
    #[cfg(test)]
    pub fn on_memory(config: Config, store: tidegate::MemoryStore) -> Self {
        let metrics = Arc::new(Metrics::default());
        let backend = Arc::new(Backend::memory(store, Arc::clone(&metrics)));
        Self::new(config, backend, metrics)
    }

    fn new(config: Config, backend: Arc<Backend>, metrics: Arc<Metrics>) -> Self {
        let (hot_keys, started) = (Arc::new(HotKeys::new()), Instant::now());
        let limiter = Limiter::new(Arc::clone(&backend));
        let journal = Arc::new(Journal::default());
        let active = ActiveConfig::new(config, limiter, &metrics, &hot_keys, &journal);
        let overrides = Arc::new(Overrides::new(&backend));
        overrides.activate(&active.limiter);
        metrics.register(Arc::clone(&overrides) as Arc<dyn MetricsSection>);
        let (active, proxy) = (ArcSwap::from_pointee(active), OnceLock::new());
        let started_at = SystemTime::now();
        let reloads = ReloadHistory::new(started_at);
        metrics.register(Arc::clone(&backend) as Arc<dyn MetricsSection>);
        metrics.register(Arc::clone(&journal) as Arc<dyn MetricsSection>);
        Self {
            active,
            backend,
            metrics,
            hot_keys,
            proxy,
            started,
            started_at,
            reloads,
            overrides,
            journal,
        }
    }

    /// Shows the gateway in the admin API.
    pub fn set_proxy(&self, proxy: Arc<dyn Proxy>) {
        let _ = self.proxy.set(proxy);
    }

    /// Returns the counters and the health of the gateway; `None` for `tidegate serve`.
    pub fn proxy(&self) -> Option<&Arc<dyn Proxy>> {
        self.proxy.get()
    }

    /// Activates a new configuration, and returns what it changes. The counts and the overrides stay.
    pub fn reload(&self, config: Config) -> Vec<ConfigChange> {
        let before = self.active();
        let limiter = before.limiter.limiter().clone();
        let active =
            ActiveConfig::new(config, limiter, &self.metrics, &self.hot_keys, &self.journal);
        self.overrides.activate(&active.limiter);
        let changes = before.summary.changes_to(&active.summary);
        drop(before);
        self.active.store(Arc::new(active));
        self.metrics.forget_unused();
        changes
    }

    /// Returns the token of a request if it has one of these scopes. A wrong token is counted.
    pub fn authorize<'t>(
        &self,
        tokens: &'t Tokens,
        given: Option<&[u8]>,
        scopes: &[Scope],
        listener: AuthListener,
        peer: Peer,
    ) -> Result<&'t Arc<Token>, AuthError> {
        let authorized = tokens.authorize(given, scopes);
        if matches!(authorized, Err(AuthError::Wrong)) {
            self.metrics.auth_failures.count(listener, peer.address);
        }
        authorized
    }

    pub fn active(&self) -> Arc<ActiveConfig> {
        self.active.load_full()
    }

    /// Returns the active configuration for a request, without a write to a counter that all threads
    /// share.
    pub fn active_guard(&self) -> Guard<Arc<ActiveConfig>> {
        self.active.load()
    }

    /// Returns the time of the hot keys, in seconds.
    pub fn hot_keys_time(&self) -> u64 {
        hot_keys::seconds(self.backend.clock().now())
    }

    /// Returns the seconds since the start.
    pub fn uptime(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    pub fn started(&self) -> (Instant, SystemTime) {
        (self.started, self.started_at)
    }
}

impl ActiveConfig {
    fn new(
        config: Config,
        limiter: Limiter<Arc<Backend>>,
        metrics: &Arc<Metrics>,
        hot_keys: &Arc<HotKeys>,
        journal: &Arc<Journal>,
    ) -> Self {
        let summary = ConfigSummary::new(&config);
        let backend = limiter.store();
        let rules = config.envoy.rules.rules().map(|rule| (rule.path.as_str(), rule.show_keys()));
        let policies = config.policies.iter().map(|policy| (policy.name(), policy.show_keys()));
        let names: Vec<(&str, ShowKeys)> = policies.chain(rules).collect();
        let ratio = config.envoy.near_limit_ratio;
        let only_names = names.iter().map(|(name, _)| *name);
        let observer = DecisionObserver::new(metrics, hot_keys, backend, ratio, only_names)
            .with_units(config.envoy.counts_units)
            .with_denial_log(config.log_denials.map(DenialLog::new), &names);
        let observer = Arc::new(observer);
        let forward_auth_parts = UsedParts::of(&config.policies);
        let reads_method = config
            .policies
            .iter()
            .any(|policy| policy.references().any(|attribute| attribute == "method"));
        let timeout = backend.timeout().unwrap_or(tidegate::DEFAULT_QUERY_TIMEOUT);
        let limiter = PolicyLimiter::new(limiter, config.policies).with_observer(observer);
        Self {
            client_ip: config.client_ip,
            envoy: config.envoy,
            tls: config.tls,
            upstream_tls: config.upstream_tls,
            limiter: limiter.with_timeout(timeout),
            forward_auth_parts,
            reads_method,
            x_ratelimit_headers: config.x_ratelimit_headers,
            partition_keys: config.partition_keys,
            tokens: config.tokens,
            hash: config.hash,
            summary,
            journal: Arc::clone(journal),
        }
    }

    pub fn policies(&self) -> &Policies {
        self.limiter.policies()
    }

    /// Returns the time by the store's clock.
    pub fn now(&self) -> Timestamp {
        self.limiter.limiter().store().clock().now()
    }

    /// Decides a query whose request has these headers, which may continue a trace. Returns what
    /// `answer` makes of the decisions.
    pub async fn decide<'a, T>(
        &'a self,
        headers: &HeaderMap,
        action: Action,
        query: Query<'a, '_>,
        answer: impl FnOnce(&PolicyDecisions<'a>) -> T,
    ) -> Result<T, QueryError> {
        let on_span = |span: &tracing::Span| logs::continue_trace(span, headers);
        Ok(match self.limiter.start(action, query.on_span(&on_span))? {
            Progress::Decided(decisions) => answer(&decisions),
            Progress::Waiting(waiting) => answer(&self.limiter.finish(waiting).await?),
        })
    }

    /// Returns the key that requests count by: an address by its group, if the policy counts by ip.
    pub fn counted_key(&self, policy: &str, key: &str) -> String {
        let policy = self.policies().get(policy);
        let is_by_ip = policy.is_some_and(|it| it.key().iter().map(KeySource::as_str).eq(["ip"]));
        let address = key.parse::<IpAddr>().ok().filter(|_| is_by_ip);
        address.map_or_else(|| key.to_owned(), |address| self.client_ip.group(address))
    }

    /// Returns a key as operators see it.
    pub fn shown_key(&self, policy: &str, key: String) -> String {
        match self.show_keys(policy) {
            ShowKeys::Plain => key,
            ShowKeys::Hashed => key_hash::of(&key),
        }
    }

    /// Returns how the keys of a policy or rule are shown. A policy that a reload has removed may
    /// have hidden its keys.
    pub fn show_keys(&self, policy: &str) -> ShowKeys {
        if let Some(policy) = self.policies().get(policy) {
            return policy.show_keys();
        }
        let rules = self.envoy.rules.rules().filter(|rule| rule.path == policy);
        if let Some(shown) = rules.map(Rule::show_keys).max() {
            return shown;
        }
        if self.envoy_limits(policy).is_empty() { ShowKeys::Hashed } else { ShowKeys::Plain }
    }

    /// Deletes the count of a key: of a policy, of one of Envoy's rules, or of the limits that
    /// Envoy's requests bring.
    pub async fn reset(&self, policy: &str, key: &str) -> Result<(), QueryError> {
        let limits = self.envoy_limits(policy);
        if self.policies().get(policy).is_some() || limits.is_empty() {
            let _ = self.limiter.decide(Action::Reset, Query::policy(policy, key)).await?;
        } else {
            for limit in &limits {
                if let Limit::Quota(_, quota) = limit {
                    let charge = Charge::new(key, quota).with_policy(policy);
                    self.limiter.limiter().reset(&charge).await?;
                }
            }
        }
        Ok(())
    }

    /// Logs and records who has reset a count.
    pub fn log_reset(&self, caller: &Caller, policy: &str, key: &str) {
        self.journal.record(EventKind::Reset {
            policy: policy.to_owned(),
            key: self.shown_key(policy, key.to_owned()),
            by: caller.author("").by,
        });
        tracing::info!(
            peer = %caller.peer,
            token = caller.token.as_deref().map(Token::name),
            policy,
            key = self.shown_key(policy, key.to_owned()),
            "count reset"
        );
    }

    /// Returns the key of an override as operators see it.
    pub fn shown_override_key(&self, policy: &str, key: &str) -> String {
        if key == OverrideKey::ALL_TEXT {
            return key.to_owned();
        }
        self.shown_key(policy, key.to_owned())
    }

    /// Returns an override with its key as operators see it.
    pub fn shown_override(&self, body: OverrideBody) -> OverrideBody {
        OverrideBody { key: self.shown_override_key(&body.policy, &body.key), ..body }
    }

    /// Logs who has set an override, or removed it.
    pub fn log_override(
        &self,
        caller: &Caller,
        policy: &str,
        key: &str,
        set: Option<&OverrideBody>,
    ) {
        let key = self.shown_override_key(policy, key);
        let limits = set.and_then(|it| serde_json::to_string(&it.stored.limits).ok());
        self.journal.record(EventKind::Override {
            policy: policy.to_owned(),
            key: key.clone(),
            by: caller.author("").by,
            limits: limits.clone(),
            reason: set.map(|it| it.stored.author.reason.clone()),
        });
        tracing::info!(
            peer = %caller.peer,
            token = caller.token.as_deref().map(Token::name),
            policy,
            key,
            limits,
            until_ms = set.and_then(|it| it.until_ms),
            reason = set.map(|it| &it.stored.author.reason),
            "override {}", if set.is_some() { "set" } else { "removed" }
        );
    }

    /// Returns whether Envoy's requests bring the limits that count under this name.
    pub fn is_limit_of_requests(&self, name: &str) -> bool {
        Unit::ALL.into_iter().any(|unit| override_name(self.envoy.algorithm, unit) == name)
    }

    /// Returns the limits of Envoy's rules, or of the limits that its requests bring, that count
    /// under this name.
    fn envoy_limits(&self, policy: &str) -> Vec<Limit> {
        let algorithm = self.envoy.algorithm;
        let rules = self.envoy.rules.rules().filter(|rule| rule.path == policy);
        let units = Unit::ALL.into_iter().filter(|unit| override_name(algorithm, *unit) == policy);
        let overrides = units.filter_map(|unit| Limit::new(algorithm, 1, 1, unit).ok());
        rules.map(|rule| rule.limit.clone()).chain(overrides).collect()
    }
}
