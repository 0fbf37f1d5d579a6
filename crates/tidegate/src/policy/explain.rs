//! [`Explanation`]: why a policy does or does not apply to a request.

use super::select::RequestValues;
use super::{
    Attributes, Condition, KeySource, MissingKey, OverrideEffect, OverridesNow, Policies, Policy,
};

/// Why a policy does or does not apply to a request; the result of [`Policies::explain`].
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Policies, Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy =
///     Policy::builder("per-ip", quota).key(["ip"]).unless([("ip", ["10.0.0.0/8"])]).build()?;
/// let policies = Policies::new(vec![policy])?;
///
/// let request = BTreeMap::from([("ip".to_owned(), "10.1.2.3".to_owned())]);
/// let explanations = policies.explain(&request);
/// assert!(!explanations[0].applies);
/// assert_eq!(explanations[0].reason, "unless: entry 1 (ip) matches");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation<'a> {
    /// Name of the policy.
    pub policy: &'a str,
    /// Whether it applies.
    pub applies: bool,
    /// Reason, without values of the request.
    pub reason: String,
    /// Key that it counts, if it applies.
    pub key: Option<String>,
}

impl Policies {
    /// Number of policies that [`explain`](Self::explain) explains, the first ones.
    pub const MAX_EXPLAINED: usize = 1_000;

    /// Explains for each policy why it does or does not apply to a request. Nothing is counted.
    pub fn explain(&self, attributes: &dyn Attributes) -> Vec<Explanation<'_>> {
        self.explain_with(attributes, None)
    }

    pub(super) fn explain_with(
        &self,
        attributes: &dyn Attributes,
        overrides: Option<OverridesNow<'_>>,
    ) -> Vec<Explanation<'_>> {
        let path = attributes.get("path");
        let path = path.as_deref().map(|path| self.path_rules().matched(path)).transpose();
        self.iter()
            .take(Self::MAX_EXPLAINED)
            .map(|policy| {
                let explained = match &path {
                    Ok(path) => {
                        let request = RequestValues::new(attributes, path.as_deref());
                        policy.explain(&request.with_overrides(overrides))
                    }
                    Err(error) => Err(error.to_string()),
                };
                let applies = explained.is_ok();
                let (key, reason) = explained.unwrap_or_else(|reason| (None, reason));
                Explanation { policy: policy.name(), applies, reason, key }
            })
            .collect()
    }
}

impl Policy {
    /// Returns the key and the reason, if the policy applies; otherwise the reason alone.
    fn explain(&self, request: &RequestValues<'_>) -> Result<(Option<String>, String), String> {
        for condition in &self.conditions {
            let attribute = &condition.attribute;
            match condition.test(request) {
                (_, true) => return Err(self.ambiguous(attribute).to_string()),
                (true, false) => {}
                (false, false) if request.get(attribute).is_none() => {
                    return Err(format!("match: the request has no {attribute}"));
                }
                (false, false) => return Err(format!("match: {attribute} does not match")),
            }
        }
        if let Some(number) = self.exempted_by(request) {
            let names = self.unless[number].iter().map(|it: &Condition| it.attribute.as_str());
            let names = names.collect::<Vec<_>>().join(" and ");
            return Err(format!("unless: entry {} ({names}) matches", number + 1));
        }
        match self.count_of(request) {
            Err(error) => Err(error.to_string()),
            Ok(None) => {
                let missing = self.missing_attribute(request).map_or("", KeySource::as_str);
                let reason = format!("key: the request has no {missing}");
                match self.missing_key {
                    MissingKey::Deny => Ok((None, reason + ", which denies it")),
                    MissingKey::Skip => Err(reason),
                }
            }
            Ok(Some((key, selected, ..)))
                if let Some(found) =
                    request.overrides().and_then(|it| it.find(self.name(), &key)) =>
            {
                match found.effect {
                    OverrideEffect::Quota(numbers) => {
                        let limit = numbers.applied_to(selected, self).limit();
                        let reason =
                            format!("it matches; a run-time override sets the limit {limit}");
                        Ok((Some(key), reason))
                    }
                    OverrideEffect::Unlimited => {
                        Err("a run-time override exempts it from the limit".to_owned())
                    }
                    OverrideEffect::Block => {
                        Ok((Some(key), "a run-time override blocks it".to_owned()))
                    }
                }
            }
            Ok(Some((key, quota, reason, 100))) => {
                Ok((Some(key), format!("{reason}; the limit is {}", quota.limit())))
            }
            Ok(Some((key, quota, reason, percent))) => {
                let limit = quota.limit();
                let reason =
                    format!("{reason}; the limit is {limit}, of which its lane has {percent}%");
                Ok((Some(key), reason))
            }
        }
    }
}
