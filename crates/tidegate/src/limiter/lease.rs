//! [`Lease`]: a charge whose hold this process renews.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;

use super::Limiter;
use crate::charge::{Charge, OwnedCharge};
use crate::clock::Timestamp;
use crate::decision::Decision;
use crate::hold::{Hold, HoldStatus};
use crate::join::join_all;
use crate::store::{Action, Store};

/// Interval of renewals: two may fail within a [lease](crate::Hold::lease).
const RENEWAL_INTERVAL: Duration = Duration::from_secs(3);
/// Interval between two looks whether all units are released.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Number of leases that are renewed together.
const MAX_RENEWALS: usize = 1_000;

/// Charge with a hold, which is renewed until the lease is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    held: Arc<HeldUnits>,
    renewal: Option<Renewal>,
}

#[derive(Debug)]
struct HeldUnits {
    charge: OwnedCharge,
    /// Time until which the units are known to be held (µs on the store's clock).
    until: AtomicU64,
}

impl HeldUnits {
    /// Takes the answer to a call that was sent at this time.
    fn extend(&self, sent_at: Timestamp, decision: &Decision) {
        let is_held = |status| matches!(status, HoldStatus::Held | HoldStatus::Replayed);
        let hold = decision.hold.filter(|hold| is_held(hold.status));
        let until = hold.map(|hold| sent_at.saturating_add(hold.expires_after()));
        self.until.store(until.map_or(0, Timestamp::as_micros), Ordering::Relaxed);
    }
}

/// Place of a lease among those that are renewed.
#[derive(Debug)]
struct Renewal {
    leases: Arc<Leases>,
    number: u64,
}

/// Leases of a limiter, which one task renews.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<LeaseTable>);

#[derive(Debug, Default)]
struct LeaseTable {
    /// By the number of the lease.
    held: HashMap<u64, Arc<HeldUnits>>,
    last_number: u64,
    is_renewing: bool,
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, LeaseTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lease. Returns its number, and whether the task runs already.
    fn insert(&self, held: &Arc<HeldUnits>) -> (u64, bool) {
        let mut table = self.lock();
        table.last_number += 1;
        let number = table.last_number;
        table.held.insert(number, Arc::clone(held));
        (number, std::mem::replace(&mut table.is_renewing, true))
    }

    /// Returns the leases to renew. Without any, the task ends.
    fn to_renew(&self) -> Vec<Arc<HeldUnits>> {
        let mut table = self.lock();
        table.is_renewing = !table.held.is_empty();
        table.held.values().map(Arc::clone).collect()
    }
}

impl Lease {
    /// Creates a lease of a charge that has a hold, without renewals.
    pub(crate) fn new(charge: &Charge<'_>) -> Self {
        let held = HeldUnits { charge: OwnedCharge::of(charge), until: AtomicU64::new(0) };
        Self { held: Arc::new(held), renewal: None }
    }

    pub(crate) fn charge(&self) -> Charge<'_> {
        self.held.charge.charge()
    }

    /// Returns the action that releases its units. A late [`Action::Release`] of an id that is used
    /// again would release another hold.
    pub(crate) fn release_action(&self) -> Action {
        let charge = self.charge();
        let is_lease = charge.hold().is_some_and(Hold::is_lease);
        let is_unit_in_flight = charge.quota().is_concurrency() && charge.cost() == 1;
        if is_lease && is_unit_in_flight { Action::Release } else { Action::Commit }
    }

    /// Takes the decision on a reservation that was sent at this time.
    pub(super) fn extend(&self, sent_at: Timestamp, decision: &Decision) {
        self.held.extend(sent_at, decision);
    }

    /// Returns the time until which the units are known to be held.
    pub(super) fn held_until(&self) -> Timestamp {
        Timestamp::from_micros(self.held.until.load(Ordering::Relaxed))
    }

    /// Takes the lease from a permit that is dropped, which is renewed until its release.
    pub(super) fn take(&mut self) -> Self {
        Self { held: Arc::clone(&self.held), renewal: self.renewal.take() }
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.leases.lock().held.remove(&self.number);
    }
}

impl<S: Store> Limiter<S> {
    /// Renews a lease until it is dropped, in a task of this runtime.
    pub(crate) fn renew(&self, lease: &mut Lease, runtime: &Handle) {
        let (number, is_renewing) = self.leases.insert(&lease.held);
        lease.renewal = Some(Renewal { leases: Arc::clone(&self.leases), number });
        if !is_renewing {
            runtime.spawn(self.clone().renew_leases());
        }
    }

    /// Waits until no request and no permit holds units any more, and their releases are made: for a
    /// process that ends, whose units in flight would otherwise be free only when their leases end.
    pub async fn released(&self) {
        while !self.leases.lock().held.is_empty() {
            self.store().clock().sleep(RELEASE_POLL_INTERVAL).await;
        }
    }

    /// Renews all leases until none is left.
    async fn renew_leases(self) {
        let mut task = RenewalTask(Some(Arc::clone(&self.leases)));
        loop {
            self.store().clock().sleep(RENEWAL_INTERVAL).await;
            let leases = self.leases.to_renew();
            if leases.is_empty() {
                task.0 = None;
                return;
            }
            for leases in leases.chunks(MAX_RENEWALS) {
                let charges: Vec<Charge<'_>> = leases.iter().map(|it| it.charge.charge()).collect();
                let sent_at = self.now();
                // Concurrent calls share script calls.
                let renewals = charges.iter().map(|charge| self.decide(Action::Renew, charge));
                for (held, renewed) in leases.iter().zip(join_all(renewals).await) {
                    match renewed {
                        Ok(decision) => {
                            held.extend(sent_at, &decision);
                            log_lost(&decision);
                        }
                        Err(error) => tracing::debug!(%error, "a lease was not renewed"),
                    }
                }
            }
        }
    }
}

/// Lets the next lease start another task if this one ends with its runtime.
struct RenewalTask(Option<Arc<Leases>>);

impl Drop for RenewalTask {
    fn drop(&mut self) {
        if let Some(leases) = &self.0 {
            leases.lock().is_renewing = false;
        }
    }
}

fn log_lost(decision: &Decision) {
    if decision.hold.is_some_and(|hold| hold.status != HoldStatus::Held) {
        tracing::debug!("a lease has ended before it was released");
    }
}
