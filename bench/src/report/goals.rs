//! What we set out to reach, and whether we have.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::{Found, NONE, Page, short};
use crate::redis::decisions::{CEILING, EACH_ALONE};

/// What limitador reached of a do-nothing server, on memory: 65 of 97.5 and 80 of 107 thousand
/// requests a second (the middles of what was measured, on another machine).
const LIMITADOR: [(&str, f64); 2] = [("http", 0.67), ("grpc", 0.75)];

struct Goal {
    what: String,
    aim: &'static str,
    measured: String,
    /// `None`: not measured.
    met: Option<bool>,
}

pub(super) fn write(page: &mut Page, found: &Found) {
    page.heading("Goals");
    let mut goals = Vec::new();
    memory(found.in_process.as_ref(), &mut goals);
    growth(found.growth.as_ref(), &mut goals);
    wire(found.http.as_ref(), &mut goals);
    service(found.service.as_ref(), &mut goals);
    redis(found.redis.as_ref(), &mut goals);
    quiet(found.redis.as_ref(), &mut goals);
    logs(found.logs.as_ref(), &mut goals);
    let mark = |met: Option<bool>| match met {
        Some(true) => "✔",
        Some(false) => "✘",
        None => NONE,
    };
    let rows: Vec<Vec<String>> = goals
        .into_iter()
        .map(|goal| vec![mark(goal.met).to_owned(), goal.what, goal.aim.to_owned(), goal.measured])
        .collect();
    page.table(&["", "what", "goal", "measured"], &rows);
}

impl Goal {
    fn at_least(
        what: impl Into<String>,
        aim: &'static str,
        least: f64,
        measured: Option<Spread>,
    ) -> Self {
        let text = measured.map_or(NONE.to_owned(), |spread| spread.to_string());
        Self {
            what: what.into(),
            aim,
            measured: text,
            met: measured.map(|spread| spread.median >= least),
        }
    }
}

fn memory(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let mut against_governor = |what: &str, aim, least: f64, cases: &dyn Fn(&str) -> bool| {
        let ratios: Vec<(String, Spread)> = results.map_or(Vec::new(), |results| {
            let ours = results
                .rows()
                .iter()
                .filter(|row| row.contestant == "tidegate" && row.metric == "ns");
            let ratio = |case: &str| results.ratio("ns", (case, "governor"), (case, "tidegate"));
            let cases = ours.map(|row| row.case.clone()).filter(|case| cases(case));
            cases.filter_map(|case| ratio(&case).map(|ratio| (case, ratio))).collect()
        });
        let worst = ratios.iter().min_by(|one, other| one.1.median.total_cmp(&other.1.median));
        let best = ratios.iter().map(|(_, ratio)| ratio.median).fold(f64::MIN, f64::max);
        let measured = worst.map_or(NONE.to_owned(), |(case, ratio)| {
            format!("{ratio} where it is least ({}); up to {best:.2}×", in_words(case))
        });
        let met = worst.map(|(_, ratio)| ratio.median >= least);
        goals.push(Goal { what: what.to_owned(), aim, measured, met });
    };
    let at = |keys: &'static str| move |case: &str| case.split('/').next() == Some(keys);
    against_governor(
        "memory, token bucket against governor, 1M keys",
        "≥ 1.4×",
        1.4,
        &at("1000000"),
    );
    against_governor("… 10k keys", "≥ 1.2×", 1.2, &at("10000"));
    against_governor("… anywhere", "≥ 1.0×", 1.0, &|_| true);
    let bytes = |contestant: &str, keys: &str| {
        results?.spread(keys, contestant, "bytes").map(|spread| spread.median)
    };
    let ours: Vec<f64> =
        ["1000000", "10000000"].iter().filter_map(|keys| bytes("tidegate", keys)).collect();
    let most = ours.iter().copied().reduce(f64::max);
    let text = ours.iter().map(|bytes| format!("{bytes:.0}")).collect::<Vec<_>>().join(" and ");
    let governor =
        bytes("governor", "1000000").map_or(NONE.to_owned(), |bytes| format!("{bytes:.0}"));
    goals.push(Goal {
        what: "… bytes a key, 1M and 10M keys".to_owned(),
        aim: "≤ 64",
        measured: most.map_or(NONE.to_owned(), |_| format!("{text} (governor {governor})")),
        met: most.map(|most| most <= 64.0),
    });
}

/// `10000/2/denied/zipf`
fn in_words(case: &str) -> String {
    let parts: Vec<&str> = case.split('/').collect();
    let &[keys, threads, outcome, walk] = parts.as_slice() else { return case.to_owned() };
    let keys = short(keys.parse().unwrap_or_default());
    let plural = |number: &str| if number == "1" { "" } else { "s" };
    format!("{keys} key{}, {threads} thread{}, {outcome}, {walk}", plural(&keys), plural(threads))
}

