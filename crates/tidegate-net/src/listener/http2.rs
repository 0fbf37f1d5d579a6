//! An HTTP/2 connection as its frames show it: open streams, clients that do not read, and floods
//! of frames.
//!
//! hyper neither ends streams whose client leaves no room in the flow control window, nor counts
//! frames that cost work and bring none.

use std::time::Duration;

use h2::Reason;
use tokio::time::Instant;

use super::frames::{
    self, ACK, DATA, END_STREAM, Frame, FrameEvent, FrameReader, GOAWAY, HEADERS, RST_STREAM,
    SETTINGS,
};

/// Flow control window of a connection, and of a stream before the client's settings arrive.
const DEFAULT_WINDOW: i64 = 65_535;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// Response bytes that a client must make room for within the write timeout.
const MIN_PROGRESS_BYTES: u64 = 16 * 1024;
/// Number of streams of a connection that may be reset because their client does not read. With
/// more, the connection is closed.
const MAX_STALLED_STREAMS: usize = 8;
/// Control frames that a client may send before it has done anything else.
const INITIAL_CONTROL_FRAMES: u64 = 1_000;
/// Control frames that a client may send for each request and for each frame of a response.
const CONTROL_FRAMES_PER_FRAME: u64 = 10;
/// Control frames per second that are always allowed, such as pings.
const CONTROL_FRAMES_PER_SECOND: u64 = 10;

/// State of a connection.
#[derive(Debug)]
pub(super) struct Http2 {
    received: FrameReader,
    sent: FrameReader,
    streams: Vec<OpenStream>,
    /// Highest stream that the client has opened.
    last_stream: u32,
    /// Window with which streams start.
    initial_window: i64,
    connection_window: i64,
    control_frames_left: u64,
    /// Time up to which control frames were allowed at a constant rate.
    allowed_until: Instant,
    stalled_streams: usize,
}

/// Stream whose response is not complete.
#[derive(Debug)]
struct OpenStream {
    id: u32,
    has_response: bool,
    /// Room for data of the response.
    window: i64,
    sent_bytes: u64,
    /// Time at which the stream was found without room, and the bytes sent until then.
    blocked: Option<(Instant, u64)>,
}

/// Client that sends too many control frames.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flood;

/// Result of a check for clients that do not read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Stalled {
    pub(super) streams: Vec<u32>,
    /// Whether to close the connection.
    pub(super) closes: bool,
}

