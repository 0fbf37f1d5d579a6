//! Requests per second over the Redis protocol by `redis-benchmark`, with and without pipelines:
//! the service with the memory store, a no-op server, Redis with a naive script and with
//! Tidegate's, and throttlecrab-server.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tidegate::Quota;
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::{Load, Protocol, Request, USER, Users};
use crate::latency;
use crate::load::Throughput;
use crate::process::{Server, free_port, own_binary, run_tool};
use crate::redis::Redis;
use crate::redis::call::CallTemplate;
use crate::redis::naive::Structure;
use crate::servers::{self, Limit, ON_MEMORY};

/// Commands that a client sends before it reads the answers.
pub(crate) const PIPELINES: [u32; 3] = [1, 16, 64];
/// Requests by which the rate of a candidate is estimated.
const WARM_UP_REQUESTS: f64 = 20_000.0;

struct Candidate {
    name: &'static str,
    server: Server,
    generator: Generator,
    request: Request,
}

/// Generator of the load.
enum Generator {
    /// `redis-benchmark` with this command.
    Tool(Vec<String>),
    /// That of the scripts suite: `redis-benchmark` cannot send arguments that are not text.
    Own,
}

/// `redis-benchmark` writes a random number in its place. It is as long as [`USER`].
const RANDOM: &str = "__rand_int__";
const CONNECTIONS: usize = 50;
const KEYS: u64 = 100_000;
const LIMIT: u64 = 1_000_000_000;
const WINDOW: Duration = Duration::from_secs(1);

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut candidates = vec![
        Candidate::of(servers::tidegate(folder.path(), ON_MEMORY)?)?,
        no_op()?,
        naive_script()?,
        own_script()?,
    ];
    candidates.extend(servers::throttlecrab()?.map(Candidate::of).transpose()?);
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
    let requests: Vec<_> =
        candidates.iter().map(|candidate| (candidate.name, candidate.request.clone())).collect();
    latency::measure(plan, "resp", &requests, &mut results)?;
    for candidate in &candidates {
        candidate.server.record_memory("memory", candidate.name, &mut results)?;
    }
    results.save()
}

impl Candidate {
    /// Sends its command by `redis-benchmark`.
    fn of(one: servers::Candidate) -> Result<Self> {
        let request = one.request(Protocol::Resp, Limit::Free).context("no Redis protocol")?;
        let words = one.resp(Limit::Free).into_iter().map(|word| word.replace(USER, RANDOM));
        Ok(Self {
            name: one.name,
            generator: Generator::Tool(words.collect()),
            server: one.server,
            request,
        })
    }

    /// Sends requests over 50 connections, with random keys of a hundred thousand.
    fn load(&self, pipeline: u32, requests: f64) -> Result<Throughput> {
        let command = match &self.generator {
            Generator::Tool(command) => command,
            Generator::Own => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "small"
                )]
                let load = Load::pipelined(pipeline.into(), Users::Random(KEYS), requests as u64);
                return Throughput::measure(&self.server, || {
                    Ok((requests, load.run(&self.request)?.per_second))
                });
            }
        };
        Throughput::measure(&self.server, || {
            let mut tool = Command::new("redis-benchmark");
            tool.args(["-p", &self.request.port.to_string(), "-n", &format!("{requests:.0}")]);
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

/// The no-op server gets the same commands as Tidegate.
fn no_op() -> Result<Candidate> {
    let port = free_port()?;
    let mut command = Command::new(own_binary("no_op_resp")?);
    let server = Server::start("no-op", command.arg(format!("127.0.0.1:{port}")), &[port])?;
    let (http, grpc, resp) = (None, None, Some(port));
    Candidate::of(servers::Candidate { name: "no-op", server, http, grpc, resp })
}

fn naive_script() -> Result<Candidate> {
    let redis = Redis::start()?;
    let call = CallTemplate::naive(&redis, Structure::TokenBucket, "user", LIMIT, WINDOW)?;
    let words = call.words_with(RANDOM).into_iter().map(String::from_utf8);
    let generator = Generator::Tool(words.collect::<Result<Vec<_>, _>>()?);
    let request = call.request(redis.port());
    Ok(Candidate { name: "Redis, naive script", server: redis.into_server(), generator, request })
}

/// Tidegate's own script, called as the library calls it for one decision.
fn own_script() -> Result<Candidate> {
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let quota = Quota::token_bucket(LIMIT, WINDOW)?;
    let call = CallTemplate::record(&redis, &runtime, &quota, "user", 1)?;
    let (request, server) = (call.request(redis.port()), redis.into_server());
    Ok(Candidate { name: "Redis, own script", server, generator: Generator::Own, request })
}
