//! Holds while processes are killed, servers fail over and are restarted empty, and renewals race
//! with the end: observed from outside, on a real Redis.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use support::{NAME, Redis, Sentinels, TEST_TIMEOUT, join_all, until};
use tidegate::{
    Action, Charge, Decision, Hold, HoldStatus, HoldTerms, Limiter, Permit, Quota, RedisStore,
    Store,
};

const REDIS: &str = "TIDEGATE_TEST_REDIS";
const INSTANCE: &str = "TIDEGATE_TEST_INSTANCE";
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
/// The time for which a permit lives without a renewal.
const LEASE: Duration = Duration::from_secs(10);
/// Time after which a slot must be free, and the margin for a loaded machine.
const LATENCY: Duration = Duration::from_millis(100);
const MARGIN: Duration = Duration::from_secs(2);
const LIMIT: u64 = 12;
/// Holders of each instance: more than its part of the limit.
const HOLDERS: u64 = 6;

fn quota() -> Quota {
    Quota::concurrency(LIMIT).expect("valid")
}

fn hold(id: &str) -> Hold {
    Hold::new(id).expect("valid")
}

async fn decide<S: Store>(limiter: &Limiter<S>, action: Action, charge: &Charge<'_>) -> Decision {
    limiter.decide(action, charge).await.expect("decided")
}

fn status(decision: &Decision) -> Option<HoldStatus> {
    decision.hold.map(|hold| hold.status)
}

async fn left<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> u64 {
    let read = limiter.store().decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
    read.expect("decided").remaining
}

/// Returns the time by the clock of this machine, which is that of Redis, in microseconds.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_micros()).expect("before the year 500,000")
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("short")
}

/// This test program, started as an instance.
struct Instance {
    process: Child,
    lines: Receiver<String>,
}

