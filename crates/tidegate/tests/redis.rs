//! The Redis store on a real server: conformance, data in Redis, and pitfalls of rate limit
//! scripts.

mod support;

use std::time::Duration;

use support::{LONG, Redis, TEST_TIMEOUT, every_quota, packed, redis_6, valkey_9};
use tidegate::testing::{conformance, conformance_of_holds, conformance_of_long_logs};
use tidegate::{Algorithm, Charge, Error, Limiter, ManualClock, Quota, RedisStore, StoreError};

const MINUTE: Duration = Duration::from_secs(60);
/// Seeds that once showed a difference, on any store.
const REGRESSIONS: [u64; 3] = [1381, 20_808, 22_496];
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
async fn holds_on_redis_conform_to_the_model() {
    let redis = Redis::start();
    conformance_of_holds(support::seeds(400), async |clock| redis.driven_limiter(clock).await)
        .await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn holds_on_redis_6_2_conform_to_the_model() {
    let redis = Redis::start_program(&redis_6(), &[]);
    conformance_of_holds(support::seeds(100), async |clock| redis.driven_limiter(clock).await)
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

/// A short form of `make test-newest`.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_store_on_the_newest_server_conforms_to_the_model_and_is_exact() {
    let redis = Redis::start_program(&valkey_9(), &[]);
    let new_limiter = async |clock| redis.driven_limiter(clock).await;
    conformance(support::seeds(150), new_limiter).await;
    conformance_of_long_logs(support::seeds(3), new_limiter).await;
    conformance_of_holds(support::seeds(100), new_limiter).await;
    support::assert_exact_under_concurrency(&redis.limiter().await).await;
    redis.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_under_concurrency() {
    let redis = Redis::start();
    support::assert_exact_under_concurrency(&redis.limiter().await).await;
    redis.assert_every_key_expires();
}

// ---- Data in Redis

#[tokio::test]
async fn a_sorted_set_log_is_readable_by_operators() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).driven_by(clock.clone());
    let limiter = Limiter::new(builder.connect().await.expect("connected"));
    let quota = Quota::sliding_log(100, MINUTE).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    for _ in 0..3 {
        let _ = limiter.acquire(&charge).await.expect("decided");
        clock.advance(Duration::from_millis(250));
    }
    let key = "rate_limit:{user123}:per-user";
    assert_eq!(limiter.store().redis_key(&charge), key);
    assert_eq!(redis.query::<u64>(&["ZCARD", key]), 3);
    let members: Vec<String> = redis.query(&["ZRANGE", key, "0", "-1", "WITHSCORES"]);
    assert_eq!(
        members,
        [
            "1700049600000000:1000001:60s",
            "1700049600000000",
            "1700049600250000:1000002:60s",
            "1700049600250000",
            "1700049600500000:1000003:60s",
            "1700049600500000"
        ]
    );
    let _ = limiter.acquire(&charge.with_cost(90)).await.expect("decided");
    assert_eq!(
        redis.query::<u64>(&["ZCARD", key]),
        4,
        "a request is one member, whatever its cost"
    );
    // A request that leaves no room names the limit and the oldest time, for the denials after it.
    for _ in 0..7 {
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    }
    let newest: Vec<String> = redis.query(&["ZRANGE", key, "-1", "-1"]);
    assert_eq!(newest, ["1700049600750000:1000100:60s|100|00000000"]);
    redis.query::<()>(&["CONFIG", "RESETSTAT"]);
    let denied = limiter.acquire(&charge).await.expect("decided");
    assert_eq!(denied.retry_after, MINUTE.saturating_sub(Duration::from_millis(750)));
    assert_eq!((denied.allowed, redis.calls_of("zrange")), (false, 1));
}

