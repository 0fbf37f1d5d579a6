//! `tidegate acquire` as a process.

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use support::Redis;

const LONG: &str = "100d";

fn tidegate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments).stdin(Stdio::null()).env_clear().output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Parses the JSON lines of an output.
fn bodies(output: &Output) -> Vec<Value> {
    text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect()
}

#[test]
fn text_output_shows_outcome_remaining_units_and_times() {
    let output =
        tidegate(&["acquire", "user123", "--limit", "2", "--window", "1d", "--count", "3"]);
    let expected = "allowed  1 of 2 left, resets in 1d\n\
                    allowed  0 of 2 left, resets in 1d\n\
                    denied   0 of 2 left, retry in 1d\n";
    assert_eq!(text(&output.stdout), expected);
    assert_eq!(output.status.code(), Some(1), "one was denied");
    let queue = [
        "acquire",
        "u",
        "--algorithm",
        "leaky-bucket",
        "--limit",
        "2",
        "--window",
        LONG,
        "--count",
        "2",
    ];
    let output = tidegate(&queue);
    assert!(text(&output.stdout).contains("delay of 50d"), "{}", text(&output.stdout));
    assert_eq!(output.status.code(), Some(0), "all were allowed");
}

#[test]
fn reports_are_charged_beyond_the_limit() {
    let output = tidegate(&[
        "acquire", "u", "--limit", "1000", "--window", "1d", "--cost", "600", "--count", "3",
        "--report",
    ]);
    let lines = text(&output.stdout);
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines[0], "allowed  400 of 1000 left, resets in 1d");
    assert!(lines[1].starts_with("over     0 of 1000 left, 1 available in "), "{lines:?}");
    assert!(lines[2].starts_with("over     0 of 1000 left, 1 available in "), "{lines:?}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn json_output_matches_the_api() {
    let arguments = [
        "acquire", "user123", "--limit", "5", "--window", LONG, "--cost", "3", "--count", "2",
        "--json",
    ];
    let output = tidegate(&arguments);
    assert_eq!(output.status.code(), Some(1));
    let bodies = bodies(&output);
    let first = json!({
        "allowed": true, "policy": "sliding-log-8640000s", "limit": 5, "remaining": 2,
        "retry_after_ms": 0, "reset_after_ms": 8_640_000_000_u64, "delay_ms": 0, "source": "store",
    });
    let mut whole = first.clone();
    whole["decisions"] = json!([first]);
    whole["decisions"][0]["mode"] = json!("enforce");
    assert_eq!(bodies[0], whole);
    assert_eq!(bodies[1]["allowed"], false);
    assert!(bodies[1]["retry_after_ms"].as_u64().expect("a number") > 8_639_000_000);
}

#[test]
fn limit_shown_is_the_burst_so_that_no_more_is_left() {
    let bucket =
        ["--algorithm", "token-bucket", "--limit", "10", "--window", LONG, "--burst", "50"];
    let arguments = [&["acquire", "u"][..], &bucket].concat();
    let line = text(&tidegate(&arguments).stdout);
    assert!(line.starts_with("allowed  49 of 50 left"), "{line}");
    let body = bodies(&tidegate(&[&arguments[..], &["--json"]].concat())).remove(0);
    assert_eq!((&body["limit"], &body["remaining"]), (&json!(50), &json!(49)));
}

