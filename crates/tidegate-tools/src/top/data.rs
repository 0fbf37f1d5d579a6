//! Answers of the admin API, and what the view shows of them.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::events::ServerEvent;

/// Maximum number of samples whose policies are kept.
const MAX_RECENT: usize = 60;
/// Maximum number of samples of the trend: 15 minutes.
const MAX_TREND: usize = 900;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ServiceStatus {
    pub(super) instance: String,
    pub(super) version: String,
    pub(super) uptime_ms: u64,
    pub(super) now_ms: u64,
    pub(super) store: Store,
    pub(super) reload: Reload,
    pub(super) upstreams: Option<Vec<UpstreamRow>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Store {
    pub(super) kind: String,
    pub(super) up: bool,
    pub(super) health: Option<StoreAvailability>,
    #[serde(deserialize_with = "or_default")]
    pub(super) nodes: Vec<NodeRow>,
    pub(super) fallback: Option<Fallback>,
    pub(super) memory: Option<Memory>,
    pub(super) deny_cache_entries: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoreAvailability {
    pub(super) state: String,
    pub(super) primaries: u64,
    pub(super) primaries_unavailable: u64,
    pub(super) slots_unavailable_ratio: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeRow {
    pub(super) address: String,
    pub(super) connected: bool,
    pub(super) circuit: Option<String>,
    pub(super) last_error: Option<String>,
    pub(super) latency_ms: Option<ReportedPercentiles>,
    pub(super) in_flight: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Fallback {
    pub(super) active: bool,
    pub(super) since_ms: Option<u64>,
    pub(super) instances: u64,
    pub(super) pending_debit_units: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Memory {
    pub(super) keys: u64,
    pub(super) max_keys: u64,
    pub(super) full: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Reload {
    pub(super) at_ms: Option<u64>,
    pub(super) ok: Option<bool>,
    pub(super) error: Option<FailedReload>,
    pub(super) config_loaded_at_ms: Option<u64>,
    pub(super) config_file: Option<String>,
    pub(super) restart_pending: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FailedReload {
    pub(super) message: String,
    pub(super) file: Option<String>,
    pub(super) line: Option<u64>,
    pub(super) column: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UpstreamRow {
    pub(super) url: String,
    pub(super) up: bool,
    pub(super) ejected: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ReportedPercentiles {
    pub(super) p50: Option<f64>,
    pub(super) p90: Option<f64>,
    pub(super) p99: Option<f64>,
}

/// Rates of one second, or means of several.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct RateSample {
    #[serde(skip_serializing)]
    pub(super) at_ms: u64,
    pub(super) allowed: f64,
    pub(super) denied: f64,
    pub(super) shadow_denied: f64,
    pub(super) errors: f64,
    /// Decisions per second of each policy: allowed, denied, shadow-denied.
    pub(super) policies: BTreeMap<String, [f64; 3]>,
    pub(super) sources: BTreeMap<String, f64>,
    pub(super) latency_ms: Option<ReportedPercentiles>,
    pub(super) store_latency_ms: Option<ReportedPercentiles>,
}

impl RateSample {
    fn requests(&self) -> f64 {
        self.allowed + self.denied + self.shadow_denied + self.errors
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct HotKeyLists {
    pub(super) allowed: Vec<HotKeyRow>,
    pub(super) denied: Vec<HotKeyRow>,
    pub(super) shadow_denied: Vec<HotKeyRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct HotKeyRow {
    pub(super) policy: String,
    pub(super) key: String,
    pub(super) count: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Lookup {
    pub(super) key: String,
    pub(super) results: Vec<LookupResult>,
    /// Whether there are more policies than results.
    pub(super) truncated: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LookupResult {
    pub(super) policy: String,
    /// Key that is counted, such as the network of an address.
    pub(super) key: Option<String>,
    pub(super) mode: Option<String>,
    pub(super) limit: Option<u64>,
    /// Units of which `remaining` are left; a bucket has its burst.
    pub(super) capacity: Option<u64>,
    pub(super) allowed: Option<bool>,
    pub(super) remaining: Option<u64>,
    pub(super) retry_after_ms: Option<u64>,
    pub(super) reset_after_ms: Option<u64>,
    pub(super) in_flight: Option<InFlight>,
    pub(super) last_denial: Option<LastDenial>,
    pub(super) run_time: Option<RunTimeOverride>,
    pub(super) reason: Option<String>,
    pub(super) error: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct InFlight {
    pub(super) units: u64,
    pub(super) first_end_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RunTimeOverride {
    pub(super) by: String,
    pub(super) reason: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LastDenial {
    pub(super) instance: String,
}

fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// All instances that share the store.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FleetRows {
    pub(super) size: u64,
    pub(super) configurations: u64,
    pub(super) error: Option<String>,
    pub(super) instances: Vec<InstanceRow>,
    pub(super) rates: RateSample,
    pub(super) hot_keys: HotKeyLists,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct InstanceRow {
    pub(super) name: Option<String>,
    pub(super) version: String,
    pub(super) config_hash: String,
    pub(super) store_up: bool,
    pub(super) fallback: bool,
    pub(super) allowed: f64,
    pub(super) denied: f64,
    pub(super) differs: Vec<String>,
    pub(super) changes: Vec<ChangeRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ChangeRow {
    pub(super) text: String,
}

/// Everything that the service reported so far.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) authority: String,
    /// Status as it was sent, for `--json`.
    status_json: Option<Value>,
    hot_keys_json: Option<Value>,
    pub(super) status: ServiceStatus,
    pub(super) hot_keys: HotKeyLists,
    fleet_json: Option<Value>,
    /// `None` for a single instance.
    pub(super) fleet: Option<FleetRows>,
    recent: VecDeque<RateSample>,
    /// Requests per second, one entry per sample.
    trend: VecDeque<f64>,
    /// Error of the connection, until the next event.
    pub(super) lost: Option<String>,
}

impl View {
    pub(super) fn new(authority: &str) -> Self {
        Self { authority: authority.to_owned(), ..Self::default() }
    }

    /// Returns the name of the instance, or its address if it has none.
    pub(super) fn instance(&self) -> &str {
        if self.status.instance.is_empty() { &self.authority } else { &self.status.instance }
    }

    /// Returns whether there is something of everything to show.
    pub(super) fn is_complete(&self) -> bool {
        self.status_json.is_some() && self.hot_keys_json.is_some() && !self.recent.is_empty()
    }

    /// Applies an event. Events with an unknown name are ignored.
    pub(super) fn apply(&mut self, event: &ServerEvent) -> serde_json::Result<()> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct SampleHistory {
            samples: Vec<RateSample>,
        }
        self.lost = None;
        match event.name.as_str() {
            "history" => {
                let history: SampleHistory = serde_json::from_str(&event.data)?;
                self.recent.clear();
                self.trend.clear();
                history.samples.into_iter().for_each(|sample| self.add(sample));
            }
            "sample" => self.add(serde_json::from_str(&event.data)?),
            "status" => {
                let status: Value = serde_json::from_str(&event.data)?;
                self.status = ServiceStatus::deserialize(&status)?;
                self.status_json = Some(status);
            }
            "hot-keys" => {
                let hot_keys: Value = serde_json::from_str(&event.data)?;
                self.hot_keys = HotKeyLists::deserialize(&hot_keys)?;
                self.hot_keys_json = Some(hot_keys);
            }
            _ => {}
        }
        Ok(())
    }

    /// Sets the state of the fleet, unless it is not an answer of Tidegate.
    pub(super) fn set_fleet(&mut self, fleet: Value) {
        let rows = FleetRows::deserialize(&fleet).ok();
        self.fleet = rows.filter(|rows| rows.size > 1 || rows.error.is_some());
        self.fleet_json = Some(fleet);
    }

    fn add(&mut self, sample: RateSample) {
        // After a reconnection, the history has the samples of before.
        self.trend.push_back(sample.requests());
        self.recent.push_back(sample);
        if self.trend.len() > MAX_TREND {
            self.trend.pop_front();
        }
        if self.recent.len() > MAX_RECENT {
            self.recent.pop_front();
        }
    }

    /// Returns the time of the service, as of its last event.
    pub(super) fn now_ms(&self) -> u64 {
        self.recent.back().map_or(0, |sample| sample.at_ms).max(self.status.now_ms)
    }

    /// Returns the uptime of the service. A status is only sent when it changes.
    pub(super) fn uptime_ms(&self) -> u64 {
        self.status.uptime_ms + (self.now_ms() - self.status.now_ms.min(self.now_ms()))
    }

    /// Returns the mean rates of the last samples, and the last known latencies of them.
    pub(super) fn mean(&self, samples: usize) -> RateSample {
        let count = samples.clamp(1, self.recent.len().max(1));
        let last: Vec<&RateSample> = self.recent.iter().rev().take(count).collect();
        let mut mean = RateSample { at_ms: self.now_ms(), ..RateSample::default() };
        #[expect(clippy::cast_precision_loss, reason = "at most 60")]
        let part = 1.0 / count as f64;
        for sample in &last {
            mean.allowed += sample.allowed * part;
            mean.denied += sample.denied * part;
            mean.shadow_denied += sample.shadow_denied * part;
            mean.errors += sample.errors * part;
            for (policy, rates) in &sample.policies {
                let sums = mean.policies.entry(policy.clone()).or_default();
                sums.iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate * part);
            }
            for (source, rate) in &sample.sources {
                *mean.sources.entry(source.clone()).or_default() += rate * part;
            }
        }
        mean.latency_ms = last.iter().find_map(|sample| sample.latency_ms);
        mean.store_latency_ms = last.iter().find_map(|sample| sample.store_latency_ms);
        mean
    }

    /// Returns the trend of the requests per second as this number of means, oldest first.
    pub(super) fn trend(&self, columns: usize) -> Vec<f64> {
        let columns = columns.min(self.trend.len());
        #[expect(clippy::cast_precision_loss, reason = "at most 900")]
        let mean = |column: usize| {
            let bound = |index: usize| index * self.trend.len() / columns;
            let (start, end) = (bound(column), bound(column + 1));
            self.trend.range(start..end).sum::<f64>() / (end - start) as f64
        };
        (0..columns).map(mean).collect()
    }

    /// Returns one JSON object with everything.
    pub(super) fn to_json(&self, samples: usize) -> Value {
        json!({
            "at_ms": self.now_ms(),
            "status": self.status_json,
            "rates": self.mean(samples),
            "hot_keys": self.hot_keys_json,
            "fleet": self.fleet_json,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(view: &mut View, name: &str, data: &Value) {
        let event = ServerEvent { name: name.to_owned(), data: data.to_string() };
        view.apply(&event).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    #[test]
    fn rates_are_means_of_the_last_samples() {
        let mut view = View::new("h:1");
        let sample = |at_ms: u64, allowed: f64| {
            json!({"at_ms": at_ms, "allowed": allowed, "policies": {"a": [allowed, 1.0, 0.0]},
                   "latency_ms": null})
        };
        let history = json!({"interval_ms": 1000, "samples": [sample(1_000, 9.0)]});
        apply(&mut view, "history", &history);
        assert!(!view.is_complete(), "no status yet");
        apply(&mut view, "status", &json!({"now_ms": 1_500, "uptime_ms": 500, "new_field": {}}));
        apply(&mut view, "hot-keys", &json!({"denied": [{"policy": "a", "key": "k"}]}));
        apply(&mut view, "news-of-a-later-version", &json!(1));
        assert!(view.is_complete());
        apply(&mut view, "sample", &sample(2_000, 1.0));
        apply(&mut view, "sample", &sample(3_000, 2.0));
        let mean = view.mean(2);
        assert_eq!((mean.allowed, mean.policies["a"]), (1.5, [1.5, 1.0, 0.0]));
        assert_eq!((view.mean(100).allowed, view.mean(0).allowed), (4.0, 2.0));
        assert_eq!((view.now_ms(), view.uptime_ms()), (3_000, 2_000));
        assert_eq!(view.trend(80), [9.0, 1.0, 2.0]);
        assert_eq!(view.trend(2), [9.0, 1.5]);
        let json = view.to_json(2);
        assert_eq!(json["rates"]["allowed"], 1.5);
        assert_eq!(json["hot_keys"]["denied"][0]["key"], "k");
        for _ in 0..2_000 {
            apply(&mut view, "sample", &sample(4_000, 1.0));
        }
        assert_eq!((view.trend.len(), view.recent.len()), (MAX_TREND, MAX_RECENT));
    }

    #[test]
    fn wrong_data_is_an_error() {
        let mut view = View::new("h:1");
        for (name, data) in [("status", "7"), ("history", "{"), ("sample", "{\"allowed\":\"x\"}")] {
            let event = ServerEvent { name: name.to_owned(), data: data.to_owned() };
            assert!(view.apply(&event).is_err(), "{name}");
        }
        assert!(!view.is_complete());
        assert!(view.mean(5).requests() < 0.1 && view.trend(5).is_empty());
    }
}
