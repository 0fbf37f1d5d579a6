//! [`RequestParts`]: the attributes of an HTTP request, by the names that policies use.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::OnceLock;

use http::header::{COOKIE, HOST, HeaderMap, HeaderValue};
use http::request::Parts;

use crate::client_ip::ClientIp;
use crate::policy::{Attributes, decode_value, normalize_host, trimmed};

/// Attributes of an HTTP request: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`,
/// `cookie.NAME`, and [`CustomAttributes`]. The Tower layer, the gateway and forward-auth all read
/// requests through it.
///
/// The host is in lower case and without its port, and several headers of one name are one,
/// separated by commas (cookies by semicolons). Of several query parameters or cookies of one name,
/// the first is returned. A request with several headers of one name, or with different parameters
/// or cookies of one name, is ambiguous, and an error for a policy that counts by them. Bytes that
/// are not UTF-8 have a character for each byte, so that different values stay different keys.
/// Policies normalize the values further, so that another spelling is not another key.
///
/// ```
/// use tidegate::layer::RequestParts;
/// use tidegate::{Attributes as _, ClientIp};
///
/// let request = http::Request::get("/login?user=ann").header("cookie", "sid = 7").body(());
/// let (parts, ()) = request.unwrap().into_parts();
/// let client_ip = ClientIp::default();
/// let attributes = RequestParts::new(&parts, None, &client_ip);
/// assert_eq!(attributes.get("path").as_deref(), Some("/login"));
/// assert_eq!(attributes.get("query.user").as_deref(), Some("ann"));
/// assert_eq!(attributes.get("cookie.sid").as_deref(), Some("7"));
/// ```
#[derive(Debug)]
pub struct RequestParts<'a> {
    method: Option<&'a str>,
    path: Option<&'a str>,
    query: Option<&'a str>,
    /// Host of the request line, or of the proxy's headers.
    host: Option<&'a str>,
    /// Whether the `Host` header is that of the request.
    reads_host_header: bool,
    headers: &'a HeaderMap,
    custom: Option<&'a CustomAttributes>,
    client: Option<(IpAddr, &'a ClientIp)>,
    /// Address of the client, resolved once. `None` inside if it is unknown.
    address: OnceLock<Option<String>>,
}

/// Address that a connection comes from, as an extension of its requests: the layer finds it there
/// if the server has set it. It must be the address of the socket; headers of proxies are read by
/// [`ClientIp`].
///
/// ```
/// use std::net::SocketAddr;
/// use tidegate::layer::Peer;
///
/// /// Called by an accept loop, for example of hyper, for each request of a connection.
/// fn with_peer<B>(mut request: http::Request<B>, address: SocketAddr) -> http::Request<B> {
///     request.extensions_mut().insert(Peer(address.ip()));
///     request
/// }
/// # let request = with_peer(http::Request::new(()), "203.0.113.9:4711".parse().unwrap());
/// # assert_eq!(request.extensions().get(), Some(&Peer("203.0.113.9".parse().unwrap())));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// Custom attributes of a request, as an extension: set by your own middleware, for policies that
/// count by them.
///
/// ```
/// use std::collections::BTreeMap;
/// use tidegate::layer::CustomAttributes;
///
/// let mut request = http::Request::new(());
/// let tenant = BTreeMap::from([("tenant".to_owned(), "acme".to_owned())]);
/// request.extensions_mut().insert(CustomAttributes(tenant));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CustomAttributes(pub BTreeMap<String, String>);

impl<'a> RequestParts<'a> {
    /// Reads a request that `peer` sent; `client_ip` has the trusted proxies.
    #[must_use]
    pub fn new(parts: &'a Parts, peer: Option<IpAddr>, client_ip: &'a ClientIp) -> Self {
        Self {
            method: Some(parts.method.as_str()),
            path: Some(parts.uri.path()),
            query: parts.uri.query(),
            // The request line takes precedence over the header (RFC 9112, 3.2.2).
            host: parts.uri.host(),
            reads_host_header: true,
            headers: &parts.headers,
            custom: parts.extensions.get(),
            client: peer.map(|peer| (peer, client_ip)),
            address: OnceLock::new(),
        }
    }

