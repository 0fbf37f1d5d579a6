//! `tidegate serve` and `tidegate gateway`: startup, signal handling, drain and shutdown.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tidegate::RedisStore;
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::admin::{self, Admin, Fleet, Live};
use crate::api::browser::BrowserGuard;
use crate::envoy::{Envoy, RejectionCounters};
use crate::journal::{self, EventKind};
use crate::metrics::stalls;
use crate::ratelimit::Ratelimit;
use crate::reload::{ConfigSource, RestartOnlyConfig};
use crate::resp::{Resp, RespShared};
use crate::state::ServerState;
use crate::{api, reload};
use tidegate_config::{
    Config, Listen, OPEN_LISTENER, RatelimitSettings, RedisConfig, StoreConfig, StoreNeeds,
};
use tidegate_net::ListenAddress;
use tidegate_net::listener::{self, ListenerConfig, MaxAge, Socket};

/// Time that in-flight requests have to complete after SIGTERM or SIGINT.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(8);
/// The admin listener shuts down after all others and has only short requests.
const ADMIN_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that in-flight requests of the API have to complete on a connection that has reached
/// `listen.max_connection_age`.
const AGE_GRACE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for settling pending debits during shutdown, and for releasing units in flight.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for which the start waits for the overrides of a Redis.
const OVERRIDES_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time an API client may go without reading any of its response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of parallel HTTP/2 streams of a connection.
const MAX_STREAMS: u32 = 256;
/// The same for the admin listener, whose responses may be large.
const ADMIN_MAX_STREAMS: u32 = 16;
/// Number of tasks that a busy thread runs before it looks for new requests of others. Tokio's own,
/// 61, makes them wait for as many connections that pipeline requests.
pub const EVENT_INTERVAL: u32 = 16;
/// Wait between two checks for a connection to Redis at startup.
const STARTUP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Runs the API, or in its place the listeners of envoyproxy/ratelimit, until SIGTERM or SIGINT.
/// Calls `announce` with the bound addresses.
pub async fn serve(
    config: Config,
    source: ConfigSource,
    ratelimit: Option<RatelimitSettings>,
    check_redis: RedisCheck,
    announce: impl FnOnce(&Listen),
) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let mut listen = config.listen.clone();
    let names = if ratelimit.is_some() { ["PORT", "GRPC_PORT"] } else { ["http", "grpc"] };
    let http_listener = bind(&listen, names[0], &listen.http).await?;
    let grpc_listener = bind(&listen, names[1], &listen.grpc).await?;
    (listen.http, listen.grpc) = (http_listener.address()?, grpc_listener.address()?);
    let grace = Some(AGE_GRACE_TIMEOUT);
    let max_age = listen.max_connection_age.map(|age| MaxAge { age, grace });
    let addresses = [("http", listen.http.clone()), ("grpc", listen.grpc.clone())];
    let guard = Arc::new(BrowserGuard::of_api(&listen.allowed_hosts));
    // By the side of Envoy, other hosts have to reach the listeners.
    let addresses = if ratelimit.is_some() { Vec::new() } else { addresses.to_vec() };
    let warn = Box::new(move |config: &Config| {
        warn_about_open_listeners(&addresses, config);
        for warning in &config.warnings_without_gateway {
            tracing::warn!("{warning}");
        }
    });
    let service = Service::start(config, source, Hooks { warn, check_redis }).await?;
    listen.admin = service.admin_address.clone();
    listen.resp = service.resp_address.clone();

    let state = &service.state;
    let stopped = &service.stopped;
    let rejections = Arc::clone(&service.rejections);
    let envoy = Envoy::new(Arc::clone(state), rejections, service.unready.subscribe()).await?;
    let envoy_of_grpc = Arc::clone(&envoy);
    let grpc_task = tokio::spawn(listener::serve(
        grpc_listener,
        move |peer| envoy_of_grpc.service(peer),
        current_tls(state),
        client_network(state),
        stopped.clone(),
        ListenerConfig { max_age, ..listener_config(&listen, state) },
    ));
    let (mut tasks, mut last_tasks) = (vec![grpc_task], Vec::new());
    match ratelimit {
        None => {
            let state_of_api = Arc::clone(state);
            tasks.push(tokio::spawn(listener::serve(
                http_listener,
                move |peer| api::service(&state_of_api, &guard, peer),
                current_tls(state),
                client_network(state),
                stopped.clone(),
                ListenerConfig { max_age, ..listener_config(&listen, state) },
            )));
        }
        Some(settings) => {
            let unready = service.unready.subscribe();
            let ratelimit = Ratelimit::new(state, envoy, unready, &settings)?;
            let debug = bind(&listen, "DEBUG_PORT", &settings.debug).await?;
            let mut listeners = vec![(http_listener, ratelimit.main()), (debug, ratelimit.debug())];
            if let Some((address, path)) = &settings.prometheus {
                let socket = bind(&listen, "PROMETHEUS_ADDR", address).await?;
                listeners.push((socket, ratelimit.metrics(path)));
            }
            for (socket, router) in listeners {
                // Without TLS, and until the end: probes have to see that requests are draining.
                last_tasks.push(tokio::spawn(listener::serve(
                    socket,
                    move |peer| listener::with_peer(&router, peer),
                    || None,
                    client_network(state),
                    service.admin_stop.subscribe(),
                    listener_config(&listen, state),
                )));
            }
        }
    }
    announce(&listen);
    service.run(signals, tasks).await;
    for task in last_tasks {
        let _ = task.await;
    }
    Ok(())
}

