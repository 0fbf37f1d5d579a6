//! Parser of commands: arrays of bulk strings, and inline commands as a person types them.
//!
//! The arguments stay where they are in the input, so a command needs no allocation.

use std::ops::Range;

use tidegate_net::listener::MIN_BUFFER;

/// Maximum length of a command, with its framing.
pub(super) const MAX_COMMAND_BYTES: usize = 64 * 1024;
/// Maximum number of arguments of a command, with its name.
pub(super) const MAX_ARGUMENTS: usize = 128;
/// The same before a client has authenticated: enough for `HELLO 3 AUTH user token SETNAME name`.
const MAX_UNAUTHENTICATED_BYTES: usize = 1024;
const MAX_UNAUTHENTICATED_ARGUMENTS: usize = 10;
/// Maximum number of digits of a length. More are not valid anyway.
const MAX_DIGITS: usize = 10;

/// Arguments of a command in the bytes of the input (`'a`), where the parser (`'p`) found them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arguments<'a, 'p> {
    bytes: &'a [u8],
    /// The same bytes, if they are known to be UTF-8.
    text: Option<&'a str>,
    ranges: &'p [Range<usize>],
}

impl<'a, 'p> Arguments<'a, 'p> {
    /// Returns the number of arguments, with the name of the command.
    pub(super) fn len(self) -> usize {
        self.ranges.len()
    }

    /// Returns an argument; 0 is the name of the command.
    pub(super) fn get(self, index: usize) -> Option<&'a [u8]> {
        self.bytes.get(self.ranges.get(index)?.clone())
    }

    /// Returns an argument as text; `None` if it is not UTF-8.
    pub(super) fn text(self, index: usize) -> Option<&'a str> {
        let range = self.ranges.get(index)?.clone();
        match self.text {
            Some(text) => text.get(range),
            None => std::str::from_utf8(self.bytes.get(range)?).ok(),
        }
    }

    /// Iterates over the arguments from this one on.
    pub(super) fn from(self, index: usize) -> impl Iterator<Item = &'a [u8]> + use<'a, 'p> {
        (index..self.len()).filter_map(move |index| self.get(index))
    }
}

/// Limits of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Limits {
    #[default]
    Full,
    /// The client has to authenticate first.
    Unauthenticated,
}

impl Limits {
    /// Returns the size of the buffer for the longest command and for the start of the next.
    pub(super) fn max_input(self) -> usize {
        self.bytes() + 64
    }

    fn bytes(self) -> usize {
        match self {
            Self::Full => MAX_COMMAND_BYTES,
            Self::Unauthenticated => MAX_UNAUTHENTICATED_BYTES,
        }
    }

    fn arguments(self) -> usize {
        match self {
            Self::Full => MAX_ARGUMENTS,
            Self::Unauthenticated => MAX_UNAUTHENTICATED_ARGUMENTS,
        }
    }

    /// Returns the error of a command beyond these limits.
    fn exceeded(self, error: FrameError) -> FrameError {
        match self {
            Self::Full => error,
            Self::Unauthenticated => FrameError::Unauthenticated,
        }
    }
}

/// Buffers of the parser, which are used for all commands of a connection.
#[derive(Debug, Default)]
pub(super) struct Parser {
    pub(super) limits: Limits,
    ranges: Vec<Range<usize>>,
    /// Arguments of an inline command without its quotes.
    unquoted: Vec<u8>,
}

/// Outcome of parsing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parsed {
    /// More bytes are needed.
    Incomplete,
    /// A command of this length in the input. Without arguments it is to be ignored.
    Command { length: usize, is_inline: bool },
}

/// Error after which the start of the next command is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("too big command: at most {MAX_COMMAND_BYTES} bytes")]
    TooLong,
    #[error(
        "unauthenticated command: at most {MAX_UNAUTHENTICATED_BYTES} bytes and \
         {MAX_UNAUTHENTICATED_ARGUMENTS} arguments before AUTH"
    )]
    Unauthenticated,
    #[error("invalid multibulk length: send *1 to *{MAX_ARGUMENTS}")]
    ArgumentCount,
    #[error("invalid bulk length: send $ and the number of bytes, at most {MAX_COMMAND_BYTES}")]
    BulkLength,
    #[error("expected '$', got '{}'", char::from(*.0).escape_default())]
    NotABulk(u8),
    #[error("expected CRLF after the bytes of a bulk string")]
    NoLineEnd,
    #[error("unbalanced quotes in request")]
    Quotes,
    #[error("this is the Redis protocol, not HTTP: the HTTP API is on listen.http")]
    Http,
}

