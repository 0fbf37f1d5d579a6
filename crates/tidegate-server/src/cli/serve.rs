//! `tidegate serve`: runs the service.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::listen::ListenFlags;
use super::service::{ServiceFlags, admin_scheme, check_redis, resp_line};
use tidegate_config::{ConfigOrigin, Listen};
use tidegate_service::logs::LogFormat;
use tidegate_service::serve;

/// Run the service: the HTTP API, Envoy's rate limit service, metrics and health.
///
/// Needs no flags: without --config it runs a built-in sample with counters in memory, on loopback
/// addresses.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Try it:
    tidegate serve
    curl -i -d '{\"policy\": \"per-user\", \"key\": \"user123\"}' http://127.0.0.1:8080/v1/acquire

  For any Redis client:
    tidegate serve --resp 127.0.0.1:8083
    redis-cli -p 8083 TG.ACQUIRE per-user user123

  With your own policies and counters shared through Redis:
    tidegate serve --config tidegate.yaml --redis redis://127.0.0.1:6379

  In a container (tokens in files: TIDEGATE_ADMIN_TOKEN_FILE, TIDEGATE_API_TOKEN_FILE):
    TIDEGATE_ADMIN_TOKEN=… tidegate serve --listen-http 0.0.0.0:8080 --listen-admin 0.0.0.0:8082

TIDEGATE_LOG sets the level of the logs: error, warn, info (the default), debug or trace.
Traces are sent over gRPC to the collector at OTEL_EXPORTER_OTLP_ENDPOINT.
The file is watched: changes are applied without a restart, and invalid files are rejected.")]
pub(super) struct ServeCommand {
    /// Configuration file; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    #[command(flatten)]
    listen: ListenFlags,

    #[command(flatten)]
    service: ServiceFlags,

    /// Format of the logs
    #[arg(long, value_name = "FORMAT", env = "TIDEGATE_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

impl ServeCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = self.service.load(self.config.as_deref())?;
        self.listen.apply(&mut config)?;
        let source = ConfigOrigin::of_file(self.config.clone()).to_string();
        let store = config.store.to_string();
        let example = config.policies.iter().next().map(|policy| policy.name().to_owned());
        let access = ApiAccess {
            tls: config.tls.is_some(),
            needs_token: config.tokens.of_api().is_some(),
            admin_scheme: admin_scheme(&config),
        };
        // Without a terminal, the logs have the addresses, and other text would be in their way.
        let has_banner = self.log_format == LogFormat::Text && std::io::stdout().is_terminal();
        let announce = |bound: &Listen| {
            let Listen { http, grpc, admin, .. } = bound;
            let resp = bound.resp.as_ref().map(tracing::field::display);
            tracing::info!(%http, %grpc, %admin, resp, store, config = %source, "listening");
            if has_banner {
                anstream::println!(
                    "{}",
                    banner(bound, access, &store, &source, example.as_deref())
                );
            }
        };
        self.service.run(self.log_format, self.config, |source| {
            serve::serve(config, source, None, check_redis, announce)
        })
    }
}

/// Requirements for calls of the API and of the admin listener.
#[derive(Clone, Copy)]
struct ApiAccess {
    tls: bool,
    needs_token: bool,
    admin_scheme: &'static str,
}

/// Returns the startup message, with an example request.
fn banner(
    bound: &Listen,
    access: ApiAccess,
    store: &str,
    source: &str,
    policy: Option<&str>,
) -> String {
    let request = match policy {
        Some(policy) => format!(r#"{{"policy": "{policy}", "key": "user123"}}"#),
        None => r#"{"key": "user123", "quota": {"limit": 5, "window": "60s"}}"#.to_owned(),
    };
    let (scheme, ca_flag) = if access.tls { ("https", "--cacert CA.pem ") } else { ("http", "") };
    let Listen { http, grpc, admin, .. } = bound;
    let resp = resp_line(bound, access.tls, "Redis  ");
    let grpc_scheme = if access.tls { "grpcs" } else { "grpc" };
    // The token itself is never printed.
    let token_flag = if access.needs_token { "-H 'Authorization: Bearer TOKEN' " } else { "" };
    format!(
        "Tidegate {} on {store}, with {source}\n\
         \n\
         \x20 API    {}\n\
         \x20 Envoy  {}\n\
         \x20 admin  {}   (dashboard at /, /metrics, /readyz, /v1/lookup)\n\
         {resp}\n\
         Try it:\n\
         \x20 curl -i {}{ca_flag}{token_flag}-d '{request}' {}\n",
        env!("CARGO_PKG_VERSION"),
        http.shown(scheme),
        grpc.shown(grpc_scheme),
        admin.shown(access.admin_scheme),
        http.curl_options(),
        http.url(scheme, "/v1/acquire"),
    )
}
