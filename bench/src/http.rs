//! Requests per second over HTTP and gRPC: the service with the memory store, throttlecrab-server
//! and no-op servers.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::Protocol;
use crate::latency;
use crate::load::{Throughput, h2load, wrk};
use crate::process::{Server, free_port, own_binary};
use crate::servers::{Candidate, Limit, ON_MEMORY, check_grpc, no_op, throttlecrab, tidegate};

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut candidates = vec![tidegate(folder.path(), ON_MEMORY)?, no_op()?];
    candidates.extend(throttlecrab()?);
    candidates.push(no_op_hyper()?);
    for candidate in &candidates {
        runtime.block_on(check_grpc(candidate))?;
    }
    let mut results = Results::new("http", plan);
    for (case, protocol) in [("http", Protocol::Http), ("grpc", Protocol::Grpc)] {
        let candidates: Vec<&Candidate> = candidates
            .iter()
            .filter(|candidate| protocol == Protocol::Http || candidate.grpc.is_some())
            .collect();
        for candidate in &candidates {
            load(candidate, protocol, folder.path(), Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                // Rotate the order of the candidates in each round.
                let candidate = candidates[(turn + round) % candidates.len()];
                let load = load(candidate, protocol, folder.path(), plan)?;
                results.add(case, candidate.name, "per_second", load.per_second);
                results.add(case, candidate.name, "cpu_micros", load.cpu_micros);
            }
        }
        print_ratios(&results, case, &candidates);
        let request = |one: &&Candidate| Some((one.name, one.request(protocol, Limit::Free)?));
        let requests: Vec<_> = candidates.iter().filter_map(request).collect();
        latency::measure(plan, case, &requests, &mut results)?;
    }
    for candidate in &candidates {
        candidate.server.record_memory("memory", candidate.name, &mut results)?;
    }
    results.save()
}

/// Sends the same request again and again.
fn load(one: &Candidate, protocol: Protocol, folder: &Path, plan: Plan) -> Result<Throughput> {
    let url = |port: Option<u16>, path: &str| {
        Ok::<_, anyhow::Error>(format!("http://127.0.0.1:{}{path}", port.context("no port")?))
    };
    let file = folder.join("request");
    if protocol == Protocol::Grpc {
        let (path, message) = one.grpc(Limit::Free);
        std::fs::write(&file, message)?;
        return h2load(&one.server, &file, &url(one.grpc, path)?, plan.turn());
    }
    let (path, body) = one.http(Limit::Free);
    let lua = format!(
        "wrk.method = 'POST'\nwrk.body = '{body}'\n\
         wrk.headers['Content-Type'] = 'application/json'\n"
    );
    std::fs::write(&file, lua)?;
    wrk(&one.server, &file, &url(one.http, path)?, plan.turn())
}

fn print_ratios(results: &Results, protocol: &str, candidates: &[&Candidate]) {
    for candidate in candidates {
        let Some(rate) = results.spread(protocol, candidate.name, "per_second") else { continue };
        print!("{protocol}: {} {:.0} requests/s", candidate.name, rate.median);
        match results.ratio("per_second", (protocol, "tidegate"), (protocol, candidate.name)) {
            Some(ratio) if candidate.name != "tidegate" => {
                println!("; tidegate/{}: {ratio}", candidate.name);
            }
            _ => println!(),
        }
    }
}

/// Bare hyper, which has no gRPC.
fn no_op_hyper() -> Result<Candidate> {
    let http = free_port()?;
    let mut command = Command::new(own_binary("no_op_hyper")?);
    let server = Server::start("hyper", command.arg(format!("127.0.0.1:{http}")), &[http])?;
    Ok(Candidate { name: "no-op hyper", server, http: Some(http), grpc: None, resp: None })
}
