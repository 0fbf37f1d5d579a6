//! Names by which gRPC clients call a Unix socket. Those of the C core (Python, C++, Ruby, PHP) send
//! its path as `:authority`, such as `run%2Ftidegate.sock`, and others send it as it is.
//!
//! h2 resets such a request, because no host name has these characters, and offers no way to accept
//! them. They are replaced before h2 reads them, which leaves all lengths as they are.

use super::frames::{Frame, FramePart, FramePosition, HEADERS};

const NAME: &[u8] = b":authority";
/// Index of the name in the static table (RFC 7541, appendix A).
const NAME_INDEX: usize = 1;
/// Flags of HEADERS. No client is known to pad them, so padded ones are left as they are.
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// Filter of the bytes of one HTTP/2 connection, behind its preface.
#[derive(Debug, Default)]
pub(super) struct AuthorityFilter {
    position: FramePosition,
    /// Fields of the current frame, if it has any. A block that continues in a further frame is
    /// read in its first one, where clients put the pseudo-headers.
    block: Option<FieldBlock>,
}

impl AuthorityFilter {
    /// Replaces the characters in the next bytes.
    pub(super) fn filter(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let (length, part) = self.position.advance(bytes);
            let (now, later) = bytes.split_at_mut(length);
            match (part, &mut self.block) {
                (FramePart::Start(frame), _) => self.block = FieldBlock::of(frame),
                (FramePart::Payload, Some(block)) => {
                    for byte in now {
                        block.filter(byte);
                    }
                }
                (FramePart::Head | FramePart::Payload, _) => {}
            }
            bytes = later;
        }
    }
}

/// Part of a field (RFC 7541, 6).
#[derive(Debug, Clone, Copy, Default)]
enum FieldPart {
    /// Kind of the field, with the index of the field or of its name.
    #[default]
    Index,
    NameLength,
    Name,
    ValueLength,
    Value,
}

/// Position in a block of fields.
#[derive(Debug, Default)]
struct FieldBlock {
    /// Bytes before the first field.
    skipped: usize,
    part: FieldPart,
    is_literal: bool,
    is_authority: bool,
    /// Whether the text is in a Huffman code, which clients do not use for this.
    is_encoded: bool,
    text_length: usize,
    text_position: usize,
    /// Number that is being read, and the position of its next bits.
    number: usize,
    shift: Option<u32>,
}

impl FieldBlock {
    fn of(frame: Frame) -> Option<Self> {
        let has_fields = frame.kind == HEADERS && !frame.has(PADDED);
        let skipped = if frame.has(PRIORITY) { PRIORITY_BYTES } else { 0 };
        has_fields.then(|| Self { skipped, ..Self::default() })
    }

    fn filter(&mut self, byte: &mut u8) {
        if self.skipped > 0 {
            self.skipped -= 1;
            return;
        }
        match self.part {
            FieldPart::Index => self.read_index(*byte),
            FieldPart::NameLength | FieldPart::ValueLength => self.read_length(*byte),
            FieldPart::Name => {
                self.is_authority &= NAME.get(self.text_position) == Some(byte);
                self.advance_text();
            }
            FieldPart::Value => {
                let is_replaced = self.is_authority && !self.is_encoded;
                if is_replaced && matches!(byte, b'%' | b'/') {
                    *byte = b'-';
                }
                self.advance_text();
            }
        }
    }

    fn read_index(&mut self, byte: u8) {
        let (prefix, is_literal) = match byte {
            0x80.. => (7, false),
            0x40.. => (6, true),
            // A new size of the dynamic table.
            0x20.. => (5, false),
            _ => (4, true),
        };
        if self.shift.is_none() {
            self.is_literal = is_literal;
        }
        let Some(index) = self.read_number(byte, prefix) else { return };
        self.is_authority = matches!(index, 0 | NAME_INDEX);
        self.part = match index {
            _ if !self.is_literal => FieldPart::Index,
            0 => FieldPart::NameLength,
            _ => FieldPart::ValueLength,
        };
    }

    fn read_length(&mut self, byte: u8) {
        if self.shift.is_none() {
            self.is_encoded = byte & 0x80 != 0;
        }
        let Some(length) = self.read_number(byte, 7) else { return };
        (self.text_length, self.text_position) = (length, 0);
        let is_name = matches!(self.part, FieldPart::NameLength);
        self.part = if is_name { FieldPart::Name } else { FieldPart::Value };
        if is_name {
            self.is_authority = length == NAME.len() && !self.is_encoded;
        }
        if length == 0 {
            self.end_text();
        }
    }

    fn advance_text(&mut self) {
        self.text_position += 1;
        if self.text_position == self.text_length {
            self.end_text();
        }
    }

