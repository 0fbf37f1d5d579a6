//! Patterns with `*` and `**`.

use std::borrow::Cow;

use ipnet::IpNet;

use super::condition::ReadRules;
use super::networks::{self, Networks, is_address};
use super::path::{PathRules, PatternError};
use super::{KeySource, PolicyError, mistake};

/// Number of addresses up to which each is compared.
const FEW_ADDRESSES: usize = 16;

/// Exact text, or text with `*` (any text without a slash) and `**` (any text), or networks.
#[derive(Debug, Clone)]
pub(super) enum Pattern {
    Exact(String),
    Wild { parts: Vec<PatternPart>, literal_prefix: String },
    Networks(Networks),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PatternPart {
    Text(String),
    Star,
    TwoStars,
    /// `/**` at the end: nothing, or a slash and any text.
    Subtree,
}

impl Pattern {
    /// Parses the patterns of an attribute. Networks, and many addresses, become one pattern.
    pub(super) fn list(
        attribute: &KeySource,
        texts: &[String],
        rules: ReadRules,
    ) -> Result<Vec<Self>, PolicyError> {
        let parse = |text| Self::new(attribute, text, rules.path);
        if attribute.as_str() != "ip" {
            return texts.iter().map(|text| parse(text)).collect();
        }
        let (wild, addresses) = texts.iter().partition::<Vec<&String>, _>(|it| is_wild_address(it));
        let parse_network = |text: &&String| {
            let network = networks::parse(text, rules.ipv6_prefix);
            let invalid = |reason| PolicyError::Pattern { pattern: (*text).clone(), reason };
            network.map_err(invalid).map(|network| (network, 0))
        };
        let addresses = addresses.iter().map(parse_network).collect::<Result<Vec<_>, _>>()?;
        // The group of an IPv6 address has a slash.
        let any = |text: &String| text.to_ascii_lowercase().replace('*', "**");
        let wild = wild.into_iter().map(|text| Self::normalized(false, &any(text)));
        let mut patterns: Vec<Self> = wild.collect();
        if addresses.len() <= FEW_ADDRESSES && addresses.iter().all(|(it, _)| is_address(it)) {
            let exact = |(network, _): &(IpNet, _)| Self::Exact(network.addr().to_string());
            patterns.extend(addresses.iter().map(exact));
        } else {
            patterns.push(Self::Networks(Networks::new(addresses.into_iter())));
        }
        Ok(patterns)
    }

    /// Parses the pattern of an attribute. It is normalized as the values of requests are, because
    /// it would never match otherwise.
    pub(super) fn new(
        attribute: &KeySource,
        text: &str,
        rules: PathRules,
    ) -> Result<Self, PolicyError> {
        let is_path = attribute.is_path();
        let never_matches =
            |reason: String| PolicyError::Pattern { pattern: text.to_owned(), reason };
        if let Some(reason) = mistake::in_pattern(attribute, text) {
            return Err(never_matches(reason));
        }
        let normal = if is_path {
            let invalid = |reason: PatternError| never_matches(reason.to_string());
            if text.contains('*') {
                rules.pattern(text).map_err(invalid)?
            } else {
                let path = rules.matched(text);
                path.map_err(PatternError::Rejected).map_err(invalid)?.into_owned()
            }
        } else if ["host", "method"].contains(&attribute.as_str()) {
            attribute.normalize(Cow::Borrowed(text)).into_owned()
        } else {
            text.to_owned()
        };
        Ok(Self::normalized(is_path, &normal))
    }