impl Instance {
    fn start(redis: &Redis, name: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "an_instance", "--ignored", "--nocapture"])
            .env(REDIS, redis.url())
            .env(INSTANCE, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        Self { process, lines }
    }

    /// Kills it, and returns the time right after that.
    fn kill(&mut self) -> u64 {
        self.process.kill().expect("our own child"); // SIGKILL
        self.process.wait().expect("our own child");
        now()
    }

    /// Returns the times from which and up to which each of its permits was held, which are within
    /// those of the permits. `end`: of those that were held when it was killed.
    fn times(&self, end: u64) -> Vec<(u64, u64)> {
        let (mut starts, mut times) = (BTreeMap::new(), Vec::new());
        for line in &self.lines {
            let Some((_, event)) = line.split_once("event ") else { continue };
            let words: Vec<&str> = event.split(' ').collect();
            let [kind, id, time] = words[..] else { continue };
            let Ok(time) = time.parse::<u64>() else { continue };
            match kind {
                "held" => drop(starts.insert(id.to_owned(), time)),
                _ => times.push((starts.remove(id).expect("held before"), time)),
            }
        }
        times.extend(starts.into_values().map(|start| (start, end.max(start))));
        times
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn print_event(kind: &str, id: &str) {
    let mut output = std::io::stdout().lock();
    let _ = writeln!(output, "event {kind} {id} {}", now());
    let _ = output.flush();
}

/// Holds permits until it is killed. The first holder keeps each of them over several renewals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of the test below, which starts it"]
async fn an_instance() {
    let url = std::env::var(REDIS).expect("started by the test below");
    let name = std::env::var(INSTANCE).expect("started by the test below");
    let store = RedisStore::builder(&url).timeout(TEST_TIMEOUT).connect().await;
    let limiter = Limiter::new(store.expect("connected"));
    let holders = (0..HOLDERS).map(|holder| {
        let (limiter, name) = (limiter.clone(), name.clone());
        tokio::spawn(async move {
            let quota = quota();
            for number in 0_u64.. {
                let id = format!("{name}-{holder}-{number}");
                let named = hold(&id);
                let charge = Charge::new("u", &quota).with_hold(&named);
                let permit = limiter.hold(&charge).await.expect("decided");
                let pause = (number * 37 + holder * 11) % 40;
                if permit.is_allowed() {
                    print_event("held", &id);
                    let work = if holder == 0 { 4_000 } else { 5 + pause };
                    tokio::time::sleep(Duration::from_millis(work)).await;
                    print_event("released", &id);
                    if number.is_multiple_of(2) {
                        permit.release().await.expect("released");
                    }
                } else {
                    tokio::time::sleep(Duration::from_millis(1 + pause / 8)).await;
                }
            }
        })
    });
    join_all(holders.collect::<Vec<_>>()).await;
}

/// Returns the largest number of permits that were held at one time, until `end` and from `start`
/// on.
fn most_in_flight(times: &[(u64, u64)], start: u64, end: u64) -> i64 {
    // Of two events at one time, the end comes first.
    let mut events: Vec<(u64, i64)> =
        times.iter().flat_map(|(from, until)| [(*from, 1), (*until, -1)]).collect();
    events.sort_unstable();
    let (mut held, mut most) = (0, 0);
    for (time, change) in events {
        held += change;
        if (start..end).contains(&time) {
            most = most.max(held);
        }
    }
    most
}

#[test]
fn killed_holders_free_their_slots_and_no_more_than_the_limit_is_held() {
    let redis = Redis::start();
    let members = || -> Vec<(String, u64)> {
        redis.query(&["ZRANGE", "rate_limit:{u}:concurrency", "0", "-1", "WITHSCORES"])
    };
    let mut instances: Vec<Instance> =
        (0..3).map(|at| Instance::start(&redis, &format!("first{at}"))).collect();
    let (mut times, mut last_kill) = (Vec::new(), 0);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while members().len() < usize::try_from(LIMIT).expect("few") {
        assert!(Instant::now() < deadline, "the instances hold permits");
        std::thread::sleep(Duration::from_millis(10));
    }
    for round in 0..6_u64 {
        std::thread::sleep(Duration::from_millis(300 + round * 113 % 400));
        let at = usize::try_from(round % 3).expect("small");
        let killed_at = instances[at].kill();
        last_kill = killed_at;
        let name = if round < 3 { format!("first{at}-") } else { format!("second{at}-") };
        for (id, ends) in members() {
            let latest = killed_at + micros(LEASE + LATENCY);
            assert!(!id.starts_with(&name) || ends <= latest, "{id} ends {ends}, {latest}");
        }
        times.extend(instances[at].times(killed_at));
        if round < 5 {
            let generation = if round < 3 { "second" } else { "third" };
            instances[at] = Instance::start(&redis, &format!("{generation}{at}"));
        }
    }
    // The slots of all that were killed are free again, and used by the two that live.
    let free_at = last_kill + micros(LEASE + LATENCY);
    let end = free_at + micros(MARGIN);
    std::thread::sleep(Duration::from_micros(end.saturating_sub(now())));
    let held = members();
    assert!(held.iter().all(|(id, _)| id.starts_with("third")), "{held:?}");
    for mut instance in instances.drain(..2) {
        let killed_at = instance.kill();
        times.extend(instance.times(killed_at));
    }
    assert!(times.len() > 500, "{} permits", times.len());
    let limit = i64::try_from(LIMIT).expect("small");
    assert_eq!(most_in_flight(&times, 0, u64::MAX), limit);
    assert_eq!(most_in_flight(&times, free_at, end), limit, "all slots are in use again");
}

/// A thousand permits of one limiter.
#[tokio::test]
async fn renewals_of_many_permits_share_calls() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::concurrency(1_000).expect("valid");
    let keys: Vec<String> = (0..10).map(|number| format!("user-{number}")).collect();
    let mut permits: Vec<Permit<RedisStore>> = Vec::new();
    for _ in 0..10 {
        let calls = keys.iter().cycle().take(100).map(|key| {
            let (limiter, quota) = (&limiter, &quota);
            async move { limiter.hold(&Charge::new(key, quota)).await.expect("decided") }
        });
        permits.extend(join_all(calls).await);
    }
    assert!(permits.iter().all(Permit::is_allowed));
    let key = limiter.store().redis_key(&Charge::new(&keys[0], &quota));
    let counts = || [redis.calls_of("evalsha"), redis.calls_of("zadd")];
    let before = counts();
    until("all permits are renewed once", async || counts()[1] >= before[1] + 1_000).await;
    let after = counts();
    let (calls, adds) = (after[0] - before[0], after[1] - before[1]);
    assert!((1_000..=1_100).contains(&adds), "each is renewed once: {adds}");
    assert!(calls <= 100, "{calls} calls for 1,000 renewals");
    assert_eq!(redis.query::<u64>(&["ZCARD", &key]), 100, "they are updates only");
    permits.truncate(10);
    until("the others are released", async || {
        let held: u64 = keys
            .iter()
            .map(|key| {
                let key = limiter.store().redis_key(&Charge::new(key, &quota));
                redis.query::<u64>(&["ZCARD", &key])
            })
            .sum();
        held == 10
    })
    .await;
}

