//! What happens again and again is told once a minute, with how often it was not told.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate::StoreError;

const PAUSE: Duration = Duration::from_secs(60);

/// Something that can go wrong with each of many requests.
pub(crate) struct Seldom(Mutex<Told>);

struct Told {
    last: Option<Instant>,
    untold: u64,
}

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Told { last: None, untold: 0 }))
    }

    /// How often it happened and was not told before this time, if this time is to be told.
    pub(crate) fn to_tell(&self, now: Instant) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.last.is_some_and(|last| now.saturating_duration_since(last) < PAUSE) {
            told.untold += 1;
            return None;
        }
        told.last = Some(now);
        Some(std::mem::take(&mut told.untold))
    }
}

/// A request that nobody could decide. The operator reads the reason; the client only that it was
/// not its fault.
pub(crate) fn store_failed(error: &StoreError) {
    static FAILURES: Seldom = Seldom::new();
    if let Some(untold) = FAILURES.to_tell(Instant::now()) {
        tracing::warn!(%error, untold, "the store could not decide; told once a minute");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_then_one_a_minute_with_the_number_of_the_others() {
        let (seldom, start) = (Seldom::new(), Instant::now());
        assert_eq!(seldom.to_tell(start), Some(0));
        for second in 1..60 {
            assert_eq!(seldom.to_tell(start + Duration::from_secs(second)), None);
        }
        assert_eq!(seldom.to_tell(start + PAUSE), Some(59));
        assert_eq!(seldom.to_tell(start + PAUSE * 3), Some(0));
    }
}
