//! [`Overrides`]: limits that the instances of a service change while they run, each a name with a
//! text, whose meaning is up to the service.
//!
//! overrides.lua documents the protocol. Heartbeats compare the version; one that differs is followed
//! by the changes since the known one, or by all entries if they are not known any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::internal_key;
use crate::clock::Timestamp;
use crate::random::random_u64;
use crate::store::StoreError;
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::Topology;
use crate::store::redis::script::Script;
use crate::store::redis::script::call::OwnCall;

/// Time from the last change, or the last [update](Overrides::update), until all of it expires.
const TABLE_TTL: Duration = Duration::from_secs(90 * 86_400);
/// Number of changes that are kept, for other instances and for the audit.
const MAX_CHANGES: usize = 10_000;
/// Number of changes or entries in one reply: a call must not block Redis for a millisecond.
const MAX_READ: usize = 200;
/// Number of attempts to read all entries while more changes are made than are kept.
const MAX_ATTEMPTS: usize = 3;

/// Limits that the instances of a service change while they run. Each has a name and a text, whose
/// meaning is up to the service.
pub struct Overrides {
    topology: Arc<Topology>,
    /// Version, entries, names, changes.
    keys: [String; 4],
}

/// Change of an override.
#[derive(Debug, Clone, Copy)]
pub struct OverrideChange<'a> {
    /// Name of the override.
    pub name: &'a str,
    /// Text, and the time until its end if it has one; `None` removes the override.
    pub value: Option<(&'a str, Option<Duration>)>,
    /// Text about who makes the change, for the audit.
    pub author: &'a str,
    /// Names of overrides that have ended, which are deleted.
    pub ended: &'a [String],
}

/// Value of an override.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverrideValue {
    /// Time of the server at which it ends.
    pub until: Option<Timestamp>,
    /// Text.
    pub text: String,
}

/// Change that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverrideRecord {
    /// Number of the change.
    pub number: u64,
    /// Name of the override.
    pub name: String,
    /// Time of the server.
    pub at: Timestamp,
    /// Value before the change.
    pub before: Option<OverrideValue>,
    /// Value after it; `None` if it was removed.
    pub after: Option<OverrideValue>,
    /// Text about who made it.
    pub author: String,
}

/// Changes since a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverridesUpdate {
    /// Nothing was ever changed, or all was lost.
    Empty,
    /// These changes, in their order.
    Changes {
        /// Version after them.
        version: String,
        /// The changes.
        records: Vec<OverrideRecord>,
    },
    /// The known version is too old, or was lost in a failover: these are all entries.
    All {
        /// Version of the entries.
        version: String,
        /// Whether the known version was lost: changes that were made before it may be missing.
        is_other_history: bool,
        /// Values by name.
        entries: HashMap<String, OverrideValue>,
    },
}

/// Returns the key of the version. It is in the slot of the heartbeats.
pub(super) fn version_key(prefix: &str) -> String {
    format!("{}:overrides:version", internal_key(prefix, "alive"))
}

impl Overrides {
    pub(in crate::store::redis) fn new(topology: &Arc<Topology>, prefix: &str) -> Self {
        let table = format!("{}:overrides", internal_key(prefix, "alive"));
        let [names, changes] = ["names", "changes"].map(|name| format!("{table}:{name}"));
        let keys = [version_key(prefix), table, names, changes];
        Self { topology: Arc::clone(topology), keys }
    }

    /// Makes a change if there are fewer than `max` overrides, or if it is of one of them. Returns
    /// the version after it; `None` if there is no room for it, or nothing to remove.
    pub async fn change(
        &self,
        change: &OverrideChange<'_>,
        max: usize,
    ) -> Result<Option<String>, StoreError> {
        let operation = if change.value.is_some() { "set" } else { "remove" };
        let nonce = format!("{:016x}", random_u64());
        let arguments = self.arguments(operation).arg(nonce).arg(max.to_string());
        let arguments = arguments.arg(MAX_CHANGES.to_string()).arg(change.name).arg(change.author);
        let time = change.value.map(|(_, time)| time.map_or(0, |time| time.as_millis()));
        let arguments = arguments.arg(time.map(|time| time.to_string()).unwrap_or_default());
        let arguments = arguments.arg(change.value.map_or("", |(text, _)| text));
        let arguments = change.ended.iter().take(MAX_READ).fold(arguments, Command::arg);
        let [made, version] = &self.call(arguments).await?[..] else { return Err(unexpected()) };
        (*made == Value::Integer(1)).then(|| text(version)).transpose()
    }

    /// Reads what has changed since a version, and keeps the overrides from expiring.
    pub async fn update(&self, known: &str) -> Result<OverridesUpdate, StoreError> {
        let mut records = Vec::new();
        if let Some(version) = self.read_changes(known, &mut records).await? {
            return Ok(OverridesUpdate::Changes { version, records });
        }
        let all = |version: String, entries| {
            // A version that is no older than the changes that are kept would be among them.
            let oldest = number_of(&version).saturating_sub(MAX_CHANGES as u64);
            let is_other_history = number_of(known) > oldest;
            OverridesUpdate::All { version, is_other_history, entries }
        };
        for _ in 0..MAX_ATTEMPTS {
            let Some((first_version, last_version, mut entries)) = self.read_entries().await?
            else {
                return Ok(OverridesUpdate::Empty);
            };
            records.clear();
            if first_version == last_version {
                return Ok(all(last_version, entries));
            }
            if let Some(version) = self.read_changes(&first_version, &mut records).await? {
                for record in records {
                    match record.after {
                        Some(value) => drop(entries.insert(record.name, value)),
                        None => drop(entries.remove(&record.name)),
                    }
                }
                return Ok(all(version, entries));
            }
        }
        Err(StoreError::Refused("overrides change faster than they can be read".to_owned()))
    }

