//! [`KeySource`]: an attribute of a request that limits can count by, checked when it is created.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Built-in attributes without a name of their own behind a prefix.
pub const NAMES: [&str; 5] = ["ip", "method", "path", "host", "domain"];
const PREFIXES: [&str; 4] = ["header", "query", "cookie", "descriptor"];

/// The number of characters of an unknown name that are compared and shown: clients choose their
/// length.
const MAX_SHOWN: usize = 64;

/// Attribute of a request that a limit counts by, matches or takes its cost from.
///
/// It exists only with a valid name, so a misspelt one cannot become a limit that never applies.
/// It parses from the strings of a configuration file:
///
/// ```
/// use tidegate::KeySource;
///
/// assert_eq!("header.X-User-Id".parse(), KeySource::header("x-user-id"));
/// assert_eq!("ip".parse(), Ok(KeySource::client_ip()));
/// let error = "heder.x-user-id".parse::<KeySource>().unwrap_err();
/// assert!(error.to_string().ends_with("(did you mean `header.x-user-id`?)"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeySource {
    name: Arc<str>,
    kind: SourceKind,
}

/// Kind of an attribute, by its name. Values of each kind are read in their own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SourceKind {
    Ip,
    Method,
    Path,
    Host,
    /// Header with credentials.
    Authorization,
    Header,
    Query,
    Cookie,
    /// From Envoy, or custom.
    Other,
}

impl KeySource {
    fn named(name: &str) -> Result<Self, AttributeError> {
        check_characters(name)?;
        check_form(name)?;
        // Header names are case-insensitive; front doors use lower case.
        let is_header = name.starts_with("header.");
        Ok(if is_header { Self::of(&name.to_ascii_lowercase()) } else { Self::of(name) })
    }

    fn of(name: &str) -> Self {
        let kind = match name {
            "ip" => SourceKind::Ip,
            "method" => SourceKind::Method,
            "path" => SourceKind::Path,
            "host" => SourceKind::Host,
            "header.authorization" | "header.proxy-authorization" => SourceKind::Authorization,
            _ => match name.split_once('.') {
                Some(("header", _)) => SourceKind::Header,
                Some(("query", _)) => SourceKind::Query,
                Some(("cookie", _)) => SourceKind::Cookie,
                _ => SourceKind::Other,
            },
        };
        Self { name: name.into(), kind }
    }

    /// Returns the address of the client: `ip`. An IPv6 address counts by its network, a /64 by
    /// default; see [`ClientIp`](crate::ClientIp), which also has the trusted proxies.
    #[must_use]
    pub fn client_ip() -> Self {
        Self::of("ip")
    }

    /// Returns the method of an HTTP request, such as `GET`: `method`.
    #[must_use]
    pub fn method() -> Self {
        Self::of("method")
    }

    /// Returns the path of an HTTP request, without its query: `path`. It is in the form of
    /// [`normalize_path`](crate::normalize_path).
    #[must_use]
    pub fn path() -> Self {
        Self::of("path")
    }

    /// Returns the host of an HTTP request, without its port: `host`. It is in the form of
    /// [`normalize_host`](crate::normalize_host).
    #[must_use]
    pub fn host() -> Self {
        Self::of("host")
    }

    /// Returns a header of an HTTP request: `header.NAME`. Header names are case-insensitive.
    /// A request with several headers of this name is refused, because servers differ in which of
    /// them they read.
    ///
    /// # Errors
    ///
    /// [`AttributeError::Malformed`] if the name is empty or cannot be the name of a header:
    ///
    /// ```
    /// use tidegate::KeySource;
    ///
    /// assert_eq!(KeySource::header("X-User-Id")?.as_str(), "header.x-user-id");
    /// assert!(KeySource::header("x user id").is_err());
    /// # Ok::<(), tidegate::AttributeError>(())
    /// ```
    pub fn header(name: &str) -> Result<Self, AttributeError> {
        Self::named(&format!("header.{name}"))
    }

    /// Returns a parameter of the query of an HTTP request: `query.NAME`. The name is
    /// case-sensitive. A request with different values of this name is refused.
    ///
    /// # Errors
    ///
    /// [`AttributeError::Malformed`] if the name is empty or has a space or a control character.
    pub fn query(name: &str) -> Result<Self, AttributeError> {
        Self::named(&format!("query.{name}"))
    }

