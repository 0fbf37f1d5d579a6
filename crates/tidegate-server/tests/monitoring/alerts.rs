use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::prometheus::{Load, Prometheus, promtool};
use crate::read;
use crate::support::{Cluster, Redis, Service, free_port, request};

/// Alerts that no test can cause in the real service, with the reason.
const WITHOUT_REAL_TEST: [(&str, &str); 1] =
    [("TidegatePanics", "a panic is a defect, and no known input causes one")];

/// Alerts that a busy machine can cause.
const ABOUT_SPEED: [&str; 2] = ["TidegateSlowDecisions", "TidegateDown"];

/// Returns the alerts of the rules.
fn alerts() -> Vec<Value> {
    let rules: Value = serde_saphyr::from_str(&read("deploy/prometheus/rules.yaml")).expect("YAML");
    let groups = rules["groups"].as_array().expect("groups");
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules"));
    rules.filter(|rule| !rule["alert"].is_null()).cloned().collect()
}

fn name(alert: &Value) -> &str {
    alert["alert"].as_str().expect("a name")
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    for arguments in [
        &["check", "rules", "rules.yaml"][..],
        &["check", "config", "prometheus.yaml"],
        &["test", "rules", "rules_test.yaml"],
    ] {
        assert!(promtool(arguments, "").contains("SUCCESS"), "{arguments:?}");
    }
}

#[test]
fn every_alert_is_explained_and_has_unit_tests_in_both_directions() {
    let page = read("docs/monitoring.md");
    let tests: Value =
        serde_saphyr::from_str(&read("deploy/prometheus/rules_test.yaml")).expect("YAML");
    let tests = tests["tests"].as_array().expect("tests").iter();
    let tests: Vec<&Value> =
        tests.flat_map(|test| test["alert_rule_test"].as_array().into_iter().flatten()).collect();
    let alerts = alerts();
    assert!(alerts.len() >= 10);
    for alert in &alerts {
        let name = name(alert);
        let severity = alert["labels"]["severity"].as_str().expect("a severity");
        assert!(["warning", "critical"].contains(&severity), "{name}: {severity}");
        for field in ["summary", "description"] {
            let text = alert["annotations"][field].as_str().unwrap_or_default();
            assert!(text.len() > 20, "{name} has no {field}");
        }
        let link = alert["annotations"]["runbook_url"].as_str().expect("a link");
        let anchor = format!("/docs/monitoring.md#{}", name.to_lowercase());
        assert!(link.ends_with(&anchor), "{name}: {link}");
        assert!(page.contains(&format!("\n### {name}\n")), "docs/monitoring.md has no {name}");
        let of_alert = tests.iter().filter(|test| test["alertname"] == name);
        let (firing, silent): (Vec<&&Value>, Vec<&&Value>) =
            of_alert.partition(|test| test["exp_alerts"].as_array().is_some_and(|a| !a.is_empty()));
        assert!(!firing.is_empty() && !silent.is_empty(), "{name}: tests in both directions");
    }
    let known: Vec<String> = alerts.iter().map(|alert| format!("### {}", name(alert))).collect();
    for heading in page.lines().filter(|line| line.starts_with("### Tidegate")) {
        assert!(known.iter().any(|known| known == heading), "{heading} is not an alert");
    }
}

#[test]
fn promtool_accepts_the_metrics_of_redis_and_of_the_gateway() {
    let redis = Redis::start();
    let config = format!("store: {{redis: '{}'}}\n{POLICY}", redis.url());
    let gateway = Service::gateway(&config, &["http://127.0.0.1:1"]);
    let metrics = gateway.admin("/metrics").body;
    assert!(metrics.contains("tidegate_redis_") && metrics.contains("tidegate_upstream_"));
    assert_eq!(promtool(&["check", "metrics"], &metrics), "");
}

/// Each key is at its limit after one request, so that a full store rejects others.
const SPENT: &str = "store: {max_keys: 64}\npolicies:\n  - {name: p, limit: 1, window: 1h}\n";
const POLICY: &str = "policies:\n  - {name: p, limit: 1000000, window: 1h}\n";

/// Returns the rules with times that are a thirtieth of the real ones.
fn shortened_rules() -> String {
    let mut rules = read("deploy/prometheus/rules.yaml");
    for minutes in 1..=10 {
        let seconds = 2 * minutes;
        for (start, end) in [("[", "]"), ("for: ", "\n"), ("offset ", ")")] {
            let long = format!("{start}{minutes}m{end}");
            rules = rules.replace(&long, &format!("{start}{seconds}s{end}"));
        }
    }
    rules.replace("[1h]", "[120s]")
}

/// Blocks a Redis for 0.2 s, again and again, until it is dropped.
struct Blocker {
    stop: std::sync::Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Blocker {
    fn start(redis: &Redis) -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let mut connection = redis.connection();
        let stopped = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let mut command = redis::cmd("DEBUG");
                command.arg("SLEEP").arg("0.2").exec(&mut connection).expect("DEBUG is enabled");
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Blocker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("started once");
        assert!(thread.join().is_ok() || std::thread::panicking());
    }
}

