//! [`FleetBoard`]: what the instances of a fleet show each other: a text of each, texts that several
//! share, and lists of events.
//!
//! board.lua documents the protocol. The text of an instance is a key of its own, so that Redis
//! removes those of dead instances. All keys have the hash tag of the heartbeats.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::internal_key;
use crate::clock::micros;
use crate::store::StoreError;
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::TopologyState;
use crate::store::redis::script::Script;
use crate::store::redis::script::call::OwnCall;

/// Number of texts that one call reads: about as many bytes as Redis copies in 100 µs.
const TEXTS_PER_CALL: usize = 64;
/// Number of events in one call.
const EVENTS_PER_CALL: usize = 100;
/// TTL of a list, from its last event on.
const LIST_TTL: Duration = Duration::from_secs(7 * 86_400);
/// TTL of a shared text, from the last publication of one of its instances on.
const SHARED_TTL: Duration = Duration::from_secs(15 * 60);

/// Texts and events that the instances of a fleet show each other, by [`RedisStore::fleet_board`].
///
/// Nothing here is part of a decision. Texts must be short: Redis copies them in each call.
///
/// ```no_run
/// use std::time::Duration;
/// use tidegate::{RedisStore, StoreError};
///
/// # async fn publish(store: &RedisStore) -> Result<(), StoreError> {
/// let Some(board) = store.fleet_board() else { return Ok(()) };
/// board.publish("api-1", "version 1", Duration::from_secs(5), "config-a", "").await?;
/// let texts = board.read(&["api-1", "api-2"]).await?;
/// assert_eq!(texts, [Some("version 1".to_owned()), None]);
/// # Ok(())
/// # }
/// ```
///
/// [`RedisStore::fleet_board`]: super::super::RedisStore::fleet_board
#[derive(Clone, Copy)]
pub struct FleetBoard<'a> {
    topology: &'a TopologyState,
    prefix: &'a str,
}

impl<'a> FleetBoard<'a> {
    /// Number of events that a list keeps.
    pub const MAX_EVENTS: usize = 1_000;

    /// Returns `None` if heartbeats are off: instances do not know of each other.
    pub(in crate::store::redis) fn new(
        topology: &'a TopologyState,
        prefix: &'a str,
    ) -> Option<Self> {
        topology.has_heartbeat().then_some(Self { topology, prefix })
    }

    /// Publishes the text of an instance for this time, and extends the life of a shared text.
    /// Returns whether each of them was there before. If the shared one was not, publish again, with
    /// its text.
    pub async fn publish(
        &self,
        instance: &str,
        text: &str,
        ttl: Duration,
        shared_name: &str,
        shared_text: &str,
    ) -> Result<(bool, bool), StoreError> {
        let (key, shared_key) = (self.text_key(instance), self.shared_key(shared_name));
        let arguments = Command::new("2").arg(&key).arg(&shared_key).arg("publish");
        let arguments = arguments.arg(text).arg(ttl.as_millis().max(1).to_string());
        let arguments = arguments.arg(SHARED_TTL.as_millis().to_string()).arg(shared_text);
        self.call(&key, arguments, true, |reply| match reply {
            Value::Array(found) if found.len() == 2 => {
                Ok((found[0] == Value::Integer(1), found[1] == Value::Integer(1)))
            }
            _ => Err(unexpected()),
        })
        .await
    }

    /// Returns the texts of these instances, in this order.
    pub async fn read(
        &self,
        instances: &[impl AsRef<str>],
    ) -> Result<Vec<Option<String>>, StoreError> {
        self.read_keys(instances.iter().map(|name| self.text_key(name.as_ref())).collect()).await
    }

    /// Returns the shared texts of these names, in this order.
    pub async fn read_shared(
        &self,
        names: &[impl AsRef<str>],
    ) -> Result<Vec<Option<String>>, StoreError> {
        self.read_keys(names.iter().map(|name| self.shared_key(name.as_ref())).collect()).await
    }

