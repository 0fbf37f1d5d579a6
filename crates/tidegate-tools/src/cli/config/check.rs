//! `tidegate config check`.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use crate::tool::style;
use tidegate_config::{Config, ConfigError, ConfigWarning, OPEN_LISTENER};

/// Permission of all users to read a file.
const WORLD_READABLE: u32 = 0o004;
/// Name of the standard input.
const STANDARD_INPUT: &str = "-";

/// Validate files; exit code 0 if all are valid, 2 if not
///
/// Prints all errors of each file. After one without a correction, the rest of its policy or section
/// is not checked.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate config check tidegate.yaml
  tidegate config check --json tidegate.yaml | jq .line

  All files of a pull request, on a machine without the certificates and tokens:
    tidegate config check --offline deploy/*.yaml

  The result of a template:
    helm template chart --show-only templates/config.yaml | tidegate config check --offline -

Secrets in the file are never printed, and no server is contacted.")]
pub(super) struct CheckCommand {
    /// Configuration files; - is the standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Read no certificates and no files with tokens or passwords, and leave out policies and
    /// sections with variables that are not set
    #[arg(long)]
    offline: bool,

    /// Print one JSON object per file: file and good, then the number of policies and rules and a
    /// list of warnings, or line, column and message of the first error and a list of all errors
    #[arg(long)]
    json: bool,
}

impl CheckCommand {
    pub(super) fn run(&self) -> ExitCode {
        let mut all_valid = true;
        for file in &self.files {
            let checked = self.check(file);
            all_valid &= checked.is_ok();
            if self.json {
                anstream::println!("{}", to_json(file, checked));
            } else {
                print(file, checked);
            }
        }
        if all_valid { ExitCode::SUCCESS } else { ExitCode::from(2) }
    }

    fn check(&self, file: &Path) -> Result<Config, Vec<ConfigError>> {
        let name = name_of(file);
        let text = if file.as_os_str() == STANDARD_INPUT {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        } else {
            std::fs::read_to_string(file)
        };
        let text = text.map_err(|error| vec![ConfigError::from_io(&name, &error)])?;
        let folder = file.parent().unwrap_or_else(|| Path::new(""));
        Config::check(folder, &name, &text, self.offline)
    }
}

fn name_of(file: &Path) -> String {
    match file.display().to_string().as_str() {
        STANDARD_INPUT => "standard input".to_owned(),
        name => name.to_owned(),
    }
}

fn print(file: &Path, checked: Result<Config, Vec<ConfigError>>) {
    let config = match checked {
        Ok(config) => config,
        Err(errors) => {
            for error in errors {
                anstream::eprintln!("{}error:{} {error}", style::ERROR, style::RESET);
            }
            return;
        }
    };
    for warning in warnings(&config, file) {
        style::print_warning(warning);
    }
    let rules = &config.envoy.rules;
    let envoy = match rules.rules().count() {
        0 => String::new(),
        count => format!(
            ", {} for Envoy in {}",
            counted(count, "rule", "rules"),
            counted(rules.domains().count(), "domain", "domains")
        ),
    };
    let policies = counted(config.policies.iter().count(), "policy", "policies");
    anstream::println!("{}: valid, {policies}{envoy}", name_of(file));
}

fn to_json(file: &Path, checked: Result<Config, Vec<ConfigError>>) -> Value {
    let config = match checked {
        Ok(config) => config,
        Err(errors) => {
            let place = |error: &ConfigError| error.position().unzip();
            let all = errors.iter().map(|error| {
                let (line, column) = place(error);
                json!({"line": line, "column": column, "message": error.message()})
            });
            let all: Vec<Value> = all.collect();
            let first = errors.first();
            let (line, column) = first.map(place).unwrap_or_default();
            return json!({
                "file": first.map(ConfigError::file),
                "good": false,
                "line": line,
                "column": column,
                "message": first.map(ConfigError::message),
                "errors": all,
            });
        }
    };
    let warning = |ConfigWarning { file, line, message }: ConfigWarning| json!({"file": file, "line": line, "message": message});
    json!({
        "file": name_of(file),
        "good": true,
        "policies": config.policies.iter().count(),
        "envoy_rules": config.envoy.rules.rules().count(),
        "warnings": warnings(&config, file).into_iter().map(warning).collect::<Vec<_>>(),
    })
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
    let others = messages.map(|message| ConfigWarning { file: name_of(file), line: None, message });
    let of_file = config.warnings.iter().chain(&config.warnings_without_gateway);
    of_file.cloned().chain(others).collect()
}

/// Returns a number with its noun, such as "1 policy" or "2 policies".
fn counted(number: usize, one: &str, many: &str) -> String {
    let noun = if number == 1 { one } else { many };
    format!("{number} {noun}")
}
