//! [`Circuit`]: whether a store, or one node of it, is failing, by the results of its recent calls.
//!
//! It opens after some failures. While it is open, probes find out whether the store has recovered,
//! and two successful ones in a row close it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::StoreError;
use crate::random::jittered;

/// Successful probes in a row that close a circuit.
const SUCCESSES_TO_CLOSE: u32 = 2;
/// Number of slots in which the last second is counted.
const SLOTS: usize = 8;
const SLOT_INTERVAL: Duration = Duration::from_millis(125);

#[derive(Debug, Clone, Copy)]
pub(crate) struct CircuitOptions {
    /// Failures that open the circuit: in a row, or within one second if they are at least half of
    /// the calls. A missing permission opens it at once.
    pub(crate) failure_threshold: u32,
    /// Mean interval between two probes.
    pub(crate) probe_interval: Duration,
}

impl Default for CircuitOptions {
    fn default() -> Self {
        Self { failure_threshold: 5, probe_interval: Duration::from_millis(200) }
    }
}

/// Circuit of a store or a node.
#[derive(Debug)]
pub(crate) struct Circuit {
    options: CircuitOptions,
    open: AtomicBool,
    failures_in_a_row: AtomicU32,
    recent: RecentCalls,
    history: Mutex<CallHistory>,
}

#[derive(Debug)]
struct CallHistory {
    /// Time at which the circuit last opened or closed.
    since: Instant,
    times_opened: u64,
    last_error: Option<Arc<StoreError>>,
    /// Successful probes in a row.
    successes: u32,
    /// Time of the next probe.
    next_probe: Instant,
}

/// State of a circuit, for metrics and health checks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitState {
    /// Whether the circuit is open: the store, or the node, is failing and is not called.
    pub open: bool,
    /// Whether the circuit is open, and its last probe succeeded: the next one may close it.
    pub half_open: bool,
    /// Time since the circuit last opened or closed.
    pub elapsed: Duration,
    /// Number of times that the circuit has opened.
    pub times_opened: u64,
    /// Last failure while the circuit was open.
    pub last_error: Option<StoreError>,
}

