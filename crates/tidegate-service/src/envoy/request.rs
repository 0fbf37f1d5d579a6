//! Decodes rate limit requests within bounds.

use axum::body::Bytes;
use prost::Message as _;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;

use super::grpc::GrpcCallError;
use super::rejection::Rejection;
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;

/// Maximum number of descriptors per request: more are a mistake or an attack.
const MAX_DESCRIPTORS: usize = 100;
/// Maximum number of entries of all descriptors of a request.
const MAX_ENTRIES: usize = 1_000;
/// Size up to which a message is decoded before its parts are counted.
const SMALL_MESSAGE: usize = 16 * 1024;

/// Field numbers of the parts that are counted.
const DESCRIPTORS: u32 = 2;
const ENTRIES: u32 = 1;

/// Decodes a request, and checks the number of its descriptors and entries.
pub(super) fn decode(message: &[u8]) -> Result<RateLimitRequest, GrpcCallError> {
    // A descriptor of two bytes takes 40 times as much memory once it is decoded.
    if message.len() > SMALL_MESSAGE {
        let (descriptors, entries) = count_parts(message).map_err(|error| malformed(&error))?;
        check_counts(descriptors, entries)?;
    }
    let request = match RateLimitRequest::decode(message) {
        Ok(request) => request,
        Err(error) => decode_with_any_bytes(message).map_err(|_| malformed(&error))?,
    };
    check(&request)?;
    Ok(request)
}

/// Checks the number of the descriptors and entries of a request.
pub(super) fn check(request: &RateLimitRequest) -> Result<(), Rejection> {
    let entries = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    check_counts(request.descriptors.len(), entries)
}

fn malformed(error: &prost::DecodeError) -> GrpcCallError {
    Status::internal(error.to_string()).into()
}

fn check_counts(descriptors: usize, entries: usize) -> Result<(), Rejection> {
    for (count, parts, max) in
        [(descriptors, "descriptors", MAX_DESCRIPTORS), (entries, "entries", MAX_ENTRIES)]
    {
        if count > max {
            return Err(Rejection::TooManyParts { count, parts, max });
        }
    }
    Ok(())
}

/// Returns the numbers of descriptors and of their entries, without decoding them.
fn count_parts(message: &[u8]) -> Result<(usize, usize), prost::DecodeError> {
    let (mut descriptors, mut entries) = (0, 0);
    for_each_part(message, DESCRIPTORS, |descriptor| {
        descriptors += 1;
        for_each_part(descriptor, ENTRIES, |_| {
            entries += 1;
            Ok(())
        })
    })?;
    Ok((descriptors, entries))
}

/// Calls `visit` with each embedded message of a field.
fn for_each_part(
    mut message: &[u8],
    field: u32,
    mut visit: impl FnMut(&[u8]) -> Result<(), prost::DecodeError>,
) -> Result<(), prost::DecodeError> {
    while !message.is_empty() {
        let (tag, wire_type) = decode_key(&mut message)?;
        if tag == field && wire_type == WireType::LengthDelimited {
            let mut rest = message;
            let length = usize::try_from(decode_varint(&mut rest)?).unwrap_or(usize::MAX);
            if let Some(part) = rest.get(..length) {
                visit(part)?;
            }
        }
        // Also checks the length.
        skip_field(wire_type, tag, &mut message, DecodeContext::default())?;
    }
    Ok(())
}

/// [`RateLimitRequest`] whose texts may be any bytes. Envoy sends header values as they are, and
/// those may be other than UTF-8.
#[derive(prost::Message)]
struct BytesRequest {
    #[prost(bytes = "bytes", tag = "1")]
    domain: Bytes,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<BytesDescriptor>,
    #[prost(uint32, tag = "3")]
    hits_addend: u32,
}

#[derive(prost::Message)]
struct BytesDescriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<BytesEntry>,
    #[prost(message, optional, tag = "2")]
    limit: Option<RateLimitOverride>,
    #[prost(message, optional, tag = "3")]
    hits_addend: Option<u64>,
    #[prost(bool, tag = "4")]
    is_negative_hits: bool,
}

#[derive(prost::Message)]
struct BytesEntry {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

/// Decodes a message in which some text is not UTF-8. Such a text has one character per byte, as in
/// the other front doors.
fn decode_with_any_bytes(message: &[u8]) -> Result<RateLimitRequest, prost::DecodeError> {
    let text = |bytes: &Bytes| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().copied().map(char::from).collect(),
    };
    let entry = |entry: &BytesEntry| Entry { key: text(&entry.key), value: text(&entry.value) };
    let descriptor = |descriptor: BytesDescriptor| RateLimitDescriptor {
        entries: descriptor.entries.iter().map(entry).collect(),
        limit: descriptor.limit,
        hits_addend: descriptor.hits_addend,
        is_negative_hits: descriptor.is_negative_hits,
    };
    let request = BytesRequest::decode(message)?;
    Ok(RateLimitRequest {
        domain: text(&request.domain),
        descriptors: request.descriptors.into_iter().map(descriptor).collect(),
        hits_addend: request.hits_addend,
    })
}

#[cfg(test)]
mod fuzz_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(descriptors: usize, entries: usize, value: &str) -> RateLimitRequest {
        let entry = Entry { key: "user".to_owned(), value: value.to_owned() };
        let descriptor = RateLimitDescriptor {
            entries: vec![entry; entries],
            limit: Some(RateLimitOverride { requests_per_unit: 5, unit: 3 }),
            hits_addend: Some(7),
            is_negative_hits: true,
        };
        RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![descriptor; descriptors],
            hits_addend: 3,
        }
    }

    fn decoded(message: &[u8]) -> Result<RateLimitRequest, String> {
        decode(message).map_err(|error| match error {
            GrpcCallError::Failed(status) => status.message().to_owned(),
            GrpcCallError::Rejected(rejection) => rejection.to_string(),
        })
    }

    #[test]
    fn numbers_of_descriptors_and_entries_are_bounded_at_any_size() {
        for value in ["x".to_owned(), "x".repeat(SMALL_MESSAGE)] {
            for (descriptors, entries) in [(1, 0), (100, 10), (1, 1_000)] {
                let whole = request(descriptors, entries, &value);
                assert_eq!(decoded(&whole.encode_to_vec()), Ok(whole));
            }
            let many = decoded(&request(101, 1, &value).encode_to_vec());
            assert_eq!(many, Err("101 descriptors: at most 100 are allowed".to_owned()));
            let many = decoded(&request(7, 143, &value).encode_to_vec());
            assert_eq!(many, Err("1001 entries: at most 1000 are allowed".to_owned()));
        }
    }

    #[test]
    fn texts_may_be_any_bytes() {
        let mut message = request(2, 2, "caf\u{e9}-XX").encode_to_vec();
        for at in 0..message.len() - 1 {
            if message[at..].starts_with(b"XX") {
                message[at..at + 2].copy_from_slice(b"\xff\xc3");
            }
        }
        // The whole value has one character per byte.
        let value = "caf\u{c3}\u{a9}-\u{ff}\u{c3}";
        assert_eq!(decoded(&message), Ok(request(2, 2, value)));
    }

    #[test]
    fn malformed_messages_are_errors() {
        let large = request(3, 3, &"x".repeat(SMALL_MESSAGE)).encode_to_vec();
        let small = request(3, 3, "x").encode_to_vec();
        for whole in [large, small] {
            assert!(decoded(&whole[..whole.len() - 1]).is_err());
            assert!(decoded(&[&whole[..], b"\x12\xff"].concat()).is_err());
            assert!(decoded(&[b"\xff", &whole[..]].concat()).is_err());
        }
    }
}
