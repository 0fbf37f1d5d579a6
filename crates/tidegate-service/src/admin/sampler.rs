//! [`Sampler`]: takes a sample of the metrics each second, from the differences of their counters.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde::ser::{SerializeMap as _, Serializer};
use tidegate::store::redis::Distribution;
use tokio::time::MissedTickBehavior;

use super::Live;
use crate::backend::RedisBackend;
use crate::metrics::SOURCES;
use crate::metrics::histogram::{decision_bounds_ms, quantile};
use crate::state::ServerState;
use tidegate_api::duration::unix_millis;

const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of policies in one sample, and of bytes of their names. The least active ones
/// are added up as [`OTHERS`].
const MAX_POLICIES: usize = 200;
const MAX_NAME_BYTES: usize = 16 * 1_024;
const OTHERS: &str = "…";
/// Number of samples over which the latency of a node is computed.
const NODE_SAMPLES: usize = 10;

/// Percentiles of latencies, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, utoipa::ToSchema)]
pub(super) struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

/// Rates of one second. The order of the fields is that of the JSON.
#[derive(Debug, Serialize)]
struct Sample<'a> {
    at_ms: u64,
    allowed: f64,
    denied: f64,
    shadow_denied: f64,
    errors: f64,
    policies: PolicyRates<'a>,
    sources: BTreeMap<&'static str, f64>,
    latency_ms: Option<Percentiles>,
    store_latency_ms: Option<Percentiles>,
    store_up: bool,
    fallback: bool,
    pending_debit_units: u64,
    memory_keys: usize,
}

/// Decisions per second of each active policy: allowed, denied, denied in shadow mode.
#[derive(Debug)]
struct PolicyRates<'a>(Vec<(&'a str, [f64; 3])>);

impl Serialize for PolicyRates<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (policy, rates) in &self.0 {
            map.serialize_entry(policy, rates)?;
        }
        map.end()
    }
}

/// Counters at the time of the last sample.
#[derive(Default)]
struct Totals {
    requests: [u64; 4],
    sources: [u64; SOURCES.len()],
    decisions: Vec<u64>,
    store_calls: Vec<u64>,
}

/// Decisions of one policy.
#[derive(Default)]
struct PolicyCounts {
    total: [u64; 3],
    /// Since the sample before.
    new: [u64; 3],
}

pub(super) struct Sampler {
    state: Arc<ServerState>,
    live: Arc<Live>,
    last_sample: Instant,
    totals: Totals,
    policies: BTreeMap<String, PolicyCounts>,
    nodes: HashMap<String, VecDeque<Distribution>>,
}

impl Sampler {
    pub(super) fn new(state: Arc<ServerState>, live: Arc<Live>) -> Self {
        Self {
            state,
            live,
            last_sample: Instant::now(),
            totals: Totals::default(),
            policies: BTreeMap::new(),
            nodes: HashMap::new(),
        }
    }

    /// Takes a sample each second until the process ends.
    pub(super) async fn run(mut self) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let sample = self.sample(Instant::now());
            let node_latency = self.node_latency();
            self.live.set_node_latency(node_latency);
            self.live.publish(&sample.into(), &self.state);
        }
    }

    /// Returns the rates since the last sample, as JSON.
    fn sample(&mut self, now: Instant) -> String {
        let seconds = now.saturating_duration_since(self.last_sample).as_secs_f64().max(0.001);
        self.last_sample = now;
        let metrics = &self.state.metrics;
        let totals = Totals {
            requests: metrics.requests.totals(),
            sources: metrics.source_totals(),
            decisions: metrics.requests.durations(),
            store_calls: metrics.store_seconds.counts(),
        };
        let last = std::mem::replace(&mut self.totals, totals);
        let of = |index: usize| rate(self.totals.requests[index] - last.requests[index], seconds);
        let sources = SOURCES.iter().zip(self.totals.sources).zip(last.sources);
        metrics.for_each_policy(|policy, counts| match self.policies.get_mut(policy) {
            Some(known) => known.update(counts),
            None => {
                let mut first = PolicyCounts::default();
                first.update(counts);
                self.policies.insert(policy.to_owned(), first);
            }
        });
        let backend = &self.state.backend;
        let fallback = backend.redis().map(|redis| redis.fallback().stats()).unwrap_or_default();
        let bounds = decision_bounds_ms();
        let sample = Sample {
            at_ms: unix_millis(SystemTime::now()),
            allowed: of(0),
            denied: of(1),
            shadow_denied: of(2),
            errors: of(3),
            policies: policy_rates(&self.policies, seconds),
            sources: sources
                .map(|((source, total), before)| (source.as_str(), rate(total - before, seconds)))
                .collect(),
            latency_ms: Percentiles::new(&bounds, &since(&last.decisions, &self.totals.decisions)),
            store_latency_ms: Percentiles::new(
                &bounds,
                &since(&last.store_calls, &self.totals.store_calls),
            ),
            store_up: backend.redis().is_none_or(RedisBackend::is_up),
            fallback: fallback.falling_back,
            pending_debit_units: fallback.pending_debit_units,
            memory_keys: backend.memory_store().keys(),
        };
        serde_json::to_string(&sample).unwrap_or_else(|_| "{}".to_owned())
    }

    /// Returns the latency of each node in the last seconds, as far as it was called.
    fn node_latency(&mut self) -> HashMap<String, Percentiles> {
        let nodes = self.state.backend.redis().map(|redis| redis.store().nodes());
        let nodes = nodes.unwrap_or_default();
        self.nodes.retain(|address, _| nodes.iter().any(|node| node.address == *address));
        let mut latency = HashMap::new();
        for node in nodes {
            let bounds: Vec<f64> =
                node.latency.iter().filter_map(|(bound, _)| bound).map(millis).collect();
            let counts =
                |all: &Distribution| all.iter().map(|(_, count)| count).collect::<Vec<_>>();
            let samples = self.nodes.entry(node.address.clone()).or_default();
            let oldest = samples.front().map(counts).unwrap_or_default();
            let recent = since(&oldest, &counts(&node.latency));
            if let Some(percentiles) = Percentiles::new(&bounds, &recent) {
                latency.insert(node.address, percentiles);
            }
            if samples.len() == NODE_SAMPLES {
                samples.pop_front();
            }
            samples.push_back(node.latency);
        }
        latency
    }
}

