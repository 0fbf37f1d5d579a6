//! Invalidations: counts that have units again. They are published after each refund and reset, and
//! polled by deny caches.
//!
//! invalidation.lua documents the protocol. In a cluster one key, and so one node, has the
//! invalidations of all counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};

use super::internal_key;
use super::publisher::Publisher;
use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::invalidation::{CountId, Cursor, Invalidations, Scope};
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
        let arguments = |command: &mut Cmd| {
            if let Scope::Counts(counts) = scope {
                command.arg(MAX_INVALIDATIONS);
                for CountId(number) in counts {
                    command.arg(format!("{number:016x}"));
                }
            }
        };
        let operation = if *scope == Scope::All { "publish-all" } else { "publish" };
        self.call(operation, arguments, |_| Ok(())).await
    }

    /// Reads the invalidations since a cursor.
    pub(crate) async fn poll(&self, since: &Cursor) -> Result<Invalidations, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(SET_TTL.as_millis().to_string()).arg(&since.0);
        };
        self.call("poll", arguments, read_reply).await
    }

    async fn call<T>(
        &self,
        operation: &str,
        arguments: impl Fn(&mut Cmd),
        read: impl Fn(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let script = Script::invalidation();
        let command = || {
            let mut command = script.evalsha(1);
            command.arg(&self.key).arg(operation).arg(format!("{:016x}", random_u64()));
            arguments(&mut command);
            command
        };
        call_script(self.topology.state(), script, &self.key, command, read).await
    }
}

/// Decodes the reply of a poll.
fn read_reply(reply: Value) -> Result<Invalidations, StoreError> {
    let (now, cursor_found, members): (u64, bool, Vec<String>) = match reply {
        Value::Array(mut values) if values.len() >= 3 => {
            let members = values.split_off(2);
            let members =
                members.into_iter().map(redis::from_redis_value).collect::<Result<_, _>>();
            let (now, cursor_found) =
                redis::from_redis_value(Value::Array(values)).map_err(|_| unexpected())?;
            (now, cursor_found, members.map_err(|_| unexpected())?)
        }
        _ => return Err(unexpected()),
    };
    let mut members = members.into_iter();
    let cursor = Cursor(members.next().ok_or_else(unexpected)?);
    let count_of = |member: String| {
        let number =
            member.rsplit(':').next().and_then(|number| u64::from_str_radix(number, 16).ok());
        number.map(CountId).ok_or_else(unexpected)
    };
    let counts = members.map(count_of).collect::<Result<Vec<_>, _>>()?;
    let scope = if cursor_found { Scope::Counts(counts) } else { Scope::All };
    Ok(Invalidations { cursor, scope, now: Some(now) })
}

fn unexpected() -> StoreError {
    StoreError::Refused("unexpected reply of the invalidation script".to_owned())
}
