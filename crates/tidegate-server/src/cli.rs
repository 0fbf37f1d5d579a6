//! Command line interface, one file per command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::Config;

mod acquire;
mod bench;
mod config;
mod doctor;
mod gateway;
mod plan;
mod redis;
mod serve;
mod simulate;
pub(crate) mod style;
mod top;

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
