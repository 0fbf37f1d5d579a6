//! Rules of envoyproxy/ratelimit: loads its YAML files unmodified and finds the rule for a
//! descriptor.
//!
//! A domain is a tree. The name of a node is its *composite*: `key_value`, or `key` alone for any
//! value. The search descends one level per entry of the descriptor: to the exact composite, else
//! the first matching wildcard of the file, else the key alone. It never backtracks, and only the
//! node of the last entry can limit the descriptor.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde_saphyr::{Location, Spanned};
use tidegate::{Algorithm, Enforcement, Quota, QuotaError, ShowKeys};

mod names;
mod raw;

use names::{composite, printable};
pub(crate) use names::{counter_key, metric_name, override_name};
use raw::{MAX_FILE_BYTES, RawDescriptor, RawFile, RawLimit};

#[cfg(test)]
mod tests;

/// Rules of all domains.
#[derive(Debug)]
pub(crate) struct Rules {
    domains: BTreeMap<String, Level>,
    /// In the order of the files. Nodes refer to them by index.
    rules: Vec<Rule>,
}

/// Node with a limit.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Name in ratelimit's statistics, which is also a valid policy name: the domain and each
    /// composite, such as `edge.message_type_marketing.to_number`.
    pub(crate) path: String,
    pub(crate) name: Option<String>,
    /// Keys of the entries on the path to this node.
    pub(crate) keys: Vec<String>,
    /// Names of the rules that do not apply to the other descriptors of a request if this rule
    /// applies.
    pub(crate) replaces: Vec<String>,
    pub(crate) limit: Limit,
    pub(crate) mode: RuleMode,
    detailed_metric: bool,
}

impl Rule {
    /// Returns the form in which operators see the keys.
    pub(crate) fn show_keys(&self) -> ShowKeys {
        ShowKeys::default_for(self.keys.iter().map(String::as_str))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Limit {
    Unlimited,
    /// Limit of 0 per window, which a [`Quota`] cannot have.
    Zero(Unit, Duration),
    Quota(Unit, Quota),
}

/// Effect of a rule whose limit is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleMode {
    Enforce,
    /// Requests are counted, but never denied.
    Shadow,
    /// A request is denied only if all of its rules in this mode are exceeded.
    Quota,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
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
pub(crate) struct MatchedRule<'a> {
    pub(crate) rule: &'a Rule,
    /// Name in metrics: the path of the rule, with the values of the descriptor if
    /// `value_to_metric` or `detailed_metric` is set.
    pub(crate) metric: Cow<'a, str>,
    /// Key of the counter: see [`counter_key`].
    pub(crate) key: String,
}

/// Error in a file, with its location and how to fix it.
#[derive(Debug, thiserror::Error)]
#[error("{location}: {kind}")]
pub(crate) struct RulesError {
    /// File and line, or the field of the configuration.
    location: String,
    kind: RulesErrorKind,
}

#[derive(Debug, thiserror::Error)]
enum RulesErrorKind {
    #[error("has {0} bytes: at most {MAX_FILE_BYTES} are allowed")]
    TooLarge(usize),
    #[error("{field}{message}")]
    Yaml { field: String, message: String },
    #[error("domain is missing or empty: write the domain that Envoy's rate limit filter sends")]
    MissingDomain,
    #[error("domain {domain:?} is already defined in {first}: keep each domain in one file")]
    DuplicateDomain { domain: String, first: String },
    #[error("key is missing or empty: a descriptor needs the key of an entry")]
    MissingKey,
    #[error("descriptor {0:?} is duplicated: merge the two")]
    DuplicateDescriptor(String),
    #[error("share_threshold needs a wildcard to share: write a value with a *, such as files/*")]
    NoWildcardToShare,
    #[error("rate_limit.unit is missing: it must be one of {}", Unit::names())]
    MissingUnit,
    #[error("rate_limit.requests_per_unit is missing: write 0 to deny every request")]
    MissingRequests,
    #[error("rate_limit has both unlimited and the unit {}: remove one of them", .0.as_str())]
    UnlimitedWithUnit(Unit),
    #[error("rate_limit.{field}: {error}")]
    Quota { field: &'static str, error: QuotaError },
    #[error(
        "rate_limit.replaces has an entry without a name: write the name of the rule to replace"
    )]
    MissingReplacedName,
    #[error("rate_limit.replaces has the rule's own name {0:?}: a rule cannot replace itself")]
    ReplacesItself(String),
    #[error("no rule is named {name:?}: {known}")]
    UnknownRule { name: String, known: String },
}

