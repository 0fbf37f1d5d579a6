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
//! background for a minute.
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
//!     +zscore +cluster|slots +asking +role
//! ```
//!
//! The user of the sentinels needs `+ping +sentinel|get-master-addr-by-name +sentinel|master
//! +sentinel|replicas`.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;

use self::batch::cross_slot::decide_all;
use self::batch::dispatch::Dispatcher;
pub(crate) use self::blocking::run_in_background;
pub use self::builder::Builder;
use self::builder::Deployment;
pub use self::client::restrictions::Restriction;
pub use self::client::stats::Distribution;
pub use self::client::tls::Tls;
pub use self::coordination::board::FleetBoard;
use self::coordination::heartbeat::Heartbeats;
use self::coordination::invalidation::{PendingInvalidation, Publisher};
pub use self::coordination::overrides::{
    OverrideChange, OverrideRecord, OverrideValue, Overrides, OverridesUpdate,
};
pub use self::coordination::probe::SCRIPT_COMMANDS;
pub use self::health::{NodeHealth, Reply};
use self::routing::slots::slot_of_charge;
use self::routing::step::Delivery;
use self::script::requests::{Operation, Request};
pub use self::script::{ClockSource, FORMAT};
use super::invalidation::{Cursor, Invalidations};
use super::{Action, Outcome, SharedStore, Store, StoreError, collect_independent};
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::join::join_all;

mod batch;
mod blocking;
mod builder;
mod client;
mod coordination;
mod health;
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
    dispatcher: Arc<Dispatcher>,
    publisher: Arc<Publisher>,
    heartbeats: Heartbeats,
    overrides: Overrides,
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
        let topology = self.dispatcher.topology();
        if options.tls.is_some() != topology.options().tls.is_some() {
            let reason = "redis:// and rediss:// cannot replace each other while the store is in \
                          use: create another store";
            return Err(StoreError::Misconfigured(reason.to_owned()));
        }
        topology.renew(seeds, options);
        Ok(())
    }

    /// Announces several decisions of one caller, which are started next: the first of them waits
    /// until the others have joined its call. Without it, a lone decision is sent at once.
    ///
    /// ```no_run
    /// use tidegate::{Action, Charge, RedisStore, Store, StoreError};
    ///
    /// async fn peek(store: &RedisStore, one: Charge<'_>, two: Charge<'_>) -> Result<(), StoreError> {
    ///     store.expect_batch();
    ///     let (one, two) = (store.decide(Action::Peek, &one), store.decide(Action::Peek, &two));
    ///     tokio::try_join!(one.into_future(), two.into_future())?;
    ///     Ok(())
    /// }
    /// ```
    pub fn expect_batch(&self) {
        for node in self.dispatcher.topology().primaries() {
            node.queue().expect_batch();
        }
    }

    /// Returns the overrides that instances of a service share.
    #[must_use]
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// Returns the version of the overrides that the last heartbeat of this store has read, and
    /// each later one: an empty text without any, and `None` before the first heartbeat. While
    /// there is a receiver, heartbeats read it.
    #[must_use]
    pub fn overrides_version(&self) -> watch::Receiver<Option<String>> {
        self.heartbeats.overrides.subscribe()
    }

    /// Returns the texts and events that the instances of a fleet show each other; `None` if
    /// heartbeats are off.
    #[must_use]
    pub fn fleet_board(&self) -> Option<FleetBoard<'_>> {
        FleetBoard::new(self.dispatcher.topology(), &self.dispatcher.prefix)
    }

    /// Returns the key under which Redis keeps the count of a charge.
    #[must_use]
    pub fn redis_key(&self, charge: &Charge<'_>) -> String {
        let mut key = String::new();
        self.dispatcher.write_key(&mut key, charge);
        key
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
            let invalidation = PendingInvalidation::of(&self.publisher, action, charges);
            let decided = match self.dispatcher.decide(&request, started, Delivery::Shared).await {
                Ok(decided) => decided.into_one(),
                Err(error) => Err(error.into_store_error()),
            };
            if let Some(invalidation) = invalidation {
                Box::pin(invalidation.publish(started + self.dispatcher.timeout)).await;
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
            let invalidation = PendingInvalidation::of(&self.publisher, action, charges);
            let decided =
                decide_all(&self.dispatcher, &self.publisher, action, charges, started).await;
            if let Some(invalidation) = invalidation {
                Box::pin(invalidation.publish(started + self.dispatcher.timeout)).await;
            }
            decided
        })
    }

    fn clock(&self) -> &dyn Clock {
        #[cfg(feature = "testing")]
        if let Some(clock) = &self.dispatcher.driven_by {
            return clock;
        }
        &self.dispatcher.clock
    }
}

impl SharedStore for RedisStore {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.heartbeats.send(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.publisher.set.has_readers().then_some(async {
            let mut polled = self.publisher.set.poll(since).await?;
            // A manual clock replaces the server's time in all scripts.
            polled.now = self.dispatcher.driven_time().or(polled.now);
            Ok(polled)
        })
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.dispatcher.topology().epoch_of(|| slot_of_charge(charge))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.dispatcher.prefix)
            .field("timeout", &self.dispatcher.timeout)
            .finish_non_exhaustive()
    }
}
