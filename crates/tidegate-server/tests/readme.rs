//! Runs the commands of the README and of the guides, and compares their output.

#[path = "../../tidegate/tests/support/server.rs"]
mod server;

use std::process::{Command, Stdio};

use server::Redis;

/// Returns the commands of a document's console blocks, each with the output below it.
fn shown(document: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in document.lines() {
        match line.strip_prefix("$ ") {
            _ if line.starts_with("```") => inside = line == "```console",
            Some(command) if inside => commands.push((command.to_owned(), String::new())),
            _ if inside => {
                let (_, output) = commands.last_mut().expect("a command before the output");
                output.push_str(line);
                output.push('\n');
            }
            _ => {}
        }
    }
    commands
}

/// Runs the commands of a document with the binary that was just built.
fn assert_output(document: &str, program: &str, redis_url: &str) {
    for (command, expected) in shown(document) {
        let line = command
            .replace(program, env!("CARGO_BIN_EXE_tidegate"))
            .replace("redis://127.0.0.1:6379", redis_url);
        let output =
            Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).output().expect("a shell");
        let found = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(found, expected, "{command}");
    }
}

#[test]
fn readme_commands_print_the_shown_output() {
    let redis = Redis::start();
    let readme = include_str!("../../../README.md");
    assert!(shown(readme).len() >= 3, "the README has too few commands");
    assert_output(readme, "cargo run --release --quiet --", &redis.url());
}

#[test]
fn capacity_guide_shows_the_output_of_its_commands() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/capacity.md");
    let guide = std::fs::read_to_string(path).expect("a document");
    assert_eq!(shown(&guide).len(), 3, "the guide has other commands");
    assert_output(&guide, "tidegate", "redis://127.0.0.1:1");
}
