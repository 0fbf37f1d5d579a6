//! How a node is reached: its [`Address`], and the [`Access`] that all nodes of one kind share
//! (TLS, user, database).

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, RedisConnectionInfo, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

/// Where a node listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// What it takes to be let in. Never shown: it holds the password.
#[derive(Clone, Default)]
pub(super) struct Access {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
    pub(super) tls: Option<Arc<ClientConfig>>,
}

/// What drives a connection; it ends when the connection does.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How many calls may gather before a caller has to wait for its turn to send.
const CALLS_UNDER_WAY: usize = 1_024;

impl Address {
    pub(super) fn tcp(host: &str, port: u16) -> Self {
        Self::Tcp { host: host.to_owned(), port }
    }

    /// `host:port` as a node says it, which may leave out the host: then it means the one we asked.
    pub(super) fn told_by(&self, text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        Some(self.beside(host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?))
    }

    /// The node of this host and port, as the node at `self` knows it.
    pub(super) fn beside(&self, host: &str, port: u16) -> Self {
        match (host, self) {
            ("" | "?", Self::Tcp { host, .. }) => Self::tcp(host, port),
            _ => Self::tcp(host, port),
        }
    }

    /// Opens a connection; whoever answers has not been greeted yet.
    pub(super) async fn open(
        &self,
        access: &Access,
    ) -> Result<(MultiplexedConnection, Driver), RedisError> {
        match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                match &access.tls {
                    None => speak(stream).await,
                    Some(config) => {
                        let name = ServerName::try_from(host.clone())
                            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                        speak(TlsConnector::from(Arc::clone(config)).connect(name, stream).await?)
                            .await
                    }
                }
            }
            #[cfg(unix)]
            Self::Unix(path) => speak(tokio::net::UnixStream::connect(path).await?).await,
            #[cfg(not(unix))]
            Self::Unix(_) => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
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

impl Access {
    /// The commands that a new connection starts with. Not left to the `redis` crate, which hides
    /// what a server answers.
    pub(super) fn greeting(&self) -> Vec<Cmd> {
        let mut commands = Vec::new();
        if let Some(password) = &self.password {
            let mut auth = redis::cmd("AUTH");
            if let Some(user) = &self.user {
                auth.arg(user);
            }
            auth.arg(password);
            commands.push(auth);
        }
        if self.database != 0 {
            let mut select = redis::cmd("SELECT");
            select.arg(self.database);
            commands.push(select);
        }
        commands
    }
}

async fn speak(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(MultiplexedConnection, Driver), RedisError> {
    // Every call has a deadline of its own; a second one here would only be in the way.
    let config = AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_pipeline_buffer_size(CALLS_UNDER_WAY);
    let silent = RedisConnectionInfo::default().set_skip_set_lib_name();
    let (connection, driver) =
        MultiplexedConnection::new_with_config(&silent, stream, config).await?;
    Ok((connection, Box::pin(driver)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_may_leave_out_the_host_that_we_know() {
        let asked = Address::tcp("10.0.0.1", 7_000);
        assert_eq!(asked.told_by("10.0.0.2:7001"), Some(Address::tcp("10.0.0.2", 7_001)));
        assert_eq!(asked.told_by(":7001"), Some(Address::tcp("10.0.0.1", 7_001)));
        assert_eq!(asked.told_by("?:7001"), Some(Address::tcp("10.0.0.1", 7_001)));
        assert_eq!(asked.told_by("::1:7001"), Some(Address::tcp("::1", 7_001)));
        assert_eq!(asked.told_by("nonsense"), None);
        assert_eq!(Address::tcp("::1", 7_001).to_string(), "[::1]:7001");
    }
}
