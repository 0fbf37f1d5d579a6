//! Small client on a raw socket, which can also send broken frames.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::TcpStream;

use crate::support::TEST_TIMEOUT;

/// Reply of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(String),
    Null,
    Array(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
}

impl Reply {
    /// Returns the integers of an array, or of the values of a map.
    pub(crate) fn integers(&self) -> Vec<i64> {
        let integer = |reply: &Reply| match reply {
            Self::Integer(number) => *number,
            other => panic!("not an integer: {other:?}"),
        };
        match self {
            Self::Array(all) => all.iter().map(integer).collect(),
            Self::Map(all) => all.iter().map(|(_, value)| integer(value)).collect(),
            other => panic!("no integers: {other:?}"),
        }
    }

    pub(crate) fn error(&self) -> &str {
        match self {
            Self::Error(text) => text,
            other => panic!("not an error: {other:?}"),
        }
    }
}

pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the service listens");
        stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        stream.set_nodelay(true).expect("a socket");
        Self(BufReader::new(stream))
    }

    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        self.0.get_mut()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream().write_all(bytes).expect("sent");
    }

    /// Sends a command and returns its reply.
    pub(crate) fn ask(&mut self, words: &[&str]) -> Reply {
        self.send(&command(words));
        self.reply()
    }

    pub(crate) fn reply(&mut self) -> Reply {
        self.next().expect("a reply before the end of the connection")
    }

    /// Returns the next reply; `None` at the end of the connection.
    pub(crate) fn next(&mut self) -> Option<Reply> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(error) => panic!("no reply: {error}"),
        }
        let line = line.strip_suffix("\r\n").expect("a whole line");
        let (kind, rest) = line.split_at(1);
        let number = || rest.parse::<i64>().expect("a number");
        Some(match kind {
            "+" => Reply::Simple(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Integer(number()),
            "_" => Reply::Null,
            "$" if number() < 0 => Reply::Null,
            "$" => {
                let mut bytes = vec![0; usize::try_from(number()).expect("a length") + 2];
                self.0.read_exact(&mut bytes).expect("the text");
                bytes.truncate(bytes.len() - 2);
                Reply::Bulk(String::from_utf8(bytes).expect("text"))
            }
            "*" => Reply::Array((0..number()).map(|_| self.reply()).collect()),
            "%" => Reply::Map((0..number()).map(|_| (self.reply(), self.reply())).collect()),
            _ => panic!("not a reply: {line}"),
        })
    }
}

/// Encodes a command.
pub(crate) fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}
