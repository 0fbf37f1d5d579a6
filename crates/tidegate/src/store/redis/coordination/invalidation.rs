//! Invalidations: counts that have units again. They are published after each refund and reset, and
//! polled by deny caches.
//!
//! invalidation.lua documents the protocol. In a cluster one key, and so one node, has the
//! invalidations of all counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};

use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::invalidation::{CountId, Cursor, Invalidations, Scope};
use crate::store::redis::Shared;
use crate::store::redis::script::Script;
use crate::store::{Action, StoreError};

/// Number of invalidations that are kept. A reader that has missed more drops its whole cache.
const MAX_INVALIDATIONS: usize = 1_000;
/// Time from the last poll until the invalidation set expires.
const SET_TTL: Duration = Duration::from_secs(10);

/// Counts that are about to get units back. They are published when the refund or reset ends, even
/// if it fails (it may have run) or its caller is cancelled.
pub(crate) struct PendingInvalidation {
    shared: Arc<Shared>,
    counts: Vec<CountId>,
}

impl PendingInvalidation {
    /// Returns `None` for an action that returns no units.
    pub(crate) fn of(shared: &Arc<Shared>, action: Action, charges: &[Charge<'_>]) -> Option<Self> {
        let counts = || charges.iter().map(CountId::of).collect();
        matches!(action, Action::Refund | Action::Reset)
            .then(|| Self { shared: Arc::clone(shared), counts: counts() })
    }

    /// Publishes the counts, and waits for it until the deadline at most. After that the publisher
    /// goes on retrying, and the refund does not fail.
    pub(crate) async fn publish(mut self, deadline: Instant) {
        let counts = std::mem::take(&mut self.counts);
        let number = self.shared.enqueue_invalidations(&counts);
        self.shared.publisher.wait_published(number, deadline).await;
    }
}

impl Drop for PendingInvalidation {
    fn drop(&mut self) {
        if !self.counts.is_empty() {
            self.shared.enqueue_invalidations(&self.counts);
        }
    }
}

impl Shared {
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
        self.invalidation_call(operation, arguments, |_| Ok(())).await
    }

    /// Reads the invalidations since a cursor.
    pub(crate) async fn poll_invalidations(
        &self,
        since: &Cursor,
    ) -> Result<Invalidations, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(SET_TTL.as_millis().to_string()).arg(&since.0);
        };
        let mut polled = self.invalidation_call("poll", arguments, read_reply).await?;
        // A manual clock replaces the server's time in all scripts.
        polled.now = self.driven_time().or(polled.now);
        Ok(polled)
    }

    async fn invalidation_call<T>(
        &self,
        operation: &str,
        arguments: impl Fn(&mut Cmd),
        read: impl Fn(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let (script, key) = (Script::invalidation(), self.internal_key("news"));
        let command = || {
            let mut command = script.evalsha(1);
            command.arg(&key).arg(operation).arg(format!("{:016x}", random_u64()));
            arguments(&mut command);
            command
        };
        self.call_script(script, &key, command, read).await
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
