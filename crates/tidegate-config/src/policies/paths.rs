//! The section `paths`: how the paths of requests are read.

use schemars::JsonSchema;
use serde_saphyr::Spanned;

use super::policy::parse_name;
use crate::yaml::{Bounded, ConfigError, Document, Flag};
use tidegate::{PathRules, PathSpelling};

/// Spellings of a path that mean the same path to the application behind.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Paths")]
pub struct RawPaths {
    /// Whether `/Login` and `/login` are the same path; false by default.
    case_insensitive: Flag,
    /// `%2F`, `%5C` and backslashes: reject (default) the request, decode them to slashes, or keep
    /// them as they are.
    #[schemars(with = "Option<PathSpelling>")]
    encoded_slashes: Option<Spanned<String>>,
    /// Parameters such as `;jsessionid=7`: reject (default) the request, decode it by leaving them
    /// out, or keep them as they are.
    #[schemars(with = "Option<PathSpelling>")]
    parameters: Option<Spanned<String>>,
    /// Whether `/a//b` and `/a/b` are the same path; true by default.
    merge_slashes: Option<Flag>,
    /// Length of the longest path, in bytes; 16384 by default. A request with a longer one gets
    /// 414.
    max_bytes: Option<Bounded<1, 65_536>>,
}

impl RawPaths {
    pub(crate) fn validate(&self, document: &Document<'_>) -> Result<PathRules, ConfigError> {
        let spelling = |name: &Option<Spanned<String>>| match name {
            Some(name) => parse_name(document, name),
            None => Ok(PathSpelling::default()),
        };
        let mut rules = PathRules::default();
        if let Some(max_bytes) = self.max_bytes {
            rules = rules.with_max_bytes(usize::try_from(max_bytes.get()).unwrap_or(usize::MAX));
        }
        Ok(rules
            .with_case_insensitive(self.case_insensitive.get())
            .with_encoded_slashes(spelling(&self.encoded_slashes)?)
            .with_parameters(spelling(&self.parameters)?)
            .with_merge_slashes(self.merge_slashes.is_none_or(Flag::get)))
    }
}
