//! The cost of denials for a server on memory: all requests are denied, for random keys that have
//! reached their limit or for one hot key, compared with allowed requests for random keys. And the
//! memory of a server that holds all those keys.

use anyhow::{Context as _, Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::{Load, Protocol, Request, Users};
use crate::load::Throughput;
use crate::servers::{ATTACK_LIMIT, Candidate, Limit, ON_MEMORY, throttlecrab, tidegate};

/// Protocols, with the requests that each connection has in flight.
pub(crate) const PROTOCOLS: [(&str, Protocol, u64); 3] =
    [("http", Protocol::Http, 1), ("grpc", Protocol::Grpc, 1), ("resp", Protocol::Resp, 16)];
pub(crate) const ALLOWED: &str = "allowed";
pub(crate) const DENIED: &str = "denied";
pub(crate) const DENIED_HOT: &str = "denied, hot key";

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let policies = format!(
        "{ON_MEMORY}  - {{name: attack, match: {{domain: attack}}, key: [descriptor.user], \
         algorithm: token-bucket, limit: {ATTACK_LIMIT}, window: 24h}}\n"
    );
    let mut candidates = vec![tidegate(folder.path(), &policies)?];
    candidates.extend(throttlecrab()?);
    let mut results = Results::new("attack", plan);
    let keys = plan.attacked_keys();
    for candidate in &candidates {
        // The keys are those of all protocols.
        let request = candidate.request(Protocol::Http, Limit::Attack).context("no HTTP")?;
        for _ in 0..ATTACK_LIMIT {
            let load = Load { requests: keys, ..Load::closed(Users::InOrder, FOREVER) };
            let answers = load.run(&request)?.answers;
            ensure!(answers.allowed == keys, "{}: {answers:?} of {keys}", candidate.name);
        }
        candidate.server.record_memory("memory", candidate.name, &mut results)?;
    }
    for (protocol, kind, pipeline) in PROTOCOLS {
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                let candidate = &candidates[(turn + round) % candidates.len()];
                for (outcome, limit, users) in [
                    (ALLOWED, Limit::Free, keys),
                    (DENIED, Limit::Attack, keys),
                    (DENIED_HOT, Limit::Attack, 1),
                ] {
                    let request = candidate.request(kind, limit).context("no such protocol")?;
                    let load =
                        Load { pipeline, ..Load::closed(Users::Random(users), plan.turn() / 2) };
                    let load = measure(candidate, &request, load, limit)?;
                    let case = format!("{protocol}/{outcome}");
                    results.add(&case, candidate.name, "per_second", load.per_second);
                    results.add(&case, candidate.name, "cpu_micros", load.cpu_micros);
                }
            }
        }
        for candidate in &candidates {
            let case = |outcome: &str| format!("{protocol}/{outcome}");
            let (allowed, denied) = (case(ALLOWED), case(DENIED));
            let (one, other) =
                ((denied.as_str(), candidate.name), (allowed.as_str(), candidate.name));
            if let Some(ratio) = results.ratio("cpu_micros", one, other) {
                println!(
                    "{protocol}: {}: CPU of a denial {ratio} of an allowed one",
                    candidate.name
                );
            }
        }
    }
    results.save()
}

/// Longer than the keys need.
const FOREVER: std::time::Duration = std::time::Duration::from_secs(3_600);

fn measure(
    candidate: &Candidate,
    request: &Request,
    load: Load,
    limit: Limit,
) -> Result<Throughput> {
    Throughput::measure(&candidate.server, || {
        let outcome = load.run(request)?;
        let (all, allowed) = (outcome.answers.count, outcome.answers.allowed);
        let expected = if limit == Limit::Free { all } else { 0 };
        ensure!(allowed == expected, "{}: {allowed} of {all} allowed", candidate.name);
        Ok((all as f64, outcome.per_second))
    })
}
