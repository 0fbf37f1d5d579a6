//! TLS and tokens with redis-cli.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::resp_address;
use crate::support::{Service, with_free_ports};

/// Starts a service with TLS and a token. Returns it with the address and the file of the CA.
fn start() -> (Service, String, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("signed");
    let ca = folder.path().join("cert.pem");
    std::fs::write(&ca, certificate.pem()).expect("written");
    std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).expect("written");
    let config = "tls: {certificate: cert.pem, key: key.pem}\nauth: {api_token: secret}\n\
                  policies: [{name: per-user, limit: 3, window: 1h}]\n";
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, with_free_ports(config)).expect("written");
    let service = Service::start_on(folder, &file, &["--resp", "127.0.0.1:0"]);
    let address = resp_address(&service);
    (service, address, ca)
}

/// Returns the protocol that a TLS client and the server agree on, if any.
fn negotiated(address: &str, ca: &Path, offered: &[&str]) -> Option<Vec<u8>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).expect("a certificate")).expect("a CA");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
    let name = "127.0.0.1".try_into().expect("a name");
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = TcpStream::connect(address).expect("the service listens");
    while client.is_handshaking() {
        client.complete_io(&mut stream).expect("a handshake");
    }
    client.alpn_protocol().map(<[u8]>::to_vec)
}

#[test]
fn listener_offers_no_protocol_of_http() {
    let (service, address, ca) = start();
    for offered in [&["h2", "http/1.1"][..], &["redis"], &[]] {
        assert_eq!(negotiated(&address, &ca, offered), None, "{offered:?}");
    }
    assert_eq!(negotiated(&service.http, &ca, &["h2"]), Some(b"h2".to_vec()));
}

#[test]
fn redis_cli_connects_over_tls_with_a_token() {
    let (_service, address, ca) = start();
    let (_, port) = address.rsplit_once(':').expect("a port");
    let ask = |options: &[&str]| {
        let output = Command::new("redis-cli")
            .args(["-h", "127.0.0.1", "-p", port])
            .args(options)
            .args(["TG.ACQUIRE", "per-user", "ann"])
            .output()
            .expect("redis-cli runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    };
    let ca = ca.to_str().expect("UTF-8");
    let reply = ask(&["--tls", "--cacert", ca, "--no-auth-warning", "-a", "secret"]);
    assert!(reply.starts_with("1\n3\n2\n0\n"), "{reply}");
    let reply = ask(&["--tls", "--cacert", ca]);
    assert!(reply.contains("NOAUTH"), "{reply}");
    let reply = ask(&["--no-auth-warning", "-a", "secret"]);
    assert!(!reply.contains("1\n3\n"), "without TLS: {reply}");
}