    /// Reads a request that a proxy describes by its headers; `ip` is the client's address, as
    /// [`ClientIp::group`] returns it. Method, path and host are absent until they are set.
    ///
    /// ```
    /// use http::HeaderMap;
    /// use tidegate::Attributes as _;
    /// use tidegate::layer::RequestParts;
    ///
    /// // The question of nginx's auth_request about a request that it holds back.
    /// let mut headers = HeaderMap::new();
    /// headers.insert("x-original-uri", "/login?user=ann".parse()?);
    /// let uri = headers.get("x-original-uri").and_then(|value| value.to_str().ok());
    /// let request = RequestParts::forwarded(&headers, "203.0.113.9".to_owned())
    ///     .with_method(Some("POST"))
    ///     .with_path_and_query(uri);
    /// assert_eq!(request.get("path").as_deref(), Some("/login"));
    /// assert_eq!(request.get("query.user").as_deref(), Some("ann"));
    /// # Ok::<(), http::header::InvalidHeaderValue>(())
    /// ```
    #[must_use]
    pub fn forwarded(headers: &'a HeaderMap, ip: String) -> Self {
        Self {
            method: None,
            path: None,
            query: None,
            host: None,
            reads_host_header: false,
            headers,
            custom: None,
            client: None,
            address: OnceLock::from(Some(ip)),
        }
    }

    /// Sets the method of a forwarded request.
    #[must_use]
    pub fn with_method(mut self, method: Option<&'a str>) -> Self {
        self.method = method;
        self
    }

    /// Sets the path and query of a forwarded request.
    #[must_use]
    pub fn with_path_and_query(mut self, uri: Option<&'a str>) -> Self {
        let uri = uri.map(|uri| uri.split('#').next().unwrap_or_default());
        self.path = uri.and_then(|uri| uri.split('?').next());
        self.query = uri.and_then(|uri| uri.split_once('?')).map(|(_, query)| query);
        self
    }

    /// Sets the host of a forwarded request.
    #[must_use]
    pub fn with_host(mut self, host: Option<&'a str>) -> Self {
        self.host = host;
        self
    }

    /// Returns whether a proxy describes the request, which then forwards its headers to a server
    /// that this process does not know.
    fn is_forwarded(&self) -> bool {
        !self.reads_host_header
    }

    /// Returns the whole query.
    #[must_use]
    pub fn raw_query(&self) -> Option<&'a str> {
        self.query
    }

    /// Returns the client's address, grouped by its network where a client has many addresses. A
    /// hop that is not an address ends the search at the proxy that reported it.
    fn ip(&self) -> Option<&str> {
        let address = self.address.get_or_init(|| {
            let (peer, client_ip) = self.client?;
            if !client_ip.trusts(peer) {
                return Some(client_ip.group(peer));
            }
            let values = |name: &str| self.headers.get_all(name).iter().map(HeaderValue::as_bytes);
            let resolved = client_ip.resolve(peer, values("x-forwarded-for"), values("forwarded"));
            Some(client_ip.group(resolved.address))
        });
        address.as_deref()
    }

    fn host(&self) -> Option<Cow<'_, str>> {
        if let Some(host) = self.host {
            return Some(normalize_host(host));
        }
        let header = self.headers.get(HOST).filter(|_| self.reads_host_header)?;
        Some(match decode_value(header.as_bytes()) {
            Cow::Borrowed(host) => normalize_host(host),
            Cow::Owned(host) => Cow::Owned(normalize_host(&host).into_owned()),
        })
    }

    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut values =
            self.headers.get_all(name).iter().map(|value| decode_value(value.as_bytes()));
        let first = values.next()?;
        // Cookies are the one list that commas do not separate (RFC 9113, 8.2.3).
        let separator = if name.eq_ignore_ascii_case(COOKIE.as_str()) { "; " } else { ", " };
        Some(values.fold(first, |all, value| Cow::Owned(format!("{all}{separator}{value}"))))
    }

    fn queries(&self, name: &str) -> impl Iterator<Item = Cow<'_, str>> {
        let pairs = self.query.into_iter().flat_map(|query| query.split('&'));
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        // Decode only the matching pairs.
        pairs
            .filter(move |(key, _)| *key == name || form_decoded(key) == name)
            .map(|(_, value)| form_decoded(value))
    }

    fn cookies(&self, name: &str) -> impl Iterator<Item = Cow<'_, str>> {
        // HTTP/2 may send each cookie in its own header.
        let headers = self.headers.get_all(COOKIE).iter();
        let pairs = headers.flat_map(|header| header.as_bytes().split(|byte| *byte == b';'));
        pairs.filter_map(move |pair| {
            let equals = pair.iter().position(|byte| *byte == b'=')?;
            let (key, value) = (pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii());
            // Frameworks also remove spaces that are not ASCII.
            let is_named =
                key == name.as_bytes() || !key.is_ascii() && trimmed(&decode_value(key)) == name;
            (!name.is_empty() && is_named).then(|| decode_value(value))
        })
    }
}

