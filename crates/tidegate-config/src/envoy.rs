//! Rules of envoyproxy/ratelimit: loads its YAML files unmodified, or the messages of a control
//! plane, and finds the rule for a descriptor. Files of one domain are merged.
//!
//! A domain is a tree. The name of a node is its *composite*: `key_value`, or `key` alone for any
//! value. The search descends one level per entry of the descriptor: to the exact composite, else
//! the first matching wildcard of the files, else the key alone. It never backtracks, and only the
//! node of the last entry can limit the descriptor.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use prost_types::Struct;
use serde_saphyr::Location;
use tidegate::{Algorithm, Enforcement, HoldTerms, OnExpire, Quota, QuotaError, ShowKeys};

use crate::warning::ConfigWarning;

mod error;
mod fields;
mod load;
mod message;
mod metadata;
mod names;
mod raw;

pub use message::{RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace};
pub use names::{CounterParts, counter_key, metric_name, override_name, parse_counter_key};

#[cfg(test)]
mod tests;

/// Rules of all domains.
#[derive(Debug)]
pub struct Rules {
    domains: BTreeMap<String, Level>,
    /// In the order of the files. Nodes refer to them by index.
    all: Vec<Rule>,
    warnings: Vec<ConfigWarning>,
}

/// Node with a limit.
#[derive(Debug)]
pub struct Rule {
    /// Name in ratelimit's statistics, which is also a valid policy name: the domain and each
    /// composite, such as `edge.message_type_marketing.to_number`.
    pub path: String,
    pub name: Option<String>,
    /// Keys of the entries on the path to this node.
    pub keys: Vec<String>,
    /// Names of the rules that do not apply to the other descriptors of a request if this rule
    /// applies.
    pub replaces: Vec<String>,
    pub limit: Limit,
    /// Units that a request holds until it reports those that it used.
    pub reserve: Option<u64>,
    pub mode: RuleMode,
    /// For the response to Envoy, if requests are within the limit.
    pub metadata: Option<Struct>,
    detailed_metric: bool,
}

impl Rule {
    /// Returns the form in which operators see the keys.
    pub fn show_keys(&self) -> ShowKeys {
        ShowKeys::default_for(self.keys.iter().map(String::as_str))
    }

    fn set_holds(&mut self, holds: RuleHolds) -> Result<(), String> {
        let Limit::Quota(_, quota) = &mut self.limit else { return Ok(()) };
        let terms = match holds {
            RuleHolds { reserve: None, on_expire: None, ttl } if quota.is_concurrency() => {
                ttl.map_or(*quota.holds(), terms_until)
            }
            _ if quota.is_concurrency() => {
                return Err("a rule of units in flight has no reserve and no on_expire".to_owned());
            }
            RuleHolds { reserve: None, .. } => {
                return Err(
                    "reserve is missing: only units in flight are held without it".to_owned()
                );
            }
            RuleHolds { reserve: Some(units), .. } if units > quota.limit() => {
                let limit = quota.limit();
                return Err(format!("reserve is {units}, but the rule admits at most {limit}"));
            }
            RuleHolds { on_expire, ttl, .. } => {
                let ttl = ttl.unwrap_or_else(|| default_ttl(quota.window()));
                terms_until(ttl).with_on_expire(on_expire.unwrap_or_default())
            }
        };
        self.reserve = holds.reserve;
        *quota = quota.clone().with_holds(terms);
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "nearly every rule has a quota")]
pub enum Limit {
    Unlimited,
    /// Limit of 0 per window, which a [`Quota`] cannot have.
    Zero(Unit, Duration),
    Quota(Unit, Quota),
}

/// Holds of the rules with a name: of their reservations, or of units in flight.
#[derive(Debug, Clone, Copy, Default)]
pub struct RuleHolds {
    pub reserve: Option<u64>,
    pub ttl: Option<Duration>,
    pub on_expire: Option<OnExpire>,
}

/// Effect of a rule whose limit is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleMode {
    Enforce,
    /// Requests are counted, but never denied.
    Shadow,
    /// A request is denied only if all of its rules in this mode are exceeded.
    Quota,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Second,
    Minute,
    Hour,
    Day,
    Week,
    Month,
    Year,
}

