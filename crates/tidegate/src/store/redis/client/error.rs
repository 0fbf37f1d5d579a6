//! Errors of nodes and of single attempts of a call; `step.rs` has the next step after each.

use std::time::Duration;

use super::connection::Address;
use super::resp::RedisError;
use crate::store::StoreError;

/// Reason why a node cannot be used. It never contains a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeError {
    /// The node's address and the reason.
    pub(crate) reason: String,
    /// Whether an option must be changed, so that a retry does not help.
    pub(crate) misconfigured: bool,
}

/// Error of one attempt of a call.
#[derive(Debug, Clone)]
pub(crate) enum AttemptError {
    /// There is no connection. The call was not sent.
    Down(NodeError),
    /// Another node has replaced this one. The call was not sent.
    Retired,
    /// The call was sent, and there was no reply in time. It may have run or may still run, so it
    /// must not be retried.
    TimedOut,
    /// The connection was lost with the call in flight. It may have run, so it must not be retried.
    Lost(NodeError),
    /// The server replied with an error. The call did not run.
    Server(ServerError),
    /// The deadline passed before the call ran: it was not sent, or its script started after the
    /// deadline by the server's clock, and did nothing.
    Late,
    /// The reply is of no use. The call has run.
    Unusable(StoreError),
}

/// Error reply of a server.
#[derive(Debug, Clone)]
pub(crate) enum ServerError {
    /// The slot has moved to this node.
    Moved(Address),
    /// The slot is migrating to this node, and the key is already there.
    Ask(Address),
    /// The slot is migrating, and the keys are on both nodes.
    TryAgain,
    /// The keys belong to different slots: the server is part of a cluster that we did not detect,
    /// or one address in front of several shards.
    CrossSlot(String),
    /// A key of the call is on another node, although its slot is not: the slot is migrating.
    NonLocalKey,
    /// The script is not cached.
    NoScript,
    /// The server accepts no writes: it is a replica, or its cluster has no majority.
    NotWritable(String),
    /// The server is loading its data, or has lost its primary.
    NotReady(String),
    /// Any other error.
    Other(String),
}

impl NodeError {
    pub(crate) fn new(address: &Address, reason: &str) -> Self {
        Self { reason: format!("{address}: {reason}"), misconfigured: false }
    }

    pub(crate) fn misconfigured(address: &Address, reason: &str) -> Self {
        Self { misconfigured: true, ..Self::new(address, reason) }
    }

    /// Creates the error of a failed handshake.
    pub(crate) fn during_handshake(address: &Address, error: &RedisError) -> Self {
        let reason = match error.code() {
            Some("WRONGPASS") => "WRONGPASS: the user or the password is wrong".to_owned(),
            Some("NOAUTH") => {
                "NOAUTH: the server requires a password, and none was given".to_owned()
            }
            _ => one_line(error),
        };
        let misconfigured = match error.code() {
            Some("WRONGPASS" | "NOAUTH" | "NOPERM" | "DENIED") => true,
            // The database does not exist, the server has no password, or it is not a Redis.
            Some("ERR") => !reason.contains("max number of clients"),
            _ => false,
        };
        Self { misconfigured, ..Self::new(address, &reason) }
    }

    /// Converts it for the caller of a decision.
    pub(crate) fn into_unreachable(self) -> StoreError {
        StoreError::Unreachable(self.reason)
    }

    /// Converts it for the caller that connects a store.
    pub(crate) fn into_start_error(self) -> StoreError {
        if self.misconfigured {
            StoreError::Misconfigured(self.reason)
        } else {
            self.into_unreachable()
        }
    }
}

impl ServerError {
    /// Classifies the text of an error reply of the node at `address`, or of one request of a
    /// script call.
    pub(crate) fn new(address: &Address, text: &str) -> Self {
        let reason = with_address(address, text);
        // The slot and the node of a redirect follow the code.
        let mut words = text.split_ascii_whitespace();
        let code = words.next().unwrap_or_default();
        let mut target = || words.nth(1).and_then(|node| address.parse_relative(node));
        match code {
            "MOVED" => target().map_or(Self::Other(reason), Self::Moved),
            "ASK" => target().map_or(Self::Other(reason), Self::Ask),
            "TRYAGAIN" => Self::TryAgain,
            "CROSSSLOT" => Self::CrossSlot(reason),
            "NOSCRIPT" => Self::NoScript,
            "READONLY" | "CLUSTERDOWN" => Self::NotWritable(reason),
            "LOADING" | "MASTERDOWN" => Self::NotReady(reason),
            // Redis 6 wraps the error of a script's command: `ERR Error running script …: -READONLY
            // You can't write …`.
            "ERR" if text.contains("-READONLY ") => Self::NotWritable(reason),
            // Proxies have their own text: `ERR eval/evalsha command keys must be in same slot`.
            "ERR" if text.contains("same slot") => Self::CrossSlot(reason),
            _ => Self::Other(reason),
        }
    }
}

impl AttemptError {
    /// Classifies the error of a call to the node at `address`.
    pub(crate) fn new(address: &Address, error: &RedisError) -> Self {
        match error {
            RedisError::Server(text) => Self::Server(ServerError::new(address, text)),
            RedisError::Io(..) => Self::Lost(NodeError::new(address, &one_line(error))),
        }
    }

    /// Returns the error of a call that depends on this one, and was not sent because of it.
    pub(crate) fn into_unsent(self) -> Self {
        match self {
            Self::TimedOut => Self::Late,
            Self::Lost(error) => Self::Down(error),
            error => error,
        }
    }

