//! Heartbeats: each keeps this instance in the set of live instances, and reads the set if it has
//! changed.
//!
//! heartbeat.lua documents the protocol. In the steady state a heartbeat costs Redis a few commands
//! of O(log N): the list is cached here with its version, and only read again when the version
//! differs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::internal_key;
use super::overrides::version_key;
use crate::random::random_u64;
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::Topology;
use crate::store::redis::script::Script;
use crate::store::redis::script::call::OwnCall;
use crate::store::{StoreError, heartbeat_interval};

/// Heartbeat intervals without a heartbeat after which an instance is removed.
const MAX_MISSED_HEARTBEATS: u32 = 5;
const MAX_INSTANCES: usize = 10_000;
/// Minimum time between two reads of a list, per instance in it. While a large fleet starts, each
/// instance that joins changes the list for all others.
const LIST_INTERVAL_PER_INSTANCE: Duration = Duration::from_millis(10);
/// A list of up to this length is always read: Redis returns it in the time of a few decisions.
const MAX_SHORT_LIST: usize = 100;

/// Sends the heartbeats of a store, and keeps the list of live instances that was last read.
pub(crate) struct Heartbeats {
    topology: Arc<Topology>,
    prefix: String,
    /// Mark of the format in names of counts.
    format_mark: String,
    last: Mutex<Option<Arc<Listed>>>,
    /// Whether an instance of another format was logged.
    logged_format: AtomicBool,
    /// Version of the overrides that the last heartbeat returned, if there is a receiver.
    pub(crate) overrides: watch::Sender<Option<String>>,
}

struct Listed {
    version: String,
    instances: Vec<String>,
    read_at: Instant,
}

impl Listed {
    fn may_be_read_again(&self, now: Instant) -> bool {
        let instances = self.instances.len();
        let interval =
            LIST_INTERVAL_PER_INSTANCE.saturating_mul(u32::try_from(instances).unwrap_or(u32::MAX));
        instances <= MAX_SHORT_LIST || now.duration_since(self.read_at) >= interval
    }
}

impl Heartbeats {
    pub(crate) fn new(topology: &Arc<Topology>, prefix: &str, format_mark: &str) -> Self {
        Self {
            topology: Arc::clone(topology),
            prefix: prefix.to_owned(),
            format_mark: format_mark.to_owned(),
            last: Mutex::default(),
            logged_format: AtomicBool::new(false),
            overrides: watch::Sender::new(None),
        }
    }

    /// Sends a heartbeat, and returns the live instances, sorted. This instance is always among
    /// them, and the only one if heartbeats are off.
    pub(crate) async fn send(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        if !self.topology.state().has_heartbeat() {
            return Ok(vec![instance.to_owned()]);
        }
        let key = internal_key(&self.prefix, "alive");
        let version_key = format!("{key}:version");
        let cached = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let size = cached.as_ref().map_or(0, |cached| cached.instances.len());
        let now = Instant::now();
        let may_read = cached.as_ref().is_none_or(|cached| cached.may_be_read_again(now));
        let max_listed = if may_read { MAX_INSTANCES } else { 0 };
        let mark = &self.format_mark;
        let member =
            if mark.is_empty() { instance.to_owned() } else { format!("{instance}%{mark}") };
        let token = format!("{:016x}{:016x}", random_u64(), random_u64());
        let longest = silence_timeout(MAX_INSTANCES);
        let wants_overrides = self.overrides.receiver_count() > 0;
        let keys = Command::new(if wants_overrides { "3" } else { "2" });
        let mut arguments = keys.arg(&key).arg(&version_key);
        if wants_overrides {
            arguments = arguments.arg(self::version_key(&self.prefix));
        }
        let arguments = arguments.arg(&member);
        let arguments = arguments.arg(silence_timeout(1).to_string());
        let arguments = arguments.arg((longest / MAX_INSTANCES as u64).to_string());
        let arguments = arguments.arg(longest.to_string()).arg(size.to_string());
        let arguments = arguments.arg(cached.as_ref().map_or("", |cached| &cached.version));
        let arguments = arguments.arg(&token).arg(max_listed.to_string());
        let call = OwnCall { script: Script::heartbeat(), key: &key, arguments, needs_time: true };
        let Reply { version, listed, overrides } =
            call.run(self.topology.state(), read_reply).await?;
        if overrides.is_some() {
            self.overrides.send_if_modified(|known| {
                let is_new = *known != overrides;
                known.clone_from(&overrides);
                is_new
            });
        }
        let mut instances = match listed {
            Some(members) => {
                let mut instances: Vec<String> =
                    members.into_iter().map(|member| self.without_mark(member)).collect();
                instances.sort_unstable();
                let listed =
                    Listed { version, instances: instances.clone(), read_at: Instant::now() };
                *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(listed));
                instances
            }
            None => cached.map_or_else(Vec::new, |cached| cached.instances.clone()),
        };
        // The cached list may be from before this instance joined.
        if let Err(index) = instances.binary_search_by(|name| name.as_str().cmp(instance)) {
            instances.insert(index, instance.to_owned());
        }
        Ok(instances)
    }

    /// Returns the name of a listed instance. Logs an instance of another format, once.
    fn without_mark(&self, member: String) -> String {
        let (name, mark) = split_mark(&member);
        if mark != self.format_mark && !self.logged_format.swap(true, Ordering::Relaxed) {
            let version = |mark: &str| mark.strip_prefix('v').unwrap_or("1").to_owned();
            tracing::warn!(
                prefix = self.prefix,
                format = version(&self.format_mark),
                other = version(mark),
                "a release with another format of counts uses the same prefix: until all \
                 instances are upgraded, each format counts for itself, and a key is admitted at \
                 most twice its limit"
            );
        }
        if mark.is_empty() { member } else { name.to_owned() }
    }
}

