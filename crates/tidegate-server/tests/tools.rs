//! Checks with external tools: promtool (metrics), schemathesis (API), curl (TLS).

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
};
use serde_json::json;
use support::{Service, with_free_ports};

const POLICY: &str = "policies:\n  - {name: per-user, limit: 1000000, window: 1h}\n";

/// Runs a program that `make setup` installs.
fn run(program: impl AsRef<Path>, arguments: &[&str], input: &str) -> Output {
    use std::io::Write;
    use std::process::Stdio;
    let program = program.as_ref();
    // Files that the program leaves behind are removed with this directory.
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("{} cannot be started ({error}): `make setup` installs it", program.display())
        });
    child
        .stdin
        .take()
        .expect("piped")
        .write_all(input.as_bytes())
        .expect("the program reads its input");
    child.wait_with_output().expect("the program exits")
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn promtool_accepts_the_metrics() {
    let service = Service::start(POLICY);
    service.acquire(&json!({"policy": "per-user", "key": "u1"}));
    let metrics = service.admin("/metrics");
    assert_eq!(metrics.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let output = run("promtool", &["check", "metrics"], &metrics.body);
    assert!(output.status.success() && text(&output).is_empty(), "{}", text(&output));
}

/// Compares a description with the responses to requests that follow it, and to those that do not.
fn check_description(address: &str, operations: usize, more: &[&str]) {
    let program =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/schemathesis"));
    let location = format!("http://{address}/openapi.json");
    // A body may match the schema and still be invalid (a policy without a key), so a rejection is
    // fine.
    let checks = ["--exclude-checks", "positive_data_acceptance"];
    let phases = ["--phases", "coverage,fuzzing", "-n", "60", "--seed", "1", "--no-color"];
    let arguments = [&["run", &location], &phases[..], &checks, more].concat();
    let output = run(program, &arguments, "");
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains(&format!("Tested: {operations}")), "{}", text(&output));
}

#[test]
fn schemathesis_confirms_the_description_of_the_api() {
    let service = Service::start(POLICY);
    check_description(&service.http, 8, &[]);
}

#[test]
fn schemathesis_confirms_the_description_of_the_admin_api() {
    let service = Service::start(POLICY);
    service.acquire(&json!({"policy": "per-user", "key": "u1"}));
    // A stream of events has no end.
    check_description(&service.admin, 15, &["--exclude-path", "/v1/live"]);
}

/// Certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "an authority for tests");
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("signed"))
    }

    fn write(&self, file: &Path) {
        std::fs::write(file, self.0.pem()).expect("written");
    }

    /// Writes a certificate for 127.0.0.1 and its key.
    fn sign(&self, certificate: &Path, key_file: &Path) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        let signed = params.signed_by(&key, &self.0).expect("signed");
        std::fs::write(key_file, key.serialize_pem()).expect("written");
        std::fs::write(certificate, signed.pem()).expect("written");
    }
}

fn curl(arguments: &[&str]) -> Output {
    run("curl", &[&["--silent", "--show-error", "--max-time", "20"], arguments].concat(), "")
}

#[test]
fn tls_works_and_new_certificates_are_reloaded() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let first = Authority::new();
    first.write(file("ca.pem").as_ref());
    first.sign(file("cert.pem").as_ref(), file("key.pem").as_ref());
    let config = format!("tls: {{certificate: cert.pem, key: key.pem}}\n{POLICY}");
    std::fs::write(file("tidegate.yaml"), with_free_ports(&config)).expect("written");
    let (ca, certificate, key) = (file("ca.pem"), file("cert.pem"), file("key.pem"));
    let yaml = file("tidegate.yaml");
    let service = Service::start_on(folder, yaml.as_ref(), &[]);
    let url = format!("https://{}/v1/acquire", service.http);
    let send =
        |ca: &str| curl(&["--cacert", ca, "-d", r#"{"policy": "per-user", "key": "u"}"#, &url]);
    assert!(text(&send(&ca)).contains(r#""allowed":true"#), "{}", text(&send(&ca)));
    let grpc = format!("https://{}/", service.grpc.as_deref().expect("an address"));
    let version =
        curl(&["--cacert", &ca, "--http2", "-o", "/dev/null", "-w", "%{http_version}", &grpc]);
    assert_eq!(text(&version), "2", "gRPC is offered by ALPN");
    assert!(
        !curl(&["--cacert", &ca, &url.replace("https", "http")]).status.success(),
        "plain HTTP is rejected"
    );

    let second = Authority::new();
    second.write(ca.as_ref());
    assert!(!send(&ca).status.success(), "signed by another CA");
    // Between the two writes the files do not match, so that reload fails and the next succeeds.
    second.sign(certificate.as_ref(), key.as_ref());
    service.wait_until("the new certificate is active", |_| send(&ca).status.success());
    assert_eq!(service.admin("/readyz").status, 200, "the admin listener on loopback has no TLS");
}

#[test]
fn clients_without_a_valid_certificate_are_rejected() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (ours, other) = (Authority::new(), Authority::new());
    ours.write(file("ca.pem").as_ref());
    ours.sign(file("cert.pem").as_ref(), file("key.pem").as_ref());
    ours.sign(file("client.pem").as_ref(), file("client-key.pem").as_ref());
    other.sign(file("stranger.pem").as_ref(), file("stranger-key.pem").as_ref());
    let config =
        format!("tls: {{certificate: cert.pem, key: key.pem, client_ca: ca.pem}}\n{POLICY}");
    std::fs::write(file("tidegate.yaml"), with_free_ports(&config)).expect("written");
    let names =
        ["ca.pem", "client.pem", "client-key.pem", "stranger.pem", "stranger-key.pem"].map(file);
    let [ca, client, client_key, stranger, stranger_key] = &names;
    let yaml = file("tidegate.yaml");
    let service = Service::start_on(folder, yaml.as_ref(), &[]);
    let url = format!("https://{}/v1/acquire", service.http);
    let send = |more: &[&str]| {
        curl(
            &[&["--cacert", ca, "-d", r#"{"policy": "per-user", "key": "u"}"#, &url], more]
                .concat(),
        )
    };
    assert!(!send(&[]).status.success());
    assert!(!send(&["--cert", stranger, "--key", stranger_key]).status.success());
    let known = send(&["--cert", client, "--key", client_key]);
    assert!(text(&known).contains(r#""allowed":true"#), "{}", text(&known));
}

#[test]
fn unusable_certificates_are_reported_at_startup() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = |name: &str| folder.path().join(name);
    let authority = Authority::new();
    authority.sign(&file("cert.pem"), &file("key.pem"));
    authority.sign(&file("other.pem"), &file("other-key.pem"));
    std::fs::write(file("empty.pem"), "").expect("written");
    for (certificate, key, message) in [
        ("cert.pem", "other-key.pem", "do not match"),
        ("empty.pem", "key.pem", "cannot read a certificate"),
        ("cert.pem", "empty.pem", "cannot read a PEM private key"),
        ("nowhere.pem", "key.pem", "nowhere.pem"),
    ] {
        let config = format!("tls: {{certificate: {certificate}, key: {key}}}\n");
        std::fs::write(file("tidegate.yaml"), config).expect("written");
        let path = file("tidegate.yaml");
        let output = run(
            env!("CARGO_BIN_EXE_tidegate"),
            &["config", "check", path.to_str().expect("UTF-8")],
            "",
        );
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output).contains(message), "{}", text(&output));
    }
}
