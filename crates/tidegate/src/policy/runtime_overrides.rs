//! [`RuntimeOverrides`]: limits that replace those of policies while a program runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ipnet::IpNet;

use super::{Policy, PolicyError, PreparedCharge};
use crate::clock::Timestamp;
use crate::key::Key;
use crate::quota::{Quota, QuotaError};
use crate::store::Action;

/// Limits that replace those of policies while a program runs: of one key, or of all keys of a
/// policy. That of a key comes first, then that of the longest network around it, then that of all
/// keys, then those of the policy itself.
///
/// The set of a [`PolicyLimiter`](crate::PolicyLimiter) may change at any time, and each decision
/// reads it once. An entry needs no removal at its end: every decision compares it with the store's clock.
/// Counts stay when a limit rises or falls.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use tidegate::{Limiter, MemoryStore, OverrideEffect, Policies, Policy, PolicyLimiter, Query};
/// use tidegate::{Quota, RuntimeOverride};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::fixed_window(1, Duration::from_secs(3600))?;
/// let policy = Policy::builder("per-user", quota).key(["header.x-user-id"]).build()?;
/// let limiter =
///     PolicyLimiter::new(Limiter::new(MemoryStore::new()), Policies::new(vec![policy])?);
/// let policy = limiter.policy("per-user")?;
///
/// let quota = policy.overridden_quota("ann", Some(2), None, None)?;
/// let until = Some(limiter.limiter().now().saturating_add(Duration::from_secs(60)));
/// let raised = RuntimeOverride { effect: OverrideEffect::Quota(Arc::new(quota)), until };
/// limiter.overrides().set("per-user", policy.override_key(&["ann"])?, raised);
///
/// let decisions = limiter.acquire(Query::policy("per-user", "ann")).await?;
/// assert_eq!(decisions.binding().map(|entry| entry.decision().limit), Some(2));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct RuntimeOverrides {
    /// Number of entries: without any, a decision reads nothing else.
    count: AtomicUsize,
    /// Changed in place, because a change of one entry must not copy 100,000 others. Locked for
    /// writing only while one entry changes, so decisions do not wait for an update of all.
    policies: RwLock<HashMap<String, PolicyOverrides>>,
}

/// Replacement of the limit of a key or of a policy, with its end.
#[derive(Debug, Clone)]
pub struct RuntimeOverride {
    /// Replacement of the limit.
    pub effect: OverrideEffect,
    /// Time by the store's clock at which it ends; `None` for no end.
    pub until: Option<Timestamp>,
}

/// Replacement of a limit.
#[derive(Debug, Clone)]
pub enum OverrideEffect {
    /// Other numbers for the quota that the request has without the override.
    Quota(Arc<OverriddenQuota>),
    /// The policy does not apply, and nothing is counted.
    Unlimited,
    /// Every request is denied.
    Block,
}

/// Numbers that replace those of a policy's quotas: the rest, such as the anchor of a calendar, is
/// that of the quota which the request selects. [`Policy::overridden_quota`] validates them.
#[derive(Debug)]
pub struct OverriddenQuota {
    limit: Option<u64>,
    window: Option<Duration>,
    burst: Option<u64>,
    /// The policy's own quota with these numbers, which most requests have.
    of_policy: Arc<Quota>,
}

/// Key of an override, in the form that requests have: [`Policy::override_key`] validates it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OverrideKey(Target);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Target {
    All,
    Key(String),
    Network(IpNet),
}

#[derive(Debug, Default)]
struct PolicyOverrides {
    all: Option<RuntimeOverride>,
    by_key: HashMap<String, RuntimeOverride>,
    /// By length of the prefix, the longest first.
    networks: BTreeMap<Reverse<u8>, HashMap<IpNet, RuntimeOverride>>,
}

impl OverrideKey {
    /// Key of an override of all keys of a policy.
    pub const ALL: Self = Self(Target::All);
    /// Text of [`ALL`](Self::ALL).
    pub const ALL_TEXT: &'static str = "*";
}