    fn end_text(&mut self) {
        self.part = if matches!(self.part, FieldPart::Name) {
            FieldPart::ValueLength
        } else {
            FieldPart::Index
        };
    }

    /// Reads the next byte of a number whose first byte has this many bits of it (RFC 7541, 5.1).
    fn read_number(&mut self, byte: u8, prefix: u32) -> Option<usize> {
        let Some(shift) = self.shift else {
            let max = (1 << prefix) - 1;
            self.number = usize::from(byte) & max;
            self.shift = (self.number == max).then_some(0);
            return self.shift.is_none().then_some(self.number);
        };
        let bits = usize::from(byte & 0x7f).checked_shl(shift).unwrap_or(usize::MAX);
        self.number = self.number.saturating_add(bits);
        self.shift = (byte & 0x80 != 0).then_some(shift.saturating_add(7));
        self.shift.is_none().then_some(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;
    use crate::listener::frames::{DATA, SETTINGS, encode};

    fn filtered(bytes: &[u8], read_size: usize) -> Vec<u8> {
        let (mut filter, mut bytes) = (AuthorityFilter::default(), bytes.to_vec());
        bytes.chunks_mut(read_size.max(1)).for_each(|read| filter.filter(read));
        bytes
    }

    fn text(text: &str) -> Vec<u8> {
        let length = text.len();
        let head = match u8::try_from(length) {
            Ok(length @ 0..127) => vec![length],
            _ => vec![127, u8::try_from(length - 127).expect("a short text")],
        };
        [&head, text.as_bytes()].concat()
    }

    /// Returns a connection with two requests, with data in between that looks like fields.
    fn connection(name: &[u8], path: &str, flags: u8) -> Vec<u8> {
        let others = [b"\x20\x83\x86\x3f\x01\x40".to_vec(), text(":path"), text("/a%2Fb")].concat();
        let last =
            [b"\x00".to_vec(), text("x"), text("/%"), b"\x7f\x01".to_vec(), text("%")].concat();
        let skipped: &[u8] = if flags & PRIORITY != 0 { b"/%\x41/%" } else { b"" };
        let headers = |path: &str| {
            let mut frame =
                encode(HEADERS, 1, &[skipped, &others, name, &text(path), &last].concat());
            frame[4] = flags;
            frame
        };
        let settings = encode(SETTINGS, 0, b"");
        let data = encode(DATA, 1, &headers("%2F/"));
        [settings, headers(path), data, headers(path)].concat()
    }

    #[test]
    fn path_is_replaced_in_every_form_of_the_field() {
        let long = "%2Frun".repeat(30);
        let names =
            [b"\x40", b"\x00", b"\x10"].map(|kind| [&kind[..], &text(":authority")].concat());
        let indexed = [b"\x41", b"\x01", b"\x11"].map(|index| index.to_vec());
        for path in ["tmp%2Frun%20dir%2Fx.sock", "/run/x.sock", "localhost:80", "", &long] {
            for name in names.iter().chain(&indexed) {
                for (read_size, flags) in [(1, 0), (7, 0), (1_000, 4), (3, PRIORITY)] {
                    let replaced = path.replace(['%', '/'], "-");
                    let given = filtered(&connection(name, path, flags), read_size);
                    assert_eq!(given, connection(name, &replaced, flags), "{path} {name:?}");
                }
            }
        }
    }

    #[test]
    fn other_fields_are_left_as_they_are() {
        for name in [&b"\x42"[..], b"\x04", b"\x40\x0a:authoritx", b"\x40\x01x"] {
            let bytes = connection(name, "/a%2F", 0);
            assert_eq!(filtered(&bytes, 5), bytes, "{name:?}");
        }
        let padded = connection(b"\x41", "/a%2F", PADDED);
        assert_eq!(filtered(&padded, 5), padded);
    }

    #[test]
    fn fuzz_bytes_are_replaced_the_same_in_any_pieces() {
        let seeds =
            [connection(b"\x41", "/a%2F", 0), connection(b"\x40\x0a:authority", "/a", PRIORITY)];
        let pieces = ["%", "/", "\x41", "\x7f", "\0", "\x01", ":authority", "\x0a"];
        fuzz::bytes(&seeds, &pieces, |bytes| {
            let whole = filtered(bytes, bytes.len());
            for read_size in [1, 2, 9] {
                assert_eq!(filtered(bytes, read_size), whole, "reads of {read_size}");
            }
            for (given, result) in bytes.iter().zip(&whole) {
                assert!(given == result || (b"%/".contains(given) && *result == b'-'));
            }
        });
    }
}
