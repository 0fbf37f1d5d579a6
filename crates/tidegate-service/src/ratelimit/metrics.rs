//! Metrics by the names of ratelimit's default mapper, followed by those of Tidegate. They are made
//! from numbers that are counted anyway, except for the units of each rule.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::PoisonError;

use super::Ratelimit;
use crate::metrics::{UnitTotals, escaped, head, write_labelled, write_numbers};

const CALL: &str = "ShouldRateLimit";

/// Number of units of one kind.
type CountOf = fn(&UnitTotals) -> u64;

/// Domain and the first two keys of a rule.
type RuleLabels<'a> = (&'a str, &'a str, Option<&'a str>);

pub(super) fn text(ratelimit: &Ratelimit) -> String {
    let (mut text, metrics) = (String::with_capacity(16 * 1024), &ratelimit.state.metrics);
    let active = ratelimit.state.active();
    let mut known = ratelimit.counted_domains.lock().unwrap_or_else(PoisonError::into_inner);
    known.extend(active.envoy.rules.domains().map(str::to_owned));
    let domains: Vec<&str> = known.iter().map(String::as_str).collect();
    let mut rules: Vec<(String, UnitTotals)> = Vec::new();
    metrics.for_each_units(|name, units| rules.push((name.to_owned(), units)));
    // Rules that differ only below their second key are one series.
    let mut series: BTreeMap<RuleLabels<'_>, UnitTotals> = BTreeMap::new();
    for (name, units) in &rules {
        let Some(labels) = labels(name, &domains) else { continue };
        let sum = series.entry(labels).or_default();
        sum.within_limit += units.within_limit;
        sum.near_limit += units.near_limit;
        sum.over_limit += units.over_limit;
        sum.shadow_mode += units.shadow_mode;
    }
    let counted: BTreeSet<&str> = series.keys().map(|(domain, ..)| *domain).collect();
    known.retain(|domain| counted.contains(domain.as_str()));
    drop(known);
    let families: [(&str, CountOf); 5] = [
        ("total_hits", |units| units.within_limit + units.over_limit),
        ("within_limit", |units| units.within_limit),
        ("near_limit", |units| units.near_limit),
        ("over_limit", |units| units.over_limit),
        ("shadow_mode", |units| units.shadow_mode),
    ];
    for (family, count) in families {
        let name = format!("ratelimit_service_rate_limit_{family}");
        head(&mut text, &name, "counter", "Units of requests, by the first keys of the rule.");
        for ((domain, key1, key2), units) in &series {
            let (domain, key1) = (escaped(domain), escaped(key1));
            let key2 = key2.map(|key| format!(",key2=\"{}\"", escaped(key))).unwrap_or_default();
            let _ = writeln!(
                text,
                "{name}{{domain=\"{domain}\",key1=\"{key1}\"{key2}}} {}",
                count(units)
            );
        }
    }
    let requests = metrics.requests.totals();
    write_labelled(
        &mut text,
        ("ratelimit_service_total_requests", "grpc_method"),
        "Calls, by method.",
        [(CALL, requests.iter().sum())],
    );
    let seconds = "ratelimit_service_response_time_seconds";
    metrics.requests.write_seconds(&mut text, seconds, &format!("grpc_method=\"{CALL}\""));
    write_labelled(
        &mut text,
        ("ratelimit_service_should_rate_limit_error", "err_type"),
        "Calls that could not be decided, by the reason.",
        [("redis_error", requests[3]), ("service_error", ratelimit.envoy.rejected())],
    );
    let [successes, failures] = metrics.reload_totals();
    // Files were loaded at the start, too.
    let first = u64::from(active.envoy.xds.is_none());
    write_numbers(
        &mut text,
        &[
            (
                "ratelimit_service_config_load_success",
                "counter",
                "Loads of the rules that succeeded.",
                successes + first,
            ),
            (
                "ratelimit_service_config_load_error",
                "counter",
                "Loads of the rules that failed.",
                failures,
            ),
        ],
    );
    text.push_str(&metrics.text());
    text
}

/// Returns the labels of a name such as `domain.key_value.key`; `None` for a policy.
fn labels<'a>(name: &'a str, domains: &[&str]) -> Option<RuleLabels<'a>> {
    let of_domain =
        |domain: &&&str| name.strip_prefix(**domain).is_some_and(|rest| rest.starts_with('.'));
    let known = domains.iter().filter(of_domain).map(|domain| domain.len()).max();
    // Its rules may have come and gone since the last scrape.
    let end = known.or_else(|| name.find('.'))?;
    let (domain, rest) = name.split_at(end);
    let mut keys = rest.strip_prefix('.')?.split('.');
    Some((domain, keys.next()?, keys.next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_labels_as_in_the_default_mapper() {
        let domains = ["edge", "www.example.com"];
        for (name, expected) in [
            ("edge.route_a", Some(("edge", "route_a", None))),
            ("edge.route_a.user", Some(("edge", "route_a", Some("user")))),
            ("edge.a.b.c.d", Some(("edge", "a", Some("b")))),
            ("www.example.com.a.b", Some(("www.example.com", "a", Some("b")))),
            ("gone.a", Some(("gone", "a", None))),
            ("per-user", None),
        ] {
            assert_eq!(labels(name, &domains), expected, "{name}");
        }
    }
}
