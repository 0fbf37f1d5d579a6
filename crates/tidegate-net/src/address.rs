//! [`ListenAddress`]: address of a listener.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Maximum length of the path of a Unix socket, in bytes: that of Linux, without the final NUL.
const MAX_UNIX_PATH_BYTES: usize = 107;

/// Address of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    Tcp(SocketAddr),
    /// Absolute path of a Unix socket.
    Unix(PathBuf),
}

/// Reason why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenAddressError {
    #[error(
        "{0:?} is not an address: write it like 127.0.0.1:8080, [::1]:8080 or \
         unix:/run/tidegate/http.sock"
    )]
    Malformed(String),
    #[error("the path of a Unix socket must be absolute, such as unix:/run/tidegate/http.sock")]
    RelativePath,
    #[error(
        "the path of a Unix socket has {0} bytes: at most {MAX_UNIX_PATH_BYTES} are allowed, such \
         as unix:/run/tidegate/http.sock"
    )]
    LongPath(usize),
}

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, ListenAddressError> {
        let Some(path) = text.strip_prefix("unix:") else {
            let address = text.parse().map_err(|_| ListenAddressError::Malformed(text.to_owned()));
            return address.map(Self::Tcp);
        };
        if !Path::new(path).is_absolute() || path.contains('\0') {
            return Err(ListenAddressError::RelativePath);
        }
        if path.len() > MAX_UNIX_PATH_BYTES {
            return Err(ListenAddressError::LongPath(path.len()));
        }
        Ok(Self::Unix(PathBuf::from(path)))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl ListenAddress {
    /// Returns the address for the startup message: a URL, or the Unix socket.
    pub fn shown(&self, scheme: &str) -> String {
        match self {
            Self::Tcp(_) => self.url(scheme, ""),
            Self::Unix(_) => self.to_string(),
        }
    }

    /// Returns the URL of a path on this listener. A Unix socket has no host, so any name will do.
    pub fn url(&self, scheme: &str, path: &str) -> String {
        match self {
            Self::Tcp(address) => format!("{scheme}://{address}{path}"),
            Self::Unix(_) => format!("{scheme}://localhost{path}"),
        }
    }

    /// Returns the options with which curl connects to this listener.
    pub fn curl_options(&self) -> String {
        match self {
            Self::Tcp(_) => String::new(),
            Self::Unix(path) => format!("--unix-socket '{}' ", path.display()),
        }
    }

    /// Returns whether other hosts may be able to connect.
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Tcp(address) => !address.ip().is_loopback(),
            Self::Unix(_) => false,
        }
    }

    /// Returns whether two listeners cannot both bind. Port 0 is any free port.
    #[must_use]
    pub fn conflicts_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unix(path), Self::Unix(other)) => path == other,
            (Self::Tcp(address), Self::Tcp(other)) => {
                let has_wildcard = address.is_ipv4() == other.is_ipv4()
                    && (address.ip().is_unspecified() || other.ip().is_unspecified());
                address.port() != 0
                    && address.port() == other.port()
                    && (address.ip() == other.ip() || has_wildcard)
            }
            _ => false,
        }
    }
}
