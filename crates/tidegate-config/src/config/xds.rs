//! The section `envoy.xds`: the control plane that sends the rules of Envoy.

use std::path::Path;

use http::uri::Authority;
use rustls::pki_types::ServerName;
use serde_saphyr::Spanned;
use tidegate::Algorithm;

use super::{Config, raw};
use crate::envoy::{RateLimitConfig, Rules};
use crate::key_hash;
use crate::yaml::{ConfigError, Document};
use tidegate_net::tls::{self, ClientTlsFiles};

const DEFAULT_NODE_ID: &str = "tidegate";

/// Control plane with the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XdsConfig {
    /// `HOST:PORT`.
    pub server: Authority,
    pub node_id: String,
    /// `None` without TLS.
    pub tls: Option<XdsTls>,
}

/// TLS towards the control plane. The files are read again for every connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XdsTls {
    pub files: ClientTlsFiles,
    /// Name in the certificate of the control plane, unless it is that of `server`.
    pub server_name: Option<ServerName<'static>>,
}

pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    envoy: &raw::RawEnvoy,
) -> Result<Option<XdsConfig>, ConfigError> {
    let Some(field) = &envoy.xds else { return Ok(None) };
    if let Some(file) = envoy.files.first() {
        let message = "envoy: files and xds exclude each other: remove one of them";
        return Err(document.error_at(file, message));
    }
    let raw = &field.value;
    let server = raw.server.value.parse::<Authority>().ok().filter(|server| {
        server.port_u16().is_some_and(|port| port > 0)
            && !server.host().is_empty()
            && !server.as_str().contains('@')
    });
    let server = server.ok_or_else(|| {
        let message = format!(
            "envoy: xds.server: {:?} is not an address: write HOST:PORT, without a scheme",
            raw.server.value
        );
        document.error_at(&raw.server, &message)
    })?;
    let concurrency = Algorithm::Concurrency.to_string();
    let mut algorithms = envoy.algorithm.iter().chain(envoy.algorithms.values());
    let has_holds = algorithms.any(|name| name.value == concurrency) || !envoy.holds.is_empty();
    if has_holds && envoy.hold_id.is_none() {
        return Err(document.error(
            "envoy: hold_id is missing: rules may hold units until a request ends, so write the \
             key of the descriptor entry that has the id of the request",
        ));
    }
    let node_id = raw.node_id.as_ref().map_or(DEFAULT_NODE_ID, |id| &id.value).to_owned();
    let tls = raw.tls.as_ref().map(|field| validate_tls(document, folder, field)).transpose()?;
    Ok(Some(XdsConfig { server, node_id, tls }))
}

fn validate_tls(
    document: &Document<'_>,
    folder: &Path,
    field: &Spanned<raw::RawXdsTls>,
) -> Result<XdsTls, ConfigError> {
    let raw = &field.value;
    let error = |message: String| document.error_at(field, &format!("envoy: xds.tls: {message}"));
    let path = |file: &Spanned<String>| folder.join(&file.value);
    let identity = match (&raw.certificate, &raw.key) {
        (Some(certificate), Some(key)) => Some((path(certificate), path(key))),
        (None, None) => None,
        _ => return Err(error("needs certificate and key together, or neither".to_owned())),
    };
    let files = ClientTlsFiles { ca: raw.ca.as_ref().map(path), identity };
    tls::client(&files).map_err(error)?;
    let server_name = raw.server_name.as_ref().map(|name| {
        ServerName::try_from(name.value.clone()).map_err(|_| {
            error("server_name must be a host name or an address, without a port".to_owned())
        })
    });
    Ok(XdsTls { files, server_name: server_name.transpose()? })
}

impl Config {
    /// Sets the rules that a control plane has sent. The error says what is wrong in which message.
    pub fn set_discovered_rules(&mut self, messages: &[RateLimitConfig]) -> Result<(), String> {
        let envoy = &mut self.envoy;
        let rules = Rules::from_messages(messages, envoy.algorithm, &envoy.algorithms);
        envoy.rules = rules.map_err(|error| error.to_string())?;
        for (name, holds) in &envoy.holds {
            let set = envoy.rules.set_holds(name, *holds);
            set.map_err(|error| format!("holds.{name}: {error}"))?;
        }
        envoy.has_rules = true;
        self.warnings.extend_from_slice(envoy.rules.warnings());
        let encoded: Vec<u8> = messages.iter().flat_map(prost::Message::encode_to_vec).collect();
        let hash = key_hash::of_bytes(&encoded);
        self.hash = key_hash::of(&[self.hash.as_str(), &hash].concat());
        self.sections.insert("envoy.xds".to_owned(), key_hash::short(&hash));
        Ok(())
    }
}
