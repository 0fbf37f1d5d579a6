//! [`DenyCache`]: a denial by the store holds until its `retry_after`, and is answered here until then.
//!
//! Units come back earlier only by a refund, a reset or a raised limit. The first two drop the
//! entries of the counts that they touch: through this instance at once, through others by the
//! [invalidations](Store::news), which are polled several times a second while entries are in use.
//! Entries are ignored once the last successful poll is older than a second, and live for five
//! seconds at most. A raised limit is another quota, and an entry holds for the very quota that it
//! was made by.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use self::table::{Companions, Denial, Found, Left, Name, Query, Table, Ticket};
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::{Clock, micros};
use crate::decision::{Decision, Source};
use crate::store::in_order::Owned;
use crate::store::news::{CountId, Mark, News};
use crate::store::{Action, Part, Store, StoreError};

mod follow;
mod table;

/// The longest life of an entry, whatever its `retry_after`: bounds how long a lost invalidation
/// has an effect.
pub(crate) const MAX_ENTRY_TTL: Duration = Duration::from_secs(5);

/// How long a denial that counts is answered from here. Then the denials of that time are recorded
/// in the store.
pub(crate) const COUNTED_DENIAL_TTL: Duration = Duration::from_millis(100);

/// What is left of the other charges is remembered for requests of up to so many.
const MOST_COMPANIONS: usize = 8;

/// A store around a store that answers a denial again, without asking, for as long as it surely
/// holds.
///
/// Who is denied and keeps asking then costs the store nothing. An answer from here has
/// [`Source::DenyCache`]; its `retry_after` and `reset_after` go down as time goes by, its
/// `remaining` is what the store told (of a bucket, what has come back since is in it). What this
/// instance admits meanwhile, to who asks for less, makes it ask the store again; of what others
/// admit it does not know: then the wait that it tells may be too short.
///
/// * It answers acquires and peeks of the same key, policy and quota, for the cost that was denied,
///   and for less time than the store said, so that no answer could have been an admission. (Who
///   asks for ever other costs is answered by the denial of a lower one.)
/// * A request of several charges is denied if one of them is. What is left of the others is then
///   what the store told when it denied the same request; if it never did, they are told as
///   untouched.
/// * A denial by a quota that counts denied requests is answered from here for up to 100 ms, and
///   its `retry_after` does not go down: each denial counts. The store records those of the last
///   100 ms before it is asked again, at most the limit.
/// * A refund or a reset through this store is seen at once. One through any other that shares the
///   counts is seen within a second of its end, by the [news](Store::news) that a `RedisStore` has
///   of them. While news cannot be read, the store is asked. So is it if news would have to be
///   read, but there is no Tokio runtime to read them on.
/// * A change without an invalidation is not seen before the entry ends, after five seconds at
///   most: a call to the memory store within this cache, a key that is deleted in Redis by hand,
///   another quota on the same count in another process. (A store that was emptied, or that lost
///   invalidations with its other writes in a failover, is noticed.)
/// * The entry of a bucket goes on being used when its time has come: this instance asks the store
///   for as many units as can be available by then, and denies the rest.
/// * It holds a fixed number of denials. What is of no use lately makes room for what is new.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, DenyCache, Limiter, MemoryStore, Quota, Source};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(DenyCache::new(MemoryStore::new())); // or RedisStore::connect(…)
/// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota);
///
/// assert!(limiter.acquire(&charge).await?.allowed);
/// assert_eq!(limiter.acquire(&charge).await?.source, Source::Store);
/// assert_eq!(limiter.acquire(&charge).await?.source, Source::DenyCache);
/// limiter.refund(&charge).await?;
/// assert!(limiter.acquire(&charge).await?.allowed);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DenyCache<S> {
    inner: Arc<Inner<S>>,
}

#[derive(Debug)]
struct Inner<S> {
    store: S,
    table: Table,
    /// Whether others can free counts, and the store tells of it.
    has_news: bool,
    /// Until then what is in the table may be believed, by the store's clock.
    trusted_until: AtomicU64,
    /// Whether it was of use lately.
    used: AtomicBool,
    follower: Mutex<Option<AbortHandle>>,
}

/// Options of a [`DenyCache`].
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    max_entries: usize,
}

impl<S: Store> Builder<S> {
    /// How many denials it holds; 100,000 by default, which take some 13 MB. With 0 it never
    /// answers.
    #[must_use]
    pub fn max_entries(mut self, entries: usize) -> Self {
        self.max_entries = entries;
        self
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> DenyCache<S> {
        let has_news = self.store.news(&Mark::default()).is_some();
        let inner = Inner {
            store: self.store,
            table: Table::new(self.max_entries),
            has_news,
            trusted_until: AtomicU64::new(if has_news { 0 } else { u64::MAX }),
            used: AtomicBool::new(false),
            follower: Mutex::default(),
        };
        DenyCache { inner: Arc::new(inner) }
    }
}

impl<S: Store> DenyCache<S> {
    /// An empty cache around this store.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// A cache with options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        Builder { store, max_entries: 100_000 }
    }

