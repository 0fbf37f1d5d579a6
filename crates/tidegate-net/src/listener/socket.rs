//! Listening sockets and their connections: TCP, or a Unix socket.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixSocket, UnixStream};
use tokio_util::either::Either;

use crate::ListenAddress;

/// Length of the queue of connections to accept, of which the system may allow less. A client that
/// finds it full tries again after a second; that of `TcpListener::bind` is 128.
const BACKLOG: u32 = 4096;
/// Address of every peer of a Unix socket. It is a process on this host.
pub(super) const UNIX_PEER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Socket that accepts connections.
pub enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// File of a Unix socket, which is removed on drop.
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode, because another process may have replaced the file.
    id: (u64, u64),
}

/// Accepted connection.
pub(super) type SocketStream = Either<TcpStream, UnixStream>;

impl Socket {
    /// Binds an address. `mode` has the permissions of a Unix socket's file.
    pub async fn bind(address: &ListenAddress, mode: u32) -> anyhow::Result<Self> {
        let bound = match address {
            ListenAddress::Tcp(address) => {
                bind_tcp(*address).map(Self::Tcp).map_err(anyhow::Error::from)
            }
            ListenAddress::Unix(path) => bind_unix(path, mode).await,
        };
        bound.with_context(|| format!("cannot listen on {address}"))
    }

    /// Returns the bound address, with the port that replaced port 0.
    pub fn address(&self) -> io::Result<ListenAddress> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(ListenAddress::Tcp),
            Self::Unix(_, file) => Ok(ListenAddress::Unix(file.path.clone())),
        }
    }

    /// Accepts a connection, with the address of its peer.
    pub(super) async fn accept(&self) -> io::Result<(SocketStream, SocketAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                let _ = stream.set_nodelay(true);
                Ok((Either::Left(stream), address))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                Ok((Either::Right(stream), UNIX_PEER))
            }
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted service may bind the port of connections that have just ended.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn bind_unix(path: &Path, mode: u32) -> anyhow::Result<Socket> {
    let socket = UnixSocket::new_stream()?;
    if let Err(error) = socket.bind(path) {
        match error.kind() {
            io::ErrorKind::AddrInUse => remove_stale(path).await?,
            io::ErrorKind::NotFound => {
                anyhow::bail!("its directory does not exist: create it, owned by this user")
            }
            _ => return Err(error.into()),
        }
        socket.bind(path)?;
    }
    // No client can connect before `listen`, so the permissions apply to every connection.
    let file = SocketFile::new(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(Socket::Unix(socket.listen(BACKLOG)?, file))
}

/// Removes the socket of a process that ended without removing it.
async fn remove_stale(path: &Path) -> anyhow::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    anyhow::ensure!(is_socket, "the file exists and is not a socket: remove it, or use another");
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).context("the old socket cannot be removed")
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(error).context("the socket belongs to another user")
        }
        // A full accept queue is an error, too.
        Ok(_) | Err(_) => anyhow::bail!("another process listens on it: stop it, or use another"),
    }
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), id: id(path)? })
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_burst_of_connections_waits_in_the_queue() {
        let allowed = fs::read_to_string("/proc/sys/net/core/somaxconn").expect("Linux");
        let allowed: usize = allowed.trim().parse().expect("a number");
        let loopback = ListenAddress::Tcp("127.0.0.1:0".parse().expect("an address"));
        let socket = Socket::bind(&loopback, 0o600).await.expect("bound");
        let ListenAddress::Tcp(address) = socket.address().expect("bound") else { unreachable!() };
        // Nothing accepts them: a connection beyond the queue would time out.
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(20));
        let connections: io::Result<Vec<TcpStream>> = (0..allowed.min(500)).map(connect).collect();
        assert_eq!(connections.expect("all fit in the queue").len(), allowed.min(500));
    }
}
