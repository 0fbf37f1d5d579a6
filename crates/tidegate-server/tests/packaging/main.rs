//! Files of `deploy/` and the metadata of packages, judged by the tools that read them: helm,
//! hadolint, systemd-analyze, cargo-deb, and the schemas of Kubernetes and Compose.
//!
//! No container engine and no cluster is needed. `make test-image` builds the image with buildah.

/// Compose file and Dockerfile.
mod compose;
/// Image, built and run.
mod image;
/// Manifests of Kubernetes and the chart.
mod kubernetes;
/// Unit of systemd, Debian package, archives of releases, packages of crates.io.
mod packages;
/// ServiceMonitor and PrometheusRule of the manifests and of the chart.
mod service_monitor;

#[path = "../../../tidegate/tests/support/server.rs"]
mod server;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(file: &str) -> String {
    let path = root().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs a tool that `make setup` installs, in the folder of the repository.
fn run<A: AsRef<OsStr>>(tool: &str, arguments: impl IntoIterator<Item = A>) -> Output {
    let own = root().join(".venv/bin").join(tool);
    let program = if own.exists() { own } else { PathBuf::from(tool) };
    Command::new(program)
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{tool} cannot be started ({error}): run `make setup`"))
}

/// Runs a tool, which must succeed, and returns its output.
fn succeed<A: AsRef<OsStr>>(tool: &str, arguments: impl IntoIterator<Item = A>) -> String {
    let output = run(tool, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{tool}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Checks a configuration with the real binary.
fn check_config(name: &str, config: &str, variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut config = config.to_owned();
    for name in ["admin-token", "api-token"] {
        let token = folder.path().join(name);
        std::fs::write(&token, format!("{name} 0123456789\n")).expect("written");
        let path = token.display().to_string();
        config = config.replace(&format!("/run/secrets/tidegate/{name}"), &path);
    }
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, &config).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check"])
        .arg(&file)
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the binary runs");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {message}\n{config}");
}

#[test]
fn yaml_files_have_no_errors() {
    let chart = ["Chart.yaml", "values.yaml"].map(|name| format!("deploy/helm/tidegate/{name}"));
    let paths = ["deploy/compose.yaml", "deploy/compose", "deploy/kubernetes"].map(str::to_owned);
    let rules = "{extends: default, rules: {document-start: disable, line-length: {max: 110}, \
                 braces: {max-spaces-inside: 0}, comments-indentation: disable}}";
    let flags = ["--strict", "-d", rules].map(str::to_owned);
    succeed("yamllint", flags.into_iter().chain(paths).chain(chart));
}
