//! gRPC at the level of frames: requests that no gRPC client sends, and the exact bytes of
//! responses.

mod support;

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
use support::{Service, TEST_TIMEOUT, with_free_ports};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code as GrpcCode;

const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const GRPC: (&str, &str) = ("content-type", "application/grpc");
/// Maximum size of a message.
const MAX_MESSAGE: usize = 4 * 1024 * 1024;

type Chunks = StreamBody<ReceiverStream<Result<Frame<Bytes>, Infallible>>>;

/// HTTP/2 connection.
struct Connection(SendRequest<Chunks>);

/// Request whose body is still being sent.
struct PendingRequest {
    chunks: mpsc::Sender<Result<Frame<Bytes>, Infallible>>,
    response: tokio::task::JoinHandle<Response>,
}

#[derive(Debug)]
struct Response {
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

    /// Sends the head at once.
    fn begin(&self, method: Method, path: &str, headers: &[(&str, &str)]) -> PendingRequest {
        let (chunks, received) = mpsc::channel(1);
        let mut request = Request::builder().method(method).uri(format!("http://tidegate{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request =
            request.body(StreamBody::new(ReceiverStream::new(received))).expect("a request");
        let mut sender = self.0.clone();
        let response = tokio::spawn(async move {
            let (head, body) = sender.send_request(request).await.expect("a response").into_parts();
            let body = body.collect().await.expect("the whole body");
            let trailers = body.trailers().cloned();
            Response { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
        });
        PendingRequest { chunks, response }
    }

    async fn call(&self, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut sending = self.begin(Method::POST, PATH, headers);
        sending.send(body).await;
        sending.end().await
    }
}

impl PendingRequest {
    async fn send(&mut self, chunk: &[u8]) {
        // The response may arrive before the body is complete.
        let _ = self.chunks.send(Ok(Frame::data(Bytes::copy_from_slice(chunk)))).await;
    }

    async fn end(self) -> Response {
        drop(self.chunks);
        tokio::time::timeout(TEST_TIMEOUT, self.response)
            .await
            .expect("no timeout")
            .expect("no panic")
    }
}

impl Response {
    /// Returns the status of an error response, which consists of headers only.
    fn error(&self) -> (GrpcCode, String) {
        assert_eq!(
            (self.status, self.body.len(), &self.trailers),
            (StatusCode::OK, 0, &None),
            "{self:?}"
        );
        assert_eq!(self.headers["content-type"], "application/grpc");
        let status = tonic::Status::from_header_map(&self.headers)
            .unwrap_or_else(|| panic!("no status: {self:?}"));
        (status.code(), status.message().to_owned())
    }

    /// Returns the message of a successful call, which ends with its status in the trailers.
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
        RateLimitResponse::decode(message).expect("a response")
    }
}

async fn connect(service: &Service) -> TcpStream {
    TcpStream::connect(service.grpc.as_deref().expect("an address"))
        .await
        .expect("the service listens")
}

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("small").to_be_bytes();
    [&[flag], &length[..], message].concat()
}

/// Request that no rule limits.
fn payload(value: &str) -> Vec<u8> {
    let entries = vec![Entry { key: "user".to_owned(), value: value.to_owned() }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    framed(
        0,
        &RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }
            .encode_to_vec(),
    )
}

#[tokio::test]
async fn response_is_one_message_and_a_status() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    for content_type in
        ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"]
    {
        let response = connection.call(&[("content-type", content_type)], &payload("x")).await;
        assert_eq!(response.message().overall_code(), Code::Ok);
        assert_eq!(response.message().statuses.len(), 1);
    }
}