    /// The store within.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// How many denials it holds, some of which may have expired.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.inner.table.entries()
    }

    /// Forgets every denial.
    pub fn clear(&self) {
        self.inner.table.clear();
    }
}

/// What is known of a charge before the store is asked.
enum Known<T> {
    /// A denial that holds.
    Denied(T),
    /// Nothing; and what a denial is kept with.
    Asked { tickets: Tickets, sent: u64, unrecorded: Unrecorded },
}

/// Units of denials that count, answered from here, which the store must record before it is asked:
/// with the position of their charge.
type Unrecorded = Vec<(usize, u64)>;

/// Of one charge, as nearly always, without a list.
enum Tickets {
    One(Ticket),
    Several(Vec<Ticket>),
    /// Whatever the store says is not kept.
    None,
}

impl<S: Store> Inner<S> {
    fn now(&self) -> u64 {
        self.store.clock().now().as_micros()
    }

    fn query<'a>(
        &self,
        action: Action,
        name: Name,
        charge: &'a Charge<'a>,
        now: u64,
        request: Option<u128>,
    ) -> Query<'a> {
        let epoch = self.store.epoch_of(charge);
        Query { name, charge, epoch, now, request, spends: action == Action::Acquire }
    }

    /// As the table does, but nothing is found there while entries are stale.
    fn find(&self, query: &Query<'_>) -> Found {
        if self.is_trusted(query.now) {
            self.table.find(query)
        } else {
            Err(self.table.ticket(query))
        }
    }

    fn is_trusted(&self, now: u64) -> bool {
        now < self.trusted_until.load(Ordering::Acquire)
    }

    /// What is done before the store is asked.
    fn before(self: &Arc<Self>, action: Action, charge: &Charge<'_>) -> Known<Decision> {
        let name = self.table.name(charge);
        let sent = self.now();
        if !may_be_kept(action, std::slice::from_ref(charge)) {
            self.ask_by(action, [name]);
            return Known::Asked { tickets: Tickets::None, sent, unrecorded: Vec::new() };
        }
        let query = self.query(action, name, charge, sent, None);
        match self.find(&query) {
            Ok((denied, _)) => {
                self.count_denial(action, &query);
                self.was_used();
                Known::Denied(denied)
            }
            Err(ticket) => {
                let unrecorded =
                    self.take_unrecorded(action, std::slice::from_ref(charge), &[name]);
                self.ask_by(action, [name]);
                Known::Asked { tickets: Tickets::One(ticket), sent, unrecorded }
            }
        }
    }

    fn before_all(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Known<Vec<Decision>> {
        let names: Vec<Name> = charges.iter().map(|charge| self.table.name(charge)).collect();
        let sent = self.now();
        if !may_be_kept(action, charges) {
            self.ask_by(action, names);
            return Known::Asked { tickets: Tickets::None, sent, unrecorded: Vec::new() };
        }
        let request = self.table.request(charges, names.iter().copied());
        let query = |at: usize| self.query(action, names[at], &charges[at], sent, Some(request));
        let mut tickets = Vec::with_capacity(charges.len());
        let mut denied: Vec<Option<Decision>> = vec![None; charges.len()];
        let mut left: Option<Vec<Left>> = None;
        for (at, denied) in denied.iter_mut().enumerate() {
            match self.find(&query(at)) {
                Ok((decision, companions)) => {
                    *denied = Some(decision);
                    left = left.or(companions);
                }
                Err(ticket) => tickets.push(ticket),
            }
        }
        // A charge that counts denials must be known to be denied, or the store has to say whether
        // it counts this one.
        let is_known = |(charge, denied): (&Charge<'_>, &Option<Decision>)| {
            denied.is_some() || action == Action::Peek || !charge.quota().count_denied()
        };
        if denied.iter().all(Option::is_none) || !charges.iter().zip(&denied).all(is_known) {
            if tickets.len() < charges.len() {
                tickets = (0..charges.len()).map(|at| self.table.ticket(&query(at))).collect();
            }
            let unrecorded = self.take_unrecorded(action, charges, &names);
            self.ask_by(action, names);
            return Known::Asked { tickets: Tickets::Several(tickets), sent, unrecorded };
        }
        for (at, _) in denied.iter().enumerate().filter(|(_, denied)| denied.is_some()) {
            self.count_denial(action, &query(at));
        }
        self.was_used();
        let others = |(at, denied): (usize, Option<Decision>)| {
            let untouched = || {
                RawDecision::untouched(charges[at].quota())
                    .into_decision(charges[at].quota(), Source::DenyCache)
            };
            denied.unwrap_or_else(|| match &left {
                Some(left) => left[at].decision(&charges[at], sent),
                None => untouched(),
            })
        };
        Known::Denied(denied.into_iter().enumerate().map(others).collect())
    }

    /// A denial from here of a quota that counts denials. The first one starts the timer that
    /// records them.
    fn count_denial(self: &Arc<Self>, action: Action, query: &Query<'_>) {
        if action != Action::Acquire
            || !query.charge.quota().count_denied()
            || !self.table.count_denial(query)
        {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        let (inner, name, owned) = (Arc::downgrade(self), query.name, Owned::of(query.charge));
        runtime.spawn(async move {
            sleep(COUNTED_DENIAL_TTL).await;
            let Some(inner) = inner.upgrade() else { return };
            let units = inner.table.take_unrecorded(name);
            inner.record(&owned.charge(), units).await;
        });
    }

    /// The store is about to be asked: what it must record before.
    fn take_unrecorded(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        names: &[Name],
    ) -> Unrecorded {
        let counts =
            |charge: &Charge<'_>| action == Action::Acquire && charge.quota().count_denied();
        let counted =
            charges.iter().zip(names).enumerate().filter(|(_, (charge, _))| counts(charge));
        counted
            .map(|(at, (_, name))| (at, self.table.take_unrecorded(*name)))
            .filter(|(_, units)| *units > 0)
            .collect()
    }

    /// Records denials that were answered from here. A full log is full: more units than its limit
    /// change nothing.
    async fn record(&self, charge: &Charge<'_>, units: u64) {
        let charge = charge.with_cost(units.min(charge.quota().limit()));
        if units > 0
            && let Err(error) = self.store.decide(Action::Report, &charge).await
        {
            tracing::debug!(%error, units, "recording denials failed");
        }
    }

    /// On the heap, because it is rarely needed.
    fn record_all<'a>(
        &'a self,
        charges: &'a [Charge<'a>],
        unrecorded: Unrecorded,
    ) -> Option<Pin<Box<impl Future<Output = ()> + use<'a, S>>>> {
        (!unrecorded.is_empty()).then(|| {
            Box::pin(async move {
                for (at, units) in unrecorded {
                    self.record(&charges[at], units).await;
                }
            })
        })
    }

    /// The store is about to be asked by these quotas.
    fn ask_by(&self, action: Action, names: impl IntoIterator<Item = Name>) {
        match action {
            Action::Acquire => {
                names.into_iter().for_each(|name| self.table.forget_other_quotas(name))
            }
            // It takes units that denials did not know of: their waits are too short.
            Action::ChargeUpTo | Action::Report => {
                names.into_iter().for_each(|name| self.table.forget(name.count()))
            }
            _ => {}
        }
    }

    /// The store has answered.
    fn after(
        self: &Arc<Self>,
        action: Action,
        sent: u64,
        tickets: &[Ticket],
        charges: &[Charge<'_>],
        decisions: &[Decision],
    ) {
        let is_denial = |decision: &Decision| !decision.allowed && decision.source == Source::Store;
        if tickets.is_empty() || !decisions.iter().any(is_denial) {
            if action == Action::Acquire && decisions.iter().all(|decision| decision.allowed) {
                for (ticket, charge) in tickets.iter().zip(charges) {
                    self.table.admitted(*ticket, charge);
                }
            }
            return;
        }
        let received = self.now().max(sent);
        // The one that holds longest knows what was left of the others.
        let longest = (0..decisions.len()).filter(|at| is_denial(&decisions[*at]));
        let longest = longest.max_by_key(|at| decisions[*at].retry_after);
        for (at, (charge, decision)) in charges.iter().zip(decisions).enumerate() {
            if is_denial(decision) {
                let companions = (Some(at) == longest
                    && (2..=MOST_COMPANIONS).contains(&charges.len()))
                .then(|| Box::new(self.companions(tickets, charges, decisions, received)));
                let denial =
                    Denial { cost: charge.cost(), decision: *decision, sent, received, companions };
                self.table.keep(tickets[at], charge.quota(), denial);
            }
        }
        self.was_used();
        if self.has_news && !self.is_trusted(received) {
            self.follow_news();
        }
    }

    fn companions(
        &self,
        tickets: &[Ticket],
        charges: &[Charge<'_>],
        decisions: &[Decision],
        received: u64,
    ) -> Companions {
        let reset_at = |decision: &Decision| received.saturating_add(micros(decision.reset_after));
        let left = |decision: &Decision| Left {
            remaining: decision.remaining,
            reset_at: reset_at(decision),
        };
        Companions {
            request: self.table.request(charges, tickets.iter().map(|ticket| ticket.name)),
            left: decisions.iter().map(left).collect(),
        }
    }

    /// Written by everybody, so only where it says something new.
    fn was_used(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Sees to it that news are read, if there is a runtime to do so on.
    fn follow_news(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut follower = self.follower.lock().unwrap_or_else(PoisonError::into_inner);
        // The runtime that it ran on may have ended.
        if follower.as_ref().is_none_or(AbortHandle::is_finished) {
            *follower = Some(runtime.spawn(follow::news(Arc::downgrade(self))).abort_handle());
        }
    }
}

/// Whether a denial of this request may be answered again. One that counts must be recorded later,
/// by a task.
fn may_be_kept(action: Action, charges: &[Charge<'_>]) -> bool {
    matches!(action, Action::Acquire | Action::Peek)
        && (!charges.iter().any(|charge| charge.quota().count_denied())
            || Handle::try_current().is_ok())
}

/// While units are given back, or a count is forgotten: denials of it are forgotten before, and
/// after, for one may have been asked for in between. Even if the caller goes away meanwhile.
struct Freeing<'a> {
    table: &'a Table,
    charges: &'a [Charge<'a>],
}

impl<'a> Freeing<'a> {
    fn begin<S>(inner: &'a Inner<S>, action: Action, charges: &'a [Charge<'a>]) -> Option<Self> {
        if !matches!(action, Action::Refund | Action::Reset) {
            return None;
        }
        let freeing = Self { table: &inner.table, charges };
        freeing.forget();
        Some(freeing)
    }

    fn forget(&self) {
        self.charges.iter().for_each(|charge| self.table.forget(CountId::of(charge)));
    }
}

impl Drop for Freeing<'_> {
    fn drop(&mut self) {
        self.forget();
    }
}

/// A request that is counted in an entry while it is in flight. Without an answer of the store,
/// even because the caller goes away, the entry is dropped.
struct CountedAsk<'a> {
    table: &'a Table,
    ticket: Option<&'a Ticket>,
}

