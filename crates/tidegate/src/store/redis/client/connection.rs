//! [`Address`] of a node, the [`ConnectionOptions`] (TLS, user, database) that all data nodes, or
//! all sentinels, share, and an established [`RedisConnection`].

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use super::error::{NodeError, one_line};
use super::resp::{Command, RedisError, Value};
use super::server_clock::ServerClock;
use super::tls::{self, ClientTls};
use super::wire::{Driver, Wire};

/// Address that a node listens on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// TLS, credentials and database of a connection. Not `Debug`, because it holds the password.
#[derive(Clone, Default)]
pub(crate) struct ConnectionOptions {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: i64,
    pub(crate) tls: Option<Arc<ClientTls>>,
}

/// Options of all connections to come. A renewal replaces them; open connections go on.
pub(crate) type SharedOptions = Arc<ArcSwap<ConnectionOptions>>;

/// Established connection. Dropping it closes the socket.
pub(crate) struct RedisConnection {
    pub(crate) wire: Wire,
    pub(crate) driver: AbortHandle,
    pub(crate) connected_at: Instant,
    /// Clock of the connected server; after a reconnect the address may lead to another server.
    pub(crate) clock: ServerClock,
}

impl RedisConnection {
    /// Connects, and sends commands right after the handshake, in one pipeline. Returns their
    /// replies, and the task that ends with the connection. The error of a single command is its
    /// reply.
    pub(crate) async fn open(
        address: &Address,
        options: &ConnectionOptions,
        commands: Vec<Command>,
    ) -> Result<(Self, JoinHandle<()>, Vec<Value>), NodeError> {
        let failed = |error: RedisError| options.handshake_error(address, &error);
        let (wire, driver) = match address.open(options).await {
            Ok(Some(opened)) => opened,
            Ok(None) => return Err(NodeError::misconfigured(address, tls::NO_TLS)),
            Err(error) => return Err(failed(error.into())),
        };
        let driver = tokio::spawn(driver);
        let connection = Self {
            wire,
            driver: driver.abort_handle(),
            connected_at: Instant::now(),
            clock: ServerClock::new(),
        };
        let mut pipeline = options.handshake_commands();
        let handshake_length = pipeline.len();
        pipeline.extend(commands);
        let mut replies = match connection.wire.send(&pipeline).await {
            Ok(replies) => replies,
            // A server with TLS closes a connection without TLS, and gives no reason.
            Err(_) if address.requires_tls(options).await => {
                return Err(NodeError::misconfigured(address, tls::ONLY_TLS));
            }
            Err(error) => return Err(failed(error)),
        };
        let answers = replies.split_off(handshake_length.min(replies.len()));
        for reply in replies {
            reply.into_result().map_err(failed)?;
        }
        Ok((connection, driver, answers))
    }
}

impl Drop for RedisConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Sends commands to a node in one pipeline, on a temporary connection. The error of a single
/// command is its reply.
pub(crate) async fn query_all_once(
    address: &Address,
    options: &ConnectionOptions,
    commands: Vec<Command>,
    query_timeout: Duration,
) -> Result<Vec<Value>, NodeError> {
    match timeout(query_timeout, RedisConnection::open(address, options, commands)).await {
        Ok(opened) => opened.map(|(_, _, replies)| replies),
        Err(_) => Err(NodeError::new(address, &format!("no answer within {query_timeout:?}"))),
    }
}

/// Sends one command to a node, on a temporary connection.
pub(crate) async fn query_once(
    address: &Address,
    options: &ConnectionOptions,
    command: Command,
    query_timeout: Duration,
) -> Result<Value, NodeError> {
    let mut replies = query_all_once(address, options, vec![command], query_timeout).await?;
    let reply = replies.pop().unwrap_or(Value::Nil).into_result();
    reply.map_err(|error| NodeError::during_handshake(address, &error))
}

impl Address {
    pub(crate) fn tcp(host: &str, port: u16) -> Self {
        Self::Tcp { host: host.to_owned(), port }
    }

    /// Parses `host:port` from a reply of the node at `self`. A node may leave out the host, which
    /// then is its own.
    pub(crate) fn parse_relative(&self, text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        Some(self.resolve_relative(
            host.trim_start_matches('[').trim_end_matches(']'),
            port.parse().ok()?,
        ))
    }

    /// Returns the address of a node as the node at `self` reports it.
    pub(crate) fn resolve_relative(&self, host: &str, port: u16) -> Self {
        match (host, self) {
            ("" | "?", Self::Tcp { host, .. }) => Self::tcp(host, port),
            _ => Self::tcp(host, port),
        }
    }

