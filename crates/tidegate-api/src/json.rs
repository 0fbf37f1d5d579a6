//! Queries and decisions as JSON, for the HTTP API and the command line.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, de};
use tidegate::{
    Algorithm, Calendar, Decision, Encoding, Explanation, Hold, HoldStatus, HoldTerms, Mode,
    PolicyDecision, PolicyDecisions, Quota, QuotaError, UnknownName, normalize_host,
};
use tidegate_config::policies::holds;

use crate::duration::millis_rounded_up;
use crate::operation::{HoldAnswer, Operation};

/// The largest `age_ms`: 10 years, longer than any count is kept.
pub const MAX_AGE_MS: u64 = 10 * 366 * 86_400_000;

/// Query in one of three forms: policy and key; attributes; key and quota.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QueryBody<'a> {
    /// Name of a policy; with `key`.
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    pub policy: Option<Text<'a>>,
    /// Value of the key; with `policy` or `quota`.
    #[serde(borrow)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 512)]
    pub key: Option<Text<'a>>,
    /// Attributes of the request, which select the policies: ip, method, path, host, header.NAME,
    /// query.NAME, cookie.NAME, domain, descriptor.KEY, and those that the configuration declares
    /// in `attributes`. Any other name is an error.
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub attributes: Option<AttributesBody>,
    /// Quota of the caller; with `key`.
    #[schema(value_type = Option<QuotaBody>)]
    pub quota: Option<Object<QuotaBody>>,
    /// Number of units; by default that of the policy, otherwise 1.
    #[schema(minimum = 1)]
    pub cost: Option<u64>,
    /// Only for a refund, which requires it or `id`: age of the charge in milliseconds, measured
    /// from just before it was sent.
    pub age_ms: Option<u64>,
    /// Id of the request. While it is remembered, a request with the same id is the same request:
    /// it gets the same answer, and nothing is charged. A reservation without an id gets a random
    /// one.
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    pub id: Option<Text<'a>>,
    /// Only for an acquire with `id`: time for which the id is remembered; 60000 by default.
    pub id_ttl_ms: Option<u64>,
    /// Time after which the reservation ends; by default that of the policy, whose maximum applies.
    pub ttl_ms: Option<u64>,
    /// Number of units that were used. 0 cancels the reservation.
    pub actual: Option<u64>,
}

impl QueryBody<'_> {
    /// Checks that the body has the fields of this operation, and no others. Returns the hold.
    pub fn hold(&self, operation: Operation) -> Result<Option<Arc<Hold>>, String> {
        let (path, fields) = (operation.path(), operation.fields());
        for (name, is_given) in [
            ("cost", self.cost.is_some()),
            ("age_ms", self.age_ms.is_some()),
            ("id", self.id.is_some()),
            ("id_ttl_ms", self.id_ttl_ms.is_some()),
            ("ttl_ms", self.ttl_ms.is_some()),
            ("actual", self.actual.is_some()),
        ] {
            if is_given && !fields.contains(&name) {
                let others = Operation::OF_API.into_iter().filter(|it| it.fields().contains(&name));
                let others: Vec<&str> = others.map(Operation::path).collect();
                let (others, fields) = (others.join(", "), fields.join(", "));
                return Err(format!("{name} is a field of {others}; {path} has {fields}"));
            }
            if !is_given && operation.required().contains(&name) {
                let meaning = match name {
                    "id" => "that of the reservation",
                    _ => "the units that were used, or 0 to cancel the reservation",
                };
                return Err(format!("{path} needs {name}: {meaning}"));
            }
        }
        if self.id_ttl_ms.is_some() && self.id.is_none() {
            return Err("id_ttl_ms is the time for which an id is remembered: send id, too".into());
        }
        if operation == Operation::Refund {
            let error = match (&self.id, self.age_ms, self.cost) {
                (Some(_), None, None) | (None, Some(_), _) => None,
                (Some(_), ..) => Some(
                    "a refund by id returns exactly the units of that id: send neither cost nor \
                     age_ms",
                ),
                (None, None, _) => Some(
                    "a refund needs id: that of its charge; or age_ms: the age of its charge in \
                     milliseconds, measured from just before the charge was sent",
                ),
            };
            if let Some(error) = error {
                return Err(error.to_owned());
            }
        }
        let hold = operation.hold(self.id.as_deref(), self.id_ttl_ms.or(self.ttl_ms));
        hold.map_err(|error| error.to_string())
    }
}

