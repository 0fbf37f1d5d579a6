//! Cost of a decision in Redis, for each algorithm and encoding: the naive script, and the calls
//! that the library sends for one decision and for several. All are sent by the same generator.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use tidegate::{Charge, Limiter, Quota, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tokio::runtime::Runtime;

use super::Redis;
use super::call::{CallTemplate, user_name};
use super::load::{ScriptLoad, Users};
use super::naive::Structure;

/// A script and how it is called.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contestant {
    pub(crate) name: &'static str,
    /// Name of its set of users. Each contestant has its own, so that their logs grow equally.
    set: &'static str,
    /// Number of decisions per call of the library; `None` for the naive script.
    per_call: Option<u64>,
    pipeline: usize,
}

pub(crate) const NAIVE_ONE: &str = "naive script, P = 1";
pub(crate) const NAIVE: &str = "naive script, P = 16";
pub(crate) const OURS_ONE: &str = "tidegate, 1 per call, P = 1";
pub(crate) const OURS: &str = "tidegate, 1 per call, P = 16";
pub(crate) const OURS_16: &str = "tidegate, 16 per call";
pub(crate) const OURS_64: &str = "tidegate, 64 per call";

const CONTESTANTS: [Contestant; 6] = [
    Contestant { name: NAIVE_ONE, set: "a", per_call: None, pipeline: 1 },
    Contestant { name: OURS_ONE, set: "b", per_call: Some(1), pipeline: 1 },
    Contestant { name: NAIVE, set: "c", per_call: None, pipeline: 16 },
    Contestant { name: OURS, set: "d", per_call: Some(1), pipeline: 16 },
    Contestant { name: OURS_16, set: "e", per_call: Some(16), pipeline: 1 },
    Contestant { name: OURS_64, set: "f", per_call: Some(64), pipeline: 1 },
];

const CONNECTIONS: usize = 50;
/// Large enough that nothing is denied.
const LIMIT: u64 = 100;
/// Long enough that nothing expires during the suite.
const WINDOW: Duration = Duration::from_secs(86_400);

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut results = Results::new("scripts", plan);
    for structure in Structure::ALL {
        match structure.quota(LIMIT, WINDOW) {
            Ok(quota) => run_structure(plan, &redis, &runtime, structure, &quota, &mut results)?,
            Err(error) => println!("skipping {}: {error}", structure.name()),
        }
    }
    results.save()
}

fn run_structure(
    plan: Plan,
    redis: &Redis,
    runtime: &Runtime,
    structure: Structure,
    quota: &Quota,
    results: &mut Results,
) -> Result<()> {
    let case = structure.name();
    let (users, decisions_per_turn) = plan.script_users_and_decisions();
    ::redis::cmd("FLUSHALL").exec(&mut redis.connection()?)?;
    let call = |contestant: &Contestant| {
        let call = match contestant.per_call {
            Some(callers) => CallTemplate::record(redis, runtime, quota, contestant.set, callers)?,
            None => CallTemplate::naive(redis, structure, contestant.set, LIMIT, WINDOW)?,
        };
        anyhow::Ok(Arc::new(call))
    };
    let calls = CONTESTANTS.iter().map(call).collect::<Result<Vec<_>>>()?;
    let send = |call: &Arc<CallTemplate>, pipeline, decisions, users| {
        let per_call = call.decisions() as u64;
        let load = ScriptLoad {
            connections: CONNECTIONS,
            pipeline,
            calls: u64::div_ceil(decisions, per_call),
        };
        let per_second = runtime.block_on(load.run(redis.port(), call, users))?;
        anyhow::Ok((per_second * per_call as f64, (load.calls * per_call) as f64))
    };
    // All keys exist before the first round, so that no round creates more than another.
    for call in &calls {
        send(call, 16, users, Users::InOrder)?;
    }
    for round in 0..plan.rounds() {
        for turn in 0..CONTESTANTS.len() {
            // Rotate the order of the contestants in each round.
            let index = (turn + round) % CONTESTANTS.len();
            let (contestant, call) = (&CONTESTANTS[index], &calls[index]);
            redis.reset_statistics()?;
            let before = redis.cpu_seconds()?;
            let (per_second, decisions) =
                send(call, contestant.pipeline, decisions_per_turn, Users::Random(users))?;
            let micros = (redis.cpu_seconds()? - before) * 1e6 / decisions;
            let calls_per_decision = redis.script_calls()? / decisions;
            results.add(case, contestant.name, "per_second", per_second);
            results.add(case, contestant.name, "redis_micros", micros);
            results.add(case, contestant.name, "redis_calls", calls_per_decision);
        }
    }
    check_recorded_calls(redis, runtime, quota, users)?;
    for contestant in &CONTESTANTS {
        let of = |metric| results.spread(case, contestant.name, metric).map(|spread| spread.median);
        if let (Some(micros), Some(rate)) = (of("redis_micros"), of("per_second")) {
            println!("{case}: {}: {micros:.2} µs, {rate:.0} decisions/s", contestant.name);
        }
    }
    Ok(())
}

/// Checks with the library that the recorded calls were decisions for the users of their sets.
fn check_recorded_calls(redis: &Redis, runtime: &Runtime, quota: &Quota, users: u64) -> Result<()> {
    let limiter = Limiter::new(runtime.block_on(RedisStore::connect(&redis.url()))?);
    for contestant in CONTESTANTS.iter().filter(|contestant| contestant.per_call.is_some()) {
        for number in (0..users).step_by(1_009) {
            let name = user_name(contestant.set, number);
            let decision = runtime.block_on(limiter.peek(&Charge::new(&name, quota)))?;
            ensure!(decision.remaining < LIMIT, "{}: {name} has no decision", contestant.name);
        }
    }
    Ok(())
}
