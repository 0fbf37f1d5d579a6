//! Where requests begin and end in the bytes of an HTTP/1.1 connection, told strictly: what another
//! server could read otherwise is refused.
//!
//! hyper reads a lone LF as the end of a line, drops a `Content-Length` beside a
//! `Transfer-Encoding`, and joins equal lengths, and after that nobody can see that they were
//! there. So the bytes are looked at before they get to hyper.

/// No line is longer: hyper's own limit for a whole head.
const MAX_LINE: usize = 64 * 1024;
/// More digits are no length that anyone has.
const MAX_DIGITS: usize = 15;

/// Follows the requests of one connection.
#[derive(Debug, Default)]
pub(super) struct Framing {
    state: State,
    /// The beginning of a line whose end is still to come.
    line: Vec<u8>,
    head: Head,
    /// The first line of the connection is over.
    is_begun: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Head,
    Body(u64),
    ChunkSize,
    ChunkData(u64),
    /// The line break behind the data.
    ChunkEnd,
    Trailers,
    /// HTTP/2, or after a request for an upgrade: no more requests of HTTP/1.1 follow.
    Open,
    Refused,
}

/// What a head has said so far.
#[derive(Debug, Default)]
struct Head {
    has_request_line: bool,
    length: Option<u64>,
    is_chunked: bool,
    is_upgrade: bool,
}

type Refused = &'static str;

impl Framing {
    /// Looks at the next bytes: how many of them pass, and no more ever if not all.
    pub(super) fn check(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let next = match self.state {
                State::Open => return bytes.len(),
                State::Refused => return at,
                State::Body(left) => Ok(skip(rest, left, State::Body, State::Head)),
                State::ChunkData(left) => Ok(skip(rest, left, State::ChunkData, State::ChunkEnd)),
                State::Head | State::ChunkSize | State::ChunkEnd | State::Trailers => {
                    self.line(rest)
                }
            };
            match next {
                Ok((length, state)) => (at, self.state) = (at + length, state),
                Err(reason) => {
                    tracing::debug!(reason, "a request that can be read in two ways is refused");
                    self.state = State::Refused;
                }
            }
        }
        at
    }

    /// Whether a body is under way, so that the client is still sending.
    pub(super) fn is_in_body(&self) -> bool {
        !matches!(self.state, State::Head | State::Open | State::Refused)
    }

    /// Takes a line, or what there is of it: its length, and what comes behind.
    fn line(&mut self, bytes: &[u8]) -> Result<(usize, State), Refused> {
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
            if self.line.len() + bytes.len() > MAX_LINE {
                return Err("a line is too long");
            }
            self.line.extend_from_slice(bytes);
            return Ok((bytes.len(), self.state));
        };
        let mut gathered = std::mem::take(&mut self.line);
        let whole = if gathered.is_empty() {
            &bytes[..=end]
        } else {
            gathered.extend_from_slice(&bytes[..=end]);
            &gathered
        };
        let line = whole.strip_suffix(b"\r\n").ok_or("a line ends with a lone LF")?;
        if line.contains(&b'\r') {
            return Err("a CR stands alone");
        }
        let state = match self.state {
            State::ChunkSize => chunk_size(line)?,
            State::ChunkEnd if line.is_empty() => State::ChunkSize,
            State::ChunkEnd => return Err("a chunk is longer than it says"),
            State::Trailers if line.is_empty() => State::Head,
            State::Trailers => field(line).map(|_| State::Trailers)?,
            _ => self.head_line(line)?,
        };
        gathered.clear();
        self.line = gathered;
        Ok((end + 1, state))
    }

    fn head_line(&mut self, line: &[u8]) -> Result<State, Refused> {
        let is_first = !std::mem::replace(&mut self.is_begun, true);
        if !self.head.has_request_line {
            if is_first && line == b"PRI * HTTP/2.0" {
                return Ok(State::Open);
            }
            // Empty lines before a request mean nothing (RFC 9112, 2.2).
            self.head.has_request_line = !line.is_empty();
            return Ok(State::Head);
        }
        if line.is_empty() {
            let head = std::mem::take(&mut self.head);
            return match (head.is_chunked, head.length) {
                (true, Some(_)) => Err("there are both a Content-Length and a Transfer-Encoding"),
                _ if head.is_upgrade => Ok(State::Open),
                (true, None) => Ok(State::ChunkSize),
                (false, Some(length)) if length > 0 => Ok(State::Body(length)),
                _ => Ok(State::Head),
            };
        }
        let (name, value) = field(line)?;
        if name.eq_ignore_ascii_case(b"content-length") {
            let length = number(value, 10, MAX_DIGITS).ok_or("the Content-Length is no number")?;
            if self.head.length.replace(length).is_some() {
                return Err("there is more than one Content-Length");
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if !value.eq_ignore_ascii_case(b"chunked") {
                return Err("the Transfer-Encoding is not chunked alone");
            }
            if std::mem::replace(&mut self.head.is_chunked, true) {
                return Err("there is more than one Transfer-Encoding");
            }
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.head.is_upgrade = true;
        }
        Ok(State::Head)
    }
}

