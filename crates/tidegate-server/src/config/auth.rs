//! The `auth` section: bearer tokens, each in the configuration, in a file of its own, or in the
//! environment.

use std::path::{Path, PathBuf};

use serde_saphyr::Spanned;
use tidegate::internals::Document;

use super::{ConfigError, Secret, raw};
use crate::tls;

const API_TOKEN: &str = "TIDEGATE_API_TOKEN";
const ADMIN_TOKEN: &str = "TIDEGATE_ADMIN_TOKEN";

/// Variables with tokens. With `_FILE` at its end, each names a file.
pub(crate) const TOKEN_VARIABLES: [&str; 2] = [API_TOKEN, ADMIN_TOKEN];

/// Tokens of the listeners.
#[derive(Debug)]
pub(super) struct Tokens {
    pub(super) api: Option<Secret>,
    pub(super) admin: Option<Secret>,
}

/// Validates the section. Files with tokens are added to `files`.
pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::RawAuth,
    files: &mut Vec<PathBuf>,
) -> Result<Tokens, ConfigError> {
    let api = WrittenToken {
        name: "api_token",
        variable: API_TOKEN,
        token: raw.api_token,
        file: raw.api_token_file,
    };
    let admin = WrittenToken {
        name: "admin_token",
        variable: ADMIN_TOKEN,
        token: raw.admin_token,
        file: raw.admin_token_file,
    };
    let mut load = |token: WrittenToken| token.load(document, folder, files);
    Ok(Tokens { api: load(api)?, admin: load(admin)? })
}

/// Token as the configuration has it.
struct WrittenToken {
    name: &'static str,
    /// Variable that overrides the configuration. The one with `_FILE` at its end names a file.
    variable: &'static str,
    token: Option<Spanned<Option<String>>>,
    file: Option<Spanned<String>>,
}

impl WrittenToken {
    fn load(
        self,
        document: &Document<'_>,
        folder: &Path,
        files: &mut Vec<PathBuf>,
    ) -> Result<Option<Secret>, ConfigError> {
        let name = self.name;
        let written = match (self.token, &self.file) {
            (Some(_), Some(file)) => {
                let message = format!("auth has both {name} and {name}_file: remove one of them");
                return Err(document.error_at(file, &message));
            }
            (token, None) => inline(document, token)?,
            (None, Some(file)) => {
                let path = folder.join(&file.value);
                let token = Secret::read(&path).map_err(|reason| {
                    document.error_at(file, &format!("{}: {reason}", tls::shown(&path)))
                })?;
                files.push(path);
                Some(token)
            }
        };
        let variable =
            from_environment(self.variable, files).map_err(|error| document.error(&error))?;
        Ok(variable.or(written))
    }
}

/// Validates a token. An empty one is an error, because it would disable authentication.
fn inline(
    document: &Document<'_>,
    raw: Option<Spanned<Option<String>>>,
) -> Result<Option<Secret>, ConfigError> {
    let Some(written) = raw else { return Ok(None) };
    match written.value.as_deref().map(str::trim) {
        None | Some("") => Err(document.error_at(
            &written,
            "this token is empty: write one (in quotes, if it starts with a special character), \
             or remove the field",
        )),
        Some(_) => Ok(written.value.map(Secret::new)),
    }
}

/// Returns the token of a variable, or of the file that the variable with `_FILE` names.
fn from_environment(variable: &str, files: &mut Vec<PathBuf>) -> Result<Option<Secret>, String> {
    let file_variable = format!("{variable}_FILE");
    match (std::env::var_os(variable), std::env::var_os(&file_variable)) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => {
            Err(format!("both {variable} and {file_variable} are set: unset one of them"))
        }
        (Some(token), None) => match token.into_string() {
            Ok(token) if !token.trim().is_empty() => Ok(Some(Secret::new(token))),
            Ok(_) => Err(format!("{variable} is empty: set a token, or unset the variable")),
            Err(_) => Err(format!("{variable} is not UTF-8")),
        },
        (None, Some(file)) => {
            let path = PathBuf::from(file);
            let token = Secret::read(&path)
                .map_err(|reason| format!("{file_variable} {}: {reason}", tls::shown(&path)))?;
            files.push(path);
            Ok(Some(token))
        }
    }
}
