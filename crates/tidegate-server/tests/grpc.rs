//! gRPC frame by frame: what a client of gRPC would never send, and how each answer looks on the
//! wire.

mod support;

#[path = "../src/envoy/proto.rs"]
mod proto;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use support::{PATIENCE, Service, with_free_ports};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code as GrpcCode;

const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const GRPC: (&str, &str) = ("content-type", "application/grpc");
/// What one message may have.
const MAX_MESSAGE: usize = 256 * 1024;

type Pieces = StreamBody<ReceiverStream<Result<Frame<Bytes>, Infallible>>>;

/// A connection of HTTP/2.
struct Connection(SendRequest<Pieces>);

/// A request whose body is still being sent.
struct Sending {
    pieces: mpsc::Sender<Result<Frame<Bytes>, Infallible>>,
    answer: tokio::task::JoinHandle<Answer>,
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

impl Connection {
    async fn open(service: &Service) -> Self {
        Self::over(connect(service).await).await
    }

    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) =
            handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("HTTP/2");
        tokio::spawn(connection);
        Self(sender)
    }

    /// The head goes out at once.
    fn begin(&self, method: Method, path: &str, headers: &[(&str, &str)]) -> Sending {
        let (pieces, received) = mpsc::channel(1);
        let mut request = Request::builder().method(method).uri(format!("http://tidegate{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request =
            request.body(StreamBody::new(ReceiverStream::new(received))).expect("a request");
        let mut sender = self.0.clone();
        let answer = tokio::spawn(async move {
            let (head, body) = sender.send_request(request).await.expect("an answer").into_parts();
            let body = body.collect().await.expect("all of it");
            let trailers = body.trailers().cloned();
            Answer { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
        });
        Sending { pieces, answer }
    }

    async fn call(&self, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut sending = self.begin(Method::POST, PATH, headers);
        sending.send(body).await;
        sending.end().await
    }
}

impl Sending {
    async fn send(&mut self, piece: &[u8]) {
        // The answer may be there before the body is.
        let _ = self.pieces.send(Ok(Frame::data(Bytes::copy_from_slice(piece)))).await;
    }

    async fn end(self) -> Answer {
        drop(self.pieces);
        tokio::time::timeout(PATIENCE, self.answer).await.expect("in time").expect("no panic")
    }
}

impl Answer {
    /// Of an error, which is all head.
    fn error(&self) -> (GrpcCode, String) {
        assert_eq!(
            (self.status, self.body.len(), &self.trailers),
            (StatusCode::OK, 0, &None),
            "{self:?}"
        );
        assert_eq!(self.headers["content-type"], "application/grpc");
        let status = tonic::Status::from_header_map(&self.headers)
            .unwrap_or_else(|| panic!("a status: {self:?}"));
        (status.code(), status.message().to_owned())
    }

    /// Of a call that went well, which ends with its status.
    fn message(&self) -> RateLimitResponse {
        assert_eq!(
            (self.status, &self.headers["content-type"]),
            (StatusCode::OK, &"application/grpc".parse().expect("ascii"))
        );
        assert_eq!(self.headers.get("grpc-status"), None, "{self:?}");
        let trailers = self.trailers.as_ref().unwrap_or_else(|| panic!("trailers: {self:?}"));
        assert_eq!((trailers.len(), &trailers["grpc-status"]), (1, &"0".parse().expect("ascii")));
        let (prefix, message) = self.body.split_at(5);
        assert_eq!(prefix, &framed(0, message)[..5]);
        RateLimitResponse::decode(message).expect("an answer")
    }
}

async fn connect(service: &Service) -> TcpStream {
    TcpStream::connect(service.grpc.as_deref().expect("an address")).await.expect("it listens")
}

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("small").to_be_bytes();
    [&[flag], &length[..], message].concat()
}

/// A question that nothing limits.
fn question(value: &str) -> Vec<u8> {
    let entries = vec![Entry { key: "user".to_owned(), value: value.to_owned() }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    framed(
        0,
        &RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }
            .encode_to_vec(),
    )
}

#[tokio::test]
async fn an_answer_is_one_message_and_a_status() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    for content_type in
        ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"]
    {
        let answer = connection.call(&[("content-type", content_type)], &question("x")).await;
        assert_eq!(answer.message().overall_code(), Code::Ok);
        assert_eq!(answer.message().statuses.len(), 1);
    }
}

