//! Holds while the store fails.

use std::time::Duration;

use tidegate::testing::conformance_of_holds;
use tidegate::{
    Action, Breaker, Charge, Clock, Decision, DenyCache, Fallback, Fleet, Hold, HoldStatus,
    HoldTerms, Limiter, ManualClock, MemoryStore, OnExpire, Outcome, Quota, Source, Store,
    StoreError,
};

use crate::fallback::{fallback_on, fleet_of};
use crate::flaky::{Fault, Flaky, down};
use crate::support::{seeds, until};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

fn hold(id: &str) -> Hold {
    Hold::new(id).expect("valid")
}

async fn decide<S: Store>(limiter: &Limiter<S>, action: Action, charge: &Charge<'_>) -> Decision {
    limiter.decide(action, charge).await.expect("decided")
}

fn status(decision: &Decision) -> Option<HoldStatus> {
    decision.hold.map(|hold| hold.status)
}

/// Store whose decisions do not say that a cache made them, as those of the model do not.
struct WithoutSource<S>(S);

impl<S: Store> Store for WithoutSource<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        self.0.decide(action, charge).map(|decided| Ok(decided?.with_source(Source::Store)))
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        self.0.decide_all(action, charges).map(|decided| {
            Ok(decided?.into_iter().map(|it| it.with_source(Source::Store)).collect())
        })
    }

    fn clock(&self) -> &dyn Clock {
        self.0.clock()
    }
}

#[tokio::test]
async fn wrappers_around_a_healthy_store_conform_to_the_model() {
    conformance_of_holds(seeds(500), async |clock: ManualClock| {
        let memory = MemoryStore::builder().clock(clock).build();
        Limiter::new(WithoutSource(Fallback::new(DenyCache::new(Breaker::new(memory)))))
    })
    .await;
}

#[tokio::test]
async fn a_hold_of_an_outage_is_settled_where_it_was_taken() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let quota = Quota::sliding_log(100, HOUR).expect("valid");
    let (job, other) = (hold("job"), hold("other"));
    let charge = Charge::new("u", &quota).with_cost(40);
    store.set_fault(down());
    let reserved = decide(&limiter, Action::Acquire, &charge.with_hold(&job)).await;
    assert_eq!((reserved.allowed, reserved.source), (true, Source::Local));
    assert_eq!(status(&reserved), Some(HoldStatus::Held));
    let repeated = decide(&limiter, Action::Acquire, &charge.with_hold(&job)).await;
    assert_eq!(status(&repeated), Some(HoldStatus::Replayed));
    // The units that return are no longer owed to the store.
    let settled = decide(&limiter, Action::Commit, &charge.with_cost(15).with_hold(&job)).await;
    assert_eq!((status(&settled), settled.source), (Some(HoldStatus::Settled), Source::Local));
    let repeated = decide(&limiter, Action::Commit, &charge.with_cost(0).with_hold(&job)).await;
    assert_eq!(status(&repeated), Some(HoldStatus::Settled));
    assert!(decide(&limiter, Action::Acquire, &charge.with_hold(&other)).await.allowed);
    store.set_fault(Fault::None);
    until("the store has what was used", async || store.remaining(&charge).await <= 45).await;
    // The rest of this one was charged to the store already.
    let late = decide(&limiter, Action::Commit, &charge.with_cost(0).with_hold(&other)).await;
    assert_eq!((status(&late), late.source), (Some(HoldStatus::Settled), Source::Local));
    assert_eq!(store.remaining(&charge).await, 45, "never admits more than the limit");
}

