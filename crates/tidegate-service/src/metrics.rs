//! Metrics in Prometheus's text format. Each thread counts its decisions for itself ([`Counters`]).
//!
//! A key is never a label, because the number of keys is unbounded.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tidegate::{Source, StoreError};

use crate::auth::AuthFailures;
use crate::logs::{self, panics};
use tidegate_net::listener::ClosedConnections;

pub mod counters;
pub mod histogram;
pub mod process;
mod requests;
pub mod stalls;

pub use counters::Counters;
pub use histogram::Histogram;
use requests::RequestMetrics;
pub use requests::RequestOutcome;

#[derive(Default)]
pub struct Metrics {
    /// Outcomes of every policy since the start, so that a reload resets no counter.
    outcomes: RwLock<BTreeMap<String, Arc<Outcomes>>>,
    /// Number of names in `outcomes` that stem from limit overrides in requests.
    override_names: AtomicUsize,
    sources: Counters<{ SOURCES.len() }>,
    pub requests: RequestMetrics,
    pub store_seconds: Histogram,
    store_errors: [AtomicU64; ERROR_KINDS.len()],
    reload_successes: AtomicU64,
    reload_failures: AtomicU64,
    /// Forward-auth requests by the part of the original request that is missing.
    incomplete_forward_auth: [AtomicU64; PARTS],
    upstream_retries: AtomicU64,
    pub closed_connections: Arc<ClosedConnections>,
    pub auth_failures: AuthFailures,
    /// Metrics of the store and of the front doors, in the order of their start.
    sections: RwLock<Vec<Arc<dyn MetricsSection>>>,
}

/// Metrics that a part of the service owns, and registers at its start.
pub trait MetricsSection: Send + Sync {
    /// Appends the metrics in the text format.
    fn write_metrics(&self, text: &mut String);
}

/// Decisions of one policy, by outcome.
#[derive(Debug, Default)]
pub struct Outcomes(Counters<{ UNITS + 3 }>);

/// Units of a policy that requests asked for, as ratelimit counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitTotals {
    pub within_limit: u64,
    pub near_limit: u64,
    /// Units of denied requests, also of those that passed in shadow mode.
    pub over_limit: u64,
    pub shadow_mode: u64,
}

/// Event in the life of a hold, in the order of [`HOLD_EVENTS`].
#[derive(Debug, Clone, Copy)]
pub enum HoldEvent {
    Reserved,
    Replayed,
    Settled,
    Ended,
    Unknown,
    Renewed,
    Pending,
}

/// Number of parts of an original request that forward-auth needs: URI, method and host.
pub const PARTS: usize = PART_NAMES.len();
const PART_NAMES: [&str; 3] = ["uri", "method", "host"];

/// Indexes of the counters of a policy.
const ALLOWED: usize = 0;
const DENIED: usize = 1;
const SHADOW_DENIED: usize = 2;
const MISSING_KEY: usize = 3;
const NEAR_LIMIT: usize = 4;
const OTHER_LIMIT: usize = 5;
const REFUNDED: usize = 6;
const REFUND_FAILED: usize = 7;
/// Index of the first of the decisions of a fallback, by source.
const FALLBACK: usize = 8;
/// Index of the first of the events of holds.
const HOLD: usize = FALLBACK + FALLBACKS.len();
/// Index of the first of the numbers of units: admitted, denied, denied in shadow mode.
const UNITS: usize = HOLD + HOLD_EVENTS.len();

/// Maximum number of policy names, including those that requests create by matching rules.
const MAX_NAMES: usize = 2_000;
/// Maximum number of names that stem from limit overrides in requests.
const MAX_OVERRIDE_NAMES: usize = 200;
pub const SOURCES: [Source; 7] = [
    Source::Store,
    Source::DenyCache,
    Source::Local,
    Source::Allow,
    Source::Deny,
    Source::MissingKey,
    Source::Override,
];
/// Sources of decisions during an outage of the store.
const FALLBACKS: [Source; 3] = [Source::Local, Source::Allow, Source::Deny];
const HOLD_EVENTS: [&str; 7] =
    ["reserved", "replayed", "settled", "ended", "unknown", "renewed", "pending"];
const ERROR_KINDS: [&str; 6] =
    ["full", "timeout", "unreachable", "refused", "misconfigured", "permission"];

/// Returns the index of an outcome.
fn outcome(allowed: bool, shadow: bool) -> usize {
    match (allowed, shadow) {
        (true, _) => ALLOWED,
        (false, false) => DENIED,
        (false, true) => SHADOW_DENIED,
    }
}

