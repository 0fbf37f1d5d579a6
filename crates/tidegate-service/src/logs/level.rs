//! Levels of the logs, as `TIDEGATE_LOG` has them.

use tracing_subscriber::EnvFilter;

/// Variable with the levels.
pub const VARIABLE: &str = "TIDEGATE_LOG";

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Parses levels. A word that is no level would be the name of a module, and its filter would
/// switch off all other lines.
pub(super) fn parse(text: &str) -> anyhow::Result<EnvFilter> {
    let directives = text.split(',').map(|directive| {
        let (target, level) = match directive.rsplit_once('=') {
            Some((target, level)) => (Some(target), level),
            None => (None, directive),
        };
        let level = level.trim().to_ascii_lowercase();
        let level = if level == "warning" { "warn" } else { level.as_str() };
        anyhow::ensure!(
            LEVELS.contains(&level),
            "{VARIABLE}={text}: {level:?} is no level: write one of {}, or levels of modules, such \
             as info,tidegate=debug",
            LEVELS.join(", ")
        );
        Ok(match target {
            Some(target) => format!("{}={level}", in_crate(target)),
            None => level.to_owned(),
        })
    });
    let directives = directives.collect::<anyhow::Result<Vec<_>>>()?.join(",");
    directives.parse().map_err(|error| anyhow::anyhow!("{VARIABLE}={text}: {error}"))
}

/// Modules of the service, which is a crate of its own.
const SERVICE_MODULES: [&str; 13] = [
    "admin", "api", "auth", "backend", "envoy", "hot_keys", "logs", "metrics", "observer",
    "reload", "resp", "serve", "state",
];

/// Returns the target of a module. All modules of the binary are named `tidegate::…` in a filter,
/// whatever their crate is.
fn in_crate(target: &str) -> String {
    let Some(path) = target.trim().strip_prefix("tidegate::") else { return target.to_owned() };
    match path.split("::").next().unwrap_or_default() {
        "gateway" => format!("tidegate_{path}"),
        "config" => format!("tidegate_config::{path}"),
        "listener" | "tls" => format!("tidegate_net::{path}"),
        "doctor" => format!("tidegate_tools::{path}"),
        module if SERVICE_MODULES.contains(&module) => format!("tidegate_service::{path}"),
        // A module of the library.
        _ => target.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_parsed_in_any_case() {
        for (text, expected) in [
            ("warn", "warn"),
            ("warning", "warn"),
            ("WARNING", "warn"),
            (" debug ", "debug"),
            ("info,tidegate=Warning", "tidegate=warn,info"),
            ("off", "off"),
            ("tidegate::gateway=debug", "tidegate_gateway=debug"),
            ("tidegate::gateway::client=debug", "tidegate_gateway::client=debug"),
            ("tidegate::reload=debug", "tidegate_service::reload=debug"),
            ("tidegate::listener=trace", "tidegate_net::listener=trace"),
            ("tidegate::store::redis=debug", "tidegate::store::redis=debug"),
        ] {
            assert_eq!(parse(text).expect(text).to_string(), expected, "{text}");
        }
    }

    #[test]
    fn unknown_level_is_an_error_that_lists_the_right_ones() {
        for text in ["warnings", "verbose", "info,tidegate=loud", "tidegate", "1", "info,"] {
            let error = parse(text).expect_err(text).to_string();
            let levels = "off, error, warn, info, debug, trace";
            assert!(error.contains(text) && error.contains(levels), "{error}");
        }
    }
}
