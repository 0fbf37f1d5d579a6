//! Patterns with `*` and `**`, and the one way to write a path.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Exact text, or text with `*` (anything but a slash) and `**` (anything).
#[derive(Debug, Clone)]
pub(super) enum Pattern {
    Exact(String),
    Wild { parts: Vec<Part>, literal_prefix: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    Star,
    TwoStars,
    /// `/**` at the end: nothing, or a slash and anything.
    Below,
}

impl Pattern {
    pub(super) fn new(attribute: &str, text: &str) -> Self {
        let text = match attribute {
            "path" if text.contains('*') => text.to_owned(),
            "path" => normal_path(text).into_owned(),
            _ => text.to_owned(),
        };
        if !text.contains('*') {
            return Self::Exact(text);
        }
        let (body, below) = match text.strip_suffix("/**") {
            Some(body) if attribute == "path" => (body, true),
            _ => (text.as_str(), false),
        };
        let mut parts = Vec::new();
        let mut rest = body;
        while !rest.is_empty() {
            let (part, used) = if rest.starts_with("**") {
                (Part::TwoStars, 2)
            } else if rest.starts_with('*') {
                (Part::Star, 1)
            } else {
                let end = rest.find('*').unwrap_or(rest.len());
                (Part::Text(rest[..end].to_owned()), end)
            };
            // Two stars that meet again are no more than two stars.
            if !(part == Part::TwoStars && parts.last() == Some(&Part::TwoStars)) {
                parts.push(part);
            }
            rest = &rest[used..];
        }
        if below {
            parts.push(Part::Below);
        }
        let literal = match parts.first() {
            Some(Part::Text(literal)) => literal.as_str(),
            _ => "",
        };
        // Only whole segments: the one that a star is in may go on.
        let whole = if parts.len() == 2 && below {
            literal
        } else {
            &literal[..literal.rfind('/').unwrap_or(0)]
        };
        let literal_prefix = whole.to_owned();
        Self::Wild { parts, literal_prefix }
    }

    pub(super) fn matches(&self, value: &str) -> bool {
        match self {
            Self::Exact(text) => text == value,
            Self::Wild { parts, .. } => parts_match(parts, value),
        }
    }
}

/// Each star takes as little as will do, and more when what follows does not match: only the last
/// star of each kind has to be tried again, so the work is at most the pattern's length times the
/// value's.
fn parts_match(parts: &[Part], value: &str) -> bool {
    let bytes = value.as_bytes();
    // reachable[i]: the parts so far can match the first i bytes.
    let mut reachable = vec![false; bytes.len() + 1];
    reachable[0] = true;
    for part in parts {
        let mut next = vec![false; bytes.len() + 1];
        match part {
            Part::Text(text) => {
                for at in 0..=bytes.len().saturating_sub(text.len()) {
                    if reachable[at] && bytes[at..].starts_with(text.as_bytes()) {
                        next[at + text.len()] = true;
                    }
                }
            }
            Part::Star | Part::TwoStars => {
                let mut open = false;
                for at in 0..=bytes.len() {
                    if at > 0 && *part == Part::Star && bytes[at - 1] == b'/' {
                        open = false;
                    }
                    open |= reachable[at];
                    next[at] = open;
                }
            }
            Part::Below => {
                let ends_here =
                    |at: usize| reachable[at] && (at == bytes.len() || bytes[at] == b'/');
                next[bytes.len()] = (0..=bytes.len()).any(ends_here);
            }
        }
        reachable = next;
    }
    reachable[bytes.len()]
}

/// A path as policies see it: no query, no empty or dot segments, no slash at its end, and no
/// percent-encoding of characters that need none. Otherwise another way to write it would get
/// around a policy.
#[must_use]
pub fn normal_path(path: &str) -> Cow<'_, str> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let plain = path.starts_with('/')
        && !path.contains("//")
        && !path.contains("/.")
        && !path.contains('%')
        && (path.len() == 1 || !path.ends_with('/'));
    if plain {
        return Cow::Borrowed(path);
    }
    let decoded = decode_unreserved(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    Cow::Owned(format!("/{}", segments.join("/")))
}

fn decode_unreserved(path: &str) -> String {
    let mut decoded = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        decoded.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 3).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code.map(char::from) {
            Some(character) if character.is_ascii_alphanumeric() || "-._~".contains(character) => {
                decoded.push(character);
                rest = &rest[at + 3..];
            }
            // The rest is kept, with its digits in one case.
            Some(character) => {
                let _ = write!(decoded, "%{:02X}", u32::from(character));
                rest = &rest[at + 3..];
            }
            None => {
                decoded.push('%');
                rest = &rest[at + 1..];
            }
        }
    }
    decoded.push_str(rest);
    decoded
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_star_stays_within_a_segment_and_two_stars_do_not() {
        let matches = |pattern: &str, path: &str| Pattern::new("path", pattern).matches(path);
        assert!(matches("/a/*/c", "/a/b/c") && !matches("/a/*/c", "/a/b/b/c"));
        assert!(matches("/a/**/c", "/a/b/b/c"));
        assert!(matches("/a/**", "/a") && matches("/a/**", "/a/b/c") && !matches("/a/**", "/ab"));
        assert!(matches("/v*/x", "/v2/x") && !matches("/v*/x", "/w2/x"));
        assert!(matches("/**", "/") && matches("/**", "/x"));
        assert!(matches("**.png", "/a/b.png") && !matches("*.png", "/a/b.png"));
        let host = |pattern: &str, host: &str| Pattern::new("host", pattern).matches(host);
        assert!(host("*.example.com", "a.b.example.com") && !host("*.example.com", "example.com"));
    }

    #[test]
    fn a_path_has_one_way_to_be_written() {
        for (path, normal) in [
            ("/", "/"),
            ("", "/"),
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b"),
            ("//a//b", "/a/b"),
            ("/a/./b/../c", "/a/c"),
            ("/../../a", "/a"),
            ("/%61%2f%2F", "/a%2F%2F"),
            ("/%2e%2E/a", "/a"),
            ("/a%", "/a%"),
            ("/a%zz%4", "/a%zz%4"),
            ("/é?q", "/é"),
        ] {
            assert_eq!(normal_path(path), normal, "{path}");
        }
    }

    proptest! {
        #[test]
        fn a_normal_path_stays_as_it_is(path in "[/.a%2eF?é]{0,30}") {
            let normal = normal_path(&path).into_owned();
            prop_assert_eq!(normal_path(&normal), normal.as_str());
        }

        #[test]
        fn any_pattern_takes_any_value_without_a_panic(pattern in "[*/aé]{0,12}", value in "[/aé]{0,20}") {
            let matches = |attribute| Pattern::new(attribute, &pattern).matches(&value);
            // Without stars it is plain equality.
            if !pattern.contains('*') {
                prop_assert_eq!(matches("x"), pattern == value);
            }
            if pattern == "**" {
                prop_assert!(matches("x"));
            }
            matches("path");
        }
    }
}
