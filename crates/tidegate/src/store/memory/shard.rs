//! [`Shard`]: a table behind its lock.

use std::time::Duration;

use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::SHARDS;
use super::table::Table;
use crate::key::Fingerprint;

/// Number of attempts to take a lock while its holder is most likely running.
const SPIN_LIMIT: u32 = 3;
/// Number of attempts, including the spins, before a thread sleeps between attempts.
const YIELD_LIMIT: u32 = 10;
const SLEEP_INTERVAL: Duration = Duration::from_micros(50);

/// A table behind its lock. It has its own cache line, so that shards do not slow each other down
/// by false sharing.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Shard {
    table: SpinMutex<Table>,
}

const _: () = assert!(size_of::<Shard>() == 64);

impl Shard {
    #[inline]
    pub(super) fn lock(&self) -> SpinMutexGuard<'_, Table> {
        self.table.try_lock().unwrap_or_else(|| self.lock_contended())
    }

    /// Critical sections last nanoseconds: spin a few times with growing gaps (each `try_lock`
    /// steals the holder's cache line), then yield, then sleep, because a longer wait means that
    /// the holder was preempted.
    #[cold]
    fn lock_contended(&self) -> SpinMutexGuard<'_, Table> {
        let mut attempt = 0;
        loop {
            match attempt {
                0..SPIN_LIMIT => spin(attempt),
                SPIN_LIMIT..YIELD_LIMIT => std::thread::yield_now(),
                _ => std::thread::sleep(SLEEP_INTERVAL),
            }
            if let Some(table) = self.table.try_lock() {
                return table;
            }
            attempt += 1;
        }
    }

    /// Spins for the lock. Returns `None` where [`lock`](Self::lock) would yield, so that a caller
    /// can release its other locks first.
    pub(super) fn try_lock_briefly(&self) -> Option<SpinMutexGuard<'_, Table>> {
        self.table.try_lock().or_else(|| {
            (0..SPIN_LIMIT).find_map(|attempt| {
                spin(attempt);
                self.table.try_lock()
            })
        })
    }
}

/// Spins twice as long with each attempt.
fn spin(attempt: u32) {
    (0..16 << attempt).for_each(|_| std::hint::spin_loop());
}

/// The locked tables of several shards, in ascending order of the shards.
pub(super) struct LockedShards<'a>(pub(super) Vec<(usize, SpinMutexGuard<'a, Table>)>);

impl LockedShards<'_> {
    pub(super) fn table(&mut self, fingerprint: Fingerprint) -> &mut Table {
        let index = fingerprint.shard_index(SHARDS);
        let at = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[at].1
    }
}
