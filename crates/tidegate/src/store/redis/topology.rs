//! [`Topology`]: which node decides, now. One address, the primary that the sentinels name, or the owner of a slot.
//!
//! Tasks keep it current; a call only looks. A call that is sent elsewhere, or meets a node that
//! does not write, stirs them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::cluster::SlotMap;
use super::access::{Access, Address};
use super::fault::Trouble;
use super::link::{Link, Role};
use super::stir::Stir;
use crate::store::StoreError;

mod cluster;
mod sentinel;

/// Where to begin.
#[derive(Clone)]
pub(super) enum Plan {
    /// One server; or a node of a cluster, as will turn out.
    Single(Address),
    /// Some nodes of a cluster.
    Cluster(Vec<Address>),
    /// Sentinels, which know the primary by this name, and how to be let in by them.
    Sentinel { name: String, sentinels: Vec<Address>, access: Arc<Access> },
}

pub(super) struct Topology {
    known: Arc<Known>,
    tasks: Vec<JoinHandle<()>>,
}

/// What calls and tasks share.
pub(super) struct Known {
    access: Arc<Access>,
    timeout: Duration,
    routes: ArcSwap<Routes>,
    /// Goes up after the routes have changed.
    epoch: AtomicU64,
    /// Goes up after all routes have changed. Changes of single slots are counted in the slot map.
    full_changes: AtomicU64,
    /// Every data node that is, or was just now, of use.
    links: Mutex<HashMap<Address, InUse>>,
    sentinels: Vec<Arc<Link>>,
    stir: Stir,
    /// How the first look at the world went.
    settled: watch::Sender<Option<Result<(), Trouble>>>,
    redirects: AtomicU64,
    /// Of links that are no more.
    past_reconnects: AtomicU64,
    past_loads: AtomicU64,
}

struct InUse {
    link: Arc<Link>,
    wanted: Instant,
}

enum Routes {
    /// Nobody has told yet, or nobody could.
    Unknown(Trouble),
    One(Arc<Link>),
    Slots(SlotMap),
}

/// How long a store may take to start.
const START: Duration = Duration::from_secs(2);
/// How long a node of no slots is kept: one that a slot is just moving to has none yet.
const KEPT_UNUSED: Duration = Duration::from_secs(30);

impl Topology {
    pub(super) fn start(plan: Plan, access: Access, timeout: Duration) -> Self {
        let stir = Stir::new();
        let sentinels = match &plan {
            Plan::Sentinel { sentinels, access, .. } => {
                let link = |address: &Address| {
                    Link::new(address.clone(), access, Role::Sentinel, timeout, &stir)
                };
                sentinels.iter().map(|address| Arc::new(link(address))).collect()
            }
            _ => Vec::new(),
        };
        let nobody =
            Trouble { reason: "no node has been found yet".to_owned(), misconfigured: false };
        let known = Arc::new(Known {
            access: Arc::new(access),
            timeout,
            routes: ArcSwap::from_pointee(Routes::Unknown(nobody)),
            epoch: AtomicU64::new(0),
            full_changes: AtomicU64::new(0),
            links: Mutex::default(),
            sentinels,
            stir,
            settled: watch::Sender::new(None),
            redirects: AtomicU64::new(0),
            past_reconnects: AtomicU64::new(0),
            past_loads: AtomicU64::new(0),
        });
        let tasks = match plan {
            Plan::Single(address) => {
                let link = known.link_to(&address);
                known.take_route(Routes::One(Arc::clone(&link)));
                vec![tokio::spawn(cluster::follow_if_it_is_one(Arc::clone(&known), link))]
            }
            Plan::Cluster(seeds) => vec![tokio::spawn(cluster::follow(Arc::clone(&known), seeds))],
            Plan::Sentinel { name, .. } => sentinel::follow(&known, &name),
        };
        Self { known, tasks }
    }

