//! Files of envoyproxy/ratelimit, as parsed from YAML.

use std::borrow::Cow;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny};
use serde_saphyr::{Localizer, Location, Spanned, UserMessageFormatter};
use tidegate::{Algorithm, QuotaError};

use super::{FileLocation, Limit, RulesError, RulesErrorKind, Unit};

/// Content of a file. As in Go, null is equivalent to a missing field.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawFile {
    #[serde(default, deserialize_with = "text")]
    pub(super) domain: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) descriptors: Vec<Spanned<RawDescriptor>>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "these are the fields of the file")]
pub(super) struct RawDescriptor {
    #[serde(default, deserialize_with = "text")]
    pub(super) key: String,
    #[serde(default, deserialize_with = "text")]
    pub(super) value: String,
    pub(super) rate_limit: Option<Spanned<RawLimit>>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) descriptors: Vec<Spanned<RawDescriptor>>,
    #[serde(default, deserialize_with = "flag")]
    pub(super) shadow_mode: bool,
    #[serde(default, deserialize_with = "flag")]
    pub(super) quota_mode: bool,
    #[serde(default, deserialize_with = "flag")]
    pub(super) detailed_metric: bool,
    #[serde(default, deserialize_with = "flag")]
    pub(super) value_to_metric: bool,
    #[serde(default, deserialize_with = "flag")]
    pub(super) share_threshold: bool,
    /// Dynamic metadata for Envoy, which is not supported. ratelimit sends it only on request.
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLimit {
    #[serde(default, deserialize_with = "unit")]
    pub(super) unit: Option<Unit>,
    #[serde(default, deserialize_with = "requests")]
    pub(super) requests_per_unit: Option<u32>,
    #[serde(default, deserialize_with = "multiplier")]
    pub(super) unit_multiplier: Option<u32>,
    #[serde(default, deserialize_with = "flag")]
    pub(super) unlimited: bool,
    #[serde(default, deserialize_with = "text")]
    pub(super) name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) replaces: Vec<RawReplaced>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawReplaced {
    #[serde(default, deserialize_with = "text")]
    pub(super) name: String,
}

// Far above the needs of real rules, and low enough to bound memory. Aliases multiply the content
// of a file, so the length of a text is bounded, too.
pub(super) const MAX_FILE_BYTES: usize = 16 * 1024 * 1024;
pub(super) const MAX_TEXT_BYTES: usize = 4 * 1024;
const MAX_NODES: usize = 1_000_000;
const MAX_EVENTS_FROM_ALIASES: usize = 50_000;
/// Maximum depth of nested lists and maps. A level of descriptors has one of each.
const MAX_DEPTH: usize = 64;

impl RawFile {
    /// Parses the text of a file.
    pub(super) fn parse(file: &str, text: &str) -> Result<Self, RulesError> {
        if text.len() > MAX_FILE_BYTES {
            return Err(FileLocation { file, location: Location::UNKNOWN }
                .error(RulesErrorKind::TooLarge(text.len())));
        }
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_depth: MAX_DEPTH,
                max_nodes: MAX_NODES,
                max_events: 2 * MAX_NODES,
                // Aliases are meant for this: a thousand rules may repeat one limit.
                enforce_alias_anchor_ratio: false,
            },
            alias_limits: serde_saphyr::alias_limits! {
                max_total_replayed_events: MAX_EVENTS_FROM_ALIASES
            },
            legacy_octal_numbers: true,
            with_snippet: false,
        };
        serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            let location = error.location().unwrap_or(Location::UNKNOWN);
            let message =
                error.render_with_formatter(&UserMessageFormatter.with_localizer(&WithoutLocation));
            let field =
                field_before(text, location).map(|field| format!("{field}: ")).unwrap_or_default();
            FileLocation { file, location }.error(RulesErrorKind::Yaml { field, message })
        })
    }
}

impl RawLimit {
    /// Returns the limit, or the error of its fields.
    pub(super) fn validate(&self, algorithm: Algorithm) -> Result<Limit, RulesErrorKind> {
        match (self.unlimited, self.unit) {
            (true, None) => Ok(Limit::Unlimited),
            (true, Some(unit)) => Err(RulesErrorKind::UnlimitedWithUnit(unit)),
            (false, None) => Err(RulesErrorKind::MissingUnit),
            (false, Some(unit)) => {
                let requests = self.requests_per_unit.ok_or(RulesErrorKind::MissingRequests)?;
                let limit =
                    Limit::new(algorithm, requests, self.unit_multiplier.unwrap_or(1), unit);
                limit.map_err(|error| {
                    let is_window = matches!(error, QuotaError::Window(_));
                    let field =
                        if is_window { "unit and unit_multiplier" } else { "requests_per_unit" };
                    RulesErrorKind::Quota { field, error }
                })
            }
        }
    }
}

fn or_default<'de, T: Deserialize<'de> + Default, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    or_default(deserializer).map_err(|_| D::Error::custom("must be true or false"))
}

fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text: String = or_default(deserializer)?;
    if text.len() > MAX_TEXT_BYTES {
        return Err(D::Error::custom(format!(
            "has {} bytes: at most {MAX_TEXT_BYTES} are allowed",
            text.len()
        )));
    }
    Ok(text)
}

fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Unit>, D::Error> {
    let name = text(deserializer)?;
    let found = Unit::ALL.into_iter().find(|unit| unit.as_str().eq_ignore_ascii_case(&name));
    match found {
        None if !name.is_empty() => Err(D::Error::custom(format!(
            "{name:?} is not a unit: it must be one of {}",
            Unit::names()
        ))),
        found => Ok(found),
    }
}

fn requests<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Option::deserialize(deserializer)
        .map_err(|_| D::Error::custom(format!("must be a whole number from 0 to {}", u32::MAX)))
}

fn multiplier<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::deserialize(deserializer) {
        Ok(multiplier) if multiplier != Some(0) => Ok(multiplier),
        _ => Err(D::Error::custom(format!("must be a whole number from 1 to {}", u32::MAX))),
    }
}

/// Returns the name of the field whose value is at a location.
fn field_before(text: &str, location: Location) -> Option<&str> {
    let line = text.lines().nth(usize::try_from(location.line().checked_sub(1)?).ok()?)?;
    let column = usize::try_from(location.column().checked_sub(1)?).ok()?;
    let (start, _) = line.char_indices().nth(column)?;
    let before = line[..start].trim_end().strip_suffix(':')?;
    before.rsplit(|character: char| !(character.is_ascii_lowercase() || character == '_')).next()
}

/// Omits the location from the message, because [`FileLocation::error`] puts it in front.
struct WithoutLocation;

impl Localizer for WithoutLocation {
    fn attach_location<'a>(&self, message: Cow<'a, str>, _: Location) -> Cow<'a, str> {
        message
    }
}