    /// Returns a cookie of an HTTP request: `cookie.NAME`. The name is case-sensitive. A request
    /// with different values of this name is refused. Clients choose their cookies: a key that a
    /// client must not change needs a verified value, such as a [custom](Self::custom) attribute.
    ///
    /// # Errors
    ///
    /// [`AttributeError::Malformed`] if the name is empty or has a space or a control character.
    pub fn cookie(name: &str) -> Result<Self, AttributeError> {
        Self::named(&format!("cookie.{name}"))
    }

    /// Returns an attribute that your own code provides, such as `tenant`. The Tower layer reads it
    /// from the extension `CustomAttributes` of a request.
    ///
    /// # Errors
    ///
    /// [`AttributeError::BuiltIn`] for a name that is built in, and [`AttributeError::Malformed`]
    /// for one that is empty or has a space:
    ///
    /// ```
    /// use tidegate::{AttributeError, KeySource};
    ///
    /// assert_eq!(KeySource::custom("tenant")?.as_str(), "tenant");
    /// assert_eq!(KeySource::custom("ip"), Err(AttributeError::BuiltIn("ip".to_owned())));
    /// # Ok::<(), AttributeError>(())
    /// ```
    pub fn custom(name: &str) -> Result<Self, AttributeError> {
        AttributeNames::default().declare(name)?;
        Self::named(name)
    }

    /// Returns the name, as in a configuration file.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Returns whether a client may leave the attribute out, or choose its value.
    pub(super) fn is_chosen_by_clients(&self) -> bool {
        self.is_header() || matches!(self.kind, SourceKind::Query | SourceKind::Cookie)
    }

    pub(super) fn kind(&self) -> SourceKind {
        self.kind
    }

    pub(super) fn is_path(&self) -> bool {
        self.kind == SourceKind::Path
    }

    pub(super) fn is_header(&self) -> bool {
        matches!(self.kind, SourceKind::Header | SourceKind::Authorization)
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl From<KeySource> for String {
    fn from(source: KeySource) -> Self {
        source.name.as_ref().to_owned()
    }
}

/// Parses a built-in name. Names of custom attributes are errors: see [`KeySource::custom`].
impl FromStr for KeySource {
    type Err = AttributeError;

    fn from_str(name: &str) -> Result<Self, AttributeError> {
        AttributeNames::default().source(name)
    }
}

/// Error in the name of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttributeError {
    /// The name is neither built in nor declared, so no request would have the attribute.
    #[error(
        "unknown attribute {name:?}: it must be one of ip, method, path, host, header.NAME, query.NAME, \
         cookie.NAME, domain, descriptor.KEY, or be declared in `attributes`{}",
        suggestion(nearest.as_deref())
    )]
    Unknown {
        /// The unknown name.
        name: String,
        /// The most similar known name.
        nearest: Option<String>,
    },
    /// An HTTP request never has the attribute.
    #[error(
        "no HTTP request has the attribute {0:?}, which only Envoy sends: use ip, method, path, \
         host, header.NAME, query.NAME, cookie.NAME or a custom attribute"
    )]
    NotHttp(String),
    /// The name is malformed.
    #[error("{name:?} is not an attribute name: {reason}")]
    Malformed {
        /// The malformed name.
        name: String,
        /// Description of the defect.
        reason: &'static str,
    },
    /// A built-in attribute is declared.
    #[error("{0:?} cannot be declared: the name is built in")]
    BuiltIn(String),
    /// An attribute is declared twice.
    #[error("the attribute {0:?} is declared twice")]
    DeclaredTwice(String),
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

/// The front door that provides a built-in attribute.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Http,
    Envoy,
}

fn built_in(name: &str) -> Option<Origin> {
    match name {
        "ip" | "method" | "path" | "host" => Some(Origin::Http),
        "domain" => Some(Origin::Envoy),
        _ => match name.split_once('.')? {
            ("header" | "query" | "cookie", _) => Some(Origin::Http),
            ("descriptor", _) => Some(Origin::Envoy),
            _ => None,
        },
    }
}

