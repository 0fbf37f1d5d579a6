//! [`Monitor`]: looks at this instance each second, records what happened to its store and its hot
//! keys, and publishes its state.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tidegate::resilience::fallback::Stats;
use tidegate::store::heartbeat_interval;
use tidegate::store::redis::{FleetBoard, NodeHealth};
use tokio::time::MissedTickBehavior;

use super::{DeniedKey, Fleet, InstanceFacts, MAX_PUBLISHED, Rates, board};
use crate::admin::hot_keys::HotKeysBody;
use crate::admin::live::Live;
use crate::backend::RedisBackend;
use crate::hot_keys::HotKey;
use crate::journal::{EventKind, bounded};
use crate::state::ServerState;
use tidegate_api::duration::millis;

const INTERVAL: Duration = Duration::from_secs(1);
/// Hot keys are read with every look of this multiple.
const HOT_KEYS_INTERVAL: u64 = 5;
/// Number of denied keys whose first and last denials are known.
const MAX_DENIED: usize = 100;
/// Heartbeats of the fleet per publication, in a fleet so large that it sends 200 per second.
const HEARTBEATS_PER_PUBLICATION: usize = 4;
/// Publication intervals after which the state of a silent instance expires.
const MAX_MISSED: u32 = 5;

struct Monitor {
    state: Arc<ServerState>,
    live: Arc<Live>,
    fleet: Arc<Fleet>,
    looks: u64,
    /// Counters of the fallback at the last look.
    last_stats: Stats,
    outage: Option<Outage>,
    /// Addresses of the primaries when they were last known.
    primaries: BTreeSet<String>,
    /// Time since which Redis is down without a break.
    down_since: Option<Instant>,
    published_at: Option<Instant>,
}

/// Outage that is not over.
struct Outage {
    since: Instant,
    /// Counters before it.
    before: Stats,
}

impl Fleet {
    /// Starts to look at this instance, until the process ends.
    pub(crate) fn start(state: &Arc<ServerState>, live: &Arc<Live>) -> Arc<Self> {
        let fleet = Arc::new(Self::default());
        let monitor = Monitor {
            state: Arc::clone(state),
            live: Arc::clone(live),
            fleet: Arc::clone(&fleet),
            looks: 0,
            last_stats: Stats::default(),
            outage: None,
            primaries: BTreeSet::new(),
            down_since: None,
            published_at: None,
        };
        tokio::spawn(monitor.run());
        fleet
    }
}