#[test]
fn flags_are_read_from_the_environment() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["acquire", "user123"]).env_clear();
    command.envs([
        ("TIDEGATE_LIMIT", "1"),
        ("TIDEGATE_WINDOW", LONG),
        ("TIDEGATE_COUNT", "2"),
        ("TIDEGATE_JSON", "1"),
    ]);
    let output = command.output().expect("the binary runs");
    assert_eq!(bodies(&output).len(), 2, "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn mistakes_exit_with_2_and_one_helpful_line() {
    let quota = ["--limit", "5", "--window", "60s"];
    let long_key = "k".repeat(513);
    let cases: [(&[&str], &str); 15] = [
        (&["acquire", "u", "--limit", "0", "--window", "60s"], "from 1 to 1000000000000"),
        (&["acquire", "u", "--limit", "-1", "--window", "60s"], "unexpected argument '-1'"),
        (&["acquire", "u", "--limit", "many", "--window", "60s"], "invalid digit"),
        (
            &["acquire", "u", "--limit", "5", "--window", "60"],
            "write it like 500ms, 60s, 5m, 1h30m or 30d",
        ),
        (&["acquire", "u", "--limit", "5", "--window", "1us"], "from 1ms to 366 days"),
        (&["acquire", "u", "--limit", "5"], "--window"),
        (&["acquire", "", quota[0], quota[1], quota[2], quota[3]], "the key is empty"),
        (
            &["acquire", &long_key, quota[0], quota[1], quota[2], quota[3]],
            "has 513 bytes: at most 512",
        ),
        (
            &["acquire", "a\nb", quota[0], quota[1], quota[2], quota[3]],
            "control character '\\n' at byte 1",
        ),
        (
            &["acquire", "u", "--limit", "5", "--window", "60s", "--cost", "0"],
            "a cost is at least 1",
        ),
        (&["acquire", "u", "--limit", "5", "--window", "60s", "--cost", "6"], "at most 5 at once"),
        (
            &["acquire", "u", "--limit", "5", "--window", "60s", "--algorithm", "token"],
            "token-bucket",
        ),
        (
            &["acquire", "u", "--limit", "5", "--window", "60s", "--burst", "9"],
            "only token-bucket and leaky-bucket",
        ),
        (
            &["acquire", "u", "--limit", "5", "--window", "60s", "--redis", "127.0.0.1"],
            "redis://[user:password@]host",
        ),
        (&["aquire", "u"], "acquire"),
    ];
    for (arguments, message) in cases {
        let output = tidegate(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(message), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(!error.contains('\u{1b}'), "no colours without a terminal");
    }
}

#[test]
fn unreachable_redis_is_an_error_without_its_password() {
    let url = "redis://default:hunter2@127.0.0.1:1";
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let command = command.args(["acquire", "u", "--limit", "5", "--window", "60s"]);
    let output = command.env("TIDEGATE_REDIS", url).output().expect("the binary runs");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("cannot be reached: 127.0.0.1:1"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn help_shows_examples_and_hides_secrets() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output =
        command.args(["acquire", "--help"]).env("TIDEGATE_REDIS", "redis://:hunter2@host").output();
    let help = text(&output.expect("the binary runs").stdout);
    assert!(help.contains("Examples:") && help.contains("--count 5"), "{help}");
    assert!(!help.contains("hunter2"), "{help}");
}

/// Eight processes in a loop on one Redis are allowed exactly the limit in total, with every
/// algorithm.
#[test]
fn processes_on_one_redis_are_allowed_exactly_the_limit() {
    let redis = Redis::start();
    let url = redis.url();
    let kinds = [
        ("sliding-log", "sorted-set"),
        ("sliding-log", "packed"),
        ("sliding-counter", ""),
        ("fixed-window", ""),
        ("token-bucket", ""),
        ("leaky-bucket", ""),
    ];
    for (algorithm, encoding) in kinds {
        let mut processes = Vec::new();
        for _ in 0..8 {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
            command.args([
                "acquire", "shared", "--limit", "300", "--window", LONG, "--count", "60", "--json",
            ]);
            command.args(["--algorithm", algorithm, "--redis", &url, "--timeout", "20s"]);
            if !encoding.is_empty() {
                command.args(["--encoding", encoding]);
            }
            command.env_clear().stdout(Stdio::piped()).stderr(Stdio::piped());
            processes.push(command.spawn().expect("the binary starts"));
        }
        let mut admitted = 0;
        for process in processes {
            let output = process.wait_with_output().expect("the binary ends");
            assert_ne!(output.status.code(), Some(2), "{}", text(&output.stderr));
            admitted += bodies(&output).iter().filter(|body| body["allowed"] == true).count();
        }
        assert_eq!(admitted, 300, "{algorithm} {encoding}");
    }
    redis.assert_every_key_expires();
}

#[test]
fn calendar_wins_over_the_variable_of_the_window() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["acquire", "u", "--limit", "5", "--calendar", "month"]).env_clear();
    let output = command.env("TIDEGATE_WINDOW", LONG).output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn limit_of_a_simulation_wins_over_the_variable_of_the_file() {
    let simulate = ["simulate", "--load", "steady", "--rate", "10", "--duration", "10s"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(simulate).args(["--limit", "5", "--window", "1s"]).env_clear();
    let output = command.env("TIDEGATE_CONFIG", "/nowhere/tidegate.yaml").output();
    let output = output.expect("the binary runs");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    // Without such a flag, the variable counts, and an error names it.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(simulate).env_clear().env("TIDEGATE_CONFIG", "/nowhere/tidegate.yaml");
    let error = text(&command.output().expect("the binary runs").stderr);
    assert!(error.contains("--config is set by the variable TIDEGATE_CONFIG"), "{error}");
}

#[test]
fn decisions_wait_until_they_are_allowed() {
    let quota = ["--limit", "1", "--window", "200ms", "--count", "3"];
    let start = std::time::Instant::now();
    let waited = tidegate(&[&["acquire", "u", "--wait", "60s", "--quiet"], &quota[..]].concat());
    assert_eq!(waited.status.code(), Some(0), "{}", text(&waited.stderr));
    assert_eq!(text(&waited.stdout), "", "--quiet");
    assert!(start.elapsed() >= std::time::Duration::from_millis(400), "{:?}", start.elapsed());
    // A wait that cannot end in time ends at once.
    let short = ["acquire", "u", "--limit", "1", "--window", "1h", "--count", "2", "--wait", "1m"];
    let denied = tidegate(&short);
    assert_eq!(denied.status.code(), Some(1), "{}", text(&denied.stderr));
    assert!(start.elapsed() < std::time::Duration::from_secs(50), "{:?}", start.elapsed());
}

#[test]
fn a_running_service_decides() {
    let service = support::Service::start("policies: [{name: api, limit: 2, window: 1h}]\n");
    let url = format!("http://{}", service.http);
    let by_policy = ["acquire", "ann", "--http", &url, "--policy", "api", "--count", "3"];
    let decided = tidegate(&by_policy);
    let lines = text(&decided.stdout);
    assert_eq!(decided.status.code(), Some(1), "{}", text(&decided.stderr));
    assert!(lines.starts_with("allowed  1 of 2 left, resets in 1h\nallowed  0 of 2"), "{lines}");
    assert!(lines.lines().nth(2).expect("a line").starts_with("denied   0 of 2 left"), "{lines}");
    let by_quota = ["acquire", "bob", "--http", &url, "--json"];
    let quota = ["--limit", "1", "--window", "100ms", "--count", "3", "--wait", "60s"];
    let decided = tidegate(&[&by_quota[..], &quota].concat());
    let decisions = bodies(&decided);
    assert!(decisions.iter().all(|decision| decision["allowed"] == true), "{decisions:?}");
    for (flags, message) in [
        (&["--http", &url, "--policy", "other"][..], "no policy"),
        (&["--http", &url], "--http needs --policy"),
        (&["--http", &url, "--policy", "api", "--limit", "5", "--window", "1s"], "has a limit"),
        (&["--http", "http://127.0.0.1:1", "--policy", "api"], "--http http://127.0.0.1:1: "),
    ] {
        let output = tidegate(&[&["acquire", "ann"], flags].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {error}");
        assert!(error.contains(message) && error.lines().count() == 1, "{flags:?}: {error}");
    }
}
