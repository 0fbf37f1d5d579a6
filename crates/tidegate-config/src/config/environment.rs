//! [`EnvironmentConfig`]: a configuration that variables of the environment were translated into.

use super::Config;
use crate::yaml::ConfigError;

/// Name of the text in errors that are about none of its values.
const NAME: &str = "the environment";

/// Configuration that the environment was translated into.
#[derive(Clone)]
pub struct EnvironmentConfig {
    /// JSON, with a field in each line.
    pub(crate) text: String,
    /// Fields with the variables that are set, and their values.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Whether requests are errors until a control plane has sent rules.
    pub(crate) needs_rules: bool,
}

impl EnvironmentConfig {
    /// Loads and validates the configuration. Errors name variables, not places in the text.
    pub(crate) fn load(&self) -> Result<Config, ConfigError> {
        let mut config = Config::parse(NAME, &self.text).map_err(|error| self.explained(error))?;
        config.envoy.counts_units = true;
        config.envoy.needs_rules = self.needs_rules && config.envoy.xds.is_some();
        Ok(config)
    }

    fn explained(&self, error: ConfigError) -> ConfigError {
        let Some((line, _)) = error.position() else { return error };
        let path = path_at(&self.text, line);
        let is_part_of = |part: &str, whole: &str| {
            part.strip_prefix(whole).is_some_and(|it| it.starts_with('.'))
        };
        let variables = self.variables.iter().filter(|(field, _)| {
            *field == path || is_part_of(&path, field) || is_part_of(field, &path)
        });
        let mut variables: Vec<&str> = variables.map(|(_, shown)| shown.as_str()).collect();
        // An error about a section may quote the value of one.
        let is_quoted = |shown: &&str| {
            let value = shown.split_once("=\"").map(|(_, value)| value.trim_end_matches('"'));
            value.is_some_and(|value| error.message().contains(value))
        };
        if variables.iter().any(is_quoted) {
            variables.retain(is_quoted);
        }
        // Names of fields mean nothing to whoever has set variables.
        let mut message = error.message();
        while let Some((name, rest)) = message.split_once(": ")
            && name.split('.').all(|part| path.split('.').any(|it| it == part))
        {
            message = rest;
        }
        let subject = if variables.is_empty() { NAME.to_owned() } else { variables.join(" ") };
        // The subject has the value that the message masks.
        ConfigError::of_subject(subject, &message.replace("… ", ""))
    }
}

/// Returns the path of the field at a line of JSON that is indented.
fn path_at(text: &str, line: usize) -> String {
    let (mut names, mut depth) = (Vec::new(), usize::MAX);
    let lines: Vec<&str> = text.lines().take(line).collect();
    for line in lines.into_iter().rev() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if indent < depth {
            depth = indent;
            names.extend(
                content
                    .strip_prefix('"')
                    .and_then(|it| it.split_once("\": "))
                    .map(|(name, _)| name),
            );
        }
    }
    names.reverse();
    names.join(".")
}
