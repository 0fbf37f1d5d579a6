//! Group commit: decisions that arrive while a call to their node is in flight share the next call.
//!
//! With no call in flight, the first caller becomes the leader and yields once so that other ready
//! tasks can join its batch. If none has joined, the leader makes a [`Call`](super::call::Call) for
//! its own request. Otherwise a separate task sends the batch, so that a cancelled caller does not
//! affect the others. Callers that arrive during a call join the next batch, which is sent as soon
//! as the call completes.
//!
//! A watchdog sends a batch that has waited for [`MAX_LINGER`] although calls are in flight: they
//! may be slow, or belong to a future that is neither polled nor dropped.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Pipeline, Value};
use tokio::runtime::Handle;
use tokio::time::sleep_until;

use super::Shared;
use super::batch::{Batch, BatchHandle, InFlightBatch, ItemResult, Sealed};
use super::error::{AttemptError, ServerError, is_readonly, with_address};
use super::node::NodeClient;
use super::requests::{ItemReply, Request};
use super::script::{KeyMode, Script};
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

/// Next step of a leader.
pub(super) enum LeaderOutcome {
    /// No other request has joined: the leader makes the call itself.
    Alone(InFlightPermit),
    /// Another task sends the batch.
    Wait(BatchHandle),
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
/// Maximum number of loads of a script for one batch.
const MAX_SCRIPT_LOADS: usize = 3;
/// A batch lingers for a twentieth of the timeout, but at least and at most these times.
const MIN_LINGER: Duration = Duration::from_millis(1);
const MAX_LINGER: Duration = Duration::from_millis(5);

impl Queue {
    pub(super) fn new() -> Self {
        let state = QueueState {
            in_flight: VecDeque::new(),
            permits_issued: 0,
            open: VecDeque::new(),
            has_watchdog: false,
        };
        Self { state: Mutex::new(state), runtime: Handle::current() }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a request to the open batch of a node.
pub(super) fn enqueue(
    shared: &Arc<Shared>,
    node: Arc<NodeClient>,
    request: &Request<'_>,
    slot: u16,
    deadline: Instant,
) -> Enqueued {
    let mut state = node.queue().state();
    let write_key = |text: &mut String, charge: &Charge<'_>| shared.write_redis_key(text, charge);
    let leads = state.in_flight.is_empty() && state.open.is_empty();
    let handle = match state.open.back() {
        Some((batch, _)) if batch.weight() < MAX_BATCH_WEIGHT => {
            batch.join(request, slot, deadline, write_key)
        }
        _ => {
            let batch = Arc::<Batch>::default();
            let handle = batch.join(request, slot, deadline, write_key);
            state.open.push_back((batch, Instant::now()));
            handle
        }
    };
    if leads {
        let number = state.issue_permit();
        drop(state);
        return Enqueued::Lead(BatchLeader {
            handle,
            permit: InFlightPermit { number, shared: Arc::clone(shared), node },
        });
    }
    if state.in_flight.len() < MAX_IN_FLIGHT
        && handle.batch().charges() >= MIN_CONCURRENT_BATCH
        && let Some(batch) = state.take(handle.batch())
    {
        let number = state.issue_permit();
        drop(state);
        let permit = InFlightPermit { number, shared: Arc::clone(shared), node: Arc::clone(&node) };
        node.queue().runtime.spawn(permit.send_batches(InFlightBatch(batch)));
        return Enqueued::Wait(handle);
    }
    // A leader needs no watchdog: it sends its own batch.
    let has_watchdog = std::mem::replace(&mut state.has_watchdog, true);
    drop(state);
    if !has_watchdog {
        node.queue().runtime.spawn(watchdog(Arc::clone(shared), Arc::clone(&node)));
    }
    Enqueued::Wait(handle)
}

impl BatchLeader {
    /// Yields once so that other ready tasks can join, then sends the batch.
    pub(super) async fn collect(self) -> LeaderOutcome {
        tokio::task::yield_now().await;
        let Self { handle, permit } = self;
        let taken = permit.node.queue().state().take(handle.batch());
        match taken {
            Some(batch) if batch.has_one_waiter() => LeaderOutcome::Alone(permit),
            Some(batch) => {
                let runtime = permit.node.queue().runtime.clone();
                runtime.spawn(permit.send_batches(InFlightBatch(batch)));
                LeaderOutcome::Wait(handle)
            }
            // The permit of a completed call has sent the batch.
            None => LeaderOutcome::Wait(handle),
        }
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
        self.open.remove(index).map(|(batch, _)| batch)
    }

    /// Returns the next batch to send with this permit. Without a batch the permit is released; a
    /// revoked permit gets no batch.
    fn next_batch(&mut self, permit: u64) -> Option<InFlightBatch> {
        let index = self.in_flight.iter().position(|held| *held == permit)?;
        self.in_flight.remove(index);
        let (batch, _) = self.open.pop_front()?;
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
            self.send_batch(&batch).await;
            next = self.node.queue().state().next_batch(self.number);
        }
    }

    /// Sends one batch, and wakes waiters whose deadline passes before it completes.
    async fn send_batch(&self, InFlightBatch(batch): &InFlightBatch) {
        let sealed = batch.seal(Instant::now());
        let mut next_deadline = sealed.earliest;
        let results = if next_deadline.is_some() {
            let mut call = pin!(self.send(&sealed));
            loop {
                let Some(deadline) = next_deadline else { break call.await };
                tokio::select! {
                    biased;
                    results = &mut call => break results,
                    () = sleep_until(deadline.into()) => {
                        next_deadline = batch.expire(Instant::now());
                    }
                }
            }
        } else {
            Vec::new()
        };
        batch.complete(sealed, results);
    }

    /// Sends a sealed batch, and returns the result of each item. On a cluster a call has the keys
    /// of one slot, so the batch is a pipeline with one call per slot.
    async fn send(&self, sealed: &Sealed) -> Vec<ItemResult> {
        let mut results = vec![ItemResult::RetryAlone; sealed.requests.items().len()];
        let mut calls = group_by_call(sealed, self.shared.topology.state().is_cluster());
        for _ in 0..=MAX_SCRIPT_LOADS {
            let loads = |_: &Vec<usize>| self.node.load_count(Script::decide(KeyMode::Declared));
            let loads: Vec<u64> = calls.iter().map(loads).collect();
            let replies = match self.attempt(sealed, &calls).await {
                Ok(replies) => replies,
                Err(error) => {
                    let result = self.result_of(0, error);
                    calls.iter().flatten().for_each(|item| results[*item] = result.clone());
                    break;
                }
            };
            let mut calls_to_retry = Vec::new();
            for ((items, loads), reply) in calls.into_iter().zip(loads).zip(replies) {
                let loaded = match reply {
                    Err(AttemptError::Server(ServerError::NoScript)) => {
                        self.node
                            .load(Script::decide(KeyMode::Declared), loads, sealed.latest)
                            .await
                    }
                    Err(error) => Err(error),
                    Ok(item_results) => {
                        for (item, result) in items.iter().zip(item_results) {
                            results[*item] = result;
                        }
                        continue;
                    }
                };
                match loaded {
                    Ok(()) => calls_to_retry.push(items),
                    Err(error) => {
                        let result = self.result_of(sealed.requests.items()[items[0]].slot, error);
                        for item in items {
                            results[item] = result.clone();
                        }
                    }
                }
            }
            calls = calls_to_retry;
            if calls.is_empty() {
                break;
            }
        }
        results
    }

    /// Sends the calls once. Returns for each the results of its items.
    async fn attempt(
        &self,
        sealed: &Sealed,
        calls: &[Vec<usize>],
    ) -> Result<Vec<Result<Vec<ItemResult>, AttemptError>>, AttemptError> {
        let connection = self.node.connection(sealed.latest).await?;
        let server_times =
            self.shared.server_times(connection.clock(), sealed.earliest.unwrap_or(sealed.latest));
        let repeats = |item: usize| sealed.repeats[item];
        let mode = KeyMode::Declared;
        let command =
            |items: &Vec<usize>| sealed.requests.command(items, repeats, &server_times, mode);
        let (sent, replies);
        if let [items] = calls {
            let command = command(items);
            sent = Instant::now();
            replies = match self.node.send(&connection, &command, sealed.latest).await {
                Err(error) if !matches!(error, AttemptError::Server(_)) => return Err(error),
                reply => vec![reply],
            };
        } else {
            let mut commands = Pipeline::with_capacity(calls.len());
            for items in calls {
                commands.add_command(command(items));
            }
            sent = Instant::now();
            replies = self.node.send_all(&connection, &commands, sealed.latest).await?;
        }
        let received = Instant::now();
        let read = |(items, reply): (&Vec<usize>, Result<Value, AttemptError>)| {
            let reply = match sealed.requests.read(items, repeats, reply?) {
                Ok(reply) => reply,
                Err(error) => return Ok(vec![ItemResult::Failed(error); items.len()]),
            };
            connection.clock().observe(reply.now, sent, received);
            Ok(match reply.items {
                Some(replies) => replies.into_iter().map(|reply| self.item_result(reply)).collect(),
                // The script ran after its deadline, perhaps only because the server's clock was
                // set. Its time is known now.
                None => vec![ItemResult::Retry; items.len()],
            })
        };
        Ok(calls.iter().zip(replies).map(read).collect())
    }

    /// Returns the result of all items of a failed call. Items of a call that did not run are
    /// retried alone, so that they follow redirects.
    fn result_of(&self, slot: u16, error: AttemptError) -> ItemResult {
        let topology = self.shared.topology.state();
        match error {
            AttemptError::Server(ServerError::Moved(address)) => {
                topology.on_moved(slot, &address);
                ItemResult::RetryAlone
            }
            AttemptError::Server(ServerError::Other(_)) => {
                ItemResult::Failed(error.into_store_error(self.shared.timeout))
            }
            AttemptError::Retired | AttemptError::Server(_) => ItemResult::RetryAlone,
            AttemptError::Down(_) | AttemptError::TimedOut | AttemptError::Lost(_) => {
                topology.trigger_refresh();
                ItemResult::Failed(error.into_store_error(self.shared.timeout))
            }
        }
    }

    fn item_result(&self, reply: ItemReply) -> ItemResult {
        match reply {
            ItemReply::Error(reason) if is_readonly(&reason) => ItemResult::RetryAlone,
            ItemReply::Error(reason) => {
                let reason = with_address(self.node.address(), &reason);
                ItemResult::Replied(ItemReply::Error(reason))
            }
            reply => ItemResult::Replied(reply),
        }
    }
}

/// Returns the items to send, grouped by call.
fn group_by_call(sealed: &Sealed, is_cluster: bool) -> Vec<Vec<usize>> {
    let to_send = (0..sealed.repeats.len()).filter(|item| sealed.repeats[*item] > 0);
    if !is_cluster {
        return vec![to_send.collect()];
    }
    let slot = |item: &usize| sealed.requests.items()[*item].slot;
    let mut by_slot: Vec<usize> = to_send.collect();
    by_slot.sort_by_key(slot);
    by_slot.chunk_by(|one, other| slot(one) == slot(other)).map(<[usize]>::to_vec).collect()
}
