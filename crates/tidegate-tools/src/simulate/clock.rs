//! [`VirtualClock`]: the clock of a simulated store, which stands at the time of a request.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{Clock, Timestamp};

use tidegate_api::duration;

/// Clock that one thread sets. Unlike [`ManualClock`](tidegate::ManualClock) it has no sleepers to
/// wake, so that setting it costs nothing. A sleep moves it.
#[derive(Debug, Clone, Default)]
pub(crate) struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    pub(crate) fn set(&self, micros: u64) {
        self.0.store(micros, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.sleep_blocking(duration);
        Box::pin(std::future::ready(()))
    }

    fn sleep_blocking(&self, duration: Duration) {
        self.0.fetch_add(duration::micros_rounded_up(duration), Ordering::Relaxed);
    }
}
