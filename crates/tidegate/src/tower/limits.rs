//! The gates over a [`Limiter`]: one quota, or policies.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;

use super::attributes::{HttpAttributes, Peer};
use super::gate::{Admission, Gate, Line};
use crate::charge::Charge;
use crate::client_ip::ClientIp;
use crate::clock::Timestamp;
use crate::limiter::{Error, Limiter};
use crate::policy::{Attributes as _, Mode, OnStoreFailure, Policies, Selected};
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Store};

type KeyOf = dyn for<'a> Fn(&'a Parts) -> Option<Cow<'a, str>> + Send + Sync;
type CostOf = dyn Fn(&Parts) -> u64 + Send + Sync;
type PeerOf = dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync;

/// One quota for every request that has a key.
pub struct QuotaGate<S = MemoryStore> {
    limiter: Limiter<S>,
    quota: Quota,
    pub(super) policy: Option<Arc<str>>,
    pub(super) key: KeyBy,
    pub(super) on_store_failure: OnStoreFailure,
    reader: Reader,
}

/// The policies that apply to a request, all or nothing.
pub struct PolicyGate<S = MemoryStore> {
    limiter: Limiter<S>,
    policies: Arc<Policies>,
    reader: Reader,
}

/// Whose count it is.
#[derive(Clone)]
pub(super) enum KeyBy {
    /// All requests together.
    All,
    Attribute(Arc<str>),
    Closure(Arc<KeyOf>),
}

/// How a request is read.
#[derive(Clone)]
pub struct Reader {
    pub(super) peer: Arc<PeerOf>,
    pub(super) client_ip: Arc<ClientIp>,
    pub(super) cost: Option<Arc<CostOf>>,
}

/// Gates that read requests the same way.
pub trait Reads: Gate {
    /// How they do.
    fn reader(&mut self) -> &mut Reader;
}

impl Default for Reader {
    fn default() -> Self {
        let peer = |head: &Parts| head.extensions.get::<Peer>().map(|Peer(address)| *address);
        Self { peer: Arc::new(peer), client_ip: Arc::default(), cost: None }
    }
}

impl Reader {
    fn attributes<'a>(&'a self, head: &'a Parts) -> HttpAttributes<'a> {
        HttpAttributes::new(head, (self.peer)(head), &self.client_ip)
    }

    fn cost(&self, head: &Parts) -> Option<u64> {
        self.cost.as_ref().map(|cost| cost(head))
    }
}

impl<S: Store> QuotaGate<S> {
    pub(super) fn new(limiter: Limiter<S>, quota: Quota) -> Self {
        let on_store_failure = OnStoreFailure::default();
        Self {
            limiter,
            quota,
            policy: None,
            key: KeyBy::All,
            on_store_failure,
            reader: Reader::default(),
        }
    }

    /// `None`: the request has no key, and so no limit.
    fn key_of<'a>(&self, head: &'a Parts) -> Result<Option<Cow<'a, str>>, Error> {
        let key = match &self.key {
            KeyBy::All => Some(Cow::Borrowed("all")),
            KeyBy::Closure(key) => key(head),
            KeyBy::Attribute(name) => {
                let attributes = self.reader.attributes(head);
                let key = attributes.get(name).map(|key| Cow::Owned(key.into_owned()));
                known(&attributes)?;
                key
            }
        };
        Ok(key.filter(|key| !key.is_empty()))
    }
}

impl<S: Store> PolicyGate<S> {
    pub(super) fn new(limiter: Limiter<S>, policies: Arc<Policies>) -> Self {
        Self { limiter, policies, reader: Reader::default() }
    }
}

/// To let a request pass because nobody knows where it comes from would be a limit that is none.
fn known(attributes: &HttpAttributes<'_>) -> Result<(), Error> {
    if attributes.lacked_peer() { Err(Error::UnknownPeer) } else { Ok(()) }
}