/// Returns the host of the request to the nearest proxy, which is the last one of the list.
pub fn nearest_host(hosts: &str) -> &str {
    hosts.rsplit(',').next().unwrap_or_default().trim()
}

/// JSON object with the fields of this type. Derived implementations also accept an array of the
/// values, which is rejected here.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> de::Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: de::MapAccess<'de>>(self, fields: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// Attributes by name, without duplicates. Header names are case-insensitive; host and path are
/// normalized.
#[derive(Debug, Default)]
pub struct AttributesBody(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for AttributesBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> de::Visitor<'de> for Pairs {
            type Value = AttributesBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of names and strings")
            }

            fn visit_map<A: de::MapAccess<'de>>(
                self,
                mut pairs: A,
            ) -> Result<AttributesBody, A::Error> {
                let mut all = BTreeMap::new();
                while let Some((mut name, mut value)) = pairs.next_entry::<String, String>()? {
                    if name.starts_with("header.") {
                        name.make_ascii_lowercase();
                    } else if name == "host" {
                        value = normalize_host(nearest_host(&value)).into_owned();
                    }
                    if all.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("{name:?} is given twice")));
                    }
                    all.insert(name, value);
                }
                Ok(AttributesBody(all))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// String that borrows from the JSON if it has no escapes. (`Option<Cow<str>>` always copies.)
#[derive(Debug)]
pub struct Text<'a>(Cow<'a, str>);

impl std::ops::Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

/// Quota of the caller.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaBody {
    /// sliding-log (default), sliding-counter, fixed-window, token-bucket, leaky-bucket or
    /// concurrency.
    #[schema(value_type = Option<Algorithms>)]
    algorithm: Option<String>,
    /// For sliding-log: sorted-set (default) or packed; for sliding-counter: hash (default) or
    /// packed.
    #[schema(value_type = Option<Encodings>)]
    encoding: Option<String>,
    /// For sliding-log: whether denied requests are counted.
    count_denied: Option<bool>,
    /// Time for which a key is denied after it exceeds the limit, such as 10m; or up to ten of
    /// them, by its number of blocks in the last day.
    #[schema(value_type = Option<BlockLengths>)]
    block_for: Option<BlockLengths>,
    /// Units per window, or in flight.
    #[schema(minimum = 1)]
    limit: u64,
    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d, or for fixed-window the periods of a
    /// calendar. Required, except for concurrency, which has none.
    #[schema(value_type = Option<WindowBody>)]
    window: Option<WindowBody>,
    /// Capacity of a bucket; by default the limit.
    #[schema(minimum = 1)]
    burst: Option<u64>,
    /// Lifetime of reservations.
    #[schema(value_type = Option<HoldBody>)]
    hold: Option<Object<HoldBody>>,
}

/// Lifetime of reservations, and the effect of their end on the units.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HoldBody {
    /// Time after which one ends that is neither settled nor renewed, from 1s to 24h; 60s by
    /// default.
    ttl: Option<String>,
    /// Time after which one ends however often it is renewed, from 1s to 24h; 10m by default.
    max_ttl: Option<String>,
    /// charge (default): the units of one that ends without a commit stay charged; release: they
    /// return, as those of concurrency do.
    #[schema(value_type = Option<OnExpires>)]
    on_expire: Option<String>,
}

impl HoldBody {
    fn terms(&self, algorithm: Algorithm) -> Result<HoldTerms, String> {
        let duration = |name: &str, text: &Option<String>| {
            let parsed = text.as_deref().map(tidegate_config::duration::parse).transpose();
            parsed.map_err(|error| format!("{name}: {error}"))
        };
        let times = (duration("ttl", &self.ttl)?, duration("max_ttl", &self.max_ttl)?);
        let terms =
            HoldTerms::with_defaults(times.0, times.1).map_err(|error| error.to_string())?;
        let Some(name) = &self.on_expire else { return Ok(terms) };
        let on_expire = name.parse().map_err(|error: UnknownName| error.to_string())?;
        Ok(holds::with_on_expire(terms, algorithm, on_expire)?)
    }
}

