//! The `listen` section: addresses of the listeners.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_saphyr::Spanned;
use tidegate::internals::Document;

use super::{ConfigError, raw};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listen {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) gateway: SocketAddr,
}

/// Validates the addresses. The admin listener may only leave loopback with a token.
pub(super) fn validate(
    document: &Document<'_>,
    raw: &raw::RawListen,
    has_admin_token: bool,
) -> Result<Listen, ConfigError> {
    let listen = Listen {
        http: address(document, raw.http.as_ref(), 8080)?,
        grpc: address(document, raw.grpc.as_ref(), 8081)?,
        admin: address(document, raw.admin.as_ref(), 8082)?,
        gateway: address(document, raw.gateway.as_ref(), 8000)?,
    };
    let is_exposed = !has_admin_token && !listen.admin.ip().is_loopback();
    if let Some(field) = raw.admin.as_ref().filter(|_| is_exposed) {
        return Err(document.error_at(
            field,
            "listen.admin is not on loopback but auth.admin_token is not set: set a token, or \
             listen on 127.0.0.1",
        ));
    }
    // Only addresses in the file can conflict: `gateway` does not use http and grpc, and `serve`
    // does not use gateway.
    for (name, (field, address), (_, other)) in [
        ("grpc", (&raw.grpc, listen.grpc), (&raw.http, listen.http)),
        ("admin", (&raw.admin, listen.admin), (&raw.http, listen.http)),
        ("admin", (&raw.admin, listen.admin), (&raw.grpc, listen.grpc)),
        ("admin", (&raw.admin, listen.admin), (&raw.gateway, listen.gateway)),
    ]
    .into_iter()
    .filter(|(_, _, (field, _))| field.is_some())
    {
        if let Some(field) = field.as_ref().filter(|_| conflicts(address, other)) {
            return Err(document.error_at(
                field,
                &format!("listen.{name}: {other} is already in use: each listener needs its own"),
            ));
        }
    }
    Ok(listen)
}

/// Returns whether two listeners cannot both bind. Port 0 is any free port.
fn conflicts(address: SocketAddr, other: SocketAddr) -> bool {
    let has_wildcard = address.is_ipv4() == other.is_ipv4()
        && (address.ip().is_unspecified() || other.ip().is_unspecified());
    address.port() != 0
        && address.port() == other.port()
        && (address.ip() == other.ip() || has_wildcard)
}

fn address(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
    port: u16,
) -> Result<SocketAddr, ConfigError> {
    let Some(text) = raw else { return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)) };
    text.value.parse().map_err(|_| {
        let message = format!(
            "{:?} is not an address: write it like 127.0.0.1:{port} or [::1]:{port}",
            text.value
        );
        document.error_at(text, &message)
    })
}