impl Parser {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Returns the memory of long inline commands.
    pub(super) fn shrink(&mut self) {
        if self.unquoted.capacity() > MIN_BUFFER {
            self.unquoted = Vec::new();
        }
    }

    /// Parses the first command of the input.
    pub(super) fn parse(&mut self, input: &[u8]) -> Result<Parsed, FrameError> {
        self.ranges.clear();
        match input.first() {
            None => Ok(Parsed::Incomplete),
            Some(b'*') => self.parse_array(input),
            Some(_) => self.parse_inline(input),
        }
    }

    /// Returns the arguments of the array that was parsed.
    pub(super) fn arguments<'a>(&self, input: &'a [u8]) -> Arguments<'a, '_> {
        Arguments { bytes: input, text: None, ranges: &self.ranges }
    }

    /// Returns the arguments of the array that was parsed, in an input that is text.
    pub(super) fn text_arguments<'a>(&self, input: &'a str) -> Arguments<'a, '_> {
        Arguments { bytes: input.as_bytes(), text: Some(input), ranges: &self.ranges }
    }

    /// Returns the arguments of the inline command that was parsed.
    pub(super) fn inline_arguments(&self) -> Arguments<'_, '_> {
        Arguments { bytes: &self.unquoted, text: None, ranges: &self.ranges }
    }

    fn parse_array(&mut self, input: &[u8]) -> Result<Parsed, FrameError> {
        let Some((count, mut at)) = number(input, 1).map_err(|()| FrameError::ArgumentCount)?
        else {
            return Ok(Parsed::Incomplete);
        };
        let count = match count {
            // An empty array, or a null.
            Number::MinusOne => 0,
            Number::Size(count) if count <= self.limits.arguments() => count,
            Number::Size(_) => return Err(self.limits.exceeded(FrameError::ArgumentCount)),
        };
        let max = self.limits.bytes();
        for _ in 0..count {
            match input.get(at) {
                None => return self.incomplete(at),
                Some(b'$') => {}
                Some(other) => return Err(FrameError::NotABulk(*other)),
            }
            let parsed = number(input, at + 1).map_err(|()| FrameError::BulkLength)?;
            let Some((length, start)) = parsed else { return self.incomplete(at) };
            let Number::Size(length) = length else { return Err(FrameError::BulkLength) };
            let end = start.saturating_add(length);
            if end.saturating_add(2) > max {
                return Err(self.limits.exceeded(FrameError::TooLong));
            }
            match input.get(end..end + 2) {
                Some(b"\r\n") => {}
                Some(_) => return Err(FrameError::NoLineEnd),
                None => return self.incomplete(end),
            }
            self.ranges.push(start..end);
            at = end + 2;
        }
        Ok(Parsed::Command { length: at, is_inline: false })
    }

    /// Returns that more bytes are needed, unless the command is already too long.
    fn incomplete(&self, length: usize) -> Result<Parsed, FrameError> {
        if length < self.limits.bytes() {
            return Ok(Parsed::Incomplete);
        }
        Err(self.limits.exceeded(FrameError::TooLong))
    }

    fn parse_inline(&mut self, input: &[u8]) -> Result<Parsed, FrameError> {
        let searched = &input[..input.len().min(self.limits.bytes())];
        let Some(end) = memchr::memchr(b'\n', searched) else {
            return self.incomplete(input.len());
        };
        let line = input[..end].strip_suffix(b"\r").unwrap_or(&input[..end]);
        if is_http(line) {
            return Err(FrameError::Http);
        }
        self.split(line)?;
        if self.ranges.len() > self.limits.arguments() {
            return Err(self.limits.exceeded(FrameError::ArgumentCount));
        }
        Ok(Parsed::Command { length: end + 1, is_inline: true })
    }

    /// Splits a line into its words as Redis does: `"a b\n"` with escapes, `'a b'` without.
    fn split(&mut self, line: &[u8]) -> Result<(), FrameError> {
        self.unquoted.clear();
        let mut rest = line.trim_ascii_start();
        while !rest.is_empty() && self.ranges.len() <= MAX_ARGUMENTS {
            let start = self.unquoted.len();
            loop {
                rest = match rest {
                    [quote @ (b'"' | b'\''), quoted @ ..] => self.push_quoted(quoted, *quote)?,
                    [] => break,
                    [space, ..] if space.is_ascii_whitespace() => break,
                    [byte, rest @ ..] => {
                        self.unquoted.push(*byte);
                        rest
                    }
                };
            }
            self.ranges.push(start..self.unquoted.len());
            rest = rest.trim_ascii_start();
        }
        Ok(())
    }

    /// Adds the text up to the closing quote, which must end a word. Returns the rest.
    fn push_quoted<'a>(&mut self, mut rest: &'a [u8], quote: u8) -> Result<&'a [u8], FrameError> {
        let has_escapes = quote == b'"';
        loop {
            let (byte, after) = match rest {
                [byte, after @ ..] if *byte == quote => return end_of_quotes(after),
                [b'\\', b'x', high, low, after @ ..]
                    if has_escapes && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
                {
                    (hex(*high) << 4 | hex(*low), after)
                }
                [b'\\', escaped, after @ ..] if has_escapes => (unescaped(*escaped), after),
                [b'\\', b'\'', after @ ..] => (b'\'', after),
                [byte, after @ ..] => (*byte, after),
                [] => return Err(FrameError::Quotes),
            };
            self.unquoted.push(byte);
            rest = after;
        }
    }
}

