//! A Redis server on loopback, and its statistics.

use std::process::Command;

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, Connection};
use anyhow::{Context, Result, ensure};

use crate::process::{Server, free_port};

pub(crate) mod call;
pub(crate) mod callers;
pub(crate) mod cluster;
pub(crate) mod decisions;
pub(crate) mod fleet;
pub(crate) mod logs;
pub(crate) mod lone;
pub(crate) mod naive;
pub(crate) mod random;
pub(crate) mod scripts;

/// An empty server without persistence.
pub(crate) struct Redis {
    server: Server,
    port: u16,
}

impl Redis {
    pub(crate) fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// Starts a server with additional options.
    pub(crate) fn start_with(options: &[&str]) -> Result<Self> {
        let port = free_port()?;
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        command.args(options);
        Ok(Self { server: Server::start("redis-server", &mut command, &[port])?, port })
    }

    /// Returns the process, to measure it.
    pub(crate) fn into_server(self) -> Server {
        self.server
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn connection(&self) -> Result<Connection> {
        Ok(::redis::Client::open(self.url())?.get_connection()?)
    }

    /// Returns the CPU time that Redis has used, in seconds, from `INFO cpu`.
    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        let info: String = ::redis::cmd("INFO").arg("cpu").query(&mut self.connection()?)?;
        let seconds = |name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value
                .and_then(|value| value.trim().parse::<f64>().ok())
                .with_context(|| format!("INFO has no {name}"))
        };
        Ok(seconds("used_cpu_user")? + seconds("used_cpu_sys")?)
    }

    pub(crate) fn reset_statistics(&self) -> Result<()> {
        Ok(::redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.connection()?)?)
    }

    /// Returns the number of script calls since the statistics were reset, or an error if a script
    /// failed.
    pub(crate) fn script_calls(&self) -> Result<f64> {
        let info: String =
            ::redis::cmd("INFO").arg("commandstats").query(&mut self.connection()?)?;
        // cmdstat_evalsha:calls=10,usec=120,usec_per_call=12.00,rejected_calls=0,failed_calls=0
        let Some(line) = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")) else {
            return Ok(0.0);
        };
        let number = |name: &str| {
            let value = line
                .split(',')
                .find_map(|entry| entry.trim().strip_prefix(name)?.strip_prefix('='));
            value
                .and_then(|value| value.parse::<f64>().ok())
                .with_context(|| format!("commandstats has no {name}"))
        };
        let failed = number("failed_calls")? + number("rejected_calls")?;
        // The first call of each script fails with NOSCRIPT, and the library loads the script.
        ensure!(failed <= 4.0, "{failed} scripts failed");
        number("calls")
    }
}

/// Opens a connection of the kind that the library uses, without a timeout of its own.
pub(crate) async fn connect_multiplexed(url: &str) -> Result<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let client = ::redis::Client::open(url)?;
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}
