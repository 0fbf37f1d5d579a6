//! Invalidations: counts that have units again. They are published after each refund and reset, and
//! polled by deny caches.
//!
//! invalidation.lua documents the protocol. In a cluster one key, and so one node, has the
//! invalidations of all counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::internal_key;
use super::publisher::Publisher;
use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::invalidation::{CountId, Cursor, Invalidations, Scope};
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::Topology;
use crate::store::redis::script::Script;
use crate::store::redis::script::call::call_script;
use crate::store::{Action, StoreError};

/// Number of invalidations that are kept. A reader that has missed more drops its whole cache.
const MAX_INVALIDATIONS: usize = 1_000;
/// Time from the last poll until the invalidation set expires.
const SET_TTL: Duration = Duration::from_secs(10);

/// Counts that are about to get units back. They are published when the refund or reset ends, even
/// if it fails (it may have run) or its caller is cancelled.
pub(crate) struct PendingInvalidation {
    publisher: Arc<Publisher>,
    counts: Vec<CountId>,
}

/// The invalidation set of a store in Redis.
pub(crate) struct InvalidationSet {
    topology: Arc<Topology>,
    key: String,
}

impl PendingInvalidation {
    /// Returns `None` for an action that returns no units.
    pub(crate) fn of(
        publisher: &Arc<Publisher>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Option<Self> {
        let counts = || charges.iter().map(CountId::of).collect();
        matches!(action, Action::Refund | Action::Reset)
            .then(|| Self { publisher: Arc::clone(publisher), counts: counts() })
    }

    /// Publishes the counts, and waits for it until the deadline at most. After that the publisher
    /// goes on retrying, and the refund does not fail.
    pub(crate) async fn publish(mut self, deadline: Instant) {
        let counts = std::mem::take(&mut self.counts);
        let number = self.publisher.enqueue(&counts);
        self.publisher.wait_published(number, deadline).await;
    }
}

impl Drop for PendingInvalidation {
    fn drop(&mut self) {
        if !self.counts.is_empty() {
            self.publisher.enqueue(&self.counts);
        }
    }
}

impl InvalidationSet {
    pub(crate) fn new(topology: &Arc<Topology>, prefix: &str) -> Self {
        Self { topology: Arc::clone(topology), key: internal_key(prefix, "news") }
    }

    /// Publishes invalidations by one call.
    pub(crate) async fn publish(&self, scope: &Scope) -> Result<(), StoreError> {
        let arguments = |command: Command| match scope {
            Scope::All => command,
            Scope::Counts(counts) => {
                let add = |command: Command, CountId(number): &CountId| {
                    command.arg(format!("{number:016x}"))
                };
                counts.iter().fold(command.arg(MAX_INVALIDATIONS.to_string()), add)
            }
        };
        let operation = if *scope == Scope::All { "publish-all" } else { "publish" };
        self.call(operation, arguments, |_| Ok(())).await
    }

    /// Reads the invalidations since a cursor.
    pub(crate) async fn poll(&self, since: &Cursor) -> Result<Invalidations, StoreError> {
        let arguments =
            |command: Command| command.arg(SET_TTL.as_millis().to_string()).arg(&since.0);
        self.call("poll", arguments, read_reply).await
    }

    async fn call<T>(
        &self,
        operation: &str,
        arguments: impl Fn(Command) -> Command,
        read: impl Fn(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let script = Script::invalidation();
        let command = || {
            let command = script.evalsha(1).arg(&self.key).arg(operation);
            arguments(command.arg(format!("{:016x}", random_u64())))
        };
        call_script(self.topology.state(), script, &self.key, command, read).await
    }
}

/// Decodes the reply of a poll.
fn read_reply(reply: Value) -> Result<Invalidations, StoreError> {
    let Value::Array(values) = reply else { return Err(unexpected()) };
    let [Value::Integer(now), Value::Integer(cursor_found), cursor, members @ ..] = &values[..]
    else {
        return Err(unexpected());
    };
    let cursor = Cursor(cursor.text().ok_or_else(unexpected)?.to_owned());
    let count_of = |member: &Value| {
        let number = member.text().and_then(|member| member.rsplit(':').next());
        number.and_then(|number| u64::from_str_radix(number, 16).ok()).map(CountId)
    };
    let counts = members.iter().map(count_of).collect::<Option<Vec<_>>>().ok_or_else(unexpected)?;
    let scope = if *cursor_found == 1 { Scope::Counts(counts) } else { Scope::All };
    Ok(Invalidations { cursor, scope, now: u64::try_from(*now).ok() })
}

fn unexpected() -> StoreError {
    StoreError::Refused("unexpected reply of the invalidation script".to_owned())
}
