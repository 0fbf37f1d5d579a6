//! `tidegate plan` as a process; its costs are compared with a real Redis.

mod support;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Redis, TEST_TIMEOUT};
use tidegate::{Charge, Limiter, Quota, RedisStore};

const COSTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tidegate-tools/src/plan/costs.txt");
const BILLION: [&str; 8] = ["--users", "1B", "--limit", "100", "--window", "10s", "--rps", "350k"];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("plan").args(arguments).stdin(Stdio::null()).env_clear();
    command
}

fn plan(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Returns the arguments with this one replaced or added.
fn with<'a>(arguments: &[&'a str], name: &'a str, value: &'a str) -> Vec<&'a str> {
    let mut arguments = arguments.to_vec();
    match arguments.iter().position(|argument| *argument == name) {
        Some(at) => arguments[at + 1] = value,
        None => arguments.extend([name, value]),
    }
    arguments
}

fn json(arguments: &[&str]) -> Value {
    let output = plan(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn forms(plan: &Value) -> &[Value] {
    plan["forms"].as_array().expect("a list")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn billion_users_have_a_plan() {
    let output = plan(&BILLION);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.starts_with("1,000,000,000 users with 100 per 10s, 350k requests"), "{shown}");
    assert!(!shown.contains('\x1b'), "no colours without a terminal: {shown}");
    let plan = json(&BILLION);
    let recommendation = plan["recommendation"].as_str().expect("a text");
    assert!(shown.trim_end().ends_with(recommendation), "{shown}");
    let is_end = |(_, next): &(char, char)| *next == ' ' || *next == '\n';
    let letters = recommendation.chars().zip(recommendation.chars().skip(1));
    assert!(!letters.filter(|(letter, _)| *letter == '.').any(|pair| is_end(&pair)), "{shown}");
    let names: Vec<(&str, Option<&str>)> = forms(&plan)
        .iter()
        .map(|form| (form["algorithm"].as_str().expect("a name"), form["encoding"].as_str()))
        .collect();
    assert_eq!(
        names,
        [
            ("sliding-log", Some("sorted-set")),
            ("sliding-log", Some("packed")),
            ("sliding-counter", Some("hash")),
            ("sliding-counter", Some("packed")),
            ("fixed-window", None),
            ("token-bucket", None),
            ("leaky-bucket", None),
        ]
    );
    for form in forms(&plan) {
        let memory = number(&form["memory_bytes"]);
        let expected = number(&form["keys"]) * number(&form["bytes_per_key"]) * 1.25;
        assert!((memory / expected - 1.0).abs() < 0.01, "{form}");
        let cores = 350e3 * number(&form["cpu_micros"]) / 1e6;
        assert!((number(&form["cores"]) / cores - 1.0).abs() < 0.001, "{form}");
        let by = [&form["primaries_by_memory"], &form["primaries_by_cpu"]].map(Value::as_u64);
        assert_eq!(form["primaries"].as_u64(), by.into_iter().max().flatten(), "{form}");
    }
}

#[test]
fn options_change_the_plan() {
    let usual = json(&BILLION);
    let log = |plan: &Value, field: &str| number(&forms(plan)[1][field]);
    let change =
        |name, value, field| log(&json(&with(&BILLION, name, value)), field) / log(&usual, field);
    assert!(change("--batch", "64", "cpu_micros") < 0.6);
    assert!(change("--batch", "64", "network_bits_per_second") < 0.6);
    assert!((change("--rps", "700k", "memory_bytes") - 2.0).abs() < 0.01);
    assert!(change("--key-bytes", "116", "bytes_per_key") > 1.4);
    assert!(change("--node-memory", "64MiB", "primaries_by_memory") > 3.0);
    assert!(change("--headroom", "80%", "primaries_by_cpu") > 3.0);
    // The same requests from fewer users: fewer keys, but with more requests each.
    let active = json(&with(&BILLION, "--active", "0.01%"));
    let some_log = &forms(&active)[1];
    assert_eq!((&some_log["keys"], &some_log["requests_per_key"]), (&json!(100_000), &json!(35.0)));
    assert!(log(&active, "bytes_per_key") > log(&usual, "bytes_per_key"));
    assert!(log(&active, "memory_bytes") < log(&usual, "memory_bytes"));
    // More requests than the limit of all users admits.
    let shown = text(&plan(&with(&BILLION, "--users", "1")).stdout);
    assert!(shown.contains("1 user with") && shown.contains("at most 10 of these"), "{shown}");
}

#[test]
fn keys_bound_the_primaries() {
    let one = json(&with(&with(&BILLION, "--users", "1"), "--rps", "3M"));
    for form in forms(&one) {
        assert_eq!((&form["keys"], &form["primaries"]), (&json!(1), &json!(1)), "{form}");
        assert!(number(&form["room_used"]) > 1.1, "{form}");
    }
    let shown = text(&plan(&with(&with(&BILLION, "--users", "1"), "--rps", "3M")).stdout);
    assert!(shown.contains("the keys are too few for more primaries"), "{shown}");
}

/// Returns requests per second at which a form needs this many cores.
fn rps_for(cores: f64, form: usize) -> String {
    let small = json(&with(&BILLION, "--rps", "1000"));
    format!("{:.0}", 1e6 * cores / number(&forms(&small)[form]["cpu_micros"]))
}

/// The costs are not so precise that 0.69 and 0.73 cores of a server would differ.
#[test]
fn thresholds_have_a_tolerance_and_are_shown() {
    let at = |cores: f64| json(&with(&BILLION, "--rps", &rps_for(cores, 1)));
    let log = |cores: f64| forms(&at(cores))[1].clone();
    for (cores, primaries, used) in [(0.69, 1, 0.99), (0.73, 1, 1.04), (0.8, 3, 0.38)] {
        let log = log(cores);
        assert_eq!(log["primaries_by_cpu"], primaries, "{log}");
        let found = number(&log["cores"]) / (0.7 * number(&log["primaries_by_cpu"]));
        assert!((found - used).abs() < 0.01, "{log}");
    }
    let tolerance = number(&at(0.69)["tolerance"]);
    assert!((tolerance - 0.1).abs() < 1e-9);
    let shown = text(&plan(&BILLION).stdout);
    assert!(shown.contains("room used") && shown.contains("up to 110 % are accepted"), "{shown}");
}

/// A primary more in twenty is no reason for an algorithm that is not exact.
#[test]
fn recommendation_stays_exact_within_the_error_of_the_costs() {
    let demand = ["--users", "10M", "--limit", "100", "--window", "1m"];
    let plans = (0..30).map(|step| {
        let rps = format!("{}", 1_000_000 + step * 50_000);
        json(&[&demand[..], &["--rps", &rps]].concat())
    });
    let primaries = |form: &Value| form["primaries"].as_u64().expect("a number");
    let mut seen = 0;
    for plan in plans {
        let fewest = forms(&plan).iter().map(primaries).min().expect("forms");
        let log = forms(&plan).iter().filter(|form| form["algorithm"] == "sliding-log");
        let log = log.map(primaries).min().expect("logs");
        if log > fewest && log <= fewest + fewest / 10 {
            assert_eq!(plan["recommended"]["algorithm"], "sliding-log", "{plan}");
            seen += 1;
        }
    }
    assert!(seen > 0, "no such plan");
}

#[test]
fn policy_and_prefix_are_part_of_each_key() {
    let usual = json(&BILLION);
    let named = [("--policy", "requests-per-user-and-day"), ("--prefix", "limits")];
    let longer = named.iter().fold(BILLION.to_vec(), |all, (name, value)| with(&all, name, value));
    let longer = json(&longer);
    assert_eq!((&usual["policy"], &usual["prefix"]), (&json!("per-user"), &json!("rate_limit")));
    for (before, after) in forms(&usual).iter().zip(forms(&longer)) {
        let growth = number(&after["bytes_per_key"]) - number(&before["bytes_per_key"]);
        assert!((growth - 13.0).abs() < 1e-9, "{after}");
    }
}

#[test]
fn forms_that_do_not_support_the_limit_are_named() {
    let arguments = with(&BILLION, "--limit", "1M");
    let sorted_set = &json(&arguments)["unavailable"][0];
    assert_eq!(
        (&sorted_set["encoding"], forms(&json(&arguments)).len()),
        (&json!("sorted-set"), 6)
    );
    let shown = text(&plan(&with(&BILLION, "--limit", "1B")).stdout);
    assert!(shown.contains("sliding-log packed: limit 1000000000 is too large"), "{shown}");
    assert!(shown.contains("\nUse `algorithm: sliding-counter` with"), "{shown}");
}

#[test]
fn impossible_numbers_are_errors() {
    for (name, value, expected) in [
        ("--users", "0", "--users must be at least 1"),
        ("--users", "many", "is not a whole number like"),
        ("--users", "1.5", "is not a whole number like"),
        ("--users", "1e30", "is not a whole number like"),
        ("--limit", "0", "limit 0 is out of range: it must be from 1 to 1000000000000"),
        ("--limit", "2T", "limit 2000000000000 is out of range"),
        ("--window", "0s", "window 0ns is out of range: it must be from 1ms to 366 days"),
        ("--window", "9000d", "366 days"),
        ("--window", "soon", "soon"),
        ("--rps", "0", "is not a number above 0"),
        ("--rps", "-1", "unexpected argument '-1'"),
        ("--active", "120%", "is not a share from 0% to 100%"),
        ("--active", "0", "--active must be more than 0%"),
        ("--headroom", "100%", "--headroom must be less than 100%"),
        ("--batch", "0", "1..=128"),
        ("--key-bytes", "0", "1..=1024"),
        ("--node-memory", "3", "is not a size like 16GiB"),
        ("--measure", "redis://127.0.0.1:1", "127.0.0.1:1"),
        ("--measure", "http://127.0.0.1", "--measure"),
    ] {
        let output = plan(&with(&BILLION, name, value));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name} {value}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains(expected), "{name} {value}: {error}");
        assert!(output.stdout.is_empty());
    }
    let missing = plan(&BILLION[2..]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("--users <N>"), "{}", text(&missing.stderr));
}

