//! Holds while the store is unavailable: those of local decisions, and commits that are made later.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::FallbackCore;
use super::local::{as_local, is_store_failure};
use crate::charge::{Charge, OnStoreFailure, OwnedCharge};
use crate::decision::{Decision, Source};
use crate::hold::{GRACE, Hold, HoldState, HoldStatus};
use crate::join::join_all;
use crate::store::{Action, SharedStore, Store as _, StoreError};

/// Maximum number of commits that wait for the store. Further ones get its error.
const MAX_PENDING: usize = 10_000;
/// Number of commits that are made together.
const MAX_BATCH: usize = 128;

/// Commits that wait for the store.
#[derive(Debug, Default)]
pub(super) struct PendingCommits {
    queue: Mutex<VecDeque<PendingCommit>>,
    /// Number of commits that the store did not get in time.
    dropped: AtomicU64,
}

#[derive(Debug)]
struct PendingCommit {
    action: Action,
    charge: OwnedCharge,
    /// Time by the local clock (µs) after which the store does not know the hold any more.
    until: u64,
}

impl PendingCommits {
    fn lock(&self) -> MutexGuard<'_, VecDeque<PendingCommit>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Takes the next commits. Drops those whose hold the store does not know any more.
    fn take_batch(&self, now: u64) -> Vec<PendingCommit> {
        let (mut pending, mut batch) = (self.lock(), Vec::new());
        while batch.len() < MAX_BATCH
            && let Some(commit) = pending.pop_front()
        {
            if commit.until > now {
                batch.push(commit);
            } else if self.dropped.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!("the store was unavailable for too long, commits are dropped");
            }
        }
        batch
    }
}

impl<S: SharedStore> FallbackCore<S> {
    /// Returns whether the hold of this charge is that of a local decision.
    pub(super) fn holds_locally(&self, action: Action, charge: &Charge<'_>) -> bool {
        charge.hold().is_some()
            && match action {
                Action::Acquire => self.local.repeats_hold(charge),
                Action::Commit | Action::Release | Action::Renew | Action::Refund => {
                    self.local.has_hold(charge)
                }
                Action::Peek | Action::Reset | Action::ChargeUpTo | Action::Report => false,
            }
    }

    /// Repeats, settles or renews the hold of a local decision. Settles it in the store as well, which
    /// may know the id, because the answer to an earlier request was lost.
    pub(super) async fn decide_local_hold(
        self: &Arc<Self>,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, StoreError> {
        let reserved = self.local.units_to_settle(action, charge);
        let quota = self.share_or_whole(charge);
        let decision = self.local.decide_now(action, &charge.with_quota(&quota))?;
        // The local units of a hold that has ended have returned: those that were used are reported.
        let has_ended = decision.hold.is_some_and(|hold| hold.status == HoldStatus::Ended);
        let is_report = action == Action::Commit && has_ended && !charge.quota().is_concurrency();
        if let Some(reserved) = reserved.or(is_report.then_some(0)) {
            let used = if action == Action::Refund { 0 } else { charge.cost() };
            let of = |units: u64| charge.with_cost(units);
            // Units whose debt is settled already stay in the store until they expire.
            let is_owed = !charge.quota().is_concurrency();
            let cancelled =
                if is_owed { self.ledger.cancel(&of(reserved), false) } else { reserved };
            let unpaid = of(used.saturating_sub(reserved - cancelled));
            if let Err(error) = self.store.decide(action, &unpaid).await {
                let is_pending = is_store_failure(&error) && {
                    self.on_failure(&unpaid, &error);
                    self.commit_later(action, &[unpaid], &error).is_ok()
                };
                if is_owed && !is_pending {
                    self.owe(&unpaid.without_hold(), error.may_have_run());
                }
            }
        }
        Ok(as_local(charge, decision))
    }

    /// Keeps commits that the store could not make, to make them when it has recovered.
    pub(super) fn commit_later(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: &StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let returns_error =
            |charge: &Charge<'_>| charge.on_store_failure() == OnStoreFailure::Error;
        let mut pending = self.pending_commits.lock();
        if charges.iter().any(returns_error) || pending.len() + charges.len() > MAX_PENDING {
            return Err(error.clone());
        }
        let now = self.local.clock().now().as_micros();
        let keep = |charge: &Charge<'_>| {
            // The reservation may have brought a time of its own.
            let until = now + charge.quota().holds().max_ttl_micros() + GRACE;
            pending.push_back(PendingCommit { action, charge: OwnedCharge::of(charge), until });
        };
        charges.iter().for_each(keep);
        let decision = |charge: &Charge<'_>| {
            Decision::allow(charge.quota().burst(), 0)
                .with_source(Source::Local)
                .with_hold(HoldState::of_micros(HoldStatus::Pending, 0))
        };
        Ok(charges.iter().map(decision).collect())
    }

    /// Returns whether a commit that waits for the store has the id of an acquire, which would repeat
    /// a hold that is about to end.
    pub(super) fn awaits_commit(&self, action: Action, charges: &[Charge<'_>]) -> bool {
        if action != Action::Acquire || charges.iter().all(|charge| charge.hold().is_none()) {
            return false;
        }
        let pending = self.pending_commits.lock();
        pending.iter().any(|commit| {
            let waiting = commit.charge.charge();
            let id = waiting.hold().map(Hold::id);
            let mut same = charges.iter().filter(|charge| charge.hold().map(Hold::id) == id);
            same.any(|charge| charge.key() == waiting.key() && charge.policy() == waiting.policy())
        })
    }

    /// Makes the commits that wait for the store. A commit can be made again: its hold is settled
    /// once. Returns whether none is left.
    pub(super) async fn make_pending_commits(&self) -> bool {
        loop {
            let now = self.local.clock().now().as_micros();
            let batch = self.pending_commits.take_batch(now);
            if batch.is_empty() {
                return true;
            }
            // Those that are not answered return to the queue, even if this future is dropped.
            let mut batch = Unsettled { pending: &self.pending_commits, commits: batch };
            let results = {
                let charges: Vec<Charge<'_>> =
                    batch.commits.iter().map(|commit| commit.charge.charge()).collect();
                let calls =
                    batch.commits.iter().zip(&charges).map(|(commit, charge)| {
                        self.store.decide(commit.action, charge).into_future()
                    });
                join_all(calls).await
            };
            let mut settled = results.iter().map(Result::is_ok);
            let has_failed = results.iter().any(Result::is_err);
            batch.commits.retain(|_| !settled.next().unwrap_or(false));
            drop(batch);
            if has_failed {
                return false;
            }
        }
    }
}

/// Commits that return to the queue when it is dropped.
struct Unsettled<'a> {
    pending: &'a PendingCommits,
    commits: Vec<PendingCommit>,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        self.pending.lock().extend(self.commits.drain(..));
    }
}
