//! Group commit: decisions that arrive while a call to their node is in flight share the next call.
//!
//! With no call in flight, the first caller becomes the leader. If requests have joined the batch
//! before, it yields once so that other ready tasks can join this one, too; a lone caller would only
//! lose time. If none has joined, the leader sends its batch of one itself, without
//! another task. Otherwise a separate task sends the batch, so that a cancelled caller does not
//! affect the others. Callers that arrive during a call join the next batch, which is sent as soon
//! as the call completes.
//!
//! A watchdog sends a batch that has waited for [`MAX_LINGER`] although calls are in flight: they
//! may be slow, or belong to a future that is neither polled nor dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::sleep_until;

use super::Shared;
use super::batch::{Batch, BatchHandle, InFlightBatch};
use super::dispatch::dispatch;
use super::node::NodeClient;
use super::requests::Request;
use super::step::Target;
use crate::charge::Charge;

/// Queue of batches for one node.
pub(super) struct Queue {
    state: Mutex<QueueState>,
    /// Runtime of the node's connection, on which batches are sent, too.
    runtime: Handle,
}

struct QueueState {
    /// Numbers of the permits in use, the oldest first.
    in_flight: VecDeque<u64>,
    permits_issued: u64,
    /// Open batches with their creation times, the oldest first.
    open: VecDeque<(Arc<Batch>, Instant)>,
    /// Whether the last batch that was sent had several requests.
    is_shared: bool,
    has_watchdog: bool,
}

/// Permit for one in-flight call. On drop it passes to the next waiting batch; the watchdog revokes
/// it when a batch has waited for [`MAX_LINGER`].
pub(super) struct InFlightPermit {
    number: u64,
    shared: Arc<Shared>,
    node: Arc<NodeClient>,
}

/// Role of a caller whose request was added to a batch.
pub(super) enum Enqueued {
    /// No call is in flight: the caller leads the batch.
    Lead(BatchLeader),
    Wait(BatchHandle),
}

/// First request of a batch, with the permit to send it.
pub(super) struct BatchLeader {
    // Dropped before the permit, so that the batch is then sent without the leader's request.
    handle: BatchHandle,
    permit: InFlightPermit,
}

/// Maximum number of calls in flight per node: one runs in Redis while the replies of the other are
/// decoded.
const MAX_IN_FLIGHT: usize = 2;
/// Number of charges for which a second concurrent call is worth its cost. Fewer wait for the first
/// call: a call costs Redis, and us, as much as several decisions.
const MIN_CONCURRENT_BATCH: usize = 64;
/// Maximum [`weight`](super::requests::EncodedRequests::weight) of one call: less than a
/// millisecond of Redis's time, during which Redis serves no other client.
const MAX_BATCH_WEIGHT: usize = 128;
/// A batch lingers for a twentieth of the timeout, but at least and at most these times.
const MIN_LINGER: Duration = Duration::from_millis(1);
const MAX_LINGER: Duration = Duration::from_millis(5);

