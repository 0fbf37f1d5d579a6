//! [`Policy`]: what a limit applies to, whose key it counts, and its quota; [`Policies`]: which of many apply.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::Arc;

use crate::charge::Charge;
use crate::key::{Key, KeyError};
use crate::named::named;
use crate::quota::Quota;

mod index;
mod pattern;

use index::Index;
use pattern::Pattern;
pub use pattern::normal_path;

/// What is known of a request, by name: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`, `cookie.NAME`, or any
/// other name that a policy asks for.
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
        /// More than this counts as this.
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
        /// The smallest of the policy's quotas.
        most: u64,
    },
    /// A cost of nothing.
    #[error("cost 0 takes nothing: a cost is at least 1")]
    ZeroCost,
}

/// Why policies cannot be applied to a request: the request's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {policy:?} counts by {attributes}, but that key {reason}")]
pub struct SelectError {
    policy: String,
    attributes: String,
    reason: KeyError,
}

/// The policies that apply to a request, in the order of their definition.
#[derive(Debug, Default)]
pub struct Selection<'a> {
    /// What they charge.
    pub charges: Vec<Selected<'a>>,
    /// A policy that denies because the request lacks its key.
    pub key_missing_for: Option<&'a Policy>,
}

/// A policy that applies to a request, with what it charges.
#[derive(Debug, Clone)]
pub struct Selected<'a> {
    policy: &'a Policy,
    key: String,
    quota: &'a Quota,
    cost: u64,
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
        })
    }

    /// Applies only if this attribute matches any of these patterns: `*` stands for anything but a slash, `**` for
    /// anything. (A path pattern that ends in `/**` matches the path before it, too.)
    pub fn matching<P: AsRef<str>>(
        mut self,
        attribute: impl Into<String>,
        patterns: &[P],
    ) -> Result<Self, PolicyError> {
        let attribute = attribute.into();
        if patterns.is_empty() {
            return Err(PolicyError::NoPattern(attribute));
        }
        let patterns = patterns.iter().map(|pattern| Pattern::new(&attribute, pattern.as_ref())).collect();
        self.conditions.push(Condition { attribute, patterns });
        Ok(self)
    }

    /// Counts by these attributes. None: all requests together.
    pub fn counting<A: AsRef<str>>(mut self, attributes: &[A]) -> Result<Self, PolicyError> {
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
    pub fn overriding<V: AsRef<str>>(mut self, values: &[V], quota: Quota) -> Result<Self, PolicyError> {
        let key = join(values);
        match self.overrides.insert(key.clone(), quota) {
            None => Ok(self),
            Some(_) => Err(PolicyError::OverriddenTwice(key)),
        }
    }

    /// How many units a request takes. Call it after all overrides: the cost must fit every quota.
    pub fn costing(mut self, cost: Cost) -> Result<Self, PolicyError> {
        let (least, highest) = match &cost {
            Cost::Fixed(units) => (*units, *units),
            Cost::Attribute { default, max, .. } => (*default.min(max), *default.max(max)),
        };
        if least == 0 {
            return Err(PolicyError::ZeroCost);
        }
        let quotas = self.overrides.values().chain([&self.quota]);
        let most = quotas.map(Quota::burst).min().unwrap_or(0);
        if highest > most {
            return Err(PolicyError::Cost { cost: highest, most });
        }
        self.cost = cost;
        Ok(self)
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

    /// What a request costs that says nothing of it.
    #[must_use]
    pub fn usual_cost(&self) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { default, .. } => *default,
        }
    }

    /// What this policy alone charges a request, whatever it matches: for a caller that has chosen it.
    pub fn select(&self, attributes: &dyn Attributes, cost: Option<u64>) -> Result<Selection<'_>, SelectError> {
        let mut selection = Selection::default();
        self.add_to(&mut selection, attributes, cost)?;
        Ok(selection)
    }

    fn add_to<'a>(
        &'a self,
        selection: &mut Selection<'a>,
        attributes: &dyn Attributes,
        cost: Option<u64>,
    ) -> Result<(), SelectError> {
        let Some(key) = self.key_of(attributes) else {
            if self.missing_key == MissingKey::Deny && self.mode == Mode::Enforce {
                selection.key_missing_for.get_or_insert(self);
            }
            return Ok(());
        };
        Key::new(&key).map_err(|reason| SelectError {
            policy: self.name.to_string(),
            attributes: self.key.join(", "),
            reason,
        })?;
        let quota = self.quota_for(&key);
        let cost = cost.unwrap_or_else(|| self.cost_of(attributes));
        selection.charges.push(Selected { policy: self, key, quota, cost });
        Ok(())
    }

    fn applies_to(&self, attributes: &dyn Attributes) -> bool {
        self.conditions.iter().all(|condition| {
            attributes.get(&condition.attribute).is_some_and(|value| {
                let value = if condition.attribute == "path" { normal_path(&value) } else { value };
                condition.patterns.iter().any(|pattern| pattern.matches(&value))
            })
        })
    }

    fn cost_of(&self, attributes: &dyn Attributes) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { name, default, max } => {
                let value = attributes.get(name);
                let units = value.and_then(|value| value.parse::<u64>().ok()).filter(|units| *units > 0);
                units.map_or(*default, |units| units.min(*max))
            }
        }
    }

    /// The key that this request counts under; `None` if it lacks an attribute.
    fn key_of(&self, attributes: &dyn Attributes) -> Option<String> {
        let value = |name: &String| attributes.get(name).filter(|value| !value.is_empty());
        match self.key.as_slice() {
            [] => Some("all".to_owned()),
            [name] => value(name).map(Cow::into_owned),
            names => names.iter().map(value).collect::<Option<Vec<_>>>().map(|values| join(&values)),
        }
    }
}

