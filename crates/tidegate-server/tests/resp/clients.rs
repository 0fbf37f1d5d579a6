//! Real clients in their newest versions, with their default options.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::support::Service;
use crate::{POLICIES, metric, resp_address, start};

pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the path of a program in `.venv`.
pub(crate) fn program(name: &str) -> PathBuf {
    root().join(".venv/bin").join(name)
}

/// Returns a command of a program in `.venv`.
pub(crate) fn tool(name: &str) -> Command {
    // A client that waits for ever fails the test.
    let mut command = Command::new("timeout");
    command.args(["-k", "1", "60"]).arg(program(name));
    command.env("NODE_PATH", root().join(".venv/node_modules")).stdin(Stdio::null());
    command
}

/// Runs a scenario with the arguments after the port: the client, and the protocol unless the
/// client chooses it.
fn scenario(program: &str, file: &str, arguments: &[&str]) {
    let (service, address) = start(&format!("auth: {{api_token: secret}}\n{POLICIES}"));
    let (_, port) = address.rsplit_once(':').expect("a port");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/resp").join(file);
    let mut command = tool(program);
    command.arg(path).arg(port).args(arguments);
    let output = output(command);
    assert!(output.contains("ok\n"), "{program} {arguments:?}: {output}");
    assert_eq!(metric(&service, "tidegate_panics_total"), 0);
}

fn output(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|error| {
        panic!("{command:?} cannot be started ({error}): run `make setup`")
    });
    let text = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(status.success(), "{command:?}: {text}");
    text
}

#[test]
fn redis_py_runs_the_scenario() {
    for protocol in [&[][..], &["2"], &["3"]] {
        scenario("python", "scenario.py", &[&["redis"], protocol].concat());
    }
}

#[test]
fn valkey_py_and_valkey_glide_run_the_scenario() {
    scenario("python", "scenario.py", &["valkey"]);
    scenario("python", "scenario_glide.py", &[]);
}

#[test]
fn ioredis_and_iovalkey_run_the_scenario() {
    for arguments in [&["ioredis"][..], &["ioredis", "2"], &["iovalkey"]] {
        scenario("node", "scenario.js", arguments);
    }
}

#[test]
fn node_redis_runs_the_scenario() {
    for protocol in [&[][..], &["2"], &["3"]] {
        scenario("node", "scenario.js", &[&["redis"], protocol].concat());
    }
}

/// Clients try what a server supports when they connect. That is no reason for an alert.
#[test]
fn connecting_counts_no_error() {
    let python = "import sys, redis, valkey
for module in (redis, valkey):
    assert module.Redis(port=int(sys.argv[1])).ping()";
    let node = "const port = Number(process.argv[1]);
(async () => {
  for (const name of ['ioredis', 'iovalkey']) {
    const client = new (require(name))(port);
    await client.ping();
    await client.quit();
  }
  const client = require('redis').createClient({ socket: { port } });
  await client.connect();
  await client.close();
})();";
    let glide = "import asyncio, sys
from glide import GlideClient, GlideClientConfiguration, NodeAddress
async def main():
    address = NodeAddress('127.0.0.1', int(sys.argv[1]))
    client = await GlideClient.create(GlideClientConfiguration([address]))
    await client.ping()
    await client.close()
asyncio.run(main())";
    let (service, address) = start(POLICIES);
    let (_, port) = address.rsplit_once(':').expect("a port");
    for (program, flag, text) in
        [("python", "-c", python), ("node", "-e", node), ("python", "-c", glide)]
    {
        let mut command = tool(program);
        command.args([flag, text, port]);
        output(command);
        assert_eq!(metric(&service, "tidegate_resp_errors_total"), 0, "{text}");
    }
}

fn redis_cli(address: &str, words: &[&str]) -> String {
    let (_, port) = address.rsplit_once(':').expect("a port");
    let mut command = Command::new("redis-cli");
    command.args(["-p", port]).args(words);
    output(command)
}

#[test]
fn redis_cli_works_as_it_is() {
    let (_service, address) = start(POLICIES);
    assert_eq!(redis_cli(&address, &["PING"]), "PONG\n");
    assert!(redis_cli(&address, &["TG.ACQUIRE", "per-user", "ann"]).starts_with("1\n3\n2\n"));
    let reply = redis_cli(&address, &["-3", "TG.ACQUIRE", "per-user", "ann"]);
    assert!(reply.starts_with("1\n3\n1\n"), "{reply}");
    let reply = redis_cli(&address, &["-3", "TG.ACQUIRE", "per-user", "ann", "WITHNAMES"]);
    assert!(reply.starts_with("allowed 1\nlimit 3\nremaining 0\n"), "{reply}");
    assert_eq!(redis_cli(&address, &["CL.THROTTLE", "u", "15", "30", "60"]), "0\n16\n15\n-1\n2\n");
    assert_eq!(redis_cli(&address, &["THROTTLE", "w", "10", "100", "60"]), "1\n10\n9\n1\n0\n");
    assert!(redis_cli(&address, &["INFO"]).contains("redis_version:"));
    assert!(redis_cli(&address, &["GET", "a"]).contains("unknown command 'GET'"));
    // An interactive session asks for the descriptions of all commands.
    assert!(redis_cli(&address, &["COMMAND", "DOCS"]).contains("cl.throttle"));
    assert!(redis_cli(&address, &["-r", "5", "ECHO", "again"]).starts_with("again\nagain\n"));
}

#[test]
fn redis_benchmark_works_as_it_is() {
    let (service, address): (Service, String) = start(POLICIES);
    let (_, port) = address.rsplit_once(':').expect("a port");
    for pipeline in ["1", "16"] {
        let mut command = Command::new("redis-benchmark");
        command.args(["-p", port, "-n", "2000", "-c", "20", "-r", "1000", "-P", pipeline, "-q"]);
        command.args(["TG.ACQUIRE", "wide", "user:__rand_int__"]);
        let output = output(command);
        assert!(output.contains("requests per second"), "{output}");
        assert!(!output.contains("WARNING") && !output.contains("rror"), "{output}");
    }
    assert_eq!(metric(&service, "tidegate_resp_commands_total{command=\"tg.acquire\"}"), 4_000);
    assert_eq!(metric(&service, "tidegate_resp_errors_total"), 0);
    assert_eq!(resp_address(&service), address);
}
