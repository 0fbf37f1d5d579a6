//! Selection of the policies that apply to a request, and their charges.

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::{IntErrorKind, ParseIntError};

use super::index::Index;
use super::query::QuotaRef;
use super::quotas::QuotaReason;
use super::{
    AttributeError, AttributeNames, Attributes, Condition, Cost, KeySource, MissingKey, Mode,
    OverrideEffect, OverridesNow, PathError, PathRules, Policy, PolicyError, PreparedCharge, join,
};
use crate::key::{Key, KeyError};
use crate::quota::Quota;
use crate::store::Action;

/// Length of the longest unknown name that is compared with those of the policies, and the number
/// of policies that it is compared with: an unknown name must not cost more than a decision.
const MAX_COMPARED_BYTES: usize = 40;
const MAX_COMPARED: usize = 32;

/// Set of policies with unique names, indexed by their conditions, so that selection stays fast
/// with thousands of policies.
///
/// A [`PolicyLimiter`](crate::PolicyLimiter) decides requests by it. Policies are built in code or,
/// loaded from a file by the crate `tidegate-config`. The set is immutable: to
/// change a policy, create another set. Counts belong to the store and to the policy's name, so
/// they survive such a change.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Policies, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minute = Duration::from_secs(60);
/// let login = Policy::builder("login", Quota::sliding_log(5, minute)?)
///     .matches("path", ["/login"])
///     .key(["ip"])
///     .build()?;
/// let users = Policy::builder("per-user", Quota::sliding_log(100, minute)?)
///     .key(["header.x-user-id"])
///     .build()?;
/// let policies = Policies::new(vec![login, users])?;
///
/// assert_eq!(policies.get("login").map(|policy| policy.quota().limit()), Some(5));
/// assert_eq!(policies.iter().count(), 2);
/// assert!(policies.check_attribute("heder.x-user-id").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Policies {
    all: Vec<Policy>,
    by_name: HashMap<String, usize>,
    index: Index,
    attributes: AttributeNames,
    path_rules: PathRules,
    /// Whether any policy reads the path.
    reads_paths: bool,
}

impl Policies {
    /// Creates the set. Policy names must be unique.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Twice`] if two policies have the same name, because they would share their
    /// counts.
    pub fn new(policies: Vec<Policy>) -> Result<Self, PolicyError> {
        Self::with_rules(policies, PathRules::default())
    }

    /// Creates the set of these policies, by whose path rules the paths of requests are read.
    pub fn with_rules(policies: Vec<Policy>, rules: PathRules) -> Result<Self, PolicyError> {
        let mut by_name = HashMap::with_capacity(policies.len());
        for (position, policy) in policies.iter().enumerate() {
            if by_name.insert(policy.name.clone(), position).is_some() {
                return Err(PolicyError::Twice(policy.name.clone()));
            }
        }
        let mut attributes = AttributeNames::default();
        for policy in &policies {
            attributes.merge(&policy.attributes);
        }
        let set = Self { all: policies, by_name, attributes, ..Self::default() };
        set.with_path_rules(rules)
    }

    /// Sets how the paths of requests are read. By default, paths that applications read
    /// differently are errors.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Pattern`] if a pattern would never match by these rules.
    pub fn with_path_rules(mut self, rules: PathRules) -> Result<Self, PolicyError> {
        for policy in &mut self.all {
            policy.set_path_rules(rules)?;
        }
        let reads_path = |policy: &&Policy| policy.references().any(|name| name == "path");
        let mut readers = self.all.iter().filter(reads_path).peekable();
        self.reads_paths = readers.peek().is_some();
        // A policy in shadow mode must not reject a request.
        let is_enforced = readers.any(|policy| policy.mode == Mode::Enforce);
        self.path_rules = if is_enforced { rules } else { rules.rejecting_nothing() };
        self.index = Index::new(&self.all);
        Ok(self)
    }

