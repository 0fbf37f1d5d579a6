//! Group commit: decisions that arrive while a call to their node is in flight share the next call.
//!
//! With no call in flight, the first caller becomes the leader. If requests have joined the batch
//! before, it yields once so that other ready tasks can join this one, too; a lone caller would only
//! lose time. If none has joined, the leader sends its batch of one itself, without
//! another task. Otherwise a separate task sends the batch, so that a cancelled caller does not
//! affect the others. Callers that arrive during a call join the next batch, which is sent when the
//! call has completed: at once, or if it is small, after the callers of that call had their turn.
//!
//! A watchdog sends a batch that has waited for [`MAX_LINGER`] although calls are in flight: they
//! may be slow, or belong to a future that is neither polled nor dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::sleep_until;

use super::dispatch::Dispatcher;
use super::{Batch, BatchHandle, InFlightBatch};
use crate::charge::Charge;
use crate::store::redis::client::NodeClient;
use crate::store::redis::routing::step::CallTarget;
use crate::store::redis::script::requests::Request;

/// Queue of batches for one node.
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    /// Runtime of the node's connection, on which batches are sent, too.
    runtime: Handle,
}

struct QueueState {
    /// Numbers of the permits in use, the oldest first.
    in_flight: VecDeque<u64>,
    permits_issued: u64,
    /// Open batches, the oldest first.
    open: VecDeque<QueuedBatch>,
    /// Whether the last batch that was sent had several requests.
    is_shared: bool,
    has_watchdog: bool,
}

/// Batch that requests can join.
struct QueuedBatch {
    batch: Arc<Batch>,
    opened_at: Instant,
    /// Expected time in Redis; see `EncodedRequests::weight`.
    weight: usize,
}

/// Permit for one in-flight call. On drop it passes to the next waiting batch; the watchdog revokes
/// it when a batch has waited for [`MAX_LINGER`].
pub(crate) struct InFlightPermit {
    number: u64,
    dispatcher: Arc<Dispatcher>,
    node: Arc<NodeClient>,
    /// Whether it was passed to a task that has not started yet.
    is_passed: bool,
}

/// Role of a caller whose request was added to a batch.
pub(crate) enum Enqueued {
    /// No call is in flight: the caller leads the batch.
    Lead(BatchLeader),
    Wait(BatchHandle),
}

/// First request of a batch, with the permit to send it.
pub(crate) struct BatchLeader {
    // Dropped before the permit, so that the batch is then sent without the leader's request.
    handle: BatchHandle,
    permit: InFlightPermit,
}

/// Maximum number of calls in flight per node: one runs in Redis while the replies of the other are
/// decoded. The second one is a full batch: fewer requests wait for the first call, because a call
/// costs Redis, and us, as much as several decisions.
const MAX_IN_FLIGHT: usize = 2;
/// Maximum `EncodedRequests::weight` of one call: less than a millisecond of Redis's time, during
/// which Redis serves no other client.
const MAX_BATCH_WEIGHT: usize = 128;
/// `EncodedRequests::weight` below which a call costs more than its decisions, so that it is worth
/// waiting for the callers that are ready.
const SMALL_BATCH_WEIGHT: usize = 16;
/// A batch lingers for a twentieth of the timeout, but at least and at most these times.
const MIN_LINGER: Duration = Duration::from_millis(1);
const MAX_LINGER: Duration = Duration::from_millis(5);

