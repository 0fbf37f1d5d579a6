//! [`Policy`]: a named limit on some requests; [`Policies`]: which of many apply;
//! [`PolicyLimiter`]: the decision pipeline behind every front door.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::charge::OnStoreFailure;
use crate::enum_names::enum_names;
use crate::key::Key;
use crate::quota::Quota;

mod builder;
mod decisions;
mod error;
mod index;
mod key_source;
mod limiter;
mod mistake;
mod path;
mod pattern;
mod pipeline;
mod query;
mod refund_on;
mod select;
mod show_keys;
mod value;

pub use builder::{PolicyBuilder, PolicyPart};
pub use decisions::{PolicyDecision, PolicyDecisions};
pub use error::{PolicyError, QueryError};
pub use key_source::NAMES as ATTRIBUTE_NAMES;
#[cfg(feature = "tower")]
pub(crate) use key_source::check_http;
pub use key_source::{AttributeError, AttributeNames, KeySource};
pub use limiter::{
    DEFAULT_QUERY_TIMEOUT, Observer, PolicyLimiter, Progress, TRACE_TARGET, Waiting,
};
pub use path::{PathError, PathRules, PathSpelling, normalize_host, normalize_path};
use pattern::Pattern;
pub use query::{Enforcement, PreparedCharge, Query};
pub use refund_on::StatusSet;
pub use select::{Policies, SelectError, Selection};
pub use show_keys::ShowKeys;
pub use value::decode_value;
#[cfg(feature = "tower")]
pub(crate) use value::trimmed;

/// Attributes of a request by name: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`,
/// `cookie.NAME`; from Envoy `domain` and `descriptor.KEY`; and custom ones, which
/// [`PolicyBuilder::attributes`] declares.
///
/// Maps from `String` to `String` implement it. Implement it for a request type of your own, so
/// that only the attributes that a policy uses are read:
///
/// ```
/// use std::borrow::Cow;
/// use std::time::Duration;
/// use tidegate::{Attributes, Policy, Quota};
///
/// struct Job {
///     tenant: String,
/// }
///
/// impl Attributes for Job {
///     fn get(&self, name: &str) -> Option<Cow<'_, str>> {
///         match name {
///             "tenant" => Some(Cow::from(&self.tenant)),
///             _ => None,
///         }
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy =
///     Policy::builder("per-tenant", quota).attributes(["tenant"]).key(["tenant"]).build()?;
/// let job = Job { tenant: "acme".to_owned() };
/// assert_eq!(policy.select(&job, None)?.charges[0].key(), Some("acme"));
/// # Ok(())
/// # }
/// ```
///
/// A front door for HTTP must normalize `path` and `host` by [`normalize_path`] and
/// [`normalize_host`], as `layer::RequestParts` (feature `tower`) does.
pub trait Attributes {
    /// Returns the value of this attribute, if the request has it.
    fn get(&self, name: &str) -> Option<Cow<'_, str>>;

    /// Returns whether the request has several different values of this attribute, of which the
    /// application may read another one than [`get`](Self::get) returns. Such a request is an error
    /// for a policy that uses the attribute.
    fn is_ambiguous(&self, _name: &str) -> bool {
        false
    }

    /// Returns whether `ip` was read although the address of the peer is unknown. Such a request is
    /// an error, because failing open would silently disable the limit.
    fn lacks_peer(&self) -> bool {
        false
    }
}

impl Attributes for BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        BTreeMap::get(self, name).map(|value| Cow::Borrowed(value.as_str()))
    }
}

impl<H: BuildHasher> Attributes for HashMap<String, String, H> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        HashMap::get(self, name).map(|value| Cow::Borrowed(value.as_str()))
    }
}

/// Named limit: the requests that it applies to, the key that it counts by, its quota and its
/// failure mode.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Policies, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy = Policy::builder("per-user", quota)
///     .matches("path", ["/api/**"])
///     .key(["header.x-user-id"])
///     .build()?;
/// let policies = Policies::new(vec![policy])?;
///
/// let request = [("path", "/api/items"), ("header.x-user-id", "u1")];
/// let request = BTreeMap::from(request.map(|(name, value)| (name.into(), value.into())));
/// let selected = policies.select(&request, None)?;
/// assert_eq!(selected.charges[0].key(), Some("u1"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Policy {
    name: String,
    conditions: Vec<Condition>,
    key: Vec<KeySource>,
    missing_key: MissingKey,
    quota: Quota,
    cost: Cost,
    mode: Mode,
    on_store_failure: OnStoreFailure,
    /// `None`: by the attributes of the key.
    show_keys: Option<ShowKeys>,
    refund_on: Option<Arc<StatusSet>>,
    overrides: HashMap<String, Quota>,
    attributes: AttributeNames,
    path_rules: PathRules,
    /// Whether a request without the key has been logged. Clones share it.
    missing_key_logged: Arc<AtomicBool>,
}

