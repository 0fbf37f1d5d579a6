//! [`Dispatcher`]: decides requests. It routes each to its node, in a batch with others, and takes
//! the next step after a failure.
//!
//! A batch is one pipeline, whose calls decide its items. On a cluster, one call decides items of
//! any slots of the node, if the server allows it: the script declares one key and names the others
//! as arguments. An item whose key is on another node then fails alone, has written nothing, and is
//! sent again alone, so that the server redirects it. Where the server does not allow it, there is
//! one call per slot; so it is on one address in front of several shards.
//!
//! Restrictions of a node are learned from its first error, and the calls that it refused, which did
//! nothing, are sent again in the form that it allows.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::sleep_until;

use super::queue::{Enqueued, enqueue};
use super::{Batch, InFlightBatch, ItemResult, Sealed};
use crate::charge::Charge;
use crate::clock::{Clock as _, SystemClock, Timestamp};
use crate::key::write_redis_key;
use crate::store::StoreError;
use crate::store::circuit::failure;
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::error::{
    AttemptError, NodeError, ServerError, is_non_local_key, is_server_condition, item_error,
    refuses_time, refuses_undeclared, refuses_write_after_time, with_address,
};
use crate::store::redis::client::restrictions::Restriction;
use crate::store::redis::client::server_clock::{Estimate, ServerClock, ServerTimes};
use crate::store::redis::client::stats::BucketCounters;
use crate::store::redis::coordination::probe::{on_not_permitted, probe_until_closed};
use crate::store::redis::routing::slots::slot_of_charge;
use crate::store::redis::routing::step::{CallError, CallTarget, Delivery, NextStep, Retries};
use crate::store::redis::routing::{Topology, TopologyState};
use crate::store::redis::script::call::{ScriptCall, ScriptResult};
use crate::store::redis::script::reply::{ItemReply, LATER, RequestDecisions};
use crate::store::redis::script::requests::{EncodedRequests, OrderedItem, Request};
use crate::store::redis::script::{ClockSource, KeyMode, Script};

/// Decides the requests of a store. Background tasks share it, because a refund may outlast its
/// caller.
pub(crate) struct Dispatcher {
    pub(crate) topology: Arc<Topology>,
    /// Prefix of all keys.
    pub(crate) prefix: String,
    /// Mark of the format in names of counts.
    pub(crate) format_mark: String,
    pub(crate) clock: SystemClock,
    pub(crate) timeout: Duration,
    pub(crate) group_commit: bool,
    pub(crate) cross_slot: bool,
    /// Number of decisions in each call.
    pub(crate) call_sizes: BucketCounters,
    /// Runtime in which the store was connected.
    pub(crate) runtime: Handle,
    /// Manual clock of a test, which replaces the server's time.
    #[cfg(feature = "testing")]
    pub(crate) driven_by: Option<crate::clock::ManualClock>,
}

impl Dispatcher {
    pub(crate) fn topology(&self) -> &TopologyState {
        self.topology.state()
    }

    /// Appends the Redis key of a charge.
    pub(crate) fn write_key(&self, text: &mut String, charge: &Charge<'_>) {
        write_redis_key(text, &self.prefix, charge.key(), &self.format_mark, charge.policy());
    }

    /// Returns whether one call to this node may reach keys of several slots.
    pub(crate) fn crosses_slots(&self, node: &NodeClient) -> bool {
        self.cross_slot
            && self.topology().is_cluster()
            && !node.refuses(Restriction::UndeclaredKeys)
    }

    /// Returns whether all keys of one call to this node must be in one slot.
    pub(crate) fn splits_slots(&self, node: &NodeClient) -> bool {
        self.topology().is_cluster() || node.refuses(Restriction::SeveralSlots)
    }

