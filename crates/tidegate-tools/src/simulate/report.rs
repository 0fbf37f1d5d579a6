//! [`SimulationReport`]: the result of a simulation, as tables and as JSON.

use std::io::{self, Write};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use tidegate::Quota;
use tidegate_config::duration::readable;

use super::log::LineCounts;
use super::run::VariantRun;
use super::series::Series;
use super::tally::{HEAVIEST_KEYS, PolicyTally};
use super::what_if::Comparison;
use crate::tool::style;
use crate::tool::table::TextTable;
use crate::tool::text::grouped;
use tidegate_api::duration;

/// Maximum number of policies whose heaviest keys the tables show; JSON has all.
const MAX_KEY_TABLES: usize = 5;
/// Maximum number of characters of a key in a table.
const MAX_KEY_CHARACTERS: usize = 60;

/// Facts about the traffic.
#[derive(Debug, Default)]
pub struct TrafficSummary {
    pub requests: u64,
    /// Times of the first and the last request.
    pub times: Option<(u64, u64)>,
    /// Start and end of generated traffic.
    pub generated: Option<(u64, u64)>,
    /// Counts of the lines of access logs.
    pub lines: Option<LineCounts>,
    /// Columns that are not attributes.
    pub ignored_columns: Vec<String>,
}

impl TrafficSummary {
    /// Returns the start and end of the traffic.
    pub(super) fn period(&self) -> (u64, u64) {
        self.generated.or(self.times).unwrap_or_default()
    }

    pub fn count(&mut self, time: u64) {
        self.requests += 1;
        let first = self.times.map_or(time, |(first, _)| first);
        self.times = Some((first, time));
    }
}

/// Result of a simulation.
pub struct SimulationReport {
    pub(super) runs: Vec<VariantRun>,
    pub(super) comparison: Option<Comparison>,
    pub(super) traffic: TrafficSummary,
}

impl SimulationReport {
    /// Returns whether no policy of a configuration applied to any request, with its name.
    pub fn unmatched(&self) -> Option<&str> {
        let is_unmatched = |run: &&VariantRun| run.counts.unlimited == run.counts.requests;
        self.runs.iter().find(is_unmatched).map(|run| run.name.as_str())
    }

    /// Returns the first error, if no request could be decided.
    pub fn undecided(&self) -> Option<&str> {
        let is_undecided = |run: &&VariantRun| run.counts.errors == run.counts.requests;
        let run = self.runs.iter().find(is_undecided)?;
        run.counts.error_examples.first().map(String::as_str)
    }

    /// Writes the tables.
    pub fn write(&self, output: &mut dyn Write) -> io::Result<()> {
        self.write_traffic(output)?;
        for run in &self.runs {
            let counts = &run.counts;
            let of_requests = |part| percent(part, counts.requests);
            let name = if self.runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
            let mut line = format!(
                "{name}{} admitted, {} denied ({})",
                grouped(counts.admitted),
                grouped(counts.denied),
                of_requests(counts.denied)
            );
            for (count, words) in [
                (counts.shadow_denied, "denied only in shadow mode"),
                (counts.unlimited, "without a policy"),
                (counts.errors, "not decided"),
            ] {
                if count > 0 {
                    line.extend([", ", &grouped(count), " ", words]);
                }
            }
            writeln!(output, "{line}")?;
            for example in &counts.error_examples {
                writeln!(output, "  not decided: {example}")?;
            }
        }
        writeln!(output)?;
        self.policies().write(output)?;
        let tallies = self.runs.iter().flat_map(|run| &run.counts.policies);
        if tallies.into_iter().any(|tally| tally.quota.is_concurrency()) {
            let reason = "the ends of the requests are not known";
            writeln!(output, "Units in flight are released at once, because {reason}.")?;
        }
        self.write_heaviest_keys(output)?;
        self.write_comparison(output)
    }

