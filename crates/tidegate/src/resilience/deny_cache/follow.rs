//! Reads the news of the store for as long as denials are of use.

use std::sync::atomic::Ordering;
use std::sync::{PoisonError, Weak};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::Inner;
use crate::clock::micros;
use crate::resilience::jittered;
use crate::store::news::{Freed, Mark};
use crate::store::{Store, StoreError};

/// Between two looks, give or take a little: many instances must not come all at once.
const PAUSE: Duration = Duration::from_millis(300);
const JITTER: Duration = Duration::from_millis(100);
/// A look that takes longer is worth nothing.
const PATIENCE: Duration = Duration::from_millis(500);
/// So long after a look was begun, something may have happened that nobody here has heard of for a
/// second.
const TRUST: Duration = Duration::from_secs(1);
/// After so many looks in which nobody wanted to know, there are no more.
const IDLE_LOOKS: u32 = 25;

/// Where and when news were last read.
#[derive(Default)]
struct Reading {
    mark: Mark,
    /// When it was begun by our clock, and the time by the store's.
    times: Option<(u64, u64)>,
}

pub(super) async fn news<S: Store>(inner: Weak<Inner<S>>) {
    let mut reading = Reading::default();
    let mut idle = 0;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        if let Err(error) = inner.look(&mut reading).await {
            tracing::debug!(%error, "no news of the store: denials are not answered without it after a second");
        }
        idle = if inner.used.swap(false, Ordering::Relaxed) { 0 } else { idle + 1 };
        if idle >= IDLE_LOOKS && inner.stop_following() {
            return;
        }
        drop(inner);
        sleep(PAUSE + jittered(JITTER)).await;
    }
}

impl<S: Store> Inner<S> {
    async fn look(&self, reading: &mut Reading) -> Result<(), StoreError> {
        let sent = self.now();
        let Some(call) = self.store.news(&reading.mark) else { return Ok(()) };
        let news = timeout(PATIENCE, call).await.unwrap_or(Err(StoreError::Timeout(PATIENCE)))?;
        let freed = if ran_ahead(reading.times, news.now, self.now()) {
            Freed::Anything
        } else {
            news.freed
        };
        *reading = Reading { mark: news.mark, times: news.now.map(|now| (sent, now)) };
        // First forgotten, then trusted. A denial that is under way meanwhile finds that it comes
        // too late to be kept.
        match freed {
            Freed::Counts(counts) => counts.into_iter().for_each(|count| self.table.forget(count)),
            Freed::Anything => self.table.clear(),
        }
        let trust = micros(TRUST);
        self.trusted_until.store(sent.saturating_add(trust), Ordering::Release);
        Ok(())
    }

    /// Nothing is read any more, and nothing believed. False if somebody wants it just now.
    fn stop_following(&self) -> bool {
        let mut follower = self.follower.lock().unwrap_or_else(PoisonError::into_inner);
        if self.used.load(Ordering::Relaxed) {
            return false;
        }
        self.trusted_until.store(0, Ordering::Release);
        *follower = None;
        true
    }
}

/// Whether the store's clock has gone further than ours: it was set, or another server has taken
/// over, or this machine has slept. By that clock denials end earlier than we think.
fn ran_ahead(before: Option<(u64, u64)>, now: Option<u64>, ours: u64) -> bool {
    let (Some((begun, then)), Some(now)) = (before, now) else { return false };
    let at_most = ours.saturating_sub(begun);
    // What a denial is held too short by anyway.
    now.saturating_sub(then) > at_most + at_most / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_has_gone_further_than_ours_is_noticed() {
        let second = 1_000_000;
        assert!(!ran_ahead(None, Some(5), 5));
        assert!(!ran_ahead(Some((0, 7)), None, 5));
        assert!(!ran_ahead(Some((0, 7)), Some(7 + second + 1_000), second));
        assert!(ran_ahead(Some((0, 7)), Some(7 + second + 1_001), second));
        assert!(
            !ran_ahead(Some((0, 7)), Some(3), second),
            "one that is behind only makes denials longer"
        );
    }
}
