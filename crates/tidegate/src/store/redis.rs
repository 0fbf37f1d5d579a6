//! [`RedisStore`]: counts that a fleet shares, decided inside Redis by atomic Lua scripts.
//!
//! A decision takes one round trip, however many charges it has; decisions that arrive while a call
//! is in flight share the next call. Time is the server's, so the clocks of clients do not matter.
//!
//! # Deployments
//!
//! A single server ([`RedisStore::builder`]), a cluster ([`RedisStore::cluster`]), or a primary
//! behind sentinels ([`RedisStore::sentinel`]), each with TLS by `rediss://`. The store follows
//! failovers and slot migrations.
//!
//! # Outages
//!
//! No call takes longer than its timeout. A call that may have run ends with
//! [`StoreError::AnswerLost`] and is never sent again, and a script that starts after its caller's
//! deadline spends nothing. While a node is down, its calls
//! fail at once, and the store keeps trying to reconnect.
//!
//! Each node has a circuit. It opens after five failures in a row, or when at least five calls of
//! the last second failed and they are half of its calls or more. A call that many decisions share
//! counts once. While it is open, the calls of
//! this node return [`StoreError::Open`] at once, and a decision on an internal key is tried
//! several times per second. Two in a row that succeed close the circuit. A missing permission or
//! command opens the circuit at once, with an error that names it ([`StoreError::NotPermitted`]),
//! and the circuit closes when nothing is missing any more.
//!
//! # Invalidations
//!
//! After each refund and reset the store publishes which count has units again, in a small sorted
//! set, if there is a reader: a `DenyCache` (feature `resilience`) in another process. Concurrent
//! refunds share one call. A refund returns once its invalidation is published or its timeout has
//! passed. An invalidation that cannot be published does not fail the refund; it is retried in the
//! background for as long as a deny cache entry lives, five seconds.
//!
//! # Permissions
//!
//! These are all permissions that the Redis user needs, for the prefix `rate_limit`. Of the last
//! three, `cluster|slots` and `asking` are needed only on a cluster, `role` only behind sentinels:
//!
//! ```text
//! ACL SETUSER tidegate on >password ~rate_limit:* +evalsha +script|load +time +unlink
//!     +get +hdel +hincrby +hmget +hset +pexpireat +pttl +set +setrange +zadd +zcard
//!     +zcount +zrange +zrangebyscore +zrem +zremrangebyrank +zremrangebyscore
//!     +cluster|slots +asking +role
//! ```
//!
//! The user of the sentinels needs `+ping +sentinel|get-master-addr-by-name +sentinel|master
//! +sentinel|replicas`.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use self::batch::dispatch::dispatch;
use self::batch::queue::Enqueued;
use self::batch::{Batch, InFlightBatch};
pub use self::builder::Builder;
use self::builder::Deployment;
use self::client::NodeClient;
use self::client::server_clock::{ServerClock, ServerTimes};
use self::client::stats::BucketCounters;
pub use self::client::stats::Distribution;
pub use self::client::tls::Tls;
use self::coordination::heartbeat::Heartbeats;
use self::coordination::invalidation::{PendingInvalidation, Publisher};
#[doc(hidden)]
pub use self::coordination::permissions::SCRIPT_COMMANDS;
pub use self::health::{NodeHealth, Reply};
pub use self::resilient::ResilientRedis;
use self::routing::Topology;
use self::routing::slots::slot_of_user_key;
use self::routing::step::{CallError, Delivery, NextStep, Retries, Target};
use self::script::requests::{EncodedRequests, Operation, Request, RequestDecisions};
use super::invalidation::{Cursor, Invalidations};
use super::{Action, Outcome, SharedStore, Store, StoreError};
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::decision::Decision;
use crate::join::{collect_independent, join_all};
use crate::key::write_redis_key;
use crate::limiter::runtime::OnRuntime;

mod batch;
mod builder;
mod client;
mod coordination;
mod health;
mod resilient;
mod routing;
mod script;

/// Store whose counts all processes on one Redis or one cluster share.
///
/// ```no_run
/// use tidegate::{Limiter, RedisStore};
///
/// # async fn connect() -> Result<(), tidegate::StoreError> {
/// let limiter = Limiter::new(RedisStore::connect("redis://127.0.0.1:6379").await?);
/// # Ok(())
/// # }
/// ```
pub struct RedisStore {
    shared: Arc<Shared>,
}

/// State of a store. Background tasks share it, because a refund may outlast its caller.
struct Shared {
    topology: Arc<Topology>,
    publisher: Arc<Publisher>,
    heartbeats: Heartbeats,
    prefix: String,
    /// Mark of the format in names of counts.
    format_mark: String,
    clock: SystemClock,
    timeout: Duration,
    group_commit: bool,
    cross_slot: bool,
    /// Number of decisions in each call.
    call_sizes: BucketCounters,
    /// Runtime in which the store was connected.
    runtime: Handle,
    /// Manual clock of a test, which replaces the server's time.
    #[cfg(feature = "testing")]
    driven_by: Option<crate::clock::ManualClock>,
}

