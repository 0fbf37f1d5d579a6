//! Questions and answers as JSON, the same from the shell and over HTTP.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, de};
use tidegate::{Algorithm, Decision, Encoding, Quota};

use crate::engine::Answer;
use crate::forward_auth::plain_host;

/// A question, in one of three forms: a policy and a key; attributes; a key and a quota.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AskBody<'a> {
    /// The name of a policy; with `key`.
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    pub(crate) policy: Option<Text<'a>>,
    /// Whose count it is; with `policy` or `quota`.
    #[serde(borrow)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 512)]
    pub(crate) key: Option<Text<'a>>,
    /// Attributes of the request, which select the policies: ip, method, path, host, header.NAME,
    /// query.NAME, cookie.NAME, domain, descriptor.KEY, and those that the configuration declares
    /// in `attributes`. Any other name is an error.
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub(crate) attributes: Option<AttributesBody>,
    /// A quota of the caller's own; with `key`.
    #[schema(value_type = Option<QuotaBody>)]
    pub(crate) quota: Option<Object<QuotaBody>>,
    /// How many units it takes; as the policy says by default, otherwise 1.
    #[schema(minimum = 1)]
    pub(crate) cost: Option<u64>,
    /// Only of use in a refund: how many milliseconds ago the charge was made, from just before it
    /// was asked for. Its own units are then returned; otherwise the oldest that still count.
    pub(crate) age_ms: Option<u64>,
}

/// A JSON object with the fields of this type. (serde would also take an array of its values.)
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

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

/// Attributes by name, each once. Names of headers are told in any case, a host in any of the ways
/// to write it.
#[derive(Debug, Default)]
pub(crate) struct AttributesBody(pub(crate) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for AttributesBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> de::Visitor<'de> for Pairs {
            type Value = AttributesBody;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of names and texts")
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
                        value = plain_host(&value);
                    }
                    if all.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("{name:?} is there twice")));
                    }
                    all.insert(name, value);
                }
                Ok(AttributesBody(all))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// A string, not copied where JSON has it as it is. (serde's own `Option<Cow<str>>` always copies.)
#[derive(Debug)]
pub(crate) struct Text<'a>(Cow<'a, str>);

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

/// A quota of the caller's own.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct QuotaBody {
    /// sliding-log (default), sliding-counter, fixed-window, token-bucket or leaky-bucket.
    #[schema(value_type = Option<Algorithms>)]
    algorithm: Option<String>,
    /// For sliding-log: sorted-set (default) or packed.
    #[schema(value_type = Option<Encodings>)]
    encoding: Option<String>,
    /// For sliding-log: denied requests count as well.
    count_denied: Option<bool>,
    /// Units per window.
    #[schema(minimum = 1)]
    limit: u64,
    /// Such as 500ms, 60s, 5m, 1h, 30d.
    window: String,
    /// What a bucket holds; the limit by default.
    #[schema(minimum = 1)]
    burst: Option<u64>,
}

impl QuotaBody {
    /// The quota, or what is wrong with it.
    pub(crate) fn quota(&self) -> Result<Quota, String> {
        let algorithm: Algorithm = match &self.algorithm {
            Some(name) => name
                .parse()
                .map_err(|error: tidegate::UnknownName| format!("quota.algorithm: {error}"))?,
            None => Algorithm::SlidingLog,
        };
        let window = tidegate::config::duration::parse(&self.window)
            .map_err(|error| format!("quota.window: {error}"))?;
        let in_quota = |error: tidegate::QuotaError| format!("quota: {error}");
        let mut quota = Quota::new(algorithm, self.limit, window).map_err(in_quota)?;
        if let Some(encoding) = &self.encoding {
            let encoding: Encoding = encoding
                .parse()
                .map_err(|error: tidegate::UnknownName| format!("quota.encoding: {error}"))?;
            quota = quota.with_encoding(encoding).map_err(in_quota)?;
        }
        if let Some(count_denied) = self.count_denied {
            quota = quota.with_count_denied(count_denied).map_err(in_quota)?;
        }
        if let Some(burst) = self.burst {
            quota = quota.with_burst(burst).map_err(in_quota)?;
        }
        Ok(quota)
    }
}

/// How units are counted.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
#[expect(dead_code, reason = "it describes the API")]
pub(crate) enum Algorithms {
    SlidingLog,
    SlidingCounter,
    FixedWindow,
    TokenBucket,
    LeakyBucket,
}

/// How Redis keeps a sliding-log.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
#[expect(dead_code, reason = "it describes the API")]
pub(crate) enum Encodings {
    SortedSet,
    Packed,
}

/// Who decided: the store, its remembered denial, this instance in its place, or the policy's word
/// for when it fails.
#[derive(utoipa::ToSchema)]
#[schema(rename_all = "kebab-case")]
#[expect(dead_code, reason = "it describes the API")]
pub(crate) enum Sources {
    Store,
    DenyCache,
    Local,
    Allow,
    Deny,
}

/// What is decided, the most restrictive decision on top.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "it describes the API; `to_json` writes it")]
pub(crate) struct Body<'a> {
    #[serde(flatten)]
    leading: DecisionBody<'a>,
    /// Each policy's decision. Empty if no policy applies.
    decisions: Vec<DecisionBody<'a>>,
}

