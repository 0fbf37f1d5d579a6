//! [`ByValue`]: limits, or parts of them, by the value of an attribute.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::json;
use serde_saphyr::Spanned;

use super::policy::Units;

/// `{attribute: header.x-plan, free: 100, pro: 1000, other: 60}`.
#[derive(Debug)]
pub(super) struct ByValue<T> {
    pub(super) attribute: Spanned<String>,
    pub(super) values: Vec<(Spanned<String>, Spanned<T>)>,
    /// For a missing value, and for any other.
    pub(super) other: Spanned<T>,
}

/// Choice by the value of an attribute.
pub(super) trait Choice: JsonSchema {
    const NAME: &'static str;
    const DESCRIPTION: &'static str;
    const EXAMPLE: &'static str;

    /// Returns the choice for other values, if it need not be written.
    fn default_other() -> Option<Self>
    where
        Self: Sized;
}

impl Choice for Units {
    const NAME: &'static str = "Limits";
    const DESCRIPTION: &'static str = "Limits by the value of an attribute";
    const EXAMPLE: &'static str = "limits: {attribute: header.x-plan, pro: 1000, other: 60}";

    fn default_other() -> Option<Self> {
        None
    }
}

/// Part of a limit, such as `80%`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Percent(pub(super) u64);

impl Choice for Percent {
    const NAME: &'static str = "Lanes";
    const DESCRIPTION: &'static str = "Parts of the limit by the value of an attribute";
    const EXAMPLE: &'static str = "lanes: {attribute: header.x-priority, low: 80%, normal: 95%}";

    fn default_other() -> Option<Self> {
        Some(Self(100))
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let number = text.strip_suffix('%').filter(|digits| !digits.starts_with(['0', '+']));
        let percent = number.and_then(|digits| digits.parse().ok());
        let percent = percent.filter(|percent| (1..=100).contains(percent));
        let error =
            || de::Error::custom("must be a part of the limit from 1% to 100%, such as 80%");
        percent.map(Self).ok_or_else(error)
    }
}

impl JsonSchema for Percent {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Percent".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^([1-9][0-9]?|100)%$"})
    }
}

impl<'de, T: Choice + Deserialize<'de>> Deserialize<'de> for ByValue<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ByValueVisitor<T>(PhantomData<T>);
        impl<'de, T: Choice + Deserialize<'de>> Visitor<'de> for ByValueVisitor<T> {
            type Value = ByValue<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXAMPLE)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ByValue<T>, A::Error> {
                let (mut attribute, mut other, mut values) = (None, None, Vec::new());
                while let Some(name) = map.next_key::<Spanned<String>>()? {
                    match name.value.as_str() {
                        "attribute" => attribute = Some(map.next_value::<Spanned<String>>()?),
                        "other" => other = Some(map.next_value()?),
                        _ => values.push((name, map.next_value()?)),
                    }
                }
                let attribute = attribute.ok_or_else(|| de::Error::missing_field("attribute"))?;
                let default = || {
                    let other = T::default_other()?;
                    Some(Spanned::new(other, attribute.referenced, attribute.defined))
                };
                let other = other.or_else(default);
                let other = other.ok_or_else(|| de::Error::missing_field("other"))?;
                Ok(ByValue { attribute, values, other })
            }
        }
        deserializer.deserialize_map(ByValueVisitor(PhantomData))
    }
}

impl<T: Choice> JsonSchema for ByValue<T> {
    fn schema_name() -> Cow<'static, str> {
        T::NAME.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let choice = generator.subschema_for::<T>();
        let required: &[&str] =
            if T::default_other().is_some() { &["attribute"] } else { &["attribute", "other"] };
        json_schema!({
            "description": format!("{}: {{{}", T::DESCRIPTION, T::EXAMPLE.split_once('{').map_or("", |it| it.1)),
            "type": "object",
            "properties": {
                "attribute": {"type": "string", "minLength": 1, "not": {"enum": ["ip", "path"]}},
                "other": choice
            },
            "additionalProperties": choice,
            "required": json!(required)
        })
    }
}