    /// Opens a connection, without the [handshake](ConnectionOptions::handshake_commands). Returns
    /// `None` if TLS is expected, and the server speaks none on this port.
    async fn open(&self, options: &ConnectionOptions) -> io::Result<Option<(Wire, Driver)>> {
        match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let Some(tls) = &options.tls else { return Ok(Some(Wire::new(stream))) };
                let name = tls
                    .name_of(self, host)
                    .map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
                let encrypted = tls::handshake(&tls.config, name, (host, *port), stream).await?;
                Ok(encrypted.map(Wire::new))
            }
            #[cfg(unix)]
            Self::Unix(path) => Ok(Some(Wire::new(tokio::net::UnixStream::connect(path).await?))),
            #[cfg(not(unix))]
            Self::Unix(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// Returns whether the port speaks TLS, although the URL is `redis://`.
    async fn requires_tls(&self, options: &ConnectionOptions) -> bool {
        match self {
            Self::Tcp { host, port } => options.tls.is_none() && tls::speaks_tls(host, *port).await,
            Self::Unix(_) => false,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl ConnectionOptions {
    /// Replaces the credentials and certificates of `shared` by these.
    pub(crate) fn renew(mut self, shared: &SharedOptions) {
        let current = shared.load();
        self.database = current.database;
        if let (Some(tls), Some(current)) = (&self.tls, &current.tls) {
            tls.adopt_names(current);
        }
        shared.store(Arc::new(self));
    }

    /// Returns the commands that a new connection starts with.
    pub(crate) fn handshake_commands(&self) -> Vec<Command> {
        let mut commands = Vec::new();
        if let Some(password) = &self.password {
            let auth = Command::new("AUTH");
            let auth = self.user.iter().fold(auth, Command::arg);
            commands.push(auth.arg(password));
        }
        if self.database != 0 {
            commands.push(Command::new("SELECT").arg(self.database.to_string()));
        }
        commands
    }

    /// Returns the error of a connection that fails before its handshake is done. A server that
    /// rejects our certificate reports it only after the TLS handshake, if at all.
    fn handshake_error(&self, address: &Address, error: &RedisError) -> NodeError {
        let is_dropped = matches!(
            error,
            RedisError::Io(
                ErrorKind::BrokenPipe
                    | ErrorKind::ConnectionReset
                    | ErrorKind::ConnectionAborted
                    | ErrorKind::UnexpectedEof
                    | ErrorKind::NotConnected,
                _
            )
        );
        if self.tls.is_some() && is_dropped {
            let hint = "(by TLS: does the server require another client certificate?)";
            return NodeError::new(address, &format!("{} {hint}", one_line(error)));
        }
        NodeError::during_handshake(address, error)
    }
}

/// Returns whether a reply of ROLE is that of a primary.
pub(crate) fn is_primary_role(role: &Value) -> bool {
    let Value::Array(parts) = role else { return false };
    parts.first().and_then(Value::text) == Some("master")
}

/// Parses a reply of TIME to microseconds.
pub(crate) fn parse_time(reply: &Value) -> Option<i64> {
    let Value::Array(parts) = reply else { return None };
    // Dragonfly returns integers.
    let number = |part: &Value| match part {
        Value::Integer(number) => Some(*number),
        part => part.text()?.parse().ok(),
    };
    let [seconds, micros] = parts.as_slice() else { return None };
    // Envoy's proxy returns all microseconds since 1970 as the second number.
    let micros = number(micros).filter(|micros| (0..1_000_000).contains(micros))?;
    number(seconds)?.checked_mul(1_000_000)?.checked_add(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reported_address_without_a_host_is_on_the_same_host() {
        let asked = Address::tcp("10.0.0.1", 7_000);
        assert_eq!(asked.parse_relative("10.0.0.2:7001"), Some(Address::tcp("10.0.0.2", 7_001)));
        assert_eq!(asked.parse_relative(":7001"), Some(Address::tcp("10.0.0.1", 7_001)));
        assert_eq!(asked.parse_relative("?:7001"), Some(Address::tcp("10.0.0.1", 7_001)));
        assert_eq!(asked.parse_relative("::1:7001"), Some(Address::tcp("::1", 7_001)));
        assert_eq!(asked.parse_relative("nonsense"), None);
        assert_eq!(Address::tcp("::1", 7_001).to_string(), "[::1]:7001");
    }

    #[test]
    fn only_plausible_times_are_parsed() {
        let reply = |seconds: &str, micros: &str| {
            let bulk = |text: &str| Value::String(text.as_bytes().to_vec());
            parse_time(&Value::Array(vec![bulk(seconds), bulk(micros)]))
        };
        assert_eq!(reply("1794828888", "288879"), Some(1_794_828_888_288_879));
        assert_eq!(reply("1794828888", "1794828888288879"), None);
        assert_eq!(reply("9223372036854775807", "0"), None);
        assert_eq!(reply("now", "0"), None);
    }
}
