//! Networks of addresses, such as `10.0.0.0/8`: how policies write them, and the longest prefix
//! that contains an address.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

use crate::client_ip::{is_nat64, unmapped};

/// Parses an address or a network, as requests of clients with these groups of IPv6 have it. An
/// IPv4-mapped address is IPv4, and bits beyond the prefix are dropped. The error says what would
/// be right.
pub(super) fn parse(text: &str, ipv6_prefix: u8) -> Result<IpNet, String> {
    let network = match text.parse::<IpAddr>() {
        Ok(address) => Ok(IpNet::from(address)),
        Err(_) => text.parse::<IpNet>(),
    };
    let network = network.map_err(|_| {
        "it is neither an address nor a network: write `192.0.2.1`, `10.0.0.0/8` or \
         `2001:db8::/32`"
            .to_owned()
    })?;
    let IpNet::V6(ipv6) = unmapped(network) else { return Ok(unmapped(network).trunc()) };
    if ipv6.prefix_len() >= 96 && is_nat64(ipv6.addr()) {
        return Err("requests have the IPv4 address that NAT64 embeds: write that".to_owned());
    }
    if ipv6.prefix_len() > ipv6_prefix {
        let bits = u128::MAX << (128 - u32::from(ipv6_prefix));
        let group = Ipv6Addr::from_bits(ipv6.addr().to_bits() & bits);
        return Err(format!(
            "it is inside the group {group}/{ipv6_prefix}, whose clients count together: write \
             `{group}/{ipv6_prefix}`, or set client_ip.ipv6_prefix to {}",
            ipv6.prefix_len()
        ));
    }
    Ok(IpNet::V6(ipv6.trunc()))
}

/// Returns the text of an address, or of the network of an IPv6 group, as requests have it.
pub(super) fn group(network: IpNet) -> String {
    match network {
        IpNet::V4(network) if network.prefix_len() == 32 => network.addr().to_string(),
        network => network.to_string(),
    }
}

/// Returns whether this is a single IPv4 address.
pub(super) fn is_address(network: &IpNet) -> bool {
    network.addr().is_ipv4() && network.prefix_len() == 32
}

/// Networks, each with a number, by the addresses that they contain.
#[derive(Debug, Clone, Default)]
pub(super) struct Networks {
    ipv4: Ranges<u32>,
    ipv6: Ranges<u128>,
}

impl Networks {
    pub(super) fn new(networks: impl Iterator<Item = (IpNet, u32)>) -> Self {
        let (mut ipv4, mut ipv6) = (Vec::new(), Vec::new());
        for (network, number) in networks {
            match network {
                IpNet::V4(it) => {
                    ipv4.push((it.network().to_bits(), it.broadcast().to_bits(), number));
                }
                IpNet::V6(it) => {
                    ipv6.push((it.network().to_bits(), it.broadcast().to_bits(), number));
                }
            }
        }
        let after = |last: u32| last.checked_add(1);
        Self { ipv4: Ranges::new(ipv4, after), ipv6: Ranges::new(ipv6, |last| last.checked_add(1)) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ipv4.starts.is_empty() && self.ipv6.starts.is_empty()
    }

    /// Returns the number of the longest network that contains the address. An IPv6 address may
    /// have the prefix of its group.
    pub(super) fn find(&self, value: &str) -> Option<u32> {
        let address = value.split_once('/').map_or(value, |(address, _)| address);
        match address.parse::<IpAddr>().ok()?.to_canonical() {
            IpAddr::V4(address) => self.ipv4.find(address.to_bits()),
            IpAddr::V6(address) => self.ipv6.find(address.to_bits()),
        }
    }
}

/// Addresses in ranges without overlap, each with the number of its longest network. Either
/// networks are disjoint or one contains the other, so a longer one splits a shorter one.
#[derive(Debug, Clone, Default)]
struct Ranges<A> {
    /// First address of each range, ascending.
    starts: Vec<A>,
    numbers: Vec<Option<u32>>,
}

impl<A: Ord + Copy + Default> Ranges<A> {
    /// Creates the ranges of networks: first and last address, and number. `after` returns the next
    /// address.
    fn new(mut networks: Vec<(A, A, u32)>, after: impl Fn(A) -> Option<A>) -> Self {
        networks.sort_unstable_by_key(|(first, last, _)| (*first, Reverse(*last)));
        let mut ranges = Self::default();
        let mut open = Vec::new();
        for (first, last, number) in networks {
            ranges.close(&mut open, Some(first), &after);
            ranges.push(first, Some(number));
            open.push((last, number));
        }
        ranges.close(&mut open, None, &after);
        ranges
    }

