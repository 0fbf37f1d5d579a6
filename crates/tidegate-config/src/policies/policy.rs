//! [`RawPolicy`]: a policy as written in a configuration, and its validation.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use tidegate::{
    Algorithm, AttributeNames, Calendar, Encoding, MAX_KEY_BYTES, MissingKey, Mode, OnStoreFailure,
    PathRules, Policy, PolicyError, PolicyPart, Quota, QuotaError, ShowKeys, UnknownName,
};

use super::cost::RawCost;
use super::holds::RawHolds;
use super::limits::{ByValue, Percent};
use super::schema::{
    add_policy_rules, block_lengths, conditions, exemptions, key_attributes, statuses, texts,
};
use super::window::RawWindow;
use crate::yaml::{Bounded, ConfigError, Document, Flag, duration};

/// A limit, a burst or a cost.
pub(super) type Units = Bounded<1, { Quota::MAX_LIMIT }>;

/// Decisions of a policy while the store is unavailable.
const POLICY_FAILURES: [OnStoreFailure; 3] =
    [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny];

/// A named limit.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Policy", transform = add_policy_rules)]
pub struct RawPolicy {
    /// Name in responses, metrics and Redis keys.
    #[schemars(with = "String", length(min = 1, max = MAX_KEY_BYTES))]
    pub(crate) name: Spanned<String>,
    /// Attributes that must match: ip, method, path, host, header.NAME, query.NAME, cookie.NAME,
    /// domain, descriptor.KEY, or one declared in `attributes`. Each has a pattern or a list of
    /// patterns; `*` matches anything except a slash, `**` matches anything. A pattern of ip may be
    /// a network.
    #[serde(default, rename = "match")]
    #[schemars(schema_with = "conditions")]
    matches: Conditions,
    /// Exceptions, each written like `match`: the policy does not apply to a request that matches
    /// one of them wholly.
    #[serde(default)]
    #[schemars(schema_with = "exemptions")]
    unless: Vec<Spanned<Conditions>>,
    /// Attributes whose values are counted separately, named as in `match`. Without a key, all
    /// requests are counted together.
    #[serde(default, deserialize_with = "present")]
    #[schemars(schema_with = "key_attributes")]
    key: Option<Spanned<KeyNames>>,
    /// Treatment of a request without the key: skip (default) or deny.
    #[schemars(with = "Option<MissingKey>")]
    missing_key: Option<Spanned<String>>,
    /// sliding-log (default), sliding-counter, fixed-window, token-bucket, leaky-bucket, or
    /// concurrency: a limit of units in flight, without a window.
    #[schemars(with = "Option<Algorithm>")]
    algorithm: Option<Spanned<String>>,
    /// For sliding-log: sorted-set (default) or packed; for sliding-counter: hash (default) or
    /// packed.
    #[schemars(with = "Option<Encoding>")]
    encoding: Option<Spanned<String>>,
    /// For sliding-log: whether denied requests count too.
    #[schemars(with = "Option<Flag>")]
    count_denied: Option<Spanned<Flag>>,
    /// Time for which a key is denied after it exceeds the limit, such as 10m, or a list such as
    /// [1m, 10m, 1h] by its number of blocks in the last day.
    #[serde(default)]
    #[schemars(schema_with = "block_lengths")]
    block_for: Option<Spanned<OneOrMany>>,
    /// Units per window.
    #[serde(default, deserialize_with = "present")]
    #[schemars(with = "Units")]
    limit: Option<Spanned<Units>>,
    /// Instead of `limit`: units per window by the value of an attribute, such as a plan.
    limits: Option<ByValue<Units>>,
    /// Parts of the limit that requests may fill by the value of an attribute, such as a priority:
    /// the rest is kept for the others. The count is the same for all.
    lanes: Option<ByValue<Percent>>,
    /// Duration such as 500ms, 60s, 5m, 1h, 30d, or for fixed-window the periods of a calendar.
    #[schemars(with = "Option<RawWindow>")]
    window: Option<Spanned<RawWindow>>,
    /// Capacity of a bucket; the limit by default.
    #[schemars(with = "Option<Units>")]
    burst: Option<Spanned<Units>>,
    /// Units that a request costs: a number, the value of an attribute, or a reserve that the
    /// response settles.
    #[schemars(with = "Option<RawCost>")]
    cost: Option<Spanned<RawCost>>,
    /// enforce (default), or shadow: decides and counts, but never denies.
    #[schemars(with = "Option<Mode>")]
    mode: Option<Spanned<String>>,
    /// Decision while the store is unavailable: local (default), allow or deny.
    #[schemars(with = "Option<String>", extend("enum" = ["local", "allow", "deny", null]))]
    on_store_failure: Option<Spanned<String>>,
    /// Form in which operators see the keys: plain, or hashed, the default for credentials such as
    /// header.authorization, header.x-api-key and cookies.
    #[schemars(with = "Option<ShowKeys>")]
    show_keys: Option<Spanned<String>>,
    /// Returns the units when the response has one of these statuses. Only the gateway and the
    /// Tower layer see responses.
    refund_on: Option<RawRefundOn>,
    /// How long reservations and units in flight are held.
    #[schemars(with = "Option<RawHolds>")]
    hold: Option<Spanned<RawHolds>>,
    /// Other limits for some keys.
    #[serde(default)]
    overrides: Vec<Override>,
}

