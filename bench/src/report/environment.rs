//! Conditions of the measurement: the command, the machine, the versions, the date.

use std::process::Command;

use anyhow::{Context, Result};
use tidegate_bench::results::{Header, Results, root};

use super::{Page, SuiteResults};
use crate::process::{peer_binary, run_tool};

/// Crates whose versions are listed.
const CRATES: [&str; 8] =
    ["governor", "limitador", "throttlecrab", "axum", "tonic", "hyper", "tokio", "redis"];

pub(super) fn write(page: &mut Page, suites: &SuiteResults) -> Result<()> {
    let suites = [
        &suites.in_process,
        &suites.growth,
        &suites.layer,
        &suites.http,
        &suites.gateway,
        &suites.resp,
        &suites.attack,
        &suites.scripts,
        &suites.redis,
        &suites.fleet,
        &suites.cluster,
        &suites.service,
        &suites.logs,
    ]
    .into_iter()
    .flatten();
    let headers: Vec<&Header> = suites.map(Results::header).collect();
    let first = headers.iter().map(|header| header.started).min().unwrap_or_default();
    let seconds: f64 = headers.iter().map(|header| header.seconds).sum();
    let is_quick = headers.iter().any(|header| header.plan == "quick");
    let command = if is_quick { "BENCH=quick make bench" } else { "make bench" };
    let mut rows = vec![
        row(
            "command",
            &format!("`{command}` ({:.0} minutes of measuring)", (seconds / 60.0).ceil()),
        ),
        row("date", &date(first)?),
        row(
            "commit",
            first_line(&run_tool(
                Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(root()),
            )),
        ),
        row("machine", &machine()),
        row("kernel", first_line(&run_tool(Command::new("uname").arg("-sr")))),
        row("compiler", first_line(&run_tool(Command::new("rustc").arg("--version")))),
        row("Redis", first_line(&run_tool(Command::new("redis-server").arg("--version")))),
        row("h2load", first_line(&run_tool(Command::new("h2load").arg("--version")))),
        row("wrk", &wrk()),
        row("crates", &crates()?),
    ];
    if let Some(binary) = peer_binary("throttlecrab-server") {
        rows.push(row(
            "throttlecrab-server",
            first_line(&run_tool(Command::new(binary).arg("--version"))),
        ));
    }
    // A suite that runs after another one starts with a load of up to about 3.
    let load = headers.iter().map(|header| header.load).fold(0.0, f64::max);
    if load > 3.0 {
        page.paragraph(&format!(
            "**The machine was busy** (a load of {load:.1} at the start of a suite): the numbers \
             are not representative."
        ));
    }
    if is_quick {
        page.paragraph(
            "**A quick run**: fewer rounds, shorter turns, and no 10M keys. `make bench` does the \
             full run.",
        );
    }
    page.table(&["", ""], &rows);
    Ok(())
}

fn row(name: &str, value: &str) -> Vec<String> {
    vec![name.to_owned(), value.to_owned()]
}

fn first_line(output: &Result<String>) -> &str {
    output.as_ref().ok().and_then(|output| output.lines().next()).unwrap_or("unknown").trim()
}

/// Returns the version of wrk, which prints it together with an error.
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
        line.unwrap_or("unknown").to_owned()
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

/// Returns the versions in `bench/Cargo.lock`.
fn crates() -> Result<String> {
    let lock =
        std::fs::read_to_string(root().join("bench/Cargo.lock")).context("bench/Cargo.lock")?;
    let version = |name: &str| {
        let after = lock.split(&format!("name = \"{name}\"\nversion = \"")).nth(1)?;
        Some(format!("{name} {}", after.split('"').next()?))
    };
    Ok(CRATES.iter().filter_map(|name| version(name)).collect::<Vec<_>>().join(", "))
}

/// Formats a time as in `2026-11-15 14:20 UTC`.
fn date(seconds: u64) -> Result<String> {
    let mut command = Command::new("date");
    Ok(run_tool(command.args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%d %H:%M UTC"]))?
        .trim()
        .to_owned())
}