#[tokio::test]
async fn response_is_the_same_over_tls() {
    let folder = tempfile::tempdir().expect("a temporary directory");
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
    let response = Connection::over(stream).await.call(&[GRPC], &payload("x")).await;
    assert_eq!(response.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn malformed_message_is_an_error_and_keeps_the_connection() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let whole = payload("x");
    for (body, code, words) in [
        (framed(1, &whole[5..]), GrpcCode::Internal, "compressed"),
        (framed(7, &whole[5..]), GrpcCode::Internal, "flag is 7"),
        (Vec::new(), GrpcCode::Internal, "no message"),
        (whole[..3].to_vec(), GrpcCode::Internal, "shorter than"),
        (whole[..5].to_vec(), GrpcCode::Internal, "shorter than"),
        (whole[..whole.len() - 1].to_vec(), GrpcCode::Internal, "shorter than"),
        ([&whole[..], b"\0\0"].concat(), GrpcCode::Internal, "shorter than"),
        ([&whole[..], &framed(1, b"")].concat(), GrpcCode::Internal, "compressed"),
        (framed(0, b"\xff\xff\xff"), GrpcCode::Internal, "Protobuf"),
        (framed(0, b""), GrpcCode::InvalidArgument, "the domain is empty"),
    ] {
        let (found, message) = connection.call(&[GRPC], &body).await.error();
        assert_eq!(found, code, "{message}");
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(connection.call(&[GRPC], &whole).await.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn first_of_several_messages_counts() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let nonsense = framed(0, &RateLimitRequest::default().encode_to_vec());
    let both = [payload("x"), nonsense.clone()].concat();
    assert_eq!(connection.call(&[GRPC], &both).await.message().overall_code(), Code::Ok);
    let both = [nonsense, payload("x")].concat();
    assert_eq!(connection.call(&[GRPC], &both).await.error().0, GrpcCode::InvalidArgument);
}

#[tokio::test]
async fn message_may_arrive_byte_by_byte_up_to_the_maximum_size() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let mut sending = connection.begin(Method::POST, PATH, &[GRPC]);
    for byte in payload("x") {
        sending.send(&[byte]).await;
    }
    assert_eq!(sending.end().await.message().overall_code(), Code::Ok);
    let around = payload("").len() - 5;
    // In several chunks.
    let mut largest = payload(&"x".repeat(MAX_MESSAGE - around));
    while largest.len() - 5 > MAX_MESSAGE {
        largest = payload(&"x".repeat(MAX_MESSAGE - around - (largest.len() - 5 - MAX_MESSAGE)));
    }
    assert_eq!(largest.len() - 5, MAX_MESSAGE);
    assert_eq!(connection.call(&[GRPC], &largest).await.message().overall_code(), Code::Ok);
}

/// Response to a call that cannot be decided. An error would let Envoy's request pass.
fn assert_rejected(response: &Response) {
    let message = response.message();
    assert_eq!(message.overall_code(), Code::OverLimit);
    assert_eq!(message.response_headers_to_add, []);
}

/// Returns the number of rejections with this reason.
fn rejections(service: &Service, reason: &str) -> u64 {
    let metrics = service.admin("/metrics").body;
    let name = format!("tidegate_envoy_rejections_total{{reason=\"{reason}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
    line.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{reason}: {metrics}"))
}

#[tokio::test]
async fn message_that_is_too_large_is_denied() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let too_large = framed(0, &vec![0; MAX_MESSAGE + 1]);
    for body in [&too_large[..5], &too_large[..], &[&payload("x")[..], &too_large].concat()] {
        assert_rejected(&connection.call(&[GRPC], body).await);
    }
    assert_eq!(rejections(&service, "message_size"), 3);
    service.wait_until_logged("4194305 bytes");
    let output = service.output();
    assert_eq!(output.matches("4194305 bytes: at most 4194304").count(), 1, "{output}");
    assert_eq!(connection.call(&[GRPC], &payload("x")).await.message().overall_code(), Code::Ok);
}

/// Unread bytes of a denied call would use up the flow control window of the connection, until its
/// stream is reset a second later.
#[tokio::test]
async fn oversized_messages_stall_no_other_call() {
    let service = Service::start("");
    let prefix = [&[0][..], &u32::MAX.to_be_bytes()].concat();
    // The machine may be too busy for a call within a second.
    for _ in 0..10 {
        let connection = Connection::open(&service).await;
        let mut oversized = Vec::new();
        for _ in 0..8 {
            let mut sending = connection.begin(Method::POST, PATH, &[GRPC]);
            sending.send(&prefix).await;
            let response = tokio::time::timeout(TEST_TIMEOUT, &mut sending.response).await;
            assert_rejected(&response.expect("no timeout").expect("no panic"));
            oversized.push(sending.chunks);
        }
        // In total twice the window of the connection, which is 1 MiB.
        let chunk = Bytes::from(vec![0; 64 * 1024]);
        for _ in 0..4 {
            for chunks in &oversized {
                let _ = chunks.send(Ok(Frame::data(chunk.clone()))).await;
            }
        }
        let small = connection.call(&[GRPC], &payload("x")).await;
        assert_eq!(small.message().overall_code(), Code::Ok);
        if oversized.iter().all(|chunks| !chunks.is_closed()) {
            return;
        }
    }
    panic!("in ten rounds, no call was answered before the oversized streams were reset");
}

#[tokio::test]
async fn incomplete_messages_of_a_connection_are_bounded() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let start = &framed(0, &vec![0; MAX_MESSAGE])[..MAX_MESSAGE];
    let mut incomplete = Vec::new();
    for _ in 0..6 {
        let mut sending = connection.begin(Method::POST, PATH, &[GRPC]);
        sending.send(start).await;
        incomplete.push(sending);
    }
    let answered = async || loop {
        let done = incomplete.iter().position(|sending| sending.response.is_finished());
        if let Some(done) = done {
            return done;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let denied = tokio::time::timeout(TEST_TIMEOUT, answered()).await.expect("no timeout");
    let denied = incomplete.remove(denied);
    assert_rejected(&denied.end().await);
    assert_eq!(rejections(&service, "buffered_bytes"), 1);
    assert!(incomplete.iter().all(|sending| !sending.response.is_finished()));
    assert_eq!(connection.call(&[GRPC], &payload("x")).await.message().overall_code(), Code::Ok);
    // A call that is cancelled releases its bytes.
    for cancelled in incomplete.drain(..) {
        cancelled.response.abort();
    }
    let large = payload(&"x".repeat(MAX_MESSAGE / 2));
    let deadline = Instant::now() + TEST_TIMEOUT;
    while connection.call(&[GRPC], &large).await.message().overall_code() != Code::Ok {
        assert!(Instant::now() < deadline, "the bytes are not released");
    }
}

#[tokio::test]
async fn compression_is_rejected_with_the_accepted_encodings() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let response =
        connection.call(&[GRPC, ("grpc-encoding", "gzip")], &framed(1, b"anything")).await;
    let (code, message) = response.error();
    assert_eq!(code, GrpcCode::Unimplemented);
    assert!(message.contains("gzip"), "{message}");
    assert_eq!(response.headers["grpc-accept-encoding"], "identity");
    let plain = connection.call(&[GRPC, ("grpc-encoding", "identity")], &payload("x")).await;
    assert_eq!(plain.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn non_grpc_requests_get_http_errors() {
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
        let response = connection.call(&headers, &payload("x")).await;
        assert_eq!(
            (response.status, response.body.len()),
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, 0),
            "{content_type:?}"
        );
    }
    for path in [
        "/",
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        "/envoy.service.ratelimit.v2.Other/Call",
    ] {
        let response = connection.begin(Method::POST, path, &[GRPC]).end().await;
        assert_eq!(response.error().0, GrpcCode::Unimplemented, "{path}");
    }
}

#[tokio::test]
async fn error_messages_are_ascii() {
    let service = Service::start("auth: {api_token: open-sesame}\n");
    let connection = Connection::open(&service).await;
    let response = connection.call(&[GRPC], &payload("x")).await;
    let words = "a bearer token is required: Authorization: Bearer …".to_owned();
    assert_eq!(response.error(), (GrpcCode::Unauthenticated, words));
    let on_the_wire = response.headers["grpc-message"].to_str().expect("ASCII");
    assert!(on_the_wire.ends_with("Bearer%20%E2%80%A6"), "{on_the_wire}");
    // Without the token, no message is read.
    let sending = connection.begin(Method::POST, PATH, &[GRPC]);
    let early = tokio::time::timeout(TEST_TIMEOUT, sending.response)
        .await
        .expect("no timeout")
        .expect("no panic");
    assert_eq!(early.error().0, GrpcCode::Unauthenticated);
    let right =
        connection.call(&[GRPC, ("authorization", "Bearer open-sesame")], &payload("x")).await;
    assert_eq!(right.message().overall_code(), Code::Ok);
}

#[tokio::test]
async fn slow_request_blocks_no_other_and_is_drained() {
    let mut service = Service::start("");
    let connection = Connection::open(&service).await;
    let (head, tail) = (&payload("x")[..9], &payload("x")[9..]);
    let mut slow = connection.begin(Method::POST, PATH, &[GRPC]);
    slow.send(head).await;
    for _ in 0..3 {
        assert_eq!(
            connection.call(&[GRPC], &payload("y")).await.message().overall_code(),
            Code::Ok
        );
    }
    let mut given_up = connection.begin(Method::POST, PATH, &[GRPC]);
    given_up.send(head).await;
    given_up.response.abort();
    drop(given_up);
    assert_eq!(connection.call(&[GRPC], &payload("y")).await.message().overall_code(), Code::Ok);
    assert!(!slow.response.is_finished());
    service.signal("TERM");
    service.wait_until("the shutdown starts", |service| service.output().contains("shutting down"));
    slow.send(tail).await;
    assert_eq!(slow.end().await.message().overall_code(), Code::Ok);
    assert!(service.wait_for_exit().success());
}

#[tokio::test]
async fn missing_message_times_out() {
    let service = Service::start("");
    let connection = Connection::open(&service).await;
    let started = Instant::now();
    let mut nothing = connection.begin(Method::POST, PATH, &[GRPC]);
    let mut half = connection.begin(Method::POST, PATH, &[GRPC]);
    half.send(&payload("x")[..9]).await;
    let health = connection.begin(Method::POST, "/grpc.health.v1.Health/Check", &[GRPC]);
    for late in [&mut nothing, &mut half] {
        let response = tokio::time::timeout(TEST_TIMEOUT, &mut late.response)
            .await
            .expect("no timeout")
            .expect("no panic");
        let (code, message) = response.error();
        assert_eq!(
            (code, message.as_str()),
            (GrpcCode::DeadlineExceeded, "the message did not arrive within 10 seconds")
        );
        assert!(started.elapsed() >= Duration::from_secs(9), "{:?}", started.elapsed());
        // The stream is reset, which also stops the sender.
        tokio::time::timeout(TEST_TIMEOUT, late.chunks.closed())
            .await
            .expect("the receiver is closed");
    }
    assert_eq!(health.response.await.expect("no panic").error().0, GrpcCode::DeadlineExceeded);
    assert_eq!(connection.call(&[GRPC], &payload("x")).await.message().overall_code(), Code::Ok);
}
