//! [`Call`]: one call of a script outside of a batch: for a request that is decided alone, a probe,
//! a heartbeat or invalidations. It is routed, follows redirects, and is never sent again once it
//! may have run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::sleep_until;

use super::connection::Connection;
use super::error::{AttemptError, ServerError};
use super::node::NodeClient;
use super::queue::InFlightPermit;
use super::script::Script;
use super::server_clock::ServerClock;
use super::topology::TopologyState;
use crate::store::StoreError;

/// Call of a script on keys of one slot.
pub(super) struct Call<'a> {
    pub(super) script: &'a Script,
    pub(super) slot: u16,
    pub(super) started: Instant,
    pub(super) timeout: Duration,
}

/// Reason why a call has no result.
pub(super) enum CallError {
    Failed(StoreError),
    /// No single node has all of these keys now, so they must be decided one by one.
    CrossSlot,
}

/// Decoded reply of a script.
pub(super) enum ScriptReply<T> {
    Answer(T),
    /// The script ran after its deadline by the server's clock, and did nothing.
    Late,
}

const MAX_REDIRECTS: u32 = 16;
/// Retries after READONLY, CLUSTERDOWN, or the retirement of a node.
const MAX_READONLY_RETRIES: u32 = 3;
/// Retries of several keys of a migrating slot together, before they are decided one by one.
const MAX_TRYAGAIN_RETRIES: u32 = 3;
const MIN_BACKOFF: Duration = Duration::from_millis(2);

impl CallError {
    pub(super) fn into_store_error(self) -> StoreError {
        match self {
            Self::Failed(error) => error,
            Self::CrossSlot => {
                StoreError::Refused("the keys are migrating to another node".to_owned())
            }
        }
    }
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl Call<'_> {
    pub(super) fn deadline(&self) -> Instant {
        self.started + self.timeout
    }

    /// Runs the call until it has a result, at most until its deadline.
    ///
    /// `command` builds the command for a server's clock; `read` decodes the reply, with the
    /// server's time. The permit covers the first attempt only, so that retries do not delay the
    /// next batch.
    pub(super) async fn run<T>(
        &self,
        topology: &TopologyState,
        mut permit: Option<InFlightPermit>,
        command: impl Fn(&ServerClock) -> Cmd,
        read: impl Fn(Value) -> Result<(Option<i64>, ScriptReply<T>), StoreError>,
    ) -> Result<T, CallError> {
        let deadline = self.deadline();
        let mut target: Option<(Arc<NodeClient>, bool)> = None;
        let (mut redirects, mut readonly_retries, mut tryagain_retries) = (0, 0, 0);
        loop {
            let (node, asking) = match target.take() {
                Some(target) => target,
                None => (topology.route(self.slot)?, false),
            };
            let loads = node.load_count(self.script);
            let attempted = self.attempt(&node, asking, &command).await;
            drop(permit.take());
            let error = match attempted {
                Ok((value, connection, sent)) => {
                    let received = Instant::now();
                    let (now, reply) = read(value)?;
                    if let Some(now) = now {
                        connection.clock().observe(now, sent, received);
                    }
                    match reply {
                        ScriptReply::Answer(answer) => return Ok(answer),
                        // The server's clock was set. Its time is known now, and the script did
                        // nothing, so a retry is safe.
                        ScriptReply::Late if received < deadline => {
                            target = Some((node, asking));
                            continue;
                        }
                        ScriptReply::Late => AttemptError::TimedOut,
                    }
                }
                Err(error) => error,
            };
            let should_retry = match &error {
                AttemptError::Server(ServerError::NoScript) => {
                    node.load(self.script, loads, deadline)
                        .await
                        .map_err(|error| self.failed(error))?;
                    target = Some((node, asking));
                    true
                }
                AttemptError::Server(ServerError::Moved(address)) => {
                    target = Some((topology.on_moved(self.slot, address), false));
                    redirects += 1;
                    redirects <= MAX_REDIRECTS
                }
                AttemptError::Server(ServerError::Ask(address)) => {
                    target = Some((topology.on_ask(address), true));
                    redirects += 1;
                    redirects <= MAX_REDIRECTS
                }
                AttemptError::Server(ServerError::TryAgain) => {
                    tryagain_retries += 1;
                    if tryagain_retries > MAX_TRYAGAIN_RETRIES
                        || !self.back_off(tryagain_retries).await
                    {
                        return Err(CallError::CrossSlot);
                    }
                    true
                }
                AttemptError::Server(ServerError::CrossSlot) => {
                    topology.trigger_refresh();
                    return Err(CallError::CrossSlot);
                }
                AttemptError::Server(ServerError::NotWritable(_)) => {
                    readonly_retries += 1;
                    topology.on_readonly(&node)
                        && readonly_retries <= MAX_READONLY_RETRIES
                        && self.back_off(readonly_retries + 1).await
                }
                AttemptError::Retired => {
                    readonly_retries += 1;
                    readonly_retries <= MAX_READONLY_RETRIES
                        && self.back_off(readonly_retries).await
                }
                AttemptError::Server(ServerError::Other(_)) => false,
                AttemptError::Down(_) | AttemptError::TimedOut | AttemptError::Lost(_) => {
                    topology.trigger_refresh();
                    false
                }
            };
            if !should_retry {
                return Err(self.failed(error));
            }
        }
    }

    /// Sends the call to a node once. Returns the reply, its connection, and the time of sending.
    async fn attempt(
        &self,
        node: &NodeClient,
        asking: bool,
        command: impl Fn(&ServerClock) -> Cmd,
    ) -> Result<(Value, Arc<Connection>, Instant), AttemptError> {
        let deadline = self.deadline();
        let connection = node.connection(deadline).await?;
        let command = command(connection.clock());
        let sent = Instant::now();
        let reply = if asking {
            node.send_asking(&connection, command, deadline).await?
        } else {
            node.send(&connection, &command, deadline).await?
        };
        Ok((reply, connection, sent))
    }

    /// Sleeps before a retry, twice as long each time. Returns false if the deadline is earlier.
    async fn back_off(&self, retry: u32) -> bool {
        let until = Instant::now() + MIN_BACKOFF * 2_u32.pow(retry - 1);
        if until >= self.deadline() {
            return false;
        }
        sleep_until(until.into()).await;
        true
    }

    fn failed(&self, error: AttemptError) -> CallError {
        CallError::Failed(error.into_store_error(self.timeout))
    }
}
