//! Clients that react to a denial: they send the request again.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::Attributes;
use tidegate_api::duration;

use super::{ReplayResult, TrafficRequest};

/// Number of times that a client sends a denied request again before it gives up.
pub const MAX_RETRIES: u32 = 10;
/// Time until a client that retries at once has the answer, and sends the request again.
const IMMEDIATE_BACKOFF: Duration = Duration::from_millis(100);
/// Wait before the first retry with backoff, doubled for each further one.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Time at which clients send a denied request again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RetryKind {
    /// After 100 ms
    Immediate,
    /// After 1 s, 2 s, 4 s … at most 60 s
    Backoff,
    /// After the time that Retry-After names
    RetryAfter,
}

/// Denied requests that will be sent again, in the order of their times.
#[derive(Debug)]
pub(super) struct RetryQueue<R> {
    kind: RetryKind,
    /// By time; those of the same time in the order of their denials.
    pending: BTreeMap<(u64, u64), Retry<R>>,
    pub(super) retries: u64,
    /// Requests whose last retry was denied, too.
    pub(super) abandoned: u64,
}

/// Request at the time at which it is sent again.
#[derive(Debug)]
pub(super) struct Retry<R> {
    time: u64,
    number: u32,
    request: Arc<R>,
}

impl<R: TrafficRequest + Clone> RetryQueue<R> {
    pub(super) fn new(kind: RetryKind) -> Self {
        Self { kind, pending: BTreeMap::new(), retries: 0, abandoned: 0 }
    }

    /// Removes the next request that is sent again before `time`.
    pub(super) fn pop_before(&mut self, time: u64) -> Option<Retry<R>> {
        let entry = self.pending.first_entry().filter(|entry| entry.key().0 < time)?;
        self.retries += 1;
        Some(entry.remove())
    }

    pub(super) fn on_request(&mut self, request: &R, outcome: &ReplayResult<'_>) {
        if let Some(wait) = self.wait_after(outcome, 0) {
            self.push(request.time(), wait, 1, Arc::new(request.clone()));
        }
    }

    pub(super) fn on_retry(&mut self, retry: &Retry<R>, outcome: &ReplayResult<'_>) {
        let Some(wait) = self.wait_after(outcome, retry.number) else { return };
        if retry.number == MAX_RETRIES {
            self.abandoned += 1;
        } else {
            self.push(retry.time, wait, retry.number + 1, Arc::clone(&retry.request));
        }
    }

    fn push(&mut self, now: u64, wait: Duration, number: u32, request: Arc<R>) {
        let time = now.saturating_add(duration::micros(wait));
        let order = self.retries + self.pending.len() as u64;
        self.pending.insert((time, order), Retry { time, number, request });
    }

    /// Returns the wait of a client after a denial.
    fn wait_after(&self, outcome: &ReplayResult<'_>, retries: u32) -> Option<Duration> {
        let denial = outcome.as_ref().ok()?.denied_by()?;
        Some(match self.kind {
            RetryKind::Immediate => IMMEDIATE_BACKOFF,
            RetryKind::Backoff => (MIN_BACKOFF * (1 << retries.min(6))).min(MAX_BACKOFF),
            // The header has whole seconds, rounded up.
            RetryKind::RetryAfter => {
                let wait = denial.decision().retry_after;
                Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
            }
        })
    }
}

impl<R: TrafficRequest> Attributes for Retry<R> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        self.request.get(name)
    }

    fn is_ambiguous(&self, name: &str) -> bool {
        self.request.is_ambiguous(name)
    }
}

impl<R: TrafficRequest> TrafficRequest for Retry<R> {
    fn time(&self) -> u64 {
        self.time
    }

    fn address(&self) -> Option<Cow<'_, str>> {
        self.request.address()
    }

    fn cost(&self) -> Option<u64> {
        self.request.cost()
    }

    fn status(&self) -> Option<u16> {
        self.request.status()
    }

    fn forwarded(&self) -> [Option<Cow<'_, str>>; 2] {
        self.request.forwarded()
    }

    fn line(&self) -> Option<(usize, u64)> {
        self.request.line()
    }
}
