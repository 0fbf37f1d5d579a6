//! Health of the nodes for operators: a snapshot, counters, and plain commands.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::RedisStore;
use super::client::NodeClient;
use super::client::connection::{Address, query_all_once};
use super::client::resp::{Command, Value};
use super::client::restrictions::Restriction;
use super::client::stats::Distribution;
use super::coordination::probe::probe;
use super::script::ClockSource;
use crate::store::StoreError;
use crate::store::circuit::CircuitState;

/// Health of one node, as this process sees it: an entry of [`RedisStore::nodes`].
///
/// ```no_run
/// use tidegate::RedisStore;
///
/// /// Returns whether every shard can decide, for a readiness check.
/// fn is_ready(store: &RedisStore) -> bool {
///     let mut deciding = store.nodes().into_iter().filter(|node| node.primary).peekable();
///     deciding.peek().is_some() && deciding.all(|node| node.connected && !node.circuit.open)
/// }
///
/// fn log_failures(store: &RedisStore) {
///     for node in store.nodes().iter().filter(|node| !node.connected) {
///         let reason = node.last_error.as_deref().unwrap_or("not connected yet");
///         eprintln!("{}: {reason}", node.address);
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeHealth {
    /// Address of the node, without user and password.
    pub address: String,
    /// Whether there is a connection.
    pub connected: bool,
    /// Whether the node decides. Sentinels do not.
    pub primary: bool,
    /// Number of slots of a cluster that it serves. Outside of a cluster it is
    /// [`ALL_SLOTS`](Self::ALL_SLOTS), and 0 for a sentinel.
    pub slots: u16,
    /// Circuit of its decisions. While it is open, they fail at once.
    pub circuit: CircuitState,
    /// Last error of the connection, even if the node has reconnected since.
    pub last_error: Option<String>,
    /// Number of scripts that this process has loaded on the node.
    pub script_loads: u64,
    /// Number of connections after the first.
    pub reconnects: u64,
    /// Number of calls that decide and wait for their replies now.
    pub in_flight: usize,
    /// Latency of these calls in microseconds, from just before they were sent.
    pub latency: Distribution,
    /// Clock of its decisions.
    pub clock: ClockSource,
    /// Maximum error of an estimated clock now; `None` if scripts read the server's clock, or if no
    /// estimate is in use because the node was idle or is not connected.
    pub clock_error: Option<Duration>,
    /// Scripts that it has refused since the connection was made. This store avoids them.
    pub restrictions: Vec<Restriction>,
}

/// Reply of a node to a plain command.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// No value.
    Nil,
    /// An integer.
    Integer(i64),
    /// A string, in which invalid UTF-8 is replaced.
    Text(String),
    /// Several replies.
    List(Vec<Reply>),
    /// An error message of the server, which starts with a code in capitals.
    Error(String),
}

