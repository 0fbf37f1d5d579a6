//! Shared test support: a real Redis, limiters on it, and quotas of every kind.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]

mod certificates;
mod clock;
mod cluster;
mod sentinel;
mod server;
mod strict;

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

pub(crate) use certificates::Authority;
pub(crate) use clock::{ServerClock, redis_with_settable_clock};
pub(crate) use cluster::Cluster;
pub(crate) use sentinel::{NAME, Sentinels};
pub(crate) use server::{Redis, free_port, redis_6, valkey_9};
pub(crate) use strict::{ClusterView, Databases, Refusal, Restrictions, ScriptCache, StrictServer};
use tidegate::{Algorithm, Charge, Encoding, Limiter, ManualClock, Quota, RedisStore, Store};

/// Timeout of operations that must succeed, long enough for a slow machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

impl Redis {
    /// Returns a limiter on the server's own clock.
    pub(crate) async fn limiter(&self) -> Limiter<RedisStore> {
        let builder = RedisStore::builder(&self.url()).timeout(TEST_TIMEOUT);
        Limiter::new(builder.connect().await.expect("our own server answers"))
    }

    /// Returns a limiter whose scripts use this clock, with a separate key prefix.
    pub(crate) async fn driven_limiter(&self, clock: ManualClock) -> Limiter<RedisStore> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("test-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let builder =
            RedisStore::builder(&self.url()).timeout(TEST_TIMEOUT).prefix(prefix).driven_by(clock);
        Limiter::new(builder.connect().await.expect("our own server answers"))
    }
}

/// Permissions that a user needs on one server, as documented in `store::redis`.
pub(crate) const PERMISSIONS: [&str; 23] = [
    "evalsha",
    "script|load",
    "time",
    "get",
    "hdel",
    "hincrby",
    "hmget",
    "hset",
    "pexpireat",
    "pttl",
    "unlink",
    "set",
    "setrange",
    "zadd",
    "zcard",
    "zcount",
    "zrange",
    "zrangebyscore",
    "zrem",
    "zremrangebyrank",
    "zremrangebyscore",
    "zscore",
    "cluster|slots",
];

impl Redis {
    /// Creates a user with only these permissions, on keys with the default prefix.
    pub(crate) fn grant(&self, permissions: &[&str]) {
        let grants: Vec<String> = permissions.iter().map(|command| format!("+{command}")).collect();
        let mut rule = vec!["ACL", "SETUSER", "tidegate", "on", ">hunter2", "~rate_limit:*"];
        rule.extend(grants.iter().map(String::as_str));
        self.query::<()>(&rule);
    }

    pub(crate) fn url_of_user(&self) -> String {
        self.url().replace("//", "//tidegate:hunter2@")
    }
}

/// Returns a quota of each algorithm and each encoding.
pub(crate) fn every_quota(limit: u64, window: Duration) -> Vec<Quota> {
    let mut quotas: Vec<Quota> = Algorithm::RATES
        .iter()
        .map(|algorithm| Quota::new(*algorithm, limit, window).expect("a valid quota"))
        .collect();
    quotas.push(packed(limit, window));
    quotas.push(packed_counter(limit, window));
    quotas
}

pub(crate) fn packed_counter(limit: u64, window: Duration) -> Quota {
    let quota = Quota::sliding_counter(limit, window).expect("a valid quota");
    quota.with_encoding(Encoding::Packed).expect("a counter")
}

pub(crate) fn packed(limit: u64, window: Duration) -> Quota {
    let quota = Quota::sliding_log(limit, window).expect("a valid quota");
    quota.with_encoding(Encoding::Packed).expect("a log")
}

/// Runs futures at the same time, so that their requests share calls.
pub(crate) async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<_> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

/// A window so long that no unit becomes free during a test.
pub(crate) const LONG: Duration = Duration::from_secs(100 * 86_400);

/// Asserts that exactly the limit is admitted when 64 tasks charge one key.
pub(crate) async fn assert_exact_under_concurrency<S: Store>(limiter: &Limiter<S>) {
    for quota in every_quota(500, LONG) {
        let tasks: Vec<_> = (0..64)
            .map(|_| {
                let (limiter, quota) = (limiter.clone(), quota.clone());
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..16 {
                        let charge = Charge::new("contended", &quota);
                        admitted +=
                            u64::from(limiter.acquire(&charge).await.expect("a decision").allowed);
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.expect("no panic");
        }
        assert_eq!(admitted, 500, "{}", quota.default_policy_name());
    }
}

/// Returns this many seeds, or `TIDEGATE_SEEDS` of them, for longer runs than in CI.
pub(crate) fn seeds(default: u64) -> std::ops::Range<u64> {
    let configured = std::env::var("TIDEGATE_SEEDS").ok();
    0..configured.map_or(default, |count| count.parse().expect("TIDEGATE_SEEDS is a number"))
}

/// Waits until a condition holds, at most for [`TEST_TIMEOUT`]. Returns the time that it took.
pub(crate) async fn until(description: &str, mut condition: impl AsyncFnMut() -> bool) -> Duration {
    let start = std::time::Instant::now();
    while !condition().await {
        assert!(start.elapsed() < TEST_TIMEOUT, "timed out: {description}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}
