//! [`Tls`]: trusted certificates, the client certificate, and the names of servers. Uses rustls
//! with ring, independent of the process's default crypto provider.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName,
};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::endpoint::Address;
use crate::store::StoreError;

/// TLS options of a `RedisStore`: trusted certificates and the client certificate. The server's
/// certificate and its name are always verified.
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
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid("no protocol version", &error))?
            .with_root_certificates(roots);
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

fn invalid(problem: &str, reason: &dyn fmt::Display) -> StoreError {
    StoreError::Misconfigured(format!("TLS: {problem}: {reason}"))
}

fn certificates(
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, tokio_rustls::rustls::pki_types::pem::Error> {
    CertificateDer::pem_slice_iter(pem).collect()
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("ca", &self.ca.is_some())
            .field("identity", &self.identity.is_some())
            .field("server_name", &self.server_name)
            .finish()
    }
}
