use std::process::Command;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
};
use serde_json::{Value, json};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{Service, with_free_ports};
use crate::upstream::{OK, Upstream};

const LIMIT: &str = "policies: [{name: p, limit: 3, window: 1h}]\n";

/// Certificate for localhost, its key and its CA, as files.
pub(crate) fn with_certificate(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut params = CertificateParams::new(Vec::<String>::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "test CA");
    let ca =
        CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("parameters");
    let certificate = params.signed_by(&key, &ca).expect("signed");
    let write =
        |name: &str, text: String| std::fs::write(folder.path().join(name), text).expect("written");
    write("cert.pem", certificate.pem());
    write("key.pem", key.serialize_pem());
    write("ca.pem", ca.pem());
    write("tidegate.yaml", with_free_ports(config));
    folder
}

pub(crate) fn port(address: &str) -> &str {
    address.rsplit(':').next().expect("a port")
}

fn curl(arguments: &[&str]) -> (String, String) {
    let options = ["-s", "-m", "20", "-w", "\n%{http_version} %{http_code}"];
    let output = Command::new("curl").args(options).args(arguments).output().expect("curl runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (body, summary) = text.rsplit_once('\n').expect("curl's summary");
    (body.to_owned(), summary.to_owned())
}

#[test]
fn clients_can_use_tls_with_both_http_versions() {
    let upstream = Upstream::responding_with(OK);
    let folder = with_certificate(&format!(
        "{LIMIT}tls: {{certificate: cert.pem, key: key.pem}}\ngateway: {{upstreams: ['{}']}}\n",
        upstream.url()
    ));
    let ca = folder.path().join("ca.pem").display().to_string();
    let gateway = Service::gateway_in(folder, &[]);
    let url = format!("https://localhost:{}/", port(&gateway.http));
    let send = |version: &str| curl(&["--cacert", &ca, version, &url]);
    assert_eq!(send("--http2"), ("ok".to_owned(), "2 200".to_owned()));
    assert_eq!(send("--http1.1"), ("ok".to_owned(), "1.1 200".to_owned()));
    assert_eq!(curl(&["--cacert", &ca, "--http2", "-d", "body", &url]).1, "2 200");
    assert_eq!(send("--http2").1, "2 429");
    let received = upstream.received();
    let host = format!("localhost:{}", port(&gateway.http));
    assert_eq!(received[0].header("host"), Some(host.as_str()));
    assert_eq!(received[0].header("x-forwarded-proto"), Some("https"));
    assert_eq!(received[0].header("via"), Some("2 tidegate"));
    assert_eq!(received[2].body, b"body");
}

#[test]
fn plaintext_http2_needs_prior_knowledge() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let url = format!("http://{}/", gateway.http);
    assert_eq!(curl(&["--http2-prior-knowledge", &url]), ("ok".to_owned(), "2 200".to_owned()));
    // An upgrade from HTTP/1.1 to HTTP/2 is ignored.
    assert_eq!(curl(&["--http2", &url]), ("ok".to_owned(), "1.1 200".to_owned()));
}

#[test]
fn upstreams_with_valid_certificates_can_use_tls_with_both_http_versions() {
    let folder = with_certificate("tls: {certificate: cert.pem, key: key.pem}\n");
    let file = folder.path().join("tidegate.yaml");
    let ca = folder.path().join("ca.pem");
    let service = Service::start_on(folder, &file, &[]);
    let payload = json!({"key": "k", "quota": {"limit": 7, "window": "60s"}}).to_string();
    for scheme in ["https", "h2"] {
        let upstream = format!("{scheme}://localhost:{}", port(&service.http));
        let gateway =
            Service::gateway(&format!("gateway: {{ca: {}}}\n", ca.display()), &[&upstream]);
        let response = gateway.post("/v1/peek", &payload);
        assert_eq!(
            (response.status, &response.json()["limit"]),
            (200, &json!(7)),
            "{scheme}: {response:?}"
        );
        let via = if scheme == "h2" { "2 tidegate" } else { "1.1 tidegate" };
        assert_eq!(response.header("via"), Some(via));
        // Signed by an untrusted CA.
        let gateway = Service::gateway("", &[&upstream]);
        assert_eq!(gateway.post("/v1/peek", &payload).status, 502);
    }
}

#[test]
fn reload_applies_a_changed_ca_of_the_upstreams() {
    let folder = with_certificate("tls: {certificate: cert.pem, key: key.pem}\n");
    let file = folder.path().join("tidegate.yaml");
    let right_ca = std::fs::read(folder.path().join("ca.pem")).expect("a CA");
    let service = Service::start_on(folder, &file, &[]);
    for scheme in ["https", "h2"] {
        let upstream = format!("{scheme}://localhost:{}", port(&service.http));
        // The CA of another certificate.
        let gateway =
            Service::gateway_in(with_certificate("gateway: {ca: ca.pem}\n"), &[&upstream]);
        let status =
            || crate::support::request(&gateway.http, "GET", "/openapi.json", &[], b"").status;
        assert_eq!(status(), 502, "{scheme}");
        std::fs::write(gateway.folder().join("ca.pem"), &right_ca).expect("written");
        gateway.wait_until_logged("configuration reloaded");
        assert_eq!(status(), 200, "{scheme}");
        assert!(!gateway.output().contains("need a restart"), "{}", gateway.output());
    }
}

#[tokio::test]
async fn grpc_is_forwarded_with_trailers_and_limited() {
    let service = Service::start("");
    let upstream = format!("h2c://{}", service.grpc.as_deref().expect("the service listens"));
    let gateway = Service::gateway(LIMIT, &[&upstream]);
    let endpoint =
        tonic::transport::Endpoint::from_shared(format!("http://{}", gateway.http)).expect("a URL");
    let mut client = HealthClient::new(endpoint.connect().await.expect("connected"));
    let send = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let response = client.check(send("")).await.expect("a response").into_inner();
    assert_eq!(response.status, 1, "serving");
    // The first message of an open stream arrives at once.
    let mut watched = client.watch(send("")).await.expect("a stream").into_inner();
    assert_eq!(watched.message().await.expect("a message").expect("one").status, 1);
    let unknown = client.check(send("unknown")).await.expect_err("not known");
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    let denied = client.check(send("")).await.expect_err("denied");
    assert_eq!(denied.code(), tonic::Code::ResourceExhausted);
}

#[test]
fn json_responses_are_forwarded_unchanged() {
    let service = Service::start("");
    let gateway = Service::gateway("", &[&format!("http://{}", service.http)]);
    // The description has the host that the client asked for.
    let host = format!("Host: {}", gateway.http);
    let (direct, through) = (
        curl(&["-H", &host, &format!("http://{}/openapi.json", service.http)]).0,
        curl(&["--compressed", &format!("http://{}/openapi.json", gateway.http)]).0,
    );
    assert!(serde_json::from_str::<Value>(&through).is_ok() && through == direct);
}