/// How the policies of a document are read.
#[derive(Debug)]
pub(crate) struct PolicyRules<'a> {
    pub(crate) attributes: &'a AttributeNames,
    pub(crate) paths: PathRules,
    pub(crate) ipv6_prefix: u8,
}

impl RawPolicy {
    /// Returns the name of the policy and the line that has it.
    #[must_use]
    pub fn line(&self) -> (String, u64) {
        (self.name.value.clone(), self.name.referenced.line())
    }

    /// Builds the policy, or returns an error with its position in the document.
    pub(crate) fn validate(
        self,
        document: &Document<'_>,
        rules: &PolicyRules<'_>,
    ) -> Result<Policy, ConfigError> {
        let raw = self;
        let algorithm = match &raw.algorithm {
            Some(name) => parse_name(document, name)?,
            None => Algorithm::SlidingLog,
        };
        let name = &raw.name;
        let window = raw.window.as_ref();
        let quota = |limit| raw.quota(document, algorithm, limit, window, raw.burst.as_ref());
        let limit = match (&raw.limit, &raw.limits) {
            (Some(limit), None) => limit,
            (None, Some(limits)) => &limits.other,
            (None, None) => {
                let missing = "missing field `limit`, or `limits` by the value of an attribute";
                return Err(document.error_at(name, missing));
            }
            (Some(limit), Some(_)) => {
                let both = "a policy has `limit` or `limits`: move this one to `limits.other`";
                return Err(document.error_at(limit, both));
            }
        };
        let mut quotas = vec![quota(limit)?];
        let mut policy = Policy::builder(&name.value, quotas[0].clone())
            .attribute_names(rules.attributes.clone())
            .path_rules(rules.paths)
            .ipv6_prefix(rules.ipv6_prefix);
        let attributes = rules.attributes;
        for (attribute, patterns) in raw.matches.named(document, attributes, "match")? {
            policy = policy.matches(attribute, patterns);
        }
        for entry in &raw.unless {
            policy = policy.unless(entry.value.named(document, attributes, "unless")?);
        }
        if let Some(limits) = &raw.limits {
            let attribute =
                attribute_name(document, attributes, "limits.attribute", &limits.attribute)?;
            let mut values = Vec::with_capacity(limits.values.len());
            for (value, limit) in &limits.values {
                values.push((&value.value, quota(limit)?));
            }
            quotas.extend(values.iter().map(|(_, quota)| quota.clone()));
            policy = policy.limits(attribute, values);
        }
        if let Some(anchor) = raw.anchor_attribute(document)? {
            let attribute = attribute_name(document, attributes, "anchor.attribute", anchor)?;
            policy = policy.limits(attribute, anchored(&quotas[0]));
        }
        if let Some(lanes) = &raw.lanes {
            let attribute =
                attribute_name(document, attributes, "lanes.attribute", &lanes.attribute)?;
            let values = lanes.values.iter();
            let values = values.map(|(value, percent)| (&value.value, percent.value.0));
            policy = policy.lanes(attribute, values, lanes.other.value.0);
        }
        if let Some(key) = &raw.key {
            let names = key.value.names(key).into_iter();
            let names = names.map(|name| attribute_name(document, attributes, "key", &name));
            let names = names.collect::<Result<Vec<_>, _>>()?;
            policy = policy.key(names);
        }
        if let Some(missing) = &raw.missing_key {
            policy = policy.missing_key(parse_name(document, missing)?);
        }
        if let Some(mode) = &raw.mode {
            policy = policy.mode(parse_name(document, mode)?);
        }
        if let Some(failure) = &raw.on_store_failure {
            policy = policy.on_store_failure(policy_failure(document, failure)?);
        }
        if let Some(show_keys) = &raw.show_keys {
            policy = policy.show_keys(parse_name(document, show_keys)?);
        }
        if let Some(refund_on) = &raw.refund_on {
            policy = policy.refund_on(refund_on.status.value.texts());
        }
        for entry in &raw.overrides {
            let window = entry.window.as_ref().or(window);
            let burst = entry.burst.as_ref().or(raw.burst.as_ref());
            let quota = raw.quota(document, algorithm, &entry.limit, window, burst)?;
            policy = policy.override_for(entry.key.value.texts(), quota.clone());
            quotas.push(quota);
        }
        if let Some(cost) = &raw.cost {
            let max_cost = quotas.iter().map(Quota::burst).max().unwrap_or(1);
            policy = policy.cost(cost.value.to_cost(document, attributes, max_cost)?);
            if let Some(header) = cost.value.settled_by() {
                policy = policy.settled_by(&header.value);
            }
        }
        let error_in =
            |(part, error): (_, PolicyError)| raw.error_in(document, part, &error.to_string());
        policy.build_parts().map_err(error_in)
    }