    fn normalized(is_path: bool, text: &str) -> Self {
        if !text.contains('*') {
            return Self::Exact(text.to_owned());
        }
        let (body, below) = match text.strip_suffix("/**") {
            Some(body) if is_path => (body, true),
            _ => (text, false),
        };
        let mut parts = Vec::new();
        let mut rest = body;
        while !rest.is_empty() {
            let (part, used) = if rest.starts_with("**") {
                (PatternPart::TwoStars, 2)
            } else if rest.starts_with('*') {
                (PatternPart::Star, 1)
            } else {
                let end = rest.find('*').unwrap_or(rest.len());
                (PatternPart::Text(rest[..end].to_owned()), end)
            };
            // `****` is the same as `**`.
            if !(part == PatternPart::TwoStars && parts.last() == Some(&PatternPart::TwoStars)) {
                parts.push(part);
            }
            rest = &rest[used..];
        }
        if below {
            parts.push(PatternPart::Subtree);
        }
        let literal = match parts.first() {
            Some(PatternPart::Text(literal)) => literal.as_str(),
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
            Self::Networks(networks) => networks.find(value).is_some(),
        }
    }
}

/// Returns whether this is a pattern that an address may match, such as `10.1.*`.
fn is_wild_address(text: &str) -> bool {
    text.contains('*')
        && text.bytes().all(|byte| byte.is_ascii_hexdigit() || b".:*/".contains(&byte))
}

/// Matches part by part, with the set of reachable positions instead of backtracking: the work is
/// at most the length of the pattern times that of the value, whatever a client sends.
fn parts_match(parts: &[PatternPart], value: &str) -> bool {
    let bytes = value.as_bytes();
    // reachable[i]: the parts so far can match the first i bytes.
    let mut reachable = vec![false; bytes.len() + 1];
    let mut next = vec![false; bytes.len() + 1];
    reachable[0] = true;
    for part in parts {
        next.fill(false);
        match part {
            PatternPart::Text(text) => {
                for at in 0..=bytes.len().saturating_sub(text.len()) {
                    if reachable[at] && bytes[at..].starts_with(text.as_bytes()) {
                        next[at + text.len()] = true;
                    }
                }
            }
            PatternPart::Star | PatternPart::TwoStars => {
                let mut open = false;
                for at in 0..=bytes.len() {
                    if at > 0 && *part == PatternPart::Star && bytes[at - 1] == b'/' {
                        open = false;
                    }
                    open |= reachable[at];
                    next[at] = open;
                }
            }
            PatternPart::Subtree => {
                let ends_here =
                    |at: usize| reachable[at] && (at == bytes.len() || bytes[at] == b'/');
                next[bytes.len()] = (0..=bytes.len()).any(ends_here);
            }
        }
        std::mem::swap(&mut reachable, &mut next);
    }
    reachable[bytes.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::PathSpelling;

    #[test]
    fn star_stays_within_a_segment_and_double_star_does_not() {
        let matches = |pattern: &str, path: &str| Pattern::normalized(true, pattern).matches(path);
        assert!(matches("/a/*/c", "/a/b/c") && !matches("/a/*/c", "/a/b/b/c"));
        assert!(matches("/a/**/c", "/a/b/b/c"));
        assert!(matches("/a/**", "/a") && matches("/a/**", "/a/b/c") && !matches("/a/**", "/ab"));
        assert!(matches("/v*/x", "/v2/x") && !matches("/v*/x", "/w2/x"));
        assert!(matches("/**", "/") && matches("/**", "/x"));
        assert!(matches("**.png", "/a/b.png") && !matches("*.png", "/a/b.png"));
        let host = |pattern: &str, host: &str| Pattern::normalized(false, pattern).matches(host);
        assert!(host("*.example.com", "a.b.example.com") && !host("*.example.com", "example.com"));
    }

    #[test]
    fn patterns_are_normalized_or_refused() {
        let rules = PathRules::default();
        let path = KeySource::path();
        let matches = |pattern: &str, path_of_request: &str| {
            let pattern = Pattern::new(&path, pattern, rules).expect("a pattern");
            pattern.matches(&rules.matched(path_of_request).expect("a path"))
        };
        for (pattern, request) in [
            ("/%7Euser/**", "/~user/x"),
            ("/dir//**", "/dir/x"),
            ("/t/*/", "/t/a/"),
            ("/t/*/", "/t/a"),
            ("api/*", "/api/x"),
            ("/caf%c3%a9/*", "/caf%C3%A9/x"),
            ("/login/", "/login"),
            ("/users:login", "/users%3Alogin"),
            ("/users%3alogin/*", "/users:login/x"),
            ("/café/*", "/caf%C3%A9/x"),
            ("/caf%C3%A9", "/café"),
            ("/a b", "/a%20b"),
            ("/a%2A/*", "/a*/x"),
        ] {
            assert!(matches(pattern, request), "{pattern} {request}");
        }
        assert!(!matches("/a%2A", "/ab"), "a star with a code is a letter");
        for refused in ["/limited%2f**", "/a/../*", "*.png", "*", "/a;x/**", "/a%2fb"] {
            let error = Pattern::new(&path, refused, rules).expect_err(refused).to_string();
            assert!(error.contains(&format!("{refused:?} would never match")), "{error}");
        }
        let decoding = rules.with_encoded_slashes(PathSpelling::Decode);
        let pattern = Pattern::new(&path, "/limited%2f**", decoding).expect("a pattern");
        assert!(pattern.matches("/limited/x"));
        let any_case = rules.with_case_insensitive(true);
        let pattern = Pattern::new(&path, "/Admin/**", any_case).expect("a pattern");
        assert!(pattern.matches("/admin/x"));
        let host = Pattern::new(&KeySource::host(), "*.Example.COM", rules).expect("a pattern");
        assert!(host.matches("a.example.com"));
    }

    proptest! {
        #[test]
        fn no_pattern_panics_on_any_value(pattern in "[*/aé]{0,12}", value in "[/aé]{0,20}") {
            let matches = |is_path| Pattern::normalized(is_path, &pattern).matches(&value);
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
