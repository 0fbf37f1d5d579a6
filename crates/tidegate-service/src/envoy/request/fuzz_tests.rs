//! Fuzzing of rate limit requests: what was encoded is decoded, within the bounds.

use super::*;
use crate::fuzz::{self, Random};

const TEXTS: [&str; 7] = ["", "edge", "user", "a|b=c%", "naïve", "\0\n", "remote_address"];
/// Tags, lengths and numbers of the wire format.
const PIECES: [&str; 14] = [
    "\x0a",
    "\x12",
    "\x18",
    "\x1a",
    "\x20",
    "\x01",
    "\x00",
    "\x02",
    "\x7f",
    "\x0a\x04edge",
    "\x12\x00",
    "\x0a\x02\x0a\x00",
    "\x13",
    "\x14",
];

fn message(random: &mut Random) -> RateLimitRequest {
    let entry = |random: &mut Random| Entry {
        key: (*random.pick(&TEXTS)).to_owned(),
        value: random.pick(&TEXTS).repeat(random.below(3)),
    };
    let descriptor = |random: &mut Random| RateLimitDescriptor {
        entries: (0..random.below(4)).map(|_| entry(random)).collect(),
        limit: (random.below(3) == 0).then(|| RateLimitOverride {
            requests_per_unit: 5,
            unit: i32::from(random.next().to_le_bytes()[0] % 9),
        }),
        hits_addend: (random.below(3) == 0).then(|| random.next()),
        is_negative_hits: random.below(2) == 0,
    };
    let count = if random.below(20) == 0 { 99 + random.below(3) } else { random.below(4) };
    RateLimitRequest {
        domain: (*random.pick(&TEXTS)).to_owned(),
        descriptors: (0..count).map(|_| descriptor(random)).collect(),
        hits_addend: u32::try_from(random.next() >> 32).unwrap_or_default(),
    }
}

fn parts(request: &RateLimitRequest) -> (usize, usize) {
    let entries = request.descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
    (request.descriptors.len(), entries)
}

#[test]
fn fuzz_rls_messages_are_decoded_as_they_were_encoded() {
    let generate = |random: &mut Random| message(random).encode_to_vec();
    fuzz::run::<&[u8]>(&[], 1, generate, |bytes| {
        // The shrinker may break it.
        let Ok(request) = RateLimitRequest::decode(bytes) else { return };
        let (descriptors, entries) = parts(&request);
        match decode(bytes) {
            Ok(decoded) => assert_eq!(decoded, request),
            Err(_) => assert!(descriptors > MAX_DESCRIPTORS || entries > MAX_ENTRIES),
        }
    });
}

#[test]
fn fuzz_rls_bytes_are_decoded_within_the_bounds() {
    let generate = |random: &mut Random| {
        let mut bytes = message(random).encode_to_vec();
        random.mutate::<&[u8]>(&mut bytes, &PIECES, &[]);
        bytes
    };
    // A length of 2^64 - 1, and a group within a group.
    let seeds: [&[u8]; 3] =
        [b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x13\x13\x14\x14", b"\x0a\x02\xc3\x28"];
    fuzz::run(&seeds, 1, generate, |bytes| {
        let decoded = decode(bytes);
        let general = RateLimitRequest::decode(bytes);
        if let Ok(request) = &decoded {
            let (descriptors, entries) = parts(request);
            assert!(descriptors <= MAX_DESCRIPTORS && entries <= MAX_ENTRIES);
            // The count before decoding is that of the decoded message.
            assert_eq!(count_parts(bytes).ok(), Some((descriptors, entries)));
            let again = decode(&request.encode_to_vec()).ok();
            assert_eq!(again.as_ref(), Some(request), "encoded again, it is the same");
        }
        match general {
            Ok(request)
                if parts(&request).0 <= MAX_DESCRIPTORS && parts(&request).1 <= MAX_ENTRIES =>
            {
                assert_eq!(decoded.ok(), Some(request));
            }
            _ => {}
        }
    });
}
