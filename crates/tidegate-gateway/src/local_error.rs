//! Lack of local resources, which is no failure of the upstream.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Instant;

use rustix::io::Errno;

use tidegate_net::LogThrottle;

/// Local resource without which no connection can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LocalResource {
    Files,
    Ports,
    Memory,
}

impl LocalResource {
    pub(super) const ALL: [Self; 3] = [Self::Files, Self::Ports, Self::Memory];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Ports => "ports",
            Self::Memory => "memory",
        }
    }

    /// Returns the resource that was missing for a connection to a host. `error` is the error of
    /// the system, if there is one.
    pub(super) fn missing(error: Option<&io::Error>, host: &str) -> Option<Self> {
        let code = error.and_then(io::Error::raw_os_error).map(Errno::from_raw_os_error);
        match code {
            Some(Errno::MFILE | Errno::NFILE) => Some(Self::Files),
            Some(Errno::NOBUFS | Errno::NOMEM) => Some(Self::Memory),
            // Without IPv6, connecting to ::1 fails in the same way, and localhost may mean it.
            Some(Errno::ADDRNOTAVAIL) => {
                let is_ipv4 = host.parse::<Ipv4Addr>().is_ok();
                (is_ipv4 || has_ipv6()).then_some(Self::Ports)
            }
            Some(_) => None,
            // A failed lookup of a name hides its cause.
            None => lacks_files().then_some(Self::Files),
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Self::Files => {
                "raise the limit on open files (ulimit -n, LimitNOFILE of systemd), or lower \
                 listen.max_connections and gateway.max_connections"
            }
            Self::Ports => {
                "all local ports for this upstream are in use: widen \
                 net.ipv4.ip_local_port_range, or lower gateway.max_connections"
            }
            Self::Memory => {
                "the kernel has no memory for a socket: raise net.ipv4.tcp_mem or the memory of \
                 this host, or lower gateway.max_connections"
            }
        }
    }

    pub(super) fn log(self) {
        static THROTTLES: [LogThrottle; LocalResource::ALL.len()] =
            [const { LogThrottle::new() }; LocalResource::ALL.len()];
        if let Some(suppressed) = THROTTLES[self as usize].should_log(Instant::now()) {
            tracing::warn!(
                resource = self.as_str(),
                suppressed,
                "no connection to an upstream can be opened: {} (logged once per minute)",
                self.advice()
            );
        }
    }
}

fn has_ipv6() -> bool {
    UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

fn lacks_files() -> bool {
    File::open("/dev/null").is_err_and(|error| {
        let code = error.raw_os_error().map(Errno::from_raw_os_error);
        matches!(code, Some(Errno::MFILE | Errno::NFILE))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_this_host_are_not_those_of_the_upstream() {
        let missing = |errno: Errno| {
            let error = io::Error::from_raw_os_error(errno.raw_os_error());
            LocalResource::missing(Some(&error), "127.0.0.1")
        };
        assert_eq!(missing(Errno::MFILE), Some(LocalResource::Files));
        assert_eq!(missing(Errno::NFILE), Some(LocalResource::Files));
        assert_eq!(missing(Errno::NOBUFS), Some(LocalResource::Memory));
        assert_eq!(missing(Errno::ADDRNOTAVAIL), Some(LocalResource::Ports));
        for errno in [Errno::CONNREFUSED, Errno::CONNRESET, Errno::HOSTUNREACH, Errno::NETUNREACH] {
            assert_eq!(missing(errno), None, "{errno}");
        }
        assert_eq!(LocalResource::missing(None, "localhost"), None, "there are free files");
    }
}
