//! [`Redaction`]: which parts of a configuration an error message may show.
//!
//! The decision depends on the position of a line, not on its contents, so it also works for a
//! document that does not parse. A section is a field at the left margin with everything indented
//! below it. Sections are masked unless they are known to hold no secrets; inside an open section,
//! everything under the name of a secret field (which may be indented wrongly) is masked too. While
//! a document does not parse, so are the values of unknown fields, which may hold anything.

use std::collections::BTreeSet;

use schemars::Schema;
use schemars::transform::{RecursiveTransform, Transform as _};

use tidegate::KeySource;

/// Sections of this library, which hold no secrets.
const OPEN_SECTIONS: [&str; 2] = ["attributes", "policies"];

/// Usual names of fields that hold secrets.
const SECRET_FIELDS: [&str; 7] =
    ["auth", "token", "api_token", "admin_token", "secret", "username", "password"];

pub(crate) const MASK: &str = "…";

/// The names in a configuration that error messages may show, besides the sections `attributes` and
/// `policies`.
///
/// Error messages quote the offending line. By default only lines of `attributes` and `policies`
/// are shown, because other sections may hold secrets, such as the password of a store.
///
/// ```
/// use serde::Deserialize;
/// use tidegate_config::yaml::{Document, Redaction};
///
/// #[derive(Debug, Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Server {
///     port: u16,
/// }
///
/// const NAMES: Redaction = Redaction {
///     open_sections: &["port"],
///     secret_fields: &["redis_url"],
///     other_fields: &[],
///     all_fields: || ["port".to_owned()].into(),
/// };
/// let document = Document::new("server.yaml", "port: http\n").with_redaction(&NAMES);
/// let error = document.parse::<Server>().unwrap_err().to_string();
/// assert!(error.contains("port: http"));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Redaction {
    /// Top-level sections without secrets, whose lines are shown. All others are masked, whatever
    /// their name, because a misspelt section can hold a secret too.
    pub open_sections: &'static [&'static str],
    /// Names of fields that hold secrets, in any section.
    pub secret_fields: &'static [&'static str],
    /// Other field names that a masked line may show.
    pub other_fields: &'static [&'static str],
    /// Returns the names of all fields, such as by [`schema_fields`]. Values of other fields are
    /// masked.
    pub all_fields: fn() -> BTreeSet<String>,
}

/// Returns the names of all fields in a JSON Schema.
#[must_use]
pub fn schema_fields(mut schema: Schema) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let add = |schema: &mut Schema| {
        let fields = schema.get("properties").and_then(|fields| fields.as_object());
        names.extend(fields.into_iter().flat_map(|fields| fields.keys().cloned()));
    };
    RecursiveTransform(add).transform(&mut schema);
    names
}

impl Redaction {
    pub(crate) const DEFAULT: Self = Self {
        open_sections: &[],
        secret_fields: &[],
        other_fields: &[],
        all_fields: BTreeSet::new,
    };

    /// Returns whether this line, counted from 0, may hold a secret.
    pub(crate) fn may_be_secret(&self, text: &str, number: usize) -> bool {
        let before: Vec<&str> = lines(text).take(number + 1).collect();
        let Some(line) = before.get(number) else { return true };
        let mut margin = indent(line) + 1;
        for line in before
            .iter()
            .rev()
            .filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
        {
            let at = indent(line);
            if at >= margin {
                continue;
            }
            margin = at;
            if field_names(line).any(|field| self.is_secret_field(field)) {
                return true;
            }
            if !line.starts_with([' ', '\t', '-']) {
                return !field_names(line).next().is_some_and(|section| {
                    self.is_open_section(section) && line.starts_with(section)
                });
            }
            // The items of a list may have the same indentation as the field of the list.
            margin = margin.max(1);
        }
        true
    }

    /// Returns the line with secrets masked.
    pub(crate) fn redacted_line(&self, text: &str, number: usize) -> String {
        let line = lines(text).nth(number).unwrap_or_default();
        if self.may_be_secret(text, number) {
            self.masked_line(line)
        } else {
            // The caller shortens the line: a part of a URL would not be recognized.
            without_userinfo(line)
        }
    }

