//! Environment variables in the values of a configuration: `${NAME}` and `${NAME:-default}`.
//!
//! They are replaced in the parsed values, never in the text of the file, so a value cannot add
//! fields or change their types. Names of fields are not replaced.

use std::borrow::Cow;
use std::env::VarError;
use std::fmt;

use serde::de::{
    self, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor,
};

/// Source of the values of variables.
pub(crate) type Lookup = fn(&str) -> Result<String, VarError>;

/// Returns the value of a variable of this process.
pub(crate) fn environment(name: &str) -> Result<String, VarError> {
    std::env::var(name)
}

/// Replaces the variables of a text. `$${` stands for the characters `${`, and any other `$` for
/// itself.
pub(crate) fn replaced(text: &str, lookup: Lookup) -> Result<Cow<'_, str>, String> {
    if !text.contains("${") {
        return Ok(Cow::Borrowed(text));
    }
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        let (before, from_dollar) = rest.split_at(dollar);
        result.push_str(before);
        if let Some(after) = from_dollar.strip_prefix("$${") {
            result.push_str("${");
            rest = after;
        } else if let Some(after) = from_dollar.strip_prefix("${") {
            let (reference, after) = after.split_once('}').ok_or_else(malformed)?;
            result.push_str(&value(reference, lookup)?);
            rest = after;
        } else {
            result.push('$');
            rest = &from_dollar[1..];
        }
    }
    result.push_str(rest);
    Ok(Cow::Owned(result))
}

/// Returns the value of `NAME` or `NAME:-default`.
fn value(reference: &str, lookup: Lookup) -> Result<String, String> {
    let (name, default) = match reference.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (reference, None),
    };
    let is_name = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && name.chars().all(|character| character.is_ascii_alphanumeric() || character == '_');
    if !is_name || default.is_some_and(|default| default.contains("${")) {
        return Err(malformed());
    }
    match (lookup(name), default) {
        (Ok(value), None) => Ok(value),
        (Ok(value), Some(_)) if !value.is_empty() => Ok(value),
        (Ok(_) | Err(VarError::NotPresent), Some(default)) => Ok(default.to_owned()),
        (Err(VarError::NotPresent), None) => Err(format!(
            "the variable {} is not set: set it, or write a default, such as ${{NAME:-default}}",
            shown(name)
        )),
        (Err(VarError::NotUnicode(_)), _) => {
            Err(format!("the value of the variable {} is not UTF-8", shown(name)))
        }
    }
}

/// Returns whether this is an error of a variable itself, which contains no value.
pub(crate) fn is_error(message: &str) -> bool {
    message.contains("the variable ") || message.contains(&malformed())
}

/// Returns the name for a message. One in capital letters is surely a name; any other is quoted,
/// because it may be a part of a password, and quoted texts of secret fields are masked.
fn shown(name: &str) -> Cow<'_, str> {
    if name.chars().any(|character| character.is_ascii_lowercase()) {
        return Cow::Owned(format!("{name:?}"));
    }
    Cow::Borrowed(name)
}

fn malformed() -> String {
    "after ${ must follow the name of a variable and a }, such as ${NAME} or ${NAME:-default}; \
     write $${ for the characters themselves"
        .to_owned()
}

/// Part of a deserializer that replaces the variables in all texts which pass through it.
pub(crate) struct WithVariables<T> {
    pub(crate) inner: T,
    pub(crate) lookup: Lookup,
    /// Whether the field takes any type. A variable then also stands for a number or a flag.
    takes_any: bool,
}

impl<T> WithVariables<T> {
    pub(crate) fn new(inner: T, lookup: Lookup) -> Self {
        Self { inner, lookup, takes_any: false }
    }

    fn around<U>(&self, inner: U) -> WithVariables<U> {
        WithVariables::new(inner, self.lookup)
    }
}

