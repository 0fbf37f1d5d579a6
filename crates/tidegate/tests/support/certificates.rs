//! A certificate authority for one test, and the certificates that it signs.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::named("test authority")
    }

    pub(crate) fn named(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("signed") }
    }

    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Signs a certificate for a server of this name, or for a client.
    pub(crate) fn sign(&self, name: &str) -> Identity {
        self.sign_all(&[name])
    }

    /// Signs a certificate for a server of these names.
    pub(crate) fn sign_all(&self, names: &[&str]) -> Identity {
        let owned: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(owned).expect("names");
        params.distinguished_name.push(DnType::CommonName, names[0]);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

impl Identity {
    /// Writes the certificate and the key into a folder.
    pub(crate) fn write(&self, folder: &Path) -> (PathBuf, PathBuf) {
        let (certificate, key) = (folder.join("certificate.pem"), folder.join("key.pem"));
        std::fs::write(&certificate, &self.certificate).expect("written");
        std::fs::write(&key, &self.key).expect("written");
        (certificate, key)
    }
}
