//! Which policies apply to a request, and what each of them charges it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::{IntErrorKind, ParseIntError};

use super::index::Index;
use super::{
    AttributeError, AttributeNames, Attributes, Cost, MissingKey, Mode, Policy, PolicyError, join,
    normal_path,
};
use crate::charge::Charge;
use crate::key::{Key, KeyError};
use crate::quota::Quota;

/// A set of policies, indexed by what they match.
#[derive(Debug, Default)]
pub struct Policies {
    all: Vec<Policy>,
    by_name: HashMap<String, usize>,
    index: Index,
    attributes: AttributeNames,
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
        let mut attributes = AttributeNames::default();
        for policy in &policies {
            attributes.merge(&policy.attributes);
        }
        Ok(Self { all: policies, by_name, index, attributes })
    }

    /// Adds declared attributes, which callers may send even if no policy uses them.
    #[cfg(feature = "config")]
    pub(crate) fn with_attribute_names(mut self, names: &AttributeNames) -> Self {
        self.attributes.merge(names);
        self
    }

    /// Checks the name of an attribute that a caller sends: it must be built in, or declared by one
    /// of the policies or their file. A limit on a misspelt one would never apply.
    pub fn check_attribute(&self, name: &str) -> Result<(), AttributeError> {
        self.attributes.check_known(name)
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

    /// Which policies apply to a request, and what each charges. A `cost` that the request names
    /// itself goes before the policies' own.
    pub fn select(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
    ) -> Result<Selection<'_>, SelectError> {
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
    /// Policies in shadow mode that would have turned the request away, because it lacks their key
    /// or has one that is none.
    pub turned_away_in_shadow: Vec<&'a Policy>,
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
    /// What this policy alone charges a request, whatever it matches: for a caller that has chosen
    /// it.
    pub fn select(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
    ) -> Result<Selection<'_>, SelectError> {
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
        let shadow = self.mode == Mode::Shadow;
        let Some(key) = self.key_of(attributes) else {
            match self.missing_key {
                MissingKey::Deny if shadow => selection.turned_away_in_shadow.push(self),
                MissingKey::Deny => _ = selection.key_missing_for.get_or_insert(self),
                MissingKey::Skip => {}
            }
            return Ok(());
        };
        match Key::new(&key) {
            Ok(_) => {}
            Err(_) if shadow => {
                selection.turned_away_in_shadow.push(self);
                return Ok(());
            }
            Err(reason) => {
                let (policy, attributes) = (self.name.to_string(), self.key.join(", "));
                return Err(SelectError { policy, attributes, reason });
            }
        }
        let quota = self.quota_for(&key);
        let cost = cost.unwrap_or_else(|| self.cost_of(attributes, quota));
        selection.charges.push(Selected { policy: self, key, quota, cost });
        Ok(())
    }

    pub(super) fn applies_to(&self, attributes: &dyn Attributes) -> bool {
        self.conditions.iter().all(|condition| {
            attributes.get(&condition.attribute).is_some_and(|value| {
                let value = if condition.attribute == "path" { normal_path(&value) } else { value };
                condition.patterns.iter().any(|pattern| pattern.matches(&value))
            })
        })
    }

    fn cost_of(&self, attributes: &dyn Attributes, quota: &Quota) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { name, default, max } => {
                let units = attributes
                    .get(name)
                    .and_then(|value| whole_number(&value))
                    .filter(|units| *units > 0);
                units.map_or(*default, |units| units.min(*max).min(quota.burst()))
            }
        }
    }

    /// The key that this request counts under; `None` if it lacks an attribute.
    fn key_of(&self, attributes: &dyn Attributes) -> Option<String> {
        let value = |name: &String| attributes.get(name).filter(|value| !value.is_empty());
        match self.key.as_slice() {
            [] => Some("all".to_owned()),
            [name] => value(name).map(Cow::into_owned),
            names => {
                names.iter().map(value).collect::<Option<Vec<_>>>().map(|values| join(&values))
            }
        }
    }
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
        let charge =
            Charge::new(&self.key, self.quota).with_policy(&self.policy.name).with_cost(self.cost);
        charge.with_on_store_failure(self.policy.on_store_failure)
    }
}

