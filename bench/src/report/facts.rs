//! How it was measured: the command, the machine, the versions, the date.

use std::process::Command;

use anyhow::{Context, Result};
use tidegate_bench::results::{Header, Results, root};

use super::{Found, Page};
use crate::process::{output_of, peer_binary};

/// Crates whose versions say what was compared.
const CRATES: [&str; 8] =
    ["governor", "limitador", "throttlecrab", "axum", "tonic", "hyper", "tokio", "redis"];

pub(super) fn write(page: &mut Page, found: &Found) -> Result<()> {
    let suites =
        [&found.in_process, &found.growth, &found.http, &found.redis, &found.service, &found.logs]
            .into_iter()
            .flatten();
    let headers: Vec<&Header> = suites.map(Results::header).collect();
    let first = headers.iter().map(|header| header.started).min().unwrap_or_default();
    let seconds: f64 = headers.iter().map(|header| header.seconds).sum();
    let quick = headers.iter().any(|header| header.plan == "quick");
    let command = if quick { "BENCH=quick make bench" } else { "make bench" };
    let mut rows = vec![
        row(
            "command",
            &format!("`{command}` ({:.0} minutes of measuring)", (seconds / 60.0).ceil()),
        ),
        row("date", &date(first)?),
        row(
            "commit",
            first_line(&output_of(
                Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(root()),
            )),
        ),
        row("machine", &machine()),
        row("kernel", first_line(&output_of(Command::new("uname").arg("-sr")))),
        row("compiler", first_line(&output_of(Command::new("rustc").arg("--version")))),
        row("Redis", first_line(&output_of(Command::new("redis-server").arg("--version")))),
        row("h2load", first_line(&output_of(Command::new("h2load").arg("--version")))),
        row("wrk", &wrk()),
        row("crates", &crates()?),
    ];
    if let Some(binary) = peer_binary("throttlecrab-server") {
        rows.push(row(
            "throttlecrab-server",
            first_line(&output_of(Command::new(binary).arg("--version"))),
        ));
    }
    // Each suite is the others' load, but only one at a time.
    let load = headers.iter().map(|header| header.load).fold(0.0, f64::max);
    if load > 3.0 {
        page.line(&format!(
            "\n**The machine was busy** (a load of {load:.1} before a suite began): these numbers show that everything runs, and \
             little else."
        ));
    }
    if quick {
        page.line("\n**A quick pass**: fewer rounds, shorter turns, and no 10M keys. The full one is `make bench`.");
    }
    page.table(&["", ""], &rows);
    Ok(())
}

fn row(what: &str, value: &str) -> Vec<String> {
    vec![what.to_owned(), value.to_owned()]
}

fn first_line(output: &Result<String>) -> &str {
    output.as_ref().ok().and_then(|output| output.lines().next()).unwrap_or("not known").trim()
}

/// It tells its version, and then that it was called wrongly.
fn wrk() -> String {
    let output =
        Command::new("wrk").arg("-v").output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).split(" [").next().unwrap_or_default().trim().to_owned()
}

fn machine() -> String {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))
            .map(str::trim);
        line.unwrap_or("not known").to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory = field("/proc/meminfo", "MemTotal")
        .trim_end_matches(" kB")
        .parse::<f64>()
        .unwrap_or_default();
    format!(
        "{}, {cores} cores, {:.0} GB",
        field("/proc/cpuinfo", "model name"),
        memory / 1_048_576.0
    )
}

/// The versions in our lock file.
fn crates() -> Result<String> {
    let lock =
        std::fs::read_to_string(root().join("bench/Cargo.lock")).context("bench/Cargo.lock")?;
    let version = |name: &str| {
        let after = lock.split(&format!("name = \"{name}\"\nversion = \"")).nth(1)?;
        Some(format!("{name} {}", after.split('"').next()?))
    };
    Ok(CRATES.iter().filter_map(|name| version(name)).collect::<Vec<_>>().join(", "))
}

/// `2026-11-15 14:20 UTC`
fn date(seconds: u64) -> Result<String> {
    let mut command = Command::new("date");
    Ok(output_of(command.args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%d %H:%M UTC"]))?
        .trim()
        .to_owned())
}
