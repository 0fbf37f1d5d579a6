//! `tidegate config`: validate a file, or describe one to an editor.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

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
    #[command(after_help = "\
Examples:
  tidegate config check tidegate.yaml
  tidegate config check --json tidegate.yaml | jq .line

Nothing that may be a secret is shown of the file, and no server is asked.")]
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,

        /// One object of JSON: file, good, and either what there is or line, column and message
        #[arg(long)]
        json: bool,
    },
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
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Check { file, json: true } => return Ok(check_for_machines(&file)),
            Command::Check { file, json: false } => {
                let config = Config::load(&file)?;
                let (policies, rules) = (config.policies.iter().count(), &config.envoy.rules);
                let envoy = match rules.rules().count() {
                    0 => String::new(),
                    count => {
                        format!(", {count} rules for Envoy in {} domains", rules.domains().count())
                    }
                };
                anstream::println!("{}: good, {policies} policies{envoy}", file.display());
            }
            Command::Schema => {
                anstream::println!("{}", serde_json::to_string_pretty(&Config::schema())?)
            }
            Command::Sample => anstream::print!("{}", crate::config::SAMPLE),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn check_for_machines(file: &Path) -> ExitCode {
    let name = file.display().to_string();
    let (answer, code) = match Config::load(file) {
        Ok(config) => {
            let (policies, rules) =
                (config.policies.iter().count(), config.envoy.rules.rules().count());
            (
                json!({"file": name, "good": true, "policies": policies, "envoy_rules": rules}),
                ExitCode::SUCCESS,
            )
        }
        Err(error) => {
            let (line, column) = error.position().unzip();
            let answer = json!({
                "file": error.file(), "good": false, "line": line, "column": column, "message": error.message(),
            });
            (answer, ExitCode::from(2))
        }
    };
    anstream::println!("{answer}");
    code
}
