//! Goals on Redis.

use tidegate_bench::results::Results;

use super::super::{NOT_MEASURED, SuiteResults};
use super::{Goal, protocol_name};
use crate::redis::naive::Structure;
use crate::redis::{cluster, decisions, fleet, lone, scripts};

pub(super) fn add(suites: &SuiteResults, goals: &mut Vec<Goal>) {
    service(suites.service.as_ref(), goals);
    one_per_call(suites.scripts.as_ref(), goals);
    batched(suites.scripts.as_ref(), goals);
    many_callers(suites.redis.as_ref(), goals);
    lone_caller(suites.redis.as_ref(), goals);
    in_a_fleet(suites.fleet.as_ref(), goals);
    on_a_cluster(suites.cluster.as_ref(), goals);
    logs(suites.logs.as_ref(), goals);
}

fn service(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (protocol, target, min) in [("http", "≥ 0.6×", 0.6), ("grpc", "≥ 0.75×", 0.75)] {
        let ratio = results.and_then(|results| {
            results.ratio("per_second", (protocol, "tidegate"), (protocol, "no-op"))
        });
        let description = format!(
            "{} on Redis, exact log, random keys, compared with a no-op server",
            protocol_name(protocol)
        );
        goals.push(Goal::at_least(description, target, min, ratio));
    }
}

/// Returns the largest ratio of the CPU time to that of the naive script.
fn max_ratio(structure: Structure) -> (&'static str, f64) {
    match structure {
        Structure::LogPacked | Structure::CounterPacked => ("≤ 1.0×", 1.0),
        Structure::FixedWindow => ("≤ 1.9×", 1.9),
        _ => ("≤ 1.1×", 1.1),
    }
}

fn one_per_call(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for structure in Structure::ALL {
        let case = structure.name();
        let ratio = results.and_then(|results| {
            results.ratio("redis_micros", (case, scripts::OURS), (case, scripts::NAIVE))
        });
        let (target, max) = max_ratio(structure);
        let description =
            format!("Redis CPU, one decision per call, compared with a naive script: {case}");
        goals.push(Goal::at_most(description, target, max, ratio));
        let denied = scripts::denied_case(structure, "random");
        let Some(published) = structure.published() else { continue };
        for (shown, case) in [("…", case), ("… denied,", denied.as_str())] {
            let ratio = results.and_then(|results| {
                results.ratio("redis_micros", (case, scripts::OURS), (case, scripts::PUBLISHED))
            });
            let description = format!(
                "{shown} compared with a script of ours after the documented behaviour of {}",
                published.library
            );
            goals.push(Goal::at_most(description, "≤ 1.0×", 1.0, ratio));
        }
    }
}

/// Calls with 64 decisions, sent without the library.
fn batched(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for structure in Structure::ALL {
        let case = structure.name();
        let ratio = results.and_then(|results| {
            results.ratio("per_second", (case, scripts::OURS_64), (case, scripts::NAIVE))
        });
        let description = format!(
            "decisions per second, 64 per call, random keys, compared with a naive script: {case}"
        );
        goals.push(Goal::at_least(description, "≥ 2.5×", 2.5, ratio));
    }
}