    /// Returns the attribute that has the anchor of the calendar. Nothing else may choose a quota by
    /// an attribute, and an override has its own anchor.
    fn anchor_attribute(
        &self,
        document: &Document<'_>,
    ) -> Result<Option<&Spanned<String>>, ConfigError> {
        let of = RawWindow::anchor_attribute;
        let anchor = self.window.as_ref().and_then(|window| of(&window.value));
        if let (Some(anchor), Some(_)) = (anchor, &self.limits) {
            let both = "a policy chooses by one attribute: leave out `limits`, or the attribute of \
                        the anchor";
            return Err(document.error_at(anchor, both));
        }
        let lacks_day = |entry: &&Override| {
            let window = entry.window.as_ref().or(self.window.as_ref());
            window.is_some_and(|window| of(&window.value).is_some())
        };
        match self.overrides.iter().find(lacks_day) {
            Some(entry) => {
                let missing = "the anchor of an override is a day: write its \
                               `window: {calendar: …, timezone: …, anchor: 15}`";
                Err(document.error_at(&entry.key, missing))
            }
            None => Ok(anchor),
        }
    }

    /// Returns an error in a part of the policy, with its position in the document.
    fn error_in(&self, document: &Document<'_>, part: PolicyPart, message: &str) -> ConfigError {
        let name = &self.name;
        if let (PolicyPart::RefundOn, Some(refund_on)) = (part, &self.refund_on) {
            return document.error_at(&refund_on.status, message);
        }
        match (part, &self.key, &self.cost) {
            (PolicyPart::Match(index), ..) => document.error_at(&self.matches.0[index].1, message),
            (PolicyPart::Unless(index), ..) => document.error_at(&self.unless[index], message),
            (PolicyPart::Override(index), ..) => {
                document.error_at(&self.overrides[index].key, message)
            }
            (PolicyPart::Limits | PolicyPart::Lanes, ..) => {
                let limits = self.limits.as_ref().map(|limits| &limits.attribute);
                let lanes = self.lanes.as_ref().map(|lanes| &lanes.attribute);
                let at = if part == PolicyPart::Limits { limits } else { lanes };
                document.error_at(at.unwrap_or(name), message)
            }
            (PolicyPart::Key, Some(key), _) => document.error_at(key, message),
            (PolicyPart::Cost, _, Some(cost)) => document.error_at(cost, message),
            (PolicyPart::SettledBy, _, Some(cost)) => {
                document.error_at(cost.value.settled_by().unwrap_or(name), message)
            }
            _ => document.error_at(name, message),
        }
    }

