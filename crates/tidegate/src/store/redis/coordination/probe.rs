//! Circuits of the nodes: a node whose decisions fail is probed until it can decide again.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::time::{sleep_until, timeout_at};

use super::internal_key;
use super::permissions::check_permissions;
use crate::charge::Charge;
use crate::quota::Quota;
use crate::resilience::circuit::failure;
use crate::store::redis::Shared;
use crate::store::redis::batch::dispatch::dispatch_probe;
use crate::store::redis::batch::{Batch, InFlightBatch};
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::error::MIGRATING;
use crate::store::redis::routing::slots::{SLOTS, slot_of};
use crate::store::redis::routing::step::{Delivery, NextStep};
use crate::store::redis::script::requests::{Operation, Request};
use crate::store::{Action, StoreError};

/// Number of hash tags to try for one in a slot of a given node. Even for a node with a single slot
/// the search fails only with probability e^-20.
const MAX_TAGS: usize = 20 * SLOTS;

impl Shared {
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

    /// Opens the circuit of a node that lacks a permission or a command. Returns the error with
    /// their names, which the server's error rarely has. Concurrent calls share one check.
    pub(crate) async fn on_not_permitted(
        self: &Arc<Self>,
        node: &Arc<NodeClient>,
        error: StoreError,
        deadline: Instant,
    ) -> StoreError {
        let named = timeout_at(deadline.into(), async {
            let _guard = node.permission_check.lock().await;
            if node.circuit().is_not_permitted() {
                return node.circuit().open_error();
            }
            let error = self.check_permissions(node).await.err().unwrap_or(error.clone());
            self.record(node, Err(&error));
            error
        });
        match named.await {
            Ok(StoreError::Open(error)) => Arc::unwrap_or_clone(error),
            Ok(error) => error,
            Err(_) => {
                self.record(node, Err(&error));
                error
            }
        }
    }

    /// Checks which commands that decisions need are missing on a node.
    async fn check_permissions(&self, node: &Arc<NodeClient>) -> Result<(), StoreError> {
        match self.probe_key(node) {
            Some(key) => check_permissions(node, &key, &self.prefix, self.timeout).await,
            None => Ok(()),
        }
    }

    /// Decides a charge on an internal key by the same script as any decision, so that it fails
    /// whenever decisions on this node would.
    pub(crate) async fn probe(&self, node: &Arc<NodeClient>) -> Result<(), StoreError> {
        let Some(key) = self.probe_key(node) else { return Ok(()) };
        let quota = Quota::fixed_window(Quota::MAX_LIMIT, Duration::from_secs(1));
        let quota = quota.map_err(|error| StoreError::Refused(error.to_string()))?;
        let charge = [Charge::new("probe", &quota)];
        let request = Request::new(Operation::Apply(Action::Acquire), &charge);
        let write_key = |text: &mut String, _: &Charge<'_>| text.push_str(&key);
        let deadline = Instant::now() + self.timeout;
        let batch = Arc::<Batch>::default();
        let handle = batch.join(&request, slot_of(&key), Delivery::Shared, deadline, write_key);
        dispatch_probe(self, node, &InFlightBatch(batch)).await;
        match handle.decisions(&request).await {
            // A node that redirects can answer.
            Ok(_) | Err(NextStep::Redirect(_)) => Ok(()),
            Err(NextStep::Fail(error) | NextStep::BackOff(error)) => Err(error),
            Err(NextStep::TimeOut | NextStep::SendAgain | NextStep::AnswerLost) => {
                Err(StoreError::Timeout(self.timeout))
            }
            Err(NextStep::SendAlone | NextStep::AwaitMigration | NextStep::Split) => {
                Err(StoreError::Refused(MIGRATING.to_owned()))
            }
        }
    }

    /// Returns a probe key of this node; `None` if it has left the cluster, and decides nothing.
    fn probe_key(&self, node: &Arc<NodeClient>) -> Option<String> {
        let topology = self.topology.state();
        let key = |number| internal_key(&self.prefix, &format!("probe-{number}"));
        if !topology.is_cluster() {
            return Some(key(0));
        }
        let is_primary = topology.primaries().iter().any(|primary| Arc::ptr_eq(primary, node));
        let is_owned = |key: &String| topology.is_owner(slot_of(key), node);
        is_primary.then(|| (0..MAX_TAGS).map(key).find(is_owned)).flatten()
    }
}

/// Probes a node until its circuit closes, another node has replaced it, or the store is dropped.
async fn probe_until_closed(store: Weak<Shared>, node: Arc<NodeClient>) {
    while !node.is_retired() {
        sleep_until(node.circuit().next_probe()).await;
        let Some(store) = store.upgrade() else { return };
        if !node.circuit().takes_probe() {
            continue;
        }
        let mut probed = store.probe(&node).await;
        // The probe does not need all commands.
        if node.circuit().is_not_permitted() || matches!(probed, Err(StoreError::NotPermitted(_))) {
            probed = store.check_permissions(&node).await.and(probed);
        }
        if node.circuit().record_probe(probed.as_ref().err()) {
            tracing::debug!(node = %node.address(), "circuit closed");
            return;
        }
    }
}