impl std::fmt::Display for OverrideKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Target::All => f.write_str(Self::ALL_TEXT),
            Target::Key(key) => f.write_str(key),
            Target::Network(network) => write!(f, "{network}"),
        }
    }
}

impl RuntimeOverride {
    fn is_active(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }

    /// Returns the time until its end; zero without an end, as of a denial without a next try.
    pub(super) fn wait(&self, now: Timestamp) -> Duration {
        self.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    /// Creates the acquire of a policy for a key; `None` if it is not limited.
    pub(super) fn charge<'a>(
        &self,
        policy: &'a Policy,
        key: &'a str,
        cost: u64,
        now: Timestamp,
    ) -> Option<PreparedCharge<'a>> {
        match &self.effect {
            OverrideEffect::Quota(numbers) => {
                let quota = numbers.applied_to(policy.quota_for(key), policy);
                Some(PreparedCharge::of_policy(policy, key, quota, cost))
            }
            OverrideEffect::Unlimited => None,
            OverrideEffect::Block => {
                let (quota, wait) = (policy.quota_for(key), self.wait(now));
                Some(PreparedCharge::blocked(policy, key, quota, wait))
            }
        }
    }
}

impl OverriddenQuota {
    /// Returns a quota of the policy with these numbers.
    #[must_use]
    pub fn applied_to(&self, quota: &Quota, policy: &Policy) -> Arc<Quota> {
        if std::ptr::eq(quota, policy.quota()) {
            return Arc::clone(&self.of_policy);
        }
        let changed = with_numbers(quota, self.limit, self.window, self.burst);
        changed.map_or_else(|_| Arc::clone(&self.of_policy), Arc::new)
    }
}

impl PolicyOverrides {
    fn len(&self) -> usize {
        let networks: usize = self.networks.values().map(HashMap::len).sum();
        usize::from(self.all.is_some()) + self.by_key.len() + networks
    }

    /// Iterates over the entries for a key, in the order of their precedence, each with the network
    /// or all keys that it is for; `None` for the key itself.
    fn entries_for(
        &self,
        key: &str,
    ) -> impl Iterator<Item = (Option<OverrideKey>, &RuntimeOverride)> {
        let of_networks = self.networks.iter().filter_map(move |(Reverse(length), networks)| {
            let address = key.split_once('/').map_or(key, |(address, _)| address);
            let address = address.parse::<IpAddr>().ok()?.to_canonical();
            let network = IpNet::new(address, *length).ok()?.trunc();
            Some((Some(OverrideKey(Target::Network(network))), networks.get(&network)?))
        });
        let of_key = self.by_key.get(key).map(|entry| (None, entry));
        let of_all = self.all.iter().map(|entry| (Some(OverrideKey::ALL), entry));
        of_key.into_iter().chain(of_networks).chain(of_all)
    }

    fn set(&mut self, key: OverrideKey, entry: RuntimeOverride) {
        match key.0 {
            Target::All => self.all = Some(entry),
            Target::Key(key) => drop(self.by_key.insert(key, entry)),
            Target::Network(network) => {
                let networks = self.networks.entry(Reverse(network.prefix_len())).or_default();
                networks.insert(network, entry);
            }
        }
    }

    fn remove(&mut self, key: &OverrideKey) {
        match &key.0 {
            Target::All => self.all = None,
            Target::Key(key) => drop(self.by_key.remove(key)),
            Target::Network(network) => {
                let length = Reverse(network.prefix_len());
                if let Some(networks) = self.networks.get_mut(&length) {
                    networks.remove(network);
                    if networks.is_empty() {
                        self.networks.remove(&length);
                    }
                }
            }
        }
    }
}

impl RuntimeOverrides {
    /// Sets the override of a key.
    pub fn set(&self, policy: &str, key: OverrideKey, entry: RuntimeOverride) {
        self.change(policy, |overrides| overrides.set(key, entry));
    }

