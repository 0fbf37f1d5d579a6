//! `tidegate serve` and `tidegate gateway`: wires the parts together, reloads, and drains.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate::Policies;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::admin::{self, Admin};
use crate::config::{Config, GatewayConfig, Listen, RedisConfig, StoreConfig};
use crate::engine::Engine;
use crate::envoy::Envoy;
use crate::listener::{self, Manner};
use crate::{api, doctor, gateway, reload};

/// What is under way when the process is asked to end gets this long; then it ends all the same.
const DRAIN: Duration = Duration::from_secs(8);

/// A client of the API that takes nothing of its answer is cut off.
const WRITE_TIME: Duration = Duration::from_secs(30);

/// What a running service cannot change without a restart.
pub(crate) struct Fixed {
    listen: Listen,
    store: StoreConfig,
    gateway: GatewayConfig,
}

impl Fixed {
    fn of(config: &Config) -> Self {
        Self {
            listen: config.listen.clone(),
            store: config.store.clone(),
            gateway: config.gateway.clone(),
        }
    }

    /// Says what a new configuration would change in vain.
    pub(crate) fn differs(&self, config: &Config) -> Option<&'static str> {
        if self.listen != config.listen {
            return Some("listen");
        }
        if self.gateway != config.gateway {
            return Some("gateway");
        }
        (self.store != config.store).then_some("store")
    }
}

/// Runs the API until SIGTERM or SIGINT. `announce` is told the addresses once they are bound.
pub(crate) async fn serve(
    config: Config,
    file: Option<PathBuf>,
    announce: impl FnOnce(&Listen),
) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let http_listener = bind(config.listen.http, "listen.http").await?;
    let grpc_listener = bind(config.listen.grpc, "listen.grpc").await?;
    let mut listen = config.listen.clone();
    (listen.http, listen.grpc) = (http_listener.local_addr()?, grpc_listener.local_addr()?);
    let service = Service::start(config, file, |_| ()).await?;
    listen.admin = service.admin_address;

    let (engine, stopped) = (&service.engine, &service.stopped);
    let manner = Manner { drain: DRAIN, write_time: WRITE_TIME, strict: false, light: true };
    let http = {
        let engine = Arc::clone(engine);
        move |peer| api::service(&engine, peer)
    };
    let http = tokio::spawn(listener::serve(
        http_listener,
        http,
        secured(engine),
        stopped.clone(),
        manner,
    ));
    let grpc = Envoy::new(Arc::clone(engine)).await?;
    let grpc = move |_| grpc.service();
    let grpc = tokio::spawn(listener::serve(
        grpc_listener,
        grpc,
        secured(engine),
        stopped.clone(),
        manner,
    ));
    announce(&listen);
    service.run(signals, [http, grpc]).await;
    Ok(())
}

/// Runs the gateway until SIGTERM or SIGINT. `announce` is told the addresses once they are bound.
pub(crate) async fn gateway(
    config: Config,
    file: Option<PathBuf>,
    announce: impl FnOnce(&Listen),
) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let listener = bind(config.listen.gateway, "listen.gateway").await?;
    let mut listen = config.listen.clone();
    listen.gateway = listener.local_addr()?;
    let settings = config.gateway.clone();
    let service = Service::start(config, file, gateway::warn_of_unused_policies).await?;
    listen.admin = service.admin_address;

    let manner =
        Manner { drain: DRAIN, write_time: settings.idle_timeout, strict: true, light: false };
    let gateway = gateway::service(&settings, &service.engine)?;
    let gateway = move |peer| listener::told_the_peer(&gateway, peer);
    let (tls, stopped) = (secured(&service.engine), service.stopped.clone());
    let gateway = tokio::spawn(listener::serve(listener, gateway, tls, stopped, manner));
    announce(&listen);
    service.run(signals, [gateway]).await;
    Ok(())
}

/// Asked for before anything else: a signal that comes early is not lost.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }
}

