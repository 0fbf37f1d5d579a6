//! [`RedisStore`]: counts that a fleet shares, decided inside Redis by atomic Lua scripts.
//!
//! One decision is one round trip, however many charges it has; decisions that come while others
//! are under way go together in the next. The time is the server's, so clients' clocks never
//! matter.
//!
//! # Which Redis
//!
//! One server ([`RedisStore::builder`]), a cluster ([`RedisStore::cluster`]), or a primary that
//! sentinels name ([`RedisStore::sentinel`]); with `rediss://` by TLS. Failovers and moving slots
//! are followed.
//!
//! # When Redis is slow or gone
//!
//! No call takes longer than its timeout. A call that may have run is never sent again, and a
//! script that comes to run after its caller's deadline spends nothing. While a node is away its
//! calls fail at once; it is connected to again as soon as it is back.
//!
//! # Invalidations
//!
//! After each refund and reset the store publishes which count has units again, in a small sorted
//! set beside the counts, if there is a reader: a `DenyCache` (feature `resilience`) in another
//! process. Refunds at the same time share one call. A refund returns once its invalidation is
//! published, or its timeout has passed; it does not fail for it. What could not be published is
//! retried in the background for as long as a deny cache entry lives, five seconds.
//!
//! # What a Redis user must be allowed
//!
//! Nothing but this, for the prefix `rate_limit`; of the last three, `cluster|slots` and `asking`
//! only on a cluster, `role` only behind sentinels:
//!
//! ```text
//! ACL SETUSER tidegate on >password ~rate_limit:* +evalsha +script|load +time +unlink +get +getrange +hmget +hset
//!     +pexpireat +pttl +set +setrange +zadd +zcard +zcount +zrange +zrangebyscore +zrem +zremrangebyrank +zremrangebyscore
//!     +cluster|slots +asking +role
//! ```
//!
//! A user of the sentinels: `+ping +sentinel|get-master-addr-by-name +sentinel|master
//! +sentinel|replicas`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::batch::Outcome;
pub use self::builder::Builder;
use self::builder::Kind;
use self::call::{Call, Reply as Read, Setback};
pub use self::health::{NodeHealth, Reply};
use self::heartbeat::CachedInstances;
use self::news::PendingInvalidation;
use self::publisher::Publisher;
use self::queue::{Entrance, Turn, Way};
use self::requests::{Request, Requests, Verb, Verdicts};
use self::server_clock::{ServerClock, ServerTimes};
use self::slot::slot_of_counts;
pub use self::tls::Tls;
use self::topology::Topology;
use super::news::{Mark, News};
use super::{Action, Part, Store, StoreError};
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::decision::{Decision, Source};
use crate::key::write_redis_key;

mod access;
mod batch;
mod builder;
mod call;
mod fault;
mod groups;
mod health;
mod heartbeat;
mod link;
mod news;
mod probe;
mod publisher;
mod queue;
mod requests;
mod script;
mod server_clock;
mod slot;
mod stir;
mod tls;
mod topology;

/// Counts that all processes on one Redis, or one cluster, share.
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

/// What a refund needs that goes on after its caller has gone.
struct Shared {
    topology: Topology,
    publisher: Publisher,
    prefix: String,
    clock: SystemClock,
    timeout: Duration,
    group_commit: bool,
    instances: CachedInstances,
    /// Tests drive the script's time by this clock.
    #[cfg(feature = "testing")]
    driven_by: Option<crate::clock::ManualClock>,
}

impl RedisStore {
    /// Connects to the server at this URL, `redis://[user:password@]host[:port][/database]`, or
    /// `rediss://…` for TLS.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// A store on one server, with options. If the server turns out to be a node of a cluster, the
    /// cluster is used.
    #[must_use]
    pub fn builder(url: &str) -> Builder {
        Builder::new(Kind::Single, [url])
    }

    /// A store on a cluster, of which these are some nodes; the others are found.
    ///
    /// Charges of one key are decided together, as on one server. Charges of several keys may live
    /// in several slots: those of one node are decided at the same time, nodes in order, and if one
    /// charge denies, what the others spent is given back.
    #[must_use]
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Builder {
        Builder::new(Kind::Cluster, urls)
    }

    /// A store on the primary that the sentinels at these URLs know by this name.
    ///
    /// User and password in the URLs are for the sentinels, and for the primary too unless
    /// [`Builder::credentials`] has its own; so are `rediss://` and [`Builder::tls`]. The database
    /// is the primary's.
    #[must_use]
    pub fn sentinel(primary: &str, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Builder {
        Builder::new(Kind::Sentinel { primary: primary.to_owned() }, urls)
    }

    /// The key under which Redis keeps a charge's count.
    #[must_use]
    pub fn redis_key(&self, charge: &Charge<'_>) -> String {
        self.shared.redis_key(charge)
    }
}

impl Shared {
    fn redis_key(&self, charge: &Charge<'_>) -> String {
        let mut text = String::new();
        self.write_redis_key(&mut text, charge);
        text
    }