    /// Returns the path in the form that the policies match, for a proxy to forward.
    ///
    /// # Errors
    ///
    /// The path has a spelling that the [path rules](Self::with_path_rules) reject, and a policy
    /// depends on it.
    pub fn normalize_path<'p>(&self, path: &'p str) -> Result<Cow<'p, str>, PathError> {
        self.path_rules.normalize(path)
    }

    /// Returns whether a policy depends on the path.
    #[cfg(feature = "tower")]
    pub(crate) fn reads_paths(&self) -> bool {
        self.reads_paths
    }

    pub(super) fn path_rules(&self) -> PathRules {
        self.path_rules
    }

    /// Adds declared attributes, which callers may send even if no policy uses them.
    #[must_use]
    pub fn with_attribute_names(mut self, names: &AttributeNames) -> Self {
        self.attributes.merge(names);
        self
    }

    /// Checks the name of an attribute that a caller sends. It must be built in, or declared by one
    /// of the policies or their file: a limit on a misspelt attribute would never apply.
    pub fn check_attribute(&self, name: &str) -> Result<(), AttributeError> {
        self.attributes.check_known(name)
    }

    /// Returns the policy of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Policy> {
        // Comparing a few names is cheaper than a hash.
        const FEW: usize = 8;
        if self.all.len() <= FEW {
            return self.all.iter().find(|policy| policy.name == name);
        }
        self.by_name.get(name).map(|position| &self.all[*position])
    }

    /// Returns the most similar name of a policy, for an error message. Clients choose the name, so
    /// only short names are compared, with a few that could be meant.
    pub(super) fn nearest(&self, name: &str) -> Option<String> {
        if name.len() > MAX_COMPARED_BYTES {
            return None;
        }
        let similar = |candidate: &&str| {
            let (written, known) = (name.as_bytes(), candidate.as_bytes());
            written.len().abs_diff(known.len()) <= 2
                && (written.first() == known.first() || written.last() == known.last())
        };
        let candidates = self.all.iter().map(Policy::name).filter(similar).take(MAX_COMPARED);
        let distance = |candidate| (strsim::osa_distance(name, candidate), candidate);
        let (distance, nearest) = candidates.map(distance).min()?;
        (distance <= 1 + name.chars().count() / 3).then(|| nearest.to_owned())
    }

    /// Returns the policies that a client bypasses by leaving out their key, and whose requests no
    /// other policy limits for all clients.
    pub fn bypassable(&self) -> impl Iterator<Item = &Policy> {
        self.all.iter().filter(|policy| {
            policy.mode == Mode::Enforce
                && policy.missing_key == MissingKey::Skip
                && policy.key.iter().any(KeySource::is_chosen_by_clients)
                && !self.all.iter().any(|other| other.limits_all_requests_of(policy))
        })
    }

    /// Returns the policies that a client may exempt itself from by a header, a query parameter or
    /// a cookie, each with that attribute. An address or a custom attribute beside it is not a
    /// client's choice.
    pub fn exemptible(&self) -> impl Iterator<Item = (&Policy, &KeySource)> {
        let enforced = self.all.iter().filter(|policy| policy.mode == Mode::Enforce);
        enforced.filter_map(|policy| {
            Some((policy, policy.unless.iter().find_map(|group| chosen_by_clients(group))?))
        })
    }

    /// Replaces the quotas of one policy, for a comparison with others. `change` gets each quota,
    /// and whether it is that of an override or of a value.
    pub fn with_quotas<E: From<PolicyError>>(
        mut self,
        name: &str,
        change: impl Fn(&Quota, bool) -> Result<Quota, E>,
    ) -> Result<Self, E> {
        if let Some(position) = self.by_name.get(name) {
            let policy = &mut self.all[*position];
            policy.quotas.change(change)?;
            policy.set_cost(policy.cost.clone())?;
        }
        Ok(self)
    }

    /// Iterates over the policies, in the order of their definition.
    pub fn iter(&self) -> impl Iterator<Item = &Policy> {
        self.all.iter()
    }

    /// Selects the policies that apply to a request, with their charges. A `cost` of the request
    /// takes precedence over those of the policies.
    ///
    /// Nothing is counted. Use a [`PolicyLimiter`](crate::PolicyLimiter) to decide requests, and
    /// this method to find out which policies apply, for example in tests of a configuration.
    ///
    /// # Errors
    ///
    /// A policy that is enforced cannot make a valid key of the attributes, for example because a
    /// header is longer than [`MAX_KEY_BYTES`](crate::MAX_KEY_BYTES).
    pub fn select(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
    ) -> Result<Selection<'_>, SelectError> {
        self.select_where(attributes, cost, None, |_| true)
    }

    /// Selects among the policies that `filter` accepts.
    pub(super) fn select_where(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
        overrides: Option<OverridesNow<'_>>,
        filter: impl Fn(&Policy) -> bool,
    ) -> Result<Selection<'_>, SelectError> {
        let mut selection = Selection::default();
        let path = if self.reads_paths { attributes.get("path") } else { None };
        let path = path.as_deref().map(|path| self.path_rules.matched(path)).transpose();
        let path = path.map_err(SelectError::Path)?;
        let request = RequestValues::new(attributes, path.as_deref()).with_overrides(overrides);
        for position in self.index.candidates(&request).iter() {
            let policy = &self.all[*position];
            if policy.applies_to(&request)? && filter(policy) {
                policy.add_to(&mut selection, &request, cost)?;
            }
        }
        Ok(selection)
    }
}

