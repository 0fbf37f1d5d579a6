//! [`Shard`]: a table behind its lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::SHARDS;
use super::table::Table;
use crate::fingerprint::Fingerprint;

/// How often a thread looks whether a lock is free before it sleeps until it is.
const LOOKS_AT_A_LOCK: u32 = 10;

/// On a cache line of its own, or a lock on one shard would slow its neighbours.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Shard {
    table: Mutex<Table>,
    /// No key of the shard expires before this time. May be too early, never too late.
    pub(super) next_expiry: AtomicU64,
}

const _: () = assert!(size_of::<Shard>() == 64);

impl Default for Shard {
    fn default() -> Self {
        Self { table: Mutex::default(), next_expiry: AtomicU64::new(u64::MAX) }
    }
}

impl Shard {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.try_lock().unwrap_or_else(|_| self.lock_soon())
    }

    /// Who holds a lock needs it for some nanoseconds only. So a few looks, far apart, before the thread is put to sleep. The
    /// mutex's own wait looks all the time, and each look takes the cache line from who works on it: on one key, two
    /// threads get twice as many decisions like this.
    #[cold]
    fn lock_soon(&self) -> MutexGuard<'_, Table> {
        for look in 0..LOOKS_AT_A_LOCK {
            if look < 3 {
                (0..16 << look).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::yield_now();
            }
            if let Ok(table) = self.table.try_lock() {
                return table;
            }
        }
        // A panic elsewhere cannot leave an entry half written: states are written whole.
        self.table.clear_poison();
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
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

pub(super) struct Locked<'a>(pub(super) Vec<(usize, MutexGuard<'a, Table>)>);

impl Locked<'_> {
    pub(super) fn table(&mut self, fingerprint: Fingerprint) -> &mut Table {
        let index = fingerprint.remainder_of(SHARDS);
        let at = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[at].1
    }
}
