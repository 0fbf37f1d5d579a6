//! `tidegate health`: asks a running instance whether it is ready, for health checks of containers.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use rustls::pki_types::ServerName;

use self::any_certificate::AnyCertificate;
use super::style;
use crate::config::{Config, ListenAddress};
use tidegate::internals::duration;

mod any_certificate;

const DEFAULT_ADMIN_PORT: u16 = 8082;
/// Maximum size of a response. That of /readyz has a few lines per node.
const MAX_RESPONSE_BYTES: u64 = 1 << 20;

/// Check whether a running instance is ready: exit code 0 if it is, 1 if not
///
/// Sends GET /readyz to the admin listener of this host. An instance that shuts down is not ready.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  In a Dockerfile:
    HEALTHCHECK CMD [\"tidegate\", \"health\"]

  Only while Redis decides:
    tidegate health --admin http://127.0.0.1:8082 --require store

Certificates are not verified: the request has no secret, and only its status is used.")]
pub(super) struct HealthCommand {
    /// Admin listener: http://HOST:PORT, https://HOST:PORT or unix:PATH. By default the one of
    /// --listen-admin or --config, and otherwise 127.0.0.1:8082
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN")]
    admin: Option<String>,

    /// Address that the instance listens on, as for `tidegate serve`
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN_ADMIN")]
    listen_admin: Option<ListenAddress>,

    /// Configuration file of the instance
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    /// Also require that the store decides, or that an upstream of the gateway is not ejected
    #[arg(long, value_name = "PART")]
    require: Option<Requirement>,

    /// Time limit of the check
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = timeout)]
    timeout: Duration,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Requirement {
    Store,
    Upstreams,
}

fn timeout(text: &str) -> Result<Duration, String> {
    let timeout = duration::parse(text)?;
    let is_valid = (Duration::from_millis(1)..=Duration::from_secs(60)).contains(&timeout);
    is_valid.then_some(timeout).ok_or_else(|| "must be from 1ms to 1m".to_owned())
}

/// Address of an admin listener.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    address: TargetAddress,
    tls: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum TargetAddress {
    /// Host, and host with port.
    Tcp(String, String),
    Unix(PathBuf),
}

impl HealthCommand {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        let targets = self.targets()?;
        let path = match self.require {
            None => "/readyz",
            Some(Requirement::Store) => "/readyz?require=store",
            Some(Requirement::Upstreams) => "/readyz?require=upstreams",
        };
        let deadline = Instant::now() + self.timeout;
        let mut status = Err(anyhow::anyhow!("no address"));
        for target in targets {
            status = target.status_of(path, deadline);
            if status.is_ok() {
                break;
            }
        }
        match status {
            Ok((200, _)) => {
                anstream::println!("ready");
                Ok(ExitCode::SUCCESS)
            }
            Ok((status, body)) => {
                anstream::eprintln!("not ready: {status} {}", body.trim());
                Ok(ExitCode::from(1))
            }
            Err(error) => {
                anstream::eprintln!("not ready: {error:#}");
                Ok(ExitCode::from(1))
            }
        }
    }

    /// Returns the addresses to try, one after another.
    fn targets(&self) -> anyhow::Result<Vec<Target>> {
        if let Some(url) = &self.admin {
            return Ok(vec![Target::parse(url)?]);
        }
        let config = match self.config.as_deref().map(Config::load).transpose() {
            Ok(config) => config,
            Err(error) => {
                // The instance keeps its configuration while the file is invalid, and is healthy.
                let (style, reset) = (style::WARNING, style::RESET);
                anstream::eprintln!("{style}warning:{reset} {}", error.line());
                let address = self.listen_admin.clone();
                let target = |tls| Target::of_listener(address.clone(), tls);
                return Ok(vec![target(false), target(true)]);
            }
        };
        let tls = config.as_ref().and_then(|config| config.tls.as_ref());
        let tls = tls.is_some_and(|tls| tls.admin.is_some());
        let listens_on = self.listen_admin.clone().or(config.map(|config| config.listen.admin));
        Ok(vec![Target::of_listener(listens_on, tls)])
    }
}

