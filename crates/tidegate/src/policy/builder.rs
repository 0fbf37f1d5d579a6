//! [`PolicyBuilder`]: collects the parts of a policy in any order and validates them at the end.

use std::sync::Arc;

use super::{
    AttributeNames, Cost, DEFAULT_IPV6_PREFIX, MissingKey, Mode, OnResponse, PathRules, Policy,
    PolicyError, ShowKeys, StatusSet, on_response,
};
use crate::charge::OnStoreFailure;
use crate::quota::Quota;

/// Builder of a [`Policy`]. The order of the calls does not matter; [`build`](Self::build)
/// validates everything.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Cost, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minute = Duration::from_secs(60);
/// let policy = Policy::builder("uploads", Quota::token_bucket(100, minute)?)
///     .cost(Cost::Attribute { name: "header.x-megabytes".into(), default: 1, max: 100 })
///     .key(["header.x-user-id"])
///     .matches("method", ["PUT", "POST"])
///     .override_for(["big-customer"], Quota::token_bucket(1_000, minute)?)
///     .build()?;
/// assert_eq!(policy.quota_for("big-customer").limit(), 1_000);
///
/// let quota = Quota::token_bucket(100, minute)?;
/// let misspelt = Policy::builder("uploads", quota).key(["heder.x-user-id"]);
/// assert!(misspelt.build().is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "call `build` to create the policy"]
pub struct PolicyBuilder {
    name: String,
    quota: Quota,
    attributes: AttributeNames,
    declared: Vec<String>,
    path_rules: PathRules,
    ipv6_prefix: u8,
    matches: Vec<(String, Vec<String>)>,
    unless: Vec<Vec<(String, Vec<String>)>>,
    key: Vec<String>,
    limits: Option<(String, Vec<(String, Quota)>)>,
    lanes: Option<LaneParts>,
    overrides: Vec<(Vec<String>, Quota)>,
    cost: Cost,
    missing_key: MissingKey,
    mode: Mode,
    on_store_failure: OnStoreFailure,
    show_keys: Option<ShowKeys>,
    refund_on: Option<Vec<String>>,
    settled_by: Option<String>,
}

/// An attribute, the percentages of its values, and that of any other value.
type LaneParts = (String, Vec<(String, u64)>, u64);

/// Part of a policy that is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyPart {
    /// The name.
    Name,
    /// The declared attributes.
    Attributes,
    /// A condition, by its position.
    Match(usize),
    /// An entry of [`unless`](PolicyBuilder::unless), by its position.
    Unless(usize),
    /// The attributes of the key.
    Key,
    /// An override, by its position.
    Override(usize),
    /// The limits by the values of an attribute.
    Limits,
    /// The lanes.
    Lanes,
    /// The cost.
    Cost,
    /// The statuses of responses whose requests are refunded.
    RefundOn,
    /// The response header that has the units which were used.
    SettledBy,
}

fn strings(texts: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    texts.into_iter().map(Into::into).collect()
}

impl PolicyBuilder {
    pub(super) fn new(name: String, quota: Quota) -> Self {
        Self {
            name,
            quota,
            attributes: AttributeNames::default(),
            declared: Vec::new(),
            path_rules: PathRules::KEEP,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
            matches: Vec::new(),
            unless: Vec::new(),
            key: Vec::new(),
            limits: None,
            lanes: None,
            overrides: Vec::new(),
            cost: Cost::Fixed(1),
            missing_key: MissingKey::default(),
            mode: Mode::default(),
            on_store_failure: OnStoreFailure::default(),
            show_keys: None,
            refund_on: None,
            settled_by: None,
        }
    }

