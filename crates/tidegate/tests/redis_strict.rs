//! The Redis store behind a proxy with the documented restrictions of managed services and of
//! compatible servers.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};

use redis::{FromRedisValue, RedisError};
use support::{ClusterView, Databases, Refusal, Restrictions, ScriptCache, StrictServer};
use support::{LONG, TEST_TIMEOUT, every_quota};
use tidegate::store::redis::{Builder, ClockSource};
use tidegate::testing::{conformance, conformance_of_holds, conformance_of_long_logs};
use tidegate::{Charge, Limiter, RedisStore};

fn builder(server: &StrictServer) -> Builder {
    RedisStore::builder(&server.url()).timeout(TEST_TIMEOUT)
}

async fn limiter(builder: Builder) -> Limiter<RedisStore> {
    Limiter::new(builder.connect().await.expect("the proxy answers"))
}

/// Compares the store behind a proxy with the model.
async fn assert_conforms(restrictions: Restrictions, seeds: u64) {
    let server = StrictServer::start(restrictions);
    let number = AtomicU64::new(0);
    let new_limiter = async |clock| {
        let prefix = format!("test-{}", number.fetch_add(1, Ordering::Relaxed));
        limiter(builder(&server).prefix(prefix).driven_by(clock)).await
    };
    conformance(support::seeds(seeds), new_limiter).await;
    conformance_of_long_logs(support::seeds(2), new_limiter).await;
    conformance_of_holds(support::seeds(seeds / 4), new_limiter).await;
    server.redis().assert_every_key_expires();
}

#[tokio::test]
async fn store_conforms_to_the_model_behind_enterprise() {
    assert_conforms(Restrictions::enterprise(), 100).await;
}

#[tokio::test]
async fn store_conforms_to_the_model_behind_serverless() {
    assert_conforms(Restrictions::serverless(), 100).await;
}

#[tokio::test]
async fn store_conforms_to_the_model_behind_dragonfly() {
    assert_conforms(Restrictions::dragonfly(), 30).await;
}

#[tokio::test]
async fn store_conforms_to_the_model_behind_alibaba() {
    assert_conforms(Restrictions::alibaba_without_script_check(), 100).await;
}

/// Keys of a storm; fewer where each script waits for another process.
const KEYS: usize = 150;
const FEW_KEYS: usize = 30;
const LIMIT: u64 = 5;
/// Requests of each key.
const REQUESTS: usize = 8;

/// Sends requests of many keys at the same time, single ones and pairs. Each is decided by the
/// server, and exactly the limit is admitted.
async fn assert_storm_is_exact(server: &StrictServer, builder: Builder, keys: usize) {
    let limiter = limiter(builder).await;
    for quota in every_quota(LIMIT, LONG) {
        let tasks = (0..keys * REQUESTS).map(|request| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            let key = format!("user-{}", request % keys);
            tokio::spawn(async move {
                let decision = limiter.acquire(&Charge::new(&key, &quota)).await.expect("decided");
                u64::from(decision.allowed)
            })
        });
        let mut admitted = 0;
        for task in tasks.collect::<Vec<_>>() {
            admitted += task.await.expect("no panic");
        }
        assert_eq!(admitted, keys as u64 * LIMIT, "{}", quota.default_policy_name());

        // Both keys of a pair are charged, or none.
        let pairs = (0..keys * REQUESTS).map(|request| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            let pair = [format!("left-{}", request % keys), format!("right-{}", request % keys)];
            tokio::spawn(async move {
                let charges = [Charge::new(&pair[0], &quota), Charge::new(&pair[1], &quota)];
                let decisions = limiter.acquire_all(&charges).await.expect("decided");
                u64::from(decisions.is_allowed())
            })
        });
        let mut admitted = 0;
        for task in pairs.collect::<Vec<_>>() {
            admitted += task.await.expect("no panic");
        }
        // A pair in two slots may be denied while another one is undone, never admitted above.
        assert!(admitted <= keys as u64 * LIMIT, "{}", quota.default_policy_name());
        assert!(admitted >= keys as u64, "{admitted}: {}", quota.default_policy_name());
        for key in ["left-0", "right-0"] {
            let peeked = limiter.peek(&Charge::new(key, &quota)).await.expect("decided");
            assert!(peeked.remaining <= LIMIT);
        }
    }
    server.redis().assert_every_key_expires();
    // Far below the 3,999 that ElastiCache Serverless allows: 128 keys with a header each.
    assert!(server.max_words() <= 260, "{} words", server.max_words());
}

