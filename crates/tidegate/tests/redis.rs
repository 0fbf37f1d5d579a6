//! The Redis store on a real server: conformance, what Redis holds, and the traps of the usual
//! scripts.

mod support;

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{LONG, PATIENCE, Redis, every_quota, packed};
use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{Algorithm, Charge, Error, Limiter, ManualClock, Quota, RedisStore, StoreError};

const MINUTE: Duration = Duration::from_secs(60);
/// Seeds that once showed a difference, on whichever store.
const REGRESSIONS: [u64; 1] = [1381];
const LONG_REGRESSIONS: [u64; 1] = [3];

#[tokio::test]
async fn the_redis_store_conforms_to_the_model() {
    let redis = Redis::start();
    conformance(support::seeds(600).chain(REGRESSIONS), async |clock| {
        redis.driven_limiter(clock).await
    })
    .await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn long_logs_on_redis_conform_to_the_model() {
    let redis = Redis::start();
    conformance_of_long_logs(support::seeds(20).chain(LONG_REGRESSIONS), async |clock| {
        redis.driven_limiter(clock).await
    })
    .await;
    redis.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_under_concurrency() {
    let redis = Redis::start();
    support::assert_exact_under_concurrency(&redis.limiter().await).await;
    redis.assert_every_key_expires();
}

// ---- What Redis holds
// -------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_sorted_set_log_can_be_read_by_an_operator() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let builder = RedisStore::builder(&redis.url()).timeout(PATIENCE).driven_by(clock.clone());
    let limiter = Limiter::new(builder.connect().await.expect("connected"));
    let quota = Quota::sliding_log(100, MINUTE).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    for _ in 0..3 {
        limiter.acquire(&charge).await.expect("decided");
        clock.advance(Duration::from_millis(250));
    }
    let key = "rate_limit:{user123}:per-user";
    assert_eq!(limiter.store().redis_key(&charge), key);
    assert_eq!(redis.query::<u64>(&["ZCARD", key]), 3);
    let members: Vec<String> = redis.query(&["ZRANGE", key, "0", "-1", "WITHSCORES"]);
    assert_eq!(
        members,
        [
            "0000000000000001:1",
            "1700049600000000",
            "0000000000000002:1",
            "1700049600250000",
            "0000000000000003:1",
            "1700049600500000"
        ]
    );
    limiter.acquire(&charge.with_cost(90)).await.expect("decided");
    assert_eq!(redis.query::<u64>(&["ZCARD", key]), 4, "a cost is one member, however high");
}

#[tokio::test]
async fn each_algorithm_has_its_representation() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let expected = [
        ("sliding-log-8640000s", "zset"),
        ("sliding-log-packed-8640000s", "string"),
        ("sliding-counter-8640000s", "hash"),
        ("fixed-window-8640000s", "string"),
        ("token-bucket-8640000s", "hash"),
        ("leaky-bucket-8640000s", "hash"),
    ];
    for quota in every_quota(10, LONG) {
        limiter.acquire(&Charge::new("u", &quota)).await.expect("decided");
    }
    for (policy, kind) in expected {
        let key = format!("rate_limit:{{u}}:{policy}");
        assert_eq!(redis.query::<String>(&["TYPE", &key]), kind, "{policy}");
        let expires_in: i64 = redis.query(&["PTTL", &key]);
        let most = if policy.starts_with("sliding-counter") { 2 } else { 1 } * 8_640_000_000;
        assert!((1..=most + 1).contains(&expires_in), "{policy} expires in {expires_in} ms");
    }
    let window: String = redis.query(&["GET", "rate_limit:{u}:fixed-window-8640000s"]);
    assert!(window.starts_with("1:"), "{window}");
}

