//! Comparison with the naive scripts: per algorithm and encoding, in a fleet, and on a cluster.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::chart::{Bar, Chart, Panel, figures};
use super::{NOT_MEASURED, Page, SuiteResults, thousands};
use crate::redis::naive::Structure;
use crate::redis::{cluster, fleet, scripts};

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if let Some(results) = &suites.scripts {
        write_scripts(page, results);
    }
    if let Some(results) = &suites.fleet {
        write_fleet(page, results);
    }
    if let Some(results) = &suites.cluster {
        write_cluster(page, results);
    }
}

fn median(spread: Option<Spread>) -> String {
    spread.map_or(NOT_MEASURED.to_owned(), |spread| figures(spread.median))
}

fn ratio(spread: Option<Spread>) -> String {
    spread.map_or(NOT_MEASURED.to_owned(), |spread| spread.to_string())
}

fn write_scripts(page: &mut Page, results: &Results) {
    page.heading("Scripts on Redis, compared with naive and published ones");
    page.paragraph(
        "A naive script is the short one that a team would write itself: one algorithm, one \
         decision per call (`bench/src/redis/naive`). The calls of Tidegate are those that the \
         library sends, recorded with `MONITOR`. A load generator with 50 connections sends both, \
         for random users of 100,000 whose keys exist. P is the number of calls that each \
         connection has in flight; calls with 16 and 64 decisions have P = 1.",
    );
    page.paragraph(
        "The CPU time is that of Redis, from `INFO cpu`, per decision. It includes the reading and \
         writing of the connection, which is most of the cost at P = 1. A fixed window of Tidegate \
         stores its window and answers when it ends, which an `INCR` does not. There is no naive \
         script for a packed counter, so it is compared with the hash.",
    );
    page.paragraph(
        "The naive scripts are not the best known ones, so ratios to them alone would flatter. \
         Published algorithms are scripts of ours after the documented behaviour of other \
         libraries (`bench/src/redis/published`), not their code: both counters are compared with \
         the sliding window of `@upstash/ratelimit`, the fixed window with the counter of \
         `rate-limiter-flexible`, and the token bucket with the GCRA of `redis_rate`. The first \
         trusts the time of the client, the second leaves the comparison to it, and the third \
         computes in floating point. They too are called as they are documented, with one decision \
         per call.",
    );
    page.line("Redis CPU µs per decision:");
    let candidates = [
        scripts::NAIVE_ONE,
        scripts::OURS_ONE,
        scripts::NAIVE,
        scripts::PUBLISHED,
        scripts::OURS,
        scripts::OURS_16,
        scripts::OURS_64,
    ];
    let measured = |structure: &&Structure| {
        results.rounds(structure.name(), scripts::OURS, "redis_micros").is_some()
    };
    let structures: Vec<&Structure> = Structure::ALL.iter().filter(measured).collect();
    let rows: Vec<Vec<String>> = structures
        .iter()
        .map(|structure| {
            let case = structure.name();
            let cells = candidates.map(|name| median(results.spread(case, name, "redis_micros")));
            let compared = [scripts::NAIVE, scripts::PUBLISHED].map(|other| {
                ratio(results.ratio("redis_micros", (case, scripts::OURS), (case, other)))
            });
            [case.to_owned()].into_iter().chain(cells).chain(compared).collect()
        })
        .collect();
    let heads = ["", "naive, P = 1", "1 per call, P = 1", "naive, P = 16", "published, P = 16"];
    let more = ["1 per call, P = 16", "16 per call", "64 per call"];
    let ratios = ["1 per call / naive, P = 16", "1 per call / published, P = 16"];
    page.table(&[heads.as_slice(), &more, &ratios].concat(), &rows);

    page.line("Decisions per second, with the generator on one core and Redis on the other:");
    let rows: Vec<Vec<String>> = structures
        .iter()
        .map(|structure| {
            let case = structure.name();
            let rate = |name: &str| {
                let rate = results.spread(case, name, "per_second");
                rate.map_or(NOT_MEASURED.to_owned(), |rate| thousands(rate.median))
            };
            let compared = |name: &str| {
                ratio(results.ratio("per_second", (case, name), (case, scripts::NAIVE)))
            };
            let rates = [
                scripts::NAIVE_ONE,
                scripts::NAIVE,
                scripts::PUBLISHED,
                scripts::OURS,
                scripts::OURS_64,
            ];
            [case.to_owned()]
                .into_iter()
                .chain(rates.map(rate))
                .chain([
                    compared(scripts::PUBLISHED),
                    compared(scripts::OURS),
                    compared(scripts::OURS_64),
                    per_call(results, case),
                ])
                .collect()
        })
        .collect();
    let heads = ["", "naive, P = 1", "naive, P = 16", "published, P = 16", "1 per call, P = 16"];
    let more = ["64 per call", "published / naive", "1 per call / naive", "64 per call / naive"];
    page.table(&[heads.as_slice(), &more, &["decisions in the largest call"]].concat(), &rows);

    bytes(page, results, &structures);
    let panels = structures.iter().map(|structure| {
        let bar = |name: &&str| {
            let value = results.spread(structure.name(), name, "redis_micros")?;
            let ours = name.starts_with("tidegate");
            Some(Bar { label: (*name).to_owned(), value, ours })
        };
        let [naive, published, ours] = scripts::SINGLE;
        let bars = [naive, published, ours, scripts::OURS_16, scripts::OURS_64];
        Panel { title: structure.name().to_owned(), bars: bars.iter().filter_map(bar).collect() }
    });
    let title = "Redis CPU µs per decision (lower is better)".to_owned();
    page.chart("scripts", &Chart { title, panels: panels.collect() });
}

