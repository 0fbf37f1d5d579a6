//! Monitoring with the real parts: Prometheus scrapes the real binary under load, its alerts fire
//! when something breaks, the queries of the Grafana dashboard return data, and `tidegate top` runs
//! in a pseudo terminal.

#[path = "../support/mod.rs"]
mod support;

/// Alerts of `deploy/prometheus/rules.yaml`.
mod alerts;
/// Dashboard of `deploy/grafana/tidegate.json`.
mod dashboard;
/// A real Prometheus, and load.
mod prometheus;
/// A pseudo terminal.
mod terminal;
/// `tidegate top`.
mod top;

use std::path::PathBuf;

/// Returns the path of a file of the repository.
fn repository(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn read(path: &str) -> String {
    let file = repository(path);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}
