//! What the tests share: a real Redis, limiters on it, quotas of every kind.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]

mod certificates;
mod clock;
mod cluster;
mod sentinel;
mod server;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use certificates::Authority;
pub(crate) use clock::redis_with_a_clock_to_set;
pub(crate) use cluster::Cluster;
pub(crate) use sentinel::{NAME, Sentinels};
pub(crate) use server::{Redis, free_port, redis_6, valkey_9};
use tidegate::{Algorithm, Charge, Encoding, Limiter, ManualClock, Quota, RedisStore, Store};

/// This machine may be slow; what takes this long hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

impl Redis {
    /// A limiter on the server's own clock.
    pub(crate) async fn limiter(&self) -> Limiter<RedisStore> {
        let builder = RedisStore::builder(&self.url()).timeout(PATIENCE);
        Limiter::new(builder.connect().await.expect("our own server answers"))
    }

    /// A limiter whose scripts get their time from this clock, with keys of its own.
    pub(crate) async fn driven_limiter(&self, clock: ManualClock) -> Limiter<RedisStore> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("test-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let builder =
            RedisStore::builder(&self.url()).timeout(PATIENCE).prefix(prefix).driven_by(clock);
        Limiter::new(builder.connect().await.expect("our own server answers"))
    }
}

/// What the documentation of `store::redis` says that a user must be allowed on one server.
pub(crate) const RIGHTS: [&str; 21] = [
    "evalsha",
    "script|load",
    "time",
    "get",
    "getrange",
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
    "cluster|slots",
];

impl Redis {
    /// A user who may do this and no more, on keys of the usual prefix.
    pub(crate) fn grant(&self, rights: &[&str]) {
        let grants: Vec<String> = rights.iter().map(|command| format!("+{command}")).collect();
        let mut rule = vec!["ACL", "SETUSER", "tidegate", "on", ">hunter2", "~rate_limit:*"];
        rule.extend(grants.iter().map(String::as_str));
        self.query::<()>(&rule);
    }

    pub(crate) fn url_of_user(&self) -> String {
        self.url().replace("//", "//tidegate:hunter2@")
    }
}

/// A quota of each algorithm, and of each encoding.
pub(crate) fn every_quota(limit: u64, window: Duration) -> Vec<Quota> {
    let mut quotas: Vec<Quota> = Algorithm::ALL
        .iter()
        .map(|algorithm| Quota::new(*algorithm, limit, window).expect("a valid quota"))
        .collect();
    quotas.push(packed(limit, window));
    quotas
}

pub(crate) fn packed(limit: u64, window: Duration) -> Quota {
    let quota = Quota::sliding_log(limit, window).expect("a valid quota");
    quota.with_encoding(Encoding::Packed).expect("a log")
}

/// Long enough that a test never meets its end, and nothing comes back meanwhile.
pub(crate) const LONG: Duration = Duration::from_secs(100 * 86_400);

/// 64 tasks, each asking again and again for one key: exactly the limit is admitted.
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

/// So many seeds, or as many as `TIDEGATE_SEEDS` says, for a longer look than CI takes.
pub(crate) fn seeds(usual: u64) -> std::ops::Range<u64> {
    let wanted = std::env::var("TIDEGATE_SEEDS").ok();
    0..wanted.map_or(usual, |count| count.parse().expect("TIDEGATE_SEEDS is a number"))
}

/// Asks again and again until it is so; what takes longer than [`PATIENCE`] will never be.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) -> Duration {
    let start = std::time::Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < PATIENCE, "{what} in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}
