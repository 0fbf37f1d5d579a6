//! `tidegate lookup`: the state of a key in a running service.

use std::process::ExitCode;

use clap::Args;

use super::admin::AnswerFlags;
use crate::top;

/// Show the state of a key in every policy of a running service, without a charge.
///
/// The remaining units, when it is free, why it is denied, and which instance denied it last. Exit
/// code: 0, or 2 on an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A user, an address or the hash of a key, as the hot keys show it:
    tidegate lookup user123
    tidegate lookup 203.0.113.9 --policy per-ip
    tidegate lookup sha256:ba7816bf8f01cfea

  For a script:
    tidegate lookup user123 --json | jq .denied")]
pub struct LookupCommand {
    /// Key, or its hash
    key: String,

    /// Only this policy
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY")]
    policy: Option<String>,

    #[command(flatten)]
    answer: AnswerFlags,
}

impl LookupCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { key, policy, answer } = self;
        let body = answer.ask(async |client| client.lookup_json(&key, policy.as_deref()).await)?;
        top::print_lookup(&body, answer.json_of(&body))?;
        Ok(ExitCode::SUCCESS)
    }
}
