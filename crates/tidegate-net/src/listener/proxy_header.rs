//! PROXY protocol, versions 1 and 2: a balancer sends the address of the client before the first
//! byte of its connection.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Length of `PROXY UNKNOWN\r\n`. No header of either version is shorter.
const MIN_BYTES: usize = 15;
const V1_START: &[u8] = b"PROXY ";
/// Maximum length of a header of version 1, with its line end.
const MAX_V1_BYTES: usize = 107;
const V2_START: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
const V2_HEAD_BYTES: usize = 16;
/// Maximum length of the addresses and options behind the head of version 2. The protocol allows
/// 64 KiB, but all options that are in use need a few hundred bytes.
const MAX_V2_BYTES: usize = 4 * 1024;

/// Header, as far as it was received.
enum Header {
    /// At least this number of bytes is missing.
    Incomplete(usize),
    /// Address of the client; `None` if it has none, or if the balancer itself is the client.
    Complete(Option<SocketAddr>),
}

/// Reads a header, and no byte behind it. Returns the address of the client, if the header has one.
/// The error for an invalid header is [`io::ErrorKind::InvalidData`].
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<SocketAddr>> {
    let mut header = Vec::new();
    loop {
        let missing = match parse(&header).ok_or(io::ErrorKind::InvalidData)? {
            Header::Complete(client) => return Ok(client),
            Header::Incomplete(missing) => missing,
        };
        if (&mut *stream).take(missing as u64).read_buf(&mut header).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Parses the first bytes of a connection; `None` if they are not those of a header.
fn parse(bytes: &[u8]) -> Option<Header> {
    let may_start_with = |start: &[u8]| start.iter().zip(bytes).all(|(start, byte)| start == byte);
    let (is_v1, is_v2) = (may_start_with(V1_START), may_start_with(V2_START));
    match MIN_BYTES.checked_sub(bytes.len()) {
        Some(missing @ 1..) => (is_v1 || is_v2).then_some(Header::Incomplete(missing)),
        _ if is_v1 => parse_v1(bytes),
        _ if is_v2 => parse_v2(bytes),
        _ => None,
    }
}

/// Parses a line like `PROXY TCP4 203.0.113.9 192.0.2.1 50000 443`.
fn parse_v1(bytes: &[u8]) -> Option<Header> {
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return (bytes.len() < MAX_V1_BYTES).then_some(Header::Incomplete(1));
    };
    let line =
        bytes.strip_prefix(V1_START)?.strip_suffix(b"\r\n").filter(|_| end + 1 == bytes.len())?;
    if line == b"UNKNOWN" || line.starts_with(b"UNKNOWN ") {
        return Some(Header::Complete(None));
    }
    let mut fields = str::from_utf8(line).ok()?.split(' ');
    let family = fields.next()?;
    let (source, destination) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let (port, _) = (parse_port(fields.next()?)?, parse_port(fields.next()?)?);
    let is_valid = match (source, destination) {
        (IpAddr::V4(_), IpAddr::V4(_)) => family == "TCP4",
        (IpAddr::V6(_), IpAddr::V6(_)) => family == "TCP6",
        _ => false,
    };
    let client = Header::Complete(Some(SocketAddr::new(source, port)));
    (is_valid && fields.next().is_none()).then_some(client)
}

/// Parses a port without a sign or leading zeros.
fn parse_port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port: &u16| port.to_string() == text)
}

fn parse_v2(bytes: &[u8]) -> Option<Header> {
    let Some((head, block)) = bytes.split_first_chunk::<V2_HEAD_BYTES>() else {
        return Some(Header::Incomplete(V2_HEAD_BYTES - bytes.len()));
    };
    let [.., command, family, high, low] = *head;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > MAX_V2_BYTES {
        return None;
    }
    if let Some(missing @ 1..) = length.checked_sub(block.len()) {
        return Some(Header::Incomplete(missing));
    }
    let client = match (command, family) {
        // A health check of the balancer itself: the family does not matter.
        (0x20, _) |
        // Neither family has an address of IP: unspecified, Unix sockets.
        (0x21, 0x00 | 0x31 | 0x32) => None,
        (0x21, 0x11) => Some(source::<4>(block)?),
        (0x21, 0x21) => Some(source::<16>(block)?),
        _ => return None,
    };
    Some(Header::Complete(client))
}

