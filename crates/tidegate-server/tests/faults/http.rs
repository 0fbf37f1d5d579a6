use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The service closes connections that were idle for ten seconds, so older ones are not reused.
const MAX_IDLE: Duration = Duration::from_secs(5);

/// Kept connection for sequential requests.
pub(crate) struct Connection {
    stream: TcpStream,
    /// Received bytes that are not parsed yet.
    buffer: Vec<u8>,
    used: Instant,
}

pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub(crate) fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").into_bytes()
}

impl Connection {
    pub(crate) async fn open(address: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(2048), used: Instant::now() })
    }

    pub(crate) fn is_fresh(&self) -> bool {
        self.used.elapsed() < MAX_IDLE
    }

    pub(crate) async fn request(&mut self, request: &[u8]) -> io::Result<Response> {
        self.send(request).await?;
        self.receive().await
    }

    pub(crate) async fn send(&mut self, requests: &[u8]) -> io::Result<()> {
        self.stream.write_all(requests).await
    }

    pub(crate) async fn receive(&mut self) -> io::Result<Response> {
        loop {
            if let Some((response, length)) = parse_response(&self.buffer)? {
                self.buffer.drain(..length);
                self.used = Instant::now();
                return Ok(response);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "closed in the middle of a response",
                ));
            }
        }
    }
}

/// Parses the first response, if it is complete, and returns it with its length.
fn parse_response(bytes: &[u8]) -> io::Result<Option<(Response, usize)>> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let Some(head) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = std::str::from_utf8(&bytes[..head]).map_err(|_| wrong("a head that is not text"))?;
    let status =
        text.get(9..12).and_then(|digits| digits.parse().ok()).ok_or_else(|| wrong("no status"))?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>().ok())
            .flatten()
    });
    let length = length.ok_or_else(|| wrong("no length"))?;
    let (start, end) = (head + 4, head + 4 + length);
    Ok(bytes.get(start..end).map(|body| (Response { status, body: body.to_vec() }, end)))
}
