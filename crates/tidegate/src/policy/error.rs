//! [`PolicyError`]: why a policy, or a set of policies, is invalid. [`QueryError`]: why a request
//! could not be decided.

use super::{AttributeError, SelectError};
use crate::charge::ChargeError;
use crate::key::KeyError;
use crate::limiter::Error;
use crate::quota::QuotaError;
use crate::store::StoreError;

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
    /// The numbers of an override are invalid.
    #[error(transparent)]
    Quota(QuotaError),
    /// A key is overridden twice.
    #[error("the key {0:?} is overridden twice")]
    OverriddenTwice(String),
    /// An entry of `unless` has no condition, so it would exempt every request.
    #[error("an entry of `unless` without attributes would exempt every request: give some")]
    NoCondition,
    /// An attribute cannot choose limits.
    #[error(
        "limits cannot be chosen by {0}: use `overrides` for addresses, and a policy for each path"
    )]
    LimitsAttribute(String),
    /// A value has two limits.
    #[error("the value {0:?} has two limits")]
    LimitTwice(String),
    /// A value has two lanes.
    #[error("the value {0:?} has two lanes: write it once, not twice")]
    LaneTwice(String),
    /// A lane has no valid part of the limit.
    #[error("a lane has from 1% to 100% of the limit, not {0}%")]
    LanePercent(u64),
    /// A lane of a small limit has less than one unit.
    #[error("a lane of {percent}% of the limit {limit} has less than one unit: raise one of them")]
    EmptyLane {
        /// Percentage of the lane.
        percent: u64,
        /// Limit, or burst, of one of the quotas.
        limit: u64,
    },
    /// Lanes and counted denials do not fit together.
    #[error("lanes cannot be used with count_denied: denials of one lane would fill the others")]
    LaneCountsDenied,
    /// Lanes and blocks do not fit together.
    #[error("lanes cannot be used with block_for: a denial of one lane would block the others")]
    LaneBlocks,
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
    /// The list of statuses is empty.
    #[error("refund_on has no status: write some, such as [2xx, 3xx]")]
    NoStatus,
    /// A text is neither a status nor a class of statuses.
    #[error(
        "{0:?} is not a status: write one from 100 to 599, such as 404, or a class of them, \
         such as 2xx"
    )]
    Status(String),
    /// A text cannot be the name of a response header.
    #[error("{0:?} is not the name of a response header: write one such as x-tokens-used")]
    ResponseHeader(String),
    /// Units in flight are settled by a response.
    #[error(
        "a policy of concurrency is not settled by a response: its units are released when the \
         response has ended"
    )]
    SettledInFlight,
    /// The name of an attribute is unknown or malformed.
    #[error(transparent)]
    Attribute(#[from] AttributeError),
}

/// Error that leaves a [`Query`](crate::Query) undecided. A denial is not an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// A charge is invalid, whatever the counts are.
    #[error(transparent)]
    Charge(ChargeError),
    /// The store failed.
    #[error(transparent)]
    Store(StoreError),
    /// A policy cannot build a valid key from this request.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// No policy has this name.
    #[error("there is no policy {name:?}{}", suggestion(nearest.as_deref()))]
    UnknownPolicy {
        /// The name that was asked for.
        name: String,
        /// The most similar name of a policy.
        nearest: Option<String>,
    },
    /// A limit counts by the client's address, which is unknown: the layer is not set up to find
    /// it.
    #[error(
        "a limit counts by ip, but the address of the peer is unknown: configure the layer's `peer`"
    )]
    UnknownPeer,
}

impl QueryError {
    /// Returns whether a call that failed may have made the charges.
    pub(super) fn may_have_run(&self) -> bool {
        matches!(self, Self::Store(error) if error.may_have_run())
    }
}

impl From<Error> for QueryError {
    fn from(error: Error) -> Self {
        match error {
            Error::Charge(error) => Self::Charge(error),
            Error::Store(error) => Self::Store(error),
        }
    }
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(": did you mean {name:?}?")).unwrap_or_default()
}
