//! [`DenialTable`]: the cached denials, in a set-associative table of fixed size.
//!
//! The set of a request follows from its hash, which depends on a secret of the process: a client
//! cannot choose keys that evict the entries of another client.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::key::RequestHash;
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::micros;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::shared::MAX_DENIAL_TTL;

/// Maximum number of decisions in a set. The denial of a request with more charges has a set of
/// its own.
const WAYS: usize = 8;
/// Longest time for which a denial is repeated if more units than it shows may become free before
/// it ends: those of a limit that allows the request, or fewer than the request needs.
const MAX_INEXACT_TTL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct DenialTable {
    sets: Box<[Mutex<Vec<Denial>>]>,
    ways: usize,
    entries: AtomicUsize,
}

/// A request as the cache sees it before it calls the store.
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheQuery {
    pub(super) request: RequestHash,
    /// Version of the counts of the request.
    pub(super) version: u64,
    /// Time by the store's clock (µs).
    pub(super) now: u64,
    /// Whether entries may be used.
    pub(super) is_fresh: bool,
}

/// A denial by the store: its decisions on all charges of one request.
#[derive(Debug)]
pub(super) struct Denial {
    request: RequestHash,
    version: u64,
    /// Whether it was used since the last eviction.
    used: bool,
    /// Time before which all decisions surely hold.
    until: u64,
    /// Time at which the store had answered.
    received: u64,
    decisions: Box<[RawDecision]>,
}

impl Denial {
    /// Returns `None` for a denial that ends too soon to be useful. It holds until the first of
    /// its charges would be allowed; the store decided after `query.now`, when it was called.
    pub(super) fn new(
        query: CacheQuery,
        received: u64,
        charges: &[Charge<'_>],
        decisions: &[Decision],
    ) -> Option<Self> {
        let denied = decisions.iter().filter(|decision| !decision.allowed);
        let retry_after = denied.map(|decision| micros(decision.retry_after)).min()?;
        let remains_exact = charges.iter().zip(decisions).all(|(charge, decision)| {
            let lacks_one = !decision.allowed && charge.cost() <= decision.remaining + 1;
            lacks_one || decision.reset_after.is_zero()
        });
        let max_ttl = if remains_exact { MAX_DENIAL_TTL } else { MAX_INEXACT_TTL };
        let ttl = certain_part(retry_after).min(micros(max_ttl));
        let raw = |decision: &Decision| RawDecision {
            allowed: decision.allowed,
            remaining: decision.remaining,
            retry_after: micros(decision.retry_after),
            reset_after: micros(decision.reset_after),
            delay: micros(decision.delay),
        };
        (ttl > 0).then(|| Self {
            request: query.request,
            version: query.version,
            used: false,
            until: query.now.saturating_add(ttl),
            received,
            decisions: decisions.iter().map(raw).collect(),
        })
    }

    /// Returns the decision on a charge, at this time. Waits are counted from the answer of the
    /// store, so that a client that waits is admitted.
    pub(super) fn decision(&self, charge: usize, quota: &Quota, now: u64) -> Decision {
        let passed = now.saturating_sub(self.received);
        let at_denial = self.decisions[charge];
        let reset_after = at_denial.reset_after.saturating_sub(passed);
        let retry_after = at_denial.retry_after.saturating_sub(passed);
        let remaining = if reset_after == 0 { quota.burst() } else { at_denial.remaining };
        let raw = RawDecision { remaining, retry_after, reset_after, ..at_denial };
        raw.into_decision(quota.burst(), Source::DenyCache)
    }

    /// Returns whether every charge is denied.
    pub(super) fn is_of_all_charges(&self) -> bool {
        self.decisions.iter().all(|decision| !decision.allowed)
    }
}

impl DenialTable {
    pub(super) fn new(max_entries: usize) -> Self {
        let sets = (max_entries / WAYS).max(1);
        Self {
            sets: std::iter::repeat_with(Mutex::default).take(sets).collect(),
            ways: WAYS.min(max_entries),
            entries: AtomicUsize::new(0),
        }
    }

    /// Returns the number of entries, including stale ones.
    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Finds the denial that still holds for this request, and returns what `read` makes of it.
    pub(super) fn find<T>(
        &self,
        query: &CacheQuery,
        read: impl FnOnce(&Denial) -> Option<T>,
    ) -> Option<T> {
        let mut set = self.lock(query.request);
        let denial = set.iter_mut().find(|denial| denial.request == query.request)?;
        if denial.version != query.version || query.now >= denial.until {
            return None;
        }
        denial.used = true;
        read(denial)
    }

    /// Inserts a denial instead of an earlier one of the same request, unless that has a later
    /// version.
    pub(super) fn insert(&self, denial: Denial) {
        if self.ways == 0 {
            return;
        }
        let mut set = self.lock(denial.request);
        let is_same = |other: &Denial| other.request == denial.request;
        if set.iter().any(|other| is_same(other) && other.version > denial.version) {
            return;
        }
        let len_before = set.len();
        set.retain(|other| !is_same(other));
        while !set.is_empty() && size_of_set(&set) + denial.decisions.len() > self.ways {
            evict_one(&mut set, denial.received);
        }
        set.push(denial);
        // Adds first, because another thread may subtract at any time.
        self.entries.fetch_add(set.len(), Ordering::Relaxed);
        self.entries.fetch_sub(len_before, Ordering::Relaxed);
    }

    /// Drops all entries, and frees their memory.
    pub(super) fn clear(&self) {
        for set in &self.sets {
            let dropped = std::mem::take(&mut *lock(set));
            self.entries.fetch_sub(dropped.len(), Ordering::Relaxed);
        }
    }

    fn lock(&self, RequestHash([hash, _]): RequestHash) -> MutexGuard<'_, Vec<Denial>> {
        let set = hash % self.sets.len() as u64;
        lock(&self.sets[usize::try_from(set).unwrap_or(0)])
    }
}

fn lock(set: &Mutex<Vec<Denial>>) -> MutexGuard<'_, Vec<Denial>> {
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of decisions in a set.
fn size_of_set(set: &[Denial]) -> usize {
    set.iter().map(|denial| denial.decisions.len()).sum()
}

/// Evicts the entry that ends first, of those that have ended or were not used since the last
/// eviction if there is one.
fn evict_one(set: &mut Vec<Denial>, now: u64) {
    let in_use = |denial: &Denial| denial.used && now < denial.until;
    let first = set.iter().enumerate().min_by_key(|(_, denial)| (in_use(denial), denial.until));
    let Some(at) = first.map(|(at, _)| at) else { return };
    if in_use(&set.swap_remove(at)) {
        for denial in set {
            denial.used = false;
        }
    }
}

/// Returns the part of a wait that surely passes by the store's clock. NTP changes the speed of a
/// clock by up to one part in 2,000, so two clocks may drift apart by one part in 1,000.
fn certain_part(wait: u64) -> u64 {
    wait - wait.div_ceil(1_000)
}
