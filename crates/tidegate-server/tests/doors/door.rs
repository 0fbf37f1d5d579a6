//! Answers and records of a front door.

use std::collections::{BTreeMap, BTreeSet};

use crate::cases::Case;
use crate::support::{Response, Service};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Allowed,
    Denied,
    /// The request is invalid.
    Error,
}

/// Answer to one request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    /// Limit and remaining units of the binding limit.
    pub(crate) limit: Option<(u64, u64)>,
    /// Rate limit headers, where the door has any. Waits are replaced: they depend on the time.
    pub(crate) headers: Option<Vec<(String, String)>>,
}

/// Fields of a `decide` span.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DecideSpan {
    pub(crate) action: String,
    pub(crate) allowed: Option<bool>,
    /// Names of the policies that applied.
    pub(crate) policies: String,
    pub(crate) denied_by: Option<String>,
}

/// Everything that a door answered and recorded.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) answers: Vec<(&'static str, Answer)>,
    /// Policy and key of every hot key.
    pub(crate) keys: BTreeSet<(String, String)>,
    /// Counters by name, with the policy among the labels.
    pub(crate) metrics: BTreeMap<String, u64>,
    /// Spans in the order of their start.
    pub(crate) spans: Vec<DecideSpan>,
}

impl Record {
    pub(crate) fn allowed(&self) -> Vec<Outcome> {
        self.answers.iter().map(|(_, answer)| answer.outcome).collect()
    }
}

pub(crate) trait Door {
    async fn send(&mut self, case: &Case) -> Answer;

    /// Collects the records of the door.
    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record;
}

/// Returns the answer of a door that speaks HTTP.
pub(crate) fn http_answer(response: &Response) -> Answer {
    let outcome = match response.status {
        200 => Outcome::Allowed,
        429 => Outcome::Denied,
        400 => Outcome::Error,
        other => panic!("status {other}: {response:?}"),
    };
    let header = |name: &str| response.header(name).map(|value| value.parse().expect("a number"));
    let limit = header("x-ratelimit-limit").zip(header("x-ratelimit-remaining"));
    let is_rate_limit = |name: &str| name.contains("ratelimit") || name == "retry-after";
    let headers = response.headers.iter().filter(|(name, _)| is_rate_limit(name));
    let mut headers: Vec<(String, String)> =
        headers.map(|(name, value)| (name.clone(), without_waits(name, value))).collect();
    headers.sort();
    Answer { outcome, limit, headers: Some(headers) }
}

/// Replaces the waits of nearly one or two days, which differ by the seconds that the test takes.
fn without_waits(name: &str, value: &str) -> String {
    let is_wait = |number: &str| {
        let days = [86_400, 2 * 86_400];
        let is_near = |seconds: u64| days.iter().any(|day| (day - 600..=*day).contains(&seconds));
        number.parse().is_ok_and(is_near)
    };
    match name {
        "retry-after" | "x-ratelimit-reset" if is_wait(value) => "WAIT".to_owned(),
        "ratelimit" => {
            let item = |item: &str| match item.rsplit_once(";t=") {
                Some((start, wait)) if is_wait(wait) => format!("{start};t=WAIT"),
                _ => item.to_owned(),
            };
            value.split(", ").map(item).collect::<Vec<_>>().join(", ")
        }
        _ => value.to_owned(),
    }
}

/// Returns the keys and counters of a running service.
pub(crate) fn read_admin(service: &Service) -> (BTreeSet<(String, String)>, BTreeMap<String, u64>) {
    let hot = service.admin("/v1/hot-keys?limit=1000").json();
    let lists = ["allowed", "denied", "shadow_denied"];
    let lists = lists.map(|list| hot[list].as_array().expect("a list").clone());
    let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
    let keys = lists.iter().flatten().map(|hot| (text(&hot["policy"]), text(&hot["key"])));
    let metrics = service.admin("/metrics").body;
    let counters = metrics.lines().filter(|line| {
        line.starts_with("tidegate_decisions_total")
            || line.starts_with("tidegate_missing_key_total")
            || line.starts_with("tidegate_limits_other_total")
    });
    let counters = counters.filter(|line| !line.contains("(quota)")).filter_map(|line| {
        let (name, count) = line.rsplit_once(' ')?;
        Some((name.to_owned(), count.parse().ok()?)).filter(|(_, count)| *count > 0)
    });
    (keys.collect(), counters.collect())
}
