use std::collections::BTreeMap;

use super::*;
use crate::algorithm::Algorithm;
use crate::calendar::{Calendar, CalendarUnit};
use crate::clock::ManualClock;
use crate::decision::{Decision, Source};
use crate::hold::Hold;
use crate::limiter::Limiter;
use crate::policy::{Cost, Mode, Policies, PolicyBuilder, PolicyDecision, PolicyLimiter, Query};
use crate::store::memory::MemoryStore;

const MINUTE: Duration = Duration::from_secs(60);

struct Setup {
    limiter: PolicyLimiter,
    clock: ManualClock,
}

/// Creates a limiter with the policy `p`: a fixed window of 10 by user, and 5 for bob.
fn setup(change: impl FnOnce(PolicyBuilder) -> PolicyBuilder) -> Setup {
    let quota = |limit| Quota::fixed_window(limit, 10 * MINUTE).expect("valid");
    setup_with(quota(10), |builder| change(builder.override_for(["bob"], quota(5))))
}

fn setup_with(quota: Quota, change: impl FnOnce(PolicyBuilder) -> PolicyBuilder) -> Setup {
    let clock = ManualClock::new();
    let builder = Policy::builder("p", quota).key(["header.x-user"]);
    let policy = change(builder).build().expect("valid");
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let policies = Policies::new(vec![policy]).expect("valid");
    Setup { limiter: PolicyLimiter::new(Limiter::new(store), policies), clock }
}

impl Setup {
    fn policy(&self) -> &Policy {
        self.limiter.policy("p").expect("known")
    }

    fn set(&self, key: &str, effect: OverrideEffect, time: Option<Duration>) {
        let until = time.map(|time| self.limiter.limiter().now().saturating_add(time));
        let key = self.policy().override_key(&[key]).expect("valid");
        self.limiter.overrides().set("p", key, RuntimeOverride { effect, until });
    }

    fn set_limit(&self, key: &str, limit: u64, time: Duration) {
        let quota = self.policy().overridden_quota(key, Some(limit), None, None).expect("valid");
        self.set(key, OverrideEffect::Quota(Arc::new(quota)), Some(time));
    }

    /// Sets numbers without an end.
    fn set_numbers(&self, key: &str, limit: Option<u64>, window: Option<Duration>) {
        let quota = self.policy().overridden_quota(key, limit, window, None).expect("valid");
        self.set(key, OverrideEffect::Quota(Arc::new(quota)), None);
    }

    /// Returns the decisions on a request of this user: limit, whether it is allowed, and source.
    async fn acquire(&self, user: &str) -> Vec<(u64, bool, Source)> {
        let request = BTreeMap::from([("header.x-user".to_owned(), user.to_owned())]);
        let by_attributes = self.limiter.decide(Action::Peek, Query::attributes(&request)).await;
        let by_attributes = shown(&by_attributes.expect("decided"));
        let by_name = self.limiter.acquire(Query::policy("p", user)).await.expect("decided");
        assert_eq!(by_attributes, shown(&by_name), "both forms of a query see the same");
        by_attributes
    }

    async fn limit(&self, user: &str) -> u64 {
        self.acquire(user).await[0].0
    }
}

fn shown(decisions: &crate::policy::PolicyDecisions<'_>) -> Vec<(u64, bool, Source)> {
    let made = decisions.iter().map(PolicyDecision::decision);
    made.map(|made| (made.limit, made.allowed, made.source)).collect()
}

