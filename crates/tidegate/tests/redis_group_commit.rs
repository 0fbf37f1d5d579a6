//! Group commit on a real Redis: what is decided together is what would be decided one by one, and
//! nobody's trouble is another's.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{LONG, PATIENCE, Redis, every_quota, packed, redis_6, until};
use tidegate::{
    Action, Charge, Decision, Error, Limiter, ManualClock, Quota, RedisStore, StoreError,
};
use tokio::task::JoinHandle;

/// As many calls as may be under way at once, and more.
const CALLS: usize = 8;

async fn limiter_with(redis: &Redis, timeout: Duration) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&redis.url()).timeout(timeout).connect().await;
    Limiter::new(store.expect("our own server answers"))
}

async fn occupy(
    redis: &Redis,
    limiter: &Limiter<RedisStore>,
) -> Vec<JoinHandle<Result<Decision, Error>>> {
    redis.hold_back();
    under_way(limiter).await
}

/// Callers that are under way, so that everybody who comes after them gathers. The runtime must
/// have one thread.
async fn under_way(limiter: &Limiter<RedisStore>) -> Vec<JoinHandle<Result<Decision, Error>>> {
    let mut occupied = Vec::new();
    for number in 0..CALLS {
        let (limiter, quota) =
            (limiter.clone(), Quota::fixed_window(1_000_000, LONG).expect("valid"));
        let key = format!("occupied-{number}");
        occupied.push(tokio::spawn(async move { limiter.peek(&Charge::new(&key, &quota)).await }));
        // One by one, or they would all go in one call.
        everybody_has_come().await;
    }
    occupied
}

/// Tasks run in the order in which they were spawned, each until it waits.
async fn everybody_has_come() {
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
}

// ---- The same answers
// -------------------------------------------------------------------------------------------

/// What one caller asks: an action on some charges.
#[derive(Debug, Clone)]
struct Ask {
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

fn ask() -> impl Strategy<Value = Ask> {
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
    (action, charges).prop_map(|(action, charges)| Ask { action, charges })
}

/// Several rounds of asks that come at once, most of them for few counts, and how far time goes on
/// after each.
fn rounds() -> impl Strategy<Value = Vec<(Vec<Ask>, u64)>> {
    let hot = ask().prop_flat_map(|hot| {
        let asks = prop::collection::vec(prop_oneof![2 => Just(hot), 1 => ask()], 1..24);
        (asks, prop_oneof![0..3_000_000_u64, 0..12_000_000_u64])
    });
    prop::collection::vec(hot, 1..4)
}

/// Equal acquires are granted together, in the place of the first.
fn in_order_of_grants(asks: &[Ask]) -> Vec<usize> {
    let joins = |ask: &Ask| {
        let counts_denied = |(_, quota, _): &(usize, usize, u64)| quotas()[*quota].count_denied();
        ask.action == Action::Acquire
            && ask.charges.len() == 1
            && !ask.charges.iter().any(counts_denied)
    };
    let first_equal = |at: usize| {
        let equal = |other: &Ask| joins(other) && other.charges == asks[at].charges;
        if joins(&asks[at]) { asks.iter().position(equal).unwrap_or(at) } else { at }
    };
    let mut order: Vec<usize> = (0..asks.len()).collect();
    order.sort_by_key(|at| first_equal(*at));
    order
}

async fn decide(limiter: &Limiter<RedisStore>, ask: &Ask) -> Result<Vec<Decision>, Error> {
    let quotas = quotas();
    let names: Vec<String> =
        ask.charges.iter().map(|(_, quota, _)| format!("policy-{quota}")).collect();
    let charges: Vec<Charge<'_>> = (ask.charges.iter().zip(&names))
        .map(|((key, quota, cost), name)| {
            Charge::new(KEYS[*key], &quotas[*quota]).with_policy(name).with_cost(*cost)
        })
        .collect();
    limiter.decide_all(ask.action, &charges).await
}

async fn every_count(limiter: &Limiter<RedisStore>) -> Vec<Result<Vec<Decision>, Error>> {
    let mut counts = Vec::new();
    for key in 0..KEYS.len() {
        for quota in 0..quotas().len() {
            counts.push(
                decide(limiter, &Ask { action: Action::Peek, charges: vec![(key, quota, 1)] })
                    .await,
            );
        }
    }
    counts
}

async fn assert_together_is_one_by_one(
    redis: &Redis,
    rounds: Vec<(Vec<Ask>, u64)>,
) -> Result<(), TestCaseError> {
    redis.query::<()>(&["FLUSHALL"]);
    let clock = ManualClock::new();
    let together = redis.driven_limiter(clock.clone()).await;
    let builder = RedisStore::builder(&redis.url())
        .timeout(PATIENCE)
        .prefix("alone")
        .driven_by(clock.clone());
    let alone = Limiter::new(builder.group_commit(false).connect().await.expect("connected"));
    for (asks, pause) in rounds {
        let occupied = occupy(redis, &together).await;
        let tasks: Vec<_> = asks
            .iter()
            .map(|ask| {
                let (limiter, ask) = (together.clone(), ask.clone());
                tokio::spawn(async move { decide(&limiter, &ask).await })
            })
            .collect();
        everybody_has_come().await;
        redis.go_on();
        for task in occupied {
            task.await.expect("no panic").expect("decided");
        }
        let mut decided = Vec::new();
        for task in tasks {
            decided.push(task.await.expect("no panic"));
        }
        for at in in_order_of_grants(&asks) {
            prop_assert_eq!(
                &decided[at],
                &decide(&alone, &asks[at]).await,
                "{} of {:?}",
                at,
                &asks
            );
        }
        prop_assert_eq!(every_count(&together).await, every_count(&alone).await);
        clock.advance(Duration::from_micros(pause));
        prop_assert_eq!(
            every_count(&together).await,
            every_count(&alone).await,
            "after {} us",
            pause
        );
    }
    Ok(())
}

fn together_is_one_by_one(program: &Path, cases: u32) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let redis = Redis::start_program(program, &[]);
    let mut runner =
        TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..Default::default() });
    let outcome = runner
        .run(&rounds(), |rounds| runtime.block_on(assert_together_is_one_by_one(&redis, rounds)));
    if let Err(error) = outcome {
        panic!("{error}");
    }
    redis.assert_every_key_expires();
}