impl Http2 {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            received: FrameReader::default(),
            sent: FrameReader::default(),
            streams: Vec::new(),
            last_stream: 0,
            initial_window: DEFAULT_WINDOW,
            connection_window: DEFAULT_WINDOW,
            control_frames_left: INITIAL_CONTROL_FRAMES,
            allowed_until: now,
            stalled_streams: 0,
        }
    }

    /// Reads bytes from the client, which follow the preface.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), Flood> {
        let mut reader = std::mem::take(&mut self.received);
        let mut control_frames = 0;
        reader.read(bytes, |event| match event {
            FrameEvent::Head(frame) => control_frames += u64::from(self.received_frame(frame)),
            FrameEvent::Setting { id: INITIAL_WINDOW_SIZE, value } => {
                let change = i64::from(value) - self.initial_window;
                self.initial_window += change;
                for stream in &mut self.streams {
                    stream.window += change;
                }
            }
            FrameEvent::Setting { .. } => {}
            FrameEvent::WindowUpdate { stream: 0, increment } => {
                self.connection_window += i64::from(increment);
            }
            FrameEvent::WindowUpdate { stream, increment } => {
                if let Some(stream) = self.stream(stream) {
                    stream.window += i64::from(increment);
                }
            }
        });
        self.received = reader;
        self.allow(control_frames)
    }

    /// Records the head of a frame and returns whether it is a control frame.
    fn received_frame(&mut self, frame: Frame) -> bool {
        match frame.kind {
            HEADERS => {
                // Any other one has the trailers of a request.
                if frame.stream > self.last_stream {
                    self.last_stream = frame.stream;
                    self.control_frames_left += CONTROL_FRAMES_PER_FRAME;
                    self.streams.push(OpenStream {
                        id: frame.stream,
                        has_response: false,
                        window: self.initial_window,
                        sent_bytes: 0,
                        blocked: None,
                    });
                }
                false
            }
            // hyper limits the size of a header block.
            frames::CONTINUATION => false,
            DATA => frame.length == 0 && !frame.has(END_STREAM),
            SETTINGS => !frame.has(ACK),
            RST_STREAM => {
                self.end_stream(frame.stream);
                true
            }
            _ => true,
        }
    }

    fn allow(&mut self, control_frames: u64) -> Result<(), Flood> {
        if control_frames > self.control_frames_left {
            let now = Instant::now();
            let seconds = now.duration_since(self.allowed_until).as_secs();
            if seconds > 0 {
                self.allowed_until = now;
                self.control_frames_left +=
                    (seconds * CONTROL_FRAMES_PER_SECOND).min(INITIAL_CONTROL_FRAMES);
            }
        }
        self.control_frames_left =
            self.control_frames_left.checked_sub(control_frames).ok_or(Flood)?;
        Ok(())
    }

    /// Reads bytes to the client.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        let mut reader = std::mem::take(&mut self.sent);
        reader.read(bytes, |event| {
            if let FrameEvent::Head(frame) = event {
                self.sent_frame(frame);
            }
        });
        self.sent = reader;
    }

    fn sent_frame(&mut self, frame: Frame) {
        match frame.kind {
            HEADERS | DATA => {
                self.control_frames_left += CONTROL_FRAMES_PER_FRAME;
                if frame.kind == DATA {
                    self.connection_window -= i64::from(frame.length);
                }
                if frame.has(END_STREAM) {
                    self.end_stream(frame.stream);
                } else if let Some(stream) = self.stream(frame.stream) {
                    stream.has_response = true;
                    if frame.kind == DATA {
                        stream.window -= i64::from(frame.length);
                        stream.sent_bytes += u64::from(frame.length);
                    }
                }
            }
            RST_STREAM => self.end_stream(frame.stream),
            _ => {}
        }
    }

    fn stream(&mut self, id: u32) -> Option<&mut OpenStream> {
        self.streams.iter_mut().find(|stream| stream.id == id)
    }

    fn end_stream(&mut self, id: u32) {
        if let Some(index) = self.streams.iter().position(|stream| stream.id == id) {
            self.streams.swap_remove(index);
        }
    }

    pub(super) fn has_open_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Removes and returns the streams whose client has not made room for their response since
    /// `timeout`. Progress is noticed at the checks, which must be more frequent than the timeout.
    pub(super) fn check(&mut self, now: Instant, timeout: Duration) -> Stalled {
        let mut stalled = Stalled::default();
        let is_full = self.connection_window <= 0;
        self.streams.retain_mut(|stream| {
            if !stream.has_response || (stream.window > 0 && !is_full) {
                stream.blocked = None;
                return true;
            }
            let (since, sent) = stream.blocked.get_or_insert((now, stream.sent_bytes));
            // A few bytes at a time are no progress.
            if stream.sent_bytes - *sent >= MIN_PROGRESS_BYTES {
                (*since, *sent) = (now, stream.sent_bytes);
            }
            let is_stalled = now.duration_since(*since) >= timeout;
            if is_stalled {
                stalled.streams.push(stream.id);
            }
            !is_stalled
        });
        self.stalled_streams += stalled.streams.len();
        stalled.closes = self.stalled_streams > MAX_STALLED_STREAMS;
        stalled
    }

    /// Returns whether a frame may be inserted into the bytes from the client.
    pub(super) fn may_insert_received(&self) -> bool {
        self.received.is_between_frames()
    }

    /// Returns whether a frame may be inserted into the bytes to the client.
    pub(super) fn may_insert_sent(&self) -> bool {
        self.sent.is_between_frames()
    }

    /// Returns the last frame of a connection.
    pub(super) fn goaway(&self, is_error: bool) -> Vec<u8> {
        let code = if is_error { Reason::ENHANCE_YOUR_CALM } else { Reason::NO_ERROR };
        let payload = [self.last_stream, code.into()].map(u32::to_be_bytes).concat();
        frames::encode(GOAWAY, 0, &payload)
    }
}

