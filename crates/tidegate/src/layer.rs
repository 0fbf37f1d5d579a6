//! Tower layer in front of your service: axum, tonic, hyper, or any other Tower service.
//!
//! ```
//! use std::time::Duration;
//! use axum::{Router, routing::get};
//! use tidegate::layer::RateLimitLayer;
//! use tidegate::{KeySource, Limiter, MemoryStore, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(MemoryStore::new()); // or on Redis, for a fleet
//! let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//! let layer = RateLimitLayer::new(limiter, quota)
//!     .policy("per-user")
//!     .by(KeySource::header("x-user-id")?)
//!     .exempt_preflight()
//!     .refund_on(|status| status.is_server_error());
//! let app: Router = Router::new().route("/", get(async || "hello")).layer(layer);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! All clones of a layer, and all its services, share the limiter and so the counts.
//!
//! * A denied request gets 429 with `RateLimit`, `RateLimit-Policy`, `Retry-After` and a
//!   problem+json body of the type `quota-exceeded`; a gRPC client gets the status
//!   `RESOURCE_EXHAUSTED` with `RetryInfo`. The body of the request is not read.
//! * An admitted request gets the same headers on the response of the service.
//! * The layer sleeps for the delay of a `leaky-bucket` before it calls the service. A request that
//!   is dropped in that time returns its units.
//! * If the limits cannot be decided, the response is 503 (gRPC: `UNAVAILABLE`). A `Fallback`
//!   (feature `resilience`) around the store always decides.
//!
//! # Several limits
//!
//! Policies have conditions, several limits at once (all or nothing), shadow mode, overrides and
//! costs by attribute:
//!
//! ```
//! # use std::time::Duration;
//! # use tidegate::layer::RateLimitLayer;
//! use tidegate::{Limiter, MemoryStore, Mode, Policies, Policy, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let minute = Duration::from_secs(60);
//! let users = Policy::builder("per-user", Quota::sliding_log(100, minute)?)
//!     .key(["header.x-user-id"])
//!     .build()?;
//! let search = Policy::builder("search", Quota::token_bucket(5, minute)?)
//!     .matches("path", ["/search/**"])
//!     .key(["header.x-user-id"])
//!     .mode(Mode::Shadow)
//!     .build()?;
//! let limiter = Limiter::new(MemoryStore::new());
//! let layer = RateLimitLayer::with_policies(limiter, Policies::new(vec![users, search])?);
//! # Ok(())
//! # }
//! ```
//!
//! Policies are built in code, as here, or loaded from a configuration file of the `tidegate`
//! service by the crate `tidegate-config`.
//!
//! # The client's address
//!
//! Limits by `ip` need the address of the peer. The layer reads it from the extension [`Peer`], or
//! by [`RateLimitLayer::peer`]; for axum:
//!
//! ```
//! # use std::net::SocketAddr;
//! # use std::time::Duration;
//! # use tidegate::layer::RateLimitLayer;
//! # use tidegate::{Limiter, MemoryStore, Quota};
//! use axum::extract::ConnectInfo;
//! use tidegate::KeySource;
//!
//! # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//! # let limiter = Limiter::new(MemoryStore::new());
//! let layer = RateLimitLayer::new(limiter, quota)
//!     .by(KeySource::client_ip())
//!     .peer(|parts| parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.ip()));
//! // and: axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
//! # Ok::<(), tidegate::QuotaError>(())
//! ```
//!
//! If it is unknown, such a limit responds with 500: failing open would silently disable the limit.
//! Behind proxies, [`RateLimitLayer::client_ip`] sets which ones to trust.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Response, StatusCode, response};
use tower_layer::Layer;

use crate::charge::OnStoreFailure;
use crate::client_ip::ClientIp;
use crate::limiter::Limiter;
use crate::policy::{
    KeySource, Observer, Policies, PolicyDecision, PolicyLimiter, QueryError, check_http,
};
use crate::quota::Quota;
use crate::store::Store;

