//! `/v1/forward-auth`: a proxy holds a request back and asks with its head, as nginx's
//! `auth_request`, Caddy's `forward_auth` and Traefik's `forwardAuth` do. Translates, decides
//! nothing.

use std::borrow::Cow;

use axum::extract::Query;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Deserialize;
use tidegate::config::duration;
use tidegate::{Action, Attributes, Timestamp};

use crate::config::Secret;
use crate::engine::{Answer, Ask, Engine};
use crate::http::Reply;
use crate::listener::{Peer, Request};
use crate::problem::Problem;
use crate::{http as api, token};

/// For a proxy that cannot set `Authorization`, or leaves the client's there because a policy
/// counts by it.
const TOKEN: &str = "x-tidegate-token";
/// Where proxies say what they were asked, each in its own way.
const METHOD: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const URI: [&str; 3] = ["x-forwarded-uri", "x-original-uri", "x-original-url"];
const HOST: [&str; 2] = ["x-forwarded-host", "x-original-host"];

#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Parameters {
    /// Only this policy is applied, whatever it matches; all that match, if left out.
    policy: Option<String>,
    /// What a denial is answered with; 429 if left out. nginx takes 401 and 403 alone.
    #[param(inline)]
    deny_status: Option<DenyStatus>,
}

#[derive(Clone, Copy, Deserialize, utoipa::ToSchema)]
enum DenyStatus {
    #[serde(rename = "401")]
    Unauthorized,
    #[serde(rename = "403")]
    Forbidden,
    #[serde(rename = "429")]
    TooManyRequests,
}

/// May the request that a proxy holds back pass? Its head is in the headers, its method, URI and
/// host in X-Forwarded-Method, -Uri and -Host or X-Original-Method, -URI (-URL) and -Host.
#[utoipa::path(
    get, path = "/v1/forward-auth", params(Parameters),
    responses(
        (status = 200, description = "Allowed"),
        (status = 400, description = "The question is wrong", body = Problem, content_type = "application/problem+json"),
        (
            status = 401, description = "No token, or a wrong one; or denied, with deny_status=401",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 403, description = "Denied, with deny_status=403",
            body = Problem, content_type = "application/problem+json"
        ),
        (status = 404, description = "No such policy", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "Denied", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "Nobody could decide", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(crate) async fn forward_auth(
    engine: &Engine,
    peer: Peer,
    request: Request,
) -> Result<Reply, Problem> {
    let live = engine.live();
    let (mut head, _) = request.into_parts();
    take_token(live.api_token.as_ref(), &mut head.headers)?;
    let address = api::client_address(&live.client_ip, peer, &head.headers)?;
    let forwarded = Forwarded {
        ip: Some(live.client_ip.group(address)),
        method: told(&head.headers, &METHOD, Some)?,
        uri: told(&head.headers, &URI, origin_form)?,
        host: told(&head.headers, &HOST, Some)?.map(plain_host),
        headers: &head.headers,
    };
    // A proxy that hands on the client's query would let it choose its policy.
    if head
        .uri
        .query()
        .is_some_and(|query| !query.is_empty() && forwarded.whole_query() == Some(query))
    {
        return Err(Problem::bad_request(
            "this query is that of the held back request: the proxy must send its own, if only a question mark \
             (Caddy: uri /v1/forward-auth?)",
        ));
    }
    let parameters: Result<Query<Parameters>, _> = Query::try_from_uri(&head.uri);
    let Query(parameters) = parameters.map_err(|error| Problem::bad_request(error.body_text()))?;
    let ask =
        Ask::Attributes { attributes: &forwarded, only: parameters.policy.as_deref(), cost: None };
    let answer = engine.ask(&live, &head.headers, Action::Acquire, ask, Timestamp::ZERO).await?;
    let denied = !answer.allowed();
    let mut response = if denied {
        Problem::new(
            parameters.deny_status.map_or(StatusCode::TOO_MANY_REQUESTS, Into::into),
            reason(&answer),
        )
        .into_http()
    } else {
        Response::new(Full::default())
    };
    api::add_limits(response.headers_mut(), &answer, live.x_ratelimit_headers, denied);
    Ok(response)
}

impl From<DenyStatus> for StatusCode {
    fn from(status: DenyStatus) -> Self {
        match status {
            DenyStatus::Unauthorized => Self::UNAUTHORIZED,
            DenyStatus::Forbidden => Self::FORBIDDEN,
            DenyStatus::TooManyRequests => Self::TOO_MANY_REQUESTS,
        }
    }
}

/// Checks the proxy's token and takes it out: what is ours must not become a key, and so come to
/// light among the hot ones.
fn take_token(token: Option<&Secret>, headers: &mut HeaderMap) -> Result<(), Problem> {
    let given = headers.remove(TOKEN);
    let Some(token) = token else { return Ok(()) };
    match given {
        Some(given) => token::check_plain(token, given.as_bytes()),
        None => token::check(Some(token), headers).map(|()| {
            headers.remove(header::AUTHORIZATION);
        }),
    }
    .map_err(Problem::unauthorized)
}

/// For the client, to whom Caddy and Traefik hand it on.
fn reason(answer: &Answer<'_>) -> String {
    let Some(line) = answer.leading() else { return "denied".to_owned() };
    let (policy, wait) = (line.policy, line.decision.retry_after);
    if wait.is_zero() {
        return format!("policy {policy:?} does not let this request pass");
    }
    format!(
        "policy {policy:?} lets no more than its limit pass: try again in {}",
        duration::readable(wait)
    )
}

/// What the proxy says, in any of these headers. If two of them differ, one is the client's own: a
/// proxy that sets `X-Original-URI` hands on an `X-Forwarded-Uri` that it does not know of.
fn told<'h>(
    headers: &'h HeaderMap,
    names: &[&str],
    part: impl Fn(&'h str) -> Option<&'h str>,
) -> Result<Option<&'h str>, Problem> {
    let mut found: Option<(&str, &str)> = None;
    for (name, value) in
        names.iter().flat_map(|name| headers.get_all(*name).iter().map(move |value| (*name, value)))
    {
        let text = str::from_utf8(value.as_bytes()).ok().and_then(&part);
        let text = text.ok_or_else(|| Problem::bad_request(format!("{name} cannot be read")))?;
        match found {
            Some((other, before)) if before != text => {
                return Err(Problem::bad_request(format!(
                    "{other} and {name} do not say the same: the proxy must set the one and remove the other"
                )));
            }
            _ => found = Some((name, text)),
        }
    }
    Ok(found.map(|(_, text)| text))
}

/// The path and the query of a URI, which may be a whole URL.
fn origin_form(uri: &str) -> Option<&str> {
    if uri.starts_with('/') {
        return Some(uri);
    }
    let (_, after_scheme) = uri.split_once("://")?;
    Some(after_scheme.find(['/', '?']).map_or("/", |at| &after_scheme[at..]))
}

/// The name that the nearest proxy was asked by: no port, and in one case.
pub(crate) fn plain_host(host: &str) -> String {
    let nearest = host.rsplit(',').next().unwrap_or_default().trim();
    let name = match nearest.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') =>
        {
            name
        }
        _ => nearest,
    };
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// What is known of the request that the proxy holds back. Looked up as policies ask for it: most
/// ask for little.
struct Forwarded<'h> {
    ip: Option<String>,
    method: Option<&'h str>,
    uri: Option<&'h str>,
    host: Option<String>,
    headers: &'h HeaderMap,
}

