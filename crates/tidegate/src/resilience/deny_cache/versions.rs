//! [`CountVersions`]: numbers that change when units of a count may have been charged or returned.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::store::invalidation::CountId;

/// Number of slots. With 100,000 admissions per second, a slot changes about once per second.
const SLOTS: usize = 1 << 17;

/// Versions of counts. The version of a count changes whenever units of it may have been charged
/// or returned.
///
/// Counts share slots, so a version may also change because of another count: that only costs a
/// call to the store.
#[derive(Debug)]
pub(super) struct CountVersions {
    slots: Box<[AtomicU32]>,
    /// Number of changes of all counts.
    common: AtomicU32,
}

impl CountVersions {
    pub(super) fn new() -> Self {
        let slots = std::iter::repeat_with(AtomicU32::default).take(SLOTS).collect();
        Self { slots, common: AtomicU32::default() }
    }

    /// Returns the version that all counts have in common. The version of a request is the sum of
    /// it and of those of its counts: each only grows, so the sum grows if any of them changes.
    pub(super) fn common(&self) -> u64 {
        u64::from(self.common.load(Ordering::Acquire))
    }

    /// Returns the version of a count.
    pub(super) fn of(&self, count: CountId) -> u64 {
        u64::from(self.slot(count).load(Ordering::Acquire))
    }

    /// Changes the version of a count.
    pub(super) fn change(&self, count: CountId) {
        self.slot(count).fetch_add(1, Ordering::AcqRel);
    }

    /// Changes the versions of all counts.
    pub(super) fn change_all(&self) {
        self.common.fetch_add(1, Ordering::AcqRel);
    }

    fn slot(&self, CountId(count): CountId) -> &AtomicU32 {
        &self.slots[usize::try_from(count % SLOTS as u64).unwrap_or(0)]
    }
}
