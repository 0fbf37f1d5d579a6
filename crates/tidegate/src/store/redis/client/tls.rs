//! [`Tls`]: trusted certificates, the client certificate, and the names of servers. Uses rustls
//! with ring, independent of the process's default crypto provider.
//!
//! A URL with the wrong scheme is detected: `rediss://` for a port without TLS, or `redis://` for
//! one with TLS. Neither side reports it, so the port is asked in the other way. Nothing secret is
//! sent.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use arc_swap::ArcSwap;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime,
};
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct,
    RootCertStore, SignatureScheme, WantsVerifier,
};

use super::connection::Address;
use crate::store::StoreError;

/// TLS options of a `RedisStore`: trusted certificates and the client certificate. The server's
/// certificate is always verified, and so is its name, unless [`any_name`](Self::any_name) is set.
///
/// They are needed only for a private certificate authority, for client certificates, or for
/// servers whose address is not in their certificate; a `rediss://` URL alone trusts the
/// certificates of the system.
///
/// ```no_run
/// use tidegate::RedisStore;
/// use tidegate::store::redis::Tls;
///
/// # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
/// let tls = Tls::new()
///     .ca(std::fs::read("/etc/redis/ca.pem")?)
///     .identity(std::fs::read("/etc/redis/client.pem")?, std::fs::read("/etc/redis/client.key")?);
/// let store = RedisStore::builder("rediss://redis.example.com:6380").tls(tls).connect().await?;
/// # Ok(())
/// # }
/// ```
///
/// The certificates are parsed when the store connects or its options are checked:
///
/// ```
/// use tidegate::RedisStore;
/// use tidegate::store::redis::Tls;
///
/// let builder = RedisStore::builder("rediss://redis.example.com").tls(Tls::new().ca("no PEM"));
/// let error = builder.check().unwrap_err();
/// assert!(error.to_string().starts_with("TLS: the CA is not usable"));
/// ```
#[derive(Clone, Default)]
pub struct Tls {
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    server_name: Option<String>,
    accepts_any_name: bool,
}

/// TLS of the connections of a store.
pub(crate) struct ClientTls {
    pub(crate) config: Arc<ClientConfig>,
    /// Name of all servers that have no announced one.
    server_name: Option<ServerName<'static>>,
    /// Host names that the nodes of a cluster announce.
    announced: ArcSwap<HashMap<Address, ServerName<'static>>>,
}

impl ClientTls {
    /// Returns the name that the certificate of a server must have: the announced host name, else
    /// the configured name, else the host that is connected to.
    pub(crate) fn name_of(
        &self,
        address: &Address,
        host: &str,
    ) -> Result<ServerName<'static>, InvalidDnsNameError> {
        match self.announced.load().get(address).or(self.server_name.as_ref()) {
            Some(name) => Ok(name.clone()),
            None => ServerName::try_from(host.to_owned()),
        }
    }

    /// Takes over the announced host names of the options before.
    pub(crate) fn adopt_names(&self, earlier: &Self) {
        self.announced.store(earlier.announced.load_full());
    }

    /// Replaces the announced host names. One that is no host name is left out.
    pub(crate) fn announce(&self, names: impl IntoIterator<Item = (Address, String)>) {
        let parsed = |(address, name)| Some((address, ServerName::try_from(name).ok()?));
        let names: HashMap<_, _> = names.into_iter().filter_map(parsed).collect();
        if **self.announced.load() != names {
            self.announced.store(Arc::new(names));
        }
    }
}

impl Tls {
    /// Creates options that trust the system's certificates and present no client certificate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the trusted certificate authorities (PEM, one or several certificates), in place of the
    /// system's.
    #[must_use]
    pub fn ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(pem.into());
        self
    }

    /// Sets the client certificate with its chain, the client's own certificate first, and its
    /// private key (PEM: PKCS #8, PKCS #1 or SEC 1). Error messages never quote the key.
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some((certificate.into(), key.into()));
        self
    }

    /// Sets the name that the certificates of all servers must have, for servers whose address is
    /// not in their certificate: such as those of a cluster that announces IP addresses. A host
    /// name that the cluster announces has precedence. By default the name is the host of the URL,
    /// or of the address that a cluster or a sentinel reports.
    #[must_use]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// Accepts certificates of the trusted authorities for any name. A client that has one of them
    /// can take the place of the server, so this is for an authority that signs nothing else.
    #[must_use]
    pub fn any_name(mut self) -> Self {
        self.accepts_any_name = true;
        self
    }

    pub(crate) fn client_tls(self) -> Result<Arc<ClientTls>, StoreError> {
        let server_name = match &self.server_name {
            None => None,
            Some(name) => Some(ServerName::try_from(name.clone()).map_err(|_| {
                let reason = "it must be a host name or an address, without a port";
                invalid("the server name is not usable", &reason)
            })?),
        };
        let config = self.client_config()?;
        Ok(Arc::new(ClientTls { config, server_name, announced: ArcSwap::default() }))
    }

    fn client_config(self) -> Result<Arc<ClientConfig>, StoreError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(pem) => {
                for certificate in
                    certificates(pem).map_err(|error| invalid("the CA is not PEM", &error))?
                {
                    roots
                        .add(certificate)
                        .map_err(|error| invalid("the CA is not usable", &error))?;
                }
                if roots.is_empty() {
                    return Err(invalid("the CA is not usable", &"it contains no certificate"));
                }
            }
            None => {
                // Skip certificates that cannot be parsed: some systems have a few among many.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    let hint = "set the CA of your Redis";
                    return Err(invalid("the system has no trusted certificates", &hint));
                }
            }
        }
        let builder = config_builder().map_err(|error| invalid("no protocol version", &error))?;
        let config = if self.accepts_any_name {
            let verifier = AnyName::new(roots).map_err(|error| invalid("no verifier", &error))?;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        } else {
            builder.with_root_certificates(roots)
        };
        let config = match &self.identity {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = certificates(chain)
                    .map_err(|error| invalid("the certificate is not PEM", &error))?;
                if chain.is_empty() {
                    let reason = "it contains no certificate";
                    return Err(invalid("the certificate is not usable", &reason));
                }
                // The parser's error is dropped, because it might quote the key.
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|_| invalid("the key is not usable", &"it is not a PEM key"))?;
                config.with_client_auth_cert(chain, key).map_err(|error| {
                    invalid("the certificate and its key are not usable", &error)
                })?
            }
        };
        Ok(Arc::new(config))
    }
}