impl QuotaBody {
    /// Returns the quota, or a description of its error.
    pub fn quota(&self) -> Result<Quota, String> {
        let algorithm: Algorithm = match &self.algorithm {
            Some(name) => {
                name.parse().map_err(|error: UnknownName| format!("quota.algorithm: {error}"))?
            }
            None => Algorithm::SlidingLog,
        };
        let quota_error = |error: QuotaError| format!("quota: {error}");
        let mut quota = match (&self.window, algorithm) {
            (None, Algorithm::Concurrency) => Quota::concurrency(self.limit),
            (Some(_), Algorithm::Concurrency) => Err(QuotaError::NoWindow),
            (None, _) => {
                return Err(format!("quota.window is missing, which {algorithm} needs: 60s"));
            }
            (Some(WindowBody::Duration(window)), _) => {
                let window = tidegate_config::duration::parse(window)
                    .map_err(|error| format!("quota.window: {error}"))?;
                Quota::new(algorithm, self.limit, window)
            }
            (Some(WindowBody::Calendar(Object(calendar))), _) => {
                let periods =
                    calendar.periods().map_err(|error| format!("quota.window: {error}"))?;
                Quota::new_in_calendar(algorithm, self.limit, periods)
            }
        }
        .map_err(quota_error)?;
        if let Some(Object(hold)) = &self.hold {
            let terms = hold.terms(algorithm).map_err(|error| format!("quota.hold: {error}"))?;
            quota = quota.with_holds(terms);
        }
        if let Some(encoding) = &self.encoding {
            let encoding: Encoding = encoding
                .parse()
                .map_err(|error: UnknownName| format!("quota.encoding: {error}"))?;
            quota = quota.with_encoding(encoding).map_err(quota_error)?;
        }
        if let Some(count_denied) = self.count_denied {
            quota = quota.with_count_denied(count_denied).map_err(quota_error)?;
        }
        if let Some(burst) = self.burst {
            quota = quota.with_burst(burst).map_err(quota_error)?;
        }
        if let Some(lengths) = &self.block_for {
            let lengths = match lengths {
                BlockLengths::One(text) => std::slice::from_ref(text),
                BlockLengths::Many(texts) => texts,
            };
            let parse = |text: &String| tidegate_config::duration::parse(text);
            let lengths = lengths.iter().map(parse).collect::<Result<Vec<_>, _>>();
            let lengths = lengths.map_err(|error| format!("quota.block_for: {error}"))?;
            quota = quota.with_block_for(&lengths).map_err(quota_error)?;
        }
        Ok(quota)
    }
}

/// A duration, or the periods of a calendar.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(
    untagged,
    expecting = "expected a duration such as 60s, or an object such as {\"calendar\": \"month\", \
                 \"timezone\": \"Europe/Berlin\", \"anchor\": \"15\"}"
)]
pub enum WindowBody {
    Duration(String),
    #[schema(value_type = CalendarBody)]
    Calendar(Object<CalendarBody>),
}

/// Periods of a calendar.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CalendarBody {
    /// day, week, month, quarter or year.
    #[schema(value_type = CalendarUnits)]
    calendar: String,
    /// Name in the IANA database, such as Europe/Berlin; UTC by default.
    #[schema(max_length = 64)]
    timezone: Option<String>,
    /// Day on which periods start: of the month, from 1 (default) to 31, or a weekday.
    #[schema(max_length = 16)]
    anchor: Option<String>,
}

impl CalendarBody {
    fn periods(&self) -> Result<Calendar, String> {
        let unit = self.calendar.parse().map_err(|error: UnknownName| error.to_string())?;
        let calendar = Calendar::new(unit, self.timezone.as_deref().unwrap_or("UTC"));
        let anchored = match &self.anchor {
            Some(anchor) => calendar.and_then(|calendar| calendar.with_anchor(anchor)),
            None => calendar,
        };
        anchored.map_err(|error| error.to_string())
    }
}

/// Unit of a calendar.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum CalendarUnits {
    Day,
    Week,
    Month,
    Quarter,
    Year,
}

/// A duration, or a list of durations.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(untagged, expecting = "expected a duration such as 10m, or a list such as [1m, 10m, 1h]")]
pub enum BlockLengths {
    One(String),
    Many(Vec<String>),
}

/// Algorithm of a quota.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum Algorithms {
    SlidingLog,
    SlidingCounter,
    FixedWindow,
    TokenBucket,
    LeakyBucket,
    Concurrency,
}

/// Effect of the end of a reservation that was not committed on its units.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum OnExpires {
    Charge,
    Release,
}

/// Encoding of a sliding-log or sliding-counter in Redis.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum Encodings {
    SortedSet,
    Hash,
    Packed,
}

