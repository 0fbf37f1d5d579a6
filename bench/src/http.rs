//! Requests per second over HTTP and gRPC: the service with the memory store, throttlecrab-server
//! and no-op servers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::grpc::{ENVOY_PATH, encode_message, envoy_request, unary_call};
use crate::load::{Throughput, h2load, wrk};
use crate::process::{Server, free_port, own_binary, peer_binary};
use tidegate_bench::proto::envoy::service::ratelimit::v3::RateLimitResponse;

/// A server, with its requests for both protocols.
struct Candidate {
    name: &'static str,
    server: Server,
    http_url: String,
    http_script: PathBuf,
    /// Address and message of the call; `None` for a server of HTTP alone.
    grpc: Option<(String, PathBuf)>,
}

/// Function that measures one turn of a candidate.
type Protocol = fn(&Candidate, Plan) -> Result<Throughput>;

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut candidates = Vec::new();
    for start in [tidegate, no_op] {
        let (http, grpc) = (free_port()?, free_port()?);
        candidates.push(start(folder.path(), http, grpc)?);
        runtime.block_on(check_grpc(grpc))?;
    }
    match peer_binary("throttlecrab-server") {
        Some(binary) => candidates.push(runtime.block_on(throttlecrab(&binary, folder.path()))?),
        None => println!("skipping throttlecrab-server: not installed (make bench-tools)"),
    }
    candidates.push(no_op_hyper(folder.path())?);
    let mut results = Results::new("http", plan);
    let protocols: [(&str, Protocol); 2] = [
        ("http", |one, plan| wrk(&one.server, &one.http_script, &one.http_url, plan.turn())),
        ("grpc", |one, plan| {
            let (url, message) = one.grpc.as_ref().context("a server of HTTP alone")?;
            h2load(&one.server, message, url, plan.turn())
        }),
    ];
    for (protocol, load) in protocols {
        if protocol == "grpc" {
            candidates.retain(|candidate| candidate.grpc.is_some());
        }
        for candidate in &candidates {
            load(candidate, Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                // Rotate the order of the candidates in each round.
                let candidate = &candidates[(turn + round) % candidates.len()];
                let load = load(candidate, plan)?;
                results.add(protocol, candidate.name, "per_second", load.per_second);
                results.add(protocol, candidate.name, "cpu_micros", load.cpu_micros);
            }
        }
        print_ratios(&results, protocol, &candidates);
    }
    results.save()
}

