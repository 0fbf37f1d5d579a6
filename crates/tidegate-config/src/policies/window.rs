//! [`RawWindow`]: the window of a limit: a duration, or the periods of a calendar.

use std::fmt;

use schemars::JsonSchema;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_saphyr::Spanned;

use tidegate::{Algorithm, Calendar, CalendarError, CalendarUnit, Quota, QuotaError};

use super::policy::parse_name;
use super::schema::anchor_day;
use crate::yaml::{ConfigError, Document, duration, whole};

/// Duration such as 500ms, 60s, 5m, 1h, 30d, or for fixed-window the periods of a calendar.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "Window")]
pub(super) enum RawWindow {
    Duration(#[schemars(with = "String", pattern(duration::PATTERN))] String),
    Calendar(Box<RawCalendar>),
}

/// Periods of a calendar in a time zone.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Calendar")]
pub(super) struct RawCalendar {
    /// day, week, month, quarter or year.
    #[schemars(with = "CalendarUnit")]
    calendar: Spanned<String>,
    /// Name in the IANA database, such as Europe/Berlin; UTC by default.
    #[schemars(with = "Option<String>")]
    timezone: Option<Spanned<String>>,
    /// Day on which periods start: of the month, from 1 (default) to 31, which is the last day in a
    /// shorter month; for weeks a weekday, monday by default; or the attribute that has it.
    #[schemars(with = "Option<RawAnchor>")]
    anchor: Option<Spanned<RawAnchor>>,
}

/// Day on which the periods of a calendar start.
#[derive(Debug, JsonSchema)]
#[schemars(untagged, rename = "Anchor")]
pub(super) enum RawAnchor {
    Day(#[schemars(schema_with = "anchor_day")] String),
    Attribute(AnchorAttribute),
}

#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct AnchorAttribute {
    /// Attribute, named as in `match`.
    #[schemars(with = "String", length(min = 1), extend("not" = {"enum": ["ip", "path"]}))]
    attribute: Spanned<String>,
}

impl RawWindow {
    /// Returns the attribute that has the anchor.
    pub(super) fn anchor_attribute(&self) -> Option<&Spanned<String>> {
        let Self::Calendar(calendar) = self else { return None };
        match &calendar.anchor.as_ref()?.value {
            RawAnchor::Day(_) => None,
            RawAnchor::Attribute(anchor) => Some(&anchor.attribute),
        }
    }

    /// Builds a quota of this window, which is written at `at`.
    pub(super) fn quota(
        &self,
        document: &Document<'_>,
        at: &Spanned<Self>,
        algorithm: Algorithm,
        limit: &Spanned<super::policy::Units>,
    ) -> Result<Quota, ConfigError> {
        let units = limit.value.get();
        let at_window = |error: &str| document.error_at(at, error);
        let (made, note) = match self {
            Self::Duration(text) => {
                let window = duration::parse(text).map_err(|error| at_window(&error))?;
                (Quota::new(algorithm, units, window), duration::sum_note(text))
            }
            Self::Calendar(calendar) => {
                let periods = calendar.periods(document)?;
                (Quota::new_in_calendar(algorithm, units, periods), "")
            }
        };
        made.map_err(|error| match error {
            QuotaError::Window(_) | QuotaError::WindowFraction(_) => {
                at_window(&format!("{error}{note}"))
            }
            QuotaError::NoWindow | QuotaError::NoCalendar(_) => at_window(&error.to_string()),
            _ => document.error_at(limit, &error.to_string()),
        })
    }
}

impl RawCalendar {
    fn periods(&self, document: &Document<'_>) -> Result<Calendar, ConfigError> {
        let unit = parse_name(document, &self.calendar)?;
        let zone = self.timezone.as_ref();
        let calendar = Calendar::new(unit, zone.map_or("UTC", |zone| &zone.value));
        let calendar = calendar.map_err(|error| {
            document.error_at(zone.unwrap_or(&self.calendar), &error.to_string())
        })?;
        let Some(anchor) = &self.anchor else { return Ok(calendar) };
        let anchored = match &anchor.value {
            RawAnchor::Day(day) => calendar.with_anchor(day),
            RawAnchor::Attribute(_) if unit == CalendarUnit::Day => Err(CalendarError::NoAnchor),
            RawAnchor::Attribute(_) => Ok(calendar),
        };
        anchored.map_err(|error| document.error_at(anchor, &error.to_string()))
    }
}

impl<'de> Deserialize<'de> for RawWindow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_map(
            deserializer,
            "a duration such as 60s, or {calendar: month, timezone: Europe/Berlin}",
            Self::Duration,
            |calendar: RawCalendar| Self::Calendar(Box::new(calendar)),
        )
    }
}

impl<'de> Deserialize<'de> for RawAnchor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_map(
            deserializer,
            "a day of the month, a weekday, or {attribute: NAME}",
            Self::Day,
            Self::Attribute,
        )
    }
}

/// Reads a text, which may look like a number, or the fields of a map.
fn text_or_map<'de, D: Deserializer<'de>, M: Deserialize<'de>, T>(
    deserializer: D,
    expected: &'static str,
    of_text: fn(String) -> T,
    of_map: fn(M) -> T,
) -> Result<T, D::Error> {
    struct TextOrMap<M, T>(&'static str, fn(String) -> T, fn(M) -> T);
    impl<'de, M: Deserialize<'de>, T> Visitor<'de> for TextOrMap<M, T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            Ok(self.1(text.to_owned()))
        }

        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }

        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }

        fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
            let found = de::Unexpected::Float(number);
            let number = whole(number).ok_or_else(|| E::invalid_type(found, &self))?;
            self.visit_u64(number)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            M::deserialize(de::value::MapAccessDeserializer::new(map)).map(self.2)
        }
    }
    deserializer.deserialize_any(TextOrMap(expected, of_text, of_map))
}
