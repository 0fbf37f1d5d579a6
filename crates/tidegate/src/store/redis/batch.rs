//! [`Batch`]: requests that are sent together, and the waiters for their results. A request that no
//! other has joined is a batch of one.
//!
//! Lifecycle: open → sealed (in flight) → completed. A waiter may be dropped at any time without
//! an effect on the others: its request is left out if the batch is still open, and its result is
//! ignored if it is in flight.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::requests::{EncodedRequests, ItemReply, Request, RequestDecisions};
use super::step::{Delivery, NextStep};
use crate::charge::Charge;
use crate::store::StoreError;

/// Batch of requests for one node.
#[derive(Default)]
pub(super) struct Batch {
    open: Mutex<OpenBatch>,
    completed: OnceLock<Completed>,
}

/// Contents of a batch that requests can still join.
#[derive(Default)]
struct OpenBatch {
    requests: EncodedRequests,
    /// Delivery per item.
    deliveries: Vec<Delivery>,
    waiters: Vec<Waiter>,
}

struct Waiter {
    item: usize,
    deadline: Instant,
    state: WaiterState,
}

enum WaiterState {
    Waiting(Option<Waker>),
    /// The deadline has passed.
    TimedOut,
    /// The caller was cancelled.
    Dropped,
}

/// Contents of a sealed batch.
pub(super) struct Sealed {
    pub(super) requests: EncodedRequests,
    /// Delivery per item.
    pub(super) deliveries: Vec<Delivery>,
    /// Number of requests per item. Items with 0 are not sent.
    pub(super) repeats: Vec<u64>,
    /// Position of each waiter; `None` if its request is not sent.
    positions: Vec<Option<Position>>,
    /// Earliest deadline of a waiter, after which the script must not run. `None` without waiters.
    pub(super) earliest: Option<Instant>,
    /// Latest deadline of a waiter, after which the reply is of no use.
    pub(super) latest: Instant,
}

/// Position of a waiter's request in the call.
#[derive(Clone, Copy)]
struct Position {
    item: usize,
    /// Number of equal requests before this one.
    preceding: u64,
}

struct Completed {
    positions: Vec<Option<Position>>,
    /// Result per item.
    results: Vec<ItemResult>,
}

/// Result of one item: its reply, or the next step of its requests.
pub(super) type ItemResult = Result<ItemReply, NextStep>;

/// Handle with which a waiter gets its outcome. Dropping it cancels the request.
pub(super) struct BatchHandle {
    batch: Arc<Batch>,
    index: usize,
    done: bool,
}

/// Batch in flight. If its sender is dropped before it completes, the waiters get an error.
pub(super) struct InFlightBatch(pub(super) Arc<Batch>);

impl Batch {
    /// Adds a request and its waiter. The batch must still be open.
    pub(super) fn join(
        self: &Arc<Self>,
        request: &Request<'_>,
        slot: u16,
        delivery: Delivery,
        deadline: Instant,
        write_key: impl Fn(&mut String, &Charge<'_>, &str),
    ) -> BatchHandle {
        let mut open = self.open();
        let item = open.requests.add(request, slot, write_key);
        match open.deliveries.get_mut(item) {
            Some(of_equal) => *of_equal = delivery.max(*of_equal),
            None => open.deliveries.push(delivery),
        }
        open.waiters.push(Waiter { item, deadline, state: WaiterState::Waiting(None) });
        BatchHandle { batch: Arc::clone(self), index: open.waiters.len() - 1, done: false }
    }

    /// Returns the number of charges.
    pub(super) fn charges(&self) -> usize {
        self.open().requests.charges()
    }

    /// Returns the expected time in Redis; see [`EncodedRequests::weight`].
    pub(super) fn weight(&self) -> usize {
        self.open().requests.weight()
    }

    /// Returns whether exactly one request has joined.
    pub(super) fn has_one_waiter(&self) -> bool {
        self.open().waiters.len() == 1
    }

    fn open(&self) -> MutexGuard<'_, OpenBatch> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seals the batch, and returns the requests of the waiters that remain.
    pub(super) fn seal(&self, now: Instant) -> Sealed {
        let mut open = self.open();
        let requests = std::mem::take(&mut open.requests);
        let deliveries = std::mem::take(&mut open.deliveries);
        let mut repeats = vec![0; requests.items().len()];
        let (mut late, mut earliest, mut latest) = (Vec::new(), None::<Instant>, now);
        let position = |waiter: &mut Waiter| {
            let WaiterState::Waiting(waker) = &mut waiter.state else { return None };
            if waiter.deadline <= now {
                late.extend(waker.take());
                waiter.state = WaiterState::TimedOut;
                return None;
            }
            earliest =
                Some(earliest.map_or(waiter.deadline, |earliest| waiter.deadline.min(earliest)));
            latest = latest.max(waiter.deadline);
            let preceding = repeats[waiter.item];
            repeats[waiter.item] += 1;
            Some(Position { item: waiter.item, preceding })
        };
        let positions = open.waiters.iter_mut().map(position).collect();
        drop(open);
        late.into_iter().for_each(Waker::wake);
        Sealed { requests, deliveries, repeats, positions, earliest, latest }
    }

    /// Wakes the waiters whose deadline has passed. Returns the next deadline.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
        let (mut late, mut next) = (Vec::new(), None::<Instant>);
        for waiter in &mut self.open().waiters {
            if let WaiterState::Waiting(waker) = &mut waiter.state {
                if waiter.deadline <= now {
                    late.extend(waker.take());
                    waiter.state = WaiterState::TimedOut;
                } else {
                    next = Some(next.map_or(waiter.deadline, |next| waiter.deadline.min(next)));
                }
            }
        }
        late.into_iter().for_each(Waker::wake);
        next
    }

