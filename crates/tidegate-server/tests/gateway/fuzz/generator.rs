//! Requests that are almost right, or wrong in a way that servers have mistaken before.

use std::fmt::Write as _;

use crate::frames::{self, DATA, END_HEADERS, END_STREAM, HEADERS};
use crate::seeded::Seeded;

const METHODS: [&str; 14] = [
    "GET", "GET", "GET", "GET", "POST", "POST", "POST", "PUT", "HEAD", "OPTIONS", "DELETE",
    "TRACE", "CONNECT", "get",
];

const PATHS: [&str; 12] = [
    "/limited/x",
    "/limited/x",
    "/limited/y",
    "/tree/a/b",
    "/tree",
    "/star/a/end",
    "/star/a/b/end",
    "/id/x",
    "/id/x",
    "/",
    "/page/a",
    "*",
];

/// Pieces that paths of servers have been confused by.
const PATH_PIECES: [&str; 32] = [
    "/", "//", "/.", "/./", "/..", "/../", "%2e", "%2E%2e", "/%2e%2e/", "%%32e", "%252e", "%2F",
    "%2f", "%5C", "\\", ";", ";a=b", "/..;/", "%", "%0", "%0a", "%00", "%20", "?", "?a=/../b", "#",
    "%23", "%3F", "a", "X", "~", "\u{e9}",
];

const VERSIONS: [&str; 12] = [
    "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1",
    "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "http/1.1",
];

const FIELDS: [&str; 30] = [
    "Connection: close",
    "Connection: keep-alive",
    "Connection: X-User-Id",
    "Connection: close, x-user-id, Content-Length, Host",
    "Connection: Transfer-Encoding",
    "Connection: upgrade",
    "Upgrade: websocket",
    "Upgrade: h2c",
    "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    "Keep-Alive: timeout=5",
    "Proxy-Connection: keep-alive",
    "TE: trailers",
    "TE: gzip",
    "Trailer: X-User-Id",
    "Expect: 100-continue",
    "X_User_Id: other",
    "X-Original-URL: /limited/x",
    "X-HTTP-Method-Override: POST",
    "X-Forwarded-For: 6.6.6.6",
    "Forwarded: for=6.6.6.6",
    "Cookie: a=b",
    "Cookie: session=\"X",
    "Content-Type: text/plain",
    "Authorization: Bearer X",
    "Host: h",
    "Host: other",
    "Content-Length: 0",
    "Transfer-Encoding: chunked",
    "X-Empty:",
    "X-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// Field with its usual name, and the same in spellings that servers have mistaken for it.
const FRAMINGS: [&str; 10] = [
    "Content-Length : {}",
    " Content-Length: {}",
    "Content-Length: +{}",
    "Content-Length: {}, {}",
    "Content_Length: {}",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding:\tchunked",
    "X: y\nContent-Length: {}",
];

/// Body that would be a request of its own, if the framing were mistaken.
const SMUGGLED: &str = "GET /limited/x HTTP/1.1\r\nHost: h\r\n\r\n";

/// Bytes that end, separate or fold parts of a request.
const BYTES: [u8; 14] = *b"\r\n\0 \t:;,%/\\0\x80\xff";

/// Returns what a client sends on one connection: a few requests, and some bytes changed.
pub(super) fn connection(seeded: &mut Seeded) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..=seeded.below(4) {
        request(seeded, &mut bytes);
    }
    if seeded.once_in(3) {
        for _ in 0..=seeded.below(2) {
            let at = seeded.below(bytes.len());
            let byte = BYTES[seeded.below(BYTES.len())];
            match seeded.below(3) {
                0 => bytes.insert(at, byte),
                1 => bytes[at] = byte,
                _ => drop(bytes.remove(at)),
            }
        }
    }
    bytes
}

fn request(seeded: &mut Seeded, bytes: &mut Vec<u8>) {
    let method = seeded.pick(&METHODS);
    let target = target(seeded);
    let space = if seeded.once_in(40) { "  " } else { " " };
    let version = seeded.pick(&VERSIONS);
    bytes.extend_from_slice(format!("{method}{space}{target} {version}\r\n").as_bytes());
    if !seeded.once_in(30) {
        bytes.extend_from_slice(b"Host: h\r\n");
    }
    for _ in 0..seeded.below(3) {
        let name = seeded.pick(&["X-User-Id", "x-user-id", "X-USER-ID"]);
        let (before, after) = (seeded.pick(&[" ", "", "\t", "  "]), seeded.pick(&["", " ", "\t"]));
        let line = format!("{name}:{before}u{}{after}\r\n", seeded.below(60));
        bytes.extend_from_slice(line.as_bytes());
    }
    while seeded.once_in(3) {
        bytes.extend_from_slice(seeded.pick(&FIELDS).as_bytes());
        bytes.extend_from_slice(if seeded.once_in(60) { b"\n" } else { b"\r\n" });
    }
    body(seeded, bytes);
}

