//! Arrows between the first-level modules of the library: they go one way.

use std::path::Path;

#[path = "support/imports.rs"]
mod imports;

use imports::{cycle, edges, edges_of, exports};

/// Modules, each with those that it imports.
const ALLOWED: [(&str, &[&str]); 13] = [
    // The domain, and the arithmetic that it is about:
    ("hold", &["clock", "enum_names", "random"]),
    ("decision", &["hold"]),
    ("algorithm", &["action", "decision", "enum_names"]),
    ("calendar", &["clock", "enum_names"]),
    ("quota", &["algorithm", "calendar", "clock", "hold", "key"]),
    ("charge", &["action", "algorithm", "clock", "decision", "enum_names", "hold", "key", "quota"]),
    // Where counts are kept:
    (
        "store",
        &[
            "action",
            "algorithm",
            "calendar",
            "charge",
            "clock",
            "decision",
            "hold",
            "join",
            "key",
            "quota",
            "random",
        ],
    ),
    (
        "resilience",
        &["algorithm", "charge", "clock", "decision", "hold", "join", "quota", "random", "store"],
    ),
    ("limiter", &["algorithm", "charge", "clock", "decision", "hold", "join", "quota", "store"]),
    // Limits on requests:
    ("headers", &["algorithm", "clock", "decision", "quota"]),
    (
        "policy",
        &[
            "charge",
            "client_ip",
            "clock",
            "decision",
            "enum_names",
            "headers",
            "hold",
            "join",
            "key",
            "limiter",
            "quota",
            "store",
        ],
    ),
    (
        "layer",
        &["charge", "client_ip", "decision", "headers", "limiter", "policy", "quota", "store"],
    ),
    (
        "testing",
        &[
            "algorithm",
            "calendar",
            "charge",
            "clock",
            "decision",
            "hold",
            "limiter",
            "quota",
            "store",
        ],
    ),
];

#[test]
fn modules_import_as_listed() {
    imports::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &ALLOWED);
}

#[test]
fn cycles_are_found() {
    assert!(cycle(&edges(&[("a", &["b", "c"]), ("b", &["c"])])).is_empty());
    let cyclic = edges(&[("a", &["b"]), ("b", &["c"]), ("c", &["b", "d"])]);
    assert_eq!(cycle(&cyclic), ["a", "b", "c"]);
}

#[test]
fn edges_are_those_of_production_code() {
    let code = "\
use crate::{config::{self, Config}, logs};
use super::super::serve;
use super::flags::Flags;
// use crate::comment;
fn f() { crate::metrics::count(other::crate::name()) }
#[cfg(test)]
use crate::first_test;
#[cfg(test)]
#[path = \"x.rs\"]
mod fuzz;
    #[cfg(test)]
    fn g() {
        crate::second_test::f();
    }
fn h(_: crate::Type, _: crate::cli::Type, _: crate::Key) {}
#[cfg(test)]
mod tests {
    use crate::third_test;
}
";
    let exports = exports("pub use domain::key::{Key, KeyError};\npub use charge::Charge;\n");
    let found = edges_of("cli/bench", code, &exports).into_iter().map(|(_, to)| to);
    assert_eq!(found.collect::<Vec<_>>(), ["config", "domain", "logs", "metrics", "serve"]);
}
