//! Protection of listeners without a token against web pages, which can make a browser on this host
//! or in its network send requests.
//!
//! A page of another origin may send a request but not read the response (CSRF). A page whose own
//! name resolves to this host counts as the same origin (DNS rebinding), and can also read. With a
//! token neither works, because the page does not know it.

use std::net::{Ipv4Addr, Ipv6Addr};

use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header};
use tidegate::normalize_host;

use super::problem::Problem;
use tidegate_config::AllowedHosts;
use tidegate_net::ListenAddress;

/// Relation of a page to this listener, which scripts cannot change. Browsers send it over TLS and
/// to loopback.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Number of characters of a host in a message.
const MAX_SHOWN: usize = 64;

/// Checks of the requests to one listener that has no token.
#[derive(Debug)]
pub struct BrowserGuard {
    /// Whether programs must use a name of this host, too: a rebound page can read a response to
    /// GET, for which browsers send no `Origin`.
    checks_programs: bool,
    allowed_hosts: AllowedHosts,
}

impl BrowserGuard {
    /// Creates the guard of the admin listener with this bound address.
    pub fn of_admin(bound: &ListenAddress, allowed_hosts: &AllowedHosts) -> Self {
        // No browser connects to a Unix socket, but a proxy in front of it may.
        let checks_programs = matches!(bound, ListenAddress::Tcp(_)) && !bound.is_remote();
        Self { checks_programs, allowed_hosts: allowed_hosts.clone() }
    }

    /// Creates the guard of the API. It has nothing to read by GET, and browsers send `Origin` with
    /// every POST, so programs may use any name, such as that of a sidecar.
    pub fn of_api(allowed_hosts: &AllowedHosts) -> Self {
        Self { checks_programs: false, allowed_hosts: allowed_hosts.clone() }
    }

    /// Checks a request.
    pub fn check<B>(&self, request: &Request<B>) -> Result<(), Problem> {
        self.check_host(request)?;
        Self::check_origin(request)
    }

    /// Checks that no page of another origin sent a request that changes something.
    pub fn check_origin<B>(request: &Request<B>) -> Result<(), Problem> {
        if request.method().is_safe() || !is_from_browser(request.headers()) {
            return Ok(());
        }
        if !is_same_origin(request) {
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "a web page of another origin sent this request (Origin, Sec-Fetch-Site): call \
                 this listener from a program, or from a page of its own",
            ));
        }
        if !is_json(request.headers()) {
            return Err(Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "requests of a browser must have a JSON body: send Content-Type: application/json",
            ));
        }
        Ok(())
    }

    /// Checks the names of this host in a request. Other hosts call a listener beyond loopback by
    /// any name, such as that of a Kubernetes service, so there only browsers are checked, as with
    /// the API.
    fn check_host<B>(&self, request: &Request<B>) -> Result<(), Problem> {
        if !self.checks_programs && !is_from_browser(request.headers()) {
            return Ok(());
        }
        let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
        let fields = request.headers().get_all(header::HOST).iter().map(HeaderValue::as_bytes);
        match target.into_iter().chain(fields).find(|host| !self.is_allowed(host)) {
            None => Ok(()),
            Some(host) => {
                let shown: String = String::from_utf8_lossy(host).chars().take(MAX_SHOWN).collect();
                Err(Problem::new(
                    StatusCode::FORBIDDEN,
                    format!(
                        "{shown:?} is not a name of this listener, which has no token: use its \
                         address or localhost, add the name to listen.allowed_hosts, or set a \
                         token in auth"
                    ),
                ))
            }
        }
    }

    /// Returns whether no attacker can make this name resolve to this host. Addresses are not
    /// resolved at all.
    fn is_allowed(&self, host: &[u8]) -> bool {
        let Ok(host) = str::from_utf8(host) else { return false };
        let name = normalize_host(host);
        let ipv6 = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        ipv6.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
            || name.parse::<Ipv4Addr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self.allowed_hosts.contains(&name)
    }
}

fn is_from_browser(headers: &HeaderMap) -> bool {
    // Most requests have few headers, and comparing their names is faster than hashing these.
    headers.keys().any(|name| name == header::ORIGIN || name == SEC_FETCH_SITE)
}

/// Returns whether a page of this listener, or the user, made the browser send the request.
fn is_same_origin<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    if headers.contains_key(SEC_FETCH_SITE) {
        let mut sites = headers.get_all(SEC_FETCH_SITE).iter();
        return sites.all(|site| site == "same-origin" || site == "none");
    }
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    let host = host.or_else(|| Some(request.uri().authority()?.as_str().as_bytes()));
    headers.get_all(header::ORIGIN).iter().all(|origin| {
        let origin = origin.as_bytes();
        let plain = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
        plain.is_some_and(|origin| host.is_some_and(|host| host.eq_ignore_ascii_case(origin)))
    })
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = value.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(address: &str) -> BrowserGuard {
        let bound = address.parse().expect("an address");
        BrowserGuard::of_admin(&bound, &AllowedHosts::default())
    }

    fn request(fields: &[(&str, &str)]) -> Request<()> {
        let request = fields
            .iter()
            .fold(Request::post("/"), |request, (name, value)| request.header(*name, *value));
        request.body(()).expect("a request")
    }

    #[test]
    fn names_that_an_attacker_may_resolve_are_not_allowed_on_loopback() {
        let loopback = guard("127.0.0.1:8082");
        for host in
            ["localhost", "a.localhost:1", "127.0.0.1", "0.0.0.0:8082", "[::1]:8082", "[fe80::1]"]
        {
            assert!(loopback.check_host(&request(&[("host", host)])).is_ok(), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::1",
            "::1]",
            "localhost@evil.example",
            "",
            "2130706433",
            "é",
            "evil.example:localhost",
        ] {
            assert!(loopback.check_host(&request(&[("host", host)])).is_err(), "{host}");
        }
        let twice = [("host", "localhost"), ("host", "evil.example")];
        assert!(loopback.check_host(&request(&twice)).is_err());
        assert!(loopback.check_host(&request(&[])).is_ok(), "browsers always send a Host");
    }

    #[test]
    fn only_browsers_are_checked_beyond_loopback_and_on_unix_sockets() {
        for address in ["0.0.0.0:8080", "10.0.0.1:8080", "[::]:8080", "unix:/run/tidegate.sock"] {
            let guard = guard(address);
            let service = ("host", "tidegate.svc");
            assert!(guard.check(&request(&[service])).is_ok(), "{address}");
            let page = [service, ("origin", "http://tidegate.svc")];
            assert!(guard.check(&request(&page)).is_err(), "{address}");
        }
    }

    #[test]
    fn origin_is_compared_with_the_host_unless_the_browser_has_done_so() {
        let host = ("host", "localhost:8082");
        let json = ("content-type", "Application/JSON; charset=utf-8");
        let is_allowed =
            |fields: &[(&str, &str)]| guard("127.0.0.1:8082").check(&request(fields)).is_ok();
        assert!(is_allowed(&[host, json, ("origin", "http://LOCALHOST:8082")]));
        assert!(is_allowed(&[
            host,
            json,
            ("origin", "https://a.example"),
            ("sec-fetch-site", "same-origin")
        ]));
        for origin in ["null", "", "http://localhost", "http://localhost:3000", "localhost:8082"] {
            assert!(!is_allowed(&[host, json, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site", "", "anything"] {
            let own = ("origin", "http://localhost:8082");
            assert!(!is_allowed(&[host, json, own, ("sec-fetch-site", site)]), "{site}");
        }
    }
}
