//! [`ClientIp`]: the address of the client behind trusted proxies, and its rate-limiting key.
//!
//! Each proxy appends the address of its peer, so a header is read from the right, and only as far
//! as trusted proxies wrote it. Everything to the left of the first untrusted address may be forged
//! by the client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

use self::hops::{ReverseHops, parse_address, parse_forwarded};

mod hops;

/// First bytes of the addresses in which a NAT64 translator embeds those of IPv4 (RFC 6052).
const NAT64_PREFIX: [u8; 12] = [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0];

/// The trusted proxies, and the grouping of IPv6 addresses.
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

/// The resolved address of a client, as [`ClientIp::resolve`] returns it.
///
/// ```
/// use tidegate::ClientIp;
///
/// let client_ip = ClientIp::new(vec!["10.0.0.0/8".parse()?], 64)?;
/// let proxy = "10.0.0.1".parse()?;
/// let resolve = |header: &'static str| {
///     client_ip.resolve(proxy, [header.as_bytes()].into_iter(), [].into_iter())
/// };
/// assert_eq!(resolve("203.0.113.9").address.to_string(), "203.0.113.9");
/// let broken = resolve("unknown");
/// assert!(broken.unparsable);
/// assert_eq!(broken.address, proxy);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// The address. An IPv4-mapped IPv6 address is converted to IPv4.
    pub address: IpAddr,
    /// Whether a trusted proxy passed on a hop that is not an address, or too many hops. Then
    /// `address` is the address of that proxy, and the client is unknown.
    pub unparsable: bool,
}

/// The error for an IPv6 prefix length out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("IPv6 prefix {0} is out of range: it must be from 1 to 128")]
pub struct Ipv6PrefixError(pub u8);

impl Default for ClientIp {
    /// Trusts no proxies, so that the peer is the client, and groups IPv6 addresses by /64, the
    /// smallest network that a subscriber gets.
    fn default() -> Self {
        Self { trusted_proxies: Vec::new(), ipv6_prefix: 64 }
    }
}

impl ClientIp {
    /// Trusts the headers of peers in `trusted_proxies`, and groups IPv6 addresses by their first
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

    /// Returns the address of the client: the peer, or, if the peer is a trusted proxy, the
    /// rightmost untrusted hop, or the leftmost hop if all hops are trusted. The header values must
    /// be in the order in which they were received.
    ///
    /// `Forwarded` is read only if `X-Forwarded-For` names no hop. Trusted proxies must therefore
    /// set or remove `X-Forwarded-For`; a proxy that forwards the header of the client unchanged
    /// lets the client choose its address.
    #[must_use]
    pub fn resolve<'h>(
        &self,
        peer: IpAddr,
        x_forwarded_for: impl DoubleEndedIterator<Item = &'h [u8]>,
        forwarded: impl DoubleEndedIterator<Item = &'h [u8]>,
    ) -> Resolved {
        let peer = peer.to_canonical();
        let direct = Resolved { address: peer, unparsable: false };
        if !self.trusts(peer) {
            return direct;
        }
        self.walk(peer, x_forwarded_for, parse_address)
            .or_else(|| self.walk(peer, forwarded, parse_forwarded))
            .unwrap_or(direct)
    }

    /// Returns the rate-limiting key of a client: an IPv4 address, also one that is mapped to IPv6
    /// or embedded by NAT64, or the network of an IPv6 address, such as `2001:db8:0:1::/64`.
    ///
    /// ```
    /// use tidegate::ClientIp;
    ///
    /// let client_ip = ClientIp::default();
    /// assert_eq!(client_ip.group("203.0.113.9".parse()?), "203.0.113.9");
    /// assert_eq!(client_ip.group("2001:db8:0:1:a:b:c:d".parse()?), "2001:db8:0:1::/64");
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    #[must_use]
    pub fn group(&self, address: IpAddr) -> String {
        match self.network(address) {
            IpAddr::V4(address) => dotted(address),
            IpAddr::V6(network) => format!("{network}/{}", self.ipv6_prefix),
        }
    }

    /// Returns what [`group`](Self::group) names: an IPv4 address, or the first address of the
    /// network of an IPv6 address.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tidegate::ClientIp;
    ///
    /// let address: IpAddr = "2001:db8:0:1:a:b:c:d".parse()?;
    /// let network: IpAddr = "2001:db8:0:1::".parse()?;
    /// assert_eq!(ClientIp::default().network(address), network);
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    #[must_use]
    pub fn network(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(address) => nat64_embedded(address).map_or_else(
                || {
                    let prefix = u128::MAX << (128 - self.ipv6_prefix);
                    Ipv6Addr::from_bits(address.to_bits() & prefix).into()
                },
                IpAddr::V4,
            ),
            address @ IpAddr::V4(_) => address,
        }
    }

    /// Returns whether this address belongs to a trusted proxy.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted_proxies.iter().any(|network| network.contains(&address))
    }

    /// Walks the hops of a header from the right to the first untrusted one. Returns `None` if the
    /// header names no hop.
    fn walk<'h>(
        &self,
        proxy: IpAddr,
        lines: impl DoubleEndedIterator<Item = &'h [u8]>,
        parse: fn(&[u8]) -> Option<IpAddr>,
    ) -> Option<Resolved> {
        let mut last_valid = None;
        for hop in ReverseHops::new(lines) {
            let Some(address) = hop.and_then(parse) else {
                return Some(Resolved { address: last_valid.unwrap_or(proxy), unparsable: true });
            };
            last_valid = Some(address);
            if !self.trusts(address) {
                break;
            }
        }
        last_valid.map(|address| Resolved { address, unparsable: false })
    }
}