    /// Removes the override of a key.
    pub fn remove(&self, policy: &str, key: &OverrideKey) {
        self.change(policy, |overrides| overrides.remove(key));
    }

    fn change(&self, policy: &str, change: impl FnOnce(&mut PolicyOverrides)) {
        let mut policies = self.policies.write().unwrap_or_else(PoisonError::into_inner);
        let overrides = policies.entry(policy.to_owned()).or_default();
        let before = overrides.len();
        change(overrides);
        let after = overrides.len();
        if after == 0 {
            policies.remove(policy);
        }
        let count = self.count.load(Ordering::Relaxed) + after - before;
        self.count.store(count, Ordering::Release);
    }

    /// Returns whether there is no entry.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Returns the override that applies to a key at this time.
    #[must_use]
    pub fn find(&self, policy: &str, key: &str, now: Timestamp) -> Option<RuntimeOverride> {
        self.find_with_key(policy, key, now).map(|(_, entry)| entry)
    }

    /// Returns the override that applies to a key at this time, with the network or all keys that
    /// it is for; `None` for the key itself.
    #[must_use]
    pub fn find_with_key(
        &self,
        policy: &str,
        key: &str,
        now: Timestamp,
    ) -> Option<(Option<OverrideKey>, RuntimeOverride)> {
        self.find_where(policy, key, |entry| entry.is_active(now))
    }

    fn find_where(
        &self,
        policy: &str,
        key: &str,
        is_wanted: impl Fn(&RuntimeOverride) -> bool,
    ) -> Option<(Option<OverrideKey>, RuntimeOverride)> {
        if self.is_empty() {
            return None;
        }
        let policies = self.policies.read().unwrap_or_else(PoisonError::into_inner);
        let mut entries = policies.get(policy)?.entries_for(key);
        let (of, entry) = entries.find(|(_, entry)| is_wanted(entry))?;
        Some((of, entry.clone()))
    }

    /// Returns a larger quota than this one, with the same windows, by which units of a key may have
    /// been charged.
    pub(super) fn larger_than(
        &self,
        quota: &Quota,
        policy: &Policy,
        key: &str,
    ) -> Option<Arc<Quota>> {
        if self.is_empty() {
            return None;
        }
        let policies = self.policies.read().unwrap_or_else(PoisonError::into_inner);
        let entries = policies.get(policy.name())?.entries_for(key);
        let quotas = entries.filter_map(|(_, entry)| match &entry.effect {
            OverrideEffect::Quota(numbers) => Some(numbers.applied_to(quota, policy)),
            OverrideEffect::Unlimited | OverrideEffect::Block => None,
        });
        let larger = quotas.filter(|it| it.burst() > quota.burst() && it.has_windows_of(quota));
        larger.max_by_key(|quota| quota.burst())
    }
}

/// Overrides as one request sees them.
#[derive(Clone, Copy)]
pub(super) struct OverridesNow<'r> {
    overrides: &'r RuntimeOverrides,
    now: Timestamp,
    /// Whether the action decides: a report, a refund and a commit count, whatever is blocked.
    decides: bool,
}

impl<'r> OverridesNow<'r> {
    /// Returns `None` if there are no overrides.
    #[inline]
    pub(super) fn new(
        overrides: &'r RuntimeOverrides,
        action: Action,
        now: Timestamp,
    ) -> Option<Self> {
        if overrides.is_empty() {
            return None;
        }
        let decides = matches!(action, Action::Acquire | Action::Peek);
        Some(Self { overrides, now, decides })
    }

    pub(super) fn now(&self) -> Timestamp {
        self.now
    }

    pub(super) fn find(&self, policy: &str, key: &str) -> Option<RuntimeOverride> {
        let is_wanted = |entry: &RuntimeOverride| {
            let counts = matches!(entry.effect, OverrideEffect::Quota(_));
            (self.decides || counts) && entry.is_active(self.now)
        };
        self.overrides.find_where(policy, key, is_wanted).map(|(_, entry)| entry)
    }
}

