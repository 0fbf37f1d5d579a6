//! Goals, and whether they are met.

use tidegate_bench::results::{Results, Row};
use tidegate_bench::spread::Spread;

use crate::attack::{ALLOWED, DENIED, PROTOCOLS};
use crate::gateway::CASES;

use super::attack::IN_PROCESS;
use super::{NOT_MEASURED, Page, SuiteResults, abbreviate, latency};

mod redis;

struct Goal {
    description: String,
    target: &'static str,
    measured: String,
    /// Whether the goal is met; `None` if it was not measured.
    met: Option<bool>,
}

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    page.heading("Goals");
    let mut goals = Vec::new();
    memory(suites.in_process.as_ref(), &mut goals);
    growth(suites.growth.as_ref(), &mut goals);
    layer(suites.layer.as_ref(), &mut goals);
    network(suites.http.as_ref(), &mut goals);
    gateway(suites.gateway.as_ref(), &mut goals);
    resp(suites.resp.as_ref(), &mut goals);
    redis::add(suites, &mut goals);
    p99(suites, &mut goals);
    attack(suites, &mut goals);
    let mark = |met: Option<bool>| match met {
        Some(true) => "✔",
        Some(false) => "✘",
        None => NOT_MEASURED,
    };
    let rows: Vec<Vec<String>> = goals
        .into_iter()
        .map(|goal| {
            vec![mark(goal.met).to_owned(), goal.description, goal.target.to_owned(), goal.measured]
        })
        .collect();
    page.table(&["", "measurement", "goal", "result"], &rows);
}

impl Goal {
    fn at_least(
        description: impl Into<String>,
        target: &'static str,
        min: f64,
        measured: Option<Spread>,
    ) -> Self {
        let text = measured.map_or(NOT_MEASURED.to_owned(), |spread| spread.to_string());
        Self {
            description: description.into(),
            target,
            measured: text,
            met: measured.map(|spread| spread.median >= min),
        }
    }

    fn at_most(
        description: impl Into<String>,
        target: &'static str,
        max: f64,
        measured: Option<Spread>,
    ) -> Self {
        Self {
            met: measured.map(|spread| spread.median <= max),
            ..Self::at_least(description, target, max, measured)
        }
    }
}

fn memory(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let mut compared = |with: &str, description: &str, target, min: f64, keys: &[&str]| {
        let ratios: Vec<(String, Spread)> = results.map_or(Vec::new(), |results| {
            let is_ours = |row: &&Row| row.candidate == "tidegate" && row.metric == "ns";
            let ours = results.rows().iter().filter(is_ours).map(|row| row.case.clone());
            let ours =
                ours.filter(|case| case.split('/').next().is_some_and(|one| keys.contains(&one)));
            let ratio = |case: &str| results.ratio("ns", (case, with), (case, "tidegate"));
            ours.filter_map(|case| ratio(&case).map(|ratio| (case, ratio))).collect()
        });
        let worst = ratios.iter().min_by(|one, other| one.1.median.total_cmp(&other.1.median));
        let best = ratios.iter().map(|(_, ratio)| ratio.median).fold(f64::MIN, f64::max);
        let measured = worst.map_or(NOT_MEASURED.to_owned(), |(case, ratio)| {
            format!("{ratio} in the worst case ({}); up to {best:.2}×", describe_case(case))
        });
        let met = worst.map(|(_, ratio)| ratio.median >= min);
        goals.push(Goal { description: description.to_owned(), target, measured, met });
    };
    let (few, many) = (["1", "10000"], ["1000000", "10000000"]);
    let description = "memory, token bucket, compared with governor, 1M and 10M keys";
    compared("governor", description, "≥ 2×", 2.0, &many);
    compared("governor", "… 1 and 10k keys", "≥ 1.4×", 1.4, &few);
    let description = "… compared with a bare sharded table, all numbers of keys";
    compared("bare table", description, "≥ 0.6×", 0.6, &[few, many].concat());
    let bytes = |candidate: &str, keys: &str| {
        results?.spread(keys, candidate, "bytes").map(|spread| spread.median)
    };
    let ours: Vec<f64> =
        ["1000000", "10000000"].iter().filter_map(|keys| bytes("tidegate", keys)).collect();
    let most = ours.iter().copied().reduce(f64::max);
    let text = ours.iter().map(|bytes| format!("{bytes:.0}")).collect::<Vec<_>>().join(" and ");
    let governor =
        bytes("governor", "1000000").map_or(NOT_MEASURED.to_owned(), |bytes| format!("{bytes:.0}"));
    goals.push(Goal {
        description: "… bytes per key, 1M and 10M keys".to_owned(),
        target: "≤ 56",
        measured: most.map_or(NOT_MEASURED.to_owned(), |_| format!("{text} (governor {governor})")),
        met: most.map(|most| most <= 56.0),
    });
}

