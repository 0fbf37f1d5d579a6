//! Group commit: while calls to a node are under way, decisions gather, and go together in the
//! next.
//!
//! Who finds nothing under way steps aside once, so that all who are ready to ask now can join, and
//! then asks: by itself if nobody came. Everybody else joins the batch that gathers; as soon as a
//! call is over, that batch is sent, by a task of its own, so that no caller that goes away leaves
//! the others behind. Nobody waits for a timer, but when calls are slow: after a few milliseconds a
//! batch is sent all the same. It may be that nobody looks at the call before it any more: a future
//! that is neither polled nor dropped would keep its turn for ever.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Pipeline, Value};
use tokio::runtime::Handle;
use tokio::time::sleep_until;

use super::Shared;
use super::batch::{Batch, Carried, Fate, Sealed, Ticket};
use super::fault::{Fault, Said, named, says_readonly};
use super::link::Link;
use super::requests::{Request, Told};
use crate::charge::Charge;

/// Of one node.
pub(super) struct Queue {
    line: Mutex<Line>,
    /// The node's connection lives there as well.
    runtime: Handle,
}

struct Line {
    /// The turns of those under way, the oldest first.
    under_way: VecDeque<u64>,
    turns: u64,
    /// With when they began to gather.
    gathering: VecDeque<(Arc<Batch>, Instant)>,
    /// Somebody looks after those who gather.
    watched: bool,
}

/// The right to have a call under way. Dropped, it goes to the batch that waits for it. Kept for
/// too long, it is lost.
pub(super) struct Turn {
    number: u64,
    shared: Arc<Shared>,
    link: Arc<Link>,
}

pub(super) enum Entrance {
    /// Nothing is under way: step aside once, then go.
    Lead(Lead),
    Wait(Ticket),
}

/// The first of a batch, with the right to send it.
pub(super) struct Lead {
    // Goes before the turn: who leaves is not asked for by those who then send the batch.
    ticket: Ticket,
    turn: Turn,
}

/// How a leader goes on.
pub(super) enum Way {
    /// Nobody came: ask.
    Alone(Turn),
    /// They are asked for together.
    Wait(Ticket),
}

/// How many calls may be under way at once: while the replies of one are taken in, Redis has the
/// other.
const MOST_UNDER_WAY: usize = 2;
/// So many counts are worth a second call beside the first. Fewer wait for its end: a call costs
/// Redis, and us, as much as some decisions.
const ENOUGH_CHARGES: usize = 64;
/// How much one call may weigh ([`weight`](super::requests::Requests::weight)): less than a
/// millisecond of Redis's time, in which it serves no other client.
const MAX_BATCH_WEIGHT: usize = 128;
/// How often a script is loaded for one batch.
const MOST_LOADS: usize = 3;
/// How long a batch gathers at most: a twentieth of the timeout, within these.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(5));

