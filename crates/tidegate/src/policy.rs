//! [`Policy`]: what a limit applies to, whose key it counts, and its quota; [`Policies`]: which of many apply.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use crate::decision::{Decision, Source};
use crate::enum_names::enum_names;
use crate::key::{Key, KeyError};
use crate::quota::Quota;

mod attribute;
mod index;
mod pattern;
mod select;

pub use attribute::AttributeError;
pub(crate) use attribute::AttributeNames;
#[cfg(feature = "tower")]
pub(crate) use attribute::check_http;
use pattern::Pattern;
pub use pattern::normal_path;
pub use select::{Policies, SelectError, Selected, Selection};

/// Attributes of a request by name: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`,
/// `cookie.NAME`; from Envoy `domain` and `descriptor.KEY`; and those that
/// [`Policy::with_attributes`] declares.
pub trait Attributes {
    /// The value of this attribute, if the request has it.
    fn get(&self, name: &str) -> Option<Cow<'_, str>>;
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

/// A named limit: what it matches, whose key it counts, its quota, its failure mode.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Policies, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy = Policy::new("per-user", quota)?.matching("path", &["/api/**"])?.counting(&["header.x-user-id"])?;
/// let policies = Policies::new(vec![policy])?;
///
/// let request = BTreeMap::from([("path", "/api/items"), ("header.x-user-id", "u1")].map(|(k, v)| (k.into(), v.into())));
/// let selected = policies.select(&request, None)?;
/// assert_eq!(selected.charges[0].key(), "u1");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Policy {
    /// Shared with what outlives a request.
    pub(crate) name: Arc<str>,
    conditions: Vec<Condition>,
    key: Vec<String>,
    missing_key: MissingKey,
    quota: Quota,
    cost: Cost,
    mode: Mode,
    on_store_failure: OnStoreFailure,
    overrides: HashMap<String, Quota>,
    attributes: AttributeNames,
}

/// One attribute that must match any of the patterns.
#[derive(Debug, Clone)]
struct Condition {
    attribute: String,
    patterns: Vec<Pattern>,
}

/// What to do with a request that lacks an attribute of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingKey {
    /// The policy does not apply.
    #[default]
    Skip,
    /// The request is denied.
    Deny,
}

/// What a denial means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The request is denied.
    #[default]
    Enforce,
    /// The request passes: only counted, to see what a limit would do.
    Shadow,
}

/// What to answer while the store cannot decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnStoreFailure {
    /// Decide in this process's memory.
    #[default]
    Local,
    /// Let pass.
    Allow,
    /// Deny.
    Deny,
}

/// How many units a request takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cost {
    /// Always so many.
    Fixed(u64),
    /// As many as an attribute says.
    Attribute {
        /// Which one.
        name: String,
        /// If it is absent or no whole number from 1 on.
        default: u64,
        /// More than this counts as this; and more than the key's quota admits at once, as that.
        max: u64,
    },
}

/// Why a policy, or a set of them, is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The name is no name.
    #[error("the policy name {0}")]
    Name(KeyError),
    /// Two policies of one name would share their counts.
    #[error("the policy name {0:?} is used twice: each policy needs a name of its own")]
    Twice(String),
    /// A condition without a value never matches.
    #[error("the attribute {0:?} has no value to match: give one, or a list of some")]
    NoPattern(String),
    /// The same key is overridden twice.
    #[error("the key {0:?} is overridden twice")]
    OverriddenTwice(String),
    /// A cost that could never be admitted.
    #[error("cost {cost} can never be admitted: the quota admits at most {most} at once")]
    Cost {
        /// The cost.
        cost: u64,
        /// The smallest of the policy's quotas; for the `max` of an attribute, the largest.
        most: u64,
    },
    /// What a request takes that says nothing would be more than what any may take.
    #[error("the default cost {default} is more than the max {max}: lower it, or raise the max")]
    DefaultCost {
        /// The default.
        default: u64,
        /// The most.
        max: u64,
    },
    /// A cost of nothing.
    #[error("cost 0 takes nothing: a cost is at least 1")]
    ZeroCost,
    /// The name of an attribute is unknown or malformed.
    #[error(transparent)]
    Attribute(#[from] AttributeError),
}

impl Policy {
    /// Applies to every request, counts them all together, and enforces.
    pub fn new(name: impl Into<String>, quota: Quota) -> Result<Self, PolicyError> {
        let name = name.into();
        Key::new(&name).map_err(PolicyError::Name)?;
        Ok(Self {
            name: name.into(),
            conditions: Vec::new(),
            key: Vec::new(),
            missing_key: MissingKey::default(),
            quota,
            cost: Cost::Fixed(1),
            mode: Mode::default(),
            on_store_failure: OnStoreFailure::default(),
            overrides: HashMap::new(),
            attributes: AttributeNames::default(),
        })
    }

