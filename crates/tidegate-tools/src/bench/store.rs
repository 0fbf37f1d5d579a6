//! [`StoreTarget`]: a store in this process, or Redis.

use tidegate::{Charge, Error, Limiter, Quota, Store, StoreError};

use super::target::{Answer, LoadTarget, RequestError, TIMEOUT};

/// Limiter on a store, with one quota for all keys.
#[derive(Debug)]
pub(crate) struct StoreTarget<S> {
    limiter: Limiter<S>,
    quota: Quota,
    cost: u64,
}

impl<S: Store> StoreTarget<S> {
    pub(crate) fn new(store: S, quota: Quota, cost: u64) -> Self {
        Self { limiter: Limiter::new(store), quota, cost }
    }
}

impl<S: Store> LoadTarget for StoreTarget<S> {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        let charge = Charge::new(key, &self.quota).with_cost(self.cost);
        match self.limiter.acquire(&charge).await {
            Ok(decision) if decision.allowed => Ok(Answer::Allowed),
            Ok(_) => Ok(Answer::Denied),
            Err(error) => Err(RequestError::new(kind(&error), error)),
        }
    }
}

fn kind(error: &Error) -> &'static str {
    let Error::Store(error) = error else { return "invalid" };
    match error {
        StoreError::AnswerLost(reason) => kind(&Error::Store(StoreError::clone(reason))),
        StoreError::Full { .. } | StoreError::OutOfMemory(_) => "full",
        StoreError::Timeout(_) => TIMEOUT,
        StoreError::Unreachable(_) => "unreachable",
        StoreError::Unreadable(_) => "unreadable",
        StoreError::NotPermitted(_) => "permission",
        StoreError::Open(_) => "circuit-open",
        StoreError::Misconfigured(_) => "misconfigured",
        _ => "refused",
    }
}
