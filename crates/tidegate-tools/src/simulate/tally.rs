//! Counts of a policy and its keys, and the exact log that they are compared with.

use std::collections::{HashMap, VecDeque};

use tidegate::{Algorithm, Policy, PolicyDecision, Quota, ShowKeys};

use super::series::Series;
use tidegate_api::duration;
use tidegate_config::key_hash;

/// Size of a key in the memory store, and of a request in a sliding log.
const KEY_BYTES: u64 = 40;
const LOG_ENTRY_BYTES: u64 = 16;
/// Maximum number of time slots in which expiries are counted. Beyond it, each two become one.
const MAX_SLOTS: usize = 4_096;

/// Counts of one policy.
#[derive(Debug)]
pub(super) struct PolicyTally {
    pub(super) name: String,
    pub(super) quota: Quota,
    pub(super) is_shadow: bool,
    show_keys: ShowKeys,
    pub(super) requests: u64,
    /// Requests that passed and took units of this policy.
    pub(super) admitted: u64,
    pub(super) admitted_units: u64,
    /// Requests that this policy denies, in shadow mode only on paper.
    pub(super) denied: u64,
    /// Admitted requests that do not fit an exact log of the same limit and window.
    pub(super) over: u64,
    pub(super) over_units: u64,
    /// Denied requests that fit one.
    pub(super) under: u64,
    pub(super) under_units: u64,
    pub(super) worst: Option<WorstWindow>,
    pub(super) series: Series,
    pub(super) keys: HashMap<String, KeyTally>,
    /// Keys that count at the same time.
    pub(super) live_keys: LiveCount,
    /// Requests that sliding logs hold at the same time.
    pub(super) live_entries: LiveCount,
}

/// Window in which a key was admitted most units, as a part of its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorstWindow {
    pub(super) units: u64,
    pub(super) limit: u64,
    pub(super) key: String,
    /// End of the window.
    pub(super) time: u64,
}

/// Counts of one key.
#[derive(Debug, Default)]
pub(super) struct KeyTally {
    pub(super) requests: u64,
    pub(super) admitted: u64,
    pub(super) denied: u64,
    /// Time until which the key counts; 0 if it never did.
    expires_at: u64,
    window: ExactWindow,
}

/// Units that were admitted in the last window: the sliding log by its definition.
#[derive(Debug, Default)]
pub(super) struct ExactWindow {
    admissions: VecDeque<(u64, u64)>,
    units: u64,
}

impl ExactWindow {
    /// Returns the units that were admitted in (now − window, now].
    pub(super) fn units_at(&mut self, now: u64, window: u64) -> u64 {
        while let Some((time, units)) = self.admissions.front().copied() {
            if now.saturating_sub(time) < window {
                break;
            }
            self.units -= units;
            self.admissions.pop_front();
        }
        self.units
    }

    /// Takes units out of the last admission.
    fn refund(&mut self, units: u64) {
        if let Some((_, sum)) = self.admissions.back_mut() {
            *sum -= units;
            self.units -= units;
        }
    }

    pub(super) fn admit(&mut self, now: u64, units: u64) {
        self.units += units;
        match self.admissions.back_mut() {
            Some((time, sum)) if *time == now => *sum += units,
            _ => self.admissions.push_back((now, units)),
        }
    }
}

impl PolicyTally {
    pub(super) fn new(policy: &Policy, start: u64) -> Self {
        Self {
            name: policy.name().to_owned(),
            quota: policy.quota().clone(),
            is_shadow: policy.mode() == tidegate::Mode::Shadow,
            show_keys: policy.show_keys(),
            requests: 0,
            admitted: 0,
            admitted_units: 0,
            denied: 0,
            over: 0,
            over_units: 0,
            under: 0,
            under_units: 0,
            worst: None,
            series: Series::new(start),
            keys: HashMap::new(),
            live_keys: LiveCount::default(),
            live_entries: LiveCount::default(),
        }
    }

