//! TLS from PEM files: certificates of listeners, optional client certificates, and the authorities
//! that clients of other servers trust.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// TLS settings of the listeners.
#[derive(Debug, Clone)]
pub struct ListenerTls {
    /// Settings of http, grpc and gateway.
    pub service: Arc<ServerConfig>,
    /// Settings of the admin listener, unless it has no TLS. They never ask for a client
    /// certificate, because probes have none.
    pub admin: Option<Arc<ServerConfig>>,
    /// Whether clients of `service` need a certificate.
    pub has_client_ca: bool,
}

/// PEM files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// CAs that must have signed the certificate of every client.
    pub client_ca: Option<PathBuf>,
    /// Lists of revoked client certificates.
    pub client_crl: Option<PathBuf>,
}

/// Loads the TLS settings of a listener. The error names the file.
pub fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, String> {
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
            let crls = files.client_crl.as_deref().map(revocation_lists).transpose()?;
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .with_crls(crls.unwrap_or_default())
                .build();
            builder.with_client_cert_verifier(
                verifier.map_err(|error| format!("{}: {error}", shown(file)))?,
            )
        }
    };
    let (certificate, key) = (&files.certificate, &files.key);
    let mut config = builder
        .with_single_cert(certificates(certificate)?, private_key(key)?)
        .map_err(|error| mismatch(certificate, key, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// PEM files of a client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTlsFiles {
    /// CAs that sign the certificates of servers; by default the roots that the system trusts.
    pub ca: Option<PathBuf>,
    /// Certificate of the client, and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl ClientTlsFiles {
    /// Returns the files of a client without a certificate.
    pub fn of_ca(ca: Option<&Path>) -> Self {
        Self { ca: ca.map(Path::to_owned), identity: None }
    }
}

/// Loads the TLS settings of a client. The error names the file.
pub fn client(files: &ClientTlsFiles) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match &files.ca {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?.with_root_certificates(roots);
    let Some((certificate, key)) = &files.identity else {
        return Ok(builder.with_no_client_auth());
    };
    let identity = builder.with_client_auth_cert(certificates(certificate)?, private_key(key)?);
    identity.map_err(|error| mismatch(certificate, key, &error))
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(file)
        .map_err(|error| format!("{}: cannot read a PEM private key: {error}", shown(file)))
}

fn mismatch(certificate: &Path, key: &Path, error: &rustls::Error) -> String {
    format!("{} and {} do not match: {error}", shown(certificate), shown(key))
}

/// TLS settings towards upstreams of both protocols.
#[derive(Debug, Clone)]
pub struct UpstreamTls {
    pub http1: Arc<ClientConfig>,
    pub http2: Arc<ClientConfig>,
}

impl UpstreamTls {
    /// Loads the certificates of `ca`, or those that the system trusts.
    pub fn load(ca: Option<&Path>) -> Result<Self, String> {
        let http1 = client(&ClientTlsFiles::of_ca(ca))?;
        let mut http2 = http1.clone();
        http2.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { http1: Arc::new(http1), http2: Arc::new(http2) })
    }
}

/// Returns the path for error messages, unless it does not look like one: the field may hold the
/// key itself by mistake, which must not be printed.
pub fn shown(file: &Path) -> String {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_like_a_path =
        name.contains('.') && !name.contains(|character: char| character.is_whitespace());
    if file.exists() || is_like_a_path {
        file.display().to_string()
    } else {
        "this file".to_owned()
    }
}

/// Reads all certificates of a PEM file, at least one.
pub fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let unreadable = |error: &dyn std::fmt::Display| {
        format!("{}: cannot read a certificate: {error}", shown(file))
    };
    let found = CertificateDer::pem_file_iter(file).map_err(|error| unreadable(&error))?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| unreadable(&error))?;
    if found.is_empty() { Err(unreadable(&"the file has none in PEM form")) } else { Ok(found) }
}

/// Reads all revocation lists of a PEM file, at least one.
pub fn revocation_lists(file: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let unreadable = |error: &dyn std::fmt::Display| {
        format!("{}: cannot read a revocation list: {error}", shown(file))
    };
    let found =
        CertificateRevocationListDer::pem_file_iter(file).map_err(|error| unreadable(&error))?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| unreadable(&error))?;
    if found.is_empty() { Err(unreadable(&"the file has none in PEM form")) } else { Ok(found) }
}
