//! All errors of a file: after an error, the part that has it is left out, and the rest is checked
//! again. A part is a policy, or another section.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde_saphyr::Spanned;

use super::{Config, raw};
use crate::yaml::ConfigError;

/// Maximum number of errors of a file.
const MAX_ERRORS: usize = 100;

impl Config {
    /// Validates a text, whose files are relative to `folder`, and returns all of its errors. With
    /// `is_offline`, it does not read certificates and files with tokens and passwords, and leaves
    /// out parts with variables that are not set.
    pub fn check(
        folder: &Path,
        name: &str,
        text: &str,
        is_offline: bool,
    ) -> Result<Self, Vec<ConfigError>> {
        let mut text = text.to_owned();
        let mut errors = Vec::new();
        let mut has_unknown_field = BTreeSet::new();
        loop {
            let error = match Self::parse_in(folder, name, &text, is_offline) {
                Ok(config) if errors.is_empty() => return Ok(config),
                Ok(_) => return Err(errors),
                Err(error) => error,
            };
            let lines: Vec<&str> = text.lines().collect();
            let place = error.position().map(|(line, _)| line - 1);
            let Some(line) = place.filter(|line| *line < lines.len()) else {
                // After the first error, it may be about a part that was left out.
                if errors.is_empty() {
                    errors.push(error);
                }
                return Err(errors);
            };
            let part = Part::around(&lines, line);
            let is_unknown = error.message().contains("unknown field");
            let is_missing_variable = is_offline && lines[line].contains("${");
            let mut left_out = part.lines.clone();
            if is_unknown && line > part.lines.start && has_own_line(lines[line], &error) {
                has_unknown_field.insert(part.lines.start);
                left_out = field_at(&lines, line, part.lines.end);
            }
            // Another error may follow from the fields that were left out.
            if !is_missing_variable
                && (is_unknown || !has_unknown_field.contains(&part.lines.start))
            {
                errors.push(error);
            }
            // The value of an anchor is used elsewhere.
            let is_over = lines[left_out.clone()].iter().any(|line| line.contains('&'));
            if (is_over && !errors.is_empty()) || errors.len() == MAX_ERRORS {
                return Err(errors);
            }
            let stand_in = part.stand_in.filter(|_| left_out == part.lines);
            let mut kept: Vec<&str> = lines.clone();
            kept[left_out.clone()].fill("");
            kept[left_out.start] = stand_in.as_deref().unwrap_or_default();
            let rest = kept.join("\n");
            if rest == text {
                return Err(errors);
            }
            text = rest;
        }
    }
}

/// Lines of a policy or of another section.
struct Part {
    lines: Range<usize>,
    /// Valid policy in place of one that is left out, because a list of none is no list.
    stand_in: Option<String>,
}

impl Part {
    /// Returns the part around this line.
    fn around(lines: &[&str], line: usize) -> Self {
        let is_header = |line: &&str| line.starts_with(|first: char| !" \t#-".contains(first));
        let start = lines[..=line].iter().rposition(is_header).unwrap_or_default();
        let after = lines[line + 1..].iter().position(is_header);
        let end = after.map_or(lines.len(), |after| line + 1 + after);
        let section = Self { lines: start..end, stand_in: None };
        let item = |line: &&str| line.trim_start().starts_with("- ");
        let first = lines[start..end].iter().find(|line| item(line));
        let (true, Some(first)) = (lines[start].starts_with("policies:"), first) else {
            return section;
        };
        let indent = indent_of(first);
        let starts = |line: &&str| item(line) && indent_of(line) == indent;
        let Some(own) = lines[start..=line].iter().rposition(starts) else { return section };
        let own = start + own;
        let next = lines[own + 1..end].iter().position(starts);
        let spaces = " ".repeat(indent);
        Self {
            lines: own..next.map_or(end, |next| own + 1 + next),
            stand_in: Some(format!("{spaces}- {{name: left-out-{own}, limit: 1, window: 1s}}")),
        }
    }
}

fn indent_of(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Returns whether the field that an error is about starts its line.
fn has_own_line(line: &str, error: &ConfigError) -> bool {
    error.position().is_some_and(|(_, column)| column == indent_of(line) + 1)
}

/// Returns the lines of the field that starts in this line.
fn field_at(lines: &[&str], line: usize, end: usize) -> Range<usize> {
    let indent = indent_of(lines[line]);
    let is_inside = |line: &&str| line.trim().is_empty() || indent_of(line) > indent;
    let inside = lines[line + 1..end].iter().take_while(|line| is_inside(line)).count();
    line..line + 1 + inside
}

/// Removes the files of a configuration that another machine may not have.
pub(super) fn without_files(raw: &mut raw::RawConfig) {
    let inline = |file: &mut Option<Spanned<String>>| {
        file.take().map(|Spanned { value, referenced, defined }| Spanned {
            value: Some(format!("the content of {value}")),
            referenced,
            defined,
        })
    };
    let auth = &mut raw.auth;
    let of_tokens = auth.tokens.iter_mut().map(|raw| (&mut raw.token, &mut raw.token_file));
    let short_forms = [
        (&mut auth.api_token, &mut auth.api_token_file),
        (&mut auth.admin_token, &mut auth.admin_token_file),
    ];
    for (token, file) in short_forms.into_iter().chain(of_tokens) {
        if token.is_none() {
            *token = inline(file);
        }
    }
    if let Some(sentinel) = &mut raw.store.sentinel {
        let sentinel = &mut sentinel.value;
        if sentinel.password.is_none() {
            sentinel.password = inline(&mut sentinel.password_file);
        }
    }
    raw.store.password_file = None;
    raw.store.tls = None;
    raw.gateway.ca = None;
    raw.tls = None;
}