/// One that is too large for our numbers is the largest of them.
fn whole_number(text: &str) -> Option<u64> {
    text.parse().map_or_else(
        |error: ParseIntError| (*error.kind() == IntErrorKind::PosOverflow).then_some(u64::MAX),
        Some,
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;

    fn quota(limit: u64) -> Quota {
        Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid")
    }

    fn policy(name: &str) -> Policy {
        Policy::new(name, quota(10)).expect("a name")
    }

    fn by_tenant(declared: &[&str]) -> Result<Policy, PolicyError> {
        policy("p").with_attributes(declared)?.counting(&["tenant"])
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
        let api = policy("api")
            .matching("path", &["/api/**"])
            .and_then(|p| p.matching("method", &["GET", "POST"]));
        let policies = Policies::new(vec![policy("all"), api.expect("valid")]).expect("two names");
        assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "GET")]), ["all", "api"]);
        assert_eq!(names(&policies, &[("path", "/api"), ("method", "POST")]), ["all", "api"]);
        assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "PUT")]), ["all"]);
        assert_eq!(names(&policies, &[("path", "/apis"), ("method", "GET")]), ["all"]);
        assert_eq!(
            names(&policies, &[("path", "/api/items")]),
            ["all"],
            "an absent attribute matches nothing"
        );
    }

    #[test]
    fn attributes_of_callers_are_built_in_or_declared_by_a_policy() {
        let policies =
            Policies::new(vec![policy("all"), by_tenant(&["tenant", "plan"]).expect("valid")]);
        let policies = policies.expect("two names");
        for known in ["tenant", "plan", "ip", "header.x", "descriptor.user", "query.any thing"] {
            assert_eq!(policies.check_attribute(known), Ok(()), "{known}");
        }
        let error = policies.check_attribute("tennant").expect_err("unknown").to_string();
        assert!(
            error.contains("\"tennant\"") && error.contains("did you mean `tenant`?"),
            "{error}"
        );
        assert!(Policies::default().check_attribute("tenant").is_err());
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
        let login = policy("login")
            .matching("path", &["/login"])
            .and_then(|p| p.counting(&["ip"]))
            .expect("valid");
        let elsewhere = request(&[("path", "/"), ("ip", "192.0.2.1")]);
        assert_eq!(
            login.select(&elsewhere, None).expect("a sound key").charges[0].key(),
            "192.0.2.1"
        );
        assert!(login.select(&request(&[]), None).expect("no key").charges.is_empty());
    }

    #[test]
    fn a_request_without_the_key_is_skipped_or_denied() {
        let skip = policy("skip").counting(&["header.x-user-id"]).expect("valid");
        let deny = policy("deny")
            .counting(&["header.x-user-id"])
            .expect("valid")
            .on_missing_key(MissingKey::Deny);
        let policies = Policies::new(vec![skip, deny]).expect("two names");
        for absent in [request(&[]), request(&[("header.x-user-id", "")])] {
            let selection = policies.select(&absent, None).expect("sound");
            assert!(selection.charges.is_empty());
            assert_eq!(selection.key_missing_for.map(Policy::name), Some("deny"));
        }
        assert_eq!(names(&policies, &[("header.x-user-id", "u1")]), ["skip", "deny"]);
    }

    #[test]
    fn what_is_only_looked_at_turns_nobody_away() {
        let shadow = policy("shadow").counting(&["header.x"]).expect("valid").in_mode(Mode::Shadow);
        let policies =
            Policies::new(vec![shadow.on_missing_key(MissingKey::Deny)]).expect("one name");
        for request in [request(&[]), request(&[("header.x", &"x".repeat(513))])] {
            let selection = policies.select(&request, None).expect("nobody is turned away");
            assert!(selection.charges.is_empty() && selection.key_missing_for.is_none());
            assert_eq!(selection.turned_away_in_shadow.len(), 1);
        }
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
        let policies = Policies::new(vec![policy("p").counting(&["header.x"]).expect("valid")])
            .expect("one name");
        let long = "x".repeat(513);
        for (value, reason) in [(long.as_str(), "has 513 bytes"), ("a\nb", "control character")] {
            let error = policies
                .select(&request(&[("header.x", value)]), None)
                .expect_err("no key")
                .to_string();
            assert!(
                error.contains("policy \"p\" counts by header.x") && error.contains(reason),
                "{error}"
            );
        }
    }

    #[test]
    fn overrides_go_by_key_and_costs_by_attribute() {
        let policy = by_tenant(&["tenant"])
            .and_then(|p| p.overriding(&["acme"], quota(1_000)))
            .expect("valid");
        let cost = Cost::Attribute { name: "header.x-cost".to_owned(), default: 2, max: 8 };
        let policies = Policies::new(vec![policy.costing(cost).expect("fits")]).expect("one name");
        let charged = |attributes: &[(&str, &str)], cost| {
            let request = request(attributes);
            let selection = policies.select(&request, cost).expect("sound");
            let charge = selection.charges[0].charge();
            (charge.quota().limit(), charge.cost())
        };
        assert_eq!(charged(&[("tenant", "acme")], None), (1_000, 2));
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], None), (10, 5));
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "99")], None), (10, 8));
        assert_eq!(
            charged(&[("tenant", "other"), ("header.x-cost", "99999999999999999999999")], None),
            (10, 8)
        );
        for nonsense in ["0", "-1", "NaN", "1e3", ""] {
            assert_eq!(
                charged(&[("tenant", "other"), ("header.x-cost", nonsense)], None),
                (10, 2),
                "{nonsense}"
            );
        }
        assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], Some(7)), (10, 7));
    }

    #[test]
    fn an_attribute_costs_no_more_than_the_keys_own_quota_admits() {
        let policy =
            by_tenant(&["tenant", "cost"]).and_then(|p| p.overriding(&["small"], quota(5)));
        let cost = Cost::Attribute { name: "cost".to_owned(), default: 1, max: 10 };
        let policy = policy.and_then(|p| p.costing(cost)).expect("fits the larger");
        let charged = |tenant: &str| {
            let request = request(&[("tenant", tenant), ("cost", "100")]);
            policy.select(&request, None).expect("sound").charges[0].cost()
        };
        assert_eq!((charged("small"), charged("other")), (5, 10));
    }
}