#[tokio::test]
async fn key_comes_before_all_keys_before_the_file_before_the_policy() {
    let it = setup(|policy| policy);
    assert_eq!([it.limit("ann").await, it.limit("bob").await], [10, 5]);
    it.set_limit("*", 3, MINUTE);
    assert_eq!([it.limit("ann").await, it.limit("bob").await], [3, 3]);
    it.set_limit("bob", 100, 2 * MINUTE);
    assert_eq!([it.limit("ann").await, it.limit("bob").await], [3, 100]);
    it.clock.advance(MINUTE.saturating_sub(Duration::from_micros(1)));
    assert_eq!(it.limit("ann").await, 3);
    it.clock.advance(Duration::from_micros(1));
    assert_eq!([it.limit("ann").await, it.limit("bob").await], [10, 100], "that of all has ended");
    it.limiter.overrides().remove("p", &it.policy().override_key(&["bob"]).expect("valid"));
    assert_eq!(it.limit("bob").await, 5);
    it.limiter.overrides().remove("p", &OverrideKey::ALL);
    assert!(it.limiter.overrides().is_empty());
}

#[tokio::test]
async fn counts_stay_when_a_limit_rises_and_falls() {
    let it = setup(|policy| policy);
    for _ in 0..10 {
        assert!(it.limiter.acquire(Query::policy("p", "ann")).await.expect("ok").is_allowed());
    }
    let remaining = async || {
        let decisions = it.limiter.acquire(Query::policy("p", "ann")).await.expect("decided");
        decisions.binding().map(|entry| (entry.decision().allowed, entry.decision().remaining))
    };
    assert_eq!(remaining().await, Some((false, 0)));
    it.set_limit("ann", 12, MINUTE);
    assert_eq!(remaining().await, Some((true, 1)), "ten of twelve were used");
    it.set_limit("ann", 11, MINUTE);
    assert_eq!(remaining().await, Some((false, 0)));
    it.clock.advance(MINUTE);
    assert_eq!(remaining().await, Some((false, 0)), "eleven of ten are used");
}

#[tokio::test]
async fn unlimited_key_is_not_counted_and_the_denial_of_a_blocked_one_has_its_wait() {
    let it = setup(|policy| policy);
    it.set("ann", OverrideEffect::Unlimited, Some(MINUTE));
    for _ in 0..20 {
        assert_eq!(it.acquire("ann").await, []);
    }
    it.set("*", OverrideEffect::Block, Some(2 * MINUTE));
    assert_eq!(it.acquire("ann").await, [], "that of the key comes first");
    let blocked = it.limiter.acquire(Query::policy("p", "bob")).await.expect("decided");
    let denial = blocked.denied_by().expect("blocked");
    assert_eq!(denial.decision().retry_after, 2 * MINUTE);
    assert_eq!((denial.key(), denial.missing_key()), (Some("bob"), None));
    assert_eq!(it.acquire("bob").await, [(5, false, Source::Override)]);
    it.clock.advance(MINUTE);
    assert_eq!(it.acquire("ann").await, [(10, false, Source::Override)]);
    it.set("*", OverrideEffect::Block, None);
    it.clock.advance(1_000 * MINUTE);
    let blocked = it.limiter.acquire(Query::policy("p", "ann")).await.expect("decided");
    assert_eq!(blocked.denied_by().map(|it| it.decision().retry_after), Some(Duration::ZERO));
    it.limiter.overrides().remove("p", &OverrideKey::ALL);
    assert_eq!(it.acquire("ann").await, [(10, true, Source::Store)], "nothing was counted");
}

#[tokio::test]
async fn wait_of_a_blocked_key_is_that_of_its_own_limit_if_it_is_longer() {
    let it = setup(|policy| policy);
    let _ = it.act(Action::Acquire, Query::policy("p", "ann").with_cost(10)).await;
    let own = it.act(Action::Acquire, Query::policy("p", "ann")).await.retry_after;
    it.set("*", OverrideEffect::Block, Some(Duration::from_secs(2)));
    let ann = attributes(&[("header.x-user", "ann")]);
    for query in [Query::policy("p", "ann"), Query::attributes(&ann)] {
        let blocked = it.act(Action::Acquire, query).await;
        assert_eq!((blocked.retry_after, blocked.source), (own, Source::Override));
    }
    let free = it.act(Action::Acquire, Query::policy("p", "new")).await;
    assert_eq!(free.retry_after, Duration::from_secs(2));
    it.clock.advance(own);
    assert!(it.act(Action::Acquire, Query::policy("p", "ann")).await.allowed);
}