/// Describes a case such as `10000/2/denied/zipf`.
fn describe_case(case: &str) -> String {
    let parts: Vec<&str> = case.split('/').collect();
    let &[keys, threads, outcome, distribution] = parts.as_slice() else { return case.to_owned() };
    let keys = abbreviate(keys.parse().unwrap_or_default());
    let plural = |number: &str| if number == "1" { "" } else { "s" };
    format!(
        "{keys} key{}, {threads} thread{}, {outcome}, {distribution}",
        plural(&keys),
        plural(threads)
    )
}

fn growth(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (description, first) in [
        ("cost growth with the number of keys, without cache misses", "keys/1000/cached"),
        ("cost growth with L", "limit/10"),
    ] {
        let rows = results.map_or(&[][..], Results::rows);
        let (kind, last) = first.split_once('/').unwrap_or_default();
        let which = last.split_once('/').map(|(_, which)| which);
        let of_kind =
            |case: &str| case.starts_with(kind) && which.is_none_or(|which| case.ends_with(which));
        let growths = rows.iter().filter(|row| of_kind(&row.case)).filter_map(|row| {
            let growth =
                results?.ratio("ns", (&row.case, &row.candidate), (first, &row.candidate))?;
            let size = row.case.split('/').nth(1)?;
            Some((format!("{} at {size}", row.candidate), growth.median))
        });
        let worst = growths.max_by(|one, other| one.1.total_cmp(&other.1));
        goals.push(Goal {
            description: description.to_owned(),
            target: "≤ 2×",
            measured: worst.as_ref().map_or(NOT_MEASURED.to_owned(), |(candidate, growth)| {
                format!("at most {growth:.2}× ({candidate})")
            }),
            met: worst.map(|(_, growth)| growth <= 2.0),
        });
    }
}

fn network(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let ratio = |protocol: &str, other: &str| {
        results.and_then(|results| {
            results.ratio("per_second", (protocol, "tidegate"), (protocol, other))
        })
    };
    for protocol in ["http", "grpc"] {
        let name = protocol_name(protocol);
        let no_op = ratio(protocol, "no-op");
        let (target, min) = if protocol == "http" { ("≥ 1×", 1.0) } else { ("≥ 0.9×", 0.9) };
        goals.push(Goal::at_least(
            format!("{name} on memory, compared with a no-op server"),
            target,
            min,
            no_op,
        ));
        if protocol == "http" {
            goals.push(Goal::at_least(
                "HTTP on memory, compared with a no-op server on bare hyper",
                "≥ 0.9×",
                0.9,
                ratio(protocol, "no-op hyper"),
            ));
        }
        let throttlecrab = ratio(protocol, "throttlecrab");
        goals.push(Goal::at_least(
            format!("{name}, compared with throttlecrab-server"),
            "≥ 1.2×",
            1.2,
            throttlecrab,
        ));
    }
}

