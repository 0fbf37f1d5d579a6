//! What is known of one part of a store: whether it fails, and since when.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::store::{Part, StoreError};

const CHAINS: usize = 64;
/// A second of the past is kept in so many slots.
const SLOTS: usize = 8;
const SLOT: Duration = Duration::from_millis(125);

/// The circuits of all parts that were ever asked. Only grows: by one for each node of a cluster.
/// Looked up without a lock.
#[derive(Debug)]
pub(super) struct Circuits {
    chains: [OnceLock<Box<Link>>; CHAINS],
}

#[derive(Debug)]
struct Link {
    circuit: Circuit,
    next: OnceLock<Box<Link>>,
}

impl Circuits {
    pub(super) fn new() -> Self {
        Self { chains: [const { OnceLock::new() }; CHAINS] }
    }

    pub(super) fn of(&self, part: Part) -> &Circuit {
        #[expect(clippy::cast_possible_truncation, reason = "the low bits choose the chain")]
        let mut place = &self.chains[part.0 as usize % CHAINS];
        loop {
            let link = place.get_or_init(|| {
                Box::new(Link { circuit: Circuit::new(part), next: OnceLock::new() })
            });
            if link.circuit.part == part {
                return &link.circuit;
            }
            place = &link.next;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Circuit> {
        self.chains
            .iter()
            .flat_map(|first| std::iter::successors(first.get(), |link| link.next.get()))
            .map(|link| &link.circuit)
    }
}

/// Open or closed, and why.
#[derive(Debug)]
pub(super) struct Circuit {
    pub(super) part: Part,
    open: AtomicBool,
    failures_in_a_row: AtomicU32,
    recent: Recent,
    history: Mutex<History>,
}

#[derive(Debug)]
pub(super) struct History {
    /// When it was opened or closed.
    pub(super) since: Instant,
    pub(super) opened: u64,
    pub(super) last_error: Option<Arc<StoreError>>,
    /// Looks whether the part is back.
    pub(super) prober: Option<AbortHandle>,
}

impl Circuit {
    fn new(part: Part) -> Self {
        let history = History { since: Instant::now(), opened: 0, last_error: None, prober: None };
        Self {
            part,
            open: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            recent: Recent::new(),
            history: Mutex::new(history),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call. True if it is time to open.
    pub(super) fn count(&self, failed: bool, enough: u32) -> bool {
        if !failed {
            if self.failures_in_a_row.load(Ordering::Relaxed) > 0 {
                self.failures_in_a_row.store(0, Ordering::Relaxed);
            }
            self.recent.count(false);
            return false;
        }
        let in_a_row = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.recent.count(true);
        let (calls, failures) = self.recent.sum();
        in_a_row >= enough || (failures >= u64::from(enough) && 2 * failures >= calls)
    }

    /// The lock is held by the caller, so that there is one opening at a time.
    pub(super) fn set_open(&self, history: &mut History, error: &StoreError) {
        history.since = Instant::now();
        history.opened += 1;
        history.last_error = Some(Arc::new(error.clone()));
        self.open.store(true, Ordering::Release);
    }

    /// Closes, and forgets what was counted before. How long it was open.
    pub(super) fn close(&self) -> Duration {
        let mut history = self.history();
        let open_for = history.since.elapsed();
        history.since = Instant::now();
        history.prober = None;
        self.failures_in_a_row.store(0, Ordering::Relaxed);
        self.recent.forget();
        self.open.store(false, Ordering::Release);
        open_for
    }
}

/// Calls and failures of about the last second. Each slot is one word (its number, calls,
/// failures), so that counting is one atomic step.
#[derive(Debug)]
struct Recent {
    start: Instant,
    slots: [AtomicU64; SLOTS],
}

const COUNT_BITS: u32 = 20;
const MOST: u64 = (1 << COUNT_BITS) - 1;
const NUMBERS: u64 = 1 << (64 - 2 * COUNT_BITS);

impl Recent {
    fn new() -> Self {
        Self { start: Instant::now(), slots: [const { AtomicU64::new(0) }; SLOTS] }
    }

    /// The number of the present slot, from 1 on: 0 is none.
    fn present(&self) -> u64 {
        let slots = self.start.elapsed().as_millis() / SLOT.as_millis();
        u64::try_from(slots).unwrap_or(0) % (NUMBERS - 1) + 1
    }

    fn count(&self, failed: bool) {
        let number = self.present();
        let add = |packed: u64| {
            let (kept, calls, failures) = unpack(packed);
            let (calls, failures) = if kept == number { (calls, failures) } else { (0, 0) };
            Some(
                number << (2 * COUNT_BITS)
                    | (calls + 1).min(MOST) << COUNT_BITS
                    | (failures + u64::from(failed)).min(MOST),
            )
        };
        #[expect(clippy::cast_possible_truncation, reason = "the low bits choose the slot")]
        let slot = &self.slots[number as usize % SLOTS];
        // The closure always has a new value.
        let _ = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    fn sum(&self) -> (u64, u64) {
        let present = self.present();
        let slots = self.slots.iter().map(|slot| unpack(slot.load(Ordering::Relaxed)));
        let lately = slots
            .filter(|(number, ..)| *number > 0 && present.wrapping_sub(*number) < SLOTS as u64);
        lately.fold((0, 0), |sum, (_, calls, failures)| (sum.0 + calls, sum.1 + failures))
    }

    fn forget(&self) {
        self.slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
}

fn unpack(packed: u64) -> (u64, u64, u64) {
    (packed >> (2 * COUNT_BITS), packed >> COUNT_BITS & MOST, packed & MOST)
}