/// Policies that apply to one path, each with a count of its own.
const MANY_POLICIES: usize = 100;

/// Returns a configuration with [`MANY_POLICIES`].
fn with_many_policies(config: &str) -> String {
    let policy = |number| {
        let fields = "key: [header.x-user-id], match: {path: /many}, limit: 1000000, window: 1h";
        format!("  - {{name: many-{number}, {fields}}}\n")
    };
    config.to_owned() + &(0..MANY_POLICIES).map(policy).collect::<String>()
}

/// Allows requests of more keys than the ledger of an outage has room for: 100,000, by policy.
fn drop_debits(service: &Service) {
    let dropped = |metrics: &str| {
        metrics.contains("tidegate_dropped_debit_units_total ")
            && !metrics.contains("tidegate_dropped_debit_units_total 0\n")
    };
    for user in 0..2 * 100_000 / MANY_POLICIES {
        let attributes = json!({"path": "/many", "header.x-user-id": user.to_string()});
        assert_eq!(service.acquire(&json!({"attributes": attributes})).status, 200);
        if user % 100 == 0 && dropped(&service.admin("/metrics").body) {
            return;
        }
    }
    assert!(dropped(&service.admin("/metrics").body));
}

/// Sets an override, and empties its Redis.
fn lose_overrides(service: &Service, redis: &Redis) {
    let change = json!({
        "policy": "p", "key": "*", "limit": 999_999, "expires_in": "1h", "reason": "test",
    });
    let json = [("content-type", "application/json")];
    let body = change.to_string();
    let set = request(&service.admin, "PUT", "/v1/overrides", &json, body.as_bytes());
    assert_eq!(set.status, 200, "{set:?}");
    redis.query::<()>(&["FLUSHALL"]);
}

/// Waits until each of these alerts has fired for its job, and no other for the healthy service.
fn wait_until_firing(prometheus: &Prometheus, mut expected: BTreeSet<(&str, &str)>) {
    let mut on_healthy = BTreeSet::new();
    prometheus.wait_until(|prometheus| {
        for (name, job) in prometheus.firing() {
            let is_part = (&*name, &*job) == ("TidegateStoreDown", "tidegate-cluster");
            assert!(!is_part, "one primary of three is no outage");
            expected.retain(|(alert, of)| (*alert, *of) != (name.as_str(), job.as_str()));
            if job == "tidegate-healthy" && !ABOUT_SPEED.contains(&name.as_str()) {
                on_healthy.insert(name);
            }
        }
        if expected.is_empty() { Ok(()) } else { Err(format!("{expected:?}")) }
    });
    assert!(on_healthy.is_empty(), "{on_healthy:?}");
}

/// Waits until none of these alerts fires for its job.
fn wait_until_ended(prometheus: &Prometheus, ended: &[(&str, &str)]) {
    prometheus.wait_until(|prometheus| {
        let firing = prometheus.firing();
        let fires = |(name, job): &&(&str, &str)| {
            firing.iter().any(|fired| (&*fired.0, &*fired.1) == (*name, *job))
        };
        let left: Vec<_> = ended.iter().filter(fires).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("the end of {left:?}")) }
    });
}

/// Starts a cluster of which no replica takes over within the test, and a service on it.
fn cluster_with_service() -> (Cluster, Service) {
    let options = ["--cluster-node-timeout", "300000"];
    let cluster = Cluster::start_with(Path::new("redis-server"), &options);
    let urls = cluster.urls().join("', '");
    let config = format!("store: {{redis: ['{urls}'], timeout: 1s}}\n{POLICY}");
    (cluster, Service::start(&config))
}

