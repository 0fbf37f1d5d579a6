//! Whether scripts run, and how long a decision takes: measured by the store's own probe, which spends a unit of a count
//! that nobody else has.

use std::time::{Duration, Instant};

use serde::Serialize;
use tidegate::Store as _;
use tidegate::store::Part;

use super::{Examination, Finding, Report, Subject};

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
    part: Part,
    examination: &Examination<'_>,
    nodes: usize,
    report: &mut Report,
) {
    // The first probe may have to load the script.
    match subject.store.probe(part).await {
        Ok(()) => subject.found(report, Finding::ok("scripts", "a decision works: the script loads, runs and writes")),
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
    let timeout = examination.timeout;
    let Some(latency) = Percentiles::of(samples) else {
        let message = format!("none of {failed} probes was answered within {timeout:?}");
        return subject.found(report, Finding::error("latency", message));
    };
    let Percentiles { p50, p90, p99, max, samples, .. } = &latency;
    let message = format!(
        "p50 {}, p90 {}, p99 {}, max {} of {samples} probes; a decision may take {timeout:?}",
        readable(*p50),
        readable(*p90),
        readable(*p99),
        readable(*max)
    );
    let slow = Duration::from_micros(*p99) > timeout / 2;
    subject.found(
        report,
        if failed > 0 {
            let message = format!("{failed} probes failed or were late; {message}");
            Finding::warning("latency", message).advice("look for slow commands (SLOWLOG GET), forks and the network")
        } else if slow {
            let advice = "move Redis closer, look for slow commands (SLOWLOG GET), or raise store.timeout";
            Finding::warning("latency", format!("p99 is near the timeout: {message}")).advice(advice)
        } else {
            Finding::ok("latency", message)
        },
    );
    let mut all = report.latency_us.take().map_or_else(Vec::new, |latency| latency.sorted);
    all.extend(latency.sorted);
    report.latency_us = Percentiles::of(all);
}

fn readable(micros: u64) -> String {
    format!("{}.{:02} ms", micros / 1_000, micros / 10 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

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