mod body;
mod future;
mod grpc;
mod headers;
mod log_throttle;
mod request_limiter;
mod request_limiters;
mod request_parts;
mod responses;
mod service;

pub use body::Body;
pub use future::ResponseFuture;
pub use headers::for_each_header_value;
pub use request_limiter::{HeaderSwitches, RequestLimiter};
pub use request_limiters::{
    ConfigureRequest, PolicyRequestLimiter, QuotaRequestLimiter, RequestOptions,
};
pub use request_parts::{CustomAttributes, Peer, RequestParts};
pub use responses::Denial;
use responses::Responses;
pub use service::RateLimit;

/// Layer that puts a [`RateLimit`] in front of services. Clones share their counts.
///
/// `G` is the request limiter: [`QuotaRequestLimiter`] for [`new`](Self::new),
/// [`PolicyRequestLimiter`] for [`with_policies`](Self::with_policies), or your own
/// [`RequestLimiter`]. The [module](self) has more examples.
///
/// ```
/// use std::convert::Infallible;
/// use std::time::Duration;
/// use http::{Request, Response, StatusCode};
/// use tidegate::layer::RateLimitLayer;
/// use tidegate::{Limiter, MemoryStore, Quota};
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Failed requests do not count against the limit.
/// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
///     .refund_on(|status| status.is_server_error());
/// let service = layer.layer(service_fn(async |request: Request<()>| {
///     let mut response = Response::new(());
///     if request.uri().path() == "/broken" {
///         *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
///     }
///     Ok::<_, Infallible>(response)
/// }));
///
/// for path in ["/broken", "/broken", "/"] {
///     let response = service.clone().oneshot(Request::get(path).body(())?).await?;
///     assert_ne!(response.status(), StatusCode::TOO_MANY_REQUESTS);
/// }
/// let denied = service.oneshot(Request::new(())).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
pub struct RateLimitLayer<G> {
    shared: Arc<LayerState<G>>,
}

/// State of a layer and all its services.
#[derive(Clone)]
struct LayerState<G> {
    limiter: G,
    exempt_preflight: bool,
    refund_on: Option<Arc<dyn Fn(StatusCode) -> bool + Send + Sync>>,
    settle: Option<Arc<SettleFn>>,
    responses: Responses,
}

type SettleFn = dyn Fn(&response::Parts) -> Option<u64> + Send + Sync;

impl<S: Store> RateLimitLayer<QuotaRequestLimiter<S>> {
    /// Creates a layer with one quota. All requests count together unless [`by`](Self::by) or
    /// [`key`](Self::key) is set.
    #[must_use]
    pub fn new(limiter: Limiter<S>, quota: Quota) -> Self {
        Self::with_request_limiter(QuotaRequestLimiter::new(limiter, quota))
    }

    /// Counts by an attribute of the request. A request without it is not limited.
    ///
    /// # Panics
    ///
    /// Panics if only Envoy sends the attribute (`domain`, `descriptor.KEY`): no request would ever
    /// be limited.
    #[must_use]
    #[track_caller]
    pub fn by(self, source: KeySource) -> Self {
        if let Err(error) = check_http(source.as_str()) {
            panic!("RateLimitLayer::by: {error}");
        }
        self.with(|shared| shared.limiter.key = source.into())
    }

