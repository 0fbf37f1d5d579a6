//! Group commit on a real Redis: decisions are the same as without it, and the failure of one
//! request does not affect the others.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{LONG, Redis, TEST_TIMEOUT, every_quota, packed, redis_6, until};
use tidegate::{
    Action, Charge, Decision, Error, Limiter, ManualClock, Quota, RedisStore, StoreError,
};
use tokio::task::JoinHandle;

/// More calls than may be in flight at once.
const CALLS: usize = 8;

async fn limiter_with(redis: &Redis, timeout: Duration) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&redis.url()).timeout(timeout).connect().await;
    Limiter::new(store.expect("our own server answers"))
}

/// Pauses writes in Redis, then fills the calls in flight.
async fn pause_and_fill_in_flight(
    redis: &Redis,
    limiter: &Limiter<RedisStore>,
) -> Vec<JoinHandle<Result<Decision, Error>>> {
    redis.pause_writes();
    fill_in_flight(limiter).await
}

/// Starts as many calls as may be in flight, so that later requests join a batch. The runtime must
/// have one thread.
async fn fill_in_flight(limiter: &Limiter<RedisStore>) -> Vec<JoinHandle<Result<Decision, Error>>> {
    let mut in_flight = Vec::new();
    for number in 0..CALLS {
        let (limiter, quota) =
            (limiter.clone(), Quota::fixed_window(1_000_000, LONG).expect("valid"));
        let key = format!("in-flight-{number}");
        in_flight.push(tokio::spawn(async move { limiter.peek(&Charge::new(&key, &quota)).await }));
        // One at a time, because otherwise they would share one call.
        run_ready_tasks().await;
    }
    in_flight
}

/// Sends a batch of several requests, after which a leader waits for others. Loads the script.
async fn share_a_batch(limiter: &Limiter<RedisStore>) {
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let charge = Charge::new("earlier", &quota);
    let acquire = || limiter.acquire(&charge);
    let (one, two, three) = tokio::join!(acquire(), acquire(), acquire());
    assert!([one, two, three].into_iter().all(|decided| decided.expect("decided").allowed));
}

/// Tasks run in the order in which they were spawned, each until it waits.
async fn run_ready_tasks() {
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
}

// ---- Equal decisions

/// Request of one caller.
#[derive(Debug, Clone)]
struct TestRequest {
    action: Action,
    /// Key, quota, cost.
    charges: Vec<(usize, usize, u64)>,
}

const KEYS: [&str; 3] = ["a", "{b}", "c"];

fn quotas() -> Vec<Quota> {
    let window = Duration::from_secs(10);
    let counting = |quota: Quota| quota.with_count_denied(true).expect("a log");
    let mut quotas = every_quota(7, window);
    quotas.extend(every_quota(40, window));
    quotas.push(counting(packed(5, window)));
    quotas.push(counting(Quota::sliding_log(5, window).expect("valid")));
    quotas
}

fn request() -> impl Strategy<Value = TestRequest> {
    let action = prop_oneof![
        8 => Just(Action::Acquire),
        1 => Just(Action::Peek),
        1 => Just(Action::Refund),
        1 => Just(Action::ChargeUpTo),
        1 => Just(Action::Reset),
    ];
    let charge =
        || (0..KEYS.len(), 0..quotas().len(), prop_oneof![4 => Just(1_u64), 1 => 2..4_u64]);
    let charges = prop_oneof![
        6 => charge().prop_map(|charge| vec![charge]),
        1 => (charge(), charge()).prop_map(|(one, other)| vec![one, other]),
    ];
    (action, charges).prop_map(|(action, charges)| TestRequest { action, charges })
}

/// Rounds of concurrent requests, most of them for few counts, and the time to advance after each.
fn rounds() -> impl Strategy<Value = Vec<(Vec<TestRequest>, u64)>> {
    let hot = request().prop_flat_map(|hot| {
        let requests = prop::collection::vec(prop_oneof![2 => Just(hot), 1 => request()], 1..24);
        (requests, prop_oneof![0..3_000_000_u64, 0..12_000_000_u64])
    });
    prop::collection::vec(hot, 1..4)
}

