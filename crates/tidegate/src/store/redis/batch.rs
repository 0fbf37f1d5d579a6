//! [`Batch`]: decisions that go together in one call, and those who wait for them.
//!
//! It gathers until it is sealed; then it is under way, until it is settled. A caller may leave at
//! any time, and leaves the others alone: before the seal it is not asked for, after it nobody
//! listens to what it is told.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::requests::{Request, Requests, Told, Verdicts};
use crate::charge::Charge;
use crate::store::StoreError;

#[derive(Default)]
pub(super) struct Batch {
    gathering: Mutex<Gathering>,
    settled: OnceLock<Settled>,
}

#[derive(Default)]
struct Gathering {
    requests: Requests,
    callers: Vec<Caller>,
}

struct Caller {
    item: usize,
    deadline: Instant,
    state: State,
}

enum State {
    Waits(Option<Waker>),
    /// Its deadline has passed.
    TimedOut,
    /// Nobody waits any more.
    Gone,
}

/// What is sent.
pub(super) struct Sealed {
    pub(super) requests: Requests,
    /// How often each item is asked, which may be never.
    pub(super) times: Vec<u64>,
    /// Those of the callers; `None` for who is not asked for.
    places: Vec<Option<Place>>,
    /// The first deadline of a caller: nothing may be done for it later. `None` if nobody waits any
    /// more.
    pub(super) earliest: Option<Instant>,
    /// The last deadline of a caller: nobody waits for longer.
    pub(super) latest: Instant,
}

/// Where a caller finds what it is told.
#[derive(Clone, Copy)]
struct Place {
    item: usize,
    /// How many equal requests came before.
    earlier: u64,
}

struct Settled {
    places: Vec<Option<Place>>,
    /// One an item.
    fates: Vec<Fate>,
}

/// What became of an item.
#[derive(Debug, Clone)]
pub(super) enum Fate {
    Told(Told),
    Failed(StoreError),
    /// It surely was not done, and can be asked again, together with others.
    Again,
    /// It surely was not done, and must look for its own way.
    Alone,
}

/// What became of a caller's request.
pub(super) enum Outcome {
    Decided(Verdicts),
    Failed(StoreError),
    TimedOut,
    Again,
    Alone,
}

/// A caller's place in a batch.
pub(super) struct Ticket {
    batch: Arc<Batch>,
    number: usize,
    done: bool,
}

/// A batch under way. If whoever carries it goes away, its callers are told.
pub(super) struct Carried(pub(super) Arc<Batch>);

impl Batch {
    /// Adds a caller. To be called before the seal.
    pub(super) fn join(
        self: &Arc<Self>,
        request: &Request<'_>,
        slot: u16,
        deadline: Instant,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> Ticket {
        let mut gathering = self.gathering();
        let item = gathering.requests.add(request, slot, write_key);
        gathering.callers.push(Caller { item, deadline, state: State::Waits(None) });
        Ticket { batch: Arc::clone(self), number: gathering.callers.len() - 1, done: false }
    }

    /// How many counts it looks at.
    pub(super) fn charges(&self) -> usize {
        self.gathering().requests.charges()
    }

    /// How long Redis will need for it.
    pub(super) fn weight(&self) -> usize {
        self.gathering().requests.weight()
    }

    /// Whether only one has ever joined.
    pub(super) fn has_one_caller(&self) -> bool {
        self.gathering().callers.len() == 1
    }

    fn gathering(&self) -> MutexGuard<'_, Gathering> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be sent for those who still wait. Nobody can join from now on.
    pub(super) fn seal(&self, now: Instant) -> Sealed {
        let mut gathering = self.gathering();
        let requests = std::mem::take(&mut gathering.requests);
        let mut times = vec![0; requests.items().len()];
        let (mut late, mut earliest, mut latest) = (Vec::new(), None::<Instant>, now);
        let place = |caller: &mut Caller| {
            let State::Waits(waker) = &mut caller.state else { return None };
            if caller.deadline <= now {
                late.extend(waker.take());
                caller.state = State::TimedOut;
                return None;
            }
            earliest =
                Some(earliest.map_or(caller.deadline, |earliest| caller.deadline.min(earliest)));
            latest = latest.max(caller.deadline);
            let earlier = times[caller.item];
            times[caller.item] += 1;
            Some(Place { item: caller.item, earlier })
        };
        let places = gathering.callers.iter_mut().map(place).collect();
        drop(gathering);
        late.into_iter().for_each(Waker::wake);
        Sealed { requests, times, places, earliest, latest }
    }

    /// Tells those whose deadline has passed. The next deadline of somebody who still waits.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
        let (mut late, mut next) = (Vec::new(), None::<Instant>);
        for caller in &mut self.gathering().callers {
            if let State::Waits(waker) = &mut caller.state {
                if caller.deadline <= now {
                    late.extend(waker.take());
                    caller.state = State::TimedOut;
                } else {
                    next = Some(next.map_or(caller.deadline, |next| caller.deadline.min(next)));
                }
            }
        }
        late.into_iter().for_each(Waker::wake);
        next
    }

