//! The breaker, in paused time: a minute takes no time.

use std::time::Duration;

use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{
    Action, Algorithm, Breaker, Charge, Decision, Fallback, Limiter, ManualClock, MemoryStore,
    Part, Quota, Store, StoreError,
};
use tokio::time::{Instant, advance, sleep};

use crate::flaky::{Flaky, Mood, gone};
use crate::support::{LONG, assert_exact_under_concurrency, seeds};

const SECOND: Duration = Duration::from_secs(1);

fn quota() -> Quota {
    Quota::sliding_log(1_000, LONG).expect("valid")
}

async fn acquire<S: Store>(store: &S, key: &str) -> Result<Decision, StoreError> {
    store.decide(Action::Acquire, &Charge::new(key, &quota())).await
}

#[tokio::test(start_paused = true)]
async fn five_failures_in_a_row_open_it_and_nobody_asks_the_store_any_more() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.is(gone());
    for _ in 0..4 {
        acquire(&breaker, "u").await.expect_err("gone");
    }
    store.is(Mood::Well);
    acquire(&breaker, "u").await.expect("four are not enough");
    // Or the four would be some of five within a second.
    advance(2 * SECOND).await;
    store.is(gone());
    for _ in 0..5 {
        assert_eq!(acquire(&breaker, "u").await, Err(StoreError::Unreachable("gone".to_owned())));
    }
    let asked = store.calls();
    for _ in 0..100 {
        let refused = acquire(&breaker, "u").await.expect_err("open");
        assert!(
            matches!(&refused, StoreError::Open(cause) if **cause == StoreError::Unreachable("gone".to_owned()))
        );
        assert_eq!(
            refused.to_string(),
            "the store was not asked, for it is failing: the store cannot be reached: gone"
        );
    }
    assert_eq!(store.calls(), asked);
    let states = breaker.states();
    assert_eq!((states.len(), states[0].open, states[0].opened), (1, true, 1));
    assert_eq!(states[0].last_error, Some(StoreError::Unreachable("gone".to_owned())));
}

