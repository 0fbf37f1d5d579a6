use crate::frames::{
    DATA, END_HEADERS, END_STREAM, Frames, HEADERS, PING, SETTINGS, WINDOW_UPDATE, encode,
};
use crate::support::Service;
use crate::{request_fields, wait_until_closed};

const ENHANCE_YOUR_CALM: u32 = 11;
const PRIORITY: u8 = 2;
/// Type that is not defined.
const UNKNOWN: u8 = 0x20;

#[test]
fn floods_of_control_frames_end_the_connection() {
    let service = Service::start("");
    let weight: &[u8] = &[0, 0, 0, 0, 16];
    let floods: [(&str, u8, u32, &[u8]); 5] = [
        ("PRIORITY", PRIORITY, 1, weight),
        ("WINDOW_UPDATE", WINDOW_UPDATE, 0, &[0, 0, 0, 1]),
        ("PING", PING, 0, b"12345678"),
        ("SETTINGS", SETTINGS, 0, &[]),
        ("unknown", UNKNOWN, 0, &[]),
    ];
    // Nothing listens at the upstream.
    let gateway = Service::gateway("", &["http://127.0.0.1:1"]);
    let grpc = service.grpc.as_ref().expect("gRPC");
    for address in [&service.http, grpc, &service.admin, &gateway.http] {
        for (name, kind, stream, payload) in floods {
            let mut client = Frames::connect(address, 65_535);
            let some = encode(kind, 0, stream, payload).repeat(100);
            for _ in 0..1_000 {
                // The service closes the connection in the meantime.
                if client.try_send_bytes(&some).is_err() {
                    break;
                }
            }
            assert_eq!(client.code_at_the_end(), Some(ENHANCE_YOUR_CALM), "{name}");
        }
    }
    wait_until_closed(&service, "control_frames", 15);
}

#[test]
fn control_frames_between_requests_are_no_flood() {
    let service = Service::start("");
    let mut client = Frames::connect(&service.http, 65_535);
    let fields = request_fields("GET", "/nowhere");
    for number in 0..1_000 {
        let stream = 2 * number + 1;
        client.send(HEADERS, END_HEADERS | END_STREAM, stream, &fields);
        client.send(PRIORITY, 0, stream, &[0, 0, 0, 0, 16]);
        client.send(PING, 0, 0, b"12345678");
        loop {
            let frame = client.next_frame().expect("a response");
            if frame.kind == DATA {
                let length = u32::try_from(frame.payload.len()).expect("short");
                client.send(WINDOW_UPDATE, 0, 0, &length.to_be_bytes());
                client.send(WINDOW_UPDATE, 0, stream, &length.to_be_bytes());
            }
            if frame.flags & END_STREAM != 0 {
                break;
            }
        }
    }
}
