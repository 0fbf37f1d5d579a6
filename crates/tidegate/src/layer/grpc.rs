//! gRPC responses: a status in the headers of a response without a body.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use super::body::Body;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// Status codes of the layer, by their numbers on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
}

/// Returns whether the headers are those of a gRPC request.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Returns a response with a status and, if a retry can help, a `RetryInfo`.
pub(super) fn response<B>(
    request: &HeaderMap,
    code: Code,
    message: &str,
    retry_after: Option<Duration>,
) -> Response<Body<B>> {
    let mut response = Response::new(Body::of_layer(bytes::Bytes::new()));
    let headers = response.headers_mut();
    let kind = request.get(CONTENT_TYPE).cloned();
    headers.insert(CONTENT_TYPE, kind.unwrap_or(HeaderValue::from_static("application/grpc")));
    headers.insert(STATUS, HeaderValue::from(code as u16));
    let mut insert = |name, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    insert(MESSAGE, &percent_encoded(message));
    if let Some(retry_after) = retry_after {
        insert(DETAILS, &base64(&details(code, message, retry_after)));
    }
    response
}

/// Returns the HTTP status that corresponds to a gRPC status in the headers, which a call has that
/// failed before its first message.
pub(super) fn http_status(response: &HeaderMap) -> Option<StatusCode> {
    let code = response.get(STATUS)?.to_str().ok()?;
    Some(match code {
        "0" => StatusCode::OK,
        "3" | "9" | "11" => StatusCode::BAD_REQUEST,
        "4" => StatusCode::GATEWAY_TIMEOUT,
        "5" => StatusCode::NOT_FOUND,
        "6" | "10" => StatusCode::CONFLICT,
        "7" => StatusCode::FORBIDDEN,
        "8" => StatusCode::TOO_MANY_REQUESTS,
        "12" => StatusCode::NOT_IMPLEMENTED,
        "14" => StatusCode::SERVICE_UNAVAILABLE,
        "16" => StatusCode::UNAUTHORIZED,
        // Cancelled by the client: nginx's code for it.
        "1" => StatusCode::from_u16(499).ok()?,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    })
}

/// Encodes a `google.rpc.Status` with a `google.rpc.RetryInfo`. Two small messages do not justify a
/// dependency on a Protocol Buffers library.
fn details(code: Code, message: &str, retry_after: Duration) -> Vec<u8> {
    let mut duration = Vec::new();
    push_number(&mut duration, 1, retry_after.as_secs());
    push_number(&mut duration, 2, retry_after.subsec_nanos().into());
    let mut retry_info = Vec::new();
    push_bytes(&mut retry_info, 1, &duration);
    let mut any = Vec::new();
    push_bytes(&mut any, 1, b"type.googleapis.com/google.rpc.RetryInfo");
    push_bytes(&mut any, 2, &retry_info);
    let mut status = Vec::new();
    push_number(&mut status, 1, code as u64);
    push_bytes(&mut status, 2, message.as_bytes());
    push_bytes(&mut status, 3, &any);
    status
}

fn push_number(message: &mut Vec<u8>, field: u8, number: u64) {
    message.push(field << 3);
    push_varint(message, number);
}

fn push_bytes(message: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    message.push(field << 3 | 2);
    push_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

/// Appends a varint: seven bits per byte, the lowest first.
fn push_varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    message.push(number.to_le_bytes()[0]);
}

/// Encodes without padding, as gRPC requires for binary headers.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| usize::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..=chunk.len() {
            text.push(char::from(DIGITS[bits >> (18 - 6 * digit) & 0x3f]));
        }
    }
    text
}

/// Percent-encodes all but printable ASCII, and the percent sign itself.
fn percent_encoded(text: &str) -> String {
    use std::fmt::Write as _;

    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use tonic_types::StatusExt as _;

    use super::*;

    fn status(message: &str, retry_after: Option<Duration>) -> tonic::Status {
        let response: Response<Body<()>> =
            response(&HeaderMap::new(), Code::ResourceExhausted, message, retry_after);
        assert_eq!(response.status(), StatusCode::OK);
        tonic::Status::from_header_map(response.headers()).expect("a gRPC status")
    }

    #[test]
    fn client_reads_code_message_and_retry_info() {
        let waits = [(0, 1), (1, 0), (59, 999_999_000), (127, 5), (128, 5), (31_622_400, 1)];
        for wait in waits.map(|(seconds, nanos)| Duration::new(seconds, nanos)) {
            for message in ["plain", "100 % \"größer\"\n", ""] {
                let status = status(message, Some(wait));
                assert_eq!(status.code(), tonic::Code::ResourceExhausted);
                assert_eq!(status.message(), message);
                assert_eq!(
                    status.get_details_retry_info().and_then(|info| info.retry_delay),
                    Some(wait)
                );
            }
        }
        assert!(status("no wait helps", None).get_details_retry_info().is_none());
    }

    #[test]
    fn grpc_status_maps_to_the_http_status() {
        let of = |code: i32| {
            let response: Response<()> =
                tonic::Status::new(tonic::Code::from_i32(code), "").into_http();
            http_status(response.headers()).map(|status| status.as_u16())
        };
        assert_eq!(of(tonic::Code::Internal as i32), Some(500));
        assert_eq!(of(tonic::Code::Unavailable as i32), Some(503));
        assert_eq!(of(tonic::Code::NotFound as i32), Some(404));
        assert_eq!(of(tonic::Code::ResourceExhausted as i32), Some(429));
        assert_eq!(of(tonic::Code::Cancelled as i32), Some(499));
        assert_eq!(http_status(&HeaderMap::new()), None);
    }
}