/// While a new configuration is rolled out, some instances go by the old one.
#[tokio::test]
async fn two_algorithms_on_one_count_do_not_make_each_other_forget() {
    let redis = Redis::start();
    let (one, other) = (redis.limiter().await, redis.limiter().await);
    let quotas = every_quota(3, LONG);
    for (at, old) in quotas.iter().enumerate() {
        for (beside, new) in quotas.iter().enumerate().filter(|(beside, _)| *beside != at) {
            let key = format!("{at}-{beside}");
            let (old, new) =
                (Charge::new(&key, old).with_policy("p"), Charge::new(&key, new).with_policy("p"));
            let (mut by_old, mut by_new) = (0, 0);
            for _ in 0..10 {
                by_old += usize::from(one.acquire(&old).await.expect("decided").allowed);
                by_new += usize::from(other.acquire(&new).await.expect("decided").allowed);
            }
            let as_one =
                matches!(old.quota().algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
                    && matches!(
                        new.quota().algorithm(),
                        Algorithm::TokenBucket | Algorithm::LeakyBucket
                    );
            assert_eq!(by_old + by_new, if as_one { 3 } else { 6 }, "{old:?} and {new:?}");
            one.refund(&new).await.expect("refunded");
            assert!(one.acquire(&new).await.expect("decided").allowed);
            one.reset(&new).await.expect("reset");
            for charge in [&old, &new] {
                assert!(
                    one.acquire(charge).await.expect("decided").allowed,
                    "forgotten: {charge:?} of {old:?} and {new:?}"
                );
            }
        }
    }
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_packed_request_takes_at_most_eight_bytes() {
    let redis = Redis::start();
    for window in [MINUTE, Duration::from_secs(86_400), Duration::from_secs(30 * 86_400)] {
        for limit in [10, 100, 1_000, 10_000] {
            let clock = ManualClock::new();
            let limiter = redis.driven_limiter(clock.clone()).await;
            let quota = packed(limit, window);
            let charge = Charge::new("user123", &quota).with_policy("per-user");
            let key = limiter.store().redis_key(&charge);
            let weigh = || redis.query::<u64>(&["MEMORY", "USAGE", &key, "SAMPLES", "0"]);
            for count in 1..=limit {
                clock.advance(Duration::from_micros(3));
                assert!(limiter.acquire(&charge).await.expect("decided").allowed);
                if count.is_power_of_two() || count == limit {
                    let bytes = weigh();
                    assert!(
                        bytes <= 8 * count + 150,
                        "{bytes} bytes for {count} of {limit} in {window:?}"
                    );
                }
            }
            assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
            // And when the window has turned over by a half.
            clock.advance(window.saturating_sub(Duration::from_micros(3 * limit / 2)));
            let mut count = 0;
            while limiter.acquire(&charge).await.expect("decided").allowed {
                count += 1;
            }
            assert!(count > 0);
            let bytes = weigh();
            assert!(
                bytes <= 8 * limit + 150,
                "{bytes} bytes for {limit} in {window:?} after a turn"
            );
        }
    }
}

#[tokio::test]
async fn a_packed_log_takes_a_fifteenth_of_a_sorted_set() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let limiter = redis.driven_limiter(clock.clone()).await;
    let quotas = [Quota::sliding_log(1_000, MINUTE).expect("valid"), packed(1_000, MINUTE)];
    for _ in 0..1_000 {
        clock.advance(Duration::from_micros(59_999));
        for quota in &quotas {
            assert!(limiter.acquire(&Charge::new("u", quota)).await.expect("decided").allowed);
        }
    }
    let [sorted_set, packed] = quotas.map(|quota| {
        let key = limiter.store().redis_key(&Charge::new("u", &quota));
        redis.query::<u64>(&["MEMORY", "USAGE", &key, "SAMPLES", "0"])
    });
    assert!(15 * packed <= sorted_set, "{packed} bytes packed, {sorted_set} as a sorted set");
}

/// A small log, as most are, is one read and one write.
#[tokio::test]
async fn a_decision_takes_the_fewest_commands() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let limiter = redis.driven_limiter(clock.clone()).await;
    let most = [
        ("sliding-log", 5),
        ("sliding-counter", 3),
        ("fixed-window", 2),
        ("token-bucket", 3),
        ("leaky-bucket", 3),
    ];
    let quotas = every_quota(100, MINUTE);
    for quota in &quotas {
        let name = quota.algorithm().as_str();
        let most =
            most.iter().find(|(algorithm, _)| *algorithm == name).map_or(0, |(_, most)| *most);
        let most = if quota.encoding() == tidegate::Encoding::Packed { 2 } else { most };
        let charge = Charge::new("u", quota);
        limiter.acquire(&charge).await.expect("decided");
        redis.query::<()>(&["CONFIG", "RESETSTAT"]);
        for _ in 0..90 {
            clock.advance(Duration::from_millis(1));
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let calls =
            |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        let aside =
            ["cmdstat_evalsha", "cmdstat_time", "cmdstat_info", "cmdstat_config", "cmdstat_client"];
        let inside = stats.lines().filter(|line| !aside.iter().any(|name| line.starts_with(name)));
        let commands: u64 = inside.filter_map(calls).sum();
        assert!(
            commands <= most * 90,
            "{commands} commands for 90 decisions of {}",
            quota.default_policy_name()
        );
    }
}

/// Counted in commands inside the script, which no noise can blur: each is a constant piece of
/// work, or a copy of at most a kilobyte.
#[tokio::test]
async fn a_packed_decision_does_not_grow_with_the_limit() {
    let redis = Redis::start();
    let commands = || -> u64 {
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let calls =
            |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        let ours =
            |line: &&str| !line.starts_with("cmdstat_info") && !line.starts_with("cmdstat_client");
        stats.lines().filter(ours).filter_map(calls).sum()
    };
    let mut counts = Vec::new();
    for limit in [100_u64, 1_000, 10_000] {
        let clock = ManualClock::new();
        let limiter = redis.driven_limiter(clock.clone()).await;
        let quota = packed(limit, MINUTE);
        let charge = Charge::new("user123", &quota);
        let gap = Duration::from_micros(60_000_000 / limit);
        for _ in 0..limit {
            clock.advance(gap);
            limiter.acquire(&charge).await.expect("decided");
        }
        // A full, turning window: denied and allowed in turn; then one request that needs a search.
        let before = commands();
        for _ in 0..100 {
            assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
            clock.advance(gap);
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        counts.push((commands() - before) / 200);
        let before = commands();
        limiter.acquire(&charge.with_cost(limit)).await.expect("decided");
        counts.push(commands() - before);
    }
    assert!(counts.iter().all(|count| *count <= 20), "commands a decision: {counts:?}");
}

#[tokio::test]
async fn a_decision_is_one_call_however_many_charges_it_has() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quotas = every_quota(10, LONG);
    let charges: Vec<Charge<'_>> = quotas.iter().map(|quota| Charge::new("u", quota)).collect();
    limiter.acquire_all(&charges).await.expect("decided");
    let calls = || -> (u64, u64) {
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let of = |name: &str| {
            let line =
                stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
            line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
        };
        (of("evalsha"), of("eval") + of("script"))
    };
    let before = calls();
    for _ in 0..5 {
        limiter.acquire_all(&charges).await.expect("decided");
    }
    let after = calls();
    assert_eq!((after.0 - before.0, after.1 - before.1), (5, 0));
}

// ---- The traps of the usual scripts
// ----------------------------------------------------------------------------

/// A member that is only the time counts requests of one moment once; one made by Lua's `tostring`
/// has 14 digits, and counts eleven of a thousand different microseconds.
#[tokio::test]
async fn requests_of_one_microsecond_and_of_neighbouring_ones_all_count() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let limiter = redis.driven_limiter(clock.clone()).await;
    for quota in every_quota(2_000, MINUTE) {
        let charge = Charge::new("user123", &quota);
        for count in 1..=100 {
            assert_eq!(limiter.acquire(&charge).await.expect("decided").remaining, 2_000 - count);
        }
        if quota.default_policy_name() == "sliding-log-60s" {
            for _ in 0..1_000 {
                clock.advance(Duration::from_micros(1));
                limiter.acquire(&charge).await.expect("decided");
            }
            assert_eq!(redis.query::<u64>(&["ZCARD", &limiter.store().redis_key(&charge)]), 1_100);
        }
    }
}

