//! [`Policy`]: a named limit on some requests; [`Policies`]: which of many apply;
//! [`PolicyLimiter`]: the decision pipeline behind every front door.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ipnet::IpNet;

use crate::charge::OnStoreFailure;
use crate::enum_names::enum_names;
use crate::key::Key;
use crate::quota::Quota;

mod attributes;
mod builder;
mod condition;
mod decisions;
mod error;
mod explain;
mod index;
mod key_source;
mod lanes;
mod lease;
mod limiter;
mod mistake;
mod networks;
mod on_response;
mod path;
mod pattern;
mod pipeline;
mod query;
mod quotas;
mod refund_on;
mod runtime_overrides;
mod select;
mod show_keys;
mod value;

pub use attributes::Attributes;
pub use builder::{PolicyBuilder, PolicyPart};
use condition::{Condition, ReadRules};
pub use decisions::{PolicyDecision, PolicyDecisions};
pub use error::{PolicyError, QueryError};
pub use explain::Explanation;
pub use key_source::NAMES as ATTRIBUTE_NAMES;
#[cfg(feature = "tower")]
pub(crate) use key_source::check_http;
pub use key_source::{AttributeError, AttributeNames, KeySource};
use lanes::Lanes;
use lease::LeaseScope;
pub use lease::RequestLease;
pub use limiter::{
    DEFAULT_QUERY_TIMEOUT, Observer, PolicyLimiter, Progress, TRACE_TARGET, Waiting,
};
use on_response::OnResponse;
#[cfg(feature = "tower")]
pub(crate) use path::has_dot_segment;
pub use path::{PathError, PathRules, PathSpelling, normalize_host, normalize_path};
pub use query::{Enforcement, PreparedCharge, Query};
use quotas::{Quotas, ValueQuotas};
pub use refund_on::StatusSet;
use runtime_overrides::OverridesNow;
pub use runtime_overrides::{
    OverriddenQuota, OverrideEffect, OverrideKey, RuntimeOverride, RuntimeOverrides,
};
#[cfg(feature = "tower")]
pub(crate) use select::whole_number;
pub use select::{Policies, SelectError, Selection};
pub use show_keys::ShowKeys;
pub use value::decode_value;
#[cfg(feature = "tower")]
pub(crate) use value::trimmed;