/// Rule for a descriptor, with the key of its counter.
#[derive(Debug)]
pub struct MatchedRule<'a> {
    pub rule: &'a Rule,
    /// Name in metrics: the path of the rule, with the values of the descriptor if
    /// `value_to_metric` or `detailed_metric` is set.
    pub metric: Cow<'a, str>,
    /// Key of the counter: see [`counter_key`].
    pub key: String,
}

impl Rules {
    /// Returns the rule for a descriptor, given by the keys and values of its entries. `None` if
    /// the descriptor has no limit.
    pub fn find<'a>(
        &self,
        domain: &str,
        entries: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Option<MatchedRule<'_>> {
        let mut level = self.domains.get(domain)?;
        let entries = entries.into_iter();
        let mut matches = Vec::with_capacity(entries.size_hint().0);
        for (key, value) in entries {
            let found = level.find(key, value)?;
            level = &found.node.children;
            matches.push(found);
        }
        let rule = &self.all[matches.last()?.node.rule?];
        let counter_entries = matches.iter().map(|entry| (entry.key, entry.counter_value));
        let metric = if rule.detailed_metric {
            Cow::Owned(metric_name(domain, counter_entries.clone()))
        } else if matches.iter().any(|entry| entry.node.value_to_metric) {
            let metric_entries = matches.iter().map(|entry| (entry.key, entry.metric_value));
            Cow::Owned(metric_name(domain, metric_entries))
        } else {
            Cow::Borrowed(rule.path.as_str())
        };
        Some(MatchedRule { rule, metric, key: counter_key(domain, counter_entries) })
    }

    pub fn domains(&self) -> impl Iterator<Item = &str> {
        self.domains.keys().map(String::as_str)
    }

    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.all.iter()
    }

    /// Sets the holds of the rules with this name. Returns the reason why they are invalid.
    pub fn set_holds(&mut self, name: &str, holds: RuleHolds) -> Result<(), String> {
        let mut rules = self.all.iter_mut().filter(|rule| rule.name.as_deref() == Some(name));
        rules.try_for_each(|rule| rule.set_holds(holds))
    }

    /// Returns the parts that are loaded, but perhaps not as their author expects.
    pub fn warnings(&self) -> &[ConfigWarning] {
        &self.warnings
    }
}

impl Limit {
    /// Creates a limit of `requests` per window of `units` times `unit`.
    pub fn new(
        algorithm: Algorithm,
        requests: u32,
        units: u32,
        unit: Unit,
    ) -> Result<Self, QuotaError> {
        let window = unit.window() * units;
        let limit = u64::from(requests);
        match (limit, algorithm) {
            (0, _) => Ok(Self::Zero(unit, window)),
            (_, Algorithm::Concurrency) => {
                let quota = Quota::concurrency(limit)?;
                Ok(Self::Quota(unit, quota.with_holds(terms_until(default_ttl(window)))))
            }
            _ => Ok(Self::Quota(unit, Quota::new(algorithm, limit, window)?)),
        }
    }

    /// Returns whether it limits units in flight.
    pub fn is_concurrency(&self) -> bool {
        matches!(self, Self::Quota(_, quota) if quota.is_concurrency())
    }
}

/// Returns the time after which a request holds nothing any more, even if it has not ended: the
/// window, but at least a minute, because requests take time, and at most an hour, because the units
/// of a proxy that has crashed are held as long.
fn default_ttl(window: Duration) -> Duration {
    const MINUTE: Duration = Duration::from_secs(60);
    window.clamp(MINUTE, 60 * MINUTE)
}

/// Returns the terms of holds that are not renewed.
fn terms_until(ttl: Duration) -> HoldTerms {
    HoldTerms::new(ttl, ttl).unwrap_or_default()
}

impl From<RuleMode> for Enforcement {
    fn from(mode: RuleMode) -> Self {
        match mode {
            RuleMode::Enforce => Self::Enforce,
            RuleMode::Shadow => Self::Shadow,
            RuleMode::Quota => Self::AllDenied,
        }
    }
}

impl RuleMode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
            Self::Quota => "quota",
        }
    }
}

