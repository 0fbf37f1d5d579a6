//! Many random keys, in memory, and on Redis after an outage; damaged and large values.

use std::fmt::Write as _;

use crate::http::{self, Connection};
use crate::row::row;
use crate::servers::Server;
use crate::support::Service;

const KEYS: usize = 1_000_000;
const CAP: usize = 100_000;
/// Keys per request, each of another policy: a debug build handles only some thousand requests per
/// second.
const KEYS_PER_REQUEST: usize = 20;
/// Connections, and in-flight requests per connection.
const CONNECTIONS: usize = 4;
const PIPELINED: usize = 25;

#[test]
fn million_random_keys_in_memory() {
    row("1,000,000 random keys on memory", |row| {
        let mut config = format!(
            "store: {{max_keys: {CAP}}}\npolicies:\n  - {{name: victim, match: {{path: \
             /victim}}, limit: 5, window: 1h}}\n"
        );
        for n in 0..KEYS_PER_REQUEST {
            // Half of the keys expire during the flood and free memory for others.
            let window = if n % 2 == 0 { "1h" } else { "1s" };
            let policy = format!(
                "name: random-{n}, match: {{path: /random}}, key: [header.k{n}], limit: 5, \
                 window: {window}"
            );
            let _ = writeln!(config, "  - {{{policy}, on_store_failure: deny}}");
        }
        let service = Service::start(&config);
        let exhausted = r#"{"policy": "victim", "key": "exhausted"}"#;
        for _ in 0..5 {
            assert_eq!(service.post("/v1/acquire", exhausted).status, 200);
        }
        assert_eq!(service.post("/v1/acquire", exhausted).status, 429);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let mut memory = Vec::new();
        let mut cap_held = true;
        let (mut unexpected, mut leaked) = (0, 0);
        for tenth in 0..10 {
            let floods: Vec<_> = (0..CONNECTIONS)
                .map(|n| {
                    runtime.spawn(flood(service.http.clone(), tenth * CONNECTIONS + n, ROUNDS))
                })
                .collect();
            for flood in floods {
                unexpected += runtime.block_on(flood).expect("no panic");
            }
            let keys = crate::load::sums(&service.admin("/metrics").body)["tidegate_memory_keys"];
            #[expect(clippy::cast_precision_loss, reason = "small enough")]
            let cap = CAP as f64;
            cap_held &= keys <= cap;
            leaked += usize::from(service.post("/v1/acquire", exhausted).status != 429);
            memory.push(service.memory());
        }
        row.figure(
            "memory",
            format_args!("{} MiB, then {} MiB", memory[1] / 1024, memory[9] / 1024),
        );
        row.require_always(unexpected == 0, || {
            format!("{unexpected} responses that are neither 200 nor 429")
        });
        row.require_always(cap_held, || "more keys than the cap".to_owned());
        row.require_always(leaked == 0, || format!("the exhausted key was allowed {leaked} times"));
        // Memory is full in the second tenth at the latest. After that only some pages come and
        // go.
        let (full, peak) = (memory[1], memory[2..].iter().max().copied().unwrap_or(0));
        row.require_always(peak <= full + full / 4, || format!("memory grows: {memory:?} KiB"));
        row.require_always(peak < 128 * 1024, || format!("{peak} KiB for {CAP} keys"));
        let output = service.output();
        row.require_always(!output.contains("panicked"), || output.clone());
    });
}