/// Returns the behaviour of a listener of the API.
pub fn listener_config(listen: &Listen, state: &ServerState) -> ListenerConfig {
    ListenerConfig {
        max_connections: listen.max_connections,
        max_connections_per_address: listen.max_connections_per_address,
        proxy_protocol: listen.proxy_protocol.clone(),
        max_streams: MAX_STREAMS,
        idle_timeout: listen.idle_timeout,
        closed: Arc::clone(&state.metrics.closed_connections),
        drain_timeout: DRAIN_TIMEOUT,
        max_age: None,
        write_timeout: WRITE_TIMEOUT,
        reject_ambiguous: false,
        inline_streams: true,
    }
}

/// Signal handlers, installed before anything else so that an early signal is not lost.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal to stop.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Logs warnings about the setup of a Redis. Arguments: the store, its configuration, and the
/// largest limit of a log that is a sorted set.
pub type RedisCheck = for<'a> fn(
    &'a RedisStore,
    &'a RedisConfig,
    StoreNeeds,
) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Calls of a service to the program that runs it.
pub struct Hooks {
    /// Called with the configuration now and after each reload.
    pub warn: Box<dyn Fn(&Config) + Send + Sync>,
    pub check_redis: RedisCheck,
}

/// Parts that `serve` and `gateway` share: the state, the reload of its configuration, and the
/// admin listener.
pub struct Service {
    pub state: Arc<ServerState>,
    ready: Arc<AtomicBool>,
    /// Turns true as soon as the instance is not ready, before the listeners stop.
    unready: watch::Sender<bool>,
    shutdown_delay: Duration,
    stop: watch::Sender<bool>,
    pub stopped: watch::Receiver<bool>,
    pub admin_address: ListenAddress,
    admin_stop: watch::Sender<bool>,
    admin: JoinHandle<()>,
    fleet: Arc<Fleet>,
    /// Redis protocol, if it is enabled.
    pub resp_address: Option<ListenAddress>,
    rejections: Arc<RejectionCounters>,
    resp: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the state and the admin listener.
    pub async fn start(config: Config, source: ConfigSource, hooks: Hooks) -> anyhow::Result<Self> {
        tidegate_net::raise_file_limit();
        stalls::start(runtime::Handle::current().metrics())?;
        (hooks.warn)(&config);
        config.log_warnings();
        let (mut files, store) = (config.files.clone(), config.store.clone());
        let xds = config.envoy.xds.clone();
        files.extend(source.password_file.clone());
        let Hooks { warn, check_redis } = hooks;
        let needs = config.store_needs();
        let listen = config.listen.clone();
        let admin_listener = bind(&config.listen, "admin", &config.listen.admin).await?;
        let admin_address = admin_listener.address()?;
        let resp_listener = match &config.listen.resp {
            Some(address) => Some(bind(&config.listen, "resp", address).await?),
            None => None,
        };
        let resp_address = resp_listener.as_ref().map(Socket::address).transpose()?;
        let guard = Arc::new(BrowserGuard::of_admin(&admin_address, &config.listen.allowed_hosts));
        let state = Arc::new(ServerState::start(config).await.context("store")?);
        state.journal.set_instance(&instance_name(&admin_address));
        let config_hash = state.active_guard().hash.clone();
        let version = env!("CARGO_PKG_VERSION");
        state.journal.record(EventKind::Started { version, config_hash });
        if let Some(file) = source.origin.file() {
            state.reloads.set_file(file.to_owned());
        }
        if let StoreConfig::Redis(config) = &store {
            let config = RedisConfig::clone(config);
            tokio::spawn(check_when_connected(Arc::clone(&state), config, needs, check_redis));
        }
        // The first request is decided by the overrides, too, if Redis is there.
        let _ = tokio::time::timeout(OVERRIDES_TIMEOUT, state.overrides.update()).await;
        tokio::spawn(Arc::clone(&state.overrides).follow());
        let (stop, stopped) = watch::channel(false);
        let ready = Arc::new(AtomicBool::new(true));
        if !files.is_empty() || xds.is_some() {
            // Compared with the file alone: flags for listeners are not a change of the file.
            let loaded = source.load().map_err(anyhow::Error::new)?;
            let restart_only =
                RestartOnlyConfig::new(&loaded, &admin_address, resp_address.as_ref());
            reload::watch(source, files, xds, restart_only, warn, Arc::clone(&state))?;
        }
        // The admin listener stops last: `/readyz` must report 503 while requests are draining.
        let (admin_stop, admin_stopped) = watch::channel(false);
        let live = Live::start(&state, admin_stopped.clone());
        let fleet = Fleet::start(&state, &live);
        let router = {
            let (state, ready, fleet) =
                (Arc::clone(&state), Arc::clone(&ready), Arc::clone(&fleet));
            admin::router(Admin { state, ready, guard, live, fleet })
        };
        let admin_tls = {
            let state = Arc::clone(&state);
            move || state.active().tls.as_ref().and_then(|tls| tls.admin.clone())
        };
        let admin = tokio::spawn(listener::serve(
            admin_listener,
            move |peer| listener::with_peer(&router, peer),
            admin_tls,
            client_network(&state),
            admin_stopped,
            ListenerConfig {
                drain_timeout: ADMIN_DRAIN_TIMEOUT,
                max_streams: ADMIN_MAX_STREAMS,
                ..listener_config(&listen, &state)
            },
        ));
        let shutdown_delay = listen.shutdown_delay;
        let rejections = RejectionCounters::registered(&state.metrics);
        let resp_shared = RespShared::new(&state.metrics);
        let resp = resp_listener.map(|listener| {
            let state = Arc::clone(&state);
            tokio::spawn(serve_resp(listener, state, resp_shared, stopped.clone(), listen))
        });
        let (unready, _) = watch::channel(false);
        Ok(Self {
            state,
            ready,
            unready,
            shutdown_delay,
            stop,
            stopped,
            admin_address,
            admin_stop,
            admin,
            fleet,
            resp_address,
            rejections,
            resp,
        })
    }

