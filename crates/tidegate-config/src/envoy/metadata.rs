//! Metadata of a descriptor, for the response to Envoy.

use std::collections::BTreeMap;
use std::fmt;

use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// Maximum size of the metadata of one descriptor. Each response may carry it.
const MAX_METADATA_BYTES: usize = 16 * 1024;

/// Any mapping.
#[derive(Debug, Default)]
pub(super) struct Metadata(pub(super) BTreeMap<String, Value>);

impl Metadata {
    /// Returns the message, or `None` if there is no metadata.
    pub(super) fn into_struct(self) -> Option<Struct> {
        (!self.0.is_empty()).then_some(Struct { fields: self.0 })
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = match ValueOf::deserialize(deserializer)?.0.kind {
            Some(Kind::StructValue(fields)) => fields,
            Some(Kind::NullValue(_)) => Struct::default(),
            _ => return Err(D::Error::custom("must be a mapping")),
        };
        let size = fields.encoded_len();
        if size > MAX_METADATA_BYTES {
            return Err(D::Error::custom(format!(
                "has {size} bytes: at most {MAX_METADATA_BYTES} are allowed"
            )));
        }
        Ok(Self(fields.fields))
    }
}

/// Value as a protobuf message.
struct ValueOf(Value);

impl From<Kind> for ValueOf {
    fn from(kind: Kind) -> Self {
        Self(Value { kind: Some(kind) })
    }
}

impl<'de> Deserialize<'de> for ValueOf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = ValueOf;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<ValueOf, E> {
        Ok(Kind::NullValue(0).into())
    }

    fn visit_none<E>(self) -> Result<ValueOf, E> {
        Ok(Kind::NullValue(0).into())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<ValueOf, D::Error> {
        ValueOf::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<ValueOf, E> {
        Ok(Kind::BoolValue(value).into())
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of protobuf's values are doubles")]
    fn visit_i64<E>(self, value: i64) -> Result<ValueOf, E> {
        Ok(Kind::NumberValue(value as f64).into())
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of protobuf's values are doubles")]
    fn visit_u64<E>(self, value: u64) -> Result<ValueOf, E> {
        Ok(Kind::NumberValue(value as f64).into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<ValueOf, E> {
        Ok(Kind::NumberValue(value).into())
    }

    fn visit_str<E>(self, value: &str) -> Result<ValueOf, E> {
        Ok(Kind::StringValue(value.to_owned()).into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ValueOf, A::Error> {
        let mut values = Vec::new();
        while let Some(ValueOf(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(Kind::ListValue(ListValue { values }).into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ValueOf, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((name, ValueOf(value))) = map.next_entry::<String, _>()? {
            fields.insert(name, value);
        }
        Ok(Kind::StructValue(Struct { fields }).into())
    }
}