impl Outcomes {
    pub fn count(&self, allowed: bool, shadow: bool) {
        self.0.add(outcome(allowed, shadow), 1);
    }

    /// Counts a request that lacks the policy's key.
    pub fn count_missing_key(&self) {
        self.0.add(MISSING_KEY, 1);
    }

    /// Counts a request that has none of the values in the policy's `limits`.
    pub fn count_other_limit(&self) {
        self.0.add(OTHER_LIMIT, 1);
    }

    /// Counts the units of a decision.
    pub fn count_units(&self, allowed: bool, shadow: bool, units: u64) {
        self.0.add(UNITS + outcome(allowed, shadow), units);
    }

    /// Counts units that were admitted near the limit.
    pub fn count_near_limit(&self, units: u64) {
        if units > 0 {
            self.0.add(NEAR_LIMIT, units);
        }
    }

    /// Counts a refund after a response.
    pub fn count_refund(&self, succeeded: bool) {
        self.0.add(if succeeded { REFUNDED } else { REFUND_FAILED }, 1);
    }

    pub fn count_hold(&self, event: HoldEvent) {
        self.0.add(HOLD + event as usize, 1);
    }

    pub fn count_source(&self, source: Source) {
        if let Some(index) = FALLBACKS.iter().position(|known| *known == source) {
            self.0.add(FALLBACK + index, 1);
        }
    }
}

impl Metrics {
    /// Adds the metrics of a part of the service.
    pub fn register(&self, section: Arc<dyn MetricsSection>) {
        self.sections.write().unwrap_or_else(PoisonError::into_inner).push(section);
    }