impl<S: Store> Gate for QuotaGate<S> {
    async fn admit(&self, head: &Parts) -> Result<Admission, Error> {
        let Some(key) = self.key_of(head)? else { return Ok(Admission::unlimited()) };
        let cost = self.reader.cost(head).unwrap_or(1);
        if cost == 0 {
            return Ok(Admission::unlimited());
        }
        let charge = Charge::new(&key, &self.quota)
            .with_cost(cost)
            .with_on_store_failure(self.on_store_failure);
        let charge = self.policy.as_deref().map_or(charge, |policy| charge.with_policy(policy));
        let asked = now(&self.limiter);
        let decision = self.limiter.acquire(&charge).await?;
        Ok(Admission::new(asked, vec![Line::new(&charge, decision)]))
    }

    async fn refund(&self, admission: &Admission) {
        refund(&self.limiter, admission).await;
    }

    async fn sleep(&self, delay: Duration) {
        self.limiter.store().clock().sleep(delay).await;
    }
}

impl<S: Store> Gate for PolicyGate<S> {
    /// What is enforced is all or nothing; what is in shadow mode is asked one by one, and spends
    /// only if the request passes.
    async fn admit(&self, head: &Parts) -> Result<Admission, Error> {
        let cost = self.reader.cost(head);
        if cost == Some(0) {
            return Ok(Admission::unlimited());
        }
        let selection = {
            let attributes = self.reader.attributes(head);
            let selection = self.policies.select(&attributes, cost)?;
            known(&attributes)?;
            selection
        };
        if let Some(policy) = selection.key_missing_for {
            return Ok(Admission::new(now(&self.limiter), vec![Line::without_key(policy)]));
        }
        let asked = now(&self.limiter);
        let is_shadow = |selected: &Selected<'_>| selected.policy().mode() == Mode::Shadow;
        let (shadow, enforced): (Vec<_>, Vec<_>) =
            selection.charges.into_iter().partition(is_shadow);
        let decisions = match enforced.as_slice() {
            [] => Vec::new(),
            [one] => vec![self.limiter.acquire(&one.charge()).await?],
            several => {
                let charges: Vec<Charge<'_>> = several.iter().map(Selected::charge).collect();
                self.limiter.acquire_all(&charges).await?
            }
        };
        let passes = decisions.iter().all(|decision| decision.allowed);
        let decided = enforced.into_iter().zip(decisions);
        let mut lines: Vec<Line> =
            decided.map(|(selected, decision)| Line::of_policy(selected, decision)).collect();
        for selected in shadow {
            let action = if passes { Action::Acquire } else { Action::Peek };
            // What is only looked at must not fail a request.
            if let Ok(decision) = self.limiter.decide(action, &selected.charge()).await {
                lines.push(Line::of_policy(selected, decision));
            }
        }
        Ok(Admission::new(asked, lines))
    }

    async fn refund(&self, admission: &Admission) {
        refund(&self.limiter, admission).await;
    }

    async fn sleep(&self, delay: Duration) {
        self.limiter.store().clock().sleep(delay).await;
    }
}

fn now<S: Store>(limiter: &Limiter<S>) -> Timestamp {
    limiter.store().clock().now()
}

async fn refund<S: Store>(limiter: &Limiter<S>, admission: &Admission) {
    let charges: Vec<Charge<'_>> = admission.spent(now(limiter)).collect();
    if let Err(error) = limiter.decide_all(Action::Refund, &charges).await {
        tracing::warn!(%error, "what a request had taken could not be given back");
    }
}

impl<S: Store> Reads for QuotaGate<S> {
    fn reader(&mut self) -> &mut Reader {
        &mut self.reader
    }
}

impl<S: Store> Reads for PolicyGate<S> {
    fn reader(&mut self) -> &mut Reader {
        &mut self.reader
    }
}

// By hand: a derive would ask for a store that can be cloned.
impl<S> Clone for QuotaGate<S> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            quota: self.quota.clone(),
            policy: self.policy.clone(),
            key: self.key.clone(),
            on_store_failure: self.on_store_failure,
            reader: self.reader.clone(),
        }
    }
}

impl<S> Clone for PolicyGate<S> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            policies: Arc::clone(&self.policies),
            reader: self.reader.clone(),
        }
    }
}