    /// Tells everybody, in the order in which they came.
    pub(super) fn settle(&self, sealed: Sealed, fates: Vec<Fate>) {
        self.tell(Settled { places: sealed.places, fates });
    }

    fn tell(&self, settled: Settled) {
        let mut gathering = self.gathering();
        if self.settled.set(settled).is_err() {
            return;
        }
        let mut callers = std::mem::take(&mut gathering.callers);
        drop(gathering);
        for caller in &mut callers {
            if let State::Waits(Some(waker)) = std::mem::replace(&mut caller.state, State::Gone) {
                waker.wake();
            }
        }
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        if self.0.settled.get().is_none() {
            self.0.tell(Settled { places: Vec::new(), fates: Vec::new() });
        }
    }
}

impl Settled {
    fn outcome(&self, number: usize, request: &Request<'_>) -> Outcome {
        let Some(place) = self.places.get(number) else {
            let reason = "the runtime that the store was made in is shutting down";
            return Outcome::Failed(StoreError::Unreachable(reason.to_owned()));
        };
        let Some(Place { item, earlier }) = *place else { return Outcome::TimedOut };
        match &self.fates[item] {
            Fate::Told(told) => {
                told.verdicts(request, earlier).map_or_else(Outcome::Failed, Outcome::Decided)
            }
            Fate::Failed(error) => Outcome::Failed(error.clone()),
            Fate::Again => Outcome::Again,
            Fate::Alone => Outcome::Alone,
        }
    }
}

impl Ticket {
    pub(super) fn batch(&self) -> &Arc<Batch> {
        &self.batch
    }

    /// What becomes of the request that it was given for.
    pub(super) async fn outcome(mut self, request: &Request<'_>) -> Outcome {
        let in_time = Settles(&mut self).await;
        match self.batch.settled.get() {
            Some(settled) if in_time => settled.outcome(self.number, request),
            _ => Outcome::TimedOut,
        }
    }
}

/// Until the batch is settled (true) or the caller's deadline has passed (false).
struct Settles<'a>(&'a mut Ticket);

impl Future for Settles<'_> {
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<bool> {
        let ticket = &mut *self.0;
        if ticket.batch.settled.get().is_none() {
            let mut gathering = ticket.batch.gathering();
            // It may have been settled just before the lock, and then nobody will wake us.
            if ticket.batch.settled.get().is_none() {
                match gathering.callers.get_mut(ticket.number).map(|caller| &mut caller.state) {
                    Some(State::Waits(Some(waker))) => waker.clone_from(context.waker()),
                    Some(State::Waits(waker)) => *waker = Some(context.waker().clone()),
                    _ => {
                        drop(gathering);
                        ticket.done = true;
                        return Poll::Ready(false);
                    }
                }
                return Poll::Pending;
            }
        }
        ticket.done = true;
        Poll::Ready(true)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.done
            && self.batch.settled.get().is_none()
            && let Some(caller) = self.batch.gathering().callers.get_mut(self.number)
        {
            caller.state = State::Gone;
        }
    }
}
