//! `tidegate serve`: wires the parts together, reloads, and drains.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::admin::{self, Admin};
use crate::config::{Config, Listen, RedisConfig, StoreConfig};
use crate::engine::Engine;
use crate::{doctor, envoy, http, listener, reload};

/// What is under way when the process is asked to end gets this long; then it ends all the same.
const DRAIN: Duration = Duration::from_secs(8);

/// What a running service cannot change without a restart.
pub(crate) struct Fixed {
    listen: Listen,
    store: StoreConfig,
}

impl Fixed {
    /// Says what a new configuration would change in vain.
    pub(crate) fn differs(&self, config: &Config) -> Option<&'static str> {
        if self.listen != config.listen {
            return Some("listen");
        }
        (self.store != config.store).then_some("store")
    }
}

/// Runs until SIGTERM or SIGINT. `announce` is told the addresses once they are bound.
pub(crate) async fn serve(config: Config, file: Option<PathBuf>, announce: impl FnOnce(&Listen)) -> anyhow::Result<()> {
    // Asked for before anything else: a signal that comes early is not lost.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    raise_file_limit();
    let files = config.files.clone();
    let fixed = Fixed { listen: config.listen.clone(), store: config.store.clone() };
    let http_listener = bind(config.listen.http, "listen.http").await?;
    let grpc_listener = bind(config.listen.grpc, "listen.grpc").await?;
    let admin_listener = bind(config.listen.admin, "listen.admin").await?;
    let bound = Listen {
        http: http_listener.local_addr()?,
        grpc: grpc_listener.local_addr()?,
        admin: admin_listener.local_addr()?,
    };
    let engine = Arc::new(Engine::start(config).await.context("store")?);
    if let StoreConfig::Redis(config) = &fixed.store {
        tokio::spawn(examine(Arc::clone(&engine), RedisConfig::clone(config)));
    }

    let (stop, stopped) = watch::channel(false);
    let ready = Arc::new(AtomicBool::new(true));
    if let Some(file) = file {
        reload::watch(file, files, fixed, Arc::clone(&engine))?;
    }
    let http = tokio::spawn(listener::serve(
        http_listener,
        http::router(Arc::clone(&engine)),
        secured(&engine),
        stopped.clone(),
        DRAIN,
    ));
    let grpc = envoy::router(Arc::clone(&engine)).await?;
    let grpc = tokio::spawn(listener::serve(grpc_listener, grpc, secured(&engine), stopped, DRAIN));
    let counting = Arc::clone(&engine);
    let admin = Admin { engine, ready: Arc::clone(&ready) };
    // The admin listener answers as long as anything is under way: it says that we are not ready any more.
    let (admin_stop, admin_stopped) = watch::channel(false);
    let admin_drain = Duration::from_secs(1);
    let admin =
        tokio::spawn(listener::serve(admin_listener, admin::router(admin), || None, admin_stopped, admin_drain));
    announce(&bound);

    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    ready.store(false, Ordering::Relaxed);
    tracing::info!("asked to end: answering what is under way");
    let _ = stop.send(true);
    let _ = http.await;
    let _ = grpc.await;
    if let Some(redis) = counting.counts.redis() {
        // What was admitted in its place is not forgotten with this process.
        let _ = tokio::time::timeout(Duration::from_millis(500), redis.fallback().repay()).await;
    }
    let _ = admin_stop.send(true);
    let _ = admin.await;
    tracing::info!("ended");
    Ok(())
}

/// Warns of what is wrong with Redis, as soon as it is there.
async fn examine(engine: Arc<Engine>, config: RedisConfig) {
    let Some(redis) = engine.counts.redis() else { return };
    while !redis.store().nodes().iter().any(|node| node.primary && node.connected) {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    doctor::warn_of(redis.store(), config.prefix(), config.timeout()).await;
}

/// Every connection is a file. Many systems start a process with 1,024 of them, and let it ask for more.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| limit.maximum.is_none_or(|maximum| current < maximum))
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, limit = limit.current, "the limit on open files stays as it is");
    }
}

/// TLS as it is configured now: certificates are taken anew without a restart.
fn secured(engine: &Arc<Engine>) -> impl Fn() -> Option<Arc<rustls::ServerConfig>> + Send + 'static {
    let engine = Arc::clone(engine);
    move || engine.live().tls.clone()
}

async fn bind(address: SocketAddr, field: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("{field}: cannot listen on {address}"))
}

/// The configuration from a file, or the built-in sample.
pub(crate) fn configuration(file: Option<&Path>) -> Result<Config, crate::config::ConfigError> {
    match file {
        Some(file) => Config::load(file),
        None => Config::parse("sample.yaml", crate::config::SAMPLE),
    }
}
