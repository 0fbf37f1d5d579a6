//! Decisions per second on one Redis: through the library with a growing number of callers,
//! compared with the maximum rate of Redis with the naive script.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidegate::store::redis::Builder;
use tidegate::{DenyCache, Limiter, Quota, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tokio::runtime::Runtime;

use super::Redis;
use super::call::CallTemplate;
use super::callers::{self, CallerKeys, CallersResult};
use super::lone::LoneCaller;
use super::naive::Structure;
use crate::generator::{Load, Users};

/// Keys, number of concurrent callers and outcome.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    keys: CallerKeys,
    callers: usize,
    /// Whether all requests are allowed, or all denied.
    allowed: bool,
}

const CASES: [Case; 7] = [
    Case { name: "random/1", keys: CallerKeys::Random, callers: 1, allowed: true },
    Case { name: "random/64", keys: CallerKeys::Random, callers: 64, allowed: true },
    Case { name: "random/512", keys: CallerKeys::Random, callers: 512, allowed: true },
    Case { name: "hot/1", keys: CallerKeys::Hot, callers: 1, allowed: true },
    Case { name: "hot/64", keys: CallerKeys::Hot, callers: 64, allowed: true },
    Case { name: "hot/512", keys: CallerKeys::Hot, callers: 512, allowed: true },
    Case { name: "denied/512", keys: CallerKeys::Hot, callers: 512, allowed: false },
];

/// Case and candidate of the naive script.
pub(crate) const NAIVE: (&str, &str) = ("naive", "naive script");
/// Candidate without group commit.
pub(crate) const UNBATCHED: &str = "tidegate, unbatched";
/// Candidate with a deny cache, as in the service.
pub(crate) const WITH_DENY_CACHE: &str = "tidegate, deny cache";

/// Limit and window of a random key.
pub(crate) const LIMIT: u64 = 100;
pub(crate) const WINDOW: Duration = Duration::from_secs(60);
const RANDOM_KEYS: u64 = 1_000_000;

/// Returns the quota, an exact log: small for random keys; for the hot key, one that never fills,
/// or one that is full after the first request.
fn quota(case: Case) -> Result<Quota> {
    let (limit, window) = match (case.keys, case.allowed) {
        (CallerKeys::Random, _) => (LIMIT, WINDOW),
        (CallerKeys::Hot, true) => (5_000_000, Duration::from_secs(1)),
        (CallerKeys::Hot, false) => (1, Duration::from_secs(3_600)),
    };
    Structure::LogPacked.quota(limit, window)
}

/// Returns a store builder with a long timeout, so that callers wait in the queue and do not fail.
pub(crate) fn store(redis: &Redis) -> Builder {
    RedisStore::builder(&redis.url()).timeout(Duration::from_secs(5))
}

/// Runs one turn of a candidate in a case.
fn turn(
    candidate: &str,
    runtime: &Runtime,
    redis: &Redis,
    case: Case,
    duration: Duration,
) -> Result<CallersResult> {
    let quota = quota(case)?;
    runtime.block_on(async {
        match candidate {
            "tidegate" | UNBATCHED => {
                let store = store(redis).group_commit(candidate != UNBATCHED);
                let limiter = Limiter::new(store.connect().await?);
                callers::run(&limiter, &quota, case.keys, case.callers, duration).await
            }
            WITH_DENY_CACHE => {
                let limiter = Limiter::new(DenyCache::new(store(redis).connect().await?));
                callers::run(&limiter, &quota, case.keys, case.callers, duration).await
            }
            other => anyhow::bail!("unknown candidate {other}"),
        }
    })
}

/// Returns the candidates of a case.
fn candidates(case: Case) -> &'static [&'static str] {
    if case.allowed { &["tidegate", UNBATCHED] } else { &["tidegate", WITH_DENY_CACHE] }
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    // The callers use one core, and Redis uses the other.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let naive = CallTemplate::naive(&redis, Structure::LogPacked, "user", LIMIT, WINDOW)?;
    let naive = naive.request(redis.port());
    let send_naive = |calls: f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of calls is positive and small"
        )]
        let load = Load::pipelined(16, Users::Random(RANDOM_KEYS), calls as u64);
        Ok::<_, anyhow::Error>(load.run(&naive)?.per_second)
    };
    let mut lone_caller = LoneCaller::connect(&redis, &runtime, &quota(CASES[0])?)?;
    let mut results = Results::new("redis", plan);
    // Create keys, so that the first round does not create more than the others.
    let calls = send_naive(300_000.0)? * plan.turn().as_secs_f64();
    for round in 0..plan.rounds() {
        runtime.block_on(lone_caller.turn(plan.turn(), &mut results))?;
        redis.reset_statistics()?;
        let before = redis.cpu_seconds()?;
        results.add(NAIVE.0, NAIVE.1, "per_second", send_naive(calls)?);
        let calls = redis.script_calls()?;
        ensure!(calls > 0.0, "the load generator called no script");
        let micros = (redis.cpu_seconds()? - before) * 1e6;
        results.add(NAIVE.0, NAIVE.1, "redis_micros", micros / calls);
        results.add(NAIVE.0, NAIVE.1, "redis_calls", 1.0);
        for offset in 0..CASES.len() {
            // Rotate the order of the cases in each round.
            let case = CASES[(offset + round) % CASES.len()];
            for candidate in candidates(case) {
                redis.reset_statistics()?;
                let before = redis.cpu_seconds()?;
                let result = turn(candidate, &runtime, &redis, case, plan.turn())?;
                let micros = (redis.cpu_seconds()? - before) * 1e6;
                let expected = if case.allowed { result.decisions } else { 0.0 };
                ensure!(
                    (result.allowed - expected).abs() <= 1.0,
                    "{}: {} allowed",
                    case.name,
                    result.allowed
                );
                results.add(case.name, candidate, "per_second", result.per_second);
                results.add(case.name, candidate, "median_micros", result.median_micros);
                results.add(case.name, candidate, "p99_micros", result.p99_micros);
                results.add(case.name, candidate, "redis_micros", micros / result.decisions);
                results.add(
                    case.name,
                    candidate,
                    "redis_calls",
                    redis.script_calls()? / result.decisions,
                );
            }
        }
    }
    for row in results.rows().iter().filter(|row| row.metric == "per_second") {
        let (Some(rate), Some(ratio)) = (
            results.spread(&row.case, &row.candidate, "per_second"),
            results.ratio("per_second", (&row.case, &row.candidate), NAIVE),
        ) else {
            continue;
        };
        println!(
            "{}, {}: {:.0} decisions/s, {ratio} of the naive script",
            row.candidate, row.case, rate.median
        );
    }
    results.save()
}
