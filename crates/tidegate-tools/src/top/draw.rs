//! Lines of the view, for a terminal of any size and for a pipe.

use std::fmt::Write as _;

use clap::builder::styling::Style;

use super::data::{FleetRows, RateSample, ReportedPercentiles, View};
use super::line::{DIM, PLAIN, ScreenLine};
use super::sections;
use super::text;
use crate::tool::style;
use crate::tool::text::grouped;

/// Size of what is drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) columns: usize,
    pub(super) rows: usize,
}

/// Height from which a terminal has room for the lines that matter less.
const TALL_ROWS: usize = 16;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns the lines for a terminal, at most as many as it has. The last line is the footer.
pub(super) fn screen(
    view: &View,
    samples: usize,
    size: Size,
    body: Option<&[ScreenLine]>,
    footer: ScreenLine,
) -> Vec<ScreenLine> {
    let mean = view.mean(samples);
    let is_tall = size.rows >= TALL_ROWS;
    let mut lines = head(view, &mean, size.columns, is_tall);
    if is_tall {
        lines.extend(trend(view, size.columns));
        lines.push(ScreenLine::default());
    }
    let left = size.rows.saturating_sub(lines.len() + 1);
    match body {
        Some(body) => lines.extend(body.iter().take(left).cloned()),
        None => lines.extend(sections::fitted(view, &mean, size.columns, left)),
    }
    lines.truncate(size.rows.saturating_sub(1));
    while lines.len() + 1 < size.rows {
        lines.push(ScreenLine::default());
    }
    lines.push(footer);
    lines
}

/// Returns the lines for a pipe.
pub(super) fn block(view: &View, samples: usize, columns: usize) -> Vec<ScreenLine> {
    let mean = view.mean(samples);
    let mut lines = head(view, &mean, columns, true);
    lines.extend(sections::all(view, &mean, columns));
    lines
}

fn head(view: &View, mean: &RateSample, columns: usize, is_tall: bool) -> Vec<ScreenLine> {
    let mut lines = vec![title(view, columns)];
    if let Some(error) = &view.lost {
        let message = format!("connection lost, retrying: {error}");
        lines.push(ScreenLine::default().with(style::ERROR, &message));
    }
    lines.push(store(view, columns));
    let last = &view.status.reload;
    let is_reload_wrong = last.ok == Some(false) || !last.restart_pending.is_empty();
    if is_tall || is_reload_wrong {
        lines.push(reload(view, columns));
    }
    lines.push(requests(mean, columns));
    lines.extend(view.fleet.as_ref().map(|fleet| fleet_line(fleet, columns)));
    lines.push(latency(mean, columns));
    if is_tall && !mean.sources.values().all(|rate| *rate <= 0.0) {
        lines.push(sources(mean, columns));
    }
    lines
}

fn title(view: &View, columns: usize) -> ScreenLine {
    let status = &view.status;
    let items = [
        (PLAIN, view.instance().to_owned()),
        (PLAIN, format!("up {}", text::duration(view.uptime_ms()))),
        (DIM, text::time_of_day(view.now_ms())),
    ];
    ScreenLine::labelled(&format!("tidegate {}", status.version)).items(&items, columns)
}

fn store(view: &View, columns: usize) -> ScreenLine {
    let store = &view.status.store;
    let part = store.health.as_ref().filter(|health| health.state == "partly-down");
    let (state_style, state) = match (store.up, part) {
        (true, _) => (style::ALLOWED, "up".to_owned()),
        (false, None) => (style::ERROR, "DOWN".to_owned()),
        (false, Some(health)) => {
            let percent = 100.0 * health.slots_unavailable_ratio;
            let (down, all) = (health.primaries_unavailable, health.primaries);
            let state = format!("PARTLY DOWN: {down} of {all} primaries, {percent:.0} % of slots");
            (style::ERROR, state)
        }
    };
    let mut items = vec![(state_style, format!("{} {state}", store.kind))];
    if let Some(fallback) = &store.fallback {
        let since = fallback.since_ms.map(|since| view.now_ms().saturating_sub(since));
        items.push(match (fallback.active, since) {
            (false, _) => (PLAIN, "fallback off".to_owned()),
            (true, None) => (style::ERROR, "FALLBACK ACTIVE".to_owned()),
            (true, Some(since)) => {
                (style::ERROR, format!("FALLBACK ACTIVE for {}", text::duration(since)))
            }
        });
        let debits = fallback.pending_debit_units;
        let debits_style = if debits > 0 { style::WARNING } else { PLAIN };
        items.push((debits_style, format!("{} units to settle", grouped(debits))));
        let instances = fallback.instances;
        let plural = if instances == 1 { "" } else { "s" };
        items.push((PLAIN, format!("{instances} instance{plural}")));
    }
    if let Some(memory) = &store.memory {
        let is_near_cap = memory.keys.saturating_mul(10) > memory.max_keys.saturating_mul(9);
        let (memory_style, full) = match (memory.full, is_near_cap) {
            (true, _) => (style::ERROR, ", FULL"),
            (false, true) => (style::WARNING, ""),
            (false, false) => (PLAIN, ""),
        };
        let (keys, max) = (grouped(memory.keys), grouped(memory.max_keys));
        items.push((memory_style, format!("{keys} of {max} keys{full}")));
    }
    if let Some(entries) = store.deny_cache_entries {
        items.push((PLAIN, format!("{} in the deny cache", grouped(entries))));
    }
    ScreenLine::labelled("store   ").items(&items, columns)
}

