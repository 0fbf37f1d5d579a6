//! In-process section: nanoseconds per decision, bytes per key, and how both grow.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::chart::{Bar, Chart, Panel, figures};
use super::{NOT_MEASURED, Page, SuiteResults, abbreviate};

const CANDIDATES: [&str; 4] = ["tidegate", "governor", "throttlecrab", "limitador"];
const KEYS: [usize; 4] = [1, 10_000, 1_000_000, 10_000_000];
const GROWTH_KEYS: [usize; 5] = [1_000, 10_000, 100_000, 1_000_000, 10_000_000];
const GROWTH_LIMITS: [usize; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];
const ALGORITHMS: [&str; 5] =
    ["sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket"];

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if let Some(results) = &suites.in_process {
        page.heading("In process");
        page.paragraph(
            "All libraries use a token bucket (governor and throttlecrab: GCRA), except limitador, \
             which uses fixed windows. Keys look like `user:00001234`; every store holds all keys \
             before the measurement. Zipf has exponent 1. With two threads, the time is from one \
             decision to the next, over both threads. throttlecrab's limiter is behind a mutex for \
             two threads, and without one for one thread.",
        );
        page.chart("in-process", &decisions_chart(results));
        decisions(page, results);
        bytes(page, results);
    }
    if let Some(results) = &suites.growth {
        growth(page, results);
    }
}

fn decisions(page: &mut Page, results: &Results) {
    page.line("\nNanoseconds per decision, median of the rounds:");
    let mut rows = Vec::new();
    for keys in KEYS {
        for threads in [1, 2] {
            for outcome in ["allowed", "denied"] {
                for distribution in ["uniform", "zipf"] {
                    let case = format!("{keys}/{threads}/{outcome}/{distribution}");
                    if results.rounds(&case, "tidegate", "ns").is_none() {
                        continue;
                    }
                    let mut row = vec![
                        abbreviate(keys),
                        threads.to_string(),
                        outcome.to_owned(),
                        distribution.to_owned(),
                    ];
                    let ns = |candidate: &str| {
                        results.spread(&case, candidate, "ns").map(|spread| figures(spread.median))
                    };
                    row.extend(
                        CANDIDATES
                            .iter()
                            .chain(&["empty loop"])
                            .map(|candidate| ns(candidate).unwrap_or(NOT_MEASURED.to_owned())),
                    );
                    let ratio = results.ratio("ns", (&case, "governor"), (&case, "tidegate"));
                    row.push(ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()));
                    rows.push(row);
                }
            }
        }
    }
    let heads = [
        "keys",
        "threads",
        "outcome",
        "distribution",
        "tidegate",
        "governor",
        "throttlecrab",
        "limitador",
        "empty loop",
        "faster than governor",
    ];
    page.table(&heads, &rows);
}

fn decisions_chart(results: &Results) -> Chart {
    let panels = KEYS.iter().filter_map(|&keys| {
        let case = format!("{keys}/1/allowed/uniform");
        let bar = |candidate: &&str| {
            let value = results.spread(&case, candidate, "ns")?;
            Some(Bar { label: (*candidate).to_owned(), value, ours: *candidate == "tidegate" })
        };
        let bars: Vec<Bar> = CANDIDATES.iter().filter_map(bar).collect();
        let title = format!("{} key{}", abbreviate(keys), if keys == 1 { "" } else { "s" });
        (!bars.is_empty()).then_some(Panel { title, bars })
    });
    Chart {
        title: "Nanoseconds per decision (1 thread, allowed, uniform; lower is better)".to_owned(),
        panels: panels.collect(),
    }
}

