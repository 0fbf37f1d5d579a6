//! `suggest`: from an access log to limits, and which clients they would deny.
//!
//! One pass over the log writes each request as 16 bytes to a temporary file. All counts are exact,
//! and are made from that file: a window has a cursor at its end and one at its start, so memory
//! grows with the number of keys, not with that of the requests.

#![expect(clippy::cast_precision_loss, reason = "percentages and coordinates")]

use std::time::Duration;

use serde::{Serialize, Serializer};
use tidegate::Quota;

use self::traffic::{ClientKind, Traffic};
use self::windows::KeyDecisions;
use crate::simulate::lines_json;
use crate::simulate::log::LineCounts;
use crate::tool::text::whole;
use tidegate_api::duration;

mod page;
mod paths;
mod report;
mod trace;
mod traffic;
mod windows;

pub(crate) use traffic::{MAX_GROUPS, Recorder, TrafficCounts};

/// Windows whose busiest one is found for each key.
pub(crate) const WINDOWS: [(&str, Duration); 5] = [
    ("1s", Duration::from_secs(1)),
    ("10s", Duration::from_secs(10)),
    ("1m", Duration::from_secs(60)),
    ("1h", Duration::from_secs(3_600)),
    ("1d", Duration::from_secs(86_400)),
];
/// Digits of limits that people choose, in tenths.
const ROUND: [u64; 11] = [10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100];
/// Limits that are tried, from the highest on, besides those that are asked for.
const MAX_TRIED: usize = 11;
/// Maximum number of limits that are asked for: one more is the suggested one.
pub(crate) const MAX_GIVEN: usize = windows::MAX_LIMITS - MAX_TRIED - 1;

/// Choices of a suggestion.
#[derive(Debug, Clone)]
pub(crate) struct SuggestOptions {
    /// Percentage of the clients that a limit is derived from.
    pub(crate) percentile: f64,
    /// Factor between the requests of that percentile and the limit.
    pub(crate) margin: f64,
    /// Index of the window of the suggested policies.
    pub(crate) window: usize,
    /// Limits to try besides round ones.
    pub(crate) limits: Vec<u64>,
    /// Number of denied keys that are named.
    pub(crate) top: usize,
}

/// Result of the command.
#[derive(Debug, Serialize)]
pub(crate) struct Suggestion {
    #[serde(flatten)]
    counts: TrafficCounts,
    #[serde(serialize_with = "serialize_lines")]
    lines: LineCounts,
    /// First and last request, in microseconds since the Unix epoch.
    #[serde(skip)]
    times: (u64, u64),
    start: String,
    end: String,
    key: Vec<String>,
    percentile: f64,
    margin: f64,
    /// Paths of health checks: their requests are counted by no policy.
    health_check_paths: Vec<&'static str>,
    groups: Vec<GroupSuggestion>,
    /// The policies in shadow mode.
    yaml: String,
}

/// Suggestion for all paths, or for a group of them.
#[derive(Debug, Serialize)]
struct GroupSuggestion {
    /// Pattern of the paths; `null` for all.
    path: Option<String>,
    kinds: Vec<KindCounts>,
    windows: Vec<WindowSuggestion>,
    policy: PolicySuggestion,
}

/// Keys of a kind, and those that the suggested policy denies.
#[derive(Debug, Serialize)]
struct KindCounts {
    kind: ClientKind,
    keys: u64,
    requests: u64,
    denied_keys: u64,
    denied_requests: u64,
}

/// Requests of the clients in their busiest windows of one length.
#[derive(Debug, Serialize)]
struct WindowSuggestion {
    window: &'static str,
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
    suggested_limit: u64,
    /// Limits that are tried, the suggested one among them.
    limits: Vec<TriedLimit>,
    /// Requests of each client in its busiest window, in ascending order.
    #[serde(skip)]
    peaks: Vec<u32>,
}

/// Clients that a limit denies at least once, and the requests that it denies.
#[derive(Debug, Clone, Serialize)]
struct TriedLimit {
    limit: u64,
    denied_keys: u64,
    denied_requests: u64,
}

/// Suggested policy, a token bucket.
#[derive(Debug, Serialize)]
struct PolicySuggestion {
    name: String,
    limit: u64,
    window: &'static str,
    burst: u64,
    /// Keys with most denied requests, of all kinds.
    top_denied: Vec<DeniedKey>,
}

#[derive(Debug, Serialize)]
struct DeniedKey {
    key: String,
    kind: ClientKind,
    requests: u64,
    denied: u64,
}

fn serialize_lines<S: Serializer>(lines: &LineCounts, serializer: S) -> Result<S::Ok, S::Error> {
    lines_json(lines).serialize(serializer)
}

