//! Counters of what was decided, in atomics of our own, written out in Prometheus's classic text
//! format.
//!
//! Never a key as a label: their number has no bound.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tidegate::{Source, StoreError};

use crate::backend::{Backend, Redis};

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// By policy, for all that there were since the start: a reload loses no counts.
    outcomes: RwLock<BTreeMap<String, Arc<Outcomes>>>,
    /// How many of those requests with limits of their own have named.
    override_names: AtomicUsize,
    sources: [AtomicU64; SOURCES.len()],
    pub(crate) decision_seconds: Histogram,
    pub(crate) store_seconds: Histogram,
    store_errors: [AtomicU64; ERROR_KINDS.len()],
    reloads_taken: AtomicU64,
    reloads_refused: AtomicU64,
}

/// What a policy's decisions came to.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    allowed: AtomicU64,
    denied: AtomicU64,
    shadow_denied: AtomicU64,
    missing_key: AtomicU64,
    /// Those that the store did not make, by who did.
    fallback: [AtomicU64; FALLBACKS.len()],
}

/// The most policies and rules with counters of their own that requests can name.
const MAX_NAMES: usize = 2_000;
/// The same for limits that requests bring themselves, for which nothing is configured.
const MAX_OVERRIDE_NAMES: usize = 200;
const SOURCES: [Source; 5] =
    [Source::Store, Source::DenyCache, Source::Local, Source::Allow, Source::Deny];
/// Who decides while the store cannot.
const FALLBACKS: [Source; 3] = [Source::Local, Source::Allow, Source::Deny];
const ERROR_KINDS: [&str; 5] = ["full", "timeout", "unreachable", "refused", "misconfigured"];