impl Circuit {
    pub(crate) fn new(options: CircuitOptions) -> Self {
        let now = Instant::now();
        let history = CallHistory {
            since: now,
            times_opened: 0,
            last_error: None,
            successes: 0,
            next_probe: now,
        };
        Self {
            options,
            open: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            recent: RecentCalls::new(),
            history: Mutex::new(history),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(crate) fn state(&self) -> CircuitState {
        let history = self.history();
        let open = self.is_open();
        CircuitState {
            open,
            half_open: open && history.successes > 0,
            elapsed: history.since.elapsed(),
            times_opened: history.times_opened,
            last_error: history.last_error.as_deref().cloned(),
        }
    }

    /// Returns whether the circuit is open for the lack of a permission.
    #[cfg(feature = "redis")]
    pub(crate) fn is_not_permitted(&self) -> bool {
        let history = self.history();
        self.is_open() && matches!(history.last_error.as_deref(), Some(StoreError::NotPermitted(_)))
    }

    /// Returns the error of a call that is not made because the circuit is open.
    pub(crate) fn open_error(&self) -> StoreError {
        match &self.history().last_error {
            Some(error) => StoreError::Open(Arc::clone(error)),
            None => StoreError::Unreachable("the circuit has just closed, try again".to_owned()),
        }
    }

    /// Records the result of a call. Returns whether it has opened the circuit. While the circuit is
    /// open, only probes count.
    pub(crate) fn record(&self, failure: Option<&StoreError>) -> bool {
        let Some(error) = failure else {
            if self.failures_in_a_row.load(Ordering::Relaxed) > 0 {
                self.failures_in_a_row.store(0, Ordering::Relaxed);
            }
            self.recent.record(false);
            return false;
        };
        if self.is_open() {
            return false;
        }
        let in_a_row = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.recent.record(true);
        let (calls, failures) = self.recent.totals();
        let threshold = self.options.failure_threshold;
        // A missing permission lasts until an operator grants it.
        let fails = matches!(error, StoreError::NotPermitted(_))
            || in_a_row >= threshold
            || (failures >= u64::from(threshold) && 2 * failures >= calls);
        fails && self.open(error)
    }

    /// Opens the circuit. Returns false if it is open.
    fn open(&self, error: &StoreError) -> bool {
        let mut history = self.history();
        if self.is_open() {
            return false;
        }
        history.since = Instant::now();
        history.times_opened += 1;
        history.last_error = Some(Arc::new(error.reason().clone()));
        history.successes = 0;
        history.next_probe = history.since + jittered(self.options.probe_interval);
        self.open.store(true, Ordering::Release);
        true
    }

    /// Returns whether a probe is due. If so, the caller makes it.
    pub(crate) fn takes_probe(&self) -> bool {
        let mut history = self.history();
        let now = Instant::now();
        let is_due = now >= history.next_probe;
        if is_due {
            history.next_probe = now + jittered(self.options.probe_interval);
        }
        is_due
    }

    /// Returns the time of the next probe.
    #[cfg(feature = "redis")]
    pub(crate) fn next_probe(&self) -> Instant {
        self.history().next_probe
    }

    /// Records the result of a probe. Returns whether it has closed the circuit.
    pub(crate) fn record_probe(&self, failure: Option<&StoreError>) -> bool {
        let mut history = self.history();
        if let Some(error) = failure {
            history.successes = 0;
            history.last_error = Some(Arc::new(error.reason().clone()));
            return false;
        }
        history.successes += 1;
        // After a success the next probe comes sooner, so that recovery is fast.
        let now = Instant::now();
        history.next_probe = now + history.next_probe.saturating_duration_since(now) / 4;
        if history.successes < SUCCESSES_TO_CLOSE || !self.is_open() {
            return false;
        }
        history.since = now;
        self.failures_in_a_row.store(0, Ordering::Relaxed);
        self.recent.clear();
        self.open.store(false, Ordering::Release);
        true
    }

    fn history(&self) -> MutexGuard<'_, CallHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error if it means that the store is unreachable or broken.
pub(crate) fn failure(result: Result<(), &StoreError>) -> Option<&StoreError> {
    result.err().filter(|error| match error {
        StoreError::Timeout(_)
        | StoreError::Unreachable(_)
        | StoreError::AnswerLost(_)
        | StoreError::Refused(_)
        | StoreError::OutOfMemory(_)
        | StoreError::NotPermitted(_) => true,
        StoreError::Full { .. }
        | StoreError::Misconfigured(_)
        | StoreError::Open(_)
        | StoreError::Unreadable(_)
        | StoreError::Invalid(_) => false,
    })
}

/// Number of calls and failures within about the last second. Each slot is one word (slot number,
/// calls, failures), so that a call is recorded with one atomic update.
#[derive(Debug)]
struct RecentCalls {
    start: Instant,
    slots: [AtomicU64; SLOTS],
}

const COUNT_BITS: u32 = 20;
const MAX_COUNT: u64 = (1 << COUNT_BITS) - 1;
const MAX_SLOT_NUMBER: u64 = (1 << (64 - 2 * COUNT_BITS)) - 1;

impl RecentCalls {
    fn new() -> Self {
        Self { start: Instant::now(), slots: [const { AtomicU64::new(0) }; SLOTS] }
    }

    /// Returns the number of the current slot, which starts at 1: 0 marks an unused slot.
    fn current_slot(&self) -> u64 {
        let slots = self.start.elapsed().as_millis() / SLOT_INTERVAL.as_millis();
        u64::try_from(slots).unwrap_or(0) % MAX_SLOT_NUMBER + 1
    }

    fn record(&self, failed: bool) {
        let current = self.current_slot();
        let add = |packed: u64| {
            let (number, calls, failures) = unpack(packed);
            let (calls, failures) = if number == current { (calls, failures) } else { (0, 0) };
            Some(
                current << (2 * COUNT_BITS)
                    | (calls + 1).min(MAX_COUNT) << COUNT_BITS
                    | (failures + u64::from(failed)).min(MAX_COUNT),
            )
        };
        #[expect(clippy::cast_possible_truncation, reason = "the low bits choose the slot")]
        let slot = &self.slots[current as usize % SLOTS];
        // The update cannot fail: the closure always returns a value.
        let _ = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Returns the number of calls and of failures.
    fn totals(&self) -> (u64, u64) {
        let current = self.current_slot();
        let slots = self.slots.iter().map(|slot| unpack(slot.load(Ordering::Relaxed)));
        let recent = slots
            .filter(|(number, ..)| *number > 0 && current.wrapping_sub(*number) < SLOTS as u64);
        recent.fold((0, 0), |sum, (_, calls, failures)| (sum.0 + calls, sum.1 + failures))
    }

    fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
}

fn unpack(packed: u64) -> (u64, u64, u64) {
    (packed >> (2 * COUNT_BITS), packed >> COUNT_BITS & MAX_COUNT, packed & MAX_COUNT)
}