/// Returns the order in which requests are decided: equal acquires at the position of the first.
fn grant_order(requests: &[TestRequest]) -> Vec<usize> {
    let is_shareable = |request: &TestRequest| {
        let counts_denied = |(_, quota, _): &(usize, usize, u64)| quotas()[*quota].count_denied();
        request.action == Action::Acquire
            && request.charges.len() == 1
            && !request.charges.iter().any(counts_denied)
    };
    let first_equal = |index: usize| {
        let request = &requests[index];
        let mut others = requests.iter();
        let equal =
            others.position(|other| is_shareable(other) && other.charges == request.charges);
        equal.filter(|_| is_shareable(request)).unwrap_or(index)
    };
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|index| first_equal(*index));
    order
}

async fn decide(
    limiter: &Limiter<RedisStore>,
    request: &TestRequest,
) -> Result<Vec<Decision>, Error> {
    let quotas = quotas();
    let names: Vec<String> =
        request.charges.iter().map(|(_, quota, _)| format!("policy-{quota}")).collect();
    let charges: Vec<Charge<'_>> = (request.charges.iter().zip(&names))
        .map(|((key, quota, cost), name)| {
            Charge::new(KEYS[*key], &quotas[*quota]).with_policy(name).with_cost(*cost)
        })
        .collect();
    limiter.decide_all(request.action, &charges).await.map(Vec::from)
}

async fn every_count(limiter: &Limiter<RedisStore>) -> Vec<Result<Vec<Decision>, Error>> {
    let mut counts = Vec::new();
    for key in 0..KEYS.len() {
        for quota in 0..quotas().len() {
            counts.push(
                decide(
                    limiter,
                    &TestRequest { action: Action::Peek, charges: vec![(key, quota, 1)] },
                )
                .await,
            );
        }
    }
    counts
}

async fn assert_batches_match_single_calls(
    redis: &Redis,
    rounds: Vec<(Vec<TestRequest>, u64)>,
) -> Result<(), TestCaseError> {
    redis.query::<()>(&["FLUSHALL"]);
    let clock = ManualClock::new();
    let batched = redis.driven_limiter(clock.clone()).await;
    let builder = RedisStore::builder(&redis.url())
        .timeout(TEST_TIMEOUT)
        .prefix("alone")
        .driven_by(clock.clone());
    let unbatched = Limiter::new(builder.group_commit(false).connect().await.expect("connected"));
    for (requests, pause) in rounds {
        let in_flight = pause_and_fill_in_flight(redis, &batched).await;
        let tasks: Vec<_> = requests
            .iter()
            .map(|request| {
                let (limiter, request) = (batched.clone(), request.clone());
                tokio::spawn(async move { decide(&limiter, &request).await })
            })
            .collect();
        run_ready_tasks().await;
        redis.resume_writes();
        for task in in_flight {
            let _ = task.await.expect("no panic").expect("decided");
        }
        let mut decided = Vec::new();
        for task in tasks {
            decided.push(task.await.expect("no panic"));
        }
        for index in grant_order(&requests) {
            prop_assert_eq!(
                &decided[index],
                &decide(&unbatched, &requests[index]).await,
                "{} of {:?}",
                index,
                &requests
            );
        }
        prop_assert_eq!(every_count(&batched).await, every_count(&unbatched).await);
        clock.advance(Duration::from_micros(pause));
        prop_assert_eq!(
            every_count(&batched).await,
            every_count(&unbatched).await,
            "after {} us",
            pause
        );
    }
    Ok(())
}