/// The checked-in costs are those of a real server: memory within 15 %, CPU within 40 % in
/// relation to an empty script, that of a connection within a factor of two. `RENEW=1` (`make plan-costs`) writes them instead.
#[test]
fn costs_are_those_of_a_real_redis() {
    let redis = Redis::start();
    let url = redis.url();
    let measured = |samples: &str| {
        let measure = ["--measure", &url, "--samples", samples, "--print-costs"];
        let output = plan(&[&BILLION[..], &measure].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(redis.query::<u64>(&["DBSIZE"]), 0, "all keys are deleted");
        text(&output.stdout)
    };
    if std::env::var_os("RENEW").is_some() {
        let version: String = redis.query(&["INFO", "server"]);
        let version = version.lines().find_map(|line| line.strip_prefix("redis_version:"));
        let heading = format!(
            "# Costs on Redis {}; see costs.rs. `make plan-costs` measures them.\n",
            version.expect("a version")
        );
        std::fs::write(COSTS, heading + &measured("2048")).expect("written");
        return;
    }
    let checked_in = figures(&std::fs::read_to_string(COSTS).expect("a file"));
    // Other processes disturb the measurement, so each figure has several attempts.
    let mut wrong = checked_in.clone();
    for _ in 0..6 {
        let found = figures(&measured("512"));
        assert_eq!(found.len(), checked_in.len());
        wrong.retain(|(name, expected, tolerance)| {
            let (_, found, _) = found.iter().find(|figure| figure.0 == *name).expect("the same");
            let is_wrong = (found / expected - 1.0).abs() > *tolerance;
            if is_wrong {
                eprintln!("{name} is {found}, but {expected} in costs.txt");
            }
            is_wrong
        });
        if wrong.is_empty() {
            return;
        }
    }
    panic!("`make plan-costs` measures costs.txt again: {wrong:#?}");
}

/// The measured cost of a connection is the one that redis-benchmark finds, within a factor of two.
#[test]
fn connection_costs_what_redis_benchmark_finds() {
    let redis = Redis::start();
    let url = redis.url();
    let measure = ["--measure", &url, "--samples", "512", "--print-costs"];
    // Other processes disturb both measurements, so there are several attempts.
    let mut ratios = Vec::new();
    for _ in 0..6 {
        let costs = text(&plan(&[&BILLION[..], &measure].concat()).stdout);
        let number = |name: &str| -> f64 {
            let line = costs.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse().ok()).expect("a number")
        };
        let found = number("connection-cpu") * number("empty-script-micros");
        ratios.push(found / connection_micros(&redis));
        if ratios.iter().any(|ratio| (0.5..2.0).contains(ratio)) {
            return;
        }
    }
    panic!("{ratios:?}");
}

