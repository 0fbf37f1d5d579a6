//! The built-in request limiters: one quota, or policies.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::{COOKIE, HeaderName};
use http::request::Parts;

use super::request_limiter::RequestLimiter;
use super::request_parts::{Peer, RequestParts};
use crate::charge::OnStoreFailure;
use crate::client_ip::ClientIp;
use crate::limiter::Limiter;
use crate::policy::{
    Attributes as _, KeySource, Observer, PathError, Policies, PolicyDecisions, PolicyLimiter,
    PreparedCharge, Progress, Query, QueryError, SelectError, Waiting, decode_value,
    has_dot_segment,
};
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Store};

type KeyFn = dyn for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync;
type CostFn = dyn Fn(&Parts) -> u64 + Send + Sync;
type PeerFn = dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync;

/// Gate of a layer with one quota, counted by one key; [`RateLimitLayer::new`] creates it.
///
/// A request without the key is not limited, which is logged once. All options are methods of the
/// [`RateLimitLayer`]; the type itself appears only where a layer is named, such as in the return
/// type of a function:
///
/// ```
/// use std::time::Duration;
/// use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
/// use tidegate::{KeySource, Limiter, MemoryStore, Quota, QuotaError};
///
/// fn per_client() -> Result<RateLimitLayer<QuotaRequestLimiter<MemoryStore>>, QuotaError> {
///     let quota = Quota::token_bucket(10, Duration::from_secs(1))?.with_burst(50)?;
///     let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota);
///     Ok(layer.policy("per-client").by(KeySource::client_ip()))
/// }
/// # per_client().unwrap();
/// ```
///
/// [`RateLimitLayer`]: super::RateLimitLayer
/// [`RateLimitLayer::new`]: super::RateLimitLayer::new
pub struct QuotaRequestLimiter<S = MemoryStore> {
    limiter: PolicyLimiter<S>,
    quota: Quota,
    pub(super) policy: Option<String>,
    pub(super) key: KeySelector,
    pub(super) on_store_failure: OnStoreFailure,
    /// Limit of requests in flight, beside the quota.
    pub(super) in_flight: Option<Quota>,
    missing_key_logged: Arc<AtomicBool>,
    options: RequestOptions,
}

/// Gate of a layer with policies; [`RateLimitLayer::with_policies`] and
/// [`RateLimitLayer::with_policy_limiter`] create it.
///
/// All enforced policies that apply to a request are decided together: if one of them denies it,
/// none takes units. A request that no policy applies to passes without rate limit headers.
///
/// `O` is the [`Observer`] of the [`PolicyLimiter`]; `()` observes nothing. The name of the type
/// is needed where a layer is returned or stored:
///
/// ```
/// use tidegate::layer::{PolicyRequestLimiter, RateLimitLayer};
/// use tidegate::{Limiter, MemoryStore, Policies};
///
/// struct App {
///     limits: RateLimitLayer<PolicyRequestLimiter<MemoryStore>>,
/// }
///
/// let limiter = Limiter::new(MemoryStore::new());
/// let app = App { limits: RateLimitLayer::with_policies(limiter, Policies::default()) };
/// # let _ = app.limits;
/// ```
///
/// [`RateLimitLayer::with_policies`]: super::RateLimitLayer::with_policies
/// [`RateLimitLayer::with_policy_limiter`]: super::RateLimitLayer::with_policy_limiter
pub struct PolicyRequestLimiter<S = MemoryStore, O = ()> {
    limiter: PolicyLimiter<S, O>,
    options: RequestOptions,
}

/// Key of a [`QuotaRequestLimiter`].
#[derive(Clone)]
pub(super) enum KeySelector {
    /// All requests together.
    All,
    Source(KeySource),
    /// One header, whose name needs no parsing.
    Header {
        source: KeySource,
        name: HeaderName,
    },
    Custom(Arc<KeyFn>),
}

impl From<KeySource> for KeySelector {
    fn from(source: KeySource) -> Self {
        let header = source.as_str().strip_prefix("header.");
        // Cookies may be split into several headers.
        let header = header.and_then(|name| name.parse().ok()).filter(|name| *name != COOKIE);
        match header {
            Some(name) => Self::Header { source, name },
            None => Self::Source(source),
        }
    }
}

