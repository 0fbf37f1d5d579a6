//! The memory store: conformance, exactness under concurrency, the maximum of keys, and its memory.

mod support;

use std::time::Duration;

use support::{LONG, every_quota};
use tidegate::testing::{conformance, conformance_of_holds, conformance_of_long_logs};
use tidegate::{
    Algorithm, Charge, ChargeError, Clock, Error, KeyError, Limiter, ManualClock, MemoryStore,
    Quota, StoreError, Timestamp,
};

/// Seeds that once failed, on any store.
const REGRESSIONS: [u64; 1] = [1381];
const LONG_REGRESSIONS: [u64; 1] = [3];

fn limiter_on(clock: &ManualClock) -> Limiter {
    Limiter::new(MemoryStore::builder().clock(clock.clone()).build())
}

#[tokio::test]
async fn memory_store_conforms_to_the_model() {
    conformance(support::seeds(10_000).chain(REGRESSIONS), async |clock| limiter_on(&clock)).await;
}

#[tokio::test]
async fn holds_in_memory_conform_to_the_model() {
    conformance_of_holds(support::seeds(5_000), async |clock| limiter_on(&clock)).await;
}

#[tokio::test]
async fn long_logs_in_memory_conform_to_the_model() {
    conformance_of_long_logs(support::seeds(60).chain(LONG_REGRESSIONS), async |clock| {
        limiter_on(&clock)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_under_concurrency() {
    support::assert_exact_under_concurrency(&Limiter::new(MemoryStore::new())).await;
}

#[test]
fn exactly_the_limit_is_admitted_in_threads_without_a_runtime() {
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::token_bucket(1_000, LONG).expect("valid");
    let count = || {
        (0..500)
            .filter(|_| {
                limiter.blocking().acquire(&Charge::new("k", &quota)).expect("decided").allowed
            })
            .count()
    };
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(count)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(admitted, 1_000);
}

/// Several threads acquire two quotas together, while another acquires one of them alone.
#[test]
fn all_or_nothing_holds_under_concurrency() {
    let limiter = Limiter::new(MemoryStore::new());
    let (narrow, wide) = (
        Quota::fixed_window(300, LONG).expect("valid"),
        Quota::token_bucket(700, LONG).expect("valid"),
    );
    let acquire_both = || {
        let charges = [Charge::new("k", &narrow), Charge::new("other", &wide)];
        let admits = |_: &i32| {
            limiter.blocking().acquire_all(&charges).expect("decided").iter().all(|d| d.allowed)
        };
        (0..300).filter(admits).count() as u64
    };
    let acquire_wide = || {
        let admits = |_: &i32| {
            limiter.blocking().acquire(&Charge::new("other", &wide)).expect("decided").allowed
        };
        (0..100).filter(admits).count() as u64
    };
    let (both, single): (u64, u64) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(acquire_both)).collect();
        let single = scope.spawn(acquire_wide);
        let both = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
        (both, single.join().expect("no panic"))
    });
    assert_eq!((both, single), (300, 100));
    let left = |key, quota: &Quota| {
        limiter.blocking().peek(&Charge::new(key, quota)).expect("decided").remaining
    };
    assert_eq!(left("k", &narrow), 0);
    assert_eq!(
        left("other", &wide),
        700 - 300 - 100 - 1,
        "denied requests spent nothing of the wide quota"
    );
}

#[test]
fn full_store_forgets_keys_within_their_quota_but_none_at_its_limit() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).max_keys(1_000).build());
    let window = Duration::from_secs(3600);
    let quotas = [
        Quota::sliding_log(3, window),
        Quota::sliding_counter(3, window),
        Quota::fixed_window(3, window),
        Quota::token_bucket(3, window),
        Quota::leaky_bucket(3, window),
    ]
    .map(|quota| quota.expect("valid"));
    let acquire = |key: &str, quota| limiter.blocking().acquire(&Charge::new(key, quota));
    for quota in &quotas {
        for allowed in [true, true, true, false] {
            assert_eq!(acquire("victim", quota).expect("room").allowed, allowed);
        }
    }
    // A flood of keys, each within its quota, ten times the size of the store.
    for number in 0..10_000 {
        let quota = &quotas[number % quotas.len()];
        let decision = acquire(&format!("flood-{number}"), quota).expect("room is made");
        assert!(decision.allowed, "{number}");
    }
    for quota in &quotas {
        assert!(!acquire("victim", quota).expect("known").allowed, "{:?}", quota.algorithm());
    }
    let store = limiter.store();
    assert!((930..=1_000).contains(&store.keys()), "{} keys", store.keys());
    assert_eq!(store.evicted_keys() + store.keys() as u64, 10_000 + 5);
}

