//! Section on the Redis protocol.

use super::chart::{Bar, Chart, Panel};
use super::network::rate_table;
use super::{Page, SuiteResults};
use crate::resp::PIPELINES;

const CANDIDATES: [&str; 5] =
    ["tidegate", "no-op", "Redis, naive script", "Redis, own script", "throttlecrab"];

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    let Some(results) = &suites.resp else { return };
    page.heading("Redis protocol on memory");
    page.paragraph(
        "`redis-benchmark` with 50 connections and random keys of a hundred thousand runs on the \
         same cores as the server; `-P` is the number of commands that a client sends before it \
         reads the answers. The no-op server parses the commands and answers each with a fixed \
         decision, in one write per read. Redis runs a token bucket by `EVALSHA`: the naive script, \
         and Tidegate's own, which is called as the library calls it for one decision. Its call is not text, which \
         `redis-benchmark` cannot send, so the generator of the next section sends it. The CPU time is that of the server only.",
    );
    let cases = PIPELINES.map(|number| (format!("pipeline/{number}"), format!("`-P {number}`")));
    rate_table(page, results, &cases, &CANDIDATES);
    let panel = |pipeline: u32| {
        let bar = |candidate: &&str| {
            let value = results.spread(&format!("pipeline/{pipeline}"), candidate, "per_second")?;
            Some(Bar { label: (*candidate).to_owned(), value, ours: *candidate == "tidegate" })
        };
        Panel { title: format!("-P {pipeline}"), bars: CANDIDATES.iter().filter_map(bar).collect() }
    };
    let title = "Commands per second on memory (higher is better)".to_owned();
    page.chart("resp", &Chart { title, panels: PIPELINES.map(panel).into() });
}
