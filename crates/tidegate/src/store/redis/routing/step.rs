//! [`NextStep`]: what follows an error of a call: the one table for batches of any size and for the
//! store's own calls.
//!
//! A call that may have run is never sent again. Every wait ends at the deadline of its request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::TopologyState;
use crate::store::StoreError;
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::backoff::Backoff;
use crate::store::redis::client::error::{AttemptError, MIGRATING, ServerError};

/// Node that a request is sent to, and how.
#[derive(Clone)]
pub(crate) struct CallTarget {
    pub(crate) node: Arc<NodeClient>,
    pub(crate) delivery: Delivery,
}

/// How a request is delivered. A later variant satisfies the earlier ones, too, except for
/// `Spanning`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Delivery {
    /// It may share a call with any request for the node.
    Shared,
    /// It may share a call, too. Its keys are in several slots of the node, so that only a call that
    /// crosses slots can decide it.
    Spanning,
    /// It is a call of its own, so that the server checks its keys and redirects it.
    Alone,
    /// It is a call of its own right after ASKING, because the node is importing its slot.
    Asking,
}

/// Next step of the requests of a call that has failed.
#[derive(Clone)]
pub(crate) enum NextStep {
    /// Send it to this node.
    Redirect(CallTarget),
    /// Send it again, by a call of its own.
    SendAlone,
    /// Send it again at once: it did nothing, because the server's clock was set, or because its
    /// call had done enough.
    SendAgain,
    /// Wait a moment, and route it again. After several waits it fails with this error.
    BackOff(StoreError),
    /// Wait until its keys are on one node. After several waits decide its charges one by one.
    AwaitMigration,
    /// Decide its charges one by one: no single node has all of their keys.
    Split,
    Fail(StoreError),
    /// Fail, because the deadline passed before it was sent.
    TimeOut,
    /// Fail, because there was no answer in time. It may have run.
    AnswerLost,
}

/// Reason why a request has no result.
pub(crate) enum CallError {
    Failed(StoreError),
    /// No single node has all of these keys now, so they must be decided one by one.
    CrossSlot,
}

/// Retries of one request, each kind of which is bounded.
pub(crate) struct Retries {
    deadline: Instant,
    timeout: Duration,
    /// Delivery of the first attempt.
    delivery: Delivery,
    redirects: u32,
    pauses: u32,
    backoff: Backoff,
}

const MAX_REDIRECTS: u32 = 16;
const MAX_BACKOFFS: u32 = 3;
const RETRY_BACKOFF: Backoff = Backoff::from_millis(4, 16);

impl NextStep {
    /// Returns the next step after an error of a call to this node, whose first key is in this
    /// slot. Informs the topology, once for all requests of the call.
    pub(crate) fn after(
        error: AttemptError,
        topology: &TopologyState,
        node: &NodeClient,
        slot: u16,
    ) -> Self {
        let timeout = topology.timeout();
        match error {
            AttemptError::Server(ServerError::Moved(address)) => {
                let node = topology.on_moved(slot, &address);
                Self::Redirect(CallTarget { node, delivery: Delivery::Shared })
            }
            AttemptError::Server(ServerError::Ask(address)) => {
                let node = topology.on_ask(&address);
                Self::Redirect(CallTarget { node, delivery: Delivery::Asking })
            }
            AttemptError::Server(ServerError::TryAgain) => Self::AwaitMigration,
            AttemptError::Server(ServerError::NonLocalKey) => Self::SendAlone,
            AttemptError::Server(ServerError::CrossSlot(_)) => {
                topology.trigger_refresh();
                Self::Split
            }
            AttemptError::Server(ServerError::NotWritable(_)) => {
                let may_find_another = topology.on_readonly(node);
                Self::back_off_if(may_find_another, error.into_store_error(timeout))
            }
            AttemptError::Server(ServerError::NotReady(_)) => {
                topology.trigger_refresh();
                Self::back_off_if(!topology.is_standalone(), error.into_store_error(timeout))
            }
            AttemptError::Retired => Self::BackOff(error.into_store_error(timeout)),
            AttemptError::Late => Self::SendAgain,
            // The node has loaded the script, and sent its text: `NodeClient::run`.
            AttemptError::Server(ServerError::NoScript | ServerError::Other(_))
            | AttemptError::Unusable(_) => Self::Fail(error.into_store_error(timeout)),
            AttemptError::Down(_) | AttemptError::TimedOut | AttemptError::Lost(_) => {
                topology.trigger_refresh();
                Self::Fail(error.into_store_error(timeout))
            }
        }
    }

    fn back_off_if(may_help: bool, error: StoreError) -> Self {
        if may_help { Self::BackOff(error) } else { Self::Fail(error) }
    }
}

impl Retries {
    /// Creates the retries of a request that starts now.
    pub(crate) fn until(deadline: Instant, timeout: Duration, delivery: Delivery) -> Self {
        Self { deadline, timeout, delivery, redirects: 0, pauses: 0, backoff: RETRY_BACKOFF }
    }

    /// Takes the next step of a request for this slot that was sent to `target`. Returns where to
    /// send it now, or why it has no result.
    pub(crate) async fn follow(
        &mut self,
        step: NextStep,
        target: CallTarget,
        slot: u16,
        topology: &TopologyState,
    ) -> Result<CallTarget, CallError> {
        match step {
            NextStep::SendAlone if target.delivery == Delivery::Spanning => {
                Err(CallError::CrossSlot)
            }
            NextStep::Redirect(next) => {
                self.redirects += 1;
                if self.redirects > MAX_REDIRECTS {
                    let address = next.node.address();
                    return Err(CallError::Failed(StoreError::Refused(format!(
                        "too many redirects, the last one to {address}"
                    ))));
                }
                Ok(next)
            }
            NextStep::SendAlone if target.delivery == Delivery::Shared => {
                Ok(CallTarget { delivery: Delivery::Alone, ..target })
            }
            // Another key of this request is on another node.
            NextStep::SendAlone | NextStep::AwaitMigration => {
                if !self.pause().await {
                    return Err(CallError::CrossSlot);
                }
                Ok(CallTarget { node: topology.route(slot)?, delivery: Delivery::Alone })
            }
            NextStep::SendAgain if Instant::now() < self.deadline => Ok(target),
            NextStep::SendAgain | NextStep::TimeOut => {
                Err(CallError::Failed(StoreError::Timeout(self.timeout)))
            }
            NextStep::AnswerLost => {
                Err(CallError::Failed(StoreError::Timeout(self.timeout).answer_lost()))
            }
            NextStep::BackOff(error) => {
                if !self.pause().await {
                    return Err(CallError::Failed(error));
                }
                Ok(CallTarget { node: topology.route(slot)?, delivery: self.delivery })
            }
            NextStep::Split => Err(CallError::CrossSlot),
            NextStep::Fail(error) => Err(CallError::Failed(error)),
        }
    }

    /// Waits before a retry. Returns false after the last one, and if the deadline is earlier.
    async fn pause(&mut self) -> bool {
        let until = Instant::now() + self.backoff.next_wait();
        if self.pauses == MAX_BACKOFFS || until >= self.deadline {
            return false;
        }
        self.pauses += 1;
        sleep_until(until.into()).await;
        true
    }
}

impl CallError {
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            Self::Failed(error) => error,
            Self::CrossSlot => StoreError::Refused(MIGRATING.to_owned()),
        }
    }
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}
