//! [`Batch`]: requests that are sent together, and the waiters for their results. A request that no
//! other has joined is a batch of one.
//!
//! Lifecycle: open → sealed (in flight) → completed. A waiter may be dropped at any time without
//! an effect on the others: its request is left out if the batch is still open, and its result is
//! ignored if it is in flight.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::routing::step::{Delivery, NextStep};
use super::script::reply::{ItemReply, RequestDecisions};
use super::script::requests::{EncodedRequests, Request};
use crate::charge::Charge;
use crate::store::StoreError;

pub(super) mod cross_slot;
pub(super) mod dispatch;
pub(super) mod queue;

/// Batch of requests for one node.
#[derive(Default)]
pub(super) struct Batch {
    open: Mutex<OpenBatch>,
    /// Whether it was sent, so that its requests may have run.
    sent: AtomicBool,
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
    /// The deadline has passed, before or after the request was sent.
    TimedOut {
        sent: bool,
    },
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
    /// Expected time of the batch in Redis when the waiter joined; see [`EncodedRequests::weight`].
    weight: usize,
    done: bool,
}

/// Batch in flight. If its sender is dropped before it completes, the waiters get an error.
pub(super) struct InFlightBatch(pub(super) Arc<Batch>);

/// Reason of requests that no task can send or complete any more.
pub(super) const SHUTTING_DOWN: &str =
    "the runtime in which the store was created is shutting down";

impl Batch {
    /// Adds a request and its waiter. The batch must still be open.
    pub(super) fn join(
        self: &Arc<Self>,
        request: &Request<'_>,
        slot: u16,
        delivery: Delivery,
        deadline: Instant,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> BatchHandle {
        let mut open = self.open();
        let item = open.requests.add(request, slot, write_key);
        match open.deliveries.get_mut(item) {
            Some(of_equal) => *of_equal = delivery.max(*of_equal),
            None => open.deliveries.push(delivery),
        }
        open.waiters.push(Waiter { item, deadline, state: WaiterState::Waiting(None) });
        BatchHandle {
            batch: Arc::clone(self),
            index: open.waiters.len() - 1,
            weight: open.requests.weight(),
            done: false,
        }
    }

    /// Returns whether exactly one request has joined.
    pub(super) fn has_one_waiter(&self) -> bool {
        self.open().waiters.len() == 1
    }

    fn open(&self) -> MutexGuard<'_, OpenBatch> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the batch as sent.
    pub(super) fn mark_sent(&self) {
        self.sent.store(true, Ordering::Release);
    }

    /// Returns whether its requests may have run.
    pub(super) fn is_sent(&self) -> bool {
        self.sent.load(Ordering::Acquire)
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
                waiter.state = WaiterState::TimedOut { sent: false };
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
                    waiter.state = WaiterState::TimedOut { sent: self.is_sent() };
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
    fn decisions(
        &self,
        index: usize,
        request: &Request<'_>,
        is_sent: bool,
    ) -> Result<RequestDecisions, NextStep> {
        let Some(position) = self.positions.get(index) else {
            let error = StoreError::Unreachable(SHUTTING_DOWN.to_owned());
            return Err(NextStep::Fail(if is_sent { error.answer_lost() } else { error }));
        };
        let Some(Position { item, preceding }) = *position else { return Err(NextStep::TimeOut) };
        let Some(result) = self.results.get(item) else { return Err(NextStep::TimeOut) };
        let reply = result.as_ref().map_err(NextStep::clone)?;
        reply.decisions(request, preceding).map_err(NextStep::Fail)
    }
}

impl BatchHandle {
    pub(super) fn batch(&self) -> &Arc<Batch> {
        &self.batch
    }

    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    /// Waits for the decisions, or the next step of the request.
    pub(super) async fn decisions(
        mut self,
        request: &Request<'_>,
    ) -> Result<RequestDecisions, NextStep> {
        Completion(&mut self).await?;
        let batch = &self.batch;
        let completed = batch.completed.get().ok_or(NextStep::TimeOut)?;
        completed.decisions(self.index, request, batch.is_sent())
    }
}

/// Future that is ready when the batch completes, or with an error at the waiter's deadline.
struct Completion<'a>(&'a mut BatchHandle);

impl Future for Completion<'_> {
    type Output = Result<(), NextStep>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let handle = &mut *self.0;
        if handle.batch.completed.get().is_none() {
            let mut open = handle.batch.open();
            // Check again under the lock: after completion nothing would wake us.
            if handle.batch.completed.get().is_none() {
                let late = match open.waiters.get_mut(handle.index).map(|waiter| &mut waiter.state)
                {
                    Some(WaiterState::Waiting(Some(waker))) => {
                        waker.clone_from(context.waker());
                        return Poll::Pending;
                    }
                    Some(WaiterState::Waiting(waker)) => {
                        *waker = Some(context.waker().clone());
                        return Poll::Pending;
                    }
                    Some(WaiterState::TimedOut { sent: true }) => NextStep::AnswerLost,
                    _ => NextStep::TimeOut,
                };
                drop(open);
                handle.done = true;
                return Poll::Ready(Err(late));
            }
        }
        handle.done = true;
        Poll::Ready(Ok(()))
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
