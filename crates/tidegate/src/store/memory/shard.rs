//! [`Shard`]: a table behind its lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::SHARDS;
use super::table::Table;
use crate::fingerprint::Fingerprint;

/// Attempts to get a lock while its holder is most likely running.
const SPIN_ATTEMPTS: u32 = 3;
/// Attempts to get a lock, those after spinning with a yield before them, until a thread sleeps between two.
const YIELD_ATTEMPTS: u32 = 10;
const SLEEP_INTERVAL: Duration = Duration::from_micros(50);

/// On a cache line of its own, or a lock on one shard would slow its neighbours.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Shard {
    table: SpinMutex<Table>,
    /// No key of the shard expires before this time. May be too early, never too late.
    pub(super) next_expiry: AtomicU64,
}

const _: () = assert!(size_of::<Shard>() == 64);

impl Default for Shard {
    fn default() -> Self {
        Self { table: SpinMutex::default(), next_expiry: AtomicU64::new(u64::MAX) }
    }
}

impl Shard {
    #[inline]
    pub(super) fn lock(&self) -> SpinMutexGuard<'_, Table> {
        self.table.try_lock().unwrap_or_else(|| self.lock_soon())
    }

    /// Critical sections last nanoseconds: spin a few times with growing gaps (each `try_lock` takes the holder's cache line),
    /// then yield, then sleep, because a longer wait means that the holder was preempted.
    #[cold]
    fn lock_soon(&self) -> SpinMutexGuard<'_, Table> {
        let mut attempt = 0;
        loop {
            match attempt {
                0..SPIN_ATTEMPTS => spin(attempt),
                SPIN_ATTEMPTS..YIELD_ATTEMPTS => std::thread::yield_now(),
                _ => std::thread::sleep(SLEEP_INTERVAL),
            }
            if let Some(table) = self.table.try_lock() {
                return table;
            }
            attempt += 1;
        }
    }

    /// Spins for the lock, and gives up where [`lock`](Self::lock) would yield: for a caller that holds other locks.
    pub(super) fn try_lock_briefly(&self) -> Option<SpinMutexGuard<'_, Table>> {
        self.table.try_lock().or_else(|| {
            (0..SPIN_ATTEMPTS).find_map(|attempt| {
                spin(attempt);
                self.table.try_lock()
            })
        })
    }

    /// How many entries there were, and how many of them have expired and are gone.
    pub(super) fn drop_expired(&self, now: u64) -> (usize, usize) {
        let mut table = self.lock();
        let seen = table.len();
        let (dropped, next) = table.drop_expired(now);
        self.next_expiry.store(next, Ordering::SeqCst);
        (seen, dropped)
    }
}

/// Twice as long with each attempt.
fn spin(attempt: u32) {
    (0..16 << attempt).for_each(|_| std::hint::spin_loop());
}

pub(super) struct Locked<'a>(pub(super) Vec<(usize, SpinMutexGuard<'a, Table>)>);

impl Locked<'_> {
    pub(super) fn table(&mut self, fingerprint: Fingerprint) -> &mut Table {
        let index = fingerprint.remainder_of(SHARDS);
        let at = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[at].1
    }
}
