//! [`CountKind`]: the form in which Redis keeps a count.

use crate::algorithm::{Algorithm, Encoding};
use crate::charge::Charge;
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

/// Tag of each form in the key of a count. Each form has a key of its own: while a changed policy
/// is rolled out, instances use both algorithms, and if each overwrote the count of the other, no
/// request would be denied.
pub(super) const TAGS: [&str; 6] =
    ["", "%packed", "%counter", "%packed-counter", "%window", "%bucket"];

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

    /// Returns the tag of this form. The two buckets are one form.
    fn tag(self) -> &'static str {
        match self {
            Self::SlidingLog => TAGS[0],
            Self::PackedLog => TAGS[1],
            Self::SlidingCounter => TAGS[2],
            Self::PackedCounter => TAGS[3],
            Self::FixedWindow => TAGS[4],
            Self::TokenBucket | Self::LeakyBucket => TAGS[5],
        }
    }
}

/// Returns the tag in the key of a charge's count. A default policy name needs none, because it
/// already has the algorithm and the encoding.
pub(super) fn key_tag(charge: &Charge<'_>) -> &'static str {
    let quota = charge.quota();
    if charge.policy() == quota.default_policy_name() { "" } else { CountKind::of(quota).tag() }
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
    fn a_key_has_a_tag_unless_its_policy_name_has_the_algorithm() {
        let minute = Duration::from_secs(60);
        let log = Quota::sliding_log(5, minute).expect("valid");
        let bucket = Quota::token_bucket(5, minute).expect("valid");
        let tag = |quota, policy| key_tag(&Charge::new("u", quota).with_policy(policy));
        assert_eq!(tag(&log, "p"), "");
        assert_eq!(tag(&bucket, "p"), "%bucket");
        assert_eq!(tag(&bucket, "fixed-window-60s"), "%bucket");
        assert_eq!(key_tag(&Charge::new("u", &bucket)), "");
        let keys: Vec<String> = keys_of_all_forms("x:{u}%window:p:%q").collect();
        assert_eq!(keys[..2], ["x:{u}:p:%q", "x:{u}%packed:p:%q"]);
        assert_eq!(keys.len(), 6);
    }
}
