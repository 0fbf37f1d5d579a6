//! [`NodeClient`]: one connection to one node, which a supervisor task keeps up.
//!
//! While a node is down, or its circuit is open because decisions fail, calls fail at once with the
//! reason. Only during the first attempt to
//! connect, or to reconnect after a loss, calls wait for its result, so that a brief interruption
//! causes no errors. A connection that fails its health check is replaced; calls already in flight
//! on it keep waiting until their own deadline.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout, timeout_at};

use self::backoff::Backoff;
use self::connection::{Address, RedisConnection, SharedOptions, is_primary_role, parse_time};
use self::error::{AttemptError, NodeError, ServerError, one_line, with_address};
use self::resp::{Command, Value};
use self::restrictions::{Restriction, Restrictions};
use self::server_clock::Estimate;
use self::stats::NodeCalls;
use super::batch::queue::Queue;
use super::script::ClockSource;
use super::script::call::LoadedScripts;
use crate::random::jittered;
use crate::store::circuit::{Circuit, CircuitOptions};

pub(super) mod backoff;
pub(super) mod connection;
pub(super) mod error;
pub(super) mod resp;
pub(super) mod restrictions;
pub(super) mod server_clock;
pub(super) mod stats;
pub(super) mod tls;
pub(super) mod url;
mod wire;

/// Client of one node. Dropping it closes the connection.
pub(super) struct NodeClient {
    shared: Arc<NodeShared>,
    queue: Queue,
    circuit: Circuit,
    calls: NodeCalls,
    /// Held while missing permissions are looked for, once for all calls that failed.
    pub(super) permission_check: tokio::sync::Mutex<()>,
    supervisor: JoinHandle<()>,
}

/// Settings of all nodes of a store.
#[derive(Clone, Copy)]
pub(super) struct NodeSettings {
    /// Timeout of a call.
    pub(super) timeout: Duration,
    pub(super) clock: ClockSource,
    /// Whether commands are sent without a call of the user: heartbeats, health checks, refreshes
    /// of the topology.
    pub(super) heartbeat: bool,
}

/// Expected kind of the node, which the handshake checks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A data node, primary or replica.
    Data,
    /// A data node that must be a primary.
    Primary,
    Sentinel,
}

/// State that callers share with the supervisor task.
struct NodeShared {
    address: Address,
    options: SharedOptions,
    role: Role,
    settings: NodeSettings,
    /// Timeout of a connect, handshake included, and of a health check.
    connect_timeout: Duration,
    state: watch::Sender<NodeConnection>,
    /// Triggered on a lost connection, because the topology may have changed.
    refresh: RefreshTrigger,
    /// Whether the node reports that it is a replica, or has refused a write.
    demoted: AtomicBool,
    closed_by_us: AtomicBool,
    /// Requests a health check before the next regular one.
    health_check: Notify,
    replies: AtomicU64,
    connections: AtomicU64,
    scripts: LoadedScripts,
    restrictions: Restrictions,
    last_error: Mutex<Option<NodeError>>,
}

enum NodeConnection {
    /// The first attempt to connect, at the start or after a loss, is in progress.
    Connecting,
    Up(Arc<RedisConnection>),
    Down(NodeError),
    /// Another node has replaced this one, and nothing is sent to it any more.
    Retired,
}

const MIN_CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of TIME while the server's clock is estimated.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
const CONNECT_BACKOFF: Backoff = Backoff::from_millis(50, 250);
/// A connection that is lost sooner counts as a failed attempt, with a backoff before the next.
const STABLE_AFTER: Duration = Duration::from_secs(1);

impl NodeClient {
    pub(super) fn new(
        address: Address,
        options: &SharedOptions,
        role: Role,
        settings: NodeSettings,
        refresh: &RefreshTrigger,
    ) -> Self {
        let shared = Arc::new(NodeShared {
            address,
            options: Arc::clone(options),
            role,
            settings,
            connect_timeout: settings.timeout.clamp(MIN_CONNECT_TIMEOUT, MAX_CONNECT_TIMEOUT),
            state: watch::Sender::new(NodeConnection::Connecting),
            refresh: refresh.clone(),
            demoted: AtomicBool::new(false),
            closed_by_us: AtomicBool::new(false),
            health_check: Notify::new(),
            replies: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            scripts: LoadedScripts::default(),
            restrictions: Restrictions::default(),
            last_error: Mutex::new(None),
        });
        let supervisor = tokio::spawn(Arc::clone(&shared).supervise());
        let circuit = Circuit::new(CircuitOptions::default());
        Self {
            shared,
            queue: Queue::new(),
            circuit,
            calls: NodeCalls::new(),
            permission_check: tokio::sync::Mutex::default(),
            supervisor,
        }
    }

