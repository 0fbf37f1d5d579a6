//! The `listen` section: addresses of the listeners.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde_saphyr::Spanned;
use tidegate::internals::{Bounded, Document};

use super::{ConfigError, duration, raw};

const DEFAULT_UNIX_MODE: u32 = 0o660;
const DEFAULT_MAX_CONNECTION_AGE: Duration = Duration::from_secs(3_600);
const MIN_MAX_CONNECTION_AGE: Duration = Duration::from_secs(1);
/// Longer than the 60 s for which common load balancers keep idle connections.
const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(75);
const MIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_IDLE_TIMEOUT: Duration = Duration::from_secs(24 * 3_600);
const DEFAULT_MAX_CONNECTIONS: usize = 16_384;
/// Maximum length of the path of a Unix socket, in bytes: that of Linux, without the final NUL.
const MAX_UNIX_PATH_BYTES: usize = 107;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listen {
    pub(crate) http: ListenAddress,
    pub(crate) grpc: ListenAddress,
    pub(crate) admin: ListenAddress,
    pub(crate) gateway: ListenAddress,
    /// Permissions of the files of Unix sockets.
    pub(crate) unix_mode: u32,
    pub(crate) max_connection_age: Option<Duration>,
    /// Time without a request after which a connection is closed.
    pub(crate) idle_timeout: Duration,
    /// Maximum number of connections of each listener.
    pub(crate) max_connections: usize,
    pub(crate) max_connections_per_address: usize,
}

/// Address of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    Tcp(SocketAddr),
    /// Absolute path of a Unix socket.
    Unix(PathBuf),
}

/// Reason why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ListenAddressError {
    #[error(
        "{0:?} is not an address: write it like 127.0.0.1:8080, [::1]:8080 or \
         unix:/run/tidegate/http.sock"
    )]
    Malformed(String),
    #[error("the path of a Unix socket must be absolute, such as unix:/run/tidegate/http.sock")]
    RelativePath,
    #[error(
        "the path of a Unix socket has {0} bytes: at most {MAX_UNIX_PATH_BYTES} are allowed, such \
         as unix:/run/tidegate/http.sock"
    )]
    LongPath(usize),
}

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, ListenAddressError> {
        let Some(path) = text.strip_prefix("unix:") else {
            let address = text.parse().map_err(|_| ListenAddressError::Malformed(text.to_owned()));
            return address.map(Self::Tcp);
        };
        if !Path::new(path).is_absolute() || path.contains('\0') {
            return Err(ListenAddressError::RelativePath);
        }
        if path.len() > MAX_UNIX_PATH_BYTES {
            return Err(ListenAddressError::LongPath(path.len()));
        }
        Ok(Self::Unix(PathBuf::from(path)))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl ListenAddress {
    /// Returns the address for the startup message: a URL, or the Unix socket.
    pub(crate) fn shown(&self, scheme: &str) -> String {
        match self {
            Self::Tcp(_) => self.url(scheme, ""),
            Self::Unix(_) => self.to_string(),
        }
    }

    /// Returns the URL of a path on this listener. A Unix socket has no host, so any name will do.
    pub(crate) fn url(&self, scheme: &str, path: &str) -> String {
        match self {
            Self::Tcp(address) => format!("{scheme}://{address}{path}"),
            Self::Unix(_) => format!("{scheme}://localhost{path}"),
        }
    }

    /// Returns the options with which curl connects to this listener.
    pub(crate) fn curl_options(&self) -> String {
        match self {
            Self::Tcp(_) => String::new(),
            Self::Unix(path) => format!("--unix-socket '{}' ", path.display()),
        }
    }

    /// Returns whether other hosts may be able to connect.
    fn is_remote(&self) -> bool {
        match self {
            Self::Tcp(address) => !address.ip().is_loopback(),
            Self::Unix(_) => false,
        }
    }

    /// Returns whether two listeners cannot both bind. Port 0 is any free port.
    fn conflicts_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unix(path), Self::Unix(other)) => path == other,
            (Self::Tcp(address), Self::Tcp(other)) => {
                let has_wildcard = address.is_ipv4() == other.is_ipv4()
                    && (address.ip().is_unspecified() || other.ip().is_unspecified());
                address.port() != 0
                    && address.port() == other.port()
                    && (address.ip() == other.ip() || has_wildcard)
            }
            _ => false,
        }
    }
}

