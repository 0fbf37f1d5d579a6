//! Redis section: decisions through the library, and the memory of a log.

use tidegate_bench::results::Results;

use super::chart::{Bar, Chart, Panel, figures};
use super::{NOT_MEASURED, Page, SuiteResults, abbreviate, thousands};
use crate::redis::decisions::NAIVE;
use crate::redis::logs::LIMITS;
use crate::redis::lone;

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if let Some(results) = &suites.redis {
        decisions(page, results);
    }
    if let Some(results) = &suites.logs {
        logs(page, results);
    }
}

/// Describes a case such as `random/512`.
fn describe(case: &str) -> String {
    let (keys, callers) = case.split_once('/').unwrap_or((case, ""));
    let keys = match keys {
        "random" => "random keys",
        "hot" => "one hot key",
        "denied" => "one hot key, denied",
        _ => return "one decision per call, random keys".to_owned(),
    };
    format!("{keys}, {callers} caller{}", if callers == "1" { "" } else { "s" })
}

fn decisions(page: &mut Page, results: &Results) {
    page.heading("Decisions on Redis");
    page.paragraph(
        "An exact log with `encoding: packed`: L = 100 per minute for random keys of a million, a \
         log that never fills for the hot key, and a full log for denials. The naive script is \
         that of a packed log, sent by the generator of the section above with P = 16. The callers \
         share one connection and one core; Redis uses the other core. The CPU time of Redis is \
         from `INFO cpu`, its calls are from `INFO commandstats`.",
    );
    let rates: Vec<_> = results.rows().iter().filter(|row| row.metric == "per_second").collect();
    let mut rates: Vec<(&str, &str)> =
        rates.iter().map(|row| (row.case.as_str(), row.candidate.as_str())).collect();
    // The naive script first, then by keys, then by the number of callers.
    let order = [NAIVE.0, "random", "hot", "denied"];
    rates.sort_by_key(|(case, _)| {
        let (keys, callers) = case.split_once('/').unwrap_or((case, "0"));
        (order.iter().position(|one| *one == keys), callers.parse::<usize>().unwrap_or_default())
    });
    let mut rows = Vec::new();
    let panel = |title: &str| Panel { title: title.to_owned(), bars: Vec::new() };
    let mut panels = vec![
        ("random", panel("random keys")),
        ("hot", panel("one hot key")),
        ("denied", panel("one hot key, denied")),
    ];
    for (case, candidate) in rates {
        let Some(rate) = results.spread(case, candidate, "per_second") else { continue };
        let of = |metric: &str| results.spread(case, candidate, metric);
        let micros = |metric: &str| {
            of(metric).map_or(NOT_MEASURED.to_owned(), |spread| figures(spread.median))
        };
        let ratio =
            results.ratio("per_second", (case, candidate), NAIVE).filter(|_| candidate != NAIVE.1);
        rows.push(vec![
            candidate.to_owned(),
            describe(case),
            thousands(rate.median),
            ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()),
            micros("median_micros"),
            micros("p99_micros"),
            of("redis_micros")
                .map_or(NOT_MEASURED.to_owned(), |spread| format!("{:.2}", spread.median)),
            of("redis_calls")
                .map_or(NOT_MEASURED.to_owned(), |spread| format!("{:.3}", spread.median)),
        ]);
        let (keys, callers) = case.split_once('/').unwrap_or((case, ""));
        if candidate == NAIVE.1 {
            // The naive script is shown in each panel.
            for (_, panel) in &mut panels {
                panel.bars.push(Bar {
                    label: format!("{candidate}, random keys"),
                    value: rate,
                    ours: false,
                });
            }
        } else if let Some((_, panel)) = panels.iter_mut().find(|(kind, _)| *kind == keys) {
            panel.bars.push(Bar {
                label: format!("{candidate}, {callers}"),
                value: rate,
                ours: true,
            });
        }
    }
    let heads = [
        "",
        "",
        "decisions per second",
        "ratio to the naive script",
        "p50 µs",
        "p99 µs",
        "Redis CPU µs per decision",
        "calls per decision",
    ];
    page.table(&heads, &rows);
    let title =
        "Decisions per second on one Redis, by number of callers (higher is better)".to_owned();
    page.chart(
        "redis",
        &Chart { title, panels: panels.into_iter().map(|(_, panel)| panel).collect() },
    );
    lone_caller(page, results);
}

fn lone_caller(page: &mut Page, results: &Results) {
    page.paragraph(
        "A lone caller, one decision at a time: through the library, and as bare calls on the same \
         kind of connection. The three alternate every 50 calls.",
    );
    let row = |candidate: &str| {
        let median = results.spread(lone::CASE, candidate, "median_micros");
        let ratio = results
            .ratio("median_micros", (lone::CASE, candidate), (lone::CASE, lone::BARE))
            .filter(|_| candidate != lone::BARE);
        vec![
            candidate.to_owned(),
            median.map_or(NOT_MEASURED.to_owned(), |median| figures(median.median)),
            ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()),
        ]
    };
    let rows = [lone::LIBRARY, lone::BARE, lone::BARE_NAIVE].map(row);
    page.table(&["", "p50 µs", "ratio to the bare call of tidegate's script"], &rows);
}

fn logs(page: &mut Page, results: &Results) {
    page.heading("Memory of an exact log in Redis");
    page.line("`MEMORY USAGE` of one key whose log is full:");
    let mut rows = Vec::new();
    let mut panels = Vec::new();
    for limit in LIMITS {
        let case = limit.to_string();
        let bytes = |encoding: &str| results.spread(&case, encoding, "bytes");
        let (Some(packed), Some(sorted_set)) = (bytes("packed"), bytes("sorted-set")) else {
            continue;
        };
        let share = format!("1/{:.0}", sorted_set.median / packed.median);
        rows.push(vec![
            thousands(limit as f64),
            thousands(packed.median),
            thousands(sorted_set.median),
            share,
        ]);
        let bar = |label: &str, value, ours| Bar { label: label.to_owned(), value, ours };
        panels.push(Panel {
            title: format!("L = {}", abbreviate(usize::try_from(limit).unwrap_or_default())),
            bars: vec![bar("packed", packed, true), bar("sorted-set", sorted_set, false)],
        });
    }
    page.table(&["L", "packed", "sorted set", "packed / sorted set"], &rows);
    page.chart(
        "logs",
        &Chart { title: "Bytes of an exact log (lower is better)".to_owned(), panels },
    );
}
