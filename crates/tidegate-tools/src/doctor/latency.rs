//! Checks whether scripts run, and measures the latency of decisions. The store's probe charges a
//! counter that no limit uses.

use std::time::{Duration, Instant};

use serde::Serialize;
use tidegate::StoreError;

use super::{Finding, NodeUnderTest};
use crate::tool::percentiles::nearest_rank;
use tidegate_api::duration;

const CHECK: &str = "latency";
/// Time limit for the probes of all nodes together. Each node gets an equal share.
const PROBE_TIMEOUT: Duration = Duration::from_secs(6);

/// Maximum number of attempts of the first decision.
const MAX_FIRST_PROBES: usize = 4;

/// Latency percentiles in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LatencyPercentiles {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
    pub samples: usize,
    #[serde(skip)]
    sorted: Vec<u64>,
}

impl LatencyPercentiles {
    fn new(mut samples: Vec<u64>) -> Option<Self> {
        samples.sort_unstable();
        let max = *samples.last()?;
        Some(Self {
            p50: nearest_rank(&samples, 50)?,
            p90: nearest_rank(&samples, 90)?,
            p99: nearest_rank(&samples, 99)?,
            max,
            samples: samples.len(),
            sorted: samples,
        })
    }
}

pub(super) async fn check(node: &mut NodeUnderTest<'_>, nodes: usize) {
    let options = node.options;
    match first_probe(node).await {
        Ok(()) => {
            let message = "a decision works: the script runs and writes";
            node.add(Finding::ok("scripts", message));
        }
        Err(error) => {
            let finding = script_finding(node, &error).await;
            return node.add(finding);
        }
    }
    let nodes = u32::try_from(nodes.max(1)).unwrap_or(u32::MAX);
    let deadline = Instant::now() + PROBE_TIMEOUT / nodes;
    let mut samples = Vec::with_capacity(options.probes);
    let mut failed = 0;
    for _ in 0..options.probes {
        let sent = Instant::now();
        match node.store.probe_node(node.address).await {
            Ok(()) => samples.push(duration::micros(sent.elapsed())),
            Err(_) => failed += 1,
        }
        if Instant::now() > deadline {
            break;
        }
    }
    let latency = LatencyPercentiles::new(samples);
    node.add(latency_finding(latency.as_ref(), failed, options.timeout));
    let mut all = node.report.latency_us.take().map_or_else(Vec::new, |latency| latency.sorted);
    all.extend(latency.map_or_else(Vec::new, |latency| latency.sorted));
    node.report.latency_us = LatencyPercentiles::new(all);
}

/// Decides once, which is not measured. The first calls may have to load the script, which takes two
/// more round trips.
async fn first_probe(node: &NodeUnderTest<'_>) -> Result<(), StoreError> {
    for _ in 1..MAX_FIRST_PROBES {
        match node.store.probe_node(node.address).await {
            Err(error) if is_timeout(&error) => {}
            decided => return decided,
        }
    }
    node.store.probe_node(node.address).await
}

fn is_timeout(error: &StoreError) -> bool {
    matches!(error.reason(), StoreError::Timeout(_))
}

/// Returns the finding of a decision that does not work.
async fn script_finding(node: &NodeUnderTest<'_>, error: &StoreError) -> Finding {
    let message = format!("a decision does not work: {error}");
    if message.contains("KEYS array") {
        let advice = "set the parameter script_check_enable of the instance to 0 (Alibaba Cloud): \
                      its proxy refuses scripts that do not name KEYS[i] in each call";
        return Finding::error("scripts", message).advice(advice);
    }
    if !is_timeout(error) {
        return Finding::error("scripts", message);
    }
    // A plain command has a longer timeout.
    let sent = Instant::now();
    let reply = node.ask(&["TIME"]).await;
    let message = match reply {
        Ok(_) => {
            let round_trip = readable(duration::micros(sent.elapsed()));
            format!("{message}, and a round trip takes {round_trip}")
        }
        Err(_) => message,
    };
    let advice = "move Redis closer, raise store.timeout to several round trips, or check for slow \
                  commands (SLOWLOG GET)";
    Finding::error("scripts", message).advice(advice)
}

/// Compares the measured latency with the timeout of decisions.
fn latency_finding(
    latency: Option<&LatencyPercentiles>,
    failed: usize,
    timeout: Duration,
) -> Finding {
    let Some(LatencyPercentiles { p50, p90, p99, max, samples, .. }) = latency else {
        return Finding::error(CHECK, format!("all {failed} probes failed within {timeout:?}"));
    };
    let message = format!(
        "p50 {}, p90 {}, p99 {}, max {} of {samples} probes; the timeout is {timeout:?}",
        readable(*p50),
        readable(*p90),
        readable(*p99),
        readable(*max)
    );
    if failed > 0 {
        let message = format!("{failed} probes failed or timed out; {message}");
        Finding::warning(CHECK, message)
            .advice("check for slow commands (SLOWLOG GET), forks and network problems")
    } else if Duration::from_micros(*p99) > timeout / 2 {
        let advice =
            "move Redis closer, check for slow commands (SLOWLOG GET), or raise store.timeout";
        Finding::warning(CHECK, format!("p99 is close to the timeout: {message}")).advice(advice)
    } else {
        Finding::ok(CHECK, message)
    }
}

fn readable(micros: u64) -> String {
    format!("{}.{:02} ms", micros / 1_000, micros / 10 % 100)
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    #[test]
    fn latency_is_compared_with_the_timeout() {
        let timeout = Duration::from_millis(100);
        let slow_tail = |slow| LatencyPercentiles::new([vec![200; 100], vec![slow; 2]].concat());
        for (latency, failed, level, says) in [
            (
                slow_tail(50_000),
                0,
                Severity::Ok,
                "p50 0.20 ms, p90 0.20 ms, p99 50.00 ms, max 50.00 ms of 102 probes",
            ),
            (slow_tail(50_001), 0, Severity::Warning, "p99 is close to the timeout"),
            (slow_tail(200), 1, Severity::Warning, "1 probes failed or timed out"),
            (None, 3, Severity::Error, "all 3 probes failed within 100ms"),
        ] {
            let finding = latency_finding(latency.as_ref(), failed, timeout);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.message.contains(says), "{finding:?}");
        }
    }

    #[test]
    fn percentiles_use_the_nearest_rank() {
        assert_eq!(LatencyPercentiles::new(Vec::new()), None);
        let one = LatencyPercentiles::new(vec![7]).expect("one");
        assert_eq!((one.p50, one.p90, one.p99, one.max, one.samples), (7, 7, 7, 7, 1));
        let hundred = LatencyPercentiles::new((1..=100).rev().collect()).expect("some");
        assert_eq!((hundred.p50, hundred.p90, hundred.p99, hundred.max), (50, 90, 99, 100));
        let two = LatencyPercentiles::new(vec![9, 1]).expect("two");
        assert_eq!((two.p50, two.p90, two.max), (1, 9, 9));
    }
}