/// `EXPIRE` takes whole seconds: a window below one would be floored to 0, and the key deleted at
/// once.
#[tokio::test]
async fn a_window_of_milliseconds_expires_after_it_and_not_before() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in every_quota(10, Duration::from_millis(700)) {
        let charge = Charge::new("user123", &quota);
        let key = limiter.store().redis_key(&charge);
        limiter.reset(&charge).await.expect("reset");
        let server_millis = || {
            let time: Vec<i64> = redis.query(&["TIME"]);
            time[0] * 1_000 + time[1] / 1_000
        };
        let mut seen = None;
        // A window of the clock may end just now: then look again.
        for _ in 0..20 {
            let before = server_millis();
            let decision = limiter.acquire(&charge).await.expect("decided");
            let after = server_millis();
            let expires_at: i64 = redis.query(&["PEXPIRETIME", &key]);
            if expires_at > 0 {
                seen = Some((before, after, decision, expires_at));
                break;
            }
        }
        let (before, after, decision, expires_at) = seen.expect("the key is there for a while");
        assert!(decision.allowed);
        let reset = i64::try_from(decision.reset_after.as_millis()).expect("short");
        assert!(
            expires_at >= before + reset,
            "{quota:?} counts for {reset} ms, expires in {}",
            expires_at - before
        );
        let most =
            if quota.default_policy_name().starts_with("sliding-counter") { 2 * 700 } else { 700 }
                + 1;
        assert!(expires_at <= after + most, "{quota:?} expires in {} ms", expires_at - after);
    }
}