    pub(super) fn address(&self) -> &Address {
        &self.shared.address
    }

    /// Returns the name of its user.
    pub(super) fn user(&self) -> String {
        self.shared.options.load().user.clone().unwrap_or_else(|| "default".to_owned())
    }

    /// Returns the circuit of decisions on this node.
    pub(super) fn circuit(&self) -> &Circuit {
        &self.circuit
    }

    /// Returns the latency and number of decision calls.
    pub(super) fn calls(&self) -> &NodeCalls {
        &self.calls
    }

    /// Returns whether the server is known to have this restriction.
    pub(super) fn refuses(&self, restriction: Restriction) -> bool {
        self.shared.restrictions.has(restriction)
    }

    /// Remembers a restriction until the next reconnect, and logs it once.
    pub(super) fn restrict(&self, restriction: Restriction, reason: &str) {
        if self.shared.restrictions.add(restriction) {
            tracing::info!(node = %self.address(), reason, "{}", restriction.message());
        }
    }

    /// Returns the clock of scripts on this node.
    pub(super) fn clock(&self) -> ClockSource {
        self.shared.clock()
    }

    /// Returns the estimate of the server's time that is in use.
    pub(super) fn last_estimate(&self) -> Option<Estimate> {
        match &*self.shared.state.borrow() {
            NodeConnection::Up(connection) => connection.clock.estimate(Instant::now()),
            _ => None,
        }
    }

    /// Returns an estimate of the server's time for a call that is sent next. Without a recent one,
    /// runs TIME first.
    pub(super) async fn estimate(
        &self,
        on: &RedisConnection,
        deadline: Instant,
    ) -> Result<Estimate, AttemptError> {
        if let Some(estimate) = on.clock.estimate(Instant::now()) {
            return Ok(estimate);
        }
        let (sent, time) = (Instant::now(), resp::encode(&[Command::new("TIME")]));
        let replies = self.within(deadline, self.send(on, &time, 1)).await;
        let replies = replies.map_err(AttemptError::into_unsent)?;
        if let Some(now) = replies.first().and_then(parse_time) {
            on.clock.add_sample(now, sent, Instant::now());
        }
        on.clock.estimate(Instant::now()).ok_or_else(|| {
            let reason = with_address(self.address(), "TIME has no usable reply");
            AttemptError::Server(ServerError::Other(reason))
        })
    }

    pub(super) fn is_retired(&self) -> bool {
        matches!(*self.shared.state.borrow(), NodeConnection::Retired)
    }

