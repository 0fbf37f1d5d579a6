//! Over HTTP and gRPC, on memory and on Redis.

use tidegate_bench::results::Results;

use super::chart::{Bar, Chart, Panel, figures};
use super::goals::name_of;
use super::{Found, NONE, Page, thousands};

const CONTESTANTS: [&str; 3] = ["tidegate", "do-nothing", "throttlecrab"];

pub(super) fn write(page: &mut Page, found: &Found) {
    if let Some(results) = &found.http {
        page.heading("Over HTTP and gRPC, on memory");
        page.line(
            "`wrk` with 64 connections, `h2load` with 8 connections of 32 streams, on the same cores as the server. The do-nothing servers are \
             axum and tonic with a fixed answer. Processor time is the server's alone, for one request.",
        );
        table(page, results);
        page.chart("http", &chart("Requests a second, on memory (more is better)", results));
    }
    if let Some(results) = &found.service {
        page.heading("The service on Redis");
        page.line(
            "`tidegate serve` with an exact log (`encoding: packed`, 100 a minute), a random key of a million each time; clients, service and Redis on the same cores. \
             HTTP by `wrk`, gRPC by a client of our own that sends as `h2load` does, but a random key each time.",
        );
        table(page, results);
        for protocol in ["http", "grpc"] {
            let of = |metric: &str| {
                results
                    .spread(protocol, "tidegate", metric)
                    .map_or(f64::NAN, |spread| spread.median)
            };
            page.line(&format!(
                "- {}: {:.1} µs of Redis's processor time and {:.3} script calls a decision.",
                name_of(protocol),
                of("redis_micros"),
                of("redis_calls")
            ));
        }
        page.chart("service", &chart("Requests a second, on Redis (more is better)", results));
    }
}

fn table(page: &mut Page, results: &Results) {
    let mut rows = Vec::new();
    for protocol in ["http", "grpc"] {
        for who in CONTESTANTS {
            let Some(rate) = results.spread(protocol, who, "per_second") else { continue };
            let micros = results.spread(protocol, who, "processor_micros");
            let ratio = results.ratio("per_second", (protocol, "tidegate"), (protocol, who));
            rows.push(vec![
                name_of(protocol).to_owned(),
                who.to_owned(),
                thousands(rate.median),
                format!("{}–{}", thousands(rate.least), thousands(rate.most)),
                micros.map_or(NONE.to_owned(), |micros| figures(micros.median)),
                ratio
                    .filter(|_| who != "tidegate")
                    .map_or(NONE.to_owned(), |ratio| ratio.to_string()),
            ]);
        }
    }
    page.table(
        &[
            "",
            "",
            "requests a second",
            "spread",
            "µs of the processor",
            "tidegate's rate over this",
        ],
        &rows,
    );
}

fn chart(title: &str, results: &Results) -> Chart {
    let panel = |protocol: &str| {
        let bar = |who: &&str| {
            let value = results.spread(protocol, who, "per_second")?;
            Some(Bar { label: (*who).to_owned(), value, ours: *who == "tidegate" })
        };
        Panel {
            title: name_of(protocol).to_owned(),
            bars: CONTESTANTS.iter().filter_map(bar).collect(),
        }
    };
    Chart { title: title.to_owned(), panels: ["http", "grpc"].map(panel).into() }
}
