//! gRPC clients: the messages, a single call that checks the answer, and the frames of the load
//! generator with random keys, which `h2load` does not support.

use anyhow::{Result, bail};
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;

use tidegate_bench::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_bench::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate_bench::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use crate::generator::{Answers, Protocol, Request};

pub(crate) const ENVOY_PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Returns the request that Envoy sends for one user.
pub(crate) fn envoy_request(domain: &str, user: &str) -> RateLimitRequest {
    let entry = Entry { key: "user".to_owned(), value: user.to_owned() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    RateLimitRequest {
        domain: domain.to_owned(),
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

/// Returns a call for the load generator, with a minimal HTTP/2, so that the client costs little
/// compared with the server: headers are sent without the dynamic table.
pub(crate) fn call(port: u16, path: &str, message: &[u8]) -> Request {
    let mut bytes = Vec::new();
    frame(&mut bytes, HEADERS, END_HEADERS, &head(port, path));
    let data = bytes.len();
    frame(&mut bytes, DATA, END_STREAM, message);
    Request { streams: vec![5, data + 5], ..Request::new(port, Protocol::Grpc, bytes) }
}

/// Appends what a client sends first. It disables push, and uses the largest windows for streams
/// and for the connection, which the data in flight never exhausts.
pub(crate) fn open(out: &mut Vec<u8>) {
    out.extend_from_slice(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    frame(out, SETTINGS, 0, &[0, 2, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff]);
    frame(out, WINDOW_UPDATE, 0, &(0x7fff_ffff_u32 - 65_535).to_be_bytes());
}

/// Takes the complete frames, whose headers are ignored, and appends their acknowledgements.
pub(crate) fn read_answers(input: &mut Vec<u8>, out: &mut Vec<u8>) -> Result<Answers> {
    let (mut answers, mut rest) = (Answers::default(), input.as_slice());
    while let Some((kind, flags, payload, after)) = parse_frame(rest) {
        rest = after;
        match kind {
            // In the answers of both services, field 1 is 1 if the request is allowed.
            DATA => {
                answers.messages += 1;
                answers.allowed += u64::from(payload.get(5..7) == Some(&[8, 1]));
            }
            HEADERS if flags & END_STREAM != 0 => answers.count += 1,
            SETTINGS | PING if flags & ACK == 0 => {
                frame(out, kind, ACK, if kind == PING { payload } else { &[] });
            }
            RST_STREAM | GOAWAY => bail!("the server rejected a request: {kind}, {payload:?}"),
            _ => {}
        }
    }
    let parsed = input.len() - rest.len();
    input.drain(..parsed);
    Ok(answers)
}

/// Returns the encoded headers of a call: two from the static table, the others as literals.
fn head(port: u16, path: &str) -> Vec<u8> {
    let mut head = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        head.extend_from_slice(name);
        head.push(u8::try_from(value.len()).unwrap_or_default());
        head.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], path);
    literal(&[0x01], &format!("127.0.0.1:{port}"));
    literal(&[0x0f, 0x10], "application/grpc");
    literal(b"\x00\x02te", "trailers");
    head
}

/// Appends a frame of the connection, or of a stream whose number is written later.
fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags, 0, 0, 0, 0]);
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
