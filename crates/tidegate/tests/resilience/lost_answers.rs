//! Calls that may have run, because their answer was lost: none of them is made again.

use std::time::Duration;

use tidegate::{Action, Charge, Clock, Fallback, Fleet, ManualClock, Quota, Source, Store};
use tokio::time::sleep;

use crate::fallback::{fallback_on, fleet_of};
use crate::flaky::{Fault, Flaky, down};
use crate::settlement::admit;
use crate::support::{LONG, every_quota};

const MINUTE: Duration = Duration::from_secs(60);

/// The store may have counted a call whose answer was lost, and its request is also admitted
/// locally and becomes a debt. So the store counts at most the units of each lost call twice.
#[tokio::test]
async fn a_lost_answer_is_counted_twice_at_most() {
    for quota in every_quota(40, LONG) {
        let store = Flaky::new();
        let fallback = Fallback::new(store.clone());
        let charge = Charge::new("u", &quota);
        let mut admitted = 0;
        for round in 1..=3 {
            let calls = store.calls();
            store.set_fault(Fault::LosesAnswers);
            admitted += 2 * admit(&fallback, &charge.with_cost(2), 3).await;
            assert_eq!(store.calls(), calls + 1, "no further call carries a debt in doubt");
            let peeked = fallback.decide(Action::Peek, &charge).await.expect("decided");
            assert_eq!((peeked.source, peeked.remaining), (Source::Local, 40 - admitted - 1));
            store.set_fault(Fault::None);
            assert_eq!(fallback.settle().await, 6);
            assert_eq!(
                (admitted, 40 - store.remaining(&charge).await),
                (6 * round, (6 + 2) * round),
                "{quota:?}"
            );
        }
        let more = admit(&fallback, &charge, 50).await;
        assert_eq!((more, store.remaining(&charge).await), (40 - 24, 0), "{quota:?}");
    }
}

/// A debt that a lost settlement reported counts as charged. One that a lost acquire carried is
/// charged once more, because the acquire may have been denied.
#[tokio::test]
async fn a_debt_is_charged_at_most_twice_if_answers_are_lost() {
    for quota in every_quota(40, LONG) {
        for carried_by_request in [true, false] {
            let store = Flaky::new();
            let fallback = Fallback::new(store.clone());
            let charge = Charge::new("u", &quota);
            store.set_fault(down());
            assert_eq!(admit(&fallback, &charge, 5).await, 5);
            store.set_fault(Fault::LosesAnswers);
            let lost = if carried_by_request {
                5 + admit(&fallback, &charge, 1).await
            } else {
                // The read before it does not charge, so this one loses nothing.
                assert_eq!(fallback.settle().await, 0);
                store.set_fault(Fault::LosesAnswersOf(Action::Report));
                assert_eq!(fallback.settle().await, 5);
                0
            };
            for _ in 0..5 {
                fallback.settle().await;
            }
            store.set_fault(Fault::None);
            fallback.settle().await;
            assert_eq!(
                40 - store.remaining(&charge).await,
                if lost == 0 { 5 } else { 2 * lost },
                "{quota:?}"
            );
            let peeked = fallback.decide(Action::Peek, &charge).await.expect("decided");
            assert_eq!(peeked.source, Source::Store);
        }
    }
}

/// The store has denied the lost call, and so has not charged the debt that it carried.
#[tokio::test]
async fn a_debt_of_a_denied_call_counts_even_if_the_denial_is_lost() {
    for quota in every_quota(9, LONG) {
        let store = Flaky::new();
        let fallback = Fallback::new(store.clone());
        let charge = Charge::new("u", &quota);
        store.set_fault(down());
        assert_eq!(admit(&fallback, &charge, 1).await, 1);
        store.set_fault(Fault::None);
        assert_eq!(admit(&fallback, &charge, 1).await, 1);
        store.set_fault(down());
        assert_eq!(admit(&fallback, &charge, 7).await, 7);
        store.set_fault(Fault::LosesAnswers);
        assert_eq!(admit(&fallback, &charge, 1).await, 0);
        store.set_fault(Fault::None);
        assert_eq!(admit(&fallback, &charge, 1).await, 0, "{quota:?}");
        fallback.settle().await;
        assert_eq!(admit(&fallback, &charge, 1).await, 0, "{quota:?}");
    }
}

