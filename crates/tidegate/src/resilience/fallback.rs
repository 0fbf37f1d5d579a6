//! [`Fallback`]: decides in the place of a store that cannot, by each charge's own word for that case.
//!
//! `local` is this process's memory with this instance's share of the quota. What it admits is owed
//! to the store, and charged to it when it is back, so that a store which comes and goes is no
//! loophole: a key that owes has to find room for its debt and its request; and what the store
//! admits to a key that was decided locally in the last window takes from this instance's share,
//! too.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use self::owed::{Busy, Debt, Owed};
use super::fleet::{Fleet, Heartbeat};
use super::jittered;
use crate::algorithm::Algorithm;
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::{Decision, Source};
use crate::policy::OnStoreFailure;
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::news::{Mark, News};
use crate::store::{Action, Part, Store, StoreError};

mod instead;
mod owed;
mod repay;

/// A store around a store that answers when the inner one cannot: by [`Charge::on_store_failure`].
///
/// | the charge says | answer while the store fails | [`Source`] |
/// | --- | --- | --- |
/// | `local` | by this instance's [share](Fleet::share), in memory | `Local` |
/// | `allow` | allowed | `Allow` |
/// | `deny` | denied, to be tried again in a second | `Deny` |
///
/// Several charges stay all or nothing, whatever each says. A cost above the instance's share is
/// denied.
///
/// * A refund of what was admitted locally, and is not yet charged to the store, is made locally.
///   Any other is the store's error.
/// * A reset also forgets what is kept here. If the store fails, it is the store's error, for the
///   count is still there.
/// * [`StoreError::Full`] is the error of memory, which other memory is no help for: only `allow`
///   and `deny` are answered. [`StoreError::Misconfigured`] is returned.
///
/// It sends heartbeats of this instance through the store, and charges what is owed, on the Tokio
/// runtime that it is made and used in. Outside of one it does neither.
///
/// # Lost answers
///
/// After [`StoreError::Timeout`] it is not known whether the store has counted the call. The
/// request is decided locally, and if it is admitted its units are owed, so the store may count it
/// twice: at most the units of each lost call. That key is then decided locally until its debt is
/// settled, so no further call can count the debt once more. Counting twice only makes the store
/// deny earlier; it never admits more.
#[derive(Debug)]
pub struct Fallback<S: Store> {
    inner: Arc<Inner<S>>,
    _heartbeat: Option<Heartbeat>,
}

#[derive(Debug)]
struct Inner<S> {
    store: Arc<S>,
    local: MemoryStore,
    fleet: Fleet,
    owed: Owed,
    trouble: Trouble,
    counters: Counters,
}

/// What is known of the store's failures.
#[derive(Debug)]
struct Trouble {
    /// From the first failure until all is calm.
    on: AtomicBool,
    failures: AtomicU64,
    /// When an answer was last given in the store's place, by the local clock; 0: never.
    last: AtomicU64,
    /// The part that failed last.
    part: AtomicU64,
    repaying: AtomicBool,
    /// How often what is owed was gone through.
    passes: AtomicU64,
    episode: Mutex<Episode>,
}

#[derive(Debug)]
struct Episode {
    since: Instant,
    local_before: u64,
    repaid_before: u64,
    /// The reasons that were logged.
    told: Vec<String>,
    recovery: Option<AbortHandle>,
}

/// So many different reasons of one episode are logged, each once.
const REASONS_TOLD: usize = 4;

#[derive(Debug, Default)]
struct Counters {
    local: AtomicU64,
    allow: AtomicU64,
    deny: AtomicU64,
    repaid: AtomicU64,
}

/// What a [`Fallback`] has done so far, and does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Whether the store fails, or has failed within the last second.
    pub falling_back: bool,
    /// Acquires decided by this instance's share.
    pub local: u64,
    /// Acquires let pass.
    pub allow: u64,
    /// Acquires denied by the word of their charge.
    pub deny: u64,
    /// Keys that owe units to the store.
    pub owed_keys: usize,
    /// The units that they owe at most; what has left its window meanwhile is not charged.
    pub owed_units: u64,
    /// Units charged to the store afterwards.
    pub repaid_units: u64,
    /// Units admitted beyond the cap on keys that may owe. They are never charged.
    pub dropped_units: u64,
}

