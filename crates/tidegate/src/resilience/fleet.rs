//! [`Fleet`]: the live instances, and this instance's share of a quota while the store cannot count
//! for all of them.

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

use super::{jittered, random};
use crate::quota::Quota;
use crate::store::{Store, StoreError};

/// Interval between two heartbeats of one instance, in a fleet small enough for it.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Heartbeats per second of a whole fleet. A larger fleet lengthens the interval instead of sending
/// more.
const MAX_HEARTBEATS_PER_SECOND: u32 = 200;
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
/// A member is removed when it is absent from the lists of this many intervals. A store that was
/// just flushed returns lists that are too short, and a share computed from such a list would be
/// too large.
const MAX_MISSED_HEARTBEATS: u32 = 3;
/// Keys with the same bucket have the same order of instances, so that the order is computed once
/// per bucket.
const BUCKETS: u16 = 4096;

/// Interval between two heartbeats of each instance in a fleet of this size. The store derives from
/// it how long an instance may be silent, so both must use this function.
pub(crate) fn heartbeat_interval(instances: usize) -> Duration {
    let instances = u32::try_from(instances).unwrap_or(u32::MAX);
    HEARTBEAT_INTERVAL
        .max(Duration::from_secs(1).saturating_mul(instances) / MAX_HEARTBEATS_PER_SECOND)
}

/// The instances that share one store, as they last agreed through it.
///
/// Clones share one list. It is kept when the store fails: that is when it is needed.
///
/// Before the first agreement an instance cannot know how many others there are. Unless
/// [`expecting`](Self::expecting) sets a number, it then assumes a fleet of 10, and its share is a
/// tenth of each quota, at least one unit.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Fleet, Quota};
///
/// let fleet = Fleet::with_instance("a");
/// fleet.agree(["a", "b", "c"]);
/// let quota = Quota::sliding_log(90, Duration::from_secs(60))?;
/// assert_eq!(fleet.share(&quota, "per-user", "user123").map(|share| share.limit()), Some(30));
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fleet {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    instance: String,
    /// Each member with the time for which lists in a row have left it out.
    absences: Mutex<BTreeMap<String, Duration>>,
    /// Locked for writing only while it is replaced, so decisions never wait for a heartbeat.
    snapshot: RwLock<Arc<Snapshot>>,
}

/// A membership that does not change, with the ranks computed from it so far.
#[derive(Debug)]
struct Snapshot {
    /// Sorted. Empty before the first agreement.
    members: Vec<String>,
    /// Minimum number of instances, if one was set.
    expected: Option<usize>,
    /// Rank of this instance for each bucket, plus one; 0 until it is computed. Empty in a fleet of
    /// one.
    ranks: Box<[AtomicU32]>,
}

