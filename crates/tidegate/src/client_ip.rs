//! [`ClientIp`]: which address a request really comes from, and what that address counts as.
//!
//! Each proxy appends the address it was called from, so a header is believed from the right, and
//! only as far as trusted proxies wrote it. All that is left of the first untrusted address may be
//! the client's invention.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

/// Of a longer header only the right end is looked at: no honest chain of proxies comes near, and a
/// hostile one costs no more.
const MAX_HOPS: usize = 64;
const MAX_BYTES: usize = 8 * 1024;

/// Which hop to believe, and how IPv6 addresses are grouped.
///
/// ```
/// use tidegate::ClientIp;
///
/// let client_ip = ClientIp::new(vec!["10.0.0.0/8".parse()?], 64)?;
/// let spoofed = b"8.8.8.8, 203.0.113.9, 10.0.0.2".as_slice();
/// let client = client_ip.resolve("10.0.0.1".parse()?, [spoofed].into_iter(), [].into_iter());
/// assert_eq!(client_ip.group(client.address), "203.0.113.9");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIp {
    trusted_proxies: Vec<IpNet>,
    ipv6_prefix: u8,
}

/// The address that a request is taken to come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// Never an IPv4-mapped one: those are unmapped.
    pub address: IpAddr,
    /// A trusted proxy handed on a hop that is no address (or more hops than are looked at): then
    /// `address` is that proxy's, and the client behind it stays unknown.
    pub unparsable: bool,
}

/// The prefix that addresses cannot be grouped by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("IPv6 prefix {0} is out of range: it must be from 1 to 128")]
pub struct Ipv6PrefixError(pub u8);

impl Default for ClientIp {
    /// No trusted proxies, so the peer is the client; IPv6 by /64, the least that one subscriber
    /// gets.
    fn default() -> Self {
        Self { trusted_proxies: Vec::new(), ipv6_prefix: 64 }
    }
}

impl ClientIp {
    /// Believes what peers in `trusted_proxies` say; groups IPv6 addresses by their first
    /// `ipv6_prefix` bits, 1 to 128.
    pub fn new(trusted_proxies: Vec<IpNet>, ipv6_prefix: u8) -> Result<Self, Ipv6PrefixError> {
        if !(1..=128).contains(&ipv6_prefix) {
            return Err(Ipv6PrefixError(ipv6_prefix));
        }
        Ok(Self {
            trusted_proxies: trusted_proxies.into_iter().map(unmapped).collect(),
            ipv6_prefix,
        })
    }

    /// The address of the client: the peer's, unless the peer is a trusted proxy; then the
    /// rightmost hop that is not trusted, or the leftmost if all of them are. Takes the values of
    /// the two headers in the order they came in.
    ///
    /// `Forwarded` is read only if `X-Forwarded-For` names no hop. Trusted proxies must therefore
    /// write or remove `X-Forwarded-For`: one that hands on the client's own lets the client choose
    /// its address.
    #[must_use]
    pub fn resolve<'h>(
        &self,
        peer: IpAddr,
        x_forwarded_for: impl DoubleEndedIterator<Item = &'h [u8]>,
        forwarded: impl DoubleEndedIterator<Item = &'h [u8]>,
    ) -> Resolved {
        let peer = peer.to_canonical();
        let itself = Resolved { address: peer, unparsable: false };
        if !self.trusts(peer) {
            return itself;
        }
        let by_x_forwarded_for = self.walk(peer, x_forwarded_for, address);
        by_x_forwarded_for.or_else(|| self.walk(peer, forwarded, forwarded_for)).unwrap_or(itself)
    }

    /// What a client counts as: an IPv4 address itself, an IPv6 address by its prefix, such as
    /// `2001:db8:0:1::/64`.
    #[must_use]
    pub fn group(&self, address: IpAddr) -> String {
        match address.to_canonical() {
            IpAddr::V4(address) => dotted(address),
            IpAddr::V6(address) => {
                let network = Ipv6Addr::from_bits(
                    address.to_bits() & (u128::MAX << (128 - self.ipv6_prefix)),
                );
                format!("{network}/{}", self.ipv6_prefix)
            }
        }
    }

    /// Whether this address is a trusted proxy's.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted_proxies.iter().any(|network| network.contains(&address))
    }

    /// From a trusted proxy to the left, until a hop is not trusted. `None`: the header names no
    /// hop.
    fn walk<'h>(
        &self,
        proxy: IpAddr,
        lines: impl DoubleEndedIterator<Item = &'h [u8]>,
        parse: fn(&[u8]) -> Option<IpAddr>,
    ) -> Option<Resolved> {
        let mut last_good = None;
        for hop in (FromTheRight { lines, line: None, hops_left: MAX_HOPS, bytes_left: MAX_BYTES })
        {
            let Some(address) = hop.and_then(parse) else {
                return Some(Resolved { address: last_good.unwrap_or(proxy), unparsable: true });
            };
            last_good = Some(address);
            if !self.trusts(address) {
                break;
            }
        }
        last_good.map(|address| Resolved { address, unparsable: false })
    }
}

