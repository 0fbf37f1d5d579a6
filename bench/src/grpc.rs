//! gRPC clients: the messages, a single call that checks the answer, and a load generator with
//! random keys, which `h2load` does not support.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::codegen::http::uri::PathAndQuery;

use tidegate_bench::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_bench::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate_bench::proto::envoy::service::ratelimit::v3::RateLimitRequest;

pub(crate) const ENVOY_PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Returns the request that Envoy sends for one user.
pub(crate) fn envoy_request(user: &str) -> RateLimitRequest {
    let entry = Entry { key: "user".to_owned(), value: user.to_owned() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    RateLimitRequest {
        domain: "bench".to_owned(),
        descriptors: vec![descriptor],
        ..RateLimitRequest::default()
    }
}

/// Encodes a length-prefixed gRPC message without compression.
pub(crate) fn encode_message(message: &impl Message) -> Vec<u8> {
    let encoded = message.encode_to_vec();
    let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0], length.as_slice(), &encoded].concat()
}

/// Makes one unary call.
pub(crate) async fn unary_call<Q, A>(port: u16, path: &'static str, request: Q) -> Result<A>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?;
    let mut client = tonic::client::Grpc::new(endpoint.connect().await?);
    client.ready().await?;
    let codec = tonic_prost::ProstCodec::<Q, A>::default();
    let answer =
        client.unary(tonic::Request::new(request), PathAndQuery::from_static(path), codec).await?;
    Ok(answer.into_inner())
}

const CONNECTIONS: usize = 8;
const STREAMS: usize = 32;

/// Sends requests for random users on all connections for the given time. Returns the number of
/// answers and the answers per second.
pub(crate) async fn random_key_load(port: u16, turn: Duration) -> Result<(f64, f64)> {
    let start = Instant::now();
    let connections: Vec<_> = (0..CONNECTIONS)
        .map(|number| tokio::spawn(Connection::run(port, start + turn, number as u64)))
        .collect();
    let mut answers = 0;
    for connection in connections {
        answers += connection.await??;
    }
    Ok((f64::from(answers), f64::from(answers) / start.elapsed().as_secs_f64()))
}

/// Minimal HTTP/2 client, so that the client costs little compared with the server. It sends
/// headers without the dynamic table and ignores those of answers. The data in flight never
/// exhausts a flow-control window.
struct Connection {
    head: Vec<u8>,
    message: Vec<u8>,
    user: usize,
    next_stream: u32,
    random: u64,
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// Digits that are replaced in each request.
const USER_PLACEHOLDER: &str = "00000000";

impl Connection {
    async fn run(port: u16, until: Instant, number: u64) -> Result<u32> {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
        socket.set_nodelay(true)?;
        let message = encode_message(&envoy_request(USER_PLACEHOLDER));
        let user = message.len() - USER_PLACEHOLDER.len();
        ensure!(
            message.ends_with(USER_PLACEHOLDER.as_bytes()),
            "the user must be at the end of the message"
        );
        let random = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut connection = Self { head: head(port), message, user, next_stream: 1, random };

        let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // Disable push, and use the largest windows for streams and for the connection.
        frame(&mut out, SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff]);
        frame(&mut out, WINDOW_UPDATE, 0, 0, &(0x7fff_ffff_u32 - 65_535).to_be_bytes());
        for _ in 0..STREAMS {
            connection.push_request(&mut out);
        }
        let (mut answers, mut messages, mut input) = (0, 0, Vec::with_capacity(65_536));
        while Instant::now() < until {
            socket.write_all(&out).await?;
            out.clear();
            if socket.read_buf(&mut input).await? == 0 {
                bail!("the server closed the connection");
            }
            let mut rest = input.as_slice();
            while let Some((kind, flags, payload, after)) = parse_frame(rest) {
                rest = after;
                match kind {
                    // An error has headers only.
                    DATA => messages += 1,
                    HEADERS if flags & END_STREAM != 0 => {
                        answers += 1;
                        connection.push_request(&mut out);
                    }
                    SETTINGS | PING if flags & ACK == 0 => {
                        let echo = if kind == PING { payload } else { &[] };
                        frame(&mut out, kind, ACK, 0, echo);
                    }
                    RST_STREAM | GOAWAY => {
                        bail!("the server rejected a request: frame {kind}, {payload:?}")
                    }
                    _ => {}
                }
            }
            let parsed = input.len() - rest.len();
            input.drain(..parsed);
        }
        ensure!(messages >= answers, "{} of {answers} calls failed", answers - messages);
        Ok(answers)
    }

    /// Appends a call for a random user.
    fn push_request(&mut self, out: &mut Vec<u8>) {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mut number = (self.random >> 33) % 1_000_000;
        for digit in self.message[self.user..].iter_mut().rev() {
            *digit = b'0' + u8::try_from(number % 10).unwrap_or_default();
            number /= 10;
        }
        frame(out, HEADERS, END_HEADERS, self.next_stream, &self.head);
        frame(out, DATA, END_STREAM, self.next_stream, &self.message);
        self.next_stream += 2;
    }
}

/// Returns the encoded headers of a call: two from the static table, the others as literals.
fn head(port: u16) -> Vec<u8> {
    let mut head = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        head.extend_from_slice(name);
        head.push(u8::try_from(value.len()).unwrap_or_default());
        head.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], ENVOY_PATH);
    literal(&[0x01], &format!("127.0.0.1:{port}"));
    literal(&[0x0f, 0x10], "application/grpc");
    literal(b"\x00\x02te", "trailers");
    head
}

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Returns kind, flags and payload of the first frame and the remaining input, or `None` if the
/// frame is incomplete.
fn parse_frame(input: &[u8]) -> Option<(u8, u8, &[u8], &[u8])> {
    let &[high, middle, low, kind, flags, _, _, _, _, ref rest @ ..] = input else { return None };
    let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
    let (payload, after) = rest.split_at_checked(length)?;
    Some((kind, flags, payload, after))
}
