//! Commands, pipelines and broken frames on raw sockets.

use std::io::Read as _;

use crate::client::{Client, Reply, command};
use crate::support::{Service, request};
use crate::{POLICIES, metric, resp_address, start};

#[test]
fn decisions_are_those_of_the_other_front_doors() {
    let (service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    assert_eq!(client.ask(&["TG.ACQUIRE", "per-user", "ann"]).integers()[..3], [1, 3, 2]);
    let body = serde_json::json!({"policy": "per-user", "key": "ann"});
    assert_eq!(service.acquire(&body).json()["remaining"], 1);
    assert!(matches!(client.ask(&["HELLO", "3"]), Reply::Map(_)));
    let reply = client.ask(&["TG.ACQUIRE", "per-user", "ann"]);
    assert!(matches!(reply, Reply::Array(_)), "the same array in both versions: {reply:?}");
    assert_eq!(reply.integers()[..3], [1, 3, 0]);
    let denied = client.ask(&["TG.ACQUIRE", "per-user", "ann"]).integers();
    assert_eq!(denied[..3], [0, 3, 0]);
    assert!((3_500_000..=3_600_000).contains(&denied[3]), "{denied:?}");
    for _ in 0..2 {
        assert_eq!(client.ask(&["TG.ACQUIRE", "observed", "ann"]).integers()[0], 1);
    }
    let metrics = service.admin("/metrics").body;
    for line in [
        "tidegate_decisions_total{policy=\"per-user\",outcome=\"allowed\"} 3",
        "tidegate_decisions_total{policy=\"per-user\",outcome=\"denied\"} 1",
        "tidegate_decisions_total{policy=\"observed\",outcome=\"shadow_denied\"} 1",
        "tidegate_resp_commands_total{command=\"tg.acquire\"} 5",
        "tidegate_resp_connections 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let hot = service.admin("/v1/hot-keys").body;
    assert!(hot.contains("\"ann\""), "{hot}");
    drop(client);
    service.wait_until("the connection is closed", |service| {
        metric(service, "tidegate_resp_connections") == 0
    });
}

#[test]
fn pipeline_is_answered_in_order_however_it_arrives() {
    let (_service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    let mut pipeline = Vec::new();
    for number in 0..1_000 {
        pipeline.extend(command(&["ECHO", &number.to_string()]));
        pipeline.extend(command(&["CL.THROTTLE", "k", "499", "1", "86400"]));
        pipeline.extend(b"PING\r\n");
    }
    client.send(&pipeline);
    for number in 0..1_000_i64 {
        assert_eq!(client.reply(), Reply::Bulk(number.to_string()));
        let [limited, _, remaining, ..] = client.reply().integers()[..] else { panic!("five") };
        assert_eq!((limited, remaining), (i64::from(number >= 500), (499 - number).max(0)));
        assert_eq!(client.reply(), Reply::Simple("PONG".to_owned()));
    }
    // One byte at a time.
    for byte in command(&["ECHO", "slowly"]) {
        client.send(&[byte]);
    }
    assert_eq!(client.reply(), Reply::Bulk("slowly".to_owned()));
    // The end of the stream is no reason to lose replies.
    client.send(&command(&["ECHO", "last"]).repeat(100));
    client.stream().shutdown(std::net::Shutdown::Write).expect("a socket");
    for _ in 0..100 {
        assert_eq!(client.reply(), Reply::Bulk("last".to_owned()));
    }
    assert_eq!(client.next(), None);
}

#[test]
fn replies_of_a_pipeline_are_one_write() {
    let (_service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    let one = command(&["TG.PEEK", "wide", "k"]);
    assert!(matches!(client.ask(&["TG.PEEK", "wide", "k"]), Reply::Array(_)));
    client.send(&one.repeat(64));
    // One packet on loopback: a single read returns all replies.
    let mut buffer = [0; 16 * 1024];
    let length = client.stream().read(&mut buffer).expect("replies");
    let replies = buffer[..length].windows(4).filter(|part| *part == b"*6\r\n").count();
    assert_eq!(replies, 64, "{length} bytes");
}

#[test]
fn broken_frame_is_answered_and_closes_the_connection() {
    let (service, address) = start(POLICIES);
    let many = format!("*129\r\n{}", "$1\r\na\r\n".repeat(129));
    let large = "$65536\r\n".to_owned();
    for (bytes, reason) in [
        (b"*1\r\n:1\r\n".to_vec(), "expected '$', got ':'"),
        (b"*x\r\n".to_vec(), "invalid multibulk length"),
        (b"*1\r\n$-5\r\n".to_vec(), "invalid bulk length"),
        (many.into_bytes(), "send *1 to *128"),
        (format!("*1\r\n{large}").into_bytes(), "at most 65536 bytes"),
        (vec![b'x'; 100_000], "at most 65536 bytes"),
        (b"ECHO \"a\r\n".to_vec(), "unbalanced quotes"),
    ] {
        let mut client = Client::connect(&address);
        client.send(b"PING\r\n");
        // The rest is read before the close, so the client gets the error.
        client.send(&bytes);
        assert_eq!(client.reply(), Reply::Simple("PONG".to_owned()));
        let error = client.reply();
        assert!(error.error().starts_with("ERR Protocol error: "), "{error:?}");
        assert!(error.error().contains(reason), "{error:?}");
        assert_eq!(client.next(), None, "{reason}");
    }
    assert!(metric(&service, "tidegate_resp_errors_total") >= 7);
    assert_eq!(metric(&service, "tidegate_panics_total"), 0);
}

#[test]
fn web_page_cannot_send_commands() {
    let (service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    for _ in 0..3 {
        client.ask(&["TG.ACQUIRE", "per-user", "ann"]);
    }
    for method in ["POST", "PUT"] {
        let body = b"\r\nTG.RESET per-user ann\r\n";
        let text = std::panic::catch_unwind(|| request(&address, method, "/", &[], body));
        assert!(text.is_err(), "the answer is not HTTP");
    }
    let mut http2 = Client::connect(&address);
    http2.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nTG.RESET per-user ann\r\n");
    let error = http2.reply();
    assert!(error.error().contains("this is the Redis protocol, not HTTP"), "{error:?}");
    assert_eq!(http2.next(), None);
    assert_eq!(client.ask(&["TG.ACQUIRE", "per-user", "ann"]).integers()[0], 0);
    assert!(service.admin("/metrics").body.contains("command=\"tg.reset\"} 0"));
}

#[test]
fn protocol_is_off_unless_it_is_configured() {
    let service = Service::start(POLICIES);
    assert!(!service.output().contains("resp="), "{}", service.output());
}

#[test]
fn flag_variable_and_file_choose_the_address() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("resp.sock");
    let ports = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'";
    let config = format!("listen: {{{ports}, resp: 'unix:{}'}}\n{POLICIES}", socket.display());
    let service = Service::start(&config);
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("the service listens");
    std::io::Write::write_all(&mut stream, b"PING\r\n").expect("sent");
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).expect("a reply");
    assert_eq!(&reply, b"+PONG\r\n");
    drop(service);
    let service = Service::start_with_environment(POLICIES, &[("TIDEGATE_RESP", "127.0.0.1:0")]);
    assert_eq!(
        Client::connect(&resp_address(&service)).ask(&["PING"]),
        Reply::Simple("PONG".to_owned())
    );
    // The gateway serves the protocol, too.
    let gateway = Service::gateway_with_env(
        POLICIES,
        &["http://127.0.0.1:9"],
        &[("TIDEGATE_RESP", "127.0.0.1:0")],
    );
    let mut client = Client::connect(&resp_address(&gateway));
    assert_eq!(client.ask(&["TG.ACQUIRE", "per-user", "ann"]).integers()[..3], [1, 3, 2]);
}

#[test]
fn address_beyond_loopback_needs_a_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, crate::support::with_free_ports(POLICIES)).expect("written");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--resp", "0.0.0.0:0", "--config"])
        .arg(&file)
        .output()
        .expect("the binary runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("auth.api_token"), "{error}");
}
