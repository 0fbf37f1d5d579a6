//! In process: nanoseconds a decision, bytes a key, and how both grow.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::chart::{Bar, Chart, Panel, figures};
use super::{Found, NONE, Page, short};

const CONTESTANTS: [&str; 4] = ["tidegate", "governor", "throttlecrab", "limitador"];
const KEYS: [usize; 4] = [1, 10_000, 1_000_000, 10_000_000];
const GROWTH_KEYS: [usize; 5] = [1_000, 10_000, 100_000, 1_000_000, 10_000_000];
const GROWTH_LIMITS: [usize; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];
const ALGORITHMS: [&str; 5] =
    ["sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket"];

pub(super) fn write(page: &mut Page, found: &Found) {
    if let Some(results) = &found.in_process {
        page.heading("In process");
        page.line(
            "Token bucket for all (GCRA in governor and throttlecrab); limitador has the fixed window. Keys such as \
             `user:00001234`; every store holds them all before it is asked. Zipf has exponent 1. With two threads the time is from one decision to the \
             next, whichever thread makes it. throttlecrab's limiter is behind a mutex for two threads, and without one for one.",
        );
        page.chart("in-process", &decisions_chart(results));
        decisions(page, results);
        bytes(page, results);
    }
    if let Some(results) = &found.growth {
        growth(page, results);
    }
}

fn decisions(page: &mut Page, results: &Results) {
    page.line("\nNanoseconds a decision, the median of the rounds:");
    let mut rows = Vec::new();
    for keys in KEYS {
        for threads in [1, 2] {
            for outcome in ["allowed", "denied"] {
                for walk in ["uniform", "zipf"] {
                    let case = format!("{keys}/{threads}/{outcome}/{walk}");
                    if results.rounds(&case, "tidegate", "ns").is_none() {
                        continue;
                    }
                    let mut row =
                        vec![short(keys), threads.to_string(), outcome.to_owned(), walk.to_owned()];
                    let ns = |who: &str| {
                        results.spread(&case, who, "ns").map(|spread| figures(spread.median))
                    };
                    row.extend(
                        CONTESTANTS
                            .iter()
                            .chain(&["the loop alone"])
                            .map(|who| ns(who).unwrap_or(NONE.to_owned())),
                    );
                    let ratio = results.ratio("ns", (&case, "governor"), (&case, "tidegate"));
                    row.push(ratio.map_or(NONE.to_owned(), |ratio| ratio.to_string()));
                    rows.push(row);
                }
            }
        }
    }
    let heads = [
        "keys",
        "threads",
        "outcome",
        "walk",
        "tidegate",
        "governor",
        "throttlecrab",
        "limitador",
        "the loop alone",
        "faster than governor",
    ];
    page.table(&heads, &rows);
}

fn decisions_chart(results: &Results) -> Chart {
    let panels = KEYS.iter().filter_map(|&keys| {
        let case = format!("{keys}/1/allowed/uniform");
        let bar = |who: &&str| {
            let value = results.spread(&case, who, "ns")?;
            Some(Bar { label: (*who).to_owned(), value, ours: *who == "tidegate" })
        };
        let bars: Vec<Bar> = CONTESTANTS.iter().filter_map(bar).collect();
        let title = format!("{} key{}", short(keys), if keys == 1 { "" } else { "s" });
        (!bars.is_empty()).then_some(Panel { title, bars })
    });
    Chart {
        title: "Nanoseconds a decision (1 thread, allowed, uniform; less is better)".to_owned(),
        panels: panels.collect(),
    }
}

fn bytes(page: &mut Page, results: &Results) {
    page.line("\nBytes a key, as allocated, all that the store holds divided by its keys:");
    let sizes = KEYS.iter().filter(|&&keys| {
        keys > 1 && results.rounds(&keys.to_string(), "tidegate", "bytes").is_some()
    });
    let rows: Vec<Vec<String>> = sizes
        .map(|keys| {
            let bytes = |who: &&str| {
                let spread = results.spread(&keys.to_string(), who, "bytes");
                spread.map_or(NONE.to_owned(), |spread| figures(spread.median))
            };
            std::iter::once(short(*keys)).chain(CONTESTANTS.iter().map(bytes)).collect()
        })
        .collect();
    page.table(&["keys", "tidegate", "governor", "throttlecrab", "limitador"], &rows);
    for row in results.rows().iter().filter(|row| row.metric == "left_out_seconds") {
        let of = |metric: &str| {
            results
                .spread(&row.case, &row.contestant, metric)
                .map_or(f64::NAN, |spread| spread.median)
        };
        page.line(&format!(
            "{} is left out at {} keys: to fill it would take {:.0} s and {:.1} GB, by what a million took.",
            row.contestant,
            short(row.case.parse().unwrap_or_default()),
            of("left_out_seconds"),
            of("left_out_gigabytes")
        ));
    }
}

fn growth(page: &mut Page, results: &Results) {
    page.heading("How the cost grows");
    page.line(
        "Our memory store, nanoseconds a decision by the keys in it (one thread, allowed). In brackets: with as many keys in the store, but asked only for \
         1,000 of them, which stay in the cache. That is what more keys cost beside cache misses; the rest is the misses.",
    );
    let sizes: Vec<usize> =
        GROWTH_KEYS.into_iter().filter(|keys| has(results, &format!("keys/{keys}/any"))).collect();
    let ns = |case: &str, algorithm: &str| results.spread(case, algorithm, "ns");
    let text =
        |spread: Option<Spread>| spread.map_or(NONE.to_owned(), |spread| figures(spread.median));
    let rows: Vec<Vec<String>> = ALGORITHMS
        .iter()
        .map(|algorithm| {
            let cell = |keys: &usize| {
                let of = |which: &str| text(ns(&format!("keys/{keys}/{which}"), algorithm));
                format!("{} ({})", of("any"), of("few"))
            };
            std::iter::once((*algorithm).to_owned()).chain(sizes.iter().map(cell)).collect()
        })
        .collect();
    let heads: Vec<String> =
        std::iter::once("keys".to_owned()).chain(sizes.iter().map(|&keys| short(keys))).collect();
    page.table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
    let panels = ALGORITHMS.iter().map(|algorithm| {
        let bar = |keys: &usize| {
            let value = ns(&format!("keys/{keys}/any"), algorithm)?;
            Some(Bar { label: format!("{} keys", short(*keys)), value, ours: true })
        };
        Panel { title: (*algorithm).to_owned(), bars: sizes.iter().filter_map(bar).collect() }
    });
    let title = "Nanoseconds a decision by the keys in the store, cache misses and all".to_owned();
    page.chart("growth", &Chart { title, panels: panels.collect() });

    page.line("\nBy the limit, at the limit all the time (a log is full, and loses an entry with each that it gets), time driven by hand:");
    let limits: Vec<usize> =
        GROWTH_LIMITS.into_iter().filter(|limit| has(results, &format!("limit/{limit}"))).collect();
    let rows: Vec<Vec<String>> = ALGORITHMS
        .iter()
        .map(|algorithm| {
            let cell = |limit: &usize| text(ns(&format!("limit/{limit}"), algorithm));
            std::iter::once((*algorithm).to_owned()).chain(limits.iter().map(cell)).collect()
        })
        .collect();
    let heads: Vec<String> =
        std::iter::once("L".to_owned()).chain(limits.iter().map(|&limit| short(limit))).collect();
    page.table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
}

fn has(results: &Results, case: &str) -> bool {
    results.rows().iter().any(|row| row.case == case)
}