    pub(super) fn known(&self) -> &Arc<Known> {
        &self.known
    }

    /// Until some node could decide; an error if that takes too long or will never be.
    pub(super) async fn settle(&self) -> Result<(), StoreError> {
        let mut settled = self.known.settled.subscribe();
        let settle = async {
            let first =
                settled.wait_for(Option::is_some).await.ok().and_then(|first| first.clone());
            if let Some(Err(trouble)) = first {
                return Err(trouble);
            }
            self.known.some_link_is_up().await
        };
        match timeout(START, settle).await {
            Ok(settled) => settled.map_err(Trouble::at_start),
            Err(_) => Err(self
                .known
                .trouble()
                .map_or_else(|| StoreError::Timeout(START), Trouble::at_start)),
        }
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Known {
    /// The node that decides for this slot.
    pub(super) fn route(&self, slot: u16) -> Result<Arc<Link>, StoreError> {
        match &**self.routes.load() {
            Routes::One(link) => Ok(Arc::clone(link)),
            Routes::Slots(map) => map.owner(slot).map(Arc::clone).ok_or_else(|| {
                self.stir.stir();
                StoreError::Unreachable(format!("no node of the cluster serves slot {slot}"))
            }),
            Routes::Unknown(trouble) => Err(trouble.clone().unreachable()),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(**self.routes.load(), Routes::Slots(_))
    }

    /// The nodes that decide.
    pub(super) fn primaries(&self) -> Vec<Arc<Link>> {
        match &**self.routes.load() {
            Routes::One(link) => vec![Arc::clone(link)],
            Routes::Slots(map) => map.links().to_vec(),
            Routes::Unknown(_) => Vec::new(),
        }
    }

    pub(super) fn sentinels(&self) -> &[Arc<Link>] {
        &self.sentinels
    }

    /// What it takes to be let in by a data node.
    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    /// A slot that this node decides for.
    pub(super) fn is_owner(&self, slot: u16, link: &Arc<Link>) -> bool {
        matches!(&**self.routes.load(), Routes::Slots(map) if map.owner(slot).is_some_and(|owner| Arc::ptr_eq(owner, link)))
    }

    /// The link to a node, new or old.
    pub(super) fn link_to(&self, address: &Address) -> Arc<Link> {
        let mut links = self.links();
        let wanted = Instant::now();
        if let Some(known) = links.get_mut(address) {
            known.wanted = wanted;
            return Arc::clone(&known.link);
        }
        let role = if self.sentinels.is_empty() { Role::Data } else { Role::Primary };
        let link =
            Arc::new(Link::new(address.clone(), &self.access, role, self.timeout, &self.stir));
        links.insert(address.clone(), InUse { link: Arc::clone(&link), wanted });
        link
    }

    /// A node said that this slot lives there. True for calls at once; the rest of the map is asked
    /// for.
    pub(super) fn moved(&self, slot: u16, address: &Address) -> Arc<Link> {
        let link = self.link_to(address);
        self.redirects.fetch_add(1, Ordering::Relaxed);
        // Readers of the map never wait; of writers, one at a time.
        let _one_writer = self.links();
        if let Routes::Slots(map) = &**self.routes.load()
            && let Some(changed) = map.with_owner(slot, &link)
        {
            self.take_slots(changed);
        }
        self.stir.stir();
        link
    }

    /// A node said that this key of a migrating slot is there.
    pub(super) fn asked_of(&self, address: &Address) -> Arc<Link> {
        self.redirects.fetch_add(1, Ordering::Relaxed);
        self.link_to(address)
    }

    /// Something is not as it was: look again.
    pub(super) fn stir(&self) {
        self.stir.stir();
    }

    /// This node does not write. True if another one may be told soon.
    pub(super) fn does_not_write(&self, link: &Link) -> bool {
        self.stir.stir();
        let one = matches!(**self.routes.load(), Routes::One(_));
        let alone = one && self.sentinels.is_empty();
        if alone {
            // Its address may lead to another server now.
            link.reconnect();
        } else if one {
            link.demote();
        }
        !alone
    }

    pub(super) fn redirects(&self) -> u64 {
        self.redirects.load(Ordering::Relaxed)
    }

    fn take_route(&self, routes: Routes) {
        self.routes.store(Arc::new(routes));
        self.full_changes.fetch_add(1, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Replaces a slot map by one that counts its changes on.
    fn take_slots(&self, map: SlotMap) {
        self.routes.store(Arc::new(Routes::Slots(map)));
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Who reads it before it asks is answered by the routes of this epoch, or newer ones.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// As [`Self::epoch`], for one slot: a change of other slots leaves it alone.
    pub(super) fn epoch_of(&self, slot: impl FnOnce() -> u16) -> u64 {
        // Read before the routes, which are written first: a number is never newer than the routes
        // that follow it.
        let full_changes = self.full_changes.load(Ordering::Acquire);
        let slot_changes = match &**self.routes.load() {
            Routes::Slots(map) => map.changes_of(slot()),
            Routes::One(_) | Routes::Unknown(_) => 0,
        };
        (full_changes << 32) | u64::from(slot_changes)
    }

    pub(super) fn reconnects(&self) -> u64 {
        let now: u64 = self.links().values().map(|known| known.link.reconnects()).sum();
        now + self.past_reconnects.load(Ordering::Relaxed)
    }

    pub(super) fn script_loads(&self) -> u64 {
        let now: u64 = self.links().values().map(|known| known.link.script_loads()).sum();
        now + self.past_loads.load(Ordering::Relaxed)
    }

    /// Forgets nodes that nobody has wanted for a while.
    fn forget_unused(&self, in_use: &[Arc<Link>]) {
        let mut links = self.links();
        for link in in_use {
            if let Some(known) = links.get_mut(link.address()) {
                known.wanted = Instant::now();
            }
        }
        links.retain(|_, known| {
            let keep = known.wanted.elapsed() < KEPT_UNUSED;
            if !keep {
                self.bury(&known.link);
            }
            keep
        });
    }

    /// Cuts every link but this one.
    fn retire_all_but(&self, link: &Arc<Link>) {
        self.links().retain(|_, known| {
            let keep = Arc::ptr_eq(&known.link, link);
            if !keep {
                known.link.retire();
                self.bury(&known.link);
            }
            keep
        });
    }

    fn bury(&self, link: &Link) {
        self.past_reconnects.fetch_add(link.reconnects(), Ordering::Relaxed);
        self.past_loads.fetch_add(link.script_loads(), Ordering::Relaxed);
    }

    fn settle(&self, how: Result<(), Trouble>) {
        if let (Err(trouble), Routes::Unknown(_)) = (&how, &**self.routes.load()) {
            self.routes.store(Arc::new(Routes::Unknown(trouble.clone())));
        }
        self.settled.send_if_modified(|settled| {
            let news = settled.as_ref().is_none_or(Result::is_err);
            if news {
                *settled = Some(how);
            }
            news
        });
    }

    async fn some_link_is_up(&self) -> Result<(), Trouble> {
        loop {
            let primaries = self.primaries();
            let mut last = None;
            for link in &primaries {
                match link.ready().await {
                    Ok(()) => return Ok(()),
                    Err(trouble) => last = Some(trouble),
                }
            }
            match last {
                Some(trouble) if trouble.misconfigured => return Err(trouble),
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Why nothing works yet.
    fn trouble(&self) -> Option<Trouble> {
        let of_links = || self.primaries().iter().find_map(|link| link.last_trouble());
        match &**self.routes.load() {
            Routes::Unknown(trouble) => Some(trouble.clone()),
            _ => of_links(),
        }
    }

    fn links(&self) -> MutexGuard<'_, HashMap<Address, InUse>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
