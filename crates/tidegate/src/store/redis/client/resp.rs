//! RESP2, the protocol of Redis: commands, replies and errors.

use std::io;

/// Command of a pipeline, or the last words of one.
#[derive(Clone)]
pub(crate) struct Command {
    words: usize,
    encoded: Vec<u8>,
}

impl Command {
    pub(crate) fn new(name: &str) -> Self {
        Self::with_capacity(0).arg(name)
    }

    /// Creates a command without words, with space for this number of bytes.
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { words: 0, encoded: Vec::with_capacity(bytes) }
    }

    /// Appends an argument.
    #[must_use]
    pub(crate) fn arg(mut self, word: impl AsRef<[u8]>) -> Self {
        self.push(word.as_ref());
        self
    }

    /// Appends a word.
    pub(crate) fn push(&mut self, word: &[u8]) {
        push_word(&mut self.encoded, word);
        self.words += 1;
    }

    /// Returns the number of bytes of its words.
    pub(crate) fn len(&self) -> usize {
        self.encoded.len()
    }

    /// Appends it to a pipeline, after these first words.
    pub(crate) fn encode(&self, first_words: &[&str], pipeline: &mut Vec<u8>) {
        push_number(pipeline, b'*', first_words.len() + self.words);
        for word in first_words {
            push_word(pipeline, word.as_bytes());
        }
        pipeline.extend_from_slice(&self.encoded);
    }
}

/// Encodes commands as they are sent.
pub(crate) fn encode(commands: &[Command]) -> Vec<u8> {
    let mut pipeline = Vec::new();
    for command in commands {
        command.encode(&[], &mut pipeline);
    }
    pipeline
}

/// Reply of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Nil,
    Integer(i64),
    String(Vec<u8>),
    Array(Vec<Value>),
    /// Error with its code, which is the first word.
    Error(String),
}

impl Value {
    /// Returns the error of an error reply.
    pub(crate) fn into_result(self) -> Result<Self, RedisError> {
        match self {
            Self::Error(text) => Err(RedisError::Server(text)),
            value => Ok(value),
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        if let Self::String(text) = self { std::str::from_utf8(text).ok() } else { None }
    }

    /// Returns a field of a list that alternates names and values, as RESP2 has maps.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let Self::Array(parts) = self else { return None };
        let (pairs, _) = parts.as_chunks::<2>();
        pairs.iter().find(|[key, _]| key.text() == Some(name)).and_then(|[_, value]| value.text())
    }
}

/// Error of a connection, or error reply of a server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RedisError {
    #[error("{1}")]
    Io(io::ErrorKind, String),
    #[error("{0}")]
    Server(String),
}

impl RedisError {
    /// Returns the code of an error reply.
    pub(crate) fn code(&self) -> Option<&str> {
        if let Self::Server(text) = self { text.split(' ').next() } else { None }
    }
}

impl From<io::Error> for RedisError {
    fn from(error: io::Error) -> Self {
        Self::Io(error.kind(), error.to_string())
    }
}

/// Depth of nested arrays that is parsed. No reply to our commands has more than three.
const MAX_DEPTH: usize = 16;

/// Appends a word of a command.
fn push_word(command: &mut Vec<u8>, word: &[u8]) {
    push_number(command, b'$', word.len());
    command.extend_from_slice(word);
    command.extend_from_slice(b"\r\n");
}

/// Appends a line with a number. Called for each key of a call, so it avoids `write!`.
fn push_number(command: &mut Vec<u8>, kind: u8, number: usize) {
    command.push(kind);
    command.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    command.extend_from_slice(b"\r\n");
}

/// Parses the first reply in these bytes. Returns it with its length, or `None` if it is not
/// complete.
pub(crate) fn parse(bytes: &[u8]) -> io::Result<Option<(Value, usize)>> {
    let Some(length) = reply_length(bytes)? else { return Ok(None) };
    Ok(Some((read_value(&mut &bytes[..length], 0)?, length)))
}

/// Reads a value of a complete reply.
fn read_value(bytes: &mut &[u8], depth: usize) -> io::Result<Value> {
    let (line, rest) = bytes.split_at(line_length(bytes).unwrap_or(bytes.len()));
    *bytes = rest;
    let text = line[1..].trim_ascii_end();
    match line[0] {
        b'-' => Ok(Value::Error(String::from_utf8_lossy(text).into_owned())),
        b'+' => Ok(Value::String(text.to_vec())),
        b':' => {
            let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            number.map(Value::Integer).ok_or_else(|| invalid("a wrong integer"))
        }
        b'$' => Ok(size(&line[1..])?.map_or(Value::Nil, |length| {
            *bytes = &rest[length + 2..];
            Value::String(rest[..length].to_vec())
        })),
        _ if depth == MAX_DEPTH => Err(invalid("nested too deeply")),
        _ => match size(&line[1..])? {
            None => Ok(Value::Nil),
            Some(count) => {
                let values = (0..count).map(|_| read_value(bytes, depth + 1));
                Ok(Value::Array(values.collect::<io::Result<_>>()?))
            }
        },
    }
}

