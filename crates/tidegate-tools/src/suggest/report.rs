//! The suggestion as tables and as policies.

use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use tidegate::{Policy, ShowKeys};

use super::{ClientKind, GroupSuggestion, KindCounts, Suggestion, WINDOWS, above};
use crate::simulate::variants::LOG_ATTRIBUTES;
use crate::simulate::{MAX_KEY_CHARACTERS, percent, shown, write_lines};
use crate::tool::table::{TextPage, TextTable};
use crate::tool::text::grouped;
use tidegate_config::duration::readable;
use tidegate_config::key_hash;

/// Number of clients from which a percentile says something.
const MIN_CLIENTS: u64 = 20;
/// Name of the policy for all paths.
pub(super) const ALL_PATHS: &str = "all-paths";

/// Returns a key as operators see it: one that is a credential, as its hash.
pub(super) fn shown_key(policy: &Policy, key: &str) -> String {
    match policy.show_keys() {
        ShowKeys::Plain => key.to_owned(),
        ShowKeys::Hashed => key_hash::of(key),
    }
}

impl Suggestion {
    /// Writes the tables and the policies. `draw` returns the picture of a group, if the page has
    /// pictures.
    pub(super) fn write_with(
        &self,
        page: &mut TextPage<'_>,
        draw: impl Fn(&GroupSuggestion) -> Option<String>,
    ) -> io::Result<()> {
        self.write_facts(page)?;
        page.table("", &self.summary())?;
        for group in &self.groups {
            group.write_summary(page)?;
            if let Some(picture) = draw(group) {
                page.html(&picture)?;
            }
            page.table("requests of a client in its busiest window", &group.windows_table())?;
            page.table(
                "clients denied at least once (and their requests denied), by limit and window",
                &group.limits_table(),
            )?;
            let policy = &group.policy;
            if !policy.top_denied.is_empty() {
                let mut table = TextTable::new(&["key", "kind"], &["requests", "denied"]);
                for denied in &policy.top_denied {
                    table.add([
                        shown(&denied.key, MAX_KEY_CHARACTERS),
                        denied.kind.name().to_owned(),
                        grouped(denied.requests),
                        grouped(denied.denied),
                    ]);
                }
                page.table(&format!("most denied by {}", group.quota()), &table)?;
            }
        }
        page.code("policies in shadow mode", &self.yaml)
    }

    /// Writes the tables and the policies.
    pub(crate) fn write(&self, page: &mut TextPage<'_>) -> io::Result<()> {
        self.write_with(page, |_| None)
    }

    fn write_facts(&self, page: &mut TextPage<'_>) -> io::Result<()> {
        let (first, last) = self.times;
        let length = Duration::from_micros(last - first);
        let counts = &self.counts;
        page.heading(&format!(
            "{} requests in {}, {} to {}",
            grouped(counts.requests),
            readable(length),
            self.start,
            self.end
        ))?;
        write_lines(page, &self.lines)?;
        let key = self.key.join(", ");
        page.line(&format!(
            "A client is a key ({key}). Limits are suggested from p{} of the clients, times {}, \
             rounded up.",
            self.percentile, self.margin
        ))?;
        page.line(
            "Crawlers and monitors are keys most of whose requests have the user agent of one; they \
             do not raise a limit, but it applies to them.",
        )?;
        if !self.health_check_paths.is_empty() {
            let paths = self.health_check_paths.join(", ");
            page.line(&format!("Health checks are not counted, by `unless`: {paths}"))?;
        }
        // A log of one day has its last request some seconds before the end of that day.
        let is_longer = |(_, window): &(&str, Duration)| *window > length + length / 20;
        if let Some((name, _)) = WINDOWS.into_iter().find(is_longer) {
            page.line(&format!(
                "The log is shorter than {name}: such windows have more requests than it shows."
            ))?;
        }
        for (count, words) in [
            (counts.without_key, "requests have no such key, and are not counted"),
            (counts.beyond_max_keys, "requests of further keys are not counted"),
        ] {
            if count > 0 {
                page.line(&format!("{} {words}", grouped(count)))?;
            }
        }
        Ok(())
    }

    /// Returns a row for each group.
    fn summary(&self) -> TextTable {
        let numbers =
            ["requests", "clients", "limit", "burst", "denied clients", "denied requests"];
        let mut table = TextTable::new(&["paths"], &numbers);
        for group in &self.groups {
            let counts = group.kinds.iter().find(|counts| counts.kind == ClientKind::Client);
            let denied = |count: fn(&KindCounts) -> [u64; 2]| {
                counts.map(count).map_or_else(String::new, |[part, whole]| {
                    format!("{} ({})", grouped(part), percent(part, whole))
                })
            };
            table.add([
                shown(group.name(), MAX_KEY_CHARACTERS),
                grouped(group.kinds.iter().map(|counts| counts.requests).sum()),
                grouped(counts.map_or(0, |counts| counts.keys)),
                format!("{} per {}", grouped(group.policy.limit), group.policy.window),
                grouped(group.policy.burst),
                denied(|it| [it.denied_keys, it.keys]),
                denied(|it| [it.denied_requests, it.requests]),
            ]);
        }
        table
    }

