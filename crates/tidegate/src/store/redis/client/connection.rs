//! [`Connection`]: one established connection to a node.

use std::time::{Duration, Instant};

use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use super::endpoint::{Address, ConnectionOptions, OpenError};
use super::error::NodeError;
use super::resp::{Command, RedisError, Value};
use super::server_clock::ServerClock;
use super::wire::Wire;

/// Established connection. Dropping it closes the socket.
pub(crate) struct Connection {
    pub(crate) wire: Wire,
    pub(crate) driver: AbortHandle,
    pub(crate) connected_at: Instant,
    /// Clock of the connected server; after a reconnect the address may lead to another server.
    clock: ServerClock,
}

impl Connection {
    pub(crate) fn new(wire: Wire, driver: &JoinHandle<()>) -> Self {
        Self {
            wire,
            driver: driver.abort_handle(),
            connected_at: Instant::now(),
            clock: ServerClock::new(),
        }
    }

    pub(crate) fn clock(&self) -> &ServerClock {
        &self.clock
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Sends one command to a node without a client, on a temporary connection.
pub(crate) async fn query_once(
    address: &Address,
    options: &ConnectionOptions,
    command: Command,
    query_timeout: Duration,
) -> Result<Value, NodeError> {
    let mut replies = query_all_once(address, options, vec![command], query_timeout).await?;
    let reply = replies.pop().unwrap_or(Value::Nil).into_result();
    reply.map_err(|error| NodeError::during_handshake(address, &error))
}

/// Sends commands to a node in one pipeline, on a temporary connection. The error of a single
/// command is its reply.
pub(crate) async fn query_all_once(
    address: &Address,
    options: &ConnectionOptions,
    commands: Vec<Command>,
    query_timeout: Duration,
) -> Result<Vec<Value>, NodeError> {
    let query = async {
        let (wire, driver) = match address.open(options).await {
            Ok(opened) => opened,
            Err(OpenError::Failed(error)) => {
                return Err(NodeError::during_handshake(address, &error));
            }
            Err(OpenError::WrongScheme(reason)) => {
                return Err(NodeError::misconfigured(address, reason));
            }
        };
        let driver = tokio::spawn(driver);
        let _connection = Connection::new(wire.clone(), &driver);
        let mut pipeline = options.handshake_commands();
        let handshake_length = pipeline.len();
        pipeline.extend(commands);
        let handshake_error = |error: RedisError| NodeError::during_handshake(address, &error);
        let mut replies = match wire.send(&pipeline).await {
            Ok(replies) => replies,
            Err(error) => {
                let wrong_scheme = address.wrong_scheme(options).await;
                return Err(wrong_scheme.unwrap_or_else(|| handshake_error(error)));
            }
        };
        let answers = replies.split_off(handshake_length.min(replies.len()));
        for reply in replies {
            reply.into_result().map_err(handshake_error)?;
        }
        Ok(answers)
    };
    match timeout(query_timeout, query).await {
        Ok(replies) => replies,
        Err(_) => Err(NodeError::new(address, &format!("no answer within {query_timeout:?}"))),
    }
}

/// Returns whether a reply of ROLE is that of a primary.
pub(crate) fn is_primary_role(role: &Value) -> bool {
    let Value::Array(parts) = role else { return false };
    parts.first().and_then(Value::text) == Some("master")
}

/// Parses a reply of TIME to microseconds.
pub(crate) fn parse_time(reply: &Value) -> Option<i64> {
    let Value::Array(parts) = reply else { return None };
    let number = |part: &Value| part.text()?.parse::<i64>().ok();
    let [seconds, micros] = parts.as_slice() else { return None };
    // Envoy's proxy returns all microseconds since 1970 as the second number.
    let micros = number(micros).filter(|micros| (0..1_000_000).contains(micros))?;
    number(seconds)?.checked_mul(1_000_000)?.checked_add(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plausible_times_are_parsed() {
        let reply = |seconds: &str, micros: &str| {
            let bulk = |text: &str| Value::String(text.as_bytes().to_vec());
            parse_time(&Value::Array(vec![bulk(seconds), bulk(micros)]))
        };
        assert_eq!(reply("1794828888", "288879"), Some(1_794_828_888_288_879));
        assert_eq!(reply("1794828888", "1794828888288879"), None);
        assert_eq!(reply("9223372036854775807", "0"), None);
        assert_eq!(reply("now", "0"), None);
    }
}