impl Attributes for Forwarded<'_> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "ip" => self.ip.as_deref().map(Cow::Borrowed),
            "method" => self.method.map(Cow::Borrowed),
            "path" => self.uri.map(tidegate::normal_path),
            "host" => self.host.as_deref().map(Cow::Borrowed),
            _ => match name.split_once('.')? {
                ("header", name) => self.header(name),
                ("query", name) => self.query(name),
                ("cookie", name) => self.cookie(name),
                _ => None,
            },
        }
    }
}

impl Forwarded<'_> {
    /// Several lines of one name are one list.
    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut values = self.headers.get_all(name).iter().map(text);
        let first = values.next()?;
        Some(values.fold(first, |all, value| Cow::Owned(format!("{all}, {value}"))))
    }

    fn whole_query(&self) -> Option<&str> {
        self.uri?.split('#').next()?.split_once('?').map(|(_, query)| query)
    }

    /// The first of this name.
    fn query(&self, name: &str) -> Option<Cow<'_, str>> {
        let pairs =
            self.whole_query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs
            .map(|(key, value)| (decoded(key), value))
            .find(|(key, _)| key == name)
            .map(|(_, value)| decoded(value))
    }

    /// The first of this name.
    fn cookie(&self, name: &str) -> Option<Cow<'_, str>> {
        self.headers.get_all(header::COOKIE).iter().find_map(|line| {
            let value = |line: &str| {
                let (_, value) = line
                    .split(';')
                    .filter_map(|pair| pair.split_once('='))
                    .find(|(key, _)| key.trim() == name)?;
                Some(value.trim().to_owned())
            };
            value(&text(line)).map(Cow::Owned)
        })
    }
}