    /// Declares attributes of your own, beside the built-in ones, before they are used: a name that
    /// is neither is an error.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// let policy = Policy::new("per-tenant", quota)?.with_attributes(&["tenant"])?;
    /// let misspelt = policy.clone().counting(&["tennant"]).unwrap_err();
    /// assert!(misspelt.to_string().ends_with("(did you mean `tenant`?)"));
    ///
    /// let request = BTreeMap::from([("tenant".to_owned(), "acme".to_owned())]);
    /// assert_eq!(policy.counting(&["tenant"])?.select(&request, None)?.charges[0].key(), "acme");
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_attributes<A: AsRef<str>>(mut self, names: &[A]) -> Result<Self, PolicyError> {
        for name in names {
            self.attributes.declare(name.as_ref())?;
        }
        Ok(self)
    }

    /// Replaces the declared attributes.
    #[cfg(feature = "config")]
    pub(crate) fn with_attribute_names(mut self, names: &AttributeNames) -> Self {
        self.attributes = names.clone();
        self
    }

    /// Applies only if this attribute matches any of these patterns: `*` stands for anything but a
    /// slash, `**` for anything. (A path pattern that ends in `/**` matches the path before it,
    /// too.) An unknown attribute is an error.
    pub fn matching<P: AsRef<str>>(
        mut self,
        attribute: impl Into<String>,
        patterns: &[P],
    ) -> Result<Self, PolicyError> {
        let attribute = attribute.into();
        self.attributes.check(&attribute)?;
        if patterns.is_empty() {
            return Err(PolicyError::NoPattern(attribute));
        }
        let patterns =
            patterns.iter().map(|pattern| Pattern::new(&attribute, pattern.as_ref())).collect();
        self.conditions.push(Condition { attribute, patterns });
        Ok(self)
    }

    /// Counts by these attributes. None: all requests together. An unknown attribute is an error.
    pub fn counting<A: AsRef<str>>(mut self, attributes: &[A]) -> Result<Self, PolicyError> {
        attributes.iter().try_for_each(|attribute| self.attributes.check(attribute.as_ref()))?;
        self.key = attributes.iter().map(|attribute| attribute.as_ref().to_owned()).collect();
        Ok(self)
    }

    /// What to do with a request that lacks an attribute of the key.
    #[must_use]
    pub fn on_missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Whether to enforce, or only to look.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// What to answer while the store cannot decide.
    #[must_use]
    pub fn on_store_failure(mut self, failure: OnStoreFailure) -> Self {
        self.on_store_failure = failure;
        self
    }

    /// Another quota for one key (the values of its attributes, in their order).
    pub fn overriding<V: AsRef<str>>(
        mut self,
        values: &[V],
        quota: Quota,
    ) -> Result<Self, PolicyError> {
        let key = join(values);
        match self.overrides.insert(key.clone(), quota) {
            None => Ok(self),
            Some(_) => Err(PolicyError::OverriddenTwice(key)),
        }
    }

    /// How many units a request takes. Call it after all overrides: the cost must fit every quota.
    pub fn costing(mut self, cost: Cost) -> Result<Self, PolicyError> {
        if let Cost::Attribute { name, .. } = &cost {
            self.attributes.check(name)?;
        }
        let usual = match &cost {
            Cost::Fixed(0)
            | Cost::Attribute { default: 0, .. }
            | Cost::Attribute { max: 0, .. } => {
                return Err(PolicyError::ZeroCost);
            }
            Cost::Attribute { default, max, .. } if default > max => {
                return Err(PolicyError::DefaultCost { default: *default, max: *max });
            }
            // A key with a smaller quota takes less at most; but one that all quotas are smaller
            // than says nothing.
            Cost::Attribute { max, .. } if *max > self.largest_cost() => {
                return Err(PolicyError::Cost { cost: *max, most: self.largest_cost() });
            }
            Cost::Fixed(units) | Cost::Attribute { default: units, .. } => *units,
        };
        let most = self.quotas().map(Quota::burst).min().unwrap_or(0);
        if usual > most {
            return Err(PolicyError::Cost { cost: usual, most });
        }
        self.cost = cost;
        Ok(self)
    }

    fn quotas(&self) -> impl Iterator<Item = &Quota> {
        self.overrides.values().chain([&self.quota])
    }

