//! [`Fleet`]: who else is alive, and which share of a quota is this instance's while nobody can count for all.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use siphasher::sip::SipHasher13;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::random;
use crate::quota::Quota;
use crate::store::{Store, StoreError};

/// How often an instance says that it is alive.
const BEAT: Duration = Duration::from_secs(1);
/// A member is forgotten when so many lists in a row leave it out. A store that was emptied, or that a member has not got
/// through to yet, tells lists that are too short; a share by such a list would be too large.
const MISSED_BEATS: u8 = 3;

/// The instances that share one store, as they last agreed through it.
///
/// Clones share one list. It is kept when the store fails: that is when it is needed.
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
    expected: usize,
}

#[derive(Debug)]
struct Shared {
    instance: String,
    /// How many lists in a row have left each member out. Empty: nothing has been agreed yet.
    missed: RwLock<BTreeMap<String, u8>>,
}

/// Says that an instance is alive until it is dropped.
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
    /// A fleet in which this instance has a random name.
    #[must_use]
    pub fn new() -> Self {
        Self::with_instance(format!("{:016x}{:016x}", random(), random()))
    }

    /// A fleet in which this instance has a name of your choice. No two may have the same.
    #[must_use]
    pub fn with_instance(instance: impl Into<String>) -> Self {
        Self { shared: Arc::new(Shared { instance: instance.into(), missed: RwLock::default() }), expected: 1 }
    }

    /// How many instances there are at least, known or not; 1 by default. It matters when the store is away before the first
    /// agreement.
    #[must_use]
    pub fn expecting(mut self, instances: usize) -> Self {
        self.expected = instances.max(1);
        self
    }

    /// The name of this instance.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.shared.instance
    }

    /// How many instances share a quota: those last agreed on, or those expected if they are more.
    #[must_use]
    pub fn size(&self) -> usize {
        self.read(|members| members.len().max(self.expected))
    }

    /// The instances last agreed on, in the order of their names.
    #[must_use]
    pub fn members(&self) -> Vec<String> {
        self.read(|members| members.keys().cloned().collect())
    }

    /// Takes a list of who is alive, this instance included. Who is left out of three lists in a row is forgotten.
    pub fn agree<I: Into<String>>(&self, alive: impl IntoIterator<Item = I>) {
        let mut members = self.shared.missed.write().unwrap_or_else(PoisonError::into_inner);
        members.values_mut().for_each(|missed| *missed += 1);
        members.extend(alive.into_iter().map(|name| (name.into(), 0)));
        members.insert(self.shared.instance.clone(), 0);
        members.retain(|_, missed| *missed < MISSED_BEATS);
    }

    /// Says through the store that this instance is alive, and takes the list of who else is.
    pub async fn beat<S: Store>(&self, store: &S) -> Result<(), StoreError> {
        let announced = tokio::time::timeout(BEAT, store.announce(&self.shared.instance)).await;
        self.agree(announced.unwrap_or(Err(StoreError::Timeout(BEAT)))?);
        Ok(())
    }

    /// Beats once a second, from now on and until the answer is dropped. Needs a Tokio runtime.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime.
    #[must_use = "the heart stops when this is dropped"]
    pub fn keep_alive<S: Store>(&self, store: &Arc<S>) -> Heartbeat {
        self.keep_alive_on(&Handle::current(), store)
    }

    pub(super) fn keep_alive_on<S: Store>(&self, runtime: &Handle, store: &Arc<S>) -> Heartbeat {
        let (fleet, store) = (self.clone(), Arc::downgrade(store));
        let beating = async move {
            while let Some(store) = store.upgrade() {
                // What was agreed stays as it is when the store is away.
                if let Err(error) = fleet.beat(&*store).await {
                    tracing::debug!(%error, "no heartbeat through the store");
                }
                drop(store);
                tokio::time::sleep(BEAT).await;
            }
        };
        Heartbeat(runtime.spawn(beating).abort_handle())
    }

    /// This instance's share of the quota for a key of a policy. The shares of all add up to the quota, for buckets in limit
    /// and burst. If there is not a whole unit for each, one instance has it all and the others have `None`.
    #[must_use]
    pub fn share(&self, quota: &Quota, policy: &str, key: &str) -> Option<Quota> {
        self.read(|members| {
            let size = members.len().max(self.expected) as u64;
            if size == 1 {
                return Some(quota.clone());
            }
            let (limit, burst) = (quota.limit(), quota.burst());
            let rank = || self.rank(members, policy, key);
            if limit.min(burst) < size {
                return (rank() == 0).then(|| quota.clone());
            }
            let (odd_limit, odd_burst) = (limit % size, burst % size);
            let rank = if odd_limit.max(odd_burst) == 0 { 0 } else { rank() };
            let part = |whole: u64, odd: u64| whole / size + u64::from(rank < odd);
            Some(quota.with_share(part(limit, odd_limit), part(burst, odd_burst)))
        })
    }

    /// How many instances come before this one for this key, by rendezvous: all that know the same members agree on the
    /// order, each key has another one, and who comes or goes moves nobody else.
    fn rank(&self, members: &BTreeMap<String, u8>, policy: &str, key: &str) -> u64 {
        if members.is_empty() {
            // Nothing is agreed: the others may be anybody, so they go first.
            return self.expected.saturating_sub(1) as u64;
        }
        let mine = (weight(&self.shared.instance, policy, key), self.shared.instance.as_str());
        let before = members.keys().filter(|name| (weight(name, policy, key), name.as_str()) > mine).count();
        // Expected, but not heard of: they have a place in the order, too, the same for all that know these members.
        let missing = (members.len()..self.expected).map(|number| format!("missing {number}"));
        let missing_before = missing.filter(|name| (weight(name, policy, key), name.as_str()) > mine).count();
        (before + missing_before) as u64
    }

    fn read<T>(&self, look: impl FnOnce(&BTreeMap<String, u8>) -> T) -> T {
        look(&self.shared.missed.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The same in every process: it must not depend on a seed, the machine or the version of the standard library.
fn weight(instance: &str, policy: &str, key: &str) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0x7469_6465_6761_7465, 0x666c_6565_7400_0001);
    for part in [instance, policy, key] {
        hasher.write(part.as_bytes());
        // No UTF-8 text has this byte, so the parts cannot flow into each other.
        hasher.write_u8(0xff);
    }
    hasher.finish()
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
                prop_assert_eq!(share.unnamed_policy(), quota.unnamed_policy());
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
            let owners: Vec<usize> =
                (0..5).filter(|one| fleet[*one].share(&quota, "per-user", &key).is_some()).collect();
            assert_eq!(owners.len(), 1, "{key}");
            owned[owners[0]] += 1;
        }
        assert!(owned.iter().all(|count| (60..=140).contains(count)), "{owned:?}");
    }

    #[test]
    fn who_leaves_moves_only_its_own_keys() {
        let quota = Quota::sliding_log(1, Duration::from_secs(60)).expect("valid");
        let owner = |fleet: &[Fleet], key: &str| {
            let owner = fleet.iter().find(|one| one.share(&quota, "p", key).is_some());
            owner.map(|one| one.instance().to_owned())
        };
        let (five, four) = (fleet(5, 1), fleet(4, 1));
        for number in 0..200 {
            let key = format!("user-{number}");
            let before = owner(&five, &key);
            assert!(before == owner(&four, &key) || before.as_deref() == Some("instance-4"), "{key}");
        }
    }

    /// The order is part of what instances of different versions must agree on.
    #[test]
    fn the_weights_stay_as_they_are() {
        assert_eq!(weight("instance-0", "per-user", "user123"), WEIGHT_OF_INSTANCE_0);
        assert_ne!(weight("ab", "c", "d"), weight("a", "bc", "d"));
    }
    const WEIGHT_OF_INSTANCE_0: u64 = 11_740_391_901_866_006_812;

    #[test]
    fn a_share_keeps_how_its_quota_counts() {
        let quota = Quota::sliding_log(10, Duration::from_secs(60)).expect("valid");
        let quota =
            quota.with_encoding(Encoding::Packed).and_then(|quota| quota.with_count_denied(true)).expect("a log");
        let share = fleet(2, 1)[0].share(&quota, "p", "k").expect("a share");
        assert_eq!((share.limit(), share.burst()), (5, 5));
        assert_eq!((share.encoding(), share.count_denied()), (Encoding::Packed, true));
        // At the edge of what a bucket may take to drain, a share may not have a unit more of burst.
        let slow =
            Quota::token_bucket(3, Duration::from_secs(86_400 * 366)).and_then(|q| q.with_burst(29)).expect("ok");
        for share in fleet(2, 1).iter().filter_map(|one| one.share(&slow, "p", "k")) {
            let again = Quota::token_bucket(share.limit(), share.window()).and_then(|q| q.with_burst(share.burst()));
            assert_eq!(again.map(|quota| quota.burst()), Ok(share.burst()));
        }
    }

    #[test]
    fn a_member_is_forgotten_only_after_three_lists_without_it() {
        let fleet = Fleet::with_instance("a");
        assert_eq!(fleet.size(), 1);
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
