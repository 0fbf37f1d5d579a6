//! `tidegate config`: validates files, explains which policies apply, and prints the JSON Schema or
//! a sample.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use self::check::CheckCommand;
use self::explain::ExplainCommand;
use tidegate_config::Config;

mod check;
mod explain;

/// Check configuration files, explain which policies apply, or print a JSON Schema or a sample.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate config sample > tidegate.yaml
  tidegate config schema > tidegate.schema.json
  tidegate config check tidegate.yaml
  tidegate config explain --config tidegate.yaml --path /api/items")]
pub struct ConfigCommand {
    #[command(subcommand)]
    command: ConfigSubcommand,
}

#[derive(Debug, Subcommand)]
enum ConfigSubcommand {
    Check(CheckCommand),
    // Boxed, because it has many flags.
    Explain(Box<ExplainCommand>),
    /// Print the JSON Schema, for editors
    #[command(after_help = "\
Examples:
  tidegate config schema > tidegate.schema.json

  Then, as the first line of the configuration, for editors with the YAML language server:
    # yaml-language-server: $schema=tidegate.schema.json")]
    Schema,
    /// Print a sample to start from
    #[command(after_help = "\
Examples:
  tidegate config sample > tidegate.yaml")]
    Sample,
}

impl ConfigCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            ConfigSubcommand::Check(check) => return Ok(check.run()),
            ConfigSubcommand::Explain(explain) => return explain.run(),
            ConfigSubcommand::Schema => {
                anstream::println!("{}", serde_json::to_string_pretty(&Config::schema())?);
            }
            ConfigSubcommand::Sample => anstream::print!("{}", tidegate_config::SAMPLE),
        }
        Ok(ExitCode::SUCCESS)
    }
}
