//! [`PolicyBuilder`]: collects the parts of a policy in any order and validates them at the end.

use super::{AttributeNames, Cost, MissingKey, Mode, Policy, PolicyError, ShowKeys};
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
    attributes: Vec<String>,
    matches: Vec<(String, Vec<String>)>,
    key: Vec<String>,
    overrides: Vec<(Vec<String>, Quota)>,
    cost: Cost,
    missing_key: MissingKey,
    mode: Mode,
    on_store_failure: OnStoreFailure,
    show_keys: Option<ShowKeys>,
}

fn strings(texts: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    texts.into_iter().map(Into::into).collect()
}

impl PolicyBuilder {
    pub(super) fn new(name: String, quota: Quota) -> Self {
        Self {
            name,
            quota,
            attributes: Vec::new(),
            matches: Vec::new(),
            key: Vec::new(),
            overrides: Vec::new(),
            cost: Cost::Fixed(1),
            missing_key: MissingKey::default(),
            mode: Mode::default(),
            on_store_failure: OnStoreFailure::default(),
            show_keys: None,
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
        self.attributes.extend(strings(names));
        self
    }

    /// Applies the policy only to requests whose attribute matches any of these patterns: `*`
    /// stands for any text without a slash, `**` for any text. A path pattern that ends in `/**`
    /// also matches the path before it, and the method `GET` also matches `HEAD`. Several calls must
    /// all match.
    pub fn matches(
        mut self,
        attribute: impl Into<String>,
        patterns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        self.matches.push((attribute.into(), strings(patterns)));
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

    /// Sets another quota for one key, given by the values of its attributes in their order. A key
    /// that is overridden twice is an error of [`build`](Self::build).
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

    /// Validates the parts and creates the policy.
    ///
    /// # Errors
    ///
    /// The first invalid part: the name, an attribute that is unknown or malformed, a condition
    /// without patterns, a key with two overrides, or a cost that no quota could admit.
    pub fn build(self) -> Result<Policy, PolicyError> {
        let mut policy = Policy::new(self.name, self.quota)?;
        let mut names = AttributeNames::default();
        for name in &self.attributes {
            names.declare(name)?;
        }
        policy.set_attribute_names(names);
        for (attribute, patterns) in &self.matches {
            policy.add_match(attribute, patterns)?;
        }
        policy.set_key(&self.key)?;
        for (values, quota) in self.overrides {
            policy.add_override(&values, quota)?;
        }
        policy.set_cost(self.cost)?;
        policy.set_missing_key(self.missing_key);
        policy.set_mode(self.mode);
        policy.set_on_store_failure(self.on_store_failure);
        policy.show_keys = self.show_keys;
        Ok(policy)
    }
}
