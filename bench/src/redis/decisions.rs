//! Decisions a second on one Redis: through the library with more and more callers, against what
//! Redis itself can do with our script.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidegate::store::redis::Builder;
use tidegate::{DenyCache, Encoding, Limiter, Quota, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tokio::runtime::Runtime;

use super::Redis;
use super::callers::{self, Answers, Users};
use super::ceiling::Ceiling;

/// What is asked, by how many at a time.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    users: Users,
    callers: usize,
    /// All allowed, or all denied.
    allowed: bool,
}

const CASES: [Case; 7] = [
    Case { name: "random/1", users: Users::Random, callers: 1, allowed: true },
    Case { name: "random/64", users: Users::Random, callers: 64, allowed: true },
    Case { name: "random/512", users: Users::Random, callers: 512, allowed: true },
    Case { name: "hot/1", users: Users::Same, callers: 1, allowed: true },
    Case { name: "hot/64", users: Users::Same, callers: 64, allowed: true },
    Case { name: "hot/512", users: Users::Same, callers: 512, allowed: true },
    Case { name: "denied/512", users: Users::Same, callers: 512, allowed: false },
];

pub(crate) const CEILING: (&str, &str) = ("ceiling", "redis-benchmark");
/// The contestant that sends every decision by itself.
pub(crate) const EACH_ALONE: &str = "tidegate, each alone";
/// The contestant that is asked again only when a denial is over, as in the service.
pub(crate) const WITH_DENY_CACHE: &str = "tidegate, deny cache";

/// The exact log: small for random keys; for the hot key one that never fills, and one that is full
/// at once.
fn quota(case: Case) -> Result<Quota> {
    let (limit, window) = match (case.users, case.allowed) {
        (Users::Random, _) => (100, Duration::from_secs(60)),
        (Users::Same, true) => (5_000_000, Duration::from_secs(1)),
        (Users::Same, false) => (1, Duration::from_secs(3_600)),
    };
    Ok(Quota::sliding_log(limit, window)?.with_encoding(Encoding::Packed)?)
}

/// How the store is built. The timeout is long because the callers are to wait in their queue, not
/// to be turned away.
fn store(redis: &Redis) -> Builder {
    RedisStore::builder(&redis.url()).timeout(Duration::from_secs(5))
}

/// One turn of the library in a case.
fn turn(
    contestant: &str,
    runtime: &Runtime,
    redis: &Redis,
    case: Case,
    time: Duration,
) -> Result<Answers> {
    let quota = quota(case)?;
    runtime.block_on(async {
        match contestant {
            "tidegate" | EACH_ALONE => {
                let store = store(redis).group_commit(contestant != EACH_ALONE);
                let limiter = Limiter::new(store.connect().await?);
                callers::run(&limiter, &quota, case.users, case.callers, time).await
            }
            WITH_DENY_CACHE => {
                let limiter = Limiter::new(DenyCache::new(store(redis).connect().await?));
                callers::run(&limiter, &quota, case.users, case.callers, time).await
            }
            other => anyhow::bail!("no contestant {other}"),
        }
    })
}

/// Who takes part in a case.
fn contestants(case: Case) -> &'static [&'static str] {
    if case.allowed { &["tidegate", EACH_ALONE] } else { &["tidegate", WITH_DENY_CACHE] }
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    // One core for the callers: Redis has the other.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ceiling = Ceiling::of(&redis, &runtime, &quota(CASES[0])?)?;
    let mut results = Results::new("redis", plan);
    // Makes most of the keys, so that the first round has no more of that to do than the others.
    let rate = ceiling.run(&redis, 300_000.0)?;
    let requests = rate * plan.turn().as_secs_f64();
    for round in 0..plan.rounds() {
        redis.reset_statistics()?;
        let before = redis.processor_time()?;
        results.add(CEILING.0, CEILING.1, "per_second", ceiling.run(&redis, requests)?);
        let calls = redis.script_calls()?;
        ensure!(calls > 0.0, "redis-benchmark called no script");
        results.add(
            CEILING.0,
            CEILING.1,
            "redis_micros",
            (redis.processor_time()? - before) * 1e6 / calls,
        );
        results.add(CEILING.0, CEILING.1, "redis_calls", 1.0);
        for offset in 0..CASES.len() {
            // Who goes first changes.
            let case = CASES[(offset + round) % CASES.len()];
            for contestant in contestants(case) {
                redis.reset_statistics()?;
                let before = redis.processor_time()?;
                let answers = turn(contestant, &runtime, &redis, case, plan.turn())?;
                let micros = (redis.processor_time()? - before) * 1e6;
                let expected = if case.allowed { answers.decisions } else { 0.0 };
                ensure!(
                    (answers.allowed - expected).abs() <= 1.0,
                    "{}: {} allowed",
                    case.name,
                    answers.allowed
                );
                results.add(case.name, contestant, "per_second", answers.per_second);
                results.add(case.name, contestant, "median_micros", answers.median_micros);
                results.add(case.name, contestant, "p99_micros", answers.p99_micros);
                results.add(case.name, contestant, "redis_micros", micros / answers.decisions);
                results.add(
                    case.name,
                    contestant,
                    "redis_calls",
                    redis.script_calls()? / answers.decisions,
                );
            }
        }
    }
    for row in results.rows().iter().filter(|row| row.metric == "per_second") {
        let (Some(rate), Some(ratio)) = (
            results.spread(&row.case, &row.contestant, "per_second"),
            results.ratio("per_second", (&row.case, &row.contestant), CEILING),
        ) else {
            continue;
        };
        println!(
            "{}, {}: {:.0} a second, {ratio} of the ceiling",
            row.contestant, row.case, rate.median
        );
    }
    results.save()
}
