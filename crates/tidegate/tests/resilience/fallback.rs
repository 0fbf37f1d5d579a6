//! Decisions of the fallback while the store fails.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use tidegate::resilience::fallback::Stats;
use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{
    Action, Algorithm, Breaker, Calendar, CalendarUnit, Charge, Clock as _, Decision, Fallback,
    Fleet, Limiter, ManualClock, MemoryStore, OnStoreFailure, Policies, Policy, PolicyLimiter,
    Query, Quota, Source, Store, StoreError,
};
use tokio::time::{Instant, sleep};

use crate::deny_cache_races::poll_once;
use crate::flaky::{Fault, Flaky, down};
use crate::support::{LONG, assert_exact_under_concurrency, every_quota, seeds};

const MINUTE: Duration = Duration::from_secs(60);

/// Creates a fallback around this store, with its local memory on this clock.
pub(crate) fn fallback_on(clock: &ManualClock, store: &Flaky, fleet: Fleet) -> Fallback<Flaky> {
    let local = MemoryStore::builder().clock(clock.clone()).build();
    Fallback::builder(store.clone()).local(local).fleet(fleet).build()
}

/// Creates instances with the same list of members.
pub(crate) fn fleet_of(size: usize) -> Vec<Fleet> {
    let names: Vec<String> = (0..size).map(|number| format!("instance-{number}")).collect();
    let join = |name: &String| {
        let fleet = Fleet::with_instance(name).with_min_instances(size);
        fleet.update_members(names.clone());
        fleet
    };
    names.iter().map(join).collect()
}

fn allowed(decisions: &[Decision]) -> Vec<bool> {
    decisions.iter().map(|decision| decision.allowed).collect()
}

fn sources(decisions: &[Decision]) -> Vec<Source> {
    decisions.iter().map(|decision| decision.source).collect()
}

#[tokio::test]
async fn each_charge_is_decided_by_its_failure_policy() {
    let store = Flaky::new();
    let limiter = Limiter::new(Fallback::new(store.clone()));
    let quota = Quota::sliding_log(3, LONG).expect("valid");
    let charge = |failure| Charge::new("u", &quota).with_on_store_failure(failure);
    let decision = limiter.acquire(&charge(OnStoreFailure::Local)).await.expect("decided");
    assert_eq!((decision.source, decision.remaining), (Source::Store, 2));
    store.set_fault(down());

    for remaining in [2, 1, 0] {
        let peeked = limiter.peek(&charge(OnStoreFailure::Local)).await.expect("decided");
        let local = limiter.acquire(&charge(OnStoreFailure::Local)).await.expect("decided");
        assert_eq!(
            (local.allowed, local.source, local.remaining),
            (true, Source::Local, remaining)
        );
        assert_eq!(peeked.with_reset_after(local.reset_after), local);
    }
    let local = limiter.acquire(&charge(OnStoreFailure::Local)).await.expect("decided");
    assert!(!local.allowed && local.retry_after > MINUTE, "{local:?}");
    let allow = limiter.acquire(&charge(OnStoreFailure::Allow)).await.expect("decided");
    assert_eq!((allow.allowed, allow.source, allow.remaining), (true, Source::Allow, 3));
    let deny = limiter.acquire(&charge(OnStoreFailure::Deny)).await.expect("decided");
    assert_eq!((deny.allowed, deny.source, deny.remaining), (false, Source::Deny, 0));
    assert_eq!(deny.retry_after, Duration::from_secs(1));
    for action in [Action::Acquire, Action::Peek, Action::Report] {
        let error = limiter.store().decide(action, &charge(OnStoreFailure::Error)).await;
        assert!(matches!(error, Err(StoreError::Unreachable(_))), "{error:?}");
    }
    let waited =
        limiter.wait(&charge(OnStoreFailure::Deny), Duration::ZERO).await.expect("decided");
    assert_eq!(waited.source, Source::Deny, "a wait applies the failure policy, too");

    let stats = limiter.store().stats();
    let expected = Stats {
        falling_back: true,
        local: 4,
        allow: 1,
        deny: 2,
        pending_debits: 1,
        pending_debit_units: 3,
        settled_debit_units: 0,
        dropped_debit_units: 0,
        pending_commits: 0,
        dropped_commits: 0,
    };
    assert_eq!(stats, expected);
}