/// Sends heartbeats of an instance until it is dropped.
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
    /// Size of a fleet before its first agreement, unless [`expecting`](Self::expecting) sets one.
    pub const ASSUMED_INSTANCES: usize = 10;

    /// Creates a fleet in which this instance has a random name.
    #[must_use]
    pub fn new() -> Self {
        Self::with_instance(format!("{:016x}{:016x}", random(), random()))
    }

    /// Creates a fleet in which this instance has a name of your choice. No two instances may have
    /// the same.
    #[must_use]
    pub fn with_instance(instance: impl Into<String>) -> Self {
        let shared = Shared {
            instance: instance.into(),
            absences: Mutex::default(),
            snapshot: RwLock::new(Arc::new(Snapshot::new(Vec::new(), None))),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Sets the minimum number of instances, for all clones. It matters while the store is away
    /// before the first agreement, and when fewer instances than this are alive. Without it, 10 are
    /// assumed until the first agreement.
    #[must_use]
    pub fn expecting(self, instances: usize) -> Self {
        let absences = self.shared.absences.lock().unwrap_or_else(PoisonError::into_inner);
        self.publish(absences.keys().cloned().collect(), Some(instances.max(1)));
        drop(absences);
        self
    }

    /// Returns the name of this instance.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.shared.instance
    }

    /// Returns the number of instances that a quota is divided by: the members last agreed on, or
    /// the expected number if that is larger. Before the first agreement it is the expected number,
    /// or the assumed one.
    #[must_use]
    pub fn size(&self) -> usize {
        self.snapshot().size()
    }

    /// Returns the instances last agreed on, sorted by name.
    #[must_use]
    pub fn members(&self) -> Vec<String> {
        self.snapshot().members.clone()
    }

    /// Takes a list of live instances. This instance is always a member; a member is removed when
    /// it is absent from three lists in a row (in a fleet of more than 200: for three of its
    /// heartbeat intervals).
    pub fn agree<I: Into<String>>(&self, alive: impl IntoIterator<Item = I>) {
        let mut absences = self.shared.absences.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<String> = alive.into_iter().map(Into::into).collect();
        // The next list comes after the interval of this one, which is shorter than the members'
        // own while a store that was flushed fills again.
        let interval = heartbeat_interval(alive.len());
        absences.values_mut().for_each(|absence| *absence = absence.saturating_add(interval));
        absences.extend(alive.into_iter().map(|name| (name, Duration::ZERO)));
        absences.insert(self.shared.instance.clone(), Duration::ZERO);
        let timeout = heartbeat_interval(absences.len()) * MAX_MISSED_HEARTBEATS;
        absences.retain(|_, absence| *absence < timeout);
        let snapshot = self.snapshot();
        if !snapshot.members.iter().eq(absences.keys()) {
            self.publish(absences.keys().cloned().collect(), snapshot.expected);
        }
    }

    /// Sends one heartbeat through the store, and takes the list of live instances that it returns.
    pub async fn beat<S: Store>(&self, store: &S) -> Result<(), StoreError> {
        self.announce(store).await.map(|_| ())
    }

    /// Returns the length of the list.
    async fn announce<S: Store>(&self, store: &S) -> Result<usize, StoreError> {
        let announced =
            tokio::time::timeout(HEARTBEAT_TIMEOUT, store.announce(&self.shared.instance)).await;
        let alive = announced.unwrap_or(Err(StoreError::Timeout(HEARTBEAT_TIMEOUT)))?;
        let listed = alive.len();
        self.agree(alive);
        Ok(listed)
    }

    /// Sends a heartbeat about once per second, in a fleet of more than 200 instances about every
    /// N/200 seconds, until the returned guard is dropped. Needs a Tokio runtime.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime.
    #[must_use = "heartbeats stop when this is dropped"]
    pub fn keep_alive<S: Store>(&self, store: &Arc<S>) -> Heartbeat {
        self.keep_alive_on(&Handle::current(), store)
    }

    /// The caller must be inside of this runtime.
    pub(super) fn keep_alive_on<S: Store>(&self, runtime: &Handle, store: &Arc<S>) -> Heartbeat {
        let (fleet, store) = (self.clone(), Arc::downgrade(store));
        let mut heartbeats = Box::pin(async move {
            let mut listed = 1;
            while let Some(store) = store.upgrade() {
                match fleet.announce(&*store).await {
                    Ok(instances) => listed = instances,
                    // The last agreement stays valid while the store is away.
                    Err(error) => tracing::debug!(%error, "heartbeat failed"),
                }
                drop(store);
                tokio::time::sleep(jittered(heartbeat_interval(listed))).await;
            }
        });
        // A store that answers at once is heard before the first decision, which would otherwise
        // assume a fleet.
        let polled = Pin::as_mut(&mut heartbeats).poll(&mut Context::from_waker(Waker::noop()));
        debug_assert!(polled.is_pending(), "the caller holds the store");
        Heartbeat(runtime.spawn(heartbeats).abort_handle())
    }

    /// Returns this instance's share of the quota for a key of a policy. The shares of all members
    /// add up to the quota, for buckets in limit and burst. If there is less than one unit for
    /// each, one instance has the whole quota and the others have `None`.
    ///
    /// Before the first agreement, and without [`expecting`](Self::expecting), the share is a
    /// tenth, at least one unit.
    #[must_use]
    pub fn share(&self, quota: &Quota, policy: &str, key: &str) -> Option<Quota> {
        let snapshot = self.snapshot();
        let size = snapshot.size() as u64;
        if size == 1 {
            return Some(quota.clone());
        }
        let (limit, burst) = (quota.limit(), quota.burst());
        if snapshot.is_assumed() {
            return Some(quota.scaled_to((limit / size).max(1), (burst / size).max(1)));
        }
        let rank = || snapshot.rank(&self.shared.instance, bucket(policy, key));
        if limit.min(burst) < size {
            return (rank() == 0).then(|| quota.clone());
        }
        let (odd_limit, odd_burst) = (limit % size, burst % size);
        let rank = if odd_limit.max(odd_burst) == 0 { 0 } else { rank() };
        let part = |whole: u64, odd: u64| whole / size + u64::from(rank < odd);
        Some(quota.scaled_to(part(limit, odd_limit), part(burst, odd_burst)))
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.shared.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the snapshot. The caller holds the lock on `absences`, so that two callers cannot
    /// overtake each other.
    fn publish(&self, members: Vec<String>, expected: Option<usize>) {
        let snapshot = Arc::new(Snapshot::new(members, expected));
        *self.shared.snapshot.write().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }
}

impl Snapshot {
    fn new(members: Vec<String>, expected: Option<usize>) -> Self {
        let mut snapshot = Self { members, expected, ranks: Box::default() };
        if snapshot.size() > 1 && !snapshot.members.is_empty() {
            snapshot.ranks =
                std::iter::repeat_with(AtomicU32::default).take(usize::from(BUCKETS)).collect();
        }
        snapshot
    }

    /// Returns whether nothing is known about the fleet.
    fn is_assumed(&self) -> bool {
        self.members.is_empty() && self.expected.is_none()
    }

    fn size(&self) -> usize {
        let assumed = if self.members.is_empty() { Fleet::ASSUMED_INSTANCES } else { 1 };
        self.members.len().max(self.expected.unwrap_or(assumed))
    }

    /// Returns the number of instances that come before this one for the keys of a bucket.
    fn rank(&self, instance: &str, bucket: u16) -> u64 {
        let Some(memoized) = self.ranks.get(usize::from(bucket)) else {
            // Before the first agreement the order is not known, so all the expected others come
            // first.
            return self.size() as u64 - 1;
        };
        // Threads that compute a rank at the same time get the same one.
        match memoized.load(Ordering::Relaxed) {
            0 => {
                let rank = self.compute_rank(instance, bucket);
                memoized.store(u32::try_from(rank + 1).unwrap_or(u32::MAX), Ordering::Relaxed);
                rank as u64
            }
            known => u64::from(known - 1),
        }
    }

    /// Rendezvous hashing: instances with the same members agree on the order, each bucket has
    /// another order, and an instance that joins or leaves changes the order of no two others.
    fn compute_rank(&self, instance: &str, bucket: u16) -> usize {
        let mine = (weight(instance, bucket), instance);
        let is_before = |name: &str| (weight(name, bucket), name) > mine;
        let before = self.members.iter().filter(|name| is_before(name)).count();
        // Expected instances that have not joined have a place in the order, too: the same for all
        // with these members.
        let missing = (self.members.len()..self.size()).map(|number| format!("missing {number}"));
        before + missing.filter(|name| is_before(name)).count()
    }
}

/// Stable across processes: it depends on no seed, machine or version of the standard library.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0x7469_6465_6761_7465, 0x666c_6565_7400_0001);
    for part in parts {
        hasher.write(part);
        // This byte occurs in no UTF-8 text, so the parts stay separate.
        hasher.write_u8(0xff);
    }
    hasher.finish()
}

