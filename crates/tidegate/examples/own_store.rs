//! A store of your own, proven by the conformance suite (feature `testing`).
//!
//! ```sh
//! cargo run -p tidegate --example own_store
//! ```
//!
//! This one keeps fixed windows in a map. It could be any place with an atomic read and write: an
//! embedded database, a row in SQL, another server.

use std::collections::HashMap;
use std::error::Error;
use std::future::Ready;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tidegate::testing::conformance_of;
use tidegate::{
    Action, Algorithm, Charge, Clock, Decision, Limiter, Outcome, Quota, Store, StoreError,
    SystemClock,
};

/// Counts of the windows, by policy and key.
struct WindowStore<C> {
    clock: C,
    windows: Mutex<HashMap<(String, String), Window>>,
}

/// Times are microseconds.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    start: u64,
    count: u64,
}

impl<C: Clock + 'static> WindowStore<C> {
    fn new(clock: C) -> Self {
        Self { clock, windows: Mutex::default() }
    }
}

impl Window {
    /// Returns the window at this time: the same, a new one, or, if the clock has stepped back, one
    /// that starts now with the same count.
    fn at(self, quota: &Quota, now: u64) -> Self {
        let length = window_micros(quota);
        if self.start > now {
            Self { start: now, ..self }
        } else if self.start + length <= now {
            Self { start: now - now % length, count: 0 }
        } else {
            self
        }
    }

    fn remaining(self, quota: &Quota) -> u64 {
        quota.limit().saturating_sub(self.count)
    }

    fn fits(self, action: Action, charge: &Charge<'_>) -> bool {
        // A peek of cost 0 asks whether the limit is exceeded already.
        if action == Action::Peek && charge.cost() == 0 {
            return self.count <= charge.quota().limit();
        }
        charge.cost() <= self.remaining(charge.quota())
    }

    /// Applies an action, and returns the decision. `all_fit` is whether all charges of the same
    /// call fit: only then are units taken.
    fn apply(&mut self, action: Action, charge: &Charge<'_>, now: u64, all_fit: bool) -> Decision {
        let (quota, cost) = (charge.quota(), charge.cost());
        let until_end = Duration::from_micros(self.start + window_micros(quota) - now);
        let mut allowed = true;
        match action {
            Action::Acquire | Action::Peek => {
                allowed = self.fits(action, charge);
                self.count += if allowed && all_fit { cost } else { 0 };
            }
            Action::ChargeUpTo => self.count += cost.min(self.remaining(quota)),
            Action::Report => {
                allowed = self.fits(action, charge);
                self.count += cost.min(quota.max_level().saturating_sub(self.count));
            }
            Action::Refund => {
                // Units of an earlier window are gone. A charge without a time is one of Envoy's.
                let charged_at = charge.charged_at().as_micros();
                if charged_at == 0 || charged_at >= self.start {
                    self.count = self.count.saturating_sub(cost);
                }
            }
            Action::Reset => self.count = 0,
            // Of charges with holds, which this store does not have.
            Action::Commit | Action::Release | Action::Renew => {}
        }
        let reset_after = if self.count == 0 { Duration::ZERO } else { until_end };
        let decision = if allowed {
            Decision::allow(quota.limit(), self.remaining(quota))
        } else {
            Decision::deny(quota.limit(), until_end).with_remaining(self.remaining(quota))
        };
        decision.with_reset_after(reset_after)
    }
}

fn window_micros(quota: &Quota) -> u64 {
    u64::try_from(quota.window().as_micros()).unwrap_or(u64::MAX)
}

impl<C: Clock + 'static> WindowStore<C> {
    fn decide_now(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let is_other = |quota: &Quota| {
            quota.algorithm() != Algorithm::FixedWindow || !quota.block_for().is_empty()
        };
        if charges.iter().any(|charge| is_other(charge.quota()) || charge.hold().is_some()) {
            let message = "this store has only fixed-window, without blocks and holds".to_owned();
            return Err(StoreError::Misconfigured(message));
        }
        let now = self.clock.now().as_micros();
        // One lock for the whole call: nothing may happen between the reads and the writes.
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let name = |charge: &Charge<'_>| (charge.policy().to_owned(), charge.key().to_owned());
        let read = |windows: &HashMap<_, Window>, charge: &Charge<'_>| {
            windows.get(&name(charge)).copied().unwrap_or_default()
        };
        let all_fit = charges
            .iter()
            .all(|charge| read(&windows, charge).at(charge.quota(), now).fits(action, charge));
        let decide = |charge: &Charge<'_>| {
            let stored = read(&windows, charge);
            let current = stored.at(charge.quota(), now);
            let mut window = current;
            let decision = window.apply(action, charge, now, all_fit);
            // A call that takes nothing writes nothing: another quota with a longer window may
            // still need the count.
            let is_written = action == Action::Reset
                || (action != Action::Peek
                    && (window.count != current.count || stored.start > now));
            if is_written && window.count == 0 {
                windows.remove(&name(charge));
            } else if is_written {
                windows.insert(name(charge), window);
            }
            decision
        };
        Ok(charges.iter().map(decide).collect())
    }
}

impl<C: Clock + 'static> Store for WindowStore<C> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        let decided = self.decide_now(action, std::slice::from_ref(charge));
        Outcome::<Ready<_>>::Ready(decided.map(|decisions| decisions[0]))
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::<Ready<_>>::Ready(self.decide_now(action, charges))
    }

    fn clock(&self) -> &dyn Clock {
        &self.clock
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    // Every field of every decision must be that of a naive model. A mistake is shown with the
    // shortest sequence of calls that finds it.
    let fixed_windows = [Algorithm::FixedWindow];
    conformance_of(&fixed_windows, 0..500, async |clock| Limiter::new(WindowStore::new(clock)))
        .await;
    println!("500 sequences conform");

    let limiter = Limiter::new(WindowStore::new(SystemClock::new()));
    let quota = Quota::fixed_window(10, Duration::from_secs(3_600))?;
    let decision = limiter.acquire(&Charge::new("user123", &quota)).await?;
    println!("{} of {} left", decision.remaining, decision.limit);
    Ok(())
}
