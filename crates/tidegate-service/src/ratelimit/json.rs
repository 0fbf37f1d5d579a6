//! JSON form of the messages of Envoy's rate limit service (protobuf's mapping): names in camel case
//! or as in the messages, and 64-bit numbers as texts or numbers.

use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value, json};

use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, rate_limit,
};
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_api::envoy::r#type::v3::RateLimitUnit;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct JsonRequest {
    domain: String,
    descriptors: Vec<JsonDescriptor>,
    #[serde(alias = "hits_addend")]
    hits_addend: u32,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct JsonDescriptor {
    entries: Vec<JsonEntry>,
    limit: Option<JsonLimit>,
    #[serde(alias = "hits_addend", deserialize_with = "wide")]
    hits_addend: Option<u64>,
    #[serde(alias = "is_negative_hits")]
    is_negative_hits: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct JsonEntry {
    key: String,
    value: String,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct JsonLimit {
    #[serde(alias = "requests_per_unit")]
    requests_per_unit: u32,
    #[serde(deserialize_with = "unit")]
    unit: i32,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TextOrNumber {
    Number(u64),
    Text(String),
}

fn wide<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(match Option::deserialize(deserializer)? {
        None => None,
        Some(TextOrNumber::Number(number)) => Some(number),
        Some(TextOrNumber::Text(text)) => Some(text.parse().map_err(de::Error::custom)?),
    })
}

fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    match TextOrNumber::deserialize(deserializer)? {
        TextOrNumber::Number(number) => i32::try_from(number).map_err(de::Error::custom),
        TextOrNumber::Text(name) => RateLimitUnit::from_str_name(&name)
            .map(i32::from)
            .ok_or_else(|| de::Error::custom(format!("{name:?} is not a unit"))),
    }
}

/// Parses a request.
pub(super) fn request(body: &[u8]) -> Result<RateLimitRequest, String> {
    let fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let request =
        JsonRequest::deserialize(Value::Object(fields)).map_err(|error| error.to_string())?;
    let entry = |entry: JsonEntry| Entry { key: entry.key, value: entry.value };
    let limit = |limit: JsonLimit| RateLimitOverride {
        requests_per_unit: limit.requests_per_unit,
        unit: limit.unit,
    };
    let descriptor = |descriptor: JsonDescriptor| RateLimitDescriptor {
        entries: descriptor.entries.into_iter().map(entry).collect(),
        limit: descriptor.limit.map(limit),
        hits_addend: descriptor.hits_addend,
        is_negative_hits: descriptor.is_negative_hits,
    };
    Ok(RateLimitRequest {
        domain: request.domain,
        descriptors: request.descriptors.into_iter().map(descriptor).collect(),
        hits_addend: request.hits_addend,
    })
}

/// Returns a response as JSON.
pub(super) fn response(response: &RateLimitResponse) -> Value {
    let headers = response.response_headers_to_add.iter();
    let headers = headers.map(|header| json!({"key": header.key, "value": header.value}));
    let metadata = response.dynamic_metadata.as_ref();
    without_defaults([
        ("overallCode", code(response.overall_code)),
        ("statuses", response.statuses.iter().map(status).collect()),
        ("responseHeadersToAdd", headers.collect()),
        ("dynamicMetadata", metadata.map_or(Value::Null, |fields| structure(fields.clone()))),
    ])
}

fn status(status: &DescriptorStatus) -> Value {
    let limit = status.current_limit.as_ref().map(|limit| {
        let unit = rate_limit::Unit::try_from(limit.unit).unwrap_or_default();
        let unit = if limit.unit == 0 { "" } else { unit.as_str_name() };
        without_defaults([
            ("name", json!(limit.name)),
            ("requestsPerUnit", json!(limit.requests_per_unit)),
            ("unit", json!(unit)),
        ])
    });
    let reset = status.duration_until_reset.map(|reset| json!(format!("{}s", reset.seconds)));
    without_defaults([
        ("code", code(status.code)),
        ("currentLimit", limit.unwrap_or_default()),
        ("limitRemaining", json!(status.limit_remaining)),
        ("durationUntilReset", reset.unwrap_or_default()),
    ])
}

fn code(code: i32) -> Value {
    json!(Code::try_from(code).unwrap_or_default().as_str_name())
}

/// Returns an object without the fields that have the default of their type.
fn without_defaults<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let is_default = |value: &Value| {
        let empty = [Value::Null, json!(0), json!(""), json!([])];
        empty.contains(value)
    };
    let fields = fields.into_iter().filter(|(_, value)| !is_default(value));
    Value::Object(fields.map(|(name, value)| (name.to_owned(), value)).collect())
}

fn structure(fields: prost_types::Struct) -> Value {
    let fields = fields.fields.into_iter().map(|(name, field)| (name, value(field)));
    Value::Object(fields.collect::<Map<_, _>>())
}

fn value(value_of: prost_types::Value) -> Value {
    use prost_types::value::Kind;

    match value_of.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::NumberValue(number)) => json!(number),
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::BoolValue(flag)) => flag.into(),
        Some(Kind::StructValue(fields)) => structure(fields),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(value).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::RateLimit;

    #[test]
    fn requests_are_read_by_both_names_of_their_fields() {
        let camel = r#"{"domain": "d", "hitsAddend": 3, "descriptors": [{"entries": [{"key": "k",
            "value": "v"}], "limit": {"requestsPerUnit": 5, "unit": "HOUR"}, "hitsAddend": "7",
            "isNegativeHits": true}]}"#;
        let snake = camel
            .replace("hitsAddend", "hits_addend")
            .replace("requestsPerUnit", "requests_per_unit")
            .replace("isNegativeHits", "is_negative_hits")
            .replace("\"7\"", "7")
            .replace("\"HOUR\"", "3");
        let parsed = request(camel.as_bytes()).expect("valid");
        assert_eq!(request(snake.as_bytes()).expect("valid"), parsed);
        let descriptor = &parsed.descriptors[0];
        assert_eq!((descriptor.hits_addend, descriptor.is_negative_hits), (Some(7), true));
        assert_eq!(descriptor.limit.expect("a limit").unit, 3);
        let unknown_unit = r#"{"descriptors": [{"limit": {"unit": "X"}}]}"#;
        for invalid in ["", "[]", r#"{"unknown": 1}"#, unknown_unit] {
            assert!(request(invalid.as_bytes()).is_err(), "{invalid}");
        }
    }

    #[test]
    fn responses_leave_out_defaults() {
        let limited = DescriptorStatus {
            code: Code::OverLimit.into(),
            current_limit: Some(RateLimit { name: String::new(), requests_per_unit: 5, unit: 2 }),
            limit_remaining: 0,
            duration_until_reset: Some(prost_types::Duration { seconds: 35, nanos: 0 }),
        };
        let free = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        let message = RateLimitResponse {
            overall_code: Code::OverLimit.into(),
            statuses: vec![limited, free],
            ..RateLimitResponse::default()
        };
        assert_eq!(
            response(&message),
            json!({"overallCode": "OVER_LIMIT", "statuses": [
                {
                    "code": "OVER_LIMIT",
                    "currentLimit": {"requestsPerUnit": 5, "unit": "MINUTE"},
                    "durationUntilReset": "35s"
                },
                {"code": "OK"}
            ]})
        );
    }
}
