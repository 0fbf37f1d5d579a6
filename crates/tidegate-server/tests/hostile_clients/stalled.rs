use std::time::Duration;

use crate::frames::{
    DATA, END_HEADERS, END_STREAM, Frames, HEADERS, RST_STREAM, WINDOW_UPDATE, field,
};
use crate::support::{Service, request};
use crate::{request_fields, wait_until_closed};

const ENHANCE_YOUR_CALM: u32 = 11;
const CANCEL: [u8; 4] = [0, 0, 0, 8];

fn get(client: &mut Frames, stream: u32, path: &str) {
    client.send(HEADERS, END_HEADERS | END_STREAM, stream, &request_fields("GET", path));
}

/// Asks for the health of the gRPC service.
fn check_health(client: &mut Frames, stream: u32) {
    let fields = [
        request_fields("POST", "/grpc.health.v1.Health/Check"),
        field("content-type", "application/grpc"),
        field("te", "trailers"),
    ];
    client.send(HEADERS, END_HEADERS, stream, &fields.concat());
    client.send(DATA, END_STREAM, stream, &[0; 5]);
}

/// Sends requests without room for their responses. One stream is reset; with many, the connection
/// is closed.
fn assert_ended(address: &str, send: impl Fn(&mut Frames, u32) + Sync) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Frames::connect(address, 0);
            send(&mut client, 1);
            assert_eq!(client.next().0, HEADERS);
            assert_eq!(client.next(), (RST_STREAM, 0, CANCEL.to_vec()), "{address}");
            // The connection is still usable.
            send(&mut client, 3);
            assert_eq!(client.next().0, HEADERS);
            client.send(WINDOW_UPDATE, 0, 3, &1_000_000_u32.to_be_bytes());
            assert_eq!(client.next().0, DATA);
        });
        let mut client = Frames::connect(address, 0);
        for stream in 0..16 {
            send(&mut client, 2 * stream + 1);
        }
        assert_eq!(client.code_at_the_end(), Some(ENHANCE_YOUR_CALM), "{address}");
    });
}

#[test]
fn responses_of_the_api_are_not_kept_for_a_client_that_does_not_read() {
    let service = Service::start("");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_ended(&service.http, |client, stream| get(client, stream, "/openapi.json"));
        });
        scope.spawn(|| {
            assert_ended(service.grpc.as_ref().expect("gRPC"), check_health);
        });
        scope.spawn(|| {
            assert_ended(&service.admin, |client, stream| get(client, stream, "/metrics"));
        });
    });
    wait_until_closed(&service, "stalled", 3);
}

#[test]
fn denials_of_the_gateway_are_not_kept_for_a_client_that_does_not_read() {
    let config = "gateway: {idle_timeout: 1s}\npolicies: [{name: p, limit: 1, window: 1h}]\n";
    // Nothing listens there.
    let gateway = Service::gateway(config, &["http://127.0.0.1:1"]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    assert_ended(&gateway.http, |client, stream| get(client, stream, "/"));
}

#[test]
fn connection_window_that_stays_full_ends_the_connection() {
    let service = Service::start("");
    // The window of the connection has room for one response, and is never extended.
    let mut client = Frames::connect(&service.http, 1 << 20);
    for stream in 0..16 {
        get(&mut client, 2 * stream + 1, "/openapi.json");
    }
    assert_eq!(client.code_at_the_end(), Some(ENHANCE_YOUR_CALM));
}

#[test]
fn single_bytes_are_no_progress() {
    let config = "gateway: {idle_timeout: 1s}\npolicies: [{name: p, limit: 1, window: 1h}]\n";
    let gateway = Service::gateway(config, &["http://127.0.0.1:1"]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    let mut client = Frames::connect(&gateway.http, 0);
    get(&mut client, 1, "/");
    assert_eq!(client.next().0, HEADERS);
    let mut taken = 0;
    loop {
        client.send(WINDOW_UPDATE, 0, 1, &1_u32.to_be_bytes());
        match client.next() {
            (DATA, 0, byte) => taken += byte.len(),
            (RST_STREAM, _, code) => break assert_eq!(code, CANCEL),
            other => panic!("{other:?}"),
        }
        // A slow client.
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(taken < 60, "{taken} bytes");
}

/// Returns the growth of the memory, in KiB, with responses that clients leave unread.
fn memory_of_unread_responses(service: &Service, window: u32) -> u64 {
    const CONNECTIONS: usize = 20;
    const STREAMS: u32 = 200;
    let before = service.memory();
    let clients: Vec<Frames> = (0..CONNECTIONS)
        .map(|_| {
            let mut client = Frames::connect(&service.http, window);
            for stream in 0..STREAMS {
                get(&mut client, 2 * stream + 1, "/openapi.json");
            }
            let mut responses = 0;
            while responses < STREAMS {
                responses += u32::from(client.next().0 == HEADERS);
            }
            client
        })
        .collect();
    let grown = service.memory().saturating_sub(before);
    drop(clients);
    grown
}

#[test]
fn unread_responses_share_their_memory() {
    for window in [0, 1] {
        let service = Service::start("");
        assert_eq!(request(&service.http, "GET", "/openapi.json", &[], b"").status, 200);
        let grown = memory_of_unread_responses(&service, window);
        println!("window {window}: {grown} KiB for 4,000 responses");
        // Each response has about 30 KB: copies would take 120 MB.
        assert!(grown < 48 * 1024, "window {window}: {grown} KiB");
    }
}