#[tokio::test]
async fn a_sliding_counter_is_readable_by_operators() {
    let redis = Redis::start();
    let limiter = redis.driven_limiter(ManualClock::new()).await;
    let quota = Quota::sliding_counter(100, MINUTE).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    for _ in 0..3 {
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    let key = limiter.store().redis_key(&charge);
    assert!(key.ends_with(":{user123}:per-user"), "{key}");
    let fields: std::collections::BTreeMap<String, String> = redis.query(&["HGETALL", &key]);
    let fields: Vec<String> =
        fields.iter().map(|(field, value)| format!("{field} {value}")).collect();
    assert_eq!(fields, ["current 3", "previous 0", "window 1700049600000000+60s"]);
}

#[tokio::test]
async fn each_algorithm_has_its_redis_type() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let expected = [
        ("sliding-log-8640000s", "zset"),
        ("sliding-log-packed-8640000s", "string"),
        ("sliding-counter-8640000s", "hash"),
        ("sliding-counter-packed-8640000s", "string"),
        ("fixed-window-8640000s", "string"),
        ("token-bucket-8640000s", "string"),
        ("leaky-bucket-8640000s", "string"),
    ];
    for quota in every_quota(10, LONG) {
        let _ = limiter.acquire(&Charge::new("u", &quota)).await.expect("decided");
    }
    for (policy, redis_type) in expected {
        let key = format!("rate_limit:{{u}}:{policy}");
        assert_eq!(redis.query::<String>(&["TYPE", &key]), redis_type, "{policy}");
        let expires_in: i64 = redis.query(&["PTTL", &key]);
        let windows = if policy.starts_with("sliding-counter") { 2 } else { 1 };
        // Logs and buckets live up to an eighth longer.
        let max = windows * 8_640_000_000 * 9 / 8;
        assert!((1..=max + 1).contains(&expires_in), "{policy} expires in {expires_in} ms");
    }
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
            let memory_usage = || redis.query::<u64>(&["MEMORY", "USAGE", &key, "SAMPLES", "0"]);
            for count in 1..=limit {
                clock.advance(Duration::from_micros(3));
                assert!(limiter.acquire(&charge).await.expect("decided").allowed);
                if count.is_power_of_two() || count == limit {
                    let bytes = memory_usage();
                    assert!(
                        bytes <= 8 * count + 150,
                        "{bytes} bytes for {count} of {limit} in {window:?}"
                    );
                }
            }
            assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
            // Half of the window has passed.
            clock.advance(window.saturating_sub(Duration::from_micros(3 * limit / 2)));
            let mut count = 0;
            while limiter.acquire(&charge).await.expect("decided").allowed {
                count += 1;
            }
            assert!(count > 0);
            let bytes = memory_usage();
            assert!(
                bytes <= 8 * limit + 150,
                "{bytes} bytes for {limit} in {window:?} after half a window"
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

/// A small packed log takes one read and one write.
#[tokio::test]
async fn a_decision_takes_few_commands() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let limiter = redis.driven_limiter(clock.clone()).await;
    let max_commands = [
        ("sliding-log", 4),
        ("sliding-counter", 2),
        ("fixed-window", 2),
        ("token-bucket", 2),
        ("leaky-bucket", 2),
    ];
    let quotas = every_quota(100, MINUTE);
    for quota in &quotas {
        let name = quota.algorithm().as_str();
        let of_algorithm = max_commands.iter().find(|(algorithm, _)| *algorithm == name);
        let max = match quota.encoding() {
            tidegate::Encoding::Packed => 2,
            _ => of_algorithm.map_or(0, |(_, max)| *max),
        };
        let charge = Charge::new("u", quota);
        let _ = limiter.acquire(&charge).await.expect("decided");
        redis.query::<()>(&["CONFIG", "RESETSTAT"]);
        for _ in 0..90 {
            clock.advance(Duration::from_millis(1));
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let calls =
            |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        let ignored =
            ["cmdstat_evalsha", "cmdstat_time", "cmdstat_info", "cmdstat_config", "cmdstat_client"];
        let in_script =
            stats.lines().filter(|line| !ignored.iter().any(|name| line.starts_with(name)));
        let commands: u64 = in_script.filter_map(calls).sum();
        assert!(
            commands <= max * 90,
            "{commands} commands for 90 decisions of {}",
            quota.default_policy_name()
        );
    }
}

/// Counts the commands of the script, because time would be noisy: each takes constant time, or
/// copies at most four kilobytes.
#[tokio::test]
async fn the_cost_of_a_packed_decision_does_not_grow_with_the_limit() {
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
            let _ = limiter.acquire(&charge).await.expect("decided");
        }
        // In a full window requests are denied and allowed alternately; then one needs a search.
        let before = commands();
        for _ in 0..100 {
            assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
            clock.advance(gap);
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        counts.push((commands() - before) / 200);
        let before = commands();
        let _ = limiter.acquire(&charge.with_cost(limit)).await.expect("decided");
        counts.push(commands() - before);
    }
    assert!(counts.iter().all(|count| *count <= 20), "commands per decision: {counts:?}");
}

#[tokio::test]
async fn a_decision_is_one_call_however_many_charges_it_has() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quotas = every_quota(10, LONG);
    let charges: Vec<Charge<'_>> = quotas.iter().map(|quota| Charge::new("u", quota)).collect();
    let _ = limiter.acquire_all(&charges).await.expect("decided");
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
        let _ = limiter.acquire_all(&charges).await.expect("decided");
    }
    let after = calls();
    assert_eq!((after.0 - before.0, after.1 - before.1), (5, 0));
}