#[tokio::test]
async fn an_outage_adds_the_part_of_a_calendar_that_is_left() {
    let calendar = Calendar::new(CalendarUnit::Day, "UTC").expect("a zone");
    let quota = Quota::calendar_window(240, calendar.clone()).expect("valid");
    let clock = ManualClock::new();
    let (_, midnight) = calendar.period_at(clock.now());
    clock.set(midnight);
    clock.advance(Duration::from_secs(18 * 3_600));
    let store = Flaky::new();
    store.set_fault(down());
    let mut admitted = 0;
    // A quarter of the limit, by four instances.
    for fleet in fleet_of(4) {
        let limiter = Limiter::new(fallback_on(&clock, &store, fleet));
        let charge = Charge::new("u", &quota);
        while limiter.acquire(&charge).await.expect("decided").allowed {
            admitted += 1;
        }
        let denied = limiter.acquire(&charge).await.expect("decided");
        assert_eq!(denied.source, Source::Local);
        assert_eq!(denied.retry_after, Duration::from_secs(6 * 3_600));
    }
    assert_eq!(admitted, 60);
}

#[tokio::test]
async fn mixed_failure_policies_stay_all_or_nothing() {
    let store = Flaky::new();
    let fallback = Fallback::new(store.clone());
    let (wide, narrow) = (
        Quota::token_bucket(10, LONG).expect("valid"),
        Quota::fixed_window(1, LONG).expect("valid"),
    );
    let [a, b] = [Charge::new("a", &wide).with_cost(4), Charge::new("b", &narrow)];
    let allow = Charge::new("c", &wide).with_on_store_failure(OnStoreFailure::Allow);
    let deny = Charge::new("d", &wide).with_on_store_failure(OnStoreFailure::Deny);
    let ask = async |charges: &[Charge<'_>]| {
        fallback.decide_all(Action::Acquire, charges).await.expect("decided")
    };
    store.set_fault(down());

    let error = Charge::new("e", &wide).with_on_store_failure(OnStoreFailure::Error);
    assert!(fallback.decide_all(Action::Acquire, &[a, error, allow]).await.is_err());
    let decisions = ask(&[a, deny, allow]).await;
    assert_eq!(allowed(&decisions), [true, false, true]);
    assert_eq!(sources(&decisions), [Source::Local, Source::Deny, Source::Allow]);
    assert_eq!(decisions[0].remaining, 10, "a denial spends nothing");
    let decisions = ask(&[a, b, allow]).await;
    assert_eq!((allowed(&decisions), decisions[0].remaining), (vec![true; 3], 6));
    let decisions = ask(&[a, b, allow]).await;
    assert_eq!((allowed(&decisions), decisions[0].remaining), (vec![true, false, true], 6));
    assert_eq!((fallback.stats().pending_debits, fallback.stats().pending_debit_units), (2, 5));
}

