//! [`Topology`]: routes each call to the node that decides it: a single server, the primary that
//! the sentinels report, or the owner of a slot.
//!
//! Background tasks keep the routes current, and calls only read them. A call that is redirected,
//! or that meets a read-only node, triggers a refresh.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::slots::{SlotMap, SlotMoves};
use super::client::connection::{Address, ConnectionOptions, SharedOptions};
use super::client::error::NodeError;
use super::client::{NodeClient, NodeSettings, RefreshTrigger, Role};
use super::health::NodeHealth;
use crate::store::StoreError;

mod cluster;
mod sentinel;
pub(super) mod slots;
pub(super) mod step;

/// Addresses from which the topology is discovered.
#[derive(Clone)]
pub(super) enum Seeds {
    /// One server, which may turn out to be a node of a cluster.
    Single(Address),
    /// Some nodes of a cluster.
    Cluster(Vec<Address>),
    /// Sentinels, their connection options, and their name for the primary.
    Sentinel { name: String, sentinels: Vec<Address>, options: ConnectionOptions },
}

/// State of the topology and the tasks that refresh it.
pub(super) struct Topology {
    state: Arc<TopologyState>,
    tasks: Vec<JoinHandle<()>>,
}

/// State that calls share with the refresh tasks.
pub(super) struct TopologyState {
    options: SharedOptions,
    /// Options of the connections to sentinels, if there are any.
    sentinel_options: SharedOptions,
    settings: NodeSettings,
    routes: ArcSwap<Routes>,
    /// Number of changes of all routes at once, incremented after each. Changes of single slots are
    /// counted in the slot map.
    full_changes: AtomicU64,
    /// Data nodes that are in use, or were within [`UNUSED_NODE_TTL`].
    nodes: Mutex<HashMap<Address, NodeEntry>>,
    sentinels: Vec<Arc<NodeClient>>,
    refresh: RefreshTrigger,
    /// Result of initial topology discovery.
    initial_discovery: watch::Sender<Option<Result<(), NodeError>>>,
    redirects: AtomicU64,
    moves: Mutex<SlotMoves>,
    /// Totals of nodes that were dropped.
    past: Mutex<NodeTotals>,
}

/// Totals of all nodes that ever decided.
#[derive(Clone, Copy, Default)]
pub(super) struct NodeTotals {
    pub(super) reconnects: u64,
    pub(super) script_loads: u64,
    pub(super) circuits_opened: u64,
}

struct NodeEntry {
    client: Arc<NodeClient>,
    last_used: Instant,
}

enum Routes {
    /// Discovery has not succeeded yet.
    Unknown(NodeError),
    One(Arc<NodeClient>),
    Slots(SlotMap),
}

const START_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a node without slots is kept. A node that imports its first slot has none yet.
const UNUSED_NODE_TTL: Duration = Duration::from_secs(30);

impl Topology {
    pub(super) fn start(seeds: Seeds, options: ConnectionOptions, settings: NodeSettings) -> Self {
        let refresh = RefreshTrigger::new();
        let sentinel_options = SharedOptions::default();
        let sentinels = match &seeds {
            Seeds::Sentinel { sentinels, options, .. } => {
                sentinel_options.store(Arc::new(options.clone()));
                let options = &sentinel_options;
                let client = |address: &Address| {
                    NodeClient::new(address.clone(), options, Role::Sentinel, settings, &refresh)
                };
                sentinels.iter().map(|address| Arc::new(client(address))).collect()
            }
            _ => Vec::new(),
        };
        let undiscovered =
            NodeError { reason: "no node has been found yet".to_owned(), misconfigured: false };
        let state = Arc::new(TopologyState {
            options: Arc::new(ArcSwap::from_pointee(options)),
            sentinel_options,
            settings,
            routes: ArcSwap::from_pointee(Routes::Unknown(undiscovered)),
            full_changes: AtomicU64::new(0),
            nodes: Mutex::default(),
            sentinels,
            refresh,
            initial_discovery: watch::Sender::new(None),
            redirects: AtomicU64::new(0),
            moves: Mutex::default(),
            past: Mutex::default(),
        });
        let tasks = match seeds {
            Seeds::Single(address) => {
                let node = state.node_at(&address);
                state.set_routes(Routes::One(Arc::clone(&node)));
                vec![tokio::spawn(cluster::detect_cluster(Arc::clone(&state), node))]
            }
            Seeds::Cluster(nodes) => vec![tokio::spawn(cluster::follow(Arc::clone(&state), nodes))],
            Seeds::Sentinel { name, .. } => sentinel::follow(&state, &name),
        };
        Self { state, tasks }
    }

    pub(super) fn state(&self) -> &Arc<TopologyState> {
        &self.state
    }

