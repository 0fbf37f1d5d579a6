//! Sections on latency below saturation, and on the memory of the processes.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::chart::figures;
use super::{NOT_MEASURED, Page, SuiteResults, thousands};
use crate::latency::{METRICS, SHARES, SLOWEST, case_name};
use crate::redis::naive::Structure;

/// A case: its suite, its name in the results and on the page, and the goal of its p99 at half of
/// the highest rate of the slowest candidate, compared with another candidate.
type Case<'a> = (Option<&'a Results>, &'static str, &'static str, Option<P99Goal>);
type P99Goal = (&'static str, &'static str, f64);

pub(super) fn cases(suites: &SuiteResults) -> Vec<Case<'_>> {
    let (http, resp, gateway) =
        (suites.http.as_ref(), suites.resp.as_ref(), suites.gateway.as_ref());
    let (service, scripts) = (suites.service.as_ref(), suites.scripts.as_ref());
    let at_most = |other| Some((other, "≤ 1×", 1.0));
    let mut cases = vec![
        (http, "http", "HTTP on memory", at_most("throttlecrab")),
        (http, "grpc", "gRPC on memory", at_most("throttlecrab")),
        (resp, "resp", "Redis protocol on memory", at_most("Redis, naive script")),
        (gateway, "gateway", "gateway, small answers", Some(("nginx", "≤ 1.5×", 1.5))),
        (service, "http", "HTTP on Redis", None),
        (service, "grpc", "gRPC on Redis", None),
    ];
    let published = Structure::ALL.into_iter().filter(|structure| structure.published().is_some());
    cases.extend(published.map(|structure| (scripts, structure.name(), structure.name(), None)));
    cases
}

/// Returns the ratio of the p99 of Tidegate to that of another candidate.
pub(super) fn p99_ratio(results: &Results, case: &str, other: &str) -> Option<Spread> {
    let half = case_name(case, 50);
    results.ratio(METRICS[1].0, (&half, "tidegate"), (&half, other))
}

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    below_saturation(page, suites);
    memory(page, suites);
}

fn below_saturation(page: &mut Page, suites: &SuiteResults) {
    let of_case = |(results, case, shown, _): Case<'_>| {
        results.map_or(Vec::new(), |results| rows(results, case, shown))
    };
    let rows: Vec<_> = cases(suites).into_iter().flat_map(of_case).collect();
    if rows.is_empty() {
        return;
    }
    page.heading("Latency below saturation");
    page.paragraph(
        "An open loop over 64 connections: requests for random keys of 100,000 are due at a constant \
         rate, one at a time on each connection, and latency is measured from the due time, so that \
         a late answer counts for the requests that it delays, too. The rates are shares of the \
         highest one that the slowest candidate of the case reaches with the same generator in a \
         closed loop, in the same run; so all candidates of a case get the same load. Each cell has \
         p50, p99 and p99.9 in microseconds, medians of the rounds.",
    );
    let shares = SHARES.map(|share| format!("{share} %"));
    let [one, two, three] = shares.each_ref().map(String::as_str);
    let heads = ["", "100 %, per second", "", one, two, three, "p99 of tidegate / it at 50 %"];
    page.table(&heads, &rows);
}

fn rows(results: &Results, case: &str, shown: &str) -> Vec<Vec<String>> {
    let at = |share| case_name(case, share);
    let measured = results.rows().iter();
    let measured = measured.filter(|row| row.case == at(SHARES[0]) && row.metric == METRICS[0].0);
    let row = |candidate: &str| {
        let rate = results.spread(&at(SHARES[0]), SLOWEST, "per_second");
        let rate = rate.map(|rate| rate.median * 100.0 / f64::from(SHARES[0]));
        let cell = |share| {
            let of = |(metric, _)| results.spread(&at(share), candidate, metric);
            METRICS
                .map(|metric| {
                    of(metric).map_or(NOT_MEASURED.to_owned(), |one| thousands(one.median))
                })
                .join(" / ")
        };
        let ratio = p99_ratio(results, case, candidate);
        let mut row = vec![
            shown.to_owned(),
            rate.map_or(NOT_MEASURED.to_owned(), thousands),
            candidate.to_owned(),
        ];
        row.extend(SHARES.map(cell));
        let ratio = ratio.filter(|_| candidate != "tidegate");
        row.push(ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()));
        row
    };
    measured.map(|measured| row(&measured.candidate)).collect()
}

fn memory(page: &mut Page, suites: &SuiteResults) {
    let rows = [
        (&suites.http, "HTTP and gRPC"),
        (&suites.resp, "Redis protocol"),
        (&suites.gateway, "gateway"),
        (&suites.attack, "many keys"),
    ];
    let rows = rows.into_iter().flat_map(|(results, shown)| {
        let of_suite = results.iter().flat_map(move |results| {
            let peaks = results.rows().iter().filter(|row| row.metric == "peak_mb");
            peaks.map(move |row| {
                let of = |metric: &str| {
                    let spread = results.spread(&row.case, &row.candidate, metric);
                    spread.map_or(NOT_MEASURED.to_owned(), |one| figures(one.median))
                };
                vec![shown.to_owned(), row.candidate.clone(), of("resident_mb"), of("peak_mb")]
            })
        });
        of_suite.collect::<Vec<_>>()
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return;
    }
    page.heading("Memory of the processes");
    page.paragraph(
        "Resident memory in megabytes (`VmRSS` and `VmHWM` of Linux, with the workers of nginx) \
         after all loads of a suite, and of a server that has just decided on a million keys that \
         have reached their limit (a quick run: 50,000). Redis counts as a process here; the bytes \
         of a key in Redis are in the section on scripts, those of the libraries in the first one.",
    );
    page.table(&["", "", "at the end", "at most"], &rows);
}