fn bytes(page: &mut Page, results: &Results) {
    page.line(
        "\nAllocated bytes per key (all memory of the store, divided by the number of keys):",
    );
    let sizes = KEYS.iter().filter(|&&keys| {
        keys > 1 && results.rounds(&keys.to_string(), "tidegate", "bytes").is_some()
    });
    let rows: Vec<Vec<String>> = sizes
        .map(|keys| {
            let bytes = |candidate: &&str| {
                let spread = results.spread(&keys.to_string(), candidate, "bytes");
                spread.map_or(NOT_MEASURED.to_owned(), |spread| figures(spread.median))
            };
            std::iter::once(abbreviate(*keys)).chain(CANDIDATES.iter().map(bytes)).collect()
        })
        .collect();
    page.table(&["keys", "tidegate", "governor", "throttlecrab", "limitador"], &rows);
    for row in results.rows().iter().filter(|row| row.metric == "skipped_seconds") {
        let of = |metric: &str| {
            results
                .spread(&row.case, &row.candidate, metric)
                .map_or(f64::NAN, |spread| spread.median)
        };
        page.paragraph(&format!(
            "{} is skipped at {} keys: filling it would take {:.0} s and {:.1} GB, extrapolated \
             from a million keys.",
            row.candidate,
            abbreviate(row.case.parse().unwrap_or_default()),
            of("skipped_seconds"),
            of("skipped_gigabytes")
        ));
    }
}

fn growth(page: &mut Page, results: &Results) {
    page.heading("Cost growth");
    page.paragraph(
        "Nanoseconds per decision of Tidegate's memory store, by the number of keys in the store \
         (one thread, allowed). In parentheses: the same store, with decisions only for 1,000 of \
         its keys, which stay in the cache. That is the cost of more keys without cache misses; \
         the difference is the cost of the misses.",
    );
    let sizes: Vec<usize> =
        GROWTH_KEYS.into_iter().filter(|keys| has(results, &format!("keys/{keys}/all"))).collect();
    let ns = |case: &str, algorithm: &str| results.spread(case, algorithm, "ns");
    let text = |spread: Option<Spread>| {
        spread.map_or(NOT_MEASURED.to_owned(), |spread| figures(spread.median))
    };
    let rows: Vec<Vec<String>> = ALGORITHMS
        .iter()
        .map(|algorithm| {
            let cell = |keys: &usize| {
                let of = |which: &str| text(ns(&format!("keys/{keys}/{which}"), algorithm));
                format!("{} ({})", of("all"), of("cached"))
            };
            std::iter::once((*algorithm).to_owned()).chain(sizes.iter().map(cell)).collect()
        })
        .collect();
    let heads: Vec<String> = std::iter::once("keys".to_owned())
        .chain(sizes.iter().map(|&keys| abbreviate(keys)))
        .collect();
    page.table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
    let panels = ALGORITHMS.iter().map(|algorithm| {
        let bar = |keys: &usize| {
            let value = ns(&format!("keys/{keys}/all"), algorithm)?;
            Some(Bar { label: format!("{} keys", abbreviate(*keys)), value, ours: true })
        };
        Panel { title: (*algorithm).to_owned(), bars: sizes.iter().filter_map(bar).collect() }
    });
    let title = "Nanoseconds per decision by keys in the store, with cache misses".to_owned();
    page.chart("growth", &Chart { title, panels: panels.collect() });

    page.paragraph(
        "Nanoseconds per decision by the limit, in the steady state at the limit (a log is full, \
         and each new entry replaces an expired one), with a manual clock:",
    );
    let limits: Vec<usize> =
        GROWTH_LIMITS.into_iter().filter(|limit| has(results, &format!("limit/{limit}"))).collect();
    let rows: Vec<Vec<String>> = ALGORITHMS
        .iter()
        .map(|algorithm| {
            let cell = |limit: &usize| text(ns(&format!("limit/{limit}"), algorithm));
            std::iter::once((*algorithm).to_owned()).chain(limits.iter().map(cell)).collect()
        })
        .collect();
    let heads: Vec<String> = std::iter::once("L".to_owned())
        .chain(limits.iter().map(|&limit| abbreviate(limit)))
        .collect();
    page.table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
}

fn has(results: &Results, case: &str) -> bool {
    results.rows().iter().any(|row| row.case == case)
}