/// In real time, on the server's clock: after `retry_after`, and not before, one more passes.
#[tokio::test]
async fn the_servers_clock_lets_one_more_in_after_retry_after() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in every_quota(2, Duration::from_millis(300)) {
        let charge = Charge::new("user123", &quota);
        let mut start = std::time::Instant::now();
        let mut decision = limiter.acquire(&charge).await.expect("decided");
        while decision.allowed {
            start = std::time::Instant::now();
            decision = limiter.acquire(&charge).await.expect("decided");
        }
        assert!(decision.retry_after > Duration::ZERO);
        // Just before it is due it is still denied, if the look comes in time to tell.
        tokio::time::sleep(decision.retry_after.saturating_sub(Duration::from_millis(60))).await;
        let early = limiter.peek(&charge).await.expect("decided");
        assert!(!early.allowed || start.elapsed() >= decision.retry_after, "{quota:?}");
        let admitted = limiter.wait(&charge, MINUTE).await.expect("decided");
        assert!(admitted.allowed, "{quota:?}");
    }
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_lost_script_cache_is_no_error() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in every_quota(100, LONG) {
        for count in 1..=5 {
            redis.query::<()>(&["SCRIPT", "FLUSH"]);
            let decision = limiter.acquire(&Charge::new("u", &quota)).await.expect("decided");
            assert_eq!(decision.remaining, 100 - count);
        }
    }
}

