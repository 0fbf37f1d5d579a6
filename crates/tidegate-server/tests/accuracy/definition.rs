//! Decisions of each algorithm by its definition in docs/accuracy.md, without its implementation.

use std::collections::VecDeque;
use std::time::Duration;

use tidegate::Algorithm;

use crate::form::{Form, WINDOW};
use crate::traffic::Traffic;

/// Count of one client.
enum Count {
    /// Times of the units in the window.
    Log(VecDeque<u64>),
    /// Number of the window, its units, and those of the previous window.
    Windows { number: u64, current: u64, previous: u64 },
    /// Units in use, in parts of a unit that each take a microsecond times the limit to drain.
    Bucket { level: u128, at: u64 },
}

impl Count {
    fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::SlidingLog => Self::Log(VecDeque::new()),
            Algorithm::SlidingCounter | Algorithm::FixedWindow => {
                Self::Windows { number: 0, current: 0, previous: 0 }
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => Self::Bucket { level: 0, at: 0 },
            Algorithm::Concurrency => unreachable!("not a rate"),
        }
    }

    /// Returns whether one unit is admitted at this time, and takes it.
    fn admits(&mut self, now: u64, algorithm: Algorithm, limit: u64, window: u64) -> bool {
        match self {
            Self::Log(times) => {
                times.retain(|time| time + window > now);
                let fits = (times.len() as u64) < limit;
                if fits {
                    times.push_back(now);
                }
                fits
            }
            Self::Windows { number, current, previous } => {
                let now_number = now / window;
                *previous = match now_number - *number {
                    0 => *previous,
                    1 => *current,
                    _ => 0,
                };
                if now_number > *number {
                    (*number, *current) = (now_number, 0);
                }
                let weighted = match algorithm {
                    Algorithm::FixedWindow => 0,
                    _ => *previous * (window - now % window) / window,
                };
                let fits = *current + weighted < limit;
                *current += u64::from(fits);
                fits
            }
            Self::Bucket { level, at } => {
                let drained = u128::from(now - *at) * u128::from(limit);
                (*level, *at) = (level.saturating_sub(drained), now);
                let unit = u128::from(window);
                let fits = *level + unit <= u128::from(limit) * unit;
                *level += if fits { unit } else { 0 };
                fits
            }
        }
    }
}

/// Returns the first request whose decision is not that of the definition with this limit.
pub(crate) fn first_difference(
    form: Form,
    limit: u64,
    traffic: &Traffic,
    decisions: &[bool],
) -> Option<usize> {
    let algorithm = form.algorithm();
    let window = micros(WINDOW);
    let mut counts: Vec<Count> = (0..traffic.clients).map(|_| Count::new(algorithm)).collect();
    assert_eq!(traffic.requests.len(), decisions.len(), "each request has a decision");
    let mut pairs = traffic.requests.iter().zip(decisions);
    pairs.position(|(request, is_allowed)| {
        counts[request.client].admits(request.time, algorithm, limit, window) != *is_allowed
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("short")
}
