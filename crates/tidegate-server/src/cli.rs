//! The commands, one file each.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod acquire;
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
    Acquire(acquire::Acquire),
}

impl Arguments {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Acquire(acquire) => acquire.run(),
        }
    }
}
