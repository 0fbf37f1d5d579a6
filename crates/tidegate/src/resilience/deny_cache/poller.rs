//! Polls the invalidations of the store while cached denials are in use.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::DenyCacheCore;
use crate::random::jittered;
use crate::store::invalidation::{Cursor, Scope};
use crate::store::{SharedStore, StoreError};

/// Minimum interval between two polls. The jitter is added to it.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
const POLL_JITTER: Duration = Duration::from_millis(100);
const POLL_TIMEOUT: Duration = Duration::from_millis(500);
/// Time after the start of the last successful poll at which entries become stale.
const MAX_STALENESS: Duration = Duration::from_secs(1);
/// Number of polls without a use of the cache after which polling stops.
const IDLE_POLLS: u32 = 25;

/// State of the poller after its last successful poll.
#[derive(Default)]
struct PollState {
    cursor: Cursor,
    times: Option<PollTimes>,
}

/// Start of a poll by two clocks, in microseconds.
#[derive(Clone, Copy)]
struct PollTimes {
    local: u64,
    store: u64,
}

/// Polls until the cache is dropped or has been idle for a while.
async fn poll_invalidations<S: SharedStore>(inner: Weak<DenyCacheCore<S>>) {
    let mut state = PollState::default();
    let mut idle = 0;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        if let Err(error) = inner.poll_once(&mut state).await {
            tracing::debug!(%error, "polling invalidations failed");
        }
        idle = if inner.used.swap(false, Ordering::Relaxed) { 0 } else { idle + 1 };
        if idle >= IDLE_POLLS && inner.stop_polling() {
            return;
        }
        drop(inner);
        sleep(POLL_INTERVAL + jittered(POLL_JITTER)).await;
    }
}

impl<S: SharedStore> DenyCacheCore<S> {
    /// Starts the poller if it is not running and there is a Tokio runtime.
    pub(super) fn ensure_poller(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner);
        // The runtime that the poller ran on may have shut down.
        if poller.as_ref().is_none_or(AbortHandle::is_finished) {
            let task = runtime.spawn(poll_invalidations(Arc::downgrade(self)));
            *poller = Some(task.abort_handle());
        }
    }

    async fn poll_once(&self, state: &mut PollState) -> Result<(), StoreError> {
        let sent = self.now();
        let Some(call) = self.store.invalidations(&state.cursor) else { return Ok(()) };
        let polled = timeout(POLL_TIMEOUT, call).await;
        let invalidations = polled.unwrap_or(Err(StoreError::Timeout(POLL_TIMEOUT)))?;
        let scope = if store_clock_ran_ahead(state.times, invalidations.now, self.now()) {
            Scope::All
        } else {
            invalidations.scope
        };
        let times = invalidations.now.map(|store| PollTimes { local: sent, store });
        *state = PollState { cursor: invalidations.cursor, times };
        // Entries are dropped before the others become fresh. A denial that is in flight now has
        // the earlier version, so it is not used.
        match scope {
            Scope::Counts(counts) => {
                for count in counts {
                    self.versions.change(count);
                }
            }
            Scope::All => self.clear(),
        }
        let max_staleness = crate::clock::micros(MAX_STALENESS);
        self.fresh_until.store(sent.saturating_add(max_staleness), Ordering::Release);
        Ok(())
    }

    /// Marks all entries as stale and unregisters the poller. Returns false if the cache was used
    /// just now, so that polling must go on.
    fn stop_polling(&self) -> bool {
        let mut poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner);
        if self.used.load(Ordering::Relaxed) {
            return false;
        }
        self.fresh_until.store(0, Ordering::Release);
        *poller = None;
        true
    }
}

/// Returns whether the store's clock has advanced further than the local one since the last poll:
/// it was set, another server has taken over, or this machine was suspended. Denials then end
/// earlier than their entries say.
fn store_clock_ran_ahead(last: Option<PollTimes>, store_now: Option<u64>, local_now: u64) -> bool {
    let (Some(last), Some(store_now)) = (last, store_now) else { return false };
    let local_elapsed = local_now.saturating_sub(last.local);
    // Entries expire earlier by the same thousandth.
    store_now.saturating_sub(last.store) > local_elapsed + local_elapsed / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_clock_that_ran_ahead_is_detected() {
        let second = 1_000_000;
        let last = Some(PollTimes { local: 0, store: 7 });
        assert!(!store_clock_ran_ahead(None, Some(5), 5));
        assert!(!store_clock_ran_ahead(last, None, 5));
        assert!(!store_clock_ran_ahead(last, Some(7 + second + 1_000), second));
        assert!(store_clock_ran_ahead(last, Some(7 + second + 1_001), second));
        assert!(
            !store_clock_ran_ahead(last, Some(3), second),
            "a clock that is behind only makes denials longer"
        );
    }
}