/// Returns the IPv4 address that a NAT64 translator embedded, whose clients are all in one network of
/// IPv6. That network itself embeds none.
fn nat64_embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [.., a, b, c, d] = address.octets();
    let embedded = Ipv4Addr::new(a, b, c, d);
    (is_nat64(address) && !embedded.is_unspecified()).then_some(embedded)
}

/// Formats an IPv4 address faster than its `Display`, because it is the key of most limits.
fn dotted(address: Ipv4Addr) -> String {
    let mut text = String::with_capacity(15);
    for (index, octet) in address.octets().into_iter().enumerate() {
        if index > 0 {
            text.push('.');
        }
        text.push_str(itoa::Buffer::new().format(octet));
    }
    text
}

/// Returns whether a NAT64 translator has this address.
pub(crate) fn is_nat64(address: Ipv6Addr) -> bool {
    address.octets().starts_with(&NAT64_PREFIX)
}

/// Converts an IPv4-mapped network to IPv4, as is done with addresses before they are compared.
pub(crate) fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(mapped) = network else { return network };
    let ipv4 = mapped.addr().to_ipv4_mapped().zip(mapped.prefix_len().checked_sub(96));
    ipv4.and_then(|(address, prefix)| Ipv4Net::new(address, prefix).ok()).map_or(network, IpNet::V4)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::hops::MAX_BYTES;
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

    fn resolved(address: &str) -> Resolved {
        Resolved { address: ip(address), unparsable: false }
    }

    fn unparsable_after(address: &str) -> Resolved {
        Resolved { address: ip(address), unparsable: true }
    }

    #[test]
    fn untrusted_peer_is_the_client_despite_its_headers() {
        assert_eq!(resolve("203.0.113.9", &["1.1.1.1"], &["for=1.1.1.1"]), resolved("203.0.113.9"));
        let without_proxies = ClientIp::default();
        let header = b"1.1.1.1".as_slice();
        assert_eq!(
            without_proxies.resolve(ip(PROXY), [header].into_iter(), [].into_iter()),
            resolved(PROXY)
        );
    }

    #[test]
    fn proxy_that_names_no_hop_is_the_client() {
        assert_eq!(resolve(PROXY, &[], &[]), resolved(PROXY));
        assert_eq!(resolve(PROXY, &["", " , ,"], &[""]), resolved(PROXY));
    }

    #[test]
    fn the_rightmost_untrusted_hop_is_the_client() {
        assert_eq!(resolve(PROXY, &["203.0.113.9"], &[]), resolved("203.0.113.9"));
        assert_eq!(
            resolve(PROXY, &["203.0.113.9, 10.0.0.3,10.0.0.2"], &[]),
            resolved("203.0.113.9")
        );
        assert_eq!(
            resolve(PROXY, &["203.0.113.9", "10.0.0.3", "10.0.0.2"], &[]),
            resolved("203.0.113.9")
        );
        assert_eq!(
            resolve(PROXY, &[], &["for=203.0.113.9, for=10.0.0.3", "for=10.0.0.2"]),
            resolved("203.0.113.9")
        );
        assert_eq!(
            resolve("2001:db8:ffff::1", &["203.0.113.9, 2001:db8:ffff::2"], &[]),
            resolved("203.0.113.9")
        );
    }

    #[test]
    fn hops_sent_by_the_client_are_ignored() {
        assert_eq!(
            resolve(PROXY, &["8.8.8.8, 203.0.113.9, 10.0.0.2"], &[]),
            resolved("203.0.113.9")
        );
        assert_eq!(resolve(PROXY, &["8.8.8.8", "203.0.113.9"], &[]), resolved("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["10.0.0.7, 203.0.113.9"], &[]), resolved("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["unknown, \0, 203.0.113.9"], &[]), resolved("203.0.113.9"));
        assert_eq!(resolve(PROXY, &[], &["for=8.8.8.8, for=203.0.113.9"]), resolved("203.0.113.9"));
        assert_eq!(
            resolve(PROXY, &[], &[r#"for="8.8.8.8, for=203.0.113.9"#]),
            resolved("203.0.113.9")
        );
        assert_eq!(
            resolve(PROXY, &[], &[r#"for=8.8.8.8;host="a\, for=203.0.113.9"#]),
            resolved("203.0.113.9")
        );
    }

    #[test]
    fn leftmost_hop_is_the_client_if_all_hops_are_trusted() {
        assert_eq!(resolve(PROXY, &["10.0.0.4, 10.0.0.3", "10.0.0.2"], &[]), resolved("10.0.0.4"));
    }

    #[test]
    fn hops_left_of_an_unparsable_hop_are_ignored() {
        let hops = "unknown | _hidden | garbage | : | for=1.2.3.4 | \"1.2.3.4\" | \u{661}.2.3.4
            | 1.2.3 | 1.2.3.4.5 | 256.1.1.1 | 010.0.0.2 | 1.2.3.4 5 | 1.2.3.4%eth0
            | 1.2.3.4: | 1.2.3.4:x | 1.2.3.4:+5 | 1.2.3.4:65536 | 1.2.3.4:_ | 1.2.3.4:_a b
            | [1.2.3.4] | [2001:db8::1 | 2001:db8::1] | [2001:db8::1]x | [2001:db8::1]:
            | 2001:db8::g | 2001:db8::1%e h";
        for hop in hops.split('|').map(str::trim) {
            let between_hops = format!("8.8.8.8, {hop}, 10.0.0.2");
            assert_eq!(
                resolve(PROXY, &[&between_hops], &[]),
                unparsable_after("10.0.0.2"),
                "{hop}"
            );
            assert_eq!(resolve(PROXY, &["8.8.8.8", hop], &[]), unparsable_after(PROXY), "{hop}");
        }
        let elements = r#"for=unknown | for=_hidden | for="_hidden:80" | for= | for="" | for="
            | for | fo | xfor=1.2.3.4 | for =1.2.3.4 | for="1.2.3.4 | for=1.2.3.4" | for="1.2.3\.4"
            | for=1.2.3.4;host="a | for=1.2.3.4;for=1.2.3.4 | 1.2.3.4 | by=1.2.3.4 | proto=https | host="for=1.2.3.4""#;
        for element in elements.split('|').map(str::trim) {
            let between_hops = format!("for=8.8.8.8, {element}, for=10.0.0.2");
            assert_eq!(
                resolve(PROXY, &[], &[&between_hops]),
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
    fn hops_with_ports_brackets_zones_and_spaces_are_parsed() {
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
            assert_eq!(resolve(PROXY, &[hop], &[]), resolved(address), "{hop}");
        }
    }

    #[test]
    fn forwarded_is_parsed_as_in_rfc_7239() {
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
            assert_eq!(resolve(PROXY, &[], &[element]), resolved(address), "{element}");
            assert_eq!(
                resolve(PROXY, &[], &["for=8.8.8.8", element, "for=10.0.0.2"]),
                resolved(address),
                "{element}"
            );
        }
    }

    #[test]
    fn x_forwarded_for_takes_precedence_unless_it_names_no_hop() {
        assert_eq!(resolve(PROXY, &["203.0.113.9"], &["for=203.0.113.8"]), resolved("203.0.113.9"));
        assert_eq!(resolve(PROXY, &["10.0.0.2"], &["for=203.0.113.8"]), resolved("10.0.0.2"));
        assert_eq!(resolve(PROXY, &["unknown"], &["for=203.0.113.8"]), unparsable_after(PROXY));
        assert_eq!(resolve(PROXY, &[" "], &["for=203.0.113.8"]), resolved("203.0.113.8"));
    }

    #[test]
    fn mapped_addresses_are_converted_to_ipv4() {
        assert_eq!(resolve("::ffff:203.0.113.9", &["1.1.1.1"], &[]), resolved("203.0.113.9"));
        assert_eq!(
            resolve("::ffff:10.0.0.1", &["203.0.113.9, ::ffff:10.0.0.2"], &[]),
            resolved("203.0.113.9")
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
                resolved(client)
            );
        }
        assert_eq!(client_ip(&["::ffff:0:0/96"]), client_ip(&["0.0.0.0/0"]));
        assert_ne!(client_ip(&["::/0"]), client_ip(&["0.0.0.0/0"]));
    }

    #[test]
    fn ipv6_clients_are_grouped_by_prefix() {
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
    fn nat64_addresses_count_by_their_ipv4_address() {
        for (address, group) in [
            ("64:ff9b::203.0.113.9", "203.0.113.9"),
            ("64:ff9b::cb00:710a", "203.0.113.10"),
            ("64:ff9b::", "64:ff9b::/64"),
            // Other prefixes than the well-known one are networks like any other.
            ("64:ff9b:1::203.0.113.9", "64:ff9b:1::/64"),
            ("64:ff9b::1:203.0.113.9", "64:ff9b::/64"),
            ("64:ff9c::203.0.113.9", "64:ff9c::/64"),
        ] {
            assert_eq!(ClientIp::default().group(ip(address)), group, "{address}");
            let behind_proxy = resolve(PROXY, &[address], &[]).address;
            assert_eq!(behind_proxies().group(behind_proxy), group, "{address}");
        }
        // Trust needs the address of the peer itself.
        assert!(!behind_proxies().trusts(ip("64:ff9b::10.0.0.1")));
        assert!(client_ip(&["64:ff9b::10.0.0.1/128"]).trusts(ip("64:ff9b::10.0.0.1")));
    }

    #[test]
    fn only_the_last_64_hops_are_read() {
        let trusted_hops = |count: usize| "10.0.0.3, ".repeat(count - 1) + "10.0.0.2";
        assert_eq!(resolve(PROXY, &[&trusted_hops(64)], &[]), resolved("10.0.0.3"));
        assert_eq!(
            resolve(PROXY, &["203.0.113.9", &trusted_hops(63)], &[]),
            resolved("203.0.113.9")
        );
        assert_eq!(
            resolve(PROXY, &["203.0.113.9", &trusted_hops(64)], &[]),
            unparsable_after("10.0.0.3")
        );
    }

    #[test]
    fn only_the_last_8_kib_are_read() {
        let padded = |bytes: usize| " ".repeat(bytes - ", 10.0.0.2".len()) + ", 10.0.0.2";
        assert_eq!(resolve(PROXY, &[&padded(MAX_BYTES)], &[]), resolved("10.0.0.2"));
        assert_eq!(resolve(PROXY, &[&padded(MAX_BYTES + 1)], &[]), unparsable_after("10.0.0.2"));
        // At the limit, `203.0.113.9` must not be truncated to `3.0.113.9`.
        let cut = format!("203.0.113.9{}", padded(MAX_BYTES - "3.0.113.9".len()));
        assert_eq!(resolve(PROXY, &[&cut], &[]), unparsable_after("10.0.0.2"));
        assert_eq!(
            resolve(PROXY, &["1.1.1.1", &",".repeat(MAX_BYTES)], &[]),
            unparsable_after(PROXY)
        );
        assert_eq!(resolve(PROXY, &vec![""; MAX_BYTES + 1], &[]), unparsable_after(PROXY));
    }

    /// Meaningful tokens in random order, so that inputs get deep into the parser.
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

    /// Returns every address in a line by an independent method: runs of address characters.
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
        fn arbitrary_bytes_resolve_to_the_peer_or_a_hop(
            x_forwarded_for in vec(hostile_bytes(), 0..3), forwarded in vec(hostile_bytes(), 0..3),
            trusted in any::<bool>(),
        ) {
            let peer = ip(if trusted { PROXY } else { "198.51.100.1" });
            let lines = || x_forwarded_for.iter().map(Vec::as_slice);
            let forwarded_lines = || forwarded.iter().map(Vec::as_slice);
            let client = behind_proxies().resolve(peer, lines(), forwarded_lines());
            let mut hops = lines().chain(forwarded_lines()).flat_map(addresses_in);
            let is_hop = trusted && hops.any(|hop| hop == client.address);
            prop_assert!(client.address == peer || is_hop, "{:?}", client);
            prop_assert_eq!(client.address, client.address.to_canonical());
        }

        #[test]
        fn client_headers_never_override_the_hops_of_proxies(
            sent in hostile_bytes(), on_its_own_line in any::<bool>(),
            is_forwarded in any::<bool>(), proxies in 0..4_usize,
        ) {
            let appended = if is_forwarded {
                "for=\"203.0.113.77:80\";host=\"a, \\\"b\"".to_owned()
                    + &", For=10.0.0.2;proto=http".repeat(proxies)
            } else {
                "203.0.113.77:80".to_owned() + &", 10.0.0.2".repeat(proxies)
            };
            let joined = [sent.as_slice(), b", ", appended.as_bytes()].concat();
            let separate = vec![sent.as_slice(), appended.as_bytes()];
            let lines = if on_its_own_line { separate } else { vec![joined.as_slice()] };
            let (x_forwarded_for, forwarded) =
                if is_forwarded { (vec![], lines) } else { (lines, vec![]) };
            let client = behind_proxies().resolve(
                ip(PROXY),
                x_forwarded_for.into_iter(),
                forwarded.into_iter(),
            );
            prop_assert_eq!(client, resolved("203.0.113.77"));
        }
    }
}
