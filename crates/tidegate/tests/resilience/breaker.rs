//! The circuit breaker. Most tests run in paused time.

use std::sync::Arc;
use std::time::Duration;

use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{
    Action, Algorithm, Breaker, Charge, Decision, Fallback, Limiter, ManualClock, MemoryStore,
    Quota, ShardId, Store, StoreError,
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
    let states = breaker.states();
    assert_eq!((states.len(), states[0].open, states[0].times_opened), (1, true, 1));
    assert_eq!(states[0].last_error, Some(StoreError::Unreachable("down".to_owned())));
}

#[tokio::test(start_paused = true)]
async fn a_failure_rate_of_a_half_opens_the_circuit_and_a_third_does_not() {
    let store = Flaky::new();
    let opens_at = async |every: u64, interval: Duration| {
        let breaker = Breaker::new(store.clone());
        for call in 1..=300 {
            store.set_fault(if call % every == 0 { down() } else { Fault::None });
            let _ = acquire(&breaker, "u").await;
            if breaker.states()[0].open {
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
    assert!(!breaker.states()[0].open);
}

#[tokio::test(start_paused = true)]
async fn a_recovered_store_is_used_again_within_a_second() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    for round in 1..=20 {
        store.set_fault(down());
        while !breaker.states().first().is_some_and(|state| state.open) {
            acquire(&breaker, "u").await.expect_err("down");
        }
        // Outages of different lengths end at different times between two probes.
        sleep(Duration::from_millis(317 * round)).await;
        assert!(breaker.states()[0].open, "the store is still down");
        store.set_fault(Fault::None);
        let back = Instant::now();
        while acquire(&breaker, "u").await.is_err() {
            assert!(back.elapsed() < SECOND, "round {round}");
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(breaker.states()[0].times_opened, round);
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_store_opens_the_circuit_once_without_flapping() {
    let store = Flaky::new();
    let timeout = Duration::from_millis(100);
    let breaker = Breaker::builder(store.clone()).timeout(timeout).build();
    store.set_fault(Fault::Slow(Duration::from_millis(300)));
    let start = Instant::now();
    let mut waited = 0;
    while start.elapsed() < 60 * SECOND {
        let before = Instant::now();
        acquire(&breaker, "u").await.expect_err("too slow");
        assert!(before.elapsed() <= timeout);
        waited += u64::from(before.elapsed() > Duration::ZERO);
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((waited, breaker.states()[0].times_opened), (5, 1));
    store.set_fault(Fault::Slow(Duration::from_millis(50)));
    sleep(SECOND).await;
    let _ = acquire(&breaker, "u").await.expect("slow, but in time");
}

#[tokio::test(start_paused = true)]
async fn shards_fail_independently() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.set_shard_fault(1, down());
    for _ in 0..5 {
        acquire(&breaker, "v@1").await.expect_err("down");
    }
    for _ in 0..20 {
        let _ = acquire(&breaker, "u").await.expect("another shard");
        let _ = acquire(&breaker, "w@65").await.expect("another shard");
        assert!(matches!(acquire(&breaker, "v@1").await, Err(StoreError::Open(_))));
    }
    let open: Vec<(ShardId, bool)> =
        breaker.states().iter().map(|state| (state.shard, state.open)).collect();
    assert_eq!(open, [(ShardId(0), false), (ShardId(1), true), (ShardId(65), false)]);
    // A request of both shards fails at once, without a call.
    let (quota, calls) = (quota(), store.calls());
    let both = [Charge::new("u", &quota), Charge::new("v@1", &quota)];
    assert!(matches!(breaker.decide_all(Action::Acquire, &both).await, Err(StoreError::Open(_))));
    assert_eq!(store.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn requests_of_several_shards_are_all_or_nothing() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    let (wide, narrow) = (
        Quota::token_bucket(10, LONG).expect("valid"),
        Quota::fixed_window(2, LONG).expect("valid"),
    );
    let charges = [
        Charge::new("a", &wide).with_cost(3),
        Charge::new("b@1", &narrow),
        Charge::new("c@2", &wide).with_cost(4),
        Charge::new("d", &wide),
    ];
    let counts = async || {
        let mut counts = Vec::new();
        for charge in &charges {
            counts.push(store.remaining(charge).await);
        }
        counts
    };
    let allowed = |decisions: &[Decision]| {
        decisions.iter().map(|decision| decision.allowed).collect::<Vec<_>>()
    };
    let remaining = |decisions: &[Decision]| {
        decisions.iter().map(|decision| decision.remaining).collect::<Vec<_>>()
    };

    let peeked = breaker.decide_all(Action::Peek, &charges).await.expect("decided");
    assert_eq!(remaining(&peeked), [7, 1, 6, 9]);
    assert_eq!(counts().await, [10, 2, 10, 10]);
    let first = breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
    assert_eq!(
        (allowed(&first), remaining(&first)),
        (vec![true; 4], vec![7, 1, 6, 9]),
        "in the order of the charges"
    );
    let _ = breaker.decide(Action::Acquire, &charges[1]).await.expect("decided");
    for action in [Action::Acquire, Action::Peek] {
        let denied = breaker.decide_all(action, &charges).await.expect("decided");
        assert_eq!(allowed(&denied), [true, false, true, true]);
        assert_eq!(remaining(&denied), [7, 0, 6, 9], "the units that remain with nothing spent");
        assert_eq!(counts().await, [7, 0, 6, 9]);
    }

    store.set_shard_fault(2, down());
    let _ = breaker.decide(Action::Reset, &charges[1]).await.expect("reset");
    for _ in 0..5 {
        breaker.decide_all(Action::Acquire, &charges).await.expect_err("down");
        assert_eq!(counts().await, [7, 2, 6, 9], "refunded");
    }
    let open: Vec<bool> = breaker.states().iter().map(|state| state.open).collect();
    assert_eq!(open, [false, false, true], "only the shard that fails");
}

/// A refund has the time of its charge, so it is safe however short the window is.
#[tokio::test(start_paused = true)]
async fn a_denial_by_one_shard_refunds_the_others() {
    let clock = ManualClock::new();
    let full = Quota::fixed_window(1, LONG).expect("valid");
    for algorithm in Algorithm::ALL {
        for window in [Duration::from_millis(50), Duration::from_secs(1), LONG] {
            let quota = Quota::new(algorithm, 1_000, window).expect("valid");
            let store = Flaky::on(&clock);
            let breaker = Breaker::new(store.clone());
            let charges = [Charge::new("a", &quota), Charge::new("b@1", &full)];
            breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
            let before = store.remaining(&charges[0]).await;
            let denied = breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
            assert!(!denied[1].allowed);
            assert_eq!(store.remaining(&charges[0]).await, before, "{quota:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_timeout_covers_all_shards_of_a_request() {
    let store = Flaky::new();
    let breaker = Breaker::builder(store.clone()).timeout(Duration::from_millis(100)).build();
    let quota = quota();
    let charges =
        [Charge::new("a", &quota), Charge::new("b@1", &quota), Charge::new("c@2", &quota)];
    for shard in 0..3 {
        store.set_shard_fault(shard, Fault::Slow(Duration::from_millis(60)));
    }
    let start = tokio::time::Instant::now();
    breaker.decide_all(Action::Acquire, &charges).await.expect_err("three times 60 ms");
    assert!(start.elapsed() <= Duration::from_millis(101), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn probes_stop_when_the_breaker_is_dropped() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.set_fault(down());
    for _ in 0..5 {
        acquire(&breaker, "u").await.expect_err("down");
    }
    sleep(10 * SECOND).await;
    let probes = store.probes();
    assert!((25..=100).contains(&probes), "{probes} in ten seconds");
    drop(breaker);
    sleep(10 * SECOND).await;
    assert_eq!(store.probes(), probes);
    assert_eq!(store.clones(), 1, "no task is left");
}

/// A breaker may outlive the runtime of its prober.
#[test]
fn another_runtime_continues_probing() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = Flaky::new();
    let breaker = Breaker::builder(store.clone()).probe_interval(Duration::from_millis(5)).build();
    store.set_fault(down());
    runtime().block_on(async {
        for _ in 0..5 {
            acquire(&breaker, "u").await.expect_err("down");
        }
    });
    store.set_fault(Fault::None);
    runtime().block_on(async {
        let start = Instant::now();
        while acquire(&breaker, "u").await.is_err() {
            assert!(start.elapsed() < 20 * SECOND, "the circuit closes");
            sleep(Duration::from_millis(5)).await;
        }
    });
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