    /// Completes the batch with a result per item, and wakes its waiters in their order.
    pub(super) fn complete(&self, sealed: Sealed, results: Vec<ItemResult>) {
        self.finish(Completed { positions: sealed.positions, results });
    }

    fn finish(&self, completed: Completed) {
        let mut open = self.open();
        if self.completed.set(completed).is_err() {
            return;
        }
        let mut waiters = std::mem::take(&mut open.waiters);
        drop(open);
        for waiter in &mut waiters {
            let state = std::mem::replace(&mut waiter.state, WaiterState::Dropped);
            if let WaiterState::Waiting(Some(waker)) = state {
                waker.wake();
            }
        }
    }
}

impl Drop for InFlightBatch {
    fn drop(&mut self) {
        if self.0.completed.get().is_none() {
            self.0.finish(Completed { positions: Vec::new(), results: Vec::new() });
        }
    }
}

impl Completed {
    fn decisions(&self, index: usize, request: &Request<'_>) -> Result<RequestDecisions, NextStep> {
        let Some(position) = self.positions.get(index) else {
            let reason = "the runtime in which the store was created is shutting down";
            return Err(NextStep::Fail(StoreError::Unreachable(reason.to_owned())));
        };
        let Some(Position { item, preceding }) = *position else { return Err(NextStep::TimeOut) };
        let reply = self.results[item].as_ref().map_err(NextStep::clone)?;
        reply.decisions(request, preceding).map_err(NextStep::Fail)
    }
}

impl BatchHandle {
    pub(super) fn batch(&self) -> &Arc<Batch> {
        &self.batch
    }

    /// Waits for the decisions, or the next step of the request.
    pub(super) async fn decisions(
        mut self,
        request: &Request<'_>,
    ) -> Result<RequestDecisions, NextStep> {
        let in_time = Completion(&mut self).await;
        match self.batch.completed.get() {
            Some(completed) if in_time => completed.decisions(self.index, request),
            _ => Err(NextStep::TimeOut),
        }
    }
}

/// Future that resolves to true when the batch completes, or to false at the waiter's deadline.
struct Completion<'a>(&'a mut BatchHandle);

impl Future for Completion<'_> {
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<bool> {
        let handle = &mut *self.0;
        if handle.batch.completed.get().is_none() {
            let mut open = handle.batch.open();
            // Check again under the lock: after completion nothing would wake us.
            if handle.batch.completed.get().is_none() {
                match open.waiters.get_mut(handle.index).map(|waiter| &mut waiter.state) {
                    Some(WaiterState::Waiting(Some(waker))) => waker.clone_from(context.waker()),
                    Some(WaiterState::Waiting(waker)) => *waker = Some(context.waker().clone()),
                    _ => {
                        drop(open);
                        handle.done = true;
                        return Poll::Ready(false);
                    }
                }
                return Poll::Pending;
            }
        }
        handle.done = true;
        Poll::Ready(true)
    }
}

impl Drop for BatchHandle {
    fn drop(&mut self) {
        if !self.done
            && self.batch.completed.get().is_none()
            && let Some(waiter) = self.batch.open().waiters.get_mut(self.index)
        {
            waiter.state = WaiterState::Dropped;
        }
    }
}
