//! [`Fleet`]: the live instances that share a store, and the share of a quota that each of them may
//! admit while the store cannot decide.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::{Context, Waker};
use std::time::Duration;

use siphasher::sip::SipHasher13;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::quota::Quota;
use crate::random::{jittered, random_u64};
use crate::store::{SharedStore, StoreError, heartbeat_interval};

const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of heartbeat intervals that a member must be absent from the lists to be removed. A store
/// that was just flushed returns lists that are too short, and a share computed from such a list
/// would be too large.
const MAX_MISSED_HEARTBEATS: u32 = 3;
/// Number of hash buckets of keys. The order of the instances is computed once per bucket.
const BUCKETS: u16 = 4096;

/// The instances that share one store, by the last list that the store returned.
///
/// Clones share one list. While the store fails, the last list stays valid.
///
/// Before the first list an instance cannot know how many others there are. Unless
/// [`with_min_instances`](Self::with_min_instances) sets a number, it then assumes a fleet of 10:
/// its share is a tenth of each quota, at least one unit.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Fleet, Quota};
///
/// let fleet = Fleet::with_instance("a");
/// fleet.update_members(["a", "b", "c"]);
/// let quota = Quota::sliding_log(90, Duration::from_secs(60))?;
/// assert_eq!(fleet.share(&quota, "per-user", "user123").map(|share| share.limit()), Some(30));
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fleet {
    state: Arc<FleetState>,
}

#[derive(Debug)]
struct FleetState {
    instance: String,
    /// Time for which each member has been absent from the lists.
    absences: Mutex<BTreeMap<String, Duration>>,
    /// Locked for writing only while it is replaced, so decisions never wait for a heartbeat.
    membership: RwLock<Arc<Membership>>,
}

/// Immutable list of members, with the ranks computed from it so far.
#[derive(Debug)]
struct Membership {
    /// Sorted names. Empty before the first list.
    members: Vec<String>,
    min_instances: Option<usize>,
    /// Rank of this instance for each bucket, plus one; 0 until it is computed. Empty in a fleet of
    /// one.
    ranks: Box<[AtomicU32]>,
}

/// Guard of the task that sends the heartbeats of an instance. The task ends when it is dropped.
///
/// A [`Fallback`](crate::Fallback) holds its own guard. A service that uses a fleet for another
/// purpose starts the heartbeats itself:
///
/// ```
/// use std::sync::Arc;
/// use tidegate::{Fleet, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let store = Arc::new(MemoryStore::new()); // or RedisStore::connect(…)
/// let fleet = Fleet::with_instance("api-1");
/// let heartbeat = fleet.start_heartbeats(&store);
/// assert_eq!(fleet.members(), ["api-1"]);
/// drop(heartbeat); // the other instances soon remove this one
/// # }
/// ```
#[derive(Debug)]
pub struct Heartbeat(AbortHandle);

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self::new()
    }
}

impl Fleet {
    /// Assumed number of instances before the first list, unless
    /// [`with_min_instances`](Self::with_min_instances) sets one.
    pub const ASSUMED_INSTANCES: usize = 10;

    /// Creates a fleet in which this instance has a random name.
    #[must_use]
    pub fn new() -> Self {
        Self::with_instance(format!("{:016x}{:016x}", random_u64(), random_u64()))
    }

    /// Creates a fleet in which this instance has this name. Names must be unique.
    #[must_use]
    pub fn with_instance(instance: impl Into<String>) -> Self {
        let state = FleetState {
            instance: instance.into(),
            absences: Mutex::default(),
            membership: RwLock::new(Arc::new(Membership::new(Vec::new(), None))),
        };
        Self { state: Arc::new(state) }
    }

    /// Sets the minimum number of instances, for all clones. It applies while the store has not
    /// returned a list yet, and when fewer instances than this are alive. Without it, 10 are
    /// assumed until the first list.
    #[must_use]
    pub fn with_min_instances(self, instances: usize) -> Self {
        let absences = self.state.absences.lock().unwrap_or_else(PoisonError::into_inner);
        self.publish(absences.keys().cloned().collect(), Some(instances.max(1)));
        drop(absences);
        self
    }

