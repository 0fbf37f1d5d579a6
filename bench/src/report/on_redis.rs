//! On Redis: decisions through the library, and what a log takes.

use tidegate_bench::results::Results;

use super::chart::{Bar, Chart, Panel, figures};
use super::{Found, NONE, Page, short, thousands};
use crate::redis::decisions::CEILING;
use crate::redis::logs::LIMITS;

pub(super) fn write(page: &mut Page, found: &Found) {
    if let Some(results) = &found.redis {
        decisions(page, results);
    }
    if let Some(results) = &found.logs {
        logs(page, results);
    }
}

/// `random/512` in words.
fn words(case: &str) -> String {
    let (what, callers) = case.split_once('/').unwrap_or((case, ""));
    let what = match what {
        "random" => "random keys",
        "hot" => "one hot key",
        "denied" => "one hot key, denied",
        _ => return "one decision a call, random keys".to_owned(),
    };
    format!("{what}, {callers} caller{}", if callers == "1" { "" } else { "s" })
}

fn decisions(page: &mut Page, results: &Results) {
    page.heading("Decisions on Redis");
    page.line(
        "An exact log, `encoding: packed`, L = 100 a minute for random keys of a million; a log that never fills for the hot key, and a full one for the denied. \
         The ceiling is `redis-benchmark -c 50 -P 16` with the very script and arguments that the library sends for one decision. \
         The callers share one connection and one core; Redis has the other. Redis's time is from its `INFO cpu`, its calls from `INFO commandstats`.",
    );
    let rates: Vec<_> = results.rows().iter().filter(|row| row.metric == "per_second").collect();
    let mut rates: Vec<(&str, &str)> =
        rates.iter().map(|row| (row.case.as_str(), row.contestant.as_str())).collect();
    // The ceiling first, then by what is asked, then by how many ask.
    let order = ["ceiling", "random", "hot", "denied"];
    rates.sort_by_key(|(case, _)| {
        let (what, callers) = case.split_once('/').unwrap_or((case, "0"));
        (order.iter().position(|one| *one == what), callers.parse::<usize>().unwrap_or_default())
    });
    let mut rows = Vec::new();
    let panel = |title: &str| Panel { title: title.to_owned(), bars: Vec::new() };
    let mut panels = vec![
        ("random", panel("random keys")),
        ("hot", panel("one hot key")),
        ("denied", panel("one hot key, denied")),
    ];
    for (case, who) in rates {
        let Some(rate) = results.spread(case, who, "per_second") else { continue };
        let of = |metric: &str| results.spread(case, who, metric);
        let micros =
            |metric: &str| of(metric).map_or(NONE.to_owned(), |spread| figures(spread.median));
        let ratio = results.ratio("per_second", (case, who), CEILING).filter(|_| who != CEILING.1);
        rows.push(vec![
            who.to_owned(),
            words(case),
            thousands(rate.median),
            ratio.map_or(NONE.to_owned(), |ratio| ratio.to_string()),
            micros("median_micros"),
            micros("p99_micros"),
            of("redis_micros").map_or(NONE.to_owned(), |spread| format!("{:.2}", spread.median)),
            of("redis_calls").map_or(NONE.to_owned(), |spread| format!("{:.3}", spread.median)),
        ]);
        let (what, callers) = case.split_once('/').unwrap_or((case, ""));
        if who == CEILING.1 {
            // Beside each of them.
            for (_, panel) in &mut panels {
                panel.bars.push(Bar {
                    label: format!("{who}, random keys"),
                    value: rate,
                    ours: false,
                });
            }
        } else if let Some((_, panel)) = panels.iter_mut().find(|(kind, _)| *kind == what) {
            panel.bars.push(Bar { label: format!("{who}, {callers}"), value: rate, ours: true });
        }
    }
    let heads = [
        "",
        "",
        "decisions a second",
        "of the ceiling",
        "p50 µs",
        "p99 µs",
        "Redis's µs a decision",
        "calls a decision",
    ];
    page.table(&heads, &rows);
    let title =
        "Decisions a second on one Redis, by how many ask at a time (more is better)".to_owned();
    page.chart(
        "redis",
        &Chart { title, panels: panels.into_iter().map(|(_, panel)| panel).collect() },
    );
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
            title: format!("L = {}", short(usize::try_from(limit).unwrap_or_default())),
            bars: vec![bar("packed", packed, true), bar("sorted-set", sorted_set, false)],
        });
    }
    page.table(&["L", "packed", "sorted set", "packed of sorted set"], &rows);
    page.chart(
        "logs",
        &Chart { title: "Bytes of an exact log (less is better)".to_owned(), panels },
    );
}
