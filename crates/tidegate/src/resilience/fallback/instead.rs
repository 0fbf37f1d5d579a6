//! What is answered in the store's place.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Inner, may_have_run};
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::policy::OnStoreFailure;
use crate::quota::Quota;
use crate::store::{Action, Store, StoreError};

/// When a store may be back: what no wait here would help is to be tried again then.
const TRY_AGAIN: Duration = Duration::from_secs(1);

impl<S: Store> Inner<S> {
    pub(super) fn decide_instead(
        self: &Arc<Self>,
        action: Action,
        charge: &Charge<'_>,
        error: StoreError,
    ) -> Result<Decision, StoreError> {
        let decisions = self.decide_all_instead(action, std::slice::from_ref(charge), error)?;
        Ok(decisions[0])
    }

    pub(super) fn decide_all_instead(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let Some(first) = charges.first() else { return Err(error) };
        let memory_helps = match &error {
            StoreError::Timeout(_)
            | StoreError::Unreachable(_)
            | StoreError::Refused(_)
            | StoreError::Open(_)
            | StoreError::Unreadable(_) => true,
            StoreError::Full { .. } => false,
            StoreError::Misconfigured(_) => return Err(error),
        };
        // One key whose value cannot be read says nothing about the store.
        if memory_helps && !matches!(error, StoreError::Unreadable(_)) {
            self.failed(first, &error);
        }
        match action {
            Action::Acquire | Action::Peek => {}
            Action::Refund if memory_helps => return self.refund_here(charges, error),
            Action::Report if memory_helps => {
                return self.report_here(charges, may_have_run(&error));
            }
            Action::Refund | Action::Reset | Action::ChargeUpTo | Action::Report => {
                return Err(error);
            }
        }
        let in_doubt = may_have_run(&error);
        if !memory_helps
            && charges.iter().any(|charge| charge.on_store_failure() == OnStoreFailure::Local)
        {
            return Err(error);
        }
        self.decide_here(action, charges, in_doubt)
    }

    /// Decides by each charge's failure mode, and adds what is admitted locally to the debts.
    pub(super) fn decide_here(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        in_doubt: bool,
    ) -> Result<Vec<Decision>, StoreError> {
        let decisions = self.by_their_word(action, charges)?;
        self.count(action, &decisions);
        if action == Action::Acquire && decisions.iter().all(|decision| decision.allowed) {
            let now = self.local.clock().now().as_micros();
            let local = charges
                .iter()
                .zip(&decisions)
                .filter(|(_, decision)| decision.source == Source::Local);
            local.for_each(|(charge, _)| self.owed.add(charge, now, in_doubt));
        }
        Ok(decisions)
    }

