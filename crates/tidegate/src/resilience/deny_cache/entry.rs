//! [`DenialEntry`]: a cached denial, and the time until which it surely holds.

use std::num::NonZeroU64;

use super::key::EntryKey;
use super::unrecorded::COUNTED_DENIAL_TTL;
use crate::algorithm::{Algorithm, RawDecision, mul_div_ceil};
use crate::charge::Charge;
use crate::clock::micros;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::shared::MAX_DENIAL_TTL;

/// A cached denial. All times are in microseconds by the store's clock.
#[derive(Debug)]
pub(super) struct DenialEntry {
    pub(super) key: EntryKey,
    pub(super) cost: u64,
    /// Values of the denial.
    remaining: u64,
    retry_after: u64,
    reset_after: u64,
    /// Time at which the store was called, and time at which it had answered.
    pub(super) sent: u64,
    pub(super) received: u64,
    /// Epoch of the store before the call.
    pub(super) epoch: u64,
    pub(super) serial: NonZeroU64,
    /// Time before which a request is surely denied.
    pub(super) until: u64,
    /// For a bucket: units that this instance has requested since the denial. For a log that counts
    /// denials: units of cached denials that the store has not recorded yet.
    pub(super) units: u64,
    pub(super) snapshot: Option<Box<RequestSnapshot>>,
    /// Whether the entry was used since the last eviction.
    pub(super) used: bool,
}

/// Quotas of all charges of a request at the time of its denial.
#[derive(Debug)]
pub(super) struct RequestSnapshot {
    /// Hash of all charges of the request.
    pub(super) request: u128,
    pub(super) quotas: Box<[QuotaSnapshot]>,
}

/// State of one quota, with nothing spent.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuotaSnapshot {
    remaining: u64,
    reset_at: u64,
}

/// A denial by the store that is to be cached.
#[derive(Debug)]
pub(super) struct StoreDenial {
    pub(super) cost: u64,
    pub(super) decision: Decision,
    /// Time at which the store was called, and time at which it had answered. It decided in
    /// between.
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) snapshot: Option<Box<RequestSnapshot>>,
}

impl DenialEntry {
    /// Returns `None` for a denial that ends too soon to be useful.
    pub(super) fn new(
        key: EntryKey,
        epoch: u64,
        serial: NonZeroU64,
        quota: &Quota,
        denial: StoreDenial,
    ) -> Option<Self> {
        let StoreDenial { cost, decision, sent, received, snapshot } = denial;
        let retry_after = micros(decision.retry_after);
        let ttl = if quota.count_denied() { COUNTED_DENIAL_TTL } else { MAX_DENIAL_TTL };
        let until = sent.saturating_add(certain_part(retry_after).min(micros(ttl)));
        (until > sent || is_bucket(quota)).then_some(Self {
            key,
            cost,
            remaining: decision.remaining,
            retry_after,
            reset_after: micros(decision.reset_after),
            sent,
            received,
            epoch,
            serial,
            until,
            units: 0,
            snapshot,
            used: false,
        })
    }

    /// Returns the time at which the entry expires, however long its denial holds.
    pub(super) fn expires_at(&self) -> u64 {
        self.sent.saturating_add(micros(MAX_DENIAL_TTL))
    }

    /// Extends the entry of a quota that counts denials while one request asks the store again, so
    /// that the others are still denied from the cache.
    pub(super) fn extend(&mut self, now: u64) {
        let holds = certain_part(self.retry_after).min(micros(MAX_DENIAL_TTL));
        self.until =
            self.sent.saturating_add(holds).min(now.saturating_add(micros(COUNTED_DENIAL_TTL)));
    }

    /// Counts units of a bucket that the store is asked for after this denial.
    ///
    /// A later request of the same cost is surely denied before `until`, for these reasons:
    ///
    /// * `retry_after` is the time at which the first such request could be admitted. Each further
    ///   one needs `cost` more units, which take `cost * W / L` to drain (less [`Self::slack`]).
    /// * An admitted request takes its units, other instances can only take more, and refunds,
    ///   resets and other quotas drop the entry.
    /// * A request in flight counts as admitted. If it is denied instead, there were fewer than
    ///   `cost` units, so the later request is denied as well. If it fails, the entry is dropped.
    pub(super) fn count_request(&mut self, quota: &Quota, units: u64) {
        self.units = self.units.saturating_add(units);
        let drain_time = mul_div_floor(self.units, quota.window_micros(), quota.limit());
        let further = drain_time.saturating_sub(self.slack(quota));
        let holds = certain_part(self.retry_after.saturating_add(further));
        self.until = self.sent.saturating_add(holds.min(micros(MAX_DENIAL_TTL)));
    }

