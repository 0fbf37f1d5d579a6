use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use super::support::{Response, Service, connect_from, raw, read_response};

const LISTEN: &str = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
                      resp: '127.0.0.1:0', proxy_protocol: [127.0.0.2, '::1']";
const PER_CLIENT: &str = "policies: [{name: per-client, key: ip, limit: 1, window: 1h}]\n";
const ACQUIRE: &str = r#"{"attributes": {}}"#;

/// Starts a service behind the balancer 127.0.0.2.
fn start(more: &str) -> Service {
    Service::start(&format!("listen: {{{LISTEN}}}\n{more}"))
}

fn v1(client: &str) -> Vec<u8> {
    format!("PROXY TCP4 {client} 127.0.0.1 50000 80\r\n").into_bytes()
}

/// Returns a header of version 2 with a command, a family, and addresses with options.
fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
    let length = u16::try_from(block.len()).expect("short").to_be_bytes();
    [b"\r\n\r\n\0\r\nQUIT\n".as_slice(), &[command, family], &length, block].concat()
}

/// Returns a header of version 2 for the client `2001:db8::N`, with an option.
fn v2_ipv6(last: u8) -> Vec<u8> {
    let mut block = [0; 36];
    block[..4].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
    block[15] = last;
    block[31] = 1;
    v2(0x21, 0x21, &[&block[..], b"\x04\0\x05noise"].concat())
}

fn post(path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    format!("{head}{headers}Content-Length: {length}\r\n\r\n{body}").into_bytes()
}

/// Sends a header and a request in one write.
fn send(source: &str, address: &str, header: &[u8], request: &[u8]) -> Response {
    let mut stream = connect_from(source, address);
    stream.write_all(&[header, request].concat()).expect("sent");
    read_response(&mut stream)
}

fn resp_address(service: &Service) -> String {
    let output = service.output();
    let (_, rest) = output.split_once(" resp=").expect("the address in the log");
    rest.split([' ', '\n']).next().expect("an address").to_owned()
}

