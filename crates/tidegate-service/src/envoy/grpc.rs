//! Unary gRPC calls on hyper's own types: reads the message, sends a message or a status.
//!
//! tonic boxes bodies and futures, which took longer than a decision.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body as AnyBody, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};
use http_body::{Body as HttpBody, Frame};
use prost::Message;
use tonic::Status;
use tonic::metadata::{GRPC_CONTENT_TYPE, MetadataValue};

use super::message_buffer::MessageBuffer;
use super::rejection::Rejection;
use tidegate_net::listener::Request;
use tidegate_net::{BODY_TIMEOUT, BodyError, BodyReader};

/// Size of the prefix of a message: the compression flag and the length.
const PREFIX_BYTES: usize = 5;
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const OK: HeaderValue = HeaderValue::from_static("0");

pub(super) type GrpcResponse = Response<GrpcBody>;

/// Body of a response.
#[derive(Default)]
pub(crate) enum GrpcBody {
    /// Message with its prefix; the status follows.
    Message(Bytes),
    /// Status OK, in the trailers.
    Status,
    #[default]
    End,
    /// Body of a tonic response.
    Tonic(AnyBody),
}

/// Returns the response to a request of HTTP/1. gRPC needs HTTP/2, which browsers only use over
/// TLS, so no web page can call a listener in plain text.
pub(super) fn wrong_version(request: &Request) -> Option<GrpcResponse> {
    let is_http1 = request.version() < Version::HTTP_2;
    is_http1.then(|| http_error(StatusCode::HTTP_VERSION_NOT_SUPPORTED))
}

/// Returns the HTTP error for a request that is not a gRPC call: the method must be POST and the
/// content type that of gRPC.
pub(super) fn check_http(request: &Request) -> Option<GrpcResponse> {
    if request.method() != Method::POST {
        let mut response = http_error(StatusCode::METHOD_NOT_ALLOWED);
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return Some(response);
    }
    let content_type =
        request.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let is_grpc = match content_type.strip_prefix(b"application/grpc") {
        Some(format) => matches!(format.strip_prefix(b"+proto").unwrap_or(format), [] | [b';', ..]),
        None => false,
    };
    (!is_grpc).then(|| http_error(StatusCode::UNSUPPORTED_MEDIA_TYPE))
}

fn http_error(status: StatusCode) -> GrpcResponse {
    let mut response = GrpcResponse::default();
    *response.status_mut() = status;
    response
}

/// Rejects compressed messages.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Status> {
    let Some(encoding) = headers.get(GRPC_ENCODING).filter(|encoding| *encoding != "identity")
    else {
        return Ok(());
    };
    let mut status = Status::unimplemented(format!(
        "the encoding {encoding:?} is not supported: send messages without compression"
    ));
    status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
    Err(status)
}

/// Reason why a call is not decided.
#[derive(Debug, thiserror::Error)]
pub(super) enum GrpcCallError {
    #[error("the call ends with a status: {0}")]
    Failed(#[from] Status),
    #[error("the call is denied: {0}")]
    Rejected(#[from] Rejection),
}

/// Reader of the message of a call.
pub(super) struct MessageReader<M> {
    /// Decodes a complete message.
    pub(super) decode: fn(&[u8]) -> Result<M, GrpcCallError>,
    pub(super) max_bytes: usize,
}

impl<M> MessageReader<M> {
    /// Reads the message of a call. Messages after the first one must be complete, and are ignored.
    /// The buffer holds the bytes of a message that does not arrive in one chunk.
    pub(super) async fn read<B>(
        &self,
        body: B,
        buffer: &mut MessageBuffer<'_>,
    ) -> Result<M, GrpcCallError>
    where
        B: HttpBody<Data = Bytes, Error: std::error::Error + Send + Sync + 'static> + Unpin,
    {
        let mut reader = BodyReader::new(body);
        let mut message = None;
        // Nearly every message arrives in one chunk, which is not copied.
        let first = reader.next_chunk().await.map_err(read_error)?.unwrap_or_default();
        let decoded = self.decode_messages(&first, &mut message)?;
        let mut is_complete = decoded == first.len();
        if !reader.is_end() {
            buffer.extend(&first[decoded..])?;
            while let Some(chunk) = reader.next_chunk().await.map_err(read_error)? {
                buffer.extend(&chunk)?;
                let decoded = self.decode_messages(&buffer.bytes, &mut message)?;
                if decoded == buffer.bytes.len() {
                    // Frees the memory: the decoded message is as large.
                    buffer.bytes = Vec::new();
                } else {
                    buffer.bytes.drain(..decoded);
                }
            }
            is_complete = buffer.bytes.is_empty();
        }
        if !is_complete {
            return Err(Status::internal("the message is shorter than its length prefix").into());
        }
        message.ok_or_else(|| Status::internal("the request has no message").into())
    }

    /// Decodes the first message of the call, and skips the other complete ones at the start of
    /// these bytes. Returns the number of bytes of these messages.
    fn decode_messages(&self, bytes: &[u8], first: &mut Option<M>) -> Result<usize, GrpcCallError> {
        let mut rest = bytes;
        while let Some((&[flag, ref length @ ..], after)) = rest.split_first_chunk::<PREFIX_BYTES>()
        {
            match flag {
                0 => {}
                1 => {
                    return Err(Status::internal(
                        "the message is compressed, but the header grpc-encoding is missing",
                    )
                    .into());
                }
                other => {
                    return Err(Status::internal(format!(
                        "the message's compression flag is {other}, not 0 or 1"
                    ))
                    .into());
                }
            }
            let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
            if length > self.max_bytes {
                return Err(Rejection::MessageSize { length, max: self.max_bytes }.into());
            }
            let Some((message, after)) = after.split_at_checked(length) else { break };
            if first.is_none() {
                *first = Some((self.decode)(message)?);
            }
            rest = after;
        }
        Ok(bytes.len() - rest.len())
    }
}

fn read_error<E: std::error::Error + Send + Sync + 'static>(error: BodyError<E>) -> Status {
    match error {
        BodyError::TimedOut => message_timed_out(),
        BodyError::Failed(error) => Status::from_error(Box::new(error)),
    }
}

fn message_timed_out() -> Status {
    Status::deadline_exceeded("the message did not arrive within 10 seconds")
}

/// Applies the message timeout to a service of tonic, whose response starts after the first
/// message.
pub(super) async fn with_message_timeout<T>(
    call: impl Future<Output = T> + Unpin,
) -> Result<T, Status> {
    Box::pin(tokio::time::timeout(BODY_TIMEOUT, call)).await.map_err(|_| message_timed_out())
}

/// Returns the response of a successful call.
pub(super) fn response(message: &impl Message) -> GrpcResponse {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + length);
    bytes.push(0);
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    message.encode_raw(&mut bytes);
    let mut response = GrpcResponse::new(GrpcBody::Message(bytes.into()));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

impl HttpBody for GrpcBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = match &mut *self {
            Self::Message(message) => {
                let frame = Frame::data(std::mem::take(message));
                *self = Self::Status;
                frame
            }
            Self::Status => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                *self = Self::End;
                Frame::trailers(trailers)
            }
            Self::End => return Poll::Ready(None),
            Self::Tonic(body) => return Pin::new(body).poll_frame(cx),
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_) | Self::Status => false,
            Self::End => true,
            Self::Tonic(body) => body.is_end_stream(),
        }
    }
}
