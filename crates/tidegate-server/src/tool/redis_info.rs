//! Parsers for INFO and other replies of servers.

use std::fmt::Display;

use tidegate::store::redis::Reply;

/// Parsed reply of INFO: lines of `name:value` under headings.
#[derive(Debug, Default)]
pub(crate) struct Info(Vec<(String, String)>);

/// Replica as its primary reports it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Replica {
    pub(crate) address: String,
    pub(crate) online: bool,
    /// Seconds since its last acknowledgement.
    pub(crate) lag: u64,
}

impl Info {
    pub(crate) fn parse(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        let pair = |line: &str| {
            line.split_once(':').map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        Self(lines.filter_map(pair).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Returns the server and its version in readable form.
    pub(crate) fn server(&self) -> Option<String> {
        match self.text("valkey_version") {
            Some(version) => Some(format!("Valkey {version}")),
            None => self.text("redis_version").map(|version| format!("Redis {version}")),
        }
    }

    /// Returns the major and minor version of Redis, or of the Redis that it is compatible with.
    pub(crate) fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.text("redis_version")?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// Returns the connected replicas.
    pub(crate) fn replicas(&self) -> Vec<Replica> {
        let is_replica = |name: &str| {
            name.strip_prefix("slave")
                .is_some_and(|number| !number.is_empty() && number.parse::<u32>().is_ok())
        };
        self.0
            .iter()
            .filter(|(name, _)| is_replica(name))
            .filter_map(|(_, value)| Replica::parse(value))
            .collect()
    }
}

impl Replica {
    /// Parses a value such as `ip=10.0.0.2,port=6379,state=online,offset=14,lag=1`.
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
        };
        let address = address(field("ip")?, field("port")?);
        let lag = field("lag").and_then(|lag| lag.parse().ok()).unwrap_or(0);
        Some(Self { address, online: field("state") == Some("online"), lag })
    }
}

/// Returns the names and values in a reply of CONFIG GET, ACL GETUSER or SENTINEL MASTERS.
pub(crate) fn pairs(reply: &Reply) -> Vec<(&str, &str)> {
    let Reply::List(parts) = reply else { return Vec::new() };
    let (pairs, _) = parts.as_chunks::<2>();
    pairs.iter().filter_map(|[name, value]| Some((text(name)?, text(value)?))).collect()
}

/// Returns the value of a name among such pairs.
pub(crate) fn value<'a>(pairs: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    pairs.iter().find(|(found, _)| *found == name).map(|(_, value)| *value)
}

/// Returns the address of a host, which may be an address of IPv6.
pub(crate) fn address(host: &str, port: impl Display) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns whether an error says that the server does not have the command: it was renamed or
/// disabled, or a managed service does not offer it.
pub(crate) fn is_absent_command(error: &str) -> bool {
    const REASONS: [&str; 6] = [
        "unknown command",
        "unknown subcommand",
        "not available",
        "not supported",
        "unsupported",
        "disabled",
    ];
    let error = error.to_lowercase();
    error.starts_with("err ") && REASONS.iter().any(|reason| error.contains(reason))
}

fn text(reply: &Reply) -> Option<&str> {
    if let Reply::Text(text) = reply { Some(text) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS: &str = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n\r\n\
                         # Replication\r\nrole:master\r\nconnected_slaves:2\r\n\
                         slave0:ip=10.0.0.2,port=6379,state=online,offset=14,lag=1\r\n\
                         slave1:ip=2001:db8::2,port=6380,state=wait_bgsave,offset=0,lag=0\r\n\
                         slave_expires:3\r\nexecutable:/usr/bin/redis:server\r\n";

    #[test]
    fn info_fields_are_found_by_name() {
        let info = Info::parse(REDIS);
        assert_eq!(info.server().as_deref(), Some("Redis 7.0.15"));
        assert_eq!(info.version(), Some((7, 0)));
        assert_eq!(info.number("connected_slaves"), Some(2));
        assert_eq!(info.text("executable"), Some("/usr/bin/redis:server"));
        assert_eq!(info.text("# Server"), None);
        assert_eq!(info.number("redis_mode"), None);
    }

    #[test]
    fn replicas_are_parsed_with_their_state() {
        let replica =
            |address: &str, online, lag| Replica { address: address.to_owned(), online, lag };
        let expected = [replica("10.0.0.2:6379", true, 1), replica("[2001:db8::2]:6380", false, 0)];
        assert_eq!(Info::parse(REDIS).replicas(), expected);
    }

    #[test]
    fn valkey_is_recognized_with_its_compatible_redis_version() {
        let info =
            Info::parse("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.0\r\n");
        assert_eq!(info.server().as_deref(), Some("Valkey 9.1.0"));
        assert_eq!(info.version(), Some((7, 2)));
    }

    #[test]
    fn malformed_info_is_ignored() {
        for text in
            ["", "no colon", "slave0:ip=", "slave0:port=6379", ":\r\n::", "redis_version:seven"]
        {
            let info = Info::parse(text);
            assert_eq!((info.version(), info.replicas()), (None, Vec::new()), "{text}");
        }
    }

    #[test]
    fn absent_commands_differ_from_forbidden_ones() {
        for error in [
            "ERR unknown command 'CONFIG', with args beginning with: 'GET' ",
            "ERR Command is not available: 'CONFIG'. See https://example.com",
            "ERR unsupported command 'CONFIG'",
        ] {
            assert!(is_absent_command(error), "{error}");
        }
        for error in [
            "NOPERM this user has no permissions to run the 'config|get' command",
            "LOADING Redis is loading the dataset in memory",
            "ERR wrong number of arguments for 'config|get' command",
        ] {
            assert!(!is_absent_command(error), "{error}");
        }
    }
}
