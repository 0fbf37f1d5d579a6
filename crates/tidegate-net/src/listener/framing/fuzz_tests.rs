//! Fuzzing of the framing: hyper finds the same requests in what is accepted, so that no request is
//! hidden in another.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use http::{HeaderValue, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use super::*;
use crate::fuzz;

const SEEDS: [&str; 17] = [
    "T / HTTP/1.0\r\nH:\r\nContent-Length:2\r\nn:\r\nUpgrade:\r\n\r\nEb ",
    "GET / HTTP/1.0\r\nConnection: keep-alive\r\nUpgrade: x\r\n\r\nGET /b HTTP/1.1\nHost: a\n\n",
    "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: x\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na\nbGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n\n\n\n\r\n\
     A\r\n0123456789\r\n0\r\nX: y\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "GET / HTTP/1.1\nHost: a\r\n\r\n",
    "GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    "POST / HTTP/1.0\r\nHost: a\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nab\
     GET / HTTP/1.1\r\n\r\n",
    "CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\nContent-Length: 2\r\n\r\nabGET / HTTP/1.1\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\
     0000000000003\r\nabc\r\n000;\"\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "\r\n\r\nGET / HTTP/1.1\r\nHost:a\r\nConnection: close, upgrade\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
];
const PIECES: [&str; 36] = [
    "Upgrade: x\r\n",
    "Connection: keep-alive\r\n",
    "\r\n",
    "\n",
    "\r",
    "\r\n\r\n",
    "GET / HTTP/1.1\r\n",
    "POST /x HTTP/1.1\r\n",
    "Host: a\r\n",
    "Content-Length: ",
    "Content-Length: 3\r\n",
    "Content-Length:0\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding:\tCHUNKED \r\n",
    "Transfer-Encoding: ",
    "chunked",
    ", ",
    "0",
    "1",
    "3",
    "a",
    "abc",
    "0\r\n\r\n",
    "3\r\nabc\r\n",
    ";",
    ":",
    " ",
    "\t",
    "+",
    "0x",
    "\x0b",
    "\0",
    "X: y\r\n",
    "Trailer: X\r\n",
    "HTTP/1.0",
    "é",
];

/// Returns the length of the body of each complete request, by this module.
fn by_framing(bytes: &[u8]) -> Vec<u64> {
    let mut framing = Framing::default();
    let (mut complete, mut body) = (Vec::new(), 0);
    for byte in bytes {
        let had_head = framing.head.has_request_line;
        let before = framing.state;
        if framing.check(&[*byte]) == 0 {
            break;
        }
        let ends_head = had_head && !framing.head.has_request_line;
        let is_in_body = !matches!(before, FramingState::Head | FramingState::Passthrough);
        body += u64::from(matches!(before, FramingState::Body(_) | FramingState::ChunkData(_)));
        if (ends_head || is_in_body)
            && matches!(framing.state, FramingState::Head | FramingState::Passthrough)
        {
            complete.push(std::mem::take(&mut body));
        }
    }
    complete
}

/// Returns the length of the body of each complete request, by hyper.
fn by_hyper(runtime: &tokio::runtime::Runtime, bytes: &[u8]) -> Vec<u64> {
    let complete = Rc::new(RefCell::new(Vec::new()));
    let (mut client, server) = tokio::io::duplex(1 << 20);
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let complete = Rc::clone(&complete);
        async move {
            let mut response = hyper::Response::new(Empty::<Bytes>::new());
            // As the gateway does: bytes after an upgrade request are not checked.
            if request.headers().contains_key(header::UPGRADE) {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if let Ok(body) = request.into_body().collect().await {
                complete.borrow_mut().push(body.to_bytes().len() as u64);
            }
            Ok::<_, Infallible>(response)
        }
    });
    runtime.block_on(async {
        client.write_all(bytes).await.expect("the buffer is large");
        client.shutdown().await.expect("open");
        let connection = hyper::server::conn::http1::Builder::new();
        let _ = connection.serve_connection(TokioIo::new(server), service).await;
    });
    drop(client);
    complete.take()
}

#[test]
fn fuzz_framing_finds_the_requests_that_hyper_finds() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    fuzz::bytes(&SEEDS, &PIECES, |bytes| {
        let mut framing = Framing::default();
        let accepted = framing.check(bytes);
        let expected = by_framing(bytes);
        let found = by_hyper(&runtime, &bytes[..accepted]);
        // hyper may reject a request, for example because of its method. The body of an upgrade
        // request is not checked, because it is the last one.
        if framing.state == FramingState::Passthrough && found.len() == expected.len() {
            assert!(found.len() < 2 || found[..found.len() - 1] == expected[..expected.len() - 1]);
            return;
        }
        assert!(expected.starts_with(&found), "hyper {found:?}, framing {expected:?}");
    });
}

#[test]
fn fuzz_framing_does_not_depend_on_the_reads() {
    fuzz::bytes(&SEEDS, &PIECES, |bytes| {
        let whole = Framing::default().check(bytes) == bytes.len();
        for size in [1, 2, 3, 7, 64] {
            let mut framing = Framing::default();
            let accepted: usize = bytes.chunks(size).map(|read| framing.check(read)).sum();
            assert_eq!(accepted == bytes.len(), whole, "reads of {size} bytes");
            // Once rejected, nothing more is accepted, and no line is kept without a bound.
            assert!(accepted == bytes.len() || framing.check(b"GET / HTTP/1.1\r\n\r\n") == 0);
            assert!(framing.line.len() <= MAX_LINE);
        }
    });
}
