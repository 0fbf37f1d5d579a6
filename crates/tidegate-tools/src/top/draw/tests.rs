use serde_json::{Value, json};

use super::*;
use crate::top::data::Lookup;
use crate::top::events::ServerEvent;

fn apply(view: &mut View, name: &str, data: &Value) {
    let event = ServerEvent { name: name.to_owned(), data: data.to_string() };
    view.apply(&event).expect("valid");
}

fn view() -> View {
    let mut view = View::new("127.0.0.1:8082");
    let sample = |at_ms: u64, allowed: f64| {
        json!({
            "at_ms": at_ms, "allowed": allowed, "denied": 56.0, "shadow_denied": 0.0, "errors": 0.0,
            "policies": {"per-user": [1_178.0, 56.0, 0.0], "a-policy-with-a-long-name": [3.5, 0, 2]},
            "sources": {"store": 75.0, "deny-cache": 25.0, "local": 0.0},
            "latency_ms": {"p50": 0.21, "p90": 0.5, "p99": 1.3},
            "store_latency_ms": {"p50": 0.18, "p90": 0.4, "p99": 1.1},
        })
    };
    let samples: Vec<Value> = (1..=8_u32)
        .map(|second| sample(u64::from(second) * 1_000, f64::from(second) * 100.0))
        .collect();
    apply(&mut view, "history", &json!({"samples": samples}));
    apply(
        &mut view,
        "status",
        &json!({
            "version": "0.1.0", "uptime_ms": 11_520_000, "now_ms": 8_000,
            "store": {"kind": "redis", "up": true, "nodes": [
                {"address": "10.0.0.1:6379", "connected": true, "circuit": "closed",
                 "last_error": "an old one", "latency_ms": {"p50": 0.2, "p99": 1.0}, "in_flight": 2},
                {"address": "10.0.0.2:6379", "connected": false, "circuit": "open",
                 "last_error": "refused", "latency_ms": null, "in_flight": 0}],
                "fallback": {"active": false, "since_ms": null, "instances": 2,
                             "pending_debit_units": 0},
                "memory": {"keys": 12, "max_keys": 1_000_000}, "deny_cache_entries": 3},
            "reload": {"at_ms": null, "ok": true, "error": null, "config_loaded_at_ms": 2_000,
                       "config_file": "tidegate.yaml"},
            "upstreams": null,
        }),
    );
    let key = |key: &str, count: u64| json!({"policy": "per-user", "key": key, "count": count});
    let denied: Vec<Value> = (0..20).map(|n| key(&format!("user-{n}"), 12_345 - n)).collect();
    let allowed = [key("\u{1b}]0;owned\u{7}", 9)];
    let hot_keys = json!({"allowed": allowed, "denied": denied, "shadow_denied": []});
    apply(&mut view, "hot-keys", &hot_keys);
    view
}

fn texts(view: &View, columns: usize, rows: usize) -> Vec<String> {
    let size = Size { columns, rows };
    let lines = screen(view, 2, size, None, ScreenLine::labelled("q quit"));
    let written = lines.iter().map(|line| {
        let mut text = String::new();
        line.write(&mut text, columns, false);
        assert!(text::width(&text) <= columns, "{text:?}");
        text
    });
    written.collect()
}

