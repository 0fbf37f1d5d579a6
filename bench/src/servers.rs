//! Servers that decide on memory or on Redis, and the same decision in each of their protocols.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use tidegate_bench::proto::envoy::service::ratelimit::v3::RateLimitResponse;

use crate::generator::{Protocol, Request, USER};
use crate::grpc::{self, ENVOY_PATH, encode_message, envoy_request, unary_call};
use crate::process::{Server, free_port, own_binary, peer_binary};

/// Requests that are allowed for each user of [`Limit::Attack`]. With a burst of one, throttlecrab
/// never denies.
pub(crate) const ATTACK_LIMIT: u64 = 2;

/// Policies on memory: of an explicit key, and of a descriptor of Envoy's protocol.
pub(crate) const ON_MEMORY: &str = "envoy: {files: [ratelimit.yaml], algorithm: token-bucket}\n\
     policies:\n  - {name: p, key: [ip], algorithm: token-bucket, limit: 1000000000, window: 1s}\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// All requests are allowed.
    Free,
    /// All requests are denied, except the first ones of each user.
    Attack,
}

/// A server, and the port of each protocol that it has.
pub(crate) struct Candidate {
    pub(crate) name: &'static str,
    pub(crate) server: Server,
    pub(crate) http: Option<u16>,
    pub(crate) grpc: Option<u16>,
    pub(crate) resp: Option<u16>,
}

impl Candidate {
    /// Returns the request for a decision; `None` without this protocol.
    pub(crate) fn request(&self, protocol: Protocol, limit: Limit) -> Option<Request> {
        Some(match protocol {
            Protocol::Http => {
                let (port, (path, body)) = (self.http?, self.http(limit));
                let length = body.len();
                let head = format!(
                    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\
                     Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
                );
                Request::new(port, protocol, (head + &body).into_bytes())
            }
            Protocol::Grpc => {
                let (path, message) = self.grpc(limit);
                grpc::call(self.grpc?, path, &message)
            }
            Protocol::Resp => {
                let words = self.resp(limit);
                let encoded = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
                let bytes = format!("*{}\r\n{}", words.len(), encoded.collect::<String>());
                Request::new(self.resp?, protocol, bytes.into_bytes())
            }
        })
    }

    /// Returns the path and the body of the request.
    pub(crate) fn http(&self, limit: Limit) -> (&'static str, String) {
        let key = key(limit);
        if self.name == THROTTLECRAB {
            let (burst, period) = throttlecrab_limit(limit);
            let body = format!(
                r#"{{"key":"{key}","max_burst":{burst},"count_per_period":{burst},"period":{period},"quantity":1}}"#
            );
            return ("/throttle", body);
        }
        let policy = policy(limit);
        ("/v1/acquire", format!(r#"{{"policy":"{policy}","key":"{key}"}}"#))
    }

    /// Returns the path and the encoded message of the call.
    pub(crate) fn grpc(&self, limit: Limit) -> (&'static str, Vec<u8>) {
        let key = key(limit);
        if self.name == THROTTLECRAB {
            return (THROTTLE_PATH, encode_message(&ThrottleRequest::new(key, limit)));
        }
        let domain = if limit == Limit::Free { "bench" } else { "attack" };
        (ENVOY_PATH, encode_message(&envoy_request(domain, &key)))
    }

    /// Returns the words of the command.
    pub(crate) fn resp(&self, limit: Limit) -> Vec<String> {
        let key = key(limit);
        if self.name == THROTTLECRAB {
            let (burst, period) = throttlecrab_limit(limit);
            let (burst, period) = (burst.to_string(), period.to_string());
            return vec!["THROTTLE".to_owned(), key, burst.clone(), burst, period];
        }
        vec!["TG.ACQUIRE".to_owned(), policy(limit).to_owned(), key]
    }
}

/// throttlecrab has one count per key, whatever the limit.
fn key(limit: Limit) -> String {
    if limit == Limit::Free { format!("user:{USER}") } else { format!("attack:{USER}") }
}

fn policy(limit: Limit) -> &'static str {
    if limit == Limit::Free { "p" } else { "attack" }
}

/// Starts the service with all protocols, on what the rest of its configuration says.
pub(crate) fn tidegate(folder: &Path, configuration: &str) -> Result<Candidate> {
    let (http, grpc, resp, admin) = (free_port()?, free_port()?, free_port()?, free_port()?);
    std::fs::write(
        folder.join("ratelimit.yaml"),
        "domain: bench\ndescriptors:\n  \
         - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000000}}\n",
    )?;
    let path = folder.join("tidegate.yaml");
    std::fs::write(
        &path,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', \
             resp: '127.0.0.1:{resp}', admin: '127.0.0.1:{admin}'}}\n{configuration}"
        ),
    )?;
    let mut command = Command::new(own_binary("tidegate")?);
    command.arg("serve").arg("--config").arg(path);
    let server = Server::start("tidegate", &mut command, &[http, grpc, resp])?;
    Ok(Candidate { name: "tidegate", server, http: Some(http), grpc: Some(grpc), resp: Some(resp) })
}