/// What every front door stands on: the engine, its configuration, the admin listener.
struct Service {
    engine: Arc<Engine>,
    ready: Arc<AtomicBool>,
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
    admin_address: SocketAddr,
    admin_stop: watch::Sender<bool>,
    admin: JoinHandle<()>,
}

impl Service {
    /// Starts the engine; `warn` is called with the policies now and after each reload.
    async fn start(
        config: Config,
        file: Option<PathBuf>,
        warn: fn(&Policies),
    ) -> anyhow::Result<Self> {
        raise_file_limit();
        warn(&config.policies);
        let (files, store) = (config.files.clone(), config.store.clone());
        let admin_listener = bind(config.listen.admin, "listen.admin").await?;
        let admin_address = admin_listener.local_addr()?;
        let engine = Arc::new(Engine::start(config).await.context("store")?);
        if let StoreConfig::Redis(config) = &store {
            tokio::spawn(examine(Arc::clone(&engine), RedisConfig::clone(config)));
        }
        let (stop, stopped) = watch::channel(false);
        let ready = Arc::new(AtomicBool::new(true));
        if let Some(file) = file {
            // As the file says it: what flags say instead is no change of the file.
            let fixed = Fixed::of(&Config::load(&file)?);
            reload::watch(file, files, fixed, warn, Arc::clone(&engine))?;
        }
        // The admin listener answers as long as anything is under way: it says that we are not
        // ready any more.
        let (admin_stop, admin_stopped) = watch::channel(false);
        let admin = admin::router(Admin { engine: Arc::clone(&engine), ready: Arc::clone(&ready) });
        let router = move |peer| listener::told_the_peer(&admin, peer);
        let manner = Manner {
            drain: Duration::from_secs(1),
            write_time: WRITE_TIME,
            strict: false,
            light: true,
        };
        let admin =
            tokio::spawn(listener::serve(admin_listener, router, || None, admin_stopped, manner));
        Ok(Self { engine, ready, stop, stopped, admin_address, admin_stop, admin })
    }

    /// Until a signal comes; then all that is under way is answered.
    async fn run(self, mut signals: Signals, doors: impl IntoIterator<Item = JoinHandle<()>>) {
        tokio::select! {
            _ = signals.terminate.recv() => {}
            _ = signals.interrupt.recv() => {}
        }
        self.ready.store(false, Ordering::Relaxed);
        tracing::info!("asked to end: answering what is under way");
        let _ = self.stop.send(true);
        for door in doors {
            let _ = door.await;
        }
        if let Some(redis) = self.engine.backend.redis() {
            // What was admitted in its place is not forgotten with this process.
            // On the heap: with all the stores within, it is a deep type.
            let repay = Box::pin(redis.fallback().settle());
            let _ = tokio::time::timeout(Duration::from_millis(500), repay).await;
        }
        let _ = self.admin_stop.send(true);
        let _ = self.admin.await;
        tracing::info!("ended");
    }
}

/// Warns of what is wrong with Redis, as soon as it is there.
async fn examine(engine: Arc<Engine>, config: RedisConfig) {
    let Some(redis) = engine.backend.redis() else { return };
    while !redis.store().nodes().iter().any(|node| node.primary && node.connected) {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    doctor::warn_of(redis.store(), config.prefix(), config.timeout()).await;
}

/// Every connection is a file. Many systems start a process with 1,024 of them, and let it ask for
/// more.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| limit.maximum.is_none_or(|maximum| current < maximum))
        && let Err(error) =
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, limit = limit.current, "the limit on open files stays as it is");
    }
}

/// TLS as it is configured now: certificates are taken anew without a restart.
fn secured(
    engine: &Arc<Engine>,
) -> impl Fn() -> Option<Arc<rustls::ServerConfig>> + Send + 'static {
    let engine = Arc::clone(engine);
    move || engine.active().tls.clone()
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
