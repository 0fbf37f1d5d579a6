//! Priority lanes: the last part of a limit is kept for important requests, by every algorithm, on
//! memory and on a real Redis.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use support::Redis;
use tidegate::{
    Action, Algorithm, Clock as _, Hold, Limiter, ManualClock, MemoryStore, Policies, Policy,
    PolicyDecisions, PolicyLimiter, Query, Quota, Store,
};

/// So long that no bucket drains by a unit.
const WINDOW: Duration = Duration::from_secs(86_400);

fn quota(algorithm: Algorithm) -> Quota {
    match algorithm {
        Algorithm::Concurrency => Quota::concurrency(100),
        _ => Quota::new(algorithm, 100, WINDOW),
    }
    .expect("valid")
}

fn policy_limiter<S: Store>(limiter: &Limiter<S>, algorithm: Algorithm) -> PolicyLimiter<S> {
    let policy = Policy::builder("api", quota(algorithm))
        .key(["header.u"])
        .lanes("header.p", [("low", 80), ("normal", 95)], 100)
        .build()
        .expect("valid");
    PolicyLimiter::new(limiter.clone(), Policies::new(vec![policy]).expect("valid"))
}

fn request(user: &str, priority: &str) -> BTreeMap<String, String> {
    let pairs = [("header.u", user), ("header.p", priority)];
    BTreeMap::from(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())))
}

async fn decide<'a, S: Store>(
    limiter: &'a PolicyLimiter<S>,
    action: Action,
    (user, priority, cost): (&str, &str, u64),
) -> PolicyDecisions<'a> {
    let request = request(user, priority);
    limiter.decide(action, Query::attributes(&request).with_cost(cost)).await.expect("decided")
}

async fn assert_lanes<S: Store>(limiter: &Limiter<S>, algorithm: Algorithm) {
    let limiter = policy_limiter(limiter, algorithm);
    let mut admitted = 0;
    for (priority, limit) in [("low", 80), ("normal", 95), ("high", 100), ("low", 80)] {
        for _ in 0..=100 {
            let peeked = decide(&limiter, Action::Peek, ("u", priority, 1)).await;
            let decisions = decide(&limiter, Action::Acquire, ("u", priority, 1)).await;
            let decision = decisions.iter().next().expect("one limit").decision();
            assert_eq!(peeked.is_allowed(), decision.allowed);
            assert_eq!(decision.allowed, admitted < limit, "{algorithm}: {priority} {admitted}");
            admitted += u64::from(decision.allowed);
            assert_eq!(decision.limit, limit);
            assert_eq!(decision.remaining, limit.saturating_sub(admitted));
            assert_eq!(decision.retry_after.is_zero(), decision.allowed);
        }
    }
    assert_eq!(admitted, 100, "{algorithm}");

    // A cost that only the whole limit has room for is denied, not an error.
    for action in [Action::Peek, Action::Acquire] {
        assert!(!decide(&limiter, action, ("v", "low", 81)).await.is_allowed());
    }
    assert!(decide(&limiter, Action::Acquire, ("v", "low", 80)).await.is_allowed());
    assert!(!decide(&limiter, Action::Acquire, ("v", "low", 1)).await.is_allowed());
    assert!(decide(&limiter, Action::Acquire, ("v", "high", 20)).await.is_allowed());
}

#[tokio::test]
async fn the_last_part_of_a_limit_is_kept_for_important_requests() {
    let clock = ManualClock::new();
    for algorithm in Algorithm::ALL {
        let memory = MemoryStore::builder().clock(clock.clone()).build();
        assert_lanes(&Limiter::new(memory), algorithm).await;
        assert_lanes(&Redis::start().driven_limiter(clock.clone()).await, algorithm).await;
    }
}

#[tokio::test]
async fn units_are_reported_and_returned_by_the_whole_limit() {
    for algorithm in Algorithm::RATES {
        let clock = ManualClock::new();
        let memory = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = policy_limiter(&Limiter::new(memory), algorithm);
        let start = clock.now();
        // An overdraft, far above what a lane of 80 units could have.
        let reported = decide(&limiter, Action::Report, ("u", "low", 1_000)).await;
        assert!(!reported.is_allowed());
        assert!(decide(&limiter, Action::Report, ("v", "low", 81)).await.is_allowed());
        clock.advance(Duration::from_millis(1));
        let query = request("u", "low");
        let query = Query::attributes(&query).with_cost(30).with_charged_at(start);
        let _ = limiter.decide(Action::Refund, query).await.expect("refunded");
        let overdrawn = decide(&limiter, Action::Report, ("u", "high", 1)).await;
        let decision = overdrawn.iter().next().expect("one limit").decision();
        assert!(!decision.allowed, "{algorithm}: a refund must not forgive an overdraft");
    }
}

#[tokio::test]
async fn reservations_of_a_lane_are_settled() {
    let clock = ManualClock::new();
    for algorithm in Algorithm::ALL {
        let memory = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = policy_limiter(&Limiter::new(memory), algorithm);
        let low = request("u", "low");
        let query = |cost| {
            let hold = Hold::new("job").expect("valid");
            Query::attributes(&low).with_cost(cost).with_hold(hold)
        };
        assert!(limiter.acquire(query(80)).await.expect("decided").is_allowed());
        assert!(!decide(&limiter, Action::Acquire, ("u", "low", 1)).await.is_allowed());
        clock.advance(Duration::from_secs(1));
        let settled = limiter.decide(Action::Commit, query(10)).await.expect("settled");
        assert!(settled.is_allowed());
        let left = if algorithm == Algorithm::Concurrency { 100 } else { 90 };
        assert!(!decide(&limiter, Action::Acquire, ("u", "low", left - 19)).await.is_allowed());
        assert!(decide(&limiter, Action::Acquire, ("u", "high", left)).await.is_allowed());
    }
}