    /// Ends the open networks whose last address is before `next`. After each, the one around it
    /// goes on.
    fn close(&mut self, open: &mut Vec<(A, u32)>, next: Option<A>, after: impl Fn(A) -> Option<A>) {
        while let Some((last, _)) = open.last().copied()
            && next.is_none_or(|next| last < next)
        {
            open.pop();
            let around = open.last().map(|(_, number)| *number);
            if let Some(start) = after(last) {
                self.push(start, around);
            }
        }
    }

    fn push(&mut self, start: A, number: Option<u32>) {
        if self.starts.last() == Some(&start) {
            self.numbers.pop();
        } else {
            self.starts.push(start);
        }
        self.numbers.push(number);
    }

    fn find(&self, address: A) -> Option<u32> {
        let after = self.starts.partition_point(|start| *start <= address);
        self.numbers[after.checked_sub(1)?]
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn networks(texts: &[&str]) -> Networks {
        let parsed = (0..).zip(texts).map(|(number, text)| {
            (parse(text, 64).unwrap_or_else(|error| panic!("{text}: {error}")), number)
        });
        Networks::new(parsed)
    }

    #[test]
    fn longest_prefix_wins_in_any_order() {
        let found = networks(&["10.1.2.0/24", "0.0.0.0/0", "10.0.0.0/8", "10.1.2.3", "::/0"]);
        for (address, number) in [
            ("10.1.2.3", Some(3)),
            ("10.1.2.4", Some(0)),
            ("10.1.3.0", Some(2)),
            ("10.255.255.255", Some(2)),
            ("11.0.0.0", Some(1)),
            ("255.255.255.255", Some(1)),
            ("::ffff:10.1.2.9", Some(0)),
            ("2001:db8::/64", Some(4)),
            ("ffff:ffff:ffff:ffff::/64", Some(4)),
            ("10.1.2", None),
            ("", None),
        ] {
            assert_eq!(found.find(address), number, "{address}");
        }
        assert_eq!(networks(&["::ffff:10.0.0.0/104"]).find("10.9.9.9"), Some(0));
        assert_eq!(networks(&["::/0"]).find("10.9.9.9"), None, "IPv4 is another family");
        assert_eq!(networks(&["10.0.0.0/8"]).find("9.255.255.255"), None);
        assert_eq!(networks(&["10.0.0.0/8"]).find("11.0.0.0"), None);
        assert_eq!(networks(&["10.9.9.9/8"]).find("10.1.1.1"), Some(0));
    }

    #[test]
    fn networks_that_no_request_has_are_refused() {
        for (text, part) in [
            ("10.0.0.0/33", "neither an address"),
            ("10.0.0/8", "neither an address"),
            ("010.0.0.1", "neither an address"),
            ("internal", "neither an address"),
            ("", "neither an address"),
            ("2001:db8::1", "write `2001:db8::/64`, or set client_ip.ipv6_prefix to 128"),
            ("2001:db8:0:1:2::/80", "write `2001:db8:0:1::/64`"),
            ("::1", "write `::/64`"),
            ("64:ff9b::/96", "NAT64"),
        ] {
            let error = parse(text, 64).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(parse("2001:db8::1", 128).is_ok());
    }

    proptest! {
        #[test]
        fn ranges_find_what_a_search_of_all_networks_finds(
            list in vec((any::<u8>(), any::<u8>(), 0_u8..=16), 0..20), high in any::<u8>(), low in any::<u8>(),
        ) {
            let network = |(number, (a, b, prefix)): (u32, &(u8, u8, u8))| {
                (IpNet::new(IpAddr::from([*a, *b, 0, 0]), *prefix).expect("short").trunc(), number)
            };
            let list: Vec<_> = (0..).zip(&list).map(network).collect();
            let address = IpAddr::from([high, low, 7, 7]);
            let containing = list.iter().filter(|(network, _)| network.contains(&address));
            let longest = containing.map(|(network, _)| network.prefix_len()).max();
            let found = Networks::new(list.iter().copied()).find(&address.to_string());
            prop_assert_eq!(found.map(|number| list[number as usize].0.prefix_len()), longest);
        }
    }
}
