//! The answers of the deny cache beside those of a second store that is asked every time: every
//! field must be the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tidegate::{
    Action, Algorithm, Charge, Decision, DenyCache, Limiter, ManualClock, MemoryStore, Quota,
    Source, Store,
};

/// A cache around memory, and the memory store that it is compared with.
struct Beside {
    clock: ManualClock,
    caches: Vec<DenyCache<Arc<MemoryStore>>>,
    oracle: MemoryStore,
    hits: u64,
}

impl Beside {
    /// Creates several instances with a cache each around one store.
    fn instances(count: usize) -> Self {
        let clock = ManualClock::new();
        let memory = || MemoryStore::builder().clock(clock.clone()).build();
        let shared = Arc::new(memory());
        let cache = || DenyCache::new(Arc::clone(&shared));
        let caches = std::iter::repeat_with(cache).take(count).collect();
        let oracle = memory();
        Self { clock, caches, oracle, hits: 0 }
    }

    fn new() -> Self {
        Self::instances(1)
    }

    /// Sends a request to an instance and to the oracle. Returns both answers.
    async fn ask(
        &self,
        instance: usize,
        action: Action,
        charges: &[Charge<'_>],
    ) -> (Vec<Decision>, Vec<Decision>) {
        let cache = &self.caches[instance];
        match charges {
            [one] => (
                vec![cache.decide(action, one).await.expect("decided")],
                vec![self.oracle.decide(action, one).await.expect("decided")],
            ),
            all => (
                cache.decide_all(action, all).await.expect("decided"),
                self.oracle.decide_all(action, all).await.expect("decided"),
            ),
        }
    }

    /// Sends a request, compares its answers, and returns them.
    async fn decide(&mut self, action: Action, charges: &[Charge<'_>]) -> Vec<Decision> {
        let (found, truth) = self.ask(0, action, charges).await;
        for (charge, (found, truth)) in charges.iter().zip(found.iter().zip(&truth)) {
            let mut shown = found.with_source(Source::Store);
            if found.source == Source::DenyCache {
                self.hits += 1;
                if !shows_exact_remaining(charge, found) {
                    assert!(found.remaining <= truth.remaining, "{found:?} {truth:?}");
                    shown.remaining = truth.remaining;
                }
            }
            assert_eq!(shown, *truth, "{action:?} {charge:?}: {found:?}");
        }
        found
    }

    async fn acquire(&mut self, charge: Charge<'_>) -> Decision {
        self.decide(Action::Acquire, &[charge]).await[0]
    }

    fn at(&self, start: tidegate::Timestamp, seconds: f64) {
        self.clock.set(start.saturating_add(Duration::from_secs_f64(seconds)));
    }
}

/// Returns whether a cached decision shows the units that remain now. If the request lacks more
/// than one unit, or is allowed, it does not know when the next one becomes free.
fn shows_exact_remaining(charge: &Charge<'_>, decision: &Decision) -> bool {
    let lacks_one = !decision.allowed && charge.cost() <= decision.remaining + 1;
    lacks_one || decision.reset_after.is_zero()
}

fn now(beside: &Beside) -> tidegate::Timestamp {
    tidegate::Clock::now(&beside.clock)
}

#[tokio::test]
async fn the_wait_is_exact_after_a_pause() {
    let mut beside = Beside::new();
    let start = now(&beside);
    let quota = Quota::token_bucket(1, Duration::from_secs(2)).expect("valid");
    let charge = Charge::new("u", &quota);
    for (seconds, wait) in [(0.0, 0), (0.1, 1_900), (0.8, 1_200), (3.0, 0), (3.1, 1_900)] {
        beside.at(start, seconds);
        let decision = beside.acquire(charge).await;
        assert_eq!(decision.retry_after, Duration::from_millis(wait), "at {seconds} s");
    }
    assert_eq!(beside.hits, 1);
}

#[tokio::test]
async fn the_wait_is_exact_with_several_costs() {
    for algorithm in Algorithm::RATES {
        let mut beside = Beside::new();
        let quota = Quota::new(algorithm, 20, Duration::from_secs(2_400)).expect("valid");
        // The first takes all units.
        for cost in [20, 16, 1, 2, 16, 3, 16, 5, 4, 3, 2, 16, 1] {
            let _ = beside.acquire(Charge::new("u", &quota).with_cost(cost)).await;
            beside.clock.advance(Duration::from_secs(1));
        }
    }
}

#[tokio::test]
async fn a_request_over_several_limits_shows_what_the_store_shows() {
    let mut beside = Beside::new();
    let quota = |limit, seconds| Quota::sliding_log(limit, Duration::from_secs(seconds));
    let (short, long) = (quota(2, 20).expect("valid"), quota(3, 3_000).expect("valid"));
    let ip = Charge::new("ip", &long).with_policy("ip");
    let users = ["a", "b", "c"].map(|user| Charge::new(user, &short).with_policy("user"));
    for _ in 0..3 {
        for user in users {
            for action in [Action::Acquire, Action::Peek] {
                let _ = beside.decide(action, &[user, ip]).await;
                let _ = beside.decide(action, &[user]).await;
                let _ = beside.decide(action, &[ip]).await;
                let _ = beside.decide(action, &users).await;
            }
        }
        beside.clock.advance(Duration::from_secs(7));
    }
    // The very request that the store has denied is repeated.
    let before = beside.hits;
    let _ = beside.decide(Action::Acquire, &[users[0], ip]).await;
    let denied = beside.decide(Action::Acquire, &[users[0], ip]).await;
    assert_eq!((beside.hits - before, denied[0].source), (2, Source::DenyCache));
}

#[tokio::test]
async fn a_peek_of_several_is_repeated_only_if_every_limit_denies() {
    let mut beside = Beside::new();
    let quota = Quota::fixed_window(1, Duration::from_secs(3_600)).expect("valid");
    let charges = ["a", "b"].map(|key| Charge::new(key, &quota));
    for (used, hits) in [(0, 0), (1, 2)] {
        let _ = beside.decide(Action::Report, &charges[used..=used]).await;
        let before = beside.hits;
        for _ in 0..2 {
            let _ = beside.decide(Action::Peek, &charges).await;
        }
        assert_eq!(beside.hits - before, hits, "{used}");
    }
}

#[tokio::test]
async fn a_peek_does_not_deny_a_later_acquire_of_a_quota_that_counts_denials() {
    let mut beside = Beside::new();
    let start = now(&beside);
    let quota = Quota::sliding_log(1, Duration::from_secs(1)).expect("valid");
    let quota = quota.with_count_denied(true).expect("a log");
    let charge = Charge::new("u", &quota);
    assert!(beside.acquire(charge).await.allowed);
    beside.at(start, 0.95);
    assert!(!beside.decide(Action::Peek, &[charge]).await[0].allowed);
    beside.at(start, 1.01);
    assert!(beside.acquire(charge).await.allowed);
}

#[tokio::test]
async fn a_wait_that_cannot_end_in_time_is_denied_at_once() {
    let beside = Beside::new();
    let start = now(&beside);
    let quota = Quota::token_bucket(1, Duration::from_secs(2)).expect("valid");
    let charge = Charge::new("u", &quota);
    let limiter = Limiter::new(DenyCache::new(Arc::clone(beside.caches[0].store())));
    for seconds in [0.0, 0.1, 0.8, 3.0] {
        beside.at(start, seconds);
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    beside.at(start, 3.1);
    let mut wait = std::pin::pin!(limiter.wait(&charge, Duration::from_secs(1)));
    let denied = tokio::select! {
        biased;
        decided = &mut wait => decided.expect("decided"),
        () = std::future::ready(()) => panic!("it sleeps for a wait that is too short"),
    };
    assert_eq!((denied.allowed, denied.retry_after), (false, Duration::from_millis(1_900)));
}

#[derive(Debug, Clone)]
enum Step {
    /// Charges of one quota, each of another key, with these costs; 0 leaves a key out.
    Ask {
        instance: usize,
        action: Action,
        quota: usize,
        costs: [u64; 3],
    },
    /// A peek of cost 0.
    AskWhetherOverdrawn {
        quota: usize,
    },
    Advance(u64),
}

fn step(action: impl Strategy<Value = Action> + 'static) -> impl Strategy<Value = Step> {
    // Mostly one key, small costs and the first quota.
    let costs = prop_oneof![
        3 => (1..7_u64).prop_map(|cost| [cost, 0, 0]),
        2 => Just([1, 0, 0]),
        1 => (1..4_u64).prop_map(|cost| [0, cost, 0]),
        2 => [1..4_u64, 0..4_u64, 0..4_u64],
    ];
    let quota = (0..10_usize).prop_map(|number| number.saturating_sub(6));
    prop_oneof![
        8 => (0..2_usize, action, quota.clone(), costs).prop_map(
            |(instance, action, quota, costs)| Step::Ask { instance, action, quota, costs }
        ),
        1 => quota.prop_map(|quota| Step::AskWhetherOverdrawn { quota }),
        3 => (1..40_000_u64).prop_map(Step::Advance),
        1 => (1..1_500_000_u64).prop_map(Step::Advance),
    ]
}

/// One quota, the same with a raised limit, one with another algorithm, and one that counts
/// denials.
fn quotas(kind: usize, limit: u64) -> [Quota; 4] {
    let window = Duration::from_millis(84);
    let log = Quota::sliding_log(limit, window).expect("valid");
    [
        Quota::new(Algorithm::RATES[kind], limit, window).expect("valid"),
        Quota::new(Algorithm::RATES[kind], limit + 2, window).expect("valid"),
        Quota::new(Algorithm::RATES[(kind + 1) % 5], limit, window * 2).expect("valid"),
        log.with_count_denied(true).expect("a log"),
    ]
}

/// Returns the charges of a step, and nothing if they can never be admitted.
fn charges<'a>(quota: &'a Quota, costs: &[u64; 3]) -> Vec<Charge<'a>> {
    let charge = |(key, cost): (&'a str, u64)| {
        Charge::new(key, quota).with_policy("p").with_cost(cost.min(quota.burst()))
    };
    let all = ["a", "b", "c"].into_iter().zip(*costs);
    all.filter(|(_, cost)| *cost > 0).map(charge).collect()
}

/// Runs random sequences with a check, and returns the number of cache hits.
fn run(
    action: impl Strategy<Value = Action> + Clone + 'static,
    check: &impl AsyncFn(usize, u64, &[Step]) -> u64,
) -> u64 {
    let cases = (0..5_usize, 1..7_u64, proptest::collection::vec(step(action), 1..120));
    let hits = AtomicU64::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1_500));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let run = runner.run(&cases, |(kind, limit, steps)| {
        hits.fetch_add(runtime.block_on(check(kind, limit, &steps)), Ordering::Relaxed);
        Ok(())
    });
    run.expect("the answers are those of the oracle");
    hits.into_inner()
}