    /// Counts a decision of this policy. `passes`: no policy denied the request.
    pub(super) fn record(&mut self, now: u64, entry: &PolicyDecision<'_>, passes: bool) {
        self.requests += 1;
        let is_denied = entry.is_denied();
        let is_admitted = passes && !is_denied;
        let bin = self.series.at(now);
        bin.admitted += u64::from(is_admitted);
        bin.denied += u64::from(is_denied);
        self.admitted += u64::from(is_admitted);
        self.denied += u64::from(is_denied);
        let (Some(key), Some(quota)) = (entry.key(), entry.quota()) else { return };
        // Most keys are known: no allocation for the lookup.
        let tally = match self.keys.get_mut(key) {
            Some(tally) => tally,
            None => self.keys.entry(key.to_owned()).or_default(),
        };
        tally.requests += 1;
        let window = duration::micros(quota.window());
        let (limit, cost) = (quota.limit(), entry.cost());
        let fits = tally.window.units_at(now, window).saturating_add(cost) <= limit;
        if is_denied {
            tally.denied += 1;
            // A rejection has no count that could be compared.
            if fits && !entry.is_rejected() {
                self.under += 1;
                self.under_units += cost;
            }
        }
        if !is_admitted {
            return;
        }
        tally.admitted += 1;
        self.admitted_units += cost;
        if !fits {
            self.over += 1;
            self.over_units += cost;
        }
        tally.window.admit(now, cost);
        let units = tally.window.units_at(now, window);
        let peak = units.saturating_mul(1_000).div_ceil(limit);
        bin.peak = bin.peak.max(peak);
        let is_worst = self.worst.as_ref().is_none_or(|worst| {
            u128::from(units) * u128::from(worst.limit)
                > u128::from(worst.units) * u128::from(limit)
        });
        if is_worst && !quota.is_concurrency() {
            self.worst = Some(WorstWindow { units, limit, key: key.to_owned(), time: now });
        }
        let expires_at = now.saturating_add(lifetime(quota));
        self.live_keys.extend(now, tally.expires_at, expires_at);
        tally.expires_at = expires_at;
        if quota.algorithm() == Algorithm::SlidingLog {
            self.live_entries.extend(now, 0, now.saturating_add(window));
        }
    }

    /// Takes the last admission out of the exact log, because it is refunded.
    pub(super) fn refund(&mut self, entry: &PolicyDecision<'_>) {
        if let Some(tally) = entry.key().and_then(|key| self.keys.get_mut(key)) {
            tally.window.refund(entry.cost());
        }
    }

    /// Returns the number of keys with a denial.
    pub(super) fn denied_keys(&self) -> usize {
        self.keys.values().filter(|tally| tally.denied > 0).count()
    }

    /// Returns the keys with most denials, and of equal ones those with most requests.
    pub(super) fn heaviest_keys(&self, count: usize) -> Vec<(&String, &KeyTally)> {
        let mut keys: Vec<(&String, &KeyTally)> = self.keys.iter().collect();
        // The key makes the order of equal ones the same in each run.
        let order = |a: &(&String, &KeyTally), b: &(&String, &KeyTally)| {
            (b.1.denied, b.1.requests, a.0).cmp(&(a.1.denied, a.1.requests, b.0))
        };
        if (1..keys.len()).contains(&count) {
            keys.select_nth_unstable_by(count, order);
        }
        keys.truncate(count);
        keys.sort_unstable_by(order);
        keys
    }

    /// Returns a key as operators see it: one that is a credential, as its hash.
    pub(super) fn shown(&self, key: &str) -> String {
        match self.show_keys {
            ShowKeys::Plain => key.to_owned(),
            ShowKeys::Hashed => key_hash::of(key),
        }
    }

    /// Returns the estimated size of the counts in a memory store, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.live_keys.peak * KEY_BYTES + self.live_entries.peak * LOG_ENTRY_BYTES
    }
}

