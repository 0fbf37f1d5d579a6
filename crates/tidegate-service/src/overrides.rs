//! [`Overrides`]: limits that operators change while the service runs. On Redis all instances that
//! share it have them, and in memory this process.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidegate::store::redis::{OverrideChange, OverrideRecord, OverrideValue, OverridesUpdate};
use tidegate::{
    OverrideEffect, OverrideKey, Policies, Policy, PolicyLimiter, QueryError, RuntimeOverride,
    Store as _, StoreError,
};
use tidegate_api::admin::{
    OverriddenLimits, OverrideAuthor, OverrideBody, OverrideMode, OverrideScope, SetOverride,
    StoredOverride,
};
use tidegate_config::duration;

use crate::backend::Backend;
use crate::metrics::{MetricsSection, write_numbers};
use crate::observer::DecisionObserver;

/// Maximum number of overrides.
const MAX_OVERRIDES: usize = 100_000;
/// Number of changes that the memory of this process keeps for the audit.
const MAX_CHANGES: usize = 10_000;
const MAX_REASON_CHARS: usize = 500;
const MAX_WINDOW_BYTES: usize = 64;
const MIN_TIME: Duration = Duration::from_secs(1);
const MAX_TIME: Duration = Duration::from_secs(366 * 86_400);
/// Text of an override without an end.
const NEVER: &str = "never";
/// Interval at which the overrides that have ended are dropped.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the overrides are kept from expiring in Redis.
const EXTEND_INTERVAL: Duration = Duration::from_secs(3_600);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Number of overrides that have ended, and that are deleted with one change.
const MAX_ENDED: usize = 100;

type ServiceLimiter = PolicyLimiter<Arc<Backend>, Arc<DecisionObserver>>;

/// Overrides of this instance, and their changes.
pub struct Overrides {
    backend: Arc<Backend>,
    table: Mutex<Table>,
    /// Updates of two tasks would be applied in any order.
    updating: tokio::sync::Mutex<()>,
    /// Number of overrides that a Redis without them has lost.
    lost: AtomicU64,
}

#[derive(Default)]
struct Table {
    /// Limiter of the active configuration.
    limiter: Option<ServiceLimiter>,
    /// Version of the entries in Redis.
    version: String,
    updated_at: Option<Instant>,
    entries: BTreeMap<OverrideName, Entry>,
    ended: Vec<String>,
    /// Changes in memory, the latest last.
    changes: VecDeque<OverrideRecord>,
}

/// Policy and key; as a JSON array it is the name in Redis.
type OverrideName = (String, String);

#[derive(Debug, Clone)]
struct Entry {
    value: OverrideValue,
    stored: StoredOverride,
}

/// Reason why an override is not changed.
#[derive(Debug, thiserror::Error)]
pub enum OverrideError {
    #[error(transparent)]
    Query(#[from] QueryError),
    #[error("{0}")]
    Invalid(String),
    #[error("there is no override of this key")]
    NotFound,
    #[error("{0}: the change may have been made nevertheless; list the overrides")]
    Unanswered(StoreError),
    #[error("there are {MAX_OVERRIDES} overrides already: remove some, or use `*`")]
    Full,
}

impl From<StoreError> for OverrideError {
    fn from(error: StoreError) -> Self {
        Self::Query(QueryError::Store(error))
    }
}

fn invalid(reason: impl Into<String>) -> OverrideError {
    OverrideError::Invalid(reason.into())
}

fn name_of(text: &str) -> Option<OverrideName> {
    serde_json::from_str(text).ok()
}

fn text_of(name: &OverrideName) -> String {
    serde_json::to_string(name).unwrap_or_default()
}

impl Entry {
    fn new(value: OverrideValue) -> Option<Self> {
        let stored = serde_json::from_str(&value.text).ok()?;
        Some(Self { value, stored })
    }

