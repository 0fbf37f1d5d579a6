//! `tidegate config`: validates a file, and prints the JSON Schema or a sample.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use crate::tool::style;
use tidegate_config::{Config, ConfigWarning, OPEN_LISTENER};

/// Permission of all users to read a file.
const WORLD_READABLE: u32 = 0o004;

/// Check a configuration file, or print its JSON Schema or a sample.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate config sample > tidegate.yaml
  tidegate config schema > tidegate.schema.json
  tidegate config check tidegate.yaml")]
pub struct ConfigCommand {
    #[command(subcommand)]
    command: ConfigSubcommand,
}

#[derive(Debug, Subcommand)]
enum ConfigSubcommand {
    /// Validate a file; exit code 0 if it is valid, 2 if not
    #[command(after_help = "\
Examples:
  tidegate config check tidegate.yaml
  tidegate config check --json tidegate.yaml | jq .line

Secrets in the file are never printed, and no server is contacted.")]
    Check {
        /// Configuration file
        #[arg(value_name = "FILE")]
        file: PathBuf,

        /// Print one JSON object: file and good, then the number of policies and rules and a list
        /// of warnings, or line, column and message
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
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            ConfigSubcommand::Check { file, json: true } => return Ok(check_as_json(&file)),
            ConfigSubcommand::Check { file, json: false } => {
                let config = Config::load(&file)?;
                for warning in warnings(&config, &file) {
                    style::print_warning(warning);
                }
                let policies = config.policies.iter().count();
                let rules = &config.envoy.rules;
                let envoy = match rules.rules().count() {
                    0 => String::new(),
                    count => format!(
                        ", {} for Envoy in {}",
                        counted(count, "rule", "rules"),
                        counted(rules.domains().count(), "domain", "domains")
                    ),
                };
                let policies = counted(policies, "policy", "policies");
                anstream::println!("{}: valid, {policies}{envoy}", file.display());
            }
            ConfigSubcommand::Schema => {
                anstream::println!("{}", serde_json::to_string_pretty(&Config::schema())?);
            }
            ConfigSubcommand::Sample => anstream::print!("{}", tidegate_config::SAMPLE),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns the warnings about a file, the listeners that it opens, and the files of its tokens.
/// `serve` logs those about listeners, with the addresses of its flags. In a container, a file that
/// all users can read is common, and harmless.
fn warnings(config: &Config, file: &Path) -> Vec<ConfigWarning> {
    let addresses = [("http", config.listen.http.clone()), ("grpc", config.listen.grpc.clone())];
    let open = config
        .open_listeners(&addresses)
        .map(|(listener, address)| format!("listen.{listener} is {address}: {OPEN_LISTENER}"));
    let is_readable = |path: &&PathBuf| {
        std::fs::metadata(path).is_ok_and(|metadata| metadata.mode() & WORLD_READABLE != 0)
    };
    let readable = config.token_files.iter().filter(is_readable).map(|path| {
        let path = path.display();
        format!("every user of this host can read the token in {path}: chmod o= that file")
    });
    let messages = open.chain(readable);
    let others = messages.map(|message| ConfigWarning {
        file: file.display().to_string(),
        line: None,
        message,
    });
    let of_file = config.warnings.iter().chain(&config.warnings_without_gateway);
    of_file.cloned().chain(others).collect()
}

/// Returns a number with its noun, such as "1 policy" or "2 policies".
fn counted(number: usize, one: &str, many: &str) -> String {
    let noun = if number == 1 { one } else { many };
    format!("{number} {noun}")
}

fn check_as_json(file: &Path) -> ExitCode {
    let name = file.display().to_string();
    let (result, code) = match Config::load(file) {
        Ok(config) => {
            let policies = config.policies.iter().count();
            let rules = config.envoy.rules.rules().count();
            let warning = |warning: ConfigWarning| {
                let ConfigWarning { file, line, message } = warning;
                json!({"file": file, "line": line, "message": message})
            };
            let warnings: Vec<_> = warnings(&config, file).into_iter().map(warning).collect();
            let result = json!({
                "file": name,
                "good": true,
                "policies": policies,
                "envoy_rules": rules,
                "warnings": warnings,
            });
            (result, ExitCode::SUCCESS)
        }
        Err(error) => {
            let (line, column) = error.position().unzip();
            let result = json!({
                "file": error.file(),
                "good": false,
                "line": line,
                "column": column,
                "message": error.message(),
            });
            (result, ExitCode::from(2))
        }
    };
    anstream::println!("{result}");
    code
}