/// Attribute that must match any of the patterns.
#[derive(Debug, Clone)]
struct Condition {
    attribute: KeySource,
    /// Patterns as they were written, to be parsed by other path rules.
    texts: Vec<String>,
    patterns: Vec<Pattern>,
}

/// Treatment of a request that lacks an attribute of the key.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{MissingKey, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy = Policy::builder("per-user", quota)
///     .key(["header.x-user-id"])
///     .missing_key(MissingKey::Deny)
///     .build()?;
///
/// let anonymous: BTreeMap<String, String> = BTreeMap::new();
/// assert!(policy.select(&anonymous, None)?.rejected_by.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingKey {
    /// The policy does not apply, so the request is not limited by it.
    #[default]
    Skip,
    /// The request is denied, without a time after which a retry would pass. In shadow mode it
    /// passes.
    Deny,
}

/// Whether a denial is enforced. Start a new limit in [`Shadow`](Self::Shadow) mode and compare its
/// denials with the traffic before it is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The request is denied.
    #[default]
    Enforce,
    /// The request passes; the denial only shows in metrics and in the API's `decisions`.
    Shadow,
}

/// Number of units that a request takes, [`Fixed(1)`](Self::Fixed) by default.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Cost, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::token_bucket(1_000, Duration::from_secs(60))?;
/// let policy = Policy::builder("batches", quota)
///     .cost(Cost::Attribute { name: "header.x-items".into(), default: 1, max: 500 })
///     .build()?;
///
/// let batch = BTreeMap::from([("header.x-items".to_owned(), "20".to_owned())]);
/// assert_eq!(policy.select(&batch, None)?.charges[0].cost(), 20);
/// let huge = BTreeMap::from([("header.x-items".to_owned(), "9999".to_owned())]);
/// assert_eq!(policy.select(&huge, None)?.charges[0].cost(), 500);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cost {
    /// The same for every request.
    Fixed(u64),
    /// The value of an attribute.
    Attribute {
        /// Name of the attribute.
        name: String,
        /// Cost of a request without the attribute, or whose value is not a positive integer.
        default: u64,
        /// Upper bound of the cost; the burst of the key's quota is another.
        max: u64,
    },
}

impl Condition {
    fn parse(&mut self, rules: PathRules) -> Result<(), PolicyError> {
        let patterns = self.texts.iter().map(|text| Pattern::new(&self.attribute, text, rules));
        self.patterns = patterns.collect::<Result<_, _>>()?;
        // Applications answer HEAD by the routes for GET, with the same work.
        let is_method = self.attribute.as_str() == "method";
        if is_method && self.patterns.iter().any(|pattern| pattern.matches("GET")) {
            self.patterns.push(Pattern::Exact("HEAD".to_owned()));
        }
        Ok(())
    }
}

impl Policy {
    /// Starts a policy that applies to every request, counts them all together, and enforces.
    pub fn builder(name: impl Into<String>, quota: Quota) -> PolicyBuilder {
        PolicyBuilder::new(name.into(), quota)
    }

    /// Creates a policy that applies to every request. The setters below are for the builder and
    /// the configuration file, which reports each error at its own line.
    pub(crate) fn new(name: impl Into<String>, quota: Quota) -> Result<Self, PolicyError> {
        let name = name.into();
        Key::new(&name).map_err(PolicyError::Name)?;
        Ok(Self {
            name,
            conditions: Vec::new(),
            key: Vec::new(),
            missing_key: MissingKey::default(),
            quota,
            cost: Cost::Fixed(1),
            mode: Mode::default(),
            on_store_failure: OnStoreFailure::default(),
            show_keys: None,
            refund_on: None,
            overrides: HashMap::new(),
            attributes: AttributeNames::default(),
            path_rules: PathRules::KEEP,
            missing_key_logged: Arc::default(),
        })
    }

    /// Sets the custom attributes that the setters below accept.
    pub(crate) fn set_attribute_names(&mut self, names: AttributeNames) {
        self.attributes = names;
    }

    pub(crate) fn add_match(
        &mut self,
        attribute: &str,
        patterns: &[impl AsRef<str>],
    ) -> Result<(), PolicyError> {
        let attribute = self.attributes.source(attribute)?;
        if patterns.is_empty() {
            return Err(PolicyError::NoPattern(attribute.to_string()));
        }
        let texts = patterns.iter().map(|pattern| pattern.as_ref().to_owned()).collect();
        let mut condition = Condition { attribute, texts, patterns: Vec::new() };
        condition.parse(self.path_rules)?;
        self.conditions.push(condition);
        Ok(())
    }