/// One value as it is; several joined by a bar, with bars and backslashes in them escaped, so that no two lists join alike.
fn join(values: &[impl AsRef<str>]) -> String {
    if let [value] = values {
        return value.as_ref().to_owned();
    }
    let escaped = values.iter().map(|value| value.as_ref().replace('\\', "\\\\").replace('|', "\\|"));
    escaped.collect::<Vec<_>>().join("|")
}

impl<'a> Selected<'a> {
    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &'a Policy {
        self.policy
    }

    /// Whose count it is.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The same, and no more of the rest.
    #[must_use]
    pub fn into_key(self) -> String {
        self.key
    }

    /// The quota that the key has.
    #[must_use]
    pub fn quota(&self) -> &'a Quota {
        self.quota
    }

    /// How many units it takes.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// What is to be decided.
    #[must_use]
    pub fn charge(&self) -> Charge<'_> {
        let charge = Charge::new(&self.key, self.quota).policy(&self.policy.name).cost(self.cost);
        charge.on_store_failure(self.policy.on_store_failure)
    }
}

/// A set of policies, indexed by what they match.
#[derive(Debug, Default)]
pub struct Policies {
    all: Vec<Policy>,
    by_name: HashMap<String, usize>,
    index: Index,
}

impl Policies {
    /// The set; each policy has a name of its own.
    pub fn new(policies: Vec<Policy>) -> Result<Self, PolicyError> {
        let mut by_name = HashMap::with_capacity(policies.len());
        for (position, policy) in policies.iter().enumerate() {
            if by_name.insert(policy.name.to_string(), position).is_some() {
                return Err(PolicyError::Twice(policy.name.to_string()));
            }
        }
        let index = Index::new(&policies);
        Ok(Self { all: policies, by_name, index })
    }

    /// The policy of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Policy> {
        self.by_name.get(name).map(|position| &self.all[*position])
    }

    /// All of them, in the order of their definition.
    pub fn iter(&self) -> impl Iterator<Item = &Policy> {
        self.all.iter()
    }

    /// Which policies apply to a request, and what each charges. A `cost` that the request names itself goes before the
    /// policies' own.
    pub fn select(&self, attributes: &dyn Attributes, cost: Option<u64>) -> Result<Selection<'_>, SelectError> {
        let mut selection = Selection::default();
        for position in self.index.candidates(attributes) {
            let policy = &self.all[position];
            if policy.applies_to(attributes) {
                policy.add_to(&mut selection, attributes, cost)?;
            }
        }
        Ok(selection)
    }
}

