//! The service on Redis: an exact packed log with random keys, compared with no-op servers that get
//! the same requests. Clients, service and Redis share the same cores.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::{Load, Protocol, Request, USER, Users};
use crate::latency;
use crate::load::{Throughput, wrk};
use crate::redis::Redis;
use crate::servers::{Candidate, Limit, check_grpc, no_op, tidegate};

const USERS: Users = Users::Random(1_000_000);

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // A long timeout, so that no decision is made by the fallback.
    let on_redis = format!(
        "store: {{redis: '{}', timeout: 2s}}\n\
         policies:\n  \
         - {{name: p, match: {{domain: bench}}, key: [descriptor.user], \
         algorithm: sliding-log, encoding: packed, limit: 100, window: 60s}}\n",
        redis.url()
    );
    let candidates = [tidegate(folder.path(), &on_redis)?, no_op()?];
    for candidate in &candidates {
        runtime.block_on(check_grpc(candidate))?;
    }
    let mut results = Results::new("service", plan);
    let load = |candidate: &Candidate, request: &Request, turn: Duration| {
        if request.protocol == Protocol::Http {
            let script = random_key_script(folder.path(), request)?;
            let url = format!("http://127.0.0.1:{}", request.port);
            return wrk(&candidate.server, &script, &url, turn);
        }
        Throughput::measure(&candidate.server, || {
            // As many streams as `h2load` has.
            let load = Load { connections: 8, pipeline: 32, ..Load::closed(USERS, turn) };
            let outcome = load.run(request)?;
            Ok((outcome.answers.count as f64, outcome.per_second))
        })
    };
    for (protocol, kind) in [("http", Protocol::Http), ("grpc", Protocol::Grpc)] {
        let request = |one: &Candidate| {
            Ok((one.name, one.request(kind, Limit::Free).context("no such protocol")?))
        };
        let requests = candidates.iter().map(request).collect::<Result<Vec<_>>>()?;
        for (candidate, (_, request)) in candidates.iter().zip(&requests) {
            load(candidate, request, Plan::Quick.turn())?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                let index = (turn + round) % candidates.len();
                let candidate = &candidates[index];
                redis.reset_statistics()?;
                let before = redis.cpu_seconds()?;
                let load = load(candidate, &requests[index].1, plan.turn())?;
                results.add(protocol, candidate.name, "per_second", load.per_second);
                results.add(protocol, candidate.name, "cpu_micros", load.cpu_micros);
                if candidate.name == "tidegate" {
                    let decisions = load.per_second * plan.turn().as_secs_f64();
                    let micros = (redis.cpu_seconds()? - before) * 1e6;
                    results.add(protocol, candidate.name, "redis_micros", micros / decisions);
                    results.add(
                        protocol,
                        candidate.name,
                        "redis_calls",
                        redis.script_calls()? / decisions,
                    );
                }
            }
        }
        if let (Some(rate), Some(ratio)) = (
            results.spread(protocol, "tidegate", "per_second"),
            results.ratio("per_second", (protocol, "tidegate"), (protocol, "no-op")),
        ) {
            println!("{protocol} on Redis: {:.0} requests/s, {ratio} of no-op", rate.median);
        }
        latency::measure(plan, protocol, &requests, &mut results)?;
    }
    results.save()
}

/// Writes a wrk script that sends a random key in each request. The script builds the request
/// itself, because `wrk.format` is much slower.
fn random_key_script(folder: &Path, request: &Request) -> Result<PathBuf> {
    let text = String::from_utf8(request.bytes.clone())?.replace("\r\n", "\\r\\n");
    let (head, rest) = text.split_once(USER).context("no user")?;
    let lua = format!(
        "math.randomseed(os.time())\n\
         request = function()\n\
         return '{head}' .. string.format('%012d', math.random(0, 999999)) .. '{rest}'\n\
         end\n"
    );
    let path = folder.join("random.lua");
    std::fs::write(&path, lua)?;
    Ok(path)
}