/// Verifier of certificates by their authorities alone.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl AnyName {
    fn new(roots: RootCertStore) -> Result<Self, VerifierBuilderError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        Ok(Self(verifier.build()?))
    }
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};

        // The name is verified last, so nothing else is wrong.
        match self.0.verify_server_cert(certificate, intermediates, name, ocsp_response, now) {
            Err(rustls::Error::InvalidCertificate(
                NotValidForName | NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn config_builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
}

fn invalid(problem: &str, reason: &dyn fmt::Display) -> StoreError {
    StoreError::Misconfigured(format!("TLS: {problem}: {reason}"))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, rustls::pki_types::pem::Error> {
    CertificateDer::pem_slice_iter(pem).collect()
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("ca", &self.ca.is_some())
            .field("identity", &self.identity.is_some())
            .field("server_name", &self.server_name)
            .field("accepts_any_name", &self.accepts_any_name)
            .finish()
    }
}

/// Reason for the error of a `rediss://` URL.
pub(crate) const NO_TLS: &str = "the server speaks no TLS on this port, and the URL is rediss://: \
                                 use redis://, or the server's TLS port";
/// Reason for the error of a `redis://` URL.
pub(crate) const ONLY_TLS: &str = "the server speaks TLS on this port, and the URL is redis://: \
                                   use rediss://, or the server's port without TLS";

/// Duration of a TLS handshake after which the port is asked without TLS. A Redis without TLS waits
/// for the rest of a command and answers nothing. It is shorter than any connect timeout.
const PLAIN_PROBE_AFTER: Duration = Duration::from_millis(250);
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// Performs the TLS handshake. Returns `None` if the server turns out to speak no TLS. The server's
/// certificate must have this name.
pub(crate) async fn handshake(
    config: &Arc<ClientConfig>,
    name: ServerName<'static>,
    (host, port): (&str, u16),
    stream: TcpStream,
) -> io::Result<Option<TlsStream<TcpStream>>> {
    let plain = async {
        sleep(PLAIN_PROBE_AFTER).await;
        if !speaks_plain(host, port).await {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        done = TlsConnector::from(Arc::clone(config)).connect(name, stream) => match done {
            Ok(stream) => Ok(Some(stream)),
            Err(_) if speaks_plain(host, port).await => Ok(None),
            Err(error) => Err(error),
        },
        () = plain => Ok(None),
    }
}

/// Returns whether the port answers a command without TLS.
async fn speaks_plain(host: &str, port: u16) -> bool {
    let first = first_byte_of_answer(host, port, b"PING\r\n").await;
    first.is_some_and(|byte| matches!(byte, b'+' | b'-'))
}

/// Returns whether the port answers the first message of a TLS handshake.
pub(crate) async fn speaks_tls(host: &str, port: u16) -> bool {
    // The types of the records handshake and alert.
    let is_record = |byte| matches!(byte, 0x16 | 0x15);
    match client_hello(host) {
        Some(hello) => first_byte_of_answer(host, port, &hello).await.is_some_and(is_record),
        None => false,
    }
}

/// Returns the first message of a TLS handshake. No certificate matters so early.
fn client_hello(host: &str) -> Option<Vec<u8>> {
    let config = config_builder().ok()?.with_root_certificates(RootCertStore::empty());
    let name = ServerName::try_from(host.to_owned()).ok()?;
    let mut hello = Vec::new();
    ClientConnection::new(Arc::new(config.with_no_client_auth()), name)
        .ok()?
        .write_tls(&mut hello)
        .ok()?;
    Some(hello)
}

async fn first_byte_of_answer(host: &str, port: u16, message: &[u8]) -> Option<u8> {
    let ask = async {
        let mut stream = TcpStream::connect((host, port)).await.ok()?;
        stream.write_all(message).await.ok()?;
        stream.read_u8().await.ok()
    };
    timeout(PROBE_TIMEOUT, ask).await.ok()?
}