impl Policy {
    /// Returns the key of an override that is set while the program runs, validated and normalized
    /// like [those of the policy](crate::PolicyBuilder::override_for). The only value `*` stands for
    /// all keys, and several values may be joined by `|`.
    pub fn override_key(&self, values: &[impl AsRef<str>]) -> Result<OverrideKey, PolicyError> {
        if values.len() == 1 && values[0].as_ref() == OverrideKey::ALL_TEXT {
            return Ok(OverrideKey::ALL);
        }
        let (key, network) = match values {
            // As operators see a key of several values.
            [joined] if self.key.len() > 1 => self.normal_override(&split(joined.as_ref()))?,
            values => self.normal_override(values)?,
        };
        if let Err(error) = Key::new(&key) {
            return Err(PolicyError::Override { key, reason: error.to_string() });
        }
        Ok(OverrideKey(match network {
            Some(network) if !self.is_single(&network) => Target::Network(network),
            _ => Target::Key(key),
        }))
    }

    /// Returns other numbers for the quotas of a key. Those that are `None` stay as they are without
    /// the override; a burst that equals the limit follows it.
    ///
    /// # Errors
    ///
    /// A number is out of range, or the cost of a request would never be admitted.
    pub fn overridden_quota(
        &self,
        key: &str,
        limit: Option<u64>,
        window: Option<Duration>,
        burst: Option<u64>,
    ) -> Result<OverriddenQuota, PolicyError> {
        let changed = |quota: &Quota| {
            let quota = with_numbers(quota, limit, window, burst).map_err(PolicyError::Quota)?;
            let (cost, most) = (self.default_cost(), quota.burst() * self.lowest_lane() / 100);
            if cost > most {
                return Err(PolicyError::Cost { cost, most });
            }
            Ok(quota)
        };
        let by_value = self.limits().into_iter().flat_map(|(_, quotas)| quotas.values());
        by_value.chain([self.quota_for(key)]).try_for_each(|quota| changed(quota).map(drop))?;
        let of_policy = Arc::new(changed(self.quota())?);
        Ok(OverriddenQuota { limit, window, burst, of_policy })
    }
}

/// Splits a key into its values; the reverse of [`join`](super::join).
fn split(key: &str) -> Vec<String> {
    let mut values = vec![String::new()];
    let mut characters = key.chars();
    while let Some(character) = characters.next() {
        match (character, values.last_mut()) {
            ('|', _) => values.push(String::new()),
            ('\\', Some(value)) => value.extend(characters.next()),
            (_, Some(value)) => value.push(character),
            (_, None) => {}
        }
    }
    values
}

fn with_numbers(
    quota: &Quota,
    limit: Option<u64>,
    window: Option<Duration>,
    burst: Option<u64>,
) -> Result<Quota, QuotaError> {
    let limit = limit.unwrap_or_else(|| quota.limit());
    let own_burst = Some(quota.burst()).filter(|burst| *burst != quota.limit());
    let algorithm = quota.algorithm();
    let mut new = match (window, quota.calendar()) {
        (None, _) if quota.is_concurrency() => Quota::concurrency(limit)?,
        (None, Some(calendar)) => Quota::new_in_calendar(algorithm, limit, calendar.clone())?,
        (window, _) => Quota::new(algorithm, limit, window.unwrap_or_else(|| quota.window()))?,
    };
    if let Some(burst) = burst.or(own_burst) {
        new = new.with_burst(burst)?;
    }
    // The default of a raised limit may be another, and a key has its count in one encoding.
    if new.encoding() != quota.encoding() {
        new = new.with_encoding(quota.encoding())?;
    }
    if quota.count_denied() {
        new = new.with_count_denied(true)?;
    }
    if !quota.block_for().is_empty() {
        new = new.with_block_for(quota.block_for())?;
    }
    Ok(new.with_holds(*quota.holds()))
}

#[cfg(test)]
mod tests;
