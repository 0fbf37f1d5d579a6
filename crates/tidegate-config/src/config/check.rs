//! All errors of a file: after an error, the correction takes its place, or the part that has it is
//! left out, and the text is checked again. A part is a policy, or another section.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde_saphyr::Spanned;

use super::{Config, raw};
use crate::yaml::ConfigError;

/// Maximum number of errors of a file.
const MAX_ERRORS: usize = 100;
/// Values in place of wrong ones, by field.
const STAND_INS: [(&str, &str); 3] = [("limit", "1"), ("window", "1h"), ("burst", "1")];

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
        let mut corrections: Vec<Correction> = Vec::new();
        loop {
            let found = match Self::parse_in(folder, name, &text, is_offline) {
                Ok(config) if errors.is_empty() => return Ok(config),
                Ok(_) => return Err(errors),
                Err(error) => error,
            };
            let lines: Vec<&str> = text.lines().collect();
            let place = found.position().filter(|(line, _)| *line <= lines.len());
            let correction = place
                .filter(|(line, _)| {
                    let is_here = found.file() == name && errors.len() + 1 < MAX_ERRORS;
                    is_here && !lines[line - 1].contains("${")
                })
                .and_then(|(line, _)| Correction::of(&found, lines[line - 1]));
            let error = Correction::undone(found, &corrections, &errors);
            if let Some(correction) = correction {
                text = correction.applied(&lines);
                corrections.push(correction);
                errors.push(error);
                continue;
            }
            let Some(line) = place.map(|(line, _)| line - 1) else {
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

/// Correction of an error in its line, so that the errors after it are found.
struct Correction {
    line: usize,
    /// Column of the wrong text, from 1, and its number of characters.
    column: usize,
    wrong: usize,
    right: String,
}

impl Correction {
    /// Returns the correction that a message suggests, or the stand-in of its field.
    fn of(error: &ConfigError, text: &str) -> Option<Self> {
        let (line, column) = error.position()?;
        let at: String = text.chars().skip(column - 1).collect();
        let message = error.message();
        let suggested = message.rsplit_once("(did you mean `").and_then(|(before, right)| {
            let wrong = before.split(['`', '"']).nth(1)?;
            let right = right.strip_suffix("`?)").filter(|right| !right.contains(": "))?;
            Some((wrong.to_owned(), right))
        });
        let stand_in = || {
            let (_, right) = STAND_INS.iter().find(|(field, _)| {
                message.strip_prefix(field).is_some_and(|it| it.starts_with(": "))
            })?;
            let end = at.find([',', '}', ']', '#']).unwrap_or(at.len());
            Some((at[..end].trim_end().to_owned(), *right))
        };
        let (wrong, right) = suggested.or_else(stand_in)?;
        // The value of an unknown field may be a secret, which later errors would show under the
        // right name: it stays hidden unless it is a number or a duration.
        let value = at.strip_prefix(&wrong).and_then(|rest| rest.strip_prefix(':'));
        if let Some(value) = value.filter(|_| message.contains("unknown field")) {
            let value = value.split([',', '}', '#']).next().unwrap_or_default().trim();
            let is_plain = value.len() <= 8 && value.chars().all(|c| c.is_ascii_alphanumeric());
            if !is_plain || !value.starts_with(|first: char| first.is_ascii_digit()) {
                return None;
            }
        }
        let is_there = !wrong.is_empty() && wrong != right && at.starts_with(&wrong);
        let wrong = wrong.chars().count();
        is_there.then(|| Self { line, column, wrong, right: right.to_owned() })
    }

    fn applied(&self, lines: &[&str]) -> String {
        let line = lines[self.line - 1];
        let start = line.chars().take(self.column - 1);
        let end = line.chars().skip(self.column - 1 + self.wrong);
        let line: String = start.chain(self.right.chars()).chain(end).collect();
        let mut lines = lines.to_vec();
        lines[self.line - 1] = &line;
        lines.join("\n")
    }

    /// Returns an error of a corrected text as that of the original.
    fn undone(error: ConfigError, corrections: &[Self], errors: &[ConfigError]) -> ConfigError {
        let Some((line, mut column)) = error.position() else { return error };
        for made in corrections.iter().rev().filter(|made| made.line == line) {
            if column > made.column {
                let moved = column + made.wrong;
                column = moved.saturating_sub(made.right.chars().count()).max(made.column);
            }
        }
        let at_line = |other: &&ConfigError| other.position().is_some_and(|(at, _)| at == line);
        error.moved(column, errors.iter().find(at_line))
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