    /// Counts by a key that the closure takes from the request. `None` or an empty key: the request
    /// is not limited.
    ///
    /// ```
    /// use std::borrow::Cow;
    /// # use std::time::Duration;
    /// # use tidegate::layer::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Quota};
    /// # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// # let limiter = Limiter::new(MemoryStore::new());
    ///
    /// /// User that an authentication middleware has put into the request.
    /// #[derive(Clone)]
    /// struct User(String);
    ///
    /// let layer = RateLimitLayer::new(limiter, quota)
    ///     .key(|parts| parts.extensions.get::<User>().map(|User(name)| Cow::from(name)));
    /// # Ok::<(), tidegate::QuotaError>(())
    /// ```
    #[must_use]
    pub fn key(
        self,
        key: impl for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.limiter.key = request_limiters::KeySelector::Custom(Arc::new(key));
        })
    }

    /// Sets the name that the limit counts under and clients see. By default it is made of the
    /// algorithm and the window.
    #[must_use]
    pub fn policy(self, name: &str) -> Self {
        self.with(|shared| shared.limiter.policy = Some(name.to_owned()))
    }

    /// Also admits at most `limit` requests in flight for each key: a request counts until the body
    /// of its response has ended or is dropped, for example because the client has disconnected.
    /// [`RequestLease`](crate::RequestLease) has the details, and how a handler counts work that
    /// outlives its response.
    ///
    /// A request that either limit denies takes nothing from the other. For a limit in flight alone,
    /// give the layer a [`Quota::concurrency`], or [policies](Self::with_policies) with one.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use std::time::Duration;
    /// use http::{Request, Response, StatusCode};
    /// use tidegate::layer::RateLimitLayer;
    /// use tidegate::{Limiter, MemoryStore, Quota};
    /// use tower::{Layer as _, ServiceExt as _, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota).in_flight(1);
    /// let service = layer.layer(service_fn(async |_request: Request<()>| {
    ///     Ok::<_, Infallible>(Response::new("the body of a long response"))
    /// }));
    ///
    /// let first = service.clone().oneshot(Request::new(())).await?;
    /// let second = service.clone().oneshot(Request::new(())).await?;
    /// assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
    /// drop(first);
    /// assert_eq!(service.oneshot(Request::new(())).await?.status(), StatusCode::OK);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the limit is not one of [`Quota::concurrency`], such as 0.
    #[must_use]
    #[track_caller]
    pub fn in_flight(self, limit: u64) -> Self {
        match Quota::concurrency(limit) {
            Ok(quota) => self.with(|shared| shared.limiter.in_flight = Some(quota)),
            Err(error) => panic!("RateLimitLayer::in_flight: {error}"),
        }
    }

    /// Sets how requests are decided while the store is unavailable, with a `Fallback` (feature
    /// `resilience`) around the store.
    #[must_use]
    pub fn on_store_failure(self, on_store_failure: OnStoreFailure) -> Self {
        self.with(|shared| shared.limiter.on_store_failure = on_store_failure)
    }
}

impl<S: Store> RateLimitLayer<PolicyRequestLimiter<S>> {
    /// Creates a layer with policies: those that apply to a request are decided all or nothing.
    ///
    /// # Panics
    ///
    /// Panics as [`with_policy_limiter`](Self::with_policy_limiter) does.
    #[must_use]
    #[track_caller]
    pub fn with_policies(limiter: Limiter<S>, policies: impl Into<Arc<Policies>>) -> Self {
        Self::with_policy_limiter(PolicyLimiter::new(limiter, policies))
    }
}

impl<S: Store, O: Observer + Clone + 'static> RateLimitLayer<PolicyRequestLimiter<S, O>> {
    /// Creates a layer with a pipeline, which may have an observer and a timeout.
    ///
    /// # Panics
    ///
    /// Panics if a policy uses an attribute that only Envoy sends (`domain`, `descriptor.KEY`): its
    /// limit would never apply. A file that also has policies for Envoy can be filtered:
    ///
    /// ```
    /// # use tidegate::layer::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyError};
    /// # fn layer(all: Policies) -> Result<(), PolicyError> {
    /// let is_envoy = |name: &str| name == "domain" || name.starts_with("descriptor.");
    /// let is_http = |policy: &&Policy| !policy.references().any(is_envoy);
    /// let policies = Policies::new(all.iter().filter(is_http).cloned().collect())?;
    /// let layer = RateLimitLayer::with_policies(Limiter::new(MemoryStore::new()), policies);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn with_policy_limiter(limiter: PolicyLimiter<S, O>) -> Self {
        for policy in limiter.policies().iter() {
            if let Err(error) = policy.references().try_for_each(check_http) {
                panic!("RateLimitLayer: policy {:?}: {error}", policy.name());
            }
        }
        Self::with_request_limiter(PolicyRequestLimiter::new(limiter))
    }
}

