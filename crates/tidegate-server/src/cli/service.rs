//! Flags and run of the commands that serve requests.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;

use clap::Args;
use tidegate::RedisStore;
use tidegate_tools::doctor;

use super::variables;
use tidegate_config::{Config, ConfigOrigin, Listen, RedisConfig, StoreNeeds};
use tidegate_net::ListenAddress;
use tidegate_service::logs::{self, LogFormat, LogSettings};
use tidegate_service::reload::ConfigSource;
use tidegate_service::serve;
use tidegate_tools::cli::redis::RedisFlags;

/// Store of a service, and the Redis protocol.
#[derive(Debug, Args)]
pub(super) struct ServiceFlags {
    #[command(flatten)]
    redis: RedisFlags,

    /// Serve the Redis protocol on this address (IP:PORT or unix:PATH), overrides the file; off by
    /// default
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_RESP")]
    resp: Option<ListenAddress>,
}

impl ServiceFlags {
    /// Loads the configuration, as the flags change it.
    pub(super) fn load(&self, file: Option<&Path>) -> anyhow::Result<Config> {
        let mut config = ConfigOrigin::of_file(file.map(Path::to_owned)).load()?;
        config.store = self.redis.apply(config.store)?;
        config.listen.resp = self.resp.clone().or(config.listen.resp);
        serve::check_resp(&config)?;
        Ok(config)
    }

    /// Returns the source of a configuration whose store these flags override.
    fn source(&self, file: Option<PathBuf>) -> ConfigSource {
        let flags = self.redis.clone();
        ConfigSource {
            origin: ConfigOrigin::of_file(file),
            password_file: flags.password_file().map(Path::to_owned),
            with_flags: Box::new(move |store| flags.apply(store)),
        }
    }

    /// Runs a service with logs until its end.
    pub(super) fn run<F: Future<Output = anyhow::Result<()>>>(
        &self,
        log_format: LogFormat,
        file: Option<PathBuf>,
        service: impl FnOnce(ConfigSource) -> F,
    ) -> anyhow::Result<ExitCode> {
        let warnings = self.redis.warning().map(str::to_owned).into_iter();
        let warnings = warnings.chain(variables::warning(file.as_deref())).collect();
        run(&LogSettings::of_format(log_format), warnings, || service(self.source(file)))
    }
}

/// Runs a service with logs, which start with these warnings, until its end.
pub(super) fn run<F: Future<Output = anyhow::Result<()>>>(
    logs: &LogSettings,
    warnings: Vec<String>,
    service: impl FnOnce() -> F,
) -> anyhow::Result<ExitCode> {
    let runtime = serve::runtime()?;
    let logs = runtime.block_on(async { logs::start(logs) })?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    runtime.block_on(service())?;
    drop(logs);
    // Blocking tasks, such as the file watcher, must not delay the exit.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Returns the scheme of the admin listener's URLs.
pub(super) fn admin_scheme(config: &Config) -> &'static str {
    let has_tls = config.tls.as_ref().is_some_and(|tls| tls.admin.is_some());
    if has_tls { "https" } else { "http" }
}

/// Returns the line of the Redis protocol in the startup message; empty if it is off.
pub(super) fn resp_line(bound: &Listen, tls: bool, label: &str) -> String {
    let scheme = if tls { "rediss" } else { "redis" };
    let shown = bound.resp.as_ref().map(|resp| resp.shown(scheme));
    shown.map(|shown| format!("\x20 {label}{shown}\n")).unwrap_or_default()
}

/// Logs warnings about the setup of a Redis.
pub(super) fn check_redis<'a>(
    store: &'a RedisStore,
    config: &'a RedisConfig,
    needs: StoreNeeds,
) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
    Box::pin(doctor::log_warnings(store, config, needs))
}
