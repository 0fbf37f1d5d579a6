//! `tidegate config`: validate a file, or describe one to an editor.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::config::Config;

/// Check a configuration, or print its JSON Schema or a sample.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate config sample > tidegate.yaml
  tidegate config schema > tidegate.schema.json
  tidegate config check tidegate.yaml")]
pub(super) struct ConfigCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Validate a file; exit code 0 if it is good, 2 if not
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print the JSON Schema, for editors
    Schema,
    /// Print a sample to start from
    Sample,
}

impl ConfigCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Check { file } => {
                let config = Config::load(&file)?;
                let (policies, rules) = (config.policies.iter().count(), &config.envoy.rules);
                let envoy = match rules.rules().count() {
                    0 => String::new(),
                    count => format!(", {count} rules for Envoy in {} domains", rules.domains().count()),
                };
                anstream::println!("{}: good, {policies} policies{envoy}", file.display());
            }
            Command::Schema => anstream::println!("{}", serde_json::to_string_pretty(&Config::schema())?),
            Command::Sample => anstream::print!("{}", crate::config::SAMPLE),
        }
        Ok(ExitCode::SUCCESS)
    }
}