    /// Sets the path rules, by which the patterns of paths are parsed.
    pub(crate) fn set_path_rules(&mut self, rules: PathRules) -> Result<(), PolicyError> {
        self.path_rules = rules;
        self.conditions.iter_mut().try_for_each(|condition| condition.parse(rules))
    }

    pub(crate) fn set_key(&mut self, attributes: &[impl AsRef<str>]) -> Result<(), PolicyError> {
        let sources = attributes.iter().map(|name| self.attributes.source(name.as_ref()));
        self.key = sources.collect::<Result<_, _>>()?;
        Ok(())
    }

    pub(crate) fn set_missing_key(&mut self, missing_key: MissingKey) {
        self.missing_key = missing_key;
    }

    pub(crate) fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    pub(crate) fn set_on_store_failure(&mut self, on_store_failure: OnStoreFailure) {
        self.on_store_failure = on_store_failure;
    }

    pub(crate) fn add_override(
        &mut self,
        values: &[impl AsRef<str>],
        quota: Quota,
    ) -> Result<(), PolicyError> {
        if let Some(reason) = self.mistake_in_override(values) {
            return Err(PolicyError::Override { key: join(values), reason });
        }
        let normal = self.key.iter().zip(values).map(|(source, value)| {
            let value = value.as_ref();
            if source.is_path() {
                return self.path_rules.matched(value).unwrap_or(Cow::Borrowed(value));
            }
            source.normalize(Cow::Borrowed(value))
        });
        let key = join(&normal.collect::<Vec<_>>());
        match self.overrides.insert(key.clone(), quota) {
            None => Ok(()),
            Some(_) => Err(PolicyError::OverriddenTwice(key)),
        }
    }

    /// Returns why no request has this key, and what would be right.
    fn mistake_in_override(&self, values: &[impl AsRef<str>]) -> Option<String> {
        let names = || self.key.iter().map(KeySource::as_str).collect::<Vec<_>>().join(", ");
        match (values.len(), self.key.len()) {
            (_, 0) => Some(
                "this policy counts all requests together: give it a key, such as `key: [ip]`"
                    .to_owned(),
            ),
            (values, keys) if values == keys => None,
            (_, 1) => {
                Some(format!("this policy counts only by {}: write one value, not a list", names()))
            }
            (values, keys) => Some(format!(
                "it has {values} of the {keys} values that this policy counts by: write a list of \
                 {}, in order",
                names()
            )),
        }
        .or_else(|| {
            let mut pairs = self.key.iter().zip(values);
            pairs.find_map(|(source, value)| mistake::in_key(source, value.as_ref()))
        })
    }

    /// Iterates over the path patterns that are probably not meant literally, each with the pattern
    /// that is probably meant: `/users/{id}` matches only that path, `/users/*` matches any user.
    pub fn literal_parameters(&self) -> impl Iterator<Item = (&str, String)> {
        let paths = self.conditions.iter().filter(|condition| condition.attribute.is_path());
        let texts = paths.flat_map(|condition| &condition.texts);
        texts.filter_map(|text| Some((text.as_str(), mistake::meant_by_path(text)?)))
    }

    /// Sets the cost. Called after all overrides: the cost must fit every quota.
    pub(crate) fn set_cost(&mut self, cost: Cost) -> Result<(), PolicyError> {
        if let Cost::Attribute { name, .. } = &cost {
            self.attributes.check(name)?;
        }
        let usual = match &cost {
            Cost::Fixed(0)
            | Cost::Attribute { default: 0, .. }
            | Cost::Attribute { max: 0, .. } => return Err(PolicyError::ZeroCost),
            Cost::Attribute { default, max, .. } if default > max => {
                return Err(PolicyError::DefaultCost { default: *default, max: *max });
            }
            // A key with a smaller quota caps the cost itself, so only a max above every quota is
            // an error.
            Cost::Attribute { max, .. } if *max > self.max_cost() => {
                return Err(PolicyError::Cost { cost: *max, most: self.max_cost() });
            }
            Cost::Fixed(units) | Cost::Attribute { default: units, .. } => *units,
        };
        let most = self.quotas().map(Quota::burst).min().unwrap_or(0);
        if usual > most {
            return Err(PolicyError::Cost { cost: usual, most });
        }
        self.cost = cost;
        Ok(())
    }