/// Starts a server with a fixed answer, which gets the same requests as Tidegate.
pub(crate) fn no_op() -> Result<Candidate> {
    let (http, grpc) = (free_port()?, free_port()?);
    let mut command = Command::new(own_binary("no_op")?);
    command.args([format!("127.0.0.1:{http}"), format!("127.0.0.1:{grpc}")]);
    let server = Server::start("no-op", &mut command, &[http, grpc])?;
    Ok(Candidate { name: "no-op", server, http: Some(http), grpc: Some(grpc), resp: None })
}

/// Makes one call and checks the answer, because `h2load` does not detect gRPC errors.
pub(crate) async fn check_grpc(candidate: &Candidate) -> Result<()> {
    let (Some(port), key) = (candidate.grpc, key(Limit::Free)) else { return Ok(()) };
    let is_allowed = if candidate.name == THROTTLECRAB {
        let request = ThrottleRequest::new(key, Limit::Free);
        unary_call::<_, ThrottleResponse>(port, THROTTLE_PATH, request).await?.allowed
    } else {
        let request = envoy_request("bench", &key);
        unary_call::<_, RateLimitResponse>(port, ENVOY_PATH, request).await?.overall_code == 1
    };
    ensure!(is_allowed, "{} denied a request", candidate.name);
    Ok(())
}

pub(crate) const THROTTLECRAB: &str = "throttlecrab";
const THROTTLE_PATH: &str = "/throttlecrab.RateLimiter/Throttle";

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

impl ThrottleRequest {
    fn new(key: String, limit: Limit) -> Self {
        let (burst, period) = throttlecrab_limit(limit);
        Self { key, max_burst: burst, count_per_period: burst, period, quantity: 1 }
    }
}

/// Returns the burst, which is also the count per period, and the period in seconds.
fn throttlecrab_limit(limit: Limit) -> (i32, i32) {
    if limit == Limit::Free { (1_000_000_000, 1) } else { (2, 86_400) }
}

/// Starts throttlecrab-server with all protocols; `None` if it is not installed.
pub(crate) fn throttlecrab() -> Result<Option<Candidate>> {
    let Some(binary) = peer_binary("throttlecrab-server") else {
        println!("skipping throttlecrab-server: not installed (make bench-tools)");
        return Ok(None);
    };
    let mut command = Command::new(binary);
    let mut ports = [0; 3];
    for (port, protocol) in ports.iter_mut().zip(["http", "grpc", "redis"]) {
        *port = free_port()?;
        command.args([format!("--{protocol}"), format!("--{protocol}-host"), "127.0.0.1".into()]);
        command.args([format!("--{protocol}-port"), port.to_string()]);
    }
    command.args(["--log-level", "error"]);
    let server = Server::start("throttlecrab-server", &mut command, &ports)?;
    let [http, grpc, resp] = ports.map(Some);
    Ok(Some(Candidate { name: THROTTLECRAB, server, http, grpc, resp }))
}
