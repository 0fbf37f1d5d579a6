//! Latency of a lone caller: through the library, and as bare calls of the library's script and of
//! the naive script on the same kind of connection, one at a time.

use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use anyhow::{Context, Result};
use tidegate::{Charge, Limiter, Quota, RedisStore};
use tidegate_bench::results::Results;
use tidegate_bench::spread::Spread;
use tokio::runtime::Runtime;

use super::call::{CallTemplate, user_name};
use super::decisions::{LIMIT, WINDOW, store};
use super::naive::Structure;
use super::random::Random;
use super::{Redis, connect_multiplexed};

pub(crate) const CASE: &str = "lone";
pub(crate) const LIBRARY: &str = "tidegate";
pub(crate) const BARE: &str = "bare call of tidegate's script";
pub(crate) const BARE_NAIVE: &str = "bare call of the naive script";

/// Calls of a candidate before the next one has its turn. Short turns, because the latency changes
/// within milliseconds with the load of the machine.
const CALLS: usize = 50;
const USERS: u64 = 100_000;
const SET: &str = "lone";

/// A lone caller, with its connection.
pub(crate) struct LoneCaller {
    limiter: Limiter<RedisStore>,
    quota: Quota,
    connection: MultiplexedConnection,
    bare: CallTemplate,
    naive: CallTemplate,
    random: Random,
}

impl LoneCaller {
    pub(crate) fn connect(redis: &Redis, runtime: &Runtime, quota: &Quota) -> Result<Self> {
        Ok(Self {
            limiter: Limiter::new(runtime.block_on(store(redis).connect())?),
            quota: quota.clone(),
            connection: runtime.block_on(connect_multiplexed(&redis.url()))?,
            bare: CallTemplate::record(redis, runtime, quota, SET, 1)?,
            naive: CallTemplate::naive(redis, Structure::LogPacked, SET, LIMIT, WINDOW)?,
            random: Random::new(0),
        })
    }

    /// Measures a turn, in which the candidates alternate, and records the median of each.
    pub(crate) async fn turn(&mut self, duration: Duration, results: &mut Results) -> Result<()> {
        let mut latencies = [LIBRARY, BARE, BARE_NAIVE].map(|name| (name, Vec::new()));
        let end = Instant::now() + duration;
        let mut first = 0;
        while Instant::now() < end {
            first += 1;
            for turn in 0..latencies.len() {
                let (candidate, latencies) = &mut latencies[(first + turn) % 3];
                for _ in 0..CALLS {
                    let start = Instant::now();
                    self.decide(candidate).await?;
                    latencies.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
        for (candidate, latencies) in latencies {
            let median = Spread::of(&latencies).context("a decision")?.median;
            results.add(CASE, candidate, "median_micros", median);
        }
        Ok(())
    }

    async fn decide(&mut self, candidate: &str) -> Result<()> {
        let number = self.random.below(USERS);
        let call = match candidate {
            LIBRARY => {
                let name = user_name(SET, number);
                let _ = self.limiter.acquire(&Charge::new(&name, &self.quota)).await?;
                return Ok(());
            }
            BARE => &self.bare,
            _ => &self.naive,
        };
        let reply = self.connection.send_packed_command(&call.command(|| number)).await?;
        reply.extract_error()?;
        Ok(())
    }
}