/// Validates the addresses. The admin listener may only leave this host with a token.
pub(super) fn validate(
    document: &Document<'_>,
    raw: &raw::RawListen,
    has_admin_token: bool,
) -> Result<Listen, ConfigError> {
    let number = |given: Option<u64>| given.and_then(|number| usize::try_from(number).ok());
    let max_connections =
        number(raw.max_connections.map(Bounded::get)).unwrap_or(DEFAULT_MAX_CONNECTIONS);
    let listen = Listen {
        http: address(document, raw.http.as_ref(), 8080)?,
        grpc: address(document, raw.grpc.as_ref(), 8081)?,
        admin: address(document, raw.admin.as_ref(), 8082)?,
        gateway: address(document, raw.gateway.as_ref(), 8000)?,
        unix_mode: unix_mode(document, raw.unix_mode.as_ref())?,
        max_connection_age: max_connection_age(document, raw.max_connection_age.as_ref())?,
        idle_timeout: idle_timeout(document, raw.idle_timeout.as_ref())?,
        max_connections,
        max_connections_per_address: number(raw.max_connections_per_address.map(Bounded::get))
            .unwrap_or(max_connections.div_ceil(2)),
    };
    let is_exposed = !has_admin_token && listen.admin.is_remote();
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
        ("grpc", (&raw.grpc, &listen.grpc), (&raw.http, &listen.http)),
        ("admin", (&raw.admin, &listen.admin), (&raw.http, &listen.http)),
        ("admin", (&raw.admin, &listen.admin), (&raw.grpc, &listen.grpc)),
        ("admin", (&raw.admin, &listen.admin), (&raw.gateway, &listen.gateway)),
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
    text.value
        .parse()
        .map_err(|error: ListenAddressError| document.error_at(text, &error.to_string()))
}

fn unix_mode(document: &Document<'_>, raw: Option<&Spanned<String>>) -> Result<u32, ConfigError> {
    let Some(text) = raw else { return Ok(DEFAULT_UNIX_MODE) };
    let digits = text.value.strip_prefix('0').filter(|rest| rest.len() == 3);
    let digits = digits.unwrap_or(&text.value);
    let mode = u32::from_str_radix(digits, 8).ok().filter(|_| digits.len() == 3);
    mode.ok_or_else(|| {
        let message = format!(
            "{:?} are not permissions: write three octal digits, such as '660' (user and group) or \
             '666' (all users)",
            text.value
        );
        document.error_at(text, &message)
    })
}

fn max_connection_age(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
) -> Result<Option<Duration>, ConfigError> {
    let Some(text) = raw else { return Ok(Some(DEFAULT_MAX_CONNECTION_AGE)) };
    if text.value == "off" {
        return Ok(None);
    }
    let age = duration(document, text)?;
    if age < MIN_MAX_CONNECTION_AGE {
        let message = format!("{:?} is too short: write at least 1s, or off", text.value);
        return Err(document.error_at(text, &message));
    }
    Ok(Some(age))
}

fn idle_timeout(
    document: &Document<'_>,
    raw: Option<&Spanned<String>>,
) -> Result<Duration, ConfigError> {
    let Some(text) = raw else { return Ok(DEFAULT_IDLE_TIMEOUT) };
    let timeout = duration(document, text)?;
    if !(MIN_IDLE_TIMEOUT..=MAX_IDLE_TIMEOUT).contains(&timeout) {
        let message = format!("{:?} is out of range: write a time from 1s to 1d", text.value);
        return Err(document.error_at(text, &message));
    }
    Ok(timeout)
}
