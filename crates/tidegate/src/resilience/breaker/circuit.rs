//! [`Circuit`]: whether one shard of a store is failing, by the results of its recent calls.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::ShardState;
use crate::store::{ShardId, StoreError};

const CHAINS: usize = 64;
/// Number of slots in which the last second is counted.
const SLOTS: usize = 8;
const SLOT_INTERVAL: Duration = Duration::from_millis(125);

/// Circuits of all shards that were ever called: a hash table with chaining that only grows, by one
/// circuit per node of a cluster. Lookups take no lock.
#[derive(Debug)]
pub(super) struct Circuits {
    chains: [OnceLock<Box<ChainNode>>; CHAINS],
}

#[derive(Debug)]
struct ChainNode {
    circuit: Circuit,
    next: OnceLock<Box<ChainNode>>,
}

impl Circuits {
    pub(super) fn new() -> Self {
        Self { chains: [const { OnceLock::new() }; CHAINS] }
    }

    /// Returns the circuit of a shard, which is created closed at the first call.
    pub(super) fn of(&self, shard: ShardId) -> &Circuit {
        #[expect(clippy::cast_possible_truncation, reason = "the low bits choose the chain")]
        let mut cell = &self.chains[shard.0 as usize % CHAINS];
        loop {
            let node = cell.get_or_init(|| {
                Box::new(ChainNode { circuit: Circuit::new(shard), next: OnceLock::new() })
            });
            if node.circuit.shard == shard {
                return &node.circuit;
            }
            cell = &node.next;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Circuit> {
        self.chains
            .iter()
            .flat_map(|first| std::iter::successors(first.get(), |node| node.next.get()))
            .map(|node| &node.circuit)
    }
}

/// Circuit of one shard.
#[derive(Debug)]
pub(super) struct Circuit {
    pub(super) shard: ShardId,
    open: AtomicBool,
    failures_in_a_row: AtomicU32,
    recent: RecentCalls,
    history: Mutex<CircuitHistory>,
}

#[derive(Debug)]
pub(super) struct CircuitHistory {
    /// Time at which the circuit last opened or closed.
    since: Instant,
    times_opened: u64,
    pub(super) last_error: Option<Arc<StoreError>>,
    /// Task that probes the shard while the circuit is open.
    pub(super) prober: Option<AbortHandle>,
}

impl Circuit {
    fn new(shard: ShardId) -> Self {
        let history = CircuitHistory {
            since: Instant::now(),
            times_opened: 0,
            last_error: None,
            prober: None,
        };
        Self {
            shard,
            open: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            recent: RecentCalls::new(),
            history: Mutex::new(history),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn state(&self) -> ShardState {
        let history = self.history();
        ShardState {
            shard: self.shard,
            open: self.is_open(),
            elapsed: history.since.elapsed(),
            times_opened: history.times_opened,
            last_error: history.last_error.as_deref().cloned(),
        }
    }

    pub(super) fn history(&self) -> MutexGuard<'_, CircuitHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the result of a call, and returns whether the circuit must open.
    pub(super) fn record(&self, failed: bool, threshold: u32) -> bool {
        if !failed {
            if self.failures_in_a_row.load(Ordering::Relaxed) > 0 {
                self.failures_in_a_row.store(0, Ordering::Relaxed);
            }
            self.recent.record(false);
            return false;
        }
        let in_a_row = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.recent.record(true);
        let (calls, failures) = self.recent.totals();
        in_a_row >= threshold || (failures >= u64::from(threshold) && 2 * failures >= calls)
    }

    /// Opens the circuit. The caller holds the lock on the history, so that concurrent failures
    /// open it once.
    pub(super) fn set_open(&self, history: &mut CircuitHistory, error: &StoreError) {
        history.since = Instant::now();
        history.times_opened += 1;
        history.last_error = Some(Arc::new(error.clone()));
        self.open.store(true, Ordering::Release);
    }

    /// Closes the circuit, clears its counts, and returns how long it was open.
    pub(super) fn close(&self) -> Duration {
        let mut history = self.history();
        let open_for = history.since.elapsed();
        history.since = Instant::now();
        history.prober = None;
        self.failures_in_a_row.store(0, Ordering::Relaxed);
        self.recent.clear();
        self.open.store(false, Ordering::Release);
        open_for
    }
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
