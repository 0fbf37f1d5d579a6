//! Flags of the commands that ask the admin listener of a running service.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use serde_json::Value;
use tidegate_config::{Secret, duration};

use crate::tool::client::{ClientOptions, Trust, read_token};
use crate::top::AdminClient;
use crate::top::text::printable_json;

/// Variable with the token, which must not be an argument: all users see those.
const TOKEN_VARIABLE: &str = "TIDEGATE_ADMIN_TOKEN";

/// Address of the service.
#[derive(Debug, Args)]
pub struct AdminFlags {
    /// URL of the admin listener: http://HOST:PORT, https:// for TLS, or unix:PATH
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN", global = true)]
    #[arg(default_value = "http://127.0.0.1:8082")]
    pub admin: String,

    /// File with the token of the admin listener [default: the variable `TIDEGATE_ADMIN_TOKEN`]
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE", global = true)]
    token_file: Option<PathBuf>,

    /// File with the certificates to trust, in place of those of the system
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CA", global = true)]
    ca: Option<PathBuf>,
}

/// Flags of a command with one answer.
#[derive(Debug, Args)]
pub struct AnswerFlags {
    #[command(flatten)]
    admin: AdminFlags,

    /// Timeout of a request
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT")]
    #[arg(default_value = "5s", value_parser = duration::parse)]
    timeout: Duration,

    /// Print the answer of the service as JSON
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

impl AdminFlags {
    /// Returns a client of the service.
    pub(crate) fn client(&self, timeout: Duration) -> anyhow::Result<AdminClient> {
        ensure!(!timeout.is_zero(), "--timeout must be longer than 0");
        let token = self.token()?;
        AdminClient::new(&ClientOptions {
            address: &self.admin,
            token: token.as_ref(),
            trust: Trust::Authorities(self.ca.as_deref()),
            timeout,
        })
    }

    fn token(&self) -> anyhow::Result<Option<Secret>> {
        if let Some(file) = &self.token_file {
            return read_token(file).map(Some);
        }
        match std::env::var(TOKEN_VARIABLE) {
            Ok(token) if !token.is_empty() => Ok(Some(Secret::new(token))),
            Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
            Err(_) => anyhow::bail!("{TOKEN_VARIABLE} is not UTF-8"),
        }
    }
}

impl AnswerFlags {
    /// Returns an answer as JSON that is safe for a terminal, with --json.
    pub(super) fn json_of(&self, answer: &Value) -> Option<String> {
        self.json.then(|| printable_json(&answer.to_string()))
    }

    /// Asks the service.
    pub(super) fn ask(
        &self,
        ask: impl AsyncFnOnce(&AdminClient) -> anyhow::Result<Value>,
    ) -> anyhow::Result<Value> {
        let client = self.admin.client(self.timeout)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = runtime.block_on(ask(&client));
        // A request without an answer must not delay the exit.
        runtime.shutdown_background();
        answer.with_context(|| format!("--admin {}", self.admin.admin))
    }
}