/// Separates the name of an instance from its mark, and returns both.
fn split_mark(member: &str) -> (&str, &str) {
    let is_mark =
        |mark: &str| mark.strip_prefix('v').is_some_and(|version| version.parse::<u32>().is_ok());
    member.rsplit_once('%').filter(|(_, mark)| is_mark(mark)).unwrap_or((member, ""))
}

/// Microseconds without a heartbeat after which an instance is removed from a fleet of this size.
fn silence_timeout(instances: usize) -> u64 {
    let timeout = heartbeat_interval(instances) * MAX_MISSED_HEARTBEATS;
    crate::clock::micros(timeout)
}

struct Reply {
    version: String,
    listed: Option<Vec<String>>,
    /// Version of the overrides, if it was wanted.
    overrides: Option<String>,
}

fn read_reply(reply: Value) -> Result<Reply, StoreError> {
    let unexpected = || StoreError::Refused("unexpected reply of the heartbeat script".to_owned());
    let Value::Array(parts) = reply else { return Err(unexpected()) };
    let text = |value: &Value| value.text().map(str::to_owned).ok_or_else(unexpected);
    let listed = match parts.get(1) {
        Some(Value::Array(members)) => Some(members.iter().map(text).collect::<Result<_, _>>()?),
        _ => None,
    };
    let overrides = parts.get(2).and_then(Value::text).map(str::to_owned);
    Ok(Reply { version: text(parts.first().ok_or_else(unexpected)?)?, listed, overrides })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_read_at_most_every_ten_milliseconds_per_instance() {
        let read_at = Instant::now();
        let list = |size: usize| Listed {
            version: String::new(),
            instances: vec![String::new(); size],
            read_at,
        };
        let may_read =
            |size, millis| list(size).may_be_read_again(read_at + Duration::from_millis(millis));
        assert!(may_read(100, 0));
        assert!(!may_read(1_000, 9_999));
        assert!(may_read(1_000, 10_000));
    }

    #[test]
    fn a_name_is_separated_from_the_mark_of_its_format() {
        assert_eq!(split_mark("api-1"), ("api-1", ""));
        assert_eq!(split_mark("api-1%v2"), ("api-1", "v2"));
        for name in ["api%1", "api%v", "%", "api%vx"] {
            assert_eq!(split_mark(name), (name, ""));
        }
    }

    #[test]
    fn the_silence_timeout_grows_with_the_fleet() {
        assert_eq!(
            [1, 200, 1_000, MAX_INSTANCES].map(silence_timeout),
            [5_000_000, 5_000_000, 25_000_000, 250_000_000]
        );
    }
}