impl KeySource {
    /// Reads the only value of a header, as [`read`](Self::read) does.
    #[cfg(feature = "tower")]
    pub(crate) fn read_one<'r>(
        &self,
        value: Option<Cow<'r, str>>,
        is_repeated: bool,
        policy: &str,
    ) -> Result<Option<Cow<'r, str>>, SelectError> {
        let value = value.map(|value| self.normalize(value));
        if is_repeated || value.as_deref().is_some_and(|value| self.is_ambiguous_value(value)) {
            let (policy, attribute) = (policy.to_owned(), self.to_string());
            return Err(SelectError::Ambiguous { policy, attribute });
        }
        Ok(value)
    }

    /// Reads the value of a request that a limit without a policy counts by.
    #[cfg(feature = "tower")]
    pub(crate) fn read<'r>(
        &self,
        attributes: &'r dyn Attributes,
        policy: &str,
    ) -> Result<Option<Cow<'r, str>>, SelectError> {
        let request = RequestValues::new(attributes, None);
        let value = request.get(self);
        if request.is_ambiguous(self, value.as_deref()) {
            let (policy, attribute) = (policy.to_owned(), self.to_string());
            return Err(SelectError::Ambiguous { policy, attribute });
        }
        if !self.is_path() {
            return Ok(value);
        }
        let normal = |path: Cow<'r, str>| PathRules::default().matched(&path).map(Cow::into_owned);
        let path = attributes.get("path").map(normal).transpose().map_err(SelectError::Path)?;
        Ok(path.map(Cow::Owned))
    }
}

/// Values of a request, in their normal form.
#[derive(Clone, Copy)]
pub(super) struct RequestValues<'r> {
    attributes: &'r dyn Attributes,
    /// Path as patterns match it, if a policy reads it.
    path: Option<&'r str>,
    overrides: Option<OverridesNow<'r>>,
}

impl<'r> RequestValues<'r> {
    pub(super) fn new(attributes: &'r dyn Attributes, path: Option<&'r str>) -> Self {
        Self { attributes, path, overrides: None }
    }

    pub(super) fn with_overrides(self, overrides: Option<OverridesNow<'r>>) -> Self {
        Self { overrides, ..self }
    }

    pub(super) fn overrides(&self) -> Option<OverridesNow<'r>> {
        self.overrides
    }

    pub(super) fn path(&self) -> Option<&'r str> {
        self.path
    }

    /// Returns whether servers may read another value of this attribute than this one.
    #[inline]
    pub(super) fn is_ambiguous(&self, source: &KeySource, value: Option<&str>) -> bool {
        self.attributes.is_ambiguous(source.as_str())
            || value.is_some_and(|value| source.is_ambiguous_value(value))
    }

    pub(super) fn get(&self, source: &KeySource) -> Option<Cow<'r, str>> {
        if source.is_path() {
            return self.path.map(Cow::Borrowed);
        }
        self.attributes.get(source.as_str()).map(|value| source.normalize(value))
    }
}

/// Error of a request whose key is invalid or ambiguous.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// The attributes make an invalid key.
    #[error("policy {policy:?} counts by {attributes}, but that key {reason}")]
    Key {
        /// Name of the policy.
        policy: String,
        /// Attributes of its key.
        attributes: String,
        /// Defect of the key.
        reason: KeyError,
    },
    /// The request has several different values of an attribute, or one that servers read
    /// differently.
    #[error(
        "the request has several values of {attribute}, or one in a spelling that servers read \
         differently, and the policy {policy:?} uses it: send one in its usual spelling"
    )]
    Ambiguous {
        /// Name of the policy.
        policy: String,
        /// The attribute.
        attribute: String,
    },
    /// The path has a spelling that is rejected.
    #[error(transparent)]
    Path(PathError),
}