    /// Returns the quotas: those of keys with an override, then that of all others.
    pub fn quotas(&self) -> impl Iterator<Item = &Quota> {
        self.overrides.values().chain([&self.quota])
    }

    /// Returns the highest cost of one request, for the key with the largest quota.
    #[must_use]
    pub fn max_cost(&self) -> u64 {
        self.quotas().map(Quota::burst).max().unwrap_or(0)
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the quota of keys without an override.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Returns the quota of this key.
    #[must_use]
    pub fn quota_for(&self, key: &str) -> &Quota {
        self.overrides.get(key).unwrap_or(&self.quota)
    }

    /// Returns whether denials are enforced.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns how requests are decided while the store is unavailable.
    #[must_use]
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// Returns the form in which operators see the keys.
    #[must_use]
    pub fn show_keys(&self) -> ShowKeys {
        let attributes = self.key.iter().map(KeySource::as_str);
        self.show_keys.unwrap_or_else(|| ShowKeys::default_for(attributes))
    }

    /// Returns the statuses of responses whose requests it refunds, if there are any.
    #[must_use]
    pub fn refund_on(&self) -> Option<&StatusSet> {
        self.refund_on.as_deref()
    }

    /// Returns the number of keys with an override of the quota.
    #[must_use]
    pub fn override_count(&self) -> usize {
        self.overrides.len()
    }

    /// Iterates over the keys with an override, in any order, and their quotas.
    pub fn overrides(&self) -> impl Iterator<Item = (&str, &Quota)> {
        self.overrides.iter().map(|(key, quota)| (key.as_str(), quota))
    }

    /// Iterates over the conditions, all of which a request must meet: an attribute, and patterns
    /// as they were written, of which any must match.
    pub fn conditions(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.conditions.iter().map(|it| (it.attribute.as_str(), it.texts.as_slice()))
    }

    /// Returns the cost of a request that does not name one.
    #[must_use]
    pub fn cost(&self) -> &Cost {
        &self.cost
    }

    /// Returns the attributes that make up the key. Empty if all requests count together.
    #[must_use]
    pub fn key(&self) -> &[KeySource] {
        &self.key
    }

    /// Returns the attributes of the conditions, the key and the cost.
    pub fn references(&self) -> impl Iterator<Item = &str> {
        let conditions = self.conditions.iter().map(|condition| &condition.attribute);
        let cost = match &self.cost {
            Cost::Fixed(_) => None,
            Cost::Attribute { name, .. } => Some(name.as_str()),
        };
        conditions.chain(&self.key).map(KeySource::as_str).chain(cost)
    }

    /// Returns the first attribute of the conditions, the key or the cost that no HTTP request has:
    /// `domain`, `descriptor.KEY`, or a custom one.
    #[must_use]
    pub fn non_http_attribute(&self) -> Option<&str> {
        self.references().find(|name| !key_source::is_http(name))
    }

    /// Returns the treatment of a request that lacks an attribute of the key.
    #[must_use]
    pub fn missing_key(&self) -> MissingKey {
        self.missing_key
    }

    /// Returns the cost of a request that does not name one and has no attribute that does.
    #[must_use]
    pub fn default_cost(&self) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { default, .. } => *default,
        }
    }

    /// Logs a request without the key, once per policy.
    fn log_missing_key(&self) {
        if !self.missing_key_logged.swap(true, Ordering::Relaxed) {
            let key = self.key_names();
            match self.missing_key {
                MissingKey::Skip => tracing::info!(
                    policy = self.name,
                    key,
                    "policy skipped: the request lacks its key (logged once)"
                ),
                MissingKey::Deny => tracing::info!(
                    policy = self.name,
                    key,
                    "request denied: it lacks the policy's key (logged once)"
                ),
            }
        }
    }

    fn key_names(&self) -> String {
        self.key.iter().map(KeySource::as_str).collect::<Vec<_>>().join(", ")
    }
}

/// Joins the values of a key by `|`. Bars and backslashes inside a value are escaped, so that no
/// two lists of values have the same key.
fn join(values: &[impl AsRef<str>]) -> String {
    if let [value] = values {
        return value.as_ref().to_owned();
    }
    let escaped =
        values.iter().map(|value| value.as_ref().replace('\\', "\\\\").replace('|', "\\|"));
    escaped.collect::<Vec<_>>().join("|")
}

enum_names!(MissingKey, "missing_key", Skip = "skip", Deny = "deny");
enum_names!(PathSpelling, "spelling of paths", Reject = "reject", Decode = "decode", Keep = "keep");
enum_names!(Mode, "mode", Enforce = "enforce", Shadow = "shadow");

#[cfg(test)]
mod tests;
