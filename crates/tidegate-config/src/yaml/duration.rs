//! Human-readable durations: `500ms`, `60s`, `5m`, `1h30m`, `30d`; [`BoundedDuration`]: one within
//! its bounds.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error as _};

/// The units in microseconds, the largest first.
const UNITS: [(&str, u64); 6] = [
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

/// Regular expression of durations. Their bounds are beyond it: it cannot add the parts of `1m 5s`.
pub const PATTERN: &str = r"^\s*(?:[0-9]+(?:d|h|m|s|ms|us)\s*)+$";

/// Parses a duration of one or more numbers with units.
///
/// ```
/// use std::time::Duration;
/// use tidegate_config::duration;
///
/// assert_eq!(duration::parse("1h30m"), Ok(Duration::from_secs(5_400)));
/// assert!(duration::parse("60").is_err());
/// ```
pub fn parse(text: &str) -> Result<Duration, String> {
    let error =
        || format!("{text:?} is not a duration: write it like 500ms, 60s, 5m, 1h30m or 30d");
    let mut rest = text.trim();
    let mut micros = 0_u64;
    if rest.is_empty() {
        return Err(error());
    }
    while !rest.is_empty() {
        let digits = rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len());
        let unit = rest[digits..].find(|character: char| !character.is_ascii_alphabetic());
        let unit_end = unit.map_or(rest.len(), |length| digits + length);
        let number: u64 = rest[..digits].parse().map_err(|_| error())?;
        let (_, size) =
            UNITS.iter().find(|(name, _)| *name == &rest[digits..unit_end]).ok_or_else(error)?;
        let sum = number.checked_mul(*size).and_then(|part| micros.checked_add(part));
        micros = sum.ok_or_else(|| format!("{text:?} is too long"))?;
        rest = rest[unit_end..].trim_start();
    }
    Ok(Duration::from_micros(micros))
}

/// Formats a duration with its two largest units, rounded up, so that a wait is never too short.
///
/// ```
/// use std::time::Duration;
/// use tidegate_config::duration;
///
/// assert_eq!(duration::readable(Duration::from_millis(61_001)), "1m2s");
/// ```
#[must_use]
pub fn readable(duration: Duration) -> String {
    let micros = u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX);
    let Some(largest) = UNITS.iter().position(|(_, size)| micros >= *size) else {
        return "0s".to_owned();
    };
    let precision = UNITS[(largest + 1).min(UNITS.len() - 1)].1;
    let rounded = micros.div_ceil(precision).saturating_mul(precision);
    let mut text = String::new();
    let mut rest = rounded;
    for (name, size) in UNITS {
        if rest >= size {
            let _ = write!(text, "{}{name}", rest / size);
            rest %= size;
        }
    }
    text
}

/// A duration from `MIN` to `MAX` microseconds.
///
/// ```
/// use tidegate_config::yaml::{BoundedDuration, Document};
///
/// type Timeout = BoundedDuration<1_000, 60_000_000>;
/// let timeout: Timeout = Document::new("timeout.yaml", "100ms").parse()?;
/// assert_eq!(timeout.get().as_millis(), 100);
/// let error = Document::new("timeout.yaml", "0s").parse::<Timeout>().unwrap_err();
/// assert_eq!(error.message(), "must be from 1ms to 1m");
/// # Ok::<(), tidegate_config::ConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundedDuration<const MIN: u64, const MAX: u64>(Duration);

impl<const MIN: u64, const MAX: u64> BoundedDuration<MIN, MAX> {
    const BOUNDS: [Duration; 2] = [Duration::from_micros(MIN), Duration::from_micros(MAX)];

    /// Returns the duration.
    #[must_use]
    pub fn get(self) -> Duration {
        self.0
    }
}

impl<'de, const MIN: u64, const MAX: u64> Deserialize<'de> for BoundedDuration<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let duration = parse(&text).map_err(D::Error::custom)?;
        let [min, max] = Self::BOUNDS;
        if !(min..=max).contains(&duration) {
            let (min, max) = (readable(min), readable(max));
            let sum = sum_note(&text);
            return Err(D::Error::custom(format_args!("must be from {min} to {max}{sum}")));
        }
        Ok(Self(duration))
    }
}

/// Returns a note for the range of a duration that has several parts.
pub(crate) fn sum_note(text: &str) -> &'static str {
    let numbers = text.split(|character: char| !character.is_ascii_digit());
    let is_sum = numbers.filter(|number| !number.is_empty()).count() > 1;
    if is_sum { ", all parts together" } else { "" }
}

impl<const MIN: u64, const MAX: u64> JsonSchema for BoundedDuration<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": PATTERN})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units_are_durations() {
        for (text, micros) in [
            ("500ms", 500_000),
            ("60s", 60_000_000),
            ("1h30m", 5_400_000_000),
            (" 1m 5s ", 65_000_000),
            ("30d", 30 * 86_400_000_000),
            ("0s", 0),
            ("1us", 1),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        for text in [
            "", " ", "60", "s", "60 s", "1.5s", "-1s", "1y", "1month", "5minutes", "1s!", "é", "1é",
        ] {
            assert!(parse(text).is_err_and(|error| error.contains("write it like")), "{text}");
        }
        assert!(parse("99999999999999d").is_err_and(|error| error.contains("too long")));
    }

    #[test]
    fn durations_are_rounded_up() {
        for (micros, text) in [
            (0, "0s"),
            (1, "1us"),
            (999, "999us"),
            (1_001, "1ms1us"),
            (60_000_000, "1m"),
            (59_999_001, "1m"),
            (61_001_000, "1m2s"),
            (1_500_000, "1s500ms"),
            (3_599_999_999, "1h"),
            (30 * 86_400_000_000, "30d"),
            (86_400_000_001, "1d1h"),
        ] {
            assert_eq!(readable(Duration::from_micros(micros)), text);
        }
        assert_eq!(readable(Duration::from_nanos(1)), "1us");
    }

    #[test]
    fn readable_durations_are_never_shortened() {
        for shift in 0..63 {
            for odd in [0, 1, 12_345] {
                let duration =
                    Duration::from_micros((1_u64 << shift).saturating_add(odd).min(1 << 62));
                assert!(parse(&readable(duration)).expect("readable") >= duration);
            }
        }
    }
}
