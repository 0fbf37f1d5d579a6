//! `tidegate gateway`: runs the reverse proxy.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;

use super::listen::AdminFlag;
use super::service::{ServiceFlags, admin_scheme, check_redis, resp_line};
use tidegate_config::UpstreamUrl;
use tidegate_config::{
    self, AccessLogConfig, AccessLogFormat, ConfigOrigin, Listen, LogDestination,
};
use tidegate_net::ListenAddress;
use tidegate_service::logs::LogFormat;

/// Run a reverse proxy that forwards the requests that the policies allow.
///
/// Without --config it runs a built-in sample with counters in memory.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  In front of one application:
    tidegate gateway --upstream http://127.0.0.1:3000
    curl -i http://127.0.0.1:8000/

  In front of several, with your own policies and counters shared through Redis:
    tidegate gateway --upstream http://10.0.0.1:3000 --upstream http://10.0.0.2:3000 \\
      --config tidegate.yaml --redis redis://127.0.0.1:6379

  HTTP/2 to the upstream, for gRPC: h2c://HOST:PORT in plain text, h2://HOST:PORT over TLS.
  A Unix socket: unix:/run/app.sock.

TIDEGATE_LOG sets the level of the logs: error, warn, info (the default), debug or trace.")]
pub(super) struct GatewayCommand {
    /// URL to forward requests to, overrides the file; several are used in turns
    #[arg(long = "upstream", value_name = "URL", env = "TIDEGATE_UPSTREAM", value_delimiter = ',')]
    upstreams: Vec<String>,

    /// Address to listen on (IP:PORT or unix:PATH), overrides the file; 127.0.0.1:8000 by default
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN")]
    listen: Option<ListenAddress>,

    #[command(flatten)]
    admin: AdminFlag,

    /// Configuration file; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    #[command(flatten)]
    service: ServiceFlags,

    /// Write an access log to this file, overrides the configuration; or to stdout or stderr
    #[arg(long, value_name = "PATH", env = "TIDEGATE_ACCESS_LOG")]
    access_log: Option<String>,

    /// Format of the access log, overrides the configuration; combined by default
    #[arg(long, value_name = "FORMAT", env = "TIDEGATE_ACCESS_LOG_FORMAT")]
    access_log_format: Option<AccessLogFormat>,

    /// Format of the logs
    #[arg(long, value_name = "FORMAT", env = "TIDEGATE_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

impl GatewayCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = self.service.load(self.config.as_deref())?;
        self.admin.apply(&mut config)?;
        if let Some(address) = self.listen.clone() {
            config.listen.gateway = address;
        }
        if !self.upstreams.is_empty() {
            let parse = |text: &String| text.parse::<UpstreamUrl>();
            let upstreams = self.upstreams.iter().map(parse).collect::<Result<_, _>>();
            config.gateway.upstreams = upstreams.context("--upstream")?;
        }
        config.gateway.access_log = self.access_log(config.gateway.access_log.take())?;
        anyhow::ensure!(
            !config.gateway.upstreams.is_empty(),
            "there is no upstream: name one with --upstream http://127.0.0.1:3000, or under \
             gateway.upstreams in the file"
        );
        let upstreams = config.gateway.upstreams.iter().map(|upstream| upstream.text.as_str());
        let upstreams = upstreams.collect::<Vec<_>>().join(", ");
        let source = ConfigOrigin::of_file(self.config.clone()).to_string();
        let store = config.store.to_string();
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        let admin_scheme = admin_scheme(&config);
        // The lines of an access log are not mixed with other text.
        let logs_to_stdout = config
            .gateway
            .access_log
            .as_ref()
            .is_some_and(|log| log.destination == LogDestination::Stdout);
        let has_banner = self.log_format == LogFormat::Text
            && !logs_to_stdout
            && std::io::stdout().is_terminal();
        let announce = |bound: &Listen| {
            let Listen { gateway, admin, .. } = bound;
            let resp = bound.resp.as_ref().map(tracing::field::display);
            tracing::info!(
                http = %gateway, %admin, resp, %upstreams, store, config = %source, "listening"
            );
            if has_banner {
                anstream::println!(
                    "Tidegate {} on {store}, with {source}\n\
                     \n\
                     \x20 gateway  {}   to {upstreams}\n\
                     \x20 admin    {}   (dashboard at /, /metrics, /readyz, /v1/lookup)\n\
                     {}",
                    env!("CARGO_PKG_VERSION"),
                    gateway.shown(scheme),
                    admin.shown(admin_scheme),
                    resp_line(bound, scheme == "https", "Redis    "),
                );
            }
        };
        self.service.run(self.log_format, self.config, |source| {
            tidegate_gateway::serve(config, source, check_redis, announce)
        })
    }

    /// Returns the access log of the configuration, as the flags change it.
    fn access_log(
        &self,
        configured: Option<AccessLogConfig>,
    ) -> anyhow::Result<Option<AccessLogConfig>> {
        let path = self.access_log.as_deref();
        anyhow::ensure!(path != Some(""), "--access-log is empty: name a file, stdout or stderr");
        let named = path.map(|path| LogDestination::new(Path::new(""), path));
        let mut log = match (configured, named) {
            (configured, None) => configured,
            (Some(log), Some(destination)) => Some(AccessLogConfig { destination, ..log }),
            (None, Some(destination)) => Some(AccessLogConfig {
                destination,
                format: AccessLogFormat::default(),
                query: true,
            }),
        };
        if let Some(format) = self.access_log_format {
            let log = log
                .as_mut()
                .context("--access-log-format needs an access log: name one with --access-log")?;
            log.format = format;
        }
        Ok(log)
    }
}
