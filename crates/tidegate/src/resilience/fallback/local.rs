//! Decisions in place of the store, by the failure policy of each charge: locally by this
//! instance's share, or fixed (`allow`, `deny`).

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::FallbackCore;
use crate::charge::{Charge, OnStoreFailure};
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::hold::HoldStatus;
use crate::quota::Quota;
use crate::store::{Action, SharedStore, Store as _, StoreError};

/// The `retry_after` of a denial that only the store can lift: it may have recovered by then.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl<S: SharedStore> FallbackCore<S> {
    /// Decides charges that the store could not decide because of this error.
    pub(super) fn fall_back(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let Some(first) = charges.first() else { return Err(error) };
        if matches!(error, StoreError::Misconfigured(_) | StoreError::Invalid(_)) {
            return Err(error);
        }
        let is_failure = is_store_failure(&error);
        let memory_helps = is_failure || matches!(error, StoreError::Unreadable(_));
        if is_failure {
            self.on_failure(first, &error);
        }
        match action {
            Action::Acquire | Action::Peek => {}
            Action::Report if memory_helps => return self.report_locally(charges, &error),
            // A value that cannot be read stays so.
            Action::Commit | Action::Release if is_failure => {
                return self.commit_later(Action::Commit, charges, &error);
            }
            Action::Refund
            | Action::Reset
            | Action::ChargeUpTo
            | Action::Report
            | Action::Commit
            | Action::Release
            | Action::Renew => {
                return Err(error);
            }
        }
        let is_undecidable = |charge: &Charge<'_>| match charge.on_store_failure() {
            OnStoreFailure::Local => !memory_helps,
            OnStoreFailure::Allow | OnStoreFailure::Deny => false,
            OnStoreFailure::Error => true,
        };
        if charges.iter().any(is_undecidable) {
            return Err(error);
        }
        self.decide_locally(action, charges, error.may_have_run())
    }

    /// Decides by the failure policies, and adds the units that are admitted locally to the ledger.
    pub(super) fn decide_locally(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        in_doubt: bool,
    ) -> Result<Vec<Decision>, StoreError> {
        let decisions = self.by_failure_policy(action, charges)?;
        if action != Action::Acquire {
            return Ok(decisions);
        }
        self.count(&decisions);
        if decisions.iter().all(|decision| decision.allowed) {
            for (charge, decision) in charges.iter().zip(&decisions) {
                // Units in flight are those of this instance, and end with it. The units of a
                // repeated request are owed already.
                let status = decision.hold.map(|hold| hold.status);
                if decision.source == Source::Local
                    && !charge.quota().is_concurrency()
                    && status != Some(HoldStatus::Replayed)
                {
                    self.owe(charge, in_doubt);
                }
            }
        }
        Ok(decisions)
    }

    fn count(&self, decisions: &[Decision]) {
        for decision in decisions {
            let counter = match decision.source {
                Source::Allow => &self.counters.allow,
                Source::Deny => &self.counters.deny,
                _ => &self.counters.local,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Decides by the failure policy of each charge, all or nothing: a denial of any kind leaves
    /// the others unspent.
    fn by_failure_policy(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let shares: Vec<Option<Quota>> = charges.iter().map(|charge| self.share(charge)).collect();
        // The charges that memory can decide, and whether any other charge is denied.
        let mut local: Vec<Charge<'_>> = Vec::with_capacity(charges.len());
        let mut is_denied = false;
        for (charge, share) in charges.iter().zip(&shares) {
            match share {
                Some(share) if is_local(charge) && charge.cost() <= share.burst() => {
                    local.push(charge.with_quota(share));
                }
                _ => is_denied |= charge.on_store_failure() != OnStoreFailure::Allow,
            }
        }
        let decided = match (&*local, is_denied) {
            ([], _) => Vec::new(),
            ([one], false) => vec![self.local.decide_now(action, one)?],
            (several, false) => self.local.decide_all_now(action, several)?,
            (several, true) => {
                several.iter().map(|charge| self.peek_unspent(charge)).collect::<Result<_, _>>()?
            }
        };
        let mut decided = decided.into_iter();
        let decision = |(charge, share): (&Charge<'_>, &Option<Quota>)| match (
            charge.on_store_failure(),
            share,
        ) {
            (OnStoreFailure::Allow, _) => Ok(fixed_decision(charge, true)),
            // `error` has no error here: the store works, but another charge of the call has a debt
            // that is not settled yet.
            (OnStoreFailure::Deny | OnStoreFailure::Error, _) => Ok(fixed_decision(charge, false)),
            (OnStoreFailure::Local, Some(share)) if charge.cost() <= share.burst() => {
                let decision = decided.next().unwrap_or_else(|| fixed_decision(charge, false));
                Ok(as_local(charge, decision))
            }
            (OnStoreFailure::Local, share) => self.deny_beyond_share(charge, share.as_ref()),
        };
        charges.iter().zip(&shares).map(decision).collect()
    }

    /// Peeks at a charge that is not spent because another one is denied.
    fn peek_unspent(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let decision = self.local.decide_now(Action::Peek, charge)?;
        if decision.allowed {
            self.local.decide_now(Action::ChargeUpTo, &charge.with_cost(0))
        } else {
            Ok(decision)
        }
    }

    /// Denies a cost above the share: only the store can admit it.
    fn deny_beyond_share(
        &self,
        charge: &Charge<'_>,
        share: Option<&Quota>,
    ) -> Result<Decision, StoreError> {
        let denied = as_local(charge, fixed_decision(charge, false));
        let Some(share) = share else { return Ok(denied) };
        let count =
            self.local.decide_now(Action::ChargeUpTo, &charge.with_quota(share).with_cost(0))?;
        Ok(Decision { remaining: count.remaining, reset_after: count.reset_after, ..denied })
    }

    /// Returns units to the local count, whose clock is not that of the store.
    pub(super) fn refund_locally(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let (quota, mut charged_at) = (self.share_or_whole(charge), charge.charged_at());
        if charged_at != Timestamp::ZERO {
            let age = self.store.clock().now().saturating_duration_since(charged_at);
            charged_at = self.local.clock().now().saturating_sub(age);
        }
        let local = charge.with_quota(&quota).with_charged_at(charged_at);
        Ok(as_local(charge, self.local.decide_now(Action::Refund, &local)?))
    }

    /// Records a report in memory and in the ledger, if the failure policy is `local`. With the
    /// other policies it is lost. An error is returned after all others are recorded.
    fn report_locally(
        &self,
        charges: &[Charge<'_>],
        error: &StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let report = |charge: &Charge<'_>| match charge.on_store_failure() {
            OnStoreFailure::Allow => Ok(fixed_decision(charge, true)),
            OnStoreFailure::Deny => Ok(fixed_decision(charge, false)),
            OnStoreFailure::Error => Err(error.clone()),
            OnStoreFailure::Local => {
                // With the capacity of the full quota, because a share would cut it.
                let quota = self.recording_quota(charge);
                let _ = self.local.decide_now(Action::Report, &charge.with_quota(&quota))?;
                // A report whose answer was lost counts as made.
                if !error.may_have_run() {
                    self.owe(charge, false);
                }
                self.show_reported(charge)
            }
        };
        let reported: Vec<Result<Decision, StoreError>> = charges.iter().map(report).collect();
        reported.into_iter().collect()
    }

    /// Returns whether the units of a report fit into the share, and if not, the wait for one unit.
    fn show_reported(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let share = self.share_or_whole(charge).without_blocks();
        let peek =
            |cost| self.local.decide_now(Action::Peek, &charge.with_quota(&share).with_cost(cost));
        let (recorded, next) = (peek(0)?, peek(1)?);
        let retry_after = if recorded.allowed { Duration::ZERO } else { next.retry_after };
        Ok(as_local(charge, Decision { retry_after, delay: Duration::ZERO, ..recorded }))
    }

    /// Returns this instance's share, or the whole quota if another instance has it.
    pub(super) fn share_or_whole<'a>(&self, charge: &Charge<'a>) -> Cow<'a, Quota> {
        self.share(charge).map_or(Cow::Borrowed(charge.quota()), Cow::Owned)
    }

    /// Deletes the local count and the debt of this charge's key.
    pub(super) fn reset_local(&self, charge: &Charge<'_>) {
        self.ledger.remove(charge);
        // A reset in memory cannot fail.
        let _ = self.local.decide_now(Action::Reset, charge);
    }
}