#[tokio::test]
async fn errors_that_memory_does_not_help_are_returned() {
    let store = Flaky::new();
    let fallback = Fallback::new(store.clone());
    let quota = Quota::fixed_window(5, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let full = StoreError::Full { cap: 1 };
    store.set_fault(Fault::Fails(full.clone()));
    assert_eq!(fallback.decide(Action::Acquire, &charge).await, Err(full.clone()));
    let [allow, deny] = [OnStoreFailure::Allow, OnStoreFailure::Deny]
        .map(|policy| charge.with_on_store_failure(policy));
    assert!(fallback.decide(Action::Acquire, &allow).await.expect("fail open or closed").allowed);
    assert!(!fallback.decide(Action::Acquire, &deny).await.expect("fail open or closed").allowed);
    let misconfigured = StoreError::Misconfigured("no".to_owned());
    store.set_fault(Fault::Fails(misconfigured.clone()));
    assert_eq!(fallback.decide(Action::Acquire, &allow).await, Err(misconfigured));
    assert!(!fallback.stats().falling_back);
}

#[tokio::test]
async fn a_refund_is_made_where_the_units_were_charged() {
    let store = Flaky::new();
    let fallback = Fallback::new(store.clone());
    let quota = Quota::sliding_log(5, LONG).expect("valid");
    let charge = Charge::new("u", &quota).with_cost(2);
    let _ = fallback.decide(Action::Acquire, &charge).await.expect("decided");
    store.set_fault(down());
    let error = Err(StoreError::Unreachable("down".to_owned()));
    assert_eq!(fallback.decide(Action::Refund, &charge).await, error, "the store has charged them");
    let _ = fallback.decide(Action::Acquire, &charge).await.expect("decided");
    let refunded = fallback.decide(Action::Refund, &charge).await.expect("charged locally");
    assert_eq!((refunded.remaining, refunded.source), (5, Source::Local));
    assert_eq!(fallback.stats().pending_debit_units, 0);
    assert_eq!(fallback.decide(Action::Refund, &charge).await, error, "already refunded");
    assert_eq!(fallback.decide(Action::ChargeUpTo, &charge).await, error);

    let _ = fallback.decide(Action::Acquire, &charge).await.expect("decided");
    assert_eq!(
        fallback.decide(Action::Reset, &charge).await,
        error,
        "the store's count still exists"
    );
    assert_eq!(fallback.stats().pending_debits, 0);
    assert_eq!(
        fallback.decide(Action::Peek, &charge).await.expect("decided").remaining,
        3,
        "the local count was reset"
    );
    store.set_fault(Fault::None);
    let _ = fallback.decide(Action::Reset, &charge).await.expect("decided");
    assert_eq!(store.remaining(&charge).await, 5);
}

/// A request over many limits is compensated within one timeout.
#[tokio::test(start_paused = true)]
async fn refunds_of_one_request_are_sent_concurrently() {
    let store = Flaky::new();
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let policy = |number: u64| {
        let policy = Policy::builder(format!("policy-{number}"), quota.clone());
        policy.key(["header.x-user-id"]).build().expect("valid")
    };
    let policies = Policies::new((0..8).map(policy).collect()).expect("valid");
    let limiter = PolicyLimiter::new(Limiter::new(Fallback::new(store.clone())), policies);
    let attributes = BTreeMap::from([("header.x-user-id".to_owned(), "ann".to_owned())]);
    let decisions = limiter.acquire(Query::attributes(&attributes)).await.expect("decided");
    let charge = Charge::new("ann", &quota).with_policy("policy-7");
    assert_eq!((decisions.iter().count(), store.remaining(&charge).await), (8, 9));
    let delay = Duration::from_millis(80);
    store.set_fault(Fault::Slow(delay));
    let start = Instant::now();
    limiter.refund(&decisions).await;
    assert!(start.elapsed() < 2 * delay, "{:?}", start.elapsed());
    assert_eq!(store.remaining(&charge).await, 10);
}

#[tokio::test]
async fn an_instance_decides_by_its_share() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    store.set_fault(down());
    let fleet: Vec<_> =
        fleet_of(4).into_iter().map(|fleet| fallback_on(&clock, &store, fleet)).collect();
    for quota in every_quota(10, MINUTE) {
        let charge = Charge::new("u", &quota);
        let mut total = 0;
        for instance in &fleet {
            let mut admitted = 0;
            loop {
                let decision = instance.decide(Action::Acquire, &charge).await.expect("decided");
                assert_eq!((decision.limit, decision.source), (10, Source::Local));
                if !decision.allowed {
                    assert!(decision.retry_after > Duration::ZERO);
                    break;
                }
                admitted += 1;
            }
            assert!(admitted == 2 || admitted == 3, "{admitted}");
            total += admitted;
            let costly =
                instance.decide(Action::Acquire, &charge.with_cost(7)).await.expect("decided");
            assert_eq!(
                (costly.allowed, costly.retry_after),
                (false, Duration::from_secs(1)),
                "only the store could admit it"
            );
        }
        assert_eq!(total, 10, "{quota:?}");
    }
    // Fewer units than instances: one of them has the whole quota.
    let scarce = Quota::sliding_log(3, MINUTE).expect("valid");
    let mut admitted = Vec::new();
    for instance in &fleet {
        let charge = Charge::new("scarce", &scarce).with_cost(3);
        let decision = instance.decide(Action::Acquire, &charge).await.expect("decided");
        assert!(decision.allowed || decision.retry_after == Duration::from_secs(1));
        admitted.push(decision.allowed);
    }
    admitted.sort_unstable();
    assert_eq!(admitted, [false, false, false, true]);
}

#[tokio::test(start_paused = true)]
async fn instances_find_each_other_through_the_store_and_keep_the_list_in_an_outage() {
    let store = Flaky::new();
    let three: Vec<_> = (0..3).map(|_| Fallback::new(store.clone())).collect();
    let sizes = || three.iter().map(|instance| instance.fleet().size()).collect::<Vec<_>>();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(sizes(), [3, 3, 3]);
    assert_eq!(three[0].fleet().members(), three[2].fleet().members());
    store.set_fault(down());
    sleep(MINUTE).await;
    assert_eq!(sizes(), [3, 3, 3], "the last list stays valid");
    store.set_fault(Fault::None);
    let mut three = three;
    drop(three.pop());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(three[0].fleet().size(), 2);
    drop(three);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(store.clones(), 1, "no task is left");
}

