//! Tables of the view: policies, hot keys, nodes, upstreams, and a key that was looked up.

use clap::builder::styling::Style;

use super::data::{
    HotKeyRow, InstanceRow, LastDenial, Lookup, LookupResult, NodeRow, RateSample, RunTimeOverride,
    UpstreamRow, View,
};
use super::draw::percentiles;
use super::line::{DIM, PLAIN, ScreenLine};
use super::text;
use crate::tool::style;
use crate::tool::text::{grouped, printable};

/// Maximum width of a name or a key in a pipe or a wide terminal.
const MAX_NAME_COLUMNS: usize = 60;
/// Width of a column with a rate or a count.
const NUMBER_COLUMNS: usize = 10;

/// Table with its heading.
struct Section {
    heading: ScreenLine,
    rows: Vec<ScreenLine>,
    /// Sections with a smaller number are shown first if there is little room.
    priority: usize,
}

/// Returns all sections, for a pipe.
pub(super) fn all(view: &View, mean: &RateSample, columns: usize) -> Vec<ScreenLine> {
    let sections = sections(view, mean, columns);
    sections
        .into_iter()
        .flat_map(|section| std::iter::once(section.heading).chain(section.rows))
        .collect()
}

/// Returns as much of the sections as fits into this number of lines.
pub(super) fn fitted(
    view: &View,
    mean: &RateSample,
    columns: usize,
    lines: usize,
) -> Vec<ScreenLine> {
    let mut sections = sections(view, mean, columns);
    // A section needs its heading and one row.
    let shown = lines / 2;
    sections.retain(|section| section.priority < shown);
    // The rest of the lines is shared: each section gets one more row in turn.
    let mut rows = vec![0; sections.len()];
    let mut left = lines.saturating_sub(sections.len());
    let mut has_grown = true;
    while left > 0 && has_grown {
        has_grown = false;
        for (section, count) in sections.iter().zip(&mut rows) {
            if left > 0 && *count < section.rows.len() {
                (*count, left, has_grown) = (*count + 1, left - 1, true);
            }
        }
    }
    let mut fitted = Vec::new();
    for (section, count) in sections.into_iter().zip(rows) {
        fitted.push(section.heading);
        fitted.extend(section.rows.into_iter().take(count));
    }
    fitted
}

/// Returns the sections in the order in which they are shown, with consecutive priorities.
fn sections(view: &View, mean: &RateSample, columns: usize) -> Vec<Section> {
    let store = &view.status.store;
    let fleet = view.fleet.as_ref().filter(|fleet| fleet.error.is_none());
    let (hot, rates) =
        fleet.map_or((&view.hot_keys, mean), |fleet| (&fleet.hot_keys, &fleet.rates));
    let mut sections = vec![
        policies(rates, columns),
        instances(fleet.map_or(&[], |fleet| &fleet.instances), columns),
        hot_keys("denied keys", &hot.denied, style::DENIED, 1, columns),
        hot_keys("allowed keys", &hot.allowed, PLAIN, 4, columns),
        hot_keys("shadow-denied keys", &hot.shadow_denied, style::WARNING, 5, columns),
        nodes(&store.nodes, columns),
        upstreams(view.status.upstreams.as_deref().unwrap_or_default(), columns),
    ];
    sections.retain(|section| !section.rows.is_empty());
    let mut order: Vec<usize> = sections.iter().map(|section| section.priority).collect();
    order.sort_unstable();
    for section in &mut sections {
        section.priority = order.partition_point(|other| *other < section.priority);
    }
    sections
}

/// Returns the width of the first column, if the others need this number of columns.
fn name_columns<'a>(
    names: impl Iterator<Item = &'a str>,
    heading: &str,
    columns: usize,
    others: usize,
) -> usize {
    let longest = names
        .map(|name| text::width(&printable(name)))
        .max()
        .unwrap_or(0)
        .max(text::width(heading));
    longest.min(MAX_NAME_COLUMNS).min(columns.saturating_sub(others)).max(8)
}

