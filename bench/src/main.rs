//! `tidegate-bench`: runs the suites and generates `docs/benchmarks.md` from their results.

use std::process::Command;

use anyhow::{Result, bail, ensure};
use tidegate_bench::plan::Plan;

mod attack;
mod gateway;
mod generator;
mod grpc;
mod http;
mod latency;
mod load;
mod process;
mod redis;
mod report;
mod resp;
mod servers;
mod service;

/// The allocator of the service, so that callers of the library on Redis use the same one.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SUITES: [&str; 12] = [
    "in-process",
    "http",
    "gateway",
    "resp",
    "attack",
    "scripts",
    "redis",
    "fleet",
    "cluster",
    "service",
    "logs",
    "report",
];

fn main() -> Result<()> {
    let plan = Plan::from_env();
    let suites: Vec<String> = std::env::args().skip(1).collect();
    if let [command, task] = suites.as_slice()
        && command == redis::fleet::worker::COMMAND
    {
        return redis::fleet::worker::run(task);
    }
    for suite in if suites.is_empty() { SUITES.map(str::to_owned).to_vec() } else { suites } {
        println!("== {suite}");
        match suite.as_str() {
            "in-process" => in_process(&[])?,
            "layer" => in_process(&["layer"])?,
            "gateway" => gateway::run(plan)?,
            "http" => http::run(plan)?,
            "resp" => resp::run(plan)?,
            "attack" => attack::run(plan)?,
            "scripts" => redis::scripts::run(plan)?,
            "redis" => redis::decisions::run(plan)?,
            "fleet" => redis::fleet::run(plan)?,
            "cluster" => redis::cluster::run(plan)?,
            "service" => service::run(plan)?,
            "logs" => redis::logs::run(plan)?,
            "report" => report::run()?,
            other => bail!("unknown suite {other}; suites: {} (default: all)", SUITES.join(", ")),
        }
    }
    Ok(())
}

/// Runs the suite in a separate process, which has a counting allocator.
fn in_process(parts: &[&str]) -> Result<()> {
    let status = Command::new(process::own_binary("in_process")?).args(parts).status()?;
    ensure!(status.success(), "in_process: {status}");
    Ok(())
}