/// For as long as its hold could be renewed, and a minute.
#[tokio::test]
async fn a_commit_waits_for_the_store_until_its_hold_is_forgotten() {
    let terms = HoldTerms::new(MINUTE, 5 * MINUTE).expect("valid");
    let quota = Quota::sliding_log(100, HOUR).expect("valid").with_holds(terms);
    for (outage, is_made) in [(Duration::from_micros(359_999_999), true), (6 * MINUTE, false)] {
        let clock = ManualClock::new();
        let store = Flaky::on(&clock);
        let fallback = fallback_on(&clock, &store, Fleet::new());
        let job = hold("job");
        let charge = Charge::new("u", &quota).with_cost(40).with_hold(&job);
        let _ = fallback.decide(Action::Acquire, &charge).await.expect("reserved");
        store.set_fault(down());
        let pending = fallback.decide(Action::Commit, &charge.with_cost(50)).await;
        assert_eq!(status(&pending.expect("pending")), Some(HoldStatus::Pending));
        clock.advance(outage);
        store.set_fault(Fault::None);
        fallback.settle().await;
        let stats = fallback.stats();
        assert_eq!((stats.pending_commits, stats.dropped_commits), (0, u64::from(!is_made)));
        // The reservation has ended, so that all units are reported.
        assert_eq!(store.remaining(&charge).await, if is_made { 10 } else { 60 });
    }
}

#[tokio::test]
async fn a_commit_during_an_outage_is_made_afterwards() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let quota = Quota::sliding_log(100, HOUR).expect("valid");
    let ids: Vec<Hold> = (0..300).map(|number| hold(&format!("job-{number}"))).collect();
    let charge = Charge::new("u", &quota);
    for id in &ids[..100] {
        assert!(decide(&limiter, Action::Acquire, &charge.with_hold(id)).await.allowed);
    }
    for fault in [down(), Fault::LosesAnswersOf(Action::Commit)] {
        store.set_fault(fault);
        for id in &ids[..50] {
            let commit = charge.with_cost(0).with_hold(id);
            let pending = decide(&limiter, Action::Commit, &commit).await;
            assert_eq!(status(&pending), Some(HoldStatus::Pending));
        }
    }
    store.set_fault(Fault::None);
    // A commit that may have run is made again, and returns its units once.
    until("all commits are made", async || store.remaining(&charge).await == 50).await;
    let again = decide(&limiter, Action::Commit, &charge.with_cost(0).with_hold(&ids[0])).await;
    assert_eq!(status(&again), Some(HoldStatus::Settled));
    assert_eq!(store.remaining(&charge).await, 50);
}

#[tokio::test]
async fn instances_without_the_store_hold_no_more_than_the_limit() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiters: Vec<_> = fleet_of(3)
        .into_iter()
        .map(|fleet| Limiter::new(fallback_on(&clock, &store, fleet)))
        .collect();
    let quota = Quota::concurrency(10).expect("valid");
    let charge = Charge::new("u", &quota);
    store.set_fault(down());
    let mut held = Vec::new();
    for round in 0..10 {
        for (at, limiter) in limiters.iter().enumerate() {
            let id = hold(&format!("{round}-{at}"));
            if decide(limiter, Action::Acquire, &charge.with_hold(&id)).await.allowed {
                held.push((at, id));
            }
        }
    }
    assert_eq!(held.len(), 10);
    // Another instance does not know a local hold: its commit is one of the store's.
    let (at, id) = &held[0];
    store.set_fault(Fault::None);
    let commit = charge.with_cost(0).with_hold(id);
    let elsewhere = decide(&limiters[(at + 1) % 3], Action::Commit, &commit).await;
    assert_eq!(status(&elsewhere), Some(HoldStatus::Unknown));
    let here = decide(&limiters[*at], Action::Commit, &commit).await;
    assert_eq!(status(&here), Some(HoldStatus::Settled));
}

/// The first answer may be lost on the way to the client, who then sends the request again.
#[tokio::test]
async fn an_id_of_an_outage_is_charged_once() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let quota = Quota::sliding_log(100, HOUR).expect("valid");
    let charge = Charge::new("u", &quota).with_cost(10);
    let (paid, job) = (hold("payment").settled(Duration::from_secs(600)), hold("job"));
    let paid = paid.expect("valid");
    for outage in 0..2 {
        store.set_fault(down());
        // Other units, so that the local count has room for a debt that is too large.
        assert!(decide(&limiter, Action::Acquire, &charge).await.allowed);
        for id in [&paid, &job] {
            for _ in 0..3 {
                let charge = charge.with_hold(id);
                assert!(decide(&limiter, Action::Acquire, &charge).await.allowed);
            }
        }
        store.set_fault(Fault::None);
        let left = 70 - 10 * outage;
        until("debts are settled", async || store.remaining(&charge).await <= left).await;
        until("no debts", async || limiter.store().stats().pending_debits == 0).await;
        assert_eq!(store.remaining(&charge).await, left, "outage {outage}");
        for id in [&paid, &job] {
            let repeated = decide(&limiter, Action::Acquire, &charge.with_hold(id)).await;
            assert_eq!(status(&repeated), Some(HoldStatus::Replayed), "after outage {outage}");
        }
        assert_eq!(store.remaining(&charge).await, left, "after outage {outage}");
    }
    let conflict = limiter.acquire(&charge.with_cost(11).with_hold(&job)).await;
    assert!(conflict.is_err(), "another request");
}

