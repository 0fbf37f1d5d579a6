//! [`Journal`]: what happened to this instance, such as reloads, outages and resets.
//!
//! [`EventKind`] has the kinds of events. Each event is kept in memory, logged, counted, and later
//! appended to the list of the fleet by `fleet`.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::config_summary::ConfigChange;
use crate::metrics::{MetricsSection, write_family};
use tidegate_api::duration::unix_millis;
use tidegate_config::duration::readable;

/// Number of events that are kept in memory.
const MAX_EVENTS: usize = 1_000;
/// Of these, events of hot keys at most, because clients cause them.
const MAX_DENIALS: usize = 500;
/// Maximum length of an error in an event.
const MAX_TEXT_CHARS: usize = 1_000;
/// Number of changes in the text of a reload.
const MAX_CHANGES_IN_TEXT: usize = 5;

/// Last events of this instance.
#[derive(Default)]
pub struct Journal {
    instance: OnceLock<String>,
    events: Mutex<Events>,
}

#[derive(Default)]
struct Events {
    /// The oldest first.
    kept: VecDeque<Event>,
    /// Number of the newest event.
    last: u64,
    /// Number of the newest event that is in the list of the fleet.
    published: u64,
    /// Number of the events of each kind, and the time of the last one in Unix milliseconds.
    counts: [(u64, u64); EventKind::NAMES.len()],
}

/// Event of this instance.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// Number since the start of the instance, from 1 on.
    pub number: u64,
    pub at_ms: u64,
    /// Name of the instance.
    pub instance: String,
    /// One sentence about it.
    pub text: String,
    #[serde(flatten)]
    pub kind: EventKind,
    #[serde(skip)]
    at: Option<Instant>,
}

/// Kind of an event, with its values. A new kind needs its name, its class and its text.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", content = "details", rename_all = "kebab-case")]
pub enum EventKind {
    Started {
        version: &'static str,
        config_hash: String,
    },
    Stopping {
        uptime_ms: u64,
    },
    Reloaded {
        config_hash: String,
        changes: Vec<ConfigChange>,
    },
    ReloadFailed {
        error: String,
    },
    RestartPending {
        sections: Vec<&'static str>,
    },
    /// Other nodes decide from now on.
    Failover {
        from: Vec<String>,
        to: Vec<String>,
    },
    OutageStarted {
        reason: Option<String>,
    },
    OutageEnded {
        duration_ms: u64,
        local_decisions: u64,
        settled_units: u64,
        pending_units: u64,
    },
    /// `by`: name of the token, or address.
    Reset {
        policy: String,
        key: String,
        by: String,
    },
    /// `limits`: those that an override sets, as JSON; `None` if it was removed.
    Override {
        policy: String,
        key: String,
        by: String,
        limits: Option<String>,
        reason: Option<String>,
    },
    /// First denial of a hot key.
    DenialsStarted {
        policy: String,
        key: String,
    },
    /// Last denial of a hot key.
    DenialsEnded {
        policy: String,
        key: String,
        denials: u64,
        duration_ms: u64,
    },
}

impl EventKind {
    const NAMES: [&'static str; 12] = [
        "started",
        "stopping",
        "reloaded",
        "reload-failed",
        "restart-pending",
        "failover",
        "outage-started",
        "outage-ended",
        "reset",
        "override",
        "denials-started",
        "denials-ended",
    ];

    fn index(&self) -> usize {
        match self {
            Self::Started { .. } => 0,
            Self::Stopping { .. } => 1,
            Self::Reloaded { .. } => 2,
            Self::ReloadFailed { .. } => 3,
            Self::RestartPending { .. } => 4,
            Self::Failover { .. } => 5,
            Self::OutageStarted { .. } => 6,
            Self::OutageEnded { .. } => 7,
            Self::Reset { .. } => 8,
            Self::Override { .. } => 9,
            Self::DenialsStarted { .. } => 10,
            Self::DenialsEnded { .. } => 11,
        }
    }