    /// Builds a quota with the encoding, `count_denied` and `block_for` of this policy.
    fn quota(
        &self,
        document: &Document<'_>,
        algorithm: Algorithm,
        limit: &Spanned<Units>,
        window: Option<&Spanned<RawWindow>>,
        burst: Option<&Spanned<Units>>,
    ) -> Result<Quota, ConfigError> {
        let at_limit = |error: QuotaError| document.error_at(limit, &error.to_string());
        let units = limit.value.get();
        let mut quota = match window {
            None if algorithm == Algorithm::Concurrency => {
                Quota::concurrency(units).map_err(at_limit)?
            }
            None => {
                let missing = "missing field `window`: the time of the limit, such as 60s";
                return Err(document.error_at(&self.name, missing));
            }
            Some(window) => window.value.quota(document, window, algorithm, limit)?,
        };
        if let Some(holds) = &self.hold {
            quota = quota.with_holds(holds.value.terms(document, holds, algorithm)?);
        }
        if let Some(encoding) = &self.encoding {
            quota = quota
                .with_encoding(parse_name(document, encoding)?)
                .map_err(|error| document.error_at(encoding, &error.to_string()))?;
        }
        if let Some(count_denied) = &self.count_denied {
            quota = quota
                .with_count_denied(count_denied.value.get())
                .map_err(|error| document.error_at(count_denied, &error.to_string()))?;
        }
        if let Some(burst) = burst {
            quota = quota
                .with_burst(burst.value.get())
                .map_err(|error| document.error_at(burst, &error.to_string()))?;
        }
        if let Some(texts) = &self.block_for {
            let lengths = texts.value.texts().iter().map(|text| duration::parse(text));
            let lengths = lengths.collect::<Result<Vec<_>, _>>();
            quota = lengths
                .and_then(|all| quota.with_block_for(&all).map_err(|error| error.to_string()))
                .map_err(|error| document.error_at(texts, &error))?;
        }
        Ok(quota)
    }
}

impl Conditions {
    /// Returns the attributes, by their normalized names, and their patterns.
    fn named(
        &self,
        document: &Document<'_>,
        attributes: &AttributeNames,
        field: &str,
    ) -> Result<Vec<(String, &[String])>, ConfigError> {
        let mut matched = BTreeSet::new();
        let mut named = Vec::with_capacity(self.0.len());
        for (written, patterns) in &self.0 {
            let attribute = attribute_name(document, attributes, field, written)?;
            if !matched.insert(attribute.clone()) {
                let twice =
                    format!("{attribute} is there twice: header names are case-insensitive");
                return Err(document.error_at(patterns, &twice));
            }
            named.push((attribute, patterns.value.texts()));
        }
        Ok(named)
    }
}

/// Returns a quota for each value of the attribute that has the anchor of its calendar.
fn anchored(quota: &Quota) -> Vec<(String, Quota)> {
    let Some(calendar) = quota.calendar() else { return Vec::new() };
    let anchors = Calendar::anchors(calendar.unit()).into_iter();
    let quotas = anchors.filter_map(|anchor| {
        let quota = quota.clone().with_anchor(&anchor).ok()?;
        Some((anchor, quota))
    });
    quotas.collect()
}

/// Returns the normalized name: header names are case-insensitive, and requests have them in lower
/// case.
pub(super) fn attribute_name(
    document: &Document<'_>,
    attributes: &AttributeNames,
    field: &str,
    written: &Spanned<String>,
) -> Result<String, ConfigError> {
    let name = &written.value;
    attributes
        .check(name)
        .map_err(|error| document.unknown_name_at(written, &format!("{field}: {error}")))?;
    Ok(if name.starts_with("header.") { name.to_ascii_lowercase() } else { name.clone() })
}

/// Makes a field without a value an error: such a key would count all requests together.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Spanned<T>>, D::Error> {
    Spanned::deserialize(deserializer).map(Some)
}

pub(crate) fn parse_name<T: FromStr<Err = UnknownName>>(
    document: &Document<'_>,
    text: &Spanned<String>,
) -> Result<T, ConfigError> {
    text.value
        .parse()
        .map_err(|error: UnknownName| document.unknown_name_at(text, &error.to_string()))
}

