//! HTTP/2 at the level of frames.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use crate::support::TEST_TIMEOUT;

/// One side of an HTTP/2 connection.
pub(crate) struct Frames(TcpStream);

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// HPACK encoding of `:method: GET` or `POST`, `:scheme: http`, `:path: /`, `:authority: h`.
pub(crate) const GET: &[u8] = b"\x82\x86\x84\x41\x01h";
pub(crate) const POST: &[u8] = b"\x83\x86\x84\x41\x01h";
/// HPACK encoding of `:status: 200`.
pub(crate) const STATUS_200: &[u8] = b"\x88";

/// Frame of a stream.
#[derive(Debug)]
pub(crate) struct StreamFrame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

impl Frames {
    /// Connects with an initial flow control window for streams.
    pub(crate) fn connect(address: &str, window: u32) -> Self {
        Self::start(TcpStream::connect(address).expect("the service listens"), window)
    }

    /// Starts HTTP/2 on a connection to a server.
    pub(crate) fn start(stream: TcpStream, window: u32) -> Self {
        stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        stream.set_nodelay(true).expect("a socket");
        let mut frames = Self(stream);
        frames.0.write_all(PREFACE).expect("sent");
        frames.send(SETTINGS, 0, 0, &[&[0, 4][..], &window.to_be_bytes()].concat());
        frames
    }

    /// Reads the preface of a client and accepts its connection.
    pub(crate) fn accept(mut stream: TcpStream) -> Option<Self> {
        let mut preface = [0; PREFACE.len()];
        stream.read_exact(&mut preface).ok().filter(|()| preface == *PREFACE)?;
        let mut frames = Self(stream);
        frames.send(SETTINGS, 0, 0, &[]);
        Some(frames)
    }

    pub(crate) fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.try_send(kind, flags, stream, payload).expect("sent");
    }

    /// Sends a frame, unless the other side has closed the connection.
    pub(crate) fn try_send(
        &mut self,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> io::Result<()> {
        self.0.write_all(&encode(kind, flags, stream, payload))
    }

    /// Sends bytes, such as many frames at once.
    pub(crate) fn try_send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    /// Closes the connection.
    pub(crate) fn close(&self) {
        self.0.shutdown(std::net::Shutdown::Both).expect("open");
    }

    /// Returns the kind, flags and payload of the next frame of a stream, and acknowledges frames
    /// of the connection.
    pub(crate) fn next(&mut self) -> (u8, u8, Vec<u8>) {
        let frame = self.next_frame().expect("a frame");
        (frame.kind, frame.flags, frame.payload)
    }

    /// Returns the next frame of a stream, or `None` at the end of the connection.
    pub(crate) fn next_frame(&mut self) -> Option<StreamFrame> {
        loop {
            let frame = self.next_of_any_stream().ok()??;
            if frame.stream != 0 {
                return Some(frame);
            }
        }
    }

    /// Returns the next frame, or `None` at the end of the connection. Pings and settings are
    /// acknowledged.
    pub(crate) fn next_of_any_stream(&mut self) -> io::Result<Option<StreamFrame>> {
        let mut head = [0; 9];
        match self.0.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            read => read?,
        }
        let [high, middle, low, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        self.0.read_exact(&mut payload)?;
        if matches!(kind, PING | SETTINGS) && flags & ACK == 0 {
            let payload = if kind == PING { &payload[..] } else { &[] };
            // The other side may have closed the connection.
            let _ = self.try_send(kind, ACK, 0, payload);
        }
        Ok(Some(StreamFrame { kind, flags, stream: u32::from_be_bytes(stream), payload }))
    }

    /// Reads up to the end of the connection and returns the error code of the last GOAWAY, if any.
    pub(crate) fn code_at_the_end(&mut self) -> Option<u32> {
        let mut code = None;
        while let Some(frame) = self.next_of_any_stream().expect("the end, not a timeout") {
            if frame.kind == GOAWAY {
                code = frame
                    .payload
                    .get(4..8)
                    .map(|code| u32::from_be_bytes(code.try_into().expect("4 bytes")));
            }
        }
        code
    }
}

/// Returns the bytes of a frame.
pub(crate) fn encode(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Encodes a header field whose name and value are shorter than 127 bytes.
pub(crate) fn field(name: &str, value: &str) -> Vec<u8> {
    let length = |text: &str| [u8::try_from(text.len()).expect("short")];
    [&[0][..], &length(name), name.as_bytes(), &length(value), value.as_bytes()].concat()
}