impl Queue {
    pub(crate) fn new() -> Self {
        let state = QueueState {
            in_flight: VecDeque::new(),
            permits_issued: 0,
            open: VecDeque::new(),
            is_shared: false,
            has_watchdog: false,
        };
        Self { state: Mutex::new(state), runtime: Handle::current() }
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Makes the next leader yield once, so that the decisions that follow join its batch.
    pub(crate) fn expect_batch(&self) {
        self.state().is_shared = true;
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a request to the open batch of a node.
pub(crate) fn enqueue(
    dispatcher: &Arc<Dispatcher>,
    CallTarget { node, delivery }: &CallTarget,
    request: &Request<'_>,
    slot: u16,
    deadline: Instant,
    write_key: impl Fn(&mut String, &Charge<'_>),
) -> Enqueued {
    let mut state = node.queue().state();
    let leads = state.in_flight.is_empty() && state.open.is_empty();
    let handle = match state.open.back_mut() {
        Some(open) if open.weight + request.weight() <= MAX_BATCH_WEIGHT => {
            let handle = open.batch.join(request, slot, *delivery, deadline, write_key);
            open.weight = handle.weight();
            handle
        }
        _ => {
            let batch = Arc::<Batch>::default();
            let handle = batch.join(request, slot, *delivery, deadline, write_key);
            let weight = handle.weight();
            state.open.push_back(QueuedBatch { batch, opened_at: Instant::now(), weight });
            handle
        }
    };
    if leads {
        let number = state.issue_permit();
        drop(state);
        let permit = InFlightPermit::new(number, dispatcher, node);
        return Enqueued::Lead(BatchLeader { handle, permit });
    }
    if state.in_flight.len() < MAX_IN_FLIGHT
        && handle.weight() >= MAX_BATCH_WEIGHT
        && let Some(batch) = state.take(handle.batch())
    {
        let number = state.issue_permit();
        drop(state);
        let permit = InFlightPermit::new(number, dispatcher, node);
        node.queue().runtime.spawn(permit.send_batches(InFlightBatch(batch)));
        return Enqueued::Wait(handle);
    }
    // A leader needs no watchdog: it sends its own batch.
    let has_watchdog = std::mem::replace(&mut state.has_watchdog, true);
    drop(state);
    if !has_watchdog {
        node.queue().runtime.spawn(watchdog(Arc::clone(dispatcher), Arc::clone(node)));
    }
    Enqueued::Wait(handle)
}

impl BatchLeader {
    /// Sends the batch: itself if none has joined. Before that it yields once if others may join.
    pub(crate) async fn send(self) -> BatchHandle {
        let others_may_join = self.permit.node.queue().state().is_shared;
        if others_may_join {
            tokio::task::yield_now().await;
        }
        let Self { handle, permit } = self;
        let taken = permit.node.queue().state().take(handle.batch());
        match taken {
            Some(batch) if batch.has_one_waiter() => {
                permit.dispatch(&InFlightBatch(batch)).await;
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
async fn watchdog(dispatcher: Arc<Dispatcher>, node: Arc<NodeClient>) {
    // With a manual clock, requests at one instant must share a call however slow the machine is.
    let linger = if dispatcher.driven_time().is_some() {
        dispatcher.timeout
    } else {
        (dispatcher.timeout / 20).clamp(MIN_LINGER, MAX_LINGER)
    };
    let mut until = Instant::now() + linger;
    loop {
        sleep_until(until.into()).await;
        let mut state = node.queue().state();
        let Some(QueuedBatch { opened_at, .. }) = state.open.front() else {
            state.has_watchdog = false;
            return;
        };
        until = *opened_at + linger;
        if until <= Instant::now()
            && let Some(QueuedBatch { batch, .. }) = state.open.pop_front()
        {
            state.is_shared = !batch.has_one_waiter();
            state.in_flight.pop_front();
            let number = state.issue_permit();
            drop(state);
            let permit = InFlightPermit::new(number, &dispatcher, &node);
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
        let index = self.open.iter().position(|open| Arc::ptr_eq(&open.batch, batch))?;
        self.is_shared = !batch.has_one_waiter();
        self.open.remove(index).map(|open| open.batch)
    }

    /// Returns whether the batch that is sent next is small.
    fn is_small(&self) -> bool {
        self.open.front().is_some_and(|open| open.weight < SMALL_BATCH_WEIGHT)
    }

    /// Returns whether this permit passes to an open batch. Otherwise it is released.
    fn keeps_permit(&mut self, permit: u64) -> bool {
        let Some(index) = self.in_flight.iter().position(|held| *held == permit) else {
            return false;
        };
        if self.open.is_empty() {
            self.in_flight.remove(index);
        }
        !self.open.is_empty()
    }

    /// Returns the next batch to send with this permit. Without a batch the permit is released; a
    /// revoked permit gets no batch.
    fn next_batch(&mut self, permit: u64) -> Option<InFlightBatch> {
        let index = self.in_flight.iter().position(|held| *held == permit)?;
        self.in_flight.remove(index);
        let QueuedBatch { batch, .. } = self.open.pop_front()?;
        self.is_shared = !batch.has_one_waiter();
        self.in_flight.push_back(permit);
        Some(InFlightBatch(batch))
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        if self.is_passed {
            // The runtime is shutting down, so that no batch can be sent: the waiters get an error.
            while let Some(batch) = self.next_batch() {
                drop(batch);
            }
        } else if self.node.queue().state().keeps_permit(self.number) {
            let mut permit = Self::new(self.number, &self.dispatcher, &self.node);
            permit.is_passed = true;
            self.node.queue().runtime.spawn(permit.send_open_batches());
        }
    }
}

impl InFlightPermit {
    fn new(number: u64, dispatcher: &Arc<Dispatcher>, node: &Arc<NodeClient>) -> Self {
        let (dispatcher, node) = (Arc::clone(dispatcher), Arc::clone(node));
        Self { number, dispatcher, node, is_passed: false }
    }

    fn next_batch(&self) -> Option<InFlightBatch> {
        self.node.queue().state().next_batch(self.number)
    }

    async fn dispatch(&self, batch: &InFlightBatch) {
        self.dispatcher.dispatch(&self.node, batch, true).await;
    }

    /// Sends a batch, then those that have gathered since.
    async fn send_batches(self, first: InFlightBatch) {
        self.dispatch(&first).await;
        self.send_open_batches().await;
    }

    /// Sends the open batches, one after the other.
    async fn send_open_batches(mut self) {
        self.is_passed = false;
        loop {
            // Callers whose decisions have just arrived often have the next request. Without this
            // they would miss a small batch, and send another small one: two calls instead of one.
            if self.node.queue().state().is_small() {
                tokio::task::yield_now().await;
            }
            let Some(batch) = self.next_batch() else { return };
            self.dispatch(&batch).await;
        }
    }
}