fn reload(view: &View, columns: usize) -> ScreenLine {
    let reload = &view.status.reload;
    let ago = |at_ms: u64| text::duration(view.now_ms().saturating_sub(at_ms));
    if reload.ok == Some(false) {
        let mut message = "RELOAD FAILED".to_owned();
        if let Some(at_ms) = reload.at_ms {
            let _ = write!(message, " {} ago", ago(at_ms));
        }
        if let Some(error) = &reload.error {
            message.push_str(": ");
            if let Some(file) = &error.file {
                message.push_str(file);
                for number in [error.line, error.column].into_iter().flatten() {
                    let _ = write!(message, ":{number}");
                }
                message.push_str(": ");
            }
            message.push_str(&error.message);
        }
        return ScreenLine::labelled("config    ").with(style::ERROR, &message);
    }
    let mut items = Vec::new();
    if !reload.restart_pending.is_empty() {
        let sections = reload.restart_pending.join(", ");
        items.push((style::WARNING, format!("RESTART PENDING: {sections}")));
    }
    items.push((PLAIN, reload.config_file.clone().unwrap_or_else(|| "no file".to_owned())));
    if let Some(at_ms) = reload.config_loaded_at_ms.or(reload.at_ms) {
        items.push((PLAIN, format!("loaded {} ago", ago(at_ms))));
    }
    ScreenLine::labelled("config  ").items(&items, columns)
}

/// Returns the sums over all instances, and how many differ.
fn fleet_line(fleet: &FleetRows, columns: usize) -> ScreenLine {
    if let Some(error) = &fleet.error {
        let line = ScreenLine::labelled("fleet     ");
        return line.with(style::ERROR, &format!("NOT KNOWN: {error}"));
    }
    let differ = fleet.instances.iter().filter(|instance| !instance.differs.is_empty()).count();
    let mut items = vec![(PLAIN, format!("{} instances", grouped(fleet.size)))];
    if differ > 0 {
        let configurations = fleet.configurations;
        let text = format!("{differ} DIFFER, {configurations} configurations");
        items.push((style::WARNING, text));
    }
    items.extend(rate_items(&fleet.rates));
    ScreenLine::labelled("fleet   ").items(&items, columns)
}

fn requests(mean: &RateSample, columns: usize) -> ScreenLine {
    ScreenLine::labelled("requests").items(&rate_items(mean), columns)
}

fn rate_items(mean: &RateSample) -> [(Style, String); 4] {
    let item = |style: Style, rate: f64, name: &str| {
        let style = if rate > 0.0 { style } else { PLAIN };
        (style, format!("{} {name}", text::rate(rate)))
    };
    [
        item(style::ALLOWED, mean.allowed, "allowed/s"),
        item(style::DENIED, mean.denied, "denied/s"),
        item(style::WARNING, mean.shadow_denied, "shadow/s"),
        item(style::ERROR, mean.errors, "errors/s"),
    ]
}

fn latency(mean: &RateSample, columns: usize) -> ScreenLine {
    let mut items = match mean.latency_ms {
        Some(latency) => percentiles("", latency),
        None => vec![(DIM, "no decisions".to_owned())],
    };
    items.extend(mean.store_latency_ms.into_iter().flat_map(|it| percentiles("store ", it)));
    ScreenLine::labelled("latency ").items(&items, columns)
}

/// Returns the percentiles that are known.
pub(super) fn percentiles(prefix: &str, latency: ReportedPercentiles) -> Vec<(Style, String)> {
    let named = [("p50", latency.p50), ("p99", latency.p99)];
    let known = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
    known.map(|(name, value)| (PLAIN, format!("{prefix}{name} {}", text::latency(value)))).collect()
}

fn sources(mean: &RateSample, columns: usize) -> ScreenLine {
    let sum: f64 = mean.sources.values().sum();
    let mut sources: Vec<_> = mean.sources.iter().filter(|(_, rate)| **rate > 0.0).collect();
    sources.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let items: Vec<_> = sources
        .into_iter()
        .map(|(name, rate)| (PLAIN, format!("{name} {:.0} %", rate / sum * 100.0)))
        .collect();
    ScreenLine::labelled("sources ").items(&items, columns)
}

/// Returns the requests per second of the last 15 minutes as bars.
fn trend(view: &View, columns: usize) -> Option<ScreenLine> {
    let label = "trend     ";
    let trend = view.trend(columns.saturating_sub(text::width(label)));
    let max = trend.iter().copied().fold(0.0, f64::max);
    if max <= 0.0 {
        return None;
    }
    let bar = |rate: &f64| {
        let steps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let level = steps.iter().filter(|step| rate / max * 8.0 > **step).count();
        BARS[level]
    };
    let bars: String = trend.iter().map(bar).collect();
    Some(ScreenLine::labelled(label).with(style::NOTE, &bars))
}

#[cfg(test)]
mod tests;
