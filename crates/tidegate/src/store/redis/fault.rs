//! Why a call to a node did not bring an answer, and what may be done about it.

use std::time::Duration;

use redis::RedisError;

use super::access::Address;
use crate::store::StoreError;

/// Why a node cannot be used. Holds no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trouble {
    /// The node's address and what is wrong.
    pub(super) reason: String,
    /// Trying again will not help: somebody has to change an option.
    pub(super) misconfigured: bool,
}

/// Why one attempt of a call failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// There is no connection. The call was not sent.
    Down(Trouble),
    /// This node is no longer the one to ask. The call was not sent.
    Retired,
    /// No answer in time. It may have run, or may run yet: not to be sent again.
    TimedOut,
    /// The connection broke while the call was under way. It may have run: not to be sent again.
    Lost(Trouble),
    /// The server answered with an error. The call did not run.
    Said(Said),
}

/// An error that a server answered with.
#[derive(Debug)]
pub(super) enum Said {
    /// The slot lives there now.
    Moved(Address),
    /// This key of a migrating slot is there already.
    Ask(Address),
    /// Some keys of a migrating slot are here, some there.
    TryAgain,
    /// The keys belong to different slots: this is a cluster, and we did not know.
    CrossSlot,
    /// The script is not in its cache.
    NoScript,
    /// It does not write now: a replica, or a cluster without a majority.
    NotNow(String),
    /// Anything else.
    No(String),
}

impl Trouble {
    pub(super) fn new(address: &Address, reason: &str) -> Self {
        Self { reason: format!("{address}: {reason}"), misconfigured: false }
    }

    pub(super) fn misconfigured(address: &Address, reason: &str) -> Self {
        Self { misconfigured: true, ..Self::new(address, reason) }
    }

    /// What a server said, or how it failed to, while a connection to it was made.
    pub(super) fn at_the_door(address: &Address, error: &RedisError) -> Self {
        let reason = match error.code() {
            Some("WRONGPASS") => "WRONGPASS: the user or the password is wrong".to_owned(),
            Some("NOAUTH") => "NOAUTH: it asks for a password, and none was given".to_owned(),
            _ => one_line(error),
        };
        let misconfigured = match error.code() {
            Some("WRONGPASS" | "NOAUTH" | "NOPERM" | "DENIED") => true,
            // A database that is not there, a password for a server without one, a command that
            // only a Redis knows.
            Some("ERR") => !reason.contains("max number of clients"),
            _ => false,
        };
        Self { misconfigured, ..Self::new(address, &reason) }
    }

    /// For who asks for a decision.
    pub(super) fn unreachable(self) -> StoreError {
        StoreError::Unreachable(self.reason)
    }

    /// For who starts a store.
    pub(super) fn at_start(self) -> StoreError {
        if self.misconfigured { StoreError::Misconfigured(self.reason) } else { self.unreachable() }
    }
}

impl Fault {
    /// What the node at `address` answered, or how it failed to.
    pub(super) fn new(address: &Address, error: &RedisError) -> Self {
        let Some(code) = error.code() else {
            return Self::Lost(Trouble::new(address, &one_line(error)));
        };
        let target = || error.redirect_node().and_then(|(node, _)| address.told_by(node));
        // Redis 6 wraps what a script's command met: `ERR Error running script …: -READONLY You
        // can't write …`.
        let inside = |name: &str| error.detail().is_some_and(|detail| detail.contains(name));
        Self::Said(match code {
            "MOVED" => {
                target().map_or_else(|| Said::No(named(address, &one_line(error))), Said::Moved)
            }
            "ASK" => target().map_or_else(|| Said::No(named(address, &one_line(error))), Said::Ask),
            "TRYAGAIN" => Said::TryAgain,
            "CROSSSLOT" => Said::CrossSlot,
            "NOSCRIPT" => Said::NoScript,
            "READONLY" | "CLUSTERDOWN" => Said::NotNow(named(address, &one_line(error))),
            "ERR" if inside("-READONLY ") => Said::NotNow(named(address, &one_line(error))),
            _ => Said::No(named(address, &one_line(error))),
        })
    }

    pub(super) fn into_store_error(self, timeout: Duration) -> StoreError {
        match self {
            Self::Down(trouble) | Self::Lost(trouble) => trouble.unreachable(),
            Self::Retired => StoreError::Unreachable("the primary has just changed".to_owned()),
            Self::TimedOut => StoreError::Timeout(timeout),
            Self::Said(said) => StoreError::Refused(match said {
                Said::Moved(address) | Said::Ask(address) => {
                    format!("sent on too often, at last to {address}")
                }
                Said::TryAgain => "TRYAGAIN: the keys are on their way to another node".to_owned(),
                Said::CrossSlot => "CROSSSLOT: the keys belong to different slots".to_owned(),
                Said::NoScript => {
                    "NOSCRIPT: the scripts are flushed as soon as they are loaded".to_owned()
                }
                Said::NotNow(reason) | Said::No(reason) => reason,
            }),
        }
    }
}

/// The error codes by which a server refuses any request, whatever its key.
const SERVER_CONDITIONS: [&str; 9] = [
    "READONLY",
    "OOM",
    "MISCONF",
    "NOPERM",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "LOADING",
    "BUSY",
];

/// The error of one request of a script call, from the text that the script returned for it. A
/// condition of the whole server is a failure of the store; anything else is the fault of this
/// key's value.
pub(super) fn error_of_request(reason: &str) -> StoreError {
    // A key of the same slot that is on its way to another node.
    let is_migrating = reason.contains("non local key");
    let is_of_server =
        is_migrating || SERVER_CONDITIONS.iter().any(|code| reason.contains(&format!("{code} ")));
    if is_of_server {
        StoreError::Refused(reason.to_owned())
    } else {
        StoreError::Unreadable(reason.to_owned())
    }
}

/// What a script's command met, as the script tells it: a replica does not write.
pub(super) fn says_readonly(reason: &str) -> bool {
    reason.starts_with("READONLY ") || reason.contains("-READONLY ")
}

/// An error's text with the node that it comes from.
pub(super) fn named(address: &Address, reason: &str) -> String {
    format!("{address}: {}", shortened(reason))
}

/// As the server said it, or as the connection failed.
pub(super) fn one_line(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => shortened(&format!("{code} {detail}")),
        _ => shortened(&error.to_string()),
    }
}

/// On one line: some errors quote what they could not read, line breaks and all.
fn shortened(text: &str) -> String {
    // Where in the script it happened tells nobody anything, and makes two of one reason. (Redis 6
    // says it first.)
    let text = text
        .strip_prefix("@user_script: ")
        .and_then(|text| text.split_once(": "))
        .map_or(text, |(_, reason)| reason);
    let text = text.split_once(" script: ").map_or(text, |(reason, _)| reason);
    // A server that does not know AUTH quotes what came with it.
    let text = text.split_once(", with args beginning with").map_or(text, |(reason, _)| reason);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