/// Number of bits by which the addresses of IPv6 clients count together, as in
/// [`ClientIp`](crate::ClientIp).
const DEFAULT_IPV6_PREFIX: u8 = 64;

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
    /// Groups of conditions, each of which exempts a request that meets it wholly.
    unless: Vec<Vec<Condition>>,
    key: Vec<KeySource>,
    missing_key: MissingKey,
    quotas: Quotas,
    cost: Cost,
    mode: Mode,
    on_store_failure: OnStoreFailure,
    /// `None`: by the attributes of the key.
    show_keys: Option<ShowKeys>,
    on_response: Option<Arc<OnResponse>>,
    /// Boxed, because few policies have it.
    lanes: Option<Box<Lanes>>,
    attributes: AttributeNames,
    rules: ReadRules,
    /// Whether a request without the key has been logged. Clones share it.
    missing_key_logged: Arc<AtomicBool>,
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
            unless: Vec::new(),
            key: Vec::new(),
            missing_key: MissingKey::default(),
            quotas: Quotas::new(quota),
            cost: Cost::Fixed(1),
            mode: Mode::default(),
            on_store_failure: OnStoreFailure::default(),
            show_keys: None,
            on_response: None,
            lanes: None,
            attributes: AttributeNames::default(),
            rules: ReadRules { path: PathRules::KEEP, ipv6_prefix: DEFAULT_IPV6_PREFIX },
            missing_key_logged: Arc::default(),
        })
    }

    /// Sets the custom attributes that the setters below accept.
    pub(crate) fn set_attribute_names(&mut self, names: AttributeNames) {
        self.attributes = names;
    }

    fn condition(&self, attribute: &str, patterns: &[String]) -> Result<Condition, PolicyError> {
        Condition::new(self.attributes.source(attribute)?, patterns.to_vec(), self.rules)
    }

    pub(crate) fn add_match(
        &mut self,
        attribute: &str,
        patterns: &[String],
    ) -> Result<(), PolicyError> {
        self.conditions.push(self.condition(attribute, patterns)?);
        Ok(())
    }

    pub(crate) fn add_unless(
        &mut self,
        conditions: &[(String, Vec<String>)],
    ) -> Result<(), PolicyError> {
        let parse = |(attribute, it): &(String, Vec<String>)| self.condition(attribute, it);
        let conditions = conditions.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if conditions.is_empty() {
            return Err(PolicyError::NoCondition);
        }
        self.unless.push(conditions);
        Ok(())
    }

    /// Sets the path rules, by which the patterns of paths are parsed.
    pub(crate) fn set_path_rules(&mut self, rules: PathRules) -> Result<(), PolicyError> {
        self.rules.path = rules;
        let conditions = self.conditions.iter_mut().chain(self.unless.iter_mut().flatten());
        let mut paths = conditions.filter(|condition| condition.attribute.is_path());
        paths.try_for_each(|condition| condition.parse(self.rules))
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
        let (key, network) = self.normal_override(values)?;
        self.quotas.add_override(key, network, quota)
    }

    /// Returns the key of an override as requests have it, with the network that it is, if requests
    /// are counted by address alone.
    fn normal_override(
        &self,
        values: &[impl AsRef<str>],
    ) -> Result<(String, Option<IpNet>), PolicyError> {
        let invalid = |reason| PolicyError::Override { key: join(values), reason };
        if let Some(reason) = self.mistake_in_override(values) {
            return Err(invalid(reason));
        }
        let mut network = None;
        let mut normal = Vec::with_capacity(values.len());
        for (source, value) in self.key.iter().zip(values) {
            let value = value.as_ref();
            normal.push(match source.as_str() {
                "path" => self.rules.path.matched(value).unwrap_or(Cow::Borrowed(value)),
                "ip" => {
                    let parsed = networks::parse(value, self.rules.ipv6_prefix).map_err(invalid)?;
                    network = Some(parsed);
                    Cow::Owned(networks::group(parsed))
                }
                _ => source.normalize(Cow::Borrowed(value)),
            });
        }
        if values.len() > 1 && !network.as_ref().is_none_or(|network| self.is_single(network)) {
            let reason = "only a policy that counts by ip alone has limits of networks: write an \
                          address";
            return Err(invalid(reason.to_owned()));
        }
        Ok((join(&normal), network.filter(|_| values.len() == 1)))
    }

    /// Returns whether all addresses of a network count together: it is an address, or a group.
    fn is_single(&self, network: &IpNet) -> bool {
        networks::is_address(network)
            || network.addr().is_ipv6() && network.prefix_len() == self.rules.ipv6_prefix
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
    }

    /// Sets the quotas for values of an attribute, such as plans.
    pub(crate) fn set_limits(
        &mut self,
        attribute: &str,
        values: Vec<(String, Quota)>,
    ) -> Result<(), PolicyError> {
        let attribute = self.choosing_attribute(attribute)?;
        let mut quotas = HashMap::with_capacity(values.len());
        for (value, quota) in values {
            let normal = attribute.normalize(Cow::Owned(value)).into_owned();
            if let Some((value, _)) = quotas.get_key_value(&normal) {
                return Err(PolicyError::LimitTwice(String::clone(value)));
            }
            quotas.insert(normal, quota);
        }
        self.quotas.set_by_value(ValueQuotas { attribute, quotas });
        Ok(())
    }

    /// Returns the attribute whose values choose a limit.
    fn choosing_attribute(&self, attribute: &str) -> Result<KeySource, PolicyError> {
        let attribute = self.attributes.source(attribute)?;
        if ["ip", "path"].contains(&attribute.as_str()) {
            return Err(PolicyError::LimitsAttribute(attribute.to_string()));
        }
        Ok(attribute)
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
        let most = self.quotas().map(Quota::burst).min().unwrap_or(0) * self.lowest_lane() / 100;
        if usual > most {
            return Err(PolicyError::Cost { cost: usual, most });
        }
        self.cost = cost;
        Ok(())
    }

    /// Returns the quotas: those of overrides and of values, then that of all others.
    pub fn quotas(&self) -> impl Iterator<Item = &Quota> {
        self.quotas.iter()
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

    /// Returns the quota of requests without another one.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.quotas.default
    }

    /// Returns the quota of this key, if no value of a request has another one.
    #[must_use]
    pub fn quota_for(&self, key: &str) -> &Quota {
        self.quotas.of_key(key)
    }

    /// Returns the override that applies to this key: its own, or that of the longest network
    /// around it.
    #[must_use]
    pub fn override_of(&self, key: &str) -> Option<(&str, &Quota)> {
        self.quotas.override_of(key)
    }

    /// Returns the attribute whose values have quotas of their own, and these.
    #[must_use]
    pub fn limits(&self) -> Option<(&str, &HashMap<String, Quota>)> {
        let by_value = self.quotas.by_value().filter(|_| self.anchor_attribute().is_none());
        by_value.map(|it| (it.attribute.as_str(), &it.quotas))
    }

    /// Returns the attribute whose value is the day on which the periods of a calendar start.
    #[must_use]
    pub fn anchor_attribute(&self) -> Option<&str> {
        let calendar = self.quota().calendar()?;
        let by_value = self.quotas.by_value()?;
        let has_other = by_value.quotas.values().any(|quota| quota.calendar() != Some(calendar));
        has_other.then_some(by_value.attribute.as_str())
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
        self.on_response.as_ref()?.refund_on.as_ref()
    }

    /// Returns the name of the response header that has the units which a request really used, in
    /// lower case.
    #[must_use]
    pub fn settled_by(&self) -> Option<&str> {
        self.on_response.as_ref()?.settled_by.as_deref()
    }

    /// Iterates over the keys and networks with an override, and their quotas.
    pub fn overrides(&self) -> impl Iterator<Item = (&str, &Quota)> {
        self.quotas.overrides()
    }

    /// Iterates over the conditions, all of which a request must meet: an attribute, and patterns
    /// as they were written, of which any must match.
    pub fn conditions(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.conditions.iter().map(Condition::texts)
    }

    /// Iterates over the groups of conditions that exempt a request, each like
    /// [`conditions`](Self::conditions).
    pub fn unless(&self) -> impl Iterator<Item = impl Iterator<Item = (&str, &[String])>> {
        self.unless.iter().map(|group| group.iter().map(Condition::texts))
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

    /// Returns the attributes of the conditions, the key, the limits, the lanes and the cost.
    pub fn references(&self) -> impl Iterator<Item = &str> {
        let conditions = self.conditions.iter().chain(self.unless.iter().flatten());
        let conditions = conditions.map(|condition| &condition.attribute);
        let limits = self.quotas.by_value().map(|it| &it.attribute);
        let cost = match &self.cost {
            Cost::Fixed(_) => None,
            Cost::Attribute { name, .. } => Some(name.as_str()),
        };
        let lanes = self.lanes.as_ref().map(|lanes| &lanes.attribute);
        let sources = conditions.chain(&self.key).chain(limits).chain(lanes);
        sources.map(KeySource::as_str).chain(cost)
    }

    /// Returns the first attribute of [`references`](Self::references) that no HTTP request has:
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