impl Queue {
    pub(super) fn new() -> Self {
        let state = QueueState {
            in_flight: VecDeque::new(),
            permits_issued: 0,
            open: VecDeque::new(),
            is_shared: false,
            has_watchdog: false,
        };
        Self { state: Mutex::new(state), runtime: Handle::current() }
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a request to the open batch of a node.
pub(super) fn enqueue(
    shared: &Arc<Shared>,
    Target { node, delivery }: &Target,
    request: &Request<'_>,
    slot: u16,
    deadline: Instant,
    write_key: impl Fn(&mut String, &Charge<'_>, &str),
) -> Enqueued {
    let mut state = node.queue().state();
    let leads = state.in_flight.is_empty() && state.open.is_empty();
    let handle = match state.open.back() {
        Some((batch, _)) if batch.weight() < MAX_BATCH_WEIGHT => {
            batch.join(request, slot, *delivery, deadline, write_key)
        }
        _ => {
            let batch = Arc::<Batch>::default();
            let handle = batch.join(request, slot, *delivery, deadline, write_key);
            state.open.push_back((batch, Instant::now()));
            handle
        }
    };
    if leads {
        let number = state.issue_permit();
        drop(state);
        return Enqueued::Lead(BatchLeader {
            handle,
            permit: InFlightPermit { number, shared: Arc::clone(shared), node: Arc::clone(node) },
        });
    }
    if state.in_flight.len() < MAX_IN_FLIGHT
        && handle.batch().charges() >= MIN_CONCURRENT_BATCH
        && let Some(batch) = state.take(handle.batch())
    {
        let number = state.issue_permit();
        drop(state);
        let permit = InFlightPermit { number, shared: Arc::clone(shared), node: Arc::clone(node) };
        node.queue().runtime.spawn(permit.send_batches(InFlightBatch(batch)));
        return Enqueued::Wait(handle);
    }
    // A leader needs no watchdog: it sends its own batch.
    let has_watchdog = std::mem::replace(&mut state.has_watchdog, true);
    drop(state);
    if !has_watchdog {
        node.queue().runtime.spawn(watchdog(Arc::clone(shared), Arc::clone(node)));
    }
    Enqueued::Wait(handle)
}

impl BatchLeader {
    /// Sends the batch: itself if none has joined. Before that it yields once if others may join.
    pub(super) async fn send(self) -> BatchHandle {
        let others_may_join = self.permit.node.queue().state().is_shared;
        if others_may_join {
            tokio::task::yield_now().await;
        }
        let Self { handle, permit } = self;
        let taken = permit.node.queue().state().take(handle.batch());
        match taken {
            Some(batch) if batch.has_one_waiter() => {
                dispatch(&permit.shared, &permit.node, &InFlightBatch(batch)).await;
            }
            Some(batch) => {
                let runtime = permit.node.queue().runtime.clone();
                runtime.spawn(permit.send_batches(InFlightBatch(batch)));
            }
            // The permit of a completed call has sent the batch.
            None => {}
        }
        handle
    }
}

/// Sends batches that have lingered for too long. Ends when there is no open batch.
async fn watchdog(shared: Arc<Shared>, node: Arc<NodeClient>) {
    // With a manual clock, requests at one instant must share a call however slow the machine is.
    let linger = if shared.driven_time().is_some() {
        shared.timeout
    } else {
        (shared.timeout / 20).clamp(MIN_LINGER, MAX_LINGER)
    };
    let mut until = Instant::now() + linger;
    loop {
        sleep_until(until.into()).await;
        let mut state = node.queue().state();
        let Some((_, opened_at)) = state.open.front() else {
            state.has_watchdog = false;
            return;
        };
        until = *opened_at + linger;
        if until <= Instant::now()
            && let Some((batch, _)) = state.open.pop_front()
        {
            state.is_shared = !batch.has_one_waiter();
            state.in_flight.pop_front();
            let number = state.issue_permit();
            drop(state);
            let permit =
                InFlightPermit { number, shared: Arc::clone(&shared), node: Arc::clone(&node) };
            node.queue().runtime.spawn(permit.send_batches(InFlightBatch(batch)));
        }
    }
}

impl QueueState {
    fn issue_permit(&mut self) -> u64 {
        self.permits_issued += 1;
        self.in_flight.push_back(self.permits_issued);
        self.permits_issued
    }

    /// Removes this batch from the open ones. Returns `None` if it is in flight already.
    fn take(&mut self, batch: &Arc<Batch>) -> Option<Arc<Batch>> {
        let index = self.open.iter().position(|(open, _)| Arc::ptr_eq(open, batch))?;
        self.is_shared = !batch.has_one_waiter();
        self.open.remove(index).map(|(batch, _)| batch)
    }

    /// Returns the next batch to send with this permit. Without a batch the permit is released; a
    /// revoked permit gets no batch.
    fn next_batch(&mut self, permit: u64) -> Option<InFlightBatch> {
        let index = self.in_flight.iter().position(|held| *held == permit)?;
        self.in_flight.remove(index);
        let (batch, _) = self.open.pop_front()?;
        self.is_shared = !batch.has_one_waiter();
        self.in_flight.push_back(permit);
        Some(InFlightBatch(batch))
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        let next = self.node.queue().state().next_batch(self.number);
        if let Some(batch) = next {
            let permit = InFlightPermit {
                number: self.number,
                shared: Arc::clone(&self.shared),
                node: Arc::clone(&self.node),
            };
            self.node.queue().runtime.spawn(permit.send_batches(batch));
        }
    }
}

impl InFlightPermit {
    /// Sends a batch, then those that have gathered since, one after the other.
    async fn send_batches(self, first: InFlightBatch) {
        let mut next = Some(first);
        while let Some(batch) = next {
            dispatch(&self.shared, &self.node, &batch).await;
            next = self.node.queue().state().next_batch(self.number);
        }
    }
}
