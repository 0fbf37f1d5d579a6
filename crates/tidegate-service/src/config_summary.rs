//! [`ConfigSummary`]: what a configuration says, in few words, so that two of them can be compared
//! policy by policy and field by field.
//!
//! Instances show each other their summaries in Redis, and the journal and the log have what
//! differs. So a summary has no value that may be a secret or a key, but a short hash of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use tidegate::{Cost, KeySource, Policy, Quota};

use tidegate_config::envoy::{Limit, Rule};
use tidegate_config::{Config, key_hash};

/// Maximum number of bytes of a summary as JSON.
const MAX_SUMMARY_BYTES: usize = 48 * 1_024;
/// Maximum number of differences that are listed.
const MAX_CHANGES: usize = 50;
/// Maximum length of a value that is shown.
const MAX_VALUE_CHARS: usize = 60;
/// First character of a hash that stands for a value.
const HASHED: char = '#';

/// Fields of the policies and hashes of the sections of a configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigSummary {
    policies: BTreeMap<String, BTreeMap<String, String>>,
    sections: BTreeMap<String, String>,
    /// Number of policies that are left out, because the summary would be too long.
    omitted_policies: usize,
}

/// Difference between two configurations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ConfigChange {
    /// Policy or rule; null for another section of the file.
    pub policy: Option<String>,
    /// Field of the policy, or section of the file; null for a policy that was added or removed.
    pub field: Option<String>,
    /// Value before; null if it is not shown, or for a new policy or field.
    pub old: Option<String>,
    /// Value after; null if it is not shown, or for a policy or field that was removed.
    pub new: Option<String>,
    /// The change in words.
    pub text: String,
}

