//! envoyproxy/ratelimit's rules: loads its YAML files unmodified and finds the rule for a
//! descriptor.
//!
//! A domain is a tree. Each node stands under its *composite*: `key_value`, or `key` alone for any
//! value. A descriptor walks down, one entry a level, by the exact composite, else the first
//! wildcard of the file that matches, else the key alone. It never turns back, and only the node
//! where its last entry ends can limit it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use serde_saphyr::{Location, Spanned};
use tidegate::{Algorithm, Enforcement, Quota, QuotaError};

mod names;
mod raw;

use names::{composite, printable};
pub(crate) use names::{counter_key, metric_name, override_name};
use raw::{MAX_FILE_BYTES, RawDescriptor, RawFile, RawLimit};

#[cfg(test)]
mod tests;

/// The rules of all domains.
#[derive(Debug)]
pub(crate) struct Rules {
    domains: BTreeMap<String, Level>,
    /// In the order of the files. Nodes point here.
    rules: Vec<Rule>,
}

/// A node that has a limit.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Its name in ratelimit's statistics: the domain and each composite,
    /// `edge.message_type_marketing.to_number`. Fit for the name of a policy.
    pub(crate) path: String,
    pub(crate) name: Option<String>,
    /// Those of the entries that lead to it.
    pub(crate) keys: Vec<String>,
    /// While this rule applies to one descriptor of a request, rules of these names are left out
    /// for the others.
    pub(crate) replaces: Vec<String>,
    pub(crate) limit: Limit,
    pub(crate) mode: RuleMode,
    detailed_metric: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Limit {
    Unlimited,
    /// 0 in this window, which no [`Quota`] can be.
    Never(Unit, Duration),
    Quota(Unit, Quota),
}

/// What it does when it is over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleMode {
    Enforce,
    /// Decide and count, but let through.
    Shadow,
    /// It denies only together with all the others of the request that are in this mode.
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

/// The rule for a descriptor, and where it counts.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(crate) rule: &'a Rule,
    /// What metrics call it: the rule's path, with the descriptor's values where `value_to_metric`
    /// or `detailed_metric` ask for them.
    pub(crate) metric: Cow<'a, str>,
    /// Whose count it is: see [`counter_key`].
    pub(crate) key: String,
}

/// Why the files cannot be loaded: where, what, and what would be right.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {problem}")]
pub(crate) struct RulesError {
    place: String,
    problem: Problem,
}

#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("has {0} bytes: at most {MAX_FILE_BYTES} are allowed")]
    TooLarge(usize),
    #[error("{field}{message}")]
    Yaml { field: String, message: String },
    #[error("domain is missing or empty: write the domain that Envoy's rate limit filter sends")]
    NoDomain,
    #[error("domain {domain:?} is in {first} already: keep each domain in one file")]
    DomainTwice { domain: String, first: String },
    #[error("key is missing or empty: a descriptor needs the key of an entry")]
    NoKey,
    #[error("descriptor {0:?} is there already: merge the two")]
    DescriptorTwice(String),
    #[error("share_threshold needs a wildcard to share: write a value with a *, such as files/*")]
    NothingToShare,
    #[error("rate_limit.unit is missing: it must be one of {}", Unit::names())]
    NoUnit,
    #[error("rate_limit.requests_per_unit is missing: write 0 to deny every request")]
    NoRequests,
    #[error("rate_limit has both unlimited and the unit {}: take one of them out", .0.as_str())]
    UnlimitedUnit(Unit),
    #[error("rate_limit.{field}: {error}")]
    Quota { field: &'static str, error: QuotaError },
    #[error(
        "rate_limit.replaces has an entry without a name: write the name of the rule to replace"
    )]
    ReplacesNothing,
    #[error("rate_limit.replaces has the rule's own name {0:?}: a rule cannot replace itself")]
    ReplacesItself(String),
    #[error("no rule is named {name:?}: {known}")]
    NoSuchRule { name: String, known: String },
}