    /// Returns the counters of a policy.
    pub fn outcomes(&self, policy: &str) -> Arc<Outcomes> {
        let mut all = self.outcomes.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(policy.to_owned()).or_default())
    }

    /// Drops the counters of policies and rules that are gone and were never used: a control plane
    /// may replace thousands of them, again and again.
    pub fn forget_unused(&self) {
        let mut all = self.outcomes.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, outcomes| {
            Arc::strong_count(outcomes) > 1 || outcomes.0.totals().iter().any(|count| *count > 0)
        });
    }

    /// Returns the counters of a rule, or of a limit override, by its metric name. The name may
    /// contain values of requests, so once there are too many names, `common` is used instead.
    pub fn envoy_outcomes(&self, metric: &str, common: &str, is_rule: bool) -> Arc<Outcomes> {
        let known = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        let has_room = if is_rule {
            known.len() < MAX_NAMES
        } else {
            self.override_names.load(Ordering::Relaxed) < MAX_OVERRIDE_NAMES
        };
        let name = if has_room || known.contains_key(metric) { metric } else { common };
        if let Some(outcomes) = known.get(name) {
            return Arc::clone(outcomes);
        }
        drop(known);
        self.override_names.fetch_add(usize::from(!is_rule), Ordering::Relaxed);
        self.outcomes(name)
    }

    pub fn count_source(&self, source: Source) {
        if let Some(index) = SOURCES.iter().position(|known| *known == source) {
            self.sources.add(index, 1);
        }
    }

    pub fn count_store_call(&self, duration: Duration, error: Option<&StoreError>) {
        self.store_seconds.observe(duration);
        if let Some(error) = error {
            self.count_store_error(error);
        }
    }

    pub fn count_store_error(&self, error: &StoreError) {
        // A lost answer is counted by its reason.
        let kind = match error.reason() {
            StoreError::Full { .. } | StoreError::OutOfMemory(_) => 0,
            StoreError::Timeout(_) => 1,
            StoreError::Unreachable(_) => 2,
            StoreError::Misconfigured(_) => 4,
            StoreError::NotPermitted(_) => 5,
            _ => 3,
        };
        self.store_errors[kind].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of decisions by source, in the order of [`SOURCES`].
    pub fn source_totals(&self) -> [u64; SOURCES.len()] {
        self.sources.totals()
    }

    /// Calls a closure with each policy and the number of its decisions by outcome: allowed,
    /// denied, denied in shadow mode.
    pub fn for_each_policy(&self, mut visit: impl FnMut(&str, [u64; 3])) {
        let all = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        for (policy, outcomes) in all.iter() {
            visit(policy, [ALLOWED, DENIED, SHADOW_DENIED].map(|index| outcomes.0.total(index)));
        }
    }

    /// Calls a closure with each policy and the units that requests asked for.
    pub fn for_each_units(&self, mut visit: impl FnMut(&str, UnitTotals)) {
        let all = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        for (policy, outcomes) in all.iter() {
            let shadow_mode = outcomes.0.total(UNITS + SHADOW_DENIED);
            let totals = UnitTotals {
                within_limit: outcomes.0.total(UNITS + ALLOWED),
                near_limit: outcomes.0.total(NEAR_LIMIT),
                over_limit: outcomes.0.total(UNITS + DENIED) + shadow_mode,
                shadow_mode,
            };
            visit(policy, totals);
        }
    }

    /// Returns the number of reloads that succeeded, and of those that failed.
    pub fn reload_totals(&self) -> [u64; 2] {
        [&self.reload_successes, &self.reload_failures].map(|it| it.load(Ordering::Relaxed))
    }

    /// Returns whether a request has matched the policy since the start, even one without its key.
    pub fn has_matched(&self, policy: &str) -> bool {
        let all = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        let counters = [ALLOWED, DENIED, SHADOW_DENIED, MISSING_KEY];
        all.get(policy).is_some_and(|it| counters.iter().any(|index| it.0.total(*index) > 0))
    }

    /// Writes which of these policies no request has matched.
    pub fn write_unmatched<'a>(&self, text: &mut String, policies: impl Iterator<Item = &'a str>) {
        let unmatched = policies.map(|policy| (policy, u8::from(!self.has_matched(policy))));
        let help = "Whether no request has matched the policy since the start.";
        write_gauges(text, ("tidegate_policy_unmatched", "policy"), help, unmatched);
    }

    pub fn count_reload(&self, success: bool) {
        let counter = if success { &self.reload_successes } else { &self.reload_failures };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_incomplete_forward_auth(&self, part: usize) {
        self.incomplete_forward_auth[part].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that the gateway sends again.
    pub fn count_upstream_retry(&self) {
        self.upstream_retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the counters of each policy.
    fn write_outcomes(&self, text: &mut String) {
        let all = self.outcomes.read().unwrap_or_else(PoisonError::into_inner);
        let outcomes = [("allowed", ALLOWED), ("denied", DENIED), ("shadow_denied", SHADOW_DENIED)]
            .map(|(outcome, counter)| (format!(",outcome=\"{outcome}\""), counter));
        let sources = std::array::from_fn::<_, { FALLBACKS.len() }, _>(|index| {
            (format!(",source=\"{}\"", FALLBACKS[index]), FALLBACK + index)
        });
        let refunds = [("success", REFUNDED), ("failure", REFUND_FAILED)]
            .map(|(outcome, counter)| (format!(",outcome=\"{outcome}\""), counter));
        let holds = std::array::from_fn::<_, { HOLD_EVENTS.len() }, _>(|index| {
            (format!(",event=\"{}\"", HOLD_EVENTS[index]), HOLD + index)
        });
        // Name, help, and each further label with its counter.
        #[rustfmt::skip]
        let families = [
            ("tidegate_decisions_total", "Decisions by policy and outcome.", &outcomes[..]),
            ("tidegate_missing_key_total",
                "Requests that lack the key of a policy, by policy.",
                &[(String::new(), MISSING_KEY)]),
            ("tidegate_limits_other_total",
                "Requests without one of the values in the limits of a policy, by policy.",
                &[(String::new(), OTHER_LIMIT)]),
            ("tidegate_near_limit_total",
                "Units admitted near the limit, by policy.", &[(String::new(), NEAR_LIMIT)]),
            ("tidegate_refunds_total",
                "Refunds of the gateway after responses, by policy and outcome.", &refunds),
            ("tidegate_fallback_decisions_total",
                "Decisions of the fallback during an outage of the store, by policy and source.",
                &sources),
            ("tidegate_holds_total", "Reservations and units in flight, by policy and event.",
                &holds),
        ];
        for (name, help, counters) in families {
            head(text, name, "counter", help);
            // Few policies have holds.
            let is_shown = |outcomes: &Outcomes| {
                let has_event = |event: usize| outcomes.0.total(HOLD + event) > 0;
                counters[0].1 != HOLD || (0..HOLD_EVENTS.len()).any(has_event)
            };
            for (policy, outcomes) in all.iter().filter(|(_, outcomes)| is_shown(outcomes)) {
                let policy = escaped(policy);
                for (label, counter) in counters {
                    let count = outcomes.0.total(*counter);
                    let _ = writeln!(text, "{name}{{policy=\"{policy}\"{label}}} {count}");
                }
            }
        }
    }

    /// Returns all metrics in the text format, version 0.0.4.
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(8 * 1024);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.write_outcomes(&mut text);
        write_labelled(
            &mut text,
            ("tidegate_decision_sources_total", "source"),
            "Decisions by source.",
            SOURCES.iter().zip(self.sources.totals()),
        );
        self.requests.write(&mut text);
        self.store_seconds.write(
            &mut text,
            "tidegate_store_seconds",
            "Duration of a call to Redis.",
        );
        write_labelled(
            &mut text,
            ("tidegate_store_errors_total", "kind"),
            "Failed calls to the store, by kind of error.",
            ERROR_KINDS.iter().zip(self.store_errors.iter().map(load)),
        );
        write_labelled(
            &mut text,
            ("tidegate_config_reloads_total", "outcome"),
            "Reloads of the configuration, by outcome.",
            [("success", load(&self.reload_successes)), ("failure", load(&self.reload_failures))],
        );
        write_labelled(
            &mut text,
            ("tidegate_forward_auth_incomplete_total", "missing"),
            "Forward-auth requests without a header that policies need, by the missing part.",
            PART_NAMES.iter().zip(self.incomplete_forward_auth.iter().map(load)),
        );
        #[rustfmt::skip]
        let numbers = [
            ("tidegate_upstream_retries_total", "counter",
                "Requests that the gateway sent again, to the same or to another upstream.",
                load(&self.upstream_retries)),
            ("tidegate_panics_total", "counter",
                "Panics, each a defect to be reported.", panics::count()),
        ];
        write_numbers(&mut text, &numbers);
        write_labelled(
            &mut text,
            ("tidegate_log_lines_total", "outcome"),
            "Lines of the log on standard error, by outcome.",
            logs::line_counts(),
        );
        stalls::write(&mut text);
        write_labelled(
            &mut text,
            ("tidegate_connections_closed_total", "reason"),
            "Connections that were closed early or refused, by reason.",
            self.closed_connections.counts(),
        );
        write_labelled(
            &mut text,
            ("tidegate_auth_failures_total", "listener"),
            "Wrong tokens of clients, by listener.",
            self.auth_failures.counts(),
        );
        for section in self.sections.read().unwrap_or_else(PoisonError::into_inner).iter() {
            section.write_metrics(&mut text);
        }
        let (info, help) = (("tidegate_build_info", "version"), "Version of the running process.");
        write_gauges(&mut text, info, help, [(env!("CARGO_PKG_VERSION"), 1)]);
        text
    }
}

/// Writes a counter for each value of a label.
pub fn write_labelled(
    text: &mut String,
    name_and_label: (&str, &str),
    help: &str,
    counts: impl IntoIterator<Item = (impl Display, u64)>,
) {
    write_family(text, "counter", name_and_label, help, counts);
}

/// Writes a gauge for each value of a label.
pub fn write_gauges(
    text: &mut String,
    name_and_label: (&str, &str),
    help: &str,
    values: impl IntoIterator<Item = (impl Display, impl Display)>,
) {
    write_family(text, "gauge", name_and_label, help, values);
}

/// Writes a metric for each value of a label.
pub fn write_family(
    text: &mut String,
    kind: &str,
    (name, label): (&str, &str),
    help: &str,
    values: impl IntoIterator<Item = (impl Display, impl Display)>,
) {
    head(text, name, kind, help);
    for (of, value) in values {
        let of = escaped(&of.to_string());
        let _ = writeln!(text, "{name}{{{label}=\"{of}\"}} {value}");
    }
}

/// Writes metrics without labels: name, type, help and value.
pub fn write_numbers<V: Display>(text: &mut String, numbers: &[(&str, &str, &str, V)]) {
    for (name, kind, help, number) in numbers {
        head(text, name, kind, help);
        let _ = writeln!(text, "{name} {number}");
    }
}

/// Writes the hash of the active configuration.
pub fn write_config_info(text: &mut String, hash: &str) {
    let help = "Hash of the active configuration.";
    write_gauges(text, ("tidegate_config_info", "hash"), help, [(hash, 1)]);
}

/// Writes the description and the type of a metric.
pub fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Escapes the value of a label.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_are_escaped_in_labels() {
        let metrics = Metrics::default();
        metrics.outcomes("a\"} 1\nb\\").count(true, false);
        assert!(
            metrics
                .text()
                .contains(r#"tidegate_decisions_total{policy="a\"} 1\nb\\",outcome="allowed"} 1"#)
        );
    }
}