// ---- Pitfalls of rate limit scripts

/// If the member is only the time, requests at one time count once. If Lua's `tostring` formats it
/// with 14 digits, requests at a thousand different microseconds count as eleven.
#[tokio::test]
async fn requests_at_the_same_and_at_adjacent_microseconds_all_count() {
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
                let _ = limiter.acquire(&charge).await.expect("decided");
            }
            assert_eq!(redis.query::<u64>(&["ZCARD", &limiter.store().redis_key(&charge)]), 1_100);
        }
    }
}

/// `EXPIRE` takes whole seconds: a window of less than a second would be rounded down to 0, and the
/// key would be deleted at once.
#[tokio::test]
async fn a_key_with_a_window_of_milliseconds_does_not_expire_early() {
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
        let mut observed = None;
        // A fixed window may end during the request: then try again.
        for _ in 0..20 {
            let before = server_millis();
            let decision = limiter.acquire(&charge).await.expect("decided");
            let after = server_millis();
            let expires_at: i64 = redis.query(&["PEXPIRETIME", &key]);
            if expires_at > 0 {
                observed = Some((before, after, decision, expires_at));
                break;
            }
        }
        let (before, after, decision, expires_at) = observed.expect("the key exists for a while");
        assert!(decision.allowed);
        let reset = i64::try_from(decision.reset_after.as_millis()).expect("short");
        assert!(
            expires_at >= before + reset,
            "{quota:?} counts for {reset} ms, expires in {}",
            expires_at - before
        );
        let max = match quota.algorithm() {
            Algorithm::SlidingCounter => 2 * 700,
            Algorithm::FixedWindow | Algorithm::Concurrency => 700,
            // Up to an eighth longer.
            Algorithm::SlidingLog => 700 + 700 / 8 + 1,
            // One of ten units is in the bucket.
            Algorithm::TokenBucket | Algorithm::LeakyBucket => 70 + 700 / 8 + 1,
        } + 1;
        assert!(expires_at <= after + max, "{quota:?} expires in {} ms", expires_at - after);
    }
}