/// Adds the rest of the head and the body, mostly with the right length.
fn body(seeded: &mut Seeded, bytes: &mut Vec<u8>) {
    let body = seeded.pick(&["", "a", "hello\r\n", SMUGGLED, "0\r\n\r\n", "1\r\na\r\n0\r\n\r\n"]);
    let length = body.len();
    match seeded.below(12) {
        0..=4 => bytes.extend_from_slice(b"\r\n"),
        5 | 6 => {
            let head = format!("Content-Length: {length}\r\n\r\n{body}");
            bytes.extend_from_slice(head.as_bytes());
        }
        7 | 8 => {
            let extension = seeded.pick(&["", "", ";a=b", " ", ";\"\r\n\""]);
            bytes.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            if length > 0 {
                let chunk = format!("{length:x}{extension}\r\n{body}\r\n");
                bytes.extend_from_slice(chunk.as_bytes());
            }
            let trailers =
                ["", "", "X-User-Id: u1\r\n", "Content-Length: 5\r\n", "Host: other\r\n"];
            let end = format!("{}0\r\n{}\r\n", seeded.pick(&["", "", "0"]), seeded.pick(&trailers));
            bytes.extend_from_slice(end.as_bytes());
        }
        9 => {
            // One length and another framing.
            let second = seeded.pick(&FRAMINGS).replace("{}", &length.to_string());
            let head = format!("Content-Length: {length}\r\n{second}\r\n\r\n{body}");
            bytes.extend_from_slice(head.as_bytes());
        }
        10 => {
            let field = seeded.pick(&FRAMINGS).replace("{}", &length.to_string());
            bytes.extend_from_slice(format!("{field}\r\n\r\n{body}").as_bytes());
        }
        _ => {
            // A wrong length.
            let length = (length + seeded.below(5)).saturating_sub(2);
            let head = format!("Content-Length: {length}\r\n\r\n{body}");
            bytes.extend_from_slice(head.as_bytes());
        }
    }
}

/// Returns a target: a path of a policy, with some pieces between its characters.
fn target(seeded: &mut Seeded) -> String {
    let mut path = seeded.pick(&PATHS).to_owned();
    if path.starts_with("/page") {
        path = format!("/page/{}", seeded.below(30));
    }
    let mut target = String::new();
    if seeded.once_in(20) {
        target.push_str(seeded.pick(&["http://h", "http://h:80", "http://other", "h", "//h"]));
    }
    for character in path.chars() {
        match seeded.below(40) {
            0 => drop(write!(target, "%{:02x}", u32::from(character))),
            1 => drop(write!(target, "%{:02X}", u32::from(character))),
            2 => target.push(character.to_ascii_uppercase()),
            3 => {
                target.push_str(seeded.pick(&PATH_PIECES));
                target.push(character);
            }
            _ => target.push(character),
        }
    }
    if seeded.once_in(4) {
        target.push_str(seeded.pick(&PATH_PIECES));
    }
    target
}

/// Returns the bytes of a line in which `\r`, `\n`, `\t` and `\x..` are escapes.
pub(super) fn unescaped(line: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('\\') {
        bytes.extend_from_slice(before.as_bytes());
        let (byte, used) = match after.as_bytes() {
            [b'r', ..] => (b'\r', 1),
            [b'n', ..] => (b'\n', 1),
            [b't', ..] => (b'\t', 1),
            [b'x', ..] => (u8::from_str_radix(&after[1..3], 16).expect("two digits"), 3),
            [other, ..] => (*other, 1),
            [] => panic!("a backslash at the end of {line}"),
        };
        bytes.push(byte);
        rest = &after[used..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

/// Frame of an HTTP/2 stream.
pub(super) struct Frame {
    pub(super) bytes: Vec<u8>,
    pub(super) ends_stream: bool,
}

const NAMES: [&str; 14] = [
    "x-user-id",
    "X-User-Id",
    "x_user_id",
    "cookie",
    "connection",
    "transfer-encoding",
    "te",
    "host",
    "content-length",
    "x-original-url",
    "upgrade",
    "x a",
    "",
    ":path",
];

const VALUES: [&str; 14] = [
    "u1",
    "u2",
    " u3",
    "u4 ",
    "\tu5",
    "chunked",
    "trailers",
    "h",
    "other",
    "5",
    "x\r\nx-user-id: u6",
    "/limited/x",
    "",
    "\0",
];

/// Returns the frames of a request: right pseudo-headers or nearly so, odd fields, a body.
pub(super) fn http2_stream(seeded: &mut Seeded, stream: u32) -> Vec<Frame> {
    let target: String = target(seeded).chars().take(100).collect();
    let target = match seeded.below(30) {
        0 => format!("{target} HTTP/1.1\r\nHost: h\r\n\r\n"),
        1 => String::new(),
        2 => target.trim_start_matches('/').to_owned(),
        _ => target,
    };
    let method = seeded.pick(&METHODS);
    let method = if seeded.once_in(30) { "GET /limited/x HTTP/1.1\r\nx" } else { method };
    let mut pseudo = vec![
        (":method", method),
        (":scheme", seeded.pick(&["http", "http", "http", "https", "x"])),
        (":path", &target),
        (":authority", seeded.pick(&["h", "h", "h", "other", "u@h", "h\r\n"])),
    ];
    if seeded.once_in(20) {
        pseudo.remove(seeded.below(pseudo.len()));
    }
    let user = format!("u{}", seeded.below(60));
    if !seeded.once_in(4) {
        pseudo.push(("x-user-id", &user));
    }
    while seeded.once_in(2) {
        pseudo.push((seeded.pick(&NAMES), seeded.pick(&VALUES)));
    }
    if seeded.once_in(20) {
        pseudo.reverse();
    }
    let block: Vec<u8> =
        pseudo.iter().flat_map(|(name, value)| frames::field(name, value)).collect();
    let has_body = seeded.once_in(3);
    let flags = END_HEADERS | if has_body { 0 } else { END_STREAM };
    let head = frames::encode(HEADERS, flags, stream, &block);
    let mut all = vec![Frame { bytes: head, ends_stream: !has_body }];
    if has_body {
        let ends_stream = !seeded.once_in(4);
        let body = seeded.pick(&["", "hello", SMUGGLED, "0\r\n\r\n"]);
        let flags = if ends_stream { END_STREAM } else { 0 };
        all.push(Frame {
            bytes: frames::encode(DATA, flags, stream, body.as_bytes()),
            ends_stream,
        });
    }
    all
}
