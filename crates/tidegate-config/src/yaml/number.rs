//! [`Bounded`]: a number of a configuration within its bounds. [`Ratio`]: a part of a whole.
//! [`Flag`]: true or false.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A whole number from `MIN` to `MAX`.
///
/// ```
/// use tidegate_config::yaml::{Bounded, Document};
///
/// let number: Bounded<1, 100> = Document::new("limit.yaml", "42").parse()?;
/// assert_eq!(number.get(), 42);
/// assert!(Document::new("limit.yaml", "101").parse::<Bounded<1, 100>>().is_err());
/// # Ok::<(), tidegate_config::ConfigError>(())
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
        deserializer.deserialize_any(BoundedVisitor)
    }
}

/// Reads a number. A text is not a number, even if it has digits, as in a JSON Schema.
struct BoundedVisitor<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> BoundedVisitor<MIN, MAX> {
    fn within<E: de::Error>(self, number: Option<u64>) -> Result<Bounded<MIN, MAX>, E> {
        let within = number.filter(|number| (MIN..=MAX).contains(number));
        within.map(Bounded).ok_or_else(|| E::custom(format_args!("must be {self}")))
    }
}

impl<const MIN: u64, const MAX: u64> fmt::Display for BoundedVisitor<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number from {MIN} to {MAX}")
    }
}

impl<'de, const MIN: u64, const MAX: u64> Visitor<'de> for BoundedVisitor<MIN, MAX> {
    type Value = Bounded<MIN, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        self.within(Some(number))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        self.within(number.try_into().ok())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
        self.within(whole(number))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        self.within(None)
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.within(None)
    }

    fn visit_map<A: de::MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.within(None)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        let is_number = text.trim().parse::<u64>().is_ok();
        let hint = if is_number { ", without quotes" } else { "" };
        Err(E::custom(format_args!("must be {self}{hint}")))
    }
}

/// Returns a number such as `1e6` or `5.0` as a whole number. In a JSON Schema they are integers.
pub(crate) fn whole(number: f64) -> Option<u64> {
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    let is_whole = (0.0..=MAX_EXACT).contains(&number) && number.fract() == 0.0;
    if is_whole { format!("{number:.0}").parse().ok() } else { None }
}

/// A number from 0 to 1.
///
/// ```
/// use tidegate_config::yaml::{Document, Ratio};
///
/// let ratio: Ratio = Document::new("ratio.yaml", "0.8").parse()?;
/// assert_eq!(ratio.get(), 0.8);
/// let error = Document::new("ratio.yaml", "80").parse::<Ratio>().unwrap_err();
/// assert_eq!(error.message(), "must be a number from 0 to 1");
/// # Ok::<(), tidegate_config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio(f32);

impl Ratio {
    /// Returns the number.
    #[must_use]
    pub fn get(self) -> f32 {
        self.0
    }
}

impl<'de> Deserialize<'de> for Ratio {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RatioVisitor)
    }
}

/// Reads a number. A text is not a number, even if it has digits, as in a JSON Schema.
struct RatioVisitor;

impl Visitor<'_> for RatioVisitor {
    type Value = Ratio;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number from 0 to 1")
    }

    #[expect(clippy::cast_possible_truncation, reason = "a ratio needs no more digits")]
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Ratio, E> {
        let within = Some(number).filter(|number| (0.0..=1.0).contains(number));
        let ratio = within.map(|number| Ratio(number as f32));
        ratio.ok_or_else(|| E::custom("must be a number from 0 to 1"))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Ratio, E> {
        self.visit_f64(u32::try_from(number).map_or(f64::INFINITY, f64::from))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Ratio, E> {
        self.visit_f64(u32::try_from(number).map_or(f64::INFINITY, f64::from))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Ratio, E> {
        let is_number = text.trim().parse::<f64>().is_ok();
        let hint = if is_number { ", without quotes" } else { "" };
        Err(E::custom(format_args!("must be a number from 0 to 1{hint}")))
    }
}

impl JsonSchema for Ratio {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Ratio".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "number", "minimum": 0, "maximum": 1})
    }
}

/// True or false. Other words, such as `yes`, and quoted texts are errors, as in a JSON Schema.
///
/// ```
/// use tidegate_config::yaml::{Document, Flag};
///
/// let flag: Flag = Document::new("flag.yaml", "true").parse()?;
/// assert!(flag.get());
/// let error = Document::new("flag.yaml", "yes").parse::<Flag>().unwrap_err();
/// assert_eq!(error.message(), "must be true or false (YAML 1.2 has no yes, no, on or off)");
/// # Ok::<(), tidegate_config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flag(bool);

impl Flag {
    /// Creates a flag, for defaults.
    #[must_use]
    pub const fn new(value: bool) -> Self {
        Self(value)
    }

    /// Returns the value.
    #[must_use]
    pub fn get(self) -> bool {
        self.0
    }
}

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FlagVisitor;
        impl Visitor<'_> for FlagVisitor {
            type Value = Flag;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("boolean")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Flag, E> {
                Ok(Flag(value))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Flag, E> {
                let hint = match text.to_ascii_lowercase().as_str() {
                    "yes" | "no" | "on" | "off" | "y" | "n" => {
                        " (YAML 1.2 has no yes, no, on or off)"
                    }
                    "true" | "false" => ", without quotes",
                    _ => "",
                };
                Err(E::custom(format_args!("must be true or false{hint}")))
            }
        }
        deserializer.deserialize_any(FlagVisitor)
    }
}

impl JsonSchema for Flag {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Flag".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "boolean"})
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
