//! Strict HTTP/1.1 framing: rejects requests that another server could parse differently.
//!
//! hyper accepts a bare LF as a line ending, drops a `Content-Length` next to a
//! `Transfer-Encoding`, and merges equal lengths. After parsing, these are no longer visible, so
//! the raw bytes are checked before hyper sees them.

/// Maximum length of a line: hyper's limit for a whole head.
const MAX_LINE: usize = 64 * 1024;
/// Maximum number of digits of a length or a chunk size.
const MAX_DIGITS: usize = 15;

/// Framing state of one connection.
#[derive(Debug, Default)]
pub(super) struct Framing {
    state: FramingState,
    /// Incomplete line, up to the bytes received so far.
    line: Vec<u8>,
    head: Head,
    /// Whether the first line of the connection is complete.
    has_first_line: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum FramingState {
    #[default]
    Head,
    Body(u64),
    ChunkSize,
    ChunkData(u64),
    /// Line break after the data.
    ChunkEnd,
    Trailers,
    /// HTTP/2, or an upgrade request: no HTTP/1.1 request follows.
    Passthrough,
    Rejected,
}

/// Fields of the current request head that define its framing.
#[derive(Debug, Default)]
struct Head {
    has_request_line: bool,
    length: Option<u64>,
    is_chunked: bool,
    is_upgrade: bool,
}

type Reason = &'static str;

impl Framing {
    /// Checks the next bytes and returns how many of them are accepted. Once this is less than all,
    /// every later byte is rejected, too.
    pub(super) fn check(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let next = match self.state {
                FramingState::Passthrough => return bytes.len(),
                FramingState::Rejected => return at,
                FramingState::Body(left) => {
                    Ok(skip(rest, left, FramingState::Body, FramingState::Head))
                }
                FramingState::ChunkData(left) => {
                    Ok(skip(rest, left, FramingState::ChunkData, FramingState::ChunkEnd))
                }
                FramingState::Head
                | FramingState::ChunkSize
                | FramingState::ChunkEnd
                | FramingState::Trailers => self.line(rest),
            };
            match next {
                Ok((length, state)) => (at, self.state) = (at + length, state),
                Err(reason) => {
                    tracing::debug!(reason, "ambiguous request rejected");
                    self.state = FramingState::Rejected;
                }
            }
        }
        at
    }

    /// Returns whether the client is in the middle of sending a body.
    pub(super) fn is_in_body(&self) -> bool {
        !matches!(
            self.state,
            FramingState::Head | FramingState::Passthrough | FramingState::Rejected
        )
    }

    /// Consumes one line, or a part of it, and returns its length and the next state.
    fn line(&mut self, bytes: &[u8]) -> Result<(usize, FramingState), Reason> {
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
            if self.line.len() + bytes.len() > MAX_LINE {
                return Err("a line is too long");
            }
            self.line.extend_from_slice(bytes);
            return Ok((bytes.len(), self.state));
        };
        let mut buffer = std::mem::take(&mut self.line);
        let whole = if buffer.is_empty() {
            &bytes[..=end]
        } else {
            buffer.extend_from_slice(&bytes[..=end]);
            &buffer
        };
        let line = whole.strip_suffix(b"\r\n").ok_or("a line ends with a bare LF")?;
        if line.contains(&b'\r') {
            return Err("a line contains a bare CR");
        }
        let state = match self.state {
            FramingState::ChunkSize => chunk_size(line)?,
            FramingState::ChunkEnd if line.is_empty() => FramingState::ChunkSize,
            FramingState::ChunkEnd => return Err("a chunk is longer than its declared size"),
            FramingState::Trailers if line.is_empty() => FramingState::Head,
            FramingState::Trailers => field(line).map(|_| FramingState::Trailers)?,
            _ => self.head_line(line)?,
        };
        buffer.clear();
        self.line = buffer;
        Ok((end + 1, state))
    }

    fn head_line(&mut self, line: &[u8]) -> Result<FramingState, Reason> {
        let is_first = !std::mem::replace(&mut self.has_first_line, true);
        if !self.head.has_request_line {
            if is_first && line == b"PRI * HTTP/2.0" {
                return Ok(FramingState::Passthrough);
            }
            // Empty lines before a request are ignored (RFC 9112, 2.2).
            self.head.has_request_line = !line.is_empty();
            return Ok(FramingState::Head);
        }
        if line.is_empty() {
            let head = std::mem::take(&mut self.head);
            return match (head.is_chunked, head.length) {
                (true, Some(_)) => Err("Content-Length and Transfer-Encoding are both present"),
                _ if head.is_upgrade => Ok(FramingState::Passthrough),
                (true, None) => Ok(FramingState::ChunkSize),
                (false, Some(length)) if length > 0 => Ok(FramingState::Body(length)),
                _ => Ok(FramingState::Head),
            };
        }
        let (name, value) = field(line)?;
        if name.eq_ignore_ascii_case(b"content-length") {
            let length = number(value, 10).ok_or("the Content-Length is not a number")?;
            if self.head.length.replace(length).is_some() {
                return Err("there is more than one Content-Length");
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if !value.eq_ignore_ascii_case(b"chunked") {
                return Err("the Transfer-Encoding is not just `chunked`");
            }
            if std::mem::replace(&mut self.head.is_chunked, true) {
                return Err("there is more than one Transfer-Encoding");
            }
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.head.is_upgrade = true;
        }
        Ok(FramingState::Head)
    }
}