fn check_batches(program: &Path, cases: u32) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let redis = Redis::start_program(program, &[]);
    let mut runner =
        TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..Default::default() });
    let outcome = runner.run(&rounds(), |rounds| {
        runtime.block_on(assert_batches_match_single_calls(&redis, rounds))
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    redis.assert_every_key_expires();
}

#[test]
fn batched_decisions_equal_single_decisions() {
    let cases = u32::try_from(support::seeds(60).end).expect("a 32-bit number");
    check_batches(Path::new("redis-server"), cases);
}

#[test]
fn batched_decisions_equal_single_decisions_on_redis_6() {
    check_batches(&redis_6(), 15);
}

/// Each caller has one unit less remaining, and the delays of a leaky bucket grow.
#[tokio::test]
async fn equal_acquires_are_granted_in_order_of_arrival() {
    let redis = Redis::start();
    for quota in every_quota(50, LONG) {
        let limiter = redis.driven_limiter(ManualClock::new()).await;
        let in_flight = pause_and_fill_in_flight(&redis, &limiter).await;
        let before = redis.calls_of("evalsha");
        let tasks: Vec<_> = (0..60)
            .map(|_| {
                let (limiter, quota) = (limiter.clone(), quota.clone());
                tokio::spawn(async move {
                    limiter.acquire(&Charge::new("hot", &quota)).await.expect("decided")
                })
            })
            .collect();
        run_ready_tasks().await;
        redis.resume_writes();
        for task in in_flight {
            let _ = task.await.expect("no panic").expect("decided");
        }
        let mut delay = None;
        let mut left = 50;
        for (index, task) in tasks.into_iter().enumerate() {
            let decision = task.await.expect("no panic");
            assert_eq!(decision.allowed, index < 50, "{} {index}", quota.default_policy_name());
            left -= u64::from(decision.allowed);
            assert_eq!(decision.remaining, left, "{} {index}", quota.default_policy_name());
            if quota.algorithm() == tidegate::Algorithm::LeakyBucket && decision.allowed {
                assert!(delay < Some(decision.delay), "{delay:?} then {:?}", decision.delay);
                delay = Some(decision.delay);
            }
        }
        assert!(redis.calls_of("evalsha") - before <= CALLS as u64 + 1, "one call for all");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_decisions_share_few_calls() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = packed(100, LONG);
    let tasks: Vec<_> = (0..256)
        .map(|caller| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tokio::spawn(async move {
                for round in 0..20 {
                    let name = format!("user-{caller}-{round}");
                    let decision =
                        limiter.acquire(&Charge::new(&name, &quota)).await.expect("decided");
                    assert_eq!((decision.allowed, decision.remaining), (true, 99));
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let calls = redis.calls_of("evalsha");
    assert!(calls < 256 * 20 / 8, "{calls} calls for {} decisions", 256 * 20);
    assert_eq!(redis.query::<u64>(&["DBSIZE"]), 256 * 20);
    redis.assert_every_key_expires();
}

/// The leader waits for the others, and all are decided in order of arrival.
#[tokio::test]
async fn requests_of_ready_tasks_share_one_call() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = packed(100, LONG);
    share_a_batch(&limiter).await;
    let before = redis.calls_of("evalsha");
    let acquire = |key: String| {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move {
            limiter.acquire(&Charge::new(&key, &quota)).await.expect("decided").remaining
        })
    };
    let tasks: Vec<_> = (0..40).map(|caller| acquire(format!("user-{}", caller % 2))).collect();
    for (caller, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.expect("no panic"), 99 - caller as u64 / 2);
    }
    assert_eq!(redis.calls_of("evalsha") - before, 1);
}

/// If the leader is dropped after it has yielded, its batch is sent without its request.
#[tokio::test]
async fn a_dropped_leader_does_not_affect_its_batch() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    share_a_batch(&limiter).await;
    let (mut first, mut second) =
        (Box::pin(limiter.acquire(&charge)), Box::pin(limiter.acquire(&charge)));
    std::future::poll_fn(|context| {
        assert!(first.as_mut().poll(context).is_pending(), "it has yielded");
        assert!(second.as_mut().poll(context).is_pending(), "it has joined");
        std::task::Poll::Ready(())
    })
    .await;
    drop(first);
    assert_eq!(second.await.expect("decided").remaining, 9);
    assert_eq!(
        limiter.acquire(&charge).await.expect("decided").remaining,
        8,
        "only one was charged"
    );
}

// ---- Independence of requests

#[tokio::test]
async fn a_cancelled_request_is_not_charged_and_delays_no_other() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let request = || {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move {
            limiter.acquire(&Charge::new("u", &quota)).await.expect("decided").remaining
        })
    };
    let in_flight = pause_and_fill_in_flight(&redis, &limiter).await;
    let (first, second, third) = (request(), request(), request());
    run_ready_tasks().await;
    second.abort();
    // The calls in flight are cancelled, too. The batch that waits for them is sent.
    for task in &in_flight {
        task.abort();
    }
    run_ready_tasks().await;
    redis.resume_writes();
    assert_eq!(first.await.expect("no panic"), 9);
    assert_eq!(third.await.expect("no panic"), 8);
    assert!(second.await.expect_err("aborted").is_cancelled());
    assert_eq!(limiter.peek(&Charge::new("u", &quota)).await.expect("decided").remaining, 7);
}