fn policies(mean: &RateSample, columns: usize) -> Section {
    let mut policies: Vec<_> = mean.policies.iter().collect();
    let busy = |rates: &[f64; 3]| rates.iter().sum::<f64>();
    policies.sort_by(|(_, one), (_, other)| {
        (other[1] + other[2]).total_cmp(&(one[1] + one[2])).then(busy(other).total_cmp(&busy(one)))
    });
    let heading = "policies";
    let names = policies.iter().map(|(name, _)| name.as_str());
    let width = name_columns(names, heading, columns, 3 * NUMBER_COLUMNS);
    let number = |rate: f64, style: Style| (if rate > 0.0 { style } else { DIM }, text::rate(rate));
    let rows = policies.into_iter().map(|(name, [allowed, denied, shadow])| {
        let numbers = [
            number(*allowed, PLAIN),
            number(*denied, style::DENIED),
            number(*shadow, style::WARNING),
        ];
        let line = ScreenLine::default().column(PLAIN, name, width);
        numbers.iter().fold(line, |line, (style, rate)| line.number(*style, rate, NUMBER_COLUMNS))
    });
    let rows = rows.collect();
    let line = ScreenLine::default().column(style::HEADING, heading, width);
    let heading = ["allowed/s", "denied/s", "shadow/s"]
        .iter()
        .fold(line, |line, name| line.number(DIM, name, NUMBER_COLUMNS));
    Section { heading, rows, priority: 0 }
}

fn hot_keys(
    heading: &str,
    keys: &[HotKeyRow],
    style: Style,
    priority: usize,
    columns: usize,
) -> Section {
    let policy_columns = name_columns(keys.iter().map(|hot| hot.policy.as_str()), "policy", 24, 0);
    let others = NUMBER_COLUMNS + 2 + policy_columns;
    let width = name_columns(keys.iter().map(|hot| hot.key.as_str()), heading, columns, others);
    let rows = keys.iter().map(|hot| {
        ScreenLine::default()
            .column(style, &hot.key, width)
            .number(PLAIN, &grouped(hot.count), NUMBER_COLUMNS)
            .with(PLAIN, "  ")
            .column(PLAIN, &hot.policy, policy_columns)
    });
    let rows = rows.collect();
    let heading = ScreenLine::default()
        .column(style::HEADING, heading, width)
        .number(DIM, "requests", NUMBER_COLUMNS)
        .with(DIM, "  policy");
    Section { heading, rows, priority }
}

fn nodes(nodes: &[NodeRow], columns: usize) -> Section {
    let heading = "nodes";
    let width = name_columns(nodes.iter().map(|node| node.address.as_str()), heading, columns, 20);
    let rows = nodes.iter().map(|node| {
        let circuit = node.circuit.as_deref().unwrap_or("closed");
        let mut items = vec![match (node.connected, circuit) {
            (true, "closed") => (style::ALLOWED, "connected".to_owned()),
            (true, _) => (style::WARNING, format!("connected, circuit {circuit}")),
            (false, _) => (style::ERROR, format!("DISCONNECTED, circuit {circuit}")),
        }];
        if let Some(latency) = node.latency_ms {
            items.extend(percentiles("", latency));
        }
        if let Some(in_flight) = node.in_flight {
            items.push((PLAIN, format!("{in_flight} in flight")));
        }
        let line = ScreenLine::default().column(PLAIN, &node.address, width).items(&items, columns);
        match node.last_error.as_ref().filter(|_| !node.connected || circuit != "closed") {
            Some(error) => line.with(DIM, "  ").with(DIM, error),
            None => line,
        }
    });
    Section { rows: rows.collect(), heading: ScreenLine::labelled(heading), priority: 2 }
}

/// Returns the instances of the fleet, each with what differs from most others.
fn instances(instances: &[InstanceRow], columns: usize) -> Section {
    let heading = "instances";
    let name = |row: &InstanceRow| row.name.clone().unwrap_or_else(|| "(not known)".to_owned());
    let names: Vec<String> = instances.iter().map(name).collect();
    let width = name_columns(names.iter().map(String::as_str), heading, columns, 50);
    let mut rows = Vec::new();
    for (name, instance) in names.iter().zip(instances) {
        let differs = instance.differs.join(", ");
        let style = if differs.is_empty() { PLAIN } else { style::WARNING };
        let mut items = vec![
            (PLAIN, instance.version.clone()),
            (style, instance.config_hash.clone()),
            (PLAIN, format!("{} allowed/s", text::rate(instance.allowed))),
            (PLAIN, format!("{} denied/s", text::rate(instance.denied))),
        ];
        if instance.fallback || instance.name.is_some() && !instance.store_up {
            items.insert(0, (style::ERROR, "STORE DOWN".to_owned()));
        }
        if !differs.is_empty() {
            items.insert(0, (style, format!("DIFFERS in {differs}")));
        }
        rows.push(ScreenLine::default().column(style, name, width).items(&items, columns));
        let changes = instance.changes.iter();
        rows.extend(
            changes.map(|change| ScreenLine::default().with(DIM, "  ").with(style, &change.text)),
        );
    }
    Section { rows, heading: ScreenLine::labelled(heading), priority: 3 }
}

