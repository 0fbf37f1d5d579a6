use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::process::Command;

use rcgen::{CertificateParams, KeyPair};

use crate::app::App;
use crate::client::Client;
use crate::forward_auth::HAPROXY;
use crate::proxy::{Proxy, Recipe, free_port};
use crate::rate_limit_service::ENVOY;
use crate::support::{Service, connect_from};

/// The balancers connect from 127.0.0.2; other programs of the test have no header.
const LISTEN: &str = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
                      resp: '127.0.0.1:0', proxy_protocol: [127.0.0.2]}\n";
const PER_CLIENT: &str = "policies: [{name: per-client, key: ip, limit: 1, window: 1h}]\n";
const ACQUIRE: &str = r#"{"attributes": {}}"#;

/// TCP port of a balancer, and the listener behind it.
struct Tunnel {
    port: u16,
    target: SocketAddr,
}

impl Tunnel {
    fn to(target: &str) -> Self {
        Self { port: free_port(), target: target.parse().expect("an address") }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }
}

/// Returns a configuration of `HAProxy`, which also checks the health of its servers.
fn haproxy(option: &str, tunnels: &[Tunnel]) -> String {
    let mut text = "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 30s\n    \
                    timeout server 30s\n"
        .to_owned();
    for Tunnel { port, target } in tunnels {
        let _ = write!(
            text,
            "listen t{port}\n    bind 127.0.0.1:{port}\n    server tidegate {target} source \
             127.0.0.2 {option} check inter 100ms\n"
        );
    }
    text
}

fn envoy(version: &str, tunnels: &[Tunnel]) -> String {
    let (mut listeners, mut clusters) = (String::new(), String::new());
    let types = "type.googleapis.com/envoy.extensions";
    for Tunnel { port, target } in tunnels {
        let _ = write!(
            listeners,
            r#"
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": {types}.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t{port}
          cluster: t{port}"#
        );
        let target = target.port();
        let _ = write!(
            clusters,
            r#"
  - name: t{port}
    connect_timeout: 5s
    upstream_bind_config: {{source_address: {{address: 127.0.0.2, port_value: 0}}}}
    load_assignment:
      cluster_name: t{port}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {target}}}}}}}
    transport_socket:
      name: envoy.transport_sockets.upstream_proxy_protocol
      typed_config:
        "@type": {types}.transport_sockets.proxy_protocol.v3.ProxyProtocolUpstreamTransport
        config: {{version: {version}}}
        transport_socket:
          name: envoy.transport_sockets.raw_buffer
          typed_config:
            "@type": {types}.transport_sockets.raw_buffer.v3.RawBuffer"#
        );
    }
    format!("static_resources:\n  listeners:{listeners}\n  clusters:{clusters}\n")
}

/// Starts a service with TLS. Returns the file of its certificate.
fn with_tls() -> (Service, String) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, text: String| {
        let file = folder.path().join(name);
        fs::write(&file, text).expect("written");
        file
    };
    let key = KeyPair::generate().expect("a key");
    let names = vec!["127.0.0.1".to_owned()];
    let certificate = CertificateParams::new(names).expect("a name").self_signed(&key);
    let certificate = write("cert.pem", certificate.expect("signed").pem());
    write("key.pem", key.serialize_pem());
    let tls = "tls: {certificate: cert.pem, key: key.pem, admin: false}\n";
    let file = write("tidegate.yaml", format!("{LISTEN}{tls}{PER_CLIENT}"));
    (Service::start_on(folder, &file, &[]), certificate.display().to_string())
}

/// Each address has one request at every listener behind the balancer, also over TLS.
fn knows_its_clients(recipe: &Recipe<'_>, file: &str, config: impl Fn(&[Tunnel]) -> String) {
    let app = App::start();
    let service = Service::start(&format!("{LISTEN}{PER_CLIENT}"));
    let upstream = format!("http://127.0.0.1:{}", app.port);
    let gateway = Service::gateway(&format!("{LISTEN}{PER_CLIENT}"), &[&upstream]);
    let (tls_service, certificate) = with_tls();
    let output = service.output();
    let (_, resp) = output.split_once(" resp=").expect("the address in the log");
    let resp = resp.split([' ', '\n']).next().expect("an address");
    let tunnels = [&service.http, resp, &gateway.http, &tls_service.http].map(Tunnel::to);
    let [http, redis, web, tls] = tunnels.each_ref().map(Tunnel::address);
    let folder = tempfile::tempdir().expect("a temporary directory");
    fs::write(folder.path().join(file), config(&tunnels)).expect("written");
    let mut proxy = Proxy::launch(recipe, folder, http);
    proxy.wait_until("the balancer forwards connections", |_| {
        let statuses = [http, web].map(|address| {
            let response = Client(99).send(address, "POST", "/v1/acquire", &[], ACQUIRE);
            response.map(|response| response.status)
        });
        statuses.iter().all(|status| matches!(status, Ok(200 | 429)))
    });

    let acquire = |client| Client(client).post(http, "/v1/acquire", &[], ACQUIRE).status;
    assert_eq!([acquire(21), acquire(21), acquire(22)], [200, 429, 200]);

    let mut client = connect_from("127.0.0.23", &redis.to_string());
    client.write_all(b"CLIENT INFO\r\nQUIT\r\n").expect("sent");
    let port = client.local_addr().expect("bound").port();
    let mut reply = String::new();
    client.read_to_string(&mut reply).expect("a reply");
    assert!(reply.contains(&format!(" addr=127.0.0.23:{port} ")), "{reply}");

    let get = |client| Client(client).get(web, "/page", &[]).status;
    assert_eq!([get(24), get(24), get(25)], [200, 429, 200]);
    let hops = ["24", "25"].map(|client| format!("\r\nx-forwarded-for: 127.0.0.{client}\r\n"));
    for (request, hop) in app.requests("/page").iter().zip(hops) {
        assert!(request.contains(&hop), "{request}");
    }

    let url = format!("https://{tls}/v1/acquire");
    let acquire = |client: &str| {
        let options = ["-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", "-d", ACQUIRE];
        let output = Command::new("curl")
            .args(options)
            .args(["--interface", client, "--cacert", &certificate, &url])
            .output()
            .expect("curl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(["127.0.0.26", "127.0.0.26", "127.0.0.27"].map(acquire), ["200", "429", "200"]);
    for service in [&service, &gateway, &tls_service] {
        assert!(!service.output().contains("PROXY header"), "{}", service.output());
    }
}

#[test]
fn haproxy_names_its_clients_by_version_1() {
    knows_its_clients(&HAPROXY, "haproxy.cfg", |tunnels| haproxy("send-proxy", tunnels));
}

#[test]
fn haproxy_names_its_clients_by_version_2() {
    knows_its_clients(&HAPROXY, "haproxy.cfg", |tunnels| haproxy("send-proxy-v2", tunnels));
}

#[test]
fn envoy_names_its_clients_by_version_1() {
    knows_its_clients(&ENVOY, "envoy.yaml", |tunnels| envoy("V1", tunnels));
}

#[test]
fn envoy_names_its_clients_by_version_2() {
    knows_its_clients(&ENVOY, "envoy.yaml", |tunnels| envoy("V2", tunnels));
}