fn layer(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let more = results.and_then(|results| results.spread("acquire", "async", "ns_more"));
    goals.push(Goal {
        description: "async `acquire` on memory, ns above the blocking one".to_owned(),
        target: "≤ 10",
        measured: more.map_or(NOT_MEASURED.to_owned(), |more| {
            format!("{:.1} ({:.1}–{:.1})", more.median, more.min, more.max)
        }),
        met: more.map(|more| more.median <= 10.0),
    });
    for (description, target, max, metric) in [
        ("Tower layer around an empty service, ns per request", "≤ 250", 250.0, "ns"),
        ("… allocations per request", "≤ 2", 2.0, "allocations"),
    ] {
        let median = results.and_then(|results| results.spread("layer", "one quota", metric));
        let median = median.map(|spread| spread.median);
        goals.push(Goal {
            description: description.to_owned(),
            target,
            measured: median.map_or(NOT_MEASURED.to_owned(), |median| format!("{median:.0}")),
            met: median.map(|median| median <= max),
        });
    }
}

fn gateway(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (case, metric) in CASES {
        let ratio =
            results.and_then(|results| results.ratio(metric, (case, "tidegate"), (case, "nginx")));
        let description = format!("gateway, {case}, compared with nginx and `limit_req`");
        let (target, min) =
            if case == "small answers" { ("≥ 0.8×", 0.8) } else { ("≥ 0.9×", 0.9) };
        goals.push(Goal::at_least(description, target, min, ratio));
    }
}

fn resp(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let case = "pipeline/16";
    let ratio = |other: &str| {
        results.and_then(|results| results.ratio("per_second", (case, "tidegate"), (case, other)))
    };
    for (description, other, target, min) in [
        ("Redis protocol on memory, `-P 16`, compared with a no-op server", "no-op", "≥ 0.7×", 0.7),
        ("… compared with Redis and a naive script", "Redis, naive script", "≥ 5×", 5.0),
        ("… compared with Redis and Tidegate's own script", "Redis, own script", "≥ 5×", 5.0),
    ] {
        goals.push(Goal::at_least(description, target, min, ratio(other)));
    }
}

fn p99(suites: &SuiteResults, goals: &mut Vec<Goal>) {
    for (results, case, shown, goal) in latency::cases(suites) {
        let Some((other, target, max)) = goal else { continue };
        let ratio = results.and_then(|results| latency::p99_ratio(results, case, other));
        let description = format!("{shown}, p99 below saturation, compared with {other}");
        goals.push(Goal::at_most(description, target, max, ratio));
    }
}

fn attack(suites: &SuiteResults, goals: &mut Vec<Goal>) {
    let [allowed, denied, _] = IN_PROCESS.map(|case| (case, "tidegate"));
    let ratio = suites.in_process.as_ref();
    let ratio = ratio.and_then(|results| results.ratio("ns", denied, allowed));
    goals.push(Goal::at_most(
        "memory, a denial of a random key of 1M, compared with an allowed decision",
        "≤ 1.1×",
        1.1,
        ratio,
    ));
    let results = suites.attack.as_ref();
    for (protocol, ..) in PROTOCOLS {
        let [denied, allowed] = [DENIED, ALLOWED].map(|case| format!("{protocol}/{case}"));
        let ratio = |one: (&str, &str), other: (&str, &str)| {
            results.and_then(|results| results.ratio("cpu_micros", one, other))
        };
        let name = protocol_name(protocol);
        let own = (denied.as_str(), "tidegate");
        goals.push(Goal::at_most(
            format!("{name}, CPU of a denial of a random key, compared with an allowed request"),
            "≤ 1.1×",
            1.1,
            ratio(own, (&allowed, "tidegate")),
        ));
        goals.push(Goal::at_most(
            "… compared with a denial of throttlecrab-server",
            "≤ 1×",
            1.0,
            ratio(own, (&denied, "throttlecrab")),
        ));
    }
    let ratio = results.and_then(|results| {
        results.ratio("resident_mb", ("memory", "tidegate"), ("memory", "throttlecrab"))
    });
    let description =
        "resident memory of the service with 1M keys, compared with throttlecrab-server";
    goals.push(Goal::at_most(description, "≤ 1×", 1.0, ratio));
}

pub(super) fn protocol_name(protocol: &str) -> &'static str {
    match protocol {
        "http" => "HTTP",
        "grpc" => "gRPC",
        _ => "Redis protocol",
    }
}
