//! What is known of an HTTP request, by the names that policies use.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::net::IpAddr;

use http::header::{COOKIE, HOST, HeaderValue};
use http::request::Parts;

use crate::client_ip::ClientIp;
use crate::policy::{Attributes, normal_path};

/// The attributes of an HTTP request: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`,
/// `cookie.NAME`.
///
/// What can be written in several ways is told in one, so that another way to write it is no other
/// key: the path without its query and dot segments, the host in lower case and without its port,
/// several headers of one name as one with commas. Of several query parameters or cookies of one
/// name, the first counts.
#[derive(Debug)]
pub struct HttpAttributes<'a> {
    head: &'a Parts,
    peer: Option<IpAddr>,
    client_ip: &'a ClientIp,
    /// Looked up once, if at all. Its absence is told, too.
    address: OnceCell<Option<String>>,
}

/// The address that a connection comes from, as an extension of its requests: where a server puts
/// it, the layer finds it by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

impl<'a> HttpAttributes<'a> {
    /// Of a request that `peer` sent; `client_ip` says which proxies to believe.
    #[must_use]
    pub fn new(head: &'a Parts, peer: Option<IpAddr>, client_ip: &'a ClientIp) -> Self {
        Self { head, peer, client_ip, address: OnceCell::new() }
    }

    /// Whether somebody asked for the `ip`, and it was not known.
    #[must_use]
    pub fn lacked_peer(&self) -> bool {
        self.address.get().is_some_and(Option::is_none)
    }

    /// As the client counts: by its network, where a client has many addresses. A hop that is no
    /// address ends the search at the proxy that told of it.
    fn ip(&self) -> Option<&str> {
        let address = self.address.get_or_init(|| {
            let peer = self.peer?;
            // Nobody looks at the headers of a peer who is not believed.
            if !self.client_ip.trusts(peer) {
                return Some(self.client_ip.group(peer));
            }
            let values =
                |name: &str| self.head.headers.get_all(name).iter().map(HeaderValue::as_bytes);
            let resolved =
                self.client_ip.resolve(peer, values("x-forwarded-for"), values("forwarded"));
            Some(self.client_ip.group(resolved.address))
        });
        address.as_deref()
    }

    /// What the request line names goes before the header (RFC 9112, 3.2.2).
    fn host(&self) -> Option<Cow<'_, str>> {
        let from_header = || self.head.headers.get(HOST).map(|value| without_port(text(value)));
        let host = self.head.uri.host().map(Cow::Borrowed).or_else(from_header)?;
        let is_plain = !host.ends_with('.') && !host.bytes().any(|byte| byte.is_ascii_uppercase());
        Some(if is_plain {
            host
        } else {
            Cow::Owned(host.trim_end_matches('.').to_ascii_lowercase())
        })
    }

    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut values = self.head.headers.get_all(name).iter().map(text);
        let first = values.next()?;
        Some(values.fold(first, |all, value| Cow::Owned(format!("{all}, {value}"))))
    }

    fn query(&self, name: &str) -> Option<Cow<'_, str>> {
        let pairs = self.head.uri.query()?.split('&');
        pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).find_map(|(key, value)| {
            // Nobody is decoded who is not asked for.
            (key == name || form_decoded(key) == name).then(|| form_decoded(value))
        })
    }

    fn cookie(&self, name: &str) -> Option<Cow<'_, str>> {
        // HTTP/2 may bring each cookie in a header of its own.
        self.head.headers.get_all(COOKIE).iter().find_map(|line| {
            let mut cookies = line.as_bytes().split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
            let value =
                cookies.find_map(|cookie| cookie.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
            value.map(String::from_utf8_lossy)
        })
    }
}

impl Attributes for HttpAttributes<'_> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "ip" => self.ip().map(Cow::Borrowed),
            "method" => Some(Cow::Borrowed(self.head.method.as_str())),
            "path" => Some(normal_path(self.head.uri.path())),
            "host" => self.host(),
            _ => match name.split_once('.')? {
                ("header", name) => self.header(name),
                ("query", name) => self.query(name),
                ("cookie", name) => self.cookie(name),
                _ => None,
            },
        }
    }
}

/// What is no text loses only what is none: another key, but never no key.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

/// `example.com:80` and `[::1]:80` without their port.
fn without_port(host: Cow<'_, str>) -> Cow<'_, str> {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) && (!name.contains(':') || name.ends_with(']')) => {
            Cow::Owned(name.to_owned())
        }
        _ => host,
    }
}

