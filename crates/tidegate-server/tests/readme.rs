//! Runs the commands of the README and compares their output.

#[path = "../../tidegate/tests/support/server.rs"]
mod server;

use std::process::{Command, Stdio};

use server::Redis;

/// Returns the commands of the README's console blocks, each with the output below it.
fn shown(readme: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in readme.lines() {
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

#[test]
fn readme_commands_print_the_shown_output() {
    let redis = Redis::start();
    let readme = include_str!("../../../README.md");
    let commands = shown(readme);
    assert!(commands.len() >= 3, "the README has too few commands");
    for (command, expected) in commands {
        // Use the binary that was just built and a temporary Redis.
        let line = command
            .replace("cargo run --release --quiet --", env!("CARGO_BIN_EXE_tidegate"))
            .replace("redis://127.0.0.1:6379", &redis.url());
        let output =
            Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).output().expect("a shell");
        let found = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(found, expected, "{command}");
    }
}
