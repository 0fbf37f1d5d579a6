//! The circuit breaker. Most tests run in paused time.

use std::sync::Arc;
use std::time::Duration;

use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{
    Action, Breaker, Charge, Decision, Fallback, Limiter, ManualClock, MemoryStore, Quota, Store,
    StoreError,
};
use tokio::time::{Instant, advance, sleep};

use crate::flaky::{Fault, Flaky, down};
use crate::support::{LONG, assert_exact_under_concurrency, seeds};

const SECOND: Duration = Duration::from_secs(1);

fn quota() -> Quota {
    Quota::sliding_log(1_000, LONG).expect("valid")
}

async fn acquire<S: Store>(store: &S, key: &str) -> Result<Decision, StoreError> {
    store.decide(Action::Acquire, &Charge::new(key, &quota())).await
}

#[tokio::test(start_paused = true)]
async fn five_failures_in_a_row_open_the_circuit_and_stop_all_calls() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.set_fault(down());
    for _ in 0..4 {
        acquire(&breaker, "u").await.expect_err("down");
    }
    store.set_fault(Fault::None);
    let _ = acquire(&breaker, "u").await.expect("four failures are not enough");
    // Otherwise the four failures would still be among the calls of the last second.
    advance(2 * SECOND).await;
    store.set_fault(down());
    for _ in 0..5 {
        assert_eq!(acquire(&breaker, "u").await, Err(StoreError::Unreachable("down".to_owned())));
    }
    let calls = store.calls();
    for _ in 0..100 {
        let rejected = acquire(&breaker, "u").await.expect_err("open");
        let cause = StoreError::Unreachable("down".to_owned());
        assert_eq!(rejected, StoreError::Open(Arc::new(cause)));
        assert_eq!(
            rejected.to_string(),
            "circuit open, the store is failing: the store cannot be reached: down"
        );
    }
    assert_eq!(store.calls(), calls);
    let state = breaker.state();
    assert_eq!((state.open, state.times_opened), (true, 1));
    assert_eq!(state.last_error, Some(StoreError::Unreachable("down".to_owned())));
}

#[tokio::test(start_paused = true)]
async fn a_failure_rate_of_a_half_opens_the_circuit_and_a_third_does_not() {
    let store = Flaky::new();
    let opens_at = async |every: u64, interval: Duration| {
        let breaker = Breaker::new(store.clone());
        for call in 1..=300 {
            store.set_fault(if call % every == 0 { down() } else { Fault::None });
            let _ = acquire(&breaker, "u").await;
            if breaker.state().open {
                return Some(call);
            }
            advance(interval).await;
        }
        None
    };
    assert_eq!(opens_at(2, Duration::from_millis(10)).await, Some(10));
    assert_eq!(opens_at(3, Duration::from_millis(10)).await, None);
    // A rate of a half, but fewer than five failures in any second.
    assert_eq!(opens_at(2, Duration::from_millis(150)).await, None);
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_working_store_do_not_open_the_circuit() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    for error in [StoreError::Full { cap: 1 }, StoreError::Misconfigured("no".to_owned())] {
        store.set_fault(Fault::Fails(error.clone()));
        for _ in 0..20 {
            assert_eq!(acquire(&breaker, "u").await, Err(error.clone()));
        }
    }
    assert!(!breaker.state().open);
}

#[tokio::test(start_paused = true)]
async fn a_recovered_store_is_used_again_within_a_second() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    for round in 1..=20 {
        store.set_fault(down());
        while !breaker.state().open {
            acquire(&breaker, "u").await.expect_err("down");
        }
        // Outages of different lengths end at different times between two trials.
        sleep(Duration::from_millis(317 * round)).await;
        assert!(breaker.state().open, "the store is still down");
        store.set_fault(Fault::None);
        let back = Instant::now();
        while breaker.state().open {
            assert!(back.elapsed() < SECOND, "round {round}");
            let _ = acquire(&breaker, "u").await;
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(breaker.state().times_opened, round);
    }
}

/// While the store is too slow, only a call now and then waits for it.
#[tokio::test(start_paused = true)]
async fn a_slow_store_opens_the_circuit_once_without_flapping() {
    let store = Flaky::new();
    let timeout = Duration::from_millis(100);
    let breaker = Breaker::builder(store.clone()).timeout(timeout).build();
    store.set_fault(Fault::Slow(Duration::from_millis(300)));
    let start = Instant::now();
    let (mut waited, mut rejected) = (0, 0);
    while start.elapsed() < 60 * SECOND {
        let before = Instant::now();
        let error = acquire(&breaker, "u").await.expect_err("too slow");
        assert!(before.elapsed() <= timeout);
        waited += u64::from(before.elapsed() > Duration::ZERO);
        rejected += u64::from(matches!(error, StoreError::Open(_)));
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(breaker.state().times_opened, 1);
    assert!((150..=605).contains(&waited), "{waited} in a minute");
    assert!(rejected > 10 * waited, "{rejected} were rejected at once");
    store.set_fault(Fault::Slow(Duration::from_millis(50)));
    sleep(SECOND).await;
    for _ in 0..2 {
        let _ = acquire(&breaker, "u").await.expect("slow, but in time");
        sleep(SECOND).await;
    }
    assert!(!breaker.state().open);
}

/// A call that is dropped while it tries a failing store does not keep the circuit open.
#[tokio::test(start_paused = true)]
async fn a_dropped_trial_is_followed_by_another() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.set_fault(down());
    for _ in 0..5 {
        acquire(&breaker, "u").await.expect_err("down");
    }
    sleep(SECOND).await;
    store.set_fault(Fault::Slow(SECOND));
    let trial = tokio::time::timeout(Duration::from_millis(10), acquire(&breaker, "u")).await;
    assert!(trial.is_err(), "dropped while it waits");
    store.set_fault(Fault::None);
    let start = Instant::now();
    while breaker.state().open {
        assert!(start.elapsed() < SECOND, "the circuit closes");
        let _ = acquire(&breaker, "u").await;
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn breaker_around_a_healthy_store_conforms_to_the_model() {
    let make = |clock: ManualClock| {
        let memory = MemoryStore::builder().clock(clock).build();
        Limiter::new(Breaker::builder(memory).timeout(SECOND).build())
    };
    conformance(seeds(1_000), async |clock| make(clock)).await;
    conformance_of_long_logs(seeds(4), async |clock| make(clock)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_through_a_breaker() {
    assert_exact_under_concurrency(&Limiter::new(Breaker::new(MemoryStore::new()))).await;
}

#[test]
fn decisions_of_a_healthy_store_do_not_allocate() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = Fallback::new(Breaker::new(MemoryStore::new()));
    let quota = Quota::token_bucket(1_000_000, LONG).expect("valid");
    let charge = Charge::new("user123", &quota);
    let acquire_many = || {
        runtime.block_on(async {
            for _ in 0..100 {
                let _ = store.decide(Action::Acquire, &charge).await.expect("decided");
            }
        });
    };
    acquire_many();
    assert_eq!(allocation_counter::measure(acquire_many).count_total, 0);
}
