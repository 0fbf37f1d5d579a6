//! The `gateway` section: upstreams, their timeouts, and browsers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum as _;
use schemars::JsonSchema;
use serde_saphyr::Spanned;
use tidegate::internals::{Bounded, Document};

use super::{ConfigError, CorsConfig, cors, raw};
use crate::gateway::{Upstream, UpstreamLimits, UpstreamTls};

/// Minimum rate of uploads, in bytes per second.
const DEFAULT_MIN_UPLOAD_RATE: u32 = 240;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GatewayConfig {
    /// Valid URLs of the upstreams.
    pub(crate) upstreams: Vec<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) header_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) limits: UpstreamLimits,
    /// Bytes per second; 0 for no minimum.
    pub(crate) min_upload_rate: u32,
    /// Whether headers with an underscore in their name are forwarded.
    pub(crate) underscore_headers: bool,
    pub(crate) exempt_preflight: bool,
    pub(crate) cors: Option<CorsConfig>,
    pub(crate) access_log: Option<AccessLogConfig>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccessLogConfig {
    pub(crate) destination: LogDestination,
    pub(crate) format: AccessLogFormat,
    /// Whether query strings are logged.
    pub(crate) query: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LogDestination {
    Stdout,
    Stderr,
    File(PathBuf),
}

impl LogDestination {
    /// Parses `stdout`, `stderr` or a path relative to a folder.
    pub(crate) fn new(folder: &Path, path: &str) -> Self {
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
pub(crate) enum AccessLogFormat {
    /// The combined format of Apache and nginx.
    #[default]
    Combined,
    /// One JSON object per line, with the decision, the upstream and the trace.
    Json,
}

pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: &raw::RawGateway,
) -> Result<GatewayConfig, ConfigError> {
    for text in &raw.upstreams {
        text.value
            .parse::<Upstream>()
            .map_err(|error| document.error_at(text, &error.to_string()))?;
    }
    let timeout = |written: Option<raw::GatewayTimeout>, default: u64| {
        written.map_or(Duration::from_secs(default), raw::GatewayTimeout::get)
    };
    Ok(GatewayConfig {
        upstreams: raw.upstreams.iter().map(|text| text.value.clone()).collect(),
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
