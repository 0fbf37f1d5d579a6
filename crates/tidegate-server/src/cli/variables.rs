//! Warning about `TIDEGATE_` variables that nothing reads: a misspelt one is ignored silently, and
//! without its Redis each instance would count alone.

use std::collections::BTreeSet;
use std::path::Path;

use clap::CommandFactory as _;

use super::CommandLine;
use tidegate_config::{self as config, ALGORITHM_VARIABLE};
use tidegate_service::logs;

const PREFIX: &str = "TIDEGATE_";

/// Returns a warning about the variables of the environment that nothing reads. The configuration
/// file may use others as `${NAME}`.
pub(super) fn warning(file: Option<&Path>) -> Option<String> {
    let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    let unknown: Vec<String> = unknown(names(), &text).collect();
    warning_about(&unknown, &known(|command| ["serve", "gateway"].contains(&command)))
}

/// Returns the warning of a process in the place of envoyproxy/ratelimit. Its image sets variables
/// of other commands.
pub(super) fn warning_of_ratelimit() -> Option<String> {
    let mut known = known(|_| false);
    known.extend([ALGORITHM_VARIABLE, "TIDEGATE_LISTEN_ADMIN"].map(str::to_owned));
    let unknown = unknown(names(), "").filter(|name| !known.contains(name));
    warning_about(&unknown.collect::<Vec<_>>(), &known)
}

fn names() -> impl Iterator<Item = String> {
    std::env::vars_os().filter_map(|(name, _)| name.into_string().ok())
}

fn warning_about(unknown: &[String], known: &BTreeSet<String>) -> Option<String> {
    let entries = unknown.iter().map(|name| match similar(name, known) {
        Some(known) => format!("{name} (did you mean {known}?)"),
        None => name.clone(),
    });
    let entries = entries.collect::<Vec<_>>().join(", ");
    (!entries.is_empty()).then(|| {
        format!(
            "nothing reads these variables of the environment: {entries}: write the right name, \
             or unset them"
        )
    })
}

/// Returns the variables that the configuration or one of these commands reads.
fn known(is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let mut known = BTreeSet::from([logs::VARIABLE.to_owned()]);
    for variable in config::TOKEN_VARIABLES {
        known.extend([variable.to_owned(), format!("{variable}_FILE")]);
    }
    let arguments = CommandLine::command();
    for command in arguments.get_subcommands().filter(|command| is_wanted(command.get_name())) {
        let variables = command.get_arguments().filter_map(|argument| argument.get_env());
        known.extend(variables.filter_map(|name| name.to_str()).map(str::to_owned));
    }
    known
}

fn unknown(names: impl Iterator<Item = String>, config: &str) -> impl Iterator<Item = String> {
    let known = known(|_| true);
    let is_used =
        move |name: &String| known.contains(name) || config.contains(&format!("${{{name}"));
    let names: BTreeSet<String> = names
        .filter(|name| name.starts_with(PREFIX) && !is_used(name) && !is_of_kubernetes(name))
        .collect();
    names.into_iter()
}

/// Returns whether Kubernetes sets this variable, in every container beside a Service whose name
/// starts with `tidegate`.
fn is_of_kubernetes(name: &str) -> bool {
    let is_port = |rest: &str| {
        let rest = rest.trim_start_matches(|it: char| it.is_ascii_digit());
        ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| rest.starts_with(protocol))
    };
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.split("_PORT_").skip(1).any(is_port)
}

/// Returns the variable that was probably meant.
fn similar<'k>(name: &str, known: &'k BTreeSet<String>) -> Option<&'k str> {
    let longer = known.iter().filter(|known| name.starts_with(&format!("{known}_")));
    if let Some(known) = longer.max_by_key(|known| known.len()) {
        return Some(known);
    }
    let distance = |known: &&String| strsim::damerau_levenshtein(name, known);
    let nearest = known.iter().min_by_key(distance)?;
    let length = name.len() - PREFIX.len();
    (distance(&nearest) <= 1 + length / 3).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variables_come_with_the_right_name() {
        let known = known(|command| ["serve", "gateway"].contains(&command));
        for (name, expected) in [
            ("TIDEGATE_REDIS_URL", Some("TIDEGATE_REDIS")),
            ("TIDEGATE_LOG_LEVEL", Some("TIDEGATE_LOG")),
            ("TIDEGATE_CONFG", Some("TIDEGATE_CONFIG")),
            ("TIDEGATE_ADMIN_TOKEN_FLIE", Some("TIDEGATE_ADMIN_TOKEN")),
            ("TIDEGATE_HTTP_LISTEN_ADDRESS", None),
        ] {
            assert_eq!(similar(name, &known), expected, "{name}");
        }
    }

    #[test]
    fn variables_that_something_reads_are_no_mistake() {
        let names = [
            "TIDEGATE_REDIS",
            "TIDEGATE_API_TOKEN_FILE",
            "TIDEGATE_LOG",
            "TIDEGATE_SECRET",
            "TIDEGATE_SERVICE_HOST",
            "TIDEGATE_SERVICE_PORT",
            "TIDEGATE_SERVICE_PORT_HTTP",
            "TIDEGATE_PORT",
            "TIDEGATE_PORT_8080_TCP",
            "TIDEGATE_PORT_8080_TCP_ADDR",
            "TIDEGATE_REDIS_PORT_6379_TCP_PROTO",
            "PATH",
            "TIDEGATE_REDIS_URL",
        ];
        let config = "store: {redis: '${TIDEGATE_SECRET:-redis://h}'}";
        let names = names.into_iter().map(str::to_owned);
        assert!(unknown(names, config).eq(["TIDEGATE_REDIS_URL"]));
    }
}
