//! JSON form of the messages of Envoy's rate limit service, by protobuf's mapping.

use anyhow::Context as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

use tidegate_api::DESCRIPTORS;
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// Types of the messages.
#[derive(Clone)]
pub(super) struct JsonMessages {
    request: MessageDescriptor,
    response: MessageDescriptor,
}

impl JsonMessages {
    pub(super) fn new() -> anyhow::Result<Self> {
        let pool = DescriptorPool::decode(DESCRIPTORS)?;
        let message = |name: &str| {
            let full_name = format!("envoy.service.ratelimit.v3.{name}");
            pool.get_message_by_name(&full_name).with_context(|| format!("no {full_name}"))
        };
        Ok(Self { request: message("RateLimitRequest")?, response: message("RateLimitResponse")? })
    }

    /// Parses a request.
    pub(super) fn request(&self, body: &[u8]) -> anyhow::Result<RateLimitRequest> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let message = DynamicMessage::deserialize(self.request.clone(), &mut json)?;
        json.end()?;
        Ok(message.transcode_to()?)
    }

    /// Returns a response as JSON, without the fields that have the default of their type.
    pub(super) fn response(&self, response: &RateLimitResponse) -> anyhow::Result<String> {
        let mut message = DynamicMessage::new(self.response.clone());
        message.transcode_from(response)?;
        Ok(serde_json::to_string(&message)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{
        Code, DescriptorStatus, RateLimit,
    };

    #[test]
    fn requests_are_read_by_protobufs_mapping() {
        let request = |body: &str| JsonMessages::new().expect("types").request(body.as_bytes());
        let camel = r#"{"domain": "d", "hitsAddend": 3, "descriptors": [{"entries": [{"key": "k",
            "value": "v"}], "limit": {"requestsPerUnit": 5, "unit": "HOUR"}, "hitsAddend": "7",
            "isNegativeHits": true}]}"#;
        let snake = camel
            .replace("hitsAddend", "hits_addend")
            .replace("requestsPerUnit\": 5", "requests_per_unit\": \"5\"")
            .replace("isNegativeHits", "is_negative_hits")
            .replace("\"7\"", "7.0")
            .replace("\"HOUR\"", "3");
        let parsed = request(camel).expect("valid");
        assert_eq!(request(&snake).expect("valid"), parsed);
        let descriptor = &parsed.descriptors[0];
        assert_eq!((descriptor.hits_addend, descriptor.is_negative_hits), (Some(7), true));
        assert_eq!(descriptor.limit.expect("a limit").unit, 3);
        // A field that is null has its default.
        let null = r#"{"domain": null, "hitsAddend": null, "descriptors": [{"entries": [{"key": "k",
            "value": null}], "limit": null, "hitsAddend": null}]}"#;
        let absent = request(r#"{"descriptors": [{"entries": [{"key": "k"}]}]}"#).expect("valid");
        assert_eq!(request(null).expect("valid"), absent);
        assert_eq!(
            request(r#"{"descriptors": null}"#).expect("valid"),
            request("{}").expect("valid")
        );
        let unknown_unit = r#"{"descriptors": [{"limit": {"unit": "X"}}]}"#;
        for invalid in ["", "[]", "{} {}", r#"{"unknown": 1}"#, unknown_unit] {
            assert!(request(invalid).is_err(), "{invalid}");
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
        let text = JsonMessages::new().expect("types").response(&message).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Value>(&text).expect("JSON"),
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
