//! RESP, the protocol of Redis: writes the words of a command, and finds the end of a reply. The
//! `redis` crate parses it, except for the reply of a decision, which is one string.

use std::io;

use redis::{RedisResult, Value};

/// Appends the head of a command with this number of words.
pub(crate) fn push_head(command: &mut Vec<u8>, words: usize) {
    push_number(command, b'*', words);
}

/// Appends a word of a command.
pub(crate) fn push_word(command: &mut Vec<u8>, word: &[u8]) {
    push_number(command, b'$', word.len());
    command.extend_from_slice(word);
    command.extend_from_slice(b"\r\n");
}

/// Appends a line with a number. Called for each key of a call, so it avoids `write!`.
fn push_number(command: &mut Vec<u8>, kind: u8, number: usize) {
    let (mut line, mut start, mut rest) = ([0; 24], 22, number);
    line[22..].copy_from_slice(b"\r\n");
    loop {
        start -= 1;
        line[start] = b'0' + u8::try_from(rest % 10).unwrap_or_default();
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    line[start - 1] = kind;
    command.extend_from_slice(&line[start - 1..]);
}

/// Parses the first reply in these bytes. Returns it with its length, or `None` if it is not
/// complete.
pub(crate) fn parse(bytes: &[u8]) -> RedisResult<Option<(Value, usize)>> {
    let Some(length) = reply_length(bytes)? else { return Ok(None) };
    let reply = match string_of(&bytes[..length]) {
        Some(string) => Value::BulkString(string.to_vec()),
        // An error may repeat arguments of the command, which are not UTF-8.
        None if bytes.starts_with(b"-") => {
            redis::parse_redis_value(String::from_utf8_lossy(&bytes[..length]).as_bytes())?
        }
        None => redis::parse_redis_value(&bytes[..length])?,
    };
    Ok(Some((reply, length)))
}

/// Returns the contents of a complete reply that is a string.
fn string_of(reply: &[u8]) -> Option<&[u8]> {
    if reply.first() != Some(&b'$') {
        return None;
    }
    let start = line_length(reply)?;
    // A null string has no contents.
    reply.get(start..reply.len().checked_sub(2)?)
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
            b'$' | b'=' | b'!' => {
                // A null string has no contents, not even an end of line.
                if let Some(length) = number()? {
                    position = position.saturating_add(length).saturating_add(2);
                }
            }
            b'*' | b'~' | b'>' => missing = missing.saturating_add(number()?.unwrap_or(0)),
            b'%' => {
                missing = missing.saturating_add(number()?.unwrap_or(0).saturating_mul(2));
            }
            b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => {}
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

    const REPLIES: [&[u8]; 9] = [
        b"+OK\r\n",
        b"-NOSCRIPT No matching script.\r\n",
        b":-12\r\n",
        b"$5\r\na\r\nb\n\r\n",
        b"$0\r\n\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*3\r\n$1\r\n1\r\n*2\r\n:1\r\n$-1\r\n-ERR no\r\n",
        b"%1\r\n+a\r\n*0\r\n",
    ];

    #[test]
    fn replies_are_those_of_the_crate_once_they_are_complete() {
        for reply in REPLIES {
            for length in 0..reply.len() {
                assert_eq!(parse(&reply[..length]), Ok(None), "{length} bytes of {reply:?}");
            }
            let expected = redis::parse_redis_value(reply).expect("a valid reply");
            let followed = [reply, b"+next"].concat();
            assert_eq!(parse(&followed), Ok(Some((expected, reply.len()))), "{reply:?}");
        }
    }

    #[test]
    fn error_that_repeats_binary_arguments_is_parsed() {
        let reply = b"-ERR unknown command 'EVALSHA', with args '\xff\x01'\r\n";
        let (parsed, length) = parse(reply).expect("valid").expect("complete");
        assert_eq!(length, reply.len());
        let error = parsed.extract_error().expect_err("an error");
        assert_eq!(error.code(), Some("ERR"));
        assert!(error.detail().is_some_and(|detail| detail.contains("'EVALSHA'")), "{error}");
    }

    #[test]
    fn commands_are_those_of_the_crate() {
        for length in [0, 1, 9, 10, 99, 100, 12_345] {
            let word = vec![b'x'; length];
            let mut command = Vec::new();
            push_head(&mut command, 2);
            push_word(&mut command, b"ECHO");
            push_word(&mut command, &word);
            assert_eq!(command, redis::cmd("ECHO").arg(word).get_packed_command());
        }
        let mut head = Vec::new();
        push_head(&mut head, usize::MAX);
        assert_eq!(head, format!("*{}\r\n", usize::MAX).into_bytes());
    }

    #[test]
    fn anything_else_is_an_error() {
        for bytes in [b"HTTP/1.1 400\r\n".as_slice(), b"$x\r\n", b"$\r\n", b"*-2\r\n", b"$1\n1\n"] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
        assert_eq!(parse(b"$99999999999\r\nx"), Ok(None));
        assert!(parse(b"*99999999999999999999999\r\n").is_err());
    }
}
