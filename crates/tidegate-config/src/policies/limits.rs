//! [`RawLimits`]: limits by the value of an attribute, such as plans.

use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_saphyr::Spanned;

use super::policy::Units;

/// `{attribute: header.x-plan, free: 100, pro: 1000, other: 60}`.
#[derive(Debug)]
pub(super) struct RawLimits {
    pub(super) attribute: Spanned<String>,
    pub(super) values: Vec<(Spanned<String>, Spanned<Units>)>,
    /// For a missing value, and for any other.
    pub(super) other: Spanned<Units>,
}

impl<'de> Deserialize<'de> for RawLimits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LimitsVisitor;
        impl<'de> Visitor<'de> for LimitsVisitor {
            type Value = RawLimits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("limits: {attribute: header.x-plan, pro: 1000, other: 60}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawLimits, A::Error> {
                let (mut attribute, mut other, mut values) = (None, None, Vec::new());
                while let Some(name) = map.next_key::<Spanned<String>>()? {
                    match name.value.as_str() {
                        "attribute" => attribute = Some(map.next_value()?),
                        "other" => other = Some(map.next_value()?),
                        _ => values.push((name, map.next_value()?)),
                    }
                }
                let attribute = attribute.ok_or_else(|| de::Error::missing_field("attribute"))?;
                let other = other.ok_or_else(|| de::Error::missing_field("other"))?;
                Ok(RawLimits { attribute, values, other })
            }
        }
        deserializer.deserialize_map(LimitsVisitor)
    }
}

impl JsonSchema for RawLimits {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Limits".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let units = generator.subschema_for::<Units>();
        json_schema!({
            "description": "Limits by the value of an attribute: {attribute: header.x-plan, \
                            pro: 1000, other: 60}",
            "type": "object",
            "properties": {
                "attribute": {"type": "string", "minLength": 1, "not": {"enum": ["ip", "path"]}},
                "other": units
            },
            "additionalProperties": units,
            "required": ["attribute", "other"]
        })
    }
}
