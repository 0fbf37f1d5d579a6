//! Which policies a request may match, without asking each.
//!
//! Every policy stands in one place: below the literal beginning of its path pattern, or by the
//! exact value of another attribute, or among those that have to be asked always. A request looks
//! into the places that its own path and values name, so its work grows with the depth of its path,
//! not with the number of policies.

use std::collections::HashMap;

use super::pattern::{Pattern, normal_path};
use super::{Attributes, Policy};

#[derive(Debug, Default)]
pub(super) struct Index {
    always: Vec<usize>,
    /// By the literal segments that the path begins with; "" for the root.
    by_path: HashMap<String, Vec<usize>>,
    /// By attribute, then by its exact value.
    by_value: HashMap<String, HashMap<String, Vec<usize>>>,
}

impl Index {
    pub(super) fn new(policies: &[Policy]) -> Self {
        let mut index = Self::default();
        for (position, policy) in policies.iter().enumerate() {
            let exact = |pattern: &Pattern| matches!(pattern, Pattern::Exact(_));
            let path = policy.conditions.iter().find(|condition| condition.attribute == "path");
            // A method says little; any other exact value much.
            let value = policy.conditions.iter().find(|condition| {
                !["path", "method"].contains(&condition.attribute.as_str())
                    && condition.patterns.iter().all(exact)
            });
            if let Some(path) = path {
                for pattern in &path.patterns {
                    let prefix = match pattern {
                        Pattern::Exact(text) => text.trim_end_matches('/'),
                        Pattern::Wild { literal_prefix, .. } => literal_prefix,
                    };
                    index.by_path.entry(prefix.to_owned()).or_default().push(position);
                }
            } else if let Some(condition) = value {
                let values = index.by_value.entry(condition.attribute.clone()).or_default();
                for pattern in &condition.patterns {
                    if let Pattern::Exact(text) = pattern {
                        values.entry(text.clone()).or_default().push(position);
                    }
                }
            } else {
                index.always.push(position);
            }
        }
        index
    }

    /// In the order of the policies, each once.
    pub(super) fn candidates(&self, attributes: &dyn Attributes) -> Vec<usize> {
        let mut found = self.always.clone();
        if !self.by_path.is_empty()
            && let Some(path) = attributes.get("path")
        {
            let path = normal_path(&path);
            let ends =
                path.match_indices('/').map(|(at, _)| at).chain([path.trim_end_matches('/').len()]);
            for end in ends {
                found.extend(self.by_path.get(&path[..end]).into_iter().flatten());
            }
        }
        for (attribute, values) in &self.by_value {
            if let Some(value) = attributes.get(attribute) {
                found.extend(values.get(&*value).into_iter().flatten());
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::policy::Policies;
    use crate::quota::Quota;

    fn policies(patterns: &[(String, String)]) -> Vec<Policy> {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let policy = |(number, (attribute, pattern)): (usize, &(String, String))| {
            let policy = Policy::new(format!("p{number}"), quota.clone()).expect("a name");
            policy.matching(attribute.clone(), &[pattern]).expect("a pattern")
        };
        patterns.iter().enumerate().map(policy).collect()
    }

    proptest! {
        /// The index may only leave out policies that would not have matched.
        #[test]
        fn the_index_finds_what_asking_each_finds(
            patterns in proptest::collection::vec(("path|host|domain", "(/[ab]{1,2}|/\\*|/\\*\\*|/a\\*|\\*\\*){1,4}"), 0..12),
            path in "(/[ab]{1,2}){0,4}/?", host in "(/[ab]{1,2}){0,3}",
        ) {
            let list = policies(&patterns);
            let request = BTreeMap::from([("path", path), ("host", host)].map(|(name, value)| (name.to_owned(), value)));
            let by_asking: Vec<&str> = list.iter().filter(|policy| policy.applies_to(&request)).map(Policy::name).collect();
            let set = Policies::new(list.clone()).expect("names of their own");
            let selection = set.select(&request, None).expect("sound");
            let by_index: Vec<&str> = selection.charges.iter().map(|selected| selected.policy().name()).collect();
            prop_assert_eq!(by_index, by_asking);
        }
    }

    #[test]
    fn a_thousand_policies_leave_a_handful_to_ask() {
        let patterns: Vec<(String, String)> = (0..1_000)
            .map(|number| match number % 3 {
                0 => ("path".to_owned(), format!("/service-{number}/**")),
                1 => ("path".to_owned(), format!("/service-{number}/items")),
                _ => ("domain".to_owned(), format!("domain-{number}")),
            })
            .collect();
        let index = Index::new(&policies(&patterns));
        let request = [("path", "/service-300/items/7"), ("domain", "domain-302")];
        let request =
            BTreeMap::from(request.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(index.candidates(&request), [300, 302]);
    }
}