    /// Decides a request on keys of one node. Requests for one node share calls.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        request: &Request<'_>,
        started: Instant,
        delivery: Delivery,
    ) -> Result<RequestDecisions, CallError> {
        let Some(first) = request.charges.first() else {
            return Ok(RequestDecisions::Many(Vec::new()));
        };
        let (slot, deadline, topology) =
            (slot_of_charge(first), started + self.timeout, self.topology());
        let write_key = |text: &mut String, charge: &Charge<'_>| self.write_key(text, charge);
        let mut target = CallTarget { node: topology.route(slot)?, delivery };
        let mut retries = None;
        loop {
            if target.node.circuit().is_open() {
                return Err(target.node.circuit().open_error().into());
            }
            let handle = if self.group_commit {
                match enqueue(self, &target, request, slot, deadline, write_key) {
                    Enqueued::Wait(handle) => handle,
                    // Boxed, so that the future of a caller that waits for a batch stays small.
                    Enqueued::Lead(leader) => Box::pin(leader.send()).await,
                }
            } else {
                let batch = Arc::<Batch>::default();
                let handle = batch.join(request, slot, target.delivery, deadline, write_key);
                Box::pin(self.dispatch(&target.node, &InFlightBatch(batch), true)).await;
                handle
            };
            let step = match handle.decisions(request).await {
                Ok(decisions) => return Ok(decisions),
                Err(step) => step,
            };
            // The circuit has counted the calls that failed, but not those to be repeated.
            let is_counted =
                matches!(step, NextStep::Fail(_) | NextStep::TimeOut | NextStep::AnswerLost);
            let retries = retries.get_or_insert(Retries::until(deadline, self.timeout, delivery));
            let node = Arc::clone(&target.node);
            target = match Box::pin(retries.follow(step, target, slot, topology)).await {
                Ok(next) => next,
                Err(CallError::Failed(error @ StoreError::NotPermitted(_))) => {
                    let refused = on_not_permitted(self, &node, error, deadline);
                    return Err(Box::pin(refused).await.into());
                }
                Err(error) => {
                    if let CallError::Failed(error) = &error
                        && !is_counted
                    {
                        self.record(&node, Err(error));
                    }
                    return Err(error);
                }
            };
        }
    }

    /// Sends a batch, and completes it. Wakes waiters whose deadline passes before that. Its result
    /// is `recorded` once in the circuit of the node, unless it is a probe.
    pub(crate) async fn dispatch(
        self: &Arc<Self>,
        node: &Arc<NodeClient>,
        InFlightBatch(batch): &InFlightBatch,
        recorded: bool,
    ) {
        let sealed = batch.seal(Instant::now());
        let round = Round { dispatcher: self, node, batch, sealed: &sealed };
        let results = {
            let mut call = pin!(round.send());
            let mut next_deadline = sealed.earliest;
            loop {
                // No caller waits any more.
                let Some(deadline) = next_deadline else { break round.time_out() };
                tokio::select! {
                    biased;
                    results = &mut call => break results,
                    () = sleep_until(deadline.into()) => {
                        next_deadline = batch.expire(Instant::now());
                    }
                }
            }
        };
        if recorded && let Some(outcome) = round.outcome(&results) {
            self.record(node, outcome.as_ref().copied());
        }
        batch.complete(sealed, results);
    }

    /// Counts the result of a call in the circuit of its node. If that opens the circuit, the node
    /// is probed until it can decide again.
    pub(crate) fn record(
        self: &Arc<Self>,
        node: &Arc<NodeClient>,
        result: Result<(), &StoreError>,
    ) {
        if node.circuit().record(failure(result)) {
            // At debug level only: the callers get the error, and a fallback logs a warning.
            tracing::debug!(node = %node.address(), error = ?result, "circuit opened");
            let prober = probe_until_closed(Arc::downgrade(self), Arc::clone(node));
            node.queue().runtime().spawn(prober);
        }
    }

    /// Returns the times of a call of these requests that is sent now.
    fn server_times(
        &self,
        clock: &ServerClock,
        deadline: Instant,
        estimate: Option<Estimate>,
        requests: &EncodedRequests,
    ) -> ServerTimes {
        let own_now = requests.need_time().then_some(|| self.clock.now().as_micros());
        ServerTimes::new(clock, deadline, estimate, self.driven_time(), own_now)
    }

    /// Returns the time of the store's own clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.driven_time().map_or_else(|| self.clock.now(), Timestamp::from_micros)
    }

    /// Returns the time of a test's manual clock.
    #[cfg(feature = "testing")]
    pub(crate) fn driven_time(&self) -> Option<u64> {
        self.driven_by.as_ref().map(|clock| clock.now().as_micros())
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the twin for tests uses it")]
    pub(crate) fn driven_time(&self) -> Option<u64> {
        None
    }
}