/// Options of a request limiter for reading requests: the address of the peer, the trusted proxies
/// and the cost.
///
/// They are set by [`RateLimitLayer::peer`], [`RateLimitLayer::client_ip`] and
/// [`RateLimitLayer::cost`]. The defaults are the extension [`Peer`], no trusted proxy, and the
/// cost of the policies, or 1.
///
/// [`RateLimitLayer::peer`]: super::RateLimitLayer::peer
/// [`RateLimitLayer::client_ip`]: super::RateLimitLayer::client_ip
/// [`RateLimitLayer::cost`]: super::RateLimitLayer::cost
#[derive(Clone)]
pub struct RequestOptions {
    pub(super) peer: Arc<PeerFn>,
    pub(super) client_ip: Arc<ClientIp>,
    pub(super) cost: Option<Arc<CostFn>>,
    /// Whether the layer settles the cost when the response is there.
    pub(super) settles_cost: bool,
}

/// Gate with [`RequestOptions`]. Sealed: only [`QuotaRequestLimiter`] and [`PolicyRequestLimiter`]
/// implement it.
///
/// It is the bound of the methods of [`RateLimitLayer`](super::RateLimitLayer) that both built-in
/// gates share. A custom [`RequestLimiter`] reads requests itself, for example by
/// [`RequestParts`], and does not need it.
pub trait ConfigureRequest: RequestLimiter {
    /// Returns the options, to change them.
    fn options(&mut self) -> &mut RequestOptions;
}

impl Default for RequestOptions {
    fn default() -> Self {
        let peer = |parts: &Parts| parts.extensions.get::<Peer>().map(|Peer(address)| *address);
        Self { peer: Arc::new(peer), client_ip: Arc::default(), cost: None, settles_cost: false }
    }
}

impl RequestOptions {
    fn request_parts<'a>(&'a self, parts: &'a Parts) -> RequestParts<'a> {
        RequestParts::new(parts, (self.peer)(parts), &self.client_ip)
    }

    fn cost(&self, parts: &Parts) -> Option<u64> {
        self.cost.as_ref().map(|cost| cost(parts))
    }

    /// Lets the request hold its units until its response has ended.
    fn with_lease<'a, 'q>(&self, query: Query<'a, 'q>) -> Query<'a, 'q> {
        if self.settles_cost { query.with_settled_cost() } else { query.with_lease() }
    }
}

impl<S: Store> QuotaRequestLimiter<S> {
    pub(super) fn new(limiter: Limiter<S>, quota: Quota) -> Self {
        Self {
            limiter: PolicyLimiter::new(limiter, Policies::default()),
            quota,
            policy: None,
            key: KeySelector::All,
            on_store_failure: OnStoreFailure::default(),
            in_flight: None,
            missing_key_logged: Arc::default(),
            options: RequestOptions::default(),
        }
    }

    fn policy_name(&self) -> &str {
        self.policy.as_deref().unwrap_or_else(|| self.quota.default_policy_name())
    }

    /// Returns the key of a request; `None` if the request lacks it and is not limited.
    fn key<'r>(&self, parts: &'r Parts) -> Result<Option<Cow<'r, str>>, QueryError> {
        let key = match &self.key {
            KeySelector::All => Some(Cow::Borrowed("all")),
            KeySelector::Custom(key) => key(parts),
            KeySelector::Header { source, name } => {
                let mut values = parts.headers.get_all(name).iter();
                let value = values.next().map(|value| decode_value(value.as_bytes()));
                source.read_one(value, values.next().is_some(), self.policy_name())?
            }
            KeySelector::Source(source) => {
                let request = self.options.request_parts(parts);
                let key = source.read(&request, self.policy_name())?.map(Cow::into_owned);
                if request.lacks_peer() {
                    return Err(QueryError::UnknownPeer);
                }
                key.map(Cow::Owned)
            }
        };
        let key = key.filter(|key| !key.is_empty());
        if key.is_none() && !self.missing_key_logged.swap(true, Ordering::Relaxed) {
            let policy = self.policy_name();
            tracing::info!(policy, "request not limited: it lacks the key (logged once)");
        }
        Ok(key)
    }

    /// Returns the charge of a request; `None` if the request is not limited.
    fn charge<'a>(&'a self, parts: &'a Parts) -> Result<Option<PreparedCharge<'a>>, QueryError> {
        let cost = self.options.cost(parts).unwrap_or(1);
        let key = if cost == 0 { None } else { self.key(parts)? };
        Ok(key.map(|key| {
            PreparedCharge::new(self.policy_name(), key, &self.quota)
                .with_cost(cost)
                .with_on_store_failure(self.on_store_failure)
        }))
    }

    /// Returns the charge of the same key on the limit of requests in flight.
    fn in_flight<'a>(&'a self, quota: &'a Quota, key: Cow<'a, str>) -> PreparedCharge<'a> {
        let policy = match &self.policy {
            Some(policy) => Cow::Owned(format!("{policy}-in-flight")),
            None => Cow::Borrowed(quota.default_policy_name()),
        };
        PreparedCharge::new(policy, key, quota).with_on_store_failure(self.on_store_failure)
    }
}