/// In real time, by the server's clock.
#[tokio::test]
async fn a_request_is_allowed_after_retry_after_and_not_before() {
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
        // Shortly before, it is still denied, unless this peek is late.
        tokio::time::sleep(decision.retry_after.saturating_sub(Duration::from_millis(60))).await;
        let early = limiter.peek(&charge).await.expect("decided");
        assert!(!early.allowed || start.elapsed() >= decision.retry_after, "{quota:?}");
        let admitted = limiter.wait(&charge, MINUTE).await.expect("decided");
        assert!(admitted.allowed, "{quota:?}");
    }
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_flushed_script_cache_causes_no_error() {
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

/// Members from Lua's `math.random` would repeat, because its seed is the same after each start of
/// the server.
#[tokio::test]
async fn counts_continue_after_a_restart_of_the_server() {
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    let quotas = every_quota(100, LONG);
    for quota in &quotas {
        for _ in 0..5 {
            let _ = limiter.acquire(&Charge::new("u", quota)).await.expect("decided");
        }
    }
    redis.query::<()>(&["SAVE"]);
    redis.restart();
    // Until the store has reconnected, a decision may fail, but never hangs.
    let probe = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let mut attempts = 0;
    while limiter.acquire(&Charge::new("probe", &probe)).await.is_err() {
        attempts += 1;
        assert!(attempts < 200, "not reconnected");
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

/// A client that retries after a timeout would charge twice.
#[tokio::test]
async fn a_call_that_timed_out_is_charged_at_most_once() {
    let redis = Redis::start();
    let timeout = Duration::from_secs(1);
    let limiter =
        RedisStore::builder(&redis.url()).timeout(timeout).connect().await.expect("connected");
    let limiter = Limiter::new(limiter);
    let quota = Quota::sliding_log(100, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let _ = limiter.acquire(&charge).await.expect("decided");
    redis.signal("STOP");
    let lost = Err(Error::Store(StoreError::Timeout(timeout).answer_lost()));
    assert_eq!(limiter.acquire(&charge).await, lost);
    redis.signal("CONT");
    let observer = redis.limiter().await;
    let left = observer.peek(&charge).await.expect("decided").remaining + 1;
    assert!(
        left == 99 || left == 98,
        "{left} are left: the call that timed out counts once or not at all"
    );
}

/// A full Redis answers OOM, even to a group with a log, whose removals it would still accept.
#[tokio::test]
async fn a_full_redis_is_an_error_and_spends_nothing() {
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
        assert!(number < 10_000, "Redis is not full");
    }
    let quotas = every_quota(10, LONG);
    let is_oom = |error: &Error| match error {
        Error::Store(StoreError::OutOfMemory(reason)) => reason.contains("OOM"),
        _ => false,
    };
    for quota in &quotas {
        // A new store for each, because five failures would open its circuit.
        let limiter = redis.limiter().await;
        let refused = limiter.acquire(&Charge::new("u", quota)).await.expect_err("no memory");
        assert!(is_oom(&refused), "{refused} for {quota:?}");
    }
    let limiter = redis.limiter().await;
    let charges: Vec<Charge<'_>> = quotas.iter().map(|quota| Charge::new("u", quota)).collect();
    let refused = limiter.acquire_all(&charges).await.expect_err("no memory");
    assert!(is_oom(&refused), "{refused}");
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    for quota in &quotas {
        let decision = limiter.acquire(&Charge::new("u", quota)).await.expect("memory again");
        assert_eq!(decision.remaining, 9, "nothing was spent before: {quota:?}");
    }
}

#[tokio::test]
async fn running_totals_wrap_around_before_they_lose_precision() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let key = limiter.store().redis_key(&charge);
    let server: Vec<String> = redis.query(&["TIME"]);
    let now = format!("{}{:0>6}", server[0], server[1]);
    let member = format!("{now}:9999999:8640000s:3");
    redis.query::<u64>(&["ZADD", &key, &now, &member]);
    for count in 4..=10 {
        assert_eq!(limiter.acquire(&charge).await.expect("decided").remaining, 10 - count);
    }
    assert!(!limiter.acquire(&charge).await.expect("decided").allowed);
    let members: Vec<String> = redis.query(&["ZRANGE", &key, "0", "-1"]);
    assert_eq!(members.first(), Some(&member));
    let total = members.last().and_then(|member| member.split(':').nth(1));
    assert_eq!(total, Some("1000006"), "{members:?}");
    redis.assert_every_key_expires();
}

// ---- Connecting

#[tokio::test]
async fn errors_of_wrong_options_are_helpful_and_contain_no_password() {
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
    let right =
        RedisStore::builder(&guarded.url().replace("//", "//:hunter2@")).timeout(TEST_TIMEOUT);
    let right = right.connect().await.expect("the right password");
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    assert!(Limiter::new(right).acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
}