impl<G: ConfigureRequest> RateLimitLayer<G> {
    /// Sets the number of units that a request takes, instead of one or the costs of its policies.
    /// A request of cost 0 is not limited. A cost above the burst of a quota is an error, 400.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::layer::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Quota};
    /// # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// # let limiter = Limiter::new(MemoryStore::new());
    /// let layer = RateLimitLayer::new(limiter, quota).cost(|parts| match parts.uri.path() {
    ///     "/healthz" => 0,
    ///     "/export" => 10,
    ///     _ => 1,
    /// });
    /// # Ok::<(), tidegate::QuotaError>(())
    /// ```
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.limiter.options().cost = Some(Arc::new(cost)))
    }

    /// Settles the cost of a request when its response is there: the [cost](Self::cost) is reserved
    /// before, the closure returns the units that were really used, and the difference returns to
    /// the time of the charge. More than was reserved is charged, even beyond the limit. `None`
    /// keeps the reserved units, as does a request without a response.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use std::time::Duration;
    /// use http::{Request, Response};
    /// use tidegate::layer::RateLimitLayer;
    /// use tidegate::{Limiter, MemoryStore, Quota};
    /// use tower::{Layer as _, ServiceExt as _, service_fn};
    ///
    /// /// Number of tokens that a model has used for a response.
    /// #[derive(Clone, Copy)]
    /// struct TokensUsed(u64);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::sliding_log(10_000, Duration::from_secs(60))?;
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
    ///     .cost(|_| 2_000)
    ///     .settle(|response| Some(response.extensions.get::<TokensUsed>()?.0));
    /// let service = layer.layer(service_fn(async |_request: Request<()>| {
    ///     let mut response = Response::new(());
    ///     response.extensions_mut().insert(TokensUsed(700));
    ///     Ok::<_, Infallible>(response)
    /// }));
    ///
    /// let first = service.clone().oneshot(Request::new(())).await?;
    /// assert_eq!(first.headers()["x-ratelimit-remaining"], "8000");
    /// let second = service.oneshot(Request::new(())).await?;
    /// assert_eq!(second.headers()["x-ratelimit-remaining"], "7300", "700 and 2,000 are taken");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// It settles all limits, except those in flight and policies that a
    /// [response header](crate::PolicyBuilder::settled_by) settles. The response follows the
    /// settlement, so that the client's next request sees it; its headers are those of the charge.
    #[must_use]
    pub fn settle<T: Into<Option<u64>>>(
        self,
        used: impl Fn(&response::Parts) -> T + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.limiter.options().settles_cost = true;
            shared.settle = Some(Arc::new(move |response| used(response).into()));
        })
    }

    /// Sets how to find the address of the peer, instead of the extension [`Peer`].
    #[must_use]
    pub fn peer(self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.limiter.options().peer = Arc::new(peer))
    }

    /// Sets which proxies to trust for the client's address, and how IPv6 addresses are grouped. By
    /// default no proxy is trusted: the peer is the client.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::layer::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Quota};
    /// use tidegate::{ClientIp, KeySource};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// # let limiter = Limiter::new(MemoryStore::new());
    /// // Load balancers in 10.0.0.0/8 append to X-Forwarded-For.
    /// let client_ip = ClientIp::new(vec!["10.0.0.0/8".parse()?], 64)?;
    /// let layer = RateLimitLayer::new(limiter, quota)
    ///     .by(KeySource::client_ip())
    ///     .client_ip(client_ip);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn client_ip(self, client_ip: ClientIp) -> Self {
        self.with(|shared| shared.limiter.options().client_ip = Arc::new(client_ip))
    }
}

impl<G: RequestLimiter> RateLimitLayer<G> {
    /// Creates a layer with another [`RequestLimiter`].
    #[must_use]
    pub fn with_request_limiter(limiter: G) -> Self {
        let responses = Responses::default();
        Self {
            shared: Arc::new(LayerState {
                limiter,
                exempt_preflight: false,
                refund_on: None,
                settle: None,
                responses,
            }),
        }
    }

