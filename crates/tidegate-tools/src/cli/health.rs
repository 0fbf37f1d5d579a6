//! `tidegate health`: asks a running instance whether it is ready, for health checks of containers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use tidegate_config::duration;

use crate::tool::client::{ClientOptions, Endpoint, ServiceKind, Trust, read_body};
use crate::tool::style;
use tidegate_config::Config;
use tidegate_net::ListenAddress;

const DEFAULT_ADMIN_PORT: u16 = 8082;

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
pub struct HealthCommand {
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
    require: Option<RequiredPart>,

    /// Time limit of the check
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = timeout)]
    timeout: Duration,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RequiredPart {
    Store,
    Upstreams,
}

fn timeout(text: &str) -> Result<Duration, String> {
    let timeout = duration::parse(text)?;
    let is_valid = (Duration::from_millis(1)..=Duration::from_secs(60)).contains(&timeout);
    is_valid.then_some(timeout).ok_or_else(|| "must be from 1ms to 1m".to_owned())
}

impl HealthCommand {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let endpoints = self.endpoints()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = runtime.block_on(async {
            let answer = tokio::time::timeout(self.timeout, self.first_answer(&endpoints)).await;
            answer.context("no response in time")?
        });
        // The lookup of a host name must not delay the exit.
        runtime.shutdown_background();
        match answer {
            Ok((200, _)) => {
                anstream::println!("ready");
                return Ok(ExitCode::SUCCESS);
            }
            Ok((status, body)) => anstream::eprintln!("not ready: {status} {}", body.trim()),
            Err(error) => anstream::eprintln!("not ready: {error:#}"),
        }
        Ok(ExitCode::from(1))
    }

    /// Returns the endpoints to try, one after another.
    fn endpoints(&self) -> anyhow::Result<Vec<Endpoint>> {
        let options =
            ClientOptions { address: "", token: None, trust: Trust::Any, timeout: self.timeout };
        if let Some(url) = &self.admin {
            let is_address = !url.contains("://") && !url.starts_with("unix:");
            let address = if is_address { &format!("http://{url}") } else { url };
            let endpoint =
                Endpoint::parse(ServiceKind::Admin, &ClientOptions { address, ..options })?;
            ensure!(endpoint.path.is_empty(), "--admin {url} must not have a path");
            return Ok(vec![endpoint]);
        }
        let (listener, tls) = match self.config.as_deref().map(Config::load).transpose() {
            Ok(config) => {
                let tls = config.as_ref().and_then(|config| config.tls.as_ref());
                let has_tls = tls.is_some_and(|tls| tls.admin.is_some());
                (config.map(|config| config.listen.admin), &[has_tls][..])
            }
            Err(error) => {
                // The instance keeps its configuration while the file is invalid, and is healthy.
                style::print_warning(error.line());
                (None, &[false, true][..])
            }
        };
        let listener = reachable(self.listen_admin.clone().or(listener));
        tls.iter().map(|tls| Endpoint::of_listener(&listener, *tls, &options)).collect()
    }

    /// Returns the status and the body of the first response.
    async fn first_answer(&self, endpoints: &[Endpoint]) -> anyhow::Result<(u16, String)> {
        let path = match self.require {
            None => "/readyz",
            Some(RequiredPart::Store) => "/readyz?require=store",
            Some(RequiredPart::Upstreams) => "/readyz?require=upstreams",
        };
        let mut answer = Err(anyhow::anyhow!("no address"));
        for endpoint in endpoints {
            answer = answer_of(endpoint, path).await;
            if answer.is_ok() {
                break;
            }
        }
        answer
    }
}

async fn answer_of(endpoint: &Endpoint, path: &str) -> anyhow::Result<(u16, String)> {
    let connection = endpoint.open().await;
    let connection = connection.map_err(|error| anyhow::anyhow!("cannot connect to {error:#}"))?;
    let response = endpoint.get(connection, path).await.context("no response")?;
    let status = response.status().as_u16();
    let body = read_body(response.into_body()).await.unwrap_or_default();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// Returns the address by which this host reaches a listener: loopback for one that listens on all
/// addresses.
fn reachable(listener: Option<ListenAddress>) -> ListenAddress {
    let default = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_ADMIN_PORT));
    let mut address = match listener {
        Some(ListenAddress::Tcp(address)) => address,
        Some(unix @ ListenAddress::Unix(_)) => return unix,
        None => default,
    };
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    ListenAddress::Tcp(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(url: &str) -> anyhow::Result<Vec<Endpoint>> {
        let command = HealthCommand {
            admin: Some(url.to_owned()),
            listen_admin: None,
            config: None,
            require: None,
            timeout: Duration::from_secs(1),
        };
        command.endpoints()
    }

    #[test]
    fn urls_of_admin_listeners() {
        for (url, authority, scheme) in [
            ("http://127.0.0.1:8082", "127.0.0.1:8082", "http"),
            ("127.0.0.1:8082", "127.0.0.1:8082", "http"),
            ("https://tidegate.example.com/", "tidegate.example.com", "https"),
            ("http://[::1]:9", "[::1]:9", "http"),
            ("http://[::1]", "[::1]", "http"),
            ("unix:/run/admin.sock", "localhost", "http"),
        ] {
            let found = endpoints(url).unwrap_or_else(|error| panic!("{url}: {error:#}"));
            let found: Vec<_> =
                found.iter().map(|found| (found.authority.as_str(), found.scheme())).collect();
            assert_eq!(found, [(authority, scheme)], "{url}");
        }
        for url in ["", "ftp://h:1", "http://", "http://h:99999", "http://u@h:1", "http://h:1/x"] {
            assert!(endpoints(url).is_err(), "{url}");
        }
    }

    #[test]
    fn listener_on_all_addresses_is_called_on_loopback() {
        for (address, expected) in [
            ("0.0.0.0:9000", "127.0.0.1:9000"),
            ("[::]:9000", "[::1]:9000"),
            ("10.0.0.1:9000", "10.0.0.1:9000"),
        ] {
            assert_eq!(reachable(address.parse().ok()).to_string(), expected);
        }
    }
}
