//! A layer in front of your service: axum, tonic, hyper, whatever speaks Tower.
//!
//! ```
//! use std::time::Duration;
//! use axum::{Router, routing::get};
//! use tidegate::tower::RateLimitLayer;
//! use tidegate::{Limiter, MemoryStore, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(MemoryStore::new()); // or on Redis, for a fleet
//! let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//! let layer = RateLimitLayer::new(limiter, quota)
//!     .policy("per-user")
//!     .by("header.x-user-id")
//!     .exempt_preflight()
//!     .refund_on(|status| status.is_server_error());
//! let app: Router = Router::new().route("/", get(async || "hello")).layer(layer);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
//!
//! All clones of a layer, and all services made by it, share the limiter, and so the counts.
//!
//! * Who may not pass gets 429 with `RateLimit`, `RateLimit-Policy`, `Retry-After` and a
//!   problem+json body; a gRPC client the status `RESOURCE_EXHAUSTED` with `RetryInfo`. The body of
//!   such a request is not read.
//! * Who passes gets the same headers on the service's response.
//! * A `leaky-bucket`'s delay is slept before the service is called. A request that is dropped
//!   meanwhile gives its place back.
//! * If nobody can decide, the answer is 503 (gRPC: `UNAVAILABLE`). With a `Fallback` (feature
//!   `resilience`) around the store, somebody always can.
//!
//! # Several limits
//!
//! Conditions, several limits at once (all or nothing), shadow mode, overrides, costs by attribute:
//!
//! ```
//! # use std::time::Duration;
//! # use tidegate::tower::RateLimitLayer;
//! use tidegate::{Limiter, MemoryStore, Mode, Policies, Policy, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let minute = Duration::from_secs(60);
//! let users = Policy::new("per-user", Quota::sliding_log(100, minute)?)?.counting(&["header.x-user-id"])?;
//! let search = Policy::new("search", Quota::token_bucket(5, minute)?)?
//!     .matching("path", &["/search/**"])?
//!     .counting(&["header.x-user-id"])?
//!     .in_mode(Mode::Shadow);
//! let limiter = Limiter::new(MemoryStore::new());
//! let layer = RateLimitLayer::with_policies(limiter, Policies::new(vec![users, search])?);
//! # Ok(())
//! # }
//! ```
//!
//! Policies can be built by code, as here, or come from a configuration file of the `tidegate`
//! service, by `Policies::load` (with the feature `config`).
//!
//! # The client's address
//!
//! Limits by `ip` need the address of the peer. It is found in the extension [`Peer`], or where you
//! say; for axum:
//!
//! ```
//! # use std::net::SocketAddr;
//! # use std::time::Duration;
//! # use tidegate::tower::RateLimitLayer;
//! # use tidegate::{Limiter, MemoryStore, Quota};
//! use axum::extract::ConnectInfo;
//!
//! # let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//! # let limiter = Limiter::new(MemoryStore::new());
//! let layer = RateLimitLayer::new(limiter, quota)
//!     .by("ip")
//!     .peer(|head| head.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.ip()));
//! // and: axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
//! # Ok::<(), tidegate::QuotaError>(())
//! ```
//!
//! Where it is not known, such a limit answers 500: to let everybody pass would be a limit that is
//! none. Behind proxies, say which to believe: [`RateLimitLayer::client_ip`].

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Response, StatusCode};
use tower_layer::Layer;

use crate::client_ip::ClientIp;
use crate::limiter::{Error, Limiter};
use crate::policy::{OnStoreFailure, Policies, check_http};
use crate::quota::Quota;
use crate::store::Store;

mod attributes;
mod body;
mod fields;
mod gate;
mod grpc;
mod limits;
mod reply;
mod service;

pub use attributes::{HttpAttributes, Peer};
pub use body::Body;
pub use fields::each_field;
pub use gate::{Admission, Gate, Line};
use limits::{KeyBy, Reads};
pub use limits::{PolicyGate, QuotaGate};
pub use reply::Denial;
use reply::Replies;
pub use service::RateLimit;

/// Puts a [`RateLimit`] in front of services. Clones share their counts.
pub struct RateLimitLayer<G> {
    shared: Arc<Shared<G>>,
}

/// What a layer and all its services have in common.
#[derive(Clone)]
struct Shared<G> {
    gate: G,
    exempt_preflight: bool,
    refund_on: Option<Arc<dyn Fn(StatusCode) -> bool + Send + Sync>>,
    replies: Replies,
}

impl<S: Store> RateLimitLayer<QuotaGate<S>> {
    /// One quota; all requests count together until [`by`](Self::by) or [`key`](Self::key) says
    /// otherwise.
    #[must_use]
    pub fn new(limiter: Limiter<S>, quota: Quota) -> Self {
        Self::with_gate(QuotaGate::new(limiter, quota))
    }

    /// Counts by an attribute: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME` or
    /// `cookie.NAME`. A request without it is not limited.
    ///
    /// # Panics
    ///
    /// Panics if the attribute is not one of these: no request would ever be limited.
    #[must_use]
    #[track_caller]
    pub fn by(self, attribute: &str) -> Self {
        if let Err(error) = check_http(attribute) {
            panic!("RateLimitLayer::by: {error}");
        }
        self.with(|shared| shared.gate.key = KeyBy::Attribute(attribute.into()))
    }

