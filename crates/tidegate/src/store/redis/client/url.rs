//! [`Url`] of a Redis server.

use std::net::{IpAddr, Ipv6Addr};

use percent_encoding::percent_decode_str;

use super::connection::Address;
use crate::store::StoreError;

/// Parsed URL.
pub(crate) struct Url {
    pub(crate) address: Address,
    pub(crate) tls: bool,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: i64,
}

/// Nine digits: more databases than any server has.
const MAX_DATABASE: i64 = 999_999_999;
const DEFAULT_PORT: u16 = 6_379;
const URL_SYNTAX: &str =
    "it must look like redis://[user:password@]host[:port][/database], or rediss:// for TLS";

impl Url {
    /// Parses a URL. No error quotes it, because it may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self, StoreError> {
        if url.contains('#') {
            let message = "a Redis URL must have no fragment: #insecure, TLS without \
                           verification, is not supported (write a # in a password as %23)";
            return Err(StoreError::Misconfigured(message.to_owned()));
        }
        let invalid =
            || StoreError::Misconfigured(format!("this is not a Redis URL: {URL_SYNTAX}"));
        Self::parse_parts(url).ok_or_else(invalid)
    }

    fn parse_parts(url: &str) -> Option<Self> {
        if url.chars().any(char::is_control) || url.trim_end() != url {
            return None;
        }
        let (scheme, rest) = url.split_once("://")?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let tls = match scheme {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            "unix" | "redis+unix" | "valkey+unix" => return Self::parse_unix(rest, query),
            _ => return None,
        };
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, address) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        Some(Self {
            address: parse_address(address)?,
            tls,
            user: Some(decoded(user)?).filter(|user| !user.is_empty()),
            password: Some(decoded(password)?).filter(|password| !password.is_empty()),
            database: match (query_option(query, "db"), database.trim_matches('/')) {
                (Some(database), _) => parse_database(&database)?,
                (None, "") => 0,
                (None, database) => parse_database(database)?,
            },
        })
    }

    /// Parses the path of a socket, and its options `db`, `user` and `pass`.
    fn parse_unix(path: &str, query: &str) -> Option<Self> {
        let path = path.strip_prefix("localhost").unwrap_or(path);
        let path = path.starts_with('/').then(|| decoded(path)).flatten()?;
        Some(Self {
            address: Address::Unix(path.into()),
            tls: false,
            user: query_option(query, "user"),
            password: query_option(query, "pass"),
            database: query_option(query, "db").map_or(Some(0), |db| parse_database(&db))?,
        })
    }
}

/// Parses `host[:port]`. No server listens at the address that stands for all of its own.
fn parse_address(text: &str) -> Option<Address> {
    let (host, port) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((ip, port)) => (ip.parse::<Ipv6Addr>().ok()?.to_string(), port),
        None => {
            let (host, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            let is_wrong = |c: char| c.is_whitespace() || "<>[]\\^|@".contains(c);
            if host.is_empty() || host.contains(is_wrong) {
                return None;
            }
            (host.to_owned(), port)
        }
    };
    let port = match port.strip_prefix(':') {
        None if !port.is_empty() => return None,
        None | Some("") => DEFAULT_PORT,
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            digits.parse().ok()?
        }
        Some(_) => return None,
    };
    let is_wildcard = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified());
    (!is_wildcard).then_some(Address::Tcp { host, port })
}

/// Returns the value of the last option of this name.
fn query_option(query: &str, name: &str) -> Option<String> {
    let mut pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let (_, value) = pairs.rfind(|(other, _)| *other == name)?;
    Some(percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
}

fn parse_database(text: &str) -> Option<i64> {
    text.parse().ok().filter(|database| (0..=MAX_DATABASE).contains(database))
}

fn decoded(text: &str) -> Option<String> {
    percent_decode_str(text).decode_utf8().ok().map(String::from)
}

#[cfg(test)]
mod tests {
    use redis::{ConnectionAddr, IntoConnectionInfo as _};

    use super::*;

    /// Parses a URL as the `redis` crate does.
    fn by_the_crate(url: &str) -> Option<(Address, Option<String>, Option<String>, i64)> {
        let info = url.into_connection_info().ok()?;
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Address::tcp(host, *port),
            ConnectionAddr::Unix(path) => Address::Unix(path.clone()),
            other => panic!("{other:?}"),
        };
        let settings = info.redis_settings();
        let text = |text: Option<&str>| text.map(str::to_owned);
        Some((address, text(settings.username()), text(settings.password()), settings.db()))
    }

    /// As for redis-py; the `redis` crate ignores the option, and would use database 0.
    #[test]
    fn database_may_be_an_option_of_the_query() {
        let database = |url| Url::parse(url).map(|url| url.database).ok();
        assert_eq!(database("redis://h?db=3"), Some(3));
        assert_eq!(database("rediss://u:p@h:6380/2?x=1&db=3"), Some(3));
        assert_eq!(database("redis://h/2?x=1"), Some(2));
        assert_eq!(database("redis://h?db=x"), None);
        assert_eq!(database("redis://h/2?db="), None);
    }

    #[test]
    fn urls_mean_what_they_mean_to_the_crate() {
        let valid = [
            "redis://h",
            "redis://h:6380/15",
            "redis://h:/2/",
            "redis://127.0.0.1:0006379//0//",
            "redis://[::1]:6380/",
            "redis://[2001:DB8:0:0::1]",
            "redis://[::ffff:10.0.0.1]",
            "valkey://u@h",
            "redis://u:p@h",
            "redis://:p@h",
            "redis://u:@h",
            "redis://:@h",
            "redis://@h",
            "redis://u:p%40ss%23@h:6380/2",
            "redis://a@b:c:d@e@h",
            "redis://%C3%A9l%C3%A1n:é%zz%@h",
            "redis://u:p+p@h?client=x/y&z",
            "redis://h-1.example_x.com:1?",
            "unix:///run/redis.sock",
            "unix://localhost/run/redis.sock",
            "redis+unix:///run/a%20b.sock?db=2&user=u&pass=p%2B+q",
            "valkey+unix:///r?pass=a&pass=b",
        ];
        for url in valid {
            let parsed = Url::parse_parts(url);
            let parsed = parsed.map(|url| (url.address, url.user, url.password, url.database));
            assert_eq!(parsed, by_the_crate(url), "{url}");
        }
        let invalid = [
            "redis://",
            "redis:h",
            "h:6379",
            "http://h",
            "redis://:6379",
            "redis://u:p@",
            "redis://u:p@:6379/0",
            "redis://h:port",
            "redis://h:65536",
            "redis://h:+1",
            "redis://h:1:2",
            "redis://h/db",
            "redis://h/-",
            "redis://h h",
            "redis://h|h",
            "redis://0.0.0.0",
            "redis://[::]:6379",
            "redis://[::1",
            "redis://[::1]6379",
            "redis://[h]",
            "redis://::1",
            "redis://%ff@h",
            "redis://:%ff@h",
            "unix://h/run/redis.sock",
            "unix://run",
            "unix:///run?db=x",
            "unix:///run?db",
        ];
        for url in invalid {
            assert!(Url::parse(url).is_err(), "{url}");
            assert_eq!(by_the_crate(url), None, "{url}");
        }
        for url in
            ["redis://h/1000000000", "redis://h/-1", "redis://h ", "redis://h\n", "redis://h#x"]
        {
            assert!(Url::parse(url).is_err(), "{url:?}");
        }
    }
}
