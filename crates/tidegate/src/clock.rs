//! [`Clock`]: the time source of a store, [`Timestamp`], and [`ManualClock`] for tests that never
//! sleep.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use self::calibrated::CalibratedClock;

mod calibrated;

/// A point in time: microseconds since the Unix epoch, on the clock of a store.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Timestamp;
///
/// let start = Timestamp::from_micros(1_700_000_000_000_000);
/// let end = start.saturating_add(Duration::from_millis(1_500));
/// assert!(end > start);
/// assert_eq!(end.saturating_duration_since(start), Duration::from_millis(1_500));
/// assert_eq!(start.saturating_duration_since(end), Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The Unix epoch. As the time of a charge it means that the time is unknown.
    pub const ZERO: Self = Self(0);

    /// Creates a timestamp from microseconds since the Unix epoch.
    #[inline]
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the microseconds since the Unix epoch.
    #[inline]
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the time `duration` later, or the latest timestamp. The duration is rounded up to
    /// microseconds.
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros(duration)))
    }

    /// Returns the time `duration` earlier, or the Unix epoch. The duration is rounded up to
    /// microseconds.
    #[must_use]
    pub fn saturating_sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(micros(duration)))
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// A time source: the current time, and sleeping until a later time.
///
/// [`SystemClock`] and [`ManualClock`] implement it. Implement it for the simulated time of a test
/// framework; [`MemoryStore::builder`](crate::MemoryStore::builder) accepts any clock. A clock may
/// step back: stored times later than now then count as now, so that no key stays locked.
///
/// ```
/// use std::pin::Pin;
/// use std::time::Duration;
/// use tidegate::{Clock, MemoryStore, SystemClock, Timestamp};
///
/// /// A clock that is some time ahead, to test the behaviour of tomorrow.
/// #[derive(Debug)]
/// struct Ahead(SystemClock, Duration);
///
/// impl Clock for Ahead {
///     fn now(&self) -> Timestamp {
///         self.0.now().saturating_add(self.1)
///     }
///
///     fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
///         self.0.sleep(duration)
///     }
///
///     fn sleep_blocking(&self, duration: Duration) {
///         self.0.sleep_blocking(duration);
///     }
/// }
///
/// let tomorrow = Ahead(SystemClock::new(), Duration::from_secs(86_400));
/// let store = MemoryStore::builder().clock(tomorrow).build();
/// # assert_eq!(store.keys(), 0);
/// ```
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// Returns the current time, in microseconds since the Unix epoch. The windows of
    /// `fixed-window` and `sliding-counter` are aligned to the epoch.
    fn now(&self) -> Timestamp;

    /// Sleeps until `duration` has passed on this clock, never shorter.
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Blocks the thread until `duration` has passed on this clock.
    fn sleep_blocking(&self, duration: Duration);
}

/// The clock of the machine: the wall clock when it was created, advanced by the monotonic clock.
/// It ignores later changes of the wall clock.
///
/// Its `sleep` uses Tokio, so an async [`wait`](crate::Limiter::wait) needs a Tokio runtime with
/// the timer enabled.
///
/// ```
/// use tidegate::{Clock, SystemClock};
///
/// let clock = SystemClock::new();
/// let start = clock.now();
/// assert!(clock.now() >= start);
/// ```
#[derive(Clone)]
pub struct SystemClock {
    shared: Arc<CalibratedClock>,
}

impl SystemClock {
    /// Creates a clock that starts at the current wall clock time.
    #[must_use]
    pub fn new() -> Self {
        Self { shared: Arc::new(CalibratedClock::new(wall_clock().as_micros())) }
    }
}

/// Returns the current wall clock time.
pub(crate) fn wall_clock() -> Timestamp {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(micros(since_epoch))
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
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.shared.now())
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn sleep_blocking(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// A clock that only moves when a test moves it. Clones share the same time.
///
/// Sleepers wake when the clock reaches their time, so a test of a [`wait`](crate::Limiter::wait)
/// takes no time:
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Clock, ManualClock};
///
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(3600));
/// assert_eq!(clock.now().saturating_duration_since(before), Duration::from_secs(3600));
/// ```
#[derive(Clone, Default)]
pub struct ManualClock {
    shared: Arc<ManualShared>,
}

#[derive(Default)]
struct ManualShared {
    state: Mutex<ManualState>,
    changed: Condvar,
}

struct ManualState {
    now: Timestamp,
    sleepers: Vec<Waker>,
}

impl Default for ManualState {
    /// Starts at noon of a day in 2023, so that tests can step back and forth by days.
    fn default() -> Self {
        Self { now: Timestamp::from_micros(1_700_049_600_000_000), sleepers: Vec::new() }
    }
}

impl ManualClock {
    /// Creates a clock that starts at a fixed time in 2023.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the clock, and wakes the sleepers that are due.
    pub fn advance(&self, duration: Duration) {
        self.change(|now| now.saturating_add(duration));
    }

    /// Steps the clock back, as the correction of a wrong clock does.
    pub fn step_back(&self, duration: Duration) {
        self.change(|now| now.saturating_sub(duration));
    }

    /// Sets the time.
    pub fn set(&self, now: Timestamp) {
        self.change(|_| now);
    }

    /// Returns the number of callers that sleep on this clock, so that a test can wait for a
    /// sleeper before it moves the clock. Only async sleepers are counted.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let clock = ManualClock::new();
    /// let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    /// let quota = Quota::sliding_log(1, Duration::from_secs(3600))?;
    /// assert!(limiter.acquire(&Charge::new("ann", &quota)).await?.allowed);
    ///
    /// let waiting = tokio::spawn(async move {
    ///     limiter.wait(&Charge::new("ann", &quota), Duration::from_secs(7200)).await
    /// });
    /// while clock.sleepers() == 0 {
    ///     tokio::task::yield_now().await;
    /// }
    /// clock.advance(Duration::from_secs(3600)); // takes no time
    /// assert!(waiting.await??.allowed);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn sleepers(&self) -> usize {
        self.lock().sleepers.len()
    }

    fn change(&self, next: impl FnOnce(Timestamp) -> Timestamp) {
        let mut state = self.lock();
        state.now = next(state.now);
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        self.shared.changed.notify_all();
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
    fn now(&self) -> Timestamp {
        self.lock().now
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(ManualSleep { clock: self, until: self.now().saturating_add(duration) })
    }

    fn sleep_blocking(&self, duration: Duration) {
        let mut state = self.lock();
        let until = state.now.saturating_add(duration);
        while state.now < until {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct ManualSleep<'a> {
    clock: &'a ManualClock,
    until: Timestamp,
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

/// Converts a duration to microseconds: rounded up, so that a wait is never too short, and
/// saturating.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}