    pub(crate) fn into_store_error(self, timeout: Duration) -> StoreError {
        match self {
            Self::Down(error) => error.into_unreachable(),
            Self::Lost(error) => error.into_unreachable().answer_lost(),
            Self::Retired => StoreError::Unreachable("the primary has just changed".to_owned()),
            Self::TimedOut => StoreError::Timeout(timeout).answer_lost(),
            Self::Late => StoreError::Timeout(timeout),
            Self::Unusable(error) => error.answer_lost(),
            Self::Server(ServerError::Other(reason)) => server_error(reason),
            Self::Server(error) => StoreError::Refused(match error {
                ServerError::Moved(address) | ServerError::Ask(address) => {
                    format!("too many redirects, the last one to {address}")
                }
                ServerError::TryAgain | ServerError::NonLocalKey => MIGRATING.to_owned(),
                ServerError::NoScript => NO_SCRIPT.to_owned(),
                ServerError::CrossSlot(reason)
                | ServerError::NotWritable(reason)
                | ServerError::NotReady(reason)
                | ServerError::Other(reason) => reason,
            }),
        }
    }
}

/// Reason of a request whose keys are on two nodes for longer than it can wait.
pub(crate) const MIGRATING: &str = "TRYAGAIN: the keys are migrating to another node";
/// Reason of a call whose script is unknown right after it was loaded.
const NO_SCRIPT: &str = "NOSCRIPT: the script is unknown right after SCRIPT LOAD, and EVAL is not \
                         permitted: if a proxy sends the two to different servers, grant +eval";

/// Error codes with which a server refuses requests for any key.
const SERVER_CONDITIONS: [&str; 8] =
    ["READONLY", "OOM", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "BUSY"];

/// Parts of the texts with which servers reject a command for the lack of a permission, or because
/// it was renamed or disabled: Redis 6, Redis 7 and Valkey, in scripts and outside.
const NOT_PERMITTED: [&str; 6] = [
    "NOPERM ",
    "The user executing the script can't",
    "ACL failure in script",
    "nknown Redis command",
    "nknown command",
    "command is not allowed from script",
];

/// Converts the error text that the script returned for one item. A condition of the server is a
/// failure of the store; any other error is caused by the value of this key.
pub(crate) fn item_error(reason: &str) -> StoreError {
    if is_server_condition(reason) {
        server_error(reason.to_owned())
    } else {
        StoreError::Unreadable(reason.to_owned())
    }
}

/// Converts an error text that does not concern a key.
fn server_error(reason: String) -> StoreError {
    if is_not_permitted(&reason) {
        StoreError::NotPermitted(reason)
    } else if reason.contains("OOM ") {
        StoreError::OutOfMemory(reason)
    } else {
        StoreError::Refused(reason)
    }
}

/// Returns whether a server refuses requests for any key with this error.
pub(crate) fn is_server_condition(reason: &str) -> bool {
    is_not_permitted(reason)
        || SERVER_CONDITIONS.iter().any(|code| reason.contains(&format!("{code} ")))
}

/// Returns whether a server lacks a command, or its user a permission, according to this error.
pub(crate) fn is_not_permitted(reason: &str) -> bool {
    NOT_PERMITTED.iter().any(|part| reason.contains(part))
}

/// Returns whether a script's error text says that it must declare every key, as some services
/// require, or only keys of one slot.
pub(crate) fn refuses_undeclared(reason: &str) -> bool {
    ["undeclared", "not declared", "hash to the same slot"].iter().any(|part| reason.contains(part))
}

/// Returns whether an error of a whole script call may mean that the server refuses TIME in scripts.
/// Some texts name no command, so that only a call without TIME shows it.
pub(crate) fn refuses_time(reason: &str) -> bool {
    let is_denied_to_user = ["NOPERM", "ACL", "The user"].iter().any(|part| reason.contains(part));
    let is_about_time = || {
        let mut words = reason.split(|c: char| !c.is_ascii_alphanumeric());
        words.any(|word| word == "TIME") || reason.contains("'time'")
    };
    let is_command_refused = || {
        ["not allowed from script", "nknown Redis command", "nknown command"]
            .iter()
            .any(|part| reason.contains(part))
    };
    !is_denied_to_user
        && (is_command_refused() || is_about_time() || refuses_write_after_time(reason))
}

/// Returns whether a script's error text says that it must not write after it has called TIME.
pub(crate) fn refuses_write_after_time(reason: &str) -> bool {
    ["non deterministic", "non-deterministic"].iter().any(|part| reason.contains(part))
}

/// Returns whether a script's error text says that a key is on another node: its slot has moved or
/// is migrating. The request of that key has written nothing.
pub(crate) fn is_non_local_key(reason: &str) -> bool {
    reason.contains("non local key")
}

/// Returns an error text with the address of the node that it comes from.
pub(crate) fn with_address(address: &Address, reason: &str) -> String {
    format!("{address}: {}", normalized(reason))
}

/// Returns the server's error text, or the error of the connection, on one line.
pub(crate) fn one_line(error: &RedisError) -> String {
    normalized(&error.to_string())
}

/// Removes parts that vary between equal errors, arguments that may be secret, and line breaks.
fn normalized(text: &str) -> String {
    // The position in the script would make equal errors differ. Redis 6 puts it first.
    let text = text
        .strip_prefix("@user_script: ")
        .and_then(|text| text.split_once(": "))
        .map_or(text, |(_, reason)| reason);
    let text = match text.rsplit_once(" script: ") {
        Some((reason, position)) if position.contains(", on @") => reason,
        _ => text,
    };
    // A server that does not know AUTH quotes its arguments, the password among them.
    let text = text.split_once(", with args beginning with").map_or(text, |(reason, _)| reason);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
