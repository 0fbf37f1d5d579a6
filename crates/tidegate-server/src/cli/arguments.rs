//! Parsing of the command line. A flag wins over a variable of the environment that would exclude
//! it, and an error about a flag names the variable that has set it.

use std::fmt::Write as _;

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory as _, FromArgMatches as _};

use super::CommandLine;

/// Flags of a command that were set by variables of the environment, with these.
#[derive(Default)]
pub(crate) struct FromVariables(Vec<(String, String)>);

/// Parses the arguments of this process.
pub(crate) fn parse() -> (Result<CommandLine, clap::Error>, FromVariables) {
    let command = CommandLine::command();
    let found = command.clone().ignore_errors(true).try_get_matches();
    let found = found.as_ref().ok().and_then(ArgMatches::subcommand);
    let (command, variables) = match found {
        Some((name, matches)) => without_overruled(command, name, matches),
        None => (command, FromVariables::default()),
    };
    let mut formatted = command.clone();
    let parsed = command.try_get_matches().and_then(|matches| {
        CommandLine::from_arg_matches(&matches).map_err(|error| error.format(&mut formatted))
    });
    (parsed, variables)
}

/// Removes the variables of flags that one on the command line excludes.
fn without_overruled(
    command: Command,
    name: &str,
    matches: &ArgMatches,
) -> (Command, FromVariables) {
    let mut variables = FromVariables::default();
    let command = command.mut_subcommand(name, |mut command| {
        let known = command.clone();
        let with_source = |source| {
            let has_source = move |argument: &&Arg| {
                matches.value_source(argument.get_id().as_str()) == Some(source)
            };
            known.get_arguments().filter(has_source)
        };
        for argument in with_source(ValueSource::EnvVariable) {
            let is_excluded = with_source(ValueSource::CommandLine)
                .any(|flag| excludes(&known, flag, argument) || excludes(&known, argument, flag));
            if is_excluded || needs_no_file(name, argument, matches) {
                command = command.mut_arg(argument.get_id(), |it| it.env(Resettable::Reset));
            } else if let (Some(flag), Some(variable)) = (argument.get_long(), argument.get_env()) {
                let variable = variable.to_string_lossy().into_owned();
                variables.0.push((format!("--{flag}"), variable));
            }
        }
        command
    });
    (command, variables)
}

fn excludes(command: &Command, flag: &Arg, other: &Arg) -> bool {
    command.get_arg_conflicts_with(flag).iter().any(|it| it.get_id() == other.get_id())
}

/// Returns whether a simulation has a limit on its command line, which is not that of a policy of
/// the file that a variable names.
fn needs_no_file(command: &str, argument: &Arg, matches: &ArgMatches) -> bool {
    let is_given = |name| matches.value_source(name) == Some(ValueSource::CommandLine);
    let is_set =
        |name| matches.value_source(name).is_some_and(|it| it != ValueSource::DefaultValue);
    command == "simulate"
        && argument.get_id() == "config"
        && is_given("limit")
        && !is_set("policy")
        && !is_set("what_if")
}

impl FromVariables {
    /// Returns a message with the variables of the flags that it mentions.
    pub(crate) fn explain(&self, mut message: String) -> String {
        let is_part = |next: char| next.is_ascii_alphanumeric() || next == '-';
        let mentions = |message: &str, flag: &str| {
            message
                .match_indices(flag)
                .any(|(at, _)| !message[at + flag.len()..].starts_with(is_part))
        };
        for (flag, variable) in &self.0 {
            // A missing file is named, but not its flag.
            let value = std::env::var(variable).unwrap_or_default();
            let is_file = value.contains('/') && message.contains(&value);
            if is_file || mentions(&message, flag) {
                let _ = write!(message, " ({flag} is set by the variable {variable})");
            }
        }
        message
    }
}
