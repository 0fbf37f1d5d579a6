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
        // The user has set variables, and no fields.
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

/// Returns the path of the field at a line of JSON that is indented by two spaces.
fn path_at(text: &str, line: usize) -> String {
    let mut path = Vec::new();
    for line in text.lines().take(line) {
        let content = line.trim_start();
        if let Some((name, _)) = content.split_once("\": ") {
            path.truncate((line.len() - content.len()) / 2 - 1);
            path.push(name.trim_start_matches('"'));
        }
    }
    path.join(".")
}
