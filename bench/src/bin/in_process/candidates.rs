//! Libraries that are compared, each used through its public API as documented.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use governor::DefaultKeyedRateLimiter;
use limitador::RateLimiter as LimitadorLimiter;
use limitador::limit::{Context, Limit, Namespace};
use tidegate::{Charge, Limiter, MemoryStore, Quota};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// All requests are allowed.
    Allowed,
    /// All requests are denied, except those that fill the store.
    Denied,
}

impl Scenario {
    /// Burst of a key whose requests are denied. With a burst of one, throttlecrab never denies.
    const DENIED_BURST: u32 = 2;

    /// Returns the number of requests per key that fill a store.
    pub(crate) fn requests_per_key(self) -> u32 {
        match self {
            Self::Allowed => 1,
            Self::Denied => Self::DENIED_BURST,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
        }
    }

    /// Returns the seconds until a unit is refilled, and the burst. The interval is longer than the
    /// measurement, because a store that evicts full buckets would hold fewer keys than the others.
    pub(crate) fn bucket(self, keys: usize) -> (u64, u32) {
        match (self, keys) {
            (Self::Denied, _) => (3_600, Self::DENIED_BURST),
            (Self::Allowed, 1) => (1, 100_000_000),
            (Self::Allowed, ..=100_000) => (60, 5_000_000),
            (Self::Allowed, _) => (300, 1_000_000),
        }
    }
}

pub(crate) fn key_of(number: usize) -> String {
    format!("user:{number:08}")
}

pub(crate) trait Candidate: Sized + Sync {
    const NAME: &'static str;

    /// Creates an empty store.
    fn new(keys: usize, scenario: Scenario) -> Result<Self>;

    /// Returns whether the request is allowed.
    #[expect(clippy::ptr_arg, reason = "governor needs a reference to its key type")]
    fn decide(&self, key: &String) -> bool;

    /// Same as [`Self::decide`] with exclusive access, for libraries that then need no lock.
    fn decide_exclusive(&mut self, key: &String) -> bool {
        self.decide(key)
    }
}

pub(crate) struct Tidegate {
    limiter: Limiter,
    quota: Quota,
}

impl Candidate for Tidegate {
    const NAME: &'static str = "tidegate";

    fn new(keys: usize, scenario: Scenario) -> Result<Self> {
        let (seconds, burst) = scenario.bucket(keys);
        let quota =
            Quota::token_bucket(1, Duration::from_secs(seconds))?.with_burst(burst.into())?;
        // One policy may use 16 of 17 parts of a store.
        let store = MemoryStore::builder().max_keys(keys + keys / 8 + 1_024).build();
        Ok(Self { limiter: Limiter::new(store), quota })
    }

    fn decide(&self, key: &String) -> bool {
        self.limiter
            .blocking()
            .acquire(&Charge::new(key, &self.quota))
            .is_ok_and(|decision| decision.allowed)
    }
}

pub(crate) struct Governor(DefaultKeyedRateLimiter<String>);

impl Candidate for Governor {
    const NAME: &'static str = "governor";

    fn new(keys: usize, scenario: Scenario) -> Result<Self> {
        let (seconds, burst) = scenario.bucket(keys);
        let quota =
            governor::Quota::with_period(Duration::from_secs(seconds)).context("a period")?;
        Ok(Self(DefaultKeyedRateLimiter::keyed(
            quota.allow_burst(NonZeroU32::new(burst).context("a burst")?),
        )))
    }

    fn decide(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

/// The limiter needs `&mut`: one thread uses it without a lock, two threads share a mutex. The
/// store is the default of throttlecrab-server, with a cleanup interval of five minutes.
pub(crate) struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<throttlecrab::PeriodicStore>>,
    seconds: i64,
    burst: i64,
}

impl Throttlecrab {
    fn check(
        limiter: &mut throttlecrab::RateLimiter<throttlecrab::PeriodicStore>,
        key: &str,
        burst: i64,
        seconds: i64,
    ) -> bool {
        limiter
            .rate_limit(key, burst, 1, seconds, 1, SystemTime::now())
            .is_ok_and(|(allowed, _)| allowed)
    }
}

impl Candidate for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(keys: usize, scenario: Scenario) -> Result<Self> {
        let (seconds, burst) = scenario.bucket(keys);
        let store = throttlecrab::PeriodicStore::builder()
            .cleanup_interval(Duration::from_secs(300))
            .build();
        let limiter = Mutex::new(throttlecrab::RateLimiter::new(store));
        Ok(Self { limiter, seconds: i64::try_from(seconds)?, burst: burst.into() })
    }

    fn decide(&self, key: &String) -> bool {
        Self::check(
            &mut self.limiter.lock().unwrap_or_else(PoisonError::into_inner),
            key,
            self.burst,
            self.seconds,
        )
    }

    fn decide_exclusive(&mut self, key: &String) -> bool {
        let limiter = self.limiter.get_mut().unwrap_or_else(PoisonError::into_inner);
        Self::check(limiter, key, self.burst, self.seconds)
    }
}

/// limitador uses fixed windows.
pub(crate) struct Limitador {
    limiter: LimitadorLimiter,
    namespace: Namespace,
}

impl Candidate for Limitador {
    const NAME: &'static str = "limitador";

    fn new(keys: usize, scenario: Scenario) -> Result<Self> {
        let (_, limit) = scenario.bucket(keys);
        // It evicts keys above its capacity.
        let limiter = LimitadorLimiter::new(u64::try_from(keys)?.max(1_000) * 2);
        let user = "user".try_into().map_err(|error| anyhow::anyhow!("{error:?}"))?;
        limiter.add_limit(Limit::new("bench", limit.into(), 3_600, Vec::new(), vec![user]));
        Ok(Self { limiter, namespace: "bench".into() })
    }

    fn decide(&self, key: &String) -> bool {
        let context = Context::from(HashMap::from([("user".to_owned(), key.clone())]));
        self.limiter
            .check_rate_limited_and_update(&self.namespace, &context, 1)
            .is_ok_and(|check| !check.limited)
    }
}

/// Overhead of the measurement.
pub(crate) struct EmptyLoop;

impl Candidate for EmptyLoop {
    const NAME: &'static str = "empty loop";

    fn new(_: usize, _: Scenario) -> Result<Self> {
        Ok(Self)
    }

    fn decide(&self, key: &String) -> bool {
        std::hint::black_box(key.as_bytes()[0]) == b'u'
    }
}
