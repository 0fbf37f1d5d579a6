//! Normal form of paths and hosts: another spelling of the same path must not be another path to
//! the policies.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Treatment of a spelling that some servers read as another path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PathSpelling {
    /// The request is an error: right for every server, and the default.
    #[default]
    Reject,
    /// The request is for the other path, as the servers that decode it see it.
    Decode,
    /// The spelling is a part of the path, as the other servers see it.
    Keep,
}

/// How policies read the paths of requests: the spellings that mean the same path.
///
/// Dot segments and the percent-encoding of characters that need none are always resolved. The
/// other spellings depend on the application behind: choose what it does. The default is right for
/// every application that is case-sensitive, because it rejects what applications read differently.
///
/// ```
/// use tidegate::{PathRules, PathSpelling};
///
/// let strict = PathRules::default();
/// assert_eq!(strict.normalize("/api//v1/./users/")?, "/api/v1/users/");
/// assert!(strict.normalize("/files/a%2Fb").is_err());
/// let decoding = PathRules::default().with_encoded_slashes(PathSpelling::Decode);
/// assert_eq!(decoding.normalize("/files/a%2Fb")?, "/files/a/b");
/// # Ok::<(), tidegate::PathError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathRules {
    case_insensitive: bool,
    encoded_slashes: PathSpelling,
    parameters: PathSpelling,
    merge_slashes: bool,
    max_bytes: usize,
    /// Whether a code of a control character is an error.
    rejects_controls: bool,
}

/// Error of a path with a spelling that [`PathRules`] rejects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// The path has `%2F`, `%5C` or a backslash.
    #[error(
        "the path has an encoded slash or a backslash, which some servers read as a slash: leave it \
         out, or choose its meaning by `paths.encoded_slashes`"
    )]
    EncodedSlash,
    /// A segment has a `;`.
    #[error(
        "the path has a parameter (`;`), which some servers ignore: leave it out, or choose its \
         meaning by `paths.parameters`"
    )]
    Parameter,
    /// The path has an encoded control character, such as `%0A`.
    #[error("the path has an encoded control character, which some servers ignore: leave it out")]
    ControlCharacter,
    /// The path has a segment `.` or `..`, and the application behind routes it as it is.
    #[error("the path has a dot segment, which the application may read literally: leave it out")]
    DotSegment,
    /// The path is longer than the maximum.
    #[error("the path has more than {0} bytes")]
    TooLong(usize),
}

/// Returns whether a path has a segment `.` or `..`, also with `%2e`.
#[cfg(feature = "tower")]
pub(crate) fn has_dot_segment(path: &str) -> bool {
    let is_dots = |segment: &str| {
        let decoded = segment.replace("%2e", ".").replace("%2E", ".");
        decoded == "." || decoded == ".."
    };
    (path.contains("/.") || path.contains("/%2")) && path.split('/').any(is_dots)
}

/// Length of the longest path by default. Browsers and servers rarely support more.
const DEFAULT_MAX_BYTES: usize = 16 * 1024;

impl Default for PathRules {
    fn default() -> Self {
        Self {
            case_insensitive: false,
            encoded_slashes: PathSpelling::Reject,
            parameters: PathSpelling::Reject,
            merge_slashes: true,
            max_bytes: DEFAULT_MAX_BYTES,
            rejects_controls: true,
        }
    }
}

impl PathRules {
    /// Reads every path as it is, apart from the spellings that mean the same to all servers.
    pub(super) const KEEP: Self = Self {
        case_insensitive: false,
        encoded_slashes: PathSpelling::Keep,
        parameters: PathSpelling::Keep,
        merge_slashes: true,
        max_bytes: usize::MAX,
        rejects_controls: false,
    };

    /// Sets whether `/Login` and `/login` are the same path; they differ by default.
    #[must_use]
    pub fn with_case_insensitive(mut self, case_insensitive: bool) -> Self {
        self.case_insensitive = case_insensitive;
        self
    }

