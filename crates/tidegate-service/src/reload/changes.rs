//! [`Changes`]: what differs between two configurations, in names without values: a value may be a
//! secret.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Contents of the configuration file and of all files that it names; `None` for a missing file.
pub(super) type Contents = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// Maximum number of names of one kind that are listed.
const MAX_NAMES: usize = 10;

/// Names of what a reload has changed, each a list for a log line; `None` for an empty one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changes {
    /// Sections of the configuration file.
    pub(super) sections: Option<String>,
    pub(super) added_policies: Option<String>,
    pub(super) removed_policies: Option<String>,
    pub(super) changed_policies: Option<String>,
    /// Other files that changed.
    pub(super) files: Option<String>,
}

impl Changes {
    /// Compares two configurations, whose file is `main`.
    pub(super) fn between(main: Option<&Path>, before: &Contents, after: &Contents) -> Self {
        let text = |contents: &Contents| sections(contents.get(main?)?.as_deref()?);
        let (old, new) = (text(before).unwrap_or_default(), text(after).unwrap_or_default());
        let (old_policies, new_policies) = (policies(&old), policies(&new));
        let (mut added, mut removed, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        for name in names(old_policies.keys(), new_policies.keys()) {
            match (old_policies.get(name), new_policies.get(name)) {
                (None, _) => added.push(name.as_str()),
                (_, None) => removed.push(name.as_str()),
                (old, new) if old != new => changed.push(name.as_str()),
                _ => {}
            }
        }
        let sections =
            names(old.keys(), new.keys()).filter(|name| old.get(*name) != new.get(*name));
        let files = names(before.keys(), after.keys())
            .filter(|file| Some(file.as_path()) != main && before.get(*file) != after.get(*file));
        let files: Vec<String> = files.map(|file| file.display().to_string()).collect();
        Self {
            sections: listed(&sections.map(String::as_str).collect::<Vec<_>>()),
            added_policies: listed(&added),
            removed_policies: listed(&removed),
            changed_policies: listed(&changed),
            files: listed(&files.iter().map(String::as_str).collect::<Vec<_>>()),
        }
    }
}

fn sections(text: &[u8]) -> Option<Map<String, Value>> {
    serde_saphyr::from_str(str::from_utf8(text).ok()?).ok()
}

/// Returns the policies of a configuration by their names.
fn policies(sections: &Map<String, Value>) -> BTreeMap<String, &Value> {
    let policies = sections.get("policies").and_then(Value::as_array);
    let name = |policy: &Value| match policy.get("name")? {
        Value::String(name) => Some(name.clone()),
        other => Some(other.to_string()),
    };
    policies.into_iter().flatten().filter_map(|policy| Some((name(policy)?, policy))).collect()
}

/// Returns all names of two lists, each once.
fn names<'a, T: Ord + 'a>(
    old: impl Iterator<Item = &'a T>,
    new: impl Iterator<Item = &'a T>,
) -> impl Iterator<Item = &'a T> {
    old.chain(new).collect::<BTreeSet<_>>().into_iter()
}

fn listed(names: &[&str]) -> Option<String> {
    let shown = names.get(..MAX_NAMES).unwrap_or(names).join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        _ if names.is_empty() => None,
        0 => Some(shown),
        more => Some(format!("{shown} and {more} more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(config: &str, password: &str) -> Contents {
        let content = |text: &str| Some(text.as_bytes().to_vec());
        let file = |name: &str, text: &str| (PathBuf::from(name), content(text));
        BTreeMap::from([file("tidegate.yaml", config), file("password", password)])
    }

    fn between(before: &Contents, after: &Contents) -> Changes {
        Changes::between(Some(Path::new("tidegate.yaml")), before, after)
    }

    #[test]
    fn changes_are_named_without_values() {
        let before = contents(
            "auth: {api_token: S3CR3T}\npolicies:\n  - {name: a, limit: 1}\n  - {name: b, limit: 1}\n  \
             - {name: 5, limit: 1}\n",
            "OLD",
        );
        let after = contents(
            "auth: {api_token: OTHER}\nclient_ip: {}\npolicies:\n  - {name: a, limit: 2}\n  \
             - {name: c, limit: 1}\n  - {limit: 1, name: 5}\n",
            "NEW",
        );
        let text = |text: &str| Some(text.to_owned());
        let expected = Changes {
            sections: text("auth, client_ip, policies"),
            added_policies: text("c"),
            removed_policies: text("b"),
            changed_policies: text("a"),
            files: text("password"),
        };
        assert_eq!(between(&before, &after), expected);
        let none = Changes {
            sections: None,
            added_policies: None,
            removed_policies: None,
            changed_policies: None,
            files: None,
        };
        assert_eq!(between(&after, &after), none);
    }

    #[test]
    fn long_lists_are_shortened() {
        let policies: Vec<String> = (10..30).map(|n| format!("{{name: p{n}}}")).collect();
        let after = contents(&format!("policies: [{}]", policies.join(", ")), "");
        let changes = between(&contents("", ""), &after);
        let added = changes.added_policies.expect("some");
        assert!(added.starts_with("p10, p11, ") && added.ends_with("p19 and 10 more"), "{added}");
    }
}
