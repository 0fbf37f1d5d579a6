//! [`Clock`]: where a store's time comes from, and [`ManualClock`] for tests that never sleep.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use self::anchored::Anchored;

mod anchored;

/// Where time comes from: microseconds since the Unix epoch, and how to wait for them.
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// Microseconds since the Unix epoch. Windows of the clock (`fixed-window`, `sliding-counter`)
    /// are aligned to it.
    fn now(&self) -> u64;

    /// Resolves once `duration` has passed on this clock, never earlier.
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Blocks the thread until `duration` has passed on this clock.
    fn sleep_blocking(&self, duration: Duration);
}

/// The machine's clock: the wall clock at the start, moved on by the monotonic one, so it never
/// follows a wall clock that is set.
///
/// Its `sleep` is Tokio's, so an async [`wait`](crate::Limiter::wait) needs a Tokio runtime with
/// its timer on.
#[derive(Clone)]
pub struct SystemClock {
    shared: Arc<Anchored>,
}

impl SystemClock {
    /// A clock set by the wall clock now.
    #[must_use]
    pub fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { shared: Arc::new(Anchored::new(micros(since_epoch))) }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SystemClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemClock").field("now", &self.now()).finish()
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> u64 {
        self.shared.now()
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn sleep_blocking(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// A clock that moves only when it is told to. Clones share one time.
///
/// Sleepers wake when the time they wait for is reached, so a test of a
/// [`wait`](crate::Limiter::wait) takes no time:
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Clock, ManualClock};
///
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(3600));
/// assert_eq!(clock.now() - before, 3_600_000_000);
/// ```
#[derive(Clone, Default)]
pub struct ManualClock {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<ManualState>,
    moved: Condvar,
}

struct ManualState {
    now: u64,
    sleepers: Vec<Waker>,
}

impl Default for ManualState {
    /// Noon of some day, so that an hour back and a hundred days on are both still sensible times.
    fn default() -> Self {
        Self { now: 1_700_049_600_000_000, sleepers: Vec::new() }
    }
}

impl ManualClock {
    /// A clock that stands at a fixed time in 2023.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves on.
    pub fn advance(&self, duration: Duration) {
        self.change(|now| now.saturating_add(micros(duration)));
    }

    /// Steps back, as a clock does that was set wrong.
    pub fn step_back(&self, duration: Duration) {
        self.change(|now| now.saturating_sub(micros(duration)));
    }

    /// Jumps to this time (microseconds since the epoch).
    pub fn set(&self, now: u64) {
        self.change(|_| now);
    }

    /// How many callers are asleep on this clock: a test that moves it may want to know that
    /// somebody waits.
    #[must_use]
    pub fn sleepers(&self) -> usize {
        self.lock().sleepers.len()
    }

    fn change(&self, next: impl FnOnce(u64) -> u64) {
        let mut state = self.lock();
        state.now = next(state.now);
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        self.shared.moved.notify_all();
        sleepers.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, ManualState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManualClock").field("now", &self.now()).finish()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> u64 {
        self.lock().now
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(ManualSleep { clock: self, until: self.now().saturating_add(micros(duration)) })
    }

    fn sleep_blocking(&self, duration: Duration) {
        let mut state = self.lock();
        let until = state.now.saturating_add(micros(duration));
        while state.now < until {
            state = self.shared.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct ManualSleep<'a> {
    clock: &'a ManualClock,
    until: u64,
}

impl Future for ManualSleep<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.clock.lock();
        if state.now >= self.until {
            return Poll::Ready(());
        }
        state.sleepers.push(context.waker().clone());
        Poll::Pending
    }
}

/// Whole microseconds, rounded up: who sleeps or advances by a duration has then truly reached it.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}