    /// Sets the meaning of `%2F`, `%5C` and backslashes: [`PathSpelling::Decode`] makes slashes of
    /// them.
    #[must_use]
    pub fn with_encoded_slashes(mut self, encoded_slashes: PathSpelling) -> Self {
        self.encoded_slashes = encoded_slashes;
        self
    }

    /// Sets the meaning of parameters, such as `/cart;jsessionid=7`: [`PathSpelling::Decode`]
    /// removes them.
    #[must_use]
    pub fn with_parameters(mut self, parameters: PathSpelling) -> Self {
        self.parameters = parameters;
        self
    }

    /// Sets whether `/a//b` and `/a/b` are the same path, as by default.
    #[must_use]
    pub fn with_merge_slashes(mut self, merge_slashes: bool) -> Self {
        self.merge_slashes = merge_slashes;
        self
    }

    /// Sets the length of the longest path; 16 KiB by default.
    #[must_use]
    pub fn with_max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// Returns these rules, without those that reject paths.
    pub(super) fn rejecting_nothing(mut self) -> Self {
        for spelling in [&mut self.encoded_slashes, &mut self.parameters] {
            if *spelling == PathSpelling::Reject {
                *spelling = PathSpelling::Keep;
            }
        }
        self.max_bytes = usize::MAX;
        self.rejects_controls = false;
        self
    }

