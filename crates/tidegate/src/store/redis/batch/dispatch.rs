//! [`Dispatcher`]: decides requests. It routes each to its node, in a batch with others, and takes
//! the next step after a failure.
//!
//! A batch is one pipeline, whose calls decide its items. On a cluster, one call decides items of
//! any slots of the node, if the server allows it: the script declares one key and names the others
//! as arguments. An item whose key is on another node then fails alone, has written nothing, and is
//! sent again alone, so that the server redirects it. Where the server does not allow it, there is
//! one call per slot.

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
    refuses_undeclared, with_address,
};
use crate::store::redis::client::server_clock::{ServerClock, ServerTimes};
use crate::store::redis::client::stats::BucketCounters;
use crate::store::redis::coordination::probe::{on_not_permitted, probe_until_closed};
use crate::store::redis::routing::slots::slot_of_charge;
use crate::store::redis::routing::step::{CallError, CallTarget, Delivery, NextStep, Retries};
use crate::store::redis::routing::{Topology, TopologyState};
use crate::store::redis::script::call::{ScriptCall, ScriptResult};
use crate::store::redis::script::reply::{ItemReply, LATER, RequestDecisions};
use crate::store::redis::script::requests::{EncodedRequests, OrderedItem, Request};
use crate::store::redis::script::{KeyMode, Script};

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
        self.cross_slot && node.allows_cross_slot()
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
        requests: &EncodedRequests,
    ) -> ServerTimes {
        let own_now = requests.have_times().then_some(|| self.clock.now().as_micros());
        ServerTimes::new(clock, deadline, self.driven_time(), own_now)
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
    asking: bool,
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
        let to_send = (0..items).filter(|item| self.sealed.repeats[*item] > 0).collect();
        let mut calls = self.plan(to_send, self.dispatcher.crosses_slots(self.node));
        while !calls.is_empty() {
            let mut to_declare = Vec::new();
            for (call, replies) in calls.iter().zip(self.send_calls(&calls).await) {
                match replies {
                    Ok(replies) => {
                        for (OrderedItem { item, .. }, reply) in call.items.iter().zip(replies) {
                            results[*item] = self.item_result(*item, reply, call.mode);
                        }
                    }
                    Err(error) if call.mode == KeyMode::CrossSlot && self.may_declare(&error) => {
                        to_declare.extend(call.items.iter().map(|ordered| ordered.item));
                    }
                    Err(error) => {
                        let step = self.next_step(call.items[0].item, error);
                        for OrderedItem { item, .. } in &call.items {
                            results[*item] = Err(step.clone());
                        }
                    }
                }
            }
            // Such a request is decided slot by slot.
            for item in &to_declare {
                if self.sealed.deliveries[*item] == Delivery::Spanning {
                    results[*item] = Err(NextStep::Split);
                }
            }
            to_declare.retain(|item| self.sealed.deliveries[*item] != Delivery::Spanning);
            calls = self.plan(to_declare, false);
        }
        results
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

    /// Returns the calls that decide these items: one for all that may share it, or on a cluster,
    /// if it does not cross slots, one per slot.
    fn plan(&self, items: Vec<usize>, crosses_slots: bool) -> Vec<PlannedCall> {
        let sealed = self.sealed;
        let planned = |items: &[usize], mode, asking| {
            let repeats = |item: usize| sealed.repeats[item];
            let items = sealed.requests.order(items.iter().copied(), repeats);
            PlannedCall { items, mode, asking }
        };
        let declared = |items: &[usize], asking| planned(items, KeyMode::Declared, asking);
        let (mut calls, mut shared) = (Vec::new(), items);
        let mut spans_slots = false;
        shared.retain(|item| {
            match sealed.deliveries[*item] {
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
            && (!self.dispatcher.topology().is_cluster()
                || shared.windows(2).all(|pair| slot(&pair[0]) == slot(&pair[1])));
        if shared.is_empty() {
            // Nothing to share.
        } else if is_one_slot {
            calls.push(declared(&shared, false));
        } else if crosses_slots || spans_slots {
            calls.push(planned(&shared, KeyMode::CrossSlot, false));
        } else {
            shared.sort_by_key(slot);
            let by_slot = shared.chunk_by(|one, other| slot(one) == slot(other));
            calls.extend(by_slot.map(|items| declared(items, false)));
        }
        calls
    }

    /// Returns whether the items of a call that would cross slots, but was not run because of this
    /// error, can be decided slot by slot. A server that does not know such calls is remembered.
    fn may_declare(&self, error: &AttemptError) -> bool {
        match error {
            AttemptError::Server(
                ServerError::Moved(_)
                | ServerError::Ask(_)
                | ServerError::TryAgain
                | ServerError::CrossSlot,
            ) => true,
            AttemptError::Server(ServerError::Other(reason)) if !is_server_condition(reason) => {
                self.node.refuse_cross_slot(reason);
                true
            }
            _ => false,
        }
    }

    /// Sends the calls in one pipeline. Returns for each the replies to its items.
    async fn send_calls(&self, calls: &[PlannedCall]) -> Vec<Result<Vec<ItemReply>, AttemptError>> {
        let Sealed { requests, earliest, latest, .. } = self.sealed;
        let connection = match self.node.connection(*latest).await {
            Ok(connection) => connection,
            Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
        };
        let deadline = earliest.unwrap_or(*latest);
        let times = self.dispatcher.server_times(&connection.clock, deadline, requests);
        let script_call = |call: &PlannedCall| ScriptCall {
            script: Script::decide(call.mode),
            arguments: requests.arguments(&call.items, &times, call.mode),
            asking: call.asking,
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
            let reply = requests.read(&call.items, &reply?).map_err(AttemptError::Unusable)?;
            connection.clock.observe(reply.now, sent, received);
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
                self.node.refuse_cross_slot(&with_address(self.node.address(), reason));
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