    /// Passes CORS preflight requests without a decision: browsers send them automatically, and
    /// without credentials.
    ///
    /// Scripts can only read a denial that has CORS headers, so a layer that adds them belongs
    /// outside of this one.
    #[must_use]
    pub fn exempt_preflight(self) -> Self {
        self.with(|shared| shared.exempt_preflight = true)
    }

    /// Refunds a request if its response has such a status, besides the policies that have a
    /// [`refund_on`](crate::PolicyBuilder::refund_on) of their own.
    ///
    /// A gRPC call has its status in the headers or, after its messages, in the trailers; it counts
    /// as the corresponding HTTP status. An error of the service without a response counts as 500.
    /// A request that is dropped before its response is not refunded.
    ///
    /// The response follows the refund, which has the timeout of a query, so that the client's next
    /// request sees the refund; the trailers of a gRPC call do not wait. The headers of the response
    /// are those of the charge, without the refund.
    ///
    /// Units that no longer count when the response is there (the bucket has drained, the window
    /// has passed) are not refunded: they would be those of other requests.
    #[must_use]
    pub fn refund_on(self, refund_on: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.refund_on = Some(Arc::new(refund_on)))
    }

    /// Sets the response to a denied request, instead of 429 with problem+json. The headers are
    /// added to it. gRPC clients always get a gRPC status. [`Denial`] has an example.
    #[must_use]
    pub fn on_denied<T: Into<Bytes>>(
        self,
        response: impl Fn(&Denial<'_>) -> Response<T> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.responses.on_denied = Arc::new(move |denial| response(denial).map(Into::into));
        })
    }

    /// Sets the response to a request that could not be decided, instead of 503 (or 400 if the
    /// request is invalid, and 500 if the layer is) with problem+json. gRPC clients always get a
    /// gRPC status.
    ///
    /// The error may name servers, so it should not be shown to clients; the layer logs it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::layer::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Quota};
    /// use http::{Response, StatusCode};
    /// use tidegate::QueryError;
    ///
    /// # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// # let limiter = Limiter::new(MemoryStore::new());
    /// let layer = RateLimitLayer::new(limiter, quota).on_error(|error| {
    ///     let mut response = Response::new("please try again later");
    ///     *response.status_mut() = match error {
    ///         QueryError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    ///         _ => StatusCode::BAD_REQUEST,
    ///     };
    ///     response
    /// });
    /// # Ok::<(), tidegate::QuotaError>(())
    /// ```
    #[must_use]
    pub fn on_error<T: Into<Bytes>>(
        self,
        response: impl Fn(&QueryError) -> Response<T> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.responses.on_error = Arc::new(move |error| response(error).map(Into::into));
        })
    }

    /// Sets whether responses also have the older `X-RateLimit-*` headers; by default they do.
    #[must_use]
    pub fn x_ratelimit_headers(self, enabled: bool) -> Self {
        self.with(|shared| shared.responses.x_ratelimit_headers = enabled)
    }

    /// Shows the partition key that the closure returns as the parameter `pk` of `RateLimit` and
    /// `RateLimit-Policy`; by default none. It should be a hash of the policy's key, which may be a
    /// secret. A client that sends requests of several users sees by it which of them share a count.
    #[must_use]
    pub fn partition_key(
        self,
        hash: impl Fn(&PolicyDecision<'_>) -> Option<[u8; 16]> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| shared.responses.partition_key = Some(Arc::new(hash)))
    }

    fn with(mut self, change: impl FnOnce(&mut LayerState<G>)) -> Self {
        change(Arc::make_mut(&mut self.shared));
        self
    }
}

impl<G> fmt::Debug for RateLimitLayer<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").finish_non_exhaustive()
    }
}

impl<G> Clone for RateLimitLayer<G> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S, G> Layer<S> for RateLimitLayer<G> {
    type Service = RateLimit<S, G>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, Arc::clone(&self.shared))
    }
}
