//! [`Link`]: one connection to one node, kept up by a task of its own.
//!
//! While there is no connection, calls fail at once and say why. Only when a connection was lost
//! (or never tried) just now, a call waits for the first attempt to make a new one, within its own
//! deadline: a brief interruption is then no error. A connection from which nothing comes back,
//! though asked, is replaced; who still waits on it waits in peace.

use std::hash::Hasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{sleep, timeout, timeout_at};

use super::access::{Access, Address};
use super::fault::{Fault, Trouble, one_line};
use super::queue::Queue;
use super::script::{SCRIPTS, Script};
use super::server_clock::ServerClock;
use super::stir::Stir;
use crate::random::jittered;
use crate::store::ShardId;

pub(super) struct Link {
    node: Arc<Node>,
    queue: Queue,
    keeper: JoinHandle<()>,
}

/// What kind of node is at the other end, and so what it must answer before it is used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A data node, whatever it is just now.
    Data,
    /// A data node that must be a primary.
    Primary,
    Sentinel,
}

struct Node {
    address: Address,
    access: Arc<Access>,
    role: Role,
    part: ShardId,
    /// How long a connection may take to be made, and to answer when it is in doubt.
    patience: Duration,
    state: watch::Sender<State>,
    /// Told when there is no connection: the topology may have changed.
    lost: Stir,
    /// It says that it is a replica, or has refused to write.
    demoted: AtomicBool,
    /// We ended the connection ourselves.
    cut: AtomicBool,
    doubt: Notify,
    replies: AtomicU64,
    connections: AtomicU64,
    loads: [Load; SCRIPTS],
    script_loads: AtomicU64,
    last_trouble: Mutex<Option<Trouble>>,
}

enum State {
    /// The first attempt since the connection was lost, or the very first, is under way.
    Connecting,
    Up(Arc<Connection>),
    Down(Trouble),
    /// Another node has taken its place: nothing is sent here any more.
    Retired,
}

pub(super) struct Connection {
    handle: MultiplexedConnection,
    driver: AbortHandle,
    made: Instant,
    /// Of the server at the other end of this very connection: the next may lead to another.
    clock: ServerClock,
}

/// One script on one node: who finds it missing loads it, once for all who found it missing.
#[derive(Default)]
struct Load {
    done: AtomicU64,
    turn: tokio::sync::Mutex<()>,
}

const PATIENCE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));
const HEARTBEAT: Duration = Duration::from_millis(500);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(300);
/// A connection that ended sooner was none: the next one has to wait.
const SHORT_LIFE: Duration = Duration::from_secs(1);

impl Link {
    pub(super) fn new(
        address: Address,
        access: &Arc<Access>,
        role: Role,
        timeout: Duration,
        lost: &Stir,
    ) -> Self {
        let node = Arc::new(Node {
            part: part_of(&address),
            address,
            access: Arc::clone(access),
            role,
            patience: timeout.clamp(PATIENCE.0, PATIENCE.1),
            state: watch::Sender::new(State::Connecting),
            lost: lost.clone(),
            demoted: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            doubt: Notify::new(),
            replies: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            loads: std::array::from_fn(|_| Load::default()),
            script_loads: AtomicU64::new(0),
            last_trouble: Mutex::new(None),
        });
        let keeper = tokio::spawn(Arc::clone(&node).keep_connected());
        Self { node, queue: Queue::new(), keeper }
    }

    pub(super) fn address(&self) -> &Address {
        &self.node.address
    }

    pub(super) fn part(&self) -> ShardId {
        self.node.part
    }

