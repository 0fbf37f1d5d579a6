//! Requests a second over HTTP and gRPC: our service on memory, throttlecrab's server, and servers
//! that do nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::grpc::{ENVOY_PATH, envoy_request, framed, unary};
use crate::load::{Load, h2load, wrk};
use crate::process::{Server, free_port, our_binary, peer_binary};
use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;

/// A server with what it is asked by either protocol.
struct Contestant {
    name: &'static str,
    server: Server,
    http_url: String,
    http_script: PathBuf,
    grpc_url: String,
    grpc_message: PathBuf,
}

/// One turn of a contestant.
type Protocol = fn(&Contestant, Plan) -> Result<Load>;

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut contestants = Vec::new();
    for start in [tidegate, do_nothing] {
        let (http, grpc) = (free_port()?, free_port()?);
        contestants.push(start(folder.path(), http, grpc)?);
        runtime.block_on(check_grpc(grpc))?;
    }
    match peer_binary("throttlecrab-server") {
        Some(binary) => contestants.push(runtime.block_on(throttlecrab(&binary, folder.path()))?),
        None => println!("throttlecrab-server is left out: it is not installed (make bench-tools)"),
    }
    let mut results = Results::new("http", plan);
    let protocols: [(&str, Protocol); 2] = [
        ("http", |one, plan| wrk(&one.server, &one.http_script, &one.http_url, plan.turn())),
        ("grpc", |one, plan| h2load(&one.server, &one.grpc_message, &one.grpc_url, plan.turn())),
    ];
    for (protocol, load) in protocols {
        for contestant in &contestants {
            load(contestant, Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..contestants.len() {
                // Who goes first changes.
                let contestant = &contestants[(turn + round) % contestants.len()];
                let load = load(contestant, plan)?;
                results.add(protocol, contestant.name, "per_second", load.per_second);
                results.add(protocol, contestant.name, "processor_micros", load.processor_micros);
            }
        }
        print_ratios(&results, protocol, &contestants);
    }
    results.save()
}

fn print_ratios(results: &Results, protocol: &str, contestants: &[Contestant]) {
    for contestant in contestants {
        let Some(rate) = results.spread(protocol, contestant.name, "per_second") else { continue };
        print!("{protocol}: {} {:.0} a second", contestant.name, rate.median);
        match results.ratio("per_second", (protocol, "tidegate"), (protocol, contestant.name)) {
            Some(ratio) if contestant.name != "tidegate" => println!("; tidegate {ratio} of it"),
            _ => println!(),
        }
    }
}

/// A script for wrk that posts the same body over and over.
fn post(path: PathBuf, body: &str) -> Result<PathBuf> {
    let lua = format!(
        "wrk.method = 'POST'\nwrk.body = '{body}'\nwrk.headers['Content-Type'] = 'application/json'\n"
    );
    std::fs::write(&path, lua)?;
    Ok(path)
}

fn message(path: PathBuf, message: &impl prost::Message) -> Result<PathBuf> {
    std::fs::write(&path, framed(message))?;
    Ok(path)
}

fn tidegate(folder: &Path, http: u16, grpc: u16) -> Result<Contestant> {
    let admin = free_port()?;
    std::fs::write(
        folder.join("ratelimit.yaml"),
        "domain: bench\ndescriptors:\n  - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000000}}\n",
    )?;
    let config = folder.join("tidegate.yaml");
    std::fs::write(
        &config,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', admin: '127.0.0.1:{admin}'}}\n\
             envoy: {{files: [ratelimit.yaml], algorithm: token-bucket}}\n\
             policies:\n  - {{name: p, key: [ip], algorithm: token-bucket, limit: 1000000000, window: 1s}}\n"
        ),
    )?;
    let mut command = Command::new(our_binary("tidegate")?);
    let server =
        Server::start("tidegate", command.arg("serve").arg("--config").arg(config), &[http, grpc])?;
    Ok(Contestant {
        name: "tidegate",
        server,
        http_url: format!("http://127.0.0.1:{http}/v1/acquire"),
        http_script: post(folder.join("tidegate.lua"), r#"{"policy": "p", "key": "user123"}"#)?,
        grpc_url: format!("http://127.0.0.1:{grpc}{ENVOY_PATH}"),
        grpc_message: message(folder.join("tidegate.message"), &envoy_request("user123"))?,
    })
}

/// Asked just what ours is asked.
fn do_nothing(folder: &Path, http: u16, grpc: u16) -> Result<Contestant> {
    Ok(Contestant {
        name: "do-nothing",
        server: start_do_nothing(http, grpc)?,
        http_url: format!("http://127.0.0.1:{http}/v1/acquire"),
        http_script: post(folder.join("do-nothing.lua"), r#"{"policy": "p", "key": "user123"}"#)?,
        grpc_url: format!("http://127.0.0.1:{grpc}{ENVOY_PATH}"),
        grpc_message: message(folder.join("do-nothing.message"), &envoy_request("user123"))?,
    })
}

pub(crate) fn start_do_nothing(http: u16, grpc: u16) -> Result<Server> {
    let mut command = Command::new(our_binary("do_nothing")?);
    Server::start(
        "do-nothing",
        command.args([format!("127.0.0.1:{http}"), format!("127.0.0.1:{grpc}")]),
        &[http, grpc],
    )
}

/// One call to each that is to be measured by gRPC: `h2load` does not see whether an answer is an
/// error.
pub(crate) async fn check_grpc(port: u16) -> Result<()> {
    let answer: RateLimitResponse = unary(port, ENVOY_PATH, envoy_request("user123")).await?;
    ensure!(answer.overall_code == 1, "not allowed: {answer:?}");
    Ok(())
}

/// throttlecrab's messages, after its `proto/throttlecrab.proto`.
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

async fn throttlecrab(binary: &Path, folder: &Path) -> Result<Contestant> {
    let (http, grpc) = (free_port()?, free_port()?);
    let mut command = Command::new(binary);
    command.args(["--http", "--http-host", "127.0.0.1", "--http-port", &http.to_string()]);
    command.args(["--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", &grpc.to_string()]);
    command.args(["--log-level", "error"]);
    let server = Server::start("throttlecrab-server", &mut command, &[http, grpc])?;
    let most = 1_000_000_000;
    let request = ThrottleRequest {
        key: "user123".to_owned(),
        max_burst: most,
        count_per_period: most,
        period: 1,
        quantity: 1,
    };
    let body = format!(
        r#"{{"key": "user123", "max_burst": {most}, "count_per_period": {most}, "period": 1, "quantity": 1}}"#
    );
    let path = "/throttlecrab.RateLimiter/Throttle";
    let answer: ThrottleResponse = unary(grpc, path, request.clone()).await?;
    ensure!(answer.allowed, "throttlecrab does not allow");
    Ok(Contestant {
        name: "throttlecrab",
        server,
        http_url: format!("http://127.0.0.1:{http}/throttle"),
        http_script: post(folder.join("throttlecrab.lua"), &body)?,
        grpc_url: format!("http://127.0.0.1:{grpc}{path}"),
        grpc_message: message(folder.join("throttlecrab.message"), &request)?,
    })
}