/// The client may disconnect while the call that settles its debt is in flight.
#[tokio::test(start_paused = true)]
async fn a_cancelled_request_settles_the_debt_once() {
    let store = Flaky::new();
    let fallback = Fallback::new(store.clone());
    let quota = Quota::fixed_window(40, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    store.set_fault(down());
    assert_eq!(admit(&fallback, &charge, 5).await, 5);
    store.set_fault(Fault::Slow(Duration::from_millis(50)));
    let cancelled = fallback.decide(Action::Acquire, &charge);
    let cancelled = tokio::time::timeout(Duration::from_millis(10), cancelled).await;
    assert!(cancelled.is_err());
    sleep(Duration::from_secs(5)).await;
    assert_eq!(store.remaining(&charge).await, 40 - 5 - 1);
    assert_eq!((fallback.stats().pending_debits, fallback.stats().settled_debit_units), (0, 5));
}

#[tokio::test]
async fn a_refund_whose_answer_is_lost_is_never_made_again() {
    for quota in every_quota(100, LONG) {
        let store = Flaky::new();
        let fallback = Fallback::builder(store.clone()).fleet(fleet_of(1).remove(0)).build();
        let charge = Charge::new("u", &quota);
        assert_eq!(admit(&fallback, &charge, 50).await, 50);
        store.set_fault(down());
        assert_eq!(admit(&fallback, &charge, 40).await, 40);
        store.set_fault(Fault::LosesAnswers);
        for refunded in 1..=60 {
            let refund = fallback.decide(Action::Refund, &charge).await;
            match refund {
                Ok(_) => assert!(refunded <= 40, "only units that are owed are returned here"),
                Err(error) => assert!(refunded > 40 && error.may_have_run()),
            }
        }
        store.set_fault(Fault::None);
        fallback.settle().await;
        assert_eq!(store.remaining(&charge).await, 70, "{quota:?}");
        assert_eq!(admit(&fallback, &charge, 200).await, 70, "30 are in use");
    }
}

/// The store does not have units that are still owed: if it returned them, others could spend them.
#[tokio::test]
async fn a_refund_cancels_what_is_still_owed_before_the_store_is_called() {
    for quota in every_quota(100, LONG) {
        let clock = ManualClock::new();
        clock.advance(LONG);
        let store = Flaky::on(&clock);
        let fallback = fallback_on(&clock, &store, Fleet::new());
        let charge = Charge::new("u", &quota);
        let charged_at = clock.now();
        assert_eq!(admit(&fallback, &charge, 20).await, 20);
        clock.advance(MINUTE);
        store.set_fault(down());
        let owed_since = clock.now();
        assert_eq!(admit(&fallback, &charge, 10).await, 10);
        let used =
            async || (100 - store.remaining(&charge).await, fallback.stats().pending_debit_units);

        // A charge from before the outage is not owed.
        let early = charge.with_charged_at(charged_at).with_cost(2);
        assert!(fallback.decide(Action::Refund, &early).await.is_err());
        assert_eq!(used().await, (20, 10), "{quota:?}");
        // A refund that the store must make in part changes nothing if the store fails.
        let late = charge.with_charged_at(owed_since);
        assert!(fallback.decide(Action::Refund, &late.with_cost(12)).await.is_err());
        assert_eq!(used().await, (20, 10), "{quota:?}");
        store.set_fault(Fault::None);
        let calls = store.calls();
        let refunded = fallback.decide(Action::Refund, &late.with_cost(4)).await.expect("refunded");
        assert_eq!((refunded.source, store.calls()), (Source::Local, calls));
        assert_eq!(used().await, (20, 6), "{quota:?}");
        let refunded = fallback.decide(Action::Refund, &charge.with_cost(8)).await;
        assert_eq!(refunded.expect("refunded").source, Source::Store);
        assert_eq!(used().await, (18, 0), "six were owed: {quota:?}");
    }
}
