//! Reader of HTTP/2 frame heads in a stream of bytes. Payloads are skipped, except for settings and
//! window updates.

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;
/// Flag of DATA and HEADERS: the last frame of this side of the stream.
pub(super) const END_STREAM: u8 = 1;
/// Flag of SETTINGS and PING.
pub(super) const ACK: u8 = 1;
/// Flag of HEADERS and CONTINUATION: the last frame of the header block.
pub(super) const END_HEADERS: u8 = 4;

const HEAD_BYTES: usize = 9;
/// Size of one setting: its identifier and value.
const SETTING_BYTES: usize = 6;
const INCREMENT_BYTES: usize = 4;

/// Head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) length: u32,
}

impl Frame {
    fn parse([high, middle, low, kind, flags, stream @ ..]: [u8; HEAD_BYTES]) -> Self {
        Self {
            kind,
            flags,
            // The highest bit is reserved.
            stream: u32::from_be_bytes(stream) & 0x7fff_ffff,
            length: u32::from_be_bytes([0, high, middle, low]),
        }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Part of a frame that matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameEvent {
    Head(Frame),
    Setting { id: u16, value: u32 },
    WindowUpdate { stream: u32, increment: u32 },
}

/// Position of one direction of a connection within its frames.
#[derive(Debug, Default)]
pub(super) struct FramePosition {
    head: [u8; HEAD_BYTES],
    head_length: usize,
    payload_left: usize,
}

/// Part of a frame.
pub(super) enum FramePart {
    /// Incomplete head.
    Head,
    /// End of the head of this frame.
    Start(Frame),
    Payload,
}

impl FramePosition {
    /// Returns the length of the part that the next bytes start with. There is at least one byte.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> (usize, FramePart) {
        if self.payload_left > 0 {
            let length = bytes.len().min(self.payload_left);
            self.payload_left -= length;
            return (length, FramePart::Payload);
        }
        let length = bytes.len().min(HEAD_BYTES - self.head_length);
        self.head[self.head_length..][..length].copy_from_slice(&bytes[..length]);
        self.head_length += length;
        if self.head_length < HEAD_BYTES {
            return (length, FramePart::Head);
        }
        let frame = Frame::parse(self.head);
        (self.head_length, self.payload_left) = (0, frame.length as usize);
        (length, FramePart::Start(frame))
    }
}

/// Reader of one direction of a connection.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    position: FramePosition,
    /// Current frame, once its head is complete.
    frame: Frame,
    /// Incomplete setting or increment.
    item: [u8; SETTING_BYTES],
    item_length: usize,
    is_in_header_block: bool,
}

impl FrameReader {
    /// Reads the next bytes.
    pub(super) fn read(&mut self, mut bytes: &[u8], mut on_event: impl FnMut(FrameEvent)) {
        while !bytes.is_empty() {
            let (length, part) = self.position.advance(bytes);
            let (now, later) = bytes.split_at(length);
            match part {
                FramePart::Head => {}
                FramePart::Start(frame) => {
                    self.start_frame(frame);
                    on_event(FrameEvent::Head(frame));
                }
                FramePart::Payload => self.read_payload(now, &mut on_event),
            }
            bytes = later;
        }
    }

    /// Returns whether another frame may be inserted here.
    pub(super) fn is_between_frames(&self) -> bool {
        let FramePosition { head_length, payload_left, .. } = self.position;
        head_length == 0 && payload_left == 0 && !self.is_in_header_block
    }

    fn start_frame(&mut self, frame: Frame) {
        self.frame = frame;
        self.item_length = 0;
        if matches!(frame.kind, HEADERS | CONTINUATION) {
            self.is_in_header_block = !frame.has(END_HEADERS);
        }
    }

    fn read_payload(&mut self, bytes: &[u8], on_event: &mut impl FnMut(FrameEvent)) {
        let item_bytes = match self.frame.kind {
            SETTINGS => SETTING_BYTES,
            WINDOW_UPDATE => INCREMENT_BYTES,
            _ => return,
        };
        for byte in bytes {
            self.item[self.item_length] = *byte;
            self.item_length += 1;
            if self.item_length == item_bytes {
                self.item_length = 0;
                on_event(self.item());
            }
        }
    }

