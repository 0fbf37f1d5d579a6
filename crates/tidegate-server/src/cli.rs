//! The commands, one file each.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod acquire;
mod config;
mod doctor;
mod gateway;
mod serve;
pub(crate) mod style;

/// Decides, exactly and fast, whether a request may pass now.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, propagate_version = true, styles = style::HELP)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Serve),
    Gateway(gateway::Gateway),
    Acquire(acquire::Acquire),
    Config(config::ConfigCommand),
    Doctor(doctor::Doctor),
}

impl Arguments {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Serve(serve) => serve.run(),
            Command::Gateway(gateway) => gateway.run(),
            Command::Acquire(acquire) => acquire.run(),
            Command::Config(config) => config.run(),
            Command::Doctor(doctor) => doctor.run(),
        }
    }
}

/// What is wrong with the flags, and what would be right, in one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let told = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let told = told.collect::<Vec<_>>().join(" ");
    format!(
        "{}error:{}{} (--help tells more)",
        style::ERROR,
        style::RESET,
        told.trim_start_matches("error:")
    )
}