/// Options of a [`Fallback`].
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    local: Option<MemoryStore>,
    fleet: Option<Fleet>,
    max_owed: usize,
}

impl<S: Store> Builder<S> {
    /// The memory to decide in; an empty one by default.
    #[must_use]
    pub fn local(mut self, memory: MemoryStore) -> Self {
        self.local = Some(memory);
        self
    }

    /// The instances to share with. By default they are found through the store, from one on.
    #[must_use]
    pub fn fleet(mut self, fleet: Fleet) -> Self {
        self.fleet = Some(fleet);
        self
    }

    /// How many keys may owe; 100,000 by default.
    #[must_use]
    pub fn max_owed(mut self, keys: usize) -> Self {
        self.max_owed = keys;
        self
    }

    /// The store, with its heart beating if there is a Tokio runtime.
    #[must_use]
    pub fn build(self) -> Fallback<S> {
        let store = Arc::new(self.store);
        let fleet = self.fleet.unwrap_or_default();
        let heartbeat =
            Handle::try_current().ok().map(|runtime| fleet.keep_alive_on(&runtime, &store));
        let episode = Episode {
            since: Instant::now(),
            local_before: 0,
            repaid_before: 0,
            told: Vec::new(),
            recovery: None,
        };
        let trouble = Trouble {
            on: AtomicBool::new(false),
            failures: AtomicU64::new(0),
            last: AtomicU64::new(0),
            part: AtomicU64::new(0),
            repaying: AtomicBool::new(false),
            passes: AtomicU64::new(0),
            episode: Mutex::new(episode),
        };
        let inner = Inner {
            store,
            local: self.local.unwrap_or_default(),
            fleet,
            owed: Owed::new(self.max_owed),
            trouble,
            counters: Counters::default(),
        };
        Fallback { inner: Arc::new(inner), _heartbeat: heartbeat }
    }
}

impl<S: Store> Fallback<S> {
    /// A fallback around this store, with the default options.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// A fallback with options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        Builder { store, local: None, fleet: None, max_owed: 100_000 }
    }

    /// The store within.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// The memory that decides in its place.
    #[must_use]
    pub fn local(&self) -> &MemoryStore {
        &self.inner.local
    }

    /// The instances that it shares with.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.inner.fleet
    }

    /// What it has done so far, and does now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Inner { owed, trouble, counters, .. } = &*self.inner;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            falling_back: trouble.on.load(Ordering::Relaxed),
            local: load(&counters.local),
            allow: load(&counters.allow),
            deny: load(&counters.deny),
            owed_keys: owed.keys(),
            owed_units: owed.units(),
            repaid_units: load(&counters.repaid),
            dropped_units: owed.dropped(),
        }
    }

    /// Charges to the store what is owed and fits, without waiting for the background to do so:
    /// before a shutdown, say. How many units that were.
    pub async fn repay(&self) -> u64 {
        self.inner.repay().await.repaid
    }
}

impl<S: Store> Inner<S> {
    /// Asks the store. A key that owes has to find room for its debt as well, and pays it by the
    /// way.
    async fn ask(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        if self.owed.is_empty() || !matches!(action, Action::Acquire | Action::Peek) {
            return self.store.decide_all(action, charges).await;
        }
        let now = self.local.clock().now().as_micros();
        // Who only looks pays nothing, so there is nothing to claim.
        let busy = action == Action::Peek && self.owed.is_busy(charges, now);
        let claimed = if busy { Err(Busy) } else { self.owed.claim(charges, now) };
        let Ok(mut claims) = claimed else { return self.without_asking(action, charges) };
        if claims.debts.is_empty() {
            return self.store.decide_all(action, charges).await;
        }
        let mut with_debts = charges.to_vec();
        let mut fits = true;
        for claim in &mut claims.debts {
            let charge = &charges[claim.place];
            claim.debt.units = self.still_counting(&claim.debt);
            with_debts[claim.place] =
                charge.with_cost(charge.cost().saturating_add(claim.debt.units));
            fits &= with_debts[claim.place].cost() <= charge.quota().burst();
        }
        if !fits {
            // Whatever the store counts: what was admitted here leaves no room. The local counts
            // know it, and until when.
            drop(claims);
            return self.without_asking(action, charges);
        }
        // Until its answer is here, the store may have counted the debts: also if this future is
        // dropped.
        let spends = action == Action::Acquire;
        claims.debts.iter_mut().for_each(|claim| claim.debt.in_doubt = spends);
        let decided = self.store.decide_all(action, &with_debts).await;
        let in_doubt = spends && decided.as_ref().is_err_and(may_have_run);
        claims.debts.iter_mut().for_each(|claim| claim.debt.in_doubt = in_doubt);
        let mut decisions = decided?;
        let spent = decisions.iter().all(|decision| decision.allowed);
        for claim in &mut claims.debts {
            let decision = &mut decisions[claim.place];
            let paying = claim.debt.units;
            if !spent {
                decision.remaining = decision.remaining.saturating_sub(paying);
            } else if action == Action::Acquire {
                claim.debt.units = 0;
                self.counters.repaid.fetch_add(paying, Ordering::Relaxed);
            }
        }
        Ok(decisions)
    }

