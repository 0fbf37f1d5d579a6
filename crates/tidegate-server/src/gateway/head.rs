//! Request and response heads: validation, hop-by-hop headers and `X-Forwarded-*`.

use std::io::Write as _;
use std::net::IpAddr;

use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header};
use tidegate::ClientIp;

use super::error::ProxyError;
use super::upstreams::{Protocol, Upstream};
use crate::listener::Peer;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Hop-by-hop headers (RFC 9110, 7.6.1), removed whether or not `Connection` lists them. `Trailer`
/// is kept because trailers are forwarded.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
];

/// Headers removed from trailers: a server that merges trailers into the head would see another
/// message or another client.
const FORBIDDEN_TRAILERS: [HeaderName; 4] =
    [header::CONTENT_LENGTH, header::HOST, header::AUTHORIZATION, header::FORWARDED];

const GRPC_TRAILERS: HeaderValue =
    HeaderValue::from_static("grpc-status, grpc-message, grpc-status-details-bin");

/// Upgrades that continue with HTTP. Requests on such a connection would bypass all limits.
const HTTP_UPGRADES: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// `Forwarded`, and headers by which a proxy sends some frameworks the client's address or the
/// original path. From a client, they would lead to another address or path than the one that the
/// policies matched.
const CLIENT_OVERRIDES: [HeaderName; 8] = [
    header::FORWARDED,
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-client-ip"),
    HeaderName::from_static("true-client-ip"),
    HeaderName::from_static("cf-connecting-ip"),
    HeaderName::from_static("x-original-url"),
    HeaderName::from_static("x-original-uri"),
    HeaderName::from_static("x-rewrite-url"),
];

/// Headers by which some frameworks take another method than that of the request.
const METHOD_OVERRIDES: [HeaderName; 3] = [
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
];

/// Maximum number of options in `Connection`. Each is compared with every header.
const MAX_CONNECTION_OPTIONS: usize = 100;

/// Number of passes through a gateway, by `Via`, after which a request is considered looping.
const MAX_PASSES: usize = 8;

/// Rejects requests that two servers could understand differently. `listener/framing.rs` has
/// already rejected ambiguous framing.
pub(super) fn check(head: &Parts) -> Result<(), ProxyError> {
    if head.method == Method::CONNECT {
        return Err(ProxyError::Method("CONNECT is not supported: this gateway opens no tunnels"));
    }
    // The response to TRACE repeats the request, with headers that scripts must not read.
    if head.method == Method::TRACE {
        return Err(ProxyError::Trace);
    }
    // Policies would see a path, and the upstream none.
    if head.uri.path() == "*" && head.method != Method::OPTIONS {
        return Err(ProxyError::Ambiguous("only OPTIONS may have the target `*`"));
    }
    if elements(&head.headers, &header::VIA).filter(|hop| hop.ends_with(b" tidegate")).count()
        >= MAX_PASSES
    {
        return Err(ProxyError::Loop);
    }
    if elements(&head.headers, &header::CONNECTION).count() > MAX_CONNECTION_OPTIONS {
        return Err(ProxyError::Ambiguous("Connection has more than 100 options"));
    }
    check_host(head)?;
    // HTTP/1.1 removes them, and HTTP/2 has none (RFC 9113, 8.2.1). An HTTP/1.1 upstream would see
    // another value than the policies.
    if head.headers.values().any(has_outer_space) {
        return Err(ProxyError::Ambiguous("a header value has a space at its start or end"));
    }
    let mut lengths = head.headers.get_all(header::CONTENT_LENGTH).iter();
    // Over HTTP/2, an empty one is accepted as 0.
    let length = lengths.next().map(HeaderValue::as_bytes);
    if lengths.next().is_some() {
        return Err(ProxyError::Ambiguous("there is more than one Content-Length"));
    }
    if length.is_some_and(|it| it.is_empty() || !it.iter().all(u8::is_ascii_digit)) {
        return Err(ProxyError::Ambiguous("the Content-Length is not a number"));
    }
    // Policies and the upstream could see different users.
    if is_repeated(&head.headers, &header::AUTHORIZATION) {
        return Err(ProxyError::Ambiguous("there is more than one Authorization"));
    }
    Ok(())
}

/// Rejects requests whose host is missing, repeated or contradictory.
fn check_host(head: &Parts) -> Result<(), ProxyError> {
    let mut values = head.headers.get_all(header::HOST).iter();
    let value = values.next();
    if values.next().is_some() {
        return Err(ProxyError::Ambiguous("there is more than one Host"));
    }
    let host: Option<Authority> = value.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    if value.is_some() && host.is_none() {
        return Err(ProxyError::Ambiguous("the Host is not a valid host name"));
    }
    let has_user = |authority: &Authority| authority.as_str().contains('@');
    match (head.uri.authority(), host) {
        (_, None) if head.version == Version::HTTP_11 => {
            Err(ProxyError::Ambiguous("there is no Host"))
        }
        (_, Some(host)) if has_user(&host) => {
            Err(ProxyError::Ambiguous("the Host contains a user name"))
        }
        (Some(target), Some(host)) if *target != host => {
            Err(ProxyError::Ambiguous("the Host differs from the host of the request target"))
        }
        (Some(target), _) if has_user(target) => {
            Err(ProxyError::Ambiguous("the request target contains a user name"))
        }
        _ => Ok(()),
    }
}