impl Suggestion {
    /// Finds limits for the recorded requests.
    pub(crate) fn new(
        recorder: Recorder,
        lines: LineCounts,
        options: &SuggestOptions,
    ) -> anyhow::Result<Self> {
        let traffic = recorder.finish()?;
        let mut groups = vec![GroupSuggestion::new(&traffic, None, options)?];
        for (number, _) in traffic.groups.iter().enumerate() {
            let group = GroupSuggestion::new(&traffic, Some(number), options)?;
            if group.windows[0].max > 0 {
                groups.push(group);
            }
        }
        let times = traffic.counts.times.unwrap_or_default();
        let key = traffic.key.key().iter().map(|source| source.as_str().to_owned()).collect();
        let mut suggestion = Self {
            times,
            start: crate::simulate::utc(times.0),
            end: crate::simulate::utc(times.1),
            key,
            percentile: options.percentile,
            margin: options.margin,
            health_check_paths: traffic.health_paths.clone(),
            groups,
            counts: traffic.counts,
            lines,
            yaml: String::new(),
        };
        suggestion.yaml = suggestion.policies();
        Ok(suggestion)
    }

    /// Returns the policies in shadow mode.
    pub(crate) fn yaml(&self) -> &str {
        &self.yaml
    }

    /// Returns whether no request has the key.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups[0].windows[0].max == 0
    }
}

/// Requests of a group, with the busiest windows of each key.
struct GroupTraffic<'t> {
    traffic: &'t Traffic,
    group: Option<usize>,
    options: &'t SuggestOptions,
    /// By window and key.
    peaks: Vec<Vec<u32>>,
    has_clients: bool,
}

impl<'t> GroupTraffic<'t> {
    fn new(
        traffic: &'t Traffic,
        group: Option<usize>,
        options: &'t SuggestOptions,
    ) -> anyhow::Result<Self> {
        let busiest = |(_, window)| windows::peaks(traffic, group, duration::micros(window));
        let peaks = WINDOWS.into_iter().map(busiest).collect::<Result<_, _>>()?;
        let all = Self { traffic, group, options, peaks, has_clients: false };
        let has_clients = all.keys().any(|key| traffic.kind(key) == ClientKind::Client);
        Ok(Self { has_clients, ..all })
    }

    /// Returns the keys with a request.
    fn keys(&self) -> impl Iterator<Item = usize> {
        (0..self.traffic.key_count()).filter(|key| self.peaks[0][*key] > 0)
    }

    /// Returns whether a key is a client. Without clients, all keys are in their place.
    fn is_client(&self, key: usize) -> bool {
        let is_client = self.traffic.kind(key) == ClientKind::Client;
        self.peaks[0][key] > 0 && (is_client || !self.has_clients)
    }

    /// Returns the values of the clients, in ascending order.
    fn sorted(&self, values: &[u32]) -> Vec<u32> {
        let clients = self.keys().filter(|key| self.is_client(*key));
        let mut values: Vec<u32> = clients.map(|key| values[key]).collect();
        values.sort_unstable();
        values
    }

    /// Returns a limit with a margin for these clients.
    fn suggested(&self, sorted: &[u32]) -> u64 {
        round_up(percentile(sorted, self.options.percentile) as f64 * self.options.margin)
    }

    /// Tries limits in the window of this index.
    fn try_limits(&self, index: usize, highest: u64) -> anyhow::Result<WindowSuggestion> {
        let (name, window) = WINDOWS[index];
        let peaks = self.sorted(&self.peaks[index]);
        let suggested_limit = self.suggested(&peaks);
        let mut limits = tried_limits(highest, &self.options.limits);
        limits.push(suggested_limit);
        limits.sort_unstable();
        limits.dedup();
        let lowest = limits[0];
        let is_denied = |key| self.is_client(key) && u64::from(self.peaks[index][key]) > lowest;
        let window = duration::micros(window);
        let denied = windows::denials(self.traffic, self.group, window, &limits, is_denied)?;
        let tried = |(limit, denied_requests)| TriedLimit {
            limit,
            denied_keys: above(&peaks, limit),
            denied_requests,
        };
        Ok(WindowSuggestion {
            window: name,
            p50: percentile(&peaks, 50.0),
            p90: percentile(&peaks, 90.0),
            p99: percentile(&peaks, 99.0),
            p999: percentile(&peaks, 99.9),
            max: percentile(&peaks, 100.0),
            suggested_limit,
            limits: limits.into_iter().zip(denied).map(tried).collect(),
            peaks,
        })
    }

    /// Returns the keys of a kind, and those that are denied.
    fn kind_counts(&self, kind: ClientKind, decisions: &[KeyDecisions]) -> KindCounts {
        let of_kind = self.keys().filter(|key| self.traffic.kind(*key) == kind);
        let mut counts =
            KindCounts { kind, keys: 0, requests: 0, denied_keys: 0, denied_requests: 0 };
        for KeyDecisions { requests, denied } in of_kind.map(|key| decisions[key]) {
            counts.keys += 1;
            counts.requests += requests;
            counts.denied_keys += u64::from(denied > 0);
            counts.denied_requests += denied;
        }
        counts
    }