named!(MissingKey, "missing_key", Skip = "skip", Deny = "deny");
named!(Mode, "mode", Enforce = "enforce", Shadow = "shadow");
named!(OnStoreFailure, "on_store_failure", Local = "local", Allow = "allow", Deny = "deny");

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

    fn request(attributes: &[(&str, &str)]) -> BTreeMap<String, String> {
        attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn names(policies: &Policies, attributes: &[(&str, &str)]) -> Vec<String> {
        let request = request(attributes);
        let selection = policies.select(&request, None).expect("sound keys");
        selection.charges.iter().map(|selected| selected.policy().name().to_owned()).collect()
    }

    #[test]
    fn every_condition_must_match_and_a_list_means_any_of() {
        let api = policy("api").matching("path", &["/api/**"]).and_then(|p| p.matching("method", &["GET", "POST"]));
        let policies = Policies::new(vec![policy("all"), api.expect("valid")]).expect("two names");
        assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "GET")]), ["all", "api"]);
        assert_eq!(names(&policies, &[("path", "/api"), ("method", "POST")]), ["all", "api"]);
        assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "PUT")]), ["all"]);
        assert_eq!(names(&policies, &[("path", "/apis"), ("method", "GET")]), ["all"]);
        assert_eq!(names(&policies, &[("path", "/api/items")]), ["all"], "an absent attribute matches nothing");
    }

    #[test]
    fn another_way_to_write_a_path_does_not_get_around_its_policy() {
        let api = policy("api").matching("path", &["/api/login"]).expect("valid");
        let policies = Policies::new(vec![api]).expect("one name");
        for path in [
            "/api/login",
            "//api//login",
            "/api/./login",
            "/x/../api/login",
            "/%61pi/l%6Fgin",
            "/api/login/",
            "/api/login?x=1",
        ] {
            assert_eq!(names(&policies, &[("path", path)]), ["api"], "{path}");
        }
        assert!(names(&policies, &[("path", "/api/login2")]).is_empty());
    }

    #[test]
    fn a_policy_that_was_chosen_is_not_asked_what_it_matches() {
        let login = policy("login").matching("path", &["/login"]).and_then(|p| p.counting(&["ip"])).expect("valid");
        let elsewhere = request(&[("path", "/"), ("ip", "192.0.2.1")]);
        assert_eq!(login.select(&elsewhere, None).expect("a sound key").charges[0].key(), "192.0.2.1");
        assert!(login.select(&request(&[]), None).expect("no key").charges.is_empty());
    }

    #[test]
    fn a_request_without_the_key_is_skipped_or_denied() {
        let skip = policy("skip").counting(&["header.x-user-id"]).expect("valid");
        let deny = policy("deny").counting(&["header.x-user-id"]).expect("valid").on_missing_key(MissingKey::Deny);
        let policies = Policies::new(vec![skip, deny]).expect("two names");
        for absent in [request(&[]), request(&[("header.x-user-id", "")])] {
            let selection = policies.select(&absent, None).expect("sound");
            assert!(selection.charges.is_empty());
            assert_eq!(selection.key_missing_for.map(Policy::name), Some("deny"));
        }
        assert_eq!(names(&policies, &[("header.x-user-id", "u1")]), ["skip", "deny"]);
    }

    #[test]
    fn keys_of_several_attributes_never_join_alike() {
        let both = policy("both").counting(&["ip", "path"]).expect("valid");
        let policies = Policies::new(vec![both]).expect("one name");
        let key = |ip: &str, path: &str| {
            let request = request(&[("ip", ip), ("path", path)]);
            policies.select(&request, None).expect("sound").charges[0].key().to_owned()
        };
        assert_eq!(key("1.2.3.4", "/a"), "1.2.3.4|/a");
        assert_ne!(key("a|b", "c"), key("a", "b|c"));
        assert_ne!(key("a\\", "b"), key("a", "\\b"));
        assert_ne!(key("a\\|b", "c"), key("a\\", "b|c"));
    }

    #[test]
    fn a_key_that_is_none_is_the_requests_fault() {
        let policies = Policies::new(vec![policy("p").counting(&["header.x"]).expect("valid")]).expect("one name");
        let long = "x".repeat(513);
        for (value, reason) in [(long.as_str(), "has 513 bytes"), ("a\nb", "control character")] {
            let error = policies.select(&request(&[("header.x", value)]), None).expect_err("no key").to_string();
            assert!(error.contains("policy \"p\" counts by header.x") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn overrides_go_by_key_and_costs_by_attribute() {
        let policy =
            policy("p").counting(&["tenant"]).and_then(|p| p.overriding(&["acme"], quota(1_000))).expect("valid");
        let cost = Cost::Attribute { name: "header.x-cost".to_owned(), default: 2, max: 8 };
        let policies = Policies::new(vec![policy.costing(cost).expect("fits")]).expect("one name");
        let charged = |attributes: &[(&str, &str)], cost| {
            let request = request(attributes);
            let selection = policies.select(&request, cost).expect("sound");
            let charge = selection.charges[0].charge();
            (charge.quota().limit(), charge.units())
        };
        assert_eq!(charged(&[("tenant", "acme")], None), (1_000, 2));
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], None), (10, 5));
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "99")], None), (10, 8));
        for nonsense in ["0", "-1", "NaN", "1e3", "", "99999999999999999999999"] {
            assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", nonsense)], None), (10, 2), "{nonsense}");
        }
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], Some(7)), (10, 7));
    }

    #[test]
    fn what_makes_no_policy_says_so() {
        assert_eq!(Policy::new("", quota(1)).err(), Some(PolicyError::Name(KeyError::Empty)));
        assert!(
            Policies::new(vec![policy("a"), policy("a")]).is_err_and(|error| error.to_string().contains("used twice"))
        );
        assert!(policy("a").matching::<&str>("path", &[]).is_err());
        assert!(policy("a").costing(Cost::Fixed(0)).is_err());
        assert!(policy("a").costing(Cost::Fixed(11)).is_err_and(|error| error.to_string().contains("at most 10")));
        let twice = policy("a").overriding(&["k"], quota(1)).and_then(|p| p.overriding(&["k"], quota(2)));
        assert!(twice.is_err_and(|error| error.to_string().contains("overridden twice")));
        assert!("shadwo".parse::<Mode>().is_err_and(|error| error.to_string().contains("enforce, shadow")));
    }
}
