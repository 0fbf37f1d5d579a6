//! Dynamic metadata of a response, for filters and access logs of Envoy, in ratelimit's structure:
//! the domain, the descriptors, and the metadata of the rules that allow the request.

use std::collections::BTreeMap;

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use super::plan::DescriptorPlan;
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};

/// Returns the metadata of the response with these statuses.
pub(super) fn of_response(
    request: &RateLimitRequest,
    plans: &[DescriptorPlan<'_>],
    statuses: &[DescriptorStatus],
) -> Struct {
    let descriptors: Vec<Value> = request.descriptors.iter().map(descriptor).collect();
    let mut fields: BTreeMap<String, Value> = BTreeMap::from([
        ("domain".to_owned(), request.domain.clone().into()),
        ("descriptors".to_owned(), descriptors.into()),
    ]);
    if request.hits_addend != 0 {
        fields.insert("hitsAddend".to_owned(), request.hits_addend.into());
    }
    let mut metadata = BTreeMap::new();
    for (plan, status) in plans.iter().zip(statuses) {
        if let DescriptorPlan::Limited(limited) = plan
            && let Some(own) = limited.metadata
            && status.code() != Code::OverLimit
        {
            add_missing(&mut metadata, &own.fields);
        }
    }
    if !metadata.is_empty() {
        fields.insert("metadata".to_owned(), metadata.into());
    }
    Struct { fields }
}

fn descriptor(descriptor: &RateLimitDescriptor) -> Value {
    let entries = descriptor.entries.iter();
    let entries: Vec<Value> =
        entries.map(|entry| format!("{}={}", entry.key, entry.value).into()).collect();
    let mut fields: BTreeMap<String, Value> =
        BTreeMap::from([("entries".to_owned(), entries.into())]);
    if let Some(limit) = &descriptor.limit {
        // Protobuf's text format, which leaves out a number of 0.
        let unit = format!("unit:{}", limit.unit().as_str_name());
        let limit = match limit.requests_per_unit {
            0 => unit,
            requests => format!("requests_per_unit:{requests} {unit}"),
        };
        fields.insert("limit".to_owned(), limit.into());
    }
    if let Some(hits) = descriptor.hits_addend {
        #[expect(clippy::cast_precision_loss, reason = "numbers of protobuf's values are doubles")]
        fields.insert("hitsAddend".to_owned(), (hits as f64).into());
    }
    fields.into()
}

/// Adds the fields that are missing, also inside of structures. Other fields stay as they are.
fn add_missing(fields: &mut BTreeMap<String, Value>, more: &BTreeMap<String, Value>) {
    for (name, value) in more {
        match fields.get_mut(name) {
            None => {
                fields.insert(name.clone(), value.clone());
            }
            Some(Value { kind: Some(Kind::StructValue(inner)) }) => {
                if let Some(Kind::StructValue(more)) = &value.kind {
                    add_missing(&mut inner.fields, &more.fields);
                }
            }
            Some(_) => {}
        }
    }
}