    /// Returns the queue of decisions for this node.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.shared.state.borrow(), NodeConnection::Up(_))
    }

    pub(super) fn last_error(&self) -> Option<NodeError> {
        self.shared.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the scripts that were loaded here.
    pub(super) fn scripts(&self) -> &LoadedScripts {
        &self.shared.scripts
    }

    /// Returns the number of connections after the first.
    pub(super) fn reconnects(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// Closes the connection for good, with all calls in flight: another node has replaced this
    /// one.
    pub(super) fn retire(&self) {
        self.supervisor.abort();
        if let NodeConnection::Up(connection) =
            self.shared.state.send_replace(NodeConnection::Retired)
        {
            connection.driver.abort();
        }
    }

    /// Replaces the connection unless it is new: the address may lead to another server now.
    pub(super) fn reconnect(&self) {
        if let NodeConnection::Up(connection) = &*self.shared.state.borrow()
            && connection.connected_at.elapsed() >= STABLE_AFTER
        {
            self.shared.closed_by_us.store(true, Ordering::Relaxed);
            connection.driver.abort();
        }
    }

    /// Reconnects to a node that has refused a write. It is used again once its handshake reports
    /// that it is a primary.
    pub(super) fn demote(&self) {
        self.shared.demoted.store(true, Ordering::Relaxed);
        self.reconnect();
    }

    pub(super) fn is_demoted(&self) -> bool {
        self.shared.demoted.load(Ordering::Relaxed)
    }

    /// Waits until there is a connection, or until the first attempt to connect has failed.
    pub(super) async fn ready(&self) -> Result<(), NodeError> {
        match self.shared.connection().await {
            Ok(_) => Ok(()),
            Err(AttemptError::Down(error)) => Err(error),
            Err(_) => Err(NodeError::new(self.address(), "the node is no longer used")),
        }
    }

    /// Returns the connection; if the first attempt to connect is in progress, waits for it.
    pub(super) async fn connection(
        &self,
        deadline: Instant,
    ) -> Result<Arc<RedisConnection>, AttemptError> {
        if let NodeConnection::Up(connection) = &*self.shared.state.borrow() {
            return Ok(Arc::clone(connection));
        }
        let still_connecting =
            |_| Err(AttemptError::Down(NodeError::new(self.address(), "still connecting")));
        timeout_at(deadline.into(), self.shared.connection()).await.unwrap_or_else(still_connecting)
    }

    /// Sends encoded commands once. The error of a single command is its reply.
    pub(super) async fn send(
        &self,
        on: &RedisConnection,
        commands: &[u8],
        replies: usize,
    ) -> Result<Vec<Value>, AttemptError> {
        let call = on.wire.call(commands, replies);
        let is_sent = call.is_sent();
        let replies = call.await;
        self.shared.replies.fetch_add(1, Ordering::Relaxed);
        replies.map_err(|error| {
            let error = AttemptError::new(self.address(), &error);
            if matches!(error, AttemptError::Lost(_)) {
                self.check_health();
            }
            if is_sent { error } else { error.into_unsent() }
        })
    }

    /// Checks the health of the connection now: a call had no reply.
    pub(super) fn check_health(&self) {
        self.shared.health_check.notify_one();
    }

    /// Waits for a call until its deadline.
    pub(super) async fn within<T>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<T, AttemptError>>,
    ) -> Result<T, AttemptError> {
        timeout_at(deadline.into(), call).await.unwrap_or_else(|_| {
            self.check_health();
            Err(AttemptError::TimedOut)
        })
    }

    /// Sends one command on the current connection.
    pub(super) async fn query(
        &self,
        command: Command,
        deadline: Instant,
    ) -> Result<Value, AttemptError> {
        let reply = self.query_all(&[command], deadline).await?.pop().unwrap_or(Value::Nil);
        reply.into_result().map_err(|error| AttemptError::new(self.address(), &error))
    }

    /// Sends several commands in a pipeline. The error of a single command is its reply.
    pub(super) async fn query_all(
        &self,
        commands: &[Command],
        deadline: Instant,
    ) -> Result<Vec<Value>, AttemptError> {
        let connection = self.connection(deadline).await?;
        let encoded = resp::encode(commands);
        self.within(deadline, self.send(&connection, &encoded, commands.len())).await
    }
}

impl Drop for NodeClient {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

impl NodeShared {
    /// Returns the connection, or the reason for its absence, once the first attempt to connect has
    /// ended.
    async fn connection(&self) -> Result<Arc<RedisConnection>, AttemptError> {
        let mut state = self.state.subscribe();
        let is_known = |state: &NodeConnection| !matches!(state, NodeConnection::Connecting);
        match state.wait_for(is_known).await.as_deref() {
            Ok(NodeConnection::Up(connection)) => Ok(Arc::clone(connection)),
            Ok(NodeConnection::Down(error)) => Err(AttemptError::Down(error.clone())),
            Ok(NodeConnection::Connecting | NodeConnection::Retired) | Err(_) => {
                Err(AttemptError::Retired)
            }
        }
    }

    /// Keeps the node connected, with backoff between attempts.
    async fn supervise(self: Arc<Self>) {
        let mut backoff = CONNECT_BACKOFF;
        let mut outage_logged = false;
        loop {
            let connected = timeout(self.connect_timeout, self.connect()).await;
            match connected.unwrap_or_else(|_| Err(self.no_answer())) {
                Ok((connection, driver)) => {
                    self.connections.fetch_add(1, Ordering::Relaxed);
                    self.set_state(NodeConnection::Up(Arc::clone(&connection)));
                    if std::mem::take(&mut outage_logged) {
                        tracing::info!(node = %self.address, "reconnected to Redis");
                    }
                    let error = self.monitor(&connection, driver).await;
                    if self.closed_by_us.swap(false, Ordering::Relaxed) {
                        tracing::debug!(
                            node = %self.address,
                            "Redis accepts no writes, reconnecting"
                        );
                    } else {
                        tracing::warn!(
                            node = %self.address,
                            reason = %error.reason,
                            "connection to Redis lost"
                        );
                        outage_logged = true;
                    }
                    self.record_error(&error);
                    let was_stable = connection.connected_at.elapsed() >= STABLE_AFTER;
                    self.set_state(if was_stable {
                        NodeConnection::Connecting
                    } else {
                        NodeConnection::Down(error)
                    });
                    self.refresh.trigger();
                    if was_stable {
                        backoff = CONNECT_BACKOFF;
                        continue;
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut outage_logged, true) {
                        tracing::warn!(
                            node = %self.address,
                            reason = %error.reason,
                            "cannot connect to Redis"
                        );
                    }
                    self.record_error(&error);
                    self.set_state(NodeConnection::Down(error));
                    self.refresh.trigger();
                }
            }
            sleep(jittered(backoff.next_wait())).await;
        }
    }

