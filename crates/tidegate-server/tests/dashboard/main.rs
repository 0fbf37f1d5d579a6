//! The dashboard in a real browser: Chromium, driven by playwright-core, on the real binary. The
//! tests are in `dashboard.mjs`; this target runs them, so that `cargo test` does.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn dashboard_works_in_chromium() {
    let node = root().join(".venv/bin/node");
    let packages =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tidegate-service/dashboard/node_modules");
    for (path, tool) in [(&node, "Node.js"), (&packages.join("playwright-core"), "playwright-core")]
    {
        assert!(path.exists(), "{tool} is missing ({}): run `make setup`", path.display());
    }
    let found = Command::new("chromium").arg("--version").output();
    assert!(found.is_ok_and(|output| output.status.success()), "no chromium: run `make setup`");
    let output = Command::new(node)
        .args(["--test", "--test-reporter=spec", "--test-force-exit"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dashboard/dashboard.mjs"))
        .env("TIDEGATE", env!("CARGO_BIN_EXE_tidegate"))
        .output()
        .expect("node runs");
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
