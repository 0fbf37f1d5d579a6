//! Section on the cost of denials.

use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;

use super::chart::figures;
use super::goals::protocol_name;
use super::{NOT_MEASURED, Page, SuiteResults, thousands};
use crate::attack::{ALLOWED, DENIED, DENIED_HOT, PROTOCOLS};
use crate::redis::naive::Structure;
use crate::redis::scripts::{self, denied_case};

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if suites.in_process.is_none() && suites.attack.is_none() && suites.scripts.is_none() {
        return;
    }
    page.heading("The cost of denials");
    page.paragraph(
        "An attack: every request is denied, each for another random key that has reached its \
         limit, or all for one hot key. The ratio compares a denial for a random key with an \
         allowed request for one of as many keys.",
    );
    if let Some(results) = &suites.in_process {
        page.line("In process, nanoseconds per decision of one thread, with a million keys:");
        let rows = ["tidegate", "governor", "throttlecrab", "limitador"].map(|candidate| {
            row(results, "ns", candidate, &IN_PROCESS, vec![candidate.to_owned()])
        });
        page.table(&heads(&["", "allowed", "denied", "one key, denied"]), &rows);
    }
    if let Some(results) = &suites.attack {
        page.paragraph(
            "Servers on memory with a million keys (a quick run: 50,000), CPU µs of the server per \
             request; over the Redis protocol 16 commands are in flight on each connection:",
        );
        let mut rows = Vec::new();
        for (protocol, ..) in PROTOCOLS {
            let cases = [ALLOWED, DENIED, DENIED_HOT].map(|case| format!("{protocol}/{case}"));
            for candidate in ["tidegate", "throttlecrab"] {
                let rate = results.spread(&cases[1], candidate, "per_second");
                let rate = rate.map_or(NOT_MEASURED.to_owned(), |rate| thousands(rate.median));
                let start = vec![protocol_name(protocol).to_owned(), candidate.to_owned(), rate];
                rows.push(row(results, "cpu_micros", candidate, &cases, start));
            }
        }
        let first = ["", "", "denials per second", "allowed", "denied", "one key, denied"];
        page.table(&heads(&first), &rows);
    }
    if let Some(results) = &suites.scripts {
        page.line(
            "Scripts on Redis, one decision per call with P = 16, Redis CPU µs per decision:",
        );
        let mut rows = Vec::new();
        for structure in Structure::ALL {
            let denied = [denied_case(structure, "random"), denied_case(structure, "hot")];
            let cases = [structure.name(), &denied[0], &denied[1]];
            for candidate in scripts::SINGLE {
                if results.rounds(cases[1], candidate, "redis_micros").is_none() {
                    continue;
                }
                let start = vec![structure.name().to_owned(), scripts::shown(structure, candidate)];
                rows.push(row(results, "redis_micros", candidate, &cases, start));
            }
        }
        page.table(&heads(&["", "", "allowed", "denied", "one key, denied"]), &rows);
    }
}

/// Cases of the suite in process: allowed, denied, and denied for one key.
pub(super) const IN_PROCESS: [&str; 3] =
    ["1000000/1/allowed/uniform", "1000000/1/denied/uniform", "1/1/denied/uniform"];

fn heads<'a>(first: &[&'a str]) -> Vec<&'a str> {
    [first, &["denied / allowed"]].concat()
}

/// Appends the figures of a candidate in the three cases to a row, and the ratio of the first two.
fn row(
    results: &Results,
    metric: &str,
    candidate: &str,
    cases: &[impl AsRef<str>; 3],
    mut row: Vec<String>,
) -> Vec<String> {
    let text = |spread: Option<Spread>| {
        spread.map_or(NOT_MEASURED.to_owned(), |spread| figures(spread.median))
    };
    row.extend(cases.each_ref().map(|case| text(results.spread(case.as_ref(), candidate, metric))));
    let [allowed, denied, _] = cases.each_ref().map(|case| (case.as_ref(), candidate));
    let ratio = results.ratio(metric, denied, allowed);
    row.push(ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string()));
    row
}
