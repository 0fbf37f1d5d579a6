//! [`Restrictions`] of a server, as its errors have shown them.

use std::sync::atomic::{AtomicU8, Ordering};

/// Scripts that a server does not allow: an entry of [`NodeHealth`](super::super::NodeHealth). The
/// store learns it from the first error, adapts, and forgets it with the connection, because the address
/// may lead to another server then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Restriction {
    /// Scripts that use keys which are not in `KEYS`. The node gets one call per slot.
    UndeclaredKeys = 1,
    /// Scripts with `KEYS` of several slots (`CROSSSLOT`), although it is not a node of a cluster:
    /// one address in front of several shards. It gets one call per slot.
    SeveralSlots = 2,
    /// Scripts that call `TIME`. Its clock is [estimated](super::super::ClockSource::Estimated).
    TimeInScripts = 4,
}

/// Restrictions of one server.
#[derive(Default)]
pub(crate) struct Restrictions {
    known: AtomicU8,
    logged: AtomicU8,
}

impl Restriction {
    pub(crate) const ALL: [Self; 3] =
        [Self::UndeclaredKeys, Self::SeveralSlots, Self::TimeInScripts];

    /// Returns its name, such as `several_slots`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::UndeclaredKeys => "undeclared_keys",
            Self::SeveralSlots => "several_slots",
            Self::TimeInScripts => "time_in_scripts",
        }
    }

    /// Returns what is logged when it is learned.
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::UndeclaredKeys => {
                "Redis refuses scripts that use keys which are not in KEYS: one call per slot from \
                 now on"
            }
            Self::SeveralSlots => {
                "Redis refuses scripts with keys of several slots (CROSSSLOT): one call per slot \
                 from now on"
            }
            Self::TimeInScripts => {
                "Redis refuses TIME in scripts: its clock is estimated from now on \
                 (store.clock: estimated)"
            }
        }
    }
}

impl Restrictions {
    pub(crate) fn has(&self, restriction: Restriction) -> bool {
        self.known.load(Ordering::Relaxed) & restriction as u8 != 0
    }

    /// Adds a restriction. Returns whether it is to be logged, which it is once.
    pub(crate) fn add(&self, restriction: Restriction) -> bool {
        let bit = restriction as u8;
        self.known.fetch_or(bit, Ordering::Relaxed);
        self.logged.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    pub(crate) fn forget(&self) {
        self.known.store(0, Ordering::Relaxed);
    }
}