impl Rules {
    /// Each file with its text. `algorithm` is for all rules but those whose name is in
    /// `algorithms`.
    pub(crate) fn load(
        files: &[(String, String)],
        algorithm: Algorithm,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<Self, RulesError> {
        let mut all = Self { domains: BTreeMap::new(), rules: Vec::new() };
        let mut file_of_domain = BTreeMap::new();
        for (file, text) in files {
            let place = Place { file, location: Location::UNKNOWN };
            let RawFile { domain, descriptors } = RawFile::read(file, text)?;
            if domain.is_empty() {
                return Err(place.error(Problem::NoDomain));
            }
            if let Some(first) = file_of_domain.insert(domain.clone(), file) {
                return Err(place.error(Problem::DomainTwice { domain, first: first.clone() }));
            }
            let mut loader = Loader { file, algorithm, algorithms, rules: &mut all.rules };
            let level = loader.level(&domain, &[], descriptors)?;
            all.domains.insert(domain, level);
        }
        all.check_named(algorithms)?;
        Ok(all)
    }

    /// An algorithm for a rule that is not there is a typing error, or a rule that has been
    /// renamed.
    fn check_named(&self, algorithms: &BTreeMap<String, Algorithm>) -> Result<(), RulesError> {
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
        let problem = Problem::NoSuchRule { name: name.clone(), known };
        Err(RulesError { place: "envoy.algorithms".to_owned(), problem })
    }

    /// The rule for a descriptor, given by its entries' keys and values. `None`: nothing limits it.
    pub(crate) fn find<'a>(
        &self,
        domain: &str,
        entries: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Option<Found<'_>> {
        let mut level = self.domains.get(domain)?;
        let entries = entries.into_iter();
        let mut steps = Vec::with_capacity(entries.size_hint().0);
        for (key, value) in entries {
            let step = level.step(key, value)?;
            level = &step.node.below;
            steps.push(step);
        }
        let rule = &self.rules[steps.last()?.node.rule?];
        let counted = steps.iter().map(|step| (step.key, step.counted));
        let metric = if rule.detailed_metric {
            Cow::Owned(metric_name(domain, counted.clone()))
        } else if steps.iter().any(|step| step.node.value_to_metric) {
            Cow::Owned(metric_name(domain, steps.iter().map(|step| (step.key, step.shown))))
        } else {
            Cow::Borrowed(rule.path.as_str())
        };
        Some(Found { rule, metric, key: counter_key(domain, counted) })
    }

    pub(crate) fn domains(&self) -> impl Iterator<Item = &str> {
        self.domains.keys().map(String::as_str)
    }

    pub(crate) fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }
}

impl Limit {
    /// So many requests in so many units.
    pub(crate) fn new(
        algorithm: Algorithm,
        requests: u32,
        units: u32,
        unit: Unit,
    ) -> Result<Self, QuotaError> {
        let window = unit.window() * units;
        match requests {
            0 => Ok(Self::Never(unit, window)),
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

    /// Fixed lengths as in ratelimit: a month is 30 days and a year 365, whatever the calendar
    /// says.
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

/// The nodes below a domain or another node.
#[derive(Debug, Default)]
struct Level {
    nodes: BTreeMap<String, Node>,
    /// In the order of the file.
    wildcards: Vec<Wildcard>,
}

#[derive(Debug)]
struct Node {
    /// Its place in [`Rules::rules`].
    rule: Option<usize>,
    below: Level,
    value_to_metric: bool,
    share_threshold: bool,
}

/// A composite with one `*` or more, each of which matches any text or none.
#[derive(Debug)]
struct Wildcard {
    composite: String,
    start: String,
    middle: Vec<String>,
    end: String,
}

/// One entry of a descriptor, and the node that it has led to.
struct Step<'a> {
    node: &'a Node,
    key: &'a str,
    /// The value that the count is for: with `share_threshold`, the wildcard stands for all that
    /// match it.
    counted: &'a str,
    /// The value that metrics show, if the rule has no `detailed_metric`.
    shown: &'a str,
}

impl Level {
    fn step<'a>(&'a self, key: &'a str, value: &'a str) -> Option<Step<'a>> {
        let exact = [key, "_", value].concat();
        if let Some(node) = self.nodes.get(&exact) {
            return Some(Step { node, key, counted: value, shown: value });
        }
        if let Some(wildcard) = self.wildcards.iter().find(|wildcard| wildcard.matches(&exact)) {
            let node = self.nodes.get(&wildcard.composite)?;
            let pattern = wildcard.value_for(key);
            let counted = if node.share_threshold { pattern } else { value };
            let shown = if node.value_to_metric { counted } else { pattern };
            return Some(Step { node, key, counted, shown });
        }
        let node = self.nodes.get(key)?;
        let shown = if node.value_to_metric { value } else { "" };
        Some(Step { node, key, counted: value, shown })
    }
}

impl Wildcard {
    fn new(composite: &str) -> Option<Self> {
        let (start, rest) = composite.split_once('*')?;
        let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        Some(Self {
            composite: composite.to_owned(),
            start: start.to_owned(),
            middle: middle.split('*').map(str::to_owned).collect(),
            end: end.to_owned(),
        })
    }

