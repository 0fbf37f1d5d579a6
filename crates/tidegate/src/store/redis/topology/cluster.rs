//! A cluster: who owns which slot, as its nodes tell by `CLUSTER SLOTS`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::sleep;

use super::super::access::Address;
use super::super::fault::{Fault, Said, Trouble};
use super::super::link::{Link, ask_once};
use super::super::slot::SLOTS;
use super::{Known, Routes};

/// Who owns which slot.
#[derive(Clone)]
pub(super) struct SlotMap {
    links: Vec<Arc<Link>>,
    /// For each slot an index into `links`, or `NOBODY`.
    owners: Box<[u16]>,
    /// For each slot, how often it has changed its owner.
    changes: Box<[u32]>,
}

/// What `CLUSTER SLOTS` says.
struct Told {
    /// First slot, last slot, owner.
    ranges: Vec<(u16, u16, Address)>,
    replicas: Vec<Address>,
}

const NOBODY: u16 = u16::MAX;
/// How long one node may take to tell.
const ASK: Duration = Duration::from_millis(300);
/// Between two looks: when all is well, when a primary cannot be reached, and at least.
const CALM: Duration = Duration::from_secs(5);
const WORRIED: Duration = Duration::from_millis(200);
const AT_LEAST: Duration = Duration::from_millis(50);