    /// Waits for a signal, then drains the listeners and shuts down.
    pub async fn run(
        self,
        mut signals: Signals,
        listeners: impl IntoIterator<Item = JoinHandle<()>>,
    ) {
        signals.next().await;
        self.ready.store(false, Ordering::Relaxed);
        let _ = self.unready.send(true);
        let uptime_ms = tidegate_api::duration::millis(self.state.started().0.elapsed());
        self.state.journal.record(EventKind::Stopping { uptime_ms });
        if !self.shutdown_delay.is_zero() {
            tracing::info!(
                delay = ?self.shutdown_delay,
                "not ready, accepting requests until the shutdown delay ends"
            );
            tokio::select! {
                () = tokio::time::sleep(self.shutdown_delay) => {}
                () = signals.next() => tracing::info!("second signal, shutdown delay skipped"),
            }
        }
        tracing::info!("shutting down, draining in-flight requests");
        let _ = self.stop.send(true);
        for listener in listeners.into_iter().chain(self.resp) {
            let _ = listener.await;
        }
        // Units in flight would be held until their leases end.
        let active = self.state.active();
        let _ = tokio::time::timeout(SETTLE_TIMEOUT, active.limiter.limiter().released()).await;
        if let Some(redis) = self.state.backend.redis() {
            // Debits of requests admitted during an outage would be lost with this process. The
            // future is boxed because its type nests all stores.
            let settle = Box::pin(redis.fallback().settle());
            let _ = tokio::time::timeout(SETTLE_TIMEOUT, settle).await;
            let events = self.fleet.publish_events(&self.state);
            let _ = tokio::time::timeout(SETTLE_TIMEOUT, events).await;
        }
        let _ = self.admin_stop.send(true);
        let _ = self.admin.await;
        tracing::info!("stopped");
    }
}