/// Returns whether every HTTP request may have the attribute.
pub(super) fn is_http(name: &str) -> bool {
    built_in(name) == Some(Origin::Http)
}

/// Checks that an HTTP request can have the attribute: only Envoy sends `domain` and
/// `descriptor.KEY`.
#[cfg(feature = "tower")]
pub(crate) fn check_http(name: &str) -> Result<(), AttributeError> {
    match built_in(name) {
        Some(Origin::Envoy) => Err(AttributeError::NotHttp(name.to_owned())),
        _ => Ok(()),
    }
}

/// Attributes that policies may use: the built-in ones and the declared custom ones.
#[derive(Debug, Clone, Default)]
pub struct AttributeNames {
    declared: Arc<BTreeSet<String>>,
}

impl AttributeNames {
    /// Declares a custom attribute.
    pub fn declare(&mut self, name: &str) -> Result<(), AttributeError> {
        check_characters(name)?;
        // Another spelling of a built-in name would be mistaken for it.
        let lower = name.to_lowercase();
        if built_in(&lower).is_some() || PREFIXES.contains(&lower.as_str()) {
            return Err(AttributeError::BuiltIn(name.to_owned()));
        }
        if !Arc::make_mut(&mut self.declared).insert(name.to_owned()) {
            return Err(AttributeError::DeclaredTwice(name.to_owned()));
        }
        Ok(())
    }

    /// Adds the attributes that `other` declares.
    pub(crate) fn merge(&mut self, other: &Self) {
        if !Arc::ptr_eq(&self.declared, &other.declared)
            && !other.declared.is_subset(&self.declared)
        {
            Arc::make_mut(&mut self.declared).extend(other.declared.iter().cloned());
        }
    }

    /// Returns the attribute of this name, if it is known and well-formed.
    pub(crate) fn source(&self, name: &str) -> Result<KeySource, AttributeError> {
        self.check(name)?;
        KeySource::named(name)
    }

    /// Checks a name that a policy uses.
    pub fn check(&self, name: &str) -> Result<(), AttributeError> {
        check_characters(name)?;
        self.check_known(name)?;
        check_form(name)
    }

    /// Checks the name of an attribute that a request has. The part after a prefix is not checked:
    /// clients choose the names of their headers, cookies and query parameters.
    pub(crate) fn check_known(&self, name: &str) -> Result<(), AttributeError> {
        if built_in(name).is_some() || self.declared.contains(name) {
            return Ok(());
        }
        Err(AttributeError::Unknown { name: shown(name), nearest: self.nearest(name) })
    }

    /// The most similar name, by its kind where the name has one: `headers.x-user` is near
    /// `header.x-user`.
    fn nearest(&self, name: &str) -> Option<String> {
        let name: String = name.chars().take(MAX_SHOWN).collect();
        let (kind, rest) =
            name.split_once(|character: char| !character.is_alphanumeric()).unwrap_or((&name, ""));
        let rest = if rest.is_empty() { "NAME" } else { rest };
        let names = NAMES.into_iter().chain(self.declared.iter().map(String::as_str));
        let names = names.filter_map(|known| Some((distance(&name, known)?, known.to_owned())));
        let prefixed = PREFIXES
            .iter()
            .filter_map(|known| Some((distance(kind, known)?, format!("{known}.{rest}"))));
        prefixed.chain(names).min_by_key(|(distance, _)| *distance).map(|(_, nearest)| nearest)
    }
}

/// The number of different letters, in either case, if it is small enough for a misspelling.
fn distance(written: &str, known: &str) -> Option<usize> {
    let distance = strsim::damerau_levenshtein(&written.to_lowercase(), &known.to_lowercase());
    (distance <= 1 + written.chars().count() / 3).then_some(distance)
}

pub(super) fn shown(name: &str) -> String {
    let mut start: String = name.chars().take(MAX_SHOWN).collect();
    if start.len() < name.len() {
        start.push('…');
    }
    start
}

fn malformed(name: &str, reason: &'static str) -> AttributeError {
    AttributeError::Malformed { name: shown(name), reason }
}

fn check_characters(name: &str) -> Result<(), AttributeError> {
    if name.is_empty() {
        return Err(malformed(
            name,
            "it is empty; write a name, such as ip, path or header.x-user-id",
        ));
    }
    if name.chars().any(|character| character.is_whitespace() || character.is_control()) {
        return Err(malformed(name, "it has a space or a control character"));
    }
    Ok(())
}