impl Queue {
    pub(super) fn new() -> Self {
        let line = Line {
            under_way: VecDeque::new(),
            turns: 0,
            gathering: VecDeque::new(),
            watched: false,
        };
        Self { line: Mutex::new(line), runtime: Handle::current() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn, or a place among those who gather.
pub(super) fn enter(
    shared: &Arc<Shared>,
    link: Arc<Link>,
    request: &Request<'_>,
    slot: u16,
    deadline: Instant,
) -> Entrance {
    let mut line = link.queue().line();
    let write_key = |text: &mut String, charge: &Charge<'_>| shared.write_redis_key(text, charge);
    let leads = line.under_way.is_empty() && line.gathering.is_empty();
    let ticket = match line.gathering.back() {
        Some((batch, _)) if batch.weight() < MAX_BATCH_WEIGHT => {
            batch.join(request, slot, deadline, write_key)
        }
        _ => {
            let batch = Arc::<Batch>::default();
            let ticket = batch.join(request, slot, deadline, write_key);
            line.gathering.push_back((batch, Instant::now()));
            ticket
        }
    };
    if leads {
        let number = line.next_turn();
        drop(line);
        return Entrance::Lead(Lead {
            ticket,
            turn: Turn { number, shared: Arc::clone(shared), link },
        });
    }
    if line.under_way.len() < MOST_UNDER_WAY
        && ticket.batch().charges() >= ENOUGH_CHARGES
        && let Some(batch) = line.take(ticket.batch())
    {
        let number = line.next_turn();
        drop(line);
        let turn = Turn { number, shared: Arc::clone(shared), link: Arc::clone(&link) };
        link.queue().runtime.spawn(turn.carry_all(Carried(batch)));
        return Entrance::Wait(ticket);
    }
    // Who leads looks after itself.
    let watched = std::mem::replace(&mut line.watched, true);
    drop(line);
    if !watched {
        link.queue().runtime.spawn(watch(Arc::clone(shared), Arc::clone(&link)));
    }
    Entrance::Wait(ticket)
}

impl Lead {
    /// Lets those join who are ready to.
    pub(super) async fn go(self) -> Way {
        tokio::task::yield_now().await;
        let Self { ticket, turn } = self;
        let taken = turn.link.queue().line().take(ticket.batch());
        match taken {
            Some(batch) if batch.has_one_caller() => Way::Alone(turn),
            Some(batch) => {
                let runtime = turn.link.queue().runtime.clone();
                runtime.spawn(turn.carry_all(Carried(batch)));
                Way::Wait(ticket)
            }
            // A call that was over has taken it along.
            None => Way::Wait(ticket),
        }
    }
}

/// Sends batches that have waited for too long. Goes when nobody gathers.
async fn watch(shared: Arc<Shared>, link: Arc<Link>) {
    // Where time stands still, as tests have it, what comes at one moment goes together, however
    // slow the machine is.
    let patience = if shared.driven_time().is_some() {
        shared.timeout
    } else {
        (shared.timeout / 20).clamp(PATIENCE.0, PATIENCE.1)
    };
    let mut until = Instant::now() + patience;
    loop {
        sleep_until(until.into()).await;
        let mut line = link.queue().line();
        let Some((_, begun)) = line.gathering.front() else {
            line.watched = false;
            return;
        };
        until = *begun + patience;
        if until <= Instant::now()
            && let Some((batch, _)) = line.gathering.pop_front()
        {
            line.under_way.pop_front();
            let number = line.next_turn();
            drop(line);
            let turn = Turn { number, shared: Arc::clone(&shared), link: Arc::clone(&link) };
            link.queue().runtime.spawn(turn.carry_all(Carried(batch)));
        }
    }
}

impl Line {
    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.under_way.push_back(self.turns);
        self.turns
    }

    /// This batch, if it still gathers.
    fn take(&mut self, batch: &Arc<Batch>) -> Option<Arc<Batch>> {
        let at = self.gathering.iter().position(|(gathering, _)| Arc::ptr_eq(gathering, batch))?;
        self.gathering.remove(at).map(|(batch, _)| batch)
    }

    /// What is to be sent in this turn next; if there is nothing, the turn is over. If it is lost,
    /// others see to it.
    fn next(&mut self, turn: u64) -> Option<Carried> {
        let held = self.under_way.iter().position(|held| *held == turn)?;
        self.under_way.remove(held);
        let (batch, _) = self.gathering.pop_front()?;
        self.under_way.push_back(turn);
        Some(Carried(batch))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = self.link.queue().line().next(self.number);
        if let Some(batch) = next {
            let turn = Turn {
                number: self.number,
                shared: Arc::clone(&self.shared),
                link: Arc::clone(&self.link),
            };
            self.link.queue().runtime.spawn(turn.carry_all(batch));
        }
    }
}

impl Turn {
    async fn carry_all(self, first: Carried) {
        let mut next = Some(first);
        while let Some(batch) = next {
            self.carry(&batch).await;
            next = self.link.queue().line().next(self.number);
        }
    }

    async fn carry(&self, Carried(batch): &Carried) {
        let sealed = batch.seal(Instant::now());
        let mut alarm = sealed.earliest;
        let fates = if alarm.is_some() {
            let mut sent = pin!(self.send(&sealed));
            loop {
                let Some(next) = alarm else { break sent.await };
                tokio::select! {
                    biased;
                    fates = &mut sent => break fates,
                    () = sleep_until(next.into()) => alarm = batch.expire(Instant::now()),
                }
            }
        } else {
            Vec::new()
        };
        batch.settle(sealed, fates);
    }

    /// What becomes of each item. On a cluster a call has the keys of one slot, so there are as
    /// many as slots, in one go.
    async fn send(&self, sealed: &Sealed) -> Vec<Fate> {
        let mut fates = vec![Fate::Alone; sealed.requests.items().len()];
        let mut calls = calls_of(sealed, self.shared.topology.known().is_cluster());
        for _ in 0..=MOST_LOADS {
            let loads = |items: &Vec<usize>| self.link.loads_of(sealed.requests.script(items));
            let loads: Vec<u64> = calls.iter().map(loads).collect();
            let replies = match self.attempt(sealed, &calls).await {
                Ok(replies) => replies,
                Err(fault) => {
                    let fate = self.fate_of(0, fault);
                    calls.iter().flatten().for_each(|item| fates[*item] = fate.clone());
                    break;
                }
            };
            let mut missed = Vec::new();
            for ((items, loads), reply) in calls.into_iter().zip(loads).zip(replies) {
                let loaded = match reply {
                    Err(Fault::Said(Said::NoScript)) => {
                        self.link.load(sealed.requests.script(&items), loads, sealed.latest).await
                    }
                    Err(fault) => Err(fault),
                    Ok(told) => {
                        items.iter().zip(told).for_each(|(item, told)| fates[*item] = told);
                        continue;
                    }
                };
                match loaded {
                    Ok(()) => missed.push(items),
                    Err(fault) => {
                        let fate = self.fate_of(sealed.requests.items()[items[0]].slot, fault);
                        for item in items {
                            fates[item] = fate.clone();
                        }
                    }
                }
            }
            calls = missed;
            if calls.is_empty() {
                break;
            }
        }
        fates
    }

    /// Sends the calls, once: what each brings to its items.
    async fn attempt(
        &self,
        sealed: &Sealed,
        calls: &[Vec<usize>],
    ) -> Result<Vec<Result<Vec<Fate>, Fault>>, Fault> {
        let connection = self.link.connection(sealed.latest).await?;
        let server_times =
            self.shared.server_times(connection.clock(), sealed.earliest.unwrap_or(sealed.latest));
        let times = |item: usize| sealed.times[item];
        let command = |items: &Vec<usize>| sealed.requests.command(items, times, &server_times);
        let (sent, replies);
        if let [items] = calls {
            let command = command(items);
            sent = Instant::now();
            replies = match self.link.send(&connection, &command, sealed.latest).await {
                Err(fault) if !matches!(fault, Fault::Said(_)) => return Err(fault),
                reply => vec![reply],
            };
        } else {
            let mut commands = Pipeline::with_capacity(calls.len());
            for items in calls {
                commands.add_command(command(items));
            }
            sent = Instant::now();
            replies = self.link.send_all(&connection, &commands, sealed.latest).await?;
        }
        let received = Instant::now();
        let read = |(items, reply): (&Vec<usize>, Result<Value, Fault>)| match sealed
            .requests
            .read(items, times, reply?)
        {
            Ok(answer) => {
                connection.clock().heard(answer.now, sent, received);
                Ok(match answer.told {
                    Some(told) => told.into_iter().map(|told| self.told(told)).collect(),
                    // Time is up; or the server's clock was set, and is known now.
                    None => vec![Fate::Again; items.len()],
                })
            }
            Err(error) => Ok(vec![Fate::Failed(error); items.len()]),
        };
        Ok(calls.iter().zip(replies).map(read).collect())
    }

    /// What a fault of a whole call means to its items. What surely did not run, goes on by itself:
    /// it follows its slot.
    fn fate_of(&self, slot: u16, fault: Fault) -> Fate {
        let known = self.shared.topology.known();
        match fault {
            Fault::Said(Said::Moved(address)) => {
                known.moved(slot, &address);
                Fate::Alone
            }
            Fault::Retired
            | Fault::Said(
                Said::Ask(_) | Said::TryAgain | Said::CrossSlot | Said::NoScript | Said::NotNow(_),
            ) => Fate::Alone,
            Fault::Said(Said::No(_)) => Fate::Failed(fault.into_store_error(self.shared.timeout)),
            Fault::Down(_) | Fault::TimedOut | Fault::Lost(_) => {
                known.stir();
                Fate::Failed(fault.into_store_error(self.shared.timeout))
            }
        }
    }

    fn told(&self, told: Told) -> Fate {
        match told {
            Told::Error(reason) if says_readonly(&reason) => Fate::Alone,
            Told::Error(reason) => Fate::Told(Told::Error(named(self.link.address(), &reason))),
            told => Fate::Told(told),
        }
    }
}

/// The items that are asked, by the calls that ask them.
fn calls_of(sealed: &Sealed, is_cluster: bool) -> Vec<Vec<usize>> {
    let asked = (0..sealed.times.len()).filter(|item| sealed.times[*item] > 0);
    if !is_cluster {
        return vec![asked.collect()];
    }
    let slot = |item: &usize| sealed.requests.items()[*item].slot;
    let mut by_slot: Vec<usize> = asked.collect();
    by_slot.sort_by_key(slot);
    by_slot.chunk_by(|one, other| slot(one) == slot(other)).map(<[usize]>::to_vec).collect()
}
