//! Cost of a decision in Redis, for each algorithm and encoding: the naive script, and the calls
//! that the library sends for one decision and for several, and the best known algorithm. All are
//! sent by the same generator.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;
use anyhow::{Result, ensure};
use tidegate::{Charge, Limiter, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tokio::runtime::Runtime;

use super::Redis;
use super::call::{CallTemplate, user_name};
use super::naive::Structure;
use crate::generator::{Load, Users};
use crate::latency;

/// A script and how it is called.
#[derive(Debug, Clone, Copy)]
struct Contestant {
    name: &'static str,
    /// Name of its set of users. Each contestant has its own, so that their logs grow equally.
    set: &'static str,
    script: Script,
    pipeline: u64,
}

#[derive(Debug, Clone, Copy)]
enum Script {
    Naive,
    /// That of an algorithm that another library documents, if there is one of this kind.
    Published,
    /// Tidegate's, with this number of decisions per call.
    Ours(u64),
}

pub(crate) const NAIVE_ONE: &str = "naive script, P = 1";
pub(crate) const NAIVE: &str = "naive script, P = 16";
pub(crate) const PUBLISHED: &str = "published algorithm, P = 16";
pub(crate) const OURS_ONE: &str = "tidegate, 1 per call, P = 1";
pub(crate) const OURS: &str = "tidegate, 1 per call, P = 16";
pub(crate) const OURS_16: &str = "tidegate, 16 per call";
pub(crate) const OURS_64: &str = "tidegate, 64 per call";

const CONTESTANTS: [Contestant; 7] = [
    Contestant { name: NAIVE_ONE, set: "a", script: Script::Naive, pipeline: 1 },
    Contestant { name: OURS_ONE, set: "b", script: Script::Ours(1), pipeline: 1 },
    Contestant { name: NAIVE, set: "c", script: Script::Naive, pipeline: 16 },
    Contestant { name: OURS, set: "d", script: Script::Ours(1), pipeline: 16 },
    Contestant { name: OURS_16, set: "e", script: Script::Ours(16), pipeline: 1 },
    Contestant { name: OURS_64, set: "f", script: Script::Ours(64), pipeline: 1 },
    Contestant { name: PUBLISHED, set: "like", script: Script::Published, pipeline: 16 },
];
/// Those with one decision per call, which are also measured when they deny, and below saturation.
pub(crate) const SINGLE: [&str; 3] = [NAIVE, PUBLISHED, OURS];

/// Large enough that nothing is denied.
const LIMIT: u64 = 100;
/// Of users all of whose requests are denied after these. The recorded call takes two.
const DENIED_LIMIT: u64 = 2;
/// Long enough that nothing expires during the suite.
const WINDOW: Duration = Duration::from_secs(86_400);

/// Returns the case in which all requests are denied.
pub(crate) fn denied_case(structure: Structure, keys: &str) -> String {
    format!("{}/denied/{keys}", structure.name())
}

/// Returns the name of a contestant of [`SINGLE`] on the page, without its pipeline.
pub(crate) fn shown(structure: Structure, name: &str) -> String {
    match (name, structure.published()) {
        (PUBLISHED, Some(published)) => format!("script of ours after {}", published.library),
        _ => name.split(',').next().unwrap_or_default().to_owned(),
    }
}

/// A suite that runs, and the structure whose turn it is.
struct Run<'a> {
    plan: Plan,
    redis: &'a Redis,
    runtime: &'a Runtime,
    structure: Structure,
    users: u64,
    decisions: u64,
    results: &'a mut Results,
}

type Call = (Contestant, Arc<CallTemplate>);

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut results = Results::new("scripts", plan);
    let (users, decisions) = plan.script_users_and_decisions();
    for structure in Structure::ALL {
        let (redis, runtime, results) = (&redis, &runtime, &mut results);
        Run { plan, redis, runtime, structure, users, decisions, results }.run()?;
    }
    results.save()
}