    /// Returns the override as the policies apply it, or why it has no effect.
    fn resolve(
        &self,
        policies: &Policies,
        (policy, key): &OverrideName,
    ) -> Result<(OverrideKey, RuntimeOverride), String> {
        let Some(policy) = policies.get(policy) else {
            return Err("the configuration has no such policy".to_owned());
        };
        let (key, effect) = resolve(policy, std::slice::from_ref(key), &self.stored.limits)?;
        Ok((key, RuntimeOverride { effect, until: self.value.until }))
    }
}

/// Validates an override like those of the configuration.
fn resolve(
    policy: &Policy,
    values: &[String],
    limits: &OverriddenLimits,
) -> Result<(OverrideKey, OverrideEffect), String> {
    let key = policy.override_key(values).map_err(|error| error.to_string())?;
    let OverriddenLimits { limit, window, burst, mode } = limits;
    let has_numbers = limit.is_some() || window.is_some() || burst.is_some();
    let effect = match mode {
        Some(_) if has_numbers => {
            return Err("an override has a mode or numbers: send one of both".to_owned());
        }
        Some(OverrideMode::Unlimited) => OverrideEffect::Unlimited,
        Some(OverrideMode::Block) => OverrideEffect::Block,
        None if !has_numbers => {
            return Err("send a limit, a window, a burst, or the mode unlimited or block".into());
        }
        None => {
            if window.as_ref().is_some_and(|text| text.len() > MAX_WINDOW_BYTES) {
                return Err("window: the text is too long".to_owned());
            }
            let window = window.as_deref().map(duration::parse).transpose();
            let window = window.map_err(|error| {
                format!("window: {error}; a calendar is set by the overrides of the file")
            })?;
            let quota = policy.overridden_quota(&key.to_string(), *limit, window, *burst);
            OverrideEffect::Quota(Arc::new(quota.map_err(|error| error.to_string())?))
        }
    };
    Ok((key, effect))
}

/// Parses the time until the end of an override; `None` for no end.
fn time_until_end(text: &str) -> Result<Option<Duration>, OverrideError> {
    if text == NEVER {
        return Ok(None);
    }
    let time = duration::parse(text).map_err(|error| invalid(format!("expires_in: {error}")))?;
    if !(MIN_TIME..=MAX_TIME).contains(&time) {
        return Err(invalid("expires_in is out of range: from 1s to 366d, or never"));
    }
    Ok(Some(time))
}

fn check_reason(reason: &str) -> Result<(), OverrideError> {
    if reason.chars().count() > MAX_REASON_CHARS {
        return Err(invalid(format!("the reason has more than {MAX_REASON_CHARS} characters")));
    }
    Ok(())
}

impl Table {
    /// Sets an override, or removes it.
    fn apply(&mut self, name: OverrideName, value: Option<OverrideValue>) {
        let entry = value.and_then(Entry::new);
        if let Some(limiter) = &self.limiter {
            let (policies, overrides) = (limiter.policies(), limiter.overrides());
            match entry.as_ref().map(|entry| entry.resolve(policies, &name)) {
                Some(Ok((key, found))) => overrides.set(&name.0, key, found),
                Some(Err(_)) | None => remove(limiter, &name),
            }
        }
        match entry {
            Some(entry) => drop(self.entries.insert(name, entry)),
            None => drop(self.entries.remove(&name)),
        }
    }

    /// Returns the number of overrides that are in force and have no equal among these.
    fn missing_in(&self, values: &HashMap<String, OverrideValue>) -> usize {
        let is_missing = |(name, entry): &(&OverrideName, &Entry)| {
            values.get(&text_of(name)) != Some(&entry.value)
        };
        self.entries.iter().filter(is_missing).count()
    }

    /// Replaces all overrides.
    fn replace(&mut self, values: HashMap<String, OverrideValue>) {
        let known = |name: &OverrideName| values.contains_key(&text_of(name));
        let gone: Vec<_> = self.entries.keys().filter(|name| !known(name)).cloned().collect();
        for name in gone {
            self.apply(name, None);
        }
        for (text, value) in values {
            if let Some(name) = name_of(&text) {
                self.apply(name, Some(value));
            }
        }
    }