/// Bytes that are no UTF-8 are taken one by one, so that no two values read alike.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    match str::from_utf8(value.as_bytes()) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(value.as_bytes().iter().copied().map(char::from).collect()),
    }
}

/// Without percent-encoding, and with spaces for plus signs. What is no UTF-8 then stays as it was
/// written.
fn decoded(part: &str) -> Cow<'_, str> {
    if !part.contains(['%', '+']) {
        return Cow::Borrowed(part);
    }
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [byte, after @ ..] = rest {
        let digits = after.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let code =
            digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        let (plain, used) = match (byte, code) {
            (b'%', Some(code)) => (code, 3),
            (b'+', _) => (b' ', 1),
            _ => (*byte, 1),
        };
        bytes.push(plain);
        rest = &rest[used..];
    }
    String::from_utf8(bytes).map_or(Cow::Borrowed(part), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    fn attribute(uri: &str, lines: &[(&'static str, &str)], name: &str) -> Option<String> {
        let headers = headers(lines);
        let uri = origin_form(uri);
        let forwarded = Forwarded { ip: None, method: None, uri, host: None, headers: &headers };
        forwarded.get(name).map(Cow::into_owned)
    }

    #[test]
    fn queries_are_decoded_and_the_first_of_a_name_counts() {
        let uri = "/a?x=1&user=J%C3%BCrgen+B&user=2&%6Bey=%2&e&bad=%ff#user=3";
        let query = |name: &str| attribute(uri, &[], &format!("query.{name}"));
        assert_eq!(query("user").as_deref(), Some("Jürgen B"));
        assert_eq!(query("key").as_deref(), Some("%2"));
        assert_eq!(query("e").as_deref(), Some(""));
        assert_eq!(query("bad").as_deref(), Some("%ff"));
        assert_eq!(query("absent"), None);
        assert_eq!(attribute(uri, &[], "path").as_deref(), Some("/a"));
    }

    #[test]
    fn headers_and_cookies_are_found_whatever_their_lines() {
        let lines = [
            ("x-user", "a"),
            ("x-user", "b"),
            ("cookie", "sid=1; theme=dark"),
            ("cookie", "late=2"),
        ];
        let get = |name: &str| attribute("/", &lines, name);
        assert_eq!(get("header.X-User").as_deref(), Some("a, b"));
        assert_eq!(get("cookie.sid").as_deref(), Some("1"));
        assert_eq!(get("cookie.theme").as_deref(), Some("dark"));
        assert_eq!(get("cookie.late").as_deref(), Some("2"));
        assert_eq!(get("cookie.si"), None);
        assert_eq!(get("header.absent"), None);
        assert_eq!(get("header.not a name"), None);
        assert_eq!(get("nothing"), None);
    }

    #[test]
    fn values_that_are_no_utf8_do_not_read_alike() {
        let value =
            |bytes: &[u8]| text(&HeaderValue::from_bytes(bytes).expect("a value")).into_owned();
        assert_eq!(value("ü".as_bytes()), "ü");
        assert_ne!(value(b"\xff"), value(b"\xfe"));
    }

    #[test]
    fn a_uri_may_be_a_whole_url_and_a_host_has_one_way_to_be_written() {
        assert_eq!(origin_form("/a?b"), Some("/a?b"));
        assert_eq!(origin_form("https://example.com/a?b"), Some("/a?b"));
        assert_eq!(origin_form("https://example.com"), Some("/"));
        assert_eq!(origin_form("a"), None);
        for (host, plain) in [
            ("Example.COM", "example.com"),
            ("example.com:8443", "example.com"),
            ("example.com.", "example.com"),
            ("spoofed.example, example.com", "example.com"),
            ("[2001:db8::1]:80", "[2001:db8::1]"),
            ("[2001:db8::1]", "[2001:db8::1]"),
        ] {
            assert_eq!(plain_host(host), plain, "{host}");
        }
    }

    #[test]
    fn two_headers_that_differ_are_refused() {
        let told = |lines: &[(&'static str, &str)]| {
            told(&headers(lines), &URI, origin_form).map(|uri| uri.map(str::to_owned))
        };
        let same = [("x-forwarded-uri", "/a"), ("x-original-url", "https://example.com/a")];
        assert_eq!(told(&same).expect("the same").as_deref(), Some("/a"));
        assert!(told(&[("x-forwarded-uri", "/a"), ("x-original-uri", "/b")]).is_err());
        assert!(told(&[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")]).is_err());
        assert!(told(&[("x-forwarded-uri", "nonsense")]).is_err());
        assert_eq!(told(&[]).expect("nothing wrong"), None);
    }
}
