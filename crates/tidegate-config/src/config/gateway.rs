//! The `gateway` section: upstreams, their timeouts, and browsers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::yaml::{Bounded, Document};
use clap::ValueEnum as _;
use http::Uri;
use http::uri::{Authority, Scheme};
use schemars::JsonSchema;
use serde_saphyr::Spanned;

use super::{CorsConfig, cors, raw};
use crate::yaml::ConfigError;
use tidegate_net::tls::UpstreamTls;
use tidegate_net::{ListenAddress, ListenAddressError};

/// Minimum rate of uploads, in bytes per second.
const DEFAULT_MIN_UPLOAD_RATE: u32 = 240;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    pub upstreams: Vec<UpstreamUrl>,
    pub connect_timeout: Duration,
    pub header_timeout: Duration,
    pub idle_timeout: Duration,
    pub limits: UpstreamLimits,
    /// Bytes per second; 0 for no minimum.
    pub min_upload_rate: u32,
    /// Whether headers with an underscore in their name are forwarded.
    pub underscore_headers: bool,
    pub exempt_preflight: bool,
    pub cors: Option<CorsConfig>,
    pub access_log: Option<AccessLogConfig>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLogConfig {
    pub destination: LogDestination,
    pub format: AccessLogFormat,
    /// Whether query strings are logged.
    pub query: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogDestination {
    Stdout,
    Stderr,
    File(PathBuf),
}

impl LogDestination {
    /// Parses `stdout`, `stderr` or a path relative to a folder.
    pub fn new(folder: &Path, path: &str) -> Self {
        match path {
            "stdout" => Self::Stdout,
            "stderr" => Self::Stderr,
            path => Self::File(folder.join(path)),
        }
    }
}

/// Format of the lines of an access log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, clap::ValueEnum)]
#[schemars(rename_all = "lowercase")]
pub enum AccessLogFormat {
    /// The combined format of Apache and nginx.
    #[default]
    Combined,
    /// One JSON object per line, with the decision, the upstream and the trace.
    Json,
}

/// URL of a server that requests are forwarded to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamUrl {
    /// The URL as it is written.
    pub text: String,
    pub scheme: Scheme,
    /// Host and port; `localhost` for a Unix socket.
    pub authority: Authority,
    /// Path of a Unix socket.
    pub socket: Option<PathBuf>,
    /// Prefix of every path; empty or without a trailing slash.
    pub base: String,
    pub protocol: UpstreamProtocol,
}

/// HTTP version towards an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamProtocol {
    Http1,
    Http2,
}

/// Reason why an upstream's URL is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamUrlError {
    /// The URL is not printed: it may hold a password.
    #[error("the URL of an upstream must not contain a user or password")]
    Credentials,
    #[error(
        "{0:?} is not an upstream: write it like http://127.0.0.1:3000, https://…, \
         unix:/run/app.sock, or for HTTP/2 h2c://… and h2://…"
    )]
    Invalid(String),
    #[error(transparent)]
    Socket(#[from] ListenAddressError),
}

impl std::str::FromStr for UpstreamUrl {
    type Err = UpstreamUrlError;

    fn from_str(text: &str) -> Result<Self, UpstreamUrlError> {
        if text.starts_with("unix:")
            && let ListenAddress::Unix(path) = text.parse()?
        {
            return Ok(Self {
                text: text.to_owned(),
                scheme: Scheme::HTTP,
                authority: Authority::from_static("localhost"),
                socket: Some(path),
                base: String::new(),
                protocol: UpstreamProtocol::Http1,
            });
        }
        if text.contains('@') {
            return Err(UpstreamUrlError::Credentials);
        }
        let invalid = || UpstreamUrlError::Invalid(text.chars().take(100).collect());
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        let (scheme, protocol) = match uri.scheme_str() {
            Some("http") => (Scheme::HTTP, UpstreamProtocol::Http1),
            Some("https") => (Scheme::HTTPS, UpstreamProtocol::Http1),
            Some("h2c") => (Scheme::HTTP, UpstreamProtocol::Http2),
            Some("h2") => (Scheme::HTTPS, UpstreamProtocol::Http2),
            _ => return Err(invalid()),
        };
        let authority = uri
            .authority()
            .filter(|authority| has_valid_host(authority) && has_valid_port(authority))
            .ok_or_else(invalid)?
            .clone();
        if uri.query().is_some() {
            return Err(invalid());
        }
        let base = uri.path().trim_end_matches('/').to_owned();
        Ok(Self { text: text.to_owned(), scheme, authority, socket: None, base, protocol })
    }
}

