//! Mappings as ratelimit reads them: a field in the wrong place is ignored, and of equal fields the
//! last counts. Both are noted, because they are most likely mistakes.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_saphyr::{Location, Spanned};

use super::raw::{RawDescriptor, RawFile, RawLimit};

/// Mapping with known fields.
pub(super) trait Fields: Default {
    /// Names of its fields.
    const NAMES: &'static [&'static str];

    /// Reads the value of a field, which may have been read before.
    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error>;

    fn notes(&mut self) -> &mut Vec<Note>;
}

/// Note on a part of a file.
#[derive(Debug, Clone)]
pub(super) struct Note<K = NoteKind> {
    pub(super) location: Location,
    pub(super) kind: K,
}

/// Reason why a part is loaded, but perhaps not as its author expects.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum NoteKind {
    #[error("{name} has no effect here: it belongs {place}")]
    Misplaced { name: &'static str, place: &'static str },
    #[error("{name} is written more than once: the last one counts")]
    Repeated { name: &'static str },
    #[error("rate_limit is written more than once: each field counts as it is written last")]
    RepeatedLimit,
    #[error("this document is not loaded: only the first document of a file is")]
    SecondDocument,
    #[error("rate_limit.requests_per_unit is missing and counts as 0: every request is denied")]
    MissingRequests,
    #[error("unit {0:?} has no effect: the limit is unlimited")]
    UnitOfUnlimited(String),
}

/// Fields of the mappings in a file, and where they belong.
const PLACES: [(&str, &[&str]); 3] = [
    ("to a descriptor", RawDescriptor::NAMES),
    ("into rate_limit", RawLimit::NAMES),
    ("at the top of the file", RawFile::NAMES),
];

/// Deserializes a mapping.
pub(super) fn deserialize<'de, T: Fields, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_map(FieldsVisitor(PhantomData))
}

struct FieldsVisitor<T>(PhantomData<T>);

impl<'de, T: Fields> Visitor<'de> for FieldsVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut fields = T::default();
        let mut seen = Vec::with_capacity(T::NAMES.len());
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            if let Some(name) = T::NAMES.iter().find(|name| **name == key.value) {
                fields.read(name, &mut map)?;
                if seen.contains(name) {
                    let kind = match *name {
                        "rate_limit" => NoteKind::RepeatedLimit,
                        name => NoteKind::Repeated { name },
                    };
                    fields.notes().push(Note { location: key.defined, kind });
                }
                seen.push(name);
            } else if let Some((name, place)) = place_of(&key.value) {
                map.next_value::<IgnoredAny>()?;
                let kind = NoteKind::Misplaced { name, place };
                fields.notes().push(Note { location: key.defined, kind });
            } else {
                return Err(A::Error::unknown_field(&key.value, T::NAMES));
            }
        }
        Ok(fields)
    }
}

fn place_of(name: &str) -> Option<(&'static str, &'static str)> {
    PLACES
        .iter()
        .find_map(|(place, names)| Some((*names.iter().find(|known| **known == name)?, *place)))
}
