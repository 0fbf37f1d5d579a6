//! Text, JSON, progress and signals.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Redis, TEST_TIMEOUT};
use crate::{HUNDRED_FOR_ONE_KEY, TEN_PER_HOUR, bench, count, json_of, report, spawn, text};

#[test]
fn text_has_counts_and_percentiles_and_no_control_codes() {
    let output = bench(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR[..]].concat());
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
    let shown = text(&output.stdout);
    assert!(!shown.contains(['\r', '\x1b']), "{shown:?}");
    for part in [
        "memory: sliding-log, 10 per 1h\n",
        "closed loop, 64 callers, keys: 1, hot\n",
        "requests            100   ",
        " answered per second\n",
        "allowed              10   10.0 %\n",
        "denied               90   90.0 %\n",
        "errors                0   0.0 %\n",
        "latency from sending to the answer\np50 ",
        " p90 ",
        " p99 ",
        " p99.9 ",
        " max ",
    ] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    let open = bench(&[&HUNDRED_FOR_ONE_KEY[..], &["--rate", "1000"]].concat());
    let shown = text(&open.stdout);
    assert!(shown.contains("open loop, 1000 requests per second (fixed)"), "{shown}");
    assert!(shown.contains("latency from the due time to the answer"), "{shown}");
}

#[test]
fn note_says_that_keys_in_redis_expire() {
    let redis = Redis::start();
    let output = bench(&["--redis", &redis.url(), "--requests", "5"]);
    let shown = text(&output.stdout);
    assert!(shown.contains("start with tidegate_bench:{bench-"), "{shown}");
    assert!(shown.contains("each has an expiry"), "{shown}");
}

#[test]
fn json_has_the_documented_fields() {
    let document = include_str!("../../../../docs/bench.md");
    let (_, fields) = document.split_once("| field |").expect("a table of fields");
    let fields: Vec<&str> = fields
        .lines()
        .skip(2)
        .map_while(|line| line.strip_prefix("| `"))
        .filter_map(|line| line.split('`').next())
        .collect();
    assert!(fields.len() > 20, "{fields:?}");
    let closed = report(&["--requests", "10"]);
    let open = report(&["--requests", "10", "--rate", "1000", "--distribution", "zipf"]);
    let mut found = Vec::new();
    for result in [&closed, &open] {
        collect_fields(result, "", &mut found);
    }
    for field in &fields {
        assert!(found.iter().any(|name| name == field), "{field} is documented, but not printed");
    }
    for name in &found {
        assert!(fields.contains(&name.as_str()), "{name} is not documented");
    }
    for name in ["p50", "p90", "p99", "p99_9", "max", "mean"] {
        assert!(closed["latency_us"][name].as_f64().expect("a number") > 0.0, "{closed}");
    }
    let latency = |name: &str| closed["latency_us"][name].as_f64().expect("a number");
    assert!(latency("p50") <= latency("p90") && latency("p99") <= latency("max"), "{closed}");
}

/// Collects the paths of all fields, with the percentiles as one.
fn collect_fields(value: &Value, path: &str, found: &mut Vec<String>) {
    let Value::Object(fields) = value else { return };
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        if value.is_object() && !name.ends_with("_us") {
            collect_fields(value, &path, found);
        } else if !found.contains(&path) {
            found.push(path);
        }
    }
}

#[test]
fn interrupt_prints_the_result_so_far() {
    let redis = Redis::start();
    let url = redis.url();
    for pace in [["--rate", "100"], ["--concurrency", "2"]] {
        for signal in ["INT", "TERM"] {
            let before = redis.calls_of("evalsha");
            let target = ["--redis", &url, "--duration", "1h", "--warmup", "0s", "--json"];
            let run = spawn(&[&target[..], &pace].concat());
            let deadline = Instant::now() + TEST_TIMEOUT;
            while redis.calls_of("evalsha") < before + 20 {
                assert!(Instant::now() < deadline, "no decision");
                std::thread::sleep(Duration::from_millis(5));
            }
            interrupt(&run, signal);
            let result = json_of(&run.wait_with_output().expect("it ends"));
            assert_eq!(result["interrupted"], true, "{result}");
            assert!(count(&result, "answered") > 0, "{result}");
            assert_eq!(count(&result, "failed"), 0, "{result}");
            assert_eq!(count(&result, "unanswered"), 0, "{result}");
            assert!(result["seconds"].as_f64().expect("a number") < 3_600.0);
        }
    }
}

#[test]
fn second_interrupt_does_not_wait_for_answers() {
    let redis = Redis::start();
    for pace in [["--rate", "100"], ["--concurrency", "2"]] {
        let target = ["--redis", &redis.url(), "--timeout", "60s", "--warmup", "0s", "--json"];
        let mut run = spawn(&[&target[..], &pace, &["--duration", "1h"]].concat());
        let before = redis.calls_of("evalsha");
        let deadline = Instant::now() + TEST_TIMEOUT;
        while redis.calls_of("evalsha") < before + 20 {
            assert!(Instant::now() < deadline, "no decision");
            std::thread::sleep(Duration::from_millis(5));
        }
        redis.signal("STOP");
        // The next requests wait for Redis.
        std::thread::sleep(Duration::from_millis(500));
        while run.try_wait().expect("our own child").is_none() {
            assert!(Instant::now() < deadline, "it still waits");
            interrupt(&run, "INT");
            std::thread::sleep(Duration::from_millis(100));
        }
        redis.signal("CONT");
        let result = json_of(&run.wait_with_output().expect("it ends"));
        assert_eq!(result["interrupted"], true, "{result}");
        assert!(count(&result, "unanswered") > 0, "{result}");
        let warning = result["warnings"][0].as_str().expect("a warning");
        assert!(warning.contains("had no answer yet"), "{warning}");
    }
}

fn interrupt(run: &Child, signal: &str) {
    // It may have ended just now.
    let _ = Command::new("kill").arg(format!("-{signal}")).arg(run.id().to_string()).status();
}

#[test]
fn progress_is_shown_on_a_terminal_only() {
    let command =
        format!("{} bench --duration 1s --warmup 0s --rate 100", env!("CARGO_BIN_EXE_tidegate"));
    // `script` runs a command on a terminal.
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .stdin(Stdio::null())
        .output()
        .expect("script runs");
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("\r\x1b[2K[") && shown.contains(" % "), "{shown:?}");
    assert!(shown.contains("requests, ") && shown.contains(" left"), "{shown:?}");
}