    /// Returns the normal form of a path, without its query. A proxy forwards it, so that the
    /// application sees the path that the policies matched. The case of letters and a slash at the
    /// end stay, although policies may ignore them.
    ///
    /// The normal form of a normal form is the same path, and the work is linear in its length.
    ///
    /// # Errors
    ///
    /// The path has a spelling that is rejected.
    pub fn normalize(self, path: &str) -> Result<Cow<'_, str>, PathError> {
        let path = path.split(['?', '#']).next().unwrap_or_default();
        if path.len() > self.max_bytes {
            return Err(PathError::TooLong(self.max_bytes));
        }
        if self.is_normal(path) {
            return Ok(Cow::Borrowed(path));
        }
        let decoded = self.decode(path)?;
        let mut normal = String::with_capacity(decoded.len() + 1);
        let mut segments = decoded.strip_prefix('/').unwrap_or(&decoded).split('/').peekable();
        while let Some(segment) = segments.next() {
            let segment = self.without_parameters(segment)?;
            let is_last = segments.peek().is_none();
            match segment {
                "." | ".." => {
                    if segment == ".." {
                        normal.truncate(normal.rfind('/').unwrap_or(0));
                    }
                    // `/a/.` names the directory `/a/`.
                    if is_last {
                        normal.push('/');
                    }
                }
                "" if is_last => normal.push('/'),
                "" if self.merge_slashes => {}
                other => {
                    normal.push('/');
                    normal.push_str(other);
                }
            }
        }
        Ok(Cow::Owned(normal))
    }

    /// Returns the form of a path that patterns match: the normal form with each character in its
    /// usual spelling, without slashes at the end and, if the case does not matter, in lower case.
    pub(super) fn matched(self, path: &str) -> Result<Cow<'_, str>, PathError> {
        let normal = self.spell(self.normalize(path)?, Stars::Letters);
        let length = normal.trim_end_matches('/').len().max(1);
        let has_capitals = || normal.bytes().any(|byte| byte.is_ascii_uppercase());
        if self.case_insensitive && has_capitals() {
            return Ok(Cow::Owned(normal[..length].to_ascii_lowercase()));
        }
        Ok(match normal {
            Cow::Borrowed(path) => Cow::Borrowed(&path[..length]),
            Cow::Owned(mut path) => {
                path.truncate(length);
                Cow::Owned(path)
            }
        })
    }

    /// Returns the form of a pattern with stars, in which a star is a letter like others.
    pub(super) fn pattern(self, text: &str) -> Result<String, PatternError> {
        if text.starts_with('*') && !text.starts_with("**") {
            return Err(PatternError::LeadingStar);
        }
        let decoded = self.decode(text).map_err(PatternError::Rejected)?;
        let decoded = self.spell(decoded, Stars::Wildcards);
        let mut pattern = String::with_capacity(decoded.len() + 1);
        for (position, segment) in decoded.split('/').enumerate() {
            match self.without_parameters(segment).map_err(PatternError::Rejected)? {
                "." | ".." => return Err(PatternError::DotSegment),
                "" if self.merge_slashes || position == 0 => {}
                segment => {
                    if position > 0 || !segment.starts_with('*') {
                        pattern.push('/');
                    }
                    pattern.push_str(segment);
                }
            }
        }
        pattern.truncate(pattern.trim_end_matches('/').len());
        if pattern.is_empty() {
            pattern.push('/');
        }
        if self.case_insensitive {
            pattern.make_ascii_lowercase();
        }
        Ok(pattern)
    }

    /// Spells characters as they usually are: those that a path may have (RFC 3986, 3.3) without
    /// a code, the others with it. Servers read both as equal, and `/users%3Alogin` as `/users:login`.
    fn spell(self, path: Cow<'_, str>, stars: Stars) -> Cow<'_, str> {
        let is_usual = |byte: u8| match byte {
            b'*' => stars == Stars::Wildcards,
            b'/' | b';' => true,
            _ => is_plain(byte),
        };
        if path.bytes().all(is_usual) {
            return path;
        }
        let mut spelt = String::with_capacity(path.len());
        let mut rest = path.as_bytes();
        while let [first, after @ ..] = rest {
            let code = code_at(rest);
            // A star with a code is a letter, in patterns too. A `;` with a code is no parameter.
            match code.unwrap_or(*first) {
                b';' if code.is_some() && self.parameters != PathSpelling::Keep => {
                    spelt.push_str("%3B");
                }
                b'/' if code.is_some() => spelt.push_str("%2F"),
                b'*' if code.is_some() => spelt.push_str("%2A"),
                byte if is_usual(byte) => spelt.push(char::from(byte)),
                byte => _ = write!(spelt, "%{byte:02X}"),
            }
            rest = &after[if code.is_some() { 2 } else { 0 }..];
        }
        Cow::Owned(spelt)
    }

    fn is_normal(self, path: &str) -> bool {
        let has_empty_segments = self.merge_slashes && path.contains("//");
        path.starts_with('/')
            && !has_empty_segments
            && !path.contains("/.")
            && !path.bytes().any(|byte| matches!(byte, b'%' | b';' | b'\\'))
    }

    fn without_parameters(self, segment: &str) -> Result<&str, PathError> {
        match (segment.split_once(';'), self.parameters) {
            (None, _) | (_, PathSpelling::Keep) => Ok(segment),
            (Some(_), PathSpelling::Reject) => Err(PathError::Parameter),
            (Some((name, _)), PathSpelling::Decode) => Ok(name),
        }
    }

    /// Decodes characters that need no percent-encoding. Others stay encoded, in upper case, and a
    /// `%` without a code becomes `%25`: it is a letter, and must not start a code with what
    /// follows it once that is decoded.
    fn decode(self, path: &str) -> Result<Cow<'_, str>, PathError> {
        if !path.contains(['%', '\\']) {
            return Ok(Cow::Borrowed(path));
        }
        let mut decoded = String::with_capacity(path.len());
        let mut rest = path;
        while let Some(at) = rest.find(['%', '\\']) {
            decoded.push_str(&rest[..at]);
            let code = code_at(&rest.as_bytes()[at..]);
            let is_slash = matches!(code, Some(b'/' | b'\\')) || rest[at..].starts_with('\\');
            match (is_slash, self.encoded_slashes, code) {
                (true, PathSpelling::Reject, _) => return Err(PathError::EncodedSlash),
                // FastAPI's routes match a path with a line feed at its end.
                (_, _, Some(code)) if self.rejects_controls && code.is_ascii_control() => {
                    return Err(PathError::ControlCharacter);
                }
                (true, PathSpelling::Decode, _) => decoded.push('/'),
                (true, PathSpelling::Keep, None) => decoded.push('\\'),
                (_, _, Some(code)) if code.is_ascii_alphanumeric() || b"-._~".contains(&code) => {
                    decoded.push(char::from(code));
                }
                (_, _, code) => {
                    let _ = write!(decoded, "%{:02X}", code.unwrap_or(b'%'));
                }
            }
            rest = &rest[at + if code.is_some() { 3 } else { 1 }..];
        }
        decoded.push_str(rest);
        Ok(Cow::Owned(decoded))
    }
}