#[tokio::test]
async fn each_caller_has_its_own_deadline_and_is_not_charged_after_it() {
    const TIMEOUT: Duration = Duration::from_millis(400);
    let redis = Redis::start();
    let limiter = limiter_with(&redis, TIMEOUT).await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    let before = redis.calls_of("evalsha");
    redis.signal("STOP");
    let in_flight = fill_in_flight(&limiter).await;
    let mut tasks = Vec::new();
    for _ in 0..6 {
        for _ in 0..5 {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tasks.push(tokio::spawn(async move {
                let start = Instant::now();
                let outcome = limiter.acquire(&Charge::new("u", &quota)).await;
                (outcome, start.elapsed())
            }));
        }
        tokio::time::sleep(TIMEOUT / 4).await;
    }
    for task in tasks {
        let (outcome, waited) = task.await.expect("no panic");
        // After the first timeouts the circuit is open, and rejects at once.
        let earliest = match outcome {
            Err(Error::Store(StoreError::Open(_))) => Duration::ZERO,
            Err(Error::Store(error)) if *error.reason() == StoreError::Timeout(TIMEOUT) => TIMEOUT,
            outcome => panic!("{outcome:?}"),
        };
        assert!(
            waited >= earliest && waited < earliest + Duration::from_millis(300),
            "after {waited:?}"
        );
    }
    for task in in_flight {
        assert!(task.await.expect("no panic").is_err());
    }
    redis.signal("CONT");
    until("the sent calls have run", async || redis.calls_of("evalsha") > before).await;
    until("decisions are made again", async || limiter.peek(&charge).await.is_ok()).await;
    assert_eq!(
        limiter.peek(&charge).await.expect("decided").remaining,
        998,
        "no late request was charged"
    );
}

#[tokio::test]
async fn a_failing_request_does_not_affect_the_others() {
    for program in [Path::new("redis-server").to_owned(), redis_6()] {
        let redis = Redis::start_program(&program, &[]);
        redis.grant(&support::PERMISSIONS);
        redis.query::<()>(&["ACL", "SETUSER", "tidegate", "-zadd", "+client|pause"]);
        let store = RedisStore::builder(&redis.url_of_user())
            .timeout(TEST_TIMEOUT)
            .connect()
            .await
            .expect("connected");
        let limiter = Limiter::new(store);
        let in_flight = pause_and_fill_in_flight(&redis, &limiter).await;
        let bad = Quota::sliding_log(10, LONG).expect("valid");
        let good = Quota::fixed_window(10, LONG).expect("valid");
        let request = |quota: &Quota, name: &'static str, cost: u64| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tokio::spawn(async move {
                limiter.acquire(&Charge::new(name, &quota).with_cost(cost)).await
            })
        };
        let both = {
            let (limiter, good, bad) = (limiter.clone(), good.clone(), bad.clone());
            tokio::spawn(async move {
                limiter.acquire_all(&[Charge::new("e", &good), Charge::new("e", &bad)]).await
            })
        };
        let valid = [request(&good, "a", 1), request(&good, "b", 1), request(&good, "b", 2)];
        let failing = [request(&bad, "c", 1), request(&bad, "c", 2)];
        let last = request(&good, "d", 3);
        run_ready_tasks().await;
        redis.resume_writes();
        for task in in_flight {
            let _ = task.await.expect("no panic").expect("decided");
        }
        let mut left = Vec::new();
        for task in valid.into_iter().chain([last]) {
            left.push(task.await.expect("no panic").expect("decided").remaining);
        }
        assert_eq!(left, [9, 9, 7, 7]);
        let both = both.await.expect("no panic").expect_err("no right to ZADD").to_string();
        assert!(both.contains("+zadd"), "{both}");
        for task in failing {
            let error = task.await.expect("no panic").expect_err("no right to ZADD").to_string();
            assert!(error.contains("+zadd") && error.contains("127.0.0.1"), "{error}");
            assert!(!error.contains("user_script"), "{error}");
        }
    }
}