enum Limited<'a> {
    Policy(&'a Policy),
    Rule(&'a Rule),
}

impl ConfigSummary {
    /// Summarizes a configuration.
    pub fn new(config: &Config) -> Self {
        let policies =
            config.policies.iter().map(|policy| (policy.name(), Limited::Policy(policy)));
        let rules = config.envoy.rules.rules().map(|rule| (&*rule.path, Limited::Rule(rule)));
        let all: BTreeMap<&str, Limited<'_>> = policies.chain(rules).collect();
        let mut summary = Self { sections: config.sections.clone(), ..Self::default() };
        // Of ten thousand rules only the first ones fit, so the others are not even summarized.
        let mut length = summary.to_json().len();
        for (name, limited) in &all {
            let fields = match limited {
                Limited::Policy(policy) => of_policy(policy, config.policy_fields.get(*name)),
                Limited::Rule(rule) => of_rule(rule),
            };
            length += serde_json::to_string(&(name, &fields)).unwrap_or_default().len();
            if length > MAX_SUMMARY_BYTES {
                break;
            }
            summary.policies.insert((*name).to_owned(), fields);
        }
        // In the order of their names and in few steps, so that two summaries leave the same out.
        let mut kept = all.len();
        while kept > summary.policies.len() {
            kept = kept * 3 / 4;
        }
        summary.policies = summary.policies.into_iter().take(kept).collect();
        summary.omitted_policies = all.len() - kept;
        summary
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns what another configuration has changed in this one: policies first, then sections
    /// other than those of the policies.
    pub fn changes_to(&self, after: &Self) -> Vec<ConfigChange> {
        let mut changes = Vec::new();
        for name in names(&self.policies, &after.policies) {
            match (self.policies.get(name), after.policies.get(name)) {
                (Some(old), Some(new)) => {
                    let fields = names(old, new).into_iter();
                    let differ = fields.filter(|field| old.get(*field) != new.get(*field));
                    changes.extend(differ.map(|field| {
                        ConfigChange::of_field(name, field, old.get(field), new.get(field))
                    }));
                }
                (old, _) => changes.push(ConfigChange::of_policy(name, old.is_some())),
            }
        }
        let has_policies = !changes.is_empty();
        for name in names(&self.sections, &after.sections) {
            let is_explained = has_policies && matches!(name.as_str(), "policies" | "envoy");
            if !is_explained && self.sections.get(name) != after.sections.get(name) {
                changes.push(ConfigChange::of_section(name));
            }
        }
        let more = changes.len().saturating_sub(MAX_CHANGES);
        changes.truncate(MAX_CHANGES);
        if more > 0 {
            let text = format!("{more} more differences");
            changes.push(ConfigChange { text, ..ConfigChange::of_section("") });
        }
        changes
    }
}

impl ConfigChange {
    fn of_field(policy: &str, field: &str, old: Option<&String>, new: Option<&String>) -> Self {
        let shown = |value: Option<&String>| value.filter(|it| !it.starts_with(HASHED)).cloned();
        let (old, new) = (shown(old), shown(new));
        let text = match (&old, &new) {
            (Some(old), Some(new)) => format!("{policy}: {field} {old} → {new}"),
            (None, Some(new)) => format!("{policy}: {field} → {new}"),
            _ => format!("{policy}: {field} changed"),
        };
        Self { policy: Some(policy.to_owned()), field: Some(field.to_owned()), old, new, text }
    }

    fn of_policy(policy: &str, is_removed: bool) -> Self {
        let text = format!("{policy}: policy {}", if is_removed { "removed" } else { "added" });
        Self { policy: Some(policy.to_owned()), field: None, old: None, new: None, text }
    }

    /// Returns the change of files that the configuration names.
    pub fn of_files(files: String) -> Self {
        let text = format!("changed files: {files}");
        Self { policy: None, field: None, old: None, new: Some(files), text }
    }

    fn of_section(section: &str) -> Self {
        let text = format!("section {section} changed");
        Self { policy: None, field: Some(section.to_owned()), old: None, new: None, text }
    }
}

impl fmt::Display for ConfigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Fields of one policy. Those that are not in the file have their default.
struct Fields(BTreeMap<String, String>);

impl Fields {
    fn new(quota: &Quota) -> Self {
        let mut fields = Self(BTreeMap::new());
        fields.add("algorithm", quota.algorithm().as_str());
        fields.add("limit", quota.limit().to_string());
        let readable = || tidegate_config::duration::readable(quota.window());
        if !quota.is_concurrency() {
            fields.add("window", quota.calendar().map_or_else(readable, ToString::to_string));
        }
        if quota.burst() != quota.limit() {
            fields.add("burst", quota.burst().to_string());
        }
        fields.add("count_denied", quota.count_denied().to_string());
        fields.add("encoding", quota.encoding().as_str());
        let blocks = quota.block_for().iter().copied().map(tidegate_config::duration::readable);
        fields.add("block_for", blocks.collect::<Vec<_>>().join(", "));
        fields
    }

    /// Adds a field, unless it is empty. A long value is replaced by its hash.
    fn add(&mut self, name: &str, value: impl Into<String>) {
        let value = value.into();
        if value.chars().count() > MAX_VALUE_CHARS {
            self.add_hashed(name, &value);
        } else if !value.is_empty() {
            self.0.insert(name.to_owned(), value);
        }
    }

    /// Adds a field whose value may be a secret or has keys.
    fn add_hashed(&mut self, name: &str, value: &str) {
        if !value.is_empty() {
            self.0.insert(name.to_owned(), format!("{HASHED}{}", key_hash::short(value)));
        }
    }
}

/// Returns the fields of a policy: values as they apply, and what else is written in the file.
fn of_policy(
    policy: &Policy,
    written: Option<&serde_json::Map<String, serde_json::Value>>,
) -> BTreeMap<String, String> {
    let mut fields = Fields::new(policy.quota());
    let key: Vec<&str> = policy.key().iter().map(KeySource::as_str).collect();
    fields.add("key", key.join(", "));
    fields.add("missing_key", policy.missing_key().as_str());
    fields.add("mode", policy.mode().as_str());
    fields.add("on_store_failure", policy.on_store_failure().as_str());
    fields.add("show_keys", policy.show_keys().as_str());
    fields.add(
        "cost",
        match policy.cost() {
            Cost::Fixed(units) => units.to_string(),
            Cost::Attribute { name, default, max } => format!("{name}, {default} to {max}"),
        },
    );
    if let Some(statuses) = policy.refund_on() {
        fields.add("refund_on", statuses.iter().collect::<Vec<_>>().join(", "));
    }
    fields.add("anchor", policy.anchor_attribute().unwrap_or_default());
    for (name, value) in written.into_iter().flatten() {
        let is_list_of_values = matches!(name.as_str(), "key" | "block_for" | "refund_on");
        let is_value = !value.is_object() && !value.is_array() || is_list_of_values;
        match name.as_str() {
            "name" | "window" => {}
            "cost" | "hold" if value.is_object() => {
                fields.add(name, value.to_string().replace('"', ""));
            }
            _ if is_value && fields.0.contains_key(name) => {}
            // Also those that are new: no field is left out.
            _ => fields.add_hashed(name, &value.to_string()),
        }
    }
    fields.0
}

fn of_rule(rule: &Rule) -> BTreeMap<String, String> {
    let mut fields = match &rule.limit {
        Limit::Quota(_, quota) => Fields::new(quota),
        Limit::Zero(..) => Fields(BTreeMap::from([("limit".to_owned(), "0".to_owned())])),
        Limit::Unlimited => Fields(BTreeMap::from([("limit".to_owned(), "unlimited".to_owned())])),
    };
    fields.add("mode", rule.mode.as_str());
    fields.0
}

fn names<'a, V>(
    old: &'a BTreeMap<String, V>,
    new: &'a BTreeMap<String, V>,
) -> BTreeSet<&'a String> {
    old.keys().chain(new.keys()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(policies: &str, other: &str) -> ConfigSummary {
        let text = format!("{other}\npolicies:\n{policies}");
        ConfigSummary::new(&Config::parse("test", &text).unwrap_or_else(|error| panic!("{error}")))
    }

    fn texts(before: &ConfigSummary, after: &ConfigSummary) -> Vec<String> {
        before.changes_to(after).into_iter().map(|change| change.text).collect()
    }

    #[test]
    fn changes_name_the_policy_the_field_and_both_values() {
        let policy = |name: &str, rest: &str| {
            format!(
                "  - {{name: {name}, key: [header.u], algorithm: sliding-log, window: 60s, {rest}}}\n"
            )
        };
        let old = [
            policy("a", "limit: 100, overrides: [{key: S3CR3T, limit: 7}]"),
            policy("b", "limit: 5"),
        ];
        let new = [
            policy("a", "limit: 200, mode: shadow, overrides: [{key: S3CR3T, limit: 8}]"),
            policy("c", "limit: 5"),
        ];
        let (old, new) = (summary(&old.concat(), ""), summary(&new.concat(), "client_ip: {}"));
        assert_eq!(
            texts(&old, &new),
            [
                "a: limit 100 → 200",
                "a: mode enforce → shadow",
                "a: overrides changed",
                "b: policy removed",
                "c: policy added",
                "section client_ip changed",
            ]
        );
        assert!(!old.to_json().contains("S3CR3T"), "{}", old.to_json());
        assert_eq!(texts(&new, &new), [""; 0]);
        let again: ConfigSummary = serde_json::from_str(&old.to_json()).expect("our own JSON");
        assert_eq!(again, old);
    }

    #[test]
    fn no_field_of_a_policy_is_forgotten() {
        let month = |rest: &str| {
            let window = format!("window: {{calendar: month, timezone: {rest}}}");
            format!("{{name: p, key: [header.u], algorithm: fixed-window, limit: 5, {window}}}")
        };
        let bucket = |rest: &str| {
            format!(
                "{{name: p, key: [header.u], algorithm: token-bucket, limit: 5, window: 1m{rest}}}"
            )
        };
        let lanes = |percent: u8| {
            bucket(&format!(", lanes: {{attribute: header.p, S3CR3T: 100%, other: {percent}%}}"))
        };
        for (old, new, change) in [
            (month("Europe/Berlin"), month("UTC"), "p: window month, Europe/Berlin → month, UTC"),
            (
                month("UTC, anchor: 15"),
                month("UTC, anchor: 16"),
                "p: window month from day 15, UTC → month from day 16, UTC",
            ),
            (
                month("UTC, anchor: {attribute: header.a}"),
                month("UTC, anchor: {attribute: header.b}"),
                "p: anchor header.a → header.b",
            ),
            (lanes(50), lanes(60), "p: lanes changed"),
            (bucket(""), bucket(", hold: {ttl: 30s}"), "p: hold → {ttl:30s}"),
            (
                bucket(", cost: {reserve: 1, actual: {response_header: x-cost}}"),
                bucket(", cost: {reserve: 1, actual: {response_header: x-used}}"),
                "p: cost {actual:{response_header:x-cost},reserve:1} → \
                 {actual:{response_header:x-used},reserve:1}",
            ),
        ] {
            let [old, new] = [old, new].map(|policy| summary(&format!("  - {policy}\n"), ""));
            assert_eq!(texts(&old, &new), [change]);
            assert!(!old.to_json().contains("S3CR3T"), "{}", old.to_json());
        }
    }

    #[test]
    fn a_long_configuration_has_a_short_summary_and_few_changes() {
        let policies = |limit: u64| -> String {
            let policy = |number: u64| {
                format!(
                    "  - {{name: policy-{number:04}, algorithm: token-bucket, limit: {limit}, window: 1s}}\n"
                )
            };
            (0..1_000).map(policy).collect()
        };
        let (old, new) = (summary(&policies(5), ""), summary(&policies(6), ""));
        assert!(old.to_json().len() <= MAX_SUMMARY_BYTES && old.omitted_policies > 0);
        let changes = texts(&old, &new);
        assert_eq!(changes.len(), MAX_CHANGES + 1);
        assert!(changes[MAX_CHANGES].ends_with(" more differences"), "{changes:?}");
    }
}