fn bytes(page: &mut Page, results: &Results, structures: &[&Structure]) {
    page.line("Bytes of a user's keys in Redis (`MEMORY USAGE`) after one decision:");
    let rows: Vec<Vec<String>> = structures
        .iter()
        .map(|structure| {
            let bytes = scripts::SINGLE
                .map(|name| median(results.spread(structure.name(), name, "redis_bytes")));
            [structure.name().to_owned()].into_iter().chain(bytes).collect()
        })
        .collect();
    page.table(&["", "naive", "published", "tidegate"], &rows);
}

/// Returns the number of decisions in the call that was recorded with 64 callers.
fn per_call(results: &Results, case: &str) -> String {
    let calls = results.spread(case, scripts::OURS_64, "redis_calls");
    calls.map_or(NOT_MEASURED.to_owned(), |calls| format!("{:.0}", 1.0 / calls.median))
}

fn write_fleet(page: &mut Page, results: &Results) {
    page.heading("A fleet on one Redis");
    page.paragraph(&format!(
        "{} instances with a connection each, and with few or many callers each, on one Redis; \
         each caller waits for its decision before the next request. The naive clients are the \
         multiplexed connections of the crate `redis`, with as many callers. The instances run in \
         one process per core, on the same cores as Redis. Users are random ones of a million; one \
         in 64 requests is for one of four users that all instances share, and whose limit is \
         reached. Answers are wrong if those users get more or less than their limit, or if \
         another user is denied.",
        fleet::INSTANCES
    ));
    let mut rows = Vec::new();
    let mut panels = Vec::new();
    for structure in fleet::STRUCTURES {
        for callers in fleet::CALLERS {
            let case = fleet::case_name(structure, callers);
            let title = format!("{}, {callers} callers each", structure.name());
            let mut bars = Vec::new();
            for candidate in [fleet::NAIVE, fleet::OURS] {
                let of = |metric: &str| results.spread(&case, candidate, metric);
                let Some(rate) = of("per_second") else { continue };
                let compared = results
                    .ratio("per_second", (&case, candidate), (&case, fleet::NAIVE))
                    .filter(|_| candidate != fleet::NAIVE);
                let wrong = of("wrong_answers")
                    .map_or(NOT_MEASURED.to_owned(), |wrong| thousands(wrong.max));
                rows.push(vec![
                    title.clone(),
                    candidate.to_owned(),
                    thousands(rate.median),
                    ratio(compared),
                    median(of("redis_micros")),
                    of("redis_calls")
                        .map_or(NOT_MEASURED.to_owned(), |calls| format!("{:.3}", calls.median)),
                    median(of("client_micros")),
                    wrong,
                ]);
                bars.push(Bar {
                    label: candidate.to_owned(),
                    value: rate,
                    ours: candidate == fleet::OURS,
                });
            }
            panels.push(Panel { title, bars });
        }
    }
    let heads = [
        "",
        "",
        "decisions per second",
        "ratio to the naive script",
        "Redis CPU µs per decision",
        "calls per decision",
        "client CPU µs per decision",
        "wrong answers, at most",
    ];
    page.table(&heads, &rows);
    let title =
        format!("Decisions per second of {} instances (higher is better)", fleet::INSTANCES);
    page.chart("fleet", &Chart { title, panels });
}

fn write_cluster(page: &mut Page, results: &Results) {
    page.heading("A cluster");
    page.paragraph(
        "512 callers of one instance with random keys of a million, an exact packed log, on one \
         server and on a cluster of three primaries. The CPU time and the calls are the sums over \
         the nodes. All nodes and the callers share the two cores, so that only the CPU time and \
         the calls are comparable.",
    );
    let rows: Vec<Vec<String>> = [cluster::SINGLE, cluster::CLUSTER]
        .into_iter()
        .map(|deployment| {
            let of = |metric: &str| results.spread(cluster::CASE, deployment, metric);
            let calls = of("redis_calls");
            let compared = results.ratio(
                "redis_micros",
                (cluster::CASE, deployment),
                (cluster::CASE, cluster::SINGLE),
            );
            vec![
                deployment.to_owned(),
                of("per_second").map_or(NOT_MEASURED.to_owned(), |rate| thousands(rate.median)),
                calls.map_or(NOT_MEASURED.to_owned(), |calls| format!("{:.3}", calls.median)),
                median(of("redis_micros")),
                ratio(compared.filter(|_| deployment != cluster::SINGLE)),
            ]
        })
        .collect();
    let heads = [
        "",
        "decisions per second",
        "calls per decision",
        "Redis CPU µs per decision",
        "CPU, ratio to one server",
    ];
    page.table(&heads, &rows);
}