    /// Appends events, each with its age, to the list of this name. Only the last
    /// [`MAX_EVENTS`](Self::MAX_EVENTS) are kept.
    pub async fn append(
        &self,
        list: &str,
        events: &[(Duration, String)],
    ) -> Result<(), StoreError> {
        let key = self.list_key(list);
        for events in events.chunks(EVENTS_PER_CALL) {
            let arguments = Command::new("1").arg(&key).arg("append");
            let arguments = arguments.arg(Self::MAX_EVENTS.to_string());
            let arguments = arguments.arg(LIST_TTL.as_millis().to_string());
            let arguments = arguments.arg(events.len().to_string());
            let arguments = events.iter().fold(arguments, |arguments, (age, text)| {
                arguments.arg(micros(*age).to_string()).arg(text)
            });
            self.call(&key, arguments, true, |_| Ok(())).await?;
        }
        Ok(())
    }

    /// Returns the last `limit` events of a list, the oldest first, each with its time in
    /// microseconds since the Unix epoch by the clock of the server.
    pub async fn events(&self, list: &str, limit: usize) -> Result<Vec<(u64, String)>, StoreError> {
        let key = self.list_key(list);
        // An event that is appended between two calls shifts the ranks of the others.
        let mut events = BTreeSet::new();
        let limit = limit.min(Self::MAX_EVENTS);
        for last in (0..limit).step_by(EVENTS_PER_CALL) {
            let first = limit.min(last + EVENTS_PER_CALL);
            let ranks = [first, last + 1].map(|rank| format!("-{rank}"));
            let arguments = Command::new("1").arg(&key).arg("list");
            let arguments = ranks.iter().fold(arguments, Command::arg);
            let page = self.call(&key, arguments, false, read_events).await?;
            let is_last = page.len() < first - last;
            events.extend(page);
            if is_last {
                break;
            }
        }
        Ok(events.into_iter().collect())
    }

    async fn read_keys(&self, keys: Vec<String>) -> Result<Vec<Option<String>>, StoreError> {
        let mut texts = Vec::with_capacity(keys.len());
        for keys in keys.chunks(TEXTS_PER_CALL) {
            let arguments = keys.iter().fold(Command::new(&keys.len().to_string()), Command::arg);
            texts.extend(self.call(&keys[0], arguments.arg("read"), false, read_texts).await?);
        }
        Ok(texts)
    }

    async fn call<T>(
        &self,
        key: &str,
        arguments: Command,
        needs_time: bool,
        read: impl FnOnce(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let call = OwnCall { script: Script::board(), key, arguments, needs_time };
        call.run(self.topology, read).await
    }

    fn text_key(&self, instance: &str) -> String {
        format!("{}:instance:{instance}", self.base())
    }

    fn shared_key(&self, name: &str) -> String {
        format!("{}:shared:{name}", self.base())
    }

    fn list_key(&self, list: &str) -> String {
        format!("{}:list:{list}", self.base())
    }

    fn base(&self) -> String {
        internal_key(self.prefix, "alive")
    }
}

impl fmt::Debug for FleetBoard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetBoard").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

fn read_texts(reply: Value) -> Result<Vec<Option<String>>, StoreError> {
    let Value::Array(texts) = reply else { return Err(unexpected()) };
    Ok(texts.iter().map(|text| text.text().map(str::to_owned)).collect())
}

fn read_events(reply: Value) -> Result<Vec<(u64, String)>, StoreError> {
    let Value::Array(values) = reply else { return Err(unexpected()) };
    let event = |pair: &[Value]| {
        let [text, score] = pair else { return None };
        Some((score.text()?.parse().ok()?, text.text()?.to_owned()))
    };
    values.chunks(2).map(|pair| event(pair).ok_or_else(unexpected)).collect()
}

fn unexpected() -> StoreError {
    StoreError::Refused("unexpected reply of the board script".to_owned())
}
