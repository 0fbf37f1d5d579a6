//! The `listen` section: addresses of the listeners.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer as _, Visitor};
use serde_saphyr::Spanned;
use tidegate_net::{ListenAddress, ListenAddressError};

use super::raw;
use crate::tokens::Tokens;
use crate::yaml::{Bounded, BoundedDuration, ConfigError, Document};

const DEFAULT_UNIX_MODE: u32 = 0o660;
const DEFAULT_MAX_CONNECTION_AGE: Duration = Duration::from_secs(3_600);
/// Minimum and maximum of `max_connection_age`, in microseconds: from a second to 366 days.
const CONNECTION_AGES: [u64; 2] = [1_000_000, 366 * 86_400_000_000];
/// Longer than the 60 s for which common load balancers keep idle connections.
const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// Redis clients keep connections in pools, and their servers close none by default.
const DEFAULT_RESP_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
const DEFAULT_MAX_CONNECTIONS: usize = 16_384;
const MAX_ALLOWED_HOSTS: usize = 100;
/// Maximum length of a host name (RFC 1035, 2.3.4).
const MAX_NAME_BYTES: usize = 253;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    pub http: ListenAddress,
    pub grpc: ListenAddress,
    pub admin: ListenAddress,
    pub gateway: ListenAddress,
    /// Redis protocol.
    pub resp: Option<ListenAddress>,
    /// Permissions of the files of Unix sockets.
    pub unix_mode: u32,
    pub max_connection_age: Option<Duration>,
    /// Time without a request after which a connection is closed.
    pub idle_timeout: Duration,
    /// The same for the Redis protocol.
    pub resp_idle_timeout: Duration,
    /// Maximum number of connections of each listener.
    pub max_connections: usize,
    pub max_connections_per_address: usize,
    /// Time for which requests are accepted after a signal to stop.
    pub shutdown_delay: Duration,
    pub allowed_hosts: AllowedHosts,
    /// Networks of the balancers whose connections start with a PROXY header.
    pub proxy_protocol: Vec<IpNet>,
}

impl Listen {
    /// Returns whether other hosts may be able to use the Redis protocol.
    pub fn is_resp_remote(&self) -> bool {
        self.resp.as_ref().is_some_and(ListenAddress::is_remote)
    }
}

/// Host names by which listeners are called, in addition to addresses and localhost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    /// Names in lower case. One that starts with a dot stands for all names that end in it.
    names: Vec<String>,
}

impl AllowedHosts {
    /// Returns whether a normalized name is one of them.
    pub fn contains(&self, host: &str) -> bool {
        self.names.iter().any(|name| match name.strip_prefix('.') {
            None => name == host,
            Some(_) => host.len() > name.len() && host.ends_with(name),
        })
    }
}

/// Validates the addresses. The admin listener and the Redis protocol may only leave this host with
/// a token.
pub(super) fn validate(
    document: &Document<'_>,
    raw: &raw::RawListen,
    tokens: &Tokens,
) -> Result<Listen, ConfigError> {
    let number = |given: Option<u64>| given.and_then(|number| usize::try_from(number).ok());
    let max_connections =
        number(raw.max_connections.map(Bounded::get)).unwrap_or(DEFAULT_MAX_CONNECTIONS);
    let listen = Listen {
        http: address(document, raw.http.as_ref(), 8080)?,
        grpc: address(document, raw.grpc.as_ref(), 8081)?,
        admin: address(document, raw.admin.as_ref(), 8082)?,
        gateway: address(document, raw.gateway.as_ref(), 8000)?,
        resp: raw.resp.as_ref().map(|text| parse(document, text)).transpose()?,
        unix_mode: raw.unix_mode.map_or(DEFAULT_UNIX_MODE, |mode| mode.0),
        max_connection_age: max_connection_age(document, raw.max_connection_age.as_ref())?,
        idle_timeout: raw.idle_timeout.map_or(DEFAULT_IDLE_TIMEOUT, raw::IdleTimeout::get),
        resp_idle_timeout: raw
            .idle_timeout
            .map_or(DEFAULT_RESP_IDLE_TIMEOUT, raw::IdleTimeout::get),
        max_connections,
        max_connections_per_address: number(raw.max_connections_per_address.map(Bounded::get))
            .unwrap_or(max_connections.div_ceil(2)),
        shutdown_delay: raw.shutdown_delay.map_or(Duration::ZERO, raw::ShutdownDelay::get),
        allowed_hosts: allowed_hosts(document, &raw.allowed_hosts)?,
        proxy_protocol: super::networks(document, &raw.proxy_protocol)?,
    };
    let is_exposed = tokens.of_admin().is_none() && listen.admin.is_remote();
    if let Some(field) = raw.admin.as_ref().filter(|_| is_exposed) {
        return Err(document.error_at(
            field,
            "listen.admin is not on loopback but auth.admin_token is not set: set a token (there, \
             in auth.admin_token_file, or in the variable TIDEGATE_ADMIN_TOKEN), or listen on \
             127.0.0.1",
        ));
    }
    let is_resp_exposed = tokens.of_api().is_none() && listen.is_resp_remote();
    if let Some(field) = raw.resp.as_ref().filter(|_| is_resp_exposed) {
        return Err(document.error_at(
            field,
            "listen.resp is not on loopback but auth.api_token is not set: set a token, or listen \
             on 127.0.0.1",
        ));
    }
    // Only addresses in the file can conflict: `gateway` does not use http and grpc, and `serve`
    // does not use gateway.
    let resp = listen.resp.as_ref().unwrap_or(&listen.http);
    for (name, (field, address), (_, other)) in [
        ("grpc", (&raw.grpc, &listen.grpc), (&raw.http, &listen.http)),
        ("admin", (&raw.admin, &listen.admin), (&raw.http, &listen.http)),
        ("admin", (&raw.admin, &listen.admin), (&raw.grpc, &listen.grpc)),
        ("admin", (&raw.admin, &listen.admin), (&raw.gateway, &listen.gateway)),
        ("resp", (&raw.resp, resp), (&raw.http, &listen.http)),
        ("resp", (&raw.resp, resp), (&raw.grpc, &listen.grpc)),
        ("resp", (&raw.resp, resp), (&raw.admin, &listen.admin)),
        ("resp", (&raw.resp, resp), (&raw.gateway, &listen.gateway)),
    ]
    .into_iter()
    .filter(|(_, _, (field, _))| field.is_some())
    {
        if let Some(field) = field.as_ref().filter(|_| address.conflicts_with(other)) {
            return Err(document.error_at(
                field,
                &format!("listen.{name}: {other} is already in use: each listener needs its own"),
            ));
        }
    }
    Ok(listen)
}