#[tokio::test]
async fn shadow_policy_that_blocks_denies_nothing() {
    let it = setup(|policy| policy.mode(Mode::Shadow));
    it.set("*", OverrideEffect::Block, None);
    let decisions = it.limiter.acquire(Query::policy("p", "ann")).await.expect("decided");
    assert!(decisions.is_allowed() && !decisions.iter().all(|it| it.decision().allowed));
}

#[tokio::test]
async fn refund_of_a_raised_limit_keeps_the_rest_of_its_level() {
    let it = setup_with(Quota::token_bucket(10, MINUTE).expect("valid"), |policy| policy);
    it.set_limit("ann", 1_000, MINUTE);
    let charged_at = it.limiter.limiter().now();
    let query = Query::policy("p", "ann").with_cost(500);
    assert!(it.limiter.acquire(query).await.expect("decided").is_allowed());
    let refund = Query::policy("p", "ann").with_cost(1).with_charged_at(charged_at);
    let refunded = it.limiter.decide(Action::Refund, refund).await.expect("decided");
    let remaining = refunded.binding().map(|it| it.decision().remaining);
    assert_eq!(remaining, Some(501), "by the quota of 10 the level would be cut to 100");
}

#[tokio::test]
async fn blocked_and_unlimited_keys_are_refunded_and_reported() {
    let it = setup(|policy| policy);
    let charged_at = it.limiter.limiter().now();
    let query = || Query::policy("p", "ann");
    assert!(it.limiter.acquire(query().with_cost(4)).await.expect("decided").is_allowed());
    for effect in [OverrideEffect::Block, OverrideEffect::Unlimited] {
        it.set("ann", effect, None);
        let report = it.limiter.decide(Action::Report, query()).await.expect("decided");
        assert_eq!(shown(&report), [(10, true, Source::Store)]);
        let refund = query().with_cost(2).with_charged_at(charged_at);
        assert_eq!(
            it.limiter.decide(Action::Refund, refund).await.expect("decided").iter().count(),
            1
        );
    }
    it.limiter.overrides().remove("p", &it.policy().override_key(&["ann"]).expect("valid"));
    let left = it.limiter.decide(Action::Peek, query()).await.expect("decided");
    assert_eq!(left.binding().map(|it| it.decision().remaining), Some(7), "4 + 2 - 4, and this");
}

#[tokio::test]
async fn longest_network_that_has_not_ended_applies() {
    let quota = Quota::fixed_window(10, MINUTE).expect("valid");
    let policy = Policy::builder("p", quota).key(["ip"]).build().expect("valid");
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let policies = Policies::new(vec![policy]).expect("valid");
    let it = Setup { limiter: PolicyLimiter::new(Limiter::new(store), policies), clock };
    it.set_limit("*", 1, 4 * MINUTE);
    it.set_limit("10.0.0.0/8", 2, 3 * MINUTE);
    it.set_limit("10.1.0.0/16", 3, 2 * MINUTE);
    it.set_limit("10.1.1.1", 4, MINUTE);
    it.set_limit("2001:db8::/32", 5, MINUTE);
    it.set_limit("2001:db8:1::/64", 6, MINUTE);
    let limit = async |ip: &str| {
        let decisions = it.limiter.decide(Action::Peek, Query::policy("p", ip)).await;
        decisions.expect("decided").binding().map(|it| it.decision().limit)
    };
    assert_eq!(limit("2001:db8:9::/64").await, Some(5));
    assert_eq!(limit("2001:db8:1::/64").await, Some(6));
    for expected in [4, 3, 2, 1, 10] {
        assert_eq!(limit("10.1.1.1").await, Some(expected));
        it.clock.advance(MINUTE);
    }
}

