//! Whether the clocks agree. Decisions go by the clock of the node that decides: ours never
//! matters, but a failover to a node whose clock differs shifts every window.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate::store::redis::Reply;

use super::{Finding, Report, Role, Subject};

const CHECK: &str = "clock";
const APART: Duration = Duration::from_secs(1);
/// The quickest of so many answers tells best.
const LOOKS: usize = 3;

/// What the nodes' clocks show.
#[derive(Default)]
pub(super) struct Clocks(Vec<Clock>);

struct Clock {
    address: String,
    /// Microseconds ahead of this machine's, give or take `doubt`.
    ahead: i64,
    doubt: i64,
}

impl Clocks {
    pub(super) async fn look(&mut self, subject: &Subject<'_>, report: &mut Report) {
        let mut best: Option<(i64, i64)> = None;
        for _ in 0..LOOKS {
            let sent = micros_now();
            let reply = subject.store.ask_node(subject.address, &["TIME"]).await;
            let received = micros_now();
            let Ok(Some(server)) = reply.as_ref().map(server_micros) else { break };
            let doubt = (received - sent).max(0) / 2;
            if best.is_none_or(|(_, least)| doubt < least) {
                best = Some((server - (sent + doubt), doubt));
            }
        }
        let Some((ahead, doubt)) = best else { return };
        report.node(subject.address, Role::Replica).clock_ahead_us = Some(ahead);
        self.0.push(Clock { address: subject.address.to_owned(), ahead, doubt });
        let message = format!(
            "{} {} this machine's",
            readable(ahead),
            if ahead < 0 { "behind" } else { "ahead of" }
        );
        subject.found(
            report,
            if micros(APART) < ahead.abs() - doubt {
                let advice =
                    "run NTP on both: decisions go by Redis's clock, and windows begin by it";
                Finding::warning(CHECK, message).advice(advice)
            } else {
                Finding::ok(CHECK, message)
            },
        );
    }

    /// Between the nodes.
    pub(super) fn compare(&self, report: &mut Report) {
        let (Some(first), Some(last)) = (
            self.0.iter().min_by_key(|clock| clock.ahead),
            self.0.iter().max_by_key(|clock| clock.ahead),
        ) else {
            return;
        };
        let apart = last.ahead - first.ahead;
        if apart - first.doubt - last.doubt > micros(APART) {
            let message = format!(
                "the clocks of {} and {} are {} apart: a failover between them shifts every window by that much",
                first.address,
                last.address,
                readable(apart)
            );
            report.add(Finding::warning(CHECK, message).advice("run NTP on every node"));
        }
    }
}

fn micros_now() -> i64 {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn readable(micros: i64) -> String {
    let micros = micros.unsigned_abs();
    if micros < 1_000_000 {
        format!("{}.{} ms", micros / 1_000, micros / 100 % 10)
    } else {
        format!("{} s", micros / 1_000_000)
    }
}

/// The reply of TIME.
fn server_micros(reply: &Reply) -> Option<i64> {
    let Reply::List(parts) = reply else { return None };
    let [Reply::Text(seconds), Reply::Text(micros)] = parts.as_slice() else { return None };
    Some(seconds.parse::<i64>().ok()?.checked_mul(1_000_000)? + micros.parse::<i64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(clocks: &[(i64, i64)]) -> Vec<Finding> {
        let clock =
            |&(ahead, doubt): &(i64, i64)| Clock { address: format!("n{ahead}"), ahead, doubt };
        let mut report = Report::default();
        Clocks(clocks.iter().map(clock).collect()).compare(&mut report);
        report.findings
    }

    #[test]
    fn only_nodes_that_are_surely_apart_are_told() {
        assert_eq!(compared(&[]), []);
        assert_eq!(compared(&[(5_000_000, 0)]), []);
        assert_eq!(compared(&[(-500_000, 0), (500_000, 0)]), []);
        // Half a second of doubt on each side.
        assert_eq!(compared(&[(0, 500_000), (1_900_000, 500_000)]), []);
        let found = compared(&[(0, 1_000), (-3_600_000_000, 1_000), (10, 1_000)]);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("n-3600000000 and n10 are 3600 s apart"), "{found:?}");
    }

    #[test]
    fn a_difference_is_readable() {
        assert_eq!(
            [0, -1_250, 999_999, -61_000_000].map(readable),
            ["0.0 ms", "1.2 ms", "999.9 ms", "61 s"]
        );
    }
}
