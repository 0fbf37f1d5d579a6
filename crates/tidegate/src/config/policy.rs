//! A policy as it is written in a configuration, and what it means.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::document::{ConfigError, Document};
use super::duration;
use crate::algorithm::Algorithm;
use crate::named::UnknownName;
use crate::policy::{Cost, Policy, PolicyError};
use crate::quota::Quota;

/// A named limit, as it is written.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Policy")]
pub struct RawPolicy {
    /// Its name in answers, metrics and Redis keys.
    #[schemars(with = "String")]
    name: Spanned<String>,
    /// Attributes that must match: a value or a list of some; `*` stands for anything but a slash, `**` for anything.
    #[serde(default, rename = "match")]
    matches: BTreeMap<String, OneOrMany>,
    /// The attributes whose values are counted separately. None: all requests together.
    #[serde(default)]
    key: OneOrMany,
    /// What to do with a request that lacks the key: skip (default) or deny.
    #[schemars(with = "Option<String>")]
    missing_key: Option<Spanned<String>>,
    /// sliding-log (default), sliding-counter, fixed-window, token-bucket or leaky-bucket.
    #[schemars(with = "Option<String>")]
    algorithm: Option<Spanned<String>>,
    /// For sliding-log: sorted-set (default) or packed.
    #[schemars(with = "Option<String>")]
    encoding: Option<Spanned<String>>,
    /// For sliding-log: denied requests count as well.
    #[schemars(with = "Option<bool>")]
    count_denied: Option<Spanned<bool>>,
    /// Units per window.
    #[schemars(with = "u64")]
    limit: Spanned<u64>,
    /// Such as 500ms, 60s, 5m, 1h, 30d.
    #[schemars(with = "String")]
    window: Spanned<String>,
    /// What a bucket holds; the limit by default.
    #[schemars(with = "Option<u64>")]
    burst: Option<Spanned<u64>>,
    /// Units that a request takes: a number, or from an attribute.
    cost: Option<RawCost>,
    /// enforce (default), or shadow: decide and count, but let through.
    #[schemars(with = "Option<String>")]
    mode: Option<Spanned<String>>,
    /// While the store cannot decide: local (default), allow or deny.
    #[schemars(with = "Option<String>")]
    on_store_failure: Option<Spanned<String>>,
    /// Other limits for some keys.
    #[serde(default)]
    overrides: Vec<Override>,
}

impl RawPolicy {
    /// The policy, or what is wrong with it and where in the document.
    pub fn validate(self, document: &Document<'_>) -> Result<Policy, ConfigError> {
        let raw = self;
        let algorithm = match &raw.algorithm {
            Some(name) => named(document, name)?,
            None => Algorithm::SlidingLog,
        };
        let window = window_of(document, &raw.window)?;
        let quota = |limit: &Spanned<u64>, window: Duration, burst: Option<&Spanned<u64>>| {
            let mut quota =
                Quota::new(algorithm, limit.value, window).map_err(|error| document.at(limit, &error.to_string()))?;
            if let Some(encoding) = &raw.encoding {
                let kind = named(document, encoding)?;
                quota = quota.with_encoding(kind).map_err(|error| document.at(encoding, &error.to_string()))?;
            }
            if let Some(count_denied) = &raw.count_denied {
                let counted = quota.with_count_denied(count_denied.value);
                quota = counted.map_err(|error| document.at(count_denied, &error.to_string()))?;
            }
            if let Some(burst) = burst {
                quota = quota.with_burst(burst.value).map_err(|error| document.at(burst, &error.to_string()))?;
            }
            Ok::<Quota, ConfigError>(quota)
        };
        let name = &raw.name;
        let wrong = |error: PolicyError| document.at(name, &error.to_string());
        let mut policy = Policy::new(&name.value, quota(&raw.limit, window, raw.burst.as_ref())?).map_err(wrong)?;
        for (attribute, patterns) in &raw.matches {
            policy = policy.matching(attribute, patterns.texts()).map_err(wrong)?;
        }
        policy = policy.counting(raw.key.texts()).map_err(wrong)?;
        if let Some(missing) = &raw.missing_key {
            policy = policy.on_missing_key(named(document, missing)?);
        }
        if let Some(mode) = &raw.mode {
            policy = policy.in_mode(named(document, mode)?);
        }
        if let Some(failure) = &raw.on_store_failure {
            policy = policy.on_store_failure(named(document, failure)?);
        }
        for entry in &raw.overrides {
            let window = entry.window.as_ref().map_or(Ok(window), |text| window_of(document, text))?;
            let burst = entry.burst.as_ref().or(raw.burst.as_ref());
            policy = policy.overriding(entry.key.texts(), quota(&entry.limit, window, burst)?).map_err(wrong)?;
        }
        let cost = match raw.cost {
            None => Cost::Fixed(1),
            Some(RawCost::Fixed(units)) => Cost::Fixed(units),
            Some(RawCost::Attribute(cost)) => Cost::Attribute {
                name: cost.attribute,
                default: cost.default,
                max: cost.max.unwrap_or(raw.limit.value),
            },
        };
        policy.costing(cost).map_err(wrong)
    }
}

fn window_of(document: &Document<'_>, text: &Spanned<String>) -> Result<Duration, ConfigError> {
    duration::parse(&text.value).map_err(|error| document.at(text, &error))
}

fn named<T: FromStr<Err = UnknownName>>(document: &Document<'_>, text: &Spanned<String>) -> Result<T, ConfigError> {
    text.value.parse().map_err(|error: UnknownName| document.at_name(text, &error.to_string()))
}

/// Another limit for one key.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Override {
    /// The value of the key; for a key of several attributes a list, in their order.
    key: OneOrMany,
    #[schemars(with = "u64")]
    limit: Spanned<u64>,
    #[schemars(with = "Option<String>")]
    window: Option<Spanned<String>>,
    #[schemars(with = "Option<u64>")]
    burst: Option<Spanned<u64>>,
}

/// A text, or a list of texts.
#[derive(Debug, JsonSchema)]
#[schemars(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several, or none.
    Many(Vec<String>),
}

impl OneOrMany {
    /// As a list.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

impl Default for OneOrMany {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

/// A number, or an attribute that has it.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "Cost")]
enum RawCost {
    Fixed(u64),
    Attribute(CostAttribute),
}

#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CostAttribute {
    attribute: String,
    /// If the attribute is absent or no whole number.
    #[serde(default = "one")]
    default: u64,
    /// More counts as this; the limit by default.
    max: Option<u64>,
}

fn one() -> u64 {
    1
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = OneOrMany;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(number.to_string()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<OneOrMany, A::Error> {
                let mut all = Vec::new();
                while let Some(text) = texts.next_element()? {
                    all.push(text);
                }
                Ok(OneOrMany::Many(all))
            }
        }
        deserializer.deserialize_any(Texts)
    }
}

impl<'de> Deserialize<'de> for RawCost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Units;
        impl<'de> Visitor<'de> for Units {
            type Value = RawCost;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or {attribute: NAME, default: 1, max: 50}")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<RawCost, E> {
                Ok(RawCost::Fixed(units))
            }

            fn visit_i64<E: de::Error>(self, units: i64) -> Result<RawCost, E> {
                u64::try_from(units).map(RawCost::Fixed).map_err(|_| E::custom("a cost is at least 1"))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RawCost, A::Error> {
                CostAttribute::deserialize(de::value::MapAccessDeserializer::new(map)).map(RawCost::Attribute)
            }
        }
        deserializer.deserialize_any(Units)
    }
}