impl PolicyCounts {
    fn update(&mut self, total: [u64; 3]) {
        for (outcome, total) in total.into_iter().enumerate() {
            self.new[outcome] = total.saturating_sub(self.total[outcome]);
            self.total[outcome] = total;
        }
    }
}

impl Percentiles {
    fn new(bounds_ms: &[f64], counts: &[u64]) -> Option<Self> {
        let of = |part| quantile(bounds_ms, counts, part).map(|value| rounded(value, 1_000.0));
        Some(Self { p50: of(0.5)?, p90: of(0.9)?, p99: of(0.99)? })
    }
}

/// Returns the rates of the policies that have any, the most active ones first.
fn policy_rates(policies: &BTreeMap<String, PolicyCounts>, seconds: f64) -> PolicyRates<'_> {
    let mut active: Vec<(&str, [u64; 3])> = policies
        .iter()
        .map(|(policy, counts)| (policy.as_str(), counts.new))
        .filter(|(_, new)| new.iter().any(|count| *count > 0))
        .collect();
    active.sort_by_key(|(_, new)| std::cmp::Reverse(new.iter().sum::<u64>()));
    let mut bytes = 0;
    let fits = |(policy, _): &&(&str, [u64; 3])| {
        bytes += policy.len();
        bytes <= MAX_NAME_BYTES
    };
    let listed = active.iter().take(MAX_POLICIES).take_while(fits).count();
    let mut others = [0; 3];
    for (_, new) in active.drain(listed..) {
        for (sum, count) in others.iter_mut().zip(new) {
            *sum += count;
        }
    }
    if others.iter().any(|count| *count > 0) {
        active.push((OTHERS, others));
    }
    let rates = active.into_iter().map(|(policy, new)| (policy, new.map(|it| rate(it, seconds))));
    PolicyRates(rates.collect())
}

/// Returns the differences of counters.
fn since(last: &[u64], now: &[u64]) -> Vec<u64> {
    let before = last.iter().copied().chain(std::iter::repeat(0));
    now.iter().zip(before).map(|(now, last)| now.saturating_sub(last)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits")]
fn rate(count: u64, seconds: f64) -> f64 {
    rounded(count as f64 / seconds, 100.0)
}

fn rounded(value: f64, factor: f64) -> f64 {
    (value * factor).round() / factor
}

fn millis(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64() * 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_active_policies_are_added_up() {
        let counts = |name: &str, total: [u64; 3]| {
            let mut counts = PolicyCounts::default();
            counts.update(total);
            (name.to_owned(), counts)
        };
        let many = (0..300_u64).map(|number| counts(&format!("p{number:03}"), [number, 0, 1]));
        let policies: BTreeMap<_, _> = many.chain([counts("idle", [0; 3])]).collect();
        let PolicyRates(rates) = policy_rates(&policies, 2.0);
        assert_eq!(rates.len(), MAX_POLICIES + 1);
        assert_eq!(rates[0], ("p299", [149.5, 0.0, 0.5]));
        // p000 to p099: 4,950 allowed and 100 denied in shadow mode.
        assert_eq!(rates[MAX_POLICIES], (OTHERS, [2_475.0, 0.0, 50.0]));
        let long: BTreeMap<_, _> =
            (0..100).map(|number| counts(&format!("{number:0500}"), [1; 3])).collect();
        let PolicyRates(rates) = policy_rates(&long, 1.0);
        assert_eq!(rates.len(), MAX_NAME_BYTES / 500 + 1);
    }

    #[test]
    fn counts_are_those_since_the_last_sample() {
        let mut counts = PolicyCounts::default();
        counts.update([5, 0, 0]);
        counts.update([7, 1, 0]);
        assert_eq!(counts.new, [2, 1, 0]);
        assert_eq!(since(&[], &[1, 2]), [1, 2]);
        assert_eq!(since(&[1, 1], &[1, 2]), [0, 1]);
    }
}
