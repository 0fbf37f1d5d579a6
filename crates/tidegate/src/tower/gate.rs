//! [`Gate`]: who decides about requests; [`Admission`]: what was decided about one.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;

use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::headers::Limited;
use crate::limiter::Error;
use crate::policy::{Mode, OnStoreFailure, Policy, Selected};
use crate::quota::Quota;

/// Who decides about requests. Clones share their counts.
pub trait Gate: Clone + Send + Sync + 'static {
    /// Decides about a request by its head and, if it passes, spends. The body has not been read.
    fn admit(&self, head: &Parts) -> impl Future<Output = Result<Admission, Error>> + Send;

    /// Gives back what an admission took.
    fn refund(&self, admission: &Admission) -> impl Future<Output = ()> + Send;

    /// Sleeps until an admitted request's turn has come.
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(delay)
    }
}

/// What was decided about one request: a line for each limit that applied to it.
#[derive(Debug, Clone, Default)]
pub struct Admission {
    /// Microseconds by the clock of the gate's store.
    asked: Timestamp,
    lines: Vec<Line>,
}

/// One limit's charge and its decision.
#[derive(Debug, Clone)]
pub struct Line {
    policy: Arc<str>,
    /// Empty if the request lacks the key.
    key: String,
    quota: Quota,
    cost: u64,
    on_store_failure: OnStoreFailure,
    decision: Decision,
    shadow: bool,
}

impl Admission {
    /// What these limits decided, all or nothing: the request passes if each that is enforced
    /// allows it. `asked` is the time just before the store was asked, by the
    /// store's clock ([`Store::clock`](crate::Store::clock)).
    #[must_use]
    pub fn new(asked: Timestamp, lines: Vec<Line>) -> Self {
        Self { asked, lines }
    }

    /// No limit applies.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::default()
    }

    /// May the request pass?
    #[must_use]
    pub fn passes(&self) -> bool {
        self.enforced().all(|line| line.decision.allowed)
    }

    /// The limit that denies the request; of several, the one with the longest wait. `None` if it
    /// passes.
    #[must_use]
    pub fn denied_by(&self) -> Option<&Line> {
        self.leading().filter(|line| !line.decision.allowed)
    }

    /// How long the request has to wait for its turn.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.enforced().map(|line| line.decision.delay).max().unwrap_or_default()
    }

    /// All lines, those of limits in shadow mode too.
    #[must_use]
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The line that binds the request; `None` if no enforced limit applied.
    #[must_use]
    pub fn leading(&self) -> Option<&Line> {
        self.enforced().min_by_key(|line| line.decision.rank())
    }

    /// For the headers: what is enforced.
    pub fn limited(&self) -> impl Iterator<Item = Limited<'_>> + Clone {
        self.enforced().map(|line| Limited {
            policy: &line.policy,
            quota: &line.quota,
            decision: line.decision,
        })
    }

    /// The charges that refund what the request has spent, each with the time at which it was
    /// charged. `now` is the time by the same clock as `asked`: a charge of which nothing is left
    /// to return by then is not among them.
    pub fn spent(&self, now: Timestamp) -> impl Iterator<Item = Charge<'_>> {
        let spent = self.lines.iter().filter(|line| self.passes() && line.is_spent());
        spent.filter_map(move |line| line.charge().to_refund(&line.decision, self.asked, now))
    }

    fn enforced(&self) -> impl Iterator<Item = &Line> + Clone {
        self.lines.iter().filter(|line| !line.shadow)
    }
}

impl Line {
    /// What was decided about this charge.
    #[must_use]
    pub fn new(charge: &Charge<'_>, decision: Decision) -> Self {
        Self {
            policy: charge.policy().into(),
            key: charge.key().to_owned(),
            quota: charge.quota().clone(),
            cost: charge.cost(),
            on_store_failure: charge.on_store_failure(),
            decision,
            shadow: false,
        }
    }

    /// What was decided about this policy's charge; in shadow mode if the policy is.
    #[must_use]
    pub fn of_policy(selected: Selected<'_>, decision: Decision) -> Self {
        let policy = selected.policy();
        Self {
            policy: Arc::clone(&policy.name),
            quota: selected.quota().clone(),
            cost: selected.cost(),
            on_store_failure: policy.store_failure(),
            decision,
            shadow: policy.mode() == Mode::Shadow,
            key: selected.into_key(),
        }
    }