    pub(super) fn count(&self, action: Action, decisions: &[Decision]) {
        for decision in decisions.iter().filter(|_| action == Action::Acquire) {
            let counter = match decision.source {
                Source::Allow => &self.counters.allow,
                Source::Deny => &self.counters.deny,
                _ => &self.counters.local,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each charge's word, all or nothing: a denial of any kind leaves the others unspent.
    pub(super) fn by_their_word(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let shares: Vec<Option<Quota>> = charges.iter().map(|charge| self.share(charge)).collect();
        let is_local = |charge: &Charge<'_>| charge.on_store_failure() == OnStoreFailure::Local;
        let fits = |charge: &Charge<'_>, share: Option<&Quota>| {
            share.is_some_and(|share| charge.cost() <= share.burst())
        };
        // What the local counts are asked, and what is answered without them.
        let mut asked: Vec<Charge<'_>> = Vec::with_capacity(charges.len());
        let mut denied = false;
        for (charge, share) in charges.iter().zip(&shares) {
            match share {
                Some(share) if is_local(charge) && fits(charge, Some(share)) => {
                    asked.push(charge.with_quota(share))
                }
                _ => denied |= charge.on_store_failure() != OnStoreFailure::Allow,
            }
        }
        let found = match (&*asked, denied) {
            ([], _) => Vec::new(),
            ([one], false) => vec![self.local.decide_now(action, one)?],
            (all, false) => self.local.decide_all_now(action, all)?,
            (all, true) => all.iter().map(|charge| self.look(charge)).collect::<Result<_, _>>()?,
        };
        let mut found = found.into_iter();
        let answer = |(charge, share): (&Charge<'_>, &Option<Quota>)| match charge
            .on_store_failure()
        {
            OnStoreFailure::Allow => Ok(by_rule(charge, true)),
            OnStoreFailure::Deny => Ok(by_rule(charge, false)),
            OnStoreFailure::Local if fits(charge, share.as_ref()) => {
                let decision = found.next().unwrap_or_else(|| by_rule(charge, false));
                Ok(Decision { limit: charge.quota().limit(), source: Source::Local, ..decision })
            }
            OnStoreFailure::Local => self.beyond_the_share(charge, share.as_ref()),
        };
        charges.iter().zip(&shares).map(answer).collect()
    }

    /// What a charge would get, with nothing taken because another one denies.
    fn look(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let decision = self.local.decide_now(Action::Peek, charge)?;
        if decision.allowed {
            self.local.decide_now(Action::ChargeUpTo, &charge.with_cost(0))
        } else {
            Ok(decision)
        }
    }

    /// No wait makes room here for more than the share: only the store can admit it.
    fn beyond_the_share(
        &self,
        charge: &Charge<'_>,
        share: Option<&Quota>,
    ) -> Result<Decision, StoreError> {
        let denied = Decision { source: Source::Local, ..by_rule(charge, false) };
        let Some(share) = share else { return Ok(denied) };
        let look =
            self.local.decide_now(Action::ChargeUpTo, &charge.with_quota(share).with_cost(0))?;
        Ok(Decision { remaining: look.remaining, reset_after: look.reset_after, ..denied })
    }

    /// What was admitted here, and is not charged to the store yet, is given back here.
    fn refund_here(
        &self,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let shares: Option<Vec<Quota>> = charges.iter().map(|charge| self.share(charge)).collect();
        let Some(shares) = shares.filter(|_| self.owed.forgive(charges)) else { return Err(error) };
        let refund = |(charge, share): (&Charge<'_>, &Quota)| {
            let decision = self.local.decide_now(Action::Refund, &charge.with_quota(share))?;
            Ok(Decision { limit: charge.quota().limit(), source: Source::Local, ..decision })
        };
        charges.iter().zip(&shares).map(refund).collect()
    }

    /// Finished work is recorded here, and owed to the store, if its charge is decided locally.
    /// Otherwise it is lost.
    fn report_here(
        &self,
        charges: &[Charge<'_>],
        in_doubt: bool,
    ) -> Result<Vec<Decision>, StoreError> {
        let report = |charge: &Charge<'_>| match charge.on_store_failure() {
            OnStoreFailure::Allow => Ok(by_rule(charge, true)),
            OnStoreFailure::Deny => Ok(by_rule(charge, false)),
            OnStoreFailure::Local => {
                let quota = self.share(charge).unwrap_or_else(|| charge.quota().clone());
                let decision = self.local.decide_now(Action::Report, &charge.with_quota(&quota))?;
                self.owed.add(charge, self.local.clock().now().as_micros(), in_doubt);
                Ok(Decision { limit: charge.quota().limit(), source: Source::Local, ..decision })
            }
        };
        charges.iter().map(report).collect()
    }

    /// Nothing counts for this charge's key here any more, and nothing is owed.
    pub(super) fn forget(&self, charge: &Charge<'_>) {
        self.owed.forget(charge);
        // A memory store has no error for a reset.
        let _ = self.local.decide_now(Action::Reset, charge);
    }
}

/// The answer of `allow` or `deny`.
fn by_rule(charge: &Charge<'_>, allowed: bool) -> Decision {
    Decision {
        allowed,
        limit: charge.quota().limit(),
        remaining: if allowed { charge.quota().burst() } else { 0 },
        retry_after: if allowed { Duration::ZERO } else { TRY_AGAIN },
        reset_after: Duration::ZERO,
        delay: Duration::ZERO,
        source: if allowed { Source::Allow } else { Source::Deny },
    }
}