    /// Drops the overrides that have ended, which decisions ignore already.
    fn sweep(&mut self, now: tidegate::Timestamp) {
        let has_ended = |entry: &Entry| entry.value.until.is_some_and(|until| until <= now);
        let ended = self.entries.iter().filter(|(_, entry)| has_ended(entry));
        let ended: Vec<_> = ended.map(|(name, _)| name.clone()).collect();
        for name in ended {
            self.ended.push(text_of(&name));
            self.apply(name, None);
        }
        let excess = self.ended.len().saturating_sub(MAX_OVERRIDES);
        self.ended.drain(..excess);
    }
}

/// Ends an override in the limiter. That of a removed policy is not there.
fn remove(limiter: &ServiceLimiter, (policy, key): &OverrideName) {
    let policy = limiter.policies().get(policy);
    if let Some((policy, Ok(key))) = policy.map(|it| (it, it.override_key(&[key]))) {
        limiter.overrides().remove(policy.name(), &key);
    }
}

impl Overrides {
    pub fn new(backend: &Arc<Backend>) -> Self {
        Self {
            backend: Arc::clone(backend),
            table: Mutex::default(),
            updating: tokio::sync::Mutex::default(),
            lost: AtomicU64::new(0),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the overrides to the limiter of a configuration that is about to be active.
    pub fn activate(&self, limiter: &ServiceLimiter) {
        let mut table = self.table();
        for (name, entry) in &table.entries {
            if let Ok((key, found)) = entry.resolve(limiter.policies(), name) {
                limiter.overrides().set(&name.0, key, found);
            }
        }
        table.limiter = Some(limiter.clone());
    }

    /// Returns the instances that have the overrides.
    pub fn scope(&self) -> OverrideScope {
        match self.backend.redis() {
            Some(_) => OverrideScope::AllInstances,
            None => OverrideScope::ThisProcess,
        }
    }

    /// Sets an override, validated like those of the configuration.
    pub async fn set(
        &self,
        request: SetOverride,
        author: OverrideAuthor,
    ) -> Result<OverrideBody, OverrideError> {
        let SetOverride { policy, key, limit, window, burst, mode, expires_in, reason } = request;
        if reason.trim().is_empty() {
            return Err(invalid("the reason is missing: write why the limit is changed"));
        }
        check_reason(&reason)?;
        let time = time_until_end(&expires_in)?;
        let limits = OverriddenLimits { limit, window, burst, mode };
        let key = {
            let table = self.table();
            let limiter = table.limiter.as_ref().ok_or_else(|| invalid("not active yet"))?;
            let policy = limiter.policy(&policy)?;
            resolve(policy, key.texts(), &limits).map_err(invalid)?.0.to_string()
        };
        let stored = StoredOverride { limits, author: OverrideAuthor { reason, ..author } };
        let text = serde_json::to_string(&stored).map_err(|error| invalid(error.to_string()))?;
        let name = (policy, key);
        if !self.change(&name, Some((&text, time)), &stored.author).await? {
            return Err(OverrideError::Full);
        }
        // The update after the change may have failed.
        Ok(self.list_one(&name).unwrap_or_else(|| {
            let until = time.map(|time| self.backend.clock().now().saturating_add(time));
            let entry = Entry { value: OverrideValue { until, text }, stored };
            body(None, &name, &entry)
        }))
    }

    /// Removes an override, also that of a policy that is not there any more.
    pub async fn remove(
        &self,
        policy: &str,
        key: &str,
        author: OverrideAuthor,
    ) -> Result<(), OverrideError> {
        check_reason(&author.reason)?;
        let mut name = (policy.to_owned(), key.to_owned());
        {
            let table = self.table();
            let policy = table.limiter.as_ref().and_then(|it| it.policies().get(policy));
            if !table.entries.contains_key(&name)
                && let Some(Ok(key)) = policy.map(|policy| policy.override_key(&[key]))
            {
                name.1 = key.to_string();
            }
        }
        let removed = self.change(&name, None, &author).await?;
        removed.then_some(()).ok_or(OverrideError::NotFound)
    }

    /// Makes a change, and applies it here. Returns false if there is no room for it, or nothing to
    /// remove.
    async fn change(
        &self,
        name: &OverrideName,
        value: Option<(&str, Option<Duration>)>,
        author: &OverrideAuthor,
    ) -> Result<bool, OverrideError> {
        let author = serde_json::to_string(author).map_err(|error| invalid(error.to_string()))?;
        let Some(redis) = self.backend.redis() else {
            return Ok(self.change_in_memory(name, value, author));
        };
        let ended: Vec<String> = {
            let mut table = self.table();
            let kept = table.ended.len().saturating_sub(MAX_ENDED);
            table.ended.split_off(kept)
        };
        let name = text_of(name);
        let change = OverrideChange { name: &name, value, author: &author, ended: &ended };
        let made = redis.store().overrides().change(&change, MAX_OVERRIDES).await;
        let made = made.map_err(|error| {
            let is_lost = error.may_have_run();
            if is_lost { OverrideError::Unanswered(error) } else { error.into() }
        });
        let made = made?.is_some();
        // If it fails, the next heartbeat finds the version.
        let _ = self.update().await;
        Ok(made)
    }

    fn change_in_memory(
        &self,
        name: &OverrideName,
        value: Option<(&str, Option<Duration>)>,
        author: String,
    ) -> bool {
        let at = self.backend.clock().now();
        let mut table = self.table();
        if table.entries.len() >= MAX_OVERRIDES {
            table.sweep(at);
        }
        table.ended.clear();
        let before = table.entries.get(name).map(|entry| entry.value.clone());
        let before = before.filter(|value| value.until.is_none_or(|until| at < until));
        let has_room = before.is_some() || table.entries.len() < MAX_OVERRIDES;
        if value.is_none() && before.is_none() || !has_room {
            return false;
        }
        let after = value.map(|(text, time)| {
            let until = time.map(|time| at.saturating_add(time));
            OverrideValue { until, text: text.to_owned() }
        });
        let number = table.changes.back().map_or(1, |last| last.number + 1);
        let (name_text, value) = (text_of(name), after.clone());
        if table.changes.len() == MAX_CHANGES {
            table.changes.pop_front();
        }
        let record = OverrideRecord { number, name: name_text, at, before, after, author };
        table.changes.push_back(record);
        table.apply(name.clone(), value);
        true
    }

    /// Reads the changes that other instances have made.
    pub async fn update(&self) -> Result<(), StoreError> {
        let Some(redis) = self.backend.redis() else { return Ok(()) };
        let _updating = self.updating.lock().await;
        let known = self.table().version.clone();
        let update = redis.store().overrides().update(&known).await?;
        let mut table = self.table();
        table.updated_at = Some(Instant::now());
        table.sweep(self.backend.clock().now());
        match update {
            OverridesUpdate::Empty => {
                self.report_lost(table.entries.len());
                table.version.clear();
                table.replace(HashMap::new());
            }
            OverridesUpdate::Changes { version, records } => {
                table.version = version;
                for record in records {
                    if let Some(name) = name_of(&record.name) {
                        table.apply(name, record.after);
                    }
                }
            }
            OverridesUpdate::All { version, is_other_history, entries } => {
                // Of an emptied Redis that has new ones already, or one with an older snapshot.
                if is_other_history {
                    self.report_lost(table.missing_in(&entries));
                }
                table.version = version;
                table.replace(entries);
            }
        }
        Ok(())
    }

    fn report_lost(&self, lost: usize) {
        if lost > 0 {
            tracing::error!(
                overrides = lost,
                "Redis has lost overrides, which are not in force any more: set them again, or add \
                 them to the configuration"
            );
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
        }
    }

    /// Follows the changes of other instances, which heartbeats announce, until the process ends.
    pub async fn follow(self: Arc<Self>) {
        let mut versions = self.backend.redis().map(|redis| redis.store().overrides_version());
        loop {
            let announced = versions.as_mut().and_then(|it| it.borrow_and_update().clone());
            let is_current = {
                let mut table = self.table();
                table.sweep(self.backend.clock().now());
                // Without heartbeats, nothing announces a change.
                let (interval, is_same) = match announced {
                    Some(version) => (EXTEND_INTERVAL, version == table.version),
                    None => (SWEEP_INTERVAL, true),
                };
                let is_recent = table.updated_at.is_some_and(|at| at.elapsed() < interval);
                versions.is_none() || is_recent && is_same
            };
            let mut interval = SWEEP_INTERVAL;
            if !is_current && let Err(error) = self.update().await {
                tracing::debug!(%error, "reading overrides failed");
                interval = RETRY_INTERVAL;
            }
            let changed = async {
                match &mut versions {
                    Some(versions) => drop(versions.changed().await),
                    None => std::future::pending().await,
                }
            };
            let _ = tokio::time::timeout(interval, changed).await;
        }
    }

    fn list_one(&self, name: &OverrideName) -> Option<OverrideBody> {
        let table = self.table();
        let entry = table.entries.get(name)?;
        Some(body(table.limiter.as_ref(), name, entry))
    }

    /// Returns up to `max` overrides that `wanted` accepts, after this policy and key in their
    /// order, and whether there are more.
    pub fn list(
        &self,
        after: Option<OverrideName>,
        max: usize,
        wanted: impl Fn(&str, &str) -> bool,
    ) -> (Vec<OverrideBody>, bool) {
        let now = self.backend.clock().now();
        let table = self.table();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let found = table.entries.range((from, Bound::Unbounded)).filter(|(name, entry)| {
            entry.value.until.is_none_or(|until| now < until) && wanted(&name.0, &name.1)
        });
        let mut bodies: Vec<OverrideBody> = found
            .take(max + 1)
            .map(|(name, entry)| body(table.limiter.as_ref(), name, entry))
            .collect();
        let has_more = bodies.len() > max;
        bodies.truncate(max);
        (bodies, has_more)
    }

    /// Returns what applies to a key, and the override of the key, a network or the policy.
    pub fn in_force(&self, policy: &str, key: &str) -> Option<(OverrideEffect, OverrideBody)> {
        let now = self.backend.clock().now();
        let (of, found) = {
            let table = self.table();
            table.limiter.as_ref()?.overrides().find_with_key(policy, key, now)?
        };
        let key = of.map_or_else(|| key.to_owned(), |of| of.to_string());
        Some((found.effect, self.list_one(&(policy.to_owned(), key))?))
    }

    /// Returns the latest changes before this number, the latest first, each with its policy, its
    /// key and the values.
    pub async fn audit(
        &self,
        before: Option<u64>,
        max: usize,
    ) -> Result<Vec<(OverrideName, OverrideRecord)>, StoreError> {
        let records = match self.backend.redis() {
            Some(redis) => redis.store().overrides().audit(before, max).await?,
            None => {
                let table = self.table();
                let is_older =
                    |record: &&OverrideRecord| before.is_none_or(|number| record.number < number);
                table.changes.iter().rev().filter(is_older).take(max).cloned().collect()
            }
        };
        let named = records.into_iter().filter_map(|it| Some((name_of(&it.name)?, it)));
        Ok(named.collect())
    }
}

fn body(limiter: Option<&ServiceLimiter>, name: &OverrideName, entry: &Entry) -> OverrideBody {
    OverrideBody {
        policy: name.0.clone(),
        key: name.1.clone(),
        stored: entry.stored.clone(),
        until_ms: until_ms(&entry.value),
        inert: limiter.and_then(|limiter| entry.resolve(limiter.policies(), name).err()),
    }
}

/// Returns the end of an override in milliseconds since the Unix epoch.
pub(crate) fn until_ms(value: &OverrideValue) -> Option<u64> {
    value.until.map(|until| until.as_micros().div_ceil(1_000))
}

impl MetricsSection for Overrides {
    fn write_metrics(&self, text: &mut String) {
        let now = self.backend.clock().now();
        let table = self.table();
        let is_active = |entry: &&Entry| entry.value.until.is_none_or(|until| now < until);
        let active = table.entries.values().filter(is_active).count() as u64;
        #[rustfmt::skip]
        let numbers = [
            ("tidegate_overrides", "gauge", "Overrides that are set.", active),
            ("tidegate_overrides_lost_total", "counter",
                "Overrides that ended or changed because Redis has lost data.",
                self.lost.load(Ordering::Relaxed)),
        ];
        write_numbers(text, &numbers);
    }
}

#[cfg(test)]
mod tests;
