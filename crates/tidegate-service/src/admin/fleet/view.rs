//! `GET /v1/fleet`: all instances, what differs between them, and the sums of their rates and hot
//! keys.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tidegate::StoreError;

use super::{Fleet, InstanceFacts, InstanceState, Rates, board};
use crate::admin::hot_keys::{DEFAULT_LIMIT, HotKeysBody};
use crate::admin::{AccessProblems, Admin};
use crate::config_summary::{ConfigChange, ConfigSummary};
use crate::hot_keys::HotKey;
use crate::state::ServerState;
use tidegate_api::duration::unix_millis;

/// Time for which requests share a view.
const VIEW_TTL: Duration = Duration::from_secs(1);
/// Maximum number of instances in a response, those that differ first.
const MAX_INSTANCES: usize = 1_000;
/// Maximum number of configurations that are compared.
const MAX_CONFIGURATIONS: usize = 8;

/// All instances, as the fleet last published them.
pub(super) struct FleetView {
    body: FleetBody,
    /// Name of the instance that denied a hot key last, and the time, by policy and key.
    last_denials: HashMap<(String, String), LastDenial>,
}

/// Instance that denied a key last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(in crate::admin) struct LastDenial {
    /// Name of the instance.
    pub instance: String,
    pub at_ms: u64,
}

/// State of all instances that share a store.
#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = Fleet)]
pub(in crate::admin) struct FleetBody {
    /// Name of this instance.
    instance: String,
    now_ms: u64,
    /// Why only this instance is known; null if all are, and for a store in memory.
    error: Option<String>,
    /// Number of instances, of which some may be left out.
    size: usize,
    /// Number of different configurations.
    configurations: usize,
    /// Those that differ from most others first.
    instances: Vec<InstanceBody>,
    /// Sums over all instances.
    rates: Rates,
    /// Sums over the most frequent keys of all instances.
    hot_keys: HotKeysBody,
}

#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = Instance)]
struct InstanceBody {
    #[serde(flatten)]
    facts: InstanceFacts,
    /// Whether it is the one that answers.
    this: bool,
    allowed: f64,
    denied: f64,
    shadow_denied: f64,
    errors: f64,
    /// Differences from most other instances: `version`, `format`, `configuration`.
    differs: Vec<&'static str>,
    /// Changes of its configuration in that of most other instances.
    changes: Vec<ConfigChange>,
}

/// All instances that share the store
#[utoipa::path(
    get, path = "/v1/fleet", operation_id = "fleet",
    responses((status = 200, description = "Instances", body = FleetBody), AccessProblems)
)]
pub(in crate::admin) async fn handle(State(admin): State<Admin>) -> Response {
    Json(&admin.fleet.view(&admin.state).await.body).into_response()
}

impl Fleet {
    async fn view(&self, state: &ServerState) -> Arc<FleetView> {
        // Also while it is read, so that concurrent requests share one read.
        let mut view = self.view.lock().await;
        if let Some((read_at, view)) = &*view
            && read_at.elapsed() < VIEW_TTL
        {
            return Arc::clone(view);
        }
        let new = Arc::new(self.read_view(state).await);
        *view = Some((Instant::now(), Arc::clone(&new)));
        new
    }

    /// Returns which instance denied a key last. Only hot keys are known.
    pub(in crate::admin) async fn last_denial(
        &self,
        state: &ServerState,
        policy: &str,
        key: &str,
    ) -> Option<LastDenial> {
        let name = (policy.to_owned(), key.to_owned());
        let own = self
            .last_denial_ms(policy, key)
            .map(|at_ms| LastDenial { instance: state.journal.instance(), at_ms });
        let others = self.view(state).await.last_denials.get(&name).cloned();
        others.into_iter().chain(own).max_by_key(|denial| denial.at_ms)
    }