/// A name or a value of a query: a plus is a blank, `%41` a byte.
fn form_decoded(text: &str) -> Cow<'_, str> {
    if !text.contains(['+', '%']) {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
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
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn head(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn attribute(head: &Parts, name: &str) -> Option<String> {
        let client_ip = ClientIp::default();
        HttpAttributes::new(head, None, &client_ip).get(name).map(Cow::into_owned)
    }

    #[test]
    fn every_attribute_of_the_design_is_there() {
        let headers = [
            ("host", "Api.Example.COM:8080"),
            ("x-user-id", "ann"),
            ("cookie", "a=1; session=xyz; b=2"),
        ];
        let head = head("/api//items/../items?q=rate+limit%21&empty&%71=second", &headers);
        let get = |name: &str| attribute(&head, name);
        assert_eq!(get("method").as_deref(), Some("GET"));
        assert_eq!(get("path").as_deref(), Some("/api/items"));
        assert_eq!(get("host").as_deref(), Some("api.example.com"));
        assert_eq!(get("header.X-User-Id").as_deref(), Some("ann"));
        assert_eq!(get("query.q").as_deref(), Some("rate limit!"));
        assert_eq!(get("query.empty").as_deref(), Some(""));
        assert_eq!(get("cookie.session").as_deref(), Some("xyz"));
        for absent in [
            "header.x",
            "header.",
            "query.x",
            "cookie.x",
            "cookie.sess",
            "cookie.",
            "domain",
            "x.y",
            "",
            ".",
        ] {
            assert_eq!(get(absent), None, "{absent}");
        }
    }

    #[test]
    fn a_name_may_be_encoded_and_a_broken_code_is_kept() {
        let head = head("/?%71=1&bad=100%&half=%4&caps=%4a%4A&utf=%C3%BC&none=%FF", &[]);
        for (name, value) in [
            ("q", "1"),
            ("bad", "100%"),
            ("half", "%4"),
            ("caps", "JJ"),
            ("utf", "ü"),
            ("none", "\u{fffd}"),
        ] {
            assert_eq!(
                attribute(&head, &format!("query.{name}")).as_deref(),
                Some(value),
                "{name}"
            );
        }
    }

    #[test]
    fn headers_of_one_name_are_one_and_cookies_may_come_apart() {
        let head = head(
            "/",
            &[("x-plan", "free"), ("x-plan", "gold"), ("cookie", "a=1"), ("cookie", "b=2")],
        );
        assert_eq!(attribute(&head, "header.x-plan").as_deref(), Some("free, gold"));
        assert_eq!(attribute(&head, "cookie.b").as_deref(), Some("2"));
    }

    #[test]
    fn the_host_is_the_request_lines_or_the_headers_without_its_port() {
        for (uri, header, host) in [
            ("https://a.example:8443/", "b.example", Some("a.example")),
            ("/", "b.example.", Some("b.example")),
            ("/", "[2001:DB8::1]:80", Some("[2001:db8::1]")),
            ("/", "[2001:db8::1]", Some("[2001:db8::1]")),
            ("/", "c.example:", Some("c.example")),
        ] {
            assert_eq!(
                attribute(&head(uri, &[("host", header)]), "host").as_deref(),
                host,
                "{uri} {header}"
            );
        }
        assert_eq!(attribute(&head("/", &[]), "host"), None);
    }

    #[test]
    fn the_address_is_the_clients_and_its_absence_is_noticed() {
        let client_ip =
            ClientIp::new(vec!["10.0.0.0/8".parse().expect("a network")], 64).expect("valid");
        let head = head("/", &[("x-forwarded-for", "8.8.8.8, 2001:db8:0:1::7")]);
        let by = |peer: &str| {
            let attributes =
                HttpAttributes::new(&head, Some(peer.parse().expect("an address")), &client_ip);
            let address = attributes.get("ip").map(Cow::into_owned);
            (address, attributes.lacked_peer())
        };
        assert_eq!(by("10.0.0.1"), (Some("2001:db8:0:1::/64".to_owned()), false));
        assert_eq!(by("203.0.113.9"), (Some("203.0.113.9".to_owned()), false));
        let nobody = HttpAttributes::new(&head, None, &client_ip);
        assert!(nobody.get("path").is_some() && !nobody.lacked_peer(), "nobody asked for it");
        assert!(nobody.get("ip").is_none() && nobody.lacked_peer());
    }
}
