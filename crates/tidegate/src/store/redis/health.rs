//! How the nodes are, for operators: a snapshot, counters, and plain commands.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Pipeline, Value};

use super::RedisStore;
use super::access::Address;
use super::link::{Link, ask_once};
use crate::store::{ShardId, StoreError};

/// How one node is, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeHealth {
    /// Its address, without user and password.
    pub address: String,
    /// Shard of this node, as in [`SharedStore::probe`](crate::SharedStore::probe).
    pub part: ShardId,
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
    /// An error, as the server says it: a code in capitals, then words.
    Error(String),
}

impl RedisStore {
    /// How each node is: those that decide, then the sentinels.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeHealth> {
        let known = self.shared.topology.known();
        let of = |link: &Link, primary| NodeHealth {
            address: link.address().to_string(),
            part: link.part(),
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

    /// How many scripts were loaded, on all nodes: one a node and kind of call, and again after a
    /// restart or a flush.
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
        let Some(command) = command(words) else { return answers };
        for link in self.shared.topology.known().primaries() {
            let timeout = self.shared.timeout;
            let reply = link.ask(&command, Instant::now() + timeout).await;
            let reply =
                reply.map(Reply::from_value).map_err(|fault| fault.into_store_error(timeout));
            answers.push((link.address().to_string(), reply));
        }
        answers
    }

    /// Runs a plain command on the node of this address: one of [`nodes`](Self::nodes), or any
    /// other that the nodes tell of, such as a replica.
    #[doc(hidden)]
    pub async fn ask_node(&self, address: &str, words: &[&str]) -> Result<Reply, StoreError> {
        let replies = self.ask_node_all(address, &[words]).await?;
        Ok(replies.into_iter().next().unwrap_or(Reply::Nil))
    }

    /// Several plain commands, in one go on a node that we are connected to. What a command is
    /// answered with is in its place, errors too; an error of the whole means that there is no
    /// answer.
    #[doc(hidden)]
    pub async fn ask_node_all(
        &self,
        address: &str,
        commands: &[&[&str]],
    ) -> Result<Vec<Reply>, StoreError> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        let known = self.shared.topology.known();
        let patience = self.shared.timeout.max(PLAIN);
        let commands = commands.iter().filter_map(|words| command(words));
        let of_address = |link: &&Arc<Link>| link.address().to_string() == address;
        if let Some(link) = known.primaries().iter().chain(known.sentinels()).find(of_address) {
            let mut all = Pipeline::new();
            for command in commands {
                all.add_command(command);
            }
            let replies = link.ask_all(&all, Instant::now() + patience).await;
            let replies = replies.map_err(|fault| fault.into_store_error(patience))?;
            return Ok(replies.into_iter().map(Reply::from_value).collect());
        }
        let Some(node) = Address::tcp("", 0).told_by(address) else {
            return Err(StoreError::Misconfigured(format!(
                "{address:?} is no address: write it like 10.0.0.1:6379"
            )));
        };
        let mut replies = Vec::new();
        for command in commands {
            let reply = ask_once(&node, known.access(), command, patience).await;
            replies.push(Reply::from_value(
                reply.map_err(|trouble| StoreError::Unreachable(trouble.reason))?,
            ));
        }
        Ok(replies)
    }
}

/// A plain command is an operator's, who can wait a little longer than a decision.
const PLAIN: Duration = Duration::from_secs(1);

fn command(words: &[&str]) -> Option<Cmd> {
    let (name, arguments) = words.split_first()?;
    let mut command = redis::cmd(name);
    command.arg(arguments);
    Some(command)
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
            Value::ServerError(error) => {
                let detail = error.details().unwrap_or_default();
                Self::Error(format!("{} {detail}", error.code()).trim_end().to_owned())
            }
            // RESP3 only, which we do not speak.
            other => Self::Error(format!("an unexpected kind of reply: {other:?}")),
        }
    }
}