#[tokio::test]
async fn instances_that_start_during_an_outage_assume_a_fleet() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    store.set_fault(down());
    for quota in every_quota(100, MINUTE) {
        let charge = Charge::new("u", &quota);
        let mut admitted = [0; 10];
        for count in &mut admitted {
            let instance = fallback_on(&clock, &store, Fleet::new());
            while instance.decide(Action::Acquire, &charge).await.expect("decided").allowed {
                *count += 1;
            }
        }
        assert_eq!(admitted, [10; 10], "{quota:?}");
        // An explicit minimum replaces the assumption.
        let alone = fallback_on(&clock, &store, Fleet::new().with_min_instances(1));
        assert_eq!(alone.decide(Action::Acquire, &charge).await.expect("decided").remaining, 99);
        // A limit of less than ten still admits something.
        let scarce = Quota::new(quota.algorithm(), 3, MINUTE).expect("valid");
        let instance = fallback_on(&clock, &store, Fleet::new());
        let decision = instance
            .decide(Action::Acquire, &Charge::new("scarce", &scarce))
            .await
            .expect("decided");
        assert_eq!((decision.allowed, decision.remaining), (true, 0));
    }
}

#[tokio::test]
async fn only_keys_that_were_decided_locally_are_kept_in_memory() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let fallback = fallback_on(&clock, &store, Fleet::new());
    let quota = Quota::sliding_log(10, MINUTE).expect("valid");
    let ask = async |key: &str| {
        fallback.decide(Action::Acquire, &Charge::new(key, &quota)).await.expect("decided")
    };
    store.set_fault(down());
    let _ = ask("decided locally").await;
    store.set_fault(Fault::None);
    fallback.settle().await;
    for number in 0..5_000 {
        assert_eq!(ask(&format!("user-{number}")).await.source, Source::Store);
    }
    assert_eq!(fallback.local().keys(), 1);
    // Units that the store admits to this key are charged to the local share as well.
    for _ in 0..4 {
        assert_eq!(ask("decided locally").await.source, Source::Store);
    }
    store.set_fault(down());
    assert_eq!(ask("decided locally").await.remaining, 10 - 1 - 4 - 1);
    assert_eq!(ask("user-0").await.remaining, 9, "its first failure");
    assert_eq!(fallback.local().keys(), 2);
}

// ---- Never more than the limit

/// Log of admissions: time, units and source.
#[derive(Debug, Default)]
pub(crate) struct Admissions(Vec<(u64, u64, Source)>);

impl Admissions {
    pub(crate) fn record(&mut self, at: u64, charge: &Charge<'_>, decision: &Decision) {
        if decision.allowed {
            self.0.push((at, charge.cost(), decision.source));
        }
    }

    /// Asserts that the units of these admissions, in each window or interval that the quota
    /// limits, are at most `times` the quota.
    pub(crate) fn assert_within(
        &self,
        quota: &Quota,
        times: u64,
        is_included: impl Fn(Source) -> bool,
    ) {
        let window = u64::try_from(quota.window().as_micros()).expect("short");
        let events: Vec<(u64, u64)> = self
            .0
            .iter()
            .filter(|(_, _, source)| is_included(*source))
            .map(|(at, units, _)| (*at, *units))
            .collect();
        for (first, (from, _)) in events.iter().enumerate() {
            let mut total = 0;
            for (at, units) in &events[first..] {
                total += units;
                let max = match quota.algorithm() {
                    Algorithm::SlidingLog if at - from >= window => break,
                    Algorithm::FixedWindow | Algorithm::SlidingCounter
                        if at / window != from / window =>
                    {
                        break;
                    }
                    Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                        // Multiplied by the window, to stay exact.
                        let max = (quota.burst() * window + quota.limit() * (at - from)) * times;
                        assert!(
                            total * window <= max,
                            "{total} units in {} of {quota:?}",
                            at - from
                        );
                        continue;
                    }
                    _ => quota.limit() * times,
                };
                assert!(
                    total <= max,
                    "{total} units from {from} to {at} of {quota:?}: {:?}",
                    self.0
                );
            }
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Fault(Fault),
    /// Time passes, in hundredths of the window.
    Advance(u64),
    Acquire {
        instance: usize,
        cost: u64,
    },
}

pub(crate) fn steps(
    instances: usize,
    faults: &'static [fn() -> Fault],
) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        1 => proptest::sample::select(faults).prop_map(|fault| Step::Fault(fault())),
        3 => (0..40_u64).prop_map(Step::Advance),
        9 => (0..instances, prop_oneof![4 => Just(1_u64), 1 => 1..4_u64])
            .prop_map(|(instance, cost)| Step::Acquire { instance, cost }),
    ];
    proptest::collection::vec(step, 50..150)
}

