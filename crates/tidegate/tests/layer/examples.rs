//! Runs the examples. Cargo builds them before all tests, but not before a single `--test`.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use http::StatusCode;

use crate::site::Asker;
use crate::support::Redis;

fn example(name: &str) -> Command {
    let this = std::env::current_exe().expect("this program");
    let folder: PathBuf = this.ancestors().nth(2).expect("target/…").join("examples");
    assert!(folder.join(name).exists(), "build it first: cargo build -p tidegate --example {name}");
    Command::new(folder.join(name))
}

/// A running example that listens. It is killed on drop.
struct Server {
    process: Child,
    asker: Asker,
}

impl Server {
    fn start(mut example: Command) -> Self {
        let mut process = example.arg("0").stdout(Stdio::piped()).spawn().expect("started");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("the example prints its address");
        let address =
            line.split("http://").nth(1).and_then(|rest| rest.trim_end().strip_suffix('/'));
        let address: SocketAddr =
            address.and_then(|address| address.parse().ok()).expect("an address");
        Self { process, asker: Asker::of(address) }
    }

    /// Sends requests, and returns the number that were admitted.
    async fn admits(&self, requests: usize, headers: &[(&str, &str)]) -> usize {
        self.admits_and_fails(requests, headers).await.0
    }

    /// Sends requests, and returns the numbers of those that were admitted, and of those without a
    /// decision: on a busy machine Redis may miss the timeout of a call.
    async fn admits_and_fails(&self, requests: usize, headers: &[(&str, &str)]) -> (usize, usize) {
        let (mut admitted, mut failed) = (0, 0);
        for _ in 0..requests {
            let status = self.asker.get("/", headers).await.status;
            admitted += usize::from(status == StatusCode::OK);
            failed += usize::from(status.is_server_error());
        }
        (admitted, failed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn axum_example_limits_in_memory_and_across_processes_on_redis() {
    let alone = Server::start(example("axum"));
    assert_eq!(alone.admits(12, &[]).await, 10);
    let redis = Redis::start();
    let shared = || {
        let mut command = example("axum");
        command.env("REDIS_URL", redis.url());
        Server::start(command)
    };
    let (one, other) = (shared(), shared());
    let (first, failed) = one.admits_and_fails(7, &[]).await;
    assert_eq!(first + failed, 7, "the limit of 10 denies none of them");
    let (second, failed_later) = other.admits_and_fails(7, &[]).await;
    // A call that failed may have been counted.
    let admitted = first + second;
    assert!((10 - failed - failed_later..=10).contains(&admitted), "{first} and {second}");
}

#[tokio::test]
async fn hyper_example_limits_by_api_key() {
    let server = Server::start(example("hyper"));
    assert_eq!(server.admits(7, &[("x-api-key", "k1")]).await, 5);
    assert_eq!(server.admits(1, &[("x-api-key", "k2")]).await, 1);
}

#[test]
fn tonic_example_shows_a_client_with_retry_info() {
    let output = example("tonic").output().expect("runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("allowed:").count(), 3, "{text}");
    assert!(text.contains("ResourceExhausted") && text.contains("retry in Some("), "{text}");
}
