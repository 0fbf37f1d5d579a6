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

/// What concerns only this connection (RFC 9110, 7.6.1), whether or not `Connection` names it. `Trailer` stays: what it
/// announces passes.
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

/// Nobody has so many gateways in a row.
const MAX_PASSES: usize = 8;

/// Refuses what two servers could read in two ways. What concerns the bytes on the wire, `wire.rs` has refused before.
pub(super) fn check(head: &Parts) -> Result<(), Refusal> {
    if head.method == Method::CONNECT {
        return Err(Refusal::Method("this is a gateway to its upstreams, and opens no tunnels to elsewhere"));
    }
    if lists(&head.headers, &header::VIA).filter(|hop| hop.ends_with(" tidegate")).count() >= MAX_PASSES {
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
    match (head.uri.authority(), named) {
        (None, None) if head.version == Version::HTTP_11 => Err(Refusal::Ambiguous("there is no Host")),
        (Some(target), Some(host)) if *target != host => {
            Err(Refusal::Ambiguous("the Host is another than that of the request's target"))
        }
        (Some(authority), _) if authority.as_str().contains('@') => {
            Err(Refusal::Ambiguous("the request's target has a user"))
        }
        _ if head.headers.get_all(header::CONTENT_LENGTH).iter().count() > 1 => {
            Err(Refusal::Ambiguous("there is more than one Content-Length"))
        }
        _ => Ok(()),
    }
}

/// What the client asks to go over to, if it asks for an upgrade.
pub(super) fn upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = version == Version::HTTP_11 && names(headers).any(|name| name.eq_ignore_ascii_case("upgrade"));
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// The request as the upstream gets it, but for its target and its Host.
pub(super) fn to_upstream(head: &mut Parts, peer: Peer, client_ip: &ClientIp, upgrade: Option<HeaderValue>) {
    let host = head.headers.get(header::HOST).cloned();
    let host = host.or_else(|| HeaderValue::from_str(head.uri.authority()?.as_str()).ok());
    let takes_trailers = lists(&head.headers, &header::TE).any(|value| value.eq_ignore_ascii_case("trailers"));
    let headers = &mut head.headers;
    remove_hop_by_hop(headers);
    // The client is sent its 100 as soon as the body is wanted.
    headers.remove(header::EXPECT);
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

/// Who has asked, over what, for which host. What an untrusted peer says of it is its own word, and dropped.
fn forwarded(headers: &mut HeaderMap, peer: Peer, client_ip: &ClientIp, host: Option<&HeaderValue>) {
    let address = peer.address.ip().to_canonical();
    if !client_ip.trusts(address) {
        let said = |name: &&HeaderName| name.as_str().starts_with("x-forwarded-") || **name == header::FORWARDED;
        let said: Vec<HeaderName> = headers.keys().filter(said).cloned().collect();
        for name in said {
            headers.remove(name);
        }
    }
    let mut chain = lists(headers, &X_FORWARDED_FOR).collect::<Vec<_>>().join(", ");
    if !chain.is_empty() {
        chain.push_str(", ");
    }
    chain.push_str(&address.to_string());
    if let Ok(chain) = HeaderValue::try_from(chain) {
        headers.insert(X_FORWARDED_FOR, chain);
    }
    let scheme = HeaderValue::from_static(if peer.secured { "https" } else { "http" });
    headers.entry(X_FORWARDED_PROTO).or_insert(scheme);
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
}

/// The Host that this upstream is told: the client's. HTTP/2 has it in the target, and that is the upstream's own.
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
fn names(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    lists(headers, &header::CONNECTION)
}

/// The elements of a header that is a list.
fn lists<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> {
    let texts = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim).filter(|element| !element.is_empty())
}