/// As it writes itself, in a fraction of the time: this is the key of most limits.
fn dotted(address: Ipv4Addr) -> String {
    let mut text = String::with_capacity(15);
    for (place, octet) in address.octets().into_iter().enumerate() {
        if place > 0 {
            text.push('.');
        }
        text.push_str(itoa::Buffer::new().format(octet));
    }
    text
}

/// Addresses are unmapped before they are compared, so networks have to be too.
fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(mapped) = network else { return network };
    let ipv4 = mapped.addr().to_ipv4_mapped().zip(mapped.prefix_len().checked_sub(96));
    ipv4.and_then(|(address, prefix)| Ipv4Net::new(address, prefix).ok()).map_or(network, IpNet::V4)
}

/// The elements of a header, the last one first; `None` stands for what is too far left to be
/// looked at.
struct FromTheRight<'h, Lines> {
    lines: Lines,
    /// What is left of the line under way.
    line: Option<&'h [u8]>,
    hops_left: usize,
    bytes_left: usize,
}

impl<'h, Lines: DoubleEndedIterator<Item = &'h [u8]>> Iterator for FromTheRight<'h, Lines> {
    type Item = Option<&'h [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let line = self.line.take().or_else(|| self.lines.next_back())?;
            let in_sight = &line[line.len().saturating_sub(self.bytes_left)..];
            let (left, element) = split_last(in_sight, b',');
            let is_cut = left.is_none() && in_sight.len() < line.len();
            if is_cut || self.bytes_left == 0 {
                return Some(None);
            }
            self.line = left.map(|_| &line[..line.len() - element.len() - 1]);
            self.bytes_left = self.bytes_left.saturating_sub(element.len() + 1);
            // Lists in headers may have empty elements, which mean nothing (RFC 9110, 5.6.1).
            let element = element.trim_ascii();
            if !element.is_empty() {
                let is_in_sight = self.hops_left > 0;
                self.hops_left = self.hops_left.saturating_sub(1);
                return Some(is_in_sight.then_some(element));
            }
        }
    }
}

/// What stands before and after the last separator outside of quotes.
///
/// Quotes are paired from the right as well: one that the client left open cannot swallow what a
/// proxy appended.
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

/// The address in an element of `Forwarded` (RFC 7239), such as
/// `for="[2001:db8::1]:4711";proto=https`.
///
/// No address without a `for`, nor with two: then nobody vouches for what is left of it, either.
fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
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
    // No address needs a backslash, so quoting is all that there is to take off.
    match found? {
        [b'"', quoted @ .., b'"'] => address(quoted),
        token => address(token),
    }
}

/// `1.2.3.4`, `1.2.3.4:567`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:567`.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    if let Some(bracketed) = text.strip_prefix('[') {
        let (address, after) = bracketed.split_once(']')?;
        let is_whole = after.is_empty() || after.strip_prefix(':').is_some_and(is_port);
        return is_whole.then(|| ipv6(address)).flatten();
    }
    let ipv4 = |text: &str| text.parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    match text.split_once(':') {
        None => ipv4(text),
        Some((address, port)) if is_port(port) => ipv4(address),
        Some(_) => ipv6(text),
    }
}