    fn item(&self) -> FrameEvent {
        let [first, second, third, fourth, fifth, sixth] = self.item;
        if self.frame.kind == SETTINGS {
            let id = u16::from_be_bytes([first, second]);
            return FrameEvent::Setting {
                id,
                value: u32::from_be_bytes([third, fourth, fifth, sixth]),
            };
        }
        let increment = u32::from_be_bytes([first, second, third, fourth]) & 0x7fff_ffff;
        FrameEvent::WindowUpdate { stream: self.frame.stream, increment }
    }
}

/// Returns the bytes of a frame.
pub(super) fn encode(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    [&length[1..], &[kind, 0], &stream.to_be_bytes(), payload].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;

    fn events(bytes: &[u8], read_size: usize) -> (Vec<FrameEvent>, bool) {
        let (mut reader, mut events) = (FrameReader::default(), Vec::new());
        for read in bytes.chunks(read_size) {
            reader.read(read, |event| events.push(event));
        }
        (events, reader.is_between_frames())
    }

    #[test]
    fn settings_and_window_updates_are_read() {
        let settings = [0, 4, 0, 0, 0, 7, 0, 3, 0, 0, 1, 0];
        let update = 0x8000_0005_u32.to_be_bytes();
        let bytes = [
            encode(SETTINGS, 0, &settings),
            encode(WINDOW_UPDATE, 3, &update),
            encode(DATA, 3, b"ignored"),
            encode(SETTINGS, 0, &[]),
        ]
        .concat();
        let head =
            |kind, stream, length| FrameEvent::Head(Frame { kind, flags: 0, stream, length });
        let expected = vec![
            head(SETTINGS, 0, 12),
            FrameEvent::Setting { id: 4, value: 7 },
            FrameEvent::Setting { id: 3, value: 256 },
            head(WINDOW_UPDATE, 3, 4),
            FrameEvent::WindowUpdate { stream: 3, increment: 5 },
            head(DATA, 3, 7),
            head(SETTINGS, 0, 0),
        ];
        for read_size in 1..=bytes.len() {
            assert_eq!(events(&bytes, read_size), (expected.clone(), true));
        }
    }

    #[test]
    fn header_block_is_one_unit() {
        let mut bytes = encode(HEADERS, 1, b"x");
        assert!(!events(&bytes, 3).1);
        let mut end = encode(CONTINUATION, 1, b"y");
        end[4] = END_HEADERS;
        bytes.extend(end);
        assert!(events(&bytes, 3).1);
    }

    /// The naive model: frame by frame, in the whole text.
    fn model(mut bytes: &[u8]) -> Vec<FrameEvent> {
        let mut events = Vec::new();
        while let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() {
            let frame = Frame::parse(*head);
            events.push(FrameEvent::Head(frame));
            let payload = &rest[..rest.len().min(frame.length as usize)];
            bytes = &rest[payload.len()..];
            match frame.kind {
                SETTINGS => events.extend(payload.chunks_exact(SETTING_BYTES).map(|setting| {
                    let (id, value) = setting.split_at(2);
                    let value = u32::from_be_bytes(value.try_into().expect("four bytes"));
                    FrameEvent::Setting { id: u16::from_be_bytes([id[0], id[1]]), value }
                })),
                WINDOW_UPDATE => events.extend(payload.chunks_exact(4).map(|increment| {
                    let increment = u32::from_be_bytes(increment.try_into().expect("four bytes"));
                    let increment = increment & 0x7fff_ffff;
                    FrameEvent::WindowUpdate { stream: frame.stream, increment }
                })),
                _ => {}
            }
        }
        events
    }

    #[test]
    fn fuzz_frames_are_read_as_the_model_does_in_any_pieces() {
        let seeds = [
            encode(SETTINGS, 0, &[0, 4, 0, 0, 0, 7, 0, 3, 0, 0, 1, 0]),
            [encode(WINDOW_UPDATE, 3, &[0x80, 0, 0, 5]), encode(DATA, 1, b"x")].concat(),
            [encode(HEADERS, 1, b"x"), encode(CONTINUATION, 1, b""), encode(GOAWAY, 0, &[0; 8])]
                .concat(),
        ];
        let pieces = ["\0", "\0\0", "\x04", "\x08", "\x01", "\0\0\x06\x04\0\0\0\0\0", "\x7f"];
        fuzz::bytes(&seeds, &pieces, |bytes| {
            for read_size in [1, 2, 5, 64, bytes.len().max(1)] {
                assert_eq!(events(bytes, read_size).0, model(bytes), "reads of {read_size}");
            }
        });
    }
}
