//! What other tools say of us: promtool of the metrics, schemathesis of the API, curl of our TLS.

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
    // What a program leaves behind goes with this folder.
    let folder = tempfile::tempdir().expect("a temporary folder");
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
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
    child.wait_with_output().expect("it ends")
}

fn told(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn promtool_finds_nothing_wrong_with_the_metrics() {
    let service = Service::start(POLICY);
    service.acquire(&json!({"policy": "per-user", "key": "u1"}));
    let metrics = service.admin("/metrics");
    assert_eq!(metrics.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let output = run("promtool", &["check", "metrics"], &metrics.body);
    assert!(output.status.success() && told(&output).is_empty(), "{}", told(&output));
}

#[test]
fn schemathesis_finds_the_api_as_its_description_says() {
    let service = Service::start(POLICY);
    let program =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/schemathesis"));
    let location = format!("http://{}/openapi.json", service.http);
    // A body may fit the schema and still be no question (a policy without a key): that it is
    // refused is right.
    let checks = ["--exclude-checks", "positive_data_acceptance"];
    let phases = ["--phases", "coverage,fuzzing", "-n", "60", "--seed", "1", "--no-color"];
    let arguments: Vec<&str> = ["run", &location].into_iter().chain(phases).chain(checks).collect();
    let output = run(program, &arguments, "");
    assert!(output.status.success(), "{}", told(&output));
    assert!(told(&output).contains("Tested: 5"), "{}", told(&output));
}

/// A certificate authority, and what it has signed.
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

    /// A certificate for 127.0.0.1 and its key.
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
fn tls_is_spoken_and_new_certificates_are_taken_without_a_restart() {
    let folder = tempfile::tempdir().expect("a temporary folder");
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
    let ask =
        |ca: &str| curl(&["--cacert", ca, "-d", r#"{"policy": "per-user", "key": "u"}"#, &url]);
    assert!(told(&ask(&ca)).contains(r#""allowed":true"#), "{}", told(&ask(&ca)));
    let grpc = format!("https://{}/", service.grpc.as_deref().expect("an address"));
    let version =
        curl(&["--cacert", &ca, "--http2", "-o", "/dev/null", "-w", "%{http_version}", &grpc]);
    assert_eq!(told(&version), "2", "gRPC is offered by ALPN");
    assert!(
        !curl(&["--cacert", &ca, &url.replace("https", "http")]).status.success(),
        "nothing is said in the clear"
    );

    let second = Authority::new();
    second.write(ca.as_ref());
    assert!(!ask(&ca).status.success(), "signed by another");
    // Between the two writes they do not go together: that one is refused, and the next taken.
    second.sign(certificate.as_ref(), key.as_ref());
    service.until("the new certificate is taken", |_| ask(&ca).status.success());
    assert_eq!(
        service.admin("/readyz").status,
        200,
        "the admin listener stays in the clear, on loopback"
    );
}

#[test]
fn clients_without_the_right_certificate_are_turned_away() {
    let folder = tempfile::tempdir().expect("a temporary folder");
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
    let ask = |more: &[&str]| {
        curl(
            &[&["--cacert", ca, "-d", r#"{"policy": "per-user", "key": "u"}"#, &url], more]
                .concat(),
        )
    };
    assert!(!ask(&[]).status.success());
    assert!(!ask(&["--cert", stranger, "--key", stranger_key]).status.success());
    let known = ask(&["--cert", client, "--key", client_key]);
    assert!(told(&known).contains(r#""allowed":true"#), "{}", told(&known));
}

#[test]
fn a_certificate_that_cannot_be_used_is_said_at_the_start() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str| folder.path().join(name);
    let authority = Authority::new();
    authority.sign(&file("cert.pem"), &file("key.pem"));
    authority.sign(&file("other.pem"), &file("other-key.pem"));
    std::fs::write(file("empty.pem"), "").expect("written");
    for (certificate, key, message) in [
        ("cert.pem", "other-key.pem", "do not go together"),
        ("empty.pem", "key.pem", "no certificate can be read"),
        ("cert.pem", "empty.pem", "no private key"),
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
        assert!(told(&output).contains(message), "{}", told(&output));
    }
}
