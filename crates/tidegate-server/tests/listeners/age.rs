use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http::{Request, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::support::{Service, TEST_TIMEOUT};

/// Config with a short age, of which a tenth is jitter.
const CONFIG: &str = "
listen:
  http: 127.0.0.1:0
  grpc: 127.0.0.1:0
  admin: 127.0.0.1:0
  max_connection_age: 1s
";
const MIN_AGE: Duration = Duration::from_millis(900);
const BODY: &str = r#"{"key": "u", "quota": {"limit": 100, "window": "1h"}}"#;

type Chunks = StreamBody<ReceiverStream<Result<Frame<Bytes>, Infallible>>>;

fn request(path: &str) -> (mpsc::Sender<Result<Frame<Bytes>, Infallible>>, Request<Chunks>) {
    let (chunks, received) = mpsc::channel(1);
    let request = Request::post(format!("http://localhost{path}"))
        .body(StreamBody::new(ReceiverStream::new(received)))
        .expect("a request");
    (chunks, request)
}

/// The client gets GOAWAY, and requests in flight complete before the connection closes.
#[tokio::test]
async fn old_http2_connection_completes_its_requests_and_closes() {
    let service = Service::start(CONFIG);
    let files = service.open_files();
    let stream = TcpStream::connect(&service.http).await.expect("the service listens");
    let opened = Instant::now();
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("HTTP/2");
    tokio::spawn(connection);
    let (slow_body, slow) = request("/v1/acquire");
    let slow = tokio::spawn(sender.send_request(slow));
    let (first, second) = BODY.split_at(10);
    slow_body.send(Ok(Frame::data(first.into()))).await.expect("it is read");
    // Other requests are answered until the client gets GOAWAY.
    loop {
        if sender.ready().await.is_err() {
            break;
        }
        let (body, quick) = request("/v1/acquire");
        let quick = tokio::spawn(sender.send_request(quick));
        body.send(Ok(Frame::data(BODY.into()))).await.expect("it is read");
        drop(body);
        match quick.await.expect("no panic") {
            Ok(response) => assert_eq!(response.status(), StatusCode::OK),
            // Sent after GOAWAY, so a client sends it again on another connection.
            Err(error) => assert!(error.is_canceled() || opened.elapsed() > MIN_AGE, "{error}"),
        }
        assert!(opened.elapsed() < TEST_TIMEOUT, "no GOAWAY");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(opened.elapsed() >= MIN_AGE, "{:?}", opened.elapsed());
    assert!(!slow.is_finished());
    slow_body.send(Ok(Frame::data(second.into()))).await.expect("it is read");
    drop(slow_body);
    let response = tokio::time::timeout(TEST_TIMEOUT, slow).await.expect("no timeout");
    assert_eq!(response.expect("no panic").expect("a response").status(), StatusCode::OK);
    service.wait_until("the connection closes", |service| service.open_files() <= files);
}

/// It closes after a response that says so: closing it while it is idle could cross a request.
#[test]
fn old_http1_connection_closes_after_its_next_response() {
    let service = Service::start(CONFIG);
    let mut stream = std::net::TcpStream::connect(&service.http).expect("the service listens");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    let head = "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\n";
    let request = format!("{head}Content-Length: {}\r\n\r\n{BODY}", BODY.len());
    stream.write_all(request.as_bytes()).expect("it is read");
    let mut first = [0; 4096];
    let length = stream.read(&mut first).expect("a response");
    let first = String::from_utf8_lossy(&first[..length]).into_owned();
    assert!(first.starts_with("HTTP/1.1 200 ") && !first.contains("connection: "), "{first}");
    std::thread::sleep(Duration::from_millis(1_500));
    stream.write_all(request.as_bytes()).expect("it is read");
    let mut second = String::new();
    stream.read_to_string(&mut second).expect("the connection closes");
    assert!(second.starts_with("HTTP/1.1 200 "), "{second}");
    assert!(second.contains("connection: close"), "{second}");
}