    /// Returns the name of this instance.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.state.instance
    }

    /// Returns the number of instances that a quota is divided by: the number of members, or the
    /// minimum if that is larger. Before the first list it is the minimum, or
    /// [the assumed number](Self::ASSUMED_INSTANCES).
    #[must_use]
    pub fn size(&self) -> usize {
        self.membership().size()
    }

    /// Returns the names of the members, sorted. Empty before the first list.
    #[must_use]
    pub fn members(&self) -> Vec<String> {
        self.membership().members.clone()
    }

    /// Updates the members from a list of live instances. This instance is always a member. Another
    /// member is removed when it is absent from three lists in a row (in a fleet of more than 200:
    /// for three of its heartbeat intervals).
    pub fn update_members<I: Into<String>>(&self, alive: impl IntoIterator<Item = I>) {
        let mut absences = self.state.absences.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<String> = alive.into_iter().map(Into::into).collect();
        // A store that was just flushed returns a short list, and the next one after a short
        // interval, while the members still send at the longer interval of the full fleet.
        let interval = heartbeat_interval(alive.len());
        absences.values_mut().for_each(|absence| *absence = absence.saturating_add(interval));
        absences.extend(alive.into_iter().map(|name| (name, Duration::ZERO)));
        absences.insert(self.state.instance.clone(), Duration::ZERO);
        let timeout = heartbeat_interval(absences.len()) * MAX_MISSED_HEARTBEATS;
        absences.retain(|_, absence| *absence < timeout);
        let membership = self.membership();
        if !membership.members.iter().eq(absences.keys()) {
            self.publish(absences.keys().cloned().collect(), membership.min_instances);
        }
    }

    /// Sends one heartbeat through the store, and updates the members from the list that it
    /// returns. Returns the length of the list.
    pub async fn send_heartbeat<S: SharedStore>(&self, store: &S) -> Result<usize, StoreError> {
        let heartbeat = store.heartbeat(&self.state.instance);
        let alive = tokio::time::timeout(HEARTBEAT_TIMEOUT, heartbeat)
            .await
            .unwrap_or(Err(StoreError::Timeout(HEARTBEAT_TIMEOUT)))?;
        let listed = alive.len();
        self.update_members(alive);
        Ok(listed)
    }

    /// Sends a heartbeat about once per second, in a fleet of more than 200 instances about every
    /// N/200 seconds, until the returned guard is dropped. Needs a Tokio runtime.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime, and in one without timers (`enable_time`).
    #[must_use = "heartbeats stop when this is dropped"]
    pub fn start_heartbeats<S: SharedStore>(&self, store: &Arc<S>) -> Heartbeat {
        self.start_heartbeats_on(&Handle::current(), store)
    }

    /// The caller must be inside of this runtime.
    pub(super) fn start_heartbeats_on<S: SharedStore>(
        &self,
        runtime: &Handle,
        store: &Arc<S>,
    ) -> Heartbeat {
        let (fleet, store) = (self.clone(), Arc::downgrade(store));
        let mut heartbeats = Box::pin(async move {
            let mut listed = 1;
            while let Some(store) = store.upgrade() {
                match fleet.send_heartbeat(&*store).await {
                    Ok(instances) => listed = instances,
                    // The last list stays valid while the store is down.
                    Err(error) => tracing::debug!(%error, "heartbeat failed"),
                }
                drop(store);
                // Never longer than the interval, in which an override reaches all instances.
                let interval = heartbeat_interval(listed);
                tokio::time::sleep(interval * 9 / 16 + jittered(interval / 4)).await;
            }
        });
        // The first poll gets the list of a store that answers at once, such as memory. Otherwise
        // the first decisions would assume a fleet of ten.
        let polled = Pin::as_mut(&mut heartbeats).poll(&mut Context::from_waker(Waker::noop()));
        debug_assert!(polled.is_pending(), "the caller holds the store");
        Heartbeat(runtime.spawn(heartbeats).abort_handle())
    }

    /// Returns this instance's share of the quota for a key of a policy. The shares of all members
    /// add up to the quota, for buckets in limit and burst. If there is less than one unit per
    /// instance, one instance gets the whole quota and the others get `None`.
    ///
    /// Before the first list, and without [`with_min_instances`](Self::with_min_instances), the
    /// share is a tenth, at least one unit.
    #[must_use]
    pub fn share(&self, quota: &Quota, policy: &str, key: &str) -> Option<Quota> {
        let membership = self.membership();
        let size = membership.size() as u64;
        if size == 1 {
            return Some(quota.clone());
        }
        let (limit, burst) = (quota.limit(), quota.burst());
        if membership.is_assumed() {
            return Some(quota.scaled_to((limit / size).max(1), (burst / size).max(1)));
        }
        let rank = || membership.rank(&self.state.instance, bucket(policy, key));
        if limit.min(burst) < size {
            return (rank() == 0).then(|| quota.clone());
        }
        let (odd_limit, odd_burst) = (limit % size, burst % size);
        let rank = if odd_limit.max(odd_burst) == 0 { 0 } else { rank() };
        let part = |whole: u64, odd: u64| whole / size + u64::from(rank < odd);
        Some(quota.scaled_to(part(limit, odd_limit), part(burst, odd_burst)))
    }

    fn membership(&self) -> Arc<Membership> {
        Arc::clone(&self.state.membership.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the membership. The caller holds the lock on `absences`, so that concurrent updates
    /// are published in order.
    fn publish(&self, members: Vec<String>, min_instances: Option<usize>) {
        let membership = Arc::new(Membership::new(members, min_instances));
        *self.state.membership.write().unwrap_or_else(PoisonError::into_inner) = membership;
    }
}

impl Membership {
    fn new(members: Vec<String>, min_instances: Option<usize>) -> Self {
        let mut membership = Self { members, min_instances, ranks: Box::default() };
        if membership.size() > 1 && !membership.members.is_empty() {
            membership.ranks =
                std::iter::repeat_with(AtomicU32::default).take(usize::from(BUCKETS)).collect();
        }
        membership
    }

    /// Returns whether the size of the fleet is only assumed.
    fn is_assumed(&self) -> bool {
        self.members.is_empty() && self.min_instances.is_none()
    }

    fn size(&self) -> usize {
        let assumed = if self.members.is_empty() { Fleet::ASSUMED_INSTANCES } else { 1 };
        self.members.len().max(self.min_instances.unwrap_or(assumed))
    }

    /// Returns the number of instances that come before this one for the keys of a bucket.
    fn rank(&self, instance: &str, bucket: u16) -> u64 {
        let Some(memoized) = self.ranks.get(usize::from(bucket)) else {
            // Before the first list the order is not known: assume that all others come first.
            return self.size() as u64 - 1;
        };
        // Threads that compute a rank at the same time get the same result.
        match memoized.load(Ordering::Relaxed) {
            0 => {
                let rank = self.compute_rank(instance, bucket);
                memoized.store(u32::try_from(rank + 1).unwrap_or(u32::MAX), Ordering::Relaxed);
                rank as u64
            }
            computed => u64::from(computed - 1),
        }
    }

    /// Computes the rank by rendezvous hashing: instances with the same members agree on the order,
    /// each bucket has a different order, and an instance that joins or leaves does not change the
    /// order of the others.
    fn compute_rank(&self, instance: &str, bucket: u16) -> usize {
        let mine = (weight(instance, bucket), instance);
        let is_before = |name: &str| (weight(name, bucket), name) > mine;
        let before = self.members.iter().filter(|name| is_before(name)).count();
        // Instances below the minimum that have not joined have a rank, too: the same for all
        // instances with these members.
        let missing = (self.members.len()..self.size()).map(|number| format!("missing {number}"));
        before + missing.filter(|name| is_before(name)).count()
    }
}

/// Hashes strings stably across processes: without a seed, and independently of the machine and
/// the version of the standard library.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0x7469_6465_6761_7465, 0x666c_6565_7400_0001);
    for part in parts {
        hasher.write(part);
        // This byte occurs in no UTF-8 text, so it separates the parts.
        hasher.write_u8(0xff);
    }
    hasher.finish()
}

