//! Patterns with `*` and `**`, and the normal form of paths and hosts.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Exact text, or text with `*` (any text without a slash) and `**` (any text).
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
    /// `/**` at the end: nothing, or a slash and any text.
    Subtree,
}

impl Pattern {
    pub(super) fn new(is_path: bool, text: &str) -> Self {
        let text = if is_path && !text.contains('*') {
            normalize_path(text).into_owned()
        } else {
            text.to_owned()
        };
        if !text.contains('*') {
            return Self::Exact(text);
        }
        let (body, below) = match text.strip_suffix("/**") {
            Some(body) if is_path => (body, true),
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
            // `****` is the same as `**`.
            if !(part == Part::TwoStars && parts.last() == Some(&Part::TwoStars)) {
                parts.push(part);
            }
            rest = &rest[used..];
        }
        if below {
            parts.push(Part::Subtree);
        }
        let literal = match parts.first() {
            Some(Part::Text(literal)) => literal.as_str(),
            _ => "",
        };
        // Only whole segments: the segment with a star may continue.
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

/// Matches part by part, with the set of reachable positions instead of backtracking: the work is
/// at most the length of the pattern times that of the value, whatever a client sends.
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
            Part::Subtree => {
                let ends_here =
                    |at: usize| reachable[at] && (at == bytes.len() || bytes[at] == b'/');
                next[bytes.len()] = (0..=bytes.len()).any(ends_here);
            }
        }
        reachable = next;
    }
    reachable[bytes.len()]
}

/// Returns the normal form of a path, which policies match and count by: without query, empty or
/// dot segments, trailing slash, or percent-encoding of characters that need none. Otherwise
/// another spelling would bypass a policy.
///
/// A front door with its own [`Attributes`](crate::Attributes) must normalize `path` by it, as the
/// Tower layer does. Letters keep their case, because paths are case-sensitive. Reserved characters
/// stay encoded, with digits in upper case. An empty path is `/`.
///
/// ```
/// use tidegate::normalize_path;
///
/// assert_eq!(normalize_path("/api//v1/./users/?page=2"), "/api/v1/users");
/// assert_eq!(normalize_path("/static/../login"), "/login");
/// assert_eq!(normalize_path("/%6Cogin"), "/login");
/// assert_eq!(normalize_path("/files/a%2fb"), "/files/a%2Fb");
/// assert_eq!(normalize_path(""), "/");
/// ```
#[must_use]
pub fn normalize_path(path: &str) -> Cow<'_, str> {
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

/// Returns the normal form of a host: lower case, without port or trailing dot.
///
/// A front door with its own [`Attributes`](crate::Attributes) must normalize `host` by it, so that
/// a client cannot choose another key by another spelling.
///
/// ```
/// use tidegate::normalize_host;
///
/// assert_eq!(normalize_host("API.Example.com:8443"), "api.example.com");
/// assert_eq!(normalize_host("example.com."), "example.com");
/// assert_eq!(normalize_host("[2001:DB8::1]:443"), "[2001:db8::1]");
/// ```
#[must_use]
pub fn normalize_host(host: &str) -> Cow<'_, str> {
    let name = match host.rsplit_once(':') {
        // An IPv6 address without brackets has colons but no port.
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit())
                && (!name.contains(':') || name.ends_with(']')) =>
        {
            name
        }
        _ => host,
    };
    let name = name.trim_end_matches('.');
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    }
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
            // Reserved characters stay encoded, in upper case.
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
    fn star_stays_within_a_segment_and_double_star_does_not() {
        let matches = |pattern: &str, path: &str| Pattern::new(true, pattern).matches(path);
        assert!(matches("/a/*/c", "/a/b/c") && !matches("/a/*/c", "/a/b/b/c"));
        assert!(matches("/a/**/c", "/a/b/b/c"));
        assert!(matches("/a/**", "/a") && matches("/a/**", "/a/b/c") && !matches("/a/**", "/ab"));
        assert!(matches("/v*/x", "/v2/x") && !matches("/v*/x", "/w2/x"));
        assert!(matches("/**", "/") && matches("/**", "/x"));
        assert!(matches("**.png", "/a/b.png") && !matches("*.png", "/a/b.png"));
        let host = |pattern: &str, host: &str| Pattern::new(false, pattern).matches(host);
        assert!(host("*.example.com", "a.b.example.com") && !host("*.example.com", "example.com"));
    }

    #[test]
    fn spellings_of_a_path_have_one_normal_form() {
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
            assert_eq!(normalize_path(path), normal, "{path}");
        }
    }

    #[test]
    fn spellings_of_a_host_have_one_normal_form() {
        for (host, normal) in [
            ("Example.COM", "example.com"),
            ("example.com:8443", "example.com"),
            ("example.com:", "example.com"),
            ("example.com.", "example.com"),
            ("[2001:DB8::1]:80", "[2001:db8::1]"),
            ("[2001:db8::1]", "[2001:db8::1]"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:db8:0:1", "2001:db8:0:1"),
            ("", ""),
        ] {
            assert_eq!(normalize_host(host), normal, "{host}");
        }
    }

    proptest! {
        #[test]
        fn normal_form_of_a_path_is_stable(path in "[/.a%2eF?é]{0,30}") {
            let normal = normalize_path(&path).into_owned();
            prop_assert_eq!(normalize_path(&normal), normal.as_str());
        }

        #[test]
        fn no_pattern_panics_on_any_value(pattern in "[*/aé]{0,12}", value in "[/aé]{0,20}") {
            let matches = |is_path| Pattern::new(is_path, &pattern).matches(&value);
            // Without stars it is plain equality.
            if !pattern.contains('*') {
                prop_assert_eq!(matches(false), pattern == value);
            }
            if pattern == "**" {
                prop_assert!(matches(false));
            }
            matches(true);
        }
    }
}