    /// Returns the keys with most denied requests.
    fn top_denied(&self, decisions: &[KeyDecisions]) -> Vec<DeniedKey> {
        let mut keys: Vec<usize> = self.keys().filter(|key| decisions[*key].denied > 0).collect();
        keys.sort_unstable_by_key(|key| {
            (std::cmp::Reverse(decisions[*key].denied), self.traffic.key_name(*key))
        });
        let named = keys.into_iter().take(self.options.top).map(|key| DeniedKey {
            key: report::shown_key(&self.traffic.key, self.traffic.key_name(key)),
            kind: self.traffic.kind(key),
            requests: decisions[key].requests,
            denied: decisions[key].denied,
        });
        named.collect()
    }
}

impl GroupSuggestion {
    fn new(
        traffic: &Traffic,
        group: Option<usize>,
        options: &SuggestOptions,
    ) -> anyhow::Result<Self> {
        let path = group.map(|group| traffic.groups[group].clone());
        let all = GroupTraffic::new(traffic, group, options)?;
        let longest = all.peaks.last().map_or_else(Vec::new, |peaks| all.sorted(peaks));
        let highest = percentile(&longest, 100.0);
        let windows = (0..WINDOWS.len()).map(|index| all.try_limits(index, highest));
        let windows = windows.collect::<anyhow::Result<Vec<_>>>()?;
        let (name, window) = WINDOWS[options.window];
        let limit = windows[options.window].suggested_limit;
        let bursts = windows::bursts(traffic, group, limit, duration::micros(window))?;
        let burst = all.suggested(&all.sorted(&bursts)).min(limit);
        let quota = Quota::token_bucket(limit, window)?.with_burst(burst)?;
        let decisions = windows::decide(traffic, group, &quota)?;
        let policy = PolicySuggestion {
            name: path.clone().unwrap_or_else(|| report::ALL_PATHS.to_owned()),
            limit,
            window: name,
            burst,
            top_denied: all.top_denied(&decisions),
        };
        let kinds = ClientKind::ALL.map(|kind| all.kind_counts(kind, &decisions));
        let kinds = kinds.into_iter().filter(|counts| counts.keys > 0).collect();
        Ok(Self { path, kinds, windows, policy })
    }

    /// Returns the number of clients, or of keys if there are no clients.
    fn clients(&self) -> u64 {
        self.windows[0].peaks.len() as u64
    }
}

/// Returns the value of the nearest rank: the smallest one that this percentage does not exceed.
fn percentile(sorted: &[u32], percent: f64) -> u64 {
    // Less the error of a number such as 99.9.
    let rank = (sorted.len() as f64 * percent / 100.0 - 1e-9).ceil();
    let index = whole(rank).saturating_sub(1);
    let value = usize::try_from(index).ok().and_then(|index| sorted.get(index));
    value.or(sorted.last()).map_or(0, |value| u64::from(*value))
}

/// Returns the number of values above a limit: a sliding log denies exactly these keys.
fn above(sorted: &[u32], limit: u64) -> u64 {
    (sorted.len() - sorted.partition_point(|value| u64::from(*value) <= limit)) as u64
}

/// Rounds a number up to a limit that people choose, at least 1.
fn round_up(number: f64) -> u64 {
    let number = whole(number.ceil()).max(1);
    let scale = 10_u64.pow(number.ilog10());
    let round = ROUND.into_iter().filter(|digits| scale > 1 || digits % 10 == 0);
    let mut round = round.map(|digits| digits * scale / 10);
    round.find(|it| *it >= number).unwrap_or(number)
}

/// Returns 1, 2, 5, 10 … up to the first one that denies no client, and the given limits.
fn tried_limits(highest: u64, given: &[u64]) -> Vec<u64> {
    let steps = (0..19).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)));
    let steps: Vec<u64> = steps.collect();
    let end = steps.partition_point(|step| *step < highest) + 1;
    let end = end.min(steps.len());
    [&steps[end.saturating_sub(MAX_TRIED)..end], given].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_round_and_never_below_the_number() {
        let round = [0.0, 1.0, 7.0, 9.2, 10.1, 41.0, 86.0, 100.0, 101.0, 1_234.0].map(round_up);
        assert_eq!(round, [1, 1, 8, 10, 12, 50, 100, 100, 120, 1_500]);
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values = [1, 2, 3, 4];
        assert_eq!([50.0, 75.0, 99.9, 100.0].map(|it| percentile(&values, it)), [2, 3, 4, 4]);
        assert_eq!(percentile(&[], 50.0), 0);
        assert_eq!([0, 2, 4].map(|limit| above(&values, limit)), [4, 2, 0]);
    }

    #[test]
    fn tried_limits_end_at_the_first_that_denies_nothing() {
        assert_eq!(tried_limits(1, &[]), [1]);
        assert_eq!(tried_limits(60, &[86]), [1, 2, 5, 10, 20, 50, 100, 86]);
        assert_eq!(tried_limits(u64::MAX, &[]).len(), MAX_TRIED);
    }
}