/// Returns the CPU time of a call for its connection: the difference between calls on 50
/// connections and in a pipeline.
fn connection_micros(redis: &Redis) -> f64 {
    let sha: String = redis.query(&["SCRIPT", "LOAD", "return 0"]);
    let cpu = || -> f64 {
        let info: String = redis.query(&["INFO", "cpu"]);
        let fields = ["used_cpu_user:", "used_cpu_sys:"].map(|field| {
            let value = info.lines().find_map(|line| line.strip_prefix(field));
            value.and_then(|value| value.trim().parse::<f64>().ok()).expect("a number")
        });
        fields.iter().sum()
    };
    let port = redis.port().to_string();
    let micros_per_call = |clients: &[&str]| {
        let before = cpu();
        let output = Command::new("redis-benchmark")
            .args(["-p", &port, "-q", "-n", "20000"])
            .args(clients)
            .args(["EVALSHA", &sha, "0"])
            .output();
        assert!(output.expect("redis-benchmark is installed by `make setup`").status.success());
        (cpu() - before) * 1e6 / 20_000.0
    };
    let mut differences = [(); 5]
        .map(|()| micros_per_call(&["-c", "50"]) - micros_per_call(&["-c", "1", "-P", "64"]));
    differences.sort_by(f64::total_cmp);
    differences[2]
}