fn growth(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (what, first) in [
        ("cost growth with the keys in the store, cache misses aside", "keys/1000/few"),
        ("cost growth with L", "limit/10"),
    ] {
        let rows = results.map_or(&[][..], Results::rows);
        let (kind, last) = first.split_once('/').unwrap_or_default();
        let which = last.split_once('/').map(|(_, which)| which);
        let of_kind =
            |case: &str| case.starts_with(kind) && which.is_none_or(|which| case.ends_with(which));
        let growths = rows.iter().filter(|row| of_kind(&row.case)).filter_map(|row| {
            let growth =
                results?.ratio("ns", (&row.case, &row.contestant), (first, &row.contestant))?;
            let size = row.case.split('/').nth(1)?;
            Some((format!("{} at {size}", row.contestant), growth.median))
        });
        let worst = growths.max_by(|one, other| one.1.total_cmp(&other.1));
        goals.push(Goal {
            what: what.to_owned(),
            aim: "≤ 2×",
            measured: worst
                .as_ref()
                .map_or(NONE.to_owned(), |(who, growth)| format!("{growth:.2}× at most ({who})")),
            met: worst.map(|(_, growth)| growth <= 2.0),
        });
    }
}

fn wire(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let ratio = |protocol: &str, other: &str| {
        results.and_then(|results| {
            results.ratio("per_second", (protocol, "tidegate"), (protocol, other))
        })
    };
    for (protocol, limitador) in LIMITADOR {
        let name = name_of(protocol);
        let nothing = ratio(protocol, "do-nothing");
        goals.push(Goal::at_least(
            format!("{name} on memory against a do-nothing server"),
            "≥ 0.9×",
            0.9,
            nothing,
        ));
        let throttlecrab = ratio(protocol, "throttlecrab");
        goals.push(Goal::at_least(
            format!("{name} against throttlecrab-server"),
            "≥ 1.2×",
            1.2,
            throttlecrab,
        ));
        let share = nothing.map(|ratio| ratio.median / limitador);
        goals.push(Goal {
            what: format!(
                "{name} against limitador's share of a do-nothing server ({limitador}, published)"
            ),
            aim: "≥ 1.2×",
            measured: share.map_or(NONE.to_owned(), |share| format!("{share:.2}×")),
            met: share.map(|share| share >= 1.2),
        });
    }
}

pub(super) fn name_of(protocol: &str) -> &'static str {
    if protocol == "http" { "HTTP" } else { "gRPC" }
}

fn service(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (protocol, limitador) in [("http", 0.39), ("grpc", 0.19)] {
        let ratio = results.and_then(|results| {
            results.ratio("per_second", (protocol, "tidegate"), (protocol, "do-nothing"))
        });
        let what = format!(
            "{} on Redis, exact log, random keys, against a do-nothing server (limitador: {limitador}, published)",
            name_of(protocol)
        );
        goals.push(Goal::at_least(what, "≥ 0.6×", 0.6, ratio));
    }
}

fn redis(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let best = |case: &str| {
        let rows =
            results?.rows().iter().filter(|row| row.case == case && row.metric == "per_second");
        let ratios = rows.filter_map(|row| {
            let ratio = results?.ratio("per_second", (case, &row.contestant), CEILING)?;
            Some((row.contestant.clone(), ratio))
        });
        ratios.max_by(|one, other| one.1.median.total_cmp(&other.1.median))
    };
    let mut goal = |what: &str, aim: &'static str, least: f64, case: &str| {
        let best = best(case);
        let calls = |who: &str| results?.spread(case, who, "redis_calls").map(|calls| calls.median);
        let measured = best.as_ref().map_or(NONE.to_owned(), |(who, ratio)| {
            format!("{ratio}, {:.4} calls a decision ({who})", calls(who).unwrap_or(f64::NAN))
        });
        let no_calls =
            |who: &str| case != "denied/512" || calls(who).is_some_and(|calls| calls < 0.001);
        let met = best.map(|(who, ratio)| ratio.median >= least && no_calls(&who));
        goals.push(Goal { what: what.to_owned(), aim, measured, met });
    };
    goal(
        "Redis, random keys, 512 callers, exact log, against redis-benchmark with one decision a call",
        "≥ 1.7×",
        1.7,
        "random/512",
    );
    goal("Redis, one hot key", "≥ 5×", 5.0, "hot/512");
    goal("Redis, hot key denied", "0 calls, ≥ 10×", 10.0, "denied/512");
}

/// Nobody waits for company when it is quiet.
fn quiet(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let ratio = results.and_then(|results| {
        results.ratio("median_micros", ("random/1", "tidegate"), ("random/1", EACH_ALONE))
    });
    goals.extend(ratio.map(|ratio| Goal {
        what: "Redis, one caller: p50 with group commit against without".to_owned(),
        aim: "≤ 1.05×",
        measured: ratio.to_string(),
        met: Some(ratio.median <= 1.05),
    }));
}

fn logs(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let share = results
        .and_then(|results| results.ratio("bytes", ("1000", "packed"), ("1000", "sorted-set")));
    goals.push(Goal {
        what: "memory of an exact log against a sorted set, L = 1,000".to_owned(),
        aim: "≤ 1/15",
        measured: share.map_or(NONE.to_owned(), |share| format!("1/{:.0}", 1.0 / share.median)),
        met: share.map(|share| share.median <= 1.0 / 15.0),
    });
}
