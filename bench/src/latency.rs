//! Latency below saturation: an open loop at shares of the highest rate of the slowest candidate,
//! so that all candidates of a case get the same load.

use anyhow::{Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::{Load, Request, Users};

/// Percent of the highest rate of the slowest candidate.
pub(crate) const SHARES: [u32; 3] = [25, 50, 75];
/// Candidate of the row with that rate.
pub(crate) const SLOWEST: &str = "slowest candidate";
const USERS: Users = Users::Random(100_000);

/// Returns the case of a share in the results.
pub(crate) fn case_name(case: &str, share: u32) -> String {
    format!("latency/{case}/{share}")
}

pub(crate) fn measure(
    plan: Plan,
    case: &str,
    requests: &[(impl AsRef<str>, Request)],
    results: &mut Results,
) -> Result<()> {
    let turn = plan.turn() / 2;
    let mut slowest = f64::INFINITY;
    for (_, request) in requests {
        slowest = slowest.min(Load::closed(USERS, turn).run(request)?.per_second);
    }
    for share in SHARES {
        let (case, rate) = (case_name(case, share), slowest * f64::from(share) / 100.0);
        results.add(&case, SLOWEST, "per_second", rate);
        for round in 0..plan.rounds() {
            for turns in 0..requests.len() {
                let (name, request) = &requests[(turns + round) % requests.len()];
                let name = name.as_ref();
                let load = Load { rate: Some(rate), ..Load::closed(USERS, turn) };
                let outcome = load.run(request)?;
                let answers = outcome.answers;
                ensure!(answers.allowed == answers.count, "{name}, {case}: {answers:?}");
                for (metric, share) in METRICS {
                    results.add(&case, name, metric, outcome.micros(share)?);
                }
            }
        }
        for (name, _) in requests {
            let name = name.as_ref();
            let median = |metric| results.spread(&case, name, metric).map_or(0.0, |one| one.median);
            let [p50, p99, p99_9] = METRICS.map(|(metric, _)| median(metric));
            println!("{case}, {rate:.0}/s: {name} p50 {p50:.0} p99 {p99:.0} p99.9 {p99_9:.0} µs");
        }
    }
    Ok(())
}

/// Metrics, and the share of requests below them.
pub(crate) const METRICS: [(&str, f64); 3] =
    [("p50_micros", 0.5), ("p99_micros", 0.99), ("p99_9_micros", 0.999)];