    pub fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }

    /// Returns whether clients cause it, so that it must not push out others.
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::DenialsStarted { .. } | Self::DenialsEnded { .. })
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |millis: &u64| readable(Duration::from_secs(millis.div_ceil(1_000)));
        match self {
            Self::Started { version, .. } => write!(f, "started, version {version}"),
            Self::Stopping { uptime_ms } => write!(f, "stopping after {}", time(uptime_ms)),
            Self::Reloaded { changes, .. } if changes.is_empty() => {
                f.write_str("configuration reloaded, nothing changed")
            }
            Self::Reloaded { changes, .. } => {
                let shown = changes.iter().take(MAX_CHANGES_IN_TEXT).map(ToString::to_string);
                write!(f, "configuration reloaded: {}", shown.collect::<Vec<_>>().join("; "))?;
                match changes.len().saturating_sub(MAX_CHANGES_IN_TEXT) {
                    0 => Ok(()),
                    more => write!(f, "; and {more} more"),
                }
            }
            Self::ReloadFailed { error } => write!(f, "reload failed: {error}"),
            Self::RestartPending { sections } => {
                write!(f, "restart pending for changes in {}", sections.join(", "))
            }
            Self::Failover { from, to } => {
                write!(f, "failover from {} to {}", from.join(", "), to.join(", "))
            }
            Self::OutageStarted { reason } => {
                f.write_str("store failed, falling back")?;
                reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
            }
            Self::OutageEnded { duration_ms, local_decisions, settled_units, pending_units } => {
                write!(
                    f,
                    "store recovered after {}: {local_decisions} local decisions, {settled_units} \
                     units settled, {pending_units} pending",
                    time(duration_ms)
                )
            }
            Self::Reset { policy, key, by } => {
                write!(f, "count of {key} under {policy} reset by {by}")
            }
            Self::Override { policy, key, by, limits: None, .. } => {
                write!(f, "override of {key} under {policy} removed by {by}")
            }
            Self::Override { policy, key, by, limits: Some(limits), reason } => {
                let reason = reason.as_deref().unwrap_or_default();
                write!(f, "override of {key} under {policy} set by {by} to {limits}: {reason}")
            }
            Self::DenialsStarted { policy, key } => write!(f, "{policy} denies {key}"),
            Self::DenialsEnded { policy, key, denials, duration_ms } => {
                let duration = time(duration_ms);
                write!(f, "{policy} no longer denies {key}: {denials} denials in {duration}")
            }
        }
    }
}

impl Journal {
    /// Names the instance, once its address is known.
    pub fn set_instance(&self, name: &str) {
        let _ = self.instance.set(name.to_owned());
    }

    /// Returns the name of the instance; empty before it is known.
    pub fn instance(&self) -> String {
        self.instance.get().cloned().unwrap_or_default()
    }

    /// Records an event of now.
    pub fn record(&self, kind: EventKind) {
        self.record_since(kind, Duration::ZERO);
    }

    /// Records an event that happened before this time.
    pub fn record_since(&self, kind: EventKind, age: Duration) {
        let now = SystemTime::now();
        let mut event = Event {
            number: 0,
            at_ms: unix_millis(now.checked_sub(age).unwrap_or(now)),
            instance: self.instance(),
            text: kind.to_string(),
            kind,
            at: Instant::now().checked_sub(age),
        };
        let mut events = self.lock();
        events.last += 1;
        event.number = events.last;
        let (count, last_at_ms) = &mut events.counts[event.kind.index()];
        (*count, *last_at_ms) = (*count + 1, event.at_ms);
        events.add(event.clone());
        drop(events);
        log(&event);
    }

    /// Returns the events, the oldest first.
    pub fn events(&self) -> Vec<Event> {
        self.lock().kept.iter().cloned().collect()
    }

    /// Returns the events that are not in the list of the fleet, each with its age.
    pub fn unpublished(&self) -> Vec<(Duration, Event)> {
        let events = self.lock();
        let new = events.kept.iter().filter(|event| event.number > events.published);
        let age = |event: &Event| event.at.map(|at| at.elapsed()).unwrap_or_default();
        new.map(|event| (age(event), event.clone())).collect()
    }

    /// Remembers that all events up to this number are in the list of the fleet.
    pub fn set_published(&self, number: u64) {
        self.lock().published = number;
    }