#[test]
fn full_store_evicts_expired_keys_only() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).max_keys(1_000).build());
    let short = Quota::sliding_log(1, Duration::from_secs(1)).expect("valid");
    let long = Quota::sliding_log(1, Duration::from_secs(3600)).expect("valid");
    let acquire = |key: &str, quota| limiter.blocking().acquire(&Charge::new(key, quota));

    assert!(acquire("victim", &long).expect("room").allowed);
    let fills = |number: &u64| acquire(&format!("key-{number}"), &short).is_ok();
    let room = (0..1_000).take_while(fills).count() as u64;
    assert!((930..1_000).contains(&room), "one policy gets 16/17 of the store: {room}");
    let rejected = acquire("extra", &short).expect_err("no room");
    assert_eq!(rejected, Error::Store(StoreError::Full { cap: 1_000 }));
    assert!(rejected.to_string().contains("full (at most 1000 keys"), "{rejected}");
    assert!(
        !acquire("victim", &long).expect("known").allowed,
        "new keys do not evict an exhausted one"
    );
    let peeked =
        limiter.blocking().peek(&Charge::new("extra", &short)).expect("a peek needs no room");
    assert!(peeked.allowed);

    clock.advance(Duration::from_secs(1));
    for number in 0..room {
        assert!(
            acquire(&format!("new-{number}"), &short).expect("an expired key is evicted").allowed,
            "{number}"
        );
    }
    acquire("extra", &short).expect_err("no room again");
    assert!(!acquire("victim", &long).expect("known").allowed);
    assert_eq!(limiter.store().keys() as u64, room + 1);
}

#[test]
fn acquire_of_several_new_keys_in_a_full_store_is_all_or_nothing() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).max_keys(3).build());
    let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
    let acquire = |keys: &[&str]| {
        let charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(key, &quota)).collect();
        limiter.blocking().acquire_all(&charges)
    };
    let _ = acquire(&["a", "b"]).expect("room for two");
    acquire(&["c", "d"]).expect_err("room for only one");
    assert_eq!(limiter.store().keys(), 2, "nothing was spent or reserved");
    let _ = acquire(&["c"]).expect("room for one");
    acquire(&["d"]).expect_err("all three are at their limit");
    clock.advance(Duration::from_secs(1));
    let _ = acquire(&["d", "e", "f"]).expect("all others have expired");
    assert_eq!(limiter.store().keys(), 3);
}

#[test]
fn decisions_sweep_expired_keys() {
    let clock = ManualClock::new();
    let limiter = limiter_on(&clock);
    let quota = Quota::fixed_window(5, Duration::from_secs(1)).expect("valid");
    let acquire =
        |key: &str| limiter.blocking().acquire(&Charge::new(key, &quota)).expect("decided");
    for number in 0..20_000 {
        let _ = acquire(&format!("old-{number}"));
    }
    clock.advance(Duration::from_secs(1));
    for number in 0..20_000 {
        let _ = acquire(&format!("new-{number}"));
    }
    let keys = limiter.store().keys();
    assert!((20_000..24_000).contains(&keys), "{keys} keys, of which 20,000 count");
}

#[test]
fn key_without_units_is_removed() {
    let limiter = limiter_on(&ManualClock::new());
    for quota in every_quota(5, LONG) {
        let charge = Charge::new("k", &quota).with_cost(2);
        let _ = limiter.blocking().peek(&charge).expect("decided");
        assert_eq!(limiter.store().keys(), 0, "a peek writes nothing");
        let _ = limiter.blocking().acquire(&charge).expect("decided");
        assert_eq!(limiter.store().keys(), 1);
        let refund = charge.with_charged_at(limiter.now());
        let _ = limiter.blocking().refund(&refund).expect("decided");
        assert_eq!(limiter.store().keys(), 0, "everything was refunded");
        let _ = limiter.blocking().acquire(&charge).expect("decided");
        limiter.blocking().reset(&charge).expect("decided");
        assert_eq!(limiter.store().keys(), 0);
    }
}

#[test]
fn decision_on_an_existing_key_allocates_nothing() {
    let clock = ManualClock::new();
    let limiter = limiter_on(&clock);
    for quota in every_quota(100_000, LONG) {
        let charge = Charge::new("user123", &quota).with_policy("per-user").with_cost(3);
        // The deque of a log grows by doubling: let it grow first.
        for _ in 0..1_025 {
            clock.advance(Duration::from_micros(1));
            let _ = limiter.blocking().acquire(&charge).expect("decided");
        }
        let measured = allocation_counter::measure(|| {
            for _ in 0..500 {
                clock.advance(Duration::from_micros(1));
                let _ = limiter.blocking().acquire(&charge).expect("decided");
                let _ = limiter.blocking().peek(&charge).expect("decided");
            }
        });
        assert_eq!(measured.count_total, 0, "{}", quota.default_policy_name());
    }
}

#[test]
fn key_takes_at_most_64_bytes() {
    let limiter = limiter_on(&ManualClock::new());
    let quota = Quota::token_bucket(100, LONG).expect("valid");
    let keys: Vec<String> = (0..1_000_000).map(|number| format!("user:{number:08}")).collect();
    let measured = allocation_counter::measure(|| {
        for key in &keys {
            let _ = limiter.blocking().acquire(&Charge::new(key, &quota)).expect("decided");
        }
    });
    assert_eq!(limiter.store().keys(), 1_000_000);
    let bytes = measured.bytes_current / 1_000_000;
    assert!(bytes <= 64, "{bytes} bytes per key");
}

