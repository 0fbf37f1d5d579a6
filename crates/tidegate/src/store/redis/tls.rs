//! [`Tls`]: whom to trust, and who we are. By rustls with ring, whatever provider the process has installed.

use std::fmt;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::store::StoreError;

/// TLS options of a `RedisStore`: whose certificates it trusts, and which it shows. The server's
/// certificate is always verified, its name too.
///
/// ```
/// use tidegate::store::redis::Tls;
///
/// # fn read() -> std::io::Result<()> {
/// let tls = Tls::new().ca(std::fs::read("/etc/redis/ca.pem")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Tls {
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    /// Trusts those whom the system trusts, and shows no certificate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts these authorities (PEM) and no others.
    #[must_use]
    pub fn ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(pem.into());
        self
    }

    /// Shows this certificate, with its chain, and proves it by this key (PEM).
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some((certificate.into(), key.into()));
        self
    }

    pub(super) fn client_config(self) -> Result<Arc<ClientConfig>, StoreError> {
        let wrong = |what: &str, why: &dyn fmt::Display| {
            StoreError::Misconfigured(format!("TLS: {what}: {why}"))
        };
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(pem) => {
                for certificate in
                    certificates(pem).map_err(|error| wrong("the CA is no PEM", &error))?
                {
                    roots
                        .add(certificate)
                        .map_err(|error| wrong("the CA is not usable", &error))?;
                }
                if roots.is_empty() {
                    return Err(wrong("the CA is not usable", &"it holds no certificate"));
                }
            }
            None => {
                // Some systems keep a broken one among many good ones.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(wrong("the system trusts nobody", &"give the CA of your Redis"));
                }
            }
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong("no protocol", &error))?
            .with_root_certificates(roots);
        let config = match &self.identity {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = certificates(chain)
                    .map_err(|error| wrong("the certificate is no PEM", &error))?;
                if chain.is_empty() {
                    return Err(wrong("the certificate is not usable", &"it holds no certificate"));
                }
                // What a parser says of a key might quote it.
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|_| wrong("the key is not usable", &"no PEM key"))?;
                let shown = config.with_client_auth_cert(chain, key);
                shown
                    .map_err(|error| wrong("the certificate and its key are not usable", &error))?
            }
        };
        Ok(Arc::new(config))
    }
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
            .finish()
    }
}
