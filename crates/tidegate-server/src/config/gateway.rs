//! The `gateway` section: upstreams and their timeouts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{ConfigError, raw};
use crate::gateway::Upstream;
use tidegate::internals::Document;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GatewayConfig {
    /// Valid URLs of the upstreams.
    pub(crate) upstreams: Vec<String>,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) connect_timeout: Duration,
    pub(crate) header_timeout: Duration,
    pub(crate) idle_timeout: Duration,
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
    let ca = raw.ca.as_ref().map(|file| folder.join(&file.value));
    if let (Some(file), Some(ca)) = (&raw.ca, &ca) {
        crate::tls::certificates(ca)
            .map_err(|error| document.error_at(file, &format!("gateway.ca: {error}")))?;
    }
    Ok(GatewayConfig {
        upstreams: raw.upstreams.iter().map(|text| text.value.clone()).collect(),
        ca,
        connect_timeout: timeout(raw.connect_timeout, 2),
        header_timeout: timeout(raw.header_timeout, 30),
        idle_timeout: timeout(raw.idle_timeout, 60),
    })
}