impl Run<'_> {
    fn run(&mut self) -> Result<()> {
        let case = self.structure.name();
        ::redis::cmd("FLUSHALL").exec(&mut self.redis.connection()?)?;
        let calls = self.calls(LIMIT, &CONTESTANTS, "")?;
        // All keys exist before the first round, so that no round creates more than another.
        for (contestant, call) in &calls {
            self.send(call, 16, self.users, Users::InOrder)?;
            let bytes = self.bytes(call)?;
            self.results.add(case, contestant.name, "redis_bytes", bytes);
        }
        self.turns(case, &calls, Users::Random(self.users))?;
        self.check_recorded_calls(&calls, "", LIMIT)?;
        if self.structure.published().is_some() {
            let single = calls.iter().filter(|(one, _)| SINGLE.contains(&one.name));
            let request = |(one, call): &Call| {
                (shown(self.structure, one.name), call.request(self.redis.port()))
            };
            let requests: Vec<_> = single.map(request).collect();
            latency::measure(self.plan, case, &requests, self.results)?;
        }
        let single: Vec<Contestant> =
            CONTESTANTS.into_iter().filter(|one| SINGLE.contains(&one.name)).collect();
        let calls = self.calls(DENIED_LIMIT, &single, "-denied")?;
        for (_, call) in &calls {
            for _ in 0..DENIED_LIMIT {
                self.send(call, 16, self.users, Users::InOrder)?;
            }
        }
        for (keys, users) in [("random", self.users), ("hot", 1)] {
            self.turns(&denied_case(self.structure, keys), &calls, Users::Random(users))?;
        }
        self.check_recorded_calls(&calls, "-denied", DENIED_LIMIT)
    }

    /// Returns the calls of the contestants that have a script of this kind.
    fn calls(&self, limit: u64, contestants: &[Contestant], suffix: &str) -> Result<Vec<Call>> {
        let quota = self.structure.quota(limit, WINDOW)?;
        let mut calls = Vec::new();
        for contestant in contestants {
            let set = format!("{}{suffix}", contestant.set);
            let (redis, structure) = (self.redis, self.structure);
            let call = match (contestant.script, structure.published()) {
                (Script::Naive, _) => CallTemplate::naive(redis, structure, &set, limit, WINDOW)?,
                (Script::Published, None) => continue,
                (Script::Published, Some(published)) => {
                    CallTemplate::published(redis, published, &set, limit, WINDOW)?
                }
                (Script::Ours(callers), _) => {
                    CallTemplate::record(redis, self.runtime, &quota, &set, callers)?
                }
            };
            calls.push((*contestant, Arc::new(call)));
        }
        Ok(calls)
    }

    /// Sends calls, and returns the decisions per second and their number.
    fn send(
        &self,
        call: &Arc<CallTemplate>,
        pipeline: u64,
        decisions: u64,
        users: Users,
    ) -> Result<(f64, f64)> {
        let per_call = call.decisions() as u64;
        let calls = u64::div_ceil(decisions, per_call);
        let load = Load::pipelined(pipeline, users, calls);
        let per_second = load.run(&call.request(self.redis.port()))?.per_second;
        Ok((per_second * per_call as f64, (calls * per_call) as f64))
    }

    fn turns(&mut self, case: &str, calls: &[Call], users: Users) -> Result<()> {
        for round in 0..self.plan.rounds() {
            for turn in 0..calls.len() {
                // Rotate the order of the contestants in each round.
                let (contestant, call) = &calls[(turn + round) % calls.len()];
                self.redis.reset_statistics()?;
                let before = self.redis.cpu_seconds()?;
                let (per_second, decisions) =
                    self.send(call, contestant.pipeline, self.decisions, users)?;
                let micros = (self.redis.cpu_seconds()? - before) * 1e6 / decisions;
                let calls_per_decision = self.redis.script_calls()? / decisions;
                self.results.add(case, contestant.name, "per_second", per_second);
                self.results.add(case, contestant.name, "redis_micros", micros);
                self.results.add(case, contestant.name, "redis_calls", calls_per_decision);
            }
        }
        for (contestant, _) in calls {
            let of =
                |metric| self.results.spread(case, contestant.name, metric).map(|one| one.median);
            if let (Some(micros), Some(rate)) = (of("redis_micros"), of("per_second")) {
                println!("{case}: {}: {micros:.2} µs, {rate:.0} decisions/s", contestant.name);
            }
        }
        Ok(())
    }

    /// Returns the bytes of the keys of a user.
    fn bytes(&self, call: &CallTemplate) -> Result<f64> {
        let mut bytes = 0;
        for key in call.keys(1) {
            let mut usage = ::redis::cmd("MEMORY");
            let usage = usage.arg("USAGE").arg(key).arg("SAMPLES").arg(0);
            bytes += usage.query::<Option<u64>>(&mut self.redis.connection()?)?.unwrap_or_default();
        }
        Ok(bytes as f64)
    }

    /// Checks that the recorded calls were decisions for the users of their sets, with the library,
    /// and that the other scripts deny if nothing should remain.
    fn check_recorded_calls(&self, calls: &[Call], suffix: &str, limit: u64) -> Result<()> {
        let remaining = if limit == DENIED_LIMIT { 0 } else { limit - 1 };
        let store = self.runtime.block_on(RedisStore::connect(&self.redis.url()))?;
        let limiter = Limiter::new(store);
        let quota = self.structure.quota(limit, WINDOW)?;
        for (contestant, call) in calls {
            for number in (0..self.users).step_by(1_009) {
                let name = user_name(&format!("{}{suffix}", contestant.set), number);
                if matches!(contestant.script, Script::Ours(_)) {
                    let charge = Charge::new(&name, &quota);
                    let decision = self.runtime.block_on(limiter.peek(&charge))?;
                    ensure!(decision.remaining <= remaining, "{}: {name}", contestant.name);
                } else if remaining == 0 {
                    let reply = call.command(|| number).query(&mut self.redis.connection()?)?;
                    ensure!(is_denial(&reply), "{}: {name} got {reply:?}", contestant.name);
                }
            }
        }
        Ok(())
    }
}

/// Returns whether the first number of a reply says no, or is a count above the limit.
fn is_denial(reply: &Value) -> bool {
    match reply {
        Value::Array(fields) => fields.first().is_some_and(is_denial),
        Value::Int(number) => {
            u64::try_from(*number).is_ok_and(|number| number > DENIED_LIMIT) || *number <= 0
        }
        _ => false,
    }
}