    fn write_traffic(&self, output: &mut dyn Write) -> io::Result<()> {
        let traffic = &self.traffic;
        let (first, last) = traffic.times.unwrap_or_default();
        writeln!(
            output,
            "{}{} requests{} in {}, {} to {}",
            style::HEADING,
            grouped(traffic.requests),
            style::RESET,
            readable(Duration::from_micros(last - first)),
            utc(first),
            utc(last)
        )?;
        if let Some(lines) = &traffic.lines {
            let mut parts = vec![format!("{} lines", grouped(lines.lines))];
            for (count, words) in [
                (lines.bad, "bad"),
                (lines.not_http, "not HTTP, such as TLS sent to a plain port"),
                (lines.left_out, "left out"),
                (lines.reordered, "sorted into their place"),
                (lines.late, "too late for that"),
            ] {
                if count > 0 {
                    parts.push(format!("{} {words}", grouped(count)));
                }
            }
            writeln!(output, "{}", parts.join(", "))?;
            for example in &lines.examples {
                writeln!(output, "  bad line {example}")?;
            }
        }
        if !traffic.ignored_columns.is_empty() {
            let columns = traffic.ignored_columns.join(", ");
            writeln!(output, "columns that are not attributes: {columns}")?;
        }
        Ok(())
    }

    /// Returns the table of all policies.
    fn policies(&self) -> TextTable {
        let mut table = TextTable::new(
            &["", "policy", "algorithm", "limit"],
            &[
                "requests",
                "admitted",
                "denied",
                "worst window",
                "over",
                "under",
                "keys",
                "denied keys",
                "memory",
            ],
        );
        for run in &self.runs {
            for tally in &run.counts.policies {
                let worst = tally.worst.as_ref().map_or_else(
                    || "-".to_owned(),
                    |worst| {
                        let part = percent(worst.units, worst.limit);
                        format!("{} ({part})", grouped(worst.units))
                    },
                );
                let algorithm = tally.quota.algorithm().as_str();
                // Variants of one algorithm each have its name.
                let is_named = self.runs.len() > 1 && run.name != algorithm;
                let shadow = if tally.is_shadow { " (shadow)" } else { "" };
                table.add([
                    if is_named { run.name.clone() } else { String::new() },
                    format!("{}{shadow}", tally.name),
                    algorithm.to_owned(),
                    limit(&tally.quota),
                    grouped(tally.requests),
                    grouped(tally.admitted),
                    grouped(tally.denied),
                    worst,
                    grouped(tally.over),
                    grouped(tally.under),
                    grouped(tally.keys.len() as u64),
                    grouped(tally.denied_keys() as u64),
                    bytes(tally.memory_bytes()),
                ]);
            }
        }
        table
    }

    fn write_heaviest_keys(&self, output: &mut dyn Write) -> io::Result<()> {
        let [first, ..] = self.runs.as_slice() else { return Ok(()) };
        let used = first.counts.policies.iter().filter(|tally| tally.requests > 0);
        for tally in used.take(MAX_KEY_TABLES) {
            let others: Vec<(&str, Option<&PolicyTally>)> = self.runs[1..]
                .iter()
                .map(|run| (run.name.as_str(), tally_of(run, &tally.name)))
                .collect();
            let mut numbers = vec!["requests".to_owned()];
            if others.is_empty() {
                numbers.extend(["admitted".to_owned(), "denied".to_owned()]);
            } else {
                let names = std::iter::once(first.name.as_str());
                let names = names.chain(others.iter().map(|(name, _)| *name));
                numbers.extend(names.map(|name| format!("denied: {name}")));
            }
            let mut table = TextTable::new(&["key"], &numbers);
            for (key, heavy) in tally.heaviest_keys() {
                let shown = shown(&tally.shown(key), MAX_KEY_CHARACTERS);
                let mut row = vec![shown, grouped(heavy.requests)];
                if others.is_empty() {
                    row.push(grouped(heavy.admitted));
                }
                row.push(grouped(heavy.denied));
                let denied = |tally: &PolicyTally| {
                    grouped(tally.keys.get(key).map_or(0, |tally| tally.denied))
                };
                row.extend(
                    others.iter().map(|(_, tally)| tally.map_or_else(|| "-".to_owned(), denied)),
                );
                table.add(row);
            }
            writeln!(output)?;
            let (bold, reset) = (style::HEADING, style::RESET);
            writeln!(output, "{bold}heaviest keys of {}{reset}", tally.name)?;
            table.write(output)?;
        }
        Ok(())
    }

