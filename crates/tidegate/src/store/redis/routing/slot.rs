//! Cluster slot of a key: CRC16 (XMODEM) of its hash tag.

use crate::key::redis_key;

/// Number of slots of a cluster.
pub(crate) const SLOTS: usize = 16_384;

/// Returns the slot of a Redis key.
pub(crate) fn slot_of(redis_key: &str) -> u16 {
    crc16(hash_tag(redis_key).bytes()) % 16_384
}

/// Returns the slot of all counts of a user's key. Formats the Redis key only if it has escapes.
pub(crate) fn slot_of_user_key(key: &str) -> u16 {
    if key.bytes().any(|byte| b"%{}".contains(&byte)) {
        return slot_of(&redis_key("", key, ""));
    }
    crc16(key.bytes()) % 16_384
}

/// Returns the text between the first `{` and the next `}`, or the whole key if it is empty.
fn hash_tag(key: &str) -> &str {
    let tag =
        key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(tag, _)| tag);
    if tag.is_empty() { key } else { tag }
}

fn crc16(bytes: impl Iterator<Item = u8>) -> u16 {
    bytes.fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) ^ u16::from(byte))])
}

static TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_redis() {
        // The check value of CRC16/XMODEM, and results of CLUSTER KEYSLOT.
        assert_eq!(crc16(b"123456789".iter().copied()), 0x31C3);
        assert_eq!(slot_of("foo"), 12_182);
        assert_eq!(slot_of("rate_limit:{foo}:per-user"), 12_182);
        assert_eq!(slot_of("foo{}{bar}"), crc16("foo{}{bar}".bytes()) % 16_384);
        assert_eq!(slot_of("foo{bar}{zap}"), slot_of("bar"));
        for key in ["foo", "user:42", "{foo}", "}{", "100%", "élan"] {
            assert_eq!(
                slot_of_user_key(key),
                slot_of(&redis_key("rate_limit", key, "per-user")),
                "{key}"
            );
        }
    }
}