    /// Returns the line with secrets and the values of unknown fields masked.
    pub(crate) fn line_without_unknown(&self, text: &str, number: usize) -> String {
        let line = lines(text).nth(number).unwrap_or_default();
        let known = (self.all_fields)();
        if self.may_be_secret(text, number) || is_below_unknown(text, number, &known) {
            return self.masked_line(line);
        }
        match unknown_value(line, &known) {
            None => self.redacted_line(text, number),
            Some(start) => without_userinfo(&format!("{} {MASK}", &line[..start])),
        }
    }

    /// Returns whether this line holds the value of an unknown field, or a part of it.
    pub(crate) fn has_unknown(&self, text: &str, number: usize) -> bool {
        let known = (self.all_fields)();
        let line = lines(text).nth(number).unwrap_or_default();
        unknown_value(line, &known).is_some() || is_below_unknown(text, number, &known)
    }

    /// Returns only the field name of the line, if it is a known one.
    fn masked_line(&self, line: &str) -> String {
        let start = indent(line);
        let (margin, rest) = line.split_at_checked(start).unwrap_or(("", line));
        match rest.split_once(':') {
            Some((field, "")) if self.is_known_name(field) => format!("{margin}{field}:"),
            Some((field, _)) if self.is_known_name(field) => format!("{margin}{field}: {MASK}"),
            _ => format!("{margin}{MASK}"),
        }
    }

    /// Returns whether this is a known field name, possibly misspelt.
    pub(crate) fn is_known_name(&self, word: &str) -> bool {
        let sections = OPEN_SECTIONS.iter().chain(self.open_sections);
        let mut names =
            sections.chain(&SECRET_FIELDS).chain(self.secret_fields).chain(self.other_fields);
        names.any(|name| resembles(word, name))
    }

    fn is_secret_field(&self, field: &str) -> bool {
        SECRET_FIELDS.iter().chain(self.secret_fields).any(|name| resembles(field, name))
    }

    fn is_open_section(&self, section: &str) -> bool {
        OPEN_SECTIONS.iter().chain(self.open_sections).any(|name| *name == section)
    }
}

/// Returns the lines as YAML counts them.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // A carriage return ends a line, alone or followed by a line feed.
    text.split('\n').flat_map(|line| line.strip_suffix('\r').unwrap_or(line).split('\r'))
}

/// Returns whether the word is the name or a likely misspelling of it.
pub(crate) fn resembles(word: &str, name: &str) -> bool {
    let length = word.chars().count();
    let looks_like_a_name = (3..=32).contains(&length) && word.chars().all(is_name_char);
    word == name
        || (looks_like_a_name && strsim::damerau_levenshtein(word, name) <= (length / 4).max(1))
}

pub(crate) fn is_name_char(character: char) -> bool {
    character.is_alphanumeric() || "_-.".contains(character)
}

/// Returns the width of the indentation, including the dashes of lists.
fn indent(line: &str) -> usize {
    let mut rest = line.trim_start();
    while let Some(item) = rest.strip_prefix("- ") {
        rest = item.trim_start();
    }
    line.len() - rest.len()
}

/// Returns the words before colons, except for the schemes of URLs.
fn field_names(line: &str) -> impl Iterator<Item = &str> {
    let colons = line.match_indices(':').filter(|(colon, _)| !line[*colon..].starts_with("://"));
    colons.filter_map(|(colon, _)| {
        let word = line[..colon].trim_end().trim_end_matches(['"', '\'']);
        word.rsplit(|character| !is_name_char(character)).next().filter(|word| !word.is_empty())
    })
}

