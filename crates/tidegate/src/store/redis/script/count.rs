//! [`CountKind`]: the form in which Redis keeps a count, and the version of all forms.

use crate::algorithm::{Algorithm, Encoding};
use crate::quota::Quota;

/// Version of the forms. A release that cannot read the values of the one before it, or that writes
/// values which that one cannot read, has another version, and so other names of counts. During an
/// upgrade each version then counts for itself, and a key is admitted at most twice its limit.
pub(crate) const FORMAT: u32 = 1;

/// Returns the mark of a format in names of counts and instances. The first one has none.
pub(crate) fn format_mark(format: u32) -> String {
    if format == 1 { String::new() } else { format!("v{format}") }
}

/// Form of a count in Redis. The discriminants are the kinds of decide.lua.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountKind {
    SlidingLog = 1,
    PackedLog = 2,
    SlidingCounter = 3,
    PackedCounter = 4,
    FixedWindow = 5,
    TokenBucket = 6,
    LeakyBucket = 7,
}

impl CountKind {
    pub(crate) fn of(quota: &Quota) -> Self {
        match (quota.algorithm(), quota.encoding()) {
            (Algorithm::SlidingLog, Encoding::Packed) => Self::PackedLog,
            (Algorithm::SlidingLog, _) => Self::SlidingLog,
            (Algorithm::SlidingCounter, Encoding::Packed) => Self::PackedCounter,
            (Algorithm::SlidingCounter, _) => Self::SlidingCounter,
            (Algorithm::FixedWindow, _) => Self::FixedWindow,
            (Algorithm::TokenBucket, _) => Self::TokenBucket,
            (Algorithm::LeakyBucket, _) => Self::LeakyBucket,
        }
    }

    /// Returns the number of this form in the script.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }
}
