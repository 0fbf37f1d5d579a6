//! Holds of the naive model.

use std::time::Duration;

use super::Model;
use crate::algorithm::Algorithm;
use crate::charge::Charge;
use crate::clock::{Timestamp, micros};
use crate::decision::{Decision, Source};
use crate::hold::{GRACE, Hold, HoldState, HoldStatus, OnExpire};
use crate::store::Action;

/// A remembered acquire.
#[derive(Debug, Clone)]
pub(in crate::testing) struct ModelHold {
    units: u64,
    charged_at: u64,
    refund_at: u64,
    end: u64,
    known_until: u64,
    remaining: u64,
    on_expire: OnExpire,
    /// Whether the units return at the end, and have not yet.
    releases: bool,
    /// Whether its count was reset since, so that no unit can return.
    is_before_reset: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Settled {
        used: u64,
    },
    Reported,
    /// Reported under an unknown id.
    WasUnknown,
    Refunded,
}

impl ModelHold {
    /// Returns whether its units have not returned.
    fn is_charged(&self) -> bool {
        self.on_expire == OnExpire::Charge || self.releases
    }
}

fn name(charge: &Charge<'_>) -> (String, String) {
    (charge.key().to_owned(), charge.policy().to_owned())
}

impl Model {
    fn hold(&self, charge: &Charge<'_>, hold: &Hold, now: u64) -> Option<ModelHold> {
        let known = self.holds.get(&name(charge))?.get(hold.id())?;
        (known.known_until > now).then(|| known.clone())
    }

    /// Returns the hold of an acquire that has been made before.
    pub(super) fn repeated(
        &self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
    ) -> Option<ModelHold> {
        if !matches!(action, Action::Acquire | Action::Peek) {
            return None;
        }
        let hold = self.hold(charge, charge.hold()?, now)?;
        let is_alive = match hold.state {
            // Of units that stay charged, the id is known for longer than the hold.
            State::Open => {
                let stays = hold.on_expire == OnExpire::Charge && !charge.quota().is_concurrency();
                stays || hold.end > now && (hold.is_charged() || hold.is_before_reset)
            }
            State::Settled { used } => used > 0,
            State::Reported | State::WasUnknown | State::Refunded => false,
        };
        is_alive.then_some(hold)
    }

    /// Returns whether the id of an acquire was used with another cost, which is an error.
    #[must_use]
    pub fn is_conflict(&self, action: Action, charge: &Charge<'_>, now: Timestamp) -> bool {
        let repeated = self.repeated(action, charge, now.as_micros());
        repeated.is_some_and(|hold| hold.units != charge.cost())
    }

    /// Returns whether holds have ended, which a clock that steps back would bring back.
    pub(in crate::testing) fn has_ended_holds(&self, now: Timestamp) -> bool {
        let now = now.as_micros();
        self.holds.values().flat_map(|holds| holds.values()).any(|hold| hold.end <= now)
    }

    /// Returns the units in flight.
    pub(super) fn in_flight(&self, charge: &Charge<'_>, now: u64) -> u64 {
        self.ends(charge, now).iter().map(|(_, units)| units).sum()
    }

    fn ends(&self, charge: &Charge<'_>, now: u64) -> Vec<(u64, u64)> {
        let holds = self.holds.get(&name(charge)).into_iter().flat_map(|holds| holds.values());
        let held = holds.filter(|hold| hold.end > now && hold.state == State::Open);
        let mut ends: Vec<_> = held.map(|hold| (hold.end, hold.units)).collect();
        ends.sort_unstable();
        ends
    }

