//! `tidegate doctor` as a process, on real servers.

#[path = "../../../tidegate/tests/support/certificates.rs"]
mod certificates;
#[path = "../support/mod.rs"]
mod support;

/// Connections that fail.
mod connections;
/// Commands that are disabled, by name or by ACL.
mod disabled;
/// A server that is far away.
mod distance;
/// Managed services, which lack commands.
mod managed;
/// Proxies in front of Redis.
mod proxies;
/// Users of replicas.
mod replicas;
/// Servers with the restrictions of managed services.
mod strict;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Redis, Service, TEST_TIMEOUT};

fn tidegate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments).stdin(Stdio::null()).env_clear().output().expect("the binary runs")
}

/// Uses a timeout that is long enough for a busy machine.
fn doctor(url: &str, more: &[&str]) -> Output {
    tidegate(&[&["doctor", "--redis", url, "--timeout", "5s"], more].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Runs the doctor with a configuration of these lines.
fn doctor_with(config: &str, more: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, config).expect("written");
    let file = file.display().to_string();
    tidegate(&[&["doctor", "--timeout", "5s", "--config", &file], more].concat())
}

/// Returns the report and the exit code.
fn run_checks(url: &str) -> (Value, Option<i32>) {
    report(&doctor(url, &["--json", "--probes", "20"]))
}

fn report(output: &Output) -> (Value, Option<i32>) {
    let json = serde_json::from_slice(&output.stdout);
    (json.unwrap_or_else(|error| panic!("{error}: {output:?}")), output.status.code())
}

/// Returns the level and message of each finding of a check.
fn findings_of(report: &Value, check: &str) -> Vec<(String, String)> {
    let findings = report["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .filter(|finding| finding["check"] == check);
    let word = |finding: &Value, name: &str| finding[name].as_str().expect("a text").to_owned();
    findings.map(|finding| (word(finding, "level"), word(finding, "message"))).collect()
}

#[track_caller]
fn assert_found(report: &Value, check: &str, level: &str, says: &str) {
    let findings = findings_of(report, check);
    let right = findings.iter().any(|(found, message)| found == level && message.contains(says));
    assert!(right, "no {level} of {check} that contains {says:?} in {findings:?}");
}

/// Returns the advice of the first finding of a check at a level.
#[track_caller]
fn advice_of(report: &Value, check: &str, level: &str) -> String {
    let findings = report["findings"].as_array().expect("findings");
    let mut matching =
        findings.iter().filter(|finding| finding["check"] == check && finding["level"] == level);
    let finding = matching.next().unwrap_or_else(|| panic!("no {level} of {check} in {report}"));
    finding["advice"].as_str().unwrap_or_else(|| panic!("no advice: {finding}")).to_owned()
}

/// Waits until a condition holds.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timeout while waiting until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a replica and waits until it is in sync.
fn replica_of(primary: &Redis) -> Redis {
    let replica = Redis::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    wait_until("the replica is in sync", || {
        primary.query::<String>(&["INFO", "replication"]).contains("state=online")
    });
    replica
}

fn primary_for_replicas() -> Redis {
    Redis::start_with(&["--repl-diskless-sync-delay", "0"])
}

#[test]
fn healthy_server_is_fit_and_each_check_has_a_line() {
    let redis = Redis::start();
    let output = doctor(&redis.url(), &[]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{shown}{}", text(&output.stderr));
    for check in [
        "topology               a single server",
        "version                Redis ",
        "connections  ",
        "acl  ",
        "routing  ",
        "eviction-policy        noeviction",
        "memory  ",
        "persistence  ",
        "replicas  ",
        "min-replicas-to-write  ",
        "clock  ",
        "scripts  ",
        "latency                p50 ",
        "of 300 probes",
        "expiry                 all ",
    ] {
        assert!(shown.contains(check), "no {check:?} in\n{shown}");
    }
    assert!(
        shown.lines().last().is_some_and(|verdict| verdict.starts_with("fit, with ")),
        "{shown}"
    );
    assert!(!shown.contains('\u{1b}'), "no colours without a terminal");
    redis.assert_every_key_expires();
}

#[test]
fn json_output_is_one_object() {
    let redis = Redis::start();
    let output = doctor(&redis.url(), &["--json", "--probes", "50"]);
    assert_eq!(text(&output.stdout).lines().count(), 1);
    let (report, code) = report(&output);
    assert_eq!((code, &report["verdict"]), (Some(0), &Value::from("note")), "{report}");
    let node = &report["nodes"][0];
    assert_eq!(node["address"], format!("127.0.0.1:{}", redis.port()));
    assert_eq!(node["role"], "primary");
    assert!(
        node["version"].as_str().is_some_and(|version| version.starts_with("Redis ")),
        "{node}"
    );
    assert!(node["clock_ahead_us"].as_i64().is_some_and(|ahead| ahead.abs() < 1_000_000), "{node}");
    let latency = &report["latency_us"];
    assert_eq!(latency["samples"], 50);
    let [p50, p90, p99, max] =
        ["p50", "p90", "p99", "max"].map(|name| latency[name].as_u64().expect("a number"));
    assert!(0 < p50 && p50 <= p90 && p90 <= p99 && p99 <= max, "{latency}");
    for finding in report["findings"].as_array().expect("a list") {
        let mut fields: Vec<&str> =
            finding.as_object().expect("an object").keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, ["advice", "check", "level", "message", "node"]);
    }
}

#[test]
fn evicting_policy_is_a_warning() {
    let redis = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let output = doctor(&redis.url(), &["--probes", "20"]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    let line = shown.lines().find(|line| line.contains("eviction-policy")).expect("its line");
    assert!(line.starts_with("warning") && line.contains("allkeys-lru"), "{line}");
    assert!(shown.contains("CONFIG SET maxmemory-policy noeviction"), "{shown}");
    assert!(shown.contains("of 100 MiB (maxmemory) are used"), "{shown}");
}

#[test]
fn key_without_expiry_is_found_and_escaped() {
    let redis = Redis::start();
    let mut pipeline = redis::pipe();
    for number in 0..5_000 {
        pipeline
            .cmd("SET")
            .arg(format!("rate_limit:{{u{number}}}:p"))
            .arg(1)
            .arg("EX")
            .arg(1_000)
            .ignore();
    }
    pipeline.query::<()>(&mut redis.connection()).expect("written");
    let (report, _) = run_checks(&redis.url());
    assert_found(&report, "expiry", "ok", "keys under rate_limit: each has an expiry");
    let () = redis.query(&["SET", "rate_limit:{a\u{1b}[31mb}:p", "1"]);
    let (report, code) = run_checks(&redis.url());
    assert_eq!(code, Some(2));
    assert_found(&report, "expiry", "error", r#"have no expiry: "rate_limit:{a\u{1b}[31mb}:p""#);

    // With another prefix the key is not ours, even if the prefix contains wildcards.
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("tidegate.yaml");
    let config =
        format!("store: {{redis: '{}', prefix: 'r*', timeout: 2s}}\npolicies: []\n", redis.url());
    std::fs::write(&file, config).expect("written");
    let output =
        tidegate(&["doctor", "--config", &file.display().to_string(), "--json", "--probes", "5"]);
    let (report, code) = self::report(&output);
    assert_eq!(code, Some(0), "{report}");
    assert_found(&report, "latency", "ok", "the timeout is 2s");
}

#[test]
fn secrets_are_never_printed() {
    let redis = Redis::start_with(&["--requirepass", "planted-secret"]);
    let url = |password: &str| format!("redis://:{password}@127.0.0.1:{}", redis.port());
    for (password, more, code) in [
        ("planted-secret", &["--probes", "5"][..], 0),
        ("planted-secret", &["--probes", "5", "--json"], 0),
        ("wrong-planted-secret", &[], 2),
        ("wrong-planted-secret", &["--json"], 2),
    ] {
        let output = doctor(&url(password), more);
        let all = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{all}");
        assert!(!all.contains("planted-secret"), "{all}");
        assert_eq!(
            all.contains("WRONGPASS: the user or the password is wrong"),
            code == 2,
            "{all}"
        );
    }
}

#[test]
fn unreachable_redis_is_one_finding() {
    let url = "redis://user:hunter2@127.0.0.1:1";
    let output = doctor(url, &[]);
    let (shown, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(2));
    // The password among the arguments is a warning.
    assert!(error.starts_with("warning: ") && error.lines().count() == 1, "{error}");
    assert!(shown.contains("cannot be reached: 127.0.0.1:1"), "{shown}");
    assert!(shown.contains("→ start Redis, or correct the host and the port"), "{shown}");
    let (report, code) = run_checks(url);
    assert_eq!((code, &report["verdict"]), (Some(2), &Value::from("error")));
    assert_found(&report, "connection", "error", "cannot be reached: 127.0.0.1:1");
    assert!(!report.to_string().contains("hunter2"));
}

#[test]
fn without_redis_there_is_nothing_to_check() {
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, "policies: []\n").expect("written");
    let output = tidegate(&["doctor", "--config", &file.display().to_string()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        text(&output.stdout).contains("there is no Redis to check"),
        "{}",
        text(&output.stdout)
    );
    let output = tidegate(&["doctor"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("--redis URL, or --config FILE"),
        "{}",
        text(&output.stderr)
    );
}

/// Returns the ACL rules that the doctor recommends, for a user `tidegate` with the password `pw`.
fn advised_rules(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().expect("findings");
    let acl =
        findings.iter().find(|finding| finding["check"] == "acl").expect("a finding about the ACL");
    let advice = acl["advice"].as_str().expect("an advice").replace("PASSWORD", "pw");
    let line = advice.split_once("ACL SETUSER").expect("a line").1;
    line.split_whitespace().map(str::to_owned).collect()
}

fn apply(redis: &Redis, rules: &[String]) {
    let words: Vec<&str> =
        ["ACL", "SETUSER"].into_iter().chain(rules.iter().map(String::as_str)).collect();
    let () = redis.query(&words);
}

#[test]
fn recommended_user_passes_the_check_and_can_decide() {
    let redis = Redis::start();
    let (report, _) = run_checks(&redis.url());
    assert_found(&report, "acl", "note", "user default may do anything");
    apply(&redis, &advised_rules(&report));
    let url = format!("redis://tidegate:pw@127.0.0.1:{}", redis.port());
    let (report, code) = run_checks(&url);
    assert_eq!(code, Some(0), "{report}");
    assert_found(&report, "acl", "ok", "may do what decisions need");
    assert_found(&report, "scripts", "ok", "works");
    for check in ["version", "eviction-policy", "replicas", "expiry"] {
        assert_found(&report, check, "note", "unknown: this user may not run ");
    }
    for (algorithm, encoding) in [
        ("sliding-log", "--encoding=sorted-set"),
        ("sliding-log", "--encoding=packed"),
        ("sliding-counter", "--json"),
        ("fixed-window", "--json"),
        ("token-bucket", "--json"),
        ("leaky-bucket", "--json"),
    ] {
        // Three requests are allowed and the rest denied, to cover every path of the script.
        let more = [
            "--limit", "9", "--window", "1h", "--cost", "3", "--count", "5", "--redis", &url,
            encoding,
        ];
        let output = tidegate(&[&["acquire", "u", "--algorithm", algorithm], &more[..]].concat());
        assert_eq!(output.status.code(), Some(1), "{algorithm}: {}", text(&output.stderr));
    }
}

#[test]
fn missing_permissions_are_named() {
    let redis = Redis::start();
    let rules = advised_rules(&run_checks(&redis.url()).0);
    let url = format!("redis://tidegate:pw@127.0.0.1:{}", redis.port());
    let granted = || rules.iter().filter(|rule| rule.starts_with('+'));
    assert!(granted().count() >= 19, "{rules:?}");
    for taken in granted() {
        let left: Vec<String> = rules.iter().filter(|rule| *rule != taken).cloned().collect();
        let () = redis.query(&["ACL", "DELUSER", "tidegate"]);
        apply(&redis, &left);
        let (report, code) = run_checks(&url);
        assert_eq!(code, Some(2), "{taken}: {report}");
        let lacks = format!("this user lacks permissions that decisions need: {}", &taken[1..]);
        assert!(
            findings_of(&report, "acl").iter().any(|(_, message)| *message == lacks),
            "{taken}: {report}"
        );
        assert_eq!(advised_rules(&report), rules, "{taken}");
    }
    let () = redis.query(&["ACL", "DELUSER", "tidegate"]);
    let elsewhere: Vec<String> =
        rules.iter().map(|rule| rule.replace("~rate_limit:*", "~other:*")).collect();
    apply(&redis, &elsewhere);
    assert_found(
        &run_checks(&url).0,
        "acl",
        "error",
        "lacks permissions that decisions need: keys ~rate_limit:*",
    );
    redis.assert_every_key_expires();
}

#[test]
fn replicas_and_split_brain_protection_are_checked() {
    let primary = primary_for_replicas();
    let replica = replica_of(&primary);
    let (report, code) = run_checks(&primary.url());
    assert_eq!(code, Some(0), "{report}");
    assert_found(&report, "replicas", "ok", "1 connected");
    assert_found(&report, "min-replicas-to-write", "note", "both allow requests");
    let nodes = report["nodes"].as_array().expect("nodes");
    assert!(
        nodes.iter().any(|node| node["role"] == "replica" && node["clock_ahead_us"].is_i64()),
        "{report}"
    );

    let () = primary.query(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    assert_found(
        &run_checks(&primary.url()).0,
        "min-replicas-to-write",
        "ok",
        "stops allowing requests after 10 s",
    );
    let () = primary.query(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
    let (report, code) = run_checks(&primary.url());
    assert_eq!(code, Some(2));
    assert_found(&report, "min-replicas-to-write", "error", "it requires 2 replicas and has 1");
    assert_found(&report, "scripts", "error", "NOREPLICAS");

    let () = replica.query(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]);
    assert_found(
        &run_checks(&primary.url()).0,
        "eviction-policy",
        "warning",
        "volatile-ttl on this replica",
    );
    assert_found(&run_checks(&replica.url()).0, "role", "error", "it is a replica of 127.0.0.1:");
}

/// Sentinel process, killed at the end of the test.
struct Sentinel {
    process: Child,
    port: u16,
    _folder: tempfile::TempDir,
}

impl Sentinel {
    fn query(&self, words: &[&str]) -> String {
        let url = format!("redis://127.0.0.1:{}", self.port);
        let client = redis::Client::open(url).expect("a URL");
        let mut connection = client.get_connection().expect("our own sentinel answers");
        redis::cmd(words[0]).arg(&words[1..]).query(&mut connection).expect("a valid command")
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn sentinel_of(primary: &Redis) -> Sentinel {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .expect("a free port")
        .local_addr()
        .expect("bound")
        .port();
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("sentinel.conf");
    let config = format!(
        "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor mymaster 127.0.0.1 {} 1\n",
        folder.path().display(),
        primary.port()
    );
    std::fs::write(&file, config).expect("written");
    let mut command = Command::new("redis-server");
    command
        .arg(&file)
        .arg("--sentinel")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let sentinel =
        Sentinel { process: command.spawn().expect("redis-server starts"), port, _folder: folder };
    wait_until("the sentinel listens", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
    sentinel
}

#[test]
fn sentinels_without_a_majority_are_a_warning() {
    let primary = primary_for_replicas();
    let replica = replica_of(&primary);
    let sentinel = sentinel_of(&primary);
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("tidegate.yaml");
    let nodes = format!("['redis://127.0.0.1:{}', 'redis://127.0.0.1:1']", sentinel.port);
    let examined_as = |user: &str| {
        let sentinel = format!("{{master: mymaster, nodes: {nodes}{user}}}");
        let config = format!("store: {{sentinel: {sentinel}, timeout: 5s}}\npolicies: []\n");
        std::fs::write(&file, config).expect("written");
        report(&tidegate(&[
            "doctor",
            "--config",
            &file.display().to_string(),
            "--json",
            "--probes",
            "5",
        ]))
    };
    let (report, code) = examined_as("");
    assert_eq!(code, Some(1), "{report}");
    let named = format!("the sentinels name 127.0.0.1:{} as the primary", primary.port());
    assert_found(&report, "topology", "ok", &named);
    assert_found(
        &report,
        "sentinels",
        "warning",
        "it knows 1 sentinels, quorum 1: if one of them is lost",
    );
    assert_found(&report, "sentinels", "warning", "this sentinel does not respond: ");
    assert_found(&report, "min-replicas-to-write", "warning", "keeps allowing requests");
    assert_found(&report, "scripts", "ok", "works");

    // The recommended user is sufficient here as well.
    for server in [&primary, &replica] {
        apply(server, &advised_rules(&report));
    }
    let (report, _) = examined_as(", username: tidegate, password: pw");
    assert_found(&report, "acl", "ok", "may do what decisions need");
    assert_found(&report, "scripts", "ok", "works");
}

#[test]
fn cluster_is_checked_node_by_node() {
    let options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"];
    let nodes: Vec<Redis> = (0..3).map(|_| Redis::start_with(&options)).collect();
    // A node without a cluster serves no slot.
    let (report, code) = run_checks(&nodes[0].url());
    assert_eq!(code, Some(2), "{report}");

    let addresses: Vec<String> =
        nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let created = Command::new("redis-cli")
        .args(["--cluster", "create"])
        .args(&addresses)
        .arg("--cluster-yes")
        .stdin(Stdio::null())
        .output()
        .expect("redis-cli runs");
    assert!(created.status.success(), "{created:?}");
    let agree =
        |node: &Redis| node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
    wait_until("the cluster is up", || nodes.iter().all(agree));

    let (report, code) = run_checks(&nodes[0].url());
    assert_eq!(code, Some(0), "{report}");
    assert_found(&report, "topology", "ok", "a cluster of 3 primaries, all 16384 slots served");
    assert_found(&report, "full-coverage", "note", "the whole cluster is unavailable");
    assert_eq!(report["nodes"].as_array().map(Vec::len), Some(3));
    assert_eq!(report["latency_us"]["samples"], 60, "each node is probed");
    assert_found(&report, "migration", "ok", "no slot is migrating");
    for check in ["version", "eviction-policy", "scripts", "expiry", "clock"] {
        assert_eq!(findings_of(&report, check).len(), 3, "{check}: {report}");
    }
    let urls = nodes.iter().map(Redis::url).collect::<Vec<_>>().join(",");
    let shown = text(&doctor(&urls, &["--probes", "5"]).stdout);
    for address in &addresses {
        assert_eq!(
            shown.lines().filter(|line| line == address).count(),
            1,
            "a heading for {address} in\n{shown}"
        );
    }

    // The recommended user is sufficient for a cluster as well.
    for node in &nodes {
        apply(node, &advised_rules(&report));
    }
    let (report, code) = run_checks(&format!("redis://tidegate:pw@{}", addresses[1]));
    assert_eq!(code, Some(0), "{report}");
    assert_found(&report, "topology", "ok", "a cluster of 3 primaries");
    assert_found(&report, "migration", "note", "this user may not run CLUSTER NODES");

    // Slots that an interrupted resharding has left open.
    let id = |node: &Redis| node.query::<String>(&["CLUSTER", "MYID"]);
    let () = nodes[0].query(&["CLUSTER", "SETSLOT", "1", "MIGRATING", &id(&nodes[1])]);
    let () = nodes[1].query(&["CLUSTER", "SETSLOT", "1", "IMPORTING", &id(&nodes[0])]);
    let (report, code) = run_checks(&nodes[2].url());
    assert_eq!(code, Some(1), "{report}");
    assert_found(&report, "migration", "warning", "slot 1 is migrating to another node");
    assert_found(&report, "migration", "warning", "slot 1 is being imported");
    assert!(advice_of(&report, "migration", "warning").contains("--cluster fix"), "{report}");
    for node in &nodes {
        node.assert_every_key_expires();
    }
}

#[test]
fn service_logs_warnings_once_at_startup() {
    let redis = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lfu"]);
    let service = Service::start(&format!(
        "store: {{redis: '{}', timeout: 5s}}\npolicies: []\n",
        redis.url()
    ));
    service.wait_until("the warning is logged", |service| {
        service.output().contains("maxmemory-policy is allkeys-lfu")
    });
    let output = service.output();
    let warnings: Vec<&str> = output.lines().filter(|line| line.contains("check=")).collect();
    assert_eq!(warnings.len(), 1, "{output}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains("eviction-policy"), "{output}");
}