/// Over the bytes of a body, as many as there are.
fn skip(bytes: &[u8], left: u64, within: impl Fn(u64) -> State, behind: State) -> (usize, State) {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    let left = left - length as u64;
    (length, if left == 0 { behind } else { within(left) })
}

fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Refused> {
    if line.first().is_some_and(|byte| b" \t".contains(byte)) {
        return Err("a header goes on in the next line");
    }
    let colon = line.iter().position(|byte| *byte == b':').ok_or("a header has no colon")?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty()
        || name.iter().any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control())
    {
        return Err("the name of a header has a space in it, or is none");
    }
    Ok((name, value.trim_ascii()))
}

fn chunk_size(line: &[u8]) -> Result<State, Refused> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii_end();
    match number(digits, 16, MAX_DIGITS) {
        Some(0) => Ok(State::Trailers),
        Some(size) => Ok(State::ChunkData(size)),
        None => Err("the size of a chunk is no number"),
    }
}

/// Digits alone: no sign, no space, no prefix.
fn number(text: &[u8], radix: u32, max_digits: usize) -> Option<u64> {
    let digits = str::from_utf8(text)
        .ok()
        .filter(|text| text.bytes().all(|byte| (byte as char).is_digit(radix)))?;
    if digits.len() > max_digits { None } else { u64::from_str_radix(digits, radix).ok() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// How many bytes pass before the first that is refused, if they come in pieces of this size.
    fn passed(text: &[u8], piece: usize) -> Option<usize> {
        let mut framing = Framing::default();
        let passed: usize = text.chunks(piece).map(|piece| framing.check(piece)).sum();
        (passed < text.len()).then_some(passed)
    }

    fn is_refused(text: &str) -> bool {
        let refused: Vec<bool> =
            (1..=text.len()).map(|piece| passed(text.as_bytes(), piece).is_some()).collect();
        assert!(refused.iter().all(|one| *one == refused[0]), "however it is cut: {text:?}");
        refused[0]
    }

    #[test]
    fn plain_requests_pass_one_after_the_other() {
        for text in [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\na\nbGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n3;x=y\r\n\n\n\n\r\nA\r\n0123456789\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nGrpc-Status: 0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n\n\n\0 anything",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n\n\0 anything",
        ] {
            assert!(!is_refused(text), "{text:?}");
        }
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused_also_behind_another_request() {
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
            assert!(is_refused(wrong), "{wrong:?}");
            for before in
                ["GET / HTTP/1.1\r\n\r\n", "POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"]
            {
                let text = format!("{before}{wrong}");
                assert!(is_refused(&text), "{text:?}");
                assert!(
                    passed(text.as_bytes(), 4096) >= Some(before.len()),
                    "what came before passes: {text:?}"
                );
            }
        }
        assert!(
            is_refused("GET / HTTP/1.1\r\n\r\nPRI * HTTP/2.0\r\n\r\nGET / HTTP/1.1\n\n"),
            "only at the beginning"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_told_alike_however_they_are_cut(
            text in r"(GET / HTTP/1.1\r\n|Content-Length: [0-9]\r\n|Transfer-Encoding: chunked\r\n|\r\n|\n|[0-9a-z]{1,4}\r\n|X: y\r\n){0,12}",
            piece in 1..40_usize,
        ) {
            let whole = passed(text.as_bytes(), text.len().max(1));
            prop_assert_eq!(whole.is_some(), passed(text.as_bytes(), piece).is_some());
        }
    }
}
