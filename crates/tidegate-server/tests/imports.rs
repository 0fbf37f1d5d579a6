//! Arrows go one way: between the crates, and between the modules of each crate. The library has
//! a test of its own; the gateway is one room.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../../tidegate/tests/support/imports.rs"]
mod imports;

use imports::Allowed;

/// Crates, each with those of ours that it uses.
const CRATES: [(&str, &[&str]); 8] = [
    ("tidegate-net", &[]),
    ("tidegate-config", &["tidegate", "tidegate-net"]),
    ("tidegate-api", &["tidegate", "tidegate-config"]),
    ("tidegate-service", &["tidegate", "tidegate-api", "tidegate-config", "tidegate-net"]),
    (
        "tidegate-gateway",
        &["tidegate", "tidegate-api", "tidegate-config", "tidegate-net", "tidegate-service"],
    ),
    ("tidegate-tools", &["tidegate", "tidegate-api", "tidegate-config", "tidegate-net"]),
    ("tidegate-python", &["tidegate", "tidegate-config"]),
    (
        "tidegate-server",
        &[
            "tidegate",
            "tidegate-config",
            "tidegate-gateway",
            "tidegate-net",
            "tidegate-service",
            "tidegate-tools",
        ],
    ),
];

/// Modules of the crates, each with those that it imports.
const MODULES: [(&str, &Allowed<'_>); 6] = [
    ("tidegate-net", &[("listener", &["address", "log_throttle"])]),
    (
        "tidegate-config",
        &[
            ("policies", &["yaml"]),
            ("tokens", &["secret"]),
            ("warning", &["yaml"]),
            ("envoy", &["warning"]),
            ("config", &["envoy", "key_hash", "policies", "secret", "tokens", "warning", "yaml"]),
            ("ratelimit", &["config", "yaml"]),
        ],
    ),
    ("tidegate-api", &[("json", &["duration", "operation"])]),
    (
        "tidegate-service",
        &[
            ("metrics", &["auth", "logs"]),
            ("backend", &["logs", "metrics"]),
            ("journal", &["config_summary", "metrics"]),
            ("forward_auth_parts", &["metrics"]),
            ("hot_keys", &["metrics"]),
            ("observer", &["backend", "hot_keys", "logs", "metrics"]),
            ("overrides", &["backend", "metrics", "observer"]),
            (
                "state",
                &[
                    "auth",
                    "backend",
                    "config_summary",
                    "forward_auth_parts",
                    "hot_keys",
                    "journal",
                    "logs",
                    "metrics",
                    "observer",
                    "overrides",
                ],
            ),
            ("api", &["auth", "logs", "observer", "state"]),
            ("envoy", &["auth", "logs", "metrics", "state"]),
            ("ratelimit", &["envoy", "metrics", "state"]),
            ("resp", &["api", "auth", "logs", "metrics", "observer", "overrides", "state"]),
            (
                "admin",
                &[
                    "api",
                    "auth",
                    "backend",
                    "config_summary",
                    "hot_keys",
                    "journal",
                    "logs",
                    "metrics",
                    "overrides",
                    "state",
                ],
            ),
            ("reload", &["config_summary", "journal", "logs", "metrics", "state"]),
            (
                "serve",
                &[
                    "admin",
                    "api",
                    "envoy",
                    "journal",
                    "metrics",
                    "ratelimit",
                    "reload",
                    "resp",
                    "state",
                ],
            ),
        ],
    ),
    (
        "tidegate-tools",
        &[
            ("cli", &["bench", "doctor", "plan", "simulate", "suggest", "tool", "top"]),
            ("bench", &["simulate", "tool"]),
            ("doctor", &["tool"]),
            ("plan", &["tool"]),
            ("simulate", &["tool"]),
            ("suggest", &["simulate", "tool"]),
            ("top", &["tool"]),
        ],
    ),
    (
        "tidegate-python",
        &[
            ("quota", &["error"]),
            ("decision", &["quota"]),
            ("logs", &["process"]),
            ("aio", &["logs", "process"]),
            ("store", &["process"]),
            ("connection", &["process", "store"]),
            (
                "hold",
                &["aio", "connection", "decision", "error", "logs", "process", "quota", "store"],
            ),
            ("query", &["aio", "connection", "decision", "error", "hold", "logs"]),
            ("wait", &["aio", "decision", "error", "logs", "process", "quota"]),
            (
                "limiter",
                &[
                    "aio",
                    "connection",
                    "decision",
                    "error",
                    "hold",
                    "logs",
                    "process",
                    "query",
                    "quota",
                    "store",
                    "wait",
                ],
            ),
            ("policies", &["aio", "decision", "error", "hold", "limiter", "query", "quota"]),
        ],
    ),
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

#[test]
fn modules_import_as_listed() {
    for (name, allowed) in MODULES {
        println!("{name}");
        imports::check(&folder(name).join("src"), allowed);
    }
}

#[test]
fn crates_use_each_other_as_listed() {
    for (name, allowed) in CRATES {
        let manifest = fs::read_to_string(folder(name).join("Cargo.toml")).expect("a manifest");
        let dependencies = manifest.split("[dependencies]").nth(1).expect("dependencies");
        let dependencies = dependencies.split("\n[").next().expect("a section");
        let names = dependencies.lines().filter_map(|line| line.split(['.', ' ']).next());
        let mut ours: Vec<&str> = names.filter(|name| name.starts_with("tidegate")).collect();
        ours.sort_unstable();
        assert_eq!(ours, allowed, "{name}");
    }
    assert!(imports::cycle(&imports::edges(&CRATES)).is_empty());
}
