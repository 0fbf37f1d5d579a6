//! Flags of the commands that use Redis.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tidegate::RedisStore;

use crate::tool::style;
use tidegate_config::{Secret, StoreConfig};

/// Servers of Redis, and the password for them.
#[derive(Debug, Clone, Args)]
pub struct RedisFlags {
    /// Redis with the counters: redis://[user@]host[:port][/database] (rediss:// for TLS; nodes of
    /// a cluster separated by commas). It overrides the configuration file
    #[arg(long, value_name = "URL", env = "TIDEGATE_REDIS", hide_env_values = true)]
    redis: Option<String>,

    /// File with the password of Redis, which then is not in the URL: other users of this host
    /// can see the arguments of a process
    #[arg(long, value_name = "FILE", env = "TIDEGATE_REDIS_PASSWORD_FILE")]
    redis_password_file: Option<PathBuf>,
}

impl RedisFlags {
    /// Creates the flags of a command that names them otherwise.
    pub fn new(url: String, password_file: Option<PathBuf>) -> Self {
        Self { redis: Some(url), redis_password_file: password_file }
    }

    /// Returns whether a URL is given.
    pub fn has_url(&self) -> bool {
        self.redis.is_some()
    }

    /// Applies the flags to the store of a configuration.
    pub fn apply(&self, store: StoreConfig) -> anyhow::Result<StoreConfig> {
        let store = match &self.redis {
            Some(urls) => store.with_redis(urls),
            None => store,
        };
        let Some(file) = &self.redis_password_file else { return Ok(store) };
        let password = Secret::read(file)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("--redis-password-file {}", file.display()))?;
        store.with_password(password).context(
            "--redis-password-file is given, but there is no Redis: give --redis URL, or a \
             configuration with one",
        )
    }

    /// Connects to Redis, for commands without a configuration; `None` without a URL.
    pub async fn connect(&self, timeout: Duration) -> anyhow::Result<Option<RedisStore>> {
        match self.apply(StoreConfig::Memory(Box::default()))? {
            StoreConfig::Memory(_) => Ok(None),
            StoreConfig::Redis(redis) => {
                self.print_warning();
                let builder = redis.with_timeout(timeout).builder();
                Ok(Some(builder.connect().await.context("--redis")?))
            }
        }
    }

    /// Returns the file with the password.
    #[must_use]
    pub fn password_file(&self) -> Option<&Path> {
        self.redis_password_file.as_deref()
    }

    /// Returns a warning if a password is among the arguments of this process.
    pub fn warning(&self) -> Option<&'static str> {
        let url = self.redis.as_deref().filter(|urls| urls.split(',').any(has_password))?;
        let is_argument = std::env::args().any(|argument| argument.ends_with(url));
        is_argument.then_some(
            "the password in --redis is visible to all users of this host, in the process list: \
             use --redis-password-file, or the variable TIDEGATE_REDIS",
        )
    }

    /// Prints the warning, for commands without logs.
    pub fn print_warning(&self) {
        if let Some(warning) = self.warning() {
            style::print_warning(warning);
        }
    }
}

/// Returns whether a URL contains a password.
fn has_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let user = rest.rsplit_once('@').map(|(user, _)| user);
    user.and_then(|user| user.split_once(':')).is_some_and(|(_, password)| !password.is_empty())
}