macro_rules! forward_deserialize {
    ($($name:ident($($argument:ident: $type:ty),*),)*) => {$(
        fn $name<V: Visitor<'de>>(
            self,
            $($argument: $type,)*
            visitor: V,
        ) -> Result<V::Value, D::Error> {
            let visitor = self.around(visitor);
            self.inner.$name($($argument,)* visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for WithVariables<D> {
    type Error = D::Error;

    forward_deserialize! {
        deserialize_bool(), deserialize_char(), deserialize_str(), deserialize_string(),
        deserialize_i8(), deserialize_i16(), deserialize_i32(), deserialize_i64(),
        deserialize_i128(), deserialize_u8(), deserialize_u16(), deserialize_u32(),
        deserialize_u64(), deserialize_u128(), deserialize_f32(), deserialize_f64(),
        deserialize_bytes(), deserialize_byte_buf(), deserialize_option(), deserialize_unit(),
        deserialize_seq(), deserialize_map(),
        deserialize_unit_struct(name: &'static str),
        deserialize_newtype_struct(name: &'static str),
        deserialize_tuple(length: usize),
        deserialize_tuple_struct(name: &'static str, length: usize),
        deserialize_struct(name: &'static str, fields: &'static [&'static str]),
        deserialize_enum(name: &'static str, variants: &'static [&'static str]),
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let visitor = WithVariables { takes_any: true, ..self.around(visitor) };
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_identifier(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! forward_visit {
    ($($name:ident($type:ty),)*) => {$(
        fn $name<E: de::Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$name(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for WithVariables<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<V::Value, E> {
        let value = match replaced(text, self.lookup).map_err(E::custom)? {
            Cow::Borrowed(unchanged) => return self.inner.visit_str(unchanged),
            Cow::Owned(value) => value,
        };
        // A number with leading zeros is a text, because the zeros may matter.
        let number = value.parse::<u64>().ok().filter(|number| number.to_string() == value);
        match (number, value.as_str()) {
            (Some(number), _) if self.takes_any => self.inner.visit_u64(number),
            (None, "true") if self.takes_any => self.inner.visit_bool(true),
            (None, "false") if self.takes_any => self.inner.visit_bool(false),
            _ => self.inner.visit_string(value),
        }
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<V::Value, E> {
        if text.contains("${") { self.visit_str(text) } else { self.inner.visit_borrowed_str(text) }
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<V::Value, E> {
        if text.contains("${") { self.visit_str(&text) } else { self.inner.visit_string(text) }
    }

    forward_visit! {
        visit_bool(bool), visit_i8(i8), visit_i16(i16), visit_i32(i32), visit_i64(i64),
        visit_i128(i128), visit_u8(u8), visit_u16(u16), visit_u32(u32), visit_u64(u64),
        visit_u128(u128), visit_f32(f32), visit_f64(f64), visit_char(char), visit_bytes(&[u8]),
        visit_borrowed_bytes(&'de [u8]), visit_byte_buf(Vec<u8>),
    }

    fn visit_none<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<V::Value, D::Error> {
        let value = self.around(value);
        self.inner.visit_some(value)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, value: D) -> Result<V::Value, D::Error> {
        let value = self.around(value);
        self.inner.visit_newtype_struct(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<V::Value, A::Error> {
        let list = self.around(list);
        self.inner.visit_seq(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        let map = self.around(map);
        self.inner.visit_map(map)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<V::Value, A::Error> {
        let data = self.around(data);
        self.inner.visit_enum(data)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for WithVariables<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.around(deserializer);
        self.inner.deserialize(deserializer)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for WithVariables<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        let seed = self.around(seed);
        self.inner.next_element_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for WithVariables<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.around(seed);
        self.inner.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for WithVariables<A> {
    type Error = A::Error;
    type Variant = WithVariables<A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, Self::Variant), A::Error> {
        let lookup = self.lookup;
        let (value, variant) = self.inner.variant_seed(seed)?;
        Ok((value, WithVariables::new(variant, lookup)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for WithVariables<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.around(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = self.around(visitor);
        self.inner.tuple_variant(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = self.around(visitor);
        self.inner.struct_variant(fields, visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Result<String, VarError> {
        match name {
            "HOST" => Ok("redis.example.com".to_owned()),
            "EMPTY" => Ok(String::new()),
            "NESTED" => Ok("${HOST}".to_owned()),
            _ => Err(VarError::NotPresent),
        }
    }

    #[test]
    fn variables_are_replaced() {
        for (text, expected) in [
            ("", ""),
            ("plain", "plain"),
            ("pa$$word $HOST $", "pa$$word $HOST $"),
            ("${HOST}", "redis.example.com"),
            ("redis://${HOST}:${PORT:-6379}/0", "redis://redis.example.com:6379/0"),
            ("${EMPTY}", ""),
            ("${EMPTY:-default}", "default"),
            ("${HOST:-default}", "redis.example.com"),
            ("${MISSING:-}", ""),
            ("${MISSING:-a:-b $c}", "a:-b $c"),
            ("$${HOST}", "${HOST}"),
            ("$$${HOST}", "$${HOST}"),
            ("${NESTED}", "${HOST}"),
            ("é${HOST}é", "éredis.example.comé"),
        ] {
            assert_eq!(replaced(text, lookup).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn errors_name_the_variable() {
        for (text, expected) in [
            ("${MISSING}", "the variable MISSING is not set"),
            ("${missing}", "the variable \"missing\" is not set"),
            ("${HOST", "after ${ must follow"),
            ("${}", "after ${ must follow"),
            ("${A B}", "after ${ must follow"),
            ("${1A}", "after ${ must follow"),
            ("${A:-${B}}", "after ${ must follow"),
            ("${HOST:?message}", "after ${ must follow"),
        ] {
            let error = replaced(text, lookup).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