/// Asserts that the store has learned a restriction from its first errors: those of the calls that
/// were in flight, with up to 128 slots each.
fn assert_learned(server: &StrictServer, reason: Refusal) {
    let refused = server.refusals(reason);
    assert!(refused > 0 && 10 * refused < server.calls(), "{refused} refusals: {reason:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_is_exact_behind_enterprise() {
    let server = StrictServer::start(Restrictions::enterprise());
    assert_storm_is_exact(&server, builder(&server), KEYS).await;
    assert_learned(&server, Refusal::CrossSlot);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_is_exact_behind_serverless() {
    let server = StrictServer::start(Restrictions::serverless());
    assert_storm_is_exact(&server, builder(&server), KEYS).await;
    assert_learned(&server, Refusal::Time);
    assert_learned(&server, Refusal::UndeclaredKey);
    assert!(server.refusals(Refusal::NoScript) > 20, "at any time");
    assert_eq!(server.refusals(Refusal::CrossSlot), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_is_exact_behind_dragonfly() {
    let server = StrictServer::start(Restrictions::dragonfly());
    assert_storm_is_exact(&server, builder(&server), FEW_KEYS).await;
    assert_eq!(server.refusals(Refusal::UndeclaredKey), 0);
    // Its TIME, as a command, replies with integers.
    server.redis().query::<()>(&["FLUSHALL"]);
    assert_storm_is_exact(&server, builder(&server).clock(ClockSource::Estimated), FEW_KEYS).await;
}

/// Its Lua does not know the first line of scripts that cross slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_is_exact_behind_dragonfly_as_a_cluster() {
    let cluster = ClusterView::OneNode;
    let server = StrictServer::start(Restrictions { cluster, ..Restrictions::dragonfly() });
    assert_storm_is_exact(&server, builder(&server), FEW_KEYS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_is_exact_behind_alibaba() {
    let server = StrictServer::start(Restrictions::alibaba_without_script_check());
    assert_storm_is_exact(&server, builder(&server), KEYS).await;
    assert_learned(&server, Refusal::CrossSlot);
}

/// With the check of script texts, no decision works. The error says why, and nothing is admitted
/// by mistake.
#[tokio::test]
async fn checked_script_text_is_an_error_of_the_store() {
    let server = StrictServer::start(Restrictions::alibaba());
    let limiter = limiter(builder(&server)).await;
    for quota in every_quota(LIMIT, LONG) {
        let error = limiter.acquire(&Charge::new("u", &quota)).await.expect_err("refused");
        assert!(error.to_string().contains("using the KEYS array"), "{error}");
    }
}

// ---- The proxy itself

/// Runs a plain command through the proxy.
fn ask<T: FromRedisValue>(server: &StrictServer, words: &[&str]) -> Result<T, RedisError> {
    let mut connection = redis::Client::open(server.url())
        .and_then(|client| client.get_connection())
        .expect("the proxy answers");
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query(&mut connection)
}

/// Asserts that a command is refused with this text, and that the refusal is counted.
#[track_caller]
fn assert_refused(server: &StrictServer, reason: Refusal, words: &[&str], text: &str) {
    let before = server.refusals(reason);
    let error = ask::<redis::Value>(server, words).expect_err("refused");
    let shown = [error.code(), error.detail()].map(Option::unwrap_or_default).join(" ");
    assert!(shown.contains(text), "{shown}");
    assert_eq!(server.refusals(reason), before + 1);
}

#[test]
fn server_without_restrictions_passes_everything_on() {
    let server = StrictServer::start(Restrictions::default());
    let read_both =
        "return {redis.call('GET', KEYS[1]), redis.call('GET', 'b'), redis.call('TIME')}";
    let () = ask(&server, &["SET", "b", "2"]).expect("written");
    assert_eq!(server.redis().query::<u64>(&["GET", "b"]), 2);
    let sha: String = ask(&server, &["SCRIPT", "LOAD", read_both]).expect("loaded");
    for words in [["EVALSHA", &sha, "2", "a", "c"], ["EVAL", read_both, "2", "a", "c"]] {
        let (missing, two, time): (Option<u64>, u64, Vec<u64>) = ask(&server, &words).expect("run");
        assert_eq!((missing, two, time.len()), (None, 2, 2));
    }
    assert!(ask::<String>(&server, &["INFO"]).expect("shown").contains("_mode:standalone"));
    assert_eq!(server.calls(), 2);
}

#[test]
fn each_restriction_refuses_what_it_names() {
    let server = StrictServer::start(Restrictions {
        cross_slot: Some("CROSSSLOT no"),
        undeclared_keys: Some("ERR undeclared key "),
        time_in_scripts: Some("ERR This Redis command is not allowed from script"),
        no_keys: Some("ERR no keys"),
        max_arguments: 6,
        databases: Databases::OnlyZero,
        cluster: ClusterView::Refused("ERR no cluster"),
        absent: &["CONFIG", "ACL SETUSER"],
        absent_info: &["maxmemory_policy"],
        ..Restrictions::default()
    });
    let eval = |script, keys: &[&'static str]| [&["EVAL", script], keys].concat();
    let get = "return redis.call('GET', KEYS[1])";
    assert_refused(&server, Refusal::CrossSlot, &eval(get, &["2", "a", "b"]), "CROSSSLOT");
    let () = ask(&server, &eval(get, &["2", "{a}1", "{a}2"])).expect("one slot");
    assert_refused(&server, Refusal::NoKeys, &eval(get, &["0"]), "no keys");
    let words = ["SET", "a", "1", "PX", "5", "GET", "NX"];
    assert_refused(&server, Refusal::Arguments, &words, "too many");
    assert_refused(&server, Refusal::Database, &["SELECT", "1"], "cluster mode");
    let () = ask(&server, &["SELECT", "0"]).expect("allowed");
    assert_refused(&server, Refusal::Cluster, &["CLUSTER", "SLOTS"], "no cluster");
    assert_refused(&server, Refusal::AbsentCommand, &["CONFIG", "GET", "x"], "unknown command");
    let () = ask::<Vec<String>>(&server, &["ACL", "LIST"]).map(drop).expect("allowed");
    assert!(!ask::<String>(&server, &["INFO"]).expect("shown").contains("maxmemory_policy"));

    // Inside a script, as an error that is raised and as one that is returned. TIME alone works.
    let other = "return redis.call('GET', 'other')";
    assert_refused(&server, Refusal::UndeclaredKey, &eval(other, &["1", "a"]), "undeclared key");
    let time = "local x = 1\nreturn redis.call('TIME')";
    assert_refused(&server, Refusal::Time, &eval(time, &["1", "a"]), "not allowed from script");
    let caught = "return redis.pcall('time').err .. redis.pcall('GET', 'other').err";
    let text: String = ask(&server, &eval(caught, &["1", "a"])).expect("caught");
    assert!(text.contains("from script") && text.contains("undeclared key other"), "{text}");
    let () = ask::<Vec<String>>(&server, &["TIME"]).map(drop).expect("allowed");

    // Other restrictions from now on, and no script is known.
    let sha: String = ask(&server, &["SCRIPT", "LOAD", time]).expect("loaded");
    let call = ["EVALSHA", &sha, "1", "a"];
    assert_refused(&server, Refusal::Time, &call, "not allowed from script");
    server.restrict(Restrictions::default());
    assert_refused(&server, Refusal::NoScript, &call, "NOSCRIPT");
    let () = ask::<String>(&server, &["SCRIPT", "LOAD", time]).map(drop).expect("loaded");
    let () = ask::<Vec<String>>(&server, &call).map(drop).expect("allowed");
}

#[test]
fn scripts_are_forgotten_as_often_as_configured() {
    for (script_cache, min, max) in [
        (ScriptCache::Keeps, 0, 0),
        (ScriptCache::ForgetsEvery(1), 300, 300),
        (ScriptCache::ForgetsEvery(7), 42, 43),
        (ScriptCache::ForgetsPermille(100), 15, 60),
    ] {
        let server = StrictServer::start(Restrictions { script_cache, ..Restrictions::default() });
        let sha: String = ask(&server, &["SCRIPT", "LOAD", "return 1"]).expect("loaded");
        let mut connection = redis::Client::open(server.url())
            .and_then(|client| client.get_connection())
            .expect("connected");
        let mut call = redis::cmd("EVALSHA");
        call.arg(&sha).arg(0);
        let refused = (0..300).filter(|_| call.query::<u64>(&mut connection).is_err()).count();
        assert!((min..=max).contains(&refused), "{script_cache:?}: {refused}");
        assert_eq!(server.refusals(Refusal::NoScript), refused as u64);
        assert_eq!(ask::<u64>(&server, &["EVAL", "return 1", "0"]).expect("never refused"), 1);
    }
}

#[test]
fn keys_must_be_named_literally() {
    let server = StrictServer::start(Restrictions::alibaba());
    for (script, is_allowed) in [
        ("return redis.call('GET', KEYS[1])", true),
        ("redis.call('TIME') return redis.pcall( 'SET', KEYS[1] , ARGV[1])", true),
        ("-- redis.call('GET', key)\nreturn 1", true),
        ("local key = KEYS[1] return redis.call('GET', key)", false),
        ("return redis.call('GET', KEYS[1] .. 'x')", false),
        ("return redis.call('GET', 'x')", false),
        ("local call = redis.call return call('GET', KEYS[1])", false),
    ] {
        let loaded = ask::<String>(&server, &["SCRIPT", "LOAD", script]);
        assert_eq!(loaded.is_ok(), is_allowed, "{script}: {loaded:?}");
    }
}

#[test]
fn one_virtual_node_owns_all_slots() {
    let server = StrictServer::start(Restrictions::serverless());
    let slots: Vec<(u16, u16, (String, u16, String))> =
        ask(&server, &["CLUSTER", "SLOTS"]).expect("shown");
    let address = format!("redis://{}:{}", slots[0].2.0, slots[0].2.1);
    assert_eq!((slots.len(), slots[0].0, slots[0].1, address), (1, 0, 16_383, server.url()));
    assert!(ask::<String>(&server, &["INFO"]).expect("shown").contains("_mode:cluster"));
    assert_refused(&server, Refusal::AbsentCommand, &["FUNCTION", "LIST"], "unknown command");
}
