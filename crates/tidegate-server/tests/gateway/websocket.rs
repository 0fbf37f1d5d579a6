use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::{Service, TEST_TIMEOUT, read_response};
use crate::upstream::Upstream;

/// Sample key and accept value of RFC 6455, 1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// Upstream that echoes each message.
pub(crate) fn echo() -> Upstream {
    Upstream::start(|request, stream| {
        assert_eq!(request.header("upgrade"), Some("websocket"), "{}", request.head);
        assert_eq!(request.header("connection"), Some("upgrade"), "{}", request.head);
        assert_eq!(request.header("sec-websocket-key"), Some(KEY));
        let response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {ACCEPT}\r\n\r\n"
        );
        stream.write_all(response.as_bytes())?;
        loop {
            let message = read_frame(stream)?;
            write_frame(stream, &message, None)?;
        }
    })
}

pub(crate) fn write_frame(
    stream: &mut TcpStream,
    message: &[u8],
    mask: Option<[u8; 4]>,
) -> std::io::Result<()> {
    let masked = if mask.is_some() { 0x80 } else { 0 };
    let mut frame = vec![0x82];
    if message.len() < 126 {
        frame.push(masked | u8::try_from(message.len()).expect("short"));
    } else {
        frame.push(masked | 127);
        frame.extend_from_slice(&(message.len() as u64).to_be_bytes());
    }
    frame.extend_from_slice(mask.as_ref().map_or(&[][..], |mask| mask));
    let mask = mask.unwrap_or_default();
    frame.extend(message.iter().enumerate().map(|(at, byte)| byte ^ mask[at % 4]));
    stream.write_all(&frame)
}

pub(crate) fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut start = [0; 2];
    stream.read_exact(&mut start)?;
    let mut length = u64::from(start[1] & 0x7f);
    if length == 127 {
        let mut long = [0; 8];
        stream.read_exact(&mut long)?;
        length = u64::from_be_bytes(long);
    }
    let mut mask = [0; 4];
    if start[1] & 0x80 != 0 {
        stream.read_exact(&mut mask)?;
    }
    let mut message = vec![0; usize::try_from(length).expect("fits")];
    stream.read_exact(&mut message)?;
    message.iter_mut().enumerate().for_each(|(at, byte)| *byte ^= mask[at % 4]);
    Ok(message)
}

pub(crate) fn connect(gateway: &Service) -> TcpStream {
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    let head = format!(
        "GET /chat HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: keep-alive, \
         Upgrade\r\nSec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    );
    client.write_all(head.as_bytes()).expect("sent");
    client
}

pub(crate) fn read_head(client: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte).expect("a head");
        head.push(byte[0]);
    }
    String::from_utf8(head).expect("text").to_ascii_lowercase()
}

#[test]
fn websocket_works_in_both_directions_and_counts_once() {
    let upstream = echo();
    let gateway =
        Service::gateway("policies: [{name: p, limit: 1, window: 1h}]\n", &[&upstream.url()]);
    let before = gateway.open_files();
    let mut client = connect(&gateway);
    let head = read_head(&mut client);
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    for line in ["upgrade: websocket\r\n", "connection: upgrade\r\n", "ratelimit: \"p\";r=0"] {
        assert!(head.contains(line), "{line} in {head}");
    }
    assert!(head.contains(&ACCEPT.to_ascii_lowercase()), "{head}");
    // The message has bytes that are invalid in a head, and exceeds any buffer.
    for message in [&b"hello"[..], b"\n\0\r\n \r\n", &vec![7; 3_000_000]] {
        let mut sender = client.try_clone().expect("a socket");
        let sent = message.to_vec();
        let sending =
            std::thread::spawn(move || write_frame(&mut sender, &sent, Some([1, 2, 3, 4])));
        assert!(read_frame(&mut client).expect("an echo") == message);
        sending.join().expect("no panic").expect("sent");
    }
    // The next request is denied, and the upgraded connection cannot be used to bypass the limit.
    let mut second = connect(&gateway);
    let denied = read_response(&mut second);
    assert_eq!((denied.status, denied.header("connection")), (429, Some("close")));
    // When one side closes, the other one is closed, too.
    client.shutdown(std::net::Shutdown::Both).expect("closed");
    drop(client);
    gateway.wait_until("both sides are closed", |gateway| gateway.open_files() <= before);
}

#[test]
fn idle_upgraded_connection_is_closed() {
    let upstream = echo();
    let gateway = Service::gateway("gateway: {idle_timeout: 500ms}\n", &[&upstream.url()]);
    let mut client = connect(&gateway);
    read_head(&mut client);
    let start = Instant::now();
    // The connection stays open while there is traffic.
    while start.elapsed() < Duration::from_millis(1_500) {
        write_frame(&mut client, b"tick", Some([9; 4])).expect("sent");
        assert_eq!(read_frame(&mut client).expect("an echo"), b"tick");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(client.read(&mut [0; 10]).expect("closed"), 0);
    assert!(start.elapsed() < Duration::from_secs(10));
}