pub(crate) fn any_quota() -> impl Strategy<Value = Quota> {
    (proptest::sample::select(Algorithm::RATES.to_vec()), 1..30_u64, 1..40_u64).prop_map(
        |(algorithm, limit, burst)| {
            let quota = Quota::new(algorithm, limit, MINUTE).expect("valid");
            quota.clone().with_burst(burst).unwrap_or(quota)
        },
    )
}

pub(crate) fn hundredths_of_a_minute(hundredths: u64) -> Duration {
    MINUTE * u32::try_from(hundredths).expect("few") / 100
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// With any number of instances and any faults: together the instances admit at most the quota
    /// locally, and at most twice the quota including the admissions of the store.
    #[test]
    fn a_fleet_without_its_store_admits_at_most_the_quota(
        quota in any_quota(),
        (instances, steps) in (1..6_usize).prop_flat_map(|instances| {
            let steps = steps(instances, &[|| Fault::None, down, down, || Fault::LosesAnswers]);
            (Just(instances), steps)
        }),
    ) {
        runtime().block_on(async {
            let clock = ManualClock::new();
            let store = Flaky::on(&clock);
            let fallback = |fleet| fallback_on(&clock, &store, fleet);
            let fleet: Vec<_> = fleet_of(instances).into_iter().map(fallback).collect();
            let mut admissions = Admissions::default();
            for step in steps {
                match step {
                    Step::Fault(fault) => store.set_fault(fault),
                    Step::Advance(hundredths) => clock.advance(hundredths_of_a_minute(hundredths)),
                    Step::Acquire { instance, cost } => {
                        let charge = Charge::new("u", &quota).with_cost(cost.min(quota.burst()));
                        let decided = fleet[instance].decide(Action::Acquire, &charge).await;
                        admissions.record(clock.now().as_micros(), &charge, &decided.expect("decided"));
                    }
                }
            }
            admissions.assert_within(&quota, 1, |source| source == Source::Local);
            admissions.assert_within(&quota, 1, |source| source == Source::Store);
            admissions.assert_within(&quota, 2, |_| true);
        });
    }
}

// ---- Transparent around a healthy store

