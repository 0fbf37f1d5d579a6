//! [`CallReply`]: the decoded reply of decide.lua, and the decisions of each caller from it.

use super::requests::{Operation, Request};
use crate::algorithm::{Grants, RawDecision};
use crate::charge::{Charge, ChargeError};
use crate::decision::{Decision, Source};
use crate::hold::{Hold, HoldState};
use crate::store::redis::client::error::item_error;
use crate::store::{Action, StoreError};

/// Decoded reply of one call.
pub(crate) struct CallReply {
    /// The server's time in microseconds.
    pub(crate) now: i64,
    /// Reply per item that was sent; `None` if the script ran after its deadline and did nothing.
    pub(crate) items: Option<Vec<ItemReply>>,
}

/// Reply to one item.
#[derive(Debug, Clone)]
pub(crate) enum ItemReply {
    Grants(Grants),
    /// Result of a reservation that a fast path has decided, with the state of its hold.
    Held(Grants, Option<HoldState>),
    /// Decision per charge, with the state of its hold.
    Decisions(Vec<(RawDecision, Option<HoldState>)>),
    /// Error of this item; other items of the call are not affected.
    Error(String),
}

/// Decision per charge of one request.
pub(crate) enum RequestDecisions {
    One(Decision),
    Many(Vec<Decision>),
}

/// Reads the reply of the script, number by number.
pub(crate) struct ReplyReader<'a> {
    rest: &'a [u8],
}

/// Error text of an item for which the call did nothing, because it had done enough.
pub(crate) const LATER: &str = "LATER";
/// Error text of a reservation whose id was used with another cost.
const HOLD_CONFLICT: &str = "HOLDCONFLICT";

impl ItemReply {
    /// Returns the decisions for one request, given the number of equal requests before it.
    pub(crate) fn decisions(
        &self,
        request: &Request<'_>,
        preceding: u64,
    ) -> Result<RequestDecisions, StoreError> {
        let decision = |raw: RawDecision, charge: &Charge<'_>| {
            raw.into_decision(charge.quota().burst(), Source::Store)
        };
        match (self, request.charges) {
            (Self::Grants(grants), [charge]) => {
                let raw = grants.decision(charge.quota().parameters(), charge.cost(), preceding);
                Ok(RequestDecisions::One(decision(raw, charge)))
            }
            (Self::Held(grants, hold), [charge]) => {
                let raw = grants.decision(charge.quota().parameters(), charge.cost(), 0);
                Ok(RequestDecisions::One(Decision { hold: *hold, ..decision(raw, charge) }))
            }
            (Self::Grants(_) | Self::Held(..), _) => {
                Err(unexpected("one answer to several charges"))
            }
            // The script does not compute the state of a key that it has deleted.
            (Self::Decisions(_), charges)
                if request.operation == Operation::Apply(Action::Reset) =>
            {
                let untouched = |charge: &Charge<'_>| {
                    decision(RawDecision::untouched(charge.quota().burst()), charge)
                };
                Ok(RequestDecisions::Many(charges.iter().map(untouched).collect()))
            }
            (Self::Decisions(raw), charges) => {
                let decided = raw.iter().zip(charges).map(|((raw, hold), charge)| Decision {
                    hold: *hold,
                    ..decision(*raw, charge)
                });
                Ok(RequestDecisions::Many(decided.collect()))
            }
            (Self::Error(reason), charges) if reason.ends_with(HOLD_CONFLICT) => {
                let id = charges.iter().find_map(Charge::hold).map(Hold::id);
                Err(ChargeError::HoldConflict(id.unwrap_or_default().to_owned()).into())
            }
            (Self::Error(reason), _) => Err(item_error(reason)),
        }
    }
}

impl RequestDecisions {
    pub(crate) fn into_vec(self) -> Vec<Decision> {
        match self {
            Self::One(decision) => vec![decision],
            Self::Many(decisions) => decisions,
        }
    }

    /// Returns the decision of a request with a single charge.
    pub(crate) fn into_one(self) -> Result<Decision, StoreError> {
        match self {
            Self::One(decision) => Ok(decision),
            Self::Many(decisions) => {
                decisions.first().copied().ok_or_else(|| unexpected("no answer"))
            }
        }
    }
}

impl<'a> ReplyReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads a whole number that is not negative.
    pub(crate) fn number(&mut self) -> Result<u64, StoreError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(too_short)?;
        self.rest = rest;
        let number = f64::from_le_bytes(*bytes);
        if !(0.0..=MAX_NUMBER).contains(&number) || number.fract() != 0.0 {
            return Err(unexpected("a wrong number"));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        Ok(number as u64)
    }

    /// Skips a number, if it is the next one.
    pub(crate) fn skip(&mut self, number: f64) -> bool {
        let rest = self.rest.strip_prefix(&number.to_le_bytes());
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads the error of an item, if it has one instead of numbers.
    pub(crate) fn error(&mut self) -> Result<Option<String>, StoreError> {
        if !self.skip(-1.0) {
            return Ok(None);
        }
        let length = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        let (text, rest) = self.rest.split_at_checked(length).ok_or_else(too_short)?;
        self.rest = rest;
        Ok(Some(String::from_utf8_lossy(text).into_owned()))
    }
}

/// The largest number up to which a double represents every integer.
const MAX_NUMBER: f64 = 9_007_199_254_740_992.0;

fn too_short() -> StoreError {
    unexpected("too short")
}

pub(crate) fn unexpected(reason: &str) -> StoreError {
    StoreError::Refused(format!("unexpected reply of the script: {reason}"))
}
