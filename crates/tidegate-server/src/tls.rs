//! TLS to clients: certificates from PEM files, clients' own certificates if they are asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// Where the certificates are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    /// Clients must show a certificate that one of these has signed.
    pub(crate) client_ca: Option<PathBuf>,
}

/// What a listener needs, or what is wrong with which file.
pub(crate) fn load(files: &Files) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", shown(file)))?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(
                verifier.map_err(|error| format!("{}: {error}", shown(file)))?,
            )
        }
    };
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| {
        format!("{}: no private key in PEM can be read: {error}", shown(&files.key))
    })?;
    let mut config =
        builder.with_single_cert(certificates(&files.certificate)?, key).map_err(|error| {
            format!(
                "{} and {} do not go together: {error}",
                shown(&files.certificate),
                shown(&files.key)
            )
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// The name of a file, if it can be one: somebody may write the key itself in its place.
pub(crate) fn shown(file: &Path) -> String {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let like_a_file =
        name.contains('.') && !name.contains(|character: char| character.is_whitespace());
    if file.exists() || like_a_file { file.display().to_string() } else { "this file".to_owned() }
}

pub(crate) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let unreadable = |error: &dyn std::fmt::Display| {
        format!("{}: no certificate can be read: {error}", shown(file))
    };
    let found = CertificateDer::pem_file_iter(file).map_err(|error| unreadable(&error))?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| unreadable(&error))?;
    if found.is_empty() { Err(unreadable(&"there is none in PEM form")) } else { Ok(found) }
}
