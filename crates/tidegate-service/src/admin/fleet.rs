//! The fleet: what each instance publishes about itself in Redis with the rhythm of its heartbeats,
//! and the view of all of them, which is read when someone asks for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use self::denials::HotDenials;
use self::view::FleetView;
use crate::backend::RedisBackend;
use crate::hot_keys::HotKey;
use crate::state::ServerState;
use tidegate::StoreError;
use tidegate::store::redis::{FORMAT, FleetBoard};
use tidegate_api::duration::unix_millis;

mod denials;
mod monitor;
pub(super) mod view;

/// Lists of events in Redis. Those of hot keys are apart, because clients cause them.
pub(super) const EVENTS: &str = "events";
pub(super) const DENIALS: &str = "denials";
/// Number of hot keys of each list, and of policies, that an instance publishes.
const MAX_PUBLISHED: usize = 10;
/// Maximum number of bytes that an instance publishes about itself.
const MAX_STATE_BYTES: usize = 4_096;

/// Knowledge of this instance about itself and the fleet.
#[derive(Default)]
pub(crate) struct Fleet {
    own: Mutex<InstanceState>,
    hot_denials: Mutex<HotDenials>,
    /// Last view, which requests of the same moment share.
    view: tokio::sync::Mutex<Option<(Instant, Arc<FleetView>)>>,
}

/// State that an instance publishes about itself. Releases that lack a field get its default.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct InstanceState {
    #[serde(flatten)]
    facts: InstanceFacts,
    rates: Rates,
    allowed: Vec<HotKey>,
    denied: Vec<DeniedKey>,
    shadow_denied: Vec<HotKey>,
}

/// Part of it that is shown as it is.
#[derive(Debug, Clone, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
struct InstanceFacts {
    /// Host and admin port; null for an instance that publishes nothing, such as one of an earlier
    /// release or one that has just started.
    name: Option<String>,
    version: String,
    /// Version of the counts in Redis.
    format: u32,
    config_hash: String,
    config_loaded_at_ms: u64,
    started_at_ms: u64,
    store_up: bool,
    fallback: bool,
    reload_failed: bool,
    /// Sections of its file whose changes need a restart.
    restart_pending: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct DeniedKey {
    #[serde(flatten)]
    hot: HotKey,
    /// Time of the last denial.
    last_ms: u64,
}

/// Decisions per second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct Rates {
    allowed: f64,
    denied: f64,
    shadow_denied: f64,
    errors: f64,
    /// Of each policy: allowed, denied, denied in shadow mode. The least active ones are left out.
    policies: BTreeMap<String, [f64; 3]>,
}

impl Fleet {
    /// Returns the time of the last denial of a key by this instance, in Unix milliseconds.
    fn last_denial_ms(&self, policy: &str, key: &str) -> Option<u64> {
        self.hot_denials.lock().unwrap_or_else(PoisonError::into_inner).last_ms(policy, key)
    }

    fn own(&self) -> InstanceState {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Appends the events that are not in Redis yet.
    pub(crate) async fn publish_events(&self, state: &ServerState) -> Result<(), StoreError> {
        let Some(board) = board(state) else { return Ok(()) };
        let new = state.journal.unpublished();
        let Some(last) = new.last().map(|(_, event)| event.number) else { return Ok(()) };
        for (list, is_denial) in [(EVENTS, false), (DENIALS, true)] {
            let listed = new.iter().filter(|(_, event)| event.kind.is_denial() == is_denial);
            let texts =
                listed.filter_map(|(age, event)| Some((*age, serde_json::to_string(event).ok()?)));
            board.append(list, &texts.collect::<Vec<_>>()).await?;
        }
        state.journal.set_published(last);
        Ok(())
    }
}

/// Returns where the instances of the fleet publish; `None` if they share nothing.
fn board(state: &ServerState) -> Option<FleetBoard<'_>> {
    state.backend.redis().map(RedisBackend::store)?.fleet_board()
}

impl InstanceFacts {
    fn of(state: &ServerState) -> Self {
        let last = state.reloads.last();
        let redis = state.backend.redis();
        let (_, started_at) = state.started();
        Self {
            name: Some(state.journal.instance()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            format: FORMAT,
            config_hash: state.active_guard().hash.clone(),
            config_loaded_at_ms: unix_millis(last.loaded_at),
            started_at_ms: unix_millis(started_at),
            store_up: redis.is_none_or(RedisBackend::is_up),
            fallback: redis.is_some_and(|redis| redis.fallback().stats().falling_back),
            reload_failed: last.error.is_some(),
            restart_pending: last.restart_pending.into_iter().map(str::to_owned).collect(),
        }
    }
}

impl InstanceState {
    /// Returns it as JSON of bounded length: with fewer hot keys and policies if they are long.
    fn to_json(&self) -> String {
        let mut state = self.clone();
        for kept in [MAX_PUBLISHED, 5, 2, 1, 0] {
            state.rates.keep(2 * kept);
            state.allowed.truncate(kept);
            state.denied.truncate(kept);
            state.shadow_denied.truncate(kept);
            let json = serde_json::to_string(&state).unwrap_or_default();
            if json.len() <= MAX_STATE_BYTES {
                return json;
            }
        }
        String::new()
    }
}

impl Rates {
    /// Keeps the most active policies.
    fn keep(&mut self, count: usize) {
        let mut policies: Vec<_> = std::mem::take(&mut self.policies).into_iter().collect();
        let sum = |rates: &[f64; 3]| rates.iter().sum::<f64>();
        policies.sort_by(|(_, one), (_, other)| sum(other).total_cmp(&sum(one)));
        self.policies = policies.into_iter().take(count).collect();
    }

    fn add(&mut self, other: &Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.shadow_denied += other.shadow_denied;
        self.errors += other.errors;
        for (policy, rates) in &other.policies {
            let sums = self.policies.entry(policy.clone()).or_default();
            sums.iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_state_is_short() {
        let key = |number: usize| HotKey {
            policy: "p".repeat(200),
            key: format!("{number}{}", "\"".repeat(200)),
            count: 1,
            error: 0,
        };
        let rates = |name: usize| (format!("{name}{}", "p".repeat(100)), [1.0; 3]);
        let state = InstanceState {
            facts: InstanceFacts { name: Some("a:8082".to_owned()), ..InstanceFacts::default() },
            allowed: (0..10).map(key).collect(),
            denied: (0..10).map(|number| DeniedKey { hot: key(number), last_ms: 1 }).collect(),
            rates: Rates { policies: (0..20).map(rates).collect(), ..Rates::default() },
            ..InstanceState::default()
        };
        let json = state.to_json();
        assert!(json.len() <= MAX_STATE_BYTES, "{}", json.len());
        let read: InstanceState = serde_json::from_str(&json).expect("our own JSON");
        assert_eq!((read.facts.name.as_deref(), read.denied.len()), (Some("a:8082"), 2));
    }
}
