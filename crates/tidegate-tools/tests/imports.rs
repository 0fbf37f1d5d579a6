//! Arrows between the tools: each tool imports the shared modules in `tool`, and no other tool.

use std::path::Path;

#[path = "../../tidegate/tests/support/imports.rs"]
mod imports;

/// Modules of the tools, each with those that it imports.
const ALLOWED: [(&str, &[&str]); 7] = [
    ("cli", &["bench", "doctor", "plan", "simulate", "tool", "top"]),
    ("bench", &["tool"]),
    ("doctor", &["tool"]),
    ("plan", &["tool"]),
    ("simulate", &["tool"]),
    ("top", &["tool"]),
    ("tool", &[]),
];

#[test]
fn tools_import_shared_modules_and_no_other_tool() {
    imports::check_among(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &ALLOWED);
}