/// Returns the names of the fields of a line, each with the position after its colon.
fn keys(line: &str) -> impl Iterator<Item = (&str, usize)> {
    line.match_indices(':').filter_map(|(colon, _)| {
        let before = line[..colon].trim_end();
        let quote = before.chars().next_back().filter(|last| ['"', '\''].contains(last));
        let is_colon_of_field = line[colon + 1..].chars().next().is_none_or(char::is_whitespace);
        let key = match quote {
            Some(quote) => before[..before.len() - 1].rsplit(quote).next()?,
            None if is_colon_of_field => {
                let start = before.rfind(['{', ',', '[', '"', '\'']).map_or(0, |at| at + 1);
                let key = before[start..].rsplit(": ").next()?.trim_start();
                key.trim_start_matches("- ").trim_start_matches("? ").trim_start()
            }
            None => name_without_space(before, &line[colon + 1..])?,
        };
        Some((key, colon + 1))
    })
}

/// Returns the name of a field whose colon has no space after it, such as `limit:5`.
fn name_without_space<'a>(before: &'a str, after: &str) -> Option<&'a str> {
    let start = before.rfind(['{', ',', '[', '"', '\'']).map_or(0, |at| at + 1);
    let is_quoted = before[..start].ends_with(['"', '\'']);
    let name = before[start..].trim_start().trim_start_matches("- ").trim_start();
    let is_name =
        name.starts_with(|first: char| first.is_alphabetic()) && name.chars().all(is_name_char);
    (is_name && !is_quoted && !after.starts_with("//")).then_some(name)
}

/// Returns the position in a line after the colon of its first unknown field, if that has a value.
fn unknown_value(line: &str, known: &BTreeSet<String>) -> Option<usize> {
    let unknown = keys(line).find(|(key, _)| !is_known(key, known));
    unknown.map(|(_, start)| start).filter(|start| !line[*start..].trim().is_empty())
}

fn is_known(key: &str, known: &BTreeSet<String>) -> bool {
    known.contains(key) || key.parse::<KeySource>().is_ok()
}

/// Returns whether this line, counted from 0, is indented below an unknown field.
fn is_below_unknown(text: &str, number: usize, known: &BTreeSet<String>) -> bool {
    let before: Vec<&str> = lines(text).take(number + 1).collect();
    let Some((line, above)) = before.split_last() else { return false };
    let mut margin = indent(line);
    for line in above.iter().rev().filter(|line| !line.trim().is_empty()) {
        if indent(line) < margin {
            margin = indent(line);
            if keys(line).next().is_some_and(|(key, _)| !is_known(key, known)) {
                return true;
            }
        }
    }
    false
}

/// Masks quoted text.
pub(crate) fn without_quoted(message: &str) -> String {
    let mut redacted = String::with_capacity(message.len());
    let mut quote = None;
    let mut escaped = false;
    for character in message.chars() {
        match quote {
            None => match character {
                '"' | '`' => {
                    quote = Some(character);
                    redacted.push_str(MASK);
                }
                _ => redacted.push(character),
            },
            Some(end) if character == end && !escaped => quote = None,
            Some(_) => {}
        }
        escaped = character == '\\' && !escaped;
    }
    redacted
}

/// Masks the user and password of URLs: `http://…@host`. The placeholder in our own messages stays.
pub(crate) fn without_userinfo(text: &str) -> String {
    const PLACEHOLDER: &str = "[user:password@]";
    text.split(PLACEHOLDER).map(mask_userinfo).collect::<Vec<_>>().join(PLACEHOLDER)
}