    fn no_answer(&self) -> NodeError {
        NodeError::new(&self.address, &format!("no answer within {:?}", self.connect_timeout))
    }

    /// Connects, performs the handshake, and checks the role.
    async fn connect(&self) -> Result<(Arc<RedisConnection>, JoinHandle<()>), NodeError> {
        let mut commands = vec![self.ping_command()];
        if self.role == Role::Primary {
            commands.push(Command::new("ROLE"));
        }
        let options = self.options.load_full();
        let (connection, driver, mut replies) =
            RedisConnection::open(&self.address, &options, commands).await?;
        // The address may lead to another server now.
        self.restrictions.forget();
        for reply in &replies {
            if let Err(error) = reply.clone().into_result() {
                return Err(NodeError::during_handshake(&self.address, &error));
            }
        }
        if self.role == Role::Primary {
            let demoted = !replies.pop().is_some_and(|role| is_primary_role(&role));
            self.demoted.store(demoted, Ordering::Relaxed);
            if demoted {
                return Err(NodeError::new(&self.address, "the node is a replica, not a primary"));
            }
        }
        if let Some(now) = replies.last().and_then(parse_time) {
            connection.clock.add_sample(now, connection.connected_at, Instant::now());
        }
        Ok((Arc::new(connection), driver))
    }

    /// Waits until the connection fails, and returns the reason. Sends a health check after an
    /// interval without replies, and after a call without a reply; an estimated clock needs its
    /// reply every second. Without heartbeats, nothing is sent while there are no calls.
    async fn monitor(&self, connection: &RedisConnection, mut driver: JoinHandle<()>) -> NodeError {
        let mut last_check = connection.connected_at;
        loop {
            let before = self.replies.load(Ordering::Relaxed);
            tokio::select! {
                _ = &mut driver => {
                    return NodeError::new(&self.address, "the connection was closed");
                }
                () = self.health_check.notified() => {}
                () = sleep(HEALTH_CHECK_INTERVAL) => {
                    let is_in_use = self.replies.load(Ordering::Relaxed) != before;
                    let is_due = if is_in_use {
                        self.clock() == ClockSource::Estimated
                            && last_check.elapsed() >= SAMPLE_INTERVAL
                    } else {
                        self.settings.heartbeat
                    };
                    if !is_due {
                        continue;
                    }
                }
            }
            let sent = Instant::now();
            last_check = sent;
            let ping = [self.ping_command()];
            match timeout(self.connect_timeout, connection.wire.send(&ping)).await {
                Ok(Ok(replies)) => {
                    if let Some(now) = replies.first().and_then(parse_time) {
                        connection.clock.add_sample(now, sent, Instant::now());
                    }
                }
                Ok(Err(error)) => return NodeError::new(&self.address, &one_line(&error)),
                Err(_) => return self.no_answer(),
            }
        }
    }

    fn clock(&self) -> ClockSource {
        if self.restrictions.has(Restriction::TimeInScripts) {
            return ClockSource::Estimated;
        }
        self.settings.clock
    }

    /// Returns the command of a health check. TIME also updates the server's clock.
    fn ping_command(&self) -> Command {
        Command::new(if self.role == Role::Sentinel { "PING" } else { "TIME" })
    }

    /// Changes the state, unless the node is retired.
    fn set_state(&self, next: NodeConnection) {
        self.state.send_if_modified(|state| {
            let retired = matches!(state, NodeConnection::Retired);
            if !retired {
                *state = next;
            }
            !retired
        });
    }

    fn record_error(&self, error: &NodeError) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
    }
}

/// Asks every task that follows the topology to refresh it now. Any number of triggers before the
/// next wait count as one.
#[derive(Clone)]
pub(super) struct RefreshTrigger(watch::Sender<()>);

/// Receiver of a [`RefreshTrigger`], one per task.
pub(super) struct RefreshListener(watch::Receiver<()>);

impl RefreshTrigger {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(()))
    }

    pub(super) fn trigger(&self) {
        self.0.send_replace(());
    }

    pub(super) fn listener(&self) -> RefreshListener {
        RefreshListener(self.0.subscribe())
    }
}

impl RefreshListener {
    /// Waits for a trigger; returns at once if there was one since the last wait.
    pub(super) async fn wait(&mut self) {
        let triggered = self.0.changed().await;
        debug_assert!(triggered.is_ok(), "every listening task holds the trigger, too");
    }

    /// Waits like [`wait`](Self::wait), at most for this time.
    pub(super) async fn wait_timeout(&mut self, limit: Duration) {
        let _ = timeout(limit, self.wait()).await;
    }
}