/// Returns the length of the first reply, or `None` if it is not complete.
fn reply_length(bytes: &[u8]) -> io::Result<Option<usize>> {
    let (mut position, mut missing) = (0, 1_usize);
    while missing > 0 {
        missing -= 1;
        let Some(rest) = bytes.get(position..) else { return Ok(None) };
        let Some(line) = line_length(rest) else { return Ok(None) };
        position += line;
        let number = || size(&rest[1..line]);
        match rest[0] {
            b'$' => {
                // A null string has no contents, not even an end of line.
                if let Some(length) = number()? {
                    position = position.saturating_add(length).saturating_add(2);
                }
            }
            b'*' => missing = missing.saturating_add(number()?.unwrap_or(0)),
            b'+' | b'-' | b':' => {}
            _ => return Err(invalid("not a reply of Redis")),
        }
    }
    Ok((position <= bytes.len()).then_some(position))
}

/// Returns the length of the first line, its end included.
fn line_length(bytes: &[u8]) -> Option<usize> {
    bytes.iter().position(|byte| *byte == b'\n').map(|position| position + 1)
}

/// Returns the size of a string or an array; `None` if it is null.
fn size(line: &[u8]) -> io::Result<Option<usize>> {
    let Some(digits) = line.strip_suffix(b"\r\n") else { return Err(invalid("a wrong line end")) };
    if digits == b"-1" {
        return Ok(None);
    }
    let add = |size: usize, digit: &u8| {
        let digit = digit.is_ascii_digit().then(|| usize::from(digit - b'0'))?;
        size.checked_mul(10)?.checked_add(digit)
    };
    let size = digits.iter().try_fold(0, add).filter(|_| !digits.is_empty());
    size.map(Some).ok_or_else(|| invalid("a wrong size"))
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &str) -> Value {
        Value::String(text.as_bytes().to_vec())
    }

    #[test]
    fn replies_are_parsed_once_they_are_complete() {
        let nested = vec![
            string("1"),
            Value::Array(vec![Value::Integer(1), Value::Nil]),
            Value::Error("ERR no".to_owned()),
        ];
        let replies: [(&[u8], Value); 8] = [
            (b"+OK\r\n", string("OK")),
            (b"-NOSCRIPT No script.\r\n", Value::Error("NOSCRIPT No script.".to_owned())),
            (b":-12\r\n", Value::Integer(-12)),
            (b"$5\r\na\r\nb\n\r\n", string("a\r\nb\n")),
            (b"$0\r\n\r\n", string("")),
            (b"$-1\r\n", Value::Nil),
            (b"*-1\r\n", Value::Nil),
            (b"*3\r\n$1\r\n1\r\n*2\r\n:1\r\n$-1\r\n-ERR no\r\n", Value::Array(nested)),
        ];
        for (reply, expected) in replies {
            for length in 0..reply.len() {
                assert!(matches!(parse(&reply[..length]), Ok(None)), "{length} bytes of {reply:?}");
            }
            let followed = [reply, b"+next"].concat();
            let parsed = parse(&followed).expect("valid");
            assert_eq!(parsed, Some((expected, reply.len())), "{reply:?}");
        }
    }

    #[test]
    fn error_that_repeats_binary_arguments_is_parsed() {
        let reply = b"-ERR unknown command 'EVALSHA', with args '\xff\x01'\r\n";
        let (parsed, length) = parse(reply).expect("valid").expect("complete");
        assert_eq!(length, reply.len());
        let error = parsed.into_result().expect_err("an error");
        assert_eq!(error.code(), Some("ERR"));
        assert!(error.to_string().contains("'EVALSHA'"), "{error}");
    }

    #[test]
    fn commands_are_those_of_the_crate() {
        for length in [0, 1, 9, 10, 99, 100, 12_345] {
            let word = vec![b'x'; length];
            let command = encode(&[Command::new("ECHO").arg(&word)]);
            assert_eq!(command, redis::cmd("ECHO").arg(word).get_packed_command());
        }
    }

    #[test]
    fn anything_else_is_an_error() {
        for bytes in [b"HTTP/1.1 400\r\n".as_slice(), b"$x\r\n", b"$\r\n", b"*-2\r\n", b"$1\n1\n"] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
        assert!(matches!(parse(b"$99999999999\r\nx"), Ok(None)));
        assert!(parse(&b"*1\r\n".repeat(MAX_DEPTH + 1)).is_ok_and(|reply| reply.is_none()));
        let nested = [b"*1\r\n".repeat(MAX_DEPTH + 1), b":1\r\n".to_vec()].concat();
        assert!(parse(&nested).is_err());
        assert!(parse(b"*99999999999999999999999\r\n").is_err());
    }
}