/// Name, value and tolerance.
type Figure = (String, f64, f64);

/// Returns the figures of a table of costs that do not depend on the speed of the machine.
fn figures(costs: &str) -> Vec<Figure> {
    const COLUMNS: [(&str, f64); 5] =
        [("bytes", 0.15), ("cpu", 0.4), ("cpu/64", 0.4), ("network", 0.15), ("network/64", 0.15)];
    let mut figures = Vec::new();
    for line in costs.lines().map(|line| line.split('#').next().unwrap_or_default()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let value = |word: &str| word.parse::<f64>().expect("a number");
        match words[..] {
            [name @ "keyspace-bytes", bytes] => {
                figures.push((name.to_owned(), value(bytes), 0.15));
            }
            // Mostly system calls, whose price differs between kernels and hypervisors.
            [name @ "connection-cpu", cpu] => figures.push((name.to_owned(), value(cpu), 1.0)),
            [algorithm, encoding, entries, ref costs @ ..] => {
                for (cost, (column, tolerance)) in costs.iter().zip(COLUMNS) {
                    let name = format!("{algorithm} {encoding} {entries} {column}");
                    figures.push((name, value(cost), tolerance));
                }
            }
            _ => {}
        }
    }
    figures
}

/// Returns the quota of a form of a plan, with another limit.
fn quota(form: &Value, limit: u64, window: Duration) -> Quota {
    let algorithm = form["algorithm"].as_str().expect("a name").parse().expect("an algorithm");
    let quota = Quota::new(algorithm, limit, window).expect("valid");
    match form["encoding"].as_str() {
        Some(encoding) => quota.with_encoding(encoding.parse().expect("one")).expect("valid"),
        None => quota,
    }
}