    /// Returns the units of holds that have ended.
    pub(in crate::testing) fn release_ended(&mut self, charge: &Charge<'_>, now: u64) {
        let quota = charge.quota();
        let Some(holds) = self.holds.get_mut(&name(charge)) else { return };
        let releases = quota.is_concurrency() || quota.holds().on_expire() == OnExpire::Release;
        // After the clock stepped back.
        let latest = now + micros(quota.holds().max_ttl());
        for hold in holds.values_mut().filter(|hold| releases && hold.releases) {
            hold.known_until -= hold.end.saturating_sub(latest);
            hold.end = hold.end.min(latest);
        }
        if quota.is_concurrency() {
            holds.retain(|_, hold| hold.end > now);
            return;
        }
        if quota.holds().on_expire() != OnExpire::Release {
            return;
        }
        let mut ended: Vec<&mut ModelHold> =
            holds.values_mut().filter(|hold| hold.releases && hold.end <= now).collect();
        ended.sort_by_key(|hold| (hold.end, hold.refund_at));
        let ended: Vec<(u64, u64)> = ended
            .into_iter()
            .map(|hold| {
                hold.releases = false;
                (hold.units, hold.refund_at)
            })
            .collect();
        for (units, refund_at) in ended {
            let _ = self.apply(Action::Refund, charge, units, refund_at, now);
        }
    }

    /// Applies an action to the count.
    fn apply(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        units: u64,
        charged_at: u64,
        now: u64,
    ) -> Decision {
        let charge = charge.without_hold().with_cost(units);
        let charge = charge.with_charged_at(Timestamp::from_micros(charged_at));
        self.decide_with_block(action, &charge, now, true)
    }

    fn unspent(&mut self, charge: &Charge<'_>, now: u64) -> Decision {
        if charge.quota().is_concurrency() {
            return self.decide_in_flight(Action::Renew, charge, now, 0);
        }
        let read = self.decide_one(Action::Peek, &charge.without_hold().with_cost(0), now, true);
        Decision { allowed: true, retry_after: Duration::ZERO, delay: Duration::ZERO, ..read }
    }

    fn report(&mut self, charge: &Charge<'_>, units: u64, now: u64) -> Decision {
        if units == 0 {
            return self.unspent(charge, now);
        }
        self.apply(Action::Report, charge, units, 0, now)
    }

    fn refund(&mut self, charge: &Charge<'_>, units: u64, at: u64, now: u64) -> Decision {
        if units == 0 {
            return self.unspent(charge, now);
        }
        self.apply(Action::Refund, charge, units, at, now)
    }

    /// Returns the decision on units in flight. `end`: that of an acquire that is spent, or 0.
    fn decide_in_flight(
        &self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
        end: u64,
    ) -> Decision {
        let (ends, limit) = (self.ends(charge, now), charge.quota().limit());
        let held = self.in_flight(charge, now);
        let cost = if matches!(action, Action::Acquire | Action::Peek) { charge.cost() } else { 0 };
        let fits = held + cost <= limit || cost == 0;
        let fits_at = |time: u64| {
            let left: u64 =
                ends.iter().filter(|(end, _)| *end > time).map(|(_, units)| units).sum();
            left + cost <= limit
        };
        let retry_after = match ends.iter().find(|(end, _)| fits_at(*end)) {
            Some((end, _)) if !fits => end - now,
            _ => 0,
        };
        let spent = if end > 0 && fits { cost } else { 0 };
        let last = ends.last().map_or(now, |(end, _)| *end).max(if fits { end } else { 0 });
        Decision {
            allowed: fits,
            limit,
            remaining: limit.saturating_sub(held + spent),
            retry_after: Duration::from_micros(retry_after),
            reset_after: Duration::from_micros(last.max(now) - now),
            delay: Duration::ZERO,
            source: Source::Store,
            hold: None,
        }
    }