/// Call of a batch.
struct PlannedCall {
    items: Vec<OrderedItem>,
    mode: KeyMode,
    clock: ClockSource,
    asking: bool,
    /// Whether it is the release of a unit in flight, which is no script.
    is_release: bool,
}

/// Form of the calls of a batch, which errors of the server change.
struct CallForm {
    /// Whether one call may reach keys of several slots that it does not declare.
    crosses_slots: bool,
    clock: ClockSource,
    /// Error that made the clock an estimated one. If that helps, the node is remembered.
    time_refusal: Option<String>,
}

impl CallForm {
    fn estimate_clock(&mut self, reason: &str) {
        self.clock = ClockSource::Estimated;
        self.time_refusal = Some(reason.to_owned());
    }
}

/// A sealed batch on its way to a node.
struct Round<'a> {
    dispatcher: &'a Dispatcher,
    node: &'a Arc<NodeClient>,
    batch: &'a Batch,
    sealed: &'a Sealed,
}

impl Round<'_> {
    /// Sends the batch, and returns the result of each item.
    async fn send(&self) -> Vec<ItemResult> {
        let items = self.sealed.requests.items().len();
        let mut results: Vec<ItemResult> = (0..items).map(|_| Err(NextStep::TimeOut)).collect();
        let mut to_send: Vec<usize> =
            (0..items).filter(|item| self.sealed.repeats[*item] > 0).collect();
        let crosses_slots = self.dispatcher.crosses_slots(self.node);
        let mut form = CallForm { crosses_slots, clock: self.node.clock(), time_refusal: None };
        if self.node.refuses(Restriction::SeveralSlots) {
            self.split_spanning(&mut to_send, &mut results);
        }
        let mut calls = self.plan(to_send, &form);
        while !calls.is_empty() {
            let mut again = Vec::new();
            for (call, replies) in calls.iter().zip(self.send_calls(&calls).await) {
                let call_items = call.items.iter().map(|ordered| ordered.item);
                match replies {
                    Ok(replies) => {
                        if call.clock == ClockSource::Estimated
                            && let Some(reason) = form.time_refusal.take()
                        {
                            self.node.restrict(Restriction::TimeInScripts, &reason);
                        }
                        for (item, reply) in call_items.zip(replies) {
                            match &reply {
                                ItemReply::Error(reason)
                                    if call.clock == ClockSource::Server
                                        && refuses_write_after_time(reason) =>
                                {
                                    form.estimate_clock(reason);
                                    again.push(item);
                                }
                                _ => results[item] = self.item_result(item, reply, call.mode),
                            }
                        }
                    }
                    Err(error) if self.adapts(&mut form, call, &error) => again.extend(call_items),
                    Err(error) => {
                        let step = self.next_step(call.items[0].item, error);
                        call_items.for_each(|item| results[item] = Err(step.clone()));
                    }
                }
            }
            if self.dispatcher.splits_slots(self.node) && !form.crosses_slots {
                self.split_spanning(&mut again, &mut results);
            }
            calls = self.plan(again, &form);
        }
        results
    }

    /// Takes out the requests with keys of several slots, which are decided slot by slot.
    fn split_spanning(&self, items: &mut Vec<usize>, results: &mut [ItemResult]) {
        items.retain(|item| {
            let spans = self.sealed.requests.spans_slots(*item);
            if spans {
                results[*item] = Err(NextStep::Split);
            }
            !spans
        });
    }

    /// Returns the results of a batch whose deadlines have all passed.
    fn time_out(&self) -> Vec<ItemResult> {
        if self.sealed.earliest.is_none() {
            return Vec::new();
        }
        self.node.check_health();
        let error = if self.batch.is_sent() {
            AttemptError::TimedOut
        } else {
            AttemptError::Down(NodeError::new(self.node.address(), "still connecting"))
        };
        let step = self.next_step(0, error);
        self.sealed.requests.items().iter().map(|_| Err(step.clone())).collect()
    }

    /// Returns the result of the whole batch for the circuit of the node, however many callers it
    /// has: a failure if at least half of its requests failed. `None` if it says nothing: requests
    /// that continue elsewhere, and reads, which succeed on a full server that refuses writes.
    fn outcome(&self, results: &[ItemResult]) -> Option<Result<(), StoreError>> {
        let (mut succeeded, mut failed, mut last_error) = (0, 0, None);
        let items = self.sealed.requests.items().iter().zip(&self.sealed.repeats);
        for ((item, repeats), result) in items.zip(results) {
            let error = match result {
                Ok(ItemReply::Error(reason)) => Some(item_error(reason)),
                Ok(_) if item.is_read() => continue,
                Ok(_) => None,
                Err(NextStep::Fail(error)) => Some(error.clone()),
                Err(_) => continue,
            };
            match error.filter(|error| failure(Err(error)).is_some()) {
                // The caller first finds out which permission is missing, and then opens the
                // circuit with its name.
                Some(StoreError::NotPermitted(_)) => {}
                Some(error) => {
                    failed += repeats;
                    last_error = Some(error);
                }
                None => succeeded += repeats,
            }
        }
        match last_error {
            Some(error) if failed >= succeeded => Some(Err(error)),
            _ if succeeded > 0 => Some(Ok(())),
            _ => None,
        }
    }

    /// Returns the calls that decide these items: one for all that may share it, or on a node that
    /// splits slots, if it does not cross them, one per slot.
    fn plan(&self, items: Vec<usize>, form: &CallForm) -> Vec<PlannedCall> {
        let sealed = self.sealed;
        let planned = |items: &[usize], mode, asking| {
            let repeats = |item: usize| sealed.repeats[item];
            let is_release = items.first().is_some_and(|item| sealed.requests.is_release(*item));
            let items = sealed.requests.order(items.iter().copied(), repeats);
            let clock = if is_release { ClockSource::Server } else { form.clock };
            PlannedCall { items, mode, clock, asking, is_release }
        };
        let declared = |items: &[usize], asking| planned(items, KeyMode::Declared, asking);
        let (mut calls, mut shared) = (Vec::new(), items);
        let mut spans_slots = false;
        shared.retain(|item| {
            match sealed.deliveries[*item] {
                Delivery::Shared if sealed.requests.is_release(*item) => {
                    calls.push(declared(&[*item], false));
                }
                Delivery::Shared => return true,
                Delivery::Spanning => {
                    spans_slots = true;
                    return true;
                }
                Delivery::Alone => calls.push(declared(&[*item], false)),
                Delivery::Asking => calls.push(declared(&[*item], true)),
            }
            false
        });
        let slot = |item: &usize| sealed.requests.items()[*item].slot;
        let is_one_slot = !spans_slots
            && (!self.dispatcher.splits_slots(self.node)
                || shared.windows(2).all(|pair| slot(&pair[0]) == slot(&pair[1])));
        if shared.is_empty() {
            // Nothing to share.
        } else if is_one_slot {
            calls.push(declared(&shared, false));
        } else if form.crosses_slots || spans_slots {
            calls.push(planned(&shared, KeyMode::CrossSlot, false));
        } else {
            shared.sort_by_key(slot);
            let by_slot = shared.chunk_by(|one, other| slot(one) == slot(other));
            calls.extend(by_slot.map(|items| declared(items, false)));
        }
        calls
    }

    /// Returns whether the items of a call that was not run because of this error can be decided in
    /// another form, which is the form from now on.
    fn adapts(&self, form: &mut CallForm, call: &PlannedCall, error: &AttemptError) -> bool {
        let AttemptError::Server(error) = error else { return false };
        match (error, call.mode) {
            (ServerError::Other(reason), _)
                if call.clock == ClockSource::Server && refuses_time(reason) =>
            {
                form.estimate_clock(reason);
                return true;
            }
            (ServerError::CrossSlot(reason), KeyMode::Declared) => {
                return self.splits_after_cross_slot(call, reason);
            }
            (_, KeyMode::Declared) => return false,
            (ServerError::Moved(_) | ServerError::Ask(_) | ServerError::TryAgain, _) => {}
            (ServerError::CrossSlot(reason), _) => {
                self.node.restrict(Restriction::UndeclaredKeys, reason);
            }
            (ServerError::Other(reason), _) if !is_server_condition(reason) => {
                self.node.restrict(Restriction::UndeclaredKeys, reason);
            }
            _ => return false,
        }
        form.crosses_slots = false;
        true
    }

    /// Returns whether the items of a call that CROSSSLOT has refused can be decided slot by slot.
    fn splits_after_cross_slot(&self, call: &PlannedCall, reason: &str) -> bool {
        let requests = &self.sealed.requests;
        let slot = |ordered: &OrderedItem| requests.items()[ordered.item].slot;
        let has_several_slots = call.items.windows(2).any(|pair| slot(&pair[0]) != slot(&pair[1]))
            || call.items.iter().any(|ordered| requests.spans_slots(ordered.item));
        if has_several_slots && !self.dispatcher.topology().is_cluster() {
            // It may be a node of a cluster that was not detected.
            self.dispatcher.topology().trigger_refresh();
            self.node.restrict(Restriction::SeveralSlots, reason);
        }
        has_several_slots
    }

    /// Sends the calls in one pipeline. Returns for each the replies to its items.
    async fn send_calls(&self, calls: &[PlannedCall]) -> Vec<Result<Vec<ItemReply>, AttemptError>> {
        let Sealed { requests, earliest, latest, .. } = self.sealed;
        let connection = match self.node.connection(*latest).await {
            Ok(connection) => connection,
            Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
        };
        let deadline = earliest.unwrap_or(*latest);
        let is_estimated = calls.iter().any(|call| call.clock == ClockSource::Estimated);
        let estimate = if is_estimated {
            match self.node.estimate(&connection, *latest).await {
                Ok(estimate) => Some(estimate),
                Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
            }
        } else {
            None
        };
        let times = self.dispatcher.server_times(&connection.clock, deadline, estimate, requests);
        let script_call = |call: &PlannedCall| {
            let (script, arguments) = if call.is_release {
                (None, requests.release(call.items[0].item))
            } else {
                let script = Script::decide(call.mode, requests.parts(&call.items));
                let arguments = requests.arguments(&call.items, &times, call.mode);
                (Some(script.with_clock(call.clock)), arguments)
            };
            ScriptCall { script, arguments, asking: call.asking }
        };
        let script_calls: Vec<ScriptCall> = calls.iter().map(script_call).collect();
        for call in calls {
            let decisions = call.items.iter().map(|ordered| self.sealed.repeats[ordered.item]);
            self.dispatcher.call_sizes.record(decisions.sum());
        }
        self.batch.mark_sent();
        let sent = Instant::now();
        let measured = self.node.calls().start(sent);
        let replies = self.node.run(&connection, &script_calls, *latest).await;
        let received = Instant::now();
        measured.end(received);
        let read = |(call, reply): (&PlannedCall, ScriptResult)| {
            if call.is_release {
                let released = EncodedRequests::read_release(&reply?);
                return Ok(vec![released.map_err(AttemptError::Unusable)?]);
            }
            let reply = requests.read(&call.items, &reply?).map_err(AttemptError::Unusable)?;
            // Otherwise it is our own estimate.
            if !is_estimated {
                connection.clock.observe(reply.now, sent, received);
            }
            // The script ran after its deadline, perhaps only because the server's clock was set.
            // Its time is known now.
            reply.items.ok_or(AttemptError::Late)
        };
        calls.iter().zip(replies).map(read).collect()
    }

    fn item_result(&self, item: usize, reply: ItemReply, mode: KeyMode) -> ItemResult {
        let ItemReply::Error(reason) = &reply else { return Ok(reply) };
        if reason == LATER {
            return Err(NextStep::SendAgain);
        }
        let error = match ServerError::new(self.node.address(), reason) {
            error @ (ServerError::NotWritable(_) | ServerError::NotReady(_)) => error,
            _ if mode == KeyMode::CrossSlot && refuses_undeclared(reason) => {
                let reason = with_address(self.node.address(), reason);
                self.node.restrict(Restriction::UndeclaredKeys, &reason);
                ServerError::NonLocalKey
            }
            _ if is_non_local_key(reason) => ServerError::NonLocalKey,
            _ => return Ok(ItemReply::Error(with_address(self.node.address(), reason))),
        };
        Err(self.next_step(item, AttemptError::Server(error)))
    }

    fn next_step(&self, item: usize, error: AttemptError) -> NextStep {
        let slot = self.sealed.requests.items()[item].slot;
        NextStep::after(error, self.dispatcher.topology(), self.node, slot)
    }
}
