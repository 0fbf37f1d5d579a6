//! Checks clock differences. Decisions use the clock of the Redis node, never that of this machine,
//! but a failover to a node with another time shifts every window.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate::store::redis::{ClockSource, Reply, Restriction};

use super::{DoctorReport, Finding, NodeRole, NodeUnderTest};
use tidegate_api::duration;

const CHECK: &str = "clock";
const MAX_DIFFERENCE: Duration = Duration::from_secs(1);
/// Number of measurements per node; the one with the shortest round trip is used.
const SAMPLES: usize = 3;

/// Clock measurements of all nodes.
#[derive(Default)]
pub(super) struct Clocks(Vec<MeasuredClock>);

struct MeasuredClock {
    address: String,
    /// Microseconds ahead of this machine, plus or minus `uncertainty`.
    ahead: i64,
    uncertainty: i64,
}

impl Clocks {
    /// Measures the clock of one node and compares it with this machine's.
    pub(super) async fn measure(&mut self, node: &mut NodeUnderTest<'_>) {
        let mut best: Option<(i64, i64)> = None;
        for _ in 0..SAMPLES {
            let sent = micros_now();
            let reply = node.ask(&["TIME"]).await;
            let received = micros_now();
            let Ok(Some(server)) = reply.as_ref().map(server_micros) else { break };
            let uncertainty = (received - sent).max(0) / 2;
            if best.is_none_or(|(_, least)| uncertainty < least) {
                best = Some((server - (sent + uncertainty), uncertainty));
            }
        }
        let Some((ahead, uncertainty)) = best else { return };
        node.report.node(node.address, NodeRole::Replica).clock_ahead_us = Some(ahead);
        self.0.push(MeasuredClock { address: node.address.to_owned(), ahead, uncertainty });
        let message = format!(
            "{} {} this machine's clock",
            readable(ahead),
            if ahead < 0 { "behind" } else { "ahead of" }
        );
        node.add(if micros(MAX_DIFFERENCE) < ahead.abs() - uncertainty {
            let advice = "run NTP on both: decisions and windows use the clock of Redis";
            Finding::warning(CHECK, message).advice(advice)
        } else {
            Finding::ok(CHECK, message)
        });
    }

    /// Compares the clocks of the nodes with each other.
    pub(super) fn compare(&self, report: &mut DoctorReport) {
        let (Some(first), Some(last)) = (
            self.0.iter().min_by_key(|clock| clock.ahead),
            self.0.iter().max_by_key(|clock| clock.ahead),
        ) else {
            return;
        };
        let difference = last.ahead - first.ahead;
        if difference - first.uncertainty - last.uncertainty > micros(MAX_DIFFERENCE) {
            let message = format!(
                "the clocks of {} and {} differ by {}: a failover between them shifts every \
                 window by that much",
                first.address,
                last.address,
                readable(difference)
            );
            report.add(Finding::warning(CHECK, message).advice("run NTP on every node"));
        }
    }
}

/// Reports an estimated clock, after the node has made decisions with it.
pub(super) fn check_source(node: &mut NodeUnderTest<'_>) {
    let nodes = node.store.nodes();
    let Some(health) = nodes.iter().find(|health| health.address == node.address) else { return };
    if health.clock != ClockSource::Estimated {
        return;
    }
    let is_refused = health.restrictions.contains(&Restriction::TimeInScripts);
    let reason =
        if is_refused { "TIME is refused inside scripts" } else { "store.clock is estimated" };
    let error = health.clock_error.map_or_else(String::new, |error| {
        format!(", {} now", readable(i64::try_from(error.as_micros()).unwrap_or(i64::MAX)))
    });
    let message = format!(
        "{reason}: the clock is estimated, by the command TIME once per second; its error is at \
         most half a round trip{error}"
    );
    node.add(Finding::note(CHECK, message));
}

fn micros_now() -> i64 {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration::micros(duration)).unwrap_or(i64::MAX)
}

fn readable(micros: i64) -> String {
    let micros = micros.unsigned_abs();
    if micros < 1_000_000 {
        format!("{}.{} ms", micros / 1_000, micros / 100 % 10)
    } else {
        format!("{} s", micros / 1_000_000)
    }
}

/// Parses the reply of TIME.
fn server_micros(reply: &Reply) -> Option<i64> {
    let Reply::List(parts) = reply else { return None };
    // Dragonfly returns integers.
    let number = |part: &Reply| match part {
        Reply::Text(text) => text.parse().ok(),
        Reply::Integer(number) => Some(*number),
        _ => None,
    };
    let [seconds, micros] = parts.as_slice() else { return None };
    // Envoy's proxy returns all microseconds since 1970 as the second number.
    let micros = number(micros).filter(|micros| (0..1_000_000).contains(micros))?;
    Some(number(seconds)?.checked_mul(1_000_000)? + micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(clocks: &[(i64, i64)]) -> Vec<Finding> {
        let clock = |&(ahead, uncertainty): &(i64, i64)| MeasuredClock {
            address: format!("n{ahead}"),
            ahead,
            uncertainty,
        };
        let mut report = DoctorReport::default();
        Clocks(clocks.iter().map(clock).collect()).compare(&mut report);
        report.findings
    }

    #[test]
    fn only_certain_clock_differences_are_reported() {
        assert_eq!(compared(&[]), []);
        assert_eq!(compared(&[(5_000_000, 0)]), []);
        assert_eq!(compared(&[(-500_000, 0), (500_000, 0)]), []);
        // Half a second of uncertainty on each side.
        assert_eq!(compared(&[(0, 500_000), (1_900_000, 500_000)]), []);
        let found = compared(&[(0, 1_000), (-3_600_000_000, 1_000), (10, 1_000)]);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("n-3600000000 and n10 differ by 3600 s"), "{found:?}");
    }

    #[test]
    fn difference_is_readable() {
        assert_eq!(
            [0, -1_250, 999_999, -61_000_000].map(readable),
            ["0.0 ms", "1.2 ms", "999.9 ms", "61 s"]
        );
    }
}
