//! [`SharedStore`]: the operations on a store that its decisions do not need, and its operation in
//! a fleet does: heartbeats, invalidations and epochs.

use std::future::{Future, Ready};
use std::sync::Arc;
use std::time::Duration;

use super::invalidation::{Cursor, Invalidations};
use super::memory::MemoryStore;
use super::{Store, StoreError};
use crate::charge::Charge;

/// Interval between two heartbeats of one instance, in a fleet small enough for it.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Heartbeats per second of a whole fleet. A larger fleet lengthens the interval instead of sending
/// more.
const MAX_HEARTBEATS_PER_SECOND: u32 = 200;

/// Returns the interval between two heartbeats of each instance in a fleet of this size: one
/// second, and N/200 seconds in a fleet of N > 200 instances.
///
/// A [`SharedStore`] should remove an instance that has been silent for several of these intervals.
///
/// ```
/// use std::time::Duration;
/// use tidegate::store::heartbeat_interval;
///
/// assert_eq!(heartbeat_interval(3), Duration::from_secs(1));
/// assert_eq!(heartbeat_interval(1_000), Duration::from_secs(5));
/// ```
#[must_use]
pub fn heartbeat_interval(instances: usize) -> Duration {
    let instances = u32::try_from(instances).unwrap_or(u32::MAX);
    HEARTBEAT_INTERVAL
        .max(Duration::from_secs(1).saturating_mul(instances) / MAX_HEARTBEATS_PER_SECOND)
}

/// A [`Store`] that several instances of a service may use at the same time.
///
/// `DenyCache`, `Fallback` and `Fleet` (feature `resilience`) need these operations, and wrappers
/// pass them on to the store inside. A method without a default has none that would
/// be right for every store: a wrong answer to any of these admits too much or denies for too long.
///
/// ```
/// use std::future::Ready;
/// use tidegate::store::invalidation::{Cursor, Invalidations};
/// use tidegate::{Action, Charge, Clock, Decision, MemoryStore};
/// use tidegate::{Outcome, SharedStore, Store, StoreError};
///
/// /// A store that only this process uses.
/// struct Own(MemoryStore);
///
/// # impl Store for Own {
/// #     fn decide(
/// #         &self,
/// #         action: Action,
/// #         charge: &Charge<'_>,
/// #     ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
/// #         self.0.decide(action, charge)
/// #     }
/// #     fn decide_all(
/// #         &self,
/// #         action: Action,
/// #         charges: &[Charge<'_>],
/// #     ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
/// #         self.0.decide_all(action, charges)
/// #     }
/// #     fn clock(&self) -> &dyn Clock {
/// #         self.0.clock()
/// #     }
/// # }
/// impl SharedStore for Own {
///     async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
///         Ok(vec![instance.to_owned()]) // no other instance uses this store
///     }
///
///     fn invalidations(
///         &self,
///         _since: &Cursor,
///     ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
///         None::<Ready<_>> // every refund and reset goes through this store
///     }
/// }
/// ```
pub trait SharedStore: Store {
    /// Records that this instance is alive, and returns the names of the live instances, including
    /// this one. An instance is alive if it has sent a heartbeat within the last few
    /// [intervals](heartbeat_interval).
    fn heartbeat(
        &self,
        instance: &str,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Returns which counts were refunded or reset after this cursor, by any instance.
    ///
    /// A `DenyCache` drops its entries of these counts. An invalidation must be visible to all
    /// instances when the refund or reset returns. `None`, then for every call, means that units
    /// can only be freed through this very store.
    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send>;

    /// Returns a number that changes whenever a different server starts to decide this charge, with
    /// a different clock: decisions from before are stale then. By default it never changes.
    fn epoch_of(&self, _charge: &Charge<'_>) -> u64 {
        0
    }
}

impl<S: SharedStore> SharedStore for Arc<S> {
    fn heartbeat(
        &self,
        instance: &str,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send {
        S::heartbeat(self, instance)
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        S::invalidations(self, since)
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        S::epoch_of(self, charge)
    }
}

/// Memory that this process uses alone: it does not fail, has no other instances, and frees no
/// units except through itself.
impl SharedStore for MemoryStore {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        Ok(vec![instance.to_owned()])
    }

    fn invalidations(
        &self,
        _since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        None::<Ready<_>>
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_fleet_sends_heartbeats_less_often() {
        let millis = |instances| heartbeat_interval(instances).as_millis();
        assert_eq!([0, 1, 200, 1_000, 10_000].map(millis), [1_000, 1_000, 1_000, 5_000, 50_000]);
    }
}