/// Lua's `math.random` starts from the same seed after each start of the server, and makes the same
/// members again. Ours are made of what is stored.
#[tokio::test]
async fn counts_go_on_after_a_restart_of_the_server() {
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    let quotas = every_quota(100, LONG);
    for quota in &quotas {
        for _ in 0..5 {
            limiter.acquire(&Charge::new("u", quota)).await.expect("decided");
        }
    }
    redis.query::<()>(&["SAVE"]);
    redis.restart();
    // The connection is noticed to be gone and made anew; a decision meanwhile may fail, but never
    // hangs.
    let probe = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let mut tries = 0;
    while limiter.acquire(&Charge::new("probe", &probe)).await.is_err() {
        tries += 1;
        assert!(tries < 200, "connected again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for quota in &quotas {
        for count in 6..=10 {
            let decision = limiter.acquire(&Charge::new("u", quota)).await.expect("decided");
            assert_eq!(decision.remaining, 100 - count, "{quota:?}");
        }
    }
    redis.assert_every_key_expires();
}

/// Who sends again after a timeout charges twice.
#[tokio::test]
async fn a_call_that_timed_out_is_charged_once_at_most() {
    let redis = Redis::start();
    let timeout = Duration::from_secs(1);
    let hasty =
        RedisStore::builder(&redis.url()).timeout(timeout).connect().await.expect("connected");
    let hasty = Limiter::new(hasty);
    let quota = Quota::sliding_log(100, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    hasty.acquire(&charge).await.expect("decided");
    redis.signal("STOP");
    assert_eq!(hasty.acquire(&charge).await, Err(Error::Store(StoreError::Timeout(timeout))));
    redis.signal("CONT");
    let patient = redis.limiter().await;
    let left = patient.peek(&charge).await.expect("decided").remaining + 1;
    assert!(
        left == 99 || left == 98,
        "{left} are left: the stopped call counts once or not at all"
    );
}

/// A Redis that is full answers OOM, and nothing passes for it: not even in the company of a log,
/// whose removals such a Redis would still take.
#[tokio::test]
async fn a_full_redis_is_an_error_and_admits_nobody() {
    let redis = Redis::start_with(&["--maxmemory", "3mb", "--maxmemory-policy", "noeviction"]);
    let mut connection = redis.connection();
    for number in 0.. {
        let filler = redis::cmd("SET")
            .arg(format!("filler-{number}"))
            .arg("x".repeat(10_000))
            .exec(&mut connection);
        if filler.is_err() {
            break;
        }
        assert!(number < 10_000, "it fills up");
    }
    let limiter = redis.limiter().await;
    let quotas = every_quota(10, LONG);
    let is_oom = |error: &Error| matches!(error, Error::Store(StoreError::Refused(reason)) if reason.contains("OOM"));
    for quota in &quotas {
        let refused = limiter.acquire(&Charge::new("u", quota)).await.expect_err("no memory");
        assert!(is_oom(&refused), "{refused} for {quota:?}");
    }
    let charges: Vec<Charge<'_>> = quotas.iter().map(|quota| Charge::new("u", quota)).collect();
    let refused = limiter.acquire_all(&charges).await.expect_err("no memory");
    assert!(is_oom(&refused), "{refused}");
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    for quota in &quotas {
        let decision = limiter.acquire(&Charge::new("u", quota)).await.expect("memory again");
        assert_eq!(decision.remaining, 9, "nothing was spent before: {quota:?}");
    }
}

/// On the server's own clock, where keys do expire: a lowered limit makes a key live as long as its
/// bucket now takes to drain.
#[tokio::test]
async fn a_denial_under_a_lowered_limit_makes_the_key_live_longer() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let with_limit = |limit| {
        let quota = Quota::token_bucket(limit, Duration::from_secs(30)).expect("valid");
        quota.with_burst(100).expect("a bucket")
    };
    let (high, low) = (with_limit(100), with_limit(1));
    let charge = |quota| Charge::new("u", quota).with_policy("p");
    assert!(limiter.acquire(&charge(&high).with_cost(100)).await.expect("decided").allowed);
    assert!(!limiter.acquire(&charge(&low).with_cost(100)).await.expect("decided").allowed);
    let expires_in: i64 = redis.query(&["PTTL", &limiter.store().redis_key(&charge(&low))]);
    assert!(expires_in > 2_000_000, "100 units at 1 in 30 s take 3,000 s, not {expires_in} ms");
}

#[tokio::test]
async fn running_totals_wrap_around_before_they_lose_digits() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let key = limiter.store().redis_key(&charge);
    let server: Vec<String> = redis.query(&["TIME"]);
    let now = format!("{}{:0>6}", server[0], server[1]);
    redis.query::<u64>(&["ZADD", &key, &now, "8999999999999999:3"]);
    for count in 4..=10 {
        assert_eq!(limiter.acquire(&charge).await.expect("decided").remaining, 10 - count);
    }
    assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
    let members: Vec<String> = redis.query(&["ZRANGE", &key, "0", "-1"]);
    assert_eq!(members.first().map(String::as_str), Some("8999999999999999:3"), "{members:?}");
    assert_eq!(members.last().map(String::as_str), Some("0000000000000006:1"), "{members:?}");
    redis.assert_every_key_expires();
}

