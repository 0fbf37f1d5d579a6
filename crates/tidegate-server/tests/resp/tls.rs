//! TLS and tokens with redis-cli.

use std::process::Command;

use rcgen::{CertificateParams, KeyPair};

use crate::resp_address;
use crate::support::{Service, with_free_ports};

#[test]
fn redis_cli_connects_over_tls_with_a_token() {
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