impl<'a> CountedAsk<'a> {
    fn begin(table: &'a Table, tickets: &'a Tickets) -> Self {
        Self { table, ticket: tickets.as_slice().first().filter(|ticket| ticket.counted) }
    }

    fn answered(mut self, decision: &Decision) {
        if decision.source == Source::Store {
            self.ticket = None;
        }
    }
}

impl Drop for CountedAsk<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.table.unanswered(*ticket);
        }
    }
}

impl<S: Store> Store for DenyCache<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let inner = &self.inner;
        let (tickets, sent, unrecorded) = match inner.before(action, charge) {
            Known::Denied(decision) => return Ok(decision),
            Known::Asked { tickets, sent, unrecorded } => (tickets, sent, unrecorded),
        };
        if let Some(record) = inner.record_all(std::slice::from_ref(charge), unrecorded) {
            record.await;
        }
        let freeing = Freeing::begin(inner, action, std::slice::from_ref(charge));
        let counted = CountedAsk::begin(&inner.table, &tickets);
        let decision = inner.store.decide(action, charge).await?;
        counted.answered(&decision);
        drop(freeing);
        let decisions = std::slice::from_ref(&decision);
        inner.after(action, sent, tickets.as_slice(), std::slice::from_ref(charge), decisions);
        Ok(decision)
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        let (tickets, sent, unrecorded) = match inner.before_all(action, charges) {
            Known::Denied(decisions) => return Ok(decisions),
            Known::Asked { tickets, sent, unrecorded } => (tickets, sent, unrecorded),
        };
        if let Some(record) = inner.record_all(charges, unrecorded) {
            record.await;
        }
        let freeing = Freeing::begin(inner, action, charges);
        let decisions = inner.store.decide_all(action, charges).await?;
        drop(freeing);
        inner.after(action, sent, tickets.as_slice(), charges, &decisions);
        Ok(decisions)
    }

    fn clock(&self) -> &dyn Clock {
        self.inner.store.clock()
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        self.inner.store.part(charge)
    }

    async fn probe(&self, part: Part) -> Result<(), StoreError> {
        self.inner.store.probe(part).await
    }

    async fn announce(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.inner.store.announce(instance).await
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        self.inner.store.news(since)
    }

    fn epoch(&self) -> u64 {
        self.inner.store.epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.inner.store.epoch_of(charge)
    }
}

impl Tickets {
    fn as_slice(&self) -> &[Ticket] {
        match self {
            Self::One(ticket) => std::slice::from_ref(ticket),
            Self::Several(tickets) => tickets,
            Self::None => &[],
        }
    }
}

impl<S> Drop for DenyCache<S> {
    fn drop(&mut self) {
        if let Some(follower) =
            self.inner.follower.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            follower.abort();
        }
    }
}