    /// What one request can take at most, of the key with the largest quota.
    pub(crate) fn largest_cost(&self) -> u64 {
        self.quotas().map(Quota::burst).max().unwrap_or(0)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The quota of keys that have none of their own.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// The quota of this key.
    #[must_use]
    pub fn quota_for(&self, key: &str) -> &Quota {
        self.overrides.get(key).unwrap_or(&self.quota)
    }

    /// Whether it enforces.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What to answer while the store cannot decide.
    #[must_use]
    pub fn store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// How many keys have a quota of their own.
    #[must_use]
    pub fn overrides(&self) -> usize {
        self.overrides.len()
    }

    /// The attributes that it counts by.
    #[must_use]
    pub fn key_attributes(&self) -> &[String] {
        &self.key
    }

    /// Whether a condition or the key is about such an attribute.
    #[must_use]
    pub fn speaks_of(&self, is_such: impl Fn(&str) -> bool) -> bool {
        let conditions = self.conditions.iter().map(|condition| &condition.attribute);
        conditions.chain(&self.key).any(|name| is_such(name))
    }

    /// Returns the first attribute of the conditions, the key or the cost that no plain HTTP
    /// request has: `domain`, `descriptor.KEY`, or one that
    /// [`with_attributes`](Self::with_attributes) declares.
    #[must_use]
    pub fn non_http_attribute(&self) -> Option<&str> {
        let conditions = self.conditions.iter().map(|condition| &condition.attribute);
        let cost = match &self.cost {
            Cost::Fixed(_) => None,
            Cost::Attribute { name, .. } => Some(name),
        };
        conditions
            .chain(&self.key)
            .chain(cost)
            .map(String::as_str)
            .find(|name| !attribute::is_http(name))
    }

    /// What a request is told that lacks the key which this policy counts by. No wait helps.
    #[must_use]
    pub fn without_key(&self) -> Decision {
        Decision {
            allowed: false,
            limit: self.quota.limit(),
            remaining: 0,
            retry_after: Duration::ZERO,
            reset_after: Duration::ZERO,
            delay: Duration::ZERO,
            source: Source::Deny,
        }
    }

    /// What a request costs that says nothing of it.
    #[must_use]
    pub fn usual_cost(&self) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { default, .. } => *default,
        }
    }
}

/// One value as it is; several joined by a bar, with bars and backslashes in them escaped, so that
/// no two lists join alike.
fn join(values: &[impl AsRef<str>]) -> String {
    if let [value] = values {
        return value.as_ref().to_owned();
    }
    let escaped =
        values.iter().map(|value| value.as_ref().replace('\\', "\\\\").replace('|', "\\|"));
    escaped.collect::<Vec<_>>().join("|")
}

enum_names!(MissingKey, "missing_key", Skip = "skip", Deny = "deny");
enum_names!(Mode, "mode", Enforce = "enforce", Shadow = "shadow");
enum_names!(OnStoreFailure, "on_store_failure", Local = "local", Allow = "allow", Deny = "deny");

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn quota(limit: u64) -> Quota {
        Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid")
    }

    fn policy(name: &str) -> Policy {
        Policy::new(name, quota(10)).expect("a name")
    }

    #[test]
    fn what_makes_no_policy_says_so() {
        assert_eq!(Policy::new("", quota(1)).err(), Some(PolicyError::Name(KeyError::Empty)));
        assert!(
            Policies::new(vec![policy("a"), policy("a")])
                .is_err_and(|error| error.to_string().contains("used twice"))
        );
        assert!(policy("a").matching::<&str>("path", &[]).is_err());
        assert!(policy("a").costing(Cost::Fixed(0)).is_err());
        assert!(
            policy("a")
                .costing(Cost::Fixed(11))
                .is_err_and(|error| error.to_string().contains("at most 10"))
        );
        let cost = |default, max| Cost::Attribute { name: "header.c".to_owned(), default, max };
        assert!(
            policy("a")
                .costing(cost(7, 5))
                .is_err_and(|error| error.to_string().contains("more than the max 5"))
        );
        assert!(
            policy("a")
                .costing(cost(1, 11))
                .is_err_and(|error| error.to_string().contains("at most 10"))
        );
        let small = || policy("a").overriding(&["small"], quota(5)).expect("one");
        assert!(small().costing(cost(1, 10)).is_ok(), "the small one takes 5 at most");
        assert!(
            small()
                .costing(cost(6, 10))
                .is_err_and(|error| error.to_string().contains("at most 5"))
        );
        assert!(
            small()
                .costing(Cost::Fixed(6))
                .is_err_and(|error| error.to_string().contains("at most 5"))
        );
        let twice =
            policy("a").overriding(&["k"], quota(1)).and_then(|p| p.overriding(&["k"], quota(2)));
        assert!(twice.is_err_and(|error| error.to_string().contains("overridden twice")));
        let unknown = Cost::Attribute { name: "heder.c".to_owned(), default: 1, max: 1 };
        for wrong in [
            policy("a").matching("heder.c", &["x"]),
            policy("a").counting(&["ip", "heder.c"]),
            policy("a").costing(unknown),
        ] {
            assert!(
                wrong.is_err_and(|error| error.to_string().contains("did you mean `header.c`?"))
            );
        }
        assert!(
            "shadwo"
                .parse::<Mode>()
                .is_err_and(|error| error.to_string().contains("enforce, shadow"))
        );
    }

    #[test]
    fn attributes_that_no_http_request_has_are_found_wherever_they_are_used() {
        let own = || policy("a").with_attributes(&["tenant"]).expect("a good name");
        let cost = Cost::Attribute { name: "tenant".to_owned(), default: 1, max: 1 };
        assert_eq!(
            policy("a").counting(&["ip", "header.x"]).expect("known").non_http_attribute(),
            None
        );
        for (policy, name) in [
            (own().matching("tenant", &["acme"]), "tenant"),
            (own().counting(&["ip", "tenant"]), "tenant"),
            (own().costing(cost), "tenant"),
            (policy("a").matching("domain", &["edge"]), "domain"),
            (policy("a").counting(&["descriptor.user"]), "descriptor.user"),
        ] {
            assert_eq!(policy.expect("known").non_http_attribute(), Some(name));
        }
    }
}