    /// Counts by what the closure finds in a request. `None` or nothing in it: the request is not
    /// limited.
    #[must_use]
    pub fn key(
        self,
        key: impl for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| shared.gate.key = KeyBy::Closure(Arc::new(key)))
    }

    /// Counts under this name, and shows it to clients. Without it, the algorithm and the window
    /// are the name.
    #[must_use]
    pub fn policy(self, name: &str) -> Self {
        self.with(|shared| shared.gate.policy = Some(name.into()))
    }

    /// What to answer while the store cannot decide, if a `Fallback` (feature `resilience`) stands
    /// around it.
    #[must_use]
    pub fn on_store_failure(self, failure: OnStoreFailure) -> Self {
        self.with(|shared| shared.gate.on_store_failure = failure)
    }
}

impl<S: Store> RateLimitLayer<PolicyGate<S>> {
    /// The policies that apply to a request, all or nothing.
    ///
    /// # Panics
    ///
    /// Panics if a policy uses an attribute that no HTTP request has (`domain`, `descriptor.KEY`,
    /// or one of your own): its limit would never apply. A file that also has policies for Envoy or
    /// for callers of the API can be filtered:
    ///
    /// ```
    /// # use tidegate::tower::RateLimitLayer;
    /// # use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyError};
    /// # fn layer(all: Policies) -> Result<(), PolicyError> {
    /// let is_http = |policy: &&Policy| policy.non_http_attribute().is_none();
    /// let policies = Policies::new(all.iter().filter(is_http).cloned().collect())?;
    /// let layer = RateLimitLayer::with_policies(Limiter::new(MemoryStore::new()), policies);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn with_policies(limiter: Limiter<S>, policies: impl Into<Arc<Policies>>) -> Self {
        let policies = policies.into();
        for policy in policies.iter() {
            if let Some(Err(error)) = policy.non_http_attribute().map(check_http) {
                panic!("RateLimitLayer::with_policies: policy {:?}: {error}", policy.name());
            }
        }
        Self::with_gate(PolicyGate::new(limiter, policies))
    }
}

impl<G: Reads> RateLimitLayer<G> {
    /// How many units a request takes, instead of one or what its policies say. Nothing: it is not
    /// limited.
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.gate.reader().cost = Some(Arc::new(cost)))
    }

    /// Where the address of the peer is found, if not in the extension [`Peer`].
    #[must_use]
    pub fn peer(self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.gate.reader().peer = Arc::new(peer))
    }

    /// Which proxies to believe about the client's address, and how IPv6 addresses are grouped. By
    /// default none is believed: the peer is the client.
    #[must_use]
    pub fn client_ip(self, client_ip: ClientIp) -> Self {
        self.with(|shared| shared.gate.reader().client_ip = Arc::new(client_ip))
    }
}

impl<G: Gate> RateLimitLayer<G> {
    /// A gate of your own.
    #[must_use]
    pub fn with_gate(gate: G) -> Self {
        let replies = Replies::default();
        Self {
            shared: Arc::new(Shared { gate, exempt_preflight: false, refund_on: None, replies }),
        }
    }

    /// Lets CORS preflight requests pass without asking: browsers send them by themselves, and
    /// without credentials.
    #[must_use]
    pub fn exempt_preflight(self) -> Self {
        self.with(|shared| shared.exempt_preflight = true)
    }

    /// Gives back what a request took if its response has such a status. A gRPC status in the
    /// headers counts as the HTTP status that says the same; a service that fails without a
    /// response, as 500.
    ///
    /// What has come back by itself before the response is there (the bucket drained, the window
    /// over) is not given back again: that would be from others' counts. Of a log the newest units
    /// are given back, which may be another request's: they leave it earlier by the time that the
    /// response took.
    #[must_use]
    pub fn refund_on(self, refund_on: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.refund_on = Some(Arc::new(refund_on)))
    }

    /// Answers a denied request so, instead of 429 with problem+json. The headers are added to it.
    /// (gRPC clients always get a gRPC status.)
    #[must_use]
    pub fn on_denied<T: Into<Bytes>>(
        self,
        answer: impl Fn(&Denial<'_>) -> Response<T> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.replies.on_denied = Arc::new(move |denial| answer(denial).map(Into::into))
        })
    }

    /// Answers a request so that nobody could decide about, instead of 503 (or 400, if it was the
    /// request's fault) with problem+json. (gRPC clients always get a gRPC status.)
    #[must_use]
    pub fn on_error<T: Into<Bytes>>(
        self,
        answer: impl Fn(&Error) -> Response<T> + Send + Sync + 'static,
    ) -> Self {
        self.with(|shared| {
            shared.replies.on_error = Arc::new(move |error| answer(error).map(Into::into))
        })
    }

    /// Whether responses have the older `X-RateLimit-*` headers as well; they do by default.
    #[must_use]
    pub fn x_ratelimit_headers(self, wanted: bool) -> Self {
        self.with(|shared| shared.replies.x_ratelimit_headers = wanted)
    }

    fn with(mut self, change: impl FnOnce(&mut Shared<G>)) -> Self {
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
