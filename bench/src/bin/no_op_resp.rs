//! No-op server of the Redis protocol: parses commands and answers each with the same decision, all
//! that have arrived in one write. It is the upper bound for Tidegate.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ANSWER: &[u8] = b"*6\r\n:1\r\n:1000000000\r\n:999999999\r\n:0\r\n:1\r\n:0\r\n";

#[tokio::main]
async fn main() -> io::Result<()> {
    let address = std::env::args().nth(1).ok_or(io::ErrorKind::InvalidInput)?;
    let listener = TcpListener::bind(address).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(serve(stream));
    }
}

async fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 64 * 1024];
    let (mut end, mut answers) = (0, Vec::new());
    loop {
        let length = stream.read(&mut buffer[end..]).await?;
        if length == 0 {
            return Ok(());
        }
        end += length;
        let mut start = 0;
        while let Some(length) = command_length(&buffer[start..end]) {
            start += length;
            answers.extend_from_slice(ANSWER);
        }
        buffer.copy_within(start..end, 0);
        end -= start;
        stream.write_all(&answers).await?;
        answers.clear();
    }
}

/// Returns the length of the first command, if it is complete.
fn command_length(bytes: &[u8]) -> Option<usize> {
    let (count, mut at) = number(bytes, 1)?;
    for _ in 0..count {
        let (length, start) = number(bytes, at + 1)?;
        at = start + length + 2;
    }
    (at <= bytes.len()).then_some(at)
}

/// Parses a number and CRLF, and returns the position after it.
fn number(bytes: &[u8], start: usize) -> Option<(usize, usize)> {
    let rest = bytes.get(start..)?;
    let mut number = 0;
    for (index, byte) in rest.iter().enumerate() {
        match byte {
            b'0'..=b'9' => number = number * 10 + usize::from(byte - b'0'),
            _ => return (rest.len() > index + 1).then_some((number, start + index + 2)),
        }
    }
    None
}