    pub(super) fn decide_with_hold(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
        all_fit: bool,
    ) -> Decision {
        let reads_hold = !matches!(action, Action::Reset | Action::ChargeUpTo | Action::Report);
        let is_concurrency = charge.quota().is_concurrency();
        match (charge.hold().filter(|_| reads_hold), action) {
            (None, Action::Reset) if is_concurrency => {
                self.holds.remove(&name(charge));
                self.decide_in_flight(action, charge, now, 0)
            }
            (None, Action::Refund) if is_concurrency => {
                let mut left = charge.cost();
                let holds = self.holds.entry(name(charge)).or_default();
                let mut by_end: Vec<&mut ModelHold> = holds.values_mut().collect();
                by_end.sort_by_key(|hold| hold.end);
                for hold in by_end {
                    let taken = hold.units.min(left);
                    (hold.units, left) = (hold.units - taken, left - taken);
                }
                holds.retain(|_, hold| hold.units > 0);
                self.decide_in_flight(action, charge, now, 0)
            }
            (None, _) if is_concurrency => {
                let spends = action == Action::Peek && all_fit;
                let end = if spends { now + micros(charge.quota().holds().ttl()) } else { 0 };
                self.decide_in_flight(action, charge, now, end)
            }
            (None, _) => {
                if action == Action::Reset {
                    let holds = self.holds.get_mut(&name(charge));
                    holds.into_iter().flatten().for_each(|(_, hold)| {
                        (hold.releases, hold.is_before_reset) = (false, true);
                    });
                }
                self.decide_with_block(action, charge, now, all_fit)
            }
            (Some(hold), Action::Acquire | Action::Peek) => {
                self.reserve(action, charge, hold, now, all_fit)
            }
            (Some(hold), Action::Commit | Action::Refund) => {
                self.settle(action == Action::Refund, charge, hold, now)
            }
            (Some(hold), _) => self.renew(charge, hold, now),
        }
    }

    fn reserve(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        hold: &Hold,
        now: u64,
        all_fit: bool,
    ) -> Decision {
        let quota = charge.quota();
        let (is_concurrency, terms) = (quota.is_concurrency(), quota.holds());
        if let Some(known) = self.repeated(action, charge, now) {
            let unspent = self.unspent(charge, now);
            let is_queue = quota.algorithm() == Algorithm::LeakyBucket;
            let delay = if is_queue { known.refund_at.saturating_sub(now) } else { 0 };
            let rest = known.end.saturating_sub(now).min(micros(terms.max_ttl()));
            let expires_after = if known.state == State::Open { rest } else { 0 };
            return Decision {
                remaining: if is_concurrency { unspent.remaining } else { known.remaining },
                delay: Duration::from_micros(delay),
                hold: Some(HoldState::of_micros(HoldStatus::Replayed, expires_after)),
                ..unspent
            };
        }
        let ttl = hold.ttl_micros(terms);
        let (decision, refund_at) = if is_concurrency {
            (self.decide_in_flight(action, charge, now, if all_fit { now + ttl } else { 0 }), now)
        } else {
            let before = self.unspent(charge, now);
            let is_bucket =
                matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
            let refund_at = if is_bucket { now + micros(before.reset_after) } else { now };
            (self.decide_with_block(action, charge, now, all_fit), refund_at)
        };
        if !decision.allowed || !all_fit || action == Action::Peek {
            return decision;
        }
        let (on_expire, is_settled) = (terms.on_expire(), hold.is_settled());
        let grace = if is_settled { 0 } else { GRACE };
        let known = ModelHold {
            units: charge.cost(),
            charged_at: now,
            refund_at,
            end: now + ttl,
            known_until: now + ttl + grace,
            remaining: decision.remaining,
            on_expire,
            releases: (on_expire == OnExpire::Release || is_concurrency) && !is_settled,
            is_before_reset: false,
            state: if is_settled { State::Settled { used: charge.cost() } } else { State::Open },
        };
        self.holds.entry(name(charge)).or_default().insert(hold.id().to_owned(), known);
        let expires_after = if is_settled { 0 } else { ttl };
        decision.with_hold(HoldState::of_micros(HoldStatus::Held, expires_after))
    }