/// Returns the time in microseconds for which an admitted request counts.
fn lifetime(quota: &Quota) -> u64 {
    let window = duration::micros(quota.window());
    match quota.algorithm() {
        Algorithm::SlidingCounter => 2 * window,
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            let drain =
                u128::from(window) * u128::from(quota.burst()) / u128::from(quota.limit().max(1));
            u64::try_from(drain).unwrap_or(u64::MAX)
        }
        _ => window,
    }
}

/// Number of things that live until a time, with its peak. Expiries are counted in time slots,
/// which are at most a 1,024th of the longest life.
#[derive(Debug, Default)]
pub(super) struct LiveCount {
    count: u64,
    pub(super) peak: u64,
    /// A slot is 2^shift microseconds.
    slot_shift: u32,
    /// First slot of `expiries`.
    base: u64,
    expiries: VecDeque<u64>,
}

impl LiveCount {
    /// Counts one thing until `until`, which counted until `before`, or not at all.
    fn extend(&mut self, now: u64, before: u64, until: u64) {
        self.expire(now);
        while (until >> self.slot_shift).saturating_sub(self.base) >= MAX_SLOTS as u64 {
            self.widen();
        }
        if let Some(count) = self.slot(before).filter(|_| before > 0) {
            *count -= 1;
            self.count -= 1;
        }
        let offset = usize::try_from((until >> self.slot_shift) - self.base).unwrap_or(0);
        if offset >= self.expiries.len() {
            self.expiries.resize(offset + 1, 0);
        }
        self.expiries[offset] += 1;
        self.count += 1;
        self.peak = self.peak.max(self.count);
    }

    fn slot(&mut self, time: u64) -> Option<&mut u64> {
        let offset = (time >> self.slot_shift).checked_sub(self.base)?;
        self.expiries.get_mut(usize::try_from(offset).ok()?)
    }

    fn expire(&mut self, now: u64) {
        let slot = now >> self.slot_shift;
        while self.base < slot {
            match self.expiries.pop_front() {
                Some(expired) => {
                    self.count -= expired;
                    self.base += 1;
                }
                None => self.base = slot,
            }
        }
    }

    fn widen(&mut self) {
        let mut merged = VecDeque::with_capacity(self.expiries.len() / 2 + 1);
        for (index, count) in self.expiries.iter().enumerate() {
            let slot = u64::midpoint(self.base % 2, index as u64);
            let offset = usize::try_from(slot).unwrap_or(0);
            if offset >= merged.len() {
                merged.resize(offset + 1, 0);
            }
            merged[offset] += count;
        }
        self.slot_shift += 1;
        self.base /= 2;
        self.expiries = merged;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_window_is_open_at_its_start() {
        let mut window = ExactWindow::default();
        window.admit(100, 2);
        window.admit(100, 1);
        window.admit(150, 4);
        assert_eq!(window.units_at(199, 100), 7);
        assert_eq!(window.units_at(200, 100), 4, "a request exactly one window ago is out");
        assert_eq!(window.units_at(250, 100), 0);
        window.admit(u64::MAX, 1);
        assert_eq!(window.units_at(u64::MAX, 100), 1);
    }

    #[test]
    fn peak_of_live_things_is_that_of_a_list() {
        let mut live = LiveCount::default();
        let mut expiries: Vec<u64> = vec![0; 50];
        let (mut now, mut seed, mut peak) = (1_000_000_u64, 7_u64, 0);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now += seed >> 50;
            let key = usize::try_from((seed >> 20) % 50).expect("small");
            let until = now + 100_000;
            live.extend(now, expiries[key], until);
            expiries[key] = until;
            peak = peak.max(expiries.iter().filter(|until| **until > now).count() as u64);
        }
        let difference = live.peak.abs_diff(peak);
        assert!(difference <= 1, "{} instead of {peak}", live.peak);
        assert!(live.expiries.len() <= MAX_SLOTS);
    }
}