/// Origin of a decision: the store, a cached denial of the store, this instance while the store is
/// unavailable, the policy's failure mode, a policy whose key the request lacks, or an override
/// that blocks the key.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum Sources {
    Store,
    DenyCache,
    Local,
    Allow,
    Deny,
    MissingKey,
    Override,
}

/// Decisions on a request, the most restrictive one at the top level.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only for the schema; `to_json` writes it")]
pub struct DecisionsBody<'a> {
    #[serde(flatten)]
    binding: BindingBody,
    /// Decision of each policy. Empty if no policy applies.
    decisions: Vec<PolicyDecisionBody<'a>>,
    /// Whether each policy applies, and why. Only with `?explain` and attributes.
    #[schema(required = false)]
    policies: Option<Vec<ExplanationBody<'a>>>,
    #[serde(flatten)]
    hold: ReservationBody,
}

/// Reservation of a request. Absent if it has none, or is denied.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only for the schema; `push_hold` writes it")]
pub struct ReservationBody {
    /// Id, for its commit.
    #[schema(required = false)]
    reservation: Option<String>,
    /// Time until it ends; 0 if nothing is held.
    #[schema(required = false)]
    expires_after_ms: Option<u64>,
    /// True if the id was known: this is the earlier answer, and nothing was charged.
    #[schema(required = false)]
    replayed: Option<bool>,
    /// Whether this commit or refund, or an earlier one, has settled it. Otherwise the id is
    /// unknown or the reservation has ended, and a commit has reported its units.
    #[schema(required = false)]
    settled: Option<bool>,
    /// True if the store is unavailable: the commit is made later.
    #[schema(required = false)]
    pending: Option<bool>,
    /// Whether the renewed units are held.
    #[schema(required = false)]
    held: Option<bool>,
}

/// Why a policy does or does not apply.
#[derive(serde::Serialize, utoipa::ToSchema)]
pub struct ExplanationBody<'a> {
    policy: &'a str,
    applies: bool,
    reason: &'a str,
}

/// Most restrictive decision, with durations in milliseconds.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only for the schema; `to_json` writes it")]
pub struct BindingBody {
    /// Whether the request may pass.
    allowed: bool,
    /// Policy that decided; null if no policy applies.
    #[schema(required)]
    policy: Option<String>,
    /// Capacity: the units per window, or the burst of a bucket. `remaining` never exceeds it. Null
    /// if no policy applies.
    #[schema(required)]
    limit: Option<u64>,
    /// Units that are available right after this decision; null if no policy applies.
    #[schema(required)]
    remaining: Option<u64>,
    /// Shortest wait after which the same request would be admitted.
    retry_after_ms: u64,
    /// Time until the full limit is available again.
    reset_after_ms: u64,
    /// Wait before an admitted request may proceed.
    delay_ms: u64,
    /// Origin of the decision; null if no policy applies.
    #[schema(required)]
    source: Option<Sources>,
    /// Attribute of the policy's key that the request lacks. Only with the source missing-key.
    #[schema(required = false)]
    missing_key: Option<String>,
}

/// Body of a request to which no policy applies.
const NO_POLICY: &str = concat!(
    r#"{"allowed":true,"policy":null,"limit":null,"remaining":null,"retry_after_ms":0,"#,
    r#""reset_after_ms":0,"delay_ms":0,"source":null,"decisions":[]}"#
);

/// Decision of one policy.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only for the schema; `to_json` writes it")]
pub struct PolicyDecisionBody<'a> {
    #[serde(flatten)]
    decision: DecisionBody<'a>,
    /// Whether a denial by this policy has an effect: in shadow mode it has none.
    #[schema(value_type = Modes)]
    mode: &'static str,
    /// Key that was counted, as the policy shows it; null if the request lacks it. Only with
    /// `?explain`.
    #[schema(required = false)]
    key: Option<String>,
}

/// Whether a denial is enforced.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum Modes {
    Enforce,
    Shadow,
}

/// Decision, with durations in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, utoipa::ToSchema)]
pub struct DecisionBody<'a> {
    /// Whether the request may pass.
    allowed: bool,
    /// Policy that decided.
    policy: &'a str,
    /// Capacity: the units per window, or the burst of a bucket. `remaining` never exceeds it.
    limit: u64,
    /// Units that are available right after this decision.
    remaining: u64,
    /// Shortest wait after which the same request would be admitted.
    retry_after_ms: u64,
    /// Time until the full limit is available again.
    reset_after_ms: u64,
    /// Wait before an admitted request may proceed.
    delay_ms: u64,
    /// Origin of the decision.
    #[schema(value_type = Sources)]
    source: &'static str,
    /// Attribute of the policy's key that the request lacks. Only with the source missing-key.
    #[schema(required = false)]
    missing_key: Option<&'a str>,
}