/// Checks the part after the prefix of a built-in name.
fn check_form(name: &str) -> Result<(), AttributeError> {
    match name.split_once('.') {
        Some((prefix, "")) if PREFIXES.contains(&prefix) => {
            Err(malformed(name, "a name is missing after the dot, such as header.x-user-id"))
        }
        Some(("header", header)) if !header.chars().all(is_token) => {
            Err(malformed(name, "the part after the dot cannot be the name of a header"))
        }
        _ => Ok(()),
    }
}

/// Whether RFC 9110 allows the character in a token.
pub(super) fn is_token(character: char) -> bool {
    character.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(character)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(declared: &[&str]) -> AttributeNames {
        let mut names = AttributeNames::default();
        for name in declared {
            names.declare(name).expect("a good name");
        }
        names
    }

    #[test]
    fn built_in_and_declared_names_are_known() {
        let names = names(&["tenant", "jwt.sub"]);
        for known in [
            "ip",
            "method",
            "path",
            "host",
            "domain",
            "header.X-User",
            "query.a.b",
            "cookie.SID",
            "descriptor.k",
        ] {
            assert_eq!(names.check(known), Ok(()), "{known}");
        }
        assert_eq!((names.check("tenant"), names.check("jwt.sub")), (Ok(()), Ok(())));
    }

    #[test]
    fn unknown_name_comes_with_the_nearest_one() {
        let names = names(&["tenant", "Plan"]);
        for (written, nearest) in [
            ("headers.x-user", Some("header.x-user")),
            ("heder.X-User", Some("header.X-User")),
            ("Header.x", Some("header.x")),
            ("header-x-user", Some("header.x-user")),
            ("headers", Some("header.NAME")),
            ("query", Some("query.NAME")),
            ("cookies.sid", Some("cookie.sid")),
            ("descriptors.user", Some("descriptor.user")),
            ("paths", Some("path")),
            ("IP", Some("ip")),
            ("domian", Some("domain")),
            ("tennant", Some("tenant")),
            ("plan", Some("Plan")),
            ("user", None),
            ("foo.a-very-long-name-of-a-header", None),
        ] {
            let expected = AttributeError::Unknown {
                name: written.to_owned(),
                nearest: nearest.map(str::to_owned),
            };
            assert_eq!(names.check(written), Err(expected));
        }
    }

    #[test]
    fn long_unknown_name_is_shortened() {
        let error = names(&[]).check_known(&"é".repeat(60_000)).expect_err("unknown").to_string();
        assert!(error.len() < 500 && error.contains("é…\""), "{error}");
    }

    #[test]
    fn malformed_names_are_rejected_in_policies_only() {
        for name in [
            "header.",
            "query.",
            "cookie.",
            "descriptor.",
            "header.a:b",
            "header.é",
            "query.a b",
            "cookie.a\nb",
        ] {
            let error = names(&[]).check(name).expect_err("malformed").to_string();
            assert!(error.contains("is not an attribute name"), "{error}");
            assert_eq!(names(&[]).check_known(name), Ok(()), "a client may have sent it");
        }
        assert!(names(&[]).check("").is_err_and(|error| error.to_string().contains("it is empty")));
    }

    #[test]
    fn only_new_and_sound_names_are_declared() {
        for name in ["", " ", "a b", "a\nb", "a\u{7f}"] {
            let declared = AttributeNames::default().declare(name);
            assert!(
                matches!(declared, Err(AttributeError::Malformed { .. })),
                "{name:?}: {declared:?}"
            );
        }
        for name in
            ["ip", "Path", "domain", "header", "header.x-user", "Query.q", "descriptor.", "cookie"]
        {
            assert_eq!(
                AttributeNames::default().declare(name),
                Err(AttributeError::BuiltIn(name.to_owned()))
            );
        }
        let mut names = names(&["tenant"]);
        assert_eq!(
            names.declare("tenant"),
            Err(AttributeError::DeclaredTwice("tenant".to_owned()))
        );
        assert_eq!(names.declare("Tenant"), Ok(()));
    }
}