#[tokio::test(start_paused = true)]
async fn half_of_the_calls_of_a_second_open_it_a_third_does_not() {
    let store = Flaky::new();
    let fail_one_in = async |every: u64, pause: Duration| {
        let breaker = Breaker::new(store.clone());
        for call in 1..=300 {
            store.is(if call % every == 0 { gone() } else { Mood::Well });
            let _ = acquire(&breaker, "u").await;
            if breaker.states()[0].open {
                return Some(call);
            }
            advance(pause).await;
        }
        None
    };
    assert_eq!(fail_one_in(2, Duration::from_millis(10)).await, Some(10));
    assert_eq!(fail_one_in(3, Duration::from_millis(10)).await, None);
    // Half of them, but not five in any second.
    assert_eq!(fail_one_in(2, Duration::from_millis(150)).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_full_memory_or_a_wrong_option_is_an_answer_and_opens_nothing() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    for error in [StoreError::Full { cap: 1 }, StoreError::Misconfigured("no".to_owned())] {
        store.is(Mood::Fails(error.clone()));
        for _ in 0..20 {
            assert_eq!(acquire(&breaker, "u").await, Err(error.clone()));
        }
    }
    assert!(!breaker.states()[0].open);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_back_is_used_again_within_a_second() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    for round in 1..=20 {
        store.is(gone());
        while !breaker.states().first().is_some_and(|state| state.open) {
            acquire(&breaker, "u").await.expect_err("gone");
        }
        // Away for different times, so that it comes back at different moments between two probes.
        sleep(Duration::from_millis(317 * round)).await;
        assert!(breaker.states()[0].open, "the store is still away");
        store.is(Mood::Well);
        let back = Instant::now();
        while acquire(&breaker, "u").await.is_err() {
            assert!(back.elapsed() < SECOND, "round {round}");
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(breaker.states()[0].opened, round);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_too_slow_stays_out_without_flapping_and_nobody_waits_for_it() {
    let store = Flaky::new();
    let deadline = Duration::from_millis(100);
    let breaker = Breaker::builder(store.clone()).deadline(deadline).build();
    store.is(Mood::Slow(Duration::from_millis(300)));
    let start = Instant::now();
    let mut waited = 0;
    while start.elapsed() < 60 * SECOND {
        let before = Instant::now();
        acquire(&breaker, "u").await.expect_err("too slow");
        assert!(before.elapsed() <= deadline);
        waited += u64::from(before.elapsed() > Duration::ZERO);
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((waited, breaker.states()[0].opened), (5, 1));
    store.is(Mood::Slow(Duration::from_millis(50)));
    sleep(SECOND).await;
    acquire(&breaker, "u").await.expect("slow, but in time");
}

#[tokio::test(start_paused = true)]
async fn parts_fail_apart() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.part_is(1, gone());
    for _ in 0..5 {
        acquire(&breaker, "v@1").await.expect_err("gone");
    }
    for _ in 0..20 {
        acquire(&breaker, "u").await.expect("another part");
        acquire(&breaker, "w@65").await.expect("another part");
        assert!(matches!(acquire(&breaker, "v@1").await, Err(StoreError::Open(_))));
    }
    let open: Vec<(Part, bool)> =
        breaker.states().iter().map(|state| (state.part, state.open)).collect();
    assert_eq!(open, [(Part(0), false), (Part(1), true), (Part(65), false)]);
    // Together they fail at once, and nothing is asked.
    let (quota, calls) = (quota(), store.calls());
    let both = [Charge::new("u", &quota), Charge::new("v@1", &quota)];
    assert!(matches!(breaker.decide_all(Action::Acquire, &both).await, Err(StoreError::Open(_))));
    assert_eq!(store.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn over_several_parts_all_or_nothing_holds_and_the_failing_part_is_blamed() {
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
    let left = async || {
        let mut left = Vec::new();
        for charge in &charges {
            left.push(store.left(charge).await);
        }
        left
    };
    let allowed = |decisions: &[Decision]| {
        decisions.iter().map(|decision| decision.allowed).collect::<Vec<_>>()
    };
    let remaining = |decisions: &[Decision]| {
        decisions.iter().map(|decision| decision.remaining).collect::<Vec<_>>()
    };

    let peeked = breaker.decide_all(Action::Peek, &charges).await.expect("decided");
    assert_eq!(remaining(&peeked), [7, 1, 6, 9]);
    assert_eq!(left().await, [10, 2, 10, 10]);
    let first = breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
    assert_eq!(
        (allowed(&first), remaining(&first)),
        (vec![true; 4], vec![7, 1, 6, 9]),
        "in the order of the charges"
    );
    breaker.decide(Action::Acquire, &charges[1]).await.expect("decided");
    for action in [Action::Acquire, Action::Peek] {
        let denied = breaker.decide_all(action, &charges).await.expect("decided");
        assert_eq!(allowed(&denied), [true, false, true, true]);
        assert_eq!(remaining(&denied), [7, 0, 6, 9], "what is left with nothing taken");
        assert_eq!(left().await, [7, 0, 6, 9]);
    }

    store.part_is(2, gone());
    breaker.decide(Action::Reset, &charges[1]).await.expect("reset");
    for _ in 0..5 {
        breaker.decide_all(Action::Acquire, &charges).await.expect_err("gone");
        assert_eq!(left().await, [7, 2, 6, 9], "given back");
    }
    let open: Vec<bool> = breaker.states().iter().map(|state| state.open).collect();
    assert_eq!(open, [false, false, true], "only the part that fails");
}

/// A refund names the time of its charge, so that it is safe however short the window is.
#[tokio::test(start_paused = true)]
async fn a_denial_by_one_part_refunds_the_others_whatever_the_algorithm() {
    let clock = ManualClock::new();
    let full = Quota::fixed_window(1, LONG).expect("valid");
    for algorithm in Algorithm::ALL {
        for window in [Duration::from_millis(50), Duration::from_secs(1), LONG] {
            let quota = Quota::new(algorithm, 1_000, window).expect("valid");
            let store = Flaky::on(&clock);
            let breaker = Breaker::new(store.clone());
            let charges = [Charge::new("a", &quota), Charge::new("b@1", &full)];
            breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
            let before = store.left(&charges[0]).await;
            let denied = breaker.decide_all(Action::Acquire, &charges).await.expect("decided");
            assert!(!denied[1].allowed);
            assert_eq!(store.left(&charges[0]).await, before, "{quota:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_deadline_is_for_all_parts_together() {
    let store = Flaky::new();
    let breaker = Breaker::builder(store.clone()).deadline(Duration::from_millis(100)).build();
    let quota = quota();
    let charges =
        [Charge::new("a", &quota), Charge::new("b@1", &quota), Charge::new("c@2", &quota)];
    for part in 0..3 {
        store.part_is(part, Mood::Slow(Duration::from_millis(60)));
    }
    let start = tokio::time::Instant::now();
    breaker.decide_all(Action::Acquire, &charges).await.expect_err("three times 60 ms");
    assert!(start.elapsed() <= Duration::from_millis(101), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_probes_end_with_the_breaker() {
    let store = Flaky::new();
    let breaker = Breaker::new(store.clone());
    store.is(gone());
    for _ in 0..5 {
        acquire(&breaker, "u").await.expect_err("gone");
    }
    sleep(10 * SECOND).await;
    let probes = store.probes();
    assert!((25..=100).contains(&probes), "{probes} in ten seconds");
    drop(breaker);
    sleep(10 * SECOND).await;
    assert_eq!(store.probes(), probes);
    assert_eq!(store.holders(), 1, "nothing of the breaker is left");
}

/// A runtime may end before the breaker does: then the next one takes over.
#[test]
fn another_runtime_goes_on_probing() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = Flaky::new();
    let breaker = Breaker::builder(store.clone()).probe_pause(Duration::from_millis(5)).build();
    store.is(gone());
    runtime().block_on(async {
        for _ in 0..5 {
            acquire(&breaker, "u").await.expect_err("gone");
        }
    });
    store.is(Mood::Well);
    runtime().block_on(async {
        let start = Instant::now();
        while acquire(&breaker, "u").await.is_err() {
            assert!(start.elapsed() < 20 * SECOND, "closed again");
            sleep(Duration::from_millis(5)).await;
        }
    });
}

#[tokio::test]
async fn around_a_healthy_store_it_conforms_to_the_model() {
    let make = |clock: ManualClock| {
        let memory = MemoryStore::builder().clock(clock).build();
        Limiter::new(Breaker::builder(memory).deadline(SECOND).build())
    };
    conformance(seeds(1_000), async |clock| make(clock)).await;
    conformance_of_long_logs(seeds(4), async |clock| make(clock)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_through_it() {
    assert_exact_under_concurrency(&Limiter::new(Breaker::new(MemoryStore::new()))).await;
}

#[test]
fn around_a_healthy_store_nothing_is_allocated() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = Fallback::new(Breaker::new(MemoryStore::new()));
    let quota = Quota::token_bucket(1_000_000, LONG).expect("valid");
    let charge = Charge::new("user123", &quota);
    let ask = || {
        runtime.block_on(async {
            for _ in 0..100 {
                store.decide(Action::Acquire, &charge).await.expect("decided");
            }
        });
    };
    ask();
    assert_eq!(allocation_counter::measure(ask).count_total, 0);
}