fn address(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
    port: u16,
) -> Result<ListenAddress, ConfigError> {
    let Some(text) = raw else {
        let loopback = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        return Ok(ListenAddress::Tcp(loopback));
    };
    parse(document, text)
}

fn parse(document: &Document<'_>, text: &Spanned<String>) -> Result<ListenAddress, ConfigError> {
    text.value
        .parse()
        .map_err(|error: ListenAddressError| document.error_at(text, &error.to_string()))
}

/// Permissions of the file of a Unix socket: octal digits in quotes. Without quotes, YAML parsers
/// read them as different numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnixMode(u32);

impl<'de> Deserialize<'de> for UnixMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UnixModeVisitor)
    }
}

struct UnixModeVisitor;

impl UnixModeVisitor {
    fn without_quotes<E: de::Error>() -> E {
        E::custom(
            "write three octal digits in quotes, such as '660': without quotes they are a \
             decimal number",
        )
    }
}

impl Visitor<'_> for UnixModeVisitor {
    type Value = UnixMode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("three octal digits in quotes, such as '660'")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<UnixMode, E> {
        let digits = text.strip_prefix('0').filter(|rest| rest.len() == 3).unwrap_or(text);
        let is_octal = digits.len() == 3 && digits.bytes().all(|digit| digit.is_ascii_digit());
        let mode = u32::from_str_radix(digits, 8).ok().filter(|_| is_octal);
        mode.map(UnixMode).ok_or_else(|| {
            E::custom(format_args!(
                "{text:?} are not permissions: write three octal digits, such as '660' (user and \
                 group) or '666' (all users)"
            ))
        })
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<UnixMode, E> {
        Err(Self::without_quotes())
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<UnixMode, E> {
        Err(Self::without_quotes())
    }
}

fn max_connection_age(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
) -> Result<Option<Duration>, ConfigError> {
    type Age = BoundedDuration<{ CONNECTION_AGES[0] }, { CONNECTION_AGES[1] }>;
    let Some(text) = raw else { return Ok(Some(DEFAULT_MAX_CONNECTION_AGE)) };
    if text.value == "off" {
        return Ok(None);
    }
    let age = Age::deserialize(text.value.as_str().into_deserializer());
    age.map(|age| Some(age.get())).map_err(|error: de::value::Error| {
        document.error_at(text, &format!("{error}, or off for never"))
    })
}

fn allowed_hosts(
    document: &Document<'_>,
    raw: &[Spanned<String>],
) -> Result<AllowedHosts, ConfigError> {
    if let Some(first) = raw.get(MAX_ALLOWED_HOSTS) {
        let message = format!("there are more than {MAX_ALLOWED_HOSTS} names: use *.example.com");
        return Err(document.error_at(first, &message));
    }
    let name = |text: &Spanned<String>| {
        let (prefix, name) = match text.value.strip_prefix("*.") {
            Some(name) => (".", name),
            None => ("", text.value.as_str()),
        };
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        if name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label) {
            return Ok(format!("{prefix}{}", name.to_ascii_lowercase()));
        }
        let message = if name == "*" {
            "* would allow every name, also that of an attacker: set a token instead".to_owned()
        } else {
            let value = &text.value;
            format!(
                "{value:?} is not a host name: write it without a port, like tidegate.example.com \
                 or *.example.com"
            )
        };
        Err(document.error_at(text, &message))
    };
    Ok(AllowedHosts { names: raw.iter().map(name).collect::<Result<_, _>>()? })
}