/// Returns the name of an instance: its host and the port, or path, of its admin listener.
fn instance_name(admin: &ListenAddress) -> String {
    let host = journal::host_name();
    match admin {
        ListenAddress::Tcp(address) => format!("{host}:{}", address.port()),
        ListenAddress::Unix(path) => format!("{host}:{}", path.display()),
    }
}

/// Serves the Redis protocol.
async fn serve_resp(
    listener: Socket,
    state: Arc<ServerState>,
    shared: Arc<RespShared>,
    stopped: watch::Receiver<bool>,
    listen: Listen,
) {
    let config = ListenerConfig {
        idle_timeout: listen.resp_idle_timeout,
        ..listener_config(&listen, &state)
    };
    let (http_tls, network) = (current_tls(&state), client_network(&state));
    let tls = || {
        let mut config = rustls::ServerConfig::clone(&*http_tls()?);
        // Clients of HTTP must not take this for one of its versions.
        config.alpn_protocols.clear();
        Some(Arc::new(config))
    };
    let is_remote = listener.address().is_ok_and(|address| address.is_remote());
    let protocol = |peer| Resp::new(&state, &shared, peer, is_remote);
    listener::serve_protocol(listener, protocol, tls, network, stopped, config).await;
}

/// Returns an error if a flag opens the Redis protocol to other hosts without a token.
pub fn check_resp(config: &Config) -> anyhow::Result<()> {
    anyhow::ensure!(
        config.tokens.of_api().is_some() || !config.listen.is_resp_remote(),
        "--resp is not on loopback but auth.api_token is not set: set a token in the file, or \
         listen on 127.0.0.1"
    );
    Ok(())
}

/// Warns about listeners of the API that other hosts can use without a token or a certificate.
fn warn_about_open_listeners(addresses: &[(&str, ListenAddress)], config: &Config) {
    for (listener, address) in config.open_listeners(addresses) {
        tracing::warn!(listener, %address, "{OPEN_LISTENER}");
    }
}

/// Checks the setup of Redis once it is connected.
async fn check_when_connected(
    state: Arc<ServerState>,
    config: RedisConfig,
    needs: StoreNeeds,
    check: RedisCheck,
) {
    let Some(redis) = state.backend.redis() else { return };
    while !redis.store().nodes().iter().any(|node| node.primary && node.connected) {
        tokio::time::sleep(STARTUP_POLL_INTERVAL).await;
    }
    check(redis.store(), &config, needs).await;
}

/// Returns a source of the current TLS settings: a reload replaces certificates without a restart.
pub fn current_tls(
    state: &Arc<ServerState>,
) -> impl Fn() -> Option<Arc<rustls::ServerConfig>> + Send + 'static {
    let state = Arc::clone(state);
    move || state.active().tls.as_ref().map(|tls| Arc::clone(&tls.service))
}

/// Returns a source of the networks by which connections are limited: none for trusted proxies,
/// whose connections carry the requests of many clients.
pub fn client_network(
    state: &Arc<ServerState>,
) -> impl Fn(IpAddr) -> Option<String> + Send + 'static {
    let state = Arc::clone(state);
    move |address| {
        let client_ip = &state.active().client_ip;
        (!client_ip.trusts(address)).then(|| client_ip.group(address))
    }
}

/// Returns the runtime of a service.
pub fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_multi_thread().enable_all().event_interval(EVENT_INTERVAL).build()
}

/// Binds the address of a field of `listen`, or of a variable of envoyproxy/ratelimit.
pub async fn bind(listen: &Listen, name: &str, address: &ListenAddress) -> anyhow::Result<Socket> {
    let is_variable = name.starts_with(|first: char| first.is_ascii_uppercase());
    let setting = if is_variable { name.to_owned() } else { format!("listen.{name}") };
    let bound = Socket::bind(address, listen.unix_mode).await;
    let is_in_use = |error: &anyhow::Error| {
        let cause = error.root_cause().downcast_ref::<io::Error>();
        cause.is_some_and(|cause| cause.kind() == io::ErrorKind::AddrInUse)
    };
    bound.with_context(|| setting.clone()).map_err(|error| {
        if !is_in_use(&error) {
            return error;
        }
        let flag = match name {
            "gateway" => "--listen".to_owned(),
            "resp" => "--resp".to_owned(),
            _ => format!("--listen-{name}"),
        };
        let other = if is_variable { String::new() } else { format!(" by {flag} or in the file") };
        anyhow::anyhow!(
            "{setting}: cannot listen on {address}: the address is already in use: end the \
             process that uses it, or set another{other}"
        )
    })
}
