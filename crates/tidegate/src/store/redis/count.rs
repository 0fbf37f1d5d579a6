//! [`CountKind`]: the form in which Redis keeps a count.

use crate::algorithm::{Algorithm, Encoding};
use crate::quota::Quota;

/// Form of a count in Redis. The discriminants are the kinds of decide.lua.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CountKind {
    SlidingLog = 1,
    PackedLog = 2,
    SlidingCounter = 3,
    PackedCounter = 4,
    FixedWindow = 5,
    TokenBucket = 6,
    LeakyBucket = 7,
}

/// Tags in the keys of counts. A key has none, unless a count of another form has that key: while a
/// changed policy is rolled out, instances use both algorithms, and if each overwrote the count of
/// the other, no request would be denied.
pub(super) const TAGS: [&str; 7] =
    ["", "%log", "%packed", "%counter", "%packed-counter", "%window", "%bucket"];

impl CountKind {
    pub(super) fn of(quota: &Quota) -> Self {
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
    pub(super) fn number(self) -> u8 {
        self as u8
    }

    /// Returns the tag of this form in a key of its own. The two buckets are one form.
    pub(super) fn tag(self) -> &'static str {
        match self {
            Self::SlidingLog => TAGS[1],
            Self::PackedLog => TAGS[2],
            Self::SlidingCounter => TAGS[3],
            Self::PackedCounter => TAGS[4],
            Self::FixedWindow => TAGS[5],
            Self::TokenBucket | Self::LeakyBucket => TAGS[6],
        }
    }
}

/// Returns the keys of all forms that the count of this key may have.
pub(super) fn keys_of_all_forms(key: &str) -> impl Iterator<Item = String> {
    let (before, rest) = key.split_at(key.find('}').map_or(key.len(), |brace| brace + 1));
    let after = rest.find(':').map_or("", |colon| &rest[colon..]);
    TAGS.iter().map(move |tag| format!("{before}{tag}{after}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn count_has_a_key_for_each_form() {
        let bucket = Quota::token_bucket(5, Duration::from_secs(60)).expect("valid");
        assert_eq!(CountKind::of(&bucket).tag(), "%bucket");
        for key in ["x:{u}:p:%q", "x:{u}%window:p:%q"] {
            let keys: Vec<String> = keys_of_all_forms(key).collect();
            assert_eq!(keys[..2], ["x:{u}:p:%q", "x:{u}%log:p:%q"]);
            assert_eq!(keys.len(), 7);
        }
    }
}