/// After an outage, memory holds the keys that were decided without Redis, and none of the others.
#[test]
fn other_users_after_an_outage() {
    row("40,000 other keys after an outage", |row| {
        let mut redis = Server::start();
        // Redis is killed and refuses connections at once. The long timeout keeps a stall of the
        // machine from failing later calls.
        let mut config =
            format!("store: {{{}, timeout: 10s, instances: 1}}\npolicies:\n", redis.store());
        for n in 0..KEYS_PER_REQUEST {
            let policy = format!(
                "name: random-{n}, match: {{path: /random}}, key: [header.k{n}], limit: 1000, \
                 window: 1h"
            );
            let _ = writeln!(config, "  - {{{policy}}}");
        }
        let service = Service::start(&config);
        let send = |n: usize| {
            let body = format!(r#"{{"policy": "random-{n}", "key": "during the outage"}}"#);
            service.post("/v1/acquire", &body).json()["source"].clone()
        };
        assert_eq!(send(0), "store");
        redis.kill();
        for n in 0..KEYS_PER_REQUEST {
            row.require_always(send(n) == "local", || {
                "Redis decides although it was killed".to_owned()
            });
        }
        redis.restart();
        service.wait_until("Redis decides", |_| (0..KEYS_PER_REQUEST).all(|n| send(n) == "store"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let unexpected = runtime.block_on(flood(service.http.clone(), 0, 80));
        let metrics = crate::load::sums(&service.admin("/metrics").body);
        let (keys, local) =
            (metrics["tidegate_memory_keys"], metrics["tidegate_fallback_decisions_total"]);
        row.figure("local", format_args!("{keys} keys after {local} local decisions"));
        row.require_always(unexpected == 0, || {
            format!("{unexpected} responses that are neither 200 nor 429")
        });
        row.require_always(keys > 0.0 && keys <= local, || {
            format!("{keys} keys in memory after {local} local decisions")
        });
        let output = service.output();
        row.require_always(!output.contains("panicked"), || output.clone());
    });
}

/// A damaged value counts as none and is overwritten: all keys are decided by Redis.
#[test]
fn one_damaged_value() {
    row("a damaged value of one key", |row| {
        let redis = Server::start();
        let policy = "{name: api, match: {path: /api}, key: [header.user], algorithm: \
                      token-bucket, limit: 100000, window: 1h}";
        // The long timeout keeps a stall of the machine from failing calls.
        let service = Service::start(&format!(
            "store: {{{}, timeout: 10s}}\npolicies: [{policy}]\n",
            redis.store()
        ));
        let () = crate::servers::command(
            &mut redis.connection(),
            &["HSET", "rate_limit:{damaged}:api", "level", "x"],
        );
        let send = |key: &str| {
            let response =
                service.post("/v1/acquire", &format!(r#"{{"policy": "api", "key": "{key}"}}"#));
            (response.status, response.json()["source"].clone())
        };
        let (mut others, mut damaged) = (0, 0);
        for _ in 0..500 {
            damaged += usize::from(send("damaged") == (200, "store".into()));
            others += usize::from(send("other") == (200, "store".into()));
        }
        let metrics = crate::load::sums(&service.admin("/metrics").body);
        row.figure("others", format_args!("{others} of 500 decided by Redis"));
        row.require_always(others == 500, || {
            format!("{others} of 500 decisions for another key came from Redis")
        });
        row.require_always(damaged == 500, || {
            format!("{damaged} of 500 decisions for the damaged key came from Redis")
        });
        row.require_always(metrics["tidegate_store_breaker_opened_total"] < 0.5, || {
            "the circuit was opened".to_owned()
        });
        row.require_always(metrics["tidegate_store_up"] > 0.5, || {
            "the store is reported down".to_owned()
        });
    });
}

/// An idle log is cleaned up in steps, so that other clients are not blocked.
#[test]
fn large_idle_log() {
    row("a sorted-set log of 100,000 that rested", |row| {
        let redis = Server::start();
        let policy =
            "{name: api, match: {path: /api}, key: [header.user], limit: 100000, window: 1h}";
        let service = Service::start(&format!(
            "store: {{{}, timeout: 10s}}\npolicies: [{policy}]\n",
            redis.store()
        ));
        let mut connection = redis.connection();
        let fill = r"
            local time = redis.call('TIME')
            local now = time[1] * 1000000 + time[2]
            for i = 1, 99999 do
              local time = string.format('%.0f', now - 3700000000 + i)
              redis.call('ZADD', KEYS[1], time, time .. ':' .. (1e6 + i) .. ':3600s')
            end
            now = string.format('%.0f', now)
            redis.call('ZADD', KEYS[1], now, now .. ':1100000:3600s')
            redis.call('PEXPIRE', KEYS[1], 3600000)";
        let () = crate::servers::command(
            &mut connection,
            &["EVAL", fill, "1", "rate_limit:{rested}:api"],
        );
        let send = || service.post("/v1/acquire", r#"{"policy": "api", "key": "rested"}"#);
        let (mut max_removed, mut calls, mut members) = (0_u64, 0, 100_000_u64);
        let mut unexpected = 0;
        while members > 2_000 && calls < 2_000 {
            unexpected += usize::from(send().status != 200);
            let left: u64 =
                crate::servers::command(&mut connection, &["ZCARD", "rate_limit:{rested}:api"]);
            max_removed = max_removed.max((members + 1).saturating_sub(left));
            (members, calls) = (left, calls + 1);
        }
        row.figure(
            "removed",
            format_args!("at most {max_removed} members in one of {calls} calls"),
        );
        row.require_always(unexpected == 0, || format!("{unexpected} responses that are not 200"));
        row.require_always(max_removed <= 1_001, || {
            format!("{max_removed} members removed in one call")
        });
        row.require_always(members <= 2_000, || {
            format!("{members} members are left after {calls} calls")
        });
    });
}

/// Rounds per connection for a tenth of the keys.
const ROUNDS: usize = KEYS / 10 / CONNECTIONS / PIPELINED / KEYS_PER_REQUEST;

/// Uses other keys in each round. Returns the number of responses other than 200 and 429.
async fn flood(address: String, part: usize, rounds: usize) -> usize {
    let mut connection = Connection::open(&address).await.expect("the service listens");
    let mut unexpected = 0;
    let mut number = (part * KEYS) as u64;
    for _ in 0..rounds {
        let mut requests = Vec::new();
        for _ in 0..PIPELINED {
            let mut body = r#"{"attributes": {"path": "/random""#.to_owned();
            for n in 0..KEYS_PER_REQUEST {
                number += 1;
                let _ = write!(body, r#", "header.k{n}": "{:016x}""#, mixed(number));
            }
            body.push_str("}}");
            requests.extend(http::post("/v1/acquire", &body));
        }
        connection.send(&requests).await.expect("sent");
        for _ in 0..PIPELINED {
            let response = connection.receive().await.expect("a response");
            unexpected += usize::from(!matches!(response.status, 200 | 429));
        }
    }
    unexpected
}

/// Returns a different pseudo-random number for each input (the finalizer of `SplitMix64`).
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
