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

/// A certificate for localhost, its key and who signed it, as files.
pub(crate) fn certified(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut params = CertificateParams::new(Vec::<String>::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "the signer");
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
    let told = ["-s", "-m", "20", "-w", "\n%{http_version} %{http_code}"];
    let output = Command::new("curl").args(told).args(arguments).output().expect("curl runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (body, told) = text.rsplit_once('\n').expect("what is told");
    (body.to_owned(), told.to_owned())
}

#[test]
fn clients_are_spoken_to_over_tls_in_both_versions() {
    let upstream = Upstream::answering(OK);
    let folder = certified(&format!(
        "{LIMIT}tls: {{certificate: cert.pem, key: key.pem}}\ngateway: {{upstreams: ['{}']}}\n",
        upstream.url()
    ));
    let ca = folder.path().join("ca.pem").display().to_string();
    let gateway = Service::gateway_on(folder, &[]);
    let url = format!("https://localhost:{}/", port(&gateway.http));
    let ask = |version: &str| curl(&["--cacert", &ca, version, &url]);
    assert_eq!(ask("--http2"), ("ok".to_owned(), "2 200".to_owned()));
    assert_eq!(ask("--http1.1"), ("ok".to_owned(), "1.1 200".to_owned()));
    assert_eq!(curl(&["--cacert", &ca, "--http2", "-d", "body", &url]).1, "2 200");
    assert_eq!(ask("--http2").1, "2 429");
    let received = upstream.received();
    let host = format!("localhost:{}", port(&gateway.http));
    assert_eq!(received[0].header("host"), Some(host.as_str()));
    assert_eq!(received[0].header("x-forwarded-proto"), Some("https"));
    assert_eq!(received[0].header("via"), Some("2 tidegate"));
    assert_eq!(received[2].body, b"body");
}

#[test]
fn http2_in_the_clear_is_spoken_by_prior_knowledge() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let url = format!("http://{}/", gateway.http);
    assert_eq!(curl(&["--http2-prior-knowledge", &url]), ("ok".to_owned(), "2 200".to_owned()));
    // Asked to change over in the middle of HTTP/1.1, we stay there.
    assert_eq!(curl(&["--http2", &url]), ("ok".to_owned(), "1.1 200".to_owned()));
}

#[test]
fn upstreams_are_spoken_to_over_tls_in_both_versions_if_their_certificate_is_good() {
    let folder = certified("tls: {certificate: cert.pem, key: key.pem}\n");
    let file = folder.path().join("tidegate.yaml");
    let ca = folder.path().join("ca.pem");
    let service = Service::start_on(folder, &file, &[]);
    let question = json!({"key": "k", "quota": {"limit": 7, "window": "60s"}}).to_string();
    for scheme in ["https", "h2"] {
        let upstream = format!("{scheme}://localhost:{}", port(&service.http));
        let gateway =
            Service::gateway(&format!("gateway: {{ca: {}}}\n", ca.display()), &[&upstream]);
        let answer = gateway.post("/v1/peek", &question);
        assert_eq!(
            (answer.status, &answer.json()["limit"]),
            (200, &json!(7)),
            "{scheme}: {answer:?}"
        );
        let via = if scheme == "h2" { "2 tidegate" } else { "1.1 tidegate" };
        assert_eq!(answer.header("via"), Some(via));
        // Signed by nobody that is trusted.
        let gateway = Service::gateway("", &[&upstream]);
        assert_eq!(gateway.post("/v1/peek", &question).status, 502);
    }
}

#[tokio::test]
async fn grpc_passes_with_its_trailers_and_is_limited() {
    let service = Service::start("");
    let upstream = format!("h2c://{}", service.grpc.as_deref().expect("it listens"));
    let gateway = Service::gateway(LIMIT, &[&upstream]);
    let endpoint =
        tonic::transport::Endpoint::from_shared(format!("http://{}", gateway.http)).expect("a URL");
    let mut client = HealthClient::new(endpoint.connect().await.expect("connected"));
    let ask = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let answer = client.check(ask("")).await.expect("an answer").into_inner();
    assert_eq!(answer.status, 1, "serving");
    // A stream that stays open: its first message comes at once.
    let mut watched = client.watch(ask("")).await.expect("a stream").into_inner();
    assert_eq!(watched.message().await.expect("a message").expect("one").status, 1);
    let unknown = client.check(ask("unknown")).await.expect_err("not known");
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    let denied = client.check(ask("")).await.expect_err("denied");
    assert_eq!(denied.code(), tonic::Code::ResourceExhausted);
}

#[test]
fn json_of_the_service_passes_unchanged() {
    let service = Service::start("");
    let gateway = Service::gateway("", &[&format!("http://{}", service.http)]);
    let (direct, through) = (
        curl(&[&format!("http://{}/openapi.json", service.http)]).0,
        curl(&["--compressed", &format!("http://{}/openapi.json", gateway.http)]).0,
    );
    assert!(serde_json::from_str::<Value>(&through).is_ok() && through == direct);
}
