//! [`SimulationReport`]: the result of a simulation, as tables and as JSON.

use std::io::{self, Write};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use tidegate::Quota;
use tidegate_config::duration::readable;

use super::expect::{CheckedExpectation, Expectation};
use super::log::LineCounts;
use super::run::VariantRun;
use super::series::Series;
use super::tally::{KeyTally, PolicyTally};
use super::what_if::Comparison;
use crate::tool::table::{TextPage, TextTable};
use crate::tool::text::{grouped, printable};
use tidegate_api::duration;

/// Maximum number of policies whose heaviest keys the tables show; JSON has all.
const MAX_KEY_TABLES: usize = 5;
/// Maximum number of characters of a key in a table.
pub(crate) const MAX_KEY_CHARACTERS: usize = 60;

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
    pub(super) expectations: Vec<CheckedExpectation>,
}

impl SimulationReport {
    /// Compares the counts with expectations: those of the new configuration in a comparison,
    /// otherwise those of all. Returns whether all hold.
    pub fn expect(&mut self, expectations: &[Expectation]) -> anyhow::Result<bool> {
        let first = usize::from(self.comparison.is_some());
        let runs = &self.runs[first..];
        let checked = runs.iter().flat_map(|run| expectations.iter().map(|it| it.check(self, run)));
        self.expectations = checked.collect::<anyhow::Result<_>>()?;
        Ok(self.expectations.iter().all(|it| it.holds))
    }

    /// Returns the expectations that fail, as lines.
    pub fn failures(&self) -> impl Iterator<Item = String> {
        self.expectations.iter().filter(|it| !it.holds).map(ToString::to_string)
    }

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

