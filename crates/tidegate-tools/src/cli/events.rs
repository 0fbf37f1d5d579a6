//! `tidegate events`: what happened lately to the instances of a running service.

use std::process::ExitCode;

use clap::Args;
use clap::builder::FalseyValueParser;
use jiff::Timestamp;
use serde_json::Value;

use super::admin::AnswerFlags;
use crate::tool::text::printable;
use crate::tool::{output, style};

/// Show what happened lately to a running service and all instances that share its store.
///
/// Starts and stops, reloads with what they changed, failovers, outages of the store, resets, and
/// the first and last denials of hot keys; the newest last. Times are in UTC. Exit code: 0, or 2 on
/// an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  What changed, and since when:
    tidegate events
    tidegate events --limit 1000 | grep reloaded

  Only the instance that is asked, as JSON:
    tidegate events --this-instance --json | jq '.events[].text'")]
pub struct EventsCommand {
    /// Number of events, at most 1000
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000))]
    limit: u64,

    /// Only the events of the instance that is asked
    #[arg(long, env = "TIDEGATE_THIS_INSTANCE", value_parser = FalseyValueParser::new())]
    this_instance: bool,

    #[command(flatten)]
    answer: AnswerFlags,
}

impl EventsCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { limit, this_instance, answer } = self;
        let scope = if this_instance { "instance" } else { "fleet" };
        let path = format!("/v1/events?limit={limit}&scope={scope}");
        let body = answer.ask(async |client| client.get_json(&path).await)?;
        output::print(answer.json_of(&body), |output| {
            let events = body["events"].as_array().into_iter().flatten();
            let text = |value: &Value| printable(value.as_str().unwrap_or_default());
            for event in events.rev() {
                let at =
                    event["at_ms"].as_i64().and_then(|ms| Timestamp::from_millisecond(ms).ok());
                let at = at.unwrap_or_default().strftime("%Y-%m-%d %H:%M:%S");
                let (instance, what) = (text(&event["instance"]), text(&event["text"]));
                writeln!(output, "{at}  {}{instance}{}  {what}", style::NOTE, style::RESET)?;
            }
            match body["error"].as_str() {
                None => Ok(()),
                Some(error) => {
                    let (style, reset) = (style::WARNING, style::RESET);
                    let error = printable(error);
                    writeln!(output, "{style}only events of this instance:{reset} {error}")
                }
            }
        })?;
        Ok(ExitCode::SUCCESS)
    }
}