/// Keys between the rows of the table, beyond its last one, and with other windows are as large as
/// planned, and live no longer.
#[tokio::test]
async fn keys_have_the_planned_size_and_lifetime() {
    let redis = Redis::start();
    let store = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).connect().await;
    let limiter = Limiter::new(store.expect("our own server answers"));
    let key = format!("{:016}", 7);
    for (limit, window) in [(40, "10s"), (190, "10s"), (3_000, "1h"), (3_000, "1d"), (400, "30d")] {
        let flags = ["--limit", &limit.to_string(), "--window", window];
        let plan = json(&[&["--users", "1", "--rps", "1M"], &flags[..]].concat());
        let window = Duration::from_secs_f64(number(&plan["window_ms"]) / 1e3);
        for form in forms(&plan) {
            let quota = quota(form, limit, window);
            let charge = Charge::new(&key, &quota).with_policy("per-user");
            let redis_key = limiter.store().redis_key(&charge);
            let decision = limiter.acquire(&charge).await.expect("decided");
            assert!(decision.allowed, "{form}");
            let lifetime: f64 = redis.query(&["PTTL", &redis_key]);
            let planned = number(&form["key_lifetime_ms"]);
            assert!(lifetime > 0.0 && lifetime <= planned + 2.0, "{lifetime} ms: {form}");
            for _ in 1..quota.limit() {
                assert!(limiter.acquire(&charge).await.expect("decided").allowed, "{form}");
            }
            let usage: f64 = redis.query(&["MEMORY", "USAGE", &redis_key, "SAMPLES", "0"]);
            let checked_in = figures(&std::fs::read_to_string(COSTS).expect("a file"));
            let keyspace = checked_in.iter().find(|(name, ..)| name.starts_with("keyspace-bytes"));
            let found = usage + keyspace.expect("a line").1;
            let planned = number(&form["bytes_per_full_key"]);
            // The members of a sorted set are longer once requests are denied, as planned, and if
            // the text of the window is.
            let expected = if form["encoding"] == "sorted-set" { 0.8..1.35 } else { 0.85..1.15 };
            assert!(expected.contains(&(planned / found)), "{found} bytes at {limit}: {form}");
            let deleted: u64 = redis.query(&["UNLINK", &redis_key]);
            assert_eq!(deleted, 1);
        }
    }
}

#[test]
fn failed_measurement_leaves_no_keys() {
    let redis = Redis::start();
    let rules = ["on", ">secret", "~*", "+@all", "-memory"];
    redis.query::<String>(&[&["ACL", "SETUSER", "planner"], &rules[..]].concat());
    let url = redis.url().replace("redis://", "redis://planner:secret@");
    let output = plan(&with(&BILLION, "--measure", &url));
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("MEMORY USAGE: NOPERM"), "{error}");
    assert!(redis.calls_of("evalsha") > 0, "it had begun to decide");
    assert_eq!(redis.query::<u64>(&["DBSIZE"]), 0);
}

#[test]
fn interrupted_measurement_leaves_no_keys() {
    for signal in ["INT", "TERM"] {
        let redis = Redis::start();
        let url = redis.url();
        let mut command = command(&with(&BILLION, "--measure", &url));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.expect("the binary starts");
        let deadline = Instant::now() + TEST_TIMEOUT;
        while redis.query::<u64>(&["DBSIZE"]) == 0 {
            assert!(Instant::now() < deadline, "no key within {TEST_TIMEOUT:?}");
        }
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
        let output = child.wait_with_output().expect("the binary ends");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("--measure: ") && error.contains("ed"), "{error}");
        assert!(output.stdout.is_empty());
        assert_eq!(redis.query::<u64>(&["DBSIZE"]), 0, "SIG{signal}");
    }
}

#[test]
fn measured_costs_are_those_of_the_plan() {
    let redis = Redis::start();
    let url = redis.url();
    let plan = json(&[&BILLION[..], &["--measure", &url, "--samples", "64"]].concat());
    assert_eq!(plan["measured"], true);
    assert_eq!(forms(&plan).len(), 7);
    let checked_in = json(&BILLION);
    assert_eq!(checked_in["measured"], false);
    assert_ne!(plan["empty_script_micros"], checked_in["empty_script_micros"]);
}