#[test]
fn what_is_decided_together_is_what_is_decided_one_by_one() {
    together_is_one_by_one(
        Path::new("redis-server"),
        u32::try_from(support::seeds(60).end).expect("not so many"),
    );
}

#[test]
fn redis_6_decides_together_what_it_decides_one_by_one() {
    together_is_one_by_one(&redis_6(), 15);
}

/// Callers of one key, in their order: each is told one less, and a leaky bucket's delays grow.
#[tokio::test]
async fn callers_of_one_key_are_granted_in_the_order_in_which_they_came() {
    let redis = Redis::start();
    for quota in every_quota(50, LONG) {
        let limiter = redis.driven_limiter(ManualClock::new()).await;
        let occupied = occupy(&redis, &limiter).await;
        let before = redis.calls_of("evalsha");
        let tasks: Vec<_> = (0..60)
            .map(|_| {
                let (limiter, quota) = (limiter.clone(), quota.clone());
                tokio::spawn(async move {
                    limiter.acquire(&Charge::new("hot", &quota)).await.expect("decided")
                })
            })
            .collect();
        everybody_has_come().await;
        redis.go_on();
        for task in occupied {
            task.await.expect("no panic").expect("decided");
        }
        let mut delay = None;
        let mut left = 50;
        for (at, task) in tasks.into_iter().enumerate() {
            let decision = task.await.expect("no panic");
            assert_eq!(decision.allowed, at < 50, "{} {at}", quota.default_policy_name());
            left -= u64::from(decision.allowed);
            assert_eq!(decision.remaining, left, "{} {at}", quota.default_policy_name());
            if quota.algorithm() == tidegate::Algorithm::LeakyBucket && decision.allowed {
                assert!(delay < Some(decision.delay), "{delay:?} then {:?}", decision.delay);
                delay = Some(decision.delay);
            }
        }
        assert!(redis.calls_of("evalsha") - before <= CALLS as u64 + 1, "one call for all");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_decisions_go_in_few_calls() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = packed(100, LONG);
    let tasks: Vec<_> = (0..256)
        .map(|caller| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tokio::spawn(async move {
                for turn in 0..20 {
                    let name = format!("user-{caller}-{turn}");
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

/// Not even the first of them goes ahead alone; and they are told in the order in which they came.
#[tokio::test]
async fn all_who_are_ready_at_once_go_in_one_call() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = packed(100, LONG);
    limiter.acquire(&Charge::new("loads the script", &quota)).await.expect("decided");
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

/// The first one steps aside for the others; if it then goes away, they are asked for, and it is
/// not.
#[tokio::test]
async fn who_leads_and_goes_away_leaves_nobody_behind() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let (mut first, mut second) =
        (Box::pin(limiter.acquire(&charge)), Box::pin(limiter.acquire(&charge)));
    std::future::poll_fn(|context| {
        assert!(first.as_mut().poll(context).is_pending(), "it has stepped aside");
        assert!(second.as_mut().poll(context).is_pending(), "it has joined");
        std::task::Poll::Ready(())
    })
    .await;
    drop(first);
    assert_eq!(second.await.expect("decided").remaining, 9);
    assert_eq!(
        limiter.acquire(&charge).await.expect("decided").remaining,
        8,
        "only one has taken a unit"
    );
}

// ---- Nobody's trouble is another's
// ------------------------------------------------------------------------------

#[tokio::test]
async fn who_goes_away_before_the_call_is_not_charged_and_holds_up_nobody() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let ask = || {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move {
            limiter.acquire(&Charge::new("u", &quota)).await.expect("decided").remaining
        })
    };
    let occupied = occupy(&redis, &limiter).await;
    let (first, second, third) = (ask(), ask(), ask());
    everybody_has_come().await;
    second.abort();
    // Those under way go as well: who gathers behind them is asked for all the same.
    for task in &occupied {
        task.abort();
    }
    everybody_has_come().await;
    redis.go_on();
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
    let occupied = under_way(&limiter).await;
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
        assert_eq!(outcome, Err(Error::Store(StoreError::Timeout(TIMEOUT))));
        assert!(
            waited >= TIMEOUT && waited < TIMEOUT + Duration::from_millis(300),
            "after {waited:?}"
        );
    }
    for task in occupied {
        assert!(task.await.expect("no panic").is_err());
    }
    redis.signal("CONT");
    until("what was sent has run", async || redis.calls_of("evalsha") > before).await;
    until("decisions are made again", async || limiter.peek(&charge).await.is_ok()).await;
    assert_eq!(
        limiter.peek(&charge).await.expect("decided").remaining,
        998,
        "only what came in time"
    );
}

#[tokio::test]
async fn one_bad_request_does_not_spoil_the_others() {
    for program in [Path::new("redis-server").to_owned(), redis_6()] {
        let redis = Redis::start_program(&program, &[]);
        redis.grant(&support::RIGHTS);
        redis.query::<()>(&["ACL", "SETUSER", "tidegate", "-zadd", "+client|pause"]);
        let store = RedisStore::builder(&redis.url_of_user())
            .timeout(PATIENCE)
            .connect()
            .await
            .expect("connected");
        let limiter = Limiter::new(store);
        let occupied = occupy(&redis, &limiter).await;
        let bad = Quota::sliding_log(10, LONG).expect("valid");
        let good = Quota::fixed_window(10, LONG).expect("valid");
        let ask = |quota: &Quota, name: &'static str, cost: u64| {
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
        let fine = [ask(&good, "a", 1), ask(&good, "b", 1), ask(&good, "b", 2)];
        let spoilt = [ask(&bad, "c", 1), ask(&bad, "c", 2)];
        let last = ask(&good, "d", 3);
        everybody_has_come().await;
        redis.go_on();
        for task in occupied {
            task.await.expect("no panic").expect("decided");
        }
        let mut left = Vec::new();
        for task in fine.into_iter().chain([last]) {
            left.push(task.await.expect("no panic").expect("decided").remaining);
        }
        assert_eq!(left, [9, 9, 7, 7]);
        let both = both.await.expect("no panic").expect_err("no right to ZADD").to_string();
        assert!(both.contains("can't run this command"), "{both}");
        for task in spoilt {
            let error = task.await.expect("no panic").expect_err("no right to ZADD").to_string();
            assert!(
                error.contains("can't run this command") && error.contains("127.0.0.1"),
                "{error}"
            );
            assert!(!error.contains("user_script"), "{error}");
        }
    }
}

#[tokio::test]
async fn when_the_connection_breaks_everybody_under_way_hears_of_it_and_the_next_ones_are_decided()
{
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let occupied = occupy(&redis, &limiter).await;
    let ask = || {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move { limiter.acquire(&Charge::new("u", &quota)).await })
    };
    let tasks: Vec<_> = (0..20).map(|_| ask()).collect();
    everybody_has_come().await;
    redis.restart();
    for task in occupied {
        let _ = task.await.expect("no panic");
    }
    let mut decided = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            Ok(decision) => decided += u64::from(decision.allowed),
            Err(error) => {
                assert!(matches!(error, Error::Store(StoreError::Unreachable(_))), "{error}")
            }
        }
    }
    until("decisions are made again", async || {
        limiter.peek(&Charge::new("u", &quota)).await.is_ok()
    })
    .await;
    let left = limiter.peek(&Charge::new("u", &quota)).await.expect("decided").remaining;
    assert_eq!(left, 999 - decided, "who was told so was charged, and nobody else");
}

/// As in a stream that is not asked for its next item: the calls have been made, and nobody takes
/// in what they brought.
#[tokio::test]
async fn calls_that_nobody_looks_at_any_more_hold_up_nobody() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(100, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let mut forgotten: Vec<_> = (0..CALLS).map(|_| Box::pin(limiter.acquire(&charge))).collect();
    for call in &mut forgotten {
        let polled = std::future::poll_fn(|context| {
            std::task::Poll::Ready(call.as_mut().poll(context).is_pending())
        });
        assert!(polled.await, "on its way");
    }
    let start = Instant::now();
    for _ in 0..20 {
        limiter.acquire(&charge).await.expect("decided");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?} for twenty decisions", start.elapsed());
    for call in forgotten {
        call.await.expect("decided");
    }
    assert_eq!(limiter.peek(&charge).await.expect("decided").remaining, 99 - 20 - CALLS as u64);
}