/// One service per failure, all scraped by one Prometheus. The job of each is named after it.
#[test]
fn every_alert_fires_when_the_thing_breaks() {
    let on_redis = |redis: &Redis| {
        format!("store: {{redis: '{}', timeout: 5s, instances: 1}}\n{POLICY}", redis.url())
    };
    let (sound, mut failing) = (Redis::start(), Redis::start());
    let slow = Redis::start_with(&["--enable-debug-command", "local"]);
    let healthy = Service::start(&on_redis(&sound));
    let outage = on_redis(&failing).replace("timeout: 5s", "timeout: 100ms");
    let outage = Service::start(&with_many_policies(&outage));
    let slowed = Service::start(&on_redis(&slow));
    let full = Service::start(&format!("store: {{max_keys: 64}}\n{POLICY}"));
    let spent = Service::start(SPENT);
    let flooded = Service::start("policies:\n  - {name: p, limit: 5, window: 1h}\n");
    let gone = Service::start(POLICY);
    let differing =
        [POLICY, "policies:\n  - {name: p, limit: 9, window: 1h}\n"].map(Service::start);
    let (cluster, partial) = cluster_with_service();
    let dead = format!("http://127.0.0.1:{}", free_port());
    let gateway = Service::gateway(POLICY, &[&format!("http://{}", healthy.http), &dead]);
    let targets = [
        ("tidegate-healthy", &healthy),
        ("tidegate-outage", &outage),
        ("tidegate-slow", &slowed),
        ("tidegate-full", &full),
        ("tidegate-spent", &spent),
        ("tidegate-flooded", &flooded),
        // A job of another name.
        ("limits", &gone),
        ("tidegate-differing", &differing[0]),
        ("tidegate-differing", &differing[1]),
        ("tidegate-cluster", &partial),
        ("tidegate-gateway", &gateway),
    ];
    let addresses = targets.map(|(job, service)| (job, service.admin.as_str()));
    let prometheus = Prometheus::start(&shortened_rules(), &addresses);
    let _loads = [
        Load::start(&healthy.http, "p", 20, 100),
        Load::start(&outage.http, "p", 50, 1_000),
        Load::start(&partial.http, "p", 50, 1_000),
        Load::start(&slowed.http, "p", 20, 100),
        Load::start(&gateway.http, "p", 20, 100),
    ];
    prometheus.wait_until(|prometheus| {
        let up = prometheus.query("up == 1");
        let calm = prometheus.query("job_policy:tidegate_denials:rate5m == 0");
        let jobs: BTreeSet<&str> = targets.iter().map(|(job, _)| *job).collect();
        if up.len() == targets.len() && calm.len() >= jobs.len() {
            return Ok(());
        }
        Err(format!("{} of {} services are scraped: {calm:?}", up.len(), targets.len()))
    });

    lose_overrides(&slowed, &slow);
    failing.kill();
    cluster.nodes()[0].signal("STOP");
    let blocker = Blocker::start(&slow);
    let config = std::fs::read_to_string(flooded.file()).expect("a configuration");
    std::fs::write(flooded.file(), config.replace("limit", "limt")).expect("written");
    let _floods = [
        Load::start(&flooded.http, "p", 50, 1),
        Load::start(&full.http, "p", 100, 10_000),
        Load::start(&spent.http, "p", 20, 10_000),
    ];
    let pending = std::fs::read_to_string(full.file()).expect("a configuration");
    std::fs::write(full.file(), pending.replace("max_keys: 64", "max_keys: 65")).expect("written");
    drop(gone);
    drop_debits(&outage);
    let expected: BTreeSet<(&str, &str)> = BTreeSet::from([
        ("TidegateDown", "limits"),
        ("TidegateStorePartlyDown", "tidegate-cluster"),
        ("TidegateDroppedDebits", "tidegate-outage"),
        ("TidegateConfigDiffers", "tidegate-differing"),
        ("TidegateStoreDown", "tidegate-outage"),
        ("TidegateCircuitOpen", "tidegate-outage"),
        ("TidegateFallbackActive", "tidegate-outage"),
        ("TidegatePendingDebitsGrowing", "tidegate-outage"),
        ("TidegateDenialSpike", "tidegate-flooded"),
        ("TidegateSlowDecisions", "tidegate-slow"),
        ("TidegateConfigReloadFailing", "tidegate-flooded"),
        ("TidegateRestartPending", "tidegate-full"),
        ("TidegateMemoryNearCap", "tidegate-full"),
        ("TidegateMemoryEvictedKeys", "tidegate-full"),
        ("TidegateStoreFull", "tidegate-spent"),
        ("TidegateUpstreamDown", "tidegate-gateway"),
        ("TidegateOverridesLost", "tidegate-slow"),
    ]);
    let mut names: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
    names.extend(WITHOUT_REAL_TEST.map(|(name, _)| name));
    for alert in alerts() {
        assert!(names.contains(&name(&alert)), "{} is not tested", name(&alert));
    }
    wait_until_firing(&prometheus, expected);
    drop(blocker);

    // The alerts end when the cause does.
    failing.restart();
    cluster.nodes()[0].signal("CONT");
    std::fs::write(flooded.file(), config).expect("written");
    let ended = [
        ("TidegateStoreDown", "tidegate-outage"),
        ("TidegateCircuitOpen", "tidegate-outage"),
        ("TidegateConfigReloadFailing", "tidegate-flooded"),
        ("TidegateStorePartlyDown", "tidegate-cluster"),
    ];
    wait_until_ended(&prometheus, &ended);
}

#[test]
fn shortened_rules_are_valid_and_have_no_minutes() {
    let rules = shortened_rules();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("rules.yaml");
    std::fs::write(&file, &rules).expect("written");
    promtool(&["check", "rules", file.to_str().expect("UTF-8")], "");
    for line in rules.lines() {
        let is_long =
            |range: &str| range.contains(|c: char| c.is_ascii_digit()) && range.ends_with('m');
        let ranges = line.split('[').skip(1).filter_map(|rest| rest.split(']').next());
        assert!(!ranges.into_iter().any(is_long), "{line}");
        assert!(!(line.trim().starts_with("for: ") && line.ends_with('m')), "{line}");
    }
}
