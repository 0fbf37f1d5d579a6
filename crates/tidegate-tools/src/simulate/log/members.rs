//! [`Members`]: lines whose values have names: JSON, `key=value` pairs (logfmt), and labels (LTSV).

use std::borrow::Cow;
use std::collections::HashMap;

use super::field::{Field, FieldNames};
use super::line::LineParts;
use super::scan::quoted;

const NOT_JSON: &str = "it is not a JSON object";
const NOT_CLOSED: &str = "a quote in it is not closed";
/// Maximum depth of objects and lists.
const MAX_DEPTH: usize = 100;
/// Maximum number of names that are kept, and their length. Others are looked up each time.
const MAX_NAMES: usize = 4_096;
const MAX_NAME_BYTES: usize = 256;

/// Syntax of the names and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    Json,
    /// `key=value key="a text"`
    Logfmt,
    /// `label:value` between tabs.
    Ltsv,
}

/// Scanner of named values. It learns the meaning of each name once.
#[derive(Debug, Clone)]
pub(super) struct Members {
    syntax: Syntax,
    /// Names that the user gave.
    given: FieldNames,
    /// Names in the order of the first lines, their fields, and their places. Lines of a file have
    /// nearly the same names, so the next one is tried before it is looked up.
    known: Vec<(Box<str>, Field)>,
    places: HashMap<Box<str>, usize>,
    next: usize,
    /// Names of the current value and its parents, with dots between them.
    path: String,
    /// Name of a header whose value follows, in a list of objects with `name` and `value`.
    header: String,
}

impl Members {
    pub(super) fn new(syntax: Syntax, given: FieldNames) -> Self {
        Self {
            syntax,
            given,
            known: Vec::new(),
            places: HashMap::new(),
            next: 0,
            path: String::new(),
            header: String::new(),
        }
    }

