//! The `auth` section: tokens, each in the configuration, in a file of its own, or in the
//! environment.

use std::path::{Path, PathBuf};

use crate::yaml::Document;
use serde_saphyr::Spanned;

use super::raw;
use crate::Secret;
use crate::tokens::{Scope, Token, Tokens};
use crate::warning::ConfigWarning;
use crate::yaml::ConfigError;
use tidegate_net::tls;

const API_TOKEN: &str = "TIDEGATE_API_TOKEN";
const ADMIN_TOKEN: &str = "TIDEGATE_ADMIN_TOKEN";

/// Variables with tokens. With `_FILE` at its end, each names a file.
pub const TOKEN_VARIABLES: [&str; 2] = [API_TOKEN, ADMIN_TOKEN];

/// Minimum length of a token that cannot be guessed.
const MIN_TOKEN_CHARS: usize = 16;
const MAX_TOKEN_NAME_BYTES: usize = 64;

/// Validated section.
pub(super) struct Auth {
    pub(super) tokens: Tokens,
    /// Files with tokens.
    pub(super) files: Vec<PathBuf>,
    pub(super) warnings: Vec<ConfigWarning>,
}

/// Validates the section. `api_token` and `admin_token` are entries of the same table.
pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::RawAuth,
) -> Result<Auth, ConfigError> {
    let mut loader = AuthLoader {
        document,
        folder,
        auth: Auth { tokens: Tokens::default(), files: Vec::new(), warnings: Vec::new() },
    };
    let api = WrittenToken { token: raw.api_token, file: raw.api_token_file };
    if let Some(secret) = loader.short_form("api_token", api, API_TOKEN)? {
        let token = Token::new("api_token", &secret, &[Scope::Acquire, Scope::Refund]);
        loader.auth.tokens.add(token, true);
    }
    let admin = WrittenToken { token: raw.admin_token, file: raw.admin_token_file };
    if let Some(secret) = loader.short_form("admin_token", admin, ADMIN_TOKEN)? {
        let token = Token::new("admin_token", &secret, &Scope::ALL);
        if loader.auth.tokens.iter().any(|other| other.is_same_secret(&token)) {
            let message = "auth: api_token and admin_token are the same: each needs its own";
            return Err(document.error(message));
        }
        loader.auth.tokens.add(token, false);
    }
    for raw in raw.tokens {
        loader.named(raw)?;
    }
    Ok(loader.auth)
}

/// Token as the configuration has it.
struct WrittenToken {
    token: Option<Spanned<Option<String>>>,
    file: Option<Spanned<String>>,
}

struct AuthLoader<'a, 'd> {
    document: &'a Document<'d>,
    folder: &'a Path,
    auth: Auth,
}

impl AuthLoader<'_, '_> {
    /// Loads a token that a variable overrides. The variable with `_FILE` at its end names a file.
    fn short_form(
        &mut self,
        name: &str,
        written: WrittenToken,
        variable: &str,
    ) -> Result<Option<Secret>, ConfigError> {
        let file_field = format!("{name}_file");
        let written = self.written(&format!("auth.{name}"), [name, &file_field], written)?;
        let of_variable = from_environment(variable, &mut self.auth.files);
        let Some(secret) = of_variable.map_err(|error| self.document.error(&error))? else {
            return Ok(written);
        };
        self.warn_if_short(variable, None, &secret);
        Ok(Some(secret))
    }

    /// Adds an entry of `tokens`.
    fn named(&mut self, raw: raw::RawToken) -> Result<(), ConfigError> {
        let document = self.document;
        let name = &raw.name.value;
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=MAX_TOKEN_NAME_BYTES).contains(&name.len()) || !name.bytes().all(is_word) {
            let message = format!(
                "this name is not valid: use at most {MAX_TOKEN_NAME_BYTES} letters, digits and ._-"
            );
            return Err(document.error_at(&raw.name, &message));
        }
        if self.auth.tokens.iter().any(|other| other.name() == name) {
            let message = "another token has this name: each needs its own";
            return Err(document.error_at(&raw.name, message));
        }
        if raw.scopes.value.is_empty() {
            let message = "scopes is empty: list some of acquire, refund, reset and read";
            return Err(document.error_at(&raw.scopes, message));
        }
        let scope = |text: &Spanned<String>| {
            let known = Scope::ALL.into_iter().find(|scope| scope.as_str() == text.value);
            known.ok_or_else(|| {
                document
                    .error_at(text, "unknown scope: the scopes are acquire, refund, reset and read")
            })
        };
        let scopes = raw.scopes.value.iter().map(scope).collect::<Result<Vec<_>, _>>()?;
        let written = WrittenToken { token: raw.token, file: raw.token_file };
        let label = format!("auth.tokens: {name}");
        let Some(secret) = self.written(&label, ["token", "token_file"], written)? else {
            let message = "this entry has no token: add token_file, or token";
            return Err(document.error_at(&raw.name, message));
        };
        let token = Token::new(name, &secret, &scopes);
        if self.auth.tokens.iter().any(|other| other.is_same_secret(&token)) {
            let message = "another entry has the same token: each needs its own";
            return Err(document.error_at(&raw.name, message));
        }
        self.auth.tokens.add(token, true);
        Ok(())
    }

    /// Loads a token from the configuration or its file. `fields` are the names of both.
    fn written(
        &mut self,
        label: &str,
        fields: [&str; 2],
        written: WrittenToken,
    ) -> Result<Option<Secret>, ConfigError> {
        let document = self.document;
        let (secret, line) = match (written.token, written.file) {
            (Some(_), Some(file)) => {
                let [token, in_file] = fields;
                let message = format!("auth has both {token} and {in_file}: remove one of them");
                return Err(document.error_at(&file, &message));
            }
            (None, None) => return Ok(None),
            (Some(token), None) => {
                let line = token.referenced.line();
                (inline(document, token)?, line)
            }
            (None, Some(file)) => {
                let path = self.folder.join(&file.value);
                let secret = Secret::read(&path).map_err(|reason| {
                    document.error_at(&file, &format!("{}: {reason}", tls::shown(&path)))
                })?;
                self.auth.files.push(path);
                (secret, file.referenced.line())
            }
        };
        self.warn_if_short(label, Some(line), &secret);
        Ok(Some(secret))
    }

    fn warn_if_short(&mut self, label: &str, line: Option<u64>, secret: &Secret) {
        if secret.reveal().chars().count() < MIN_TOKEN_CHARS {
            let message = format!(
                "{label}: a token of fewer than {MIN_TOKEN_CHARS} characters can be guessed: use a \
                 random one (openssl rand -hex 16)"
            );
            let file = self.document.name().to_owned();
            self.auth.warnings.push(ConfigWarning { file, line, message });
        }
    }
}

/// Validates a token. An empty one is an error, because it would disable authentication.
fn inline(
    document: &Document<'_>,
    mut written: Spanned<Option<String>>,
) -> Result<Secret, ConfigError> {
    match written.value.take_if(|token| !token.trim().is_empty()) {
        Some(token) => Ok(Secret::new(token)),
        None => Err(document.error_at(
            &written,
            "this token is empty: write one (in quotes, if it starts with a special character), \
             or remove the field",
        )),
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