impl Outcomes {
    pub(crate) fn count(&self, allowed: bool, shadow: bool) {
        let counter = match (allowed, shadow) {
            (true, _) => &self.allowed,
            (false, false) => &self.denied,
            (false, true) => &self.shadow_denied,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that lacks the policy's key.
    pub(crate) fn count_missing_key(&self) {
        self.missing_key.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_source(&self, source: Source) {
        if let Some(index) = FALLBACKS.iter().position(|known| *known == source) {
            self.fallback[index].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Metrics {
    /// The counters of this policy.
    pub(crate) fn outcomes(&self, policy: &str) -> Arc<Outcomes> {
        let mut all = self.outcomes.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(policy.to_owned()).or_default())
    }

    /// The counters of a rule, or of limits that requests bring themselves, by the name that its
    /// metrics have. That may hold what requests say: once there are too many names, they are
    /// counted together under `common`.
    pub(crate) fn envoy_outcomes(
        &self,
        metric: &str,
        common: &str,
        is_of_a_rule: bool,
    ) -> Arc<Outcomes> {
        let known = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        let has_room = if is_of_a_rule {
            known.len() < MAX_NAMES
        } else {
            self.override_names.load(Ordering::Relaxed) < MAX_OVERRIDE_NAMES
        };
        let name = if has_room || known.contains_key(metric) { metric } else { common };
        if let Some(outcomes) = known.get(name) {
            return Arc::clone(outcomes);
        }
        drop(known);
        self.override_names.fetch_add(usize::from(!is_of_a_rule), Ordering::Relaxed);
        self.outcomes(name)
    }

    pub(crate) fn count_source(&self, source: Source) {
        if let Some(index) = SOURCES.iter().position(|known| *known == source) {
            self.sources[index].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn count_store_call(&self, took: Duration, error: Option<&StoreError>) {
        self.store_seconds.observe(took);
        if let Some(error) = error {
            let kind = match error {
                StoreError::Full { .. } => 0,
                StoreError::Timeout(_) => 1,
                StoreError::Unreachable(_) => 2,
                StoreError::Misconfigured(_) => 4,
                _ => 3,
            };
            self.store_errors[kind].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn count_reload(&self, taken: bool) {
        let counter = if taken { &self.reloads_taken } else { &self.reloads_refused };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The classic text format, version 0.0.4.
    pub(crate) fn text(&self, backend: &Backend) -> String {
        let mut text = String::with_capacity(8 * 1024);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        head(&mut text, "tidegate_decisions_total", "counter", "Decisions by policy and outcome.");
        for (policy, outcomes) in
            self.outcomes.read().unwrap_or_else(PoisonError::into_inner).iter()
        {
            let policy = escaped(policy);
            for (outcome, counter) in [
                ("allowed", &outcomes.allowed),
                ("denied", &outcomes.denied),
                ("shadow_denied", &outcomes.shadow_denied),
            ] {
                let labels = format!("policy=\"{policy}\",outcome=\"{outcome}\"");
                let _ = writeln!(text, "tidegate_decisions_total{{{labels}}} {}", load(counter));
            }
        }
        head(
            &mut text,
            "tidegate_missing_key_total",
            "counter",
            "Requests that lack the key of a policy, by policy.",
        );
        for (policy, outcomes) in
            self.outcomes.read().unwrap_or_else(PoisonError::into_inner).iter()
        {
            let (policy, count) = (escaped(policy), load(&outcomes.missing_key));
            let _ = writeln!(text, "tidegate_missing_key_total{{policy=\"{policy}\"}} {count}");
        }
        head(
            &mut text,
            "tidegate_fallback_decisions_total",
            "counter",
            "Decisions in the store's place, by policy.",
        );
        for (policy, outcomes) in
            self.outcomes.read().unwrap_or_else(PoisonError::into_inner).iter()
        {
            let policy = escaped(policy);
            for (source, counter) in FALLBACKS.iter().zip(&outcomes.fallback) {
                let labels = format!("policy=\"{policy}\",source=\"{source}\"");
                let _ = writeln!(
                    text,
                    "tidegate_fallback_decisions_total{{{labels}}} {}",
                    load(counter)
                );
            }
        }
        head(&mut text, "tidegate_decision_sources_total", "counter", "Decisions by who decided.");
        for (source, counter) in SOURCES.iter().zip(&self.sources) {
            let _ = writeln!(
                text,
                "tidegate_decision_sources_total{{source=\"{source}\"}} {}",
                load(counter)
            );
        }
        self.decision_seconds.write(
            &mut text,
            "tidegate_decision_seconds",
            "Time to decide a request.",
        );
        self.store_seconds.write(
            &mut text,
            "tidegate_store_seconds",
            "Time of a call to the store.",
        );
        head(
            &mut text,
            "tidegate_store_errors_total",
            "counter",
            "Calls that the store could not decide, by kind.",
        );
        for (kind, counter) in ERROR_KINDS.iter().zip(&self.store_errors) {
            let _ =
                writeln!(text, "tidegate_store_errors_total{{kind=\"{kind}\"}} {}", load(counter));
        }
        head(&mut text, "tidegate_memory_keys", "gauge", "Keys held in this process's memory.");
        let _ = writeln!(text, "tidegate_memory_keys {}", backend.memory_keys());
        head(&mut text, "tidegate_store_up", "gauge", "Whether the store decides.");
        let _ = writeln!(
            text,
            "tidegate_store_up {}",
            u8::from(backend.redis().is_none_or(Redis::is_up))
        );
        if let Some(redis) = backend.redis() {
            write_redis(&mut text, redis);
        }
        head(
            &mut text,
            "tidegate_config_reloads_total",
            "counter",
            "Reloads of the configuration, by outcome.",
        );
        for (outcome, counter) in
            [("taken", &self.reloads_taken), ("refused", &self.reloads_refused)]
        {
            let _ = writeln!(
                text,
                "tidegate_config_reloads_total{{outcome=\"{outcome}\"}} {}",
                load(counter)
            );
        }
        head(&mut text, "tidegate_build_info", "gauge", "The version that is running.");
        let _ =
            writeln!(text, "tidegate_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        text
    }
}

/// How Redis does, and what stands in for it.
fn write_redis(text: &mut String, redis: &Redis) {
    let (parts, fallback, store) =
        (redis.breaker().states(), redis.fallback().stats(), redis.store());
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let numbers = [
        (
            "tidegate_store_breaker_open",
            "gauge",
            "Parts of the store (nodes of a cluster) that are not asked because they fail.",
            count(parts.iter().filter(|part| part.open).count()),
        ),
        (
            "tidegate_store_breaker_opened_total",
            "counter",
            "How often a part of the store was given up for a while.",
            parts.iter().map(|part| part.times_opened).sum(),
        ),
        (
            "tidegate_deny_cache_entries",
            "gauge",
            "Denials by the store that are remembered, some of which may have expired.",
            count(redis.deny_cache().entries()),
        ),
        (
            "tidegate_fleet_instances",
            "gauge",
            "Instances that share the limits while the store is away.",
            count(redis.fallback().fleet().size()),
        ),
        (
            "tidegate_owed_units",
            "gauge",
            "Units admitted in the store's place, to be charged to it.",
            fallback.pending_debit_units,
        ),
        (
            "tidegate_repaid_units_total",
            "counter",
            "Units charged to the store afterwards.",
            fallback.settled_debit_units,
        ),
        (
            "tidegate_dropped_units_total",
            "counter",
            "Units admitted in the store's place that were too many to be charged to it.",
            fallback.dropped_debit_units,
        ),
        (
            "tidegate_redis_script_loads_total",
            "counter",
            "Scripts sent to Redis.",
            store.script_loads(),
        ),
        (
            "tidegate_redis_reconnects_total",
            "counter",
            "Connections to Redis made anew.",
            store.reconnects(),
        ),
        (
            "tidegate_redis_redirects_total",
            "counter",
            "Calls that a cluster sent on to another node.",
            store.redirects(),
        ),
    ];
    for (name, kind, help, number) in numbers {
        head(text, name, kind, help);
        let _ = writeln!(text, "{name} {number}");
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A label's value may hold anything but these three as they are.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// How long things took, in buckets from 10 µs to 1 s.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanos: AtomicU64,
}

const BOUNDS: [(u64, &str); 16] = [
    (10, "1e-05"),
    (25, "2.5e-05"),
    (50, "5e-05"),
    (100, "0.0001"),
    (250, "0.00025"),
    (500, "0.0005"),
    (1_000, "0.001"),
    (2_500, "0.0025"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (25_000, "0.025"),
    (50_000, "0.05"),
    (100_000, "0.1"),
    (250_000, "0.25"),
    (500_000, "0.5"),
    (1_000_000, "1"),
];

impl Histogram {
    pub(crate) fn observe(&self, took: Duration) {
        let micros = u64::try_from(took.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|(bound, _)| *bound < micros);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }

    fn write(&self, text: &mut String, name: &str, help: &str) {
        head(text, name, "histogram", help);
        let mut count = 0;
        for (bucket, bound) in
            self.buckets.iter().zip(BOUNDS.iter().map(|(_, bound)| *bound).chain(["+Inf"]))
        {
            count += bucket.load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let seconds = Duration::from_nanos(self.nanos.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(text, "{name}_sum {seconds}\n{name}_count {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up_and_a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::default();
        for micros in [1, 10, 11, 1_000_000, 1_000_001] {
            histogram.observe(Duration::from_micros(micros));
        }
        let mut text = String::new();
        histogram.write(&mut text, "x", "y");
        assert!(text.contains("x_bucket{le=\"1e-05\"} 2\n"), "{text}");
        assert!(text.contains("x_bucket{le=\"2.5e-05\"} 3\n"), "{text}");
        assert!(
            text.contains("x_bucket{le=\"1\"} 4\n") && text.contains("x_bucket{le=\"+Inf\"} 5\n"),
            "{text}"
        );
        assert!(text.contains("x_count 5\n") && text.contains("x_sum 2.000023\n"), "{text}");
    }

    fn memory() -> Backend {
        Backend::memory(tidegate::MemoryStore::new(), Arc::default())
    }

    #[test]
    fn a_policys_name_cannot_break_out_of_its_label() {
        let metrics = Metrics::default();
        metrics.outcomes("a\"} 1\nb\\").count(true, false);
        let backend = memory();
        assert!(
            metrics
                .text(&backend)
                .contains(r#"tidegate_decisions_total{policy="a\"} 1\nb\\",outcome="allowed"} 1"#)
        );
    }
}