/// Checks what the URI parser leaves open: a host in brackets must be an IPv6 address.
fn has_valid_host(authority: &Authority) -> bool {
    let host = authority.host();
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains(['[', ']']),
    }
}

/// A port after the host must be a number up to 65535, which the URI parser does not check.
fn has_valid_port(authority: &Authority) -> bool {
    let has_port = authority.as_str().len() > authority.host().len();
    !has_port || authority.port_u16().is_some()
}

/// Limits of each upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpstreamLimits {
    /// Maximum number of requests in flight, and of connections over HTTP/1.1.
    pub max_connections: usize,
    /// Maximum number of requests that wait.
    pub max_pending: usize,
    /// Maximum time for which a request waits.
    pub pending_timeout: Duration,
}

impl Default for UpstreamLimits {
    fn default() -> Self {
        Self { max_connections: 1024, max_pending: 1024, pending_timeout: Duration::from_secs(5) }
    }
}

pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: &raw::RawGateway,
) -> Result<GatewayConfig, ConfigError> {
    let parse = |text: &Spanned<String>| {
        text.value
            .parse()
            .map_err(|error: UpstreamUrlError| document.error_at(text, &error.to_string()))
    };
    let timeout = |written: Option<raw::GatewayTimeout>, default: u64| {
        written.map_or(Duration::from_secs(default), raw::GatewayTimeout::get)
    };
    Ok(GatewayConfig {
        upstreams: raw.upstreams.iter().map(parse).collect::<Result<_, _>>()?,
        connect_timeout: timeout(raw.connect_timeout, 2),
        header_timeout: timeout(raw.header_timeout, 30),
        idle_timeout: timeout(raw.idle_timeout, 60),
        limits: limits(raw),
        min_upload_rate: number(raw.min_upload_rate).unwrap_or(DEFAULT_MIN_UPLOAD_RATE),
        exempt_preflight: raw.exempt_preflight.get(),
        underscore_headers: raw.underscore_headers.get(),
        cors: raw.cors.as_ref().map(|raw| cors::validate(document, raw)).transpose()?,
        access_log: raw
            .access_log
            .as_ref()
            .map(|raw| access_log(document, folder, raw))
            .transpose()?,
    })
}

/// Returns the TLS settings towards upstreams and the file with their CA, if it is set.
pub(super) fn upstream_tls(
    document: &Document<'_>,
    folder: &Path,
    raw: &raw::RawGateway,
) -> Result<Option<(UpstreamTls, PathBuf)>, ConfigError> {
    let Some(field) = &raw.ca else { return Ok(None) };
    let file = folder.join(&field.value);
    let tls = UpstreamTls::load(Some(&file))
        .map_err(|error| document.error_at(field, &format!("gateway.ca: {error}")))?;
    Ok(Some((tls, file)))
}

fn limits(raw: &raw::RawGateway) -> UpstreamLimits {
    let defaults = UpstreamLimits::default();
    UpstreamLimits {
        max_connections: number(raw.max_connections).unwrap_or(defaults.max_connections),
        max_pending: number(raw.max_pending).unwrap_or(defaults.max_pending),
        pending_timeout: raw
            .pending_timeout
            .map_or(defaults.pending_timeout, raw::GatewayTimeout::get),
    }
}

fn number<T: TryFrom<u64>, const MIN: u64, const MAX: u64>(
    written: Option<Bounded<MIN, MAX>>,
) -> Option<T> {
    written.and_then(|number| T::try_from(number.get()).ok())
}

fn access_log(
    document: &Document<'_>,
    folder: &Path,
    raw: &raw::RawAccessLog,
) -> Result<AccessLogConfig, ConfigError> {
    if raw.path.value.trim().is_empty() {
        return Err(document.error_at(
            &raw.path,
            "gateway.access_log.path is empty: write a file, stdout or stderr, or remove \
             access_log",
        ));
    }
    Ok(AccessLogConfig {
        destination: LogDestination::new(folder, &raw.path.value),
        format: raw
            .format
            .as_ref()
            .map_or(Ok(AccessLogFormat::default()), |name| access_log_format(document, name))?,
        query: raw.query.get(),
    })
}

fn access_log_format(
    document: &Document<'_>,
    name: &Spanned<String>,
) -> Result<AccessLogFormat, ConfigError> {
    AccessLogFormat::from_str(&name.value, false).map_err(|_| {
        let names: Vec<String> = AccessLogFormat::value_variants()
            .iter()
            .filter_map(|format| Some(format.to_possible_value()?.get_name().to_owned()))
            .collect();
        let message =
            format!("unknown format {:?}: it must be one of {}", name.value, names.join(", "));
        document.unknown_name_at(name, &message)
    })
}
