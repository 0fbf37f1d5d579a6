use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    DistinguishedName, DnType, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};

use crate::POLICY;
use crate::support::{Service, with_free_ports};

const SERVER: u64 = 1;
const CLIENT: u64 = 2;
const STOLEN: u64 = 3;

/// Certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "an authority for tests");
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("signed"))
    }

    /// Writes `NAME.pem` and `NAME-key.pem`, for 127.0.0.1.
    fn sign(&self, folder: &Path, name: &str, serial: u64) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("a name");
        params.serial_number = Some(SerialNumber::from(serial));
        let signed = params.signed_by(&key, &self.0).expect("signed");
        fs::write(folder.join(format!("{name}.pem")), signed.pem()).expect("written");
        fs::write(folder.join(format!("{name}-key.pem")), key.serialize_pem()).expect("written");
    }

    /// Returns a list of revoked certificates, in PEM.
    fn revoke(&self, serials: &[u64]) -> String {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2126, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.0).expect("signed").pem().expect("PEM")
    }
}

fn curl(arguments: &[&str]) -> Output {
    let options = ["--silent", "--show-error", "--max-time", "20", "-w", " %{http_code}"];
    Command::new("curl").args(options).args(arguments).output().expect("curl runs")
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Starts the service in a directory with certificates of this authority.
fn start(authority: &Authority, config: &str, crl: &str) -> Service {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path();
    fs::write(path.join("ca.pem"), authority.0.pem()).expect("written");
    for (name, serial) in [("cert", SERVER), ("client", CLIENT), ("stolen", STOLEN)] {
        authority.sign(path, name, serial);
    }
    fs::write(path.join("revoked.pem"), crl).expect("written");
    let file = path.join("tidegate.yaml");
    fs::write(file, with_free_ports(config)).expect("written");
    Service::launch_on_terminal("serve", folder, &[])
}

fn path(service: &Service, name: &str) -> String {
    service.folder().join(name).to_str().expect("UTF-8").to_owned()
}

#[test]
fn admin_listener_has_tls_if_it_is_configured() {
    let config = "tls: {certificate: cert.pem, key: cert-key.pem, client_ca: ca.pem, admin: true}\n\
                  auth: {admin_token: sesame}\n";
    let service = start(&Authority::new(), &format!("{config}{POLICY}"), "");
    let ca = path(&service, "ca.pem");
    let url = |path: &str| format!("https://{}{path}", service.admin);
    // Probes have no certificate of their own.
    assert_eq!(text(&curl(&["--cacert", &ca, &url("/healthz")])), "ok\n 200");
    let metrics = curl(&["--cacert", &ca, "-H", "Authorization: Bearer sesame", &url("/metrics")]);
    assert!(text(&metrics).ends_with(" 200"), "{}", text(&metrics));
    assert!(text(&curl(&["--cacert", &ca, &url("/metrics")])).ends_with(" 401"));
    let plain = curl(&[&url("/healthz").replace("https", "http")]);
    assert!(!plain.status.success(), "{}", text(&plain));
    let shown = format!("admin  https://{}", service.admin);
    service.wait_until("the address is shown", |service| service.output().contains(&shown));
    // The API still requires a client certificate.
    let query = r#"{"policy": "p", "key": "k"}"#;
    let api = format!("https://{}/v1/acquire", service.http);
    assert!(!curl(&["--cacert", &ca, "-d", query, &api]).status.success());
}

#[test]
fn revoked_client_certificates_are_rejected_also_after_a_change_of_the_list() {
    let authority = Authority::new();
    let config = "tls: {certificate: cert.pem, key: cert-key.pem, client_ca: ca.pem, client_crl: \
                  revoked.pem}\n";
    let limit = "policies: [{name: p, limit: 1000000, window: 1h}]\n";
    let service = start(&authority, &format!("{config}{limit}"), &authority.revoke(&[STOLEN]));
    let ca = path(&service, "ca.pem");
    let query = r#"{"policy": "p", "key": "k"}"#;
    let url = format!("https://{}/v1/acquire", service.http);
    let passes = |name: &str| {
        let certificate = path(&service, &format!("{name}.pem"));
        let key = path(&service, &format!("{name}-key.pem"));
        let arguments = ["--cacert", &ca, "--cert", &certificate, "--key", &key, "-d", query, &url];
        text(&curl(&arguments)).ends_with(" 200")
    };
    assert!(passes("client") && !passes("stolen"));
    fs::write(path(&service, "revoked.pem"), authority.revoke(&[STOLEN, CLIENT])).expect("written");
    service.wait_until("the list is reloaded", |_| !passes("client"));
    assert!(!passes("stolen"));
}

#[test]
fn unusable_revocation_lists_are_config_errors() {
    let authority = Authority::new();
    let folder = tempfile::tempdir().expect("a temporary directory");
    authority.sign(folder.path(), "cert", SERVER);
    fs::write(folder.path().join("ca.pem"), authority.0.pem()).expect("written");
    fs::write(folder.path().join("empty.pem"), "").expect("written");
    let file = folder.path().join("tidegate.yaml");
    for (options, message) in [
        ("client_ca: ca.pem, client_crl: empty.pem", "cannot read a revocation list"),
        ("client_ca: ca.pem, client_crl: nowhere.pem", "nowhere.pem"),
        ("client_crl: empty.pem", "needs client_ca"),
    ] {
        let config = format!("tls: {{certificate: cert.pem, key: cert-key.pem, {options}}}\n");
        fs::write(&file, config).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check"])
            .arg(&file)
            .output()
            .expect("the binary runs");
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).contains(message), "{options}: {}", text(&output));
    }
}

#[test]
fn reload_never_turns_tls_off() {
    let with_tls = |tls: &str, limit: u64| {
        format!("{tls}policies: [{{name: p, limit: {limit}, window: 1h}}]\n")
    };
    let tls = "tls: {certificate: cert.pem, key: cert-key.pem, admin: true}\n";
    let service = start(&Authority::new(), &with_tls(tls, 7), "");
    let ca = path(&service, "ca.pem");
    let limit = || {
        let url = format!("https://{}/v1/peek", service.http);
        let answer = text(&curl(&["--cacert", &ca, "-d", r#"{"policy": "p", "key": "k"}"#, &url]));
        answer.split_once("\"limit\":").and_then(|(_, rest)| rest.split(',').next()?.parse().ok())
    };
    assert_eq!(limit(), Some(7));
    for (section, message) in [
        ("", "tls is missing, but the listeners use TLS"),
        ("tls: {certificate: cert.pem, key: cert-key.pem}\n", "tls.admin is off"),
    ] {
        fs::write(service.file(), with_free_ports(&with_tls(section, 8))).expect("written");
        service.wait_until("the reload is refused", |service| service.output().contains(message));
        assert_eq!(limit(), Some(7), "{}", service.output());
        let health = format!("https://{}/healthz", service.admin);
        assert!(text(&curl(&["--cacert", &ca, &health])).ends_with(" 200"));
    }
    fs::write(service.file(), with_free_ports(&with_tls(tls, 9))).expect("written");
    service.wait_until("a later reload succeeds", |_| limit() == Some(9));
}