    /// Returns the policies in shadow mode.
    pub(super) fn policies(&self) -> String {
        // JSON strings are YAML, whatever they contain.
        let quoted = |text: &str| serde_json::json!(text).to_string();
        let list = |texts: &[&str]| serde_json::json!(texts).to_string();
        let key: Vec<&str> = self.key.iter().map(String::as_str).collect();
        let declared: Vec<&str> =
            LOG_ATTRIBUTES.into_iter().filter(|name| key.contains(name)).collect();
        let mut yaml =
            format!("# From {} requests, {} to {}.\n", self.counts.requests, self.start, self.end);
        if !declared.is_empty() {
            // Writing to a string never fails.
            let _ = writeln!(yaml, "attributes: {}", list(&declared));
        }
        yaml.push_str("policies:\n");
        for group in &self.groups {
            let policy = &group.policy;
            let _ = writeln!(yaml, "  - name: {}", quoted(&policy.name));
            if let Some(path) = &group.path {
                let _ = writeln!(yaml, "    match: {{path: {}}}", quoted(path));
            }
            if !self.health_check_paths.is_empty() {
                let paths = list(&self.health_check_paths);
                let _ = writeln!(yaml, "    unless: [{{path: {paths}}}]");
            }
            let _ = writeln!(yaml, "    key: {}", list(&key));
            if key != ["ip"] {
                yaml.push_str("    missing_key: skip\n");
            }
            let _ = writeln!(
                yaml,
                "    algorithm: token-bucket\n    limit: {}\n    window: {}\n    burst: {}\n    \
                 mode: shadow",
                policy.limit, policy.window, policy.burst
            );
        }
        yaml
    }
}

impl GroupSuggestion {
    pub(super) fn name(&self) -> &str {
        self.path.as_deref().unwrap_or("all paths")
    }

    fn quota(&self) -> String {
        let policy = &self.policy;
        let (limit, burst) = (grouped(policy.limit), grouped(policy.burst));
        format!("{limit} per {}, burst {burst}", policy.window)
    }

    /// Writes what the suggested policy denies, and what its limit would deny in the longest window.
    fn write_summary(&self, page: &mut TextPage<'_>) -> io::Result<()> {
        page.section(&format!("{}: {}", shown(self.name(), MAX_KEY_CHARACTERS), self.quota()))?;
        for counts in &self.kinds {
            let KindCounts { kind, keys, requests, denied_keys, denied_requests } = counts;
            page.line(&format!(
                "denies {} of {} {}s ({}), and {} of their {} requests ({})",
                grouped(*denied_keys),
                grouped(*keys),
                kind.name(),
                percent(*denied_keys, *keys),
                grouped(*denied_requests),
                grouped(*requests),
                percent(*denied_requests, *requests)
            ))?;
        }
        let (limit, clients) = (self.policy.limit, self.clients());
        if clients < MIN_CLIENTS {
            page.line("so few clients say little about others: compare with the other groups")?;
        }
        let mut others = self.windows.iter().filter(|it| it.window != self.policy.window);
        if let Some(longest) = others.next_back() {
            let denied = above(&longest.peaks, limit);
            page.line(&format!(
                "the same limit per {} would deny {} of {} clients ({})",
                longest.window,
                grouped(denied),
                grouped(clients),
                percent(denied, clients)
            ))?;
        }
        Ok(())
    }

    fn windows_table(&self) -> TextTable {
        let numbers =
            ["p50", "p90", "p99", "p99.9", "max", "limit", "denied clients", "denied requests"];
        let mut table = TextTable::new(&["window"], &numbers);
        for window in &self.windows {
            let tried = window.limits.iter().find(|tried| tried.limit == window.suggested_limit);
            let [denied_keys, denied_requests] =
                tried.map_or([0, 0], |tried| [tried.denied_keys, tried.denied_requests]);
            let part = percent(denied_keys, self.clients());
            let numbers = [
                window.p50,
                window.p90,
                window.p99,
                window.p999,
                window.max,
                window.suggested_limit,
            ];
            let mut row = vec![window.window.to_owned()];
            row.extend(numbers.map(grouped));
            row.extend([format!("{} ({part})", grouped(denied_keys)), grouped(denied_requests)]);
            table.add(row);
        }
        table
    }

    /// Returns a row for each limit that is tried in all windows.
    fn limits_table(&self) -> TextTable {
        let names: Vec<String> =
            self.windows.iter().map(|it| format!("per {}", it.window)).collect();
        let mut table = TextTable::new(&[], &[&["limit".to_owned()], &names[..]].concat());
        let [first, ..] = self.windows.as_slice() else { return table };
        for limit in first.limits.iter().map(|tried| tried.limit) {
            let cells = self.windows.iter().map(|window| {
                let tried = window.limits.iter().find(|tried| tried.limit == limit)?;
                let [keys, requests] = [tried.denied_keys, tried.denied_requests].map(grouped);
                Some(if tried.denied_keys == 0 {
                    "0".to_owned()
                } else {
                    format!("{keys} ({requests})")
                })
            });
            if let Some(cells) = cells.collect::<Option<Vec<_>>>() {
                table.add([vec![grouped(limit)], cells].concat());
            }
        }
        table
    }
}
