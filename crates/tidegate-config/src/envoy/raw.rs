//! Files of envoyproxy/ratelimit, as parsed from YAML.

use std::borrow::Cow;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess};
use serde_saphyr::options::DuplicateKeyPolicy;
use serde_saphyr::{Localizer, Location, Spanned, UserMessageFormatter};
use tidegate::{Algorithm, QuotaError};

use super::error::{FileLocation, RulesError, RulesErrorKind};
use super::fields::{self, Fields, Note, NoteKind};
use super::metadata::Metadata;
use super::{Limit, Unit};

/// Content of a file. As in Go, null is equivalent to a missing field.
#[derive(Debug, Default)]
pub(super) struct RawFile {
    pub(super) domain: String,
    pub(super) descriptors: Vec<Spanned<RawDescriptor>>,
    pub(super) notes: Vec<Note>,
}

#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "these are the fields of the file")]
pub(super) struct RawDescriptor {
    pub(super) key: String,
    pub(super) value: String,
    pub(super) rate_limit: Option<Spanned<RawLimit>>,
    pub(super) descriptors: Vec<Spanned<RawDescriptor>>,
    pub(super) shadow_mode: bool,
    pub(super) quota_mode: bool,
    pub(super) detailed_metric: bool,
    pub(super) value_to_metric: bool,
    pub(super) share_threshold: bool,
    pub(super) metadata: Metadata,
    pub(super) notes: Vec<Note>,
}

#[derive(Debug, Default)]
pub(super) struct RawLimit {
    pub(super) unit: Option<Spanned<String>>,
    pub(super) requests_per_unit: Option<u32>,
    pub(super) unit_multiplier: Option<u32>,
    pub(super) unlimited: bool,
    pub(super) name: Option<String>,
    pub(super) replaces: Vec<RawReplaced>,
    /// Fields that are written, also those that are null.
    pub(super) written: Vec<&'static str>,
    pub(super) notes: Vec<Note>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct RawReplaced {
    pub(super) name: String,
    pub(super) notes: Vec<Note>,
}

impl Fields for RawFile {
    const NAMES: &'static [&'static str] = &["domain", "descriptors"];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        match name {
            "domain" => self.domain = map.next_value::<RuleText>()?.0.unwrap_or_default(),
            _ => self.descriptors = map.next_value::<Option<_>>()?.unwrap_or_default(),
        }
        Ok(())
    }

    fn notes(&mut self) -> &mut Vec<Note> {
        &mut self.notes
    }
}

impl Fields for RawDescriptor {
    const NAMES: &'static [&'static str] = &[
        "key",
        "value",
        "rate_limit",
        "descriptors",
        "shadow_mode",
        "quota_mode",
        "detailed_metric",
        "value_to_metric",
        "share_threshold",
        "metadata",
    ];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        match name {
            "key" => self.key = map.next_value::<RuleText>()?.0.unwrap_or_default(),
            "value" => self.value = map.next_value::<RuleText>()?.0.unwrap_or_default(),
            "rate_limit" => {
                let limit: Option<Spanned<RawLimit>> = map.next_value()?;
                self.rate_limit = limit.map(|mut limit| {
                    if let Some(earlier) = self.rate_limit.take() {
                        limit.value.add_missing(earlier.value);
                    }
                    limit
                });
            }
            "descriptors" => self.descriptors = map.next_value::<Option<_>>()?.unwrap_or_default(),
            "shadow_mode" => self.shadow_mode = map.next_value::<RuleFlag>()?.0.unwrap_or_default(),
            "quota_mode" => self.quota_mode = map.next_value::<RuleFlag>()?.0.unwrap_or_default(),
            "detailed_metric" => {
                self.detailed_metric = map.next_value::<RuleFlag>()?.0.unwrap_or_default();
            }
            "value_to_metric" => {
                self.value_to_metric = map.next_value::<RuleFlag>()?.0.unwrap_or_default();
            }
            "share_threshold" => {
                self.share_threshold = map.next_value::<RuleFlag>()?.0.unwrap_or_default();
            }
            _ => self.metadata.0.extend(map.next_value::<Metadata>()?.0),
        }
        Ok(())
    }

    fn notes(&mut self) -> &mut Vec<Note> {
        &mut self.notes
    }
}

impl Fields for RawLimit {
    const NAMES: &'static [&'static str] =
        &["unit", "requests_per_unit", "unit_multiplier", "unlimited", "name", "replaces"];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        self.written.push(name);
        match name {
            "unit" => {
                let Spanned { value, referenced, defined, .. } =
                    map.next_value::<Spanned<RuleText>>()?;
                let unit = value.0.filter(|unit| !unit.is_empty());
                self.unit = unit.map(|unit| Spanned::new(unit, referenced, defined));
            }
            "requests_per_unit" => self.requests_per_unit = map.next_value::<Requests>()?.0,
            "unit_multiplier" => self.unit_multiplier = map.next_value::<Multiplier>()?.0,
            "unlimited" => self.unlimited = map.next_value::<RuleFlag>()?.0.unwrap_or_default(),
            "name" => self.name = map.next_value::<RuleText>()?.0.filter(|name| !name.is_empty()),
            _ => self.replaces = map.next_value::<Option<_>>()?.unwrap_or_default(),
        }
        Ok(())
    }

    fn notes(&mut self) -> &mut Vec<Note> {
        &mut self.notes
    }
}

impl Fields for RawReplaced {
    const NAMES: &'static [&'static str] = &["name"];

    fn read<'de, A: MapAccess<'de>>(
        &mut self,
        _: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        self.name = map.next_value::<RuleText>()?.0.unwrap_or_default();
        Ok(())
    }

    fn notes(&mut self) -> &mut Vec<Note> {
        &mut self.notes
    }
}