/// Policies that apply to a request, in the order of their definition; the result of
/// [`Policies::select`].
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{MissingKey, Policies, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minute = Duration::from_secs(60);
/// let users = Policy::builder("per-user", Quota::sliding_log(100, minute)?)
///     .key(["header.x-user-id"])
///     .missing_key(MissingKey::Deny)
///     .build()?;
/// let total = Policy::builder("total", Quota::fixed_window(10_000, minute)?).build()?;
/// let policies = Policies::new(vec![users, total])?;
///
/// let anonymous = BTreeMap::from([("path".to_owned(), "/".to_owned())]);
/// let selection = policies.select(&anonymous, None)?;
/// assert_eq!(selection.rejected_by.map(|policy| policy.name()), Some("per-user"));
/// assert_eq!(selection.charges.len(), 1);
/// assert_eq!(selection.charges[0].policy(), "total");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Selection<'a> {
    /// Charges of the policies that count the request.
    pub charges: Vec<PreparedCharge<'a>>,
    /// Enforced policy that rejects the request because it lacks the policy's key, and the policy
    /// has [`MissingKey::Deny`]; of several, the first.
    pub rejected_by: Option<&'a Policy>,
    /// Attribute of that policy's key that the request lacks.
    pub missing_attribute: Option<&'a KeySource>,
    /// Policies in shadow mode that would have rejected the request, because its key is missing or
    /// invalid.
    pub shadow_rejections: Vec<&'a Policy>,
    /// Policies whose key the request lacks, whether that skips or rejects it.
    pub missing_key: Vec<&'a Policy>,
    /// Policies with quotas for the values of an attribute that the request lacks, or has with
    /// another value. Their own quota applies.
    pub other_limit: Vec<&'a Policy>,
}