    /// Has the last events, up to this number of them, published again.
    pub fn publish_again(&self, count: usize) {
        let mut events = self.lock();
        let first = events.kept.len().saturating_sub(count.max(1));
        let before = events.kept.get(first).map_or(0, |event| event.number - 1);
        events.published = events.published.min(before);
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Events {
    /// Adds an event. If there are too many, the oldest of its class is dropped.
    fn add(&mut self, event: Event) {
        let denials = self.kept.iter().filter(|kept| kept.kind.is_denial()).count();
        let is_denial = event.kind.is_denial();
        if self.kept.len() >= MAX_EVENTS || is_denial && denials >= MAX_DENIALS {
            let drops_denial = if is_denial { denials > 0 } else { denials >= MAX_DENIALS };
            let is_dropped = |kept: &Event| kept.kind.is_denial() == drops_denial;
            if let Some(oldest) = self.kept.iter().position(is_dropped) {
                self.kept.remove(oldest);
            }
        }
        self.kept.push_back(event);
    }
}

/// Logs an event, with the same details as in the API. Errors have a line of their own.
fn log(event: &Event) {
    let details = serde_json::to_value(&event.kind).unwrap_or_default();
    let details = details.get("details").map(ToString::to_string).unwrap_or_default();
    let (kind, instance, number) = (event.kind.name(), &event.instance, event.number);
    tracing::info!(event = kind, number, instance, details, "{}", event.text);
}

impl MetricsSection for Journal {
    fn write_metrics(&self, text: &mut String) {
        let counts = self.lock().counts;
        let named = || EventKind::NAMES.into_iter().zip(counts);
        let (name, help) = (("tidegate_events_total", "kind"), "Events of the journal.");
        write_family(text, "counter", name, help, named().map(|(kind, (count, _))| (kind, count)));
        let name = ("tidegate_event_timestamp_seconds", "kind");
        let help = "Time of the last event of each kind, in seconds since the epoch.";
        let happened = named().filter(|(_, (count, _))| *count > 0);
        write_family(text, "gauge", name, help, happened.map(|(kind, (_, at))| (kind, at / 1_000)));
    }
}

/// Cuts a text of unknown length.
pub(crate) fn bounded(text: String) -> String {
    match text.char_indices().nth(MAX_TEXT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Returns the name of this host.
pub(crate) fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reset(key: &str) -> EventKind {
        let text = |text: &str| text.to_owned();
        EventKind::Reset { policy: text("p"), key: text(key), by: text("ops") }
    }

    fn denial(key: usize) -> EventKind {
        EventKind::DenialsStarted { policy: "p".to_owned(), key: key.to_string() }
    }

    #[test]
    fn events_of_clients_do_not_push_out_others() {
        let journal = Journal::default();
        journal.set_instance("a:8082");
        journal.record(reset("k"));
        (0..3_000).for_each(|key| journal.record(denial(key)));
        let events = journal.events();
        assert_eq!(events.len(), 1 + MAX_DENIALS);
        assert_eq!(events[0].text, "count of k under p reset by ops");
        assert_eq!(events[MAX_DENIALS].text, "p denies 2999");
        (0..3_000).for_each(|key| journal.record(reset(&key.to_string())));
        let events = journal.events();
        let denials = events.iter().filter(|event| event.kind.is_denial()).count();
        assert_eq!((events.len(), denials), (MAX_EVENTS, MAX_DENIALS - 1));
        assert_eq!(events[MAX_EVENTS - 1].number, 6_001);
    }

    #[test]
    fn events_are_published_once() {
        let journal = Journal::default();
        journal.record(reset("1"));
        journal.record_since(reset("2"), Duration::from_secs(5));
        let new = journal.unpublished();
        assert_eq!(new.len(), 2);
        assert!(new[1].0 >= Duration::from_secs(5) && new[0].0 < Duration::from_secs(5));
        journal.set_published(1);
        assert_eq!(journal.unpublished()[0].1.number, 2);
        journal.set_published(2);
        assert!(journal.unpublished().is_empty());
        journal.publish_again(1);
        assert_eq!(journal.unpublished()[0].1.number, 2, "Redis has lost it");
        journal.publish_again(1_000);
        assert_eq!(journal.unpublished().len(), 2);
    }

    #[test]
    fn long_errors_are_cut() {
        assert_eq!(bounded("short".to_owned()), "short");
        assert_eq!(bounded("é".repeat(2_000)), "é".repeat(MAX_TEXT_CHARS) + "…");
    }

    #[test]
    fn names_are_those_of_the_json() {
        let json = serde_json::to_value(reset("k")).expect("JSON");
        assert_eq!(json["event"], reset("k").name());
        let mut text = String::new();
        let journal = Journal::default();
        journal.record(reset("k"));
        journal.write_metrics(&mut text);
        assert!(text.contains("tidegate_events_total{kind=\"reset\"} 1\n"), "{text}");
        assert!(text.contains("tidegate_events_total{kind=\"failover\"} 0\n"), "{text}");
        assert!(!text.contains("timestamp_seconds{kind=\"failover\"}"), "{text}");
    }
}