#[test]
fn overrides_are_validated_like_those_of_the_file() {
    let it = setup(|policy| policy.cost(Cost::Fixed(3)));
    let policy = it.policy();
    let error = |limit, window, burst| {
        let quota = policy.overridden_quota("ann", limit, window, burst);
        quota.expect_err("invalid").to_string()
    };
    assert!(error(Some(0), None, None).contains("limit 0"));
    assert!(error(Some(2), None, None).contains("cost 3 can never be admitted"));
    assert!(error(None, Some(Duration::ZERO), None).contains("window"));
    assert!(error(None, None, Some(5)).contains("burst"));
    let numbers = policy.overridden_quota("bob", None, Some(MINUTE), None).expect("valid");
    let quota = numbers.applied_to(policy.quota_for("bob"), policy);
    assert_eq!((quota.limit(), quota.window()), (5, MINUTE), "the limit of the file stays");
    for key in [String::new(), "x".repeat(10_000)] {
        assert!(policy.override_key(&[key]).is_err(), "no request has it");
    }
    let values = ["ann", "acme"];
    assert!(policy.override_key(&values).expect_err("two").to_string().contains("only by"));

    let quota = Quota::token_bucket(10, MINUTE).expect("valid").with_burst(30).expect("valid");
    let quota = quota.with_block_for(&[MINUTE]).expect("valid");
    let two = Policy::builder("p", quota).key(["header.a", "header.b"]).build().expect("valid");
    let joined = two.override_key(&[r"x\|y|z"]).expect("valid");
    assert_eq!(joined, two.override_key(&["x|y", "z"]).expect("valid"));
    let numbers = two.overridden_quota("x", Some(20), None, None).expect("valid");
    let quota = numbers.applied_to(two.quota(), &two);
    assert_eq!((quota.limit(), quota.burst(), quota.block_for()), (20, 30, &[MINUTE][..]));
}

#[test]
fn an_override_of_the_limit_keeps_the_calendar() {
    let month = Calendar::new(CalendarUnit::Month, "Europe/Berlin").expect("valid");
    let quota = Quota::calendar_window(10, month).expect("valid");
    let policy = Policy::builder("p", quota.clone()).key(["ip"]).build().expect("valid");
    let of = |window| {
        let numbers = policy.overridden_quota("192.0.2.1", Some(50), window, None);
        numbers.expect("valid").applied_to(policy.quota(), &policy)
    };
    assert_eq!((of(None).limit(), of(None).calendar()), (50, quota.calendar()));
    assert_eq!(of(Some(MINUTE)).calendar(), None, "a window of its own");
}

impl Setup {
    /// Returns how many units requests with these attributes may still take, by what a peek shows.
    async fn free(&self, attributes: &BTreeMap<String, String>) -> u64 {
        let decided = self.limiter.decide(Action::Peek, Query::attributes(attributes)).await;
        let decided = decided.expect("decided");
        let decision = decided.binding().expect("a limit").decision();
        decision.remaining + u64::from(decision.allowed)
    }

    /// Returns the decision of the only limit of a query.
    async fn act(&self, action: Action, query: Query<'_, '_>) -> Decision {
        let decided = self.limiter.decide(action, query).await.expect("decided");
        decided.binding().expect("a limit").decision()
    }
}

fn attributes(values: &[(&str, &str)]) -> BTreeMap<String, String> {
    values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn settlements_and_refunds_keep_the_window_of_an_override() {
    let day = 1440 * MINUTE;
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingCounter, Algorithm::SlidingLog] {
        let it = setup_with(Quota::new(algorithm, 10, 60 * MINUTE).expect("valid"), |it| it);
        it.set_numbers("ann", None, Some(day));
        let ann = attributes(&[("header.x-user", "ann")]);
        let hold = || Hold::new("id").expect("valid");
        // Not at the start of an hour, or of a day.
        it.clock.advance(100 * MINUTE);
        let charged_at = it.limiter.limiter().now();
        let _ = it.act(Action::Acquire, Query::policy("p", "ann").with_cost(4)).await;
        let reserve = Query::attributes(&ann).with_cost(2).with_hold(hold());
        let _ = it.act(Action::Acquire, reserve).await;
        it.clock.advance(MINUTE / 2);
        assert_eq!(it.free(&ann).await, 4, "{algorithm}: six of ten");
        for (query, free) in [
            (Query::policy("p", "ann").with_charged_at(charged_at), 5),
            (Query::attributes(&ann).with_charged_at(charged_at), 6),
        ] {
            let _ = it.act(Action::Refund, query.with_cost(1)).await;
            assert_eq!(it.free(&ann).await, free, "{algorithm}: one unit returned");
        }
        let _ =
            it.act(Action::Commit, Query::policy("p", "ann").with_cost(4).with_hold(hold())).await;
        assert_eq!(it.free(&ann).await, 4, "{algorithm}: two more than reserved");
    }
}

