//! Whether scripts run, and how long a decision takes: measured by the store's own probe, which
//! spends a unit of a count that nobody else has.

use std::time::{Duration, Instant};

use serde::Serialize;
use tidegate::SharedStore as _;
use tidegate::store::ShardId;

use super::{Examination, Finding, Report, Subject};

const CHECK: &str = "latency";
/// All nodes together take no longer than this, as long as one probe does not.
const MOST_TIME: Duration = Duration::from_secs(6);

/// In microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
    pub(crate) samples: usize,
    #[serde(skip)]
    sorted: Vec<u64>,
}

impl Percentiles {
    fn of(mut samples: Vec<u64>) -> Option<Self> {
        samples.sort_unstable();
        let max = *samples.last()?;
        // The smallest sample that so many percent do not exceed.
        let percentile = |percent: usize| samples[(samples.len() * percent).div_ceil(100) - 1];
        Some(Self {
            p50: percentile(50),
            p90: percentile(90),
            p99: percentile(99),
            max,
            samples: samples.len(),
            sorted: samples,
        })
    }
}

pub(super) async fn check(
    subject: &Subject<'_>,
    part: ShardId,
    examination: &Examination<'_>,
    nodes: usize,
    report: &mut Report,
) {
    // The first probe may have to load the script.
    match subject.store.probe(part).await {
        Ok(()) => subject.found(
            report,
            Finding::ok("scripts", "a decision works: the script loads, runs and writes"),
        ),
        Err(error) => {
            let finding = Finding::error("scripts", format!("a decision does not work: {error}"));
            return subject.found(report, finding);
        }
    }
    let nodes = u32::try_from(nodes.max(1)).unwrap_or(u32::MAX);
    let deadline = Instant::now() + MOST_TIME / nodes;
    let (mut samples, mut failed) = (Vec::with_capacity(examination.probes), 0);
    for _ in 0..examination.probes {
        let sent = Instant::now();
        match subject.store.probe(part).await {
            Ok(()) => samples.push(u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX)),
            Err(_) => failed += 1,
        }
        if Instant::now() > deadline {
            break;
        }
    }
    let latency = Percentiles::of(samples);
    subject.found(report, judged(latency.as_ref(), failed, examination.timeout));
    let mut all = report.latency_us.take().map_or_else(Vec::new, |latency| latency.sorted);
    all.extend(latency.map_or_else(Vec::new, |latency| latency.sorted));
    report.latency_us = Percentiles::of(all);
}

/// Whether decisions that may take so long come in time.
fn judged(latency: Option<&Percentiles>, failed: usize, timeout: Duration) -> Finding {
    let Some(Percentiles { p50, p90, p99, max, samples, .. }) = latency else {
        return Finding::error(
            CHECK,
            format!("none of {failed} probes was answered within {timeout:?}"),
        );
    };
    let [p50, p90, highest] = [p50, p90, max].map(|micros| readable(*micros));
    let message = format!(
        "p50 {p50}, p90 {p90}, p99 {}, max {highest} of {samples} probes; a decision may take {timeout:?}",
        readable(*p99)
    );
    if failed > 0 {
        let message = format!("{failed} probes failed or were late; {message}");
        Finding::warning(CHECK, message)
            .advice("look for slow commands (SLOWLOG GET), forks and the network")
    } else if Duration::from_micros(*p99) > timeout / 2 {
        let advice =
            "move Redis closer, look for slow commands (SLOWLOG GET), or raise store.timeout";
        Finding::warning(CHECK, format!("p99 is near the timeout: {message}")).advice(advice)
    } else {
        Finding::ok(CHECK, message)
    }
}

fn readable(micros: u64) -> String {
    format!("{}.{:02} ms", micros / 1_000, micros / 10 % 100)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn latency_is_judged_by_the_timeout() {
        let timeout = Duration::from_millis(100);
        let slow_tail = |slow| Percentiles::of([vec![200; 100], vec![slow; 2]].concat());
        for (latency, failed, level, says) in [
            (
                slow_tail(50_000),
                0,
                Level::Ok,
                "p50 0.20 ms, p90 0.20 ms, p99 50.00 ms, max 50.00 ms of 102 probes",
            ),
            (slow_tail(50_001), 0, Level::Warning, "p99 is near the timeout"),
            (slow_tail(200), 1, Level::Warning, "1 probes failed or were late"),
            (None, 3, Level::Error, "none of 3 probes was answered within 100ms"),
        ] {
            let finding = judged(latency.as_ref(), failed, timeout);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.message.contains(says), "{finding:?}");
        }
    }

    #[test]
    fn percentiles_are_samples_that_so_many_do_not_exceed() {
        assert_eq!(Percentiles::of(Vec::new()), None);
        let one = Percentiles::of(vec![7]).expect("one");
        assert_eq!((one.p50, one.p90, one.p99, one.max, one.samples), (7, 7, 7, 7, 1));
        let hundred = Percentiles::of((1..=100).rev().collect()).expect("some");
        assert_eq!((hundred.p50, hundred.p90, hundred.p99, hundred.max), (50, 90, 99, 100));
        let two = Percentiles::of(vec![9, 1]).expect("two");
        assert_eq!((two.p50, two.p90, two.max), (1, 9, 9));
    }
}