#[test]
fn every_field_of_every_answer_is_that_of_the_oracle() {
    let action = prop_oneof![
        12 => Just(Action::Acquire), 4 => Just(Action::Peek), 2 => Just(Action::Refund),
        1 => Just(Action::Reset), 1 => Just(Action::ChargeUpTo), 1 => Just(Action::Report),
    ];
    let hits = run(action, &async |kind, limit, steps| {
        let (mut beside, quotas) = (Beside::new(), quotas(kind, limit));
        for step in steps {
            let _ = match step {
                Step::Advance(micros) => {
                    beside.clock.advance(Duration::from_micros(*micros));
                    continue;
                }
                Step::AskWhetherOverdrawn { quota } => {
                    let charge = Charge::new("a", &quotas[*quota]).with_policy("p").with_cost(0);
                    beside.decide(Action::Peek, &[charge]).await
                }
                Step::Ask { action, quota, costs, .. } => {
                    beside.decide(*action, &charges(&quotas[*quota], costs)).await
                }
            };
        }
        beside.hits
    });
    assert!(hits > 1_000, "{hits} hits");
}

/// Units that another instance charges are not visible here: a cached denial is still none that
/// could have been an admission, and only its waits may be too short.
#[test]
fn charges_of_another_instance_only_make_waits_too_short() {
    let action = prop_oneof![
        6 => Just(Action::Acquire), 2 => Just(Action::Peek), 1 => Just(Action::Report),
    ];
    let hits = run(action, &async |kind, limit, steps| {
        let (mut beside, quotas) = (Beside::instances(2), quotas(kind, limit));
        for step in steps {
            match step {
                Step::Advance(micros) => beside.clock.advance(Duration::from_micros(*micros)),
                // Another quota on the same count may free units.
                Step::Ask { instance, action, costs, .. } => {
                    let charges = charges(&quotas[0], costs);
                    let (found, truth) = beside.ask(*instance, *action, &charges).await;
                    for (found, truth) in found.iter().zip(&truth) {
                        if found.source == Source::DenyCache {
                            beside.hits += 1;
                            assert!(found.allowed || !truth.allowed, "{found:?} {truth:?}");
                            assert!(found.retry_after <= truth.retry_after, "{found:?} {truth:?}");
                        } else {
                            assert_eq!(found, truth);
                        }
                    }
                    let is_allowed = |all: &[Decision]| all.iter().all(|one| one.allowed);
                    assert_eq!(is_allowed(&found), is_allowed(&truth));
                }
                Step::AskWhetherOverdrawn { .. } => {}
            }
        }
        beside.hits
    });
    assert!(hits > 1_000, "{hits} hits");
}