impl Policy {
    /// Selects this policy alone, whatever it matches: for a caller that names the policy. The
    /// error is that of [`Policies::select`].
    pub fn select(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
    ) -> Result<Selection<'_>, SelectError> {
        self.select_with(attributes, cost, None)
    }

    pub(super) fn select_with(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
        overrides: Option<OverridesNow<'_>>,
    ) -> Result<Selection<'_>, SelectError> {
        let mut selection = Selection::default();
        let path = if self.references().any(|name| name == "path") {
            attributes.get("path")
        } else {
            None
        };
        let path = path.as_deref().map(|path| self.rules.path.matched(path)).transpose();
        let path = path.map_err(SelectError::Path)?;
        let request = RequestValues::new(attributes, path.as_deref()).with_overrides(overrides);
        self.add_to(&mut selection, &request, cost)?;
        Ok(selection)
    }

    fn add_to<'a>(
        &'a self,
        selection: &mut Selection<'a>,
        request: &RequestValues<'_>,
        cost: Option<u64>,
    ) -> Result<(), SelectError> {
        let shadow = self.mode == Mode::Shadow;
        let (key, quota, reason, percent) = match self.count_of(request) {
            Ok(Some(count)) => count,
            Ok(None) => {
                selection.missing_key.push(self);
                match self.missing_key {
                    MissingKey::Deny if shadow => selection.shadow_rejections.push(self),
                    MissingKey::Deny if selection.rejected_by.is_none() => {
                        selection.rejected_by = Some(self);
                        selection.missing_attribute = self.missing_attribute(request);
                    }
                    MissingKey::Deny | MissingKey::Skip => {}
                }
                return Ok(());
            }
            Err(_) if shadow => {
                selection.shadow_rejections.push(self);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if matches!(reason, QuotaReason::Other(_)) {
            selection.other_limit.push(self);
        }
        let selected = quota;
        let mut quota = QuotaRef::Borrowed(selected);
        if let Some(overrides) = request.overrides
            && let Some(found) = overrides.find(&self.name, &key)
        {
            match &found.effect {
                OverrideEffect::Quota(numbers) => {
                    quota = QuotaRef::Owned(numbers.applied_to(selected, self));
                }
                OverrideEffect::Unlimited => return Ok(()),
                OverrideEffect::Block => {
                    let wait = found.wait(overrides.now());
                    selection.charges.push(PreparedCharge::blocked(self, key, selected, wait));
                    return Ok(());
                }
            }
        }
        let part = quota.get(Action::Report).map_or(0, Quota::burst) * percent / 100;
        let cost = cost.unwrap_or_else(|| self.cost_of(request, part));
        if selection.charges.is_empty() {
            // Charges are large, and a request rarely has more than two.
            selection.charges.reserve_exact(2);
        }
        let charge = PreparedCharge::of_policy(self, key, quota, cost);
        selection.charges.push(if percent == 100 { charge } else { charge.in_lane(percent) });
        Ok(())
    }

    /// Returns the key that a request counts under, its quota, and the percentage of it that the
    /// request may fill; `None` if it lacks the key.
    #[inline]
    pub(super) fn count_of(
        &self,
        request: &RequestValues<'_>,
    ) -> Result<Option<(String, &Quota, QuotaReason<'_>, u64)>, SelectError> {
        let ambiguous = |source| self.ambiguous(source);
        let Some(key) = self.key_of(request).map_err(ambiguous)? else { return Ok(None) };
        if let Err(reason) = Key::new(&key) {
            let (policy, attributes) = (self.name.clone(), self.key_names());
            return Err(SelectError::Key { policy, attributes, reason });
        }
        let (quota, reason) = self.quotas.of_request(request, &key).map_err(ambiguous)?;
        let percent = match &self.lanes {
            None => 100,
            Some(lanes) => lanes.percent_of(request).map_err(ambiguous)?,
        };
        Ok(Some((key, quota, reason, percent)))
    }

    /// Returns whether this policy limits every client whose requests `other` applies to.
    fn limits_all_requests_of(&self, other: &Policy) -> bool {
        let counts_all = self.missing_key == MissingKey::Deny
            || !self.key.iter().any(KeySource::is_chosen_by_clients);
        let covers = |condition: &Condition| {
            let is_any = condition.attribute.is_path()
                && condition.texts.iter().any(|text| ["/**", "**"].contains(&text.as_str()));
            let is_same = |other: &Condition| {
                other.attribute == condition.attribute
                    && other.texts.iter().all(|text| condition.texts.contains(text))
            };
            is_any || other.conditions.iter().any(is_same)
        };
        self.mode == Mode::Enforce
            && counts_all
            && self.unless.is_empty()
            && self.on_response.is_none()
            && self.conditions.iter().all(covers)
    }

    pub(super) fn ambiguous(&self, source: &KeySource) -> SelectError {
        SelectError::Ambiguous { policy: self.name.clone(), attribute: source.to_string() }
    }

    /// Returns whether all conditions match, and no entry of `unless` does.
    pub(super) fn applies_to(&self, request: &RequestValues<'_>) -> Result<bool, SelectError> {
        for condition in &self.conditions {
            let (is_match, is_ambiguous) = condition.test(request);
            if is_ambiguous && self.mode == Mode::Enforce {
                return Err(self.ambiguous(&condition.attribute));
            }
            if !is_match {
                return Ok(false);
            }
        }
        Ok(self.unless.is_empty() || self.exempted_by(request).is_none())
    }

    /// Returns the position of the first entry of `unless` that matches wholly. A value that
    /// servers may read differently exempts nothing.
    pub(super) fn exempted_by(&self, request: &RequestValues<'_>) -> Option<usize> {
        let meets = |condition: &Condition| condition.test(request) == (true, false);
        self.unless.iter().position(|group| group.iter().all(meets))
    }

    fn cost_of(&self, request: &RequestValues<'_>, max_cost: u64) -> u64 {
        match &self.cost {
            Cost::Fixed(units) => *units,
            Cost::Attribute { name, default, max } => {
                let units = request
                    .attributes
                    .get(name)
                    .and_then(|value| whole_number(value.trim_matches([' ', '\t'])))
                    .filter(|units| *units > 0);
                units.map_or(*default, |units| units.min(*max).min(max_cost))
            }
        }
    }

    /// Returns the key that this request counts under; `None` if it lacks an attribute. The error is
    /// an attribute that is ambiguous.
    fn key_of(&self, request: &RequestValues<'_>) -> Result<Option<String>, &KeySource> {
        let value = |source| {
            let value = request.get(source);
            if request.is_ambiguous(source, value.as_deref()) {
                return Err(source);
            }
            Ok(value.filter(|value| !value.is_empty()))
        };
        Ok(match self.key.as_slice() {
            [] => Some("all".to_owned()),
            [source] => value(source)?.map(Cow::into_owned),
            names => {
                let values = names.iter().map(value).collect::<Result<Vec<_>, _>>()?;
                values.into_iter().collect::<Option<Vec<_>>>().map(|values| join(&values))
            }
        })
    }
}

impl Policy {
    /// Returns the first attribute of the key that a request lacks.
    pub(super) fn missing_attribute(&self, request: &RequestValues<'_>) -> Option<&KeySource> {
        self.key.iter().find(|source| request.get(source).is_none_or(|value| value.is_empty()))
    }
}

/// Returns the attribute by which a client may meet all conditions, if one is its choice. Path,
/// method and host are those of the request that is exempted.
fn chosen_by_clients(conditions: &[Condition]) -> Option<&KeySource> {
    let sources = || conditions.iter().map(|condition| &condition.attribute);
    let is_request = |source: &KeySource| ["path", "method", "host"].contains(&source.as_str());
    if sources().any(|source| !source.is_chosen_by_clients() && !is_request(source)) {
        return None;
    }
    sources().find(|source| source.is_chosen_by_clients())
}

/// Parses an integer. One that is too large saturates.
pub(crate) fn whole_number(text: &str) -> Option<u64> {
    text.parse().map_or_else(
        |error: ParseIntError| (*error.kind() == IntErrorKind::PosOverflow).then_some(u64::MAX),
        Some,
    )
}

#[cfg(test)]
mod tests;
