//! `tidegate fleet`: all instances that share the store of a running service.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use serde_json::Value;

use super::admin::AnswerFlags;
use crate::tool::table::TextTable;
use crate::tool::text::printable;
use crate::tool::{output, style};
use crate::top::text::{duration, rate};

/// Show all instances that share the store of a running service, and what differs between them.
///
/// Exit code: 0, 1 if versions or configurations differ or not all instances are known, or 2 on an
/// error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  By any of the instances:
    tidegate fleet --admin https://tidegate.example.com:8082

  After a roll-out: wait until all instances have the new file:
    until tidegate fleet; do sleep 5; done

  The instances that differ, and in what:
    tidegate fleet --json | jq '.instances[] | select(.differs != []) | {name, changes}'")]
pub struct FleetCommand {
    #[command(flatten)]
    answer: AnswerFlags,
}

impl FleetCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let answer = self.answer;
        let fleet = answer.ask(async |client| client.get_json("/v1/fleet").await)?;
        output::print(answer.json_of(&fleet), |output| write(output, &fleet))?;
        let is_like_others = |instance: &Value| {
            instance["name"].is_string() && texts(&instance["differs"]).is_empty()
        };
        let is_whole = fleet["error"].is_null() && instances(&fleet).all(is_like_others);
        Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn write(output: &mut dyn Write, fleet: &Value) -> io::Result<()> {
    let now_ms = fleet["now_ms"].as_u64().unwrap_or_default();
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let number = |value: &Value| rate(value.as_f64().unwrap_or_default());
    let columns = ["instance", "version", "configuration", "store", "differs in"];
    let mut table = TextTable::new(&columns, &["up", "allowed/s", "denied/s"]);
    for instance in instances(fleet) {
        let is_known = instance["name"].is_string();
        let name = if is_known { text(&instance["name"]) } else { "(not known)".to_owned() };
        let state = match (instance["fallback"] == true, instance["store_up"] == true) {
            _ if !is_known => "",
            (true, _) => "fallback",
            (false, true) => "up",
            (false, false) => "DOWN",
        };
        let started_at = instance["started_at_ms"].as_u64().filter(|at| *at > 0);
        table.add([
            name,
            text(&instance["version"]),
            text(&instance["config_hash"]),
            state.to_owned(),
            texts(&instance["differs"]).join(", "),
            started_at.map(|at| duration(now_ms.saturating_sub(at))).unwrap_or_default(),
            number(&instance["allowed"]),
            number(&instance["denied"]),
        ]);
    }
    table.write(output)?;
    if let Some(error) = fleet["error"].as_str() {
        let (style, reset) = (style::WARNING, style::RESET);
        writeln!(output, "{style}only this instance is known:{reset} {}", printable(error))?;
    }
    let (warning, reset) = (style::WARNING, style::RESET);
    for instance in instances(fleet) {
        let name = text(&instance["name"]);
        for change in instance["changes"].as_array().into_iter().flatten() {
            writeln!(output, "{warning}{name}{reset} {}", text(&change["text"]))?;
        }
        let pending = texts(&instance["restart_pending"]).join(", ");
        if !pending.is_empty() {
            writeln!(output, "{warning}{name}{reset} restart pending: {}", printable(&pending))?;
        }
        if instance["reload_failed"] == true {
            writeln!(output, "{warning}{name}{reset} its last reload failed")?;
        }
    }
    Ok(())
}

fn instances(fleet: &Value) -> impl Iterator<Item = &Value> {
    fleet["instances"].as_array().into_iter().flatten()
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}
