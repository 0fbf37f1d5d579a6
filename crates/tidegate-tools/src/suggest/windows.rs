//! Exact counts of a group: the busiest window of each key, and what a limit would deny.

use std::collections::VecDeque;
use std::io;

use futures_util::FutureExt as _;
use tidegate::{Charge, Limiter, MemoryStore, Quota};

use super::traffic::Traffic;
use crate::simulate::VirtualClock;

/// Maximum number of limits that are tried at once.
pub(super) const MAX_LIMITS: usize = 16;

/// Returns the requests of each key in its busiest window, an interval of this many microseconds.
pub(super) fn peaks(traffic: &Traffic, group: Option<usize>, window: u64) -> io::Result<Vec<u32>> {
    let (mut counts, mut peaks) = (vec![0; traffic.key_count()], vec![0; traffic.key_count()]);
    let (mut requests, mut left) = (traffic.requests(group)?, traffic.requests(group)?);
    while let Some(entry) = requests.advance()? {
        while let Some(old) = left.leave(entry.time, window)? {
            counts[old.key as usize] -= 1;
        }
        let key = entry.key as usize;
        counts[key] += 1;
        peaks[key] = counts[key].max(peaks[key]);
    }
    Ok(peaks)
}

/// Returns the requests that each of these limits would deny to the keys for which `counts` is true.
/// As in a sliding log, denied requests do not count.
pub(super) fn denials(
    traffic: &Traffic,
    group: Option<usize>,
    window: u64,
    limits: &[u64],
    counts: impl Fn(usize) -> bool,
) -> io::Result<Vec<u64>> {
    let mut denied = vec![0; limits.len()];
    let mut admitted: Vec<[u32; MAX_LIMITS]> = Vec::new();
    // Only the rows of keys that count take memory.
    let mut row = |key| {
        counts(key).then(|| {
            admitted.push([0; MAX_LIMITS]);
            admitted.len() - 1
        })
    };
    let rows: Vec<Option<usize>> = (0..traffic.key_count()).map(&mut row).collect();
    // Bits of the limits that admitted a request, for those in the window.
    let mut window_bits: VecDeque<u32> = VecDeque::new();
    let (mut requests, mut left) = (traffic.requests(group)?, traffic.requests(group)?);
    while let Some(entry) = requests.advance()? {
        while let Some(old) = left.leave(entry.time, window)? {
            if let (Some(row), Some(bits)) = (rows[old.key as usize], window_bits.front()) {
                for (index, sum) in admitted[row].iter_mut().enumerate() {
                    *sum -= bits >> index & 1;
                }
                window_bits.pop_front();
            }
        }
        let Some(row) = rows[entry.key as usize] else { continue };
        let sums = &mut admitted[row];
        let mut bits = 0;
        for (index, limit) in limits.iter().enumerate() {
            if u64::from(sums[index]) < *limit {
                sums[index] += 1;
                bits |= 1 << index;
            } else {
                denied[index] += 1;
            }
        }
        window_bits.push_back(bits);
    }
    Ok(denied)
}

/// Returns the burst that each key needs at this rate, so that a token bucket denies nothing.
pub(super) fn bursts(
    traffic: &Traffic,
    group: Option<usize>,
    limit: u64,
    window: u64,
) -> io::Result<Vec<u32>> {
    // A request fills the bucket by `window`, and a microsecond empties it by `limit`.
    let (mut levels, mut peaks) =
        (vec![(0_u64, 0_u64); traffic.key_count()], vec![0; traffic.key_count()]);
    let mut requests = traffic.requests(group)?;
    while let Some(entry) = requests.advance()? {
        let (time, level) = &mut levels[entry.key as usize];
        let drained = limit.saturating_mul(entry.time.saturating_sub(*time));
        *level = level.saturating_sub(drained).saturating_add(window);
        *time = entry.time;
        let burst = u32::try_from(level.div_ceil(window)).unwrap_or(u32::MAX);
        let peak: &mut u32 = &mut peaks[entry.key as usize];
        *peak = burst.max(*peak);
    }
    Ok(peaks)
}

/// Requests of a key that a quota decides, by the code that decides in production.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct KeyDecisions {
    pub(super) requests: u64,
    pub(super) denied: u64,
}

/// Returns the decisions of a quota on a group, by key.
pub(super) fn decide(
    traffic: &Traffic,
    group: Option<usize>,
    quota: &Quota,
) -> anyhow::Result<Vec<KeyDecisions>> {
    let clock = VirtualClock::default();
    let store = MemoryStore::builder().clock(clock.clone()).max_keys(usize::MAX).build();
    let limiter = Limiter::new(store);
    let mut decisions = vec![KeyDecisions::default(); traffic.key_count()];
    let mut requests = traffic.requests(group)?;
    while let Some(entry) = requests.advance()? {
        let key = entry.key as usize;
        clock.set(entry.time);
        // A memory store never waits.
        let charge = Charge::new(traffic.key_name(key), quota);
        let decision = limiter.acquire(&charge).now_or_never().transpose()?;
        let is_denied = decision.is_some_and(|decision| !decision.allowed);
        decisions[key].requests += 1;
        decisions[key].denied += u64::from(is_denied);
    }
    Ok(decisions)
}
