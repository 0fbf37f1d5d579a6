use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::ServerName;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate_net::tls::{self, ClientTlsFiles, TlsFiles};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::control_plane::ControlPlane;
use crate::program::{Program, Variables};
use crate::support::{Redis, TEST_TIMEOUT, free_port};
use crate::{limited, rules_of, send};

/// Name in the certificate of the control plane.
pub(crate) const CONTROL_PLANE: &str = "envoy-gateway";
const USER: [(&str, &str); 1] = [("user", "ann")];

/// Certificate authority.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority for tests");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("signed"))
    }

    /// Writes `ca.crt`, `tls.crt` and `tls.key`, as a secret of Kubernetes has them.
    pub(crate) fn write(&self, folder: &Path, names: &[&str]) {
        fs::create_dir_all(folder).expect("created");
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(names).expect("names");
        let signed = params.signed_by(&key, &self.0).expect("signed");
        for (file, text) in
            [("ca.crt", self.0.pem()), ("tls.crt", signed.pem()), ("tls.key", key.serialize_pem())]
        {
            // A new file in the place of the old one, so that no half of it is ever read.
            let new = folder.join("new");
            fs::write(&new, text).expect("written");
            fs::rename(new, folder.join(file)).expect("renamed");
        }
    }
}

/// Returns the files of a server that demands certificates of its clients.
pub(crate) fn server_files(folder: &Path) -> TlsFiles {
    TlsFiles {
        certificate: folder.join("tls.crt"),
        key: folder.join("tls.key"),
        client_ca: Some(folder.join("ca.crt")),
        client_crl: None,
    }
}

/// Returns the variables that Envoy Gateway sets for TLS.
pub(crate) fn with_tls(variables: Variables, folder: &Path) -> Variables {
    let file = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    let (certificate, key, ca) = (file("tls.crt"), file("tls.key"), file("ca.crt"));
    variables
        .with("GRPC_SERVER_USE_TLS", "true")
        .with("GRPC_SERVER_TLS_CERT", &certificate)
        .with("GRPC_SERVER_TLS_KEY", &key)
        // Ratelimit has no such setting, so no client needs a certificate because of it.
        .with("GRPC_SERVER_TLS_CA_CERT", &ca)
        .with("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true")
        .with("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", &certificate)
        .with("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", &key)
        .with("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", &ca)
        .with("CONFIG_GRPC_XDS_SERVER_TLS_SAN", CONTROL_PLANE)
}

/// Connects without a client certificate. Returns `None` if the certificate is not of this CA.
async fn connect(address: &str, ca: &Path) -> Option<RateLimitServiceClient<Channel>> {
    let mut config = tls::client(&ClientTlsFiles::of_ca(Some(ca))).expect("a CA");
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let address = address.to_owned();
    let connect = service_fn(move |_| {
        let (connector, address) = (connector.clone(), address.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            let name = ServerName::try_from("envoy-ratelimit").expect("a name");
            std::io::Result::Ok(TokioIo::new(connector.connect(name, stream).await?))
        }
    });
    let endpoint = Endpoint::from_static("http://envoy-ratelimit");
    endpoint.connect_with_connector(connect).await.ok().map(RateLimitServiceClient::new)
}

struct Folders {
    _root: tempfile::TempDir,
    plane: PathBuf,
    program: PathBuf,
}

fn folders() -> Folders {
    let root = tempfile::tempdir().expect("a temporary directory");
    let (plane, program) = (root.path().join("plane"), root.path().join("program"));
    Folders { plane, program, _root: root }
}