macro_rules! deserialize_fields {
    ($($name:ty),*) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                fields::deserialize(deserializer)
            }
        }
    )*};
}

deserialize_fields!(RawFile, RawDescriptor, RawLimit, RawReplaced);

// Far above the needs of real rules, and low enough to bound memory. Aliases multiply the content
// of a file, so the length of a text is bounded, too.
pub(super) const MAX_FILE_BYTES: usize = 16 * 1024 * 1024;
pub(super) const MAX_TEXT_BYTES: usize = 4 * 1024;
pub(super) const MAX_NODES: usize = 1_000_000;
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
            // `Fields` sees all of them.
            duplicate_keys: DuplicateKeyPolicy::LastWins,
            legacy_octal_numbers: true,
            with_snippet: false,
        };
        let mut reader = text.as_bytes();
        let mut documents =
            serde_saphyr::read_with_options::<_, Spanned<Self>>(&mut reader, options);
        let mut parsed = match documents.next() {
            None => Self::default(),
            Some(Ok(document)) => document.value,
            Some(Err(error)) => return Err(yaml_error(file, text, &error)),
        };
        // ratelimit does not parse it, so it may have errors.
        let second = documents.next().map(|document| match document {
            Ok(document) => document.referenced,
            Err(error) => error.location().unwrap_or(Location::UNKNOWN),
        });
        parsed
            .notes
            .extend(second.map(|location| Note { location, kind: NoteKind::SecondDocument }));
        Ok(parsed)
    }
}

fn yaml_error(file: &str, text: &str, error: &serde_saphyr::Error) -> RulesError {
    let location = error.location().unwrap_or(Location::UNKNOWN);
    let message =
        error.render_with_formatter(&UserMessageFormatter.with_localizer(&WithoutLocation));
    let field = field_before(text, location).map(|field| format!("{field}: ")).unwrap_or_default();
    FileLocation { file, location }.error(RulesErrorKind::Yaml { field, message })
}

impl RawLimit {
    /// Takes the fields of an earlier limit that are not written in this one.
    fn add_missing(&mut self, earlier: Self) {
        for name in earlier.written {
            if self.written.contains(&name) {
                continue;
            }
            match name {
                "unit" => self.unit.clone_from(&earlier.unit),
                "requests_per_unit" => self.requests_per_unit = earlier.requests_per_unit,
                "unit_multiplier" => self.unit_multiplier = earlier.unit_multiplier,
                "unlimited" => self.unlimited = earlier.unlimited,
                "name" => self.name.clone_from(&earlier.name),
                _ => self.replaces.clone_from(&earlier.replaces),
            }
        }
        self.notes.extend(earlier.notes);
    }

    /// Returns the limit, or the error of its fields. Notes the parts that are probably mistakes.
    pub(super) fn validate(
        &mut self,
        location: Location,
        algorithm: Algorithm,
    ) -> Result<Limit, Note<RulesErrorKind>> {
        let error = |kind| Note { location, kind };
        let known = self.unit.as_ref().map(|unit| (unit, Unit::named(&unit.value)));
        match (self.unlimited, known) {
            (true, None) => Ok(Limit::Unlimited),
            (true, Some((unit, None))) => {
                let kind = NoteKind::UnitOfUnlimited(unit.value.clone());
                self.notes.push(Note { location: unit.defined, kind });
                Ok(Limit::Unlimited)
            }
            (true, Some((_, Some(unit)))) => Err(error(RulesErrorKind::UnlimitedWithUnit(unit))),
            (false, None) => Err(error(RulesErrorKind::MissingUnit)),
            (false, Some((unit, None))) => {
                let kind = RulesErrorKind::UnknownUnit(unit.value.clone());
                Err(Note { location: unit.referenced, kind })
            }
            (false, Some((_, Some(unit)))) => {
                if self.requests_per_unit.is_none() {
                    self.notes.push(Note { location, kind: NoteKind::MissingRequests });
                }
                let requests = self.requests_per_unit.unwrap_or_default();
                let limit =
                    Limit::new(algorithm, requests, self.unit_multiplier.unwrap_or(1), unit);
                limit.map_err(|quota_error| {
                    let is_window = matches!(quota_error, QuotaError::Window(_));
                    let field =
                        if is_window { "unit and unit_multiplier" } else { "requests_per_unit" };
                    error(RulesErrorKind::Quota { field, error: quota_error })
                })
            }
        }
    }
}

/// Text of at most [`MAX_TEXT_BYTES`].
struct RuleText(Option<String>);

impl<'de> Deserialize<'de> for RuleText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text: Option<String> = Option::deserialize(deserializer)?;
        let length = text.as_ref().map_or(0, String::len);
        if length > MAX_TEXT_BYTES {
            return Err(D::Error::custom(format!(
                "has {length} bytes: at most {MAX_TEXT_BYTES} are allowed"
            )));
        }
        Ok(Self(text))
    }
}

struct RuleFlag(Option<bool>);

impl<'de> Deserialize<'de> for RuleFlag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let flag = Option::deserialize(deserializer);
        flag.map(Self).map_err(|_| D::Error::custom("must be true or false"))
    }
}

struct Requests(Option<u32>);

impl<'de> Deserialize<'de> for Requests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Option::deserialize(deserializer)
            .map(Self)
            .map_err(|_| D::Error::custom(format!("must be a whole number from 0 to {}", u32::MAX)))
    }
}

struct Multiplier(Option<u32>);

impl<'de> Deserialize<'de> for Multiplier {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Option::deserialize(deserializer) {
            Ok(multiplier) if multiplier != Some(0) => Ok(Self(multiplier)),
            _ => Err(D::Error::custom(format!("must be a whole number from 1 to {}", u32::MAX))),
        }
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
