//! Loads files and messages: converts descriptors into nodes and rules, and merges the files of a
//! domain.

use std::collections::BTreeMap;

use serde_saphyr::{Location, Spanned};
use tidegate::Algorithm;

use super::error::{FileLocation, RulesError, RulesErrorKind, Warnings};
use super::message::RateLimitConfig;
use super::names::{composite, printable};
use super::raw::{RawDescriptor, RawFile, RawLimit};
use super::{Level, Node, Origin, Rule, RuleMode, Rules, Wildcard};

impl Rules {
    /// Loads files, given by name and text. Rules use `algorithm`, unless their name is in
    /// `algorithms`. Files of the same domain are merged; wildcards are tried in the order of the
    /// files.
    pub fn load(
        files: &[(String, String)],
        algorithm: Algorithm,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<Self, RulesError> {
        let parsed = files.iter().map(|(file, text)| RawFile::parse(file, text));
        let parsed = parsed.collect::<Result<Vec<_>, _>>()?;
        let names = files.iter().map(|(file, _)| file.as_str()).collect();
        let rules = Self::build(names, parsed, algorithm, algorithms)?;
        rules.check_algorithm_names(algorithms)?;
        Ok(rules)
    }

    /// Loads the messages of a control plane. A name in `algorithms` that no rule has is no error,
    /// because a later message may have it.
    pub fn from_messages(
        configs: &[RateLimitConfig],
        algorithm: Algorithm,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<Self, RulesError> {
        let raw = configs.iter().map(RateLimitConfig::to_raw).collect::<Result<Vec<_>, _>>()?;
        let names = configs.iter().map(|config| config.name.as_str()).collect();
        Self::build(names, raw, algorithm, algorithms)
    }

    fn build(
        files: Vec<&str>,
        contents: Vec<RawFile>,
        algorithm: Algorithm,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<Self, RulesError> {
        let mut domains: BTreeMap<String, Level> = BTreeMap::new();
        let (rules, warnings) = (Vec::new(), Warnings::default());
        let mut loader = RuleLoader { files, file: 0, algorithm, algorithms, rules, warnings };
        for (index, content) in contents.into_iter().enumerate() {
            loader.file = index;
            let RawFile { domain, descriptors, notes } = content;
            let file = loader.file_name();
            if domain.is_empty() {
                let location = FileLocation { file, location: Location::UNKNOWN };
                return Err(location.error(RulesErrorKind::MissingDomain));
            }
            loader.warnings.add(file, notes);
            let level = domains.entry(domain.clone()).or_default();
            loader.load_level(level, &domain, &[], descriptors)?;
        }
        let RuleLoader { rules, warnings, .. } = loader;
        Ok(Self { domains, all: rules, warnings: warnings.into_list() })
    }

    /// Rejects an algorithm for an unknown rule: its name is misspelt, or the rule was renamed.
    fn check_algorithm_names(
        &self,
        algorithms: &BTreeMap<String, Algorithm>,
    ) -> Result<(), RulesError> {
        let mut names: Vec<&str> =
            self.all.iter().filter_map(|rule| rule.name.as_deref()).collect();
        let Some(name) = algorithms.keys().find(|name| !names.contains(&name.as_str())) else {
            return Ok(());
        };
        names.sort_unstable();
        names.dedup();
        let known = match names.as_slice() {
            [] => "no rule of the files has a rate_limit.name".to_owned(),
            names => format!("the names in the files are {}", names.join(", ")),
        };
        let kind = RulesErrorKind::UnknownRule { name: name.clone(), known };
        Err(RulesError { location: "envoy.algorithms".to_owned(), kind })
    }
}

/// Converts descriptors into nodes and rules.
struct RuleLoader<'a> {
    /// Names of the files or messages.
    files: Vec<&'a str>,
    /// Index of the current file.
    file: usize,
    algorithm: Algorithm,
    algorithms: &'a BTreeMap<String, Algorithm>,
    rules: Vec<Rule>,
    warnings: Warnings,
}

impl<'a> RuleLoader<'a> {
    fn file_name(&self) -> &'a str {
        self.files[self.file]
    }

    fn error(&self, location: Location, kind: RulesErrorKind) -> RulesError {
        FileLocation { file: self.file_name(), location }.error(kind)
    }

    /// Adds descriptors to a level, which may have nodes of earlier files.
    fn load_level(
        &mut self,
        level: &mut Level,
        path: &str,
        keys: &[String],
        descriptors: Vec<Spanned<RawDescriptor>>,
    ) -> Result<(), RulesError> {
        for Spanned { value: mut raw, referenced: location, .. } in descriptors {
            self.warnings.add(self.file_name(), std::mem::take(&mut raw.notes));
            if raw.key.is_empty() {
                return Err(self.error(location, RulesErrorKind::MissingKey));
            }
            let composite = composite(&raw.key, &raw.value);
            let path = format!("{path}.{composite}");
            if let Some(Node { origin, .. }) = level.nodes.get(&composite) {
                let file = self.files[origin.file];
                let first = FileLocation { file, location: origin.location }.to_string();
                let kind = RulesErrorKind::DuplicateDescriptor { path, first };
                return Err(self.error(location, kind));
            }
            match Wildcard::new(&composite) {
                Some(wildcard) => level.wildcards.push(wildcard),
                None if raw.share_threshold => {
                    return Err(self.error(location, RulesErrorKind::NoWildcardToShare));
                }
                None => {}
            }
            let keys: Vec<String> = keys.iter().chain([&raw.key]).cloned().collect();
            let node = self.load_node(&path, &keys, raw, location)?;
            level.nodes.insert(composite, node);
        }
        Ok(())
    }

    fn load_node(
        &mut self,
        path: &str,
        keys: &[String],
        mut raw: RawDescriptor,
        location: Location,
    ) -> Result<Node, RulesError> {
        let mut rule = None;
        if let Some(Spanned { value: limit, referenced: location, .. }) = raw.rate_limit.take() {
            rule = Some(self.rules.len());
            let loaded = self.load_rule(path, keys, &mut raw, limit, location)?;
            self.rules.push(loaded);
        }
        let mut children = Level::default();
        self.load_level(&mut children, path, keys, raw.descriptors)?;
        Ok(Node {
            rule,
            children,
            value_to_metric: raw.value_to_metric,
            share_threshold: raw.share_threshold,
            origin: Origin { file: self.file, location },
        })
    }

    fn load_rule(
        &mut self,
        path: &str,
        keys: &[String],
        raw: &mut RawDescriptor,
        mut limit: RawLimit,
        location: Location,
    ) -> Result<Rule, RulesError> {
        let algorithm = limit
            .name
            .as_ref()
            .and_then(|name| self.algorithms.get(name))
            .copied()
            .unwrap_or(self.algorithm);
        let mut replaces = Vec::new();
        for replaced in std::mem::take(&mut limit.replaces) {
            if replaced.name.is_empty() {
                return Err(self.error(location, RulesErrorKind::MissingReplacedName));
            }
            if limit.name.as_ref() == Some(&replaced.name) {
                let kind = RulesErrorKind::ReplacesItself(replaced.name);
                return Err(self.error(location, kind));
            }
            limit.notes.extend(replaced.notes);
            replaces.push(replaced.name);
        }
        let validated = limit.validate(location, algorithm);
        let validated = validated.map_err(|note| self.error(note.location, note.kind))?;
        self.warnings.add(self.file_name(), limit.notes);
        Ok(Rule {
            path: printable(path),
            name: limit.name,
            keys: keys.to_vec(),
            replaces,
            limit: validated,
            reserve: None,
            mode: match (raw.shadow_mode, raw.quota_mode) {
                (true, _) => RuleMode::Shadow,
                (false, true) => RuleMode::Quota,
                (false, false) => RuleMode::Enforce,
            },
            metadata: std::mem::take(&mut raw.metadata).into_struct(),
            detailed_metric: raw.detailed_metric,
        })
    }
}