#[test]
fn everything_fits_on_a_terminal_of_80_by_24() {
    let lines = texts(&view(), 80, 24);
    let expected = [
        "tidegate 0.1.0  127.0.0.1:8082  up 3h 12m  00:00:08 UTC",
        "store     redis up  fallback off  0 units to settle  2 instances",
        "config    tidegate.yaml  loaded 6s ago",
        "requests  750 allowed/s  56 denied/s  0 shadow/s  0 errors/s",
        "latency   p50 0.2 ms  p99 1.3 ms  store p50 0.2 ms  store p99 1.1 ms",
        "sources   store 75 %  deny-cache 25 %",
        "trend     ▂▃▄▅▆▇██",
        "",
        "policies                  allowed/s  denied/s  shadow/s",
        "per-user                       1178        56         0",
        "a-policy-with-a-long-name       3.5         0       2.0",
        "denied keys  requests  policy",
        "user-0         12,345  per-user",
    ];
    assert_eq!(lines[..expected.len()], expected, "{lines:#?}");
    assert_eq!(lines.len(), 24);
    let text = lines.join("\n");
    for part in [
        "\nallowed keys         requests  policy\n\\u{1b}]0;owned\\u{7}         9  per-user\n",
        "\nnodes\n10.0.0.1:6379  connected  p50 0.2 ms  p99 1.0 ms  2 in flight\n",
        "\n10.0.0.2:6379  DISCONNECTED, circuit open  0 in flight  refused\n",
        "\nq quit",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
}

#[test]
fn a_small_terminal_has_what_matters_most() {
    let lines = texts(&view(), 40, 10);
    let expected = [
        "tidegate 0.1.0  127.0.0.1:8082",
        "store     redis up  fallback off",
        "requests  750 allowed/s  56 denied/s",
        "latency   p50 0.2 ms  p99 1.3 ms",
        "policies   allowed/s  denied/s  shadow/s",
        "per-user        1178        56         0",
        "a-policy-…       3.5         0       2.0",
        "denied keys  requests  policy",
        "user-0         12,345  per-user",
        "q quit",
    ];
    assert_eq!(lines, expected);
    for (columns, rows) in [(1, 1), (3, 2), (10, 3), (20, 5), (300, 100)] {
        assert_eq!(texts(&view(), columns, rows).len(), rows);
    }
}

#[test]
fn lost_part_of_a_cluster_is_not_an_outage() {
    let mut view = view();
    let health = json!({"state": "partly-down", "primaries": 4, "primaries_unavailable": 1,
                        "slots_unavailable_ratio": 0.25});
    let store = json!({"kind": "redis", "up": false, "health": health});
    apply(&mut view, "status", &json!({"version": "0.1.0", "store": store}));
    let text = texts(&view, 100, 24).join("\n");
    assert!(text.contains("redis PARTLY DOWN: 1 of 4 primaries, 25 % of slots"), "{text}");
}

#[test]
fn outage_and_failed_reload_stand_out() {
    let mut view = view();
    apply(
        &mut view,
        "status",
        &json!({
            "version": "0.1.0", "now_ms": 8_000,
            "store": {"kind": "redis", "up": false, "fallback": {"active": true, "since_ms": 3_000,
                      "instances": 1, "pending_debit_units": 1234}},
            "reload": {"at_ms": 1_000, "ok": false, "config_file": "tidegate.yaml", "error":
                       {"message": "unknown field `limt`", "file": "tidegate.yaml", "line": 7,
                        "column": 5}},
        }),
    );
    view.lost = Some("connection refused".to_owned());
    for (columns, rows) in [(100, 24), (100, 10)] {
        let text = texts(&view, columns, rows).join("\n");
        for part in [
            "connection lost, retrying: connection refused",
            "redis DOWN  FALLBACK ACTIVE for 5s  1,234 units to settle  1 instance",
            "config    RELOAD FAILED 7s ago: tidegate.yaml:7:5: unknown field `limt`",
        ] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }
}

#[test]
fn pending_restart_stands_out() {
    let mut view = view();
    let reload = json!({"ok": true, "config_file": "tidegate.yaml", "config_loaded_at_ms": 2_000,
        "restart_pending": ["listen", "store"]});
    apply(&mut view, "status", &json!({"now_ms": 8_000, "store": {"up": true}, "reload": reload}));
    for (columns, rows) in [(100, 24), (100, 10)] {
        let text = texts(&view, columns, rows).join("\n");
        let expected = "config    RESTART PENDING: listen, store  tidegate.yaml  loaded 6s ago";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn looked_up_key_shows_denials_first() {
    let lookup: Lookup = serde_json::from_value(json!({"key": "ann", "results": [
        {"policy": "a", "mode": "enforce", "limit": 10, "capacity": 100, "allowed": true, "remaining": 97,
         "retry_after_ms": 0, "reason": "3 of 100 units used."},
        {"policy": "b", "key": "all", "mode": "enforce", "limit": 5, "allowed": false, "remaining": 0,
         "retry_after_ms": 61_000, "reason": "5 of 5 units used."},
        {"policy": "c", "error": "timeout"},
        {"policy": "d", "mode": "enforce", "limit": 5, "capacity": 5, "allowed": true, "remaining": 3,
         "retry_after_ms": 0, "reset_after_ms": 50_000,
         "in_flight": {"units": 2, "first_end_ms": 9_000}, "reason": "2 of 5 units are in flight."},
        {"policy": "e", "limit": 5, "allowed": true, "remaining": 5, "reset_after_ms": 0,
         "in_flight": {"units": 0, "first_end_ms": null}},
    ]}))
    .expect("valid");
    let lines: Vec<String> =
        sections::looked_up(&lookup, 80).iter().map(ScreenLine::to_text).collect();
    let expected = [
        "key ann  1 of 5 policies deny it",
        "b         denied  0 of 5 left  free in 1m 1s  counted as all",
        "  5 of 5 units used.",
        "c         error",
        "  timeout",
        "a         allowed  97 of 100 left",
        "  3 of 100 units used.",
        "d         allowed  2 of 5 in flight  first ends in 9s  last ends in 50s",
        "  2 of 5 units are in flight.",
        "e         allowed  0 of 5 in flight",
    ];
    assert_eq!(lines, expected);
}