/// The multiplication and division that everything stands on, in Lua's doubles against Rust's 128
/// bits.
#[test]
fn lua_multiplies_and_divides_exactly() {
    const PRELUDE: &str = include_str!("../src/store/redis/prelude.lua");
    let redis = Redis::start();
    let mut connection = redis.connection();
    let script = redis::Script::new(&format!(
        "{PRELUDE}\nlocal q, r = mul_div_rem(tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]))\n\
         return {{whole(q), whole(r), whole(mul_div_ceil(tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])))}}"
    ));
    let edge = |most: u64| {
        prop_oneof![
            0..=most,
            Just(most),
            Just(most - 1),
            Just(1),
            (0..45_u32).prop_map(move |bits| most >> bits)
        ]
    };
    let numbers = (edge(1 << 50), edge((1 << 45) - 1), edge((1 << 45) - 1));
    let mut runner = TestRunner::new(ProptestConfig { cases: 3_000, ..ProptestConfig::default() });
    let connection = std::cell::RefCell::new(&mut connection);
    let exact = |(a, b, m): (u64, u64, u64)| {
        let m = m.max(1);
        let product = u128::from(a) * u128::from(b);
        prop_assume!(product / u128::from(m) < 1 << 53);
        let found: Vec<String> = script
            .arg("")
            .arg(a)
            .arg(b)
            .arg(m)
            .invoke(*connection.borrow_mut())
            .expect("the script runs");
        let (quotient, rest) = (product / u128::from(m), product % u128::from(m));
        let expected =
            [quotient, rest, quotient + u128::from(rest > 0)].map(|number| number.to_string());
        prop_assert_eq!(found, expected);
        Ok(())
    };
    runner.run(&numbers, exact).expect("exact");
}

// ---- Connecting
// -------------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_wrong_address_or_option_says_what_would_be_right_and_keeps_the_secret() {
    let refused = async |builder: tidegate::store::redis::Builder| {
        builder.connect().await.expect_err("no such server").to_string()
    };
    let nowhere = refused(RedisStore::builder("redis://user:hunter2@127.0.0.1:1")).await;
    assert!(nowhere.contains("127.0.0.1:1") && nowhere.contains("refused"), "{nowhere}");
    assert!(!nowhere.contains("hunter2"), "{nowhere}");
    let no_url = refused(RedisStore::builder("http://:hunter2@127.0.0.1")).await;
    assert!(no_url.contains("redis://[user:password@]host[:port][/database]"), "{no_url}");
    assert!(!no_url.contains("hunter2"), "{no_url}");
    let insecure = refused(RedisStore::builder("rediss://:hunter2@127.0.0.1:1/#insecure")).await;
    assert!(insecure.contains("#insecure") && !insecure.contains("hunter2"), "{insecure}");
    let braces = refused(RedisStore::builder("redis://127.0.0.1:1").prefix("a{b}")).await;
    assert!(braces.contains("no braces"), "{braces}");
    let debug = format!("{:?}", RedisStore::builder("redis://user:hunter2@127.0.0.1:1"));
    assert!(!debug.contains("hunter2"), "{debug}");

    let guarded = Redis::start_with(&["--requirepass", "hunter2"]);
    let wrong = refused(RedisStore::builder(&guarded.url().replace("//", "//:hunter3@"))).await;
    assert!(!wrong.contains("hunter3"), "{wrong}");
    let right = RedisStore::builder(&guarded.url().replace("//", "//:hunter2@")).timeout(PATIENCE);
    let right = right.connect().await.expect("the right password");
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    assert!(Limiter::new(right).acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
}