fn is_unreachable(error: &Error) -> bool {
    matches!(error, Error::Store(error) if matches!(error.reason(), StoreError::Unreachable(_)))
}

/// A lost connection fails two calls, however many callers share them.
#[tokio::test]
async fn the_circuit_counts_calls_and_not_their_callers() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let request = || {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move { limiter.acquire(&Charge::new("u", &quota)).await })
    };
    share_a_batch(&limiter).await;
    redis.pause_writes();
    let calls = redis.calls_of("evalsha");
    let callers: Vec<_> = (0..20).map(|_| request()).collect();
    run_ready_tasks().await;
    redis.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    for caller in callers {
        let error = caller.await.expect("no panic").expect_err("the connection was lost");
        assert!(matches!(error, Error::Store(StoreError::AnswerLost(_))), "{error:?}");
    }
    redis.resume_writes();
    assert_eq!(redis.calls_of("evalsha"), calls, "none has run");
    let nodes = limiter.store().nodes();
    assert_eq!(nodes[0].circuit.times_opened, 0, "{:?}", nodes[0].circuit);
    until("decisions are made again", async || request().await.expect("no panic").is_ok()).await;
}

#[tokio::test]
async fn connection_loss_fails_all_in_flight_calls() {
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let in_flight = pause_and_fill_in_flight(&redis, &limiter).await;
    let request = || {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move { limiter.acquire(&Charge::new("u", &quota)).await })
    };
    let tasks: Vec<_> = (0..20).map(|_| request()).collect();
    run_ready_tasks().await;
    redis.restart();
    for task in in_flight {
        let _ = task.await.expect("no panic");
    }
    let mut decided = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            Ok(decision) => decided += u64::from(decision.allowed),
            Err(error) => assert!(is_unreachable(&error), "{error}"),
        }
    }
    until("decisions are made again", async || {
        limiter.peek(&Charge::new("u", &quota)).await.is_ok()
    })
    .await;
    let left = limiter.peek(&Charge::new("u", &quota)).await.expect("decided").remaining;
    assert_eq!(left, 999 - decided, "exactly the allowed requests were charged");
}

/// Like the items of a stream that is no longer polled.
#[tokio::test]
async fn futures_that_are_not_polled_do_not_block_others() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(100, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let mut stalled: Vec<_> = (0..CALLS).map(|_| Box::pin(limiter.acquire(&charge))).collect();
    for call in &mut stalled {
        let polled = std::future::poll_fn(|context| {
            std::task::Poll::Ready(call.as_mut().poll(context).is_pending())
        });
        assert!(polled.await, "in flight or waiting");
    }
    let start = Instant::now();
    for _ in 0..20 {
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?} for twenty decisions", start.elapsed());
    for call in stalled {
        let _ = call.await.expect("decided");
    }
    assert_eq!(limiter.peek(&charge).await.expect("decided").remaining, 99 - 20 - CALLS as u64);
}

#[test]
fn waiters_get_an_error_when_the_runtime_of_the_store_ends() {
    let redis = Redis::start();
    let owner = tokio::runtime::Runtime::new().expect("a runtime");
    let limiter = owner.block_on(limiter_with(&redis, 2 * TEST_TIMEOUT));
    let callers = tokio::runtime::Builder::new_current_thread().enable_all().build();
    callers.expect("a runtime").block_on(async {
        let quota = Quota::fixed_window(10, LONG).expect("valid");
        let charge = Charge::new("earlier", &quota);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        redis.pause_writes();
        // The first one is in flight, the others wait for the next call.
        let waiting = fill_in_flight(&limiter).await;
        owner.shutdown_background();
        for task in waiting {
            let decided = tokio::time::timeout(TEST_TIMEOUT, task).await.expect("in time");
            let error = decided.expect("no panic").expect_err("not sent");
            assert!(is_unreachable(&error), "{error:?}");
        }
    });
}
