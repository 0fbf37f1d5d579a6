//! [`PolicyError`]: why a policy, or a set of policies, is invalid.

use super::AttributeError;
use crate::key::KeyError;

/// Error in a policy, or in a set of policies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The name is invalid.
    #[error("the policy name {0}")]
    Name(KeyError),
    /// Two policies have the same name, and would share their counts.
    #[error("the policy name {0:?} is used twice: policy names must be unique")]
    Twice(String),
    /// A condition has no pattern, so it would never match.
    #[error("the attribute {0:?} has no value to match: give one, or a list of some")]
    NoPattern(String),
    /// A pattern would never match.
    #[error("the pattern {pattern:?} would never match: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Reason, and what would be right.
        reason: String,
    },
    /// An override would never apply.
    #[error("the override of the key {key:?} would never apply: {reason}")]
    Override {
        /// The key, its values joined by `|`.
        key: String,
        /// Reason, and what would be right.
        reason: String,
    },
    /// A key is overridden twice.
    #[error("the key {0:?} is overridden twice")]
    OverriddenTwice(String),
    /// The cost could never be admitted.
    #[error("cost {cost} can never be admitted: the quota admits at most {most} at once")]
    Cost {
        /// The cost.
        cost: u64,
        /// Burst of the smallest quota of the policy; for the `max` of an attribute, the largest.
        most: u64,
    },
    /// The default cost is above the maximum.
    #[error("the default cost {default} is more than the max {max}: lower it, or raise the max")]
    DefaultCost {
        /// The default.
        default: u64,
        /// The maximum.
        max: u64,
    },
    /// The cost is 0.
    #[error("cost 0 takes nothing: a cost is at least 1")]
    ZeroCost,
    /// The name of an attribute is unknown or malformed.
    #[error(transparent)]
    Attribute(#[from] AttributeError),
}