    /// Reads the values of a line.
    pub(super) fn scan<'l>(
        &mut self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<(), &'static str> {
        self.next = 0;
        self.path.clear();
        let line = line.trim_ascii();
        match self.syntax {
            Syntax::Json => {
                // Some exports are a list with one object per line.
                let line = line.trim_end_matches(',');
                let rest = line.starts_with('{').then(|| self.value(line, 0, parts)).flatten();
                rest.filter(|rest| rest.is_empty()).map(|_| ()).ok_or(NOT_JSON)
            }
            Syntax::Ltsv => {
                for (name, value) in line.split('\t').filter_map(|label| label.split_once(':')) {
                    // Labels have the client as their host.
                    self.add(if name == "host" { "ip" } else { name }, value.into(), parts);
                }
                Ok(())
            }
            Syntax::Logfmt => {
                let mut rest = line;
                while let Some(end) = rest.find([' ', '=']) {
                    let (name, after) = rest.split_at(end);
                    rest = after.trim_ascii_start();
                    let Some(value) = after.strip_prefix('=') else { continue };
                    let (value, after) = match value.strip_prefix('"') {
                        Some(text) => quoted(text).ok_or(NOT_CLOSED)?,
                        None => {
                            let end = value.find(' ').unwrap_or(value.len());
                            (value[..end].into(), &value[end..])
                        }
                    };
                    self.add(name, value, parts);
                    rest = after.trim_ascii_start();
                }
                Ok(())
            }
        }
    }

    /// Returns the names that were read.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(|(name, _)| &**name)
    }

    fn add<'l>(&mut self, name: &str, value: Cow<'l, str>, parts: &mut LineParts<'l, '_>) {
        let is_next = self.known.get(self.next).is_some_and(|(known, _)| **known == *name);
        let place = if is_next { Some(self.next) } else { self.places.get(name).copied() };
        if let Some(place) = place {
            self.next = place + 1;
            parts.add(&self.known[place].1, value);
            return;
        }
        let field = self.given.get(name).unwrap_or_else(|| Field::named(name));
        parts.add(&field, value);
        if self.known.len() < MAX_NAMES && name.len() <= MAX_NAME_BYTES {
            self.next = self.known.len() + 1;
            self.places.insert(name.into(), self.known.len());
            self.known.push((name.into(), field));
        }
    }

    /// Reads a value of JSON at the start of a text, and returns the text after it. The values of a
    /// list have the name of the list.
    fn value<'l>(
        &mut self,
        text: &'l str,
        depth: usize,
        parts: &mut LineParts<'l, '_>,
    ) -> Option<&'l str> {
        let (first, inner) = text.split_at_checked(1)?;
        let close = match first {
            "{" => '}',
            "[" => ']',
            "\"" => {
                let (value, rest) = quoted(inner)?;
                self.add_leaf(value, parts);
                return Some(rest.trim_ascii_start());
            }
            _ => {
                let is_end = |c: char| matches!(c, ',' | '}' | ']') || c.is_ascii_whitespace();
                let (value, rest) = text.split_at(text.find(is_end)?);
                let is_number = value.starts_with(|c: char| c.is_ascii_digit() || c == '-')
                    && value.bytes().all(|it| it.is_ascii_digit() || b"+-.eE".contains(&it));
                if is_number {
                    self.add_leaf(value.into(), parts);
                }
                let is_valid = is_number || ["true", "false", "null"].contains(&value);
                return is_valid.then(|| rest.trim_ascii_start());
            }
        };
        let mut rest = (depth < MAX_DEPTH).then(|| inner.trim_ascii_start())?;
        if let Some(rest) = rest.strip_prefix(close) {
            return Some(rest.trim_ascii_start());
        }
        let parents = self.path.len();
        loop {
            if close == '}' {
                let (name, after) = quoted(rest.strip_prefix('"')?)?;
                rest = after.trim_ascii_start().strip_prefix(':')?.trim_ascii_start();
                if parents > 0 {
                    self.path.push('.');
                }
                self.path.push_str(&name);
            }
            rest = self.value(rest, depth + 1, parts)?;
            self.path.truncate(parents);
            match rest.strip_prefix(',') {
                Some(after) => rest = after.trim_ascii_start(),
                None => return Some(rest.strip_prefix(close)?.trim_ascii_start()),
            }
        }
    }

    /// Adds the value that the path leads to.
    fn add_leaf<'l>(&mut self, value: Cow<'l, str>, parts: &mut LineParts<'l, '_>) {
        let mut path = std::mem::take(&mut self.path);
        if path.ends_with(".headers.name") {
            self.header = value.into_owned();
        } else if let Some(list) = path.strip_suffix(".headers.value") {
            self.add(&format!("{list}.headers.{}", self.header), value, parts);
        } else {
            self.add(&path, value, parts);
        }
        std::mem::swap(&mut self.path, &mut path);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;
    use crate::fuzz;
    use crate::simulate::log::record::Record;

    /// Returns all texts and numbers with their names.
    fn leaves(value: &Value, path: &str, found: &mut Vec<(String, String)>) {
        match value {
            Value::String(text) => found.push((path.to_owned(), text.clone())),
            Value::Number(number) => found.push((path.to_owned(), number.to_string())),
            Value::Array(items) => items.iter().for_each(|item| leaves(item, path, found)),
            Value::Object(members) => {
                for (name, value) in members {
                    let dot = if path.is_empty() { "" } else { "." };
                    leaves(value, &format!("{path}{dot}{name}"), found);
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }

    /// Checks that a line has exactly these values.
    fn check(line: &str, value: &Value) {
        let mut expected = Vec::new();
        leaves(value, "", &mut expected);
        let attribute = |path: &str| (path.to_owned(), Field::Attribute(path.into()));
        let named: Vec<_> = expected.iter().map(|(path, _)| attribute(path)).collect();
        let mut members = Members::new(Syntax::Json, FieldNames(named.clone().into()));
        // The second line is read by the names of the first.
        for _ in 0..2 {
            let mut record = Record::default();
            let mut parts = LineParts::new(&mut record, false);
            members.scan(line, &mut parts).expect(line);
            for (path, _) in &named {
                let of_path = expected.iter().filter(|(other, _)| other.eq_ignore_ascii_case(path));
                let is_kept = |text: &&str| !["", "-", "REDACTED"].contains(text);
                let values = of_path.map(|(_, text)| text.as_str()).filter(is_kept);
                assert!(record.values(path).eq(values), "{path}: {line}");
            }
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let text = "[a-c\"\\\\é\n,:{}-]{0,4}";
        let leaf = prop_oneof![
            text.prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            Just(Value::Null),
            Just(Value::Bool(true)),
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            let members = proptest::collection::btree_map(text, inner.clone(), 0..5);
            let object =
                members.prop_map(|it| Value::Object(it.into_iter().collect::<Map<_, _>>()));
            prop_oneof![proptest::collection::vec(inner, 0..4).prop_map(Value::Array), object]
        })
    }

    proptest! {
        #[test]
        fn json_is_read_as_serde_json_reads_it(value in json(), is_pretty in any::<bool>()) {
            let value = serde_json::json!({ "value": value });
            let pretty = serde_json::to_string_pretty(&value).expect("JSON");
            check(&if is_pretty { pretty } else { value.to_string() }, &value);
        }
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        let scan = |line: &str| {
            let mut record = Record::default();
            let mut parts = LineParts::new(&mut record, false);
            Members::new(Syntax::Json, FieldNames::default()).scan(line, &mut parts)
        };
        for line in ["", "[]", "{", r#"{"ts": 1"#, r#"{"ts": 1} x"#, r#"{"ts": }"#, r#"{"a": [1}}"#]
        {
            assert_eq!(scan(line), Err(NOT_JSON), "{line}");
        }
        let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(scan(&nested(MAX_DEPTH - 1)), Ok(()));
        assert_eq!(scan(&nested(20_000)), Err(NOT_JSON));
    }

    #[test]
    fn fuzz_no_line_panics() {
        let lines = [
            r#"{"ts":1794815048.1,"request":{"uri":"/a?b=\"c\"","headers":{"A":["b","c"]}}}"#,
            r#"{"time":[],"a":{"a":[1,{"b":"}"}]},"method":null,"t":"\u00e9\xff"}"#,
            "time=2026-11-16T07:44:08Z msg=\"a \\\"b\\\"\" method=GET path=/ ip=",
            "time:[16/Nov/2026:07:44:08 +0000]\thost:203.0.113.9\treq:GET / HTTP/1.1",
        ];
        let pieces = ["{", "}", "[", "]", ",", ":", "\"", "\\", "\\u12", "\t", "=", "1e3", "é"];
        fuzz::bytes(&lines, &pieces, |line| {
            let Ok(line) = str::from_utf8(line) else { return };
            for syntax in [Syntax::Json, Syntax::Logfmt, Syntax::Ltsv] {
                let mut record = Record::default();
                let mut parts = LineParts::new(&mut record, false);
                let result = Members::new(syntax, FieldNames::default()).scan(line, &mut parts);
                let is_json = serde_json::from_str::<Map<String, Value>>(line).is_ok();
                assert!(syntax != Syntax::Json || !is_json || result.is_ok(), "{line}");
            }
        });
    }
}