    async fn read_view(&self, state: &ServerState) -> FleetView {
        let own = self.own();
        let (published, error) = match read_others(state).await {
            Ok(published) => (published, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let mut instances = vec![Some(own)];
        instances.extend(published);
        let known = || instances.iter().flatten();
        let config =
            most_frequent(known().map(|it| it.facts.config_hash.clone())).unwrap_or_default();
        let version = most_frequent(known().map(|it| it.facts.version.clone())).unwrap_or_default();
        let format = most_frequent(known().map(|it| it.facts.format)).unwrap_or_default();
        let summaries = read_summaries(state, known(), &config).await;
        let mut rates = Rates::default();
        known().for_each(|instance| rates.add(&instance.rates));
        let denied = |instance: &InstanceState| {
            instance.denied.iter().map(|key| key.hot.clone()).collect::<Vec<_>>()
        };
        let hot_keys = HotKeysBody {
            allowed: summed(known().flat_map(|it| it.allowed.clone())),
            denied: summed(known().flat_map(denied)),
            shadow_denied: summed(known().flat_map(|it| it.shadow_denied.clone())),
        };
        let mut last_denials = HashMap::new();
        for instance in known() {
            for key in instance.denied.iter().filter(|key| key.last_ms > 0) {
                let denial = LastDenial {
                    instance: instance.facts.name.clone().unwrap_or_default(),
                    at_ms: key.last_ms,
                };
                let name = (key.hot.policy.clone(), key.hot.key.clone());
                let last = last_denials.entry(name).or_insert_with(|| denial.clone());
                if last.at_ms < denial.at_ms {
                    *last = denial;
                }
            }
        }
        let hashes: BTreeSet<&str> = known().map(|it| it.facts.config_hash.as_str()).collect();
        let configurations = hashes.len();
        let size = instances.len();
        let mut bodies = Vec::with_capacity(size);
        for (index, instance) in instances.into_iter().enumerate() {
            let is_known = instance.is_some();
            let mut body = InstanceBody::new(instance.unwrap_or_default(), index == 0);
            if is_known {
                let differs = [
                    ("version", body.facts.version != version),
                    ("format", body.facts.format != format),
                    ("configuration", body.facts.config_hash != config),
                ];
                body.differs =
                    differs.iter().filter(|(_, it)| *it).map(|(name, _)| *name).collect();
                let (before, after) =
                    (summaries.get(&config), summaries.get(&body.facts.config_hash));
                if let (Some(before), Some(after)) = (before, after) {
                    body.changes = before.changes_to(after);
                }
            }
            bodies.push(body);
        }
        bodies.sort_by(|one, other| {
            let order = |it: &InstanceBody| (it.differs.is_empty(), it.facts.name.is_none());
            order(one).cmp(&order(other)).then_with(|| one.facts.name.cmp(&other.facts.name))
        });
        bodies.truncate(MAX_INSTANCES);
        let instance = state.journal.instance();
        let now_ms = unix_millis(SystemTime::now());
        let instances = bodies;
        let body =
            FleetBody { instance, now_ms, error, size, configurations, instances, rates, hot_keys };
        FleetView { body, last_denials }
    }
}

impl InstanceBody {
    fn new(state: InstanceState, this: bool) -> Self {
        Self {
            facts: state.facts,
            this,
            allowed: state.rates.allowed,
            denied: state.rates.denied,
            shadow_denied: state.rates.shadow_denied,
            errors: state.rates.errors,
            differs: Vec::new(),
            changes: Vec::new(),
        }
    }
}

/// Reads the states of the other members of the fleet; `None` for one that publishes nothing.
async fn read_others(state: &ServerState) -> Result<Vec<Option<InstanceState>>, StoreError> {
    let (Some(board), Some(redis)) = (board(state), state.backend.redis()) else {
        return Ok(Vec::new());
    };
    let fleet = redis.fallback().fleet();
    let mut members = fleet.members();
    members.retain(|member| member != fleet.instance());
    let texts = board.read(&members).await?;
    Ok(texts.into_iter().map(|text| serde_json::from_str(&text?).ok()).collect())
}

/// Returns the summaries of the configurations that are not the same, by their hashes.
async fn read_summaries(
    state: &ServerState,
    instances: impl Iterator<Item = &InstanceState>,
    reference: &str,
) -> HashMap<String, ConfigSummary> {
    let active = state.active();
    let own = (active.hash.clone(), active.summary.clone());
    let mut hashes: Vec<String> = instances.map(|it| it.facts.config_hash.clone()).collect();
    hashes.sort_unstable_by_key(|hash| (hash != reference, hash.clone()));
    hashes.dedup();
    hashes.truncate(MAX_CONFIGURATIONS);
    hashes.retain(|hash| *hash != own.0);
    let read = match board(state).filter(|_| !hashes.is_empty()) {
        Some(board) => board.read_shared(&hashes).await.unwrap_or_default(),
        None => Vec::new(),
    };
    let parsed = hashes.into_iter().zip(read);
    let parsed = parsed.filter_map(|(hash, text)| Some((hash, serde_json::from_str(&text?).ok()?)));
    parsed.chain([own]).collect()
}

/// Returns the value that occurs most, the first of several.
fn most_frequent<T: Ord + Clone>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts: Vec<(T, usize)> = Vec::new();
    for value in values {
        match counts.iter_mut().find(|(known, _)| *known == value) {
            Some((_, count)) => *count += 1,
            None => counts.push((value, 1)),
        }
    }
    // The last of equals.
    counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}

/// Returns the most frequent keys of several lists, with the sums of their counts.
fn summed(keys: impl Iterator<Item = HotKey>) -> Vec<HotKey> {
    let mut sums: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for HotKey { policy, key, count, error } in keys {
        let (counts, errors) = sums.entry((policy, key)).or_default();
        (*counts, *errors) = (*counts + count, *errors + error);
    }
    let sums = sums.into_iter();
    let mut keys: Vec<HotKey> =
        sums.map(|((policy, key), (count, error))| HotKey { policy, key, count, error }).collect();
    keys.sort_by_key(|key| std::cmp::Reverse(key.count - key.error.min(key.count)));
    keys.truncate(DEFAULT_LIMIT);
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_what_most_instances_have() {
        assert_eq!(most_frequent(["b", "a", "a"].into_iter()), Some("a"));
        assert_eq!(most_frequent(["b", "a"].into_iter()), Some("b"), "this instance comes first");
        assert_eq!(most_frequent::<u32>(std::iter::empty()), None);
    }

    #[test]
    fn hot_keys_are_summed() {
        let hot = |key: &str, count| HotKey {
            policy: "p".to_owned(),
            key: key.to_owned(),
            count,
            error: 1,
        };
        let keys = summed([hot("a", 5), hot("b", 6), hot("a", 4)].into_iter());
        let counts: Vec<_> = keys.iter().map(|it| (it.key.as_str(), it.count, it.error)).collect();
        assert_eq!(counts, [("a", 9, 2), ("b", 6, 1)]);
    }
}