    /// Writes the tables, with this number of keys in each.
    pub fn write(&self, page: &mut TextPage<'_>, top: usize) -> io::Result<()> {
        self.write_traffic(page)?;
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
                (counts.retries, "of them sent again after a denial"),
                (counts.abandoned, "given up"),
            ] {
                if count > 0 {
                    line.extend([", ", &grouped(count), " ", words]);
                }
            }
            page.line(&line)?;
            for example in &counts.error_examples {
                page.line(&format!("  not decided: {example}"))?;
            }
        }
        for expectation in &self.expectations {
            page.line(&expectation.to_string())?;
        }
        page.table("", &self.policies())?;
        let tallies = self.runs.iter().flat_map(|run| &run.counts.policies);
        if tallies.into_iter().any(|tally| tally.quota.is_concurrency()) {
            let reason = "the ends of the requests are not known";
            page.line(&format!("Units in flight are released at once, because {reason}."))?;
        }
        self.write_heaviest_keys(page, top)?;
        self.write_comparison(page, top)
    }

    fn write_traffic(&self, page: &mut TextPage<'_>) -> io::Result<()> {
        let traffic = &self.traffic;
        let (first, last) = traffic.times.unwrap_or_default();
        page.heading(&format!(
            "{} requests in {}, {} to {}",
            grouped(traffic.requests),
            readable(Duration::from_micros(last - first)),
            utc(first),
            utc(last)
        ))?;
        if let Some(lines) = &traffic.lines {
            write_lines(page, lines)?;
        }
        if !traffic.ignored_columns.is_empty() {
            let columns = traffic.ignored_columns.join(", ");
            page.line(&format!("columns that are not attributes: {columns}"))?;
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

    fn write_heaviest_keys(&self, page: &mut TextPage<'_>, top: usize) -> io::Result<()> {
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
            for (key, heavy) in tally.heaviest_keys(top) {
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
            page.table(&format!("keys of {}, most denials first", tally.name), &table)?;
        }
        Ok(())
    }

    fn write_comparison(&self, page: &mut TextPage<'_>, top: usize) -> io::Result<()> {
        let (Some(comparison), [current, other, ..]) = (&self.comparison, self.runs.as_slice())
        else {
            return Ok(());
        };
        page.heading(&format!("With {} instead of {}", other.name, current.name))?;
        page.line(&format!(
            "{} requests of {} keys would newly be denied, {} newly admitted",
            grouped(comparison.newly_denied),
            grouped(comparison.keys.len() as u64),
            grouped(comparison.newly_admitted)
        ))?;
        if comparison.other_errors > 0 {
            let count = grouped(comparison.other_errors);
            page.line(&format!("{count} requests can be decided with only one of them"))?;
        }
        let mut table = TextTable::new(&["policy", "key", "first", "last"], &["newly denied"]);
        for (policy, key, denials) in comparison.heaviest_keys().into_iter().take(top) {
            table.add([
                policy.to_owned(),
                shown(&key_of(other, policy, key), MAX_KEY_CHARACTERS),
                utc(denials.first),
                utc(denials.last),
                grouped(denials.requests),
            ]);
        }
        page.table("", &table)
    }

    /// Writes the counts of all keys as CSV.
    pub fn write_keys(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "variant,policy,key,requests,admitted,denied,newly_denied")?;
        for (number, run) in self.runs.iter().enumerate() {
            let comparison = self.comparison.as_ref().filter(|_| number == 1);
            for tally in &run.counts.policies {
                for (key, counts) in tally.heaviest_keys(usize::MAX) {
                    let newly_denied = comparison.map_or_else(String::new, |comparison| {
                        let name = (tally.name.clone(), key.clone());
                        comparison.keys.get(&name).map_or(0, |it| it.requests).to_string()
                    });
                    let [variant, policy, key] =
                        [&run.name, &tally.name, &tally.shown(key)].map(|text| quoted(text));
                    let KeyTally { requests, admitted, denied, .. } = counts;
                    writeln!(
                        output,
                        "{variant},{policy},{key},{requests},{admitted},{denied},{newly_denied}"
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Returns the result as one JSON object.
    pub fn to_json(&self, top: usize) -> Value {
        let (first, last) = self.traffic.times.unwrap_or_default();
        let mut report = json!({
            "requests": self.traffic.requests,
            "start": utc(first),
            "end": utc(last),
            "variants": self.runs.iter().map(|run| run_json(run, top)).collect::<Vec<_>>(),
        });
        if let Some(lines) = &self.traffic.lines {
            report["lines"] = lines_json(lines);
            report["lines"]["ignored_columns"] = json!(self.traffic.ignored_columns);
        }
        if let (Some(comparison), [_, other, ..]) = (&self.comparison, self.runs.as_slice()) {
            let key = |(policy, key, denials): (&str, &str, super::what_if::NewDenials)| {
                json!({
                    "policy": policy,
                    "key": key_of(other, policy, key),
                    "newly_denied": denials.requests,
                    "first": utc(denials.first),
                    "last": utc(denials.last),
                })
            };
            let keys = comparison.heaviest_keys().into_iter().map(key);
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
        if !self.expectations.is_empty() {
            let expectation = |it: &CheckedExpectation| {
                json!({
                    "expect": it.text,
                    "variant": it.variant,
                    "holds": it.holds,
                    "found": it.found,
                })
            };
            report["expectations"] = self.expectations.iter().map(expectation).collect();
        }
        report
    }
}

/// Writes the counts of the lines, and some bad ones.
pub(crate) fn write_lines(page: &mut TextPage<'_>, lines: &LineCounts) -> io::Result<()> {
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
    page.line(&parts.join(", "))?;
    for example in &lines.examples {
        page.line(&format!("  bad line {example}"))?;
    }
    Ok(())
}

pub(crate) fn lines_json(lines: &LineCounts) -> Value {
    json!({
        "read": lines.lines,
        "bad": lines.bad,
        "bad_examples": lines.examples,
        "not_http": lines.not_http,
        "left_out": lines.left_out,
        "reordered": lines.reordered,
        "late": lines.late,
    })
}

/// Quotes a field of CSV, if it needs that. Spreadsheets would run `=…` and the like as a formula.
fn quoted(text: &str) -> String {
    if text.starts_with(['=', '+', '-', '@', '\t', '\r']) {
        return quoted(&format!("'{text}"));
    }
    let is_plain = !text.contains([',', '"', '\r', '\n']);
    if is_plain { text.to_owned() } else { format!("\"{}\"", text.replace('"', "\"\"")) }
}

fn run_json(run: &VariantRun, top: usize) -> Value {
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
        "retries": counts.retries,
        "abandoned": counts.abandoned,
        "policies": counts.policies.iter().map(|tally| policy_json(tally, top)).collect::<Vec<_>>(),
        "over_time": counts.series.as_ref().map(series_json),
    })
}

fn policy_json(tally: &PolicyTally, top: usize) -> Value {
    let heavy = tally.heaviest_keys(top).into_iter().map(|(key, heavy)| {
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

/// Returns a key as operators see it.
fn key_of(run: &VariantRun, policy: &str, key: &str) -> String {
    match tally_of(run, policy) {
        _ if key.is_empty() => "(missing)".to_owned(),
        Some(tally) => tally.shown(key),
        None => key.to_owned(),
    }
}

/// Returns a text for a terminal: without control characters, and not longer than a line.
pub(crate) fn shown(text: &str, max_characters: usize) -> String {
    match text.char_indices().nth(max_characters) {
        Some((end, _)) => printable(&text[..end]) + "…",
        None => printable(text),
    }
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
pub(crate) fn utc(micros: u64) -> String {
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
pub(crate) fn percent(part: u64, whole: u64) -> String {
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
