//! The service on Redis: an exact packed log with random keys, compared with no-op servers that get
//! the same requests. Clients, service and Redis share the same cores.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::grpc::random_key_load;
use crate::http::{check_grpc, start_no_op};
use crate::load::{OpenLoopLatency, Throughput, wrk};
use crate::process::{Server, free_port, own_binary};
use crate::redis::Redis;

/// Requests per second at which latency is measured, far below the highest rate.
pub(crate) const LATENCY_RATE: u32 = 2_000;

struct Candidate {
    name: &'static str,
    server: Server,
    http: u16,
    grpc: u16,
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let candidates = [tidegate(folder.path(), &redis)?, no_op()?];
    for candidate in &candidates {
        runtime.block_on(check_grpc(candidate.grpc))?;
    }
    let mut results = Results::new("service", plan);
    let load = |protocol: &str, candidate: &Candidate, plan: Plan| {
        if protocol == "http" {
            let script = random_key_script(folder.path(), candidate.http)?;
            let url = format!("http://127.0.0.1:{}", candidate.http);
            return wrk(&candidate.server, &script, &url, plan.turn());
        }
        Throughput::measure(&candidate.server, || {
            runtime.block_on(random_key_load(candidate.grpc, plan.turn()))
        })
    };
    for protocol in ["http", "grpc"] {
        for candidate in &candidates {
            load(protocol, candidate, Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                let candidate = &candidates[(turn + round) % candidates.len()];
                redis.reset_statistics()?;
                let before = redis.cpu_seconds()?;
                let load = load(protocol, candidate, plan)?;
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
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                let candidate = &candidates[(turn + round) % candidates.len()];
                let latency = candidate.latency(protocol, plan)?;
                results.add(protocol, candidate.name, "open_p50_micros", latency.p50_micros);
                results.add(protocol, candidate.name, "open_p99_micros", latency.p99_micros);
            }
        }
    }
    results.save()
}

impl Candidate {
    /// Measures the latency at a rate that is far from the highest one.
    fn latency(&self, protocol: &str, plan: Plan) -> Result<OpenLoopLatency> {
        let url = format!("http://127.0.0.1:{}", self.http);
        let address = format!("127.0.0.1:{}", self.grpc);
        let http = ["--http", &url, "--policy", "log"];
        let grpc = ["--grpc", &address, "--domain", "bench", "--descriptor", "user={key}"];
        let target = if protocol == "http" { http.as_slice() } else { grpc.as_slice() };
        OpenLoopLatency::measure(target, LATENCY_RATE, plan.turn())
    }
}

fn tidegate(folder: &Path, redis: &Redis) -> Result<Candidate> {
    let (http, grpc, admin) = (free_port()?, free_port()?, free_port()?);
    let config = folder.join("tidegate.yaml");
    // A long timeout, so that no decision is made by the fallback.
    std::fs::write(
        &config,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', \
             admin: '127.0.0.1:{admin}'}}\n\
             store: {{redis: '{}', timeout: 2s}}\n\
             policies:\n  \
             - {{name: log, match: {{domain: bench}}, key: [descriptor.user], \
             algorithm: sliding-log, encoding: packed, limit: 100, window: 60s}}\n",
            redis.url()
        ),
    )?;
    let mut command = Command::new(own_binary("tidegate")?);
    let server =
        Server::start("tidegate", command.arg("serve").arg("--config").arg(config), &[http, grpc])?;
    Ok(Candidate { name: "tidegate", server, http, grpc })
}

fn no_op() -> Result<Candidate> {
    let (http, grpc) = (free_port()?, free_port()?);
    Ok(Candidate { name: "no-op", server: start_no_op(http, grpc)?, http, grpc })
}

/// Writes a wrk script that sends a random key in each request. The script builds the request
/// itself, because `wrk.format` is much slower.
fn random_key_script(folder: &Path, port: u16) -> Result<PathBuf> {
    let body = r#"{"policy":"log","key":""#;
    let length = body.len() + 8 + 2;
    let lua = format!(
        "local head = 'POST /v1/acquire HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\n\
         Content-Type: application/json\\r\\nContent-Length: {length}\\r\\n\\r\\n{body}'\n\
         math.randomseed(os.time())\n\
         request = function()\n\
         return head .. string.format('%08d', math.random(0, 999999)) .. '\"}}'\n\
         end\n"
    );
    let path = folder.join(format!("random-{port}.lua"));
    std::fs::write(&path, lua)?;
    Ok(path)
}