/// The store has charged a request whose answer was lost, or one from before the outage.
#[tokio::test]
async fn a_commit_of_an_outage_settles_what_the_store_knows() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let rate = Quota::sliding_log(100, HOUR).expect("valid");
    let in_flight = Quota::concurrency(100).expect("valid");
    for (quota, left) in [(&rate, 80), (&in_flight, 100)] {
        let charge = Charge::new("u", quota).with_cost(40);
        let (lost, early) = (hold("lost"), hold("early"));
        assert!(decide(&limiter, Action::Acquire, &charge.with_hold(&early)).await.allowed);
        store.set_fault(Fault::LosesAnswersOf(Action::Acquire));
        let reserved = decide(&limiter, Action::Acquire, &charge.with_hold(&lost)).await;
        assert_eq!((reserved.allowed, reserved.source), (true, Source::Local));
        store.set_fault(down());
        // A client that repeats its request.
        assert!(decide(&limiter, Action::Acquire, &charge.with_hold(&early)).await.allowed);
        for (id, used) in [(&lost, 15), (&early, 5)] {
            let commit = charge.with_cost(used).with_hold(id);
            let settled = decide(&limiter, Action::Commit, &commit).await;
            assert_eq!(status(&settled), Some(HoldStatus::Settled));
        }
        store.set_fault(Fault::None);
        until("the store has what was used", async || store.remaining(&charge).await == left).await;
        until("no debts", async || limiter.store().stats().pending_debits == 0).await;
        assert_eq!(store.remaining(&charge).await, left);
    }
}

/// The commit would release the new hold.
#[tokio::test]
async fn an_id_is_used_again_after_its_waiting_commit() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let quota = Quota::concurrency(1).expect("valid");
    let job = hold("job");
    let charge = Charge::new("u", &quota).with_hold(&job);
    assert!(decide(&limiter, Action::Acquire, &charge).await.allowed);
    store.set_fault(down());
    let pending = decide(&limiter, Action::Commit, &charge.with_cost(0)).await;
    assert_eq!(status(&pending), Some(HoldStatus::Pending));
    store.set_fault(Fault::None);
    let again = decide(&limiter, Action::Acquire, &charge).await;
    assert_eq!((again.allowed, status(&again)), (true, Some(HoldStatus::Held)));
    until("no commit waits", async || limiter.store().stats().pending_commits == 0).await;
    assert_eq!(store.remaining(&Charge::new("u", &quota)).await, 0, "it is held");
}

#[tokio::test]
async fn a_commit_after_the_end_of_a_local_hold_is_reported_to_the_store() {
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let limiter = Limiter::new(fallback_on(&clock, &store, Fleet::new()));
    let second = Duration::from_secs(1);
    let terms = HoldTerms::new(second, second).expect("valid").with_on_expire(OnExpire::Release);
    let quota = Quota::fixed_window(100, HOUR).expect("valid").with_holds(terms);
    let job = hold("job");
    let charge = Charge::new("u", &quota).with_cost(50);
    store.set_fault(down());
    assert!(decide(&limiter, Action::Acquire, &charge.with_hold(&job)).await.allowed);
    clock.advance(2 * second);
    store.set_fault(Fault::None);
    let late = decide(&limiter, Action::Commit, &charge.with_cost(30).with_hold(&job)).await;
    assert_eq!(status(&late), Some(HoldStatus::Ended));
    until("it is reported", async || store.remaining(&charge).await == 70).await;
}