    fn matches(&self, text: &str) -> bool {
        let inner = text.strip_prefix(&self.start).and_then(|rest| rest.strip_suffix(&self.end));
        let Some(mut rest) = inner else { return false };
        // The earliest place of each part leaves the most room for the next, so there is nothing to
        // try again.
        for part in &self.middle {
            let Some((_, after)) = rest.split_once(part.as_str()) else { return false };
            rest = after;
        }
        true
    }

    /// The composite without the entry's key (which is not its beginning where the `*` stands in
    /// the key).
    fn value_for(&self, key: &str) -> &str {
        let value = self.composite.strip_prefix(key).and_then(|rest| rest.strip_prefix('_'));
        value.unwrap_or(&self.composite)
    }
}

/// Raw to validated, one file at a time.
struct Loader<'a> {
    file: &'a str,
    algorithm: Algorithm,
    algorithms: &'a BTreeMap<String, Algorithm>,
    rules: &'a mut Vec<Rule>,
}

impl Loader<'_> {
    fn level(
        &mut self,
        path: &str,
        keys: &[String],
        descriptors: Vec<Spanned<RawDescriptor>>,
    ) -> Result<Level, RulesError> {
        let mut level = Level::default();
        for Spanned { value: raw, referenced: location, .. } in descriptors {
            let place = Place { file: self.file, location };
            if raw.key.is_empty() {
                return Err(place.error(Problem::NoKey));
            }
            let composite = composite(&raw.key, &raw.value);
            let path = format!("{path}.{composite}");
            if level.nodes.contains_key(&composite) {
                return Err(place.error(Problem::DescriptorTwice(path)));
            }
            match Wildcard::new(&composite) {
                Some(wildcard) => level.wildcards.push(wildcard),
                None if raw.share_threshold => return Err(place.error(Problem::NothingToShare)),
                None => {}
            }
            let keys: Vec<String> = keys.iter().chain([&raw.key]).cloned().collect();
            let node = self.node(&path, &keys, raw)?;
            level.nodes.insert(composite, node);
        }
        Ok(level)
    }

    fn node(
        &mut self,
        path: &str,
        keys: &[String],
        raw: RawDescriptor,
    ) -> Result<Node, RulesError> {
        let mut rule = None;
        if let Some(Spanned { value: limit, referenced: location, .. }) = &raw.rate_limit {
            let place = Place { file: self.file, location: *location };
            rule = Some(self.rules.len());
            self.rules
                .push(self.rule(path, keys, &raw, limit).map_err(|problem| place.error(problem))?);
        }
        Ok(Node {
            rule,
            below: self.level(path, keys, raw.descriptors)?,
            value_to_metric: raw.value_to_metric,
            share_threshold: raw.share_threshold,
        })
    }

    fn rule(
        &self,
        path: &str,
        keys: &[String],
        raw: &RawDescriptor,
        limit: &RawLimit,
    ) -> Result<Rule, Problem> {
        let name = Some(limit.name.clone()).filter(|name| !name.is_empty());
        let algorithm = name
            .as_ref()
            .and_then(|name| self.algorithms.get(name))
            .copied()
            .unwrap_or(self.algorithm);
        let replaces: Vec<String> =
            limit.replaces.iter().map(|replaced| replaced.name.clone()).collect();
        if replaces.iter().any(String::is_empty) {
            return Err(Problem::ReplacesNothing);
        }
        if let Some(itself) = name.as_ref().filter(|name| replaces.contains(name)) {
            return Err(Problem::ReplacesItself(itself.clone()));
        }
        Ok(Rule {
            path: printable(path),
            name,
            keys: keys.to_vec(),
            replaces,
            limit: limit.validated(algorithm)?,
            mode: match (raw.shadow_mode, raw.quota_mode) {
                (true, _) => RuleMode::Shadow,
                (false, true) => RuleMode::Quota,
                (false, false) => RuleMode::Enforce,
            },
            detailed_metric: raw.detailed_metric,
        })
    }
}

/// Where in the files something is wrong.
struct Place<'a> {
    file: &'a str,
    location: Location,
}

impl Place<'_> {
    fn error(&self, problem: Problem) -> RulesError {
        let place = match self.location.line() {
            0 => self.file.to_owned(),
            line => format!("{}:{line}", self.file),
        };
        RulesError { place, problem }
    }
}