/// Callers of the library on one connection.
fn many_callers(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let best = |case: &str| {
        let rows =
            results?.rows().iter().filter(|row| row.case == case && row.metric == "per_second");
        let ratios = rows.filter_map(|row| {
            let ratio = results?.ratio("per_second", (case, &row.candidate), decisions::NAIVE)?;
            Some((row.candidate.clone(), ratio))
        });
        ratios.max_by(|one, other| one.1.median.total_cmp(&other.1.median))
    };
    let mut goal = |description: &str, target: &'static str, min: f64, case: &str| {
        let best = best(case);
        let calls = |candidate: &str| {
            results?.spread(case, candidate, "redis_calls").map(|calls| calls.median)
        };
        let measured = best.as_ref().map_or(NOT_MEASURED.to_owned(), |(candidate, ratio)| {
            format!(
                "{ratio}, {:.4} calls per decision ({candidate})",
                calls(candidate).unwrap_or(f64::NAN)
            )
        });
        let no_calls = |candidate: &str| {
            case != "denied/512" || calls(candidate).is_some_and(|calls| calls < 0.001)
        };
        let met = best.map(|(candidate, ratio)| ratio.median >= min && no_calls(&candidate));
        goals.push(Goal { description: description.to_owned(), target, measured, met });
    };
    goal(
        "Redis through the library, random keys, 64 callers, exact packed log, compared with the \
         naive script",
        "≥ 2.5×",
        2.5,
        "random/64",
    );
    goal("… 512 callers", "≥ 2.5×", 2.5, "random/512");
    goal("… one hot key", "≥ 5×", 5.0, "hot/512");
    goal("… hot key denied", "0 calls, ≥ 10×", 10.0, "denied/512");
}

fn lone_caller(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let ratio = results.and_then(|results| {
        results.ratio("median_micros", (lone::CASE, lone::LIBRARY), (lone::CASE, lone::BARE))
    });
    goals.push(Goal::at_most(
        "Redis, a lone caller: p50 compared with the bare call of the script",
        "≤ 1.05×",
        1.05,
        ratio,
    ));
}

fn in_a_fleet(results: Option<&Results>, goals: &mut Vec<Goal>) {
    for (callers, target, min) in
        [(fleet::CALLERS[0], "≥ 1.0×, exact", 1.0), (fleet::CALLERS[1], "≥ 1.5×, exact", 1.5)]
    {
        for structure in fleet::STRUCTURES {
            let case = fleet::case_name(structure, callers);
            let ratio = results.and_then(|results| {
                results.ratio("per_second", (&case, fleet::OURS), (&case, fleet::NAIVE))
            });
            let wrong = results.and_then(|results| {
                results.spread(&case, fleet::OURS, "wrong_answers").map(|wrong| wrong.max)
            });
            let description = format!(
                "a fleet of {} instances with {callers} callers each, {}, compared with the naive \
                 script",
                fleet::INSTANCES,
                structure.name()
            );
            let mut goal = Goal::at_least(description, target, min, ratio);
            if let Some(wrong) = wrong {
                goal.measured = format!("{}, {wrong:.0} wrong answers", goal.measured);
                goal.met = goal.met.map(|met| met && wrong == 0.0);
            }
            goals.push(goal);
        }
    }
}

fn on_a_cluster(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let (ours, single) = ((cluster::CASE, cluster::CLUSTER), (cluster::CASE, cluster::SINGLE));
    let calls = results.and_then(|results| results.spread(ours.0, ours.1, "redis_calls"));
    goals.push(Goal {
        description: "a cluster of three nodes, 512 callers: calls per decision".to_owned(),
        target: "≤ 0.1",
        measured: calls.map_or(NOT_MEASURED.to_owned(), |calls| {
            format!("{:.3} ({:.3}–{:.3})", calls.median, calls.min, calls.max)
        }),
        met: calls.map(|calls| calls.median <= 0.1),
    });
    let ratio = results.and_then(|results| results.ratio("redis_micros", ours, single));
    goals.push(Goal::at_most("… Redis CPU, compared with one server", "≤ 1.3×", 1.3, ratio));
}

fn logs(results: Option<&Results>, goals: &mut Vec<Goal>) {
    let share = results
        .and_then(|results| results.ratio("bytes", ("1000", "packed"), ("1000", "sorted-set")));
    goals.push(Goal {
        description: "memory of a packed exact log, compared with a sorted set, L = 1,000"
            .to_owned(),
        target: "≤ 1/15",
        measured: share
            .map_or(NOT_MEASURED.to_owned(), |share| format!("1/{:.0}", 1.0 / share.median)),
        met: share.map(|share| share.median <= 1.0 / 15.0),
    });
}