impl RedisStore {
    /// Connects to the server at this URL, `redis://[user:password@]host[:port][/database]`, or
    /// `rediss://…` for TLS.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Creates a builder for a store on one server. If the server turns out to be a node of a
    /// cluster, the store uses the cluster.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tidegate::RedisStore;
    ///
    /// # async fn connect() -> Result<(), tidegate::StoreError> {
    /// let builder = RedisStore::builder("redis://127.0.0.1:6379").prefix("api");
    /// let store = builder.timeout(Duration::from_millis(50)).connect().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn builder(url: &str) -> Builder {
        Builder::new(Deployment::Single, [url])
    }

    /// Creates a builder for a store on a cluster. The URLs are those of some nodes; the others are
    /// discovered.
    ///
    /// Charges of one key are decided atomically, as on one server. So are charges of several keys
    /// that are on one node, with Redis 7 or Valkey. Charges on several nodes are decided in order,
    /// and if one denies, the units that the others spent are refunded.
    ///
    /// ```no_run
    /// use tidegate::RedisStore;
    ///
    /// # async fn connect() -> Result<(), tidegate::StoreError> {
    /// let store = RedisStore::cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"]);
    /// let store = store.connect().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Builder {
        Builder::new(Deployment::Cluster, urls)
    }

    /// Creates a builder for a store on the primary that the sentinels at these URLs monitor under
    /// this name.
    ///
    /// User and password in the URLs are for the sentinels, and for the primary unless
    /// [`Builder::credentials`] sets others. `rediss://` and [`Builder::tls`] apply to both. The
    /// database is that of the primary.
    ///
    /// ```no_run
    /// use tidegate::RedisStore;
    ///
    /// # async fn connect() -> Result<(), tidegate::StoreError> {
    /// let sentinels = ["redis://10.0.0.1:26379", "redis://10.0.0.2:26379"];
    /// let store = RedisStore::sentinel("mymaster", sentinels).connect().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn sentinel(primary: &str, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Builder {
        Builder::new(Deployment::Sentinel { primary: primary.to_owned() }, urls)
    }

    /// Takes the user, password and TLS options of a builder for all connections to come, for
    /// example after a rotation of the password. Open connections go on, and so do the addresses
    /// and all other options of the store.
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`] if an option is invalid, or if the URLs of the builder are for
    /// connections with TLS and those of the store are not, or the other way round.
    ///
    /// ```no_run
    /// use tidegate::RedisStore;
    ///
    /// # async fn rotate() -> Result<(), Box<dyn std::error::Error>> {
    /// let builder = RedisStore::builder("redis://limiter@127.0.0.1:6379");
    /// let password = || std::fs::read_to_string("/run/secrets/redis");
    /// let store = builder.clone().password(password()?).connect().await?;
    /// // Later, when the file has changed:
    /// store.renew_credentials(&builder.password(password()?))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn renew_credentials(&self, builder: &Builder) -> Result<(), StoreError> {
        let (seeds, options) = builder.validate()?;
        let topology = self.shared.topology.state();
        if options.tls.is_some() != topology.options().tls.is_some() {
            let reason = "redis:// and rediss:// cannot replace each other while the store is in \
                          use: create another store";
            return Err(StoreError::Misconfigured(reason.to_owned()));
        }
        topology.renew(seeds, options);
        Ok(())
    }

    /// Announces several decisions of one caller: the first of them waits until the others have
    /// joined its call.
    #[doc(hidden)]
    pub fn expect_batch(&self) {
        for node in self.shared.topology.state().primaries() {
            node.queue().expect_batch();
        }
    }

    /// Returns the key under which Redis keeps the count of a charge.
    #[must_use]
    pub fn redis_key(&self, charge: &Charge<'_>) -> String {
        self.shared.redis_key(charge)
    }
}

impl Shared {
    fn redis_key(&self, charge: &Charge<'_>) -> String {
        let mut text = String::new();
        self.write_key(&mut text, charge);
        text
    }

    fn write_key(&self, text: &mut String, charge: &Charge<'_>) {
        write_redis_key(text, &self.prefix, charge.key(), &self.format_mark, charge.policy());
    }

    fn slot(charge: &Charge<'_>) -> u16 {
        slot_of_user_key(charge.key())
    }

    /// Returns whether one call to this node may reach keys of several slots.
    fn crosses_slots(&self, node: &NodeClient) -> bool {
        self.cross_slot && node.allows_cross_slot()
    }