    /// The store is there, but what it has room for is not known, or surely too little: the
    /// charges' own word, as without it.
    fn without_asking(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.trouble.last.store(self.local.clock().now().as_micros().max(1), Ordering::Relaxed);
        self.decide_here(action, charges, false)
    }

    /// Returns the units of a debt that still count: those that have left the window, or drained,
    /// are not owed any more.
    fn still_counting(&self, debt: &Debt) -> u64 {
        let charge = debt.charge();
        let quota = self.counting_quota(&charge);
        let look =
            self.local.decide_now(Action::ChargeUpTo, &charge.with_quota(&quota).with_cost(0));
        look.map_or(debt.units, |found| debt.units.min(quota.burst() - found.remaining))
    }

    /// Returns the quota by which units are added to a local count, and counted, beside decisions.
    /// Its capacity is the full quota's: the share changes with the fleet, and a smaller one would
    /// cut off what is there. A bucket drains by the share.
    fn counting_quota<'a>(&self, charge: &Charge<'a>) -> Cow<'a, Quota> {
        let quota = charge.quota();
        let share = match quota.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.share(charge),
            Algorithm::SlidingLog | Algorithm::SlidingCounter | Algorithm::FixedWindow => None,
        };
        let slower = share.map(|share| quota.scaled_to(share.limit(), quota.burst()));
        // A bucket with the longest drain time has no slower one of the same capacity.
        slower
            .filter(|slower| slower.burst() == quota.burst())
            .map_or(Cow::Borrowed(quota), Cow::Owned)
    }

    fn share(&self, charge: &Charge<'_>) -> Option<Quota> {
        self.fleet.share(charge.quota(), charge.policy(), charge.key())
    }

    /// Takes units that the store admitted from the local share as well, if the key has a local
    /// count. Otherwise a store that fails once per window would admit twice the limit in each.
    ///
    /// A key without a local count was not decided here for a window at least, so its first failure
    /// is still ahead: that one may admit the share, and the store has admitted no more than the
    /// limit, which is 2 L in that window. From then on the key has a local count. Memory stays
    /// bounded by the keys that were decided locally.
    fn mirror(&self, action: Action, charges: &[Charge<'_>], decisions: &[Decision]) {
        let last = self.trouble.last.load(Ordering::Relaxed);
        if last == 0 || action != Action::Acquire || self.local.keys() == 0 {
            return;
        }
        if decisions.iter().any(|decision| !decision.allowed) {
            return;
        }
        let now = self.local.clock().now().as_micros();
        let by_store =
            charges.iter().zip(decisions).filter(|(_, decision)| decision.source == Source::Store);
        for (charge, _) in
            by_store.filter(|(charge, _)| charge.on_store_failure() == OnStoreFailure::Local)
        {
            let quota = charge.quota();
            let recent =
                now < last.saturating_add(2 * quota.window_micros().max(quota.drain_micros()));
            if recent && self.local.has_count(charge) {
                self.local.charge_if_present(&charge.with_quota(&self.counting_quota(charge)));
            }
        }
    }

    /// The store could not decide.
    fn failed(self: &Arc<Self>, charge: &Charge<'_>, error: &StoreError) {
        let trouble = &self.trouble;
        trouble.last.store(self.local.clock().now().as_micros().max(1), Ordering::Relaxed);
        trouble.part.store(self.store.part(charge).0, Ordering::Relaxed);
        let failures = trouble.failures.fetch_add(1, Ordering::SeqCst);
        let begins = !trouble.on.swap(true, Ordering::SeqCst);
        let reason = match error {
            StoreError::Open(reason) => reason,
            error => error,
        };
        // Of the many calls that a breaker answers, only some have to be looked at. (The reason may
        // have become another; and the runtime that the recovery ran on may have ended.)
        let told_already = matches!(error, StoreError::Open(_)) && !failures.is_multiple_of(64);
        if !begins && told_already {
            return;
        }
        let mut episode = trouble.episode.lock().unwrap_or_else(PoisonError::into_inner);
        if begins {
            episode.since = Instant::now();
            episode.local_before = self.counters.local.load(Ordering::Relaxed);
            episode.repaid_before = self.counters.repaid.load(Ordering::Relaxed);
            episode.told.clear();
        }
        let reason = reason.to_string();
        if episode.told.len() < REASONS_TOLD && !episode.told.contains(&reason) {
            let instances = self.fleet.size();
            let still = if begins { "" } else { "still " };
            tracing::warn!(reason, instances, "the store {still}cannot decide: falling back");
            episode.told.push(reason);
        }
        if episode.recovery.as_ref().is_none_or(AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            episode.recovery =
                Some(runtime.spawn(repay::recover(Arc::downgrade(self))).abort_handle());
        }
    }

    /// All is calm, unless there was a failure that the caller has not seen. True if nothing is
    /// left to do.
    fn end_episode(&self, failures_seen: u64) -> bool {
        let mut episode = self.trouble.episode.lock().unwrap_or_else(PoisonError::into_inner);
        let was_on = self.trouble.on.swap(false, Ordering::SeqCst);
        // Who fails counts first and looks at the flag after, so one of us two sees the other.
        if self.trouble.failures.load(Ordering::SeqCst) != failures_seen {
            self.trouble.on.store(was_on, Ordering::SeqCst);
            return false;
        }
        if was_on {
            let lasted = episode.since.elapsed();
            let local = self.counters.local.load(Ordering::Relaxed) - episode.local_before;
            let repaid = self.counters.repaid.load(Ordering::Relaxed) - episode.repaid_before;
            tracing::info!(
                ?lasted,
                local,
                repaid,
                owed = self.owed.units(),
                "the store decides again"
            );
        }
        let done = self.owed.is_empty();
        if done {
            // Told by this and not by whether the task has ended: that is a moment later.
            episode.recovery = None;
        }
        done
    }
}