impl Monitor {
    async fn run(mut self) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look(Instant::now());
            if let Err(error) = self.publish().await {
                tracing::debug!(%error, "publishing the state of this instance failed");
            }
        }
    }

    fn look(&mut self, now: Instant) {
        let state = Arc::clone(&self.state);
        if let Some(redis) = state.backend.redis() {
            self.look_at_outage(redis, now);
            self.look_at_primaries(&redis.store().nodes());
        }
        if self.looks.is_multiple_of(HOT_KEYS_INTERVAL) {
            self.look_at_hot_keys(now);
        }
        self.looks += 1;
        let mut own = self.fleet.own.lock().unwrap_or_else(PoisonError::into_inner);
        (own.facts, own.rates) = (InstanceFacts::of(&state), self.rates());
    }

    /// Returns the rates of the last second.
    fn rates(&self) -> Rates {
        let sample = self.live.history().last();
        let rates = sample.and_then(|sample| serde_json::from_str::<Rates>(&sample).ok());
        let mut rates = rates.unwrap_or_default();
        rates.keep(2 * MAX_PUBLISHED);
        rates
    }

    fn look_at_outage(&mut self, redis: &RedisBackend, now: Instant) {
        let stats = redis.fallback().stats();
        // Without requests only the connections show an outage. One that is new is no outage yet.
        self.down_since = (!redis.is_up()).then(|| self.down_since.unwrap_or(now));
        let is_long = |down: &Duration| self.outage.is_some() || *down >= INTERVAL;
        let down = self.down_since.map(|since| now.duration_since(since)).filter(is_long);
        let elapsed = redis.fallback().outage().or(down);
        match (&self.outage, elapsed) {
            (None, Some(elapsed)) => {
                let nodes = redis.store().nodes();
                let reason = |node: &NodeHealth| {
                    let error = node.circuit.last_error.as_ref().map(ToString::to_string);
                    error.or_else(|| node.last_error.clone())
                };
                let reason = nodes.iter().find_map(reason).map(bounded);
                self.state.journal.record_since(EventKind::OutageStarted { reason }, elapsed);
                let since = now.checked_sub(elapsed).unwrap_or(now);
                self.outage = Some(Outage { since, before: self.last_stats });
            }
            (Some(Outage { since, before }), None) => {
                let local = |stats: &Stats| stats.local + stats.allow + stats.deny;
                self.state.journal.record(EventKind::OutageEnded {
                    duration_ms: millis(now.duration_since(*since)),
                    local_decisions: local(&stats).saturating_sub(local(before)),
                    settled_units: stats.settled_debit_units - before.settled_debit_units,
                    pending_units: stats.pending_debit_units,
                });
                self.outage = None;
            }
            _ => {}
        }
        self.last_stats = stats;
    }

    /// Records a failover: some primaries have left, and others have taken their place.
    fn look_at_primaries(&mut self, nodes: &[NodeHealth]) {
        let deciding = nodes.iter().filter(|node| node.primary && node.slots > 0);
        let primaries: BTreeSet<String> = deciding.map(|node| node.address.clone()).collect();
        if primaries.is_empty() {
            return;
        }
        let before = std::mem::replace(&mut self.primaries, primaries);
        let from: Vec<String> = before.difference(&self.primaries).cloned().collect();
        let to: Vec<String> = self.primaries.difference(&before).cloned().collect();
        if !from.is_empty() && !to.is_empty() {
            self.state.journal.record(EventKind::Failover { from, to });
        }
    }

    fn look_at_hot_keys(&self, now: Instant) {
        let HotKeysBody { mut allowed, denied, mut shadow_denied } =
            HotKeysBody::new(&self.state, MAX_DENIED);
        let mut hot = self.fleet.hot_denials.lock().unwrap_or_else(PoisonError::into_inner);
        let events = hot.update(&denied, now);
        let last_ms = |key: &HotKey| hot.last_ms(&key.policy, &key.key);
        let published = denied.into_iter().take(MAX_PUBLISHED);
        let published = published
            .map(|key| DeniedKey { last_ms: last_ms(&key).unwrap_or_default(), hot: key })
            .collect();
        drop(hot);
        for (kind, age) in events {
            self.state.journal.record_since(kind, age);
        }
        allowed.truncate(MAX_PUBLISHED);
        shadow_denied.truncate(MAX_PUBLISHED);
        let mut own = self.fleet.own.lock().unwrap_or_else(PoisonError::into_inner);
        (own.allowed, own.denied, own.shadow_denied) = (allowed, published, shadow_denied);
    }

    /// Publishes the state with the rhythm of the heartbeats, and events at once.
    async fn publish(&mut self) -> Result<(), tidegate::StoreError> {
        let (Some(board), Some(redis)) = (board(&self.state), self.state.backend.redis()) else {
            return Ok(());
        };
        let members = redis.fallback().fleet();
        let interval = heartbeat_interval(HEARTBEATS_PER_PUBLICATION * members.size());
        // Half a look early, so that an interval of one second is not two.
        let is_due = self.published_at.is_none_or(|last| last.elapsed() + INTERVAL / 2 >= interval);
        if is_due {
            let own = self.fleet.own().to_json();
            let active = self.state.active();
            let ttl = interval * MAX_MISSED;
            let publish = async |summary| {
                board.publish(members.instance(), &own, ttl, &active.hash, summary).await
            };
            let (was_there, has_summary) = publish("").await?;
            if !has_summary {
                publish(&active.summary.to_json()).await?;
            }
            if !was_there {
                // A Redis that was emptied has lost the events, too. Each instance has its share.
                self.state.journal.publish_again(FleetBoard::MAX_EVENTS / members.size().max(1));
            }
            self.published_at = Some(Instant::now());
        }
        self.fleet.publish_events(&self.state).await
    }
}