fn upstreams(upstreams: &[UpstreamRow], columns: usize) -> Section {
    let heading = "upstreams";
    let names = upstreams.iter().map(|upstream| upstream.url.as_str());
    let width = name_columns(names, heading, columns, 20);
    let rows = upstreams.iter().map(|upstream| {
        let state = match (upstream.up, upstream.ejected) {
            (true, false) => (style::ALLOWED, "up"),
            (_, true) => (style::ERROR, "EJECTED"),
            (false, false) => (style::ERROR, "DOWN"),
        };
        let line = ScreenLine::default().column(PLAIN, &upstream.url, width);
        line.with(PLAIN, "  ").with(state.0, state.1)
    });
    Section { rows: rows.collect(), heading: ScreenLine::labelled(heading), priority: 6 }
}

/// Returns the state of a key in each policy: those that deny it first.
pub(super) fn looked_up(lookup: &Lookup, columns: usize) -> Vec<ScreenLine> {
    let mut results: Vec<&LookupResult> = lookup.results.iter().collect();
    let order = |result: &LookupResult| match (&result.error, result.allowed) {
        (Some(_), _) => 1,
        (None, Some(false)) => 0,
        (None, _) => 2,
    };
    results.sort_by_key(|result| order(result));
    let denied = results.iter().filter(|result| result.allowed == Some(false)).count();
    let more = if lookup.truncated { ", and more are not shown" } else { "" };
    let heading = format!("  {denied} of {} policies deny it{more}", results.len());
    let mut lines =
        vec![ScreenLine::labelled("key ").with(style::NOTE, &lookup.key).with(PLAIN, &heading)];
    if results.is_empty() {
        lines.push(ScreenLine::default().with(PLAIN, "No policy counts by a single key."));
    }
    let names = results.iter().map(|result| result.policy.as_str());
    let width = name_columns(names, "policy", columns, 30);
    for result in results {
        let is_shadow = result.mode.as_deref() == Some("shadow");
        let (state_style, state) = match (&result.error, result.allowed) {
            (Some(_), _) => (style::ERROR, "error"),
            (None, Some(false)) if is_shadow => (style::WARNING, "shadow-denied"),
            (None, Some(false)) => (style::DENIED, "denied"),
            (None, _) => (style::ALLOWED, "allowed"),
        };
        let mut items = vec![(state_style, state.to_owned())];
        let all = result.capacity.or(result.limit).map(grouped);
        if let (Some(in_flight), Some(all)) = (&result.in_flight, &all) {
            items.push((PLAIN, format!("{} of {all} in flight", grouped(in_flight.units))));
            let ends = [("first", in_flight.first_end_ms), ("last", result.reset_after_ms)];
            for (name, end) in ends {
                if let Some(end) = end.filter(|end| *end > 0) {
                    items.push((PLAIN, format!("{name} ends in {}", text::duration(end))));
                }
            }
        } else if let (Some(remaining), Some(all)) = (result.remaining, &all) {
            items.push((PLAIN, format!("{} of {all} left", grouped(remaining))));
            if let Some(wait) = result.retry_after_ms.filter(|wait| *wait > 0) {
                items.push((PLAIN, format!("free in {}", text::duration(wait))));
            }
        }
        if let Some(LastDenial { instance }) = &result.last_denial {
            items.push((DIM, format!("denied last by {instance}")));
        }
        if let Some(RunTimeOverride { by, reason }) = &result.run_time {
            items.push((style::WARNING, format!("changed at run time by {by}: {reason}")));
        }
        if let Some(key) = result.key.as_ref().filter(|key| **key != lookup.key) {
            items.push((DIM, format!("counted as {key}")));
        }
        lines.push(
            ScreenLine::default().column(PLAIN, &result.policy, width).items(&items, columns),
        );
        if let Some(reason) = result.error.as_ref().or(result.reason.as_ref()) {
            lines.push(ScreenLine::default().with(DIM, "  ").with(DIM, reason));
        }
    }
    lines
}