#[tokio::test]
async fn an_answer_is_the_same_over_tls() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let write =
        |name: &str, text: String| std::fs::write(folder.path().join(name), text).expect("written");
    write("cert.pem", own.cert.pem());
    write("key.pem", own.signing_key.serialize_pem());
    write("tidegate.yaml", with_free_ports("tls: {certificate: cert.pem, key: key.pem}\n"));
    let file = folder.path().join("tidegate.yaml");
    let service = Service::start_on(folder, &file, &[]);

    let mut roots = rustls::RootCertStore::empty();
    roots.add(own.cert.der().clone()).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut client = builder.expect("versions").with_root_certificates(roots).with_no_client_auth();
    client.alpn_protocols = vec![b"h2".to_vec()];
    let name = "localhost".try_into().expect("a name");
    let stream = TlsConnector::from(Arc::new(client))
        .connect(name, connect(&service).await)
        .await
        .expect("TLS");
    let answer = Connection::over(stream).await.call(&[GRPC], &question("x")).await;
    assert_eq!(answer.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn what_is_no_message_is_an_error_and_the_connection_goes_on() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let whole = question("x");
    let too_large = framed(0, &vec![0; MAX_MESSAGE + 1]);
    for (body, code, words) in [
        (framed(1, &whole[5..]), GrpcCode::Internal, "compressed"),
        (framed(7, &whole[5..]), GrpcCode::Internal, "flag is 7"),
        (Vec::new(), GrpcCode::Internal, "no message"),
        (whole[..3].to_vec(), GrpcCode::Internal, "ends before"),
        (whole[..5].to_vec(), GrpcCode::Internal, "ends before"),
        (whole[..whole.len() - 1].to_vec(), GrpcCode::Internal, "ends before"),
        ([&whole[..], b"\0\0"].concat(), GrpcCode::Internal, "ends before"),
        ([&whole[..], &framed(1, b"")].concat(), GrpcCode::Internal, "compressed"),
        (framed(0, b"\xff\xff\xff"), GrpcCode::Internal, "Protobuf"),
        (framed(0, b""), GrpcCode::InvalidArgument, "the domain is empty"),
        (too_large[..5].to_vec(), GrpcCode::OutOfRange, "262145 bytes: at most 262144"),
        (too_large.clone(), GrpcCode::OutOfRange, "262145 bytes: at most 262144"),
    ] {
        let (found, message) = connection.call(&[GRPC], &body).await.error();
        assert_eq!(found, code, "{message}");
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(connection.call(&[GRPC], &whole).await.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn the_first_of_several_messages_counts() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let nonsense = framed(0, &RateLimitRequest::default().encode_to_vec());
    let both = [question("x"), nonsense.clone()].concat();
    assert_eq!(connection.call(&[GRPC], &both).await.message().overall_code(), Code::Ok);
    let both = [nonsense, question("x")].concat();
    assert_eq!(connection.call(&[GRPC], &both).await.error().0, GrpcCode::InvalidArgument);
}

#[tokio::test]
async fn a_message_may_come_byte_by_byte_and_be_as_large_as_allowed() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let mut sending = connection.begin(Method::POST, PATH, &[GRPC]);
    for byte in question("x") {
        sending.send(&[byte]).await;
    }
    assert_eq!(sending.end().await.message().overall_code(), Code::Ok);
    let around = question("").len() - 5;
    let mut largest = question(&"x".repeat(MAX_MESSAGE - around));
    while largest.len() - 5 > MAX_MESSAGE {
        largest = question(&"x".repeat(MAX_MESSAGE - around - (largest.len() - 5 - MAX_MESSAGE)));
    }
    assert_eq!(largest.len() - 5, MAX_MESSAGE);
    assert_eq!(connection.call(&[GRPC], &largest).await.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn compression_is_refused_with_what_is_accepted_instead() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let answer = connection.call(&[GRPC, ("grpc-encoding", "gzip")], &framed(1, b"anything")).await;
    let (code, message) = answer.error();
    assert_eq!(code, GrpcCode::Unimplemented);
    assert!(message.contains("gzip"), "{message}");
    assert_eq!(answer.headers["grpc-accept-encoding"], "identity");
    let plain = connection.call(&[GRPC, ("grpc-encoding", "identity")], &question("x")).await;
    assert_eq!(plain.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn what_is_no_call_is_refused_in_the_words_of_http() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let got = connection.begin(Method::GET, PATH, &[GRPC]).end().await;
    assert_eq!(
        (got.status, &got.headers["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"POST".parse().expect("ascii"))
    );
    for content_type in [
        Some("application/json"),
        Some("application/grpc-web"),
        Some("application/grpc+json"),
        None,
    ] {
        let headers: Vec<_> = content_type.iter().map(|value| ("content-type", *value)).collect();
        let answer = connection.call(&headers, &question("x")).await;
        assert_eq!(
            (answer.status, answer.body.len()),
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, 0),
            "{content_type:?}"
        );
    }
    for path in [
        "/",
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        "/envoy.service.ratelimit.v2.Other/Call",
    ] {
        let answer = connection.begin(Method::POST, path, &[GRPC]).end().await;
        assert_eq!(answer.error().0, GrpcCode::Unimplemented, "{path}");
    }
}

#[tokio::test]
async fn an_error_is_written_in_ascii() {
    let service = Service::start("auth: {api_token: open-sesame}\n");
    let connection = Connection::open(&service).await;
    let answer = connection.call(&[GRPC], &question("x")).await;
    let words = "a bearer token is required: Authorization: Bearer …".to_owned();
    assert_eq!(answer.error(), (GrpcCode::Unauthenticated, words));
    let on_the_wire = answer.headers["grpc-message"].to_str().expect("ASCII");
    assert!(on_the_wire.ends_with("Bearer%20%E2%80%A6"), "{on_the_wire}");
    // Nobody without the token makes it read a message.
    let sending = connection.begin(Method::POST, PATH, &[GRPC]);
    let early =
        tokio::time::timeout(PATIENCE, sending.answer).await.expect("in time").expect("no panic");
    assert_eq!(early.error().0, GrpcCode::Unauthenticated);
    let right =
        connection.call(&[GRPC, ("authorization", "Bearer open-sesame")], &question("x")).await;
    assert_eq!(right.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn who_is_slow_to_ask_holds_nobody_up_and_is_answered_at_the_end() {
    let mut service = Service::start("");
    let connection = Connection::open(&service).await;
    let (head, tail) = (&question("x")[..9], &question("x")[9..]);
    let mut slow = connection.begin(Method::POST, PATH, &[GRPC]);
    slow.send(head).await;
    for _ in 0..3 {
        assert_eq!(
            connection.call(&[GRPC], &question("y")).await.message().overall_code(),
            Code::Ok
        );
    }
    let mut given_up = connection.begin(Method::POST, PATH, &[GRPC]);
    given_up.send(head).await;
    given_up.answer.abort();
    drop(given_up);
    assert_eq!(connection.call(&[GRPC], &question("y")).await.message().overall_code(), Code::Ok);
    assert!(!slow.answer.is_finished());
    service.signal("TERM");
    service.until("it was asked to end", |service| service.output().contains("asked to end"));
    slow.send(tail).await;
    assert_eq!(slow.end().await.message().overall_code(), Code::Ok);
    assert!(service.ended().success());
}

#[tokio::test]
async fn a_message_that_never_comes_is_not_waited_for() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let started = Instant::now();
    let mut nothing = connection.begin(Method::POST, PATH, &[GRPC]);
    let mut half = connection.begin(Method::POST, PATH, &[GRPC]);
    half.send(&question("x")[..9]).await;
    let health = connection.begin(Method::POST, "/grpc.health.v1.Health/Check", &[GRPC]);
    for late in [&mut nothing, &mut half] {
        let answer = tokio::time::timeout(PATIENCE, &mut late.answer)
            .await
            .expect("in time")
            .expect("no panic");
        let (code, message) = answer.error();
        assert_eq!(
            (code, message.as_str()),
            (GrpcCode::DeadlineExceeded, "the message did not come within 10 seconds")
        );
        assert!(started.elapsed() >= Duration::from_secs(9), "{:?}", started.elapsed());
        // The stream is reset, and with it who sends.
        tokio::time::timeout(PATIENCE, late.pieces.closed()).await.expect("nobody reads any more");
    }
    assert_eq!(health.answer.await.expect("no panic").error().0, GrpcCode::DeadlineExceeded);
    assert_eq!(connection.call(&[GRPC], &question("x")).await.message().overall_code(), Code::Ok);
}
