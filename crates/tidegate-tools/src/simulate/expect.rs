//! [`Expectation`]: a condition on the counts of a simulation, for a pull request.

use std::cmp::Ordering;
use std::fmt;

use anyhow::Context as _;

use super::report::{SimulationReport, percent, tally_of};
use super::run::VariantRun;
use super::tally::PolicyTally;
use crate::tool::text::{float, grouped};

/// Counts of all requests, of a policy and of a key that can be expected.
const COUNTS: [&str; 5] = ["requests", "admitted", "denied", "shadow_denied", "newly_denied"];
const POLICY_COUNTS: [&str; 7] =
    ["requests", "admitted", "denied", "over", "under", "keys", "denied_keys"];
const KEY_COUNTS: [&str; 3] = ["requests", "admitted", "denied"];

/// Whether a count is as expected, by its order to the value.
type IsExpected = fn(Ordering) -> bool;

const OPERATORS: [(&str, IsExpected); 5] = [
    ("<=", Ordering::is_le),
    (">=", Ordering::is_ge),
    ("<", Ordering::is_lt),
    (">", Ordering::is_gt),
    ("=", Ordering::is_eq),
];

/// Condition such as `per-user.denied<0.1%`, `denied=0`, or that of a key.
#[derive(Debug, Clone)]
pub struct Expectation {
    text: String,
    subject: Subject,
    count: String,
    is_expected: IsExpected,
    value: f64,
    /// Whether the value is a percentage: of the keys for counts of keys, otherwise of the requests.
    is_percentage: bool,
}

#[derive(Debug, Clone)]
enum Subject {
    AllRequests,
    Policy(String),
    Key(String),
}

/// Expectation, compared with what one configuration did.
#[derive(Debug)]
pub(super) struct CheckedExpectation {
    pub(super) text: String,
    /// Name of the configuration.
    pub(super) variant: String,
    pub(super) holds: bool,
    pub(super) found: String,
}

impl Expectation {
    /// Parses `POLICY.COUNT<VALUE` or `COUNT<VALUE`.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::new(text, |left| match left.rsplit_once('.') {
            Some((policy, count)) => (Subject::Policy(policy.to_owned()), count, &POLICY_COUNTS),
            None => (Subject::AllRequests, left, &COUNTS),
        })
    }

    /// Parses `KEY COUNT<VALUE`.
    pub fn parse_key(text: &str) -> Result<Self, String> {
        Self::new(text, |left| {
            let (key, count) = left.rsplit_once(' ').unwrap_or((left, ""));
            (Subject::Key(key.trim_end().to_owned()), count, &KEY_COUNTS)
        })
    }

    fn new(
        text: &str,
        parse: impl FnOnce(&str) -> (Subject, &str, &'static [&'static str]),
    ) -> Result<Self, String> {
        let find = |(operator, is_expected)| Some((text.rsplit_once(operator)?, is_expected));
        let ((left, right), is_expected) = OPERATORS
            .into_iter()
            .find_map(find)
            .ok_or("write it like per-user.denied<0.1% or 'googlebot denied=0'")?;
        let (subject, count, counts) = parse(left.trim());
        if !counts.contains(&count) {
            let names = counts.join(", ");
            return Err(format!("{count:?} before the operator is not one of {names}"));
        }
        let number = right.trim().trim_end_matches('%');
        let value = number.trim_end().parse::<f64>().ok().filter(|value| *value >= 0.0);
        Ok(Self {
            text: text.to_owned(),
            count: count.to_owned(),
            subject,
            is_expected,
            value: value.ok_or_else(|| format!("{right:?} is not a number, such as 5 or 0.1%"))?,
            is_percentage: right.trim_end().ends_with('%'),
        })
    }

    /// Returns whether the counts are as expected; an error if there is no such policy.
    pub(super) fn check(
        &self,
        report: &SimulationReport,
        run: &VariantRun,
    ) -> anyhow::Result<CheckedExpectation> {
        let counts = &run.counts;
        let found = match &self.subject {
            Subject::AllRequests => {
                let newly_denied = report.comparison.as_ref().map(|it| it.newly_denied);
                let count = match self.count.as_str() {
                    "requests" => counts.requests,
                    "admitted" => counts.admitted,
                    "denied" => counts.denied,
                    "shadow_denied" => counts.shadow_denied,
                    _ => newly_denied.with_context(|| format!("{}: give --what-if", self.text))?,
                };
                Some((count, counts.requests))
            }
            Subject::Policy(name) => {
                let tally = tally_of(run, name).with_context(|| {
                    let names = counts.policies.iter().map(|tally| tally.name.as_str());
                    let names = names.collect::<Vec<_>>().join(", ");
                    format!("--expect {}: {} has {names}", self.text, run.name)
                })?;
                let keys = tally.keys.len() as u64;
                Some(match self.count.as_str() {
                    "keys" => (keys, keys),
                    "denied_keys" => (tally.denied_keys() as u64, keys),
                    "over" => (tally.over, tally.requests),
                    "under" => (tally.under, tally.requests),
                    count => of_three(count, tally.requests, tally.admitted, tally.denied),
                })
            }
            Subject::Key(name) => {
                let is_named = |tally: &PolicyTally, key: &str| tally.shown(key) == *name;
                let keys = counts.policies.iter().flat_map(|tally| {
                    let keys = tally.keys.iter().filter(|(key, _)| is_named(tally, key));
                    keys.map(|(_, it)| of_three(&self.count, it.requests, it.admitted, it.denied))
                });
                keys.reduce(|sum, it| (sum.0 + it.0, sum.1 + it.1))
            }
        };
        let (variant, text) = (run.name.clone(), self.text.clone());
        Ok(match found {
            Some((count, whole)) => CheckedExpectation {
                text,
                variant,
                holds: self.holds(count, whole),
                found: format!("{} ({})", grouped(count), percent(count, whole)),
            },
            // A condition on a key that sends nothing would always hold.
            None => CheckedExpectation {
                text,
                variant,
                holds: false,
                found: "no request has this key".to_owned(),
            },
        })
    }

    fn holds(&self, count: u64, whole: u64) -> bool {
        let part = if self.is_percentage { 100.0 / float(whole.max(1)) } else { 1.0 };
        (self.is_expected)((float(count) * part).total_cmp(&self.value))
    }
}

/// Returns a count of requests by its name, and the number that a percentage refers to.
fn of_three(name: &str, requests: u64, admitted: u64, denied: u64) -> (u64, u64) {
    let count = match name {
        "requests" => requests,
        "admitted" => admitted,
        _ => denied,
    };
    (count, requests)
}

impl fmt::Display for CheckedExpectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let result = if self.holds { "holds" } else { "fails" };
        write!(f, "expected {}: {result}, found {} with {}", self.text, self.found, self.variant)
    }
}
