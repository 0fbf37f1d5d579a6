//! [`AnyStore`]: memory or Redis, as the URL of a limiter says.

use std::future::Future;
use std::slice::from_ref;
use std::sync::Arc;

use futures_util::future::Either;
use tidegate::{
    Action, BlockingStore, Charge, Clock, Decision, MemoryStore, Outcome, ResilientRedis, Store,
    StoreError,
};

use crate::process::Driver;

#[expect(clippy::large_enum_variant, reason = "a process has few of them")]
pub(crate) enum AnyStore {
    Memory(MemoryStore),
    Redis { store: ResilientRedis, driver: Arc<Driver> },
}

impl Store for AnyStore {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        match self {
            Self::Memory(store) => {
                let decided = store.decide(action, charge).map(move |decided| {
                    let fall_back = |error| store.fall_back(action, from_ref(charge), error);
                    decided.or_else(|error| fall_back(error).map(|decisions| decisions[0]))
                });
                either(decided, Either::Left)
            }
            Self::Redis { store, .. } => either(store.decide(action, charge), Either::Right),
        }
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        match self {
            Self::Memory(store) => {
                let decided = store.decide_all(action, charges).map(move |decided| {
                    decided.or_else(|error| store.fall_back(action, charges, error))
                });
                either(decided, Either::Left)
            }
            Self::Redis { store, .. } => either(store.decide_all(action, charges), Either::Right),
        }
    }

    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        match self {
            Self::Memory(store) => store.fall_back(action, charges, error),
            Self::Redis { store, .. } => store.fall_back(action, charges, error),
        }
    }

    fn clock(&self) -> &dyn Clock {
        match self {
            Self::Memory(store) => store.clock(),
            Self::Redis { store, .. } => store.clock(),
        }
    }
}

#[inline]
fn either<F: Future, E: Future<Output = F::Output>>(
    outcome: Outcome<F>,
    side: impl FnOnce(F) -> E,
) -> Outcome<E> {
    match outcome {
        Outcome::Ready(answer) => Outcome::Ready(answer),
        Outcome::Pending(future) => Outcome::Pending(side(future)),
    }
}

impl BlockingStore for AnyStore {
    fn block_on<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        match self {
            Self::Memory(store) => store.block_on(call),
            Self::Redis { driver, .. } => driver.block_on(call),
        }
    }
}
