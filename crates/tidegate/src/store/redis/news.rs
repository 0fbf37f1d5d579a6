//! News of counts that have room again: told after each refund and reset, and read by who keeps denials.
//!
//! By news.lua, which has the contract. In a cluster they are in one place, whatever the place of the count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use super::Shared;
use super::call::{Reply, Setback};
use super::script::Script;
use super::server_clock::ServerClock;
use crate::charge::Charge;
use crate::resilience::random;
use crate::store::news::{CountId, Freed, Mark, News};
use crate::store::{Action, StoreError};

/// How many are kept. Who has missed more forgets everything.
const MOST_NEWS: usize = 1_000;
/// So long after the last reader they are forgotten.
const LIFETIME: Duration = Duration::from_secs(10);

/// Counts that are about to be freed. Once that is done, or may have been, it is told, even if the caller has gone.
pub(super) struct Untold {
    shared: Arc<Shared>,
    counts: Vec<CountId>,
}

impl Untold {
    /// If this is an action that frees units.
    pub(super) fn of(shared: &Arc<Shared>, action: Action, charges: &[Charge<'_>]) -> Option<Self> {
        let freed = || charges.iter().map(CountId::of).collect();
        matches!(action, Action::Refund | Action::Reset).then(|| Self { shared: Arc::clone(shared), counts: freed() })
    }

    /// Tells it, and waits until that is done, or the caller's time is up. What cannot be told is no failure of the refund:
    /// it is seen when the denials that it would have ended do so by themselves.
    pub(super) async fn tell(mut self, deadline: Instant) {
        if let Some(task) = self.begin() {
            let _ = timeout_at(deadline.into(), task).await;
        }
    }

    /// With a timeout of its own. Without a runtime nothing can be sent any more.
    fn begin(&mut self) -> Option<JoinHandle<()>> {
        let (counts, shared) = (std::mem::take(&mut self.counts), Arc::clone(&self.shared));
        let runtime = Handle::try_current().ok().filter(|_| !counts.is_empty())?;
        Some(runtime.spawn(async move {
            if let Err(error) = shared.tell(&counts).await {
                tracing::debug!(%error, "others are not told of units that were given back");
            }
        }))
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        drop(self.begin());
    }
}

impl Shared {
    async fn tell(&self, counts: &[CountId]) -> Result<(), StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(MOST_NEWS);
            for CountId(number) in counts {
                command.arg(format!("{number:016x}"));
            }
        };
        self.news_call("tell", arguments, |_| Ok(())).await
    }

    pub(super) async fn news(&self, since: &Mark) -> Result<News, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(LIFETIME.as_millis().to_string()).arg(&since.0);
        };
        let mut news = self.news_call("read", arguments, read).await?;
        // Time as the scripts have it that decide.
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
            command.arg(&key).arg(verb).arg(format!("{:016x}", random()));
            arguments(&mut command);
            command
        };
        let call = self.call(script, &key);
        let read = |reply: Value| Ok((None, Reply::Answer(read(reply)?)));
        call.run(self.topology.known(), None, command, read).await.map_err(Setback::into_store_error)
    }
}

fn read(reply: Value) -> Result<News, StoreError> {
    let unexpected = || StoreError::Refused("unexpected reply of the script: not news".to_owned());
    let (now, complete, members): (u64, bool, Vec<String>) = match reply {
        Value::Array(mut values) if values.len() >= 3 => {
            let members = values.split_off(2);
            let members = members.into_iter().map(redis::from_redis_value).collect::<Result<_, _>>();
            let numbers = redis::from_redis_value(Value::Array(values)).map_err(|_| unexpected())?;
            let (now, complete) = numbers;
            (now, complete, members.map_err(|_| unexpected())?)
        }
        _ => return Err(unexpected()),
    };
    let mut members = members.into_iter();
    let mark = Mark(members.next().ok_or_else(unexpected)?);
    let count = |member: String| {
        let number = member.rsplit(':').next().and_then(|number| u64::from_str_radix(number, 16).ok());
        number.map(CountId).ok_or_else(unexpected)
    };
    let counts = members.map(count).collect::<Result<Vec<_>, _>>()?;
    let freed = if complete { Freed::Counts(counts) } else { Freed::Anything };
    Ok(News { mark, freed, now: Some(now) })
}
