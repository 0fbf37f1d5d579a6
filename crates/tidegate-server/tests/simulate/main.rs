//! `tidegate simulate` as a process: compared with a running service, on logs of real servers, and
//! with invalid input.

#[path = "../support/mod.rs"]
mod support;

/// Clients with different addresses.
#[path = "../proxies/client.rs"]
#[allow(dead_code, reason = "the proxies use more of it")]
mod client;
/// The service and the simulation make the same decisions.
mod differential;
/// Invalid input.
mod errors;
/// Pictures of the documents.
mod figures;
/// Formats of many servers, and hostile lines.
mod formats;
/// Logs of several files, and their columns.
mod logs;
/// Lines out of order, encodings, and the requests that are chosen.
mod order;
/// Tables, JSON, pictures, comparisons.
mod output;
/// Logs of nginx, Apache, Caddy, Traefik and the gateway.
mod servers;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Runs the command, with this standard input.
fn simulate_with_input(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .arg("simulate")
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // It may end before it has read everything.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the binary ends")
}

fn simulate(arguments: &[&str]) -> Output {
    simulate_with_input(arguments, b"")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Runs a simulation that succeeds, and returns its JSON.
fn report(arguments: &[&str]) -> Value {
    let output = simulate(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{arguments:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Temporary folder with files.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, and returns its path.
    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// Returns the names of its files.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("a folder");
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.expect("an entry").file_name().to_str().expect("UTF-8").to_owned()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

/// Compresses a file with a program, and returns the path of the result.
fn compressed(program: &str, path: &str, extension: &str) -> String {
    let status = Command::new(program).args(["-q", "-k", path]).status();
    assert!(status.unwrap_or_else(|error| panic!("{program}: {error}")).success());
    let compressed = format!("{path}.{extension}");
    assert!(Path::new(&compressed).exists());
    compressed
}

/// Returns a line of the combined format.
fn combined(address: &str, second: u32, path: &str) -> String {
    let time = format!("{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60);
    format!(
        "{address} - - [16/Nov/2026:{time} +0000] \"GET {path} HTTP/1.1\" 200 5 \"-\" \"curl\"\n"
    )
}