    fn write_redis_key(&self, text: &mut String, charge: &Charge<'_>) {
        write_redis_key(text, &self.prefix, charge.key(), charge.policy());
    }

    fn slot(charge: &Charge<'_>) -> u16 {
        slot_of_counts(charge.key())
    }

    /// Decides a request on keys of one slot (or of one server): by itself, or together with
    /// others.
    async fn decide(
        self: &Arc<Self>,
        request: &Request<'_>,
        started: Instant,
    ) -> Result<Verdicts, Setback> {
        let Some(first) = request.charges.first() else { return Ok(Verdicts::Several(Vec::new())) };
        let (slot, deadline) = (Self::slot(first), started + self.timeout);
        let mut together = self.group_commit;
        while together {
            let link = self.topology.known().route(slot)?;
            let ticket = match queue::enter(self, link, request, slot, deadline) {
                Entrance::Wait(ticket) => ticket,
                Entrance::Lead(lead) => match lead.go().await {
                    Way::Wait(ticket) => ticket,
                    Way::Alone(turn) => {
                        return Box::pin(self.decide_alone(request, slot, started, Some(turn)))
                            .await;
                    }
                },
            };
            match ticket.outcome(request).await {
                Outcome::Decided(verdicts) => return Ok(verdicts),
                Outcome::Failed(error) => return Err(error.into()),
                Outcome::Again if Instant::now() < deadline => {}
                Outcome::Again | Outcome::TimedOut => {
                    return Err(StoreError::Timeout(self.timeout).into());
                }
                Outcome::Alone => together = false,
            }
        }
        Box::pin(self.decide_alone(request, slot, started, None)).await
    }

    /// On the heap, for it is large: those who wait for others would carry it along.
    async fn decide_alone(
        &self,
        request: &Request<'_>,
        slot: u16,
        started: Instant,
        turn: Option<Turn>,
    ) -> Result<Verdicts, Setback> {
        let requests =
            Requests::one(request, slot, |text, charge| self.write_redis_key(text, charge));
        let call = Call { script: requests.script(&[0]), slot, started, timeout: self.timeout };
        let command = |clock: &ServerClock| {
            requests.command(&[0], |_| 1, &self.server_times(clock, started + self.timeout))
        };
        let read = |reply| {
            let answer = requests.read(&[0], |_| 1, reply)?;
            let Some(told) = answer.told.into_iter().flatten().next() else {
                return Ok((Some(answer.now), Read::Late));
            };
            Ok((Some(answer.now), Read::Answer(told.verdicts(request, 0)?)))
        };
        call.run(self.topology.known(), turn, command, read).await
    }

    /// The times of a call that is sent now.
    fn server_times(&self, clock: &ServerClock, deadline: Instant) -> ServerTimes {
        ServerTimes::new(clock, deadline, self.driven_time(), || self.clock.now().as_micros())
    }

    /// The time by the store's own clock.
    fn now(&self) -> Timestamp {
        self.driven_time().map_or_else(|| self.clock.now(), Timestamp::from_micros)
    }

    /// The script's time, if tests drive it.
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

impl Store for RedisStore {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let charges = std::slice::from_ref(charge);
        let request = Request { verb: Verb::Do(action), charges };
        let started = Instant::now();
        let invalidation = PendingInvalidation::of(&self.shared, action, charges);
        let decided = match self.shared.decide(&request, started).await {
            Ok(verdicts) => Ok(verdicts.first(charge).into_decision(charge.quota(), Source::Store)),
            Err(setback) => Err(setback.into_store_error()),
        };
        if let Some(invalidation) = invalidation {
            Box::pin(invalidation.publish(started + self.shared.timeout)).await;
        }
        decided
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let started = Instant::now();
        let invalidation = PendingInvalidation::of(&self.shared, action, charges);
        let decided = groups::decide_all(&self.shared, action, charges, started).await;
        if let Some(invalidation) = invalidation {
            Box::pin(invalidation.publish(started + self.shared.timeout)).await;
        }
        decided
    }

    fn clock(&self) -> &dyn Clock {
        #[cfg(feature = "testing")]
        if let Some(clock) = &self.shared.driven_by {
            return clock;
        }
        &self.shared.clock
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        self.shared.part(charge)
    }

    async fn probe(&self, part: Part) -> Result<(), StoreError> {
        self.shared.probe(part).await
    }

    async fn announce(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.shared.announce(instance).await
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        Some(self.shared.news(since))
    }

    fn epoch(&self) -> u64 {
        self.shared.topology.known().epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.shared.topology.known().epoch_of(|| Shared::slot(charge))
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