    fn write_comparison(&self, output: &mut dyn Write) -> io::Result<()> {
        let (Some(comparison), [current, other, ..]) = (&self.comparison, self.runs.as_slice())
        else {
            return Ok(());
        };
        let (bold, reset) = (style::HEADING, style::RESET);
        writeln!(output)?;
        writeln!(output, "{bold}With {} instead of {}{reset}", other.name, current.name)?;
        writeln!(
            output,
            "{} requests of {} keys would newly be denied, {} newly admitted",
            grouped(comparison.newly_denied),
            grouped(comparison.keys.len() as u64),
            grouped(comparison.newly_admitted)
        )?;
        if comparison.other_errors > 0 {
            let count = grouped(comparison.other_errors);
            writeln!(output, "{count} requests can be decided with only one of them")?;
        }
        let mut table = TextTable::new(&["policy", "key", "first", "last"], &["newly denied"]);
        for (policy, key, denials) in comparison.heaviest_keys(HEAVIEST_KEYS) {
            table.add([
                policy.to_owned(),
                shown_key(other, policy, key),
                utc(denials.first),
                utc(denials.last),
                grouped(denials.requests),
            ]);
        }
        table.write(output)
    }

    /// Returns the result as one JSON object.
    pub fn to_json(&self) -> Value {
        let (first, last) = self.traffic.times.unwrap_or_default();
        let mut report = json!({
            "requests": self.traffic.requests,
            "start": utc(first),
            "end": utc(last),
            "variants": self.runs.iter().map(run_json).collect::<Vec<_>>(),
        });
        if let Some(lines) = &self.traffic.lines {
            report["lines"] = json!({
                "read": lines.lines,
                "bad": lines.bad,
                "bad_examples": lines.examples,
                "not_http": lines.not_http,
                "left_out": lines.left_out,
                "reordered": lines.reordered,
                "late": lines.late,
                "ignored_columns": self.traffic.ignored_columns,
            });
        }
        if let (Some(comparison), [_, other, ..]) = (&self.comparison, self.runs.as_slice()) {
            let key = |(policy, key, denials): (&str, &str, super::what_if::NewDenials)| {
                json!({
                    "policy": policy,
                    "key": shown_key(other, policy, key),
                    "newly_denied": denials.requests,
                    "first": utc(denials.first),
                    "last": utc(denials.last),
                })
            };
            let keys = comparison.heaviest_keys(HEAVIEST_KEYS).into_iter().map(key);
            report["what_if"] = json!({
                "newly_denied": comparison.newly_denied,
                "newly_admitted": comparison.newly_admitted,
                "keys": comparison.keys.len(),
                "heaviest_keys": keys.collect::<Vec<_>>(),
                "newly_denied_over_time": comparison.series.as_ref().map(|series| json!({
                    "start": utc(series.start),
                    "bin_ms": millis(series.width),
                    "requests": series.bins.iter().map(|bin| bin.denied).collect::<Vec<_>>(),
                })),
            });
        }
        report
    }
}

fn run_json(run: &VariantRun) -> Value {
    let counts = &run.counts;
    json!({
        "name": run.name,
        "requests": counts.requests,
        "admitted": counts.admitted,
        "denied": counts.denied,
        "shadow_denied": counts.shadow_denied,
        "without_policy": counts.unlimited,
        "undecided": counts.errors,
        "undecided_examples": counts.error_examples,
        "policies": counts.policies.iter().map(policy_json).collect::<Vec<_>>(),
        "over_time": counts.series.as_ref().map(series_json),
    })
}