#[tokio::test]
async fn an_override_keeps_what_the_request_chooses() {
    let month = Calendar::new(CalendarUnit::Month, "Europe/Istanbul").expect("valid");
    let monthly = Quota::calendar_window(10, month).expect("valid");
    let days = ["5", "20"].map(|day| (day, monthly.clone().with_anchor(day).expect("valid")));
    let it = setup_with(monthly, |policy| policy.limits("header.x-day", days));
    let of = |day| attributes(&[("header.x-user", "ann"), ("header.x-day", day)]);
    let reset = async |day| it.act(Action::Peek, Query::attributes(&of(day))).await.reset_after;
    let before = [reset("5").await, reset("20").await, reset("1").await];
    it.set_limit("ann", 500, MINUTE);
    let after = [reset("5").await, reset("20").await, reset("1").await];
    assert_eq!(before, after);
    assert!(before[0] != before[1] && before[1] != before[2], "{before:?}");

    let plan = |limit| Quota::fixed_window(limit, 60 * MINUTE).expect("valid");
    let it = setup_with(plan(2), |policy| {
        policy.limits("header.x-plan", [("free", plan(5)), ("pro", plan(100))])
    });
    let limit = async |user, plan| {
        let request = attributes(&[("header.x-user", user), ("header.x-plan", plan)]);
        it.act(Action::Peek, Query::attributes(&request)).await.limit
    };
    it.set_numbers("*", None, Some(120 * MINUTE));
    let limits = [limit("ann", "pro").await, limit("ann", "free").await, limit("ann", "").await];
    assert_eq!(limits, [100, 5, 2], "only the window is another");
    it.set_numbers("ann", Some(7), None);
    assert_eq!([limit("ann", "pro").await, limit("bob", "free").await], [7, 5]);
}

#[tokio::test]
async fn a_settlement_after_a_boundary_starts_the_period_of_the_request() {
    let month = Calendar::new(CalendarUnit::Month, "Europe/Istanbul").expect("valid");
    let monthly = Quota::calendar_window(10, month).expect("valid");
    let days = Calendar::anchors(CalendarUnit::Month).into_iter().map(|day| {
        let quota = monthly.clone().with_anchor(&day).expect("valid");
        (day, quota)
    });
    let days: Vec<_> = days.collect();
    let it = setup_with(monthly, |policy| policy.limits("header.x-day", days));
    let ann = attributes(&[("header.x-user", "ann"), ("header.x-day", "20")]);
    let hold = || Hold::new("id").expect("valid");
    let end = it.act(Action::Peek, Query::attributes(&ann)).await.reset_after;
    it.clock.advance(end.saturating_sub(Duration::from_secs(5)));
    let _ = it.act(Action::Acquire, Query::attributes(&ann).with_cost(2).with_hold(hold())).await;
    it.clock.advance(Duration::from_secs(10));
    let _ = it.act(Action::Commit, Query::attributes(&ann).with_cost(5).with_hold(hold())).await;
    let peek = it.act(Action::Peek, Query::attributes(&ann)).await;
    let days = peek.reset_after.as_secs() / 86_400;
    assert_eq!((peek.remaining, days), (6, 29), "three more than reserved, until the 20th");
}
