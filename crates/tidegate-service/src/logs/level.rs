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
            Some(target) => format!("{target}={level}"),
            None => level.to_owned(),
        })
    });
    let directives = directives.collect::<anyhow::Result<Vec<_>>>()?.join(",");
    directives.parse().map_err(|error| anyhow::anyhow!("{VARIABLE}={text}: {error}"))
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