fn has_outer_space(value: &HeaderValue) -> bool {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    is_space(value.as_bytes().first()) || is_space(value.as_bytes().last())
}

fn is_repeated(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(name).iter().nth(1).is_some()
}

/// Returns the requested upgrade if it is forwarded: WebSocket, for example, but no HTTP version,
/// because its requests would not be limited.
pub(super) fn upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    let is_requested = version == Version::HTTP_11
        && connection_options(headers).any(|name| name.eq_ignore_ascii_case(b"upgrade"));
    let is_http = |protocol: &[u8]| {
        let name = protocol.split(|byte| *byte == b'/').next().unwrap_or_default().trim_ascii();
        HTTP_UPGRADES.iter().any(|http| name.eq_ignore_ascii_case(http))
    };
    if !is_requested
        || is_repeated(headers, &header::UPGRADE)
        || elements(headers, &header::UPGRADE).any(is_http)
    {
        return None;
    }
    headers.get(header::UPGRADE).cloned()
}

/// Headers of a request that are not forwarded.
#[derive(Debug, Clone, Copy)]
pub(super) struct DroppedHeaders {
    /// Headers with an underscore in their name.
    pub(super) underscored: bool,
    /// Headers that name another method, because a policy depends on the method.
    pub(super) method_overrides: bool,
}

/// Returns the address of the client: the peer, or the one that trusted proxies forward.
pub(super) fn client(headers: &HeaderMap, peer: Peer, client_ip: &ClientIp) -> IpAddr {
    let values = |name| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let forwarded = values(header::FORWARDED);
    client_ip.resolve(peer.address.ip(), values(X_FORWARDED_FOR), forwarded).address
}

/// Rewrites the request head for an upstream, except for its target and its Host.
pub(super) fn to_upstream(
    head: &mut Parts,
    peer: Peer,
    client_ip: &ClientIp,
    upgrade: Option<HeaderValue>,
    dropped: DroppedHeaders,
) {
    let host = head.headers.get(header::HOST).cloned();
    let host = host.or_else(|| HeaderValue::from_str(head.uri.authority()?.as_str()).ok());
    let accepts_trailers =
        elements(&head.headers, &header::TE).any(|value| value.eq_ignore_ascii_case(b"trailers"));
    let headers = &mut head.headers;
    remove_hop_by_hop(headers);
    remove_unusual(headers, !dropped.underscored);
    if dropped.method_overrides {
        remove_all(headers, &METHOD_OVERRIDES);
    }
    // hyper sends `100 Continue` itself when the body is first polled.
    remove_all(headers, &[header::EXPECT, HTTP2_SETTINGS]);
    join_cookies(headers);
    if accepts_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::UPGRADE, protocol);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    set_forwarded(headers, peer, client_ip, host.as_ref());
    if let Some(host) = host
        && !headers.contains_key(header::HOST)
    {
        headers.insert(header::HOST, host);
    }
    headers.append(header::VIA, via(head.version));
}

/// Joins the cookies that an HTTP/2 client has sent in several fields (RFC 9113, 8.2.3). HTTP/1.1
/// servers expect one field, and many read only the first.
fn join_cookies(headers: &mut HeaderMap) {
    if !is_repeated(headers, &header::COOKIE) {
        return;
    }
    let fields = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes);
    let joined = fields.collect::<Vec<_>>().join(&b"; "[..]);
    if let Ok(joined) = HeaderValue::try_from(joined) {
        headers.insert(header::COOKIE, joined);
    }
}

/// Sets `X-Forwarded-For`, `-Proto` and `-Host`. Values from an untrusted peer are dropped first.
fn set_forwarded(
    headers: &mut HeaderMap,
    peer: Peer,
    client_ip: &ClientIp,
    host: Option<&HeaderValue>,
) {
    let address = peer.address.ip().to_canonical();
    if !client_ip.trusts(address) {
        remove_x_forwarded(headers);
        remove_all(headers, &CLIENT_OVERRIDES);
    }
    let mut chain = Vec::with_capacity(16);
    for element in elements(headers, &X_FORWARDED_FOR) {
        chain.extend_from_slice(element);
        chain.extend_from_slice(b", ");
    }
    // Writing to memory cannot fail.
    let _ = write!(chain, "{address}");
    if let Ok(chain) = HeaderValue::try_from(chain) {
        headers.insert(X_FORWARDED_FOR, chain);
    }
    let scheme = HeaderValue::from_static(if peer.tls { "https" } else { "http" });
    headers.entry(X_FORWARDED_PROTO).or_insert(scheme);
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
}