/// Meaning of the stars in a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stars {
    /// Those of a request.
    Letters,
    /// Those of a pattern.
    Wildcards,
}

/// Returns whether a path usually has this character without a code.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()+,=:@".contains(&byte)
}

/// Returns the byte that a percent code at the start stands for.
fn code_at(bytes: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = bytes else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()
}

/// Defect of a path pattern, by which it would never match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PatternError {
    #[error("a path starts with a slash, which `*` does not match: write `/*` or `**`")]
    LeadingStar,
    #[error("requests have no dot segments: write the path without `.` and `..`")]
    DotSegment,
    #[error("requests with such a path are rejected: {0}")]
    Rejected(PathError),
}

/// Returns the normal form of a path, which policies match and count by: without query, empty or
/// dot segments, trailing slash, or percent-encoding of characters that need none. Otherwise
/// another spelling would bypass a policy.
///
/// It keeps encoded slashes and parameters as they are; a set of policies has [`PathRules`] for
/// them. Letters keep their case, because paths are case-sensitive. Characters that a path cannot
/// have are encoded, with digits in upper case, and so is a star. An empty path is `/`.
///
/// ```
/// use tidegate::normalize_path;
///
/// assert_eq!(normalize_path("/api//v1/./users/?page=2"), "/api/v1/users");
/// assert_eq!(normalize_path("/static/../login"), "/login");
/// assert_eq!(normalize_path("/%6Cogin"), "/login");
/// assert_eq!(normalize_path("/files/a%2fb"), "/files/a%2Fb");
/// assert_eq!(normalize_path("/users%3Alogin"), "/users:login");
/// assert_eq!(normalize_path(""), "/");
/// ```
#[must_use]
pub fn normalize_path(path: &str) -> Cow<'_, str> {
    PathRules::KEEP.matched(path).unwrap_or(Cow::Borrowed("/"))
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
    let host = host.trim_end_matches('.');
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spellings_of_a_path_have_one_normal_form() {
        for (path, normal) in [
            ("/", "/"),
            ("", "/"),
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b"),
            ("//a//b", "/a/b"),
            ("/a/./b/../c", "/a/c"),
            ("/a/b/..", "/a"),
            ("/../../a", "/a"),
            ("/a//../b", "/b"),
            ("/%61%2f%2F", "/a%2F%2F"),
            ("/%2e%2E/a", "/a"),
            ("/a%", "/a%25"),
            ("/a%zz%4", "/a%25zz%254"),
            ("/api/items/%%32e%%32e/7", "/api/items/%252e%252e/7"),
            ("/%252e%252e/7", "/%252e%252e/7"),
            ("/é%C3%a9?q", "/%C3%A9%C3%A9"),
            ("a", "/a"),
            ("/a;b", "/a;b"),
            ("/a%3bb", "/a;b"),
            ("/v1/users%3Alogin%40%2b", "/v1/users:login@+"),
            ("/{a}|\"b c", "/%7Ba%7D%7C%22b%20c"),
            ("/%7ba%7d%7c%22b%20c", "/%7Ba%7D%7C%22b%20c"),
            ("/*%2a", "/%2A%2A"),
            ("/%00%7F\u{7f}", "/%00%7F%7F"),
        ] {
            assert_eq!(normalize_path(path), normal, "{path}");
        }
    }

    #[test]
    fn forwarded_path_keeps_the_slash_at_its_end() {
        let forwarded = |path| PathRules::default().normalize(path).expect("a path").into_owned();
        assert_eq!(forwarded("/admin//login/"), "/admin/login/");
        assert_eq!(forwarded("/a/b/."), "/a/b/");
        assert_eq!(forwarded("/a/b/.."), "/a/");
        assert_eq!(forwarded("/a/.."), "/");
        assert_eq!(forwarded("/Admin"), "/Admin");
        let rules = PathRules::default().with_merge_slashes(false);
        assert_eq!(rules.normalize("/bucket//key/./x").expect("a path"), "/bucket//key/x");
        assert_eq!(rules.normalize("/bucket//../x").expect("a path"), "/bucket/x");
    }

    #[test]
    fn spellings_that_servers_read_differently_are_rejected_decoded_or_kept() {
        let rules = |spelling| {
            PathRules::default().with_encoded_slashes(spelling).with_parameters(spelling)
        };
        for (path, decoded, kept, error) in [
            ("/a%2Fb", "/a/b", "/a%2Fb", PathError::EncodedSlash),
            ("/a%5cb", "/a/b", "/a%5Cb", PathError::EncodedSlash),
            ("/a\\b", "/a/b", "/a\\b", PathError::EncodedSlash),
            ("/a/..%2f../c", "/c", "/a/..%2F../c", PathError::EncodedSlash),
            ("/a;x=1/b;y", "/a/b", "/a;x=1/b;y", PathError::Parameter),
            ("/a/..;/b", "/b", "/a/..;/b", PathError::Parameter),
        ] {
            assert_eq!(rules(PathSpelling::Reject).normalize(path), Err(error), "{path}");
            assert_eq!(rules(PathSpelling::Decode).normalize(path).as_deref(), Ok(decoded));
            assert_eq!(rules(PathSpelling::Keep).normalize(path).as_deref(), Ok(kept));
        }
        for control in ["/a%0A", "/a%00/b", "/%7f"] {
            let error = Err(PathError::ControlCharacter);
            assert_eq!(rules(PathSpelling::Keep).normalize(control), error, "{control}");
            assert!(!normalize_path(control).is_empty(), "{control}");
        }
        let short = PathRules::default().with_max_bytes(4);
        assert_eq!(short.normalize("/abc?query").as_deref(), Ok("/abc"));
        assert_eq!(short.normalize("/abcd"), Err(PathError::TooLong(4)));
        let any_case = PathRules::default().with_case_insensitive(true);
        assert_eq!(any_case.matched("/Login/").as_deref(), Ok("/login"));
        assert_eq!(any_case.normalize("/Login/").as_deref(), Ok("/Login/"));
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

    fn any_rules() -> impl Strategy<Value = PathRules> {
        let spelling = prop_oneof![
            Just(PathSpelling::Reject),
            Just(PathSpelling::Decode),
            Just(PathSpelling::Keep)
        ];
        (any::<bool>(), spelling.clone(), spelling, any::<bool>()).prop_map(
            |(any_case, slashes, parameters, merge)| {
                PathRules::default()
                    .with_case_insensitive(any_case)
                    .with_encoded_slashes(slashes)
                    .with_parameters(parameters)
                    .with_merge_slashes(merge)
            },
        )
    }

    proptest! {
        #[test]
        fn normal_form_of_a_path_is_stable(
            path in "[/.aA%25ceEfF?é;:3b*{\\\\]{0,30}", rules in any_rules(),
        ) {
            if let Ok(normal) = rules.normalize(&path) {
                prop_assert_eq!(rules.normalize(&normal), Ok(Cow::Borrowed(&*normal)));
                prop_assert_eq!(rules.matched(&normal), rules.matched(&path));
                prop_assert!(normal.starts_with('/'));
                prop_assert!(!normal.split('/').any(|segment| [".", ".."].contains(&segment)));
            }
            let normal = normalize_path(&path).into_owned();
            prop_assert_eq!(normalize_path(&normal), normal.as_str());
        }
    }
}