/// Returns the frame that ends a stream.
pub(super) fn reset(stream: u32) -> Vec<u8> {
    frames::encode(RST_STREAM, stream, &u32::from(Reason::CANCEL).to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::frames::{CONTINUATION, END_HEADERS, WINDOW_UPDATE};
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const INTERVAL: Duration = Duration::from_secs(2);

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = frames::encode(kind, stream, payload);
        bytes[4] = flags;
        bytes
    }

    fn initial_window(size: u32) -> Vec<u8> {
        frame(SETTINGS, 0, 0, &[&[0, 4][..], &size.to_be_bytes()].concat())
    }

    fn update(stream: u32, by: u32) -> Vec<u8> {
        frame(WINDOW_UPDATE, 0, stream, &by.to_be_bytes())
    }

    /// Returns a connection with requests whose responses have started.
    fn with_streams(window: u32, streams: impl IntoIterator<Item = u32>) -> Http2 {
        let mut http2 = Http2::new(Instant::now());
        http2.receive(&initial_window(window)).expect("no flood");
        for stream in streams {
            http2.receive(&frame(HEADERS, 5, stream, b"x")).expect("no flood");
            http2.send(&frame(HEADERS, END_HEADERS, stream, b"x"));
        }
        http2
    }

    /// Returns the time after which the stream is ended, with these bytes sent before each check.
    fn ended_after(http2: &mut Http2, sent: usize) -> Option<Duration> {
        let start = Instant::now();
        (0..100).map(|check| INTERVAL * check).find(|elapsed| {
            for _ in 0..sent.div_ceil(16_384) {
                http2.send(&frame(DATA, 0, 1, &vec![0; sent.min(16_384)]));
            }
            !http2.check(start + *elapsed, TIMEOUT).streams.is_empty()
        })
    }

    #[test]
    fn stream_without_room_ends_after_the_timeout() {
        assert_eq!(ended_after(&mut with_streams(0, [1]), 0), Some(TIMEOUT));
        assert_eq!(ended_after(&mut with_streams(0, [1]), 100), Some(TIMEOUT), "too slow");
        assert_eq!(ended_after(&mut with_streams(0, [1]), 16_384), None, "slow");
        assert_eq!(ended_after(&mut with_streams(1, [1]), 0), None, "has room");
        let mut without_response = with_streams(0, []);
        without_response.receive(&frame(HEADERS, 5, 1, b"x")).expect("no flood");
        assert_eq!(ended_after(&mut without_response, 0), None);
        let mut full = with_streams(1 << 20, [1]);
        full.send(&frame(DATA, 0, 1, &vec![0; 65_535]));
        assert_eq!(ended_after(&mut full, 0), Some(TIMEOUT), "the connection has no room");
        let mut extended = with_streams(0, [1]);
        extended.receive(&[update(1, 10), initial_window(5)].concat()).expect("no flood");
        extended.send(&frame(DATA, 0, 1, &[0; 14]));
        assert_eq!(ended_after(&mut extended, 0), None, "one byte of room is left");
    }

    #[test]
    fn many_stalled_streams_end_the_connection() {
        let odd = |count: u32| (0..count).map(|index| 2 * index + 1);
        for (count, closes) in [(8, false), (9, true)] {
            let mut http2 = with_streams(0, odd(count));
            let start = Instant::now();
            assert_eq!(http2.check(start, TIMEOUT), Stalled::default());
            let stalled = http2.check(start + TIMEOUT, TIMEOUT);
            assert_eq!(stalled, Stalled { streams: odd(count).collect(), closes });
            assert!(!http2.has_open_streams());
        }
    }

    #[test]
    fn streams_end_with_their_response_or_a_reset() {
        for ends in [
            (true, DATA, END_STREAM),
            (true, HEADERS, END_STREAM),
            (true, RST_STREAM, 0),
            (false, RST_STREAM, 0),
        ] {
            let mut http2 = with_streams(10, [1]);
            assert!(http2.has_open_streams());
            let (is_sent, kind, flags) = ends;
            let bytes = frame(kind, flags, 1, &[0; 4]);
            if is_sent {
                http2.send(&bytes);
            } else {
                http2.receive(&bytes).expect("no flood");
            }
            assert!(!http2.has_open_streams(), "{ends:?}");
            // Trailers of the request, which come too late.
            http2.receive(&frame(HEADERS, 5, 1, b"x")).expect("no flood");
            assert!(!http2.has_open_streams(), "{ends:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_must_be_proportional_to_requests() {
        let pings = |count: usize| frame(6, 0, 0, &[0; 8]).repeat(count);
        let mut http2 = Http2::new(Instant::now());
        assert_eq!(http2.receive(&pings(1_001)), Err(Flood));
        let mut http2 = Http2::new(Instant::now());
        assert_eq!(http2.receive(&pings(1_000)), Ok(()));
        assert_eq!(http2.receive(&pings(1)), Err(Flood));
        // With requests and frames of responses, more are allowed.
        let mut http2 = with_streams(0, [1]);
        assert_eq!(http2.receive(&pings(1_000 + 10 + 10 - 1)), Ok(()));
        assert_eq!(http2.receive(&pings(1)), Err(Flood));
        // A few per second are always allowed.
        let mut http2 = Http2::new(Instant::now());
        for _ in 0..1_000 {
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(http2.receive(&pings(10)), Ok(()));
        }
        // Header blocks and data are no control frames.
        let mut http2 = Http2::new(Instant::now());
        for kind in [CONTINUATION, DATA] {
            assert_eq!(http2.receive(&frame(kind, 0, 1, b"x").repeat(5_000)), Ok(()));
        }
        assert_eq!(http2.receive(&frame(DATA, 0, 1, b"").repeat(1_001)), Err(Flood));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_accepted(
            received in proptest::collection::vec(proptest::num::u8::ANY, 0..300),
            sent in proptest::collection::vec(0..12_u8, 0..300),
        ) {
            let mut http2 = with_streams(100, [1, 3]);
            let _ = http2.receive(&received);
            http2.send(&sent);
            let _ = http2.receive(&sent);
            http2.check(Instant::now() + TIMEOUT, TIMEOUT);
        }
    }
}