impl Folders {
    fn write(&self, authority: &Authority) {
        authority.write(&self.plane, &[CONTROL_PLANE]);
        authority.write(&self.program, &["envoy-ratelimit"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_certificates_are_rotated_under_load_without_an_error() {
    let (redis, folders, first) = (Redis::start(), folders(), Authority::new());
    folders.write(&first);
    let mut plane = ControlPlane::start_on("127.0.0.1:0", Some(server_files(&folders.plane))).await;
    let address = plane.address.to_string();
    let variables = with_tls(Variables::of_gateway(&address, &redis), &folders.program);
    let program = Program::start(&variables);
    plane.request().await;
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 1_000_000)])]).await;
    let ca = folders.program.join("ca.crt");
    let mut client = connect(&program.grpc, &ca).await.expect("no client certificate is needed");
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(1_000_000)));

    let (is_done, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load = tokio::spawn({
        let (is_done, calls) = (Arc::clone(&is_done), Arc::clone(&calls));
        async move {
            while !is_done.load(Ordering::Relaxed) {
                assert!(send(&mut client, "edge", &USER).await.0);
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let second = Authority::new();
    folders.write(&second);
    // New connections of Envoy get the new certificate.
    let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
    while connect(&program.grpc, &ca).await.is_none() {
        assert!(tokio::time::Instant::now() < deadline, "{}", program.output());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // The control plane is restarted with its own. Neither side trusts the old CA any more.
    plane.kill().await;
    let mut plane = ControlPlane::start_on(&address, Some(server_files(&folders.plane))).await;
    assert_eq!(plane.request().await.version_info, "");
    plane.accept("2", &[rules_of("edge", vec![limited("user", "", 2_000_000)])]).await;
    let mut renewed = connect(&program.grpc, &ca).await.expect("the new certificate");
    assert_eq!(send(&mut renewed, "edge", &USER).await, (true, Some(2_000_000)));
    let before = calls.load(Ordering::Relaxed);
    program.wait_until("calls go on", || calls.load(Ordering::Relaxed) > before + 10);
    is_done.store(true, Ordering::Relaxed);
    load.await.expect("no call has failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_plane_with_another_name_or_authority_is_not_trusted() {
    let (redis, folders) = (Redis::start(), folders());
    Authority::new().write(&folders.plane, &[CONTROL_PLANE]);
    Authority::new().write(&folders.program, &["envoy-ratelimit"]);
    let plane = ControlPlane::start_on("127.0.0.1:0", Some(server_files(&folders.plane))).await;
    let address = plane.address.to_string();
    let variables = with_tls(Variables::of_gateway(&address, &redis), &folders.program);
    let program = Program::start(&variables);
    program.wait_until_logged("the control plane is not connected");
    assert!(program.output().contains("invalid peer certificate: "), "{}", program.output());
    drop(program);

    let authority = Authority::new();
    folders.write(&authority);
    let program = Program::start(&variables.with("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "another.name"));
    program.wait_until_logged("the control plane is not connected");
    assert!(program.output().contains("not valid for name"), "{}", program.output());
}

/// The certificate has another name than the address, but an authority that is trusted.
#[test]
fn name_of_redis_is_verified_unless_the_setting_skips_it() {
    let (folder, authority) = (tempfile::tempdir().expect("a folder"), Authority::new());
    authority.write(folder.path(), &["redis.internal"]);
    let file = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (certificate, key, ca) = (file("tls.crt"), file("tls.key"), file("ca.crt"));
    let port = free_port().to_string();
    let redis = Redis::start_with(&[
        "--tls-port",
        &port,
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
    ]);
    let variables = Variables::of_gateway("127.0.0.1:1", &redis)
        .with("REDIS_URL", &format!("127.0.0.1:{port}"))
        .with("REDIS_TLS", "true")
        .with("REDIS_TLS_CACERT", &ca)
        .with("REDIS_TLS_CLIENT_CERT", &certificate)
        .with("REDIS_TLS_CLIENT_KEY", &key);
    let strict = Program::start(&variables);
    strict.wait_until_logged("not valid for name");
    assert_eq!(strict.health().0, 500);
    drop(strict);
    let variables = variables.with("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true");
    let lax = Program::start(&variables);
    lax.wait_until("Redis is reached", || lax.health().0 == 200);
    drop(lax);
    // Another authority is not trusted, whatever the name is.
    Authority::new().write(folder.path(), &["redis.internal"]);
    let other = Program::start(&variables);
    other.wait_until_logged("invalid peer certificate");
    assert_eq!(other.health().0, 500);
}

#[test]
fn missing_certificates_are_errors_that_name_the_file() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let missing = folder.path().join("missing");
    let redis = Redis::start();
    let variables = with_tls(Variables::of_gateway("127.0.0.1:1", &redis), &missing);
    let mut command = crate::program::program_in(folder.path());
    let output = command.env_clear().envs(&variables.0).output().expect("the binary starts");
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.code() == Some(2) && error.contains("missing/ca.crt: "), "{error}");
}