/// Returns the first of two addresses with `N` bytes and their ports.
fn source<const N: usize>(block: &[u8]) -> Option<SocketAddr>
where
    IpAddr: From<[u8; N]>,
{
    let (address, rest) = block.split_first_chunk::<N>()?;
    let (_, ports) = rest.split_first_chunk::<N>()?;
    let [high, low, _, _] = *ports.first_chunk()?;
    Some(SocketAddr::new(IpAddr::from(*address), u16::from_be_bytes([high, low])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;

    const V2_TCP4: &str = "\r\n\r\n\0\r\nQUIT\n!\x11\0\x0c\x7f\0\0\x09\x7f\0\0\x01\x01\0\0P";
    const SEEDS: [&str; 14] = [
        "PROXY TCP4 203.0.113.9 192.0.2.1 50000 443\r\nGET / HTTP/1.1\r\n\r\n",
        "PROXY TCP6 2001:db8::9 2001:db8::1 50000 443\r\n\x16\x03\x01",
        "PROXY TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff \
         ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535\r\n",
        "PROXY UNKNOWN\r\nPING\r\n",
        "PROXY UNKNOWN ffff::1 anything \x01 65535 65535\r\n",
        "PROXY TCP4 ::1 ::1 1 1\r\n",
        "PROXY TCP4 1.1.1.1 1.1.1.1 +1 01\r\n",
        "PROXY TCP4 1.1.1.1 1.1.1.1 1 1 \r\n",
        "PROXY TCP4 1.1.1.1 1.1.1.1 65536 1\r\n",
        V2_TCP4,
        "\r\n\r\n\0\r\nQUIT\n \0\0\0PING\r\n",
        "\r\n\r\n\0\r\nQUIT\n!\x21\0\x28 \x01\r\u{38}\0\0\0\0\0\0\0\0\0\0\0\x09 \
         \x01\r\u{38}\0\0\0\0\0\0\0\0\0\0\0\x01\x01\0\0P\x04\0\x01x",
        "\r\n\r\n\0\r\nQUIT\n!1\0\x02ab",
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ];
    const PIECES: [&str; 22] = [
        "PROXY ",
        "TCP4 ",
        "TCP6 ",
        "UNKNOWN",
        "203.0.113.9",
        "2001:db8::1",
        "::ffff:203.0.113.9",
        " ",
        "0",
        "80",
        "65535",
        "\r",
        "\n",
        "\r\n",
        "\0",
        "\x11",
        "!",
        "\x0c",
        "\x10",
        "\r\n\r\n\0\r\nQUIT\n",
        "\r\n\r\n\0\r\nQUIT\n!\x11\0",
        "\r\n\r\n\0\r\nQUIT\n \0",
    ];

    /// Returns the client and the number of bytes that were read.
    fn read_all(bytes: &[u8]) -> (io::Result<Option<SocketAddr>>, usize) {
        let mut rest = bytes;
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let client = runtime.block_on(read(&mut rest));
        (client, bytes.len() - rest.len())
    }

    fn client(bytes: &[u8]) -> Result<Option<String>, io::ErrorKind> {
        let client = read_all(bytes).0.map_err(|error| error.kind());
        client.map(|client| client.map(|client| client.to_string()))
    }

    fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
        let length = u16::try_from(block.len()).expect("short").to_be_bytes();
        [V2_START, &[command, family], &length, block].concat()
    }

    #[test]
    fn header_names_the_client() {
        let address = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(client(SEEDS[0].as_bytes()), address("203.0.113.9:50000"));
        assert_eq!(client(SEEDS[1].as_bytes()), address("[2001:db8::9]:50000"));
        assert_eq!(SEEDS[2].len(), 104, "the longest header with addresses");
        assert!(client(SEEDS[2].as_bytes()).is_ok());
        let block = [203, 0, 113, 9, 192, 0, 2, 1, 0xc3, 0x50, 1, 0xbb];
        assert_eq!(client(&v2(0x21, 0x11, &block)), address("203.0.113.9:50000"));
        let options = [&block[..], &[4; MAX_V2_BYTES - 12]].concat();
        assert_eq!(client(&v2(0x21, 0x11, &options)), address("203.0.113.9:50000"));
        let block: Vec<u8> = (0..36).collect();
        assert_eq!(
            client(&v2(0x21, 0x21, &block)),
            address("[1:203:405:607:809:a0b:c0d:e0f]:8225")
        );
    }

    #[test]
    fn header_without_a_client_keeps_the_address_of_the_peer() {
        for header in [&b"PROXY UNKNOWN\r\n"[..], b"PROXY UNKNOWN ::1 \xff 1\r\n"] {
            assert_eq!(client(header), Ok(None));
        }
        // A health check, of any family; an unspecified one; Unix sockets.
        for (command, family) in [(0x20, 0x00), (0x20, 0x11), (0x20, 0xff), (0x21, 0x00)] {
            assert_eq!(client(&v2(command, family, b"")), Ok(None));
        }
        assert_eq!(client(&v2(0x21, 0x31, &[b'/'; 216])), Ok(None));
    }

    #[test]
    fn invalid_headers_are_errors_as_soon_as_they_are_seen() {
        let long = [b"PROXY UNKNOWN ".as_slice(), &[b'x'; 200], b"\r\n"].concat();
        let cut = [b"PROXY UNKNOWN ".as_slice(), &[b'x'; 107 - 16], b"\r\n"].concat();
        assert_eq!(client(&cut), Ok(None), "107 bytes");
        let longer = [b"PROXY UNKNOWN ".as_slice(), &[b'x'; 107 - 15], b"\r\n"].concat();
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"P!",
            b"PING\r\n",
            b"\x16\x03\x01",
            b"\r\n\r\nx",
            b"proxy UNKNOWN\r\n",
            b"PROXY UNKNOWNX\r\n",
            b"PROXY UNKNOWN x\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1\n",
            b"PROXY TCP4  1.1.1.1 1.1.1.1 1 1\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1 \r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 +1 1\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1 01\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1 65536\r\n",
            b"PROXY TCP4 1.1.1.1 ::1 1 1\r\n",
            b"PROXY TCP4 ::1 ::1 1 1\r\n",
            b"PROXY TCP6 1.1.1.1 1.1.1.1 1 1\r\n",
            b"PROXY TCP4 1.1.1.01 1.1.1.1 1 1\r\n",
            b"PROXY UDP4 1.1.1.1 1.1.1.1 1 1\r\n",
            &long,
            &longer,
            &v2(0x11, 0x11, &[0; 12]),
            &v2(0x22, 0x11, &[0; 12]),
            &v2(0x21, 0x12, &[0; 12]),
            &v2(0x21, 0x11, &[0; 11]),
            &v2(0x21, 0x21, &[0; 35]),
            &v2(0x21, 0x00, &[0; MAX_V2_BYTES + 1]),
        ] {
            let shown = String::from_utf8_lossy(bytes);
            assert_eq!(client(bytes), Err(io::ErrorKind::InvalidData), "{shown:?}");
        }
    }

    /// Reads a complete header of version 1 with the parser of the address family alone.
    fn model_v1(line: &str) -> Option<SocketAddr> {
        let fields: Vec<&str> = line.trim_end_matches("\r\n").split(' ').collect();
        match fields[..] {
            ["PROXY", "TCP4", source, _, port, _] => format!("{source}:{port}").parse().ok(),
            ["PROXY", "TCP6", source, _, port, _] => format!("[{source}]:{port}").parse().ok(),
            _ => None,
        }
    }

    #[test]
    fn fuzz_proxy_headers_are_read_to_their_end_and_no_further() {
        fuzz::bytes(&SEEDS, &PIECES, |bytes| {
            let (client, length) = read_all(bytes);
            assert!(length <= V2_HEAD_BYTES + MAX_V2_BYTES);
            let Ok(client) = client else { return };
            let header = &bytes[..length];
            for tail in [&b""[..], b"\r\n", b"PROXY UNKNOWN\r\n", b"\x16\x03\x01\x02"] {
                let (again, read) = read_all(&[header, tail].concat());
                assert_eq!((again.expect("the same header"), read), (client, length));
            }
            for cut in 0..length {
                let (error, read) = read_all(&header[..cut]);
                let error = error.expect_err("a part of the header");
                assert_eq!((error.kind(), read), (io::ErrorKind::UnexpectedEof, cut));
            }
            if header.starts_with(V1_START) {
                assert!(length <= MAX_V1_BYTES && header.ends_with(b"\r\n"));
                let end = header.iter().position(|byte| *byte == b'\n');
                assert_eq!(end, Some(length - 1), "it is one line");
                assert_eq!(client, str::from_utf8(header).ok().and_then(model_v1));
            } else {
                let body = usize::from(header[14]) * 256 + usize::from(header[15]);
                assert_eq!(length, V2_HEAD_BYTES + body);
            }
        });
    }
}
