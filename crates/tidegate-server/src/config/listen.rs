//! Addresses to listen on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_saphyr::Spanned;
use tidegate::config::Document;

use super::{ConfigError, raw};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listen {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) gateway: SocketAddr,
}

/// `guarded`: the admin listener asks for a token.
pub(super) fn validate(
    document: &Document<'_>,
    raw: &raw::Listen,
    guarded: bool,
) -> Result<Listen, ConfigError> {
    let listen = Listen {
        http: address(document, raw.http.as_ref(), 8080)?,
        grpc: address(document, raw.grpc.as_ref(), 8081)?,
        admin: address(document, raw.admin.as_ref(), 8082)?,
        gateway: address(document, raw.gateway.as_ref(), 8000)?,
    };
    if let Some(place) = raw.admin.as_ref().filter(|_| !guarded && !listen.admin.ip().is_loopback())
    {
        return Err(document.error_at(
            place,
            "listen.admin is beyond loopback but auth.admin_token is not set: set a token, or listen on 127.0.0.1",
        ));
    }
    // Only what is written: `gateway` goes without http and grpc, `serve` without gateway.
    for (name, (one, here), (_, there)) in [
        ("grpc", (&raw.grpc, listen.grpc), (&raw.http, listen.http)),
        ("admin", (&raw.admin, listen.admin), (&raw.http, listen.http)),
        ("admin", (&raw.admin, listen.admin), (&raw.grpc, listen.grpc)),
        ("admin", (&raw.admin, listen.admin), (&raw.gateway, listen.gateway)),
    ]
    .into_iter()
    .filter(|(_, _, (other, _))| other.is_some())
    {
        if let Some(place) = one.as_ref().filter(|_| collide(here, there)) {
            return Err(document.error_at(
                place,
                &format!("listen.{name}: {there} is taken already: each listener needs its own"),
            ));
        }
    }
    Ok(listen)
}

/// Port 0 is any that is free.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let all = |address: SocketAddr| address.ip().is_unspecified();
    let alike = one.is_ipv4() == other.is_ipv4() && (all(one) || all(other));
    one.port() != 0 && one.port() == other.port() && (one.ip() == other.ip() || alike)
}

fn address(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
    port: u16,
) -> Result<SocketAddr, ConfigError> {
    let Some(text) = raw else { return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)) };
    let wrong = || {
        format!(
            "{:?} is not an address: write it like 127.0.0.1:{port} or [::1]:{port}",
            text.value
        )
    };
    text.value.parse().map_err(|_| document.error_at(text, &wrong()))
}