    /// Decisions that wait for those under way.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(*self.node.state.borrow(), State::Up(_))
    }

    pub(super) fn last_trouble(&self) -> Option<Trouble> {
        self.node.last_trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn script_loads(&self) -> u64 {
        self.node.script_loads.load(Ordering::Relaxed)
    }

    /// Connections made after the first.
    pub(super) fn reconnects(&self) -> u64 {
        self.node.connections.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// Cuts the connection, calls under way and all: another node has taken this one's place.
    pub(super) fn retire(&self) {
        self.keeper.abort();
        if let State::Up(connection) = self.node.state.send_replace(State::Retired) {
            connection.driver.abort();
        }
    }

    /// Makes the connection anew, unless it is new: its address may lead to another server now.
    pub(super) fn reconnect(&self) {
        if let State::Up(connection) = &*self.node.state.borrow()
            && connection.made.elapsed() >= SHORT_LIFE
        {
            self.node.cut.store(true, Ordering::Relaxed);
            connection.driver.abort();
        }
    }

    /// It has refused to write: it is not used again before it has said that it is a primary.
    pub(super) fn demote(&self) {
        self.node.demoted.store(true, Ordering::Relaxed);
        self.reconnect();
    }

    pub(super) fn is_demoted(&self) -> bool {
        self.node.demoted.load(Ordering::Relaxed)
    }

    /// Until there is a connection, or the first attempt to make one has failed.
    pub(super) async fn ready(&self) -> Result<(), Trouble> {
        match self.node.connection().await {
            Ok(_) => Ok(()),
            Err(Fault::Down(trouble)) => Err(trouble),
            Err(_) => Err(Trouble::new(self.address(), "is no longer used")),
        }
    }

    /// A connection to send on, now or as soon as the attempt that is under way has made one.
    pub(super) async fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, Fault> {
        if let State::Up(connection) = &*self.node.state.borrow() {
            return Ok(Arc::clone(connection));
        }
        let still_connecting =
            |_| Err(Fault::Down(Trouble::new(self.address(), "still connecting")));
        timeout_at(deadline.into(), self.node.connection()).await.unwrap_or_else(still_connecting)
    }

    /// Sends a command, once, and brings what it answered.
    pub(super) async fn send(
        &self,
        on: &Connection,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, Fault> {
        let mut handle = on.handle.clone();
        let reply = timeout_at(deadline.into(), handle.send_packed_command(command)).await;
        self.node.received(reply.map(|reply| reply.and_then(Value::extract_error)))
    }

    /// Sends a command to a node that imports its slot: only right after ASKING does it look there.
    pub(super) async fn send_asking(
        &self,
        on: &Connection,
        command: Cmd,
        deadline: Instant,
    ) -> Result<Value, Fault> {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(redis::cmd("ASKING")).add_command(command);
        let mut handle = on.handle.clone();
        let replies = timeout_at(deadline.into(), handle.send_packed_commands(&both, 0, 2)).await;
        let last = |replies: Vec<Value>| {
            replies.into_iter().next_back().unwrap_or(Value::Nil).extract_error()
        };
        self.node.received(replies.map(|replies| replies.and_then(last)))
    }

    /// Sends several commands in one go, once, and brings what each answered.
    pub(super) async fn send_all(
        &self,
        on: &Connection,
        commands: &Pipeline,
        deadline: Instant,
    ) -> Result<Vec<Result<Value, Fault>>, Fault> {
        let replies = self.pipeline(on, commands, deadline).await?;
        let said = |reply: Value| {
            reply.extract_error().map_err(|error| Fault::new(self.address(), &error))
        };
        Ok(replies.into_iter().map(said).collect())
    }

    async fn pipeline(
        &self,
        on: &Connection,
        commands: &Pipeline,
        deadline: Instant,
    ) -> Result<Vec<Value>, Fault> {
        let mut handle = on.handle.clone();
        let replies =
            timeout_at(deadline.into(), handle.send_packed_commands(commands, 0, commands.len()))
                .await;
        let replies = self.node.received(replies.map(|replies| replies.map(Value::Array)))?;
        Ok(if let Value::Array(replies) = replies { replies } else { Vec::new() })
    }

    /// A plain command, on whatever connection there is.
    pub(super) async fn ask(&self, command: &Cmd, deadline: Instant) -> Result<Value, Fault> {
        self.send(&*self.connection(deadline).await?, command, deadline).await
    }

    /// Plain commands in one go; an error that one of them met is in its place.
    pub(super) async fn ask_all(
        &self,
        commands: &Pipeline,
        deadline: Instant,
    ) -> Result<Vec<Value>, Fault> {
        self.pipeline(&*self.connection(deadline).await?, commands, deadline).await
    }

    /// How often this script has been loaded here; to be read before a call.
    pub(super) fn loads_of(&self, script: &Script) -> u64 {
        self.node.loads[script.index()].done.load(Ordering::Acquire)
    }

    /// Loads a script that a call did not find. Of all calls that did not find it, one loads it.
    pub(super) async fn load(
        &self,
        script: &Script,
        loads_before_call: u64,
        deadline: Instant,
    ) -> Result<(), Fault> {
        let load = &self.node.loads[script.index()];
        let Ok(_turn) = timeout_at(deadline.into(), load.turn.lock()).await else {
            return Err(Fault::TimedOut);
        };
        if load.done.load(Ordering::Acquire) > loads_before_call {
            return Ok(());
        }
        self.node.script_loads.fetch_add(1, Ordering::Relaxed);
        self.ask(redis::cmd("SCRIPT").arg("LOAD").arg(script.text()), deadline).await?;
        load.done.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Connection {
    fn new(handle: MultiplexedConnection, driver: &JoinHandle<()>) -> Self {
        Self {
            handle,
            driver: driver.abort_handle(),
            made: Instant::now(),
            clock: ServerClock::new(),
        }
    }

    pub(super) fn clock(&self) -> &ServerClock {
        &self.clock
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Node {
    async fn connection(&self) -> Result<Arc<Connection>, Fault> {
        let of = |state: &State| match state {
            State::Up(connection) => Some(Ok(Arc::clone(connection))),
            State::Down(trouble) => Some(Err(Fault::Down(trouble.clone()))),
            State::Retired => Some(Err(Fault::Retired)),
            State::Connecting => None,
        };
        if let Some(settled) = of(&self.state.borrow()) {
            return settled;
        }
        let mut changes = self.state.subscribe();
        loop {
            if let Some(settled) = of(&changes.borrow_and_update()) {
                return settled;
            }
            if changes.changed().await.is_err() {
                return Err(Fault::Retired);
            }
        }
    }

    fn received<E>(&self, reply: Result<Result<Value, RedisError>, E>) -> Result<Value, Fault> {
        let Ok(reply) = reply else {
            self.doubt.notify_one();
            return Err(Fault::TimedOut);
        };
        self.replies.fetch_add(1, Ordering::Relaxed);
        reply.map_err(|error| {
            let fault = Fault::new(&self.address, &error);
            if matches!(fault, Fault::Lost(_)) {
                self.doubt.notify_one();
            }
            fault
        })
    }

    async fn keep_connected(self: Arc<Self>) {
        let (mut pause, mut told) = (FIRST_PAUSE, false);
        loop {
            let silent = |_| {
                Err(Trouble::new(&self.address, &format!("no answer within {:?}", self.patience)))
            };
            match timeout(self.patience, self.connect()).await.unwrap_or_else(silent) {
                Ok((connection, driver)) => {
                    self.connections.fetch_add(1, Ordering::Relaxed);
                    self.become_(State::Up(Arc::clone(&connection)));
                    if std::mem::take(&mut told) {
                        tracing::info!(node = %self.address, "Redis is back");
                    }
                    let trouble = self.watch(&connection, driver).await;
                    if self.cut.swap(false, Ordering::Relaxed) {
                        tracing::debug!(node = %self.address, "it does not write: the connection is made anew");
                    } else {
                        tracing::warn!(node = %self.address, reason = %trouble.reason, "the connection to Redis is lost");
                        told = true;
                    }
                    self.remember(&trouble);
                    let lasting = connection.made.elapsed() >= SHORT_LIFE;
                    self.become_(if lasting { State::Connecting } else { State::Down(trouble) });
                    self.lost.stir();
                    if lasting {
                        pause = FIRST_PAUSE;
                        continue;
                    }
                }
                Err(trouble) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(node = %self.address, reason = %trouble.reason, "Redis cannot be reached");
                    }
                    self.remember(&trouble);
                    self.become_(State::Down(trouble));
                    self.lost.stir();
                }
            }
            sleep(jittered(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// A connection that is good for use: let in, and with an answer from the other end.
    async fn connect(&self) -> Result<(Arc<Connection>, JoinHandle<()>), Trouble> {
        let broken = |error: &RedisError| {
            // A server that does not like our certificate only says so after the handshake, if at
            // all.
            let perhaps = if self.access.tls.is_some() && error.is_connection_dropped() {
                " (by TLS: does it ask for another certificate of ours?)"
            } else {
                ""
            };
            Trouble::new(&self.address, &format!("{}{perhaps}", one_line(error)))
        };
        let (handle, driver) =
            self.address.open(&self.access).await.map_err(|error| broken(&error))?;
        let driver = tokio::spawn(driver);
        let connection = Connection::new(handle, &driver);
        let mut greeting = Pipeline::new();
        for command in self.access.greeting() {
            greeting.add_command(command);
        }
        greeting.add_command(self.sign_of_life());
        if self.role == Role::Primary {
            greeting.add_command(redis::cmd("ROLE"));
        }
        let sent = Instant::now();
        let replies =
            connection.handle.clone().send_packed_commands(&greeting, 0, greeting.len()).await;
        let mut replies = replies.map_err(|error| broken(&error))?;
        for reply in &replies {
            if let Value::ServerError(error) = reply {
                return Err(Trouble::at_the_door(&self.address, &RedisError::from(error.clone())));
            }
        }
        if self.role == Role::Primary {
            let demoted = !replies.pop().is_some_and(|role| says_primary(&role));
            self.demoted.store(demoted, Ordering::Relaxed);
            if demoted {
                return Err(Trouble::new(&self.address, "it is a replica, not a primary"));
            }
        }
        if let Some(now) = replies.last().and_then(server_micros) {
            connection.clock.heard(now, sent, Instant::now());
        }
        Ok((Arc::new(connection), driver))
    }

    /// Returns when the connection is of no more use. It is asked for a sign of life when nothing
    /// has come for a while, and when a call got no answer.
    async fn watch(&self, connection: &Connection, mut driver: JoinHandle<()>) -> Trouble {
        loop {
            let before = self.replies.load(Ordering::Relaxed);
            tokio::select! {
                _ = &mut driver => return Trouble::new(&self.address, "the connection was closed"),
                () = self.doubt.notified() => {}
                () = sleep(HEARTBEAT) => if self.replies.load(Ordering::Relaxed) != before { continue },
            }
            let (sent, command) = (Instant::now(), self.sign_of_life());
            let mut handle = connection.handle.clone();
            match timeout(self.patience, handle.send_packed_command(&command)).await {
                Ok(Ok(reply)) => {
                    if let Some(now) = server_micros(&reply) {
                        connection.clock.heard(now, sent, Instant::now());
                    }
                }
                Ok(Err(error)) => return Trouble::new(&self.address, &one_line(&error)),
                Err(_) => {
                    return Trouble::new(
                        &self.address,
                        &format!("no answer within {:?}", self.patience),
                    );
                }
            }
        }
    }

    fn sign_of_life(&self) -> Cmd {
        redis::cmd(if self.role == Role::Sentinel { "PING" } else { "TIME" })
    }

    fn become_(&self, next: State) {
        self.state.send_if_modified(|state| {
            let retired = matches!(state, State::Retired);
            if !retired {
                *state = next;
            }
            !retired
        });
    }

    fn remember(&self, trouble: &Trouble) {
        *self.last_trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble.clone());
    }
}

/// Asks a node that we have no link to: makes a connection, asks, and ends it. Bounded by
/// `patience`.
pub(super) async fn ask_once(
    address: &Address,
    access: &Access,
    command: Cmd,
    patience: Duration,
) -> Result<Value, Trouble> {
    let ask = async {
        let (mut handle, driver) = address.open(access).await?;
        let driver = tokio::spawn(driver);
        let _connection = Connection::new(handle.clone(), &driver);
        let mut all = Pipeline::new();
        for command in access.greeting().into_iter().chain([command]) {
            all.add_command(command);
        }
        let replies = handle.send_packed_commands(&all, 0, all.len()).await?;
        let mut last = Value::Nil;
        for reply in replies {
            last = reply.extract_error()?;
        }
        Ok(last)
    };
    match timeout(patience, ask).await {
        Ok(reply) => reply.map_err(|error: RedisError| Trouble::at_the_door(address, &error)),
        Err(_) => Err(Trouble::new(address, &format!("no answer within {patience:?}"))),
    }
}

/// The reply of ROLE.
pub(super) fn says_primary(role: &Value) -> bool {
    let Value::Array(parts) = role else { return false };
    matches!(parts.first(), Some(Value::BulkString(name)) if name == b"master")
}

/// The reply of TIME.
fn server_micros(reply: &Value) -> Option<i64> {
    let Value::Array(parts) = reply else { return None };
    let number = |part: &Value| match part {
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse::<i64>().ok(),
        _ => None,
    };
    let [seconds, micros] = parts.as_slice() else { return None };
    Some(number(seconds)? * 1_000_000 + number(micros)?)
}

/// The same for the same address, whoever asks, so that a part keeps its name over restarts.
fn part_of(address: &Address) -> ShardId {
    let mut hasher = siphasher::sip::SipHasher13::new();
    hasher.write(address.to_string().as_bytes());
    // 0 is the whole.
    ShardId(hasher.finish().max(1))
}