/// Returns whether the store may have counted a call that ended with this error.
fn may_have_run(error: &StoreError) -> bool {
    matches!(error, StoreError::Timeout(_))
}

impl<S: Store> Store for Fallback<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let inner = &self.inner;
        if action == Action::Reset {
            inner.forget(charge);
        }
        let answer = if inner.owed.is_empty() {
            inner.store.decide(action, charge).await
        } else {
            Box::pin(inner.ask(action, std::slice::from_ref(charge)))
                .await
                .map(|decisions| decisions[0])
        };
        match answer {
            Ok(decision) => {
                inner.mirror(action, std::slice::from_ref(charge), std::slice::from_ref(&decision));
                Ok(decision)
            }
            Err(error) => inner.decide_instead(action, charge, error),
        }
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        if action == Action::Reset {
            for charge in charges {
                inner.forget(charge);
            }
        }
        match inner.ask(action, charges).await {
            Ok(decisions) => {
                inner.mirror(action, charges, &decisions);
                Ok(decisions)
            }
            Err(error) => inner.decide_all_instead(action, charges, error),
        }
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

impl<S: Store> Drop for Fallback<S> {
    fn drop(&mut self) {
        let mut episode = self.inner.trouble.episode.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recovery) = episode.recovery.take() {
            recovery.abort();
        }
    }
}
