use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::certificates::{Authority, CONTROL_PLANE, server_files, with_tls};
use crate::control_plane::ControlPlane;
use crate::program::{Program, Variables};
use crate::support::{Redis, Response, TEST_TIMEOUT, free_port, request};
use crate::{limited, node, rules_of};

/// As Envoy Gateway configures it: the route and the distinct value of a header, and the cost of the
/// response when the stream is done; TLS to the service, which has the name in its certificate.
const CONFIG: &str = r#"
static_resources:
  listeners:
  - name: web
    address: { socket_address: { address: 127.0.0.1, port_value: WEB_PORT } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: web
          http_filters:
          - name: envoy.filters.http.ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: default/eg/http
              timeout: 10s
              failure_mode_deny: true
              enable_x_ratelimit_headers: DRAFT_VERSION_03
              rate_limit_service:
                transport_api_version: V3
                grpc_service: { envoy_grpc: { cluster_name: ratelimit } }
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: { prefix: / }
                route: { cluster: app }
                typed_per_filter_config:
                  envoy.filters.http.ratelimit:
                    "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute
                    rate_limits:
                    - actions:
                      - generic_key: { descriptor_key: route-a, descriptor_value: route-a }
                      - request_headers: { header_name: x-user-id, descriptor_key: rule-0-match-0 }
                    - actions: &cost
                      - generic_key: { descriptor_key: route-a, descriptor_value: route-a }
                      - request_headers: { header_name: x-tenant, descriptor_key: rule-1-match-0 }
                      hits_addend: { number: 0 }
                    - actions: *cost
                      hits_addend: { number: 10 }
                      apply_on_stream_done: true
  clusters:
  - name: app
    connect_timeout: 5s
    load_assignment:
      cluster_name: app
      endpoints:
      - lb_endpoints:
        - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: APP_PORT } } }
  - name: ratelimit
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: { http2_protocol_options: {} }
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: envoy-ratelimit
        common_tls_context:
          tls_certificates:
          - certificate_chain: { filename: FOLDER/envoy/tls.crt }
            private_key: { filename: FOLDER/envoy/tls.key }
          validation_context: { trusted_ca: { filename: FOLDER/envoy/ca.crt } }
    load_assignment:
      cluster_name: ratelimit
      endpoints:
      - lb_endpoints:
        - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: RATELIMIT_PORT } } }
"#;

/// Running Envoy, killed at the end of the test.
struct Envoy {
    process: Child,
    address: String,
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts an application that answers every request with 200. Returns its port.
async fn start_app() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 8192];
                while stream.read(&mut request).await.is_ok_and(|length| length > 0) {
                    let response = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                    let _ = stream.write_all(response).await;
                }
            });
        }
    });
    port
}

impl Envoy {
    fn start(folder: &Path, app: u16, ratelimit: &str) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let port = ratelimit.rsplit(':').next().expect("a port");
        let config = CONFIG
            .replace("WEB_PORT", &address.port().to_string())
            .replace("APP_PORT", &app.to_string())
            .replace("RATELIMIT_PORT", port)
            .replace("FOLDER", folder.to_str().expect("UTF-8"));
        let file = folder.join("envoy.yaml");
        std::fs::write(&file, config).expect("written");
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/envoy");
        let log = std::fs::File::create(folder.join("envoy.log")).expect("a log");
        let process = Command::new(program)
            .args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", "-c"])
            .arg(file)
            .env_clear()
            .env("HOME", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Envoy: run `make setup`");
        Self { process, address: address.to_string() }
    }

    fn get(&self, user: &str) -> Response {
        let headers = [("x-user-id", user), ("x-tenant", user)];
        request(&self.address, "GET", "/", &headers, b"")
    }

    fn wait_until(folder: &Path, what: &str, happened: impl Fn() -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !happened() {
            let log = std::fs::read_to_string(folder.join("envoy.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "timeout while waiting until {what}:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_is_limited_by_the_rules_of_the_control_plane_over_tls() {
    let (redis, authority) = (Redis::start(), Authority::new());
    let root = tempfile::tempdir().expect("a temporary directory");
    let folder = |name: &str| root.path().join(name);
    authority.write(&folder("plane"), &[CONTROL_PLANE]);
    authority.write(&folder("program"), &["envoy-ratelimit"]);
    authority.write(&folder("envoy"), &["envoy"]);
    let plane_files = server_files(&folder("plane"));
    let mut plane = ControlPlane::start_on("127.0.0.1:0", Some(plane_files)).await;
    let variables = Variables::of_gateway(&plane.address.to_string(), &redis);
    let program = Program::start(&with_tls(variables, &folder("program")));
    plane.request().await;
    let rules = |requests: u32| {
        let matches =
            vec![limited("rule-0-match-0", "", requests), limited("rule-1-match-0", "", 15)];
        [rules_of("default/eg/http", vec![node("route-a", "route-a", matches)])]
    };
    plane.accept("1", &rules(3)).await;

    let envoy = Envoy::start(root.path(), start_app().await, &program.grpc);
    Envoy::wait_until(root.path(), "Envoy listens", || {
        std::net::TcpStream::connect(&envoy.address).is_ok()
    });
    let first = envoy.get("ann");
    let limit = first.header("x-ratelimit-limit");
    assert_eq!(
        (first.status, limit),
        (200, Some("3, 3;w=3600, 15;w=3600")),
        "{}",
        program.output()
    );
    // A response costs 10 of 15 units, also if it exceeds them.
    let units = |kind: &str| {
        program.metric(&format!(
            "ratelimit_service_rate_limit_{kind}{{domain=\"default/eg/http\",\
             key1=\"route-a_route-a\",key2=\"rule-1-match-0\"}}"
        ))
    };
    program.wait_until("the response is counted", || units("within_limit") == 10);
    assert_eq!(envoy.get("ann").status, 200);
    program.wait_until("the response is counted", || units("over_limit") == 10);
    let denied = envoy.get("ann");
    assert_eq!(denied.status, 429, "the budget of responses is spent: {denied:?}");
    assert!(denied.header("retry-after").is_some(), "{denied:?}");

    plane.accept("2", &rules(1)).await;
    assert_eq!([envoy.get("bob").status, envoy.get("bob").status], [200, 429]);
    // Without the control plane, the rules stay.
    plane.kill().await;
    program.wait_until("the outage is noticed", || program.metric("tidegate_xds_connected") == 0);
    assert_eq!([envoy.get("eve").status, envoy.get("eve").status], [200, 429]);
}