impl Unit {
    pub const ALL: [Self; 7] =
        [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Returns the fixed length, as in ratelimit: a month has 30 days and a year 365.
    pub fn window(self) -> Duration {
        const DAY: u64 = 86_400;
        Duration::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => DAY,
            Self::Week => 7 * DAY,
            Self::Month => 30 * DAY,
            Self::Year => 365 * DAY,
        })
    }

    /// Returns the number in the messages of Envoy and of control planes. They never change.
    pub fn number(self) -> i32 {
        match self {
            Self::Second => 1,
            Self::Minute => 2,
            Self::Hour => 3,
            Self::Day => 4,
            Self::Month => 5,
            Self::Year => 6,
            Self::Week => 7,
        }
    }

    /// Returns the unit with this number.
    pub fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.number() == number)
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.as_str().eq_ignore_ascii_case(name))
    }

    fn names() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

/// Nodes below a domain or another node.
#[derive(Debug, Default)]
struct Level {
    /// By composite.
    nodes: BTreeMap<String, Node>,
    /// In the order of the file.
    wildcards: Vec<Wildcard>,
}

#[derive(Debug)]
struct Node {
    /// Index in [`Rules::all`].
    rule: Option<usize>,
    children: Level,
    value_to_metric: bool,
    share_threshold: bool,
    origin: Origin,
}

/// Place where a node is defined.
#[derive(Debug, Clone, Copy)]
struct Origin {
    /// Index of the file.
    file: usize,
    location: Location,
}

/// Composite with one or more `*`, each of which matches any text, including an empty one.
#[derive(Debug)]
struct Wildcard {
    composite: String,
    prefix: String,
    /// Parts between two `*`, in their order.
    middle: Vec<String>,
    suffix: String,
}

/// Entry of a descriptor, with the node that it matches.
struct Match<'a> {
    node: &'a Node,
    key: &'a str,
    /// Value in the key of the counter: with `share_threshold` the wildcard, so that all values
    /// that match it share one counter.
    counter_value: &'a str,
    /// Value in metrics, if the rule has no `detailed_metric`.
    metric_value: &'a str,
}

impl Level {
    /// Returns the node for an entry.
    fn find<'a>(&'a self, key: &'a str, value: &'a str) -> Option<Match<'a>> {
        let exact = [key, "_", value].concat();
        if let Some(node) = self.nodes.get(&exact) {
            return Some(Match { node, key, counter_value: value, metric_value: value });
        }
        if let Some(wildcard) = self.wildcards.iter().find(|wildcard| wildcard.matches(&exact)) {
            let node = self.nodes.get(&wildcard.composite)?;
            let pattern = wildcard.value_for(key);
            let counter_value = if node.share_threshold { pattern } else { value };
            let metric_value = if node.value_to_metric { counter_value } else { pattern };
            return Some(Match { node, key, counter_value, metric_value });
        }
        let node = self.nodes.get(key)?;
        let metric_value = if node.value_to_metric { value } else { "" };
        Some(Match { node, key, counter_value: value, metric_value })
    }
}

impl Wildcard {
    fn new(composite: &str) -> Option<Self> {
        let (prefix, rest) = composite.split_once('*')?;
        let (middle, suffix) = rest.rsplit_once('*').unwrap_or(("", rest));
        Some(Self {
            composite: composite.to_owned(),
            prefix: prefix.to_owned(),
            middle: middle.split('*').map(str::to_owned).collect(),
            suffix: suffix.to_owned(),
        })
    }

    fn matches(&self, text: &str) -> bool {
        let inner =
            text.strip_prefix(&self.prefix).and_then(|rest| rest.strip_suffix(&self.suffix));
        let Some(mut rest) = inner else { return false };
        // The earliest match of each part leaves the most text for the next part, so no
        // backtracking is needed.
        for part in &self.middle {
            let Some((_, after)) = rest.split_once(part.as_str()) else { return false };
            rest = after;
        }
        true
    }

    /// Returns the value of the composite: the part after the key, or all of it if the `*` is in
    /// the key.
    fn value_for(&self, key: &str) -> &str {
        let value = self.composite.strip_prefix(key).and_then(|rest| rest.strip_prefix('_'));
        value.unwrap_or(&self.composite)
    }
}