impl Attributes for RequestParts<'_> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "ip" => self.ip().map(Cow::Borrowed),
            "method" => self.method.map(Cow::Borrowed),
            "path" => self.path.map(Cow::Borrowed),
            "host" => self.host(),
            _ => {
                if let Some(name) = name.strip_prefix("header.") {
                    self.header(name)
                } else if let Some(name) = name.strip_prefix("query.") {
                    self.queries(name).next()
                } else if let Some(name) = name.strip_prefix("cookie.") {
                    self.cookies(name).next()
                } else {
                    self.custom?.0.get(name).map(|value| Cow::Borrowed(value.as_str()))
                }
            }
        }
    }

    fn is_ambiguous(&self, name: &str) -> bool {
        if let Some(name) = name.strip_prefix("header.") {
            // Cookies may be split into several headers.
            has_repeated_names(self.headers)
                && !name.eq_ignore_ascii_case(COOKIE.as_str())
                && self.headers.get_all(name).iter().nth(1).is_some()
                || self.is_forwarded()
                    && self.headers.keys().any(|other| is_similar_header(other.as_str(), name))
        } else if let Some(name) = name.strip_prefix("query.") {
            differ(self.queries(name)) || self.query.is_some_and(|query| has_similar(query, name))
        } else if let Some(name) = name.strip_prefix("cookie.") {
            let mut headers = self.headers.get_all(COOKIE).iter();
            differ(self.cookies(name))
                || headers.any(|header| has_similar_cookie(header.as_bytes(), name))
        } else {
            false
        }
    }

    fn lacks_peer(&self) -> bool {
        self.address.get().is_some_and(Option::is_none)
    }
}

/// Returns whether any header has several values, which most requests have none of.
fn has_repeated_names(headers: &HeaderMap) -> bool {
    headers.len() != headers.keys_len()
}

/// Returns whether any two values differ.
fn differ<'v>(mut values: impl Iterator<Item = Cow<'v, str>>) -> bool {
    let first = values.next();
    values.any(|value| Some(value) != first)
}

/// Returns whether a query has a parameter that some framework reads as `name`, and others do not.
/// Rack 2 and others also split at semicolons.
fn has_similar(query: &str, name: &str) -> bool {
    query.split('&').any(|pairs| {
        pairs.split(';').enumerate().any(|(index, pair)| {
            let key = form_decoded(pair.split_once('=').map_or(pair, |(key, _)| key));
            is_similar(&key, name) && (key != name || index > 0)
        })
    })
}

