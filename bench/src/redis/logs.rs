//! Memory of an exact log in Redis, per encoding.

use std::time::Duration;

use anyhow::Result;
use tidegate::{Charge, Encoding, Limiter, Quota, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use super::Redis;

pub(crate) const LIMITS: [u64; 3] = [100, 1_000, 10_000];

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut results = Results::new("logs", plan);
    let limiter = Limiter::new(runtime.block_on(RedisStore::connect(&redis.url()))?);
    for limit in LIMITS {
        for encoding in [Encoding::Packed, Encoding::SortedSet] {
            let quota =
                Quota::sliding_log(limit, Duration::from_secs(3_600))?.with_encoding(encoding)?;
            let charge = Charge::new("user:00001234", &quota).with_policy("log");
            runtime.block_on(limiter.reset(&charge))?;
            // One after the other, so that each entry has a different time, as in practice.
            for _ in 0..limit {
                let _ = runtime.block_on(limiter.acquire(&charge))?;
            }
            let key = limiter.store().redis_key(&charge);
            let mut usage = ::redis::cmd("MEMORY");
            usage.arg("USAGE").arg(key).arg("SAMPLES").arg(0);
            let bytes: u64 = usage.query(&mut redis.connection()?)?;
            println!("log of {limit}, {encoding}: {bytes} bytes");
            results.add(&limit.to_string(), encoding.as_str(), "bytes", bytes as f64);
        }
    }
    results.save()
}