impl<'a> DecisionBody<'a> {
    fn new(policy: &'a str, decision: &Decision) -> Self {
        Self {
            allowed: decision.allowed,
            policy,
            limit: decision.limit,
            remaining: decision.remaining,
            // Rounded up, so that a client that waits this long is admitted.
            retry_after_ms: millis_rounded_up(decision.retry_after),
            reset_after_ms: millis_rounded_up(decision.reset_after),
            delay_ms: millis_rounded_up(decision.delay),
            source: decision.source.as_str(),
            missing_key: None,
        }
    }

    fn for_policy(decision: &'a PolicyDecision<'_>) -> Self {
        let missing_key = decision.missing_key();
        Self { missing_key, ..Self::new(decision.policy(), &decision.decision()) }
    }

    /// Writes the fields, without braces.
    fn push_json(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(if self.allowed {
            br#""allowed":true,"policy":"#
        } else {
            br#""allowed":false,"policy":"#
        });
        push_text(json, self.policy);
        for (name, number) in [
            (",\"limit\":", self.limit),
            (",\"remaining\":", self.remaining),
            (",\"retry_after_ms\":", self.retry_after_ms),
            (",\"reset_after_ms\":", self.reset_after_ms),
            (",\"delay_ms\":", self.delay_ms),
        ] {
            json.extend_from_slice(name.as_bytes());
            json.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        }
        json.extend_from_slice(b",\"source\":\"");
        json.extend_from_slice(self.source.as_bytes());
        json.push(b'"');
        if let Some(key) = self.missing_key {
            json.extend_from_slice(b",\"missing_key\":");
            push_text(json, key);
        }
    }
}

/// Writes a string.
fn push_text(json: &mut Vec<u8>, text: &str) {
    let is_plain = |byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    if text.bytes().all(is_plain) {
        json.push(b'"');
        json.extend_from_slice(text.as_bytes());
        json.push(b'"');
    } else {
        json.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
    }
}

/// Returns the body for the decision of one policy.
pub fn decision_body(policy: &str, decision: &Decision) -> Vec<u8> {
    let body = DecisionBody::new(policy, decision);
    to_json(&body, [(body, Mode::Enforce)].into_iter(), &[])
}

/// Returns the body for the decisions on a request.
pub fn decisions_body(decisions: &PolicyDecisions<'_>) -> Vec<u8> {
    body_with_keys(decisions, &[])
}