    /// Returns how far below `burst - cost` a bucket may be at the end of `retry_after`, as a time
    /// to drain. It is 0, unless the count is that of another algorithm, whose units may expire
    /// all at once: the level at that time follows from `reset_after`.
    fn slack(&self, quota: &Quota) -> u64 {
        let units = quota.burst().saturating_sub(self.cost);
        let drain_time = mul_div_floor(units, quota.window_micros(), quota.limit());
        drain_time.saturating_sub(self.reset_after.saturating_sub(self.retry_after))
    }

    pub(super) fn decision(&self, charge: &Charge<'_>, now: u64) -> Decision {
        let quota = charge.quota();
        if quota.count_denied() {
            // This denial counts as well, so the wait starts again.
            let Self { remaining, retry_after, reset_after, .. } = *self;
            let raw = RawDecision { allowed: false, remaining, retry_after, reset_after, delay: 0 };
            return raw.into_decision(quota, Source::DenyCache);
        }
        let drain_time = if self.units == 0 {
            0
        } else {
            mul_div_ceil(self.units, quota.window_micros(), quota.limit())
        };
        let reset_at = self.received.saturating_add(drain_time).saturating_add(self.reset_after);
        let reset_after = reset_at.saturating_sub(now);
        let further = drain_time.saturating_sub(self.slack(quota));
        let retry_at = self.received.saturating_add(further).saturating_add(self.retry_after);
        // The units that remained at the denial have been requested since.
        let at_denial = if self.units == 0 { self.remaining } else { 0 };
        let raw = RawDecision {
            allowed: false,
            remaining: remaining_now(quota, at_denial, reset_after),
            retry_after: retry_at.saturating_sub(now),
            reset_after,
            delay: 0,
        };
        raw.into_decision(quota, Source::DenyCache)
    }
}

impl QuotaSnapshot {
    /// Takes the values of a decision that was received at this time.
    pub(super) fn new(decision: &Decision, received: u64) -> Self {
        Self {
            remaining: decision.remaining,
            reset_at: received.saturating_add(micros(decision.reset_after)),
        }
    }

    pub(super) fn decision(self, charge: &Charge<'_>, now: u64) -> Decision {
        let reset_after = self.reset_at.saturating_sub(now);
        let remaining = remaining_now(charge.quota(), self.remaining, reset_after);
        let raw = RawDecision { remaining, reset_after, ..RawDecision::untouched(charge.quota()) };
        raw.into_decision(charge.quota(), Source::DenyCache)
    }
}

/// Returns the units that remain now. The level of a bucket follows from its `reset_after`. For
/// other algorithms it is not known when units expire, so the value of the denial is the lower
/// bound.
fn remaining_now(quota: &Quota, at_denial: u64, reset_after: u64) -> u64 {
    if !is_bucket(quota) {
        return at_denial;
    }
    let level = (u128::from(reset_after) * u128::from(quota.limit()))
        .div_ceil(u128::from(quota.window_micros()));
    quota.burst().saturating_sub(u64::try_from(level).unwrap_or(u64::MAX)).max(at_denial)
}

pub(super) fn is_bucket(quota: &Quota) -> bool {
    matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
}

/// Returns the part of a wait that surely passes by the store's clock. NTP changes the speed of a
/// clock by up to one part in 2,000, so two clocks may drift apart by one part in 1,000.
fn certain_part(wait: u64) -> u64 {
    wait - wait.div_ceil(1_000)
}

fn mul_div_floor(a: u64, b: u64, m: u64) -> u64 {
    u64::try_from(u128::from(a) * u128::from(b) / u128::from(m)).unwrap_or(u64::MAX)
}
