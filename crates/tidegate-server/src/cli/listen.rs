//! Flags for the addresses to listen on, which override the configuration.

use clap::Args;

use tidegate_config::Config;
use tidegate_net::ListenAddress;

/// Addresses of `tidegate serve`.
#[derive(Debug, Args)]
pub(super) struct ListenFlags {
    /// Address of the HTTP API (IP:PORT or unix:PATH), overrides the file; 127.0.0.1:8080 by
    /// default
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN_HTTP")]
    listen_http: Option<ListenAddress>,

    /// Address of Envoy's rate limit service, overrides the file; 127.0.0.1:8081 by default
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN_GRPC")]
    listen_grpc: Option<ListenAddress>,

    #[command(flatten)]
    admin: AdminFlag,
}

/// Address of the admin listener.
#[derive(Debug, Args)]
pub(super) struct AdminFlag {
    /// Address of metrics and health, overrides the file; 127.0.0.1:8082 by default. Other than
    /// loopback only with a token: in the file, or in the variable `TIDEGATE_ADMIN_TOKEN` or
    /// `TIDEGATE_ADMIN_TOKEN_FILE`
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN_ADMIN")]
    listen_admin: Option<ListenAddress>,
}

impl ListenFlags {
    pub(super) fn apply(&self, config: &mut Config) -> anyhow::Result<()> {
        if let Some(address) = self.listen_http.clone() {
            config.listen.http = address;
        }
        if let Some(address) = self.listen_grpc.clone() {
            config.listen.grpc = address;
        }
        self.admin.apply(config)
    }
}

impl AdminFlag {
    /// Applies the flag. Without a token, an address that other hosts can reach is an error, as in
    /// the file.
    pub(super) fn apply(&self, config: &mut Config) -> anyhow::Result<()> {
        let Some(address) = self.listen_admin.clone() else { return Ok(()) };
        anyhow::ensure!(
            config.tokens.of_admin().is_some() || !address.is_remote(),
            "--listen-admin {address} is not on loopback, but there is no admin token: set one in \
             TIDEGATE_ADMIN_TOKEN, TIDEGATE_ADMIN_TOKEN_FILE or auth.admin_token, or listen on \
             127.0.0.1"
        );
        config.listen.admin = address;
        Ok(())
    }
}