    /// Decides a request on keys of one node. Requests for one node share calls.
    async fn decide(
        self: &Arc<Self>,
        request: &Request<'_>,
        started: Instant,
        delivery: Delivery,
    ) -> Result<RequestDecisions, CallError> {
        let Some(first) = request.charges.first() else {
            return Ok(RequestDecisions::Many(Vec::new()));
        };
        let (slot, deadline, topology) =
            (Self::slot(first), started + self.timeout, self.topology.state());
        let write_key = |text: &mut String, charge: &Charge<'_>| self.write_key(text, charge);
        let mut target = Target { node: topology.route(slot)?, delivery };
        let mut retries = None;
        loop {
            if target.node.circuit().is_open() {
                return Err(target.node.circuit().open_error().into());
            }
            let handle = if self.group_commit {
                match batch::queue::enqueue(self, &target, request, slot, deadline, write_key) {
                    Enqueued::Wait(handle) => handle,
                    // Boxed, so that the future of a caller that waits for a batch stays small.
                    Enqueued::Lead(leader) => Box::pin(leader.send()).await,
                }
            } else {
                let batch = Arc::<Batch>::default();
                let handle = batch.join(request, slot, target.delivery, deadline, write_key);
                Box::pin(dispatch(self, &target.node, &InFlightBatch(batch))).await;
                handle
            };
            let step = match handle.decisions(request).await {
                Ok(decisions) => return Ok(decisions),
                Err(step) => step,
            };
            // The circuit has counted the calls that failed, but not those to be repeated.
            let is_counted =
                matches!(step, NextStep::Fail(_) | NextStep::TimeOut | NextStep::AnswerLost);
            let retries = retries.get_or_insert(Retries::until(deadline, self.timeout, delivery));
            let node = Arc::clone(&target.node);
            target = match Box::pin(retries.follow(step, target, slot, topology)).await {
                Ok(next) => next,
                Err(CallError::Failed(error @ StoreError::NotPermitted(_))) => {
                    let refused = self.on_not_permitted(&node, error, deadline);
                    return Err(Box::pin(refused).await.into());
                }
                Err(error) => {
                    if let CallError::Failed(error) = &error
                        && !is_counted
                    {
                        self.record(&node, Err(error));
                    }
                    return Err(error);
                }
            };
        }
    }

    /// Returns the times of a call of these requests that is sent now.
    fn server_times(
        &self,
        clock: &ServerClock,
        deadline: Instant,
        requests: &EncodedRequests,
    ) -> ServerTimes {
        let own_now = requests.have_times().then_some(|| self.clock.now().as_micros());
        ServerTimes::new(clock, deadline, self.driven_time(), own_now)
    }

    /// Returns the time of the store's own clock.
    fn now(&self) -> Timestamp {
        self.driven_time().map_or_else(|| self.clock.now(), Timestamp::from_micros)
    }

    /// Returns the time of a test's manual clock.
    #[cfg(feature = "testing")]
    fn driven_time(&self) -> Option<u64> {
        self.driven_by.as_ref().map(|clock| clock.now().as_micros())
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the twin for tests uses it")]
    fn driven_time(&self) -> Option<u64> {
        None
    }
}

impl OnRuntime for RedisStore {
    fn runtime(&self) -> &Handle {
        &self.shared.runtime
    }

    fn call_timeout(&self) -> Duration {
        self.shared.timeout
    }
}

impl Store for RedisStore {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            let charges = std::slice::from_ref(charge);
            let request = Request::new(Operation::Apply(action), charges);
            let started = Instant::now();
            let invalidation = PendingInvalidation::of(&self.shared.publisher, action, charges);
            let decided = match self.shared.decide(&request, started, Delivery::Shared).await {
                Ok(decided) => decided.into_one(),
                Err(error) => Err(error.into_store_error()),
            };
            if let Some(invalidation) = invalidation {
                Box::pin(invalidation.publish(started + self.shared.timeout)).await;
            }
            decided
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            if matches!(action, Action::Refund | Action::Report) {
                // A refund may rewrite many members, and a request is never split.
                let decided =
                    charges.iter().map(|charge| self.decide(action, charge).into_future());
                return collect_independent(join_all(decided).await);
            }
            let started = Instant::now();
            let invalidation = PendingInvalidation::of(&self.shared.publisher, action, charges);
            let decided = batch::groups::decide_all(&self.shared, action, charges, started).await;
            if let Some(invalidation) = invalidation {
                Box::pin(invalidation.publish(started + self.shared.timeout)).await;
            }
            decided
        })
    }

    fn clock(&self) -> &dyn Clock {
        #[cfg(feature = "testing")]
        if let Some(clock) = &self.shared.driven_by {
            return clock;
        }
        &self.shared.clock
    }
}

impl SharedStore for RedisStore {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.shared.heartbeats.send(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        Some(async {
            let mut polled = self.shared.publisher.set.poll(since).await?;
            // A manual clock replaces the server's time in all scripts.
            polled.now = self.shared.driven_time().or(polled.now);
            Ok(polled)
        })
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.shared.topology.state().epoch_of(|| Shared::slot(charge))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.shared.prefix)
            .field("timeout", &self.shared.timeout)
            .finish_non_exhaustive()
    }
}
