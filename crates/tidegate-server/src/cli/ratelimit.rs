//! `ratelimit`: runs the service in the place of envoyproxy/ratelimit.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

use super::listen::AdminFlag;
use super::service::{self, check_redis};
use super::variables;
use tidegate_config::{ConfigOrigin, Listen, RatelimitSettings};
use tidegate_service::logs::{LogFormat, LogSettings, TraceMode};
use tidegate_service::reload::ConfigSource;
use tidegate_service::serve;
use tidegate_tools::tool::style;

/// Name of the program of envoyproxy/ratelimit.
const NAME: &str = "ratelimit";

/// Tidegate in the place of envoyproxy/ratelimit: its environment, probes, ports, metrics, and rules
/// by files or xDS.
#[derive(Debug, Parser)]
#[command(name = NAME, version, styles = style::HELP)]
#[command(after_help = "\
Examples:
  With rules in /data/ratelimit/config, as envoyproxy/ratelimit reads them:
    RUNTIME_ROOT=/data RUNTIME_SUBDIRECTORY=ratelimit RUNTIME_WATCH_ROOT=false \\
      REDIS_SOCKET_TYPE=tcp REDIS_URL=127.0.0.1:6379 ratelimit

  With rules of a control plane:
    CONFIG_TYPE=GRPC_XDS_SOTW CONFIG_GRPC_XDS_SERVER_URL=127.0.0.1:18000 \\
      REDIS_SOCKET_TYPE=tcp REDIS_URL=127.0.0.1:6379 ratelimit

All settings are variables of the environment, with the names and defaults of envoyproxy/ratelimit.
TIDEGATE_ENVOY_ALGORITHM sets the algorithm of the rules, such as sliding-log; fixed-window by
default. TIDEGATE_LOG overrides LOG_LEVEL.")]
pub(crate) struct RatelimitCommand {
    #[command(flatten)]
    admin: AdminFlag,
}

/// Returns whether a process was started by the name of envoyproxy/ratelimit's program.
pub(crate) fn is_name(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()) == Some(OsStr::new(NAME))
}

impl RatelimitCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let (environment, settings) = RatelimitSettings::from_environment()?;
        let origin = ConfigOrigin::Environment(environment);
        let mut config = origin.load()?;
        self.admin.apply(&mut config)?;
        let store = config.store.to_string();
        let announce = move |bound: &Listen| {
            let Listen { http, grpc, admin, .. } = bound;
            tracing::info!(%http, %grpc, %admin, store, "listening as envoyproxy/ratelimit");
        };
        let logs = LogSettings {
            format: if settings.logs_json { LogFormat::Json } else { LogFormat::Text },
            level: settings.log_level,
            traces: settings.tracing.clone().map_or(TraceMode::Off, TraceMode::Ratelimit),
        };
        let without_effect = settings.without_effect.iter();
        let warnings = without_effect.map(|names| format!("without effect: {names}"));
        let warnings = warnings.chain(variables::warning_of_ratelimit()).collect();
        let source = ConfigSource { origin, with_flags: Box::new(Ok), password_file: None };
        service::run(&logs, warnings, || {
            serve::serve(config, source, Some(settings), check_redis, announce)
        })
    }
}
