//! The order in which the charges of one request are decided.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;

use super::decisions::is_denied;
use super::{Enforcement, Observer, Policy, PolicyDecision, PolicyLimiter};
use crate::charge::{Charge, MAX_CHARGES};
use crate::clock::{Clock, Timestamp, micros};
use crate::decision::Source;
use crate::hold::{HoldStatus, HoldTerms};
use crate::join::join_all;
use crate::limiter::Error;
use crate::quota::Quota;
use crate::store::{Action, Store, StoreError};

/// Deadline of the calls of one request. The store bounds the first call itself.
struct Deadline {
    at: Option<Instant>,
    calls: usize,
}

impl<S: Store, O: Observer + Clone + 'static> PolicyLimiter<S, O> {
    /// Decides every entry. Entries in shadow mode that fail stay undecided.
    pub(super) async fn decide_entries(
        &self,
        entries: &mut [PolicyDecision<'_>],
    ) -> Result<(), Error> {
        match entries {
            [] => Ok(()),
            // Nearly every request: no list of charges.
            [entry] if entry.is_decided_alone() => {
                if let Some(charge) = entry.charge.charge() {
                    let decision = self.limiter().decide(entry.action(), &charge).await?;
                    entry.set(decision);
                }
                Ok(())
            }
            // Boxed, because it is large and every request would carry it.
            entries => Box::pin(self.decide_jointly(entries)).await,
        }
    }

    /// Decides in this order: reports, resets, and actions on holds; peeks that can deny the request
    /// before any units are taken; the enforced acquires, all or nothing; the others, such as
    /// refunds, one by one.
    async fn decide_jointly(&self, entries: &mut [PolicyDecision<'_>]) -> Result<(), Error> {
        let mut deadline = Deadline { at: self.deadline(), calls: 0 };
        let asked_at = self.limiter().store().clock().now();
        let independent =
            [Action::Report, Action::Reset, Action::Commit, Action::Release, Action::Renew];
        for action in independent {
            let belongs =
                |entry: &PolicyDecision<'_>| entry.action() == action && !entry.is_shadow();
            // They are independent of each other, so a repeated count, or more than one call can
            // have, follows in another call.
            for _ in 0..entries.len() {
                if self.decide_group(&mut deadline, action, entries, belongs).await?.is_empty() {
                    break;
                }
            }
        }
        self.decide_group(&mut deadline, Action::Peek, entries, can_deny_without_charge).await?;
        let action = if is_denied(entries) { Action::Peek } else { Action::Acquire };
        let joint = self.decide_group(&mut deadline, action, entries, is_enforced_acquire).await?;
        let denied = is_denied(entries);
        let mut charged = if denied { Vec::new() } else { joint };
        let (mut result, mut is_refunded) = (Ok(()), false);
        for (position, entry) in entries.iter_mut().enumerate() {
            let is_refund = entry.action() == Action::Refund;
            match self.decide_remaining(&mut deadline, entry, denied).await {
                Ok(true) => charged.push(position),
                Ok(false) => is_refunded |= is_refund && entry.decided,
                Err(error) => {
                    result = Err(error);
                    // A refund does not depend on the others.
                    if !is_refund {
                        break;
                    }
                }
            }
        }
        if let Err(Error::Store(error)) = &result
            && is_refunded
            && !error.may_have_run()
        {
            // The units that were returned must not be returned again.
            result = Err(Error::Store(error.clone().answer_lost()));
        }
        if result.is_err() || is_denied(entries) {
            self.compensate(entries, &charged, asked_at).await;
        }
        self.skip_new_limits(entries, asked_at).await;
        for entry in entries {
            self.lengthen_block(&mut deadline, entry).await;
        }
        result
    }

    /// Gives the denial of a key that is blocked for a while the wait of its own limit, if that is
    /// longer. The store is asked only near the end of the block, so that blocked requests cost
    /// nothing before.
    async fn lengthen_block(&self, deadline: &mut Deadline, entry: &mut PolicyDecision<'_>) {
        let (source, wait) = (entry.decision.source, entry.decision.retry_after);
        if source != Source::Override || wait.is_zero() {
            return;
        }
        let Some(charge) = entry.charge.charge() else { return };
        let quota = charge.quota();
        // Reports may have counted up to ten times the limit.
        if !quota.has_blocks() && micros(wait) >= 10 * quota.drain_micros() {
            return;
        }
        let call = self.limiter().decide(Action::Peek, &charge);
        let own = self.with_deadline(deadline, call, |error| Err(error.into())).await;
        if let Some(own) = own.ok().filter(|own| !own.allowed) {
            entry.decision.retry_after = wait.max(own.retry_after);
            entry.decision.reset_after = entry.decision.reset_after.max(own.reset_after);
        }
    }

    /// Takes back what a commit has reported to limits that do not know the id, if another one does:
    /// they are newer than the reservation. One that has returned its units and forgotten them is
    /// not, so that usage is never lost. The answer to a commit or a refund is that of the others.
    async fn skip_new_limits(&self, entries: &mut [PolicyDecision<'_>], asked_at: Timestamp) {
        let is_unknown = |entry: &PolicyDecision<'_>| {
            let settles = matches!(entry.action(), Action::Commit | Action::Refund);
            let hold = entry.decision.hold.filter(|_| settles);
            hold.map(|hold| matches!(hold.status, HoldStatus::Unknown | HoldStatus::Reported))
        };
        let known = entries.iter().filter(|entry| is_unknown(entry) == Some(false));
        let known: Vec<HoldTerms> =
            known.filter_map(|entry| Some(*entry.quota()?.holds())).collect();
        let may_forget = |quota: &Quota| {
            let (of, returns) = (quota.holds(), quota.releases_holds() && !quota.is_concurrency());
            let is_shorter = |it: &HoldTerms| of.ttl() < it.ttl() || of.max_ttl() < it.max_ttl();
            returns && known.iter().all(is_shorter)
        };
        let is_new = |entry: &PolicyDecision<'_>| {
            let forgets = entry.action() == Action::Commit && entry.quota().is_some_and(may_forget);
            is_unknown(entry) == Some(true) && !forgets
        };
        for entry in entries.iter_mut().filter(|entry| !known.is_empty() && is_new(entry)) {
            let Some(charge) = entry.charge.charge() else { continue };
            let charge = charge.without_hold().with_charged_at(asked_at);
            let is_reported = entry.action() == Action::Commit
                && charge.cost() > 0
                && entry.decision.hold.is_some_and(|hold| hold.status == HoldStatus::Unknown);
            if is_reported && !charge.quota().is_concurrency() {
                if !self.refund_charges(&[charge]).await {
                    continue;
                }
                entry.decision.remaining = entry.remaining_without(entry.decision.remaining);
            }
            entry.decision.hold = None;
        }
    }

    /// Decides the undecided entries that `belongs` selects in one call, each count once, and
    /// returns their positions.
    async fn decide_group(
        &self,
        deadline: &mut Deadline,
        action: Action,
        entries: &mut [PolicyDecision<'_>],
        belongs: impl Fn(&PolicyDecision<'_>) -> bool,
    ) -> Result<Vec<usize>, Error> {
        let mut positions = first_positions(entries, |entry| !entry.decided && belongs(entry));
        if !matches!(action, Action::Acquire | Action::Peek) {
            positions.truncate(MAX_CHARGES);
        }
        if positions.is_empty() {
            return Ok(positions);
        }
        let charges: Vec<Charge<'_>> =
            positions.iter().filter_map(|position| entries[*position].charge.charge()).collect();
        let call = self.limiter().decide_all(action, &charges);
        let fall_back = |error| self.limiter().store().fall_back(action, &charges, error);
        let decisions = self.with_deadline(deadline, call, |error| Ok(fall_back(error)?.into()));
        let decisions = decisions.await?;
        let all_fit = decisions.is_allowed();
        for (position, decision) in positions.iter().zip(decisions) {
            let entry = &mut entries[*position];
            if action == Action::Peek && entry.action() == Action::Acquire {
                entry.set_peeked(decision, all_fit);
            } else {
                entry.set_capped(decision);
            }
        }
        Ok(positions)
    }

    /// Decides one of the remaining entries, and returns whether it took units.
    async fn decide_remaining(
        &self,
        deadline: &mut Deadline,
        entry: &mut PolicyDecision<'_>,
        denied: bool,
    ) -> Result<bool, Error> {
        let action = match entry.action() {
            Action::Acquire if denied || entry.charge.exceeds_capacity() => Action::Peek,
            action => action,
        };
        let only_peeked =
            entry.enforcement() == Enforcement::AllDenied && action == Action::Acquire;
        if entry.decided && !only_peeked {
            return Ok(false);
        }
        let Some(charge) = entry.charge.charge() else { return Ok(false) };
        let fall_back = |error| {
            let charges = std::slice::from_ref(&charge);
            let decisions = self.limiter().store().fall_back(action, charges, error)?;
            Ok(decisions[0])
        };
        let call = self.limiter().decide(action, &charge);
        match self.with_deadline(deadline, call, fall_back).await {
            Ok(decision) if action == Action::Peek && entry.action() == Action::Acquire => {
                entry.set_peeked(decision, decision.allowed);
                Ok(false)
            }
            Ok(decision) => {
                entry.set_capped(decision);
                Ok(action == Action::Acquire && decision.allowed)
            }
            // A shadow policy must not fail the request; one that would reject it, shows so.
            Err(error) if entry.is_shadow() => {
                if matches!(error, Error::Charge(_)) {
                    entry.reject();
                }
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the units of a request that turned out to be denied, or failed, after they were
    /// taken: it names one count twice, other requests used up a limit that had only been peeked,
    /// or a later call failed.
    async fn compensate(
        &self,
        entries: &mut [PolicyDecision<'_>],
        charged: &[usize],
        asked_at: Timestamp,
    ) {
        // An earlier request has made the charge of a repeated one.
        let is_repeated = |position: usize| {
            let hold = entries[position].decision.hold;
            hold.is_some_and(|hold| hold.status == HoldStatus::Replayed)
        };
        let charged: Vec<usize> =
            charged.iter().copied().filter(|position| !is_repeated(*position)).collect();
        let refunds = charged.iter().filter_map(|position| entries[*position].charge.charge());
        let refunds: Vec<_> = refunds.map(|charge| charge.with_charged_at(asked_at)).collect();
        if self.refund_charges(&refunds).await {
            for position in charged {
                let entry = &mut entries[position];
                entry.decision.remaining = entry.remaining_without(entry.decision.remaining);
            }
        }
    }

    /// Sends refunds concurrently, and returns whether all succeeded within the timeout of a query.
    /// Each is a call of its own: if one fails, a fallback must know which units were returned.
    pub(super) async fn refund_charges(&self, charges: &[Charge<'_>]) -> bool {
        let mut deadline = Deadline { at: self.deadline(), calls: 1 };
        let charges = charges.iter().map(|charge| self.with_quota_of_refund(charge));
        let charges: Vec<Charge<'_>> = charges.collect();
        let refunds = charges.iter().map(|charge| self.limiter().decide(Action::Refund, charge));
        let joined = async { join_all(refunds).await.into_iter().collect::<Result<Vec<_>, _>>() };
        let refunded = self.with_deadline(&mut deadline, joined, |error| Err(error.into())).await;
        refunded.inspect_err(|error| tracing::debug!(%error, "refund failed")).is_ok()
    }

    /// Gives a charge the quota by which its units are returned, if its policy has several.
    pub(super) fn with_quota_of_refund<'b>(&'b self, charge: &Charge<'b>) -> Charge<'b> {
        let policy = self.policies().get(charge.policy()).filter(|it| it.has_several_quotas());
        let larger = |policy: &'b Policy| policy.quotas.larger_than(charge.quota(), charge.key());
        let quota = policy.and_then(larger);
        quota.map_or(*charge, |quota| charge.with_quota(quota))
    }

    /// Awaits a call, at most until the deadline. After that, `fall_back` decides.
    async fn with_deadline<T>(
        &self,
        deadline: &mut Deadline,
        call: impl Future<Output = Result<T, Error>>,
        fall_back: impl FnOnce(StoreError) -> Result<T, Error>,
    ) -> Result<T, Error> {
        deadline.calls += 1;
        let at = deadline.at.filter(|_| deadline.calls > 1);
        match at {
            None => call.await,
            Some(at) => {
                let start = Instant::now();
                let late = || fall_back(StoreError::Timeout(start.elapsed()).answer_lost());
                timeout_at(at, self.limiter().store().clock(), call).await.unwrap_or_else(late)
            }
        }
    }
}

/// Returns the positions of the entries that `belongs` selects, each count once: one call cannot
/// have the same count twice.
fn first_positions(
    entries: &[PolicyDecision<'_>],
    belongs: impl Fn(&PolicyDecision<'_>) -> bool,
) -> Vec<usize> {
    let mut positions: Vec<usize> = Vec::new();
    for (position, entry) in entries.iter().enumerate() {
        let is_repeated = |earlier: &usize| entries[*earlier].charge.has_same_count(&entry.charge);
        if belongs(entry) && !positions.iter().any(is_repeated) {
            positions.push(position);
        }
    }
    positions
}

/// Returns whether the entry can deny the request before any units are taken.
fn can_deny_without_charge(entry: &PolicyDecision<'_>) -> bool {
    match entry.enforcement() {
        Enforcement::Enforce => entry.action() == Action::Peek,
        // They deny only if all of them do.
        Enforcement::AllDenied => matches!(entry.action(), Action::Acquire | Action::Peek),
        Enforcement::Shadow => false,
    }
}

fn is_enforced_acquire(entry: &PolicyDecision<'_>) -> bool {
    entry.enforcement() == Enforcement::Enforce && entry.action() == Action::Acquire
}

/// Awaits a future until the deadline. The timer is created only if the future is not ready at
/// once, as on memory.
async fn timeout_at<T>(
    at: Instant,
    clock: &dyn Clock,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = pin!(future);
    if let Poll::Ready(value) = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        return Some(value);
    }
    let mut timer = clock.sleep(at.saturating_duration_since(Instant::now()));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => timer.as_mut().poll(cx).map(|()| None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{
        Action, Enforcement, Limiter, MemoryStore, Policies, PolicyLimiter, PreparedCharge, Query,
        Quota,
    };

    /// Returns what is left of each limit, in the order of the charges.
    async fn remaining(limiter: &PolicyLimiter, charges: Vec<PreparedCharge<'_>>) -> Vec<u64> {
        let charges = charges.into_iter().map(PreparedCharge::into_owned).collect();
        let decisions = limiter.decide(Action::Acquire, Query::prepared(charges)).await;
        let decisions = decisions.expect("decided");
        decisions.iter().map(|entry| entry.decision().remaining).collect()
    }

    #[tokio::test]
    async fn denied_request_shows_what_is_left_without_it() {
        let policies = Policies::new(vec![]).expect("valid");
        let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
        let hour = Duration::from_secs(3600);
        let ten = Quota::fixed_window(10, hour).expect("valid");
        let one = Quota::fixed_window(1, hour).expect("valid");
        let tight = || PreparedCharge::new("tight", "u", &one);
        let wide = || PreparedCharge::new("wide", "u", &ten);
        let shadow = || wide().with_enforcement(Enforcement::Shadow);
        assert_eq!(remaining(&limiter, vec![tight(), shadow()]).await, [0, 9]);
        assert_eq!(remaining(&limiter, vec![tight(), wide()]).await, [0, 9]);
        assert_eq!(remaining(&limiter, vec![tight(), shadow()]).await, [0, 9]);
        // A cost above the limit denies the request before anything is taken.
        let too_much = || PreparedCharge::new("burst", "u", &ten).with_cost(20).with_capped_cost();
        assert_eq!(remaining(&limiter, vec![too_much(), wide()]).await, [10, 9]);
        assert_eq!(remaining(&limiter, vec![too_much(), tight(), wide()]).await, [10, 0, 9]);
    }
}
