//! [`Condition`]: an attribute of a request and the patterns of which any must match.

use super::key_source::SourceKind;
use super::pattern::Pattern;
use super::select::RequestValues;
use super::{KeySource, PathRules, PolicyError};

/// Attribute that must match any of the patterns.
#[derive(Debug, Clone)]
pub(super) struct Condition {
    pub(super) attribute: KeySource,
    /// Patterns as they were written, to be parsed by other path rules.
    pub(super) texts: Vec<String>,
    pub(super) patterns: Vec<Pattern>,
}

/// How the values of requests are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadRules {
    pub(super) path: PathRules,
    /// Number of bits by which IPv6 addresses count together.
    pub(super) ipv6_prefix: u8,
}

impl Condition {
    pub(super) fn new(
        attribute: KeySource,
        texts: Vec<String>,
        rules: ReadRules,
    ) -> Result<Self, PolicyError> {
        if texts.is_empty() {
            return Err(PolicyError::NoPattern(attribute.to_string()));
        }
        let mut condition = Self { attribute, texts, patterns: Vec::new() };
        condition.parse(rules)?;
        Ok(condition)
    }

    pub(super) fn parse(&mut self, rules: ReadRules) -> Result<(), PolicyError> {
        self.patterns = Pattern::list(&self.attribute, &self.texts, rules)?;
        // Applications answer HEAD by the routes for GET, with the same work.
        let is_method = self.attribute.kind() == SourceKind::Method;
        if is_method && self.patterns.iter().any(|pattern| pattern.matches("GET")) {
            self.patterns.push(Pattern::Exact("HEAD".to_owned()));
        }
        Ok(())
    }

    /// Returns the attribute, and the patterns as they were written.
    pub(super) fn texts(&self) -> (&str, &[String]) {
        (self.attribute.as_str(), &self.texts)
    }

    /// Returns whether a request matches, and whether servers may read another value.
    #[inline]
    pub(super) fn test(&self, request: &RequestValues<'_>) -> (bool, bool) {
        let value = request.get(&self.attribute);
        let matches = |value: &str| self.patterns.iter().any(|pattern| pattern.matches(value));
        let is_match = value.as_deref().is_some_and(matches);
        // Several headers of one name are one list; of several cookies or parameters, the
        // application may read another one.
        let is_list = self.attribute.is_header();
        (is_match, !is_list && request.is_ambiguous(&self.attribute, value.as_deref()))
    }
}