fn bucket(policy: &str, key: &str) -> u16 {
    let [low, high, ..] = hash(&[policy.as_bytes(), key.as_bytes()]).to_le_bytes();
    u16::from_le_bytes([low, high]) % BUCKETS
}

/// Weight of an instance for the keys of a bucket: the instance with the greatest comes first.
fn weight(instance: &str, bucket: u16) -> u64 {
    hash(&[instance.as_bytes(), &bucket.to_le_bytes()])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{Algorithm, Encoding};

    fn fleet(size: usize, expected: usize) -> Vec<Fleet> {
        let names: Vec<String> = (0..size).map(|number| format!("instance-{number}")).collect();
        let join = |name: &String| {
            let fleet = Fleet::with_instance(name).expecting(expected);
            fleet.agree(names.iter().rev().cloned());
            fleet
        };
        names.iter().map(join).collect()
    }

    proptest! {
        #[test]
        fn shares_add_up_to_the_quota(
            size in 1..40_usize, limit in 1..200_u64, burst in 1..200_u64, key in "[a-z]{1,8}", kind in 0..5_usize,
        ) {
            let quota = Quota::new(Algorithm::ALL[kind], limit, Duration::from_secs(60)).expect("valid");
            let quota = quota.clone().with_burst(burst).unwrap_or(quota);
            let shares: Vec<Quota> = fleet(size, 1).iter().filter_map(|one| one.share(&quota, "p", &key)).collect();
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
        fn fewer_than_expected_never_have_more_than_the_quota(
            size in 1..10_usize, expected in 1..20_usize, limit in 1..50_u64, key in "[a-z]{1,8}",
        ) {
            let quota = Quota::sliding_log(limit, Duration::from_secs(60)).expect("valid");
            let fleet = fleet(size, expected);
            let shares = fleet.iter().filter_map(|one| one.share(&quota, "p", &key));
            let agreed: u64 = shares.map(|share| share.limit()).sum();
            prop_assert!(agreed <= limit);
            // Strangers to each other, as many as were expected.
            let strangers = (0..expected).map(|number| Fleet::with_instance(format!("i-{number}")).expecting(expected));
            let alone: u64 = strangers.filter_map(|one| one.share(&quota, "p", &key)).map(|q| q.limit()).sum();
            prop_assert!(alone <= limit);
            prop_assert!(limit < expected as u64 || alone > 0);
        }
    }

    #[test]
    fn a_scarce_key_has_one_owner_and_the_keys_spread_over_the_fleet() {
        let quota = Quota::sliding_log(2, Duration::from_secs(60)).expect("valid");
        let fleet = fleet(5, 1);
        let mut owned = [0; 5];
        for number in 0..500 {
            let key = format!("user-{number}");
            let owners: Vec<usize> = (0..5)
                .filter(|one| fleet[*one].share(&quota, "per-user", &key).is_some())
                .collect();
            assert_eq!(owners.len(), 1, "{key}");
            owned[owners[0]] += 1;
        }
        assert!(owned.iter().all(|count| (60..=140).contains(count)), "{owned:?}");
    }

    #[test]
    fn an_instance_that_leaves_moves_only_its_own_keys() {
        let quota = Quota::sliding_log(1, Duration::from_secs(60)).expect("valid");
        let owner = |fleet: &[Fleet], key: &str| {
            let owner = fleet.iter().find(|one| one.share(&quota, "p", key).is_some());
            owner.map(|one| one.instance().to_owned())
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
            fleet.snapshot().ranks.iter().filter(|rank| rank.load(Ordering::Relaxed) > 0).count()
        };
        let keys: Vec<String> = (0..100).map(|number| format!("user-{number}")).collect();
        let shares = || keys.iter().map(|key| fleet.share(&quota, "p", key)).collect::<Vec<_>>();
        let first = shares();
        let buckets: std::collections::BTreeSet<u16> =
            keys.iter().map(|key| bucket("p", key)).collect();
        assert_eq!(computed(), buckets.len());
        let before = fleet.snapshot();
        fleet.agree(fleet.members());
        assert!(Arc::ptr_eq(&before, &fleet.snapshot()), "the same members keep their ranks");
        assert_eq!((shares(), computed()), (first, buckets.len()));
        fleet.agree(["another"]);
        assert_eq!(computed(), 0);
    }

    #[test]
    fn without_an_agreement_a_fleet_of_ten_is_assumed() {
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
        // An explicit number is taken as it is.
        let expecting = |instances| Fleet::with_instance("a").expecting(instances);
        assert_eq!(share(&expecting(1), 1_000, 55), Some((1_000, 55)));
        assert_eq!(share(&expecting(4), 1_000, 100), Some((250, 25)));
        assert_eq!(share(&expecting(4), 3, 3), None);
        // So is an agreement.
        unknown.agree(["a"]);
        assert_eq!((unknown.size(), share(&unknown, 1_000, 55)), (1, Some((1_000, 55))));
    }

    #[test]
    fn a_large_fleet_sends_heartbeats_less_often() {
        let millis = |instances| heartbeat_interval(instances).as_millis();
        assert_eq!([0, 1, 200, 1_000, 10_000].map(millis), [1_000, 1_000, 1_000, 5_000, 50_000]);
    }

    /// Its instances announce themselves again within one interval of the full fleet, which is many
    /// of a short list.
    #[test]
    fn a_flushed_store_makes_no_member_of_a_large_fleet_forgotten() {
        let names: Vec<String> = (0..1_000).map(|number| format!("instance-{number}")).collect();
        let fleet = Fleet::with_instance("instance-0");
        fleet.agree(names.clone());
        let mut elapsed = Duration::ZERO;
        while elapsed < heartbeat_interval(1_000) {
            let back = usize::try_from(elapsed.as_millis() / 5).expect("few") + 1;
            fleet.agree(names[..back].iter().cloned());
            elapsed += heartbeat_interval(back);
            assert_eq!(fleet.size(), 1_000, "after {elapsed:?}");
        }
        for _ in 0..3 {
            fleet.agree(names[..999].iter().cloned());
        }
        assert_eq!(fleet.size(), 999);
    }

    #[test]
    fn a_share_keeps_how_its_quota_counts() {
        let quota = Quota::sliding_log(10, Duration::from_secs(60)).expect("valid");
        let quota = quota
            .with_encoding(Encoding::Packed)
            .and_then(|quota| quota.with_count_denied(true))
            .expect("a log");
        let share = fleet(2, 1)[0].share(&quota, "p", "k").expect("a share");
        assert_eq!((share.limit(), share.burst()), (5, 5));
        assert_eq!((share.encoding(), share.count_denied()), (Encoding::Packed, true));
        // At the edge of what a bucket may take to drain, a share may not have a unit more of
        // burst.
        let slow = Quota::token_bucket(3, Duration::from_secs(86_400 * 366))
            .and_then(|q| q.with_burst(29))
            .expect("ok");
        for share in fleet(2, 1).iter().filter_map(|one| one.share(&slow, "p", "k")) {
            let again = Quota::token_bucket(share.limit(), share.window())
                .and_then(|q| q.with_burst(share.burst()));
            assert_eq!(again.map(|quota| quota.burst()), Ok(share.burst()));
        }
    }

    #[test]
    fn a_member_is_forgotten_only_after_three_lists_without_it() {
        let fleet = Fleet::with_instance("a");
        fleet.agree(["a", "b", "c"]);
        fleet.agree(["a"]);
        fleet.agree(["a", "c"]);
        assert_eq!(fleet.members(), ["a", "b", "c"], "a store that was just emptied");
        fleet.agree(["c"]);
        assert_eq!(fleet.members(), ["a", "c"], "this instance is always a member");
        assert_eq!(fleet.clone().expecting(5).size(), 5);
        assert_eq!(Fleet::new().members().len(), 0);
        assert_ne!(Fleet::new().instance(), Fleet::new().instance());
    }
}
