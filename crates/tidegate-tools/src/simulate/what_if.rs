//! [`Comparison`]: the requests that two configurations decide differently.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::run::ReplayResult;
use super::series::Series;

/// Requests that the current configuration and another one decide differently.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) newly_denied: u64,
    pub(super) newly_admitted: u64,
    /// Requests that only one of the configurations answers with an error.
    pub(super) other_errors: u64,
    /// Requests that are newly denied, as `denied` of the bins.
    pub(super) series: Option<Series>,
    /// Policies and keys with a request that is newly denied; a key is empty if the request lacks
    /// it.
    pub(super) keys: HashMap<(String, String), NewDenials>,
}

/// Requests of one key that are newly denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NewDenials {
    pub(super) requests: u64,
    pub(super) first: u64,
    pub(super) last: u64,
}

impl Comparison {
    pub(super) fn record(
        &mut self,
        now: u64,
        current: &ReplayResult<'_>,
        other: &ReplayResult<'_>,
    ) {
        let series = self.series.get_or_insert_with(|| Series::new(now));
        match (current, other) {
            (Ok(current), Ok(other)) => match (current.denied_by(), other.denied_by()) {
                (None, Some(denial)) => {
                    series.at(now).denied += 1;
                    self.newly_denied += 1;
                    let key = denial.key().unwrap_or_default();
                    let name = (denial.policy().to_owned(), key.to_owned());
                    let new = NewDenials { requests: 0, first: now, last: now };
                    let denials = self.keys.entry(name).or_insert(new);
                    denials.requests += 1;
                    denials.last = now;
                }
                (Some(_), None) => self.newly_admitted += 1,
                _ => {}
            },
            (Err(_), Err(_)) => {}
            _ => self.other_errors += 1,
        }
    }

    /// Returns the keys, those with most such requests first: policy, key and counts.
    pub(super) fn heaviest_keys(&self) -> Vec<(&str, &str, NewDenials)> {
        let mut keys: Vec<(&str, &str, NewDenials)> = self
            .keys
            .iter()
            .map(|((policy, key), denials)| (policy.as_str(), key.as_str(), *denials))
            .collect();
        keys.sort_unstable_by_key(|(policy, key, denials)| {
            (Reverse(denials.requests), *policy, *key)
        });
        keys
    }
}
