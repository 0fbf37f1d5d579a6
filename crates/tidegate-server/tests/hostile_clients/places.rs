use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::frames::{DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, PING, field};
use crate::support::{Response, Service, TEST_TIMEOUT, read_response, request};
use crate::{connect_from, listen, request_fields, wait_until_closed};

const NO_ERROR: u32 = 0;

/// Returns a connection with a request in flight: its body is not complete.
fn busy(source: &str, address: &str) -> TcpStream {
    let mut stream = connect_from(source, address);
    let head = b"POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\
        Expect: 100-continue\r\n\r\n";
    stream.write_all(head).expect("sent");
    // The service reads the body, so the request is in flight.
    let mut response = [0; 25];
    stream.read_exact(&mut response).expect("100 Continue");
    assert!(response.starts_with(b"HTTP/1.1 100"));
    stream
}

fn get(mut stream: TcpStream) -> Response {
    // A refused connection may be closed before the request is sent.
    let _ = stream
        .write_all(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    read_response(&mut stream)
}

#[test]
fn idle_connections_are_closed_although_they_ping() {
    let service = Service::start(&listen("idle_timeout: 1s"));
    let grpc = service.grpc.as_ref().expect("gRPC");
    // A stream that stays open: the health of the service is watched.
    let mut watcher = Frames::connect(grpc, 65_535);
    let fields = [
        request_fields("POST", "/grpc.health.v1.Health/Watch"),
        field("content-type", "application/grpc"),
    ];
    watcher.send(HEADERS, END_HEADERS, 1, &fields.concat());
    watcher.send(DATA, END_STREAM, 1, &[0; 5]);
    assert_eq!((watcher.next().0, watcher.next().0), (HEADERS, DATA));

    for address in [&service.http, grpc, &service.admin] {
        let mut idle = Frames::connect(address, 65_535);
        let code = loop {
            let _ = idle.try_send(PING, 0, 0, b"12345678");
            match idle.next_of_any_stream().expect("no timeout") {
                Some(frame) if frame.kind == GOAWAY => break frame.payload[4..].to_vec(),
                Some(_) => std::thread::sleep(std::time::Duration::from_millis(50)),
                None => panic!("no GOAWAY"),
            }
        };
        assert_eq!(code[..4], NO_ERROR.to_be_bytes());
        assert_eq!(idle.code_at_the_end().unwrap_or(NO_ERROR), NO_ERROR);

        let mut kept = TcpStream::connect(address).expect("the service listens");
        kept.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        kept.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
        kept.read_to_end(&mut Vec::new()).expect("the end of the connection");
    }
    wait_until_closed(&service, "idle", 6);
    // More than the idle timeout has passed.
    watcher.send(PING, 0, 0, b"12345678");
    while watcher.next_of_any_stream().expect("no timeout").expect("open").kind != PING {}
}

#[test]
fn newcomer_gets_the_place_of_the_connection_that_is_idle_for_longest() {
    let service = Service::start(&listen("max_connections: 8, max_connections_per_address: 8"));
    let ping = |client: &mut Frames| {
        client.send(PING, 0, 0, b"12345678");
        while client.next_of_any_stream().expect("no timeout").expect("open").kind != PING {}
    };
    let mut idle: Vec<Frames> = (0..8)
        .map(|_| {
            let mut client = Frames::connect(&service.http, 65_535);
            ping(&mut client);
            client
        })
        .collect();
    // The first connection is in use later than the second.
    idle[0].send(HEADERS, END_HEADERS | END_STREAM, 1, &request_fields("GET", "/"));
    while idle[0].next().1 & END_STREAM == 0 {}
    assert_eq!(request(&service.http, "GET", "/openapi.json", &[], b"").status, 200);
    assert_eq!(idle.remove(1).code_at_the_end(), Some(NO_ERROR));
    idle.iter_mut().for_each(ping);
    wait_until_closed(&service, "evicted", 1);
}

#[test]
fn every_connection_of_a_crowd_is_answered() {
    let service = Service::start(&listen("max_connections: 32"));
    let crowd: Vec<TcpStream> =
        (0..500).map(|_| TcpStream::connect(&service.http).expect("the service listens")).collect();
    for _ in 0..50 {
        assert_eq!(request(&service.http, "GET", "/openapi.json", &[], b"").status, 200);
    }
    service.wait_until("the places are free", |service| service.open_files() < 200);
    drop(crowd);
}

#[test]
fn newcomer_is_refused_if_all_others_are_busy() {
    let service = Service::start(&listen("max_connections: 4, max_connections_per_address: 4"));
    let busy: Vec<TcpStream> = (0..4).map(|_| busy("127.0.0.1", &service.http)).collect();
    for _ in 0..10 {
        let refused = get(connect_from("127.0.0.2", &service.http));
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert_eq!(refused.body, "too many connections\n");
    }
    wait_until_closed(&service, "max_connections", 10);
    // The other listeners have places of their own.
    assert_eq!(service.admin("/healthz").status, 200);
    drop(busy);
    service.wait_until("a place is free", |service| {
        get(connect_from("127.0.0.2", &service.http)).status == 200
    });
}

#[test]
fn one_address_does_not_take_all_places() {
    let limits = listen("max_connections: 16, max_connections_per_address: 4");
    let service = Service::start(&limits);
    let _busy: Vec<TcpStream> = (0..4).map(|_| busy("127.0.0.1", &service.http)).collect();
    assert_eq!(get(connect_from("127.0.0.1", &service.http)).status, 503);
    wait_until_closed(&service, "max_connections_per_address", 1);
    assert_eq!(get(connect_from("127.0.0.2", &service.http)).status, 200);

    // A trusted proxy has the connections of many clients.
    let config = format!("{limits}client_ip: {{trusted_proxies: [127.0.0.1]}}\n");
    let service = Service::start(&config);
    let _busy: Vec<TcpStream> = (0..8).map(|_| busy("127.0.0.1", &service.http)).collect();
    assert_eq!(get(connect_from("127.0.0.1", &service.http)).status, 200);
}
