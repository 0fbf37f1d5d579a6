//! Sends a batch to its node: one pipeline, whose calls decide the items of the batch.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use tokio::time::sleep_until;

use super::Shared;
use super::batch::{InFlightBatch, ItemResult, Sealed};
use super::call::{ScriptCall, ScriptResult};
use super::error::{AttemptError, ServerError, is_non_local_key, is_readonly, with_address};
use super::node::NodeClient;
use super::requests::ItemReply;
use super::step::{Delivery, NextStep};

/// Call of a batch.
struct PlannedCall {
    items: Vec<usize>,
    asking: bool,
}

/// Sends a batch, and completes it. Wakes waiters whose deadline passes before that.
pub(super) async fn dispatch(
    shared: &Shared,
    node: &Arc<NodeClient>,
    InFlightBatch(batch): &InFlightBatch,
) {
    let sealed = batch.seal(Instant::now());
    let Some(earliest) = sealed.earliest else { return batch.complete(sealed, Vec::new()) };
    let round = Round { shared, node, sealed: &sealed };
    let results = if earliest == sealed.latest {
        // The call itself ends at the deadline.
        round.send().await
    } else {
        let mut call = pin!(round.send());
        let mut next_deadline = Some(earliest);
        loop {
            let Some(deadline) = next_deadline else { break call.await };
            tokio::select! {
                biased;
                results = &mut call => break results,
                () = sleep_until(deadline.into()) => next_deadline = batch.expire(Instant::now()),
            }
        }
    };
    batch.complete(sealed, results);
}

/// A sealed batch on its way to a node.
struct Round<'a> {
    shared: &'a Shared,
    node: &'a Arc<NodeClient>,
    sealed: &'a Sealed,
}

impl Round<'_> {
    /// Sends the batch, and returns the result of each item.
    async fn send(&self) -> Vec<ItemResult> {
        let items = self.sealed.requests.items().len();
        let mut results: Vec<ItemResult> = (0..items).map(|_| Err(NextStep::TimeOut)).collect();
        let calls = self.plan();
        for (call, replies) in calls.iter().zip(self.send_calls(&calls).await) {
            match replies {
                Ok(replies) => {
                    for (item, reply) in call.items.iter().zip(replies) {
                        results[*item] = self.item_result(*item, reply);
                    }
                }
                Err(error) => {
                    let step = self.next_step(call.items[0], error);
                    call.items.iter().for_each(|item| results[*item] = Err(step.clone()));
                }
            }
        }
        results
    }

    /// Returns the calls that decide the items. On a cluster a call has the keys of one slot.
    fn plan(&self) -> Vec<PlannedCall> {
        let sealed = self.sealed;
        let mut shared: Vec<usize> = Vec::with_capacity(sealed.repeats.len());
        let mut calls = Vec::new();
        for item in (0..sealed.repeats.len()).filter(|item| sealed.repeats[*item] > 0) {
            match sealed.deliveries[item] {
                Delivery::Shared => shared.push(item),
                Delivery::Alone => calls.push(PlannedCall { items: vec![item], asking: false }),
                Delivery::Asking => calls.push(PlannedCall { items: vec![item], asking: true }),
            }
        }
        let slot = |item: &usize| sealed.requests.items()[*item].slot;
        if shared.len() > 1 && self.shared.topology.state().is_cluster() {
            shared.sort_by_key(slot);
            calls.extend(
                shared
                    .chunk_by(|one, other| slot(one) == slot(other))
                    .map(|items| PlannedCall { items: items.to_vec(), asking: false }),
            );
        } else if !shared.is_empty() {
            calls.push(PlannedCall { items: shared, asking: false });
        }
        calls
    }

    /// Sends the calls in one pipeline. Returns for each the replies to its items.
    async fn send_calls(&self, calls: &[PlannedCall]) -> Vec<Result<Vec<ItemReply>, AttemptError>> {
        let Sealed { requests, repeats, earliest, latest, .. } = self.sealed;
        let connection = match self.node.connection(*latest).await {
            Ok(connection) => connection,
            Err(error) => return calls.iter().map(|_| Err(error.clone())).collect(),
        };
        let times = self.shared.server_times(connection.clock(), earliest.unwrap_or(*latest));
        let repeats = |item: usize| repeats[item];
        let script_call = |call: &PlannedCall| ScriptCall {
            script: requests.script(&call.items),
            command: requests.command(&call.items, repeats, &times),
            asking: call.asking,
        };
        let script_calls: Vec<ScriptCall> = calls.iter().map(script_call).collect();
        let sent = Instant::now();
        let replies = self.node.run(&connection, &script_calls, *latest).await;
        let received = Instant::now();
        let read = |(call, reply): (&PlannedCall, ScriptResult)| {
            let reply =
                requests.read(&call.items, repeats, reply?).map_err(AttemptError::Unusable)?;
            connection.clock().observe(reply.now, sent, received);
            // The script ran after its deadline, perhaps only because the server's clock was set.
            // Its time is known now.
            reply.items.ok_or(AttemptError::Late)
        };
        calls.iter().zip(replies).map(read).collect()
    }

    fn item_result(&self, item: usize, reply: ItemReply) -> ItemResult {
        let ItemReply::Error(reason) = &reply else { return Ok(reply) };
        let reason = with_address(self.node.address(), reason);
        if is_readonly(&reason) {
            let error = AttemptError::Server(ServerError::NotWritable(reason));
            Err(self.next_step(item, error))
        } else if is_non_local_key(&reason) {
            Err(self.next_step(item, AttemptError::Server(ServerError::NonLocalKey)))
        } else {
            Ok(ItemReply::Error(reason))
        }
    }

    fn next_step(&self, item: usize, error: AttemptError) -> NextStep {
        let slot = self.sealed.requests.items()[item].slot;
        NextStep::after(error, self.shared.topology.state(), self.node, slot)
    }
}
