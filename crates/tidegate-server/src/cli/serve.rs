//! `tidegate serve`: the service.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::config::{self, Listen, StoreConfig};
use crate::logs::{self, LogFormat};
use crate::serve;

/// Run the service: the HTTP API, Envoy's rate limit service, metrics and health.
///
/// Needs no flags: without --config it runs a built-in sample on memory, on loopback addresses.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Try it:
    tidegate serve
    curl -i -d '{\"policy\": \"per-user\", \"key\": \"user123\"}' http://127.0.0.1:8080/v1/acquire

  With policies of your own, counts shared through Redis:
    tidegate serve --config tidegate.yaml --redis redis://127.0.0.1:6379

Traces go to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, by gRPC.
The file is watched: a changed one is taken without a restart, a bad one is refused and the old one goes on.")]
pub(super) struct Serve {
    /// The configuration; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    /// Share the counts through this Redis, whatever the file says; nodes of a cluster with commas
    /// between them
    #[arg(long, value_name = "URL", env = "TIDEGATE_REDIS", hide_env_values = true)]
    redis: Option<String>,

    /// How logs are written
    #[arg(long, value_name = "FORMAT", env = "TIDEGATE_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = serve::configuration(self.config.as_deref())?;
        if let Some(url) = &self.redis {
            config.store = config.store.on_redis(url);
        }
        let source = config::describe(self.config.as_ref());
        let store =
            if matches!(config.store, StoreConfig::Memory { .. }) { "memory" } else { "Redis" };
        let example = config.policies.iter().next().map(|policy| policy.name().to_owned());
        let doors = Doors { secured: config.tls.is_some(), guarded: config.api_token.is_some() };
        let text = self.log_format == LogFormat::Text;
        let announce = |bound: &Listen| {
            let Listen { http, grpc, admin, .. } = bound;
            tracing::info!(%http, %grpc, %admin, store, config = %source, "listening");
            if text {
                anstream::println!("{}", welcome(bound, doors, store, &source, example.as_deref()));
            }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let traces = runtime.block_on(async { logs::start(self.log_format) })?;
        runtime.block_on(serve::serve(config, self.config.clone(), announce))?;
        drop(traces);
        // What is still asleep somewhere, such as a watch on a file, must not hold up the end.
        runtime.shutdown_background();
        Ok(ExitCode::SUCCESS)
    }
}

/// How the API is to be asked.
#[derive(Clone, Copy)]
struct Doors {
    /// By TLS.
    secured: bool,
    /// With a token.
    guarded: bool,
}

fn welcome(
    Listen { http, grpc, admin, .. }: &Listen,
    doors: Doors,
    store: &str,
    source: &str,
    policy: Option<&str>,
) -> String {
    let question = match policy {
        Some(policy) => format!(r#"{{"policy": "{policy}", "key": "user123"}}"#),
        None => r#"{"key": "user123", "quota": {"limit": 5, "window": "60s"}}"#.to_owned(),
    };
    let (scheme, authority) =
        if doors.secured { ("https", "--cacert CA.pem ") } else { ("http", "") };
    let grpc_scheme = if doors.secured { "grpcs" } else { "grpc" };
    // The token itself is never shown.
    let token = if doors.guarded { "-H 'Authorization: Bearer TOKEN' " } else { "" };
    format!(
        "Tidegate {} on {store}, with {source}\n\
         \n\
         \x20 API    {scheme}://{http}\n\
         \x20 Envoy  {grpc_scheme}://{grpc}\n\
         \x20 admin  http://{admin}   (/metrics, /readyz, /v1/policies, /v1/hot-keys)\n\
         \n\
         Try it:\n\
         \x20 curl -i {authority}{token}-d '{question}' {scheme}://{http}/v1/acquire\n",
        env!("CARGO_PKG_VERSION")
    )
}
