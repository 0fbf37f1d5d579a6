//! [`RawCost`]: the units of a request, as written in a configuration.

use std::fmt;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_saphyr::Spanned;

use tidegate::{AttributeNames, Cost};

use super::policy::{Units, attribute_name};
use super::schema::header_name;
use crate::yaml::{ConfigError, Document, whole};

/// The units of a request, or a reserve that its response settles.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "Cost")]
pub(super) enum RawCost {
    Units(RawUnits),
    Settled(SettledCost),
}

/// A number, or the attribute that has the number.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "Reserve")]
pub(super) enum RawUnits {
    Fixed(#[schemars(with = "Units")] u64),
    Attribute(CostAttribute),
}

#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CostAttribute {
    /// Attribute, named as in `match`.
    #[schemars(with = "String", length(min = 1))]
    attribute: Spanned<String>,
    /// Cost if the attribute is absent or not a whole number; 1 by default.
    default: Option<Units>,
    /// Maximum cost; the limit or burst of the key applies too.
    max: Option<Units>,
}

/// Units that are taken before the request, and settled by its response. Only the gateway and the
/// Tower layer see responses.
#[derive(Debug, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(super) struct SettledCost {
    /// Units to take before the request: a number, or the value of an attribute.
    reserve: RawUnits,
    actual: RawActual,
}

/// Where the response has the units that were used.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RawActual {
    /// Name of the response header. Without it, or if it is not one whole number, the reserve stays
    /// charged.
    #[schemars(schema_with = "header_name")]
    response_header: Spanned<String>,
}

/// All fields of a cost, of which either the first three or the last two belong together.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct CostFields {
    attribute: Option<Spanned<String>>,
    default: Option<Units>,
    max: Option<Units>,
    reserve: Option<RawUnits>,
    actual: Option<RawActual>,
}

impl RawCost {
    /// Builds the cost of a policy with these quotas.
    pub(super) fn to_cost(
        &self,
        document: &Document<'_>,
        attributes: &AttributeNames,
        max_cost: u64,
    ) -> Result<Cost, ConfigError> {
        let (units, field) = match self {
            Self::Units(units) => (units, "cost.attribute"),
            Self::Settled(cost) => (&cost.reserve, "cost.reserve.attribute"),
        };
        Ok(match units {
            RawUnits::Fixed(units) => Cost::Fixed(*units),
            RawUnits::Attribute(cost) => Cost::Attribute {
                name: attribute_name(document, attributes, field, &cost.attribute)?,
                default: cost.default.map_or(1, Units::get),
                max: cost.max.map_or(max_cost, Units::get),
            },
        })
    }

    /// Returns the response header that has the units which were used.
    pub(super) fn settled_by(&self) -> Option<&Spanned<String>> {
        match self {
            Self::Units(_) => None,
            Self::Settled(cost) => Some(&cost.actual.response_header),
        }
    }

    fn of_fields<E: de::Error>(fields: CostFields) -> Result<Self, E> {
        let CostFields { attribute, default, max, reserve, actual } = fields;
        let is_plain = attribute.is_some() || default.is_some() || max.is_some();
        match (reserve, actual) {
            (None, None) => {
                let attribute = attribute.ok_or_else(|| E::missing_field("attribute"))?;
                Ok(Self::Units(RawUnits::Attribute(CostAttribute { attribute, default, max })))
            }
            (Some(_), Some(_)) if is_plain => Err(E::custom(
                "move `attribute`, `default` and `max` into `reserve`: {reserve: {attribute: NAME, \
                 default: 2000}, actual: {response_header: NAME}}",
            )),
            (Some(reserve), Some(actual)) => Ok(Self::Settled(SettledCost { reserve, actual })),
            (Some(_), None) => Err(E::custom(
                "a cost with `reserve` has `actual: {response_header: NAME}`, by which it is settled",
            )),
            (None, Some(_)) => Err(E::custom(
                "a cost with `actual` has `reserve`, the units to take before the request: a whole \
                 number, or {attribute: NAME, default: 2000}",
            )),
        }
    }
}

impl<'de> Deserialize<'de> for RawUnits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match RawCost::deserialize(deserializer)? {
            RawCost::Units(units) => Ok(units),
            RawCost::Settled(_) => Err(de::Error::custom(
                "a reserve is a whole number, or {attribute: NAME, default: 2000}",
            )),
        }
    }
}

impl<'de> Deserialize<'de> for RawCost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CostVisitor;
        impl<'de> Visitor<'de> for CostVisitor {
            type Value = RawCost;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a cost: a whole number, or {attribute: NAME, default: 1, max: 50}")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<RawCost, E> {
                Ok(RawCost::Units(RawUnits::Fixed(units)))
            }

            fn visit_i64<E: de::Error>(self, units: i64) -> Result<RawCost, E> {
                let units = u64::try_from(units).map_err(|_| E::custom("a cost is at least 1"))?;
                self.visit_u64(units)
            }

            fn visit_f64<E: de::Error>(self, units: f64) -> Result<RawCost, E> {
                let found = de::Unexpected::Float(units);
                let units = whole(units).ok_or_else(|| E::invalid_type(found, &self))?;
                self.visit_u64(units)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RawCost, A::Error> {
                let fields = CostFields::deserialize(de::value::MapAccessDeserializer::new(map))?;
                RawCost::of_fields(fields)
            }
        }
        deserializer.deserialize_any(CostVisitor)
    }
}
