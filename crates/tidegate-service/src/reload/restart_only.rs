//! [`RestartOnlyConfig`]: settings that only take effect after a restart.

use tidegate_config::{Config, GatewayConfig, Listen, StoreConfig, XdsConfig};
use tidegate_net::ListenAddress;

/// Settings that only take effect after a restart.
pub struct RestartOnlyConfig {
    listen: Listen,
    /// Without passwords and certificates, which a reload renews.
    store: StoreConfig,
    gateway: GatewayConfig,
    xds: Option<XdsConfig>,
    /// Bound address of the admin listener, whatever the configuration says.
    admin_address: ListenAddress,
    /// The same for the Redis protocol.
    resp_address: Option<ListenAddress>,
}

impl RestartOnlyConfig {
    pub(crate) fn new(
        config: &Config,
        admin_address: &ListenAddress,
        resp_address: Option<&ListenAddress>,
    ) -> Self {
        Self {
            listen: config.listen.clone(),
            store: config.store.without_credentials(),
            gateway: config.gateway.clone(),
            xds: config.envoy.xds.clone(),
            admin_address: admin_address.clone(),
            resp_address: resp_address.cloned(),
        }
    }

    /// Returns an error if the admin listener or the Redis protocol would be open to other hosts
    /// without a token, or if the rules of Envoy would be missing until a restart.
    pub fn check(&self, config: &Config) -> Result<(), String> {
        if self.xds.is_some() != config.envoy.xds.is_some() {
            let change = if self.xds.is_some() { "removed" } else { "added" };
            return Err(format!("envoy.xds was {change}, which needs a restart"));
        }
        if let Some(address) = &self.resp_address
            && config.tokens.of_api().is_none()
            && address.is_remote()
        {
            return Err(format!(
                "auth.api_token is missing, but the Redis protocol is bound to {address} until a \
                 restart, where other hosts could use it without a token: set a token, or restart \
                 with listen.resp on 127.0.0.1"
            ));
        }
        let address = &self.admin_address;
        if config.tokens.of_admin().is_some() || !address.is_remote() {
            return Ok(());
        }
        Err(format!(
            "auth.admin_token is missing, but the admin listener is bound to {address} until a \
             restart, where other hosts could use it without a token: set a token, or restart with \
             listen.admin on 127.0.0.1"
        ))
    }

    /// Returns the sections of the new configuration whose changes need a restart.
    pub fn changed_sections(&self, config: &Config) -> Vec<&'static str> {
        let sections = [
            ("listen", self.listen != config.listen),
            ("gateway", self.gateway != config.gateway),
            ("store", self.store != config.store.without_credentials()),
            ("envoy.xds", self.xds != config.envoy.xds),
        ];
        sections.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).collect()
    }
}