#[test]
fn memory_of_a_log_depends_on_its_window_not_its_limit() {
    let clock = ManualClock::new();
    let limiter = limiter_on(&clock);
    let window = Duration::from_secs(60);
    let quota = Quota::sliding_log(1_000_000, window).expect("valid");
    let charge = Charge::new("user123", &quota);
    let fresh = allocation_counter::measure(|| {
        let _ = limiter.blocking().acquire(&charge).expect("decided");
    });
    assert!(fresh.bytes_total < 4_096, "{} bytes for a new key", fresh.bytes_total);
    let busy = allocation_counter::measure(|| {
        for _ in 0..10_000 {
            clock.advance(Duration::from_micros(1));
            let _ = limiter.blocking().acquire(&charge).expect("decided");
        }
    });
    let idle = allocation_counter::measure(|| {
        clock.advance(window);
        let _ = limiter.blocking().acquire(&charge).expect("decided");
    });
    assert!(busy.bytes_current > 100_000, "a busy log stores its requests");
    assert!(busy.bytes_current + idle.bytes_current < 4_096, "an idle log releases its memory");
}

#[test]
fn cost_of_ten_thousand_is_one_entry() {
    let limiter = limiter_on(&ManualClock::new());
    let quota = Quota::sliding_log(10_000_000, LONG).expect("valid");
    let charge = Charge::new("user123", &quota).with_cost(10_000);
    let measured = allocation_counter::measure(|| {
        let _ = limiter.blocking().acquire(&charge).expect("decided");
    });
    assert!(measured.bytes_total < 4_096, "{} bytes", measured.bytes_total);
}

#[test]
fn system_clock_starts_at_the_wall_clock_and_advances() {
    let clock = tidegate::SystemClock::new();
    let wall = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970")
        .as_micros();
    let first = clock.now();
    assert!(u128::from(first.as_micros()).abs_diff(wall) < 60_000_000);
    let mut last = first;
    while last == first {
        let now = clock.now();
        assert!(now >= last);
        last = now;
    }
}

#[test]
fn invalid_charges_are_rejected_for_new_and_existing_keys() {
    let limiter = limiter_on(&ManualClock::new());
    let blocking = limiter.blocking();
    for algorithm in Algorithm::RATES {
        let quota = Quota::new(algorithm, 10, Duration::from_secs(3600)).expect("valid");
        let charge = |key| Charge::new(key, &quota);
        for exists in [false, true] {
            assert_eq!(limiter.store().keys(), usize::from(exists), "{algorithm}");
            let cases = [
                (charge(""), ChargeError::Key(KeyError::Empty)),
                (charge("a\nb"), ChargeError::Key(KeyError::Control { character: '\n', at: 1 })),
                (charge("k").with_policy(""), ChargeError::Policy(KeyError::Empty)),
                (charge("k").with_cost(0), ChargeError::ZeroCost),
                (charge("k").with_cost(11), ChargeError::CostTooHigh { cost: 11, most: 10 }),
            ];
            for (invalid, error) in cases {
                assert_eq!(
                    blocking.acquire(&invalid),
                    Err(Error::Charge(error)),
                    "{algorithm}, {exists}"
                );
            }
            assert_eq!(
                blocking.peek(&charge("k")).map(|decision| decision.remaining),
                Ok(if exists { 8 } else { 9 })
            );
            let _ = blocking.acquire(&charge("k")).expect("a decision");
        }
        blocking.reset(&charge("k")).expect("a decision");
    }
}

/// Each CPU core reads its own cycle counter, and they differ slightly.
#[test]
fn clock_skew_between_cores_does_not_refill_a_bucket() {
    thread_local!(static BEHIND: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    #[derive(Debug)]
    struct SkewedClock;
    impl tidegate::Clock for SkewedClock {
        fn now(&self) -> Timestamp {
            Timestamp::from_micros(1_700_000_000_000_000 - BEHIND.get())
        }

        fn sleep(&self, _: Duration) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            Box::pin(std::future::ready(()))
        }

        fn sleep_blocking(&self, _: Duration) {}
    }
    for behind in [1, 500, 1_000] {
        let limiter = Limiter::new(MemoryStore::builder().clock(SkewedClock).build());
        let quota = Quota::token_bucket(1_000_000, Duration::from_secs(1))
            .and_then(|quota| quota.with_burst(100));
        let quota = quota.expect("valid");
        let charge = Charge::new("u", &quota);
        let acquire = |turn: u64| {
            BEHIND.set(if turn.is_multiple_of(2) { 0 } else { behind });
            limiter.blocking().acquire(&charge).expect("decided").allowed
        };
        let admitted = (0..10_000).filter(|turn| acquire(*turn)).count();
        assert_eq!(admitted, 100, "a skew of {behind} µs, and no time passes");
    }
}
