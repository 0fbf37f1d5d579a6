//! Denials by quotas that count denied requests: the cache counts them, and the store records them
//! in bulk.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::sleep;

use super::DenyCacheCore;
use super::key::EntryKey;
use super::table::CacheQuery;
use crate::charge::{Charge, OwnedCharge};
use crate::store::{Action, SharedStore};

/// Time for which a denial that counts is cached. The denials of this time are then recorded in the
/// store.
pub(super) const COUNTED_DENIAL_TTL: Duration = Duration::from_millis(100);

/// Units of cached denials that the store must record before its next decision, each with the
/// position of its charge.
pub(super) type Unrecorded = Vec<(usize, u64)>;

impl<S: SharedStore> DenyCacheCore<S> {
    /// Counts a cached denial of a quota that counts denials. The first one starts the timer that
    /// records them.
    pub(super) fn count_denial(self: &Arc<Self>, action: Action, query: &CacheQuery<'_>) {
        if action != Action::Acquire
            || !query.charge.quota().count_denied()
            || !self.table.count_denial(query)
        {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        let (inner, key, owned) = (Arc::downgrade(self), query.key, OwnedCharge::of(query.charge));
        runtime.spawn(async move {
            sleep(COUNTED_DENIAL_TTL).await;
            let Some(inner) = inner.upgrade() else { return };
            let units = inner.table.take_unrecorded(key);
            inner.record(&owned.charge(), units).await;
        });
    }

    /// Takes the units that the store must record before it decides these charges.
    pub(super) fn take_unrecorded(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        keys: &[EntryKey],
    ) -> Unrecorded {
        let counts_denied =
            |charge: &Charge<'_>| action == Action::Acquire && charge.quota().count_denied();
        let counted =
            charges.iter().zip(keys).enumerate().filter(|(_, (charge, _))| counts_denied(charge));
        counted
            .map(|(at, (_, key))| (at, self.table.take_unrecorded(*key)))
            .filter(|(_, units)| *units > 0)
            .collect()
    }

    /// Records the units of cached denials. More units than the limit have no effect on a full log.
    async fn record(&self, charge: &Charge<'_>, units: u64) {
        let charge = charge.with_cost(units.min(charge.quota().limit()));
        if units > 0
            && let Err(error) = self.store.decide(Action::Report, &charge).await
        {
            tracing::debug!(%error, units, "recording denials failed");
        }
    }

    /// Records the units of several charges. The future is boxed because it is rarely needed.
    pub(super) fn record_all<'a>(
        &'a self,
        charges: &'a [Charge<'a>],
        unrecorded: Unrecorded,
    ) -> Option<Pin<Box<impl Future<Output = ()> + use<'a, S>>>> {
        (!unrecorded.is_empty()).then(|| {
            Box::pin(async move {
                for (at, units) in unrecorded {
                    self.record(&charges[at], units).await;
                }
            })
        })
    }
}