impl Target {
    /// Parses a URL. `HOST:PORT` alone is one of plain HTTP.
    fn parse(url: &str) -> anyhow::Result<Self> {
        let syntax = "it must look like http://127.0.0.1:8082, https://HOST:PORT or unix:PATH";
        if let Some(path) = url.strip_prefix("unix:") {
            return Ok(Self { address: TargetAddress::Unix(path.into()), tls: false });
        }
        let (tls, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            None => (false, url),
            Some(_) => bail!("--admin {url}: {syntax}"),
        };
        let authority = rest.trim_end_matches('/');
        let is_host = !authority.is_empty() && !authority.contains(['/', '?', '#', '@']);
        ensure!(is_host, "--admin {url}: {syntax}");
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => {
                let port: u16 =
                    port.parse().ok().with_context(|| format!("--admin {url}: {syntax}"))?;
                (host, port)
            }
            _ => (authority, if tls { 443 } else { 80 }),
        };
        let address = TargetAddress::Tcp(host.to_owned(), format!("{host}:{port}"));
        Ok(Self { address, tls })
    }

    /// Returns the target of an instance on this host. One that listens on all addresses is called
    /// on loopback.
    fn of_listener(address: Option<ListenAddress>, tls: bool) -> Self {
        let default = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_ADMIN_PORT));
        let mut address = match address {
            Some(ListenAddress::Unix(path)) => {
                return Self { address: TargetAddress::Unix(path), tls };
            }
            Some(ListenAddress::Tcp(address)) => address,
            None => default,
        };
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        let host = address.ip().to_string();
        Self { address: TargetAddress::Tcp(host, address.to_string()), tls }
    }

    /// Returns the status and the body of a GET request.
    fn status_of(&self, path: &str, deadline: Instant) -> anyhow::Result<(u16, String)> {
        let (stream, host): (Box<dyn Stream>, &str) = match &self.address {
            TargetAddress::Tcp(_, authority) => {
                let stream = connect(authority, deadline)
                    .with_context(|| format!("cannot connect to {authority}"))?;
                (Box::new(stream), authority)
            }
            TargetAddress::Unix(path) => {
                let stream = UnixStream::connect(path)
                    .with_context(|| format!("cannot connect to unix:{}", path.display()))?;
                (Box::new(stream), "localhost")
            }
        };
        stream.limit_to(left(deadline)?)?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        if !self.tls {
            return exchange(stream, &request, deadline);
        }
        let host = match &self.address {
            TargetAddress::Tcp(host, _) => host.trim_matches(['[', ']']),
            TargetAddress::Unix(_) => "localhost",
        };
        let name = ServerName::try_from(host.to_owned()).context("the host of --admin")?;
        let session = rustls::ClientConnection::new(Arc::new(AnyCertificate::config()?), name)?;
        exchange(rustls::StreamOwned::new(session, stream), &request, deadline)
    }
}

/// Socket whose reads and writes have a time limit.
trait Stream: Read + Write {
    fn limit_to(&self, timeout: Duration) -> std::io::Result<()>;
}

impl Stream for TcpStream {
    fn limit_to(&self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl Stream for UnixStream {
    fn limit_to(&self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

/// Returns the time until the deadline.
fn left(deadline: Instant) -> anyhow::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "no response in time");
    Ok(left)
}

/// Connects to the first address that accepts a connection.
fn connect(authority: &str, deadline: Instant) -> anyhow::Result<TcpStream> {
    let mut last = None;
    for address in authority.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    Err(last.map_or_else(|| anyhow::anyhow!("the host has no address"), anyhow::Error::from))
}

/// Sends a request and reads the response until its end, the deadline or the maximum size.
fn exchange(
    mut stream: impl Read + Write,
    request: &str,
    deadline: Instant,
) -> anyhow::Result<(u16, String)> {
    stream.write_all(request.as_bytes())?;
    let mut response = Vec::new();
    let mut buffer = [0; 4096];
    while (response.len() as u64) < MAX_RESPONSE_BYTES {
        left(deadline)?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => response.extend_from_slice(&buffer[..length]),
            // A server may close a TLS connection without a notice.
            Err(_) if !response.is_empty() => break,
            Err(error) => return Err(error).context("no response"),
        }
    }
    let response = String::from_utf8_lossy(&response);
    let (head, body) = response.split_once("\r\n\r\n").context("the response is not HTTP")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("the response has no status")?, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, authority: &str, tls: bool) -> Target {
        Target { address: TargetAddress::Tcp(host.to_owned(), authority.to_owned()), tls }
    }

    #[test]
    fn urls_of_admin_listeners() {
        for (url, expected) in [
            ("http://127.0.0.1:8082", tcp("127.0.0.1", "127.0.0.1:8082", false)),
            ("127.0.0.1:8082", tcp("127.0.0.1", "127.0.0.1:8082", false)),
            (
                "https://tidegate.example.com/",
                tcp("tidegate.example.com", "tidegate.example.com:443", true),
            ),
            ("http://[::1]:9", tcp("[::1]", "[::1]:9", false)),
            ("http://[::1]", tcp("[::1]", "[::1]:80", false)),
        ] {
            assert_eq!(Target::parse(url).ok(), Some(expected), "{url}");
        }
        let unix = TargetAddress::Unix("/run/admin.sock".into());
        assert_eq!(
            Target::parse("unix:/run/admin.sock").ok(),
            Some(Target { address: unix, tls: false })
        );
        for url in ["", "ftp://h:1", "http://", "http://h:99999", "http://u@h:1", "http://h:1/x"] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn listener_on_all_addresses_is_called_on_loopback() {
        for (address, expected) in [
            ("0.0.0.0:9000", "127.0.0.1:9000"),
            ("[::]:9000", "[::1]:9000"),
            ("10.0.0.1:9000", "10.0.0.1:9000"),
        ] {
            let found = Target::of_listener(address.parse().ok(), false);
            let TargetAddress::Tcp(_, authority) = found.address else { panic!("{address}") };
            assert_eq!(authority, expected);
        }
    }
}
