//! The guides of `docs/`: their commands run and print the shown output, their links lead
//! somewhere, and the reference of metrics has every metric.

#[path = "../support/mod.rs"]
mod support;

mod links;
mod metrics;
mod page;
mod session;

use std::path::{Path, PathBuf};

/// Pages whose commands run, each with the number of steps that it has at least.
const PAGES: [(&str, usize); 8] = [
    ("docs/getting-started.md", 8),
    ("docs/concepts.md", 5),
    ("docs/http-api.md", 12),
    ("docs/metrics.md", 2),
    ("docs/envoy.md", 4),
    ("docs/operations.md", 6),
    ("docs/migrating.md", 5),
    ("docs/faq.md", 2),
];

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a repository")
}

#[test]
fn commands_of_the_guides_print_the_shown_output() {
    let failures: Vec<String> = std::thread::scope(|scope| {
        let pages = PAGES.map(|(name, at_least)| scope.spawn(move || run_page(name, at_least)));
        pages.into_iter().flat_map(|page| page.join().expect("no panic")).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_readme_is_short() {
    let lines = std::fs::read_to_string(root().join("README.md")).expect("a page").lines().count();
    assert!(lines < 200, "README.md has {lines} lines: details belong into docs/");
}

/// Runs the steps of a page, and returns what differs.
fn run_page(name: &str, at_least: usize) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(name)).expect("a page");
    let steps = page::steps(&text);
    if steps.len() < at_least {
        return vec![format!("{name} has {} steps, fewer than {at_least}", steps.len())];
    }
    session::run(&steps).into_iter().map(|failure| format!("{name}:{failure}")).collect()
}
