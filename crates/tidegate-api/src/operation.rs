//! [`Operation`]: what an endpoint of the HTTP API or a command of the Redis protocol does, and the
//! holds of its requests and answers.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Action, Hold, HoldError, HoldState, HoldStatus, PolicyDecision, PolicyDecisions};

/// Time for which the id of an acquire is remembered, unless the request sets another.
const ID_TTL: Duration = Duration::from_secs(60);

/// Operation on the limits of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Acquire,
    /// An acquire whose units are settled by a commit.
    Reserve,
    Commit,
    Renew,
    Peek,
    Refund,
    Report,
    Reset,
}

impl Operation {
    /// The operations of the API.
    pub const OF_API: [Self; 7] = [
        Self::Acquire,
        Self::Reserve,
        Self::Commit,
        Self::Renew,
        Self::Peek,
        Self::Refund,
        Self::Report,
    ];

    /// Returns the path of the endpoint.
    pub fn path(self) -> &'static str {
        match self {
            Self::Acquire => "/v1/acquire",
            Self::Reserve => "/v1/reserve",
            Self::Commit => "/v1/commit",
            Self::Renew => "/v1/renew",
            Self::Peek => "/v1/peek",
            Self::Refund => "/v1/refund",
            Self::Report => "/v1/report",
            Self::Reset => "/v1/reset",
        }
    }

    /// Returns the operation of an endpoint of the API.
    pub fn of_path(path: &str) -> Option<Self> {
        Self::OF_API.into_iter().find(|operation| operation.path() == path)
    }

    /// Returns the fields of a [`QueryBody`](crate::json::QueryBody), besides its target.
    pub fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Acquire => &["cost", "age_ms", "id", "id_ttl_ms"],
            Self::Reserve => &["cost", "id", "ttl_ms"],
            Self::Commit => &["id", "actual"],
            Self::Renew => &["id", "ttl_ms"],
            Self::Peek | Self::Report => &["cost", "age_ms"],
            Self::Refund => &["cost", "age_ms", "id"],
            Self::Reset => &[],
        }
    }

    /// Returns those of them that are required.
    pub fn required(self) -> &'static [&'static str] {
        match self {
            Self::Commit => &["id", "actual"],
            Self::Renew => &["id"],
            _ => &[],
        }
    }

    pub fn action(self) -> Action {
        match self {
            Self::Acquire | Self::Reserve => Action::Acquire,
            Self::Commit => Action::Commit,
            Self::Renew => Action::Renew,
            Self::Peek => Action::Peek,
            Self::Refund => Action::Refund,
            Self::Report => Action::Report,
            Self::Reset => Action::Reset,
        }
    }

    /// Returns the hold of a request with this id: with a random one for a reservation without an
    /// id, otherwise none.
    pub fn hold(
        self,
        id: Option<&str>,
        ttl_ms: Option<u64>,
    ) -> Result<Option<Arc<Hold>>, HoldError> {
        let hold = match id {
            Some(id) => Hold::new(id)?,
            None if self == Self::Reserve => Hold::random(),
            None => return Ok(None),
        };
        let ttl = ttl_ms.map(Duration::from_millis);
        let hold = match ttl {
            ttl if self == Self::Acquire => hold.settled(ttl.unwrap_or(ID_TTL))?,
            Some(ttl) => hold.with_ttl(ttl)?,
            None => hold,
        };
        Ok(Some(Arc::new(hold)))
    }
}

/// Part of an answer about the hold of a request.
#[derive(Debug, Clone, Copy)]
pub struct HoldAnswer<'a> {
    pub id: &'a str,
    /// `None` if nothing is held, because the store is unavailable or no limit applies.
    pub status: Option<HoldStatus>,
    pub expires_after_ms: u64,
}

impl<'a> HoldAnswer<'a> {
    /// Returns the part of the answer with these decisions, if the request has this hold, or holds
    /// units without an id of its own. A denied request holds nothing.
    pub fn new(
        operation: Operation,
        hold: Option<&'a Hold>,
        decisions: &'a PolicyDecisions<'_>,
    ) -> Option<Self> {
        if operation.action() == Action::Acquire && !decisions.is_allowed() {
            return None;
        }
        let hold = hold.or_else(|| decisions.iter().find_map(PolicyDecision::hold))?;
        let state = decisions.hold().map(|(_, state)| state);
        let expires_after = state.map(|state| state.expires_after()).unwrap_or_default();
        let status = state.map(|HoldState { status, .. }| match status {
            // An acquire with an id.
            HoldStatus::Held if expires_after.is_zero() => HoldStatus::Settled,
            status => status,
        });
        Some(Self {
            id: hold.id(),
            status,
            // Rounded down, so that a client renews in time.
            expires_after_ms: u64::try_from(expires_after.as_millis()).unwrap_or(u64::MAX),
        })
    }
}