    fn settle(&mut self, is_refund: bool, charge: &Charge<'_>, hold: &Hold, now: u64) -> Decision {
        let used = if is_refund { 0 } else { charge.cost() };
        let known = self.hold(charge, hold, now);
        if charge.quota().is_concurrency() {
            let removed = self.holds.get_mut(&name(charge)).and_then(|it| it.remove(hold.id()));
            let status = if removed.is_some() { HoldStatus::Settled } else { HoldStatus::Unknown };
            let decision = self.unspent(charge, now);
            return decision.with_hold(HoldState::of_micros(status, 0));
        }
        let (decision, state, status) = match known {
            None => {
                let decision = self.report(charge, used, now);
                if used > 0 {
                    self.remember_report(charge, hold, now);
                }
                (decision, None, HoldStatus::Unknown)
            }
            Some(known) => match known.state {
                State::Open
                    if known.is_before_reset
                        || known.on_expire == OnExpire::Release
                            && (known.end <= now || !known.releases) =>
                {
                    if known.releases {
                        // The terms have changed since the reservation.
                        let _ = self.refund(charge, known.units, known.refund_at, now);
                    }
                    (self.report(charge, used, now), Some(State::Reported), HoldStatus::Ended)
                }
                State::Open => {
                    let decision = if used <= known.units {
                        self.refund(charge, known.units - used, known.refund_at, now)
                    } else {
                        self.report(charge, used - known.units, now)
                    };
                    let state = if is_refund { State::Refunded } else { State::Settled { used } };
                    (decision, Some(state), HoldStatus::Settled)
                }
                State::Settled { .. } if is_refund && known.is_before_reset => {
                    (self.unspent(charge, now), Some(State::Refunded), HoldStatus::Settled)
                }
                State::Settled { used } if is_refund => {
                    let decision = self.refund(charge, used, known.refund_at, now);
                    (decision, Some(State::Refunded), HoldStatus::Settled)
                }
                State::Settled { .. } | State::Refunded => {
                    (self.unspent(charge, now), None, HoldStatus::Settled)
                }
                State::Reported => (self.unspent(charge, now), None, HoldStatus::Ended),
                State::WasUnknown => (self.unspent(charge, now), None, HoldStatus::Reported),
            },
        };
        let holds = self.holds.get_mut(&name(charge));
        if let (Some(state), Some(known)) = (state, holds.and_then(|it| it.get_mut(hold.id()))) {
            (known.state, known.releases) = (state, false);
        }
        decision.with_hold(HoldState::of_micros(status, 0))
    }

    fn remember_report(&mut self, charge: &Charge<'_>, hold: &Hold, now: u64) {
        let ttl = micros(charge.quota().holds().max_ttl());
        let known = ModelHold {
            units: charge.cost(),
            charged_at: now,
            refund_at: now,
            end: now + ttl,
            known_until: now + ttl + GRACE,
            remaining: 0,
            on_expire: OnExpire::Charge,
            releases: false,
            is_before_reset: false,
            state: State::WasUnknown,
        };
        self.holds.entry(name(charge)).or_default().insert(hold.id().to_owned(), known);
    }

    fn renew(&mut self, charge: &Charge<'_>, hold: &Hold, now: u64) -> Decision {
        let terms = charge.quota().holds();
        let known = self.holds.get_mut(&name(charge)).and_then(|it| it.get_mut(hold.id()));
        let known = known.filter(|it| it.state == State::Open && it.end > now && it.is_charged());
        let known = known.filter(|it| !it.is_before_reset);
        let state = match known {
            None => HoldState::of_micros(HoldStatus::Ended, 0),
            Some(known) => {
                let max_ttl = micros(terms.max_ttl());
                let extended = (known.charged_at + max_ttl).min(now + hold.ttl_micros(terms));
                let end = known.end.min(now + max_ttl).max(extended);
                known.known_until = known.known_until + end - known.end;
                known.end = end;
                HoldState::of_micros(HoldStatus::Held, end - now)
            }
        };
        self.unspent(charge, now).with_hold(state)
    }
}
