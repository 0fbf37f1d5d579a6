//! Command line interface, one file per command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{Config, Listen};

mod acquire;
mod bench;
mod config;
mod doctor;
mod gateway;
mod generate;
mod health;
mod listen;
mod plan;
mod redis;
mod serve;
mod simulate;
pub(crate) mod style;
mod top;
mod variables;

/// Distributed rate limiter: decides, exactly and fast, whether a request is allowed now.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, propagate_version = true, styles = style::HELP)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::ServeCommand),
    Gateway(gateway::GatewayCommand),
    Acquire(acquire::AcquireCommand),
    Config(config::ConfigCommand),
    Doctor(doctor::DoctorCommand),
    Plan(plan::PlanCommand),
    Top(top::TopCommand),
    Health(health::HealthCommand),
    Completions(generate::CompletionsCommand),
    Man(generate::ManCommand),
    // Boxed, because they have many flags.
    Simulate(Box<simulate::SimulateCommand>),
    Bench(Box<bench::BenchCommand>),
}

impl Arguments {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Serve(serve) => serve.run(),
            Command::Gateway(gateway) => gateway.run(),
            Command::Acquire(acquire) => acquire.run(),
            Command::Config(config) => config.run(),
            Command::Doctor(doctor) => doctor.run(),
            Command::Plan(plan) => plan.run(),
            Command::Top(top) => top.run(),
            Command::Health(health) => health.run(),
            Command::Completions(completions) => completions.run(),
            Command::Man(man) => man.run(),
            Command::Simulate(simulate) => simulate.run(),
            Command::Bench(bench) => bench.run(),
        }
    }
}

/// Returns the scheme of the admin listener's URLs.
fn admin_scheme(config: &Config) -> &'static str {
    let has_tls = config.tls.as_ref().is_some_and(|tls| tls.admin.is_some());
    if has_tls { "https" } else { "http" }
}

/// Returns the line of the Redis protocol in the startup message; empty if it is off.
fn resp_line(bound: &Listen, tls: bool, label: &str) -> String {
    let scheme = if tls { "rediss" } else { "redis" };
    let shown = bound.resp.as_ref().map(|resp| resp.shown(scheme));
    shown.map(|shown| format!("\x20 {label}{shown}\n")).unwrap_or_default()
}

/// Formats an argument error, with its suggestion, as one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let message = lines.collect::<Vec<_>>().join(" ");
    format!(
        "{}error:{}{} (see --help)",
        style::ERROR,
        style::RESET,
        message.trim_start_matches("error:")
    )
}
