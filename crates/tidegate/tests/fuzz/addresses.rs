//! Client addresses and hosts: no header of a client changes what trusted proxies reported.

use std::net::IpAddr;

use tidegate::{ClientIp, Resolved, normalize_host};

use crate::fuzz;

const PROXY: &str = "10.0.0.1";
const SEEDS: [&str; 11] = [
    "64:ff9b::203.0.113.9, 64:ff9b::1:0:5, 64:ff9b::, 10.0.0.2",
    "203.0.113.9, 10.0.0.2",
    "203.0.113.9:80,\t[2001:db8::1]:567 , ::ffff:10.0.0.3",
    "fe80::1%eth0, unknown, 10.0.0.2",
    "for=203.0.113.9;proto=https, for=\"[2001:db8::1]:4711\";by=10.0.0.2",
    "for=\"_hidden\";host=\"a, \\\"b\", for=10.0.0.2",
    "host=\"a, for=8.8.8.8;for=8.8.4.4\";for=203.0.113.9",
    "for=1.2.3.4;for=1.2.3.4, For=\"10.0.0.2\"",
    ",, ,\t,",
    "\\\\\\\"\\\",\"",
    "1.2.3.4.5, 01.2.3.4, 1.2.3, 0x7f.1, [::1, ::1]",
];
const PIECES: [&str; 23] = [
    "64:ff9b::",
    ",",
    ", ",
    ";",
    "\"",
    "\\",
    "\\\"",
    ":",
    "[",
    "]",
    "%",
    " ",
    "=",
    "for=",
    "For=\"",
    "\", ",
    "host=\"a, b\"",
    "unknown",
    "10.0.0.2",
    "203.0.113.9",
    "2001:db8::1",
    "[2001:db8:ffff::1]:80",
    "::ffff:10.0.0.3",
];

fn behind_proxies() -> ClientIp {
    let networks = ["10.0.0.0/8", "2001:db8:ffff::/48"];
    let networks = networks.iter().map(|network| network.parse().expect("a network"));
    ClientIp::new(networks.collect(), 64).expect("a valid prefix")
}

fn resolve(proxies: &ClientIp, lines: &[&[u8]], is_forwarded: bool) -> Resolved {
    let none: &[&[u8]] = &[];
    let (first, second) = if is_forwarded { (none, lines) } else { (lines, none) };
    let peer = PROXY.parse().expect("an address");
    proxies.resolve(peer, first.iter().copied(), second.iter().copied())
}

/// The naive model of `X-Forwarded-For`, for lines without quotes and within the limits.
fn model(proxies: &ClientIp, line: &str) -> Resolved {
    let mut address: IpAddr = PROXY.parse().expect("an address");
    for hop in line.split(',').rev().map(str::trim_ascii).filter(|hop| !hop.is_empty()) {
        let bracketed = hop.strip_prefix('[').and_then(|hop| hop.split_once(']'));
        let (text, port) = match (bracketed, hop.split_once(':')) {
            (Some((text, "")), _) => (text, None),
            (Some((text, port)), _) => (text, Some(port.strip_prefix(':').unwrap_or("x"))),
            (None, Some((text, port))) if !port.contains(':') && text.contains('.') => {
                (text, Some(port))
            }
            _ => (hop, None),
        };
        let is_port = port.is_none_or(|port| {
            let name = port.strip_prefix('_');
            name.map_or(port.parse::<u16>().is_ok() && !port.starts_with('+'), |name| {
                let is_part = |it: char| it.is_ascii_alphanumeric() || "._-".contains(it);
                !name.is_empty() && name.chars().all(is_part)
            })
        });
        let (bare, zone) = text.split_once('%').unwrap_or((text, ""));
        let is_zone = zone.chars().all(|it| it.is_ascii_alphanumeric() || "-._~%".contains(it));
        let parsed = bare.parse::<IpAddr>().ok();
        let is_form = |parsed: &IpAddr| {
            let is_plain_v4 = parsed.is_ipv4() && bracketed.is_none() && bare == text;
            is_port && is_zone && (is_plain_v4 || parsed.is_ipv6())
        };
        let Some(parsed) = parsed.filter(is_form) else {
            return Resolved { address, unparsable: true };
        };
        address = parsed.to_canonical();
        if !proxies.trusts(address) {
            break;
        }
    }
    Resolved { address, unparsable: false }
}

#[test]
fn fuzz_addresses_are_those_of_the_model() {
    let proxies = behind_proxies();
    fuzz::bytes(&SEEDS, &PIECES, |line| {
        let resolved = resolve(&proxies, &[line], false);
        assert_eq!(resolved.address, resolved.address.to_canonical());
        let group = proxies.group(resolved.address);
        let network = group.split('/').next().and_then(|address| address.parse::<IpAddr>().ok());
        let network = network.expect("an address");
        assert_eq!(proxies.group(network), group, "a network is its own group");
        match str::from_utf8(line) {
            Ok(line)
                if !line.contains('"') && line.len() < 8_000 && line.split(',').count() < 64 =>
            {
                assert_eq!(resolved, model(&proxies, line));
            }
            _ => {}
        }
        let used = allocation_counter::measure(|| {
            let _ = resolve(&proxies, &[line], false);
            let _ = resolve(&proxies, &[line], true);
        });
        assert_eq!(used.count_total, 0, "no allocation per request");
    });
}

#[test]
fn fuzz_addresses_of_proxies_win_over_what_a_client_sends() {
    let proxies = behind_proxies();
    let expected =
        Resolved { address: "203.0.113.77".parse().expect("an address"), unparsable: false };
    fuzz::bytes(&SEEDS, &PIECES, |sent| {
        for chain in ["", ", 10.0.0.2", ", 10.0.0.2, 2001:db8:ffff::1"] {
            let plain = format!("203.0.113.77:80{chain}");
            let elements = format!("for=\"203.0.113.77:80\";host=\"a, \\\"b\"{chain}");
            let elements = elements.replace("10.0.0.2", "For=10.0.0.2;proto=http");
            let elements = elements.replace("2001:db8:ffff::1", "for=\"[2001:db8:ffff::1]\"");
            for (appended, is_forwarded) in [(&plain, false), (&elements, true)] {
                let appended = appended.as_bytes();
                let joined = [sent, b", ", appended].concat();
                assert_eq!(resolve(&proxies, &[&joined], is_forwarded), expected);
                assert_eq!(resolve(&proxies, &[sent, appended], is_forwarded), expected);
            }
        }
    });
}

#[test]
fn fuzz_hosts_have_one_normal_form() {
    const HOSTS: [&str; 8] = [
        "API.Example.com:8443",
        "example.com.",
        "[2001:DB8::1]:443",
        "a:80.",
        "::1",
        "a..:1",
        "[::1].",
        "A.:80.",
    ];
    const PARTS: [&str; 11] = ["a", "B", ".", "..", ":", ":80", "[", "]", "::1", "é", " "];
    fuzz::texts(&HOSTS, &PARTS, |host| {
        let normal = normalize_host(host);
        assert_eq!(normalize_host(&normal), normal, "{host:?}");
        assert_eq!(normalize_host(&host.to_ascii_uppercase()), normal, "{host:?}");
        // Names with a dot at the end, and with a port, are the same.
        if !host.contains(':') {
            assert_eq!(normalize_host(&format!("{host}.:443")), normal, "{host:?}");
        }
        if !host.trim_end_matches('.').contains(':') {
            assert_eq!(normalize_host(&format!("{host}:443.")), normal, "{host:?}");
        }
    });
}
