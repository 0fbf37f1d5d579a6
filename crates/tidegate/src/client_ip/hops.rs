//! The hops in `X-Forwarded-For` and `Forwarded` headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum number of hops that are read, from the right. Real proxy chains are much shorter; the
/// limit bounds the cost of hostile headers.
const MAX_HOPS: usize = 64;
/// Maximum number of bytes that are read, from the right.
pub(super) const MAX_BYTES: usize = 8 * 1024;

/// Iterator over the elements of a header, the last one first. It yields `None` for everything
/// beyond the limits on hops and bytes.
pub(super) struct ReverseHops<'h, Lines> {
    lines: Lines,
    /// Unread part of the current line.
    line: Option<&'h [u8]>,
    hops_left: usize,
    bytes_left: usize,
}

impl<Lines> ReverseHops<'_, Lines> {
    pub(super) fn new(lines: Lines) -> Self {
        Self { lines, line: None, hops_left: MAX_HOPS, bytes_left: MAX_BYTES }
    }
}

impl<'h, Lines: DoubleEndedIterator<Item = &'h [u8]>> Iterator for ReverseHops<'h, Lines> {
    type Item = Option<&'h [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let line = self.line.take().or_else(|| self.lines.next_back())?;
            let within_limit = &line[line.len().saturating_sub(self.bytes_left)..];
            let (left, element) = split_last(within_limit, b',');
            let is_truncated = left.is_none() && within_limit.len() < line.len();
            if is_truncated || self.bytes_left == 0 {
                return Some(None);
            }
            self.line = left.map(|_| &line[..line.len() - element.len() - 1]);
            self.bytes_left = self.bytes_left.saturating_sub(element.len() + 1);
            // Empty elements of a list are ignored (RFC 9110, 5.6.1).
            let element = element.trim_ascii();
            if !element.is_empty() {
                let has_hops_left = self.hops_left > 0;
                self.hops_left = self.hops_left.saturating_sub(1);
                return Some(has_hops_left.then_some(element));
            }
        }
    }
}

/// Splits a text at its last separator outside of quotes.
///
/// Quotes are paired from the right too, so that an unbalanced quote of the client cannot hide the
/// hops that a proxy appended.
fn split_last(text: &[u8], separator: u8) -> (Option<&[u8]>, &[u8]) {
    let is_escaped =
        |at: usize| text[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    let mut is_quoted = false;
    for (at, &byte) in text.iter().enumerate().rev() {
        if byte == b'"' && !is_escaped(at) {
            is_quoted = !is_quoted;
        } else if byte == separator && !is_quoted {
            return (Some(&text[..at]), &text[at + 1..]);
        }
    }
    (None, text)
}

/// Parses the address in an element of `Forwarded` (RFC 7239), such as
/// `for="[2001:db8::1]:4711";proto=https`. An element without a `for`, or with two, is invalid.
pub(super) fn parse_forwarded(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = Some(element);
    while let Some(text) = rest {
        let (left, pair) = split_last(text, b';');
        rest = left;
        let value = match pair.trim_ascii().split_at_checked(4) {
            Some((name, value)) if name.eq_ignore_ascii_case(b"for=") => value,
            _ => continue,
        };
        if found.replace(value).is_some() {
            return None;
        }
    }
    // An address contains no backslash, so unquoting is enough.
    match found? {
        [b'"', quoted @ .., b'"'] => parse_address(quoted),
        token => parse_address(token),
    }
}

/// Parses `1.2.3.4`, `1.2.3.4:567`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:567`.
pub(super) fn parse_address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    if let Some(bracketed) = text.strip_prefix('[') {
        let (address, suffix) = bracketed.split_once(']')?;
        let is_valid = suffix.is_empty() || suffix.strip_prefix(':').is_some_and(is_port);
        return is_valid.then(|| parse_ipv6(address)).flatten();
    }
    let ipv4 = |text: &str| text.parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    match text.split_once(':') {
        None => ipv4(text),
        Some((address, port)) if is_port(port) => ipv4(address),
        Some(_) => parse_ipv6(text),
    }
}

/// Parses an IPv6 address and drops its zone, which is meaningful only on the proxy itself.
fn parse_ipv6(text: &str) -> Option<IpAddr> {
    let (address, zone) = text.split_once('%').unwrap_or((text, ""));
    let is_valid_zone =
        zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte));
    let address: Ipv6Addr = address.parse().ok().filter(|_| is_valid_zone)?;
    Some(address.to_canonical())
}

/// Returns whether this is a port number, or an obfuscated port of RFC 7239 such as `_hidden`.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok(),
    }
}