/// Removes headers with unusual characters in their names: applications behind CGI, WSGI and the
/// like cannot distinguish `X_User_Id` and `X.User.Id` from `X-User-Id`.
fn remove_unusual(headers: &mut HeaderMap, keep_underscored: bool) {
    let is_usual = |byte: u8| {
        byte.is_ascii_alphanumeric() || byte == b'-' || (byte == b'_' && keep_underscored)
    };
    remove_where(headers, |name| !name.as_str().bytes().all(is_usual));
}

fn remove_x_forwarded(headers: &mut HeaderMap) {
    remove_where(headers, |name| name.as_str().starts_with("x-forwarded-"));
}

/// Removes trailers, in either direction, that are only valid in a head.
pub(super) fn clean_trailers(trailers: &mut HeaderMap) {
    remove_hop_by_hop(trailers);
    remove_x_forwarded(trailers);
    remove_all(trailers, &FORBIDDEN_TRAILERS);
}

/// Sets the Host for an upstream: the client's for HTTP/1.1. HTTP/2 sends the upstream's own host
/// in the target instead.
pub(super) fn set_host(headers: &mut HeaderMap, upstream: &Upstream) {
    if upstream.protocol == Protocol::Http2 {
        headers.remove(header::HOST);
    } else if !headers.contains_key(header::HOST)
        && let Ok(host) = HeaderValue::from_str(upstream.authority.as_str())
    {
        headers.insert(header::HOST, host);
    }
}

/// Rewrites the response head for the client.
pub(super) fn to_client(version: Version, headers: &mut HeaderMap) {
    // Transfer-Encoding overrides Content-Length (RFC 9112, 6.3).
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    merge_lengths(headers);
    remove_hop_by_hop(headers);
    // The rate limit headers follow: one reservation avoids repeated growth.
    headers.reserve(8);
    headers.append(header::VIA, via(version));
}

/// Replaces several equal lengths by one (RFC 9110, 8.6). hyper has rejected different ones, except
/// in responses without a body, which need no length.
fn merge_lengths(headers: &mut HeaderMap) {
    let length = headers.get(header::CONTENT_LENGTH);
    let is_list = length.is_some_and(|length| length.as_bytes().contains(&b','));
    if !is_list && !is_repeated(headers, &header::CONTENT_LENGTH) {
        return;
    }
    let lengths: Vec<&[u8]> = elements(headers, &header::CONTENT_LENGTH).collect();
    let [first, others @ ..] = &lengths[..] else { return };
    let is_same = others.iter().all(|other| other == first);
    let merged = HeaderValue::from_bytes(first).ok().filter(|_| is_same);
    headers.remove(header::CONTENT_LENGTH);
    if let Some(length) = merged {
        headers.insert(header::CONTENT_LENGTH, length);
    }
}

/// Returns whether a request is a call of gRPC.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = content_type.and_then(|value| value.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Announces the trailers of a gRPC response, because hyper sends only announced ones to HTTP/1.1
/// clients. The names of other trailers are not known before the body has ended.
pub(super) fn announce_grpc_trailers(headers: &mut HeaderMap) {
    let content_type = headers.get(header::CONTENT_TYPE);
    if content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
        && !headers.contains_key(header::TRAILER)
    {
        headers.insert(header::TRAILER, GRPC_TRAILERS);
    }
}

fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_2 => "2 tidegate",
        Version::HTTP_10 => "1.0 tidegate",
        _ => "1.1 tidegate",
    })
}

/// Removes the headers that `Connection` lists, except those that later steps read. Policies must
/// not count by a header that the upstream does not get.
pub(super) fn remove_listed(headers: &mut HeaderMap) {
    let is_read = |name: &HeaderName| {
        HOP_BY_HOP.contains(name) || [header::EXPECT, HTTP2_SETTINGS].contains(name)
    };
    let listed = listed(headers);
    remove_where(headers, |name| listed.contains(name) && !is_read(name));
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed = listed(headers);
    remove_where(headers, |name| listed.contains(name) || HOP_BY_HOP.contains(name));
}

fn remove_all(headers: &mut HeaderMap, names: &[HeaderName]) {
    remove_where(headers, |name| names.contains(name));
}

/// Removes the headers whose names match. Few messages have any of them, and one pass over the
/// names of a message costs less than a search for each name to remove.
pub(super) fn remove_where(headers: &mut HeaderMap, matches: impl Fn(&HeaderName) -> bool) {
    let names: Vec<HeaderName> = headers.keys().filter(|name| matches(name)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Returns the names of the headers that `Connection` lists and that the message has, without those
/// whose removal would change its meaning.
fn listed(headers: &HeaderMap) -> Vec<HeaderName> {
    connection_options(headers)
        .filter_map(|option| {
            headers.keys().find(|name| name.as_str().as_bytes().eq_ignore_ascii_case(option))
        })
        .filter(|name| ![header::HOST, header::CONTENT_LENGTH].contains(name))
        .cloned()
        .collect()
}

/// Returns the header names that `Connection` lists.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    elements(headers, &header::CONNECTION).take(MAX_CONNECTION_OPTIONS)
}

/// Returns the elements of a list header as bytes, so that an invalid element does not hide the
/// others.
fn elements<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h [u8]> {
    let elements = headers
        .get_all(name)
        .into_iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    elements.map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}