fn bucket(policy: &str, key: &str) -> u16 {
    let [low, high, ..] = hash(&[policy.as_bytes(), key.as_bytes()]).to_le_bytes();
    u16::from_le_bytes([low, high]) % BUCKETS
}

/// Returns the weight of an instance for the keys of a bucket. The greatest weight comes first.
fn weight(instance: &str, bucket: u16) -> u64 {
    hash(&[instance.as_bytes(), &bucket.to_le_bytes()])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{Algorithm, Encoding};

    fn fleet(size: usize, min_instances: usize) -> Vec<Fleet> {
        let names: Vec<String> = (0..size).map(|number| format!("instance-{number}")).collect();
        let join = |name: &String| {
            let fleet = Fleet::with_instance(name).with_min_instances(min_instances);
            fleet.update_members(names.iter().rev().cloned());
            fleet
        };
        names.iter().map(join).collect()
    }

    proptest! {
        #[test]
        fn shares_add_up_to_the_quota(
            size in 1..40_usize, limit in 1..200_u64, burst in 1..200_u64,
            key in "[a-z]{1,8}", kind in 0..5_usize,
        ) {
            let minute = Duration::from_secs(60);
            let quota = Quota::new(Algorithm::RATES[kind], limit, minute).expect("valid");
            let quota = quota.clone().with_burst(burst).unwrap_or(quota);
            let fleet = fleet(size, 1);
            let shares: Vec<Quota> =
                fleet.iter().filter_map(|instance| instance.share(&quota, "p", &key)).collect();
            prop_assert_eq!(shares.iter().map(Quota::limit).sum::<u64>(), quota.limit());
            prop_assert_eq!(shares.iter().map(Quota::burst).sum::<u64>(), quota.burst());
            let whole = quota.limit().min(quota.burst()) < size as u64;
            prop_assert_eq!(shares.len(), if whole { 1 } else { size });
            for share in shares {
                prop_assert_eq!(share.window(), quota.window());
                prop_assert_eq!(share.algorithm(), quota.algorithm());
                prop_assert_eq!(share.default_policy_name(), quota.default_policy_name());
            }
        }

        #[test]
        fn fewer_than_min_instances_never_have_more_than_the_quota(
            size in 1..10_usize, min_instances in 1..20_usize, limit in 1..50_u64,
            key in "[a-z]{1,8}",
        ) {
            let quota = Quota::sliding_log(limit, Duration::from_secs(60)).expect("valid");
            let total = |fleet: &[Fleet]| -> u64 {
                let shares = fleet.iter().filter_map(|instance| instance.share(&quota, "p", &key));
                shares.map(|share| share.limit()).sum()
            };
            prop_assert!(total(&fleet(size, min_instances)) <= limit);
            // Instances that do not know each other, as many as the minimum.
            let isolated = |number| {
                Fleet::with_instance(format!("i-{number}")).with_min_instances(min_instances)
            };
            let isolated: Vec<Fleet> = (0..min_instances).map(isolated).collect();
            prop_assert!(total(&isolated) <= limit);
            prop_assert!(limit < min_instances as u64 || total(&isolated) > 0);
        }
    }

    #[test]
    fn a_scarce_key_has_one_owner_and_owners_are_spread_evenly() {
        let quota = Quota::sliding_log(2, Duration::from_secs(60)).expect("valid");
        let fleet = fleet(5, 1);
        let mut owned = [0; 5];
        for number in 0..500 {
            let key = format!("user-{number}");
            let owners: Vec<usize> =
                (0..5).filter(|at| fleet[*at].share(&quota, "per-user", &key).is_some()).collect();
            assert_eq!(owners.len(), 1, "{key}");
            owned[owners[0]] += 1;
        }
        assert!(owned.iter().all(|count| (60..=140).contains(count)), "{owned:?}");
    }

    #[test]
    fn an_instance_that_leaves_moves_only_its_own_keys() {
        let quota = Quota::sliding_log(1, Duration::from_secs(60)).expect("valid");
        let owner = |fleet: &[Fleet], key: &str| {
            let owner = fleet.iter().find(|instance| instance.share(&quota, "p", key).is_some());
            owner.map(|instance| instance.instance().to_owned())
        };
        let (five, four) = (fleet(5, 1), fleet(4, 1));
        for number in 0..200 {
            let key = format!("user-{number}");
            let before = owner(&five, &key);
            assert!(
                before == owner(&four, &key) || before.as_deref() == Some("instance-4"),
                "{key}"
            );
        }
    }

    /// Instances of different versions must agree on the order.
    #[test]
    fn weights_and_buckets_are_stable() {
        assert_eq!(
            (bucket("per-user", "user123"), weight("instance-0", 1)),
            (BUCKET_OF_USER123, WEIGHT_OF_INSTANCE_0)
        );
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
    }
    const BUCKET_OF_USER123: u16 = 2345;
    const WEIGHT_OF_INSTANCE_0: u64 = 8_229_007_873_498_876_007;

    #[test]
    fn a_rank_is_computed_once_per_bucket_and_membership() {
        let quota = Quota::sliding_log(1_000_003, Duration::from_secs(60)).expect("valid");
        let fleet = &fleet(50, 1)[7];
        let computed = || {
            fleet.membership().ranks.iter().filter(|rank| rank.load(Ordering::Relaxed) > 0).count()
        };
        let keys: Vec<String> = (0..100).map(|number| format!("user-{number}")).collect();
        let shares = || keys.iter().map(|key| fleet.share(&quota, "p", key)).collect::<Vec<_>>();
        let first = shares();
        let buckets: std::collections::BTreeSet<u16> =
            keys.iter().map(|key| bucket("p", key)).collect();
        assert_eq!(computed(), buckets.len());
        let before = fleet.membership();
        fleet.update_members(fleet.members());
        assert!(Arc::ptr_eq(&before, &fleet.membership()), "the same members keep their ranks");
        assert_eq!((shares(), computed()), (first, buckets.len()));
        fleet.update_members(["another"]);
        assert_eq!(computed(), 0);
    }

    #[test]
    fn before_the_first_list_a_fleet_of_ten_is_assumed() {
        let minute = Duration::from_secs(60);
        let unknown = Fleet::with_instance("a");
        assert_eq!((unknown.size(), unknown.members().len()), (10, 0));
        let share = |fleet: &Fleet, limit, burst| {
            let quota = Quota::token_bucket(limit, minute)
                .and_then(|quota| quota.with_burst(burst))
                .expect("valid");
            fleet.share(&quota, "p", "k").map(|share| (share.limit(), share.burst()))
        };
        assert_eq!(share(&unknown, 1_000, 55), Some((100, 5)));
        assert_eq!(share(&unknown, 3, 7), Some((1, 1)), "a small limit is not denied altogether");
        // An explicit minimum replaces the assumption.
        let at_least = |instances| Fleet::with_instance("a").with_min_instances(instances);
        assert_eq!(share(&at_least(1), 1_000, 55), Some((1_000, 55)));
        assert_eq!(share(&at_least(4), 1_000, 100), Some((250, 25)));
        assert_eq!(share(&at_least(4), 3, 3), None);
        // So does a list.
        unknown.update_members(["a"]);
        assert_eq!((unknown.size(), share(&unknown, 1_000, 55)), (1, Some((1_000, 55))));
    }

    /// The instances send their next heartbeat within one interval of the full fleet, which is many
    /// intervals of a short list.
    #[test]
    fn a_flushed_store_removes_no_member_of_a_large_fleet() {
        let names: Vec<String> = (0..1_000).map(|number| format!("instance-{number}")).collect();
        let fleet = Fleet::with_instance("instance-0");
        fleet.update_members(names.clone());
        let mut elapsed = Duration::ZERO;
        while elapsed < heartbeat_interval(1_000) {
            let back = usize::try_from(elapsed.as_millis() / 5).expect("few") + 1;
            fleet.update_members(names[..back].iter().cloned());
            elapsed += heartbeat_interval(back);
            assert_eq!(fleet.size(), 1_000, "after {elapsed:?}");
        }
        for _ in 0..3 {
            fleet.update_members(names[..999].iter().cloned());
        }
        assert_eq!(fleet.size(), 999);
    }

    #[test]
    fn a_share_keeps_the_options_of_its_quota() {
        let quota = Quota::sliding_log(10, Duration::from_secs(60)).expect("valid");
        let quota = quota
            .with_encoding(Encoding::Packed)
            .and_then(|quota| quota.with_count_denied(true))
            .expect("a log");
        let share = fleet(2, 1)[0].share(&quota, "p", "k").expect("a share");
        assert_eq!((share.limit(), share.burst()), (5, 5));
        assert_eq!((share.encoding(), share.count_denied()), (Encoding::Packed, true));
        // A bucket at the maximum drain time: rounding must not give a share more burst.
        let slow = Quota::token_bucket(3, Duration::from_secs(86_400 * 366))
            .and_then(|q| q.with_burst(29))
            .expect("ok");
        for share in fleet(2, 1).iter().filter_map(|instance| instance.share(&slow, "p", "k")) {
            let again = Quota::token_bucket(share.limit(), share.window())
                .and_then(|q| q.with_burst(share.burst()));
            assert_eq!(again.map(|quota| quota.burst()), Ok(share.burst()));
        }
    }

    #[test]
    fn a_member_is_removed_after_three_lists_without_it() {
        let fleet = Fleet::with_instance("a");
        fleet.update_members(["a", "b", "c"]);
        fleet.update_members(["a"]);
        fleet.update_members(["a", "c"]);
        assert_eq!(fleet.members(), ["a", "b", "c"], "absent from two lists in a row");
        fleet.update_members(["c"]);
        assert_eq!(fleet.members(), ["a", "c"], "this instance is always a member");
        assert_eq!(fleet.clone().with_min_instances(5).size(), 5);
        assert_eq!(Fleet::new().members().len(), 0);
        assert_ne!(Fleet::new().instance(), Fleet::new().instance());
    }
}
