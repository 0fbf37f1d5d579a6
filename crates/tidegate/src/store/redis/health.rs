//! How the nodes are, for operators: a snapshot, counters, and plain commands.

use std::time::Instant;

use redis::Value;

use super::RedisStore;
use super::link::Link;
use crate::store::StoreError;

/// How one node is, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeHealth {
    /// Its address, without user and password.
    pub address: String,
    /// Whether there is a connection.
    pub connected: bool,
    /// Whether it decides. Sentinels do not.
    pub primary: bool,
    /// What last went wrong with its connection, even if that is long past.
    pub last_error: Option<String>,
    /// How many scripts this process has loaded there.
    pub script_loads: u64,
    /// How many connections were made after the first.
    pub reconnects: u64,
}

/// What a node answers to a plain command.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// Nothing.
    Nil,
    /// A number.
    Integer(i64),
    /// A text; bytes that are no UTF-8 are replaced.
    Text(String),
    /// Several replies.
    List(Vec<Reply>),
    /// An error among them.
    Error(String),
}

impl RedisStore {
    /// How each node is: those that decide, then the sentinels.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeHealth> {
        let known = self.shared.topology.known();
        let of = |link: &Link, primary| NodeHealth {
            address: link.address().to_string(),
            connected: link.is_up(),
            primary,
            last_error: link.last_trouble().map(|trouble| trouble.reason),
            script_loads: link.script_loads(),
            reconnects: link.reconnects(),
        };
        let primaries = known.primaries();
        primaries
            .iter()
            .map(|link| of(link, true))
            .chain(known.sentinels().iter().map(|link| of(link, false)))
            .collect()
    }

    /// How many scripts were loaded, on all nodes: one a node and kind of call, and again after a restart or a flush.
    #[must_use]
    pub fn script_loads(&self) -> u64 {
        self.shared.topology.known().script_loads()
    }

    /// How many connections to nodes that decide were made anew.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.shared.topology.known().reconnects()
    }

    /// How many calls a cluster sent on to another node.
    #[must_use]
    pub fn redirects(&self) -> u64 {
        self.shared.topology.known().redirects()
    }

    /// Runs a plain command on each node that decides.
    #[doc(hidden)]
    pub async fn ask_every_node(&self, words: &[&str]) -> Vec<(String, Result<Reply, StoreError>)> {
        let mut answers = Vec::new();
        let Some((name, arguments)) = words.split_first() else { return answers };
        let mut command = redis::cmd(name);
        command.arg(arguments);
        for link in self.shared.topology.known().primaries() {
            let timeout = self.shared.timeout;
            let reply = link.ask(&command, Instant::now() + timeout).await;
            let reply = reply.map(Reply::from_value).map_err(|fault| fault.into_store_error(timeout));
            answers.push((link.address().to_string(), reply));
        }
        answers
    }
}

impl Reply {
    fn from_value(value: Value) -> Self {
        match value {
            Value::Nil => Self::Nil,
            Value::Int(number) => Self::Integer(number),
            Value::Okay => Self::Text("OK".to_owned()),
            Value::SimpleString(text) => Self::Text(text),
            Value::BulkString(bytes) => Self::Text(String::from_utf8_lossy(&bytes).into_owned()),
            Value::Array(values) => Self::List(values.into_iter().map(Self::from_value).collect()),
            Value::ServerError(error) => Self::Error(error.to_string()),
            // RESP3 only, which we do not speak.
            other => Self::Error(format!("an unexpected kind of reply: {other:?}")),
        }
    }
}