fn mask_userinfo(text: &str) -> String {
    let Some(at) = text.rfind('@') else { return text.to_owned() };
    let before = &text[..at];
    // A password may contain any character, so mask from the first URL on, or else from the first
    // word with a colon, or from the quote of a text with a colon.
    let start = before.find("://").map(|scheme| scheme + 3).or_else(|| {
        let is_separator = |c: &char| c.is_whitespace() || "\"'[]{},".contains(*c);
        let is_within_word = |(colon, _): &(usize, &str)| {
            before[colon + 1..].chars().next().is_some_and(|next| !is_separator(&next))
        };
        let word = before.match_indices(':').find(is_within_word).map(|(colon, _)| {
            let mut characters = before[..colon].char_indices().rev();
            let separator = characters.find(|(_, character)| is_separator(character));
            separator.map_or(0, |(at, character)| at + character.len_utf8())
        });
        let quoted = before.rfind(['"', '\'']).map(|quote| quote + 1);
        word.into_iter().chain(quoted.filter(|quoted| before[*quoted..].contains(':'))).min()
    });
    match start {
        Some(start) => format!("{}{MASK}{}", &text[..start], &text[at..]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of a server's configuration.
    const SERVER: Redaction = Redaction {
        open_sections: &["listen", "gateway"],
        secret_fields: &["store", "redis", "sentinel"],
        other_fields: &["tls", "key"],
        all_fields: || ["gateway", "upstreams", "timeout"].map(str::to_owned).into(),
    };

    /// Returns the line that contains `part`, with secrets masked.
    fn line_with(text: &str, part: &str) -> String {
        let number = lines(text).position(|line| line.contains(part)).expect("a line");
        SERVER.redacted_line(text, number)
    }

    #[test]
    fn lines_are_masked_by_their_position() {
        for (text, expected) in [
            ("auth:\n  api_tokn: S3CR3T\n", "  api_tokn: …"),
            ("auth:\n  api-tokn: S3CR3T\n", "  api-tokn: …"),
            ("auth:\n  bearer: S3CR3T\n", "  …"),
            ("auth: S3CR3T\n", "auth: …"),
            ("auth:\n  api_token:\n    - S3CR3T\n", "    - …"),
            ("auth:\n- S3CR3T\n", "- …"),
            ("auth:\n  api_token:\n    S3CR3T: x\n", "    …"),
            ("auth:\n  api_token: a\n  S3CR3T\n", "  …"),
            ("auth:\n  api_token: a\n# a comment\nS3CR3T\n", "…"),
            ("auht:\n  api_token: S3CR3T\n", "  api_token: …"),
            ("api_token: S3CR3T\n", "api_token: …"),
            ("policies: []\nS3CR3T: x\n", "…"),
            ("{policies: [], auth: {api_token: S3CR3T}}\n", "…"),
            ("--- {auth: S3CR3T}\n", "…"),
            ("policies: []\rauth: S3CR3T\r", "auth: …"),
            ("policies: []\r\nauth: S3CR3T\r\n", "auth: …"),
            ("\u{feff}auth: S3CR3T\n", "auth: …"),
            ("store:\n  sentinel:\n    passwrd: S3CR3T\n", "    passwrd: …"),
            ("store:\n  sentinel:\n    pwd: S3CR3T\n", "    …"),
            ("tls:\n  key: |\n    S3CR3T\n", "    …"),
            ("listen:\n  http: a\n  auth: {api_token: S3CR3T}\n", "  auth: …"),
            ("listen:\n  http: a\n  auth:\n    api_token:\n      - S3CR3T\n", "      - …"),
            ("listen: {http: a, 'api_token': S3CR3T}\n", "listen: …"),
            ("gateway:\n  upstreams: ['http://u:S3CR3T@h']\n", "  upstreams: ['http://…@h']"),
            (
                "gateway:\n  upstreams: [http://u:S3CR3T/@,@h, http://i]\n",
                "  upstreams: [http://…@h, http://i]",
            ),
            ("gateway:\n  upstreams: [u:S3CR3T@h]\n", "  upstreams: […@h]"),
            ("gateway:\n  upstreams: ['u:S3CR3T pw@h']\n", "  upstreams: ['…@h']"),
            ("gateway:\n  upstreams: ['u: S3CR3T, pw@h']\n", "  upstreams: ['…@h']"),
            ("gateway:\n  upstreams: [h, 'u:p S3CR3T\" pw@h']\n", "  upstreams: [h, '…@h']"),
            ("gateway:\n  upstreams:\u{a0}u:S3CR3T@h\n", "  upstreams:\u{a0}…@h"),
            ("gateway:\n\u{3000}#\u{3000}u:S3CR3T@h\n", "\u{3000}#\u{3000}…@h"),
        ] {
            assert_eq!(line_with(text, "S3CR3T"), expected, "{text}");
        }
    }

    #[test]
    fn open_sections_are_shown_in_full() {
        for (text, part) in [
            ("policies:\n  - name: a\n    algorithm: token_bucket\n", "token_bucket"),
            ("policies:\n- name: a\n  on_store_failure: password\n", "password"),
            (
                "policies:\n- name: a\n  match: {header.authorization: 'a@b.c', path: /auth}\n",
                "a@b.c",
            ),
            ("auth:\n  api_token: a\npolicies:\n  - {name: redis://h}\n", "name"),
            ("store: {redis: 'redis://h'}\nlisten: {http: localhost}\n", "localhost"),
        ] {
            let line = lines(text).find(|line| line.contains(part)).expect("a line");
            assert_eq!(line_with(text, part), line);
        }
    }

    #[test]
    fn values_of_unknown_fields_are_masked() {
        for (text, expected) in [
            ("gateway:\n  webhook: S3CR3T\n", "  webhook: …"),
            (
                "gateway: {timeout: 1s, webhook: S3CR3T, upstreams: []}\n",
                "gateway: {timeout: 1s, webhook: …",
            ),
            (
                "gateway: {timeout: 1s, \"web hook\":S3CR3T}\n",
                "gateway: {timeout: 1s, \"web hook\": …",
            ),
            ("gateway:\n  web timeout: S3CR3T\n", "  web timeout: …"),
            ("gateway:\n  webhook:\n    - S3CR3T\n", "    - …"),
            ("gateway:\n  webhook:\n    timeout: S3CR3T\n", "    …"),
            ("gateway:\n  webhook:\n  - timeout: S3CR3T\n", "  - …"),
            ("gateway:\n  - webhook: S3CR3T\n", "  - webhook: …"),
            ("gateway:\n  webhook:S3CR3T\n", "  webhook: …"),
            ("gateway: {timeout: 1s, webhook:S3CR3T}\n", "gateway: {timeout: 1s, webhook: …"),
            ("gateway:\n  timeout:S3CR3T\n", "  timeout:S3CR3T"),
            ("gateway:\n  timeout: 'unix:/S3CR3T'\n", "  timeout: 'unix:/S3CR3T'"),
            ("gateway:\n  timeout: unix:/S3CR3T\n", "  timeout: unix:/S3CR3T"),
            ("gateway:\n  timeout: S3CR3T\n", "  timeout: S3CR3T"),
            ("gateway: {header.x: S3CR3T}\n", "gateway: {header.x: S3CR3T}"),
            (
                "gateway: {upstreams: ['http://S3CR3T:80']}\n",
                "gateway: {upstreams: ['http://S3CR3T:80']}",
            ),
        ] {
            let number = lines(text).position(|line| line.contains("S3CR3T")).expect("a line");
            assert_eq!(SERVER.line_without_unknown(text, number), expected, "{text}");
        }
    }

    #[test]
    fn long_lines_are_masked_before_they_are_cut() {
        for length in 0..300 {
            let start = "x".repeat(length);
            let text = format!("gateway:\n  upstreams: ['{start}', 'http://svc:S3CR3T@h', a]\n");
            let line = SERVER.redacted_line(&text, 1);
            assert!(!line.contains("svc") && !line.contains("S3C"), "{line}");
        }
    }

    #[test]
    fn quoted_text_is_masked() {
        assert_eq!(without_quoted(r#""S3\"CR3T" is not a duration"#), "… is not a duration");
        assert_eq!(without_quoted("unknown `S3CR3T`, or \"S3CR3T"), "unknown …, or …");
    }

    #[test]
    fn unknown_sections_are_masked_by_default() {
        for (text, expected) in [
            ("store:\n  redis: S3CR3T\n", "  …"),
            ("listen: S3CR3T\n", "…"),
            ("policies:\n  - auth: {api_token: S3CR3T}\n", "  - auth: …"),
            ("policies:\n  - {name: a, limit: S3CR3T}\n", "  - {name: a, limit: S3CR3T}"),
        ] {
            let number = lines(text).position(|line| line.contains("S3CR3T")).expect("a line");
            assert_eq!(Redaction::DEFAULT.redacted_line(text, number), expected, "{text}");
        }
    }
}
