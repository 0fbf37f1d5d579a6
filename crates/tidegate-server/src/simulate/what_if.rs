//! [`Comparison`]: the requests that two configurations decide differently.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::run::RequestVerdict;
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
    /// Policies and keys with a request that is newly denied.
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
    pub(super) fn record(&mut self, now: u64, current: &RequestVerdict, other: &RequestVerdict) {
        let series = self.series.get_or_insert_with(|| Series::new(now));
        match (current, other) {
            (RequestVerdict::Admitted, RequestVerdict::Denied { policy, key }) => {
                series.at(now).denied += 1;
                self.newly_denied += 1;
                let name = (policy.clone(), key.clone());
                let denials = self.keys.entry(name).or_insert(NewDenials {
                    requests: 0,
                    first: now,
                    last: now,
                });
                denials.requests += 1;
                denials.last = now;
            }
            (RequestVerdict::Denied { .. }, RequestVerdict::Admitted) => self.newly_admitted += 1,
            (RequestVerdict::Error, RequestVerdict::Error) => {}
            (RequestVerdict::Error, _) | (_, RequestVerdict::Error) => self.other_errors += 1,
            _ => {}
        }
    }

    /// Returns the keys with most such requests: policy, key and counts.
    pub(super) fn heaviest_keys(&self, count: usize) -> Vec<(&str, &str, NewDenials)> {
        let mut keys: Vec<(&str, &str, NewDenials)> = self
            .keys
            .iter()
            .map(|((policy, key), denials)| (policy.as_str(), key.as_str(), *denials))
            .collect();
        keys.sort_unstable_by_key(|(policy, key, denials)| {
            (Reverse(denials.requests), *policy, *key)
        });
        keys.truncate(count);
        keys
    }
}
