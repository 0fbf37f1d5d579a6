//! `tidegate top`: live view of a running service.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;

use super::admin::AdminFlags;
use crate::top::{self, TopOptions};

const MIN_INTERVAL: Duration = Duration::from_millis(100);
const MAX_INTERVAL: Duration = Duration::from_secs(60);

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
pub struct TopCommand {
    #[command(flatten)]
    admin: AdminFlags,

    #[command(flatten)]
    options: TopOptions,
}

impl TopCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let options = self.options;
        ensure!(
            (MIN_INTERVAL..=MAX_INTERVAL).contains(&options.interval),
            "--interval is out of range: it must be from 100ms to 60s"
        );
        let client = self.admin.client(options.timeout)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(top::run(client, options));
        // A request without an answer must not delay the exit.
        runtime.shutdown_background();
        result.with_context(|| format!("--admin {}", self.admin.admin))?;
        Ok(ExitCode::SUCCESS)
    }
}
