//! Invalidations: counts that have units again. Published after each refund and reset, and read by
//! deny caches.
//!
//! news.lua has the contract. In a cluster all of them are on the node of one key, wherever the
//! counts live.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};

use super::Shared;
use super::call::{Reply, Setback};
use super::publisher::Scope;
use super::script::Script;
use super::server_clock::ServerClock;
use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::news::{CountId, Freed, Mark, News};
use crate::store::{Action, StoreError};

/// The most invalidations that are kept. A reader that has missed more drops everything.
const MAX_INVALIDATIONS: usize = 1_000;
/// The invalidation set expires this long after the last read.
const SET_TTL: Duration = Duration::from_secs(10);

/// Counts that are about to get units back. Published once that is done, or may be done, even if
/// the caller has gone.
pub(super) struct PendingInvalidation {
    shared: Arc<Shared>,
    counts: Vec<CountId>,
}

impl PendingInvalidation {
    /// `None` for an action that returns no units.
    pub(super) fn of(shared: &Arc<Shared>, action: Action, charges: &[Charge<'_>]) -> Option<Self> {
        let counts = || charges.iter().map(CountId::of).collect();
        matches!(action, Action::Refund | Action::Reset)
            .then(|| Self { shared: Arc::clone(shared), counts: counts() })
    }

    /// Publishes, and waits until that is done or the caller's deadline has passed. A refund does
    /// not fail for it: the publisher goes on retrying.
    pub(super) async fn publish(mut self, deadline: Instant) {
        let counts = std::mem::take(&mut self.counts);
        let number = self.shared.enqueue_invalidations(&counts);
        self.shared.publisher.published(number, deadline).await;
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
    pub(super) async fn publish(&self, scope: &Scope) -> Result<(), StoreError> {
        let arguments = |command: &mut Cmd| {
            if let Scope::Counts(counts) = scope {
                command.arg(MAX_INVALIDATIONS);
                for CountId(number) in counts {
                    command.arg(format!("{number:016x}"));
                }
            }
        };
        let verb = if *scope == Scope::All { "publish-all" } else { "publish" };
        self.news_call(verb, arguments, |_| Ok(())).await
    }

    pub(super) async fn news(&self, since: &Mark) -> Result<News, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(SET_TTL.as_millis().to_string()).arg(&since.0);
        };
        let mut news = self.news_call("read", arguments, read).await?;
        // The same time as in the scripts that decide.
        news.now = self.driven_time().or(news.now);
        Ok(news)
    }

    async fn news_call<T>(
        &self,
        verb: &str,
        arguments: impl Fn(&mut Cmd),
        read: impl Fn(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let (script, key) = (Script::news(), self.own_key("news"));
        let command = |_: &ServerClock| {
            let mut command = script.evalsha(1);
            command.arg(&key).arg(verb).arg(format!("{:016x}", random_u64()));
            arguments(&mut command);
            command
        };
        let call = self.call(script, &key);
        let read = |reply: Value| Ok((None, Reply::Answer(read(reply)?)));
        call.run(self.topology.known(), None, command, read)
            .await
            .map_err(Setback::into_store_error)
    }
}

fn read(reply: Value) -> Result<News, StoreError> {
    let unexpected = || StoreError::Refused("unexpected reply of the script: not news".to_owned());
    let (now, complete, members): (u64, bool, Vec<String>) = match reply {
        Value::Array(mut values) if values.len() >= 3 => {
            let members = values.split_off(2);
            let members =
                members.into_iter().map(redis::from_redis_value).collect::<Result<_, _>>();
            let numbers =
                redis::from_redis_value(Value::Array(values)).map_err(|_| unexpected())?;
            let (now, complete) = numbers;
            (now, complete, members.map_err(|_| unexpected())?)
        }
        _ => return Err(unexpected()),
    };
    let mut members = members.into_iter();
    let mark = Mark(members.next().ok_or_else(unexpected)?);
    let count = |member: String| {
        let number =
            member.rsplit(':').next().and_then(|number| u64::from_str_radix(number, 16).ok());
        number.map(CountId).ok_or_else(unexpected)
    };
    let counts = members.map(count).collect::<Result<Vec<_>, _>>()?;
    let freed = if complete { Freed::Counts(counts) } else { Freed::Anything };
    Ok(News { mark, freed, now: Some(now) })
}
