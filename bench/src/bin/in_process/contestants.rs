//! Who is measured: each by its own public API, as its documentation says, with the algorithm that
//! it has.

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
pub(crate) enum Admits {
    /// Every request.
    All,
    /// None but those that fill the store.
    None,
}

impl Admits {
    /// With a burst of one, throttlecrab never denies.
    const SOME: u32 = 2;

    /// How many requests of each key fill a store.
    pub(crate) fn to_fill(self) -> u32 {
        match self {
            Self::All => 1,
            Self::None => Self::SOME,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::All => "allowed",
            Self::None => "denied",
        }
    }

    /// After how many seconds a unit comes back, and how many there are. None comes back while it
    /// is measured: a key whose units are all back is forgotten by those that do so, and they would
    /// be measured with fewer keys than the others.
    fn bucket(self, keys: usize) -> (u64, u32) {
        match (self, keys) {
            (Self::None, _) => (3_600, Self::SOME),
            (Self::All, 1) => (1, 100_000_000),
            (Self::All, ..=100_000) => (60, 5_000_000),
            (Self::All, _) => (300, 1_000_000),
        }
    }
}

pub(crate) fn key_of(number: usize) -> String {
    format!("user:{number:08}")
}

pub(crate) trait Contestant: Sized + Sync {
    const NAME: &'static str;

    /// Empty.
    fn new(keys: usize, admits: Admits) -> Result<Self>;

    /// Whether this request may pass.
    #[expect(clippy::ptr_arg, reason = "governor is asked with a key of its table's own type")]
    fn decide(&self, key: &String) -> bool;

    /// The same when nobody else asks, for who then needs no lock.
    fn decide_alone(&mut self, key: &String) -> bool {
        self.decide(key)
    }
}

pub(crate) struct Tidegate {
    limiter: Limiter,
    quota: Quota,
}

impl Contestant for Tidegate {
    const NAME: &'static str = "tidegate";

    fn new(keys: usize, admits: Admits) -> Result<Self> {
        let (seconds, burst) = admits.bucket(keys);
        let quota =
            Quota::token_bucket(1, Duration::from_secs(seconds))?.with_burst(burst.into())?;
        Ok(Self { limiter: Limiter::new(MemoryStore::new()), quota })
    }

    fn decide(&self, key: &String) -> bool {
        self.limiter
            .blocking()
            .acquire(&Charge::new(key, &self.quota))
            .is_ok_and(|decision| decision.allowed)
    }
}

pub(crate) struct Governor(DefaultKeyedRateLimiter<String>);

impl Contestant for Governor {
    const NAME: &'static str = "governor";

    fn new(keys: usize, admits: Admits) -> Result<Self> {
        let (seconds, burst) = admits.bucket(keys);
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

/// Its limiter wants `&mut`: alone without a lock, by two threads behind one. Its store is the one
/// that its server takes by default, which does not clear up within five minutes.
pub(crate) struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<throttlecrab::PeriodicStore>>,
    seconds: i64,
    burst: i64,
}

impl Throttlecrab {
    fn ask(
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

impl Contestant for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(keys: usize, admits: Admits) -> Result<Self> {
        let (seconds, burst) = admits.bucket(keys);
        let store = throttlecrab::PeriodicStore::builder()
            .cleanup_interval(Duration::from_secs(300))
            .build();
        let limiter = Mutex::new(throttlecrab::RateLimiter::new(store));
        Ok(Self { limiter, seconds: i64::try_from(seconds)?, burst: burst.into() })
    }

    fn decide(&self, key: &String) -> bool {
        Self::ask(
            &mut self.limiter.lock().unwrap_or_else(PoisonError::into_inner),
            key,
            self.burst,
            self.seconds,
        )
    }

    fn decide_alone(&mut self, key: &String) -> bool {
        let limiter = self.limiter.get_mut().unwrap_or_else(PoisonError::into_inner);
        Self::ask(limiter, key, self.burst, self.seconds)
    }
}

/// Its algorithm is the fixed window.
pub(crate) struct Limitador {
    limiter: LimitadorLimiter,
    namespace: Namespace,
}

impl Contestant for Limitador {
    const NAME: &'static str = "limitador";

    fn new(keys: usize, admits: Admits) -> Result<Self> {
        let (_, most) = admits.bucket(keys);
        // Beyond its capacity it would forget keys.
        let limiter = LimitadorLimiter::new(u64::try_from(keys)?.max(1_000) * 2);
        let user = "user".try_into().map_err(|error| anyhow::anyhow!("{error:?}"))?;
        limiter.add_limit(Limit::new("bench", most.into(), 3_600, Vec::new(), vec![user]));
        Ok(Self { limiter, namespace: "bench".into() })
    }

    fn decide(&self, key: &String) -> bool {
        let context = Context::from(HashMap::from([("user".to_owned(), key.clone())]));
        self.limiter
            .check_rate_limited_and_update(&self.namespace, &context, 1)
            .is_ok_and(|check| !check.limited)
    }
}

/// What the measurement itself costs.
pub(crate) struct LoopAlone;

impl Contestant for LoopAlone {
    const NAME: &'static str = "the loop alone";

    fn new(_: usize, _: Admits) -> Result<Self> {
        Ok(Self)
    }

    fn decide(&self, key: &String) -> bool {
        std::hint::black_box(key.as_bytes()[0]) == b'u'
    }
}