impl SlotMap {
    pub(super) fn owner(&self, slot: u16) -> Option<&Arc<Link>> {
        self.links.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    pub(super) fn changes_of(&self, slot: u16) -> u32 {
        self.changes.get(usize::from(slot)).copied().unwrap_or(0)
    }

    /// Continues the counts of changes of an earlier map. True if any slot has another owner now.
    fn continue_from(&mut self, before: &Self) -> bool {
        let mut changed = false;
        for slot in (0..).take(self.owners.len()) {
            let same = match (self.owner(slot), before.owner(slot)) {
                (Some(one), Some(another)) => Arc::ptr_eq(one, another),
                (one, another) => one.is_none() && another.is_none(),
            };
            self.changes[usize::from(slot)] =
                before.changes_of(slot).wrapping_add(u32::from(!same));
            changed |= !same;
        }
        changed
    }

    pub(super) fn links(&self) -> &[Arc<Link>] {
        &self.links
    }

    /// The map with another owner of one slot; `None` if that is how it is.
    pub(super) fn with_owner(&self, slot: u16, link: &Arc<Link>) -> Option<Self> {
        if self.owner(slot).is_some_and(|owner| Arc::ptr_eq(owner, link)) {
            return None;
        }
        let mut changed = self.clone();
        *changed.owners.get_mut(usize::from(slot))? = changed.index_of(link);
        let changes = changed.changes.get_mut(usize::from(slot))?;
        *changes = changes.wrapping_add(1);
        Some(changed)
    }

    fn index_of(&mut self, link: &Arc<Link>) -> u16 {
        let index =
            self.links.iter().position(|known| Arc::ptr_eq(known, link)).unwrap_or_else(|| {
                self.links.push(Arc::clone(link));
                self.links.len() - 1
            });
        u16::try_from(index).unwrap_or(NOBODY)
    }
}

/// Follows a cluster of which these nodes are known.
pub(super) async fn follow(known: Arc<Known>, seeds: Vec<Address>) {
    let mut stirred = known.stir.watcher();
    let mut others = seeds.clone();
    loop {
        let looked = Instant::now();
        let told = ask_around(&known, &others).await;
        match told {
            Ok(told) => {
                others = told.replicas.iter().chain(&seeds).cloned().collect();
                adopt(&known, &told);
                known.settle(Ok(()));
            }
            Err(trouble) => known.settle(Err(trouble)),
        }
        let well = || known.is_cluster() && known.primaries().iter().all(|link| link.is_up());
        stirred.or_after(if well() { CALM } else { WORRIED }).await;
        sleep(AT_LEAST.saturating_sub(looked.elapsed())).await;
        // Those that go on failing go on stirring.
        if !well() {
            sleep(WORRIED.saturating_sub(looked.elapsed())).await;
        }
    }
}

/// One address. If the server there turns out to be a node of a cluster, the cluster is followed.
pub(super) async fn follow_if_it_is_one(known: Arc<Known>, link: Arc<Link>) {
    let mut stirred = known.stir.watcher();
    loop {
        let is_cluster = match link.ready().await {
            Ok(()) => match link.ask(&cluster_slots(), Instant::now() + ASK).await {
                Ok(Value::Array(_)) => Some(true),
                // It has no cluster, or does not let us ask; then a MOVED will tell.
                Ok(_) | Err(Fault::Said(Said::No(_))) => Some(false),
                Err(_) => None,
            },
            Err(trouble) => {
                known.settle(Err(trouble));
                None
            }
        };
        match is_cluster {
            Some(true) => return follow(known, vec![link.address().clone()]).await,
            Some(false) => {
                known.settle(Ok(()));
                stirred.wait().await;
                sleep(WORRIED).await;
            }
            None => sleep(WORRIED).await,
        }
    }
}

fn cluster_slots() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// The map as some node tells it: a primary that we are connected to, or else any node that we know
/// of.
async fn ask_around(known: &Known, others: &[Address]) -> Result<Told, Trouble> {
    let mut last =
        Trouble { reason: "no node of the cluster is known".to_owned(), misconfigured: false };
    let mut primaries = known.primaries();
    if !primaries.is_empty() {
        // Not always the same one: it might be cut off from the others, and tell of old times.
        let turn = usize::try_from(known.redirects()).unwrap_or(0) + rotation();
        let count = primaries.len();
        primaries.rotate_left(turn % count);
    }
    for link in primaries.iter().filter(|link| link.is_up()) {
        match link.ask(&cluster_slots(), Instant::now() + ASK).await {
            Ok(reply) => match told(&reply, link.address()) {
                Some(told) => return Ok(told),
                None => last = Trouble::new(link.address(), NO_SLOTS),
            },
            Err(fault) => {
                last = Trouble::new(link.address(), &fault.into_store_error(ASK).to_string())
            }
        }
    }
    for address in others {
        match ask_once(
            address,
            &known.access,
            cluster_slots(),
            ASK.max(known.timeout.min(Duration::from_secs(1))),
        )
        .await
        {
            Ok(reply) => match told(&reply, address) {
                Some(told) => return Ok(told),
                None => last = Trouble::new(address, NO_SLOTS),
            },
            Err(trouble) => last = trouble,
        }
    }
    Err(last)
}

const NO_SLOTS: &str = "the cluster serves no slots yet";

/// A number that grows with time.
fn rotation() -> usize {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

fn adopt(known: &Known, told: &Told) {
    let (owners, changes) =
        (vec![NOBODY; SLOTS].into_boxed_slice(), vec![0; SLOTS].into_boxed_slice());
    let mut map = SlotMap { links: Vec::new(), owners, changes };
    for (first, last, address) in &told.ranges {
        let owner = map.index_of(&known.link_to(address));
        if let Some(slots) = map.owners.get_mut(usize::from(*first)..=usize::from(*last)) {
            slots.fill(owner);
        }
    }
    known.forget_unused(&map.links);
    let _one_writer = known.links();
    match &**known.routes.load() {
        Routes::Slots(before) => {
            if map.continue_from(before) {
                known.take_slots(map);
            } else {
                known.routes.store(Arc::new(Routes::Slots(map)));
            }
        }
        Routes::One(_) | Routes::Unknown(_) => known.take_route(Routes::Slots(map)),
    }
}

/// The reply of `CLUSTER SLOTS`: for each range its first and last slot, its primary, then its
/// replicas, and of each node the host, the port, and more. `None` if no slot is served.
fn told(reply: &Value, asked: &Address) -> Option<Told> {
    let Value::Array(ranges) = reply else { return None };
    let mut told = Told { ranges: Vec::new(), replicas: Vec::new() };
    for range in ranges {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), primary, replicas @ ..] = parts.as_slice() else {
            return None;
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        told.ranges.push((first, last, node(primary, asked)?));
        told.replicas.extend(replicas.iter().filter_map(|replica| node(replica, asked)));
    }
    (!told.ranges.is_empty()).then_some(told)
}

fn node(value: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(parts) = value else { return None };
    let port = match parts.get(1)? {
        Value::Int(port) => u16::try_from(*port).ok()?,
        _ => return None,
    };
    let host = match parts.first()? {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        // Unknown to the node itself.
        _ => "",
    };
    Some(asked.beside(host, port))
}