/// Returns the body for the decisions on a request, with the key of each in the form that `shown`
/// returns for a policy and a key.
pub fn explained_body(
    decisions: &PolicyDecisions<'_>,
    shown: impl Fn(&str, &str) -> String,
    policies: Option<&[Explanation<'_>]>,
) -> Vec<u8> {
    let key = |entry: &PolicyDecision<'_>| entry.key().map(|key| shown(entry.policy(), key));
    let mut body = body_with_keys(decisions, &decisions.iter().map(key).collect::<Vec<_>>());
    if let Some(policies) = policies {
        let policies = policies.iter().map(|Explanation { policy, applies, reason, .. }| {
            ExplanationBody { policy, applies: *applies, reason }
        });
        let policies = serde_json::to_string(&policies.collect::<Vec<_>>()).unwrap_or_default();
        body.truncate(body.len() - 1);
        body.extend_from_slice(format!(",\"policies\":{policies}}}").as_bytes());
    }
    body
}

/// Adds the reservation to the body of an answer.
pub fn push_hold(body: &mut Vec<u8>, operation: Operation, answer: &HoldAnswer<'_>) {
    let has_status = |status| answer.status == Some(status);
    body.truncate(body.len() - 1);
    body.extend_from_slice(b",\"reservation\":");
    push_text(body, answer.id);
    let expires_after = format!(",\"expires_after_ms\":{}", answer.expires_after_ms);
    let fields = match operation {
        Operation::Commit | Operation::Refund => {
            let pending = if has_status(HoldStatus::Pending) { ",\"pending\":true" } else { "" };
            format!(",\"settled\":{}{pending}", has_status(HoldStatus::Settled))
        }
        Operation::Renew => format!(",\"held\":{}{expires_after}", has_status(HoldStatus::Held)),
        _ if has_status(HoldStatus::Replayed) => format!("{expires_after},\"replayed\":true"),
        _ => expires_after,
    };
    body.extend_from_slice(fields.as_bytes());
    body.push(b'}');
}

fn body_with_keys(decisions: &PolicyDecisions<'_>, keys: &[Option<String>]) -> Vec<u8> {
    let Some(binding) = decisions.binding() else { return NO_POLICY.into() };
    let binding = DecisionBody::for_policy(binding);
    // A policy in shadow mode may deny although the request passes.
    let binding = if decisions.is_allowed() {
        DecisionBody { allowed: true, retry_after_ms: 0, ..binding }
    } else {
        DecisionBody { allowed: false, ..binding }
    };
    let with_mode = |decision| {
        let mode = if PolicyDecision::is_shadow(decision) { Mode::Shadow } else { Mode::Enforce };
        (DecisionBody::for_policy(decision), mode)
    };
    to_json(&binding, decisions.iter().map(with_mode), keys)
}

/// Writes a [`DecisionsBody`] without serde, which takes several times as long. This is most of the
/// work of a response. `keys` has the key of each decision, or is empty.
fn to_json<'a>(
    binding: &DecisionBody<'a>,
    decisions: impl ExactSizeIterator<Item = (DecisionBody<'a>, Mode)>,
    keys: &[Option<String>],
) -> Vec<u8> {
    let mut json = Vec::with_capacity(256 * (1 + decisions.len()));
    json.push(b'{');
    binding.push_json(&mut json);
    let fields = 1..json.len();
    json.extend_from_slice(b",\"decisions\":[");
    for (number, (decision, mode)) in decisions.enumerate() {
        json.extend_from_slice(if number == 0 { b"{" } else { b",{" });
        // Usually there is only the binding decision.
        if decision == *binding {
            json.extend_from_within(fields.clone());
        } else {
            decision.push_json(&mut json);
        }
        json.extend_from_slice(match mode {
            Mode::Enforce => b",\"mode\":\"enforce\"",
            Mode::Shadow => b",\"mode\":\"shadow\"",
        });
        if let Some(key) = keys.get(number) {
            json.extend_from_slice(b",\"key\":");
            json.extend_from_slice(serde_json::json!(key).to_string().as_bytes());
        }
        json.push(b'}');
    }
    json.extend_from_slice(b"]}");
    json
}

#[cfg(test)]
mod fuzz_tests;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn query_is_an_object_without_repeated_names() {
        fn parse(text: &str) -> Result<Object<QueryBody<'_>>, String> {
            serde_json::from_str(text).map_err(|error| error.to_string())
        }
        let attributes = parse(
            r#"{"attributes": {"header.X-User": "U", "host": "A.Example.com:8080", "Path": "/"}}"#,
        );
        let attributes = attributes.expect("a query").0.attributes.expect("attributes").0;
        let expected = [("Path", "/"), ("header.x-user", "U"), ("host", "a.example.com")];
        assert!(
            attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(expected)
        );
        for (text, reason) in [
            (r#"["p", "k", null, null, 1]"#, "expected a JSON object"),
            (
                r#"{"key": "k", "quota": ["sliding-log", null, null, 5, "1s", null]}"#,
                "expected a JSON object",
            ),
            (
                r#"{"attributes": {"header.A": "1", "header.a": "2"}}"#,
                "\"header.a\" is given twice",
            ),
            (r#"{"attributes": {"ip": "::1", "ip": "::2"}}"#, "\"ip\" is given twice"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn body_is_json_whatever_the_name_of_the_policy() {
        let decision = Decision::deny(10, Duration::from_millis(1_500))
            .with_remaining(3)
            .with_reset_after(Duration::from_secs(60))
            .with_source(tidegate::Source::Local);
        for policy in ["p", "with \"quotes\" and \\", "naïve", "🌊 tide", "\u{7f}"] {
            let json: serde_json::Value =
                serde_json::from_slice(&decision_body(policy, &decision)).expect("JSON");
            let entry = serde_json::json!({
                "allowed": false, "policy": policy, "limit": 10, "remaining": 3,
                "retry_after_ms": 1_500, "reset_after_ms": 60_000, "delay_ms": 0, "source": "local",
            });
            let mut whole = entry.clone();
            whole["decisions"] = serde_json::json!([entry]);
            whole["decisions"][0]["mode"] = "enforce".into();
            assert_eq!(json, whole);
        }
    }
}
