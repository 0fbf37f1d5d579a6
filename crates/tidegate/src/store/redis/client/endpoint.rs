//! [`Address`] of a node, and the [`ConnectionOptions`] (TLS, user, database) that all data nodes,
//! or all sentinels, share.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::net::TcpStream;

use super::error::NodeError;
use super::resp::{Command, RedisError};
use super::scheme::{self, Handshake};
use super::tls::ClientTls;
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

/// Reason why no connection was opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    Failed(RedisError),
    /// The scheme of the URL is wrong for this port.
    WrongScheme(&'static str),
}

impl<E: Into<RedisError>> From<E> for OpenError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
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

    /// Opens a connection, without the [handshake](ConnectionOptions::handshake_commands).
    pub(crate) async fn open(
        &self,
        options: &ConnectionOptions,
    ) -> Result<(Wire, Driver), OpenError> {
        match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let Some(tls) = &options.tls else { return Ok(Wire::new(stream)) };
                let name = tls
                    .name_of(self, host)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                match scheme::handshake(&tls.config, name, (host, *port), stream).await? {
                    Handshake::Done(stream) => Ok(Wire::new(stream)),
                    Handshake::Plain => Err(OpenError::WrongScheme(scheme::NO_TLS)),
                }
            }
            #[cfg(unix)]
            Self::Unix(path) => Ok(Wire::new(tokio::net::UnixStream::connect(path).await?)),
            #[cfg(not(unix))]
            Self::Unix(_) => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
        }
    }

    /// Returns the error of a `redis://` URL for a port with TLS. The server closes such a
    /// connection without an answer.
    pub(crate) async fn wrong_scheme(&self, options: &ConnectionOptions) -> Option<NodeError> {
        match self {
            Self::Tcp { host, port }
                if options.tls.is_none() && scheme::speaks_tls(host, *port).await =>
            {
                Some(NodeError::misconfigured(self, scheme::ONLY_TLS))
            }
            _ => None,
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
}