/// Returns whether a `Cookie` header has a cookie that some framework reads as `name`, and others
/// do not: some separate cookies also by spaces and commas.
fn has_similar_cookie(header: &[u8], name: &str) -> bool {
    // Beyond ASCII, a byte may belong to a space.
    let is_separator = |byte: &u8| matches!(byte, b',' | b'\0'..=b' ') || !byte.is_ascii();
    let skip = |bytes: &'_ [u8], wanted: bool| {
        bytes.iter().position(|byte| is_separator(byte) != wanted).unwrap_or(bytes.len())
    };
    header.split(|byte| *byte == b';').any(|pair| {
        let mut rest = &pair[skip(pair, true)..];
        let mut is_first = true;
        while !rest.is_empty() {
            let is_end = |byte: &u8| is_separator(byte) || *byte == b'=';
            let (key, after) = rest.split_at(rest.iter().position(is_end).unwrap_or(rest.len()));
            let after = &after[skip(after, true)..];
            let Some((b'=', value)) = after.split_first() else {
                (rest, is_first) = (after, false);
                continue;
            };
            let is_exact = is_first && key == name.as_bytes();
            if !is_exact && str::from_utf8(key).is_ok_and(|key| is_similar(key, name)) {
                return true;
            }
            let value = &value[skip(value, true)..];
            let after = &value[skip(value, false)..];
            (rest, is_first) = (&after[skip(after, true)..], false);
        }
        false
    })
}

/// Returns whether frameworks may read one name as the other. PHP reads dots, spaces and brackets
/// as underscores and ends a name at a NUL; Rack and Express leave brackets out.
fn is_similar(name: &str, other: &str) -> bool {
    // Nearly all names differ in their first letters, which is quickly found out.
    let first = |name: &str| {
        let mut bytes = name.bytes();
        bytes.find(|byte| !b" ._[]\t\n\r".contains(byte)).map(|byte| byte.to_ascii_lowercase())
    };
    if let (Some(one), Some(two)) = (first(name), first(other))
        && one.is_ascii()
        && two.is_ascii()
        && one != two
    {
        return false;
    }
    letters(name).eq(letters(other)) && {
        let (name, other) = (until_nul(name).to_lowercase(), until_nul(other).to_lowercase());
        name.replace(is_mark, "") == other.replace(is_mark, "") || words(&name).eq(words(&other))
    }
}

fn is_mark(character: char) -> bool {
    character.is_whitespace() || matches!(character, '.' | '[' | ']')
}

fn until_nul(name: &str) -> &str {
    name.split('\0').next().unwrap_or_default()
}

fn letters(name: &str) -> impl Iterator<Item = char> {
    let letters = until_nul(name).chars().filter(|letter| *letter != '_' && !is_mark(*letter));
    letters.flat_map(char::to_lowercase)
}

fn words(name: &str) -> impl Iterator<Item = &str> {
    let words = name.split(|character| character == '_' || is_mark(character));
    words.filter(|word| !word.is_empty())
}

/// Returns whether CGI and the like read both headers as one: every character that is neither a
/// letter nor a digit becomes an underscore.
fn is_similar_header(header: &str, name: &str) -> bool {
    let folded =
        |byte: u8| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'_' };
    header.len() == name.len()
        && header.bytes().map(folded).eq(name.bytes().map(folded))
        && !header.eq_ignore_ascii_case(name)
}

/// Decodes a name or value of a query: `+` is a space, `%41` a byte. An incomplete code stays as it
/// is.
fn form_decoded(encoded: &str) -> Cow<'_, str> {
    if !encoded.contains(['+', '%']) {
        return Cow::Borrowed(encoded);
    }
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        let code =
            digit(0).zip(digit(1)).and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        let (byte, used) = match (first, code) {
            (b'%', Some(code)) => (code, 2),
            (b'+', _) => (b' ', 0),
            (other, _) => (*other, 0),
        };
        bytes.push(byte);
        rest = &after[used..];
    }
    Cow::Owned(decode_value(&bytes).into_owned())
}

#[cfg(test)]
mod tests;
