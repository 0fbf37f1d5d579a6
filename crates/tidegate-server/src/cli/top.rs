//! `tidegate top`: live view of a running service.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::config::Secret;
use crate::tool::client::{ClientOptions, Trust, read_token};
use crate::top::{self, AdminClient, TopOptions};

const MIN_INTERVAL: Duration = Duration::from_millis(100);
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// Variable with the token, which must not be an argument: all users see those.
const TOKEN_VARIABLE: &str = "TIDEGATE_ADMIN_TOKEN";

/// Show a running service: rates, latency, policies, hot keys, store.
///
/// In a terminal, q ends it, and / looks a key up in every policy: what is left, when it is free,
/// why it is denied. In a pipe, it prints a block of plain text per interval. Exit code: 0, or 2 on
/// an error, such as a service that cannot be reached at the start.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  The service of this host:
    tidegate top

  Another one, over TLS, with the token of its admin listener:
    tidegate top --admin https://tidegate.example.com:8082 --token-file admin-token

  Once, for a ticket or a chat, or as JSON for a script:
    tidegate top --once
    tidegate top --once --json | jq .rates.policies")]
pub(super) struct TopCommand {
    /// URL of the admin listener: http://HOST:PORT, https:// for TLS, or unix:PATH
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN")]
    #[arg(default_value = "http://127.0.0.1:8082")]
    admin: String,

    /// File with the token of the admin listener [default: the variable `TIDEGATE_ADMIN_TOKEN`]
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE")]
    token_file: Option<PathBuf>,

    /// File with the certificates to trust, in place of those of the system
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CA")]
    ca: Option<PathBuf>,

    #[command(flatten)]
    options: TopOptions,
}

impl TopCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let options = self.options;
        ensure!(
            (MIN_INTERVAL..=MAX_INTERVAL).contains(&options.interval),
            "--interval is out of range: it must be from 100ms to 60s"
        );
        ensure!(!options.timeout.is_zero(), "--timeout must be longer than 0");
        let token = self.token()?;
        let client = AdminClient::new(&ClientOptions {
            address: &self.admin,
            token: token.as_ref(),
            trust: Trust::Authorities(self.ca.as_deref()),
            timeout: options.timeout,
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(top::run(client, options));
        // A request without an answer must not delay the exit.
        runtime.shutdown_background();
        result.with_context(|| format!("--admin {}", self.admin))?;
        Ok(ExitCode::SUCCESS)
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
