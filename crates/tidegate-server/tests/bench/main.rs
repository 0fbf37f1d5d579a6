//! `tidegate bench` as a process: against memory, a real Redis and a real service. No test depends on
//! the speed of the machine.

#[path = "../support/mod.rs"]
mod support;

#[path = "../../../tidegate/tests/support/sentinel.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod sentinel;
/// The servers that `sentinel` starts.
mod server {
    pub(crate) use crate::support::{Redis, folder_in_memory, free_port};
}

/// Invalid input.
mod errors;
/// Open loop: due times, stalls, bounds.
mod open_loop;
/// Text, JSON, progress and signals.
mod output;
/// A running service by HTTP and gRPC.
mod services;
/// Memory and Redis.
mod stores;

use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use support::Service;

/// A limit of ten per hour.
const TEN_PER_HOUR: [&str; 4] = ["--limit", "10", "--window", "1h"];
/// A hundred requests for one key.
const HUNDRED_FOR_ONE_KEY: [&str; 4] = ["--requests", "100", "--distribution", "hot"];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("bench").args(arguments).env_clear().stdin(Stdio::null());
    command
}

fn bench(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
}

/// Returns a command whose requests do not fail while this machine is busy.
fn with_long_timeout(arguments: &[&str]) -> Command {
    let mut command = command(arguments);
    command.env("TIDEGATE_TIMEOUT", "60s");
    command
}

fn spawn(arguments: &[&str]) -> Child {
    let mut command = with_long_timeout(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Returns the JSON of a run that succeeded.
fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Runs a bench that succeeds, and returns its JSON.
fn report(arguments: &[&str]) -> Value {
    let output = with_long_timeout(&[arguments, &["--json"]].concat()).output();
    json_of(&output.expect("the binary runs"))
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report}"))
}

/// Asserts that ten of a hundred requests were allowed, and the others denied.
fn assert_ten_of_a_hundred(report: &Value) {
    let counts =
        ["requests", "answered", "allowed", "denied", "failed"].map(|name| count(report, name));
    assert_eq!(counts, [100, 100, 10, 90, 0], "{report}");
    assert_eq!(report["errors"], serde_json::json!([]));
}

/// Returns the number of requests that a policy of the service has allowed.
fn allowed_by(service: &Service, policy: &str) -> u64 {
    let name = format!("tidegate_decisions_total{{policy=\"{policy}\",outcome=\"allowed\"}} ");
    let metrics = service.admin("/metrics").body;
    let value = metrics.lines().find_map(|line| line.strip_prefix(name.as_str()));
    value.map_or(0, |value| value.parse().expect("a number"))
}
