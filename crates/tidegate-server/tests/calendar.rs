//! Calendar quotas through the binary: answers, headers, look-ups, `acquire`, and the checks of
//! whether their counts survive a restart.

mod support;

use std::process::Command;

use serde_json::{Value, json};
use support::{Redis, Service, request};
use tidegate::{Calendar, CalendarUnit, Clock as _, SystemClock};

/// Returns the milliseconds until the end of this year, and the days that it has.
fn year() -> (u64, u64) {
    let calendar = Calendar::new(CalendarUnit::Year, "Europe/Berlin").expect("a zone");
    let now = SystemClock::new().now();
    let (start, end) = calendar.period_at(now);
    let millis = end.saturating_duration_since(now).as_millis();
    let seconds = end.saturating_duration_since(start).as_secs();
    (u64::try_from(millis).expect("a year"), seconds / 86_400)
}

/// Asserts that a wait ends with the year.
fn assert_ends_with_the_year(millis: &Value, context: &impl std::fmt::Debug) {
    let (left, _) = year();
    let found = millis.as_u64().expect("milliseconds");
    assert!(found.abs_diff(left) < 60_000, "{found} {left} {context:?}");
}

const POLICY: &str = "policies:\n  - name: yearly\n    key: [header.x-user]\n    algorithm: \
                      fixed-window\n    limit: 2\n    window: {calendar: year, timezone: \
                      Europe/Berlin, anchor: {attribute: header.x-day}}\n";

#[test]
fn answers_headers_and_look_ups_show_the_period() {
    let redis = Redis::start();
    for store in [String::new(), redis.healthy_store()] {
        let service = Service::start(&format!("{store}{POLICY}"));
        let attributes = json!({"attributes": {"header.x-user": "ann", "header.x-day": "1"}});
        let first = service.acquire(&attributes);
        assert_eq!((first.status, &first.json()["remaining"]), (200, &json!(1)), "{first:?}");
        let window = format!("\"yearly\";q=2;w={}", year().1 * 86_400);
        assert_eq!(first.header("ratelimit-policy"), Some(window.as_str()));
        assert_ends_with_the_year(&first.json()["reset_after_ms"], &first);
        assert_eq!(service.acquire(&attributes).status, 200);
        let denied = service.acquire(&attributes);
        assert_eq!(denied.status, 429, "{denied:?}");
        assert_ends_with_the_year(&denied.json()["retry_after_ms"], &denied);

        let policies = service.admin("/v1/policies").json();
        assert_eq!(policies[0]["calendar"], "year from header.x-day, Europe/Berlin");
        let found = service.admin("/v1/lookup?key=ann").json();
        let [result] = found["results"].as_array().expect("a list").as_slice() else {
            panic!("one count, whatever the anchor is: {found}")
        };
        assert_eq!(result["calendar"], "year, Europe/Berlin");
        let reason = result["reason"].as_str().expect("a sentence");
        assert!(reason.starts_with("2 of 2 units of this year are used; resets on 1 January 20"));
        assert!(reason.contains(", 00:00 Europe/Berlin; the next request passes in "), "{reason}");
    }
    redis.assert_every_key_expires();
}

#[test]
fn a_caller_may_bring_a_quota_with_a_calendar() {
    let service = Service::start("policies: []\n");
    let ask = |window: Value, algorithm: &str| {
        let quota = json!({"algorithm": algorithm, "limit": 1, "window": window});
        service.acquire(&json!({"key": "ann", "quota": quota}))
    };
    let year = json!({"calendar": "year", "timezone": "Europe/Berlin", "anchor": "1"});
    let allowed = ask(year.clone(), "fixed-window");
    assert_eq!(allowed.json()["policy"], "fixed-window-year", "{allowed:?}");
    assert_ends_with_the_year(&allowed.json()["reset_after_ms"], &allowed);
    assert_eq!(ask(year.clone(), "fixed-window").status, 429);
    for (window, algorithm, detail) in [
        (year, "token-bucket", "token-bucket has no calendar"),
        (json!({"calendar": "hour"}), "fixed-window", "one of day, week"),
        (json!({"calendar": "month", "timezone": "Mars"}), "fixed-window", "unknown timezone"),
        (json!({"calendar": "month", "anchor": "32"}), "fixed-window", "from 1 to 31"),
        (json!(["month"]), "fixed-window", "expected a duration such as 60s, or an object"),
    ] {
        let refused = ask(window, algorithm);
        assert_eq!(refused.status, 400, "{refused:?}");
        assert!(refused.json()["detail"].to_string().contains(detail), "{refused:?}");
    }
}