/// Returns whether the line is of an HTTP request. A web page can send one to any address, with
/// commands in its body.
fn is_http(line: &[u8]) -> bool {
    let word = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
    word.eq_ignore_ascii_case(b"host:")
        || word.eq_ignore_ascii_case(b"post")
        || [b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0"].iter().any(|end| line.ends_with(*end))
}

fn end_of_quotes(after: &[u8]) -> Result<&[u8], FrameError> {
    match after.first() {
        Some(byte) if !byte.is_ascii_whitespace() => Err(FrameError::Quotes),
        _ => Ok(after),
    }
}

fn unescaped(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    }
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

enum Number {
    Size(usize),
    MinusOne,
}

/// Parses a number and CRLF. Returns it with the position after it, or `None` if bytes are missing.
#[inline]
fn number(input: &[u8], start: usize) -> Result<Option<(Number, usize)>, ()> {
    let rest = input.get(start..).unwrap_or_default();
    let mut size = 0;
    for (index, byte) in rest.iter().enumerate().take(MAX_DIGITS + 1) {
        match byte {
            b'0'..=b'9' if index < MAX_DIGITS => size = size * 10 + usize::from(byte - b'0'),
            b'\r' if index > 0 => {
                return match rest.get(index + 1) {
                    None => Ok(None),
                    Some(b'\n') => Ok(Some((Number::Size(size), start + index + 2))),
                    Some(_) => Err(()),
                };
            }
            b'-' if index == 0 => {
                let expected = b"-1\r\n";
                let length = rest.len().min(expected.len());
                if rest[..length] != expected[..length] {
                    return Err(());
                }
                let is_whole = length == expected.len();
                return Ok(is_whole.then_some((Number::MinusOne, start + length)));
            }
            _ => return Err(()),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod fuzz_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the commands of an input, and the error or the number of bytes that are left.
    fn commands(input: &[u8]) -> (Vec<Vec<String>>, Result<usize, FrameError>) {
        let (mut parser, mut at, mut all) = (Parser::default(), 0, Vec::new());
        loop {
            match parser.parse(&input[at..]) {
                Ok(Parsed::Incomplete) => return (all, Ok(input.len() - at)),
                Ok(Parsed::Command { length, is_inline }) => {
                    let rest = &input[at..];
                    let arguments =
                        if is_inline { parser.inline_arguments() } else { parser.arguments(rest) };
                    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                    all.push(arguments.from(0).map(text).collect());
                    at += length;
                }
                Err(error) => return (all, Err(error)),
            }
        }
    }

    #[test]
    fn commands_of_a_pipeline_follow_each_other() {
        let (all, rest) =
            commands(b"*2\r\n$4\r\nPING\r\n$0\r\n\r\nping\n\r\n*0\r\n*-1\r\n*1\r\n$4");
        assert_eq!(all, [vec!["PING", ""], vec!["ping"], vec![], vec![], vec![]]);
        assert_eq!(rest, Ok(6));
    }

    #[test]
    fn every_prefix_of_a_command_is_incomplete() {
        let whole = b"*3\r\n$10\r\nTG.ACQUIRE\r\n$1\r\np\r\n$2\r\n\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(commands(&whole[..end]), (vec![], Ok(end)), "{end}");
        }
        assert_eq!(commands(whole).0, [["TG.ACQUIRE", "p", "\r\n"]]);
    }

    #[test]
    fn broken_frames_have_specific_errors() {
        let big = format!("*1\r\n${MAX_COMMAND_BYTES}\r\n");
        let many = format!("*{}\r\n", MAX_ARGUMENTS + 1);
        let long = "a".repeat(MAX_COMMAND_BYTES);
        for (input, error) in [
            (&b"*x\r\n"[..], FrameError::ArgumentCount),
            (b"*-2\r\n", FrameError::ArgumentCount),
            (b"*99999999999\r\n", FrameError::ArgumentCount),
            (b"*1\n", FrameError::ArgumentCount),
            (many.as_bytes(), FrameError::ArgumentCount),
            (b"*1\r\n:1\r\n", FrameError::NotABulk(b':')),
            (b"*1\r\n$-1\r\n", FrameError::BulkLength),
            (b"*1\r\n$+1\r\n", FrameError::BulkLength),
            (b"*1\r\n$\r\n", FrameError::BulkLength),
            (b"*1\r\n$1\r\nab\r\n", FrameError::NoLineEnd),
            (big.as_bytes(), FrameError::TooLong),
            (long.as_bytes(), FrameError::TooLong),
            (b"ECHO \"a\n", FrameError::Quotes),
            (b"ECHO \"a\"b\n", FrameError::Quotes),
            (b"GET / HTTP/1.1\r\n", FrameError::Http),
            (b"PATCH\r\nhost: localhost\r\n", FrameError::Http),
            (b"POST\r\n", FrameError::Http),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", FrameError::Http),
        ] {
            assert_eq!(commands(input).1, Err(error), "{:?}", String::from_utf8_lossy(input));
        }
    }

    #[test]
    fn memory_of_a_long_inline_command_is_returned() {
        let mut parser = Parser::default();
        let line = format!("ECHO {}\n", "x".repeat(MIN_BUFFER));
        assert!(matches!(parser.parse(line.as_bytes()), Ok(Parsed::Command { .. })));
        assert!(parser.unquoted.capacity() > MIN_BUFFER);
        parser.shrink();
        assert_eq!(parser.unquoted.capacity(), 0);
    }

    #[test]
    fn inline_commands_have_quotes_and_escapes_as_in_redis() {
        let (all, rest) =
            commands(b"  SET  'a b' \"c\\x41\\n\\\"\" d'e'\t'it\\'s' \"\\q\\\\\" \r\nPING");
        assert_eq!(rest, Ok(4));
        assert_eq!(all, [["SET", "a b", "cA\n\"", "de", "it's", "q\\"]]);
        let words = "x ".repeat(MAX_ARGUMENTS + 1) + "\n";
        assert_eq!(commands(words.as_bytes()).1, Err(FrameError::ArgumentCount));
    }

    #[test]
    fn longest_command_is_parsed() {
        let framing = "*2\r\n$4\r\nECHO\r\n$65510\r\n".len() + 2;
        let text = "x".repeat(MAX_COMMAND_BYTES - framing);
        let whole = format!("*2\r\n$4\r\nECHO\r\n${}\r\n{text}\r\n", text.len());
        assert_eq!(whole.len(), MAX_COMMAND_BYTES);
        assert_eq!(commands(whole.as_bytes()).0.len(), 1);
        let longer = format!("*2\r\n$4\r\nECHO\r\n${}\r\n{text}x\r\n", text.len() + 1);
        assert_eq!(commands(longer.as_bytes()).1, Err(FrameError::TooLong));
    }
}
