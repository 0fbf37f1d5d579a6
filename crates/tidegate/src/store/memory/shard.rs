//! [`Shard`]: a table behind its lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::SHARDS;
use super::table::Table;
use crate::fingerprint::Fingerprint;

/// How often a thread looks whether a lock is free before it sleeps until it is.
const LOOKS_AT_A_LOCK: u32 = 10;

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

    /// Who holds a lock needs it for some nanoseconds only. So a few looks, far apart: each takes the cache line from who works
    /// on it. Who is held up for longer waits for a thread that the system has put aside, and lets others run.
    #[cold]
    fn lock_soon(&self) -> SpinMutexGuard<'_, Table> {
        let mut look = 0;
        loop {
            match look {
                0..3 => (0..16 << look).for_each(|_| std::hint::spin_loop()),
                3..LOOKS_AT_A_LOCK => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            if let Some(table) = self.table.try_lock() {
                return table;
            }
            look += 1;
        }
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

pub(super) struct Locked<'a>(pub(super) Vec<(usize, SpinMutexGuard<'a, Table>)>);

impl Locked<'_> {
    pub(super) fn table(&mut self, fingerprint: Fingerprint) -> &mut Table {
        let index = fingerprint.remainder_of(SHARDS);
        let at = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[at].1
    }
}
