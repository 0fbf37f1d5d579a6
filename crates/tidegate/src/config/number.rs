//! [`Bounded`]: a number of a configuration within its bounds.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error as _};

/// A whole number from `MIN` to `MAX`.
///
/// ```
/// use tidegate::internals::{Bounded, Document};
///
/// let number: Bounded<1, 100> = Document::new("limit.yaml", "42").parse()?;
/// assert_eq!(number.get(), 42);
/// assert!(Document::new("limit.yaml", "101").parse::<Bounded<1, 100>>().is_err());
/// # Ok::<(), tidegate::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounded<const MIN: u64, const MAX: u64>(u64);

impl<const MIN: u64, const MAX: u64> Bounded<MIN, MAX> {
    /// Returns the number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl<'de, const MIN: u64, const MAX: u64> Deserialize<'de> for Bounded<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number =
            u64::deserialize(deserializer).ok().filter(|number| (MIN..=MAX).contains(number));
        number.map(Self).ok_or_else(|| {
            D::Error::custom(format_args!("must be a whole number from {MIN} to {MAX}"))
        })
    }
}

impl<const MIN: u64, const MAX: u64> JsonSchema for Bounded<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Bounded".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "integer", "minimum": MIN, "maximum": MAX})
    }
}
