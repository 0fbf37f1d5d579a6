//! `tidegate gateway`: startup and drain.

use std::sync::Arc;

use tidegate_config::{Config, Listen};
use tidegate_net::listener::{self, ListenerConfig, MaxAge};
use tidegate_service::reload::ConfigSource;
use tidegate_service::serve::{
    Hooks, RedisCheck, Service, Signals, bind, client_network, current_tls, listener_config,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::telemetry::Telemetry;

/// Runs the gateway until SIGTERM or SIGINT. Calls `announce` with the bound addresses.
pub async fn serve(
    config: Config,
    source: ConfigSource,
    check_redis: RedisCheck,
    announce: impl FnOnce(&Listen),
) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let mut listen = config.listen.clone();
    let listener = bind(&listen, "gateway", &listen.gateway).await?;
    listen.gateway = listener.address()?;
    let settings = config.gateway.clone();
    let warn = Box::new(|config: &Config| crate::warn_about_unused_policies(&config.policies));
    let service = Service::start(config, source, Hooks { warn, check_redis }).await?;
    listen.admin = service.admin_address.clone();
    listen.resp = service.resp_address.clone();

    let (gateway_service, telemetry) = crate::service(&settings, &service.state)?;
    if settings.access_log.is_some() {
        tokio::spawn(reopen_access_log(signal(SignalKind::hangup())?, Arc::clone(&telemetry)));
    }
    let gateway_task = tokio::spawn(listener::serve(
        listener,
        move |peer| listener::with_peer(&gateway_service, peer),
        current_tls(&service.state),
        client_network(&service.state),
        service.stopped.clone(),
        ListenerConfig {
            // A long download may complete: `idle_timeout` ends a stalled one.
            max_age: listen.max_connection_age.map(|age| MaxAge { age, grace: None }),
            write_timeout: settings.idle_timeout,
            reject_ambiguous: true,
            inline_streams: false,
            ..listener_config(&listen, &service.state)
        },
    ));
    announce(&listen);
    service.run(signals, [gateway_task]).await;
    if let Some(log) = telemetry.access_log() {
        log.stop();
    }
    Ok(())
}

/// Opens the access log again on SIGHUP, for tools that rotate it.
async fn reopen_access_log(mut hangup: Signal, telemetry: Arc<Telemetry>) {
    while hangup.recv().await.is_some() {
        if let Some(log) = telemetry.access_log() {
            log.reopen();
        }
    }
}
