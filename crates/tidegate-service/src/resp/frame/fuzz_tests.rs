//! Fuzzing of frames: no input panics, commands do not depend on how they arrive, and what a client
//! encodes is parsed.

use super::*;
use crate::fuzz::{self, Random};

const PIECES: [&str; 22] = [
    "*",
    "$",
    "\r\n",
    "\r",
    "\n",
    "0",
    "1",
    "3",
    "-1",
    "65536",
    "4294967295",
    "*1\r\n$4\r\nPING\r\n",
    "*2\r\n",
    "$3\r\nkey\r\n",
    "PING",
    " ",
    "\"",
    "'",
    "\\x41",
    "\\",
    "Host: a\r\n",
    ":1\r\n",
];
const SEEDS: [&str; 5] = [
    "*3\r\n$10\r\nTG.ACQUIRE\r\n$8\r\nper-user\r\n$3\r\nann\r\n",
    "*5\r\n$11\r\nCL.THROTTLE\r\n$3\r\nann\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n*1\r\n$4\r\nPING\r\n",
    "PING\r\nECHO \"a b\" 'c'\r\n",
    "*0\r\n*-1\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
];

type Commands = (Vec<Vec<Vec<u8>>>, Option<FrameError>, usize);

/// Parses an input that arrives in pieces of this size. Returns the commands, the error, and the
/// number of bytes that were consumed.
fn parse(input: &[u8], piece: usize) -> Commands {
    let (mut parser, mut commands) = (Parser::default(), Vec::new());
    let (mut start, mut end) = (0, 0);
    loop {
        match parser.parse(&input[start..end]) {
            Ok(Parsed::Incomplete) if end == input.len() => return (commands, None, start),
            Ok(Parsed::Incomplete) => end = (end + piece).min(input.len()),
            Ok(Parsed::Command { length, is_inline }) => {
                assert!((1..=end - start).contains(&length), "{length}");
                let rest = &input[start..end];
                let arguments =
                    if is_inline { parser.inline_arguments() } else { parser.arguments(rest) };
                assert!(arguments.len() <= MAX_ARGUMENTS);
                commands.push(arguments.from(0).map(<[u8]>::to_vec).collect());
                start += length;
            }
            Err(error) => return (commands, Some(error), start),
        }
    }
}

#[test]
fn fuzz_commands_do_not_depend_on_how_they_arrive() {
    fuzz::bytes(&SEEDS, &PIECES, |input| {
        let whole = parse(input, input.len().max(1));
        for piece in [1, 7] {
            assert_eq!(parse(input, piece), whole, "in pieces of {piece}");
        }
    });
}

#[test]
fn fuzz_encoded_commands_are_parsed() {
    let generate = |random: &mut Random| {
        let mut arguments = random.pieces(&PIECES, 12);
        arguments.truncate(200);
        arguments
    };
    fuzz::run::<&[u8]>(&[], 1, generate, |bytes| {
        let arguments: Vec<&[u8]> = bytes.chunks(9).collect();
        let mut encoded = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in &arguments {
            encoded.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
            encoded.extend_from_slice(argument);
            encoded.extend_from_slice(b"\r\n");
        }
        let (commands, error, length) = parse(&encoded, 5);
        assert_eq!((error, length), (None, encoded.len()));
        assert_eq!(commands, [arguments]);
    });
}
