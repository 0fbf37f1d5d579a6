//! Counts over a boundary, in memory and on a real Redis.

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

/// Returns a clock at this time.
fn clock_at(time: &str) -> ManualClock {
    let clock = ManualClock::new();
    clock.set(timestamp(seconds(time)));
    clock
}

fn quota(limit: u64, unit: &str, zone: &str, anchor: &str) -> Quota {
    Quota::calendar_window(limit, calendar(unit, zone, anchor)).expect("valid")
}

/// Runs a test on both stores, with a clock at this time.
async fn on_both_stores(time: &str, test: impl AsyncFn(&ManualClock, &dyn Acquire)) {
    let clock = clock_at(time);
    let memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    test(&clock, &memory).await;
    let (redis, clock) = (Redis::start(), clock_at(time));
    test(&clock, &redis.driven_limiter(clock.clone()).await).await;
    redis.assert_every_key_expires();
}

/// Acquires of either store: whether allowed, units left, and the seconds until the reset.
trait Acquire {
    fn acquire<'a>(
        &'a self,
        quota: &'a Quota,
    ) -> std::pin::Pin<Box<dyn Future<Output = (bool, u64, u64)> + 'a>>;
}

impl<S: Store> Acquire for Limiter<S> {
    fn acquire<'a>(
        &'a self,
        quota: &'a Quota,
    ) -> std::pin::Pin<Box<dyn Future<Output = (bool, u64, u64)> + 'a>> {
        let charge = Charge::new("acme", quota).with_policy("billing");
        Box::pin(async move {
            let decision = self.acquire(&charge).await.expect("decided");
            assert_eq!(decision.retry_after.is_zero(), decision.allowed);
            (decision.allowed, decision.remaining, decision.reset_after.as_secs())
        })
    }
}

#[tokio::test]
async fn a_day_has_25_hours_when_clocks_go_back() {
    on_both_stores("2024-10-26T22:00:00Z", async |clock, limiter| {
        let day = quota(2, "day", "Europe/Berlin", "-");
        assert_eq!(limiter.acquire(&day).await, (true, 1, 25 * 3_600));
        clock.advance(DAY);
        assert_eq!(limiter.acquire(&day).await, (true, 0, 3_600));
        assert_eq!(limiter.acquire(&day).await, (false, 0, 3_600));
        clock.advance(Duration::from_secs(3_600) - Duration::from_micros(1));
        assert!(!limiter.acquire(&day).await.0);
        clock.advance(Duration::from_micros(1));
        assert_eq!(limiter.acquire(&day).await, (true, 1, 24 * 3_600));
    })
    .await;
}

#[tokio::test]
async fn the_31st_is_the_last_day_of_a_shorter_month_and_returns() {
    on_both_stores("2023-01-31T12:00:00Z", async |clock, limiter| {
        let month = quota(1, "month", "UTC", "31");
        for days in [28, 31, 30, 31] {
            let (allowed, _, reset) = limiter.acquire(&month).await;
            let start = u64::from(days == 28) * 43_200;
            assert_eq!((allowed, reset), (true, days * 86_400 - start), "{days}");
            assert!(!limiter.acquire(&month).await.0);
            clock.advance(Duration::from_secs(reset));
        }
    })
    .await;
}

#[tokio::test]
async fn a_count_stays_until_its_end_whatever_the_calendar_is_now() {
    on_both_stores("2024-03-10T12:00:00Z", async |clock, limiter| {
        let month = quota(3, "month", "Europe/Berlin", "1");
        let (_, _, reset) = limiter.acquire(&month).await;
        // 22:00 UTC on 31 March, because of summer time.
        assert_eq!(reset, 21 * 86_400 + 10 * 3_600);
        for other in [
            quota(3, "month", "America/New_York", "1"),
            quota(3, "month", "Europe/Berlin", "15"),
            quota(3, "day", "UTC", "-"),
        ] {
            clock.advance(5 * DAY);
            let (_, _, reset_after) = limiter.acquire(&other).await;
            assert_eq!(reset_after, reset - 86_400 * 5, "{other:?}");
            clock.step_back(5 * DAY);
        }
        clock.advance(Duration::from_secs(reset));
        let (allowed, remaining, reset) = limiter.acquire(&quota(3, "day", "UTC", "-")).await;
        assert_eq!((allowed, remaining, reset), (true, 2, 2 * 3_600));
    })
    .await;
}

/// The clocks of the instances are years ahead of the server's, and they know its time only from its
/// replies. An admission before the boundary has less than a second to the reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_fleet_admits_the_limit_in_each_period_over_a_boundary_under_load() {
    const LIMIT: u64 = 500;
    let (redis, server) = support::redis_with_settable_clock();
    let boundary = seconds("2024-03-31T22:00:00Z");
    server.stop_at(timestamp(boundary).as_micros() - 1);
    let month = quota(LIMIT, "month", "Europe/Berlin", "1");
    let mut tasks = Vec::new();
    let (exhausted, mut all_exhausted) = tokio::sync::mpsc::channel(32);
    for _ in 0..4 {
        let limiter = redis.limiter().await;
        for _ in 0..8 {
            let (limiter, month, exhausted) = (limiter.clone(), month.clone(), exhausted.clone());
            tasks.push(tokio::spawn(async move {
                let (mut admitted, mut denied) = ([0, 0], [0, 0]);
                while denied[1] < 20 {
                    let decision = limiter.acquire(&Charge::new("acme", &month)).await;
                    let decision = decision.expect("decided");
                    let is_over = usize::from(decision.reset_after > Duration::from_secs(1));
                    assert!(denied[1] == 0 || is_over == 1, "time goes on");
                    let counts = if decision.allowed { &mut admitted } else { &mut denied };
                    counts[is_over] += 1;
                    if denied == [20, 0] && !decision.allowed {
                        exhausted.send(()).await.expect("a receiver");
                    }
                }
                admitted
            }));
        }
    }
    for _ in &tasks {
        all_exhausted.recv().await.expect("a task");
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after");
    server.set(boundary - i64::try_from(now.as_secs()).expect("a time"));
    let mut total = [0, 0];
    for task in tasks {
        let admitted: [u64; 2] = task.await.expect("no panic");
        total = [total[0] + admitted[0], total[1] + admitted[1]];
    }
    assert_eq!(total, [LIMIT, LIMIT]);
    redis.assert_every_key_expires();
}