/// Returns whether the store as a whole fails. A value of one key that cannot be read is no failure.
pub(super) fn is_store_failure(error: &StoreError) -> bool {
    match error {
        StoreError::Timeout(_)
        | StoreError::Unreachable(_)
        | StoreError::AnswerLost(_)
        | StoreError::Refused(_)
        | StoreError::OutOfMemory(_)
        | StoreError::NotPermitted(_)
        | StoreError::Open(_) => true,
        StoreError::Unreadable(_)
        | StoreError::Full { .. }
        | StoreError::Misconfigured(_)
        | StoreError::Invalid(_) => false,
    }
}

fn is_local(charge: &Charge<'_>) -> bool {
    charge.on_store_failure() == OnStoreFailure::Local
}

/// Marks a decision of the local store. Its limit is that of the full quota, not of the share.
pub(super) fn as_local(charge: &Charge<'_>, decision: Decision) -> Decision {
    Decision { limit: charge.quota().burst(), source: Source::Local, ..decision }
}

/// Returns the decision of the failure policies `allow` and `deny`.
fn fixed_decision(charge: &Charge<'_>, allowed: bool) -> Decision {
    let quota = charge.quota();
    if allowed {
        Decision::allow(quota.burst(), quota.burst()).with_source(Source::Allow)
    } else {
        Decision::deny(quota.burst(), RETRY_INTERVAL)
            .with_reset_after(Duration::ZERO)
            .with_source(Source::Deny)
    }
}
