//! Probes: whether a node could decide now.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Value;

use super::Shared;
use super::call::{Call, Reply, Setback};
use super::link::Link;
use super::requests::{Request, Requests, Verb};
use super::script::Script;
use super::server_clock::ServerClock;
use super::slot::{SLOTS, slot_of};
use crate::charge::Charge;
use crate::quota::Quota;
use crate::store::{Action, ShardId, StoreError};

/// How many tags are tried to find one that lives on a node: enough for a node of one slot, but for
/// one chance in e^20.
const MOST_TAGS: usize = 20 * SLOTS;

impl Shared {
    pub(super) fn part(&self, charge: &Charge<'_>) -> ShardId {
        let known = self.topology.known();
        if !known.is_cluster() {
            return ShardId::SINGLE;
        }
        known.route(Self::slot(charge)).map_or(ShardId::SINGLE, |link| link.part())
    }

    /// Spends a unit of a count that nobody else has, by the script that decides: what would stop a
    /// decision stops this.
    pub(super) async fn probe(&self, part: ShardId) -> Result<(), StoreError> {
        let known = self.topology.known();
        let key = if known.is_cluster() && part != ShardId::SINGLE {
            // A node that is no longer in the cluster decides nothing, so nothing is wrong with it.
            let Some(link) = known.primaries().into_iter().find(|link| link.part() == part) else {
                return Ok(());
            };
            let Some(key) = self.probe_key_on(&link) else { return Ok(()) };
            key
        } else {
            self.own_key("probe-0")
        };
        let quota = Quota::fixed_window(Quota::MAX_LIMIT, Duration::from_secs(1));
        let quota = quota.map_err(|error| StoreError::Refused(error.to_string()))?;
        let charge = [Charge::new("probe", &quota)];
        let request = Request { verb: Verb::Do(Action::Acquire), charges: &charge };
        let requests = Requests::one(&request, slot_of(&key), |text, _| text.push_str(&key));
        let call = self.call(requests.script(&[0]), &key);
        let deadline = Instant::now() + self.timeout;
        let command = |clock: &ServerClock| {
            requests.command(&[0], |_| 1, &self.server_times(clock, deadline))
        };
        let read = |reply: Value| {
            let answer = requests.read(&[0], |_| 1, reply)?;
            Ok((Some(answer.now), answer.told.map_or(Reply::Late, |_| Reply::Answer(()))))
        };
        call.run(known, None, command, read).await.map_err(Setback::into_store_error)
    }

    pub(super) fn call<'a>(&self, script: &'a Script, key: &str) -> Call<'a> {
        Call { script, slot: slot_of(key), started: Instant::now(), timeout: self.timeout }
    }

    /// In a user's key a percent sign is escaped: a tag that begins with a bare one is nobody's.
    pub(super) fn own_key(&self, name: &str) -> String {
        format!("{}:{{%{name}}}", self.prefix)
    }

    fn probe_key_on(&self, link: &Arc<Link>) -> Option<String> {
        let known = self.topology.known();
        let key = |number| self.own_key(&format!("probe-{number}"));
        (0..MOST_TAGS).map(key).find(|key| known.is_owner(slot_of(key), link))
    }
}