fn read_to_end(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    // A connection that is closed with unread bytes is reset.
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn client_of_the_header_is_the_peer_on_every_listener() {
    let service = start(PER_CLIENT);
    let acquire = |header: &[u8]| {
        send("127.0.0.2", &service.http, header, &post("/v1/acquire", "", ACQUIRE)).status
    };
    let mapped = b"PROXY TCP6 ::ffff:203.0.113.9 ::1 50000 80\r\n";
    assert_eq!([acquire(&v1("203.0.113.9")), acquire(&v1("203.0.113.9"))], [200, 429]);
    assert_eq!([acquire(mapped), acquire(&v1("203.0.113.10"))], [429, 200]);
    // The network of an IPv6 client is its key.
    assert_eq!([acquire(&v2_ipv6(1)), acquire(&v2_ipv6(2))], [200, 429]);
    // The header of a health check has no client: the balancer is the peer.
    assert_eq!([acquire(b"PROXY UNKNOWN\r\n"), acquire(&v2(0x20, 0, b""))], [200, 429]);
    let block = [203, 0, 113, 11, 127, 0, 0, 1, 0, 0, 0, 80];
    assert_eq!([acquire(&v2(0x21, 0x11, &block)), acquire(&v1("203.0.113.11"))], [200, 429]);
    // Another peer has no header.
    let direct = |()| service.post("/v1/acquire", ACQUIRE).status;
    assert_eq!([(); 2].map(direct), [200, 429]);

    let reset = post("/v1/reset", "", r#"{"policy": "per-client", "key": "203.0.113.9"}"#);
    assert_eq!(send("127.0.0.2", &service.admin, &v1("198.51.100.7"), &reset).status, 204);
    service.wait_until_logged("peer=198.51.100.7:50000");
    assert_eq!(acquire(&v1("203.0.113.9")), 200);

    let mut redis = connect_from("127.0.0.2", &resp_address(&service));
    let commands = b"CLIENT INFO\r\nQUIT\r\n";
    redis.write_all(&[&v2_ipv6(7)[..], commands].concat()).expect("sent");
    let reply = read_to_end(redis);
    assert!(reply.contains(" addr=[2001:db8::7]:0 "), "{reply}");

    let mut grpc = connect_from("127.0.0.2", service.grpc.as_ref().expect("an address"));
    let settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    // Each byte in a packet of its own.
    for byte in [&v1("203.0.113.9")[..], settings].concat() {
        grpc.write_all(&[byte]).expect("sent");
    }
    let mut frame = [0; 4];
    grpc.read_exact(&mut frame).expect("a frame");
    assert_eq!(frame[3], 4, "SETTINGS");
}

#[test]
fn gateway_counts_logs_and_forwards_the_client_of_the_header() {
    let upstream = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", upstream.local_addr().expect("bound"));
    let (received, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in upstream.incoming().map_while(Result::ok) {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let _ = received.send(String::from_utf8_lossy(&buffer[..length]).into_owned());
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }
    });
    let config = format!(
        "listen: {{{LISTEN}}}\ngateway: {{access_log: {{path: stdout}}}}\n\
         client_ip: {{trusted_proxies: [198.51.100.0/24]}}\n{PER_CLIENT}"
    );
    let gateway = Service::gateway(&config, &[&url]);
    let get = |header: &[u8], forwarded: &str| {
        let forwarded = format!("X-Forwarded-For: {forwarded}\r\n");
        send("127.0.0.2", &gateway.http, header, &post("/", &forwarded, "")).status
    };
    let forwarded = || requests.recv().expect("a request").to_ascii_lowercase();
    // The balancer does not vouch for headers of its clients.
    assert_eq!(get(&v1("203.0.113.9"), "192.0.2.1"), 200);
    let request = forwarded();
    assert!(request.contains("x-forwarded-for: 203.0.113.9\r\n"), "{request}");
    gateway.wait_until_logged("203.0.113.9 - - [");
    assert_eq!(get(&v1("203.0.113.9"), "192.0.2.2"), 429);
    // A trusted proxy behind the balancer does.
    assert_eq!(get(&v1("198.51.100.5"), "192.0.2.1"), 200);
    let request = forwarded();
    assert!(request.contains("x-forwarded-for: 192.0.2.1, 198.51.100.5\r\n"), "{request}");
    assert_eq!(get(&v1("198.51.100.6"), "192.0.2.1"), 429);
}

#[test]
fn connection_of_a_balancer_needs_a_valid_header() {
    let service = start(PER_CLIENT);
    let resp = resp_address(&service);
    let acquire = post("/v1/acquire", "", ACQUIRE);
    let addresses =
        [&service.http, service.grpc.as_ref().expect("an address"), &service.admin, &resp];
    let mut closed = 0;
    for address in addresses {
        for start in [&acquire[..], b"PROXY TCP4 1.2.3 1.2.3.4 1 1\r\n", b"PING\r\n", &[0; 500]] {
            let mut stream = connect_from("127.0.0.2", address);
            let _ = stream.write_all(start);
            assert_eq!(read_to_end(stream), "", "{address}");
            closed += 1;
        }
        // A check of the port alone is no error.
        drop(connect_from("127.0.0.2", address));
    }
    let line = format!("tidegate_connections_closed_total{{reason=\"proxy_header\"}} {closed}\n");
    service.wait_until(&line, |service| service.admin("/metrics").body.contains(&line));
    let warning = "it is from listen.proxy_protocol and has no valid PROXY header";
    service.wait_until_logged(warning);
    assert_eq!(service.output().matches(warning).count(), 1, "logged once per minute");
}

#[test]
fn header_of_another_peer_is_garbage() {
    let service = start(PER_CLIENT);
    let request = [v1("203.0.113.9"), post("/v1/acquire", "", ACQUIRE)].concat();
    assert_eq!(raw(&service.http, &request).status, 400);
    let mut redis = connect_from("127.0.0.1", &resp_address(&service));
    redis.write_all(&[v1("203.0.113.9"), b"QUIT\r\n".to_vec()].concat()).expect("sent");
    let reply = read_to_end(redis);
    assert!(reply.starts_with("-ERR unknown command"), "{reply}");
    let mut second = connect_from("127.0.0.1", &service.http);
    second.write_all(&v2_ipv6(1)).expect("sent");
    assert!(!read_to_end(second).contains(" 200 "));
}

/// A peer of a Unix socket counts as 127.0.0.1, which can be a balancer.
#[test]
fn balancer_can_use_a_unix_socket() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("http.sock");
    let _service = Service::start(&format!(
        "listen: {{http: 'unix:{}', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
         proxy_protocol: [127.0.0.1]}}\n{PER_CLIENT}",
        path.display()
    ));
    let acquire = |client: &str| {
        let mut stream = UnixStream::connect(&path).expect("the service listens");
        let request = post("/v1/acquire", "", ACQUIRE);
        stream.write_all(&[v1(client), request].concat()).expect("sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("a response");
        response.get(9..12).map(str::to_owned)
    };
    let statuses = ["203.0.113.9", "203.0.113.9", "203.0.113.10"].map(acquire);
    assert_eq!(statuses.each_ref().map(Option::as_deref), [Some("200"), Some("429"), Some("200")]);
}
