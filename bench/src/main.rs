//! `tidegate-bench`: runs the suites, and makes `docs/benchmarks.md` of what they found.

use std::process::Command;

use anyhow::{Result, bail, ensure};
use tidegate_bench::plan::Plan;

mod grpc;
mod http;
mod load;
mod process;
#[path = "../../crates/tidegate-server/src/envoy/proto.rs"]
mod proto;
mod redis;
mod report;
mod service;

/// As in our own service: callers of the library on Redis allocate as it does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SUITES: &str = "in-process, http, redis, service, logs, report; without any, all of them";

fn main() -> Result<()> {
    let plan = Plan::chosen();
    let suites: Vec<String> = std::env::args().skip(1).collect();
    let all = ["in-process", "http", "redis", "service", "logs", "report"].map(str::to_owned);
    for suite in if suites.is_empty() { all.to_vec() } else { suites } {
        println!("== {suite}");
        match suite.as_str() {
            "in-process" => in_process()?,
            "http" => http::run(plan)?,
            "redis" => redis::decisions::run(plan)?,
            "service" => service::run(plan)?,
            "logs" => redis::logs::run(plan)?,
            "report" => report::run()?,
            other => bail!("there is no suite {other}: {SUITES}"),
        }
    }
    Ok(())
}

/// In a process of its own, where the allocator counts.
fn in_process() -> Result<()> {
    let status = Command::new(process::our_binary("in_process")?).status()?;
    ensure!(status.success(), "in_process: {status}");
    Ok(())
}