/// Returns the decision while the store is unavailable. Only Envoy's rules can pass the error on:
/// callers of the API and clients of the gateway have no setting of their own for it.
fn policy_failure(
    document: &Document<'_>,
    text: &Spanned<String>,
) -> Result<OnStoreFailure, ConfigError> {
    let known = POLICY_FAILURES.into_iter().find(|failure| failure.as_str() == text.value);
    known.ok_or_else(|| {
        let names = POLICY_FAILURES.map(OnStoreFailure::as_str);
        let error = UnknownName::new("on_store_failure", &text.value, &names);
        document.unknown_name_at(text, &error.to_string())
    })
}

/// Responses whose requests are refunded.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "RefundOn")]
struct RawRefundOn {
    /// Statuses such as 404, or classes of them such as 2xx: one, or a list.
    #[schemars(schema_with = "statuses")]
    status: Spanned<OneOrMany>,
}

/// Another limit for one key.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Override {
    /// Value of the key; for a key of several attributes, a list in the same order.
    #[schemars(schema_with = "texts")]
    key: Spanned<OneOrMany>,
    #[schemars(with = "Units")]
    limit: Spanned<Units>,
    #[schemars(with = "Option<RawWindow>")]
    window: Option<Spanned<RawWindow>>,
    #[schemars(with = "Option<Units>")]
    burst: Option<Spanned<Units>>,
}

/// A text, or a list of texts.
#[derive(Debug)]
pub enum OneOrMany {
    /// A single text.
    One(String),
    /// A list, possibly empty.
    Many(Vec<String>),
}

impl OneOrMany {
    /// Returns the texts as a list.
    ///
    /// ```
    /// use tidegate_config::policies::OneOrMany;
    /// use tidegate_config::yaml::Document;
    ///
    /// let one: OneOrMany = Document::new("a.yaml", "GET").parse()?;
    /// let many: OneOrMany = Document::new("a.yaml", "[GET, POST]").parse()?;
    /// assert_eq!(one.texts(), ["GET"]);
    /// assert_eq!(many.texts(), ["GET", "POST"]);
    /// # Ok::<(), tidegate_config::ConfigError>(())
    /// ```
    #[must_use]
    pub fn texts(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

/// The attributes of a key, each with its position.
#[derive(Debug)]
enum KeyNames {
    One(String),
    Many(Vec<Spanned<String>>),
}

impl KeyNames {
    /// Returns the names; `key` has the position of a single one.
    fn names(&self, key: &Spanned<Self>) -> Vec<Spanned<String>> {
        match self {
            Self::One(name) => vec![Spanned::new(name.clone(), key.referenced, key.defined)],
            Self::Many(names) => names.clone(),
        }
    }
}

/// The attributes that must match, in the order of the document.
#[derive(Debug, Default)]
struct Conditions(Vec<(Spanned<String>, Spanned<OneOrMany>)>);

impl Default for OneOrMany {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
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

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(number.to_string()))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(value.to_string()))
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<OneOrMany, E> {
                Err(E::custom("write this text in quotes, or 5.0 would be read as 5"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<OneOrMany, A::Error> {
                let mut all = Vec::new();
                while let Some(text) = texts.next_element()? {
                    all.push(text);
                }
                Ok(OneOrMany::Many(all))
            }
        }
        deserializer.deserialize_any(TextsVisitor)
    }
}

impl<'de> Deserialize<'de> for KeyNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesVisitor;
        impl<'de> Visitor<'de> for NamesVisitor {
            type Value = KeyNames;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<KeyNames, E> {
                Ok(KeyNames::One(name.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<KeyNames, A::Error> {
                let mut all = Vec::new();
                while let Some(name) = names.next_element()? {
                    all.push(name);
                }
                Ok(KeyNames::Many(all))
            }
        }
        deserializer.deserialize_any(NamesVisitor)
    }
}

impl<'de> Deserialize<'de> for Conditions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Conditions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Conditions, A::Error> {
                let mut all = Vec::new();
                while let Some(field) = fields.next_entry()? {
                    all.push(field);
                }
                Ok(Conditions(all))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}