impl Rules {
    /// Loads files, given by name and text. Rules use `algorithm`, unless their name is in
    /// `algorithms`.
    pub(crate) fn load(
        files: &[(String, String)],
        algorithm: Algorithm,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<Self, RulesError> {
        let mut all = Self { domains: BTreeMap::new(), rules: Vec::new() };
        let mut file_of_domain = BTreeMap::new();
        for (file, text) in files {
            let location = FileLocation { file, location: Location::UNKNOWN };
            let RawFile { domain, descriptors } = RawFile::parse(file, text)?;
            if domain.is_empty() {
                return Err(location.error(RulesErrorKind::MissingDomain));
            }
            if let Some(first) = file_of_domain.insert(domain.clone(), file) {
                let kind = RulesErrorKind::DuplicateDomain { domain, first: first.clone() };
                return Err(location.error(kind));
            }
            let mut loader = Loader { file, algorithm, algorithms, rules: &mut all.rules };
            let level = loader.load_level(&domain, &[], descriptors)?;
            all.domains.insert(domain, level);
        }
        all.check_algorithm_names(algorithms)?;
        Ok(all)
    }

    /// Rejects an algorithm for an unknown rule: its name is misspelt, or the rule was renamed.
    fn check_algorithm_names(
        &self,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<(), RulesError> {
        let mut names: Vec<&str> =
            self.rules.iter().filter_map(|rule| rule.name.as_deref()).collect();
        let Some(name) = algorithms.keys().find(|name| !names.contains(&name.as_str())) else {
            return Ok(());
        };
        names.sort_unstable();
        names.dedup();
        let known = match names.as_slice() {
            [] => "no rule of the files has a rate_limit.name".to_owned(),
            names => format!("the names in the files are {}", names.join(", ")),
        };
        let kind = RulesErrorKind::UnknownRule { name: name.clone(), known };
        Err(RulesError { location: "envoy.algorithms".to_owned(), kind })
    }

    /// Returns the rule for a descriptor, given by the keys and values of its entries. `None` if
    /// the descriptor has no limit.
    pub(crate) fn find<'a>(
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
        let rule = &self.rules[matches.last()?.node.rule?];
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

    pub(crate) fn domains(&self) -> impl Iterator<Item = &str> {
        self.domains.keys().map(String::as_str)
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }
}

impl Limit {
    /// Creates a limit of `requests` per window of `units` times `unit`.
    pub(crate) fn new(
        algorithm: Algorithm,
        requests: u32,
        units: u32,
        unit: Unit,
    ) -> Result<Self, QuotaError> {
        let window = unit.window() * units;
        match requests {
            0 => Ok(Self::Zero(unit, window)),
            requests => Ok(Self::Quota(unit, Quota::new(algorithm, requests.into(), window)?)),
        }
    }
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
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
            Self::Quota => "quota",
        }
    }
}

impl Unit {
    pub(crate) const ALL: [Self; 7] =
        [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    pub(crate) fn as_str(self) -> &'static str {
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
    pub(crate) fn window(self) -> Duration {
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
    /// Index in [`Rules::rules`].
    rule: Option<usize>,
    children: Level,
    value_to_metric: bool,
    share_threshold: bool,
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

/// Converts the descriptors of one file into nodes and rules.
struct Loader<'a> {
    file: &'a str,
    algorithm: Algorithm,
    algorithms: &'a BTreeMap<String, Algorithm>,
    rules: &'a mut Vec<Rule>,
}

impl Loader<'_> {
    fn load_level(
        &mut self,
        path: &str,
        keys: &[String],
        descriptors: Vec<Spanned<RawDescriptor>>,
    ) -> Result<Level, RulesError> {
        let mut level = Level::default();
        for Spanned { value: raw, referenced: location, .. } in descriptors {
            let location = FileLocation { file: self.file, location };
            if raw.key.is_empty() {
                return Err(location.error(RulesErrorKind::MissingKey));
            }
            let composite = composite(&raw.key, &raw.value);
            let path = format!("{path}.{composite}");
            if level.nodes.contains_key(&composite) {
                return Err(location.error(RulesErrorKind::DuplicateDescriptor(path)));
            }
            match Wildcard::new(&composite) {
                Some(wildcard) => level.wildcards.push(wildcard),
                None if raw.share_threshold => {
                    return Err(location.error(RulesErrorKind::NoWildcardToShare));
                }
                None => {}
            }
            let keys: Vec<String> = keys.iter().chain([&raw.key]).cloned().collect();
            let node = self.load_node(&path, &keys, raw)?;
            level.nodes.insert(composite, node);
        }
        Ok(level)
    }

    fn load_node(
        &mut self,
        path: &str,
        keys: &[String],
        raw: RawDescriptor,
    ) -> Result<Node, RulesError> {
        let mut rule = None;
        if let Some(Spanned { value: limit, referenced: location, .. }) = &raw.rate_limit {
            let location = FileLocation { file: self.file, location: *location };
            rule = Some(self.rules.len());
            self.rules.push(
                self.load_rule(path, keys, &raw, limit).map_err(|kind| location.error(kind))?,
            );
        }
        Ok(Node {
            rule,
            children: self.load_level(path, keys, raw.descriptors)?,
            value_to_metric: raw.value_to_metric,
            share_threshold: raw.share_threshold,
        })
    }

    fn load_rule(
        &self,
        path: &str,
        keys: &[String],
        raw: &RawDescriptor,
        limit: &RawLimit,
    ) -> Result<Rule, RulesErrorKind> {
        let name = Some(limit.name.clone()).filter(|name| !name.is_empty());
        let algorithm = name
            .as_ref()
            .and_then(|name| self.algorithms.get(name))
            .copied()
            .unwrap_or(self.algorithm);
        let replaces: Vec<String> =
            limit.replaces.iter().map(|replaced| replaced.name.clone()).collect();
        if replaces.iter().any(String::is_empty) {
            return Err(RulesErrorKind::MissingReplacedName);
        }
        if let Some(name) = name.as_ref().filter(|name| replaces.contains(name)) {
            return Err(RulesErrorKind::ReplacesItself(name.clone()));
        }
        Ok(Rule {
            path: printable(path),
            name,
            keys: keys.to_vec(),
            replaces,
            limit: limit.validate(algorithm)?,
            mode: match (raw.shadow_mode, raw.quota_mode) {
                (true, _) => RuleMode::Shadow,
                (false, true) => RuleMode::Quota,
                (false, false) => RuleMode::Enforce,
            },
            detailed_metric: raw.detailed_metric,
        })
    }
}

/// Location in a file.
struct FileLocation<'a> {
    file: &'a str,
    location: Location,
}

impl FileLocation<'_> {
    fn error(&self, kind: RulesErrorKind) -> RulesError {
        let location = match self.location.line() {
            0 => self.file.to_owned(),
            line => format!("{}:{line}", self.file),
        };
        RulesError { location, kind }
    }
}