fn print_ratios(results: &Results, protocol: &str, candidates: &[Candidate]) {
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

/// Writes a wrk script that repeats a POST request.
fn post(path: PathBuf, body: &str) -> Result<PathBuf> {
    let lua = format!(
        "wrk.method = 'POST'\nwrk.body = '{body}'\n\
         wrk.headers['Content-Type'] = 'application/json'\n"
    );
    std::fs::write(&path, lua)?;
    Ok(path)
}

fn message(path: PathBuf, message: &impl prost::Message) -> Result<PathBuf> {
    std::fs::write(&path, encode_message(message))?;
    Ok(path)
}

fn tidegate(folder: &Path, http: u16, grpc: u16) -> Result<Candidate> {
    let admin = free_port()?;
    std::fs::write(
        folder.join("ratelimit.yaml"),
        "domain: bench\ndescriptors:\n  \
         - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000000}}\n",
    )?;
    let config = folder.join("tidegate.yaml");
    std::fs::write(
        &config,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', \
             admin: '127.0.0.1:{admin}'}}\n\
             envoy: {{files: [ratelimit.yaml], algorithm: token-bucket}}\n\
             policies:\n  - {{name: p, key: [ip], algorithm: token-bucket, limit: 1000000000, \
             window: 1s}}\n"
        ),
    )?;
    let mut command = Command::new(own_binary("tidegate")?);
    let server =
        Server::start("tidegate", command.arg("serve").arg("--config").arg(config), &[http, grpc])?;
    Ok(Candidate {
        name: "tidegate",
        server,
        http_url: format!("http://127.0.0.1:{http}/v1/acquire"),
        http_script: post(folder.join("tidegate.lua"), r#"{"policy": "p", "key": "user123"}"#)?,
        grpc: Some((
            format!("http://127.0.0.1:{grpc}{ENVOY_PATH}"),
            message(folder.join("tidegate.message"), &envoy_request("user123"))?,
        )),
    })
}

/// The no-op server gets the same requests as Tidegate.
fn no_op(folder: &Path, http: u16, grpc: u16) -> Result<Candidate> {
    Ok(Candidate {
        name: "no-op",
        server: start_no_op(http, grpc)?,
        http_url: format!("http://127.0.0.1:{http}/v1/acquire"),
        http_script: post(folder.join("no-op.lua"), r#"{"policy": "p", "key": "user123"}"#)?,
        grpc: Some((
            format!("http://127.0.0.1:{grpc}{ENVOY_PATH}"),
            message(folder.join("no-op.message"), &envoy_request("user123"))?,
        )),
    })
}

/// Bare hyper, which has no gRPC.
fn no_op_hyper(folder: &Path) -> Result<Candidate> {
    let http = free_port()?;
    let mut command = Command::new(own_binary("no_op_hyper")?);
    let server = Server::start("hyper", command.arg(format!("127.0.0.1:{http}")), &[http])?;
    Ok(Candidate {
        name: "no-op hyper",
        server,
        http_url: format!("http://127.0.0.1:{http}/v1/acquire"),
        http_script: post(folder.join("hyper.lua"), r#"{"policy": "p", "key": "user123"}"#)?,
        grpc: None,
    })
}

pub(crate) fn start_no_op(http: u16, grpc: u16) -> Result<Server> {
    let mut command = Command::new(own_binary("no_op")?);
    Server::start(
        "no-op",
        command.args([format!("127.0.0.1:{http}"), format!("127.0.0.1:{grpc}")]),
        &[http, grpc],
    )
}

/// Makes one call and checks the answer, because `h2load` does not detect gRPC errors.
pub(crate) async fn check_grpc(port: u16) -> Result<()> {
    let answer: RateLimitResponse = unary_call(port, ENVOY_PATH, envoy_request("user123")).await?;
    ensure!(answer.overall_code == 1, "not allowed: {answer:?}");
    Ok(())
}

/// Message of throttlecrab, as in its `proto/throttlecrab.proto`.
#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ThrottleResponse {
    #[prost(bool, tag = "1")]
    allowed: bool,
}

async fn throttlecrab(binary: &Path, folder: &Path) -> Result<Candidate> {
    let (http, grpc) = (free_port()?, free_port()?);
    let mut command = Command::new(binary);
    command.args(["--http", "--http-host", "127.0.0.1", "--http-port", &http.to_string()]);
    command.args(["--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", &grpc.to_string()]);
    command.args(["--log-level", "error"]);
    let server = Server::start("throttlecrab-server", &mut command, &[http, grpc])?;
    let limit = 1_000_000_000;
    let request = ThrottleRequest {
        key: "user123".to_owned(),
        max_burst: limit,
        count_per_period: limit,
        period: 1,
        quantity: 1,
    };
    let body = format!(
        "{{\"key\": \"user123\", \"max_burst\": {limit}, \"count_per_period\": {limit}, \
         \"period\": 1, \"quantity\": 1}}"
    );
    let path = "/throttlecrab.RateLimiter/Throttle";
    let answer: ThrottleResponse = unary_call(grpc, path, request.clone()).await?;
    ensure!(answer.allowed, "throttlecrab denied a request");
    Ok(Candidate {
        name: "throttlecrab",
        server,
        http_url: format!("http://127.0.0.1:{http}/throttle"),
        http_script: post(folder.join("throttlecrab.lua"), &body)?,
        grpc: Some((
            format!("http://127.0.0.1:{grpc}{path}"),
            message(folder.join("throttlecrab.message"), &request)?,
        )),
    })
}