    /// Waits until a node can decide. Fails if discovery fails, if an option is wrong, or after
    /// [`START_TIMEOUT`].
    pub(super) async fn wait_until_ready(&self) -> Result<(), StoreError> {
        let mut initial_discovery = self.state.initial_discovery.subscribe();
        let wait = async {
            let discovery = initial_discovery.wait_for(Option::is_some).await;
            if let Some(Err(error)) = discovery.ok().and_then(|discovery| discovery.clone()) {
                return Err(error);
            }
            self.state.wait_for_any_node().await
        };
        let Ok(result) = timeout(START_TIMEOUT, wait).await else {
            let last_error = self.state.last_error().map(NodeError::into_start_error);
            return Err(last_error.unwrap_or(StoreError::Timeout(START_TIMEOUT)));
        };
        result.map_err(NodeError::into_start_error)
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl TopologyState {
    /// Returns the node that decides for this slot.
    pub(super) fn route(&self, slot: u16) -> Result<Arc<NodeClient>, StoreError> {
        match &**self.routes.load() {
            Routes::One(node) => Ok(Arc::clone(node)),
            Routes::Slots(map) => map.owner(slot).map(Arc::clone).ok_or_else(|| {
                self.refresh.trigger();
                StoreError::Unreachable(format!("no node of the cluster serves slot {slot}"))
            }),
            Routes::Unknown(error) => Err(error.clone().into_unreachable()),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(**self.routes.load(), Routes::Slots(_))
    }

    /// Returns the nodes that decide.
    pub(super) fn primaries(&self) -> Vec<Arc<NodeClient>> {
        match &**self.routes.load() {
            Routes::One(node) => vec![Arc::clone(node)],
            Routes::Slots(map) => map.nodes().to_vec(),
            Routes::Unknown(_) => Vec::new(),
        }
    }

    /// Returns the nodes that decide, each with the number of its slots.
    pub(super) fn primaries_with_slots(&self) -> Vec<(Arc<NodeClient>, u16)> {
        match &**self.routes.load() {
            Routes::One(node) => vec![(Arc::clone(node), NodeHealth::ALL_SLOTS)],
            Routes::Slots(map) => map.nodes_with_slots(),
            Routes::Unknown(_) => Vec::new(),
        }
    }

    pub(super) fn sentinels(&self) -> &[Arc<NodeClient>] {
        &self.sentinels
    }

    /// Returns the connection options of data nodes.
    pub(super) fn options(&self) -> Arc<ConnectionOptions> {
        self.options.load_full()
    }

    /// Replaces the credentials and certificates of all connections to come.
    pub(super) fn renew(&self, seeds: Seeds, options: ConnectionOptions) {
        options.renew(&self.options);
        if let Seeds::Sentinel { options, .. } = seeds {
            options.renew(&self.sentinel_options);
        }
    }

    /// Returns whether this node owns a slot of a cluster.
    pub(super) fn is_owner(&self, slot: u16, node: &Arc<NodeClient>) -> bool {
        let routes = self.routes.load();
        let Routes::Slots(map) = &**routes else { return false };
        map.owner(slot).is_some_and(|owner| Arc::ptr_eq(owner, node))
    }

    /// Returns the client of a node, and creates it if necessary.
    pub(super) fn node_at(&self, address: &Address) -> Arc<NodeClient> {
        let mut nodes = self.nodes();
        let last_used = Instant::now();
        if let Some(entry) = nodes.get_mut(address) {
            entry.last_used = last_used;
            return Arc::clone(&entry.client);
        }
        let role = if self.sentinels.is_empty() { Role::Data } else { Role::Primary };
        let node = Arc::new(NodeClient::new(
            address.clone(),
            &self.options,
            role,
            self.settings,
            &self.refresh,
        ));
        nodes.insert(address.clone(), NodeEntry { client: Arc::clone(&node), last_used });
        node
    }

    /// Follows a MOVED redirect: routes the slot to this node, and triggers a refresh of the map.
    pub(super) fn on_moved(&self, slot: u16, address: &Address) -> Arc<NodeClient> {
        let node = self.node_at(address);
        self.redirects.fetch_add(1, Ordering::Relaxed);
        // The lock serializes writers of the map; readers never wait.
        let _writer_lock = self.nodes();
        if let Routes::Slots(before) = &**self.routes.load()
            && let Some(map) = before.with_owner(slot, &node)
        {
            self.replace_slots(before, map);
        }
        self.refresh.trigger();
        node
    }

    /// Follows an ASK redirect: returns the node without a change of the routes.
    pub(super) fn on_ask(&self, address: &Address) -> Arc<NodeClient> {
        self.redirects.fetch_add(1, Ordering::Relaxed);
        self.node_at(address)
    }

    /// Returns the timeout of a call.
    pub(super) fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// Returns whether commands are sent without a call of the user.
    pub(super) fn has_heartbeat(&self) -> bool {
        self.settings.heartbeat
    }

    /// Returns whether there is a single server, and nothing that may replace it.
    pub(super) fn is_standalone(&self) -> bool {
        matches!(**self.routes.load(), Routes::One(_)) && self.sentinels.is_empty()
    }

    pub(super) fn trigger_refresh(&self) {
        self.refresh.trigger();
    }

    /// Reacts to a node that accepts no writes. Returns whether a retry may find another node.
    pub(super) fn on_readonly(&self, node: &NodeClient) -> bool {
        self.refresh.trigger();
        if self.is_standalone() {
            // The address may lead to another server now.
            node.reconnect();
            return false;
        }
        if matches!(**self.routes.load(), Routes::One(_)) {
            node.demote();
        }
        true
    }

    pub(super) fn redirects(&self) -> u64 {
        self.redirects.load(Ordering::Relaxed)
    }

    fn set_routes(&self, routes: Routes) {
        self.routes.store(Arc::new(routes));
        self.full_changes.fetch_add(1, Ordering::Release);
    }

    /// Replaces the routes by a slot map that was read from the cluster, and drops nodes that have
    /// no slots any more.
    fn refresh_slots(&self, map: SlotMap) {
        self.drop_unused(map.nodes());
        // The lock serializes writers of the map.
        let _writer_lock = self.nodes();
        match &**self.routes.load() {
            Routes::Slots(before) => self.replace_slots(before, map),
            Routes::One(_) | Routes::Unknown(_) => self.set_routes(Routes::Slots(map)),
        }
    }

    /// Replaces the slot map by one that continues its change counts.
    fn replace_slots(&self, before: &SlotMap, mut map: SlotMap) {
        let new_owners = map.continue_from(before);
        if !new_owners.is_empty() {
            let mut moves = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
            let address = |owner: Option<&Arc<NodeClient>>| Some(owner?.address().to_string());
            for slot in new_owners {
                moves.add(slot, address(before.owner(slot)), address(map.owner(slot)));
            }
        }
        self.routes.store(Arc::new(Routes::Slots(map)));
    }

    /// Logs which slots have a new owner, at most every few seconds.
    fn log_moves(&self) {
        let mut moves = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        let due = moves.take_due(Instant::now());
        drop(moves);
        slots::log(due);
    }

    /// Returns the epoch of the routes of one slot, which changes of other slots do not affect. A
    /// call that starts after this read uses routes of this epoch or a later one.
    pub(super) fn epoch_of(&self, slot: impl FnOnce() -> u16) -> u64 {
        // Writers store the routes first, so this must be loaded before the routes: the epoch is
        // then never newer than the routes.
        let full_changes = self.full_changes.load(Ordering::Acquire);
        let slot_changes = match &**self.routes.load() {
            Routes::Slots(map) => map.changes_of(slot()),
            Routes::One(_) | Routes::Unknown(_) => 0,
        };
        (full_changes << 32) | u64::from(slot_changes)
    }

    /// Returns the totals of all nodes, also of those that were dropped.
    pub(super) fn totals(&self) -> NodeTotals {
        // Locked first, so that no node is dropped in between: totals never decrease.
        let nodes = self.nodes();
        let mut totals = *self.past.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.values().for_each(|entry| totals.add(&entry.client));
        totals
    }

    /// Drops nodes that were not used for [`UNUSED_NODE_TTL`].
    fn drop_unused(&self, in_use: &[Arc<NodeClient>]) {
        let mut nodes = self.nodes();
        for node in in_use {
            if let Some(entry) = nodes.get_mut(node.address()) {
                entry.last_used = Instant::now();
            }
        }
        nodes.retain(|_, entry| {
            let keep = entry.last_used.elapsed() < UNUSED_NODE_TTL;
            if !keep {
                self.retain_totals(&entry.client);
            }
            keep
        });
    }

    /// Retires every node except this one.
    fn retire_all_but(&self, node: &Arc<NodeClient>) {
        self.nodes().retain(|_, entry| {
            let keep = Arc::ptr_eq(&entry.client, node);
            if !keep {
                entry.client.retire();
                self.retain_totals(&entry.client);
            }
            keep
        });
    }

    /// Keeps the totals of a node that is dropped.
    fn retain_totals(&self, node: &NodeClient) {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).add(node);
    }

    /// Records the result of discovery. A later success replaces an error.
    fn finish_discovery(&self, result: Result<(), NodeError>) {
        if let (Err(error), Routes::Unknown(_)) = (&result, &**self.routes.load()) {
            self.routes.store(Arc::new(Routes::Unknown(error.clone())));
        }
        self.initial_discovery.send_if_modified(|discovery| {
            let changed = discovery.as_ref().is_none_or(Result::is_err);
            if changed {
                *discovery = Some(result);
            }
            changed
        });
    }

    async fn wait_for_any_node(&self) -> Result<(), NodeError> {
        loop {
            let primaries = self.primaries();
            let mut last = None;
            for node in &primaries {
                match node.ready().await {
                    Ok(()) => return Ok(()),
                    Err(error) => last = Some(error),
                }
            }
            match last {
                Some(error) if error.misconfigured => return Err(error),
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Returns the reason why no node is ready.
    fn last_error(&self) -> Option<NodeError> {
        match &**self.routes.load() {
            Routes::Unknown(error) => Some(error.clone()),
            _ => self.primaries().iter().find_map(|node| node.last_error()),
        }
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<Address, NodeEntry>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeTotals {
    fn add(&mut self, node: &NodeClient) {
        self.reconnects += node.reconnects();
        self.script_loads += node.scripts().total();
        self.circuits_opened += node.circuit().state().times_opened;
    }
}
