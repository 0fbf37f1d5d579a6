//! A unary call of gRPC on hyper's own types: reads the message, sends a message or a status.
//!
//! tonic does the same for every service, and boxes bodies and futures for it: that took longer
//! than a decision.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body as AnyBody, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame};
use prost::Message;
use tokio::time::Sleep;
use tonic::Status;
use tonic::metadata::{GRPC_CONTENT_TYPE, MetadataValue};

use crate::listener::Request;

/// Before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// How long a client may take to send its message.
const MESSAGE_TIME: Duration = Duration::from_secs(10);
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const OK: HeaderValue = HeaderValue::from_static("0");

pub(crate) type Reply = Response<Body>;

/// The body of a reply.
#[derive(Default)]
pub(crate) enum Body {
    /// A message with its prefix, then its status.
    Message(Bytes),
    Status,
    #[default]
    End,
    /// What tonic answers.
    Other(AnyBody),
}

/// Refuses what is no call: gRPC is POST, of messages of its own type.
pub(super) fn refusal(request: &Request) -> Option<Reply> {
    let refused = |status| {
        let mut reply = Reply::default();
        *reply.status_mut() = status;
        reply
    };
    if request.method() != Method::POST {
        let mut reply = refused(StatusCode::METHOD_NOT_ALLOWED);
        reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return Some(reply);
    }
    let given = request.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let is_ours = match given.strip_prefix(b"application/grpc") {
        Some(format) => matches!(format.strip_prefix(b"+proto").unwrap_or(format), [] | [b';', ..]),
        None => false,
    };
    (!is_ours).then(|| refused(StatusCode::UNSUPPORTED_MEDIA_TYPE))
}

/// Messages come as they are, or not at all.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Status> {
    let Some(encoding) = headers.get(GRPC_ENCODING).filter(|encoding| *encoding != "identity")
    else {
        return Ok(());
    };
    let mut status =
        Status::unimplemented(format!("messages cannot be compressed, not by {encoding:?} either"));
    status.metadata_mut().insert("grpc-accept-encoding", MetadataValue::from_static("identity"));
    Err(status)
}

/// Reads the message of a call, of at most `limit` bytes, which must not take long. What comes
/// after it has to be messages too, and is left aside.
pub(super) async fn read<M, B>(mut body: B, limit: usize) -> Result<M, Status>
where
    M: Message + Default,
    B: HttpBody<Data = Bytes, Error: std::error::Error + Send + Sync + 'static> + Unpin,
{
    let (mut message, mut clock) = (None, None);
    // Nearly every message comes in one piece, which is not copied.
    let first = next_piece(&mut body, &mut clock).await?.unwrap_or_default();
    let taken = take_messages(&first, limit, &mut message)?;
    let mut is_whole = taken == first.len();
    if !body.is_end_stream() {
        let mut rest = first[taken..].to_vec();
        while let Some(piece) = next_piece(&mut body, &mut clock).await? {
            rest.extend_from_slice(&piece);
            rest.drain(..take_messages(&rest, limit, &mut message)?);
        }
        is_whole = rest.is_empty();
    }
    if !is_whole {
        return Err(Status::internal("the message ends before its length"));
    }
    message.ok_or_else(|| Status::internal("there is no message"))
}

/// Who has to wait sets the clock, which then goes on for the whole message.
async fn next_piece<B>(
    body: &mut B,
    clock: &mut Option<Pin<Box<Sleep>>>,
) -> Result<Option<Bytes>, Status>
where
    B: HttpBody<Data = Bytes, Error: std::error::Error + Send + Sync + 'static> + Unpin,
{
    let frame = poll_fn(|cx| match Pin::new(&mut *body).poll_frame(cx) {
        Poll::Ready(frame) => Poll::Ready(Ok(frame)),
        // Nearly every message is there with its head: nobody has to look at a clock.
        Poll::Pending => {
            let clock = clock.get_or_insert_with(|| Box::pin(tokio::time::sleep(MESSAGE_TIME)));
            clock.as_mut().poll(cx).map(|()| Err(too_late()))
        }
    });
    let Some(frame) = frame.await? else { return Ok(None) };
    let frame = frame.map_err(|error| Status::from_error(Box::new(error)))?;
    // Trailers say nothing here.
    Ok(Some(frame.into_data().unwrap_or_default()))
}

fn too_late() -> Status {
    Status::deadline_exceeded("the message did not come within 10 seconds")
}

/// For what tonic answers: it begins once the (first) message is there.
pub(super) async fn in_time<T>(call: impl Future<Output = T> + Unpin) -> Result<T, Status> {
    Box::pin(tokio::time::timeout(MESSAGE_TIME, call)).await.map_err(|_| too_late())
}

/// Takes the whole messages at the start of these bytes and keeps the first of all. Answers how
/// many bytes they are.
fn take_messages<M: Message + Default>(
    bytes: &[u8],
    limit: usize,
    first: &mut Option<M>,
) -> Result<usize, Status> {
    let mut rest = bytes;
    while let Some((&[flag, ref length @ ..], after)) = rest.split_first_chunk::<PREFIX>() {
        match flag {
            0 => {}
            1 => {
                return Err(Status::internal(
                    "the message is compressed, and no grpc-encoding tells how",
                ));
            }
            other => {
                return Err(Status::internal(format!(
                    "the message's compression flag is {other}, not 0 or 1"
                )));
            }
        }
        let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
        if length > limit {
            return Err(Status::out_of_range(format!(
                "the message has {length} bytes: at most {limit} are allowed"
            )));
        }
        let Some((message, after)) = after.split_at_checked(length) else { break };
        let message = M::decode(message).map_err(|error| Status::internal(error.to_string()))?;
        first.get_or_insert(message);
        rest = after;
    }
    Ok(bytes.len() - rest.len())
}

/// The answer to a call that went well.
pub(super) fn reply(message: &impl Message) -> Reply {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(PREFIX + length);
    bytes.push(0);
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    message.encode_raw(&mut bytes);
    let mut reply = Reply::new(Body::Message(bytes.into()));
    reply.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    reply
}

impl HttpBody for Body {
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
            Self::Other(body) => return Pin::new(body).poll_frame(cx),
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_) | Self::Status => false,
            Self::End => true,
            Self::Other(body) => body.is_end_stream(),
        }
    }
}