/// Skips the available bytes of a body with `left` bytes to come.
fn skip(
    bytes: &[u8],
    left: u64,
    within: impl Fn(u64) -> FramingState,
    next: FramingState,
) -> (usize, FramingState) {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    let left = left - length as u64;
    (length, if left == 0 { next } else { within(left) })
}

fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Reason> {
    if line.first().is_some_and(|byte| b" \t".contains(byte)) {
        return Err("a header is folded over two lines");
    }
    let colon = line.iter().position(|byte| *byte == b':').ok_or("a header has no colon")?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty()
        || name.iter().any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control())
    {
        return Err("a header name is empty or contains a space");
    }
    Ok((name, value.trim_ascii()))
}

fn chunk_size(line: &[u8]) -> Result<FramingState, Reason> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii_end();
    match number(digits, 16) {
        Some(0) => Ok(FramingState::Trailers),
        Some(size) => Ok(FramingState::ChunkData(size)),
        None => Err("the size of a chunk is not a number"),
    }
}

/// Parses a number of digits alone: no sign, no space, no prefix.
fn number(text: &[u8], radix: u32) -> Option<u64> {
    let digits = str::from_utf8(text)
        .ok()
        .filter(|text| text.bytes().all(|byte| (byte as char).is_digit(radix)))?;
    if digits.len() > MAX_DIGITS { None } else { u64::from_str_radix(digits, radix).ok() }
}

#[cfg(test)]
mod fuzz_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of bytes before the first rejected one, for reads of the given size.
    fn rejected_at(text: &[u8], read_size: usize) -> Option<usize> {
        let mut framing = Framing::default();
        let accepted: usize = text.chunks(read_size).map(|read| framing.check(read)).sum();
        (accepted < text.len()).then_some(accepted)
    }

    fn is_rejected(text: &str) -> bool {
        let rejected: Vec<bool> =
            (1..=text.len()).map(|size| rejected_at(text.as_bytes(), size).is_some()).collect();
        assert!(
            rejected.iter().all(|one| *one == rejected[0]),
            "depends on the read size: {text:?}"
        );
        rejected[0]
    }

    #[test]
    fn unambiguous_pipelined_requests_are_accepted() {
        for text in [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\na\nbGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n\
             3;x=y\r\n\n\n\n\r\nA\r\n0123456789\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\
             0\r\nGrpc-Status: 0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n\n\n\0 anything",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n\n\0 anything",
        ] {
            assert!(!is_rejected(text), "{text:?}");
        }
    }

    #[test]
    fn ambiguous_requests_are_rejected_also_after_a_valid_request() {
        for wrong in [
            "POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\ncontent-length: 3\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: +3\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 0x3\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length:\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length : 3\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
            "GET / HTTP/1.1\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n\n",
            "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
            "GET / HTTP/1.1\r\nX: a\r\n\tb\r\n\r\n",
            "GET / HTTP/1.1\r\n X: a\r\n\r\n",
            "GET / HTTP/1.1\r\nX: a\rContent-Length: 5\r\n\r\n",
            "GET / HTTP/1.1\r\nnonsense\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x\ny\r\na\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n",
        ] {
            assert!(is_rejected(wrong), "{wrong:?}");
            for before in
                ["GET / HTTP/1.1\r\n\r\n", "POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"]
            {
                let text = format!("{before}{wrong}");
                assert!(is_rejected(&text), "{text:?}");
                assert!(
                    rejected_at(text.as_bytes(), 4096) >= Some(before.len()),
                    "the first request is accepted: {text:?}"
                );
            }
        }
        assert!(
            is_rejected("GET / HTTP/1.1\r\n\r\nPRI * HTTP/2.0\r\n\r\nGET / HTTP/1.1\n\n"),
            "the HTTP/2 preface is only valid at the start of a connection"
        );
    }
}
