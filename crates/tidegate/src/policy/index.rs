//! Index of the policies that a request may match, without trying each.
//!
//! A policy is indexed by the literal prefix of its path pattern, by the exact value of another
//! attribute, or in the list that is always tried. A request is searched for by its path prefixes
//! and values, so the work grows with the depth of its path, not with the number of policies.

use std::borrow::Cow;
use std::collections::HashMap;

use super::pattern::Pattern;
use super::select::RequestValues;
use super::{KeySource, Policy};

#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    always: Vec<usize>,
    /// By the literal segments at the start of the path; "" for the root.
    by_path: HashMap<String, Vec<usize>>,
    /// Highest number of segments in `by_path`. Longer prefixes of a request are not looked up, so
    /// that the work stays linear in the length of its path.
    max_segments: usize,
    /// By attribute, then by its exact value.
    by_value: HashMap<KeySource, HashMap<String, Vec<usize>>>,
}

impl Index {
    pub(super) fn new(policies: &[Policy]) -> Self {
        let mut index = Self::default();
        for (position, policy) in policies.iter().enumerate() {
            let exact = |pattern: &Pattern| matches!(pattern, Pattern::Exact(_));
            let path = policy.conditions.iter().find(|condition| condition.attribute.is_path());
            // A method selects little; any other exact value selects much.
            let value = policy.conditions.iter().find(|condition| {
                !["path", "method"].contains(&condition.attribute.as_str())
                    && condition.patterns.iter().all(exact)
            });
            if let Some(path) = path {
                for pattern in &path.patterns {
                    let prefix = match pattern {
                        Pattern::Exact(text) => text.trim_end_matches('/'),
                        Pattern::Wild { literal_prefix, .. } => literal_prefix,
                        Pattern::Networks(_) => "",
                    };
                    index.max_segments = index.max_segments.max(prefix.matches('/').count());
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

    /// Returns the positions of the candidates, in the order of the policies and without
    /// duplicates.
    pub(super) fn candidates(&self, request: &RequestValues<'_>) -> Cow<'_, [usize]> {
        if self.by_path.is_empty() && self.by_value.is_empty() {
            return Cow::Borrowed(&self.always);
        }
        let mut found = self.always.clone();
        if let Some(path) = request.path().filter(|_| !self.by_path.is_empty()) {
            let ends =
                path.match_indices('/').map(|(at, _)| at).chain([path.trim_end_matches('/').len()]);
            for end in ends.take(self.max_segments + 1) {
                found.extend(self.by_path.get(&path[..end]).into_iter().flatten());
            }
        }
        for (attribute, values) in &self.by_value {
            if let Some(value) = request.get(attribute) {
                found.extend(values.get(&*value).into_iter().flatten());
            }
        }
        found.sort_unstable();
        found.dedup();
        Cow::Owned(found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::policy::{Policies, normalize_path};
    use crate::quota::Quota;

    fn policies(patterns: &[(String, String)]) -> Vec<Policy> {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let policy = |(number, (attribute, pattern)): (usize, &(String, String))| {
            let policy = Policy::builder(format!("p{number}"), quota.clone());
            policy.matches(attribute, [pattern]).build().expect("a valid policy")
        };
        patterns.iter().enumerate().map(policy).collect()
    }

    proptest! {
        /// The index may only leave out policies that would not have matched.
        #[test]
        fn index_and_linear_search_select_the_same_policies(
            patterns in proptest::collection::vec(("path|descriptor\\.x|domain", "(/[ab]{1,2}|/\\*|/\\*\\*|/a\\*|\\*\\*){1,4}"), 0..12),
            path in "(/[ab]{1,2}){0,4}/?", host in "(/[ab]{1,2}){0,3}",
        ) {
            let list = policies(&patterns);
            let request = BTreeMap::from([("path", path), ("descriptor.x", host)].map(|(name, value)| (name.to_owned(), value)));
            let path = normalize_path(&request["path"]);
            let values = RequestValues::new(&request, Some(&path));
            let by_search: Vec<&str> = list.iter().filter(|policy| policy.applies_to(&values).expect("sound")).map(Policy::name).collect();
            let set = Policies::new(list.clone()).expect("names of their own");
            let selection = set.select(&request, None).expect("sound");
            let by_index: Vec<&str> = selection.charges.iter().map(crate::policy::PreparedCharge::policy).collect();
            prop_assert_eq!(by_index, by_search);
        }
    }

    #[test]
    fn index_leaves_few_candidates_of_a_thousand_policies() {
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
        let request = RequestValues::new(&request, Some("/service-300/items/7"));
        assert_eq!(*index.candidates(&request), [300, 302]);
    }
}
