//! Rules as a control plane sends them (`ratelimit.config.ratelimit.v3`, one message for each
//! domain), with ratelimit's names and numbers. They become the same tree as files.

use serde_saphyr::{Location, Spanned};

use super::Unit;
use super::error::{FileLocation, RulesError, RulesErrorKind};
use super::raw::{MAX_NODES, MAX_TEXT_BYTES, RawDescriptor, RawFile, RawLimit, RawReplaced};

/// Rules of a domain.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RateLimitConfig {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub domain: String,
    #[prost(message, repeated, tag = "3")]
    pub descriptors: Vec<RateLimitDescriptor>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RateLimitDescriptor {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    #[prost(message, optional, tag = "3")]
    pub rate_limit: Option<RateLimitPolicy>,
    #[prost(message, repeated, tag = "4")]
    pub descriptors: Vec<RateLimitDescriptor>,
    #[prost(bool, tag = "5")]
    pub shadow_mode: bool,
    #[prost(bool, tag = "6")]
    pub detailed_metric: bool,
    #[prost(bool, tag = "7")]
    pub quota_mode: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RateLimitPolicy {
    /// Number of a [`Unit`]; 0 for none.
    #[prost(int32, tag = "1")]
    pub unit: i32,
    #[prost(uint32, tag = "2")]
    pub requests_per_unit: u32,
    #[prost(bool, tag = "3")]
    pub unlimited: bool,
    #[prost(string, tag = "4")]
    pub name: String,
    #[prost(message, repeated, tag = "5")]
    pub replaces: Vec<RateLimitReplace>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RateLimitReplace {
    #[prost(string, tag = "1")]
    pub name: String,
}

impl RateLimitConfig {
    /// Type of the message in a response of a control plane.
    pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

    /// Returns the content that a file with these rules would have.
    pub(super) fn to_raw(&self) -> Result<RawFile, RulesError> {
        let mut nodes = 0;
        let descriptors = raw_descriptors(&self.descriptors, &mut nodes).map_err(|kind| {
            FileLocation { file: &self.name, location: Location::UNKNOWN }.error(kind)
        })?;
        Ok(RawFile { domain: self.domain.clone(), descriptors, ..RawFile::default() })
    }
}

/// Converts descriptors, and adds their number to `nodes`. The depth of a message is bounded by its
/// decoder.
fn raw_descriptors(
    messages: &[RateLimitDescriptor],
    nodes: &mut usize,
) -> Result<Vec<Spanned<RawDescriptor>>, RulesErrorKind> {
    *nodes += messages.len();
    if *nodes > MAX_NODES {
        return Err(RulesErrorKind::TooManyDescriptors);
    }
    messages.iter().map(|message| message.to_raw(nodes).map(spanned)).collect()
}

impl RateLimitDescriptor {
    fn to_raw(&self, nodes: &mut usize) -> Result<RawDescriptor, RulesErrorKind> {
        Ok(RawDescriptor {
            key: checked("key", &self.key)?,
            value: checked("value", &self.value)?,
            rate_limit: self.rate_limit.as_ref().map(RateLimitPolicy::to_raw).transpose()?,
            descriptors: raw_descriptors(&self.descriptors, nodes)?,
            shadow_mode: self.shadow_mode,
            quota_mode: self.quota_mode,
            detailed_metric: self.detailed_metric,
            ..RawDescriptor::default()
        })
    }
}

impl RateLimitPolicy {
    fn to_raw(&self) -> Result<Spanned<RawLimit>, RulesErrorKind> {
        let unit = (self.unit != 0).then(|| {
            let known = Unit::of_number(self.unit);
            spanned(known.map_or_else(|| self.unit.to_string(), |unit| unit.as_str().to_owned()))
        });
        let replaced = |replaced: &RateLimitReplace| {
            Ok(RawReplaced { name: checked("name", &replaced.name)?, ..RawReplaced::default() })
        };
        let name = checked("name", &self.name)?;
        Ok(spanned(RawLimit {
            unit,
            requests_per_unit: Some(self.requests_per_unit),
            unlimited: self.unlimited,
            name: Some(name).filter(|name| !name.is_empty()),
            replaces: self.replaces.iter().map(replaced).collect::<Result<_, _>>()?,
            ..RawLimit::default()
        }))
    }
}

/// Returns a value without a place in a file.
fn spanned<T>(value: T) -> Spanned<T> {
    Spanned::new(value, Location::UNKNOWN, Location::UNKNOWN)
}

fn checked(field: &'static str, text: &str) -> Result<String, RulesErrorKind> {
    match text.len() {
        ..=MAX_TEXT_BYTES => Ok(text.to_owned()),
        length => Err(RulesErrorKind::TextTooLong { field, length }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message as _;
    use tidegate::Algorithm;

    use super::*;
    use crate::envoy::{Limit, RuleMode, Rules};

    fn limited(key: &str, value: &str, requests: u32, unit: i32) -> RateLimitDescriptor {
        let policy =
            RateLimitPolicy { unit, requests_per_unit: requests, ..RateLimitPolicy::default() };
        RateLimitDescriptor {
            key: key.to_owned(),
            value: value.to_owned(),
            rate_limit: Some(policy),
            ..RateLimitDescriptor::default()
        }
    }

    fn config(descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
        RateLimitConfig { name: "a".to_owned(), domain: "edge".to_owned(), descriptors }
    }

    fn load(configs: &[RateLimitConfig]) -> Result<Rules, String> {
        let rules = Rules::from_messages(configs, Algorithm::FixedWindow, &BTreeMap::new());
        rules.map_err(|error| error.to_string())
    }

    #[test]
    fn messages_and_files_become_the_same_rules() {
        let text = "domain: edge\ndescriptors:\n  - {key: route, value: a, descriptors: [{key: \
                    user, shadow_mode: true, rate_limit: {unit: week, requests_per_unit: 5, name: \
                    n, replaces: [{name: m}]}}]}\n  - {key: budget, quota_mode: true, \
                    detailed_metric: true, rate_limit: {unit: year, requests_per_unit: 7}}\n  - \
                    {key: free, rate_limit: {unlimited: true}}\n";
        let files = [("a".to_owned(), text.to_owned())];
        let of_file = Rules::load(&files, Algorithm::FixedWindow, &BTreeMap::new()).expect("valid");
        let mut user = limited("user", "", 5, 7);
        user.shadow_mode = true;
        let policy = user.rate_limit.as_mut().expect("a limit");
        policy.name = "n".to_owned();
        policy.replaces = vec![RateLimitReplace { name: "m".to_owned() }];
        let route = RateLimitDescriptor {
            key: "route".to_owned(),
            value: "a".to_owned(),
            descriptors: vec![user],
            ..RateLimitDescriptor::default()
        };
        let mut budget = limited("budget", "", 7, 6);
        (budget.quota_mode, budget.detailed_metric) = (true, true);
        let mut free = limited("free", "", 0, 0);
        free.rate_limit.as_mut().expect("a limit").unlimited = true;
        let message = config(vec![route, budget, free]);
        // As a control plane sends it.
        let message = RateLimitConfig::decode(&*message.encode_to_vec()).expect("a message");
        let of_message = load(&[message]).expect("valid");
        let rules = |rules: &Rules| rules.rules().map(|it| format!("{it:?}")).collect::<Vec<_>>();
        assert_eq!(rules(&of_message), rules(&of_file));
        let user = of_message.find("edge", [("route", "a"), ("user", "ann")]).expect("a rule");
        assert_eq!(user.rule.mode, RuleMode::Shadow);
        let free = of_message.find("edge", [("free", "x")]).expect("a rule");
        assert_eq!(free.rule.limit, Limit::Unlimited);
    }

    #[test]
    fn invalid_messages_are_errors_that_name_the_resource() {
        for (message, expected) in [
            (config(vec![limited("", "", 1, 1)]), "a: key is missing or empty"),
            (config(vec![limited("k", "", 1, 0)]), "a: rate_limit.unit is missing"),
            (config(vec![limited("k", "", 1, 99)]), "a: unit: \"99\" is not a unit"),
            (config(vec![limited("k", &"v".repeat(5_000), 1, 1)]), "a: value has 5000 bytes"),
            (
                config(vec![limited("k", "", 1, 1), limited("k", "", 2, 1)]),
                "a: descriptor \"edge.k\" is already defined at a: merge the two",
            ),
            (RateLimitConfig::default(), "domain is missing or empty"),
        ] {
            let error = load(&[message]).expect_err("an error");
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(load(&[]).expect("no rules").rules().count(), 0);
    }

    #[test]
    fn descriptors_are_bounded_in_number() {
        let many = vec![limited("k", "", 1, 1); 2];
        let mut nodes = MAX_NODES - 1;
        assert!(raw_descriptors(&many, &mut nodes).is_err());
    }
}