/// Either the renewal is in time, or the other request gets the slot: never both.
#[tokio::test]
async fn a_renewal_that_races_with_the_end_never_shares_its_slot() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let terms = HoldTerms::new(SECOND, MINUTE).expect("valid");
    let quota = Quota::concurrency(1).expect("valid").with_holds(terms);
    let races = (0..60_u64).map(|race| {
        let (limiter, quota) = (&limiter, &quota);
        async move {
            let key = format!("user-{race}");
            let (one, two) = (hold("one"), hold("two"));
            let charge = Charge::new(&key, quota);
            let held = decide(limiter, Action::Acquire, &charge.with_hold(&one)).await;
            assert!(held.allowed);
            // From 20 ms before the end to 20 ms after it.
            let shift = Duration::from_micros(race * 700);
            let rest = held.hold.expect("a hold").expires_after() + shift;
            tokio::time::sleep(rest.saturating_sub(Duration::from_millis(20))).await;
            let (one, two) = (charge.with_hold(&one), charge.with_hold(&two));
            let (renewed, taken) = tokio::join!(
                decide(limiter, Action::Renew, &one),
                decide(limiter, Action::Acquire, &two)
            );
            let is_renewed = status(&renewed) == Some(HoldStatus::Held);
            assert!(!(is_renewed && taken.allowed), "{renewed:?} {taken:?}");
        }
    });
    join_all(races).await;
}

#[tokio::test]
async fn commits_are_exact_at_another_instance_and_after_a_failover() {
    let sentinels = Sentinels::start();
    let connect = async || {
        let builder = RedisStore::sentinel(NAME, sentinels.urls()).timeout(TEST_TIMEOUT);
        Limiter::new(builder.connect().await.expect("connected"))
    };
    let (here, there) = (connect().await, connect().await);
    let log = Quota::sliding_log(100, 3_600 * SECOND).expect("valid");
    let in_flight = Quota::concurrency(4).expect("valid");
    let (job, other) = (hold("job"), hold("other"));
    let reserved = Charge::new("u", &log).with_cost(40);
    let slot = Charge::new("u", &in_flight);
    for id in [&job, &other] {
        assert!(decide(&here, Action::Acquire, &reserved.with_hold(id)).await.allowed);
        assert!(decide(&here, Action::Acquire, &slot.with_hold(id)).await.allowed);
    }
    let committed = reserved.with_cost(10).with_hold(&job);
    let settled = decide(&there, Action::Commit, &committed).await;
    assert_eq!((status(&settled), settled.remaining), (Some(HoldStatus::Settled), 50));
    let last = decide(&here, Action::Acquire, &slot.with_hold(&hold("last"))).await;
    assert!(last.allowed);
    until("the replicas are in sync", async || {
        let key = here.store().redis_key(&slot);
        sentinels.servers()[1..].iter().all(|replica| replica.query::<u64>(&["ZCARD", &key]) == 3)
    })
    .await;
    sentinels.servers()[0].signal("STOP");
    until("a new primary", async || sentinels.promoted(0).is_some()).await;
    for limiter in [&there, &here] {
        until("the new primary decides", async || {
            limiter.peek(&reserved.with_cost(1)).await.is_ok()
        })
        .await;
        // The first one is the second commit of this id, and the other one settles or repeats.
        let again = decide(limiter, Action::Commit, &committed).await;
        assert_eq!((status(&again), again.remaining >= 50), (Some(HoldStatus::Settled), true));
        let commit = reserved.with_cost(20).with_hold(&other);
        let settled = decide(limiter, Action::Commit, &commit).await;
        assert_eq!((status(&settled), settled.remaining), (Some(HoldStatus::Settled), 70));
        let released = decide(limiter, Action::Commit, &slot.with_hold(&other)).await;
        assert_eq!(released.remaining, 2);
    }
    sentinels.servers()[0].signal("CONT");
}

#[tokio::test]
async fn a_redis_that_restarts_empty_holds_nothing_and_loses_no_usage() {
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    let log = Quota::sliding_log(100, 3_600 * SECOND).expect("valid");
    let in_flight = Quota::concurrency(2).expect("valid");
    let (job, other) = (hold("job"), hold("other"));
    let reserved = Charge::new("u", &log).with_cost(40);
    let slot = Charge::new("u", &in_flight);
    for id in [&job, &other] {
        assert!(decide(&limiter, Action::Acquire, &reserved.with_hold(id)).await.allowed);
        assert!(decide(&limiter, Action::Acquire, &slot.with_hold(id)).await.allowed);
    }
    redis.restart();
    until("it is connected again", async || limiter.peek(&reserved).await.is_ok()).await;
    let renewed = decide(&limiter, Action::Renew, &slot.with_hold(&job)).await;
    assert_eq!(status(&renewed), Some(HoldStatus::Ended));
    // With the old holders, twice the limit is in flight until they end.
    for id in ["new-1", "new-2"].map(hold) {
        assert!(decide(&limiter, Action::Acquire, &slot.with_hold(&id)).await.allowed);
    }
    let released = decide(&limiter, Action::Commit, &slot.with_hold(&job)).await;
    assert_eq!((status(&released), released.remaining), (Some(HoldStatus::Unknown), 0));
    let late = decide(&limiter, Action::Commit, &reserved.with_cost(30).with_hold(&job)).await;
    assert_eq!((status(&late), late.remaining), (Some(HoldStatus::Unknown), 70));
    assert_eq!(left(&limiter, &reserved).await, 70);
    redis.assert_every_key_expires();
}