impl<S: Store, O: Observer + Clone + 'static> PolicyRequestLimiter<S, O> {
    pub(super) fn new(limiter: PolicyLimiter<S, O>) -> Self {
        Self { limiter, options: RequestOptions::default() }
    }
}

impl<S: Store> RequestLimiter for QuotaRequestLimiter<S> {
    type Snapshot = ();

    fn snapshot(&self) {}

    fn start<'a>(&'a self, (): &'a (), parts: &'a Parts) -> Result<Progress<'a>, QueryError> {
        let Some(charge) = self.charge(parts)? else {
            return Ok(Progress::Decided(PolicyDecisions::default()));
        };
        let query = match &self.in_flight {
            None => Query::charge(charge),
            Some(quota) => {
                let key = Cow::Owned(charge.key().unwrap_or_default().to_owned());
                let in_flight = self.in_flight(quota, key);
                Query::prepared(vec![charge, in_flight])
            }
        };
        self.limiter.start(Action::Acquire, self.options.with_lease(query))
    }

    async fn finish<'a>(
        &'a self,
        (): &'a (),
        _parts: &Parts,
        waiting: Waiting<'a>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        self.limiter.finish(waiting).await
    }

    async fn refund(&self, (): &(), decisions: &PolicyDecisions<'_>) {
        self.limiter.refund(decisions).await;
    }

    async fn sleep(&self, delay: Duration) {
        self.limiter.limiter().store().clock().sleep(delay).await;
    }
}

impl<S: Store, O: Observer + Clone + 'static> RequestLimiter for PolicyRequestLimiter<S, O> {
    type Snapshot = ();

    fn snapshot(&self) {}

    fn start<'a>(&'a self, (): &'a (), parts: &'a Parts) -> Result<Progress<'a>, QueryError> {
        let cost = self.options.cost(parts);
        if cost == Some(0) {
            return Ok(Progress::Decided(PolicyDecisions::default()));
        }
        // Policies would read the path without them, but the service routes it as it is.
        if self.limiter.policies().reads_paths() && has_dot_segment(parts.uri.path()) {
            return Err(SelectError::Path(PathError::DotSegment).into());
        }
        let request = self.options.request_parts(parts);
        let query = self.options.with_lease(Query::attributes(&request).with_cost(cost));
        self.limiter.start(Action::Acquire, query)
    }

    async fn finish<'a>(
        &'a self,
        (): &'a (),
        _parts: &Parts,
        waiting: Waiting<'a>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        self.limiter.finish(waiting).await
    }

    async fn refund(&self, (): &(), decisions: &PolicyDecisions<'_>) {
        self.limiter.refund(decisions).await;
    }

    async fn sleep(&self, delay: Duration) {
        self.limiter.limiter().store().clock().sleep(delay).await;
    }
}

impl<S: Store> ConfigureRequest for QuotaRequestLimiter<S> {
    fn options(&mut self) -> &mut RequestOptions {
        &mut self.options
    }
}

impl<S: Store, O: Observer + Clone + 'static> ConfigureRequest for PolicyRequestLimiter<S, O> {
    fn options(&mut self) -> &mut RequestOptions {
        &mut self.options
    }
}

// Not derived: a derive would require `S: Clone`.
impl<S> Clone for QuotaRequestLimiter<S> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            quota: self.quota.clone(),
            policy: self.policy.clone(),
            key: self.key.clone(),
            on_store_failure: self.on_store_failure,
            in_flight: self.in_flight.clone(),
            missing_key_logged: Arc::clone(&self.missing_key_logged),
            options: self.options.clone(),
        }
    }
}

impl<S, O: Clone> Clone for PolicyRequestLimiter<S, O> {
    fn clone(&self) -> Self {
        Self { limiter: self.limiter.clone(), options: self.options.clone() }
    }
}
