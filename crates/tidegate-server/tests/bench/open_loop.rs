//! Open loop: due times, stalls, bounds.

use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Redis, Service, TEST_TIMEOUT};
use crate::{allowed_by, count, json_of, report, spawn};

/// Two hundred requests per second for four seconds.
const LOAD: [&str; 8] = ["--rate", "200", "--warmup", "0s", "--duration", "4s", "--timeout", "30s"];
const DUE: u64 = 800;
const STALL: Duration = Duration::from_secs(1);

fn result_of(run: Child) -> Value {
    json_of(&run.wait_with_output().expect("it ends"))
}

fn micros(report: &Value, quantile: &str) -> f64 {
    report["latency_us"][quantile].as_f64().unwrap_or_else(|| panic!("{quantile} in {report}"))
}

/// Waits until Redis has decided requests.
fn wait_for_decisions(redis: &Redis) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while redis.calls_of("evalsha") < 5 {
        assert!(Instant::now() < deadline, "no decision");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that no request was lost, and that those due in the stall show it. The slowest hundredth
/// of 800 requests was due in the first 40 milliseconds of the stall.
fn assert_shows_stall(result: &Value) {
    let not_sent = count(&result["loop"], "not_sent");
    assert_eq!(count(result, "answered") + not_sent, DUE, "{result}");
    assert_eq!((count(&result["loop"], "due"), count(result, "failed")), (DUE, 0), "{result}");
    assert!(micros(result, "max") >= 0.9e6, "{result}");
    assert!(micros(result, "p99") >= 0.9e6, "{result}");
    // A quarter of the requests was due in the stall, so a tenth waited for more than half of it.
    assert!(micros(result, "p90") >= 0.4e6, "{result}");
}

#[test]
fn stalled_redis_shows_in_the_latency_of_all_requests_due_meanwhile() {
    let redis = Redis::start();
    let run = spawn(&[&["--redis", &redis.url(), "--json"], &LOAD[..]].concat());
    wait_for_decisions(&redis);
    redis.signal("STOP");
    std::thread::sleep(STALL);
    redis.signal("CONT");
    assert_shows_stall(&result_of(run));
}

#[test]
fn stalled_service_shows_in_the_latency_of_all_requests_due_meanwhile() {
    let service = Service::start(
        "policies: [{name: api, limit: 9, window: 1h}, {name: shop, match: {domain: shop}, \
         key: [descriptor.user], limit: 9, window: 1h}]\n",
    );
    let url = format!("http://{}", service.http);
    let address = service.grpc.clone().expect("an address for gRPC");
    let by_http = ["--http", &url, "--policy", "api", "--json"];
    let by_grpc = ["--grpc", &address, "--domain", "shop", "--descriptor", "user={key}", "--json"];
    let runs = [&by_http[..], &by_grpc].map(|target| spawn(&[target, &LOAD].concat()));
    service.wait_until("both are loaded", |service| {
        ["api", "shop"].into_iter().all(|policy| allowed_by(service, policy) > 5)
    });
    service.signal("STOP");
    std::thread::sleep(STALL);
    service.signal("CONT");
    for run in runs {
        assert_shows_stall(&result_of(run));
    }
}

#[test]
fn requests_without_an_answer_count_with_at_least_the_timeout() {
    let redis = Redis::start();
    let target = ["--redis", &redis.url(), "--json"];
    let load = ["--rate", "200", "--warmup", "0s", "--duration", "4s", "--timeout", "400ms"];
    let run = spawn(&[&target, &load[..]].concat());
    wait_for_decisions(&redis);
    redis.signal("STOP");
    std::thread::sleep(2 * STALL);
    redis.signal("CONT");
    let result = result_of(run);
    let failed = count(&result, "failed");
    assert!(failed > 0 && count(&result, "answered") > 0, "{result}");
    let timed_out = result["errors"].as_array().expect("a list").iter();
    let timed_out = timed_out.filter(|error| error["kind"] == "timeout");
    let timed_out: u64 = timed_out.map(|error| count(error, "count")).sum();
    assert!(timed_out * 100 > DUE, "more than a hundredth: {result}");
    assert!(micros(&result, "p99") >= 400e3, "{result}");
    let warnings = result["warnings"].to_string();
    let expected = "requests had no answer within 400ms, and count with at least this latency";
    assert!(warnings.contains(expected), "{warnings}");
    let left_out = failed - timed_out;
    let expected = format!("{left_out} requests failed: the latencies do not include them");
    assert_eq!(warnings.contains(&expected), left_out > 0, "{warnings}");
}

#[test]
fn late_answer_does_not_lower_the_rate_of_answered_requests() {
    let redis = Redis::start();
    let target = ["--redis", &redis.url(), "--json", "--timeout", "30s"];
    let runs = [["--duration", "1s"], ["--requests", "200"]].map(|end| {
        let load = ["--rate", "200", "--warmup", "0s"];
        spawn(&[&target[..], &load, &end].concat())
    });
    wait_for_decisions(&redis);
    redis.signal("STOP");
    // Longer than the load.
    std::thread::sleep(3 * STALL);
    redis.signal("CONT");
    for run in runs {
        let result = result_of(run);
        assert_eq!(count(&result, "answered"), 200, "{result}");
        let seconds = |field: &str| result[field].as_f64().expect("a number");
        assert!(seconds("seconds") > 2.0 * seconds("load_seconds"), "{result}");
        assert!((0.99..1.01).contains(&seconds("load_seconds")), "{result}");
        assert!((198.0..202.0).contains(&seconds("answered_per_second")), "{result}");
    }
}

#[test]
fn requests_above_the_bound_are_sent_late_and_none_is_lost() {
    let redis = Redis::start();
    let bound = ["--max-in-flight", "5", "--json", "--redis", &redis.url()];
    let run = spawn(&[&bound, &LOAD[..]].concat());
    wait_for_decisions(&redis);
    redis.signal("STOP");
    std::thread::sleep(STALL);
    redis.signal("CONT");
    let result = result_of(run);
    assert_shows_stall(&result);
    // Two hundred were due in the stall, and five of them in flight.
    let late = count(&result["loop"], "sent_late");
    assert!((150..=DUE).contains(&late), "{result}");
    let warning = result["warnings"][0].as_str().expect("a warning");
    assert!(warning.contains("because 5 were in flight"), "{warning}");
}

#[test]
fn requests_that_could_not_be_sent_are_counted() {
    let redis = Redis::start();
    let url = redis.url();
    let target = ["--redis", &url, "--max-in-flight", "3", "--json"];
    let run = spawn(&[&target, &LOAD[..]].concat());
    wait_for_decisions(&redis);
    // Stopped beyond the end of the run.
    redis.signal("STOP");
    std::thread::sleep(Duration::from_millis(4_500));
    redis.signal("CONT");
    let result = result_of(run);
    let [due, not_sent] = ["due", "not_sent"].map(|name| count(&result["loop"], name));
    assert_eq!(due, DUE, "{result}");
    assert_eq!(count(&result, "requests"), DUE - not_sent, "{result}");
    assert!(not_sent > 0, "{result}");
    let warning = result["warnings"][0].as_str().expect("a warning");
    assert!(warning.contains("were due but not sent"), "{warning}");
    assert!(warning.contains("the target does not keep up with 200 per second"), "{warning}");
}

#[test]
fn warm_up_is_not_measured() {
    let load = ["--rate", "100", "--duration", "500ms", "--limit", "1", "--window", "1h"];
    let hot = ["--distribution", "hot"];
    let without = report(&[&load[..], &hot, &["--warmup", "0s"]].concat());
    let with = report(&[&load[..], &hot, &["--warmup", "500ms"]].concat());
    let counts = |result: &Value| ["requests", "allowed", "denied"].map(|name| count(result, name));
    assert_eq!(counts(&without), [50, 1, 49], "{without}");
    // The warm-up has spent the only unit.
    assert_eq!(counts(&with), [50, 0, 50], "{with}");
}

#[test]
fn poisson_arrivals_have_the_rate_and_depend_on_the_seed() {
    let due = |seed: &str| {
        let load = ["--rate", "2000", "--arrivals", "poisson", "--duration", "1s"];
        let result = report(&[&load[..], &["--warmup", "0s", "--seed", seed]].concat());
        assert_eq!(result["loop"]["arrivals"], "poisson");
        count(&result["loop"], "due")
    };
    let counts = ["1", "2", "3"].map(due);
    // Six standard deviations.
    assert!(counts.iter().all(|count| (1_730..2_270).contains(count)), "{counts:?}");
    assert!(counts[0] != counts[1] || counts[1] != counts[2], "{counts:?}");
    assert_eq!(due("1"), counts[0]);
}