    /// Returns the latest changes before this number, the latest first.
    pub async fn audit(
        &self,
        before: Option<u64>,
        max: usize,
    ) -> Result<Vec<OverrideRecord>, StoreError> {
        let before = before.map_or_else(|| "+inf".to_owned(), |number| number.to_string());
        let arguments = self.arguments("audit").arg(max.min(MAX_READ).to_string()).arg(before);
        self.call(arguments).await?.iter().rev().map(read_record).collect()
    }

    /// Appends the changes since a version. Returns the version after them; `None` if the known one
    /// is not among the last changes.
    async fn read_changes(
        &self,
        known: &str,
        records: &mut Vec<OverrideRecord>,
    ) -> Result<Option<String>, StoreError> {
        let mut known = known.to_owned();
        loop {
            let arguments = self.arguments("changes").arg(MAX_READ.to_string()).arg(&known);
            let reply = self.call(arguments).await?;
            let [version, Value::Integer(is_known), members @ ..] = &reply[..] else {
                return Err(unexpected());
            };
            if *is_known == 0 {
                return Ok(None);
            }
            for member in members {
                records.push(read_record(member)?);
            }
            let version = text(version)?;
            if members.len() < MAX_READ {
                return Ok(Some(version));
            }
            let last = members.last().and_then(Value::text).ok_or_else(unexpected)?;
            known = last.splitn(3, ':').take(2).collect::<Vec<_>>().join(":");
        }
    }

    /// Reads all entries, with the version at the first page and at the last; `None` if nothing was
    /// ever changed.
    async fn read_entries(
        &self,
    ) -> Result<Option<(String, String, HashMap<String, OverrideValue>)>, StoreError> {
        let (mut first_version, mut after) = (None, "0".to_owned());
        let mut entries = HashMap::new();
        loop {
            let arguments = self.arguments("entries").arg(MAX_READ.to_string()).arg(&after);
            let reply = self.call(arguments).await?;
            let [version, found @ ..] = &reply[..] else { return Err(unexpected()) };
            let version = text(version)?;
            if version.is_empty() {
                return Ok(None);
            }
            let first_version = first_version.get_or_insert_with(|| version.clone()).clone();
            let (found, _) = found.as_chunks::<3>();
            for [number, name, value] in found {
                after = text(number)?;
                if let Some(value) = OverrideValue::parse(&text(value)?)? {
                    entries.insert(text(name)?, value);
                }
            }
            if found.len() < MAX_READ {
                return Ok(Some((first_version, version, entries)));
            }
        }
    }

    /// Returns the first arguments of an operation.
    fn arguments(&self, operation: &str) -> Command {
        let keys = self.keys.iter().fold(Command::new(&self.keys.len().to_string()), Command::arg);
        keys.arg(operation).arg(TABLE_TTL.as_millis().to_string())
    }

    async fn call(&self, arguments: Command) -> Result<Vec<Value>, StoreError> {
        let call = OwnCall {
            script: Script::overrides(),
            key: &self.keys[0],
            arguments,
            needs_time: true,
        };
        call.run(self.topology.state(), |reply| match reply {
            Value::Array(values) => Ok(values),
            _ => Err(unexpected()),
        })
        .await
    }
}

impl OverrideValue {
    /// Parses a value of the hash; `None` for an empty text.
    fn parse(value: &str) -> Result<Option<Self>, StoreError> {
        if value.is_empty() {
            return Ok(None);
        }
        let (until, text) = value.split_once(':').ok_or_else(unexpected)?;
        let until: u64 = until.parse().map_err(|_| unexpected())?;
        let until = (until > 0).then(|| Timestamp::from_micros(until));
        Ok(Some(Self { until, text: text.to_owned() }))
    }
}

/// Returns the number in a version; zero without one.
fn number_of(version: &str) -> u64 {
    version.split(':').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Decodes a member of the changes.
fn read_record(member: &Value) -> Result<OverrideRecord, StoreError> {
    let read = || {
        let (number, rest) = member.text()?.split_once(':')?;
        let (_nonce, mut rest) = rest.split_once(':')?;
        let mut next = || {
            let (length, texts) = rest.split_once(':')?;
            let (text, others) = texts.split_at_checked(length.parse().ok()?)?;
            rest = others;
            Some(text)
        };
        let name = next()?.to_owned();
        let at = Timestamp::from_micros(next()?.parse().ok()?);
        let [before, after] = [OverrideValue::parse(next()?), OverrideValue::parse(next()?)];
        let (before, after) = (before.ok()?, after.ok()?);
        let author = next()?.to_owned();
        Some(OverrideRecord { number: number.parse().ok()?, name, at, before, after, author })
    };
    read().ok_or_else(unexpected)
}

fn text(value: &Value) -> Result<String, StoreError> {
    value.text().map(str::to_owned).ok_or_else(unexpected)
}

fn unexpected() -> StoreError {
    StoreError::Refused("unexpected reply of the script of overrides".to_owned())
}
