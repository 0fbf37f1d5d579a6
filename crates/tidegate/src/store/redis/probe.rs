//! Probes, which check whether a shard can decide; the shard of a charge; and the store's internal
//! keys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::node::NodeClient;
use super::requests::{Operation, Request};
use super::slot::{SLOTS, slot_of};
use super::step::CallError;
use crate::charge::Charge;
use crate::quota::Quota;
use crate::store::{Action, ShardId, StoreError};

/// Number of hash tags to try for one in a slot of a given node. Even for a node with a single slot
/// the search fails only with probability e^-20.
const MAX_TAGS: usize = 20 * SLOTS;

impl Shared {
    /// Returns the shard that decides this charge.
    pub(super) fn shard_of(&self, charge: &Charge<'_>) -> ShardId {
        let topology = self.topology.state();
        if !topology.is_cluster() {
            return ShardId::SINGLE;
        }
        topology.route(Self::slot(charge)).map_or(ShardId::SINGLE, |node| node.shard())
    }

    /// Decides a charge on an internal key by the same script as any decision, so that it fails
    /// whenever decisions on this shard would.
    pub(super) async fn probe(self: &Arc<Self>, shard: ShardId) -> Result<(), StoreError> {
        let topology = self.topology.state();
        let key = if topology.is_cluster() && shard != ShardId::SINGLE {
            // A node that has left the cluster decides nothing, so the probe succeeds.
            let mut primaries = topology.primaries().into_iter();
            let Some(node) = primaries.find(|node| node.shard() == shard) else { return Ok(()) };
            let Some(key) = self.probe_key_on(&node) else { return Ok(()) };
            key
        } else {
            self.internal_key("probe-0")
        };
        let quota = Quota::fixed_window(Quota::MAX_LIMIT, Duration::from_secs(1));
        let quota = quota.map_err(|error| StoreError::Refused(error.to_string()))?;
        let charge = [Charge::new("probe", &quota)];
        let request = Request { operation: Operation::Apply(Action::Acquire), charges: &charge };
        let write_key = |text: &mut String, _: &Charge<'_>| text.push_str(&key);
        let started = Instant::now();
        let decided = self.send(&request, slot_of(&key), started, write_key, false).await;
        decided.map(drop).map_err(CallError::into_store_error)
    }

    /// Returns an internal key. It cannot be a user's key, in which percent signs are escaped.
    pub(super) fn internal_key(&self, name: &str) -> String {
        format!("{}:{{%{name}}}", self.prefix)
    }

    /// Returns a probe key in a slot of this node.
    fn probe_key_on(&self, node: &Arc<NodeClient>) -> Option<String> {
        let topology = self.topology.state();
        let key = |number| self.internal_key(&format!("probe-{number}"));
        (0..MAX_TAGS).map(key).find(|key| topology.is_owner(slot_of(key), node))
    }
}