/// One decision, durations in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, utoipa::ToSchema)]
pub(crate) struct DecisionBody<'a> {
    /// May the request pass?
    allowed: bool,
    /// The policy that decided; null if none applies.
    policy: Option<&'a str>,
    /// Units per window.
    limit: u64,
    /// Units that could be taken right after this decision.
    remaining: u64,
    /// Who waits this long gets in.
    retry_after_ms: u64,
    /// Until the full limit is back.
    reset_after_ms: u64,
    /// How long an admitted request waits for its turn.
    delay_ms: u64,
    /// Who decided.
    #[schema(value_type = Sources)]
    source: &'static str,
}

impl<'a> DecisionBody<'a> {
    fn new(policy: &'a str, decision: &Decision) -> Self {
        Self {
            allowed: decision.allowed,
            policy: Some(policy),
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after_ms: millis(decision.retry_after),
            reset_after_ms: millis(decision.reset_after),
            delay_ms: millis(decision.delay),
            source: decision.source.as_str(),
        }
    }

    /// The fields, without braces.
    fn push_json(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(if self.allowed {
            br#""allowed":true,"policy":"#
        } else {
            br#""allowed":false,"policy":"#
        });
        match self.policy {
            None => json.extend_from_slice(b"null"),
            Some(name)
                if name
                    .bytes()
                    .all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\')) =>
            {
                json.push(b'"');
                json.extend_from_slice(name.as_bytes());
                json.push(b'"');
            }
            Some(name) => {
                json.extend_from_slice(serde_json::Value::from(name).to_string().as_bytes())
            }
        }
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
    }
}

/// The body for the decision of one policy.
pub(crate) fn of_one(policy: &str, decision: &Decision) -> Vec<u8> {
    let line = DecisionBody::new(policy, decision);
    to_json(&line, [line].into_iter())
}

/// The body for an answer.
pub(crate) fn of_answer(answer: &Answer<'_>) -> Vec<u8> {
    let decisions = answer.lines.iter().map(|line| DecisionBody::new(line.policy, &line.decision));
    let leading = match answer.leading() {
        // A policy in shadow mode may deny; the request passes all the same.
        Some(line) if answer.allowed() => DecisionBody {
            allowed: true,
            retry_after_ms: 0,
            ..DecisionBody::new(line.policy, &line.decision)
        },
        Some(line) => {
            DecisionBody { allowed: false, ..DecisionBody::new(line.policy, &line.decision) }
        }
        None => DecisionBody {
            allowed: true,
            policy: None,
            limit: 0,
            remaining: 0,
            retry_after_ms: 0,
            reset_after_ms: 0,
            delay_ms: 0,
            source: "store",
        },
    };
    to_json(&leading, decisions)
}

/// A [`Body`]. By hand: this is most of the work of an answer, and serde takes several times as
/// long.
fn to_json<'a>(
    leading: &DecisionBody<'a>,
    decisions: impl ExactSizeIterator<Item = DecisionBody<'a>>,
) -> Vec<u8> {
    let mut json = Vec::with_capacity(256 * (1 + decisions.len()));
    json.push(b'{');
    leading.push_json(&mut json);
    let fields = 1..json.len();
    json.extend_from_slice(b",\"decisions\":[");
    for (number, decision) in decisions.enumerate() {
        json.extend_from_slice(if number == 0 { b"{" } else { b",{" });
        // Nearly always there is one decision, and it leads.
        if decision == *leading {
            json.extend_from_within(fields.clone());
        } else {
            decision.push_json(&mut json);
        }
        json.push(b'}');
    }
    json.extend_from_slice(b"]}");
    json
}

/// Rounded up, never down: who waits this long gets in.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_an_object_and_says_each_thing_once() {
        fn parse(text: &str) -> Result<Object<AskBody<'_>>, String> {
            serde_json::from_str(text).map_err(|error| error.to_string())
        }
        let attributes = parse(
            r#"{"attributes": {"header.X-User": "U", "host": "A.Example.com:8080", "Path": "/"}}"#,
        );
        let attributes = attributes.expect("a question").0.attributes.expect("attributes").0;
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
                "\"header.a\" is there twice",
            ),
            (r#"{"attributes": {"ip": "::1", "ip": "::2"}}"#, "\"ip\" is there twice"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_part_of_a_millisecond_is_a_whole_one() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(5)), 5);
        assert_eq!(millis(Duration::from_micros(5_001)), 6);
    }

    #[test]
    fn what_is_written_by_hand_is_json_whatever_the_policys_name() {
        let decision = Decision {
            allowed: false,
            limit: 10,
            remaining: 3,
            retry_after: Duration::from_millis(1_500),
            reset_after: Duration::from_secs(60),
            delay: Duration::ZERO,
            source: tidegate::Source::Local,
        };
        for policy in ["p", "with \"quotes\" and \\", "naïve", "🌊 tide", "\u{7f}"] {
            let json: serde_json::Value =
                serde_json::from_slice(&of_one(policy, &decision)).expect("JSON");
            let line = serde_json::json!({
                "allowed": false, "policy": policy, "limit": 10, "remaining": 3, "retry_after_ms": 1_500,
                "reset_after_ms": 60_000, "delay_ms": 0, "source": "local",
            });
            let mut whole = line.clone();
            whole["decisions"] = serde_json::json!([line]);
            assert_eq!(json, whole);
        }
    }
}