fn policy_json(tally: &PolicyTally) -> Value {
    let heavy = tally.heaviest_keys().into_iter().map(|(key, heavy)| {
        json!({
            "key": tally.shown(key),
            "requests": heavy.requests,
            "admitted": heavy.admitted,
            "denied": heavy.denied,
        })
    });
    let worst = tally.worst.as_ref().map(|worst| {
        json!({
            "units": worst.units,
            "limit": worst.limit,
            "key": tally.shown(&worst.key),
            "end": utc(worst.time),
        })
    });
    json!({
        "name": tally.name,
        "mode": if tally.is_shadow { "shadow" } else { "enforce" },
        "algorithm": tally.quota.algorithm().as_str(),
        "limit": tally.quota.limit(),
        "window_ms": (!tally.quota.is_concurrency())
            .then(|| millis(duration::micros(tally.quota.window()))),
        "calendar": tally.quota.calendar().map(ToString::to_string),
        "burst": tally.quota.burst(),
        "requests": tally.requests,
        "admitted": tally.admitted,
        "admitted_units": tally.admitted_units,
        "denied": tally.denied,
        "worst_window": worst,
        "over_admitted": tally.over,
        "over_admitted_units": tally.over_units,
        "under_admitted": tally.under,
        "under_admitted_units": tally.under_units,
        "keys": tally.keys.len(),
        "denied_keys": tally.denied_keys(),
        "heaviest_keys": heavy.collect::<Vec<_>>(),
        "peak_keys": tally.live_keys.peak,
        "peak_log_entries": tally.live_entries.peak,
        "memory_bytes": tally.memory_bytes(),
        "over_time": series_json(&tally.series),
    })
}

fn series_json(series: &Series) -> Value {
    let bins = &series.bins;
    json!({
        "start": utc(series.start),
        "bin_ms": millis(series.width),
        "admitted": bins.iter().map(|bin| bin.admitted).collect::<Vec<_>>(),
        "denied": bins.iter().map(|bin| bin.denied).collect::<Vec<_>>(),
    })
}

pub(super) fn tally_of<'r>(run: &'r VariantRun, policy: &str) -> Option<&'r PolicyTally> {
    run.counts.policies.iter().find(|tally| tally.name == policy)
}

fn shown_key(run: &VariantRun, policy: &str, key: &str) -> String {
    if key.is_empty() {
        return "(missing)".to_owned();
    }
    let plain = || key.to_owned();
    let key = tally_of(run, policy).map_or_else(plain, |tally| tally.shown(key));
    shown(&key, MAX_KEY_CHARACTERS)
}

/// Returns a text for a terminal: without control characters, and not longer than a line.
pub(super) fn shown(text: &str, max_characters: usize) -> String {
    let escaped: String = text.chars().take(max_characters).flat_map(char::escape_debug).collect();
    if text.chars().nth(max_characters).is_some() { escaped + "…" } else { escaped }
}

pub(super) fn limit(quota: &Quota) -> String {
    if quota.is_concurrency() {
        return format!("{} in flight", grouped(quota.limit()));
    }
    let window = match quota.calendar() {
        Some(calendar) => calendar.to_string(),
        None => readable(quota.window()),
    };
    let burst = match quota.burst() {
        burst if burst == quota.limit() => String::new(),
        burst => format!(", burst {}", grouped(burst)),
    };
    format!("{} per {window}{burst}", grouped(quota.limit()))
}

/// Formats a time in microseconds since the Unix epoch.
pub(super) fn utc(micros: u64) -> String {
    let time = i64::try_from(micros).ok().and_then(|time| Timestamp::from_microsecond(time).ok());
    time.unwrap_or(Timestamp::MAX).strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string()
}

fn millis(micros: u64) -> Value {
    if micros.is_multiple_of(1_000) {
        return json!(micros / 1_000);
    }
    json!(Duration::from_micros(micros).as_secs_f64() * 1_000.0)
}

/// Formats a part with one decimal, rounded down, except that a part above zero is not 0.0 %.
fn percent(part: u64, whole: u64) -> String {
    let thousandths = u128::from(part) * 1_000 / u128::from(whole.max(1));
    if thousandths == 0 && part > 0 {
        return "< 0.1 %".to_owned();
    }
    format!("{}.{} %", thousandths / 10, thousandths % 10)
}

fn bytes(bytes: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match units.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{}.{} {unit}", bytes / size, bytes % size * 10 / size),
        None => format!("{bytes} B"),
    }
}