    /// Declares custom attributes, in addition to the built-in ones.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// let policy = Policy::builder("per-tenant", quota).attributes(["tenant"]);
    /// assert!(policy.clone().key(["tenant"]).build().is_ok());
    /// let misspelt = policy.key(["tennant"]).build().unwrap_err();
    /// assert!(misspelt.to_string().ends_with("(did you mean `tenant`?)"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn attributes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.declared.extend(strings(names));
        self
    }

    /// Accepts the custom attributes of a set of names that is declared already.
    pub fn attribute_names(mut self, names: AttributeNames) -> Self {
        self.attributes = names;
        self
    }

    /// Sets how patterns of paths are parsed, as the [`Policies`](crate::Policies) of this policy
    /// will parse them. By default they are kept as written until then.
    pub fn path_rules(mut self, rules: PathRules) -> Self {
        self.path_rules = rules;
        self
    }

    /// Sets the number of bits by which IPv6 addresses count together, as in the
    /// [`ClientIp`](crate::ClientIp) that reads them; 64 by default. A longer network in a condition
    /// or an override is an error of [`build`](Self::build).
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.ipv6_prefix = bits;
        self
    }

    /// Applies the policy only to requests whose attribute matches any of these patterns: `*`
    /// stands for any text without a slash, `**` for any text. A path pattern that ends in `/**`
    /// also matches the path before it, and the method `GET` also matches `HEAD`. A pattern of `ip`
    /// may be a network, such as `10.0.0.0/8`. Several calls must all match.
    pub fn matches(
        mut self,
        attribute: impl Into<String>,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        self.matches.push((attribute.into(), strings(patterns)));
        self
    }

    /// Exempts requests that match all of these conditions, each an attribute and patterns as in
    /// [`matches`](Self::matches). Several calls exempt the requests of each. A value that servers
    /// may read differently exempts nothing.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::builder("per-ip", Quota::sliding_log(100, Duration::from_secs(60))?)
    ///     .key(["ip"])
    ///     .unless([("ip", ["10.0.0.0/8", "fd00::/8"])])
    ///     .unless([("path", ["/healthz"]), ("method", ["GET"])])
    ///     .build()?;
    /// assert_eq!(policy.unless().count(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn unless(
        mut self,
        conditions: impl IntoIterator<
            Item = (impl Into<String>, impl IntoIterator<Item = impl Into<String>>),
        >,
    ) -> Self {
        let conditions = conditions.into_iter();
        let conditions = conditions.map(|(attribute, it)| (attribute.into(), strings(it)));
        self.unless.push(conditions.collect());
        self
    }

    /// Counts by these attributes together. Without a key, all requests count together.
    pub fn key(mut self, attributes: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.key = strings(attributes);
        self
    }

    /// Sets the treatment of a request that lacks an attribute of the key. By default the policy
    /// does not apply to it.
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Sets whether denials are enforced; by default they are.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets how requests are decided while the store is unavailable, with a `Fallback` (feature
    /// `resilience`) around the store. By default this process decides by its share of the quota.
    pub fn on_store_failure(mut self, on_store_failure: OnStoreFailure) -> Self {
        self.on_store_failure = on_store_failure;
        self
    }

    /// Sets the form in which operators see the keys. By default keys of attributes that hold
    /// credentials are hashed; see [`ShowKeys::default_for`].
    pub fn show_keys(mut self, show_keys: ShowKeys) -> Self {
        self.show_keys = Some(show_keys);
        self
    }

    /// Sets other quotas for some values of an attribute, such as plans. A request without the
    /// attribute, or with another value, has the quota of the policy.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let per_minute = |limit| Quota::sliding_log(limit, Duration::from_secs(60));
    /// let policy = Policy::builder("per-user", per_minute(60)?)
    ///     .key(["header.x-user-id"])
    ///     .limits("header.x-plan", [("free", per_minute(100)?), ("pro", per_minute(1_000)?)])
    ///     .build()?;
    ///
    /// let request = [("header.x-user-id", "ann"), ("header.x-plan", "pro")];
    /// let request = BTreeMap::from(request.map(|(name, value)| (name.into(), value.into())));
    /// let quota = policy.select(&request, None)?.charges[0].quota().cloned();
    /// assert_eq!(quota, Some(per_minute(1_000)?));
    /// # Ok(())
    /// # }
    /// ```
    pub fn limits(
        mut self,
        attribute: impl Into<String>,
        values: impl IntoIterator<Item = (impl Into<String>, Quota)>,
    ) -> Self {
        let values = values.into_iter().map(|(value, quota)| (value.into(), quota));
        self.limits = Some((attribute.into(), values.collect()));
        self
    }

    /// Keeps the last part of the limit for important requests: the count is the same for all, and
    /// requests with these values of an attribute fill it to a percentage only. `other` is that of
    /// requests without the attribute or with another value.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = Policy::builder("api", Quota::token_bucket(100, Duration::from_secs(1))?)
    ///     .lanes("header.x-priority", [("low", 80), ("normal", 95)], 100)
    ///     .build()?;
    ///
    /// let request = BTreeMap::from([("header.x-priority".to_owned(), "low".to_owned())]);
    /// let selection = policy.select(&request, None)?;
    /// let burst = selection.charges[0].quota().map(Quota::burst);
    /// assert_eq!(burst, Some(80));
    /// # Ok(())
    /// # }
    /// ```
    pub fn lanes(
        mut self,
        attribute: impl Into<String>,
        values: impl IntoIterator<Item = (impl Into<String>, u64)>,
        other: u64,
    ) -> Self {
        let values = values.into_iter().map(|(value, percent)| (value.into(), percent));
        self.lanes = Some((attribute.into(), values.collect(), other));
        self
    }

    /// Sets another quota for one key, given by the values of its attributes in their order. It
    /// comes before [`limits`](Self::limits). If the key is `ip` alone, the value may be a network:
    /// each of its addresses has a count of its own, and the longest network around an address
    /// applies. A key that is overridden twice is an error of [`build`](Self::build).
    pub fn override_for(
        mut self,
        values: impl IntoIterator<Item = impl Into<String>>,
        quota: Quota,
    ) -> Self {
        self.overrides.push((strings(values), quota));
        self
    }

    /// Sets the number of units that a request takes; 1 by default.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Returns the units of a request when its response has one of these statuses: `404`, or a
    /// class such as `2xx`. Units are taken before the request and returned after it, so that
    /// parallel requests cannot exceed the limit together:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Only failed logins count.
    /// let quota = Quota::sliding_log(5, Duration::from_secs(60))?;
    /// let logins = Policy::builder("failed-logins", quota)
    ///     .matches("path", ["/login"])
    ///     .key(["ip"])
    ///     .refund_on(["2xx", "3xx"])
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The Tower layer (feature `tower`) and the gateway do this. A caller of a
    /// [`PolicyLimiter`](crate::PolicyLimiter), which does not know the response, does it by
    /// [`PolicyDecisions::refunded_on`](crate::PolicyDecisions::refunded_on).
    pub fn refund_on(mut self, statuses: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.refund_on = Some(strings(statuses));
        self
    }

    /// Settles the units of a request by this header of its response. The cost is reserved before
    /// the request. When the response is there, the difference to the number in the header returns
    /// to the time of the charge; more than was reserved is charged, even beyond the limit. Without
    /// the header, or if it is not one whole number, the reserved units stay.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Cost, Policy, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let name = "header.x-max-tokens".to_owned();
    /// let tokens = Policy::builder("tokens", Quota::sliding_log(100_000, Duration::from_secs(60))?)
    ///     .key(["header.x-user-id"])
    ///     .cost(Cost::Attribute { name, default: 2_000, max: 8_000 })
    ///     .settled_by("x-tokens-used")
    ///     .build()?;
    /// assert_eq!(tokens.settled_by(), Some("x-tokens-used"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The Tower layer (feature `tower`) and the gateway do this. Any other caller charges the cost,
    /// unless it asks for a [lease](crate::Query::with_lease).
    pub fn settled_by(mut self, response_header: impl Into<String>) -> Self {
        self.settled_by = Some(response_header.into());
        self
    }

    /// Validates the parts and creates the policy.
    ///
    /// # Errors
    ///
    /// The first invalid part: the name, an attribute that is unknown or malformed, a condition
    /// without patterns, a key with two overrides, a cost that no quota could admit, a text that is
    /// not a status, or one that is not the name of a header.
    pub fn build(self) -> Result<Policy, PolicyError> {
        self.build_parts().map_err(|(_, error)| error)
    }

    /// Validates the parts like [`build`](Self::build), and names the part that is invalid: for an
    /// error with its position in a file.
    pub fn build_parts(self) -> Result<Policy, (PolicyPart, PolicyError)> {
        let of = |part: PolicyPart| move |error: PolicyError| (part, error);
        let mut policy = Policy::new(self.name, self.quota).map_err(of(PolicyPart::Name))?;
        let mut names = self.attributes;
        for name in &self.declared {
            names.declare(name).map_err(|error| (PolicyPart::Attributes, error.into()))?;
        }
        policy.set_attribute_names(names);
        policy.set_path_rules(self.path_rules).map_err(of(PolicyPart::Name))?;
        policy.rules.ipv6_prefix = self.ipv6_prefix;
        for (index, (attribute, patterns)) in self.matches.iter().enumerate() {
            policy.add_match(attribute, patterns).map_err(of(PolicyPart::Match(index)))?;
        }
        for (index, conditions) in self.unless.iter().enumerate() {
            policy.add_unless(conditions).map_err(of(PolicyPart::Unless(index)))?;
        }
        policy.set_key(&self.key).map_err(of(PolicyPart::Key))?;
        for (index, (values, quota)) in self.overrides.into_iter().enumerate() {
            policy.add_override(&values, quota).map_err(of(PolicyPart::Override(index)))?;
        }
        policy.quotas.index();
        if let Some((attribute, values)) = self.limits {
            policy.set_limits(&attribute, values).map_err(of(PolicyPart::Limits))?;
        }
        if let Some((attribute, values, other)) = self.lanes {
            policy.set_lanes(&attribute, values, other).map_err(of(PolicyPart::Lanes))?;
        }
        policy.set_cost(self.cost).map_err(of(PolicyPart::Cost))?;
        policy.set_missing_key(self.missing_key);
        policy.set_mode(self.mode);
        policy.set_on_store_failure(self.on_store_failure);
        policy.show_keys = self.show_keys;
        let statuses = self.refund_on.map(|texts| StatusSet::new(&texts)).transpose();
        let refund_on = statuses.map_err(of(PolicyPart::RefundOn))?;
        let header = self.settled_by.map(|name| on_response::header_name(&name)).transpose();
        let settled_by = header.map_err(of(PolicyPart::SettledBy))?;
        if settled_by.is_some() && policy.quota().is_concurrency() {
            return Err((PolicyPart::SettledBy, PolicyError::SettledInFlight));
        }
        policy.on_response = (refund_on.is_some() || settled_by.is_some())
            .then(|| Arc::new(OnResponse { refund_on, settled_by }));
        Ok(policy)
    }
}