#[test]
fn acquire_decides_in_a_calendar() {
    let acquire = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("acquire").arg("ann").args(["--limit", "1"]).args(arguments).env_clear();
        let output = command.output().expect("the binary runs");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).expect("UTF-8"))
    };
    let year = ["--calendar", "year", "--timezone", "Europe/Berlin", "--json"];
    let (code, text) = acquire(&year);
    assert_eq!(code, Some(0), "{text}");
    let decision: Value = serde_json::from_str(&text).expect("a JSON line");
    assert_eq!(decision["policy"], "fixed-window-year");
    assert_ends_with_the_year(&decision["reset_after_ms"], &text);
    for (arguments, message) in [
        (&["--calendar", "year", "--window", "1d"][..], "cannot be used with"),
        (&["--calendar", "year", "--algorithm", "sliding-log"], "sliding-log has no calendar"),
        (&["--calendar", "week", "--anchor", "15"], "one of monday"),
        (&["--calendar", "month", "--timezone", "Mars"], "unknown timezone \"Mars\""),
        (&["--window", "1d", "--anchor", "15"], "cannot be used with"),
        (&[], "--window"),
    ] {
        let (code, text) = acquire(arguments);
        assert!(code == Some(2) && text.contains(message), "{arguments:?} {text}");
    }
}

#[test]
fn doctor_warns_if_the_counts_of_a_long_window_do_not_survive_a_restart() {
    let doctor = |arguments: &[&str], window: &str| {
        let redis = Redis::start_with(arguments);
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("tidegate.yaml");
        let policy = format!("{{name: a, algorithm: fixed-window, limit: 1, window: {window}}}");
        let text = format!("store: {{redis: '{}'}}\npolicies: [{policy}]\n", redis.url());
        std::fs::write(&file, text).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["doctor", "--json", "--timeout", "5s", "--probes", "20", "--config"]);
        let output = command.arg(&file).env_clear().output().expect("the binary runs");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("a list").clone();
        move |check: &str| {
            let finding = findings.iter().find(|finding| finding["check"] == check);
            let finding = finding.expect("the check");
            format!("{} {}", finding["level"].as_str().expect("a level"), finding["message"])
        }
    };
    let (month, minute) = ("{calendar: month}", "60s");
    let off = ["--save", "", "--appendonly", "no"];
    assert!(doctor(&off, minute)("persistence").starts_with("ok"));
    let found = doctor(&off, month)("persistence");
    assert!(
        found.starts_with("warning") && found.contains("limit of 31d is free again"),
        "{found}"
    );
    let snapshots = doctor(&["--save", "3600 1", "--appendonly", "no"], month)("persistence");
    assert!(
        snapshots.starts_with("warning") && snapshots.contains("snapshots only"),
        "{snapshots}"
    );
    let kept = doctor(&["--appendonly", "yes"], month)("persistence");
    assert!(kept.starts_with("ok"), "{kept}");
    let evicting = doctor(&["--maxmemory-policy", "allkeys-lru"], month)("eviction-policy");
    assert!(evicting.contains("the limit of 31d then starts again"), "{evicting}");
}

#[test]
fn a_reset_gives_the_rest_of_the_period_back() {
    let service = Service::start(&POLICY.replace("limit: 2", "limit: 1"));
    let query = json!({"policy": "yearly", "key": "ann"});
    assert_eq!(service.acquire(&query).status, 200);
    assert_eq!(service.acquire(&query).status, 429);
    let response = request(&service.admin, "POST", "/v1/reset", &[], query.to_string().as_bytes());
    assert_eq!(response.status, 204, "{response:?}");
    assert_eq!(service.acquire(&query).status, 200);
}