impl RedisStore {
    /// Returns the health of each node: those that decide, then the sentinels. It reads a snapshot
    /// in memory and sends nothing.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeHealth> {
        let topology = self.dispatcher.topology();
        let primaries = topology.primaries_with_slots();
        primaries
            .iter()
            .map(|(node, slots)| NodeHealth { slots: *slots, ..NodeHealth::of(node, true) })
            .chain(topology.sentinels().iter().map(|node| NodeHealth::of(node, false)))
            .collect()
    }

    /// Returns the number of script loads on all nodes. Each node loads each kind of script once,
    /// and again after a restart or `SCRIPT FLUSH`.
    #[must_use]
    pub fn script_loads(&self) -> u64 {
        self.dispatcher.topology().totals().script_loads
    }

    /// Returns the number of reconnects to nodes that decide.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.dispatcher.topology().totals().reconnects
    }

    /// Returns how often the circuit of a node has opened.
    #[must_use]
    pub fn circuits_opened(&self) -> u64 {
        self.dispatcher.topology().totals().circuits_opened
    }

    /// Returns the number of MOVED and ASK redirects of a cluster. It grows while slots move and
    /// after a failover; steady growth may mean that the topology cannot be refreshed.
    #[must_use]
    pub fn redirects(&self) -> u64 {
        self.dispatcher.topology().redirects()
    }

    /// Returns the number of requests that each script call has decided: more than one if they
    /// arrived during another call.
    #[must_use]
    pub fn decisions_per_call(&self) -> Distribution {
        self.dispatcher.call_sizes.read()
    }

    /// Decides a charge on an internal key, and so checks whether the node of this address can
    /// decide now. The result does not count in the circuit of the node.
    ///
    /// ```no_run
    /// use tidegate::{RedisStore, StoreError};
    ///
    /// async fn check(store: &RedisStore) -> Result<(), StoreError> {
    ///     for node in store.nodes().iter().filter(|node| node.primary) {
    ///         store.probe_node(&node.address).await?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub async fn probe_node(&self, address: &str) -> Result<(), StoreError> {
        let primaries = self.dispatcher.topology().primaries();
        match primaries.iter().find(|node| node.address().to_string() == address) {
            Some(node) => probe(&self.dispatcher, node).await,
            None => Err(StoreError::Unreachable(format!("{address} is not a primary"))),
        }
    }

    /// Runs a plain command on the node of this address: one of [`nodes`](Self::nodes), or another
    /// one, such as a replica. Commands have a timeout of at least a second.
    ///
    /// ```no_run
    /// use tidegate::RedisStore;
    /// use tidegate::store::redis::Reply;
    ///
    /// async fn version(store: &RedisStore) -> Result<Option<String>, tidegate::StoreError> {
    ///     let Some(node) = store.nodes().into_iter().next() else { return Ok(None) };
    ///     match store.ask_node(&node.address, &["INFO", "server"]).await? {
    ///         Reply::Text(info) => Ok(info.lines().nth(1).map(str::to_owned)),
    ///         _ => Ok(None),
    ///     }
    /// }
    /// ```
    pub async fn ask_node(&self, address: &str, words: &[&str]) -> Result<Reply, StoreError> {
        let replies = self.ask_node_all(address, &[words]).await?;
        Ok(replies.into_iter().next().unwrap_or(Reply::Nil))
    }

    /// Runs several plain commands in one pipeline, like [`ask_node`](Self::ask_node). The error of
    /// a single command is its [`Reply::Error`]; an `Err` means that the node did not answer.
    pub async fn ask_node_all(
        &self,
        address: &str,
        commands: &[&[&str]],
    ) -> Result<Vec<Reply>, StoreError> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        let topology = self.dispatcher.topology();
        let has_address = |node: &&Arc<NodeClient>| node.address().to_string() == address;
        let primaries = topology.primaries();
        let Some(node) = primaries.iter().chain(topology.sentinels()).find(has_address) else {
            return self.ask_node_separately(address, commands).await;
        };
        let timeout = self.command_timeout();
        let replies = node.query_all(&encode(commands), Instant::now() + timeout).await;
        let replies = replies.map_err(|error| error.into_store_error(timeout))?;
        Ok(replies.into_iter().map(Reply::from_value).collect())
    }

    /// Runs several plain commands in one pipeline, like [`ask_node_all`](Self::ask_node_all), on a
    /// connection of their own.
    pub async fn ask_node_separately(
        &self,
        address: &str,
        commands: &[&[&str]],
    ) -> Result<Vec<Reply>, StoreError> {
        let Some(target) = Address::tcp("", 0).parse_relative(address) else {
            return Err(StoreError::Misconfigured(format!(
                "{address:?} is not an address like 10.0.0.1:6379"
            )));
        };
        let options = self.dispatcher.topology().options();
        let timeout = self.command_timeout();
        let replies = query_all_once(&target, &options, encode(commands), timeout).await;
        let replies = replies.map_err(|error| StoreError::Unreachable(error.reason))?;
        Ok(replies.into_iter().map(Reply::from_value).collect())
    }

    fn command_timeout(&self) -> Duration {
        self.dispatcher.timeout.max(MIN_COMMAND_TIMEOUT)
    }
}

/// Minimum timeout of a plain command: operators can wait longer than decisions.
const MIN_COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

impl NodeHealth {
    /// Number of slots of a cluster.
    pub const ALL_SLOTS: u16 = 16_384;

    fn of(node: &NodeClient, primary: bool) -> Self {
        let is_estimated = primary && node.clock() == ClockSource::Estimated;
        Self {
            address: node.address().to_string(),
            connected: node.is_up(),
            primary,
            slots: 0,
            circuit: node.circuit().state(),
            last_error: node.last_error().map(|error| error.reason),
            script_loads: node.scripts().total(),
            reconnects: node.reconnects(),
            in_flight: node.calls().in_flight(),
            latency: node.calls().latency(),
            clock: node.clock(),
            clock_error: node.last_estimate().filter(|_| is_estimated).map(|estimate| {
                Duration::from_micros(u64::try_from(estimate.max_error).unwrap_or(u64::MAX))
            }),
            restrictions: Restriction::ALL.into_iter().filter(|one| node.refuses(*one)).collect(),
        }
    }
}

fn encode(commands: &[&[&str]]) -> Vec<Command> {
    let command = |words: &&[&str]| {
        let (name, arguments) = words.split_first()?;
        Some(arguments.iter().fold(Command::new(name), Command::arg))
    };
    commands.iter().filter_map(command).collect()
}

impl Reply {
    fn from_value(value: Value) -> Self {
        match value {
            Value::Nil => Self::Nil,
            Value::Integer(number) => Self::Integer(number),
            Value::String(bytes) => Self::Text(String::from_utf8_lossy(&bytes).into_owned()),
            Value::Array(values) => Self::List(values.into_iter().map(Self::from_value).collect()),
            Value::Error(text) => Self::Error(text),
        }
    }
}