#[tokio::test]
async fn fallback_around_a_healthy_store_conforms_to_the_model() {
    let make = |clock: ManualClock| {
        let memory = MemoryStore::builder().clock(clock).build();
        Limiter::new(Fallback::new(Breaker::new(memory)))
    };
    conformance(seeds(1_000), async |clock| make(clock)).await;
    conformance_of_long_logs(seeds(4), async |clock| make(clock)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_through_a_fallback() {
    assert_exact_under_concurrency(&Limiter::new(Fallback::new(MemoryStore::new()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_while_the_store_is_down() {
    let store = Flaky::new();
    store.set_fault(down());
    let alone = Fallback::builder(Breaker::new(store)).fleet(Fleet::new().with_min_instances(1));
    assert_exact_under_concurrency(&Limiter::new(alone.build())).await;
}

/// The time of a charge is by the clock of the store, and a local count has another.
#[tokio::test]
async fn a_refund_of_an_outage_is_made_whatever_the_difference_of_the_clocks_is() {
    for (of_store, of_local) in [(5, 5), (5, 8), (8, 5)] {
        let clocks = [of_store, of_local].map(|seconds| {
            let clock = ManualClock::new();
            clock.advance(Duration::from_secs(seconds));
            clock
        });
        let store = Flaky::on(&clocks[0]);
        let fallback = fallback_on(&clocks[1], &store, Fleet::new());
        let quota = Quota::sliding_log(5, MINUTE).expect("valid");
        let charge = Charge::new("u", &quota).with_cost(2);
        store.set_fault(down());
        let charged_at = clocks[0].now();
        for clock in &clocks {
            clock.advance(Duration::from_micros(20));
        }
        let _ = fallback.decide(Action::Acquire, &charge).await.expect("decided");
        let refund = charge.with_charged_at(charged_at);
        let refunded = fallback.decide(Action::Refund, &refund).await.expect("refunded");
        assert_eq!(refunded.remaining, 5, "{of_store} and {of_local}");
    }
}

/// Under load, a refund of an outage often meets the attempt to settle its debt.
#[tokio::test(start_paused = true)]
async fn a_refund_of_an_outage_is_made_although_its_debt_is_being_settled() {
    let store = Flaky::new();
    let fallback = Fallback::new(store.clone());
    let quota = Quota::sliding_log(5, LONG).expect("valid");
    let charge = Charge::new("u", &quota).with_cost(2);
    store.set_fault(down());
    let _ = fallback.decide(Action::Acquire, &charge).await.expect("decided");
    store.set_fault(Fault::Slow(LONG));
    let mut settlement = Box::pin(fallback.settle());
    assert!(poll_once(settlement.as_mut()).await.is_none(), "it has no answer");
    store.set_fault(down());
    let refunded = fallback.decide(Action::Refund, &charge).await.expect("charged locally");
    assert_eq!((refunded.remaining, refunded.source), (5, Source::Local));
    drop(settlement);
    assert_eq!(fallback.stats().pending_debit_units, 0);
    let error = Err(StoreError::Unreachable("down".to_owned()));
    assert_eq!(fallback.decide(Action::Refund, &charge).await, error, "already refunded");
}

/// A request of two shards, one of which fails: a refund in one call returns the units of the other
/// shard there, and again in the ledger.
#[tokio::test]
async fn refund_of_two_shards_returns_units_once() {
    use tidegate::PreparedCharge;
    use tidegate::{Policies, PolicyLimiter, Query};
    let store = Flaky::new();
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let fallback = Fallback::new(Breaker::new(store.clone()));
    let limiter = PolicyLimiter::new(Limiter::new(fallback), Policies::default());
    let a = Charge::new("u", &quota).with_policy("a");
    for _ in 0..2 {
        let _ = limiter.limiter().acquire(&a).await.expect("decided");
    }
    store.set_shard_fault(1, down());
    let charges =
        vec![PreparedCharge::new("a", "u", &quota), PreparedCharge::new("b", "w@1", &quota)];
    let decisions = limiter.acquire(Query::prepared(charges)).await.expect("decided");
    let local = decisions.iter().all(|entry| entry.decision().source == Source::Local);
    assert!(decisions.is_allowed() && local, "{decisions:?}");
    assert_eq!(store.remaining(&a).await, 8, "both units of the store");
    assert_eq!(limiter.limiter().store().stats().pending_debit_units, 2);
    limiter.refund(&decisions).await;
    let pending = limiter.limiter().store().stats().pending_debit_units;
    let counted = 10 - store.remaining(&a).await + pending;
    assert!(counted >= 2, "two admitted requests count, but only {counted} units do");
}

/// The blocks of the store and of this instance are apart, and each keeps its own.
#[tokio::test]
async fn outage_keeps_the_blocks_that_start_in_it() {
    let (clock, hour) = (ManualClock::new(), 60 * MINUTE);
    let store = Flaky::on(&clock);
    let fleet = fleet_of(1).remove(0);
    let limiter = Limiter::new(fallback_on(&clock, &store, fleet));
    let quota = Quota::sliding_log(2, MINUTE).and_then(|quota| quota.with_block_for(&[hour]));
    let quota = quota.expect("valid");
    let (one, other) = (Charge::new("one", &quota), Charge::new("other", &quota));
    let acquire = async |charge: &Charge<'_>| limiter.acquire(charge).await.expect("decided");
    for expected in [Duration::ZERO, Duration::ZERO, hour] {
        assert_eq!(acquire(&one).await.retry_after, expected);
    }
    store.set_fault(down());
    assert!(acquire(&one).await.allowed, "only the store has its block");
    for expected in [Duration::ZERO, Duration::ZERO, hour, hour] {
        let decision = acquire(&other).await;
        assert_eq!((decision.retry_after, decision.source), (expected, Source::Local));
    }
    // A report is recorded, and shows the count.
    let reported = limiter.report(&other).await.expect("recorded");
    assert_eq!((reported.allowed, reported.retry_after), (false, MINUTE));
    clock.advance(2 * MINUTE);
    assert_eq!(acquire(&other).await.retry_after, 58 * MINUTE);
    store.set_fault(Fault::None);
    assert_eq!(acquire(&one).await.retry_after, 58 * MINUTE);
    assert!(acquire(&other).await.allowed, "the store has no block");
    store.set_fault(down());
    limiter.reset(&other).await.expect_err("the store cannot reset it");
    assert!(acquire(&other).await.allowed, "a reset ends the local block");
}
