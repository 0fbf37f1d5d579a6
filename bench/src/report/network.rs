//! Network section: HTTP and gRPC, on memory and on Redis.

use tidegate_bench::results::Results;

use super::chart::{Bar, Chart, Panel, figures};
use super::goals::protocol_name;
use super::{NOT_MEASURED, Page, SuiteResults, thousands};

const CANDIDATES: [&str; 4] = ["tidegate", "no-op", "no-op hyper", "throttlecrab"];

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if let Some(results) = &suites.http {
        page.heading("HTTP and gRPC on memory");
        page.paragraph(
            "`wrk` with 64 connections and `h2load` with 8 connections of 32 streams run on the \
             same cores as the server. The no-op servers are axum and tonic with a fixed answer, \
             and hyper alone. The CPU time is that of the server only.",
        );
        table(page, results);
        page.chart("http", &chart("Requests per second on memory (higher is better)", results));
    }
    if let Some(results) = &suites.service {
        page.heading("The service on Redis");
        page.paragraph(
            "`tidegate serve` with an exact log (`encoding: packed`, 100 per minute) and a random \
             key of a million in each request; clients, service and Redis share the same cores. \
             The HTTP client is `wrk`; the gRPC client is part of this benchmark and sends like \
             `h2load`, but with random keys.",
        );
        table(page, results);
        for protocol in ["http", "grpc"] {
            let of = |metric: &str| {
                results
                    .spread(protocol, "tidegate", metric)
                    .map_or(f64::NAN, |spread| spread.median)
            };
            page.line(&format!(
                "- {}: {:.1} µs of Redis CPU time and {:.3} script calls per decision.",
                protocol_name(protocol),
                of("redis_micros"),
                of("redis_calls")
            ));
        }
        page.chart("service", &chart("Requests per second on Redis (higher is better)", results));
    }
}

fn table(page: &mut Page, results: &Results) {
    let cases = ["http", "grpc"].map(|protocol| (protocol, protocol_name(protocol).to_owned()));
    rate_table(page, results, &cases, &CANDIDATES);
}

/// Writes a table of rates: for each case, by its name in the results and on the page, the
/// candidates that were measured.
pub(super) fn rate_table(
    page: &mut Page,
    results: &Results,
    cases: &[(impl AsRef<str>, String)],
    candidates: &[&str],
) {
    let mut rows = Vec::new();
    for (case, shown) in cases {
        let case = case.as_ref();
        for &candidate in candidates {
            let Some(rate) = results.spread(case, candidate, "per_second") else { continue };
            let micros = results.spread(case, candidate, "cpu_micros");
            let ratio = results.ratio("per_second", (case, "tidegate"), (case, candidate));
            rows.push(vec![
                shown.clone(),
                candidate.to_owned(),
                thousands(rate.median),
                format!("{}–{}", thousands(rate.min), thousands(rate.max)),
                micros.map_or(NOT_MEASURED.to_owned(), |micros| figures(micros.median)),
                ratio
                    .filter(|_| candidate != "tidegate")
                    .map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()),
            ]);
        }
    }
    page.table(
        &["", "", "requests per second", "spread", "CPU µs per request", "ratio of tidegate to it"],
        &rows,
    );
}

fn chart(title: &str, results: &Results) -> Chart {
    let panel = |protocol: &str| {
        let bar = |candidate: &&str| {
            let value = results.spread(protocol, candidate, "per_second")?;
            Some(Bar { label: (*candidate).to_owned(), value, ours: *candidate == "tidegate" })
        };
        Panel {
            title: protocol_name(protocol).to_owned(),
            bars: CANDIDATES.iter().filter_map(bar).collect(),
        }
    };
    Chart { title: title.to_owned(), panels: ["http", "grpc"].map(panel).into() }
}
