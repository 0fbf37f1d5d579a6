//! The head of a request and of its answer, as the next hop may see them.

use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header};
use tidegate::ClientIp;

use super::refusal::Refusal;
use super::upstreams::{Speaks, Upstream};
use crate::listener::Peer;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// What concerns only this connection (RFC 9110, 7.6.1), whether or not `Connection` names it.
/// `Trailer` stays: what it announces passes.
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

/// What would be another message, or tell of another client, if it were read in the trailers.
const NOT_IN_TRAILERS: [HeaderName; 4] =
    [header::CONTENT_LENGTH, header::HOST, header::AUTHORIZATION, header::FORWARDED];

/// Ways to go on with HTTP, past all limits.
const HTTP_AGAIN: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Nobody has so many gateways in a row.
const MAX_PASSES: usize = 8;

/// Refuses what two servers could read in two ways. What concerns the bytes on the wire, `wire.rs`
/// has refused before.
pub(super) fn check(head: &Parts) -> Result<(), Refusal> {
    if head.method == Method::CONNECT {
        return Err(Refusal::Method(
            "this is a gateway to its upstreams, and opens no tunnels to elsewhere",
        ));
    }
    if lists(&head.headers, &header::VIA).filter(|hop| hop.ends_with(b" tidegate")).count()
        >= MAX_PASSES
    {
        return Err(Refusal::Loop);
    }
    let mut hosts = head.headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::Ambiguous("there is more than one Host"));
    }
    let named: Option<Authority> = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    if host.is_some() && named.is_none() {
        return Err(Refusal::Ambiguous("the Host is not the name of a host"));
    }
    let has_user = |authority: &Authority| authority.as_str().contains('@');
    match (head.uri.authority(), named) {
        (_, None) if head.version == Version::HTTP_11 => {
            Err(Refusal::Ambiguous("there is no Host"))
        }
        (_, Some(host)) if has_user(&host) => Err(Refusal::Ambiguous("the Host has a user")),
        (Some(target), Some(host)) if *target != host => {
            Err(Refusal::Ambiguous("the Host is another than that of the request's target"))
        }
        (Some(target), _) if has_user(target) => {
            Err(Refusal::Ambiguous("the request's target has a user"))
        }
        _ if is_repeated(&head.headers, &header::CONTENT_LENGTH) => {
            Err(Refusal::Ambiguous("there is more than one Content-Length"))
        }
        // Policies would see another user than the upstream does.
        _ if is_repeated(&head.headers, &header::AUTHORIZATION) => {
            Err(Refusal::Ambiguous("there is more than one Authorization"))
        }
        _ => Ok(()),
    }
}

fn is_repeated(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(name).iter().nth(1).is_some()
}

/// What the client asks to go over to, if it asks for an upgrade that we grant: one to WebSocket,
/// for example, but not to another HTTP, whose requests nobody would look at.
pub(super) fn upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = version == Version::HTTP_11
        && names(headers).any(|name| name.eq_ignore_ascii_case(b"upgrade"));
    let is_http = |protocol: &[u8]| {
        let name = protocol.split(|byte| *byte == b'/').next().unwrap_or_default().trim_ascii();
        HTTP_AGAIN.iter().any(|http| name.eq_ignore_ascii_case(http))
    };
    if !asked
        || is_repeated(headers, &header::UPGRADE)
        || lists(headers, &header::UPGRADE).any(is_http)
    {
        return None;
    }
    headers.get(header::UPGRADE).cloned()
}

/// The request as the upstream gets it, but for its target and its Host.
pub(super) fn to_upstream(
    head: &mut Parts,
    peer: Peer,
    client_ip: &ClientIp,
    upgrade: Option<HeaderValue>,
) {
    let host = head.headers.get(header::HOST).cloned();
    let host = host.or_else(|| HeaderValue::from_str(head.uri.authority()?.as_str()).ok());
    let takes_trailers =
        lists(&head.headers, &header::TE).any(|value| value.eq_ignore_ascii_case(b"trailers"));
    let headers = &mut head.headers;
    remove_hop_by_hop(headers);
    // The client is sent its 100 as soon as the body is wanted.
    headers.remove(header::EXPECT);
    headers.remove(HTTP2_SETTINGS);
    if takes_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::UPGRADE, protocol);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    forwarded(headers, peer, client_ip, host.as_ref());
    if let Some(host) = host {
        headers.insert(header::HOST, host);
    }
    headers.append(header::VIA, via(head.version));
}

/// Who has asked, over what, for which host. What an untrusted peer says of it is its own word, and
/// dropped.
fn forwarded(
    headers: &mut HeaderMap,
    peer: Peer,
    client_ip: &ClientIp,
    host: Option<&HeaderValue>,
) {
    let address = peer.address.ip().to_canonical();
    if !client_ip.trusts(address) {
        headers.remove(header::FORWARDED);
        remove_x_forwarded(headers);
    }
    let mut chain = lists(headers, &X_FORWARDED_FOR).collect::<Vec<_>>().join(&b", "[..]);
    if !chain.is_empty() {
        chain.extend_from_slice(b", ");
    }
    chain.extend_from_slice(address.to_string().as_bytes());
    if let Ok(chain) = HeaderValue::try_from(chain) {
        headers.insert(X_FORWARDED_FOR, chain);
    }
    let scheme = HeaderValue::from_static(if peer.secured { "https" } else { "http" });
    headers.entry(X_FORWARDED_PROTO).or_insert(scheme);
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
}

fn remove_x_forwarded(headers: &mut HeaderMap) {
    let said = |name: &&HeaderName| name.as_str().starts_with("x-forwarded-");
    let said: Vec<HeaderName> = headers.keys().filter(said).cloned().collect();
    for name in said {
        headers.remove(name);
    }
}

/// What may come behind a body, either way: nothing that belongs before it.
pub(super) fn clean_trailers(trailers: &mut HeaderMap) {
    remove_hop_by_hop(trailers);
    remove_x_forwarded(trailers);
    for name in NOT_IN_TRAILERS {
        trailers.remove(name);
    }
}

/// The Host that this upstream is told: the client's. HTTP/2 has it in the target, and that is the
/// upstream's own.
pub(super) fn name_host(headers: &mut HeaderMap, upstream: &Upstream) {
    if upstream.speaks == Speaks::Http2 {
        headers.remove(header::HOST);
    } else if !headers.contains_key(header::HOST)
        && let Ok(host) = HeaderValue::from_str(upstream.authority.as_str())
    {
        headers.insert(header::HOST, host);
    }
}

/// The answer as the client gets it.
pub(super) fn to_client(version: Version, headers: &mut HeaderMap) {
    // The length beside an encoding is none (RFC 9112, 6.3).
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    remove_hop_by_hop(headers);
    // Those of the limits follow: the table grows once, not one by one.
    headers.reserve(8);
    headers.append(header::VIA, via(version));
}

fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_2 => "2 tidegate",
        Version::HTTP_10 => "1.0 tidegate",
        _ => "1.1 tidegate",
    })
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = names(headers)
        .filter_map(|name| HeaderName::try_from(name).ok())
        // Without these a request would be another one.
        .filter(|name| ![header::HOST, header::CONTENT_LENGTH].contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// The headers that `Connection` names.
fn names(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    lists(headers, &header::CONNECTION)
}

/// The elements of a header that is a list. Bytes, for one that is no text says nothing of the
/// others.
fn lists<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h [u8]> {
    let elements = headers
        .get_all(name)
        .into_iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    elements.map(<[u8]>::trim_ascii).filter(|element| !element.is_empty())
}
