//! Requests per second over the Redis protocol by `redis-benchmark`, with and without pipelines:
//! the service with the memory store, a no-op server, Redis with a naive script and with
//! Tidegate's, and throttlecrab-server.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tidegate::Quota;
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tokio::runtime::Runtime;

use crate::load::Throughput;
use crate::process::{Server, free_port, own_binary, peer_binary, run_tool};
use crate::redis::Redis;
use crate::redis::call::CallTemplate;
use crate::redis::load::{ScriptLoad, Users};
use crate::redis::naive::Structure;

/// Commands that a client sends before it reads the answers.
pub(crate) const PIPELINES: [u32; 3] = [1, 16, 64];
/// Requests by which the rate of a candidate is estimated.
const WARM_UP_REQUESTS: f64 = 20_000.0;

struct Candidate {
    name: &'static str,
    server: Server,
    port: u16,
    load: Load,
}

/// Generator of the load.
enum Load {
    /// `redis-benchmark` with this command.
    Tool(Vec<String>),
    /// That of the scripts suite: `redis-benchmark` cannot send arguments that are not text.
    Own(Runtime, Arc<CallTemplate>),
}

/// `redis-benchmark` writes a random number in its place.
const RANDOM: &[u8; 12] = b"__rand_int__";
const CONNECTIONS: usize = 50;
const KEYS: u64 = 100_000;
const LIMIT: u64 = 1_000_000_000;
const WINDOW: Duration = Duration::from_secs(1);

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut candidates = vec![tidegate(folder.path())?, no_op()?, naive_script()?, own_script()?];
    match peer_binary("throttlecrab-server") {
        Some(binary) => candidates.push(throttlecrab(&binary)?),
        None => println!("skipping throttlecrab-server: not installed (make bench-tools)"),
    }
    let mut results = Results::new("resp", plan);
    for pipeline in PIPELINES {
        let case = format!("pipeline/{pipeline}");
        // The rates differ by a factor of 50, so each candidate gets its own number of requests.
        let mut requests = Vec::new();
        for candidate in &candidates {
            let rate = candidate.load(pipeline, WARM_UP_REQUESTS)?.per_second;
            requests.push(rate * plan.turn().as_secs_f64());
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                let index = (turn + round) % candidates.len();
                let load = candidates[index].load(pipeline, requests[index])?;
                let name = candidates[index].name;
                results.add(&case, name, "per_second", load.per_second);
                results.add(&case, name, "cpu_micros", load.cpu_micros);
            }
        }
        for candidate in &candidates {
            let Some(rate) = results.spread(&case, candidate.name, "per_second") else { continue };
            print!("-P {pipeline}: {} {:.0} requests/s", candidate.name, rate.median);
            match results.ratio("per_second", (&case, "tidegate"), (&case, candidate.name)) {
                Some(ratio) if candidate.name != "tidegate" => {
                    println!("; tidegate/{}: {ratio}", candidate.name);
                }
                _ => println!(),
            }
        }
    }
    results.save()
}

impl Candidate {
    /// Sends requests over 50 connections, with random keys of a hundred thousand.
    fn load(&self, pipeline: u32, requests: f64) -> Result<Throughput> {
        let command = match &self.load {
            Load::Tool(command) => command,
            Load::Own(runtime, call) => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "small"
                )]
                let (pipeline, calls) = (pipeline as usize, requests as u64);
                return Throughput::measure(&self.server, || {
                    let load = ScriptLoad { connections: CONNECTIONS, pipeline, calls };
                    let sent = load.run(self.port, call, Users::Random(KEYS));
                    Ok((requests, runtime.block_on(sent)?))
                });
            }
        };
        Throughput::measure(&self.server, || {
            let mut tool = Command::new("redis-benchmark");
            tool.args(["-p", &self.port.to_string(), "-n", &format!("{requests:.0}")]);
            tool.args(["-P", &pipeline.to_string(), "-c", &CONNECTIONS.to_string()]);
            tool.args(["-r", &KEYS.to_string(), "-q"]);
            let text = run_tool(tool.args(command))?;
            ensure!(!text.contains("rror"), "redis-benchmark got errors: {text}");
            // …: 812345.12 requests per second, p50=0.231 msec
            let (before, _) = text
                .rsplit_once(" requests per second")
                .with_context(|| format!("redis-benchmark printed no rate: {text}"))?;
            let rate = before.rsplit([' ', '\r']).next().and_then(|word| word.parse().ok());
            Ok((requests, rate.with_context(|| format!("redis-benchmark: {text}"))?))
        })
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn tidegate(folder: &Path) -> Result<Candidate> {
    let (http, grpc, admin, port) = (free_port()?, free_port()?, free_port()?, free_port()?);
    let config = folder.join("tidegate.yaml");
    fs::write(
        &config,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', \
             admin: '127.0.0.1:{admin}', resp: '127.0.0.1:{port}'}}\n\
             policies:\n  - {{name: p, algorithm: token-bucket, limit: 1000000000, window: 1s}}\n"
        ),
    )?;
    let mut command = Command::new(own_binary("tidegate")?);
    let server =
        Server::start("tidegate", command.arg("serve").arg("--config").arg(config), &[port])?;
    let command = words(&["TG.ACQUIRE", "p", "user:__rand_int__"]);
    Ok(Candidate { name: "tidegate", server, port, load: Load::Tool(command) })
}

/// The no-op server gets the same commands as Tidegate.
fn no_op() -> Result<Candidate> {
    let port = free_port()?;
    let mut command = Command::new(own_binary("no_op_resp")?);
    let server = Server::start("no-op", command.arg(format!("127.0.0.1:{port}")), &[port])?;
    let command = words(&["TG.ACQUIRE", "p", "user:__rand_int__"]);
    Ok(Candidate { name: "no-op", server, port, load: Load::Tool(command) })
}

fn naive_script() -> Result<Candidate> {
    let redis = Redis::start()?;
    let set = "user";
    let call = CallTemplate::naive(&redis, Structure::TokenBucket, set, LIMIT, WINDOW)?;
    let words = call.words_with(RANDOM).into_iter().map(String::from_utf8);
    let command = words.collect::<Result<Vec<_>, _>>()?;
    let (port, server) = (redis.port(), redis.into_server());
    Ok(Candidate { name: "Redis, naive script", server, port, load: Load::Tool(command) })
}

/// Tidegate's own script, called as the library calls it for one decision.
fn own_script() -> Result<Candidate> {
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let quota = Quota::token_bucket(LIMIT, WINDOW)?;
    let call = Arc::new(CallTemplate::record(&redis, &runtime, &quota, "user", 1)?);
    let (port, server) = (redis.port(), redis.into_server());
    Ok(Candidate { name: "Redis, own script", server, port, load: Load::Own(runtime, call) })
}

fn throttlecrab(binary: &Path) -> Result<Candidate> {
    let port = free_port()?;
    let mut command = Command::new(binary);
    command.args(["--redis", "--redis-host", "127.0.0.1", "--redis-port", &port.to_string()]);
    command.args(["--log-level", "error"]);
    let server = Server::start("throttlecrab-server", &mut command, &[port])?;
    let command = words(&["THROTTLE", "user:__rand_int__", "1000000000", "1000000000", "1"]);
    Ok(Candidate { name: "throttlecrab", server, port, load: Load::Tool(command) })
}
