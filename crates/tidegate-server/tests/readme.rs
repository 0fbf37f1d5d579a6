//! Runs the commands of the README and of the documents, and compares their output.

#[path = "../../tidegate/tests/support/server.rs"]
mod server;

use std::process::{Command, Stdio};

use server::Redis;

/// Pages with commands, each with the number of commands that it has at least.
const PAGES: [(&str, &str, usize); 3] = [
    ("README.md", include_str!("../../../README.md"), 2),
    ("docs/algorithms.md", include_str!("../../../docs/algorithms.md"), 4),
    ("docs/capacity.md", include_str!("../../../docs/capacity.md"), 3),
];

/// Returns the commands of the console blocks of a page, each with the output below it.
fn shown(page: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
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
fn commands_of_the_pages_print_the_shown_output() {
    let redis = Redis::start();
    let binary = env!("CARGO_BIN_EXE_tidegate");
    for (name, page, at_least) in PAGES {
        let commands = shown(page);
        assert!(commands.len() >= at_least, "{name} has too few commands");
        for (command, expected) in commands {
            // Use the binary that was just built and a temporary Redis.
            let line = command
                .replace("cargo run --release --quiet --", binary)
                .replace("redis://127.0.0.1:6379", &redis.url());
            let line = match line.strip_prefix("tidegate ") {
                Some(arguments) => format!("{binary} {arguments}"),
                None => line,
            };
            let output = Command::new("sh")
                .args(["-c", &line])
                .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
                .stdin(Stdio::null())
                .output()
                .expect("a shell");
            let found = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert_eq!(found, expected, "{name}: {command}");
        }
    }
}
