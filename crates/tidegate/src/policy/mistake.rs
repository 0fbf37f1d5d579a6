//! Values in policies that no request has, because they are written for another program: networks,
//! regular expressions, URLs, parameters of a router. A limit that never applies would
//! silently limit nothing.

use std::net::{IpAddr, Ipv6Addr};

use super::KeySource;

/// Characters that no host of a request has.
const NOT_IN_HOSTS: [char; 16] =
    [' ', '\t', '/', '^', '$', '|', '(', ')', '\\', ',', '!', '?', '#', '@', '{', '}'];

/// Returns why no request matches this pattern of an attribute, and what would be right.
pub(super) fn in_pattern(attribute: &KeySource, text: &str) -> Option<String> {
    match attribute.as_str() {
        "method" => in_method(text),
        "host" => in_host(text),
        "path" => in_path(text),
        "ip" => in_address(text).map(|it| match it {
            AddressMistake::Network(network) => format!(
                "networks are not supported here yet, and requests have single addresses: write {}",
                instead_of(&network)
            ),
            AddressMistake::Ipv6(normal) => {
                format!("requests have IPv6 networks as `{normal}`: write it")
            }
        }),
        _ => None,
    }
}

/// Returns why no request counts by this value of an attribute, and what would be right.
pub(super) fn in_key(attribute: &KeySource, value: &str) -> Option<String> {
    if attribute.as_str() != "ip" {
        return None;
    }
    in_address(value).map(|it| match it {
        AddressMistake::Network(network) => format!(
            "networks are not supported here yet, and requests count by single addresses: write {}",
            match network.strip_suffix("/32") {
                Some(address) => format!("`{address}`"),
                None => "an entry for each address, or another policy with `match.ip`".to_owned(),
            }
        ),
        AddressMistake::Ipv6(normal) => {
            format!("requests count by IPv6 networks as `{normal}`: write it")
        }
    })
}

/// Returns what was probably meant by a path pattern that is valid, but matches only paths with the
/// characters of a parameter or of a regular expression.
pub(super) fn meant_by_path(text: &str) -> Option<String> {
    let is_parameter = |segment: &str| {
        let enclosed = |open, close| segment.starts_with(open) && segment.ends_with(close);
        (segment.starts_with(':') && segment.len() > 1) || enclosed('{', '}') || enclosed('<', '>')
    };
    if text.contains(".*") || text.ends_with('$') {
        return Some(without_expression(text));
    }
    let segments = text.split('/').map(|segment| if is_parameter(segment) { "*" } else { segment });
    let meant = segments.collect::<Vec<_>>().join("/");
    (meant != text).then_some(meant)
}

fn in_method(text: &str) -> Option<String> {
    let is_letter = |it: char| it.is_ascii_alphanumeric() || "-_*".contains(it);
    if !text.is_empty() && text.chars().all(is_letter) {
        return None;
    }
    if text.starts_with('!') {
        let reason = "a pattern excludes nothing: list the methods to limit, such as `[POST, PUT]`";
        return Some(reason.to_owned());
    }
    let words = text.split(|it| !is_letter(it)).filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(str::to_ascii_uppercase).collect();
    Some(match words.as_slice() {
        [] => "a method is one word: write it, such as `GET`".to_owned(),
        [word] => format!("a method is one word: write `{word}`"),
        words => format!("a method is one word: write a list, `[{}]`", words.join(", ")),
    })
}

fn in_host(text: &str) -> Option<String> {
    if !text.contains(NOT_IN_HOSTS) {
        return None;
    }
    let without_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let host = without_scheme.split('/').next().unwrap_or_default();
    if host != text && !host.is_empty() && in_host(host).is_none() {
        return Some(format!("a host has neither scheme nor path: write `{host}`"));
    }
    let reason = "a host is a name without other characters, not an expression: write \
                  `example.com` or `*.example.com`, or a list of some";
    Some(reason.to_owned())
}

fn in_path(text: &str) -> Option<String> {
    if text.starts_with('^') {
        let meant = without_expression(text);
        return Some(format!(
            "a path is no regular expression: write a pattern, such as `{meant}`"
        ));
    }
    if text.starts_with("!/") {
        return Some("a pattern excludes nothing: list the paths to limit".to_owned());
    }
    let (scheme, rest) = text.split_once("://")?;
    let is_scheme = |it: char| it.is_ascii_alphanumeric() || "+.-".contains(it);
    if scheme.is_empty() || !scheme.chars().all(is_scheme) {
        return None;
    }
    let path = rest.find('/').map_or("/**", |start| &rest[start..]);
    let reason = format!("a path has neither scheme nor host: write `{path}`");
    Some(format!("{reason}, and the host in `match.host`"))
}

/// Returns the pattern that a simple regular expression of a path stands for.
fn without_expression(text: &str) -> String {
    let text = text.trim_start_matches('^').trim_end_matches('$');
    let text = text.replace("/.*", "/**").replace("[^/]*", "*").replace("[^/]+", "*");
    let text = text.replace(".*", "**").replace(".+", "**").replace('\\', "");
    if text.contains(['(', '[', '|', '?', '+', '{']) { "/api/**".to_owned() } else { text }
}

/// Address that no request has.
enum AddressMistake {
    /// IPv4 network.
    Network(String),
    /// IPv6 network in another spelling than this one, that of requests.
    Ipv6(String),
}

fn in_address(text: &str) -> Option<AddressMistake> {
    let (address, prefix) = text.split_once('/')?;
    if !address.contains(':') {
        return Some(AddressMistake::Network(text.to_owned()));
    }
    let address: Ipv6Addr = address.parse().ok()?;
    let prefix: u32 = prefix.parse().ok().filter(|prefix| *prefix <= 128)?;
    let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
    let normal = format!("{}/{prefix}", Ipv6Addr::from_bits(address.to_bits() & mask));
    (normal != text).then_some(AddressMistake::Ipv6(normal))
}

/// Returns the patterns to write instead of an IPv4 network.
fn instead_of(network: &str) -> String {
    let address = |text: &str| text.parse::<IpAddr>().is_ok();
    let (start, prefix) = network.split_once('/').unwrap_or((network, ""));
    let bytes: Vec<&str> = start.split('.').collect();
    match prefix {
        "32" if address(start) => format!("`{start}`"),
        "8" | "16" | "24" if address(start) => {
            let fixed = prefix.parse::<usize>().unwrap_or_default() / 8;
            format!("`{}.*`", bytes[..fixed].join("."))
        }
        _ => "the addresses, or patterns such as `10.1.*`".to_owned(),
    }
}