/// Without its zone, which means something only on the proxy's own machine.
fn ipv6(text: &str) -> Option<IpAddr> {
    let (address, zone) = text.split_once('%').unwrap_or((text, ""));
    let is_zone = zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte));
    let address: Ipv6Addr = address.parse().ok().filter(|_| is_zone)?;
    Some(address.to_canonical())
}

/// A number, or a name that stands for one as RFC 7239 has it: `_hidden`.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    const PROXY: &str = "10.0.0.1";

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn client_ip(trusted_proxies: &[&str]) -> ClientIp {
        let networks =
            trusted_proxies.iter().map(|network| network.parse().expect("a network")).collect();
        ClientIp::new(networks, 64).expect("a valid prefix")
    }

    fn behind_proxies() -> ClientIp {
        client_ip(&["10.0.0.0/8", "2001:db8:ffff::/48"])
    }

    fn resolve<'h>(peer: &str, x_forwarded_for: &[&'h str], forwarded: &[&'h str]) -> Resolved {
        let lines = |lines: &[&'h str]| {
            lines.iter().map(|line| line.as_bytes()).collect::<Vec<_>>().into_iter()
        };
        behind_proxies().resolve(ip(peer), lines(x_forwarded_for), lines(forwarded))
    }

    fn good(address: &str) -> Resolved {
        Resolved { address: ip(address), unparsable: false }
    }

    fn unparsable_after(address: &str) -> Resolved {
        Resolved { address: ip(address), unparsable: true }
    }

    #[test]
    fn an_untrusted_peer_is_the_client_whatever_it_says() {
        assert_eq!(resolve("203.0.113.9", &["1.1.1.1"], &["for=1.1.1.1"]), good("203.0.113.9"));
        let trusting_nobody = ClientIp::default();
        let header = b"1.1.1.1".as_slice();
        assert_eq!(
            trusting_nobody.resolve(ip(PROXY), [header].into_iter(), [].into_iter()),
            good(PROXY)
        );
    }

    #[test]
    fn a_proxy_that_names_no_hop_is_the_client() {
        assert_eq!(resolve(PROXY, &[], &[]), good(PROXY));
        assert_eq!(resolve(PROXY, &["", " , ,"], &[""]), good(PROXY));
    }

    #[test]
    fn the_rightmost_untrusted_hop_is_the_client() {
        assert_eq!(resolve(PROXY, &["203.0.113.9"], &[]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["203.0.113.9, 10.0.0.3,10.0.0.2"], &[]), good("203.0.113.9"));
        assert_eq!(
            resolve(PROXY, &["203.0.113.9", "10.0.0.3", "10.0.0.2"], &[]),
            good("203.0.113.9")
        );
        assert_eq!(
            resolve(PROXY, &[], &["for=203.0.113.9, for=10.0.0.3", "for=10.0.0.2"]),
            good("203.0.113.9")
        );
        assert_eq!(
            resolve("2001:db8:ffff::1", &["203.0.113.9, 2001:db8:ffff::2"], &[]),
            good("203.0.113.9")
        );
    }

    #[test]
    fn what_the_client_sent_itself_is_ignored() {
        assert_eq!(resolve(PROXY, &["8.8.8.8, 203.0.113.9, 10.0.0.2"], &[]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["8.8.8.8", "203.0.113.9"], &[]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["10.0.0.7, 203.0.113.9"], &[]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["unknown, \0, 203.0.113.9"], &[]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &[], &["for=8.8.8.8, for=203.0.113.9"]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &[], &[r#"for="8.8.8.8, for=203.0.113.9"#]), good("203.0.113.9"));
        assert_eq!(
            resolve(PROXY, &[], &[r#"for=8.8.8.8;host="a\, for=203.0.113.9"#]),
            good("203.0.113.9")
        );
    }

    #[test]
    fn if_every_hop_is_trusted_the_leftmost_is_the_client() {
        assert_eq!(resolve(PROXY, &["10.0.0.4, 10.0.0.3", "10.0.0.2"], &[]), good("10.0.0.4"));
    }

    #[test]
    fn nothing_left_of_an_unparsable_hop_is_believed() {
        let hops = "unknown | _hidden | garbage | : | for=1.2.3.4 | \"1.2.3.4\" | \u{661}.2.3.4
            | 1.2.3 | 1.2.3.4.5 | 256.1.1.1 | 010.0.0.2 | 1.2.3.4 5 | 1.2.3.4%eth0
            | 1.2.3.4: | 1.2.3.4:x | 1.2.3.4:+5 | 1.2.3.4:65536 | 1.2.3.4:_ | 1.2.3.4:_a b
            | [1.2.3.4] | [2001:db8::1 | 2001:db8::1] | [2001:db8::1]x | [2001:db8::1]:
            | 2001:db8::g | 2001:db8::1%e h";
        for hop in hops.split('|').map(str::trim) {
            let after_a_hop = format!("8.8.8.8, {hop}, 10.0.0.2");
            assert_eq!(resolve(PROXY, &[&after_a_hop], &[]), unparsable_after("10.0.0.2"), "{hop}");
            assert_eq!(resolve(PROXY, &["8.8.8.8", hop], &[]), unparsable_after(PROXY), "{hop}");
        }
        let elements = r#"for=unknown | for=_hidden | for="_hidden:80" | for= | for="" | for=" | for | fo
            | xfor=1.2.3.4 | for =1.2.3.4 | for="1.2.3.4 | for=1.2.3.4" | for="1.2.3\.4" | for=1.2.3.4;host="a
            | for=1.2.3.4;for=1.2.3.4 | 1.2.3.4 | by=1.2.3.4 | proto=https | host="for=1.2.3.4""#;
        for element in elements.split('|').map(str::trim) {
            let after_a_hop = format!("for=8.8.8.8, {element}, for=10.0.0.2");
            assert_eq!(
                resolve(PROXY, &[], &[&after_a_hop]),
                unparsable_after("10.0.0.2"),
                "{element}"
            );
            assert_eq!(
                resolve(PROXY, &[], &["for=8.8.8.8", element]),
                unparsable_after(PROXY),
                "{element}"
            );
        }
    }

    #[test]
    fn hops_are_read_with_ports_brackets_zones_and_spaces() {
        for (hop, address) in [
            ("203.0.113.9", "203.0.113.9"),
            ("\t203.0.113.9:567 ", "203.0.113.9"),
            ("203.0.113.9:_hidden", "203.0.113.9"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:DB8:0::0:1", "2001:db8::1"),
            ("::1", "::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:567", "2001:db8::1"),
            ("fe80::1%eth0", "fe80::1"),
            ("[fe80::1%25eth0]:80", "fe80::1"),
            ("::ffff:203.0.113.9", "203.0.113.9"),
            ("[::ffff:cb00:7109]:80", "203.0.113.9"),
        ] {
            assert_eq!(resolve(PROXY, &[hop], &[]), good(address), "{hop}");
        }
    }

    #[test]
    fn forwarded_is_read_as_rfc_7239_writes_it() {
        for (element, address) in [
            ("for=203.0.113.9", "203.0.113.9"),
            ("FOR=203.0.113.9;proto=http;by=203.0.113.43", "203.0.113.9"),
            (r#"For="[2001:db8::1]:4711""#, "2001:db8::1"),
            (r#"for="[2001:db8::1]""#, "2001:db8::1"),
            (r#"for="203.0.113.9:_hidden""#, "203.0.113.9"),
            (r#"proto=https; for="203.0.113.9:80" ;host=example.org"#, "203.0.113.9"),
            (";;for=203.0.113.9;", "203.0.113.9"),
            (r#"host="a, for=8.8.8.8;for=8.8.4.4";for=203.0.113.9"#, "203.0.113.9"),
            (r#"for=203.0.113.9;host="\", for=8.8.8.8, \\""#, "203.0.113.9"),
            (r#"for="[::ffff:203.0.113.9]""#, "203.0.113.9"),
        ] {
            assert_eq!(resolve(PROXY, &[], &[element]), good(address), "{element}");
            assert_eq!(
                resolve(PROXY, &[], &["for=8.8.8.8", element, "for=10.0.0.2"]),
                good(address),
                "{element}"
            );
        }
    }

    #[test]
    fn x_forwarded_for_comes_before_forwarded_unless_it_names_no_hop() {
        assert_eq!(resolve(PROXY, &["203.0.113.9"], &["for=203.0.113.8"]), good("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["10.0.0.2"], &["for=203.0.113.8"]), good("10.0.0.2"));
        assert_eq!(resolve(PROXY, &["unknown"], &["for=203.0.113.8"]), unparsable_after(PROXY));
        assert_eq!(resolve(PROXY, &[" "], &["for=203.0.113.8"]), good("203.0.113.8"));
    }

    #[test]
    fn mapped_addresses_are_ipv4_addresses_everywhere() {
        assert_eq!(resolve("::ffff:203.0.113.9", &["1.1.1.1"], &[]), good("203.0.113.9"));
        assert_eq!(
            resolve("::ffff:10.0.0.1", &["203.0.113.9, ::ffff:10.0.0.2"], &[]),
            good("203.0.113.9")
        );
        assert_eq!(ClientIp::default().group(ip("::ffff:203.0.113.9")), "203.0.113.9");

        let header = b"203.0.113.9, 10.0.0.2".as_slice();
        let by_mapped_network = client_ip(&["::ffff:10.0.0.0/104"]);
        for (peer, client) in [
            ("10.0.0.1", "203.0.113.9"),
            ("::ffff:10.0.0.1", "203.0.113.9"),
            ("11.0.0.1", "11.0.0.1"),
        ] {
            assert_eq!(
                by_mapped_network.resolve(ip(peer), [header].into_iter(), [].into_iter()),
                good(client)
            );
        }
        assert_eq!(client_ip(&["::ffff:0:0/96"]), client_ip(&["0.0.0.0/0"]));
        assert_ne!(client_ip(&["::/0"]), client_ip(&["0.0.0.0/0"]));
    }

    #[test]
    fn ipv6_clients_count_by_their_prefix() {
        let address = ip("2001:db8:0:1:2:3:4:5");
        for (prefix, group) in [
            (64, "2001:db8:0:1::/64"),
            (128, "2001:db8:0:1:2:3:4:5/128"),
            (33, "2001:db8::/33"),
            (1, "::/1"),
        ] {
            assert_eq!(
                ClientIp::new(Vec::new(), prefix).expect("a valid prefix").group(address),
                group
            );
        }
        assert_eq!(ClientIp::default().group(address), "2001:db8:0:1::/64");
        for prefix in [0, 129, 255] {
            assert_eq!(ClientIp::new(Vec::new(), prefix), Err(Ipv6PrefixError(prefix)));
        }
    }

    #[test]
    fn only_the_last_64_hops_are_looked_at() {
        let trusted_hops = |count: usize| "10.0.0.3, ".repeat(count - 1) + "10.0.0.2";
        assert_eq!(resolve(PROXY, &[&trusted_hops(64)], &[]), good("10.0.0.3"));
        assert_eq!(resolve(PROXY, &["203.0.113.9", &trusted_hops(63)], &[]), good("203.0.113.9"));
        assert_eq!(
            resolve(PROXY, &["203.0.113.9", &trusted_hops(64)], &[]),
            unparsable_after("10.0.0.3")
        );
    }

    #[test]
    fn only_the_last_8_kib_are_looked_at() {
        let padded = |bytes: usize| " ".repeat(bytes - ", 10.0.0.2".len()) + ", 10.0.0.2";
        assert_eq!(resolve(PROXY, &[&padded(MAX_BYTES)], &[]), good("10.0.0.2"));
        assert_eq!(resolve(PROXY, &[&padded(MAX_BYTES + 1)], &[]), unparsable_after("10.0.0.2"));
        // Where the sight ends, `203.0.113.9` must not be read as `3.0.113.9`.
        let cut = format!("203.0.113.9{}", padded(MAX_BYTES - "3.0.113.9".len()));
        assert_eq!(resolve(PROXY, &[&cut], &[]), unparsable_after("10.0.0.2"));
        assert_eq!(
            resolve(PROXY, &["1.1.1.1", &",".repeat(MAX_BYTES)], &[]),
            unparsable_after(PROXY)
        );
        assert_eq!(resolve(PROXY, &vec![""; MAX_BYTES + 1], &[]), unparsable_after(PROXY));
    }

    /// Bytes that mean something here, in any order, so that the parser is led far before it is let
    /// down.
    fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
        let pieces = concat!(
            r#",|;|"|\|:|[|]|%| |=|for=|For="|", |proto=https;|host="a, b"|unknown|_x|"#,
            "10.0.0.2|203.0.113.9|2001:db8::1|[2001:db8:ffff::1]:80|::ffff:10.0.0.3"
        );
        let pieces: Vec<&str> = pieces.split('|').collect();
        let piece = prop_oneof![
            8 => select(pieces).prop_map(|piece| piece.as_bytes().to_vec()),
            1 => vec(any::<u8>(), 0..8),
        ];
        vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    /// Every address that can be made out in some bytes, by a reading of its own: runs of the
    /// characters of an address.
    fn addresses_in(line: &[u8]) -> Vec<IpAddr> {
        let runs = line.split(|byte| !byte.is_ascii_hexdigit() && !b".:".contains(byte));
        let texts = runs.filter_map(|run| str::from_utf8(run).ok());
        let with_and_without_port =
            texts.flat_map(|text| [Some(text), text.rsplit_once(':').map(|(address, _)| address)]);
        with_and_without_port
            .flatten()
            .filter_map(|text| text.parse().ok())
            .map(|address: IpAddr| address.to_canonical())
            .collect()
    }

    proptest! {
        #[test]
        fn any_bytes_resolve_to_the_peer_or_to_a_hop(
            x_forwarded_for in vec(hostile_bytes(), 0..3), forwarded in vec(hostile_bytes(), 0..3),
            trusted in any::<bool>(),
        ) {
            let peer = ip(if trusted { PROXY } else { "198.51.100.1" });
            let lines = || x_forwarded_for.iter().map(Vec::as_slice);
            let client = behind_proxies().resolve(peer, lines(), forwarded.iter().map(Vec::as_slice));
            let mut hops = lines().chain(forwarded.iter().map(Vec::as_slice)).flat_map(addresses_in);
            prop_assert!(client.address == peer || trusted && hops.any(|hop| hop == client.address), "{:?}", client);
            prop_assert_eq!(client.address, client.address.to_canonical());
        }

        #[test]
        fn whatever_the_client_sends_the_proxies_have_the_last_word(
            sent in hostile_bytes(), on_its_own_line in any::<bool>(),
            is_forwarded in any::<bool>(), proxies in 0..4_usize,
        ) {
            let appended = if is_forwarded {
                "for=\"203.0.113.77:80\";host=\"a, \\\"b\"".to_owned() + &", For=10.0.0.2;proto=http".repeat(proxies)
            } else {
                "203.0.113.77:80".to_owned() + &", 10.0.0.2".repeat(proxies)
            };
            let joined = [sent.as_slice(), b", ", appended.as_bytes()].concat();
            let apart = vec![sent.as_slice(), appended.as_bytes()];
            let lines = if on_its_own_line { apart } else { vec![joined.as_slice()] };
            let (x_forwarded_for, forwarded) = if is_forwarded { (vec![], lines) } else { (lines, vec![]) };
            let client = behind_proxies().resolve(ip(PROXY), x_forwarded_for.into_iter(), forwarded.into_iter());
            prop_assert_eq!(client, good("203.0.113.77"));
        }
    }
}