    /// The denial of a policy whose key the request lacks. No wait helps.
    #[must_use]
    pub fn without_key(policy: &Policy) -> Self {
        let decision = policy.without_key();
        Self {
            policy: Arc::clone(&policy.name),
            key: String::new(),
            quota: policy.quota().clone(),
            cost: policy.usual_cost(),
            on_store_failure: policy.store_failure(),
            decision,
            shadow: false,
        }
    }

    /// Only looked at: it denies nobody, and no client hears of it.
    #[must_use]
    pub fn in_shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// The name that it counts under.
    #[must_use]
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Whose count it is; `None` if the request lacks the key.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        Some(self.key.as_str()).filter(|key| !key.is_empty())
    }

    /// Its quota.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Its decision.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether it is only looked at.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// Without a store's word nothing was counted.
    fn is_spent(&self) -> bool {
        self.decision.allowed && matches!(self.decision.source, Source::Store | Source::Local)
    }

    /// What was to be decided.
    #[must_use]
    pub fn charge(&self) -> Charge<'_> {
        let charge =
            Charge::new(&self.key, &self.quota).with_policy(&self.policy).with_cost(self.cost);
        charge.with_on_store_failure(self.on_store_failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock as _, ManualClock};
    use crate::limiter::Limiter;
    use crate::store::memory::MemoryStore;

    const SECOND: Duration = Duration::from_secs(1);

    /// The seconds after a first request, and then a second one, at which the second has something
    /// left to refund.
    fn refundable(quota: &Quota) -> Vec<u64> {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let charge = Charge::new("key", quota);
        let line = || {
            let decision = limiter.blocking().acquire(&charge).expect("decided");
            Admission::new(clock.now(), vec![Line::new(&charge, decision)])
        };
        line();
        let (admission, taken) = (line(), clock.now());
        (0..40)
            .filter(|second| {
                admission.spent(taken.saturating_add(Duration::from_secs(*second))).next().is_some()
            })
            .collect()
    }

    #[test]
    fn a_charge_that_has_left_its_window_or_drained_is_not_refunded() {
        let until = |end| (0..end).collect::<Vec<u64>>();
        // The manual clock stands at the beginning of a window.
        let ten = |make: fn(u64, Duration) -> Result<Quota, crate::QuotaError>| {
            make(5, 10 * SECOND).expect("valid")
        };
        assert_eq!(refundable(&ten(Quota::sliding_log)), until(10));
        // The store decides what a charge of an earlier window has left: nothing of a fixed window.
        assert_eq!(refundable(&ten(Quota::fixed_window)), until(10));
        assert_eq!(refundable(&ten(Quota::sliding_counter)), until(20));
        // The first unit drains in two seconds, then the second.
        assert_eq!(refundable(&ten(Quota::token_bucket)), until(4));
        assert_eq!(refundable(&ten(Quota::leaky_bucket)), until(4));
    }

    #[test]
    fn who_was_denied_or_not_counted_has_spent_nothing() {
        let quota = Quota::token_bucket(5, SECOND).expect("valid");
        let charge = Charge::new("key", &quota);
        let limiter = Limiter::new(MemoryStore::new());
        let allowed = limiter.blocking().acquire(&charge).expect("decided");
        let spent = |decisions: &[Decision]| {
            let lines = decisions.iter().map(|decision| Line::new(&charge, *decision)).collect();
            Admission::new(Timestamp::ZERO, lines).spent(Timestamp::ZERO).count()
        };
        assert_eq!(spent(&[allowed]), 1);
        assert_eq!(spent(&[allowed, Decision { allowed: false, ..allowed }]), 0, "all or nothing");
        assert_eq!(spent(&[allowed, Decision { source: Source::Allow, ..allowed }]), 1);
        let shadow = Line::new(&charge, Decision { allowed: false, ..allowed }).in_shadow();
        assert_eq!(
            Admission::new(Timestamp::ZERO, vec![Line::new(&charge, allowed), shadow])
                .spent(Timestamp::ZERO)
                .count(),
            1
        );
    }
}
