//! The store rejects calls: out of memory, no access, loading, busy script, too many clients.

use std::time::Instant;

use serde_json::json;

use crate::check::{Run, Sample};
use crate::fleet::{Fleet, default_streams};
use crate::load::Load;
use crate::row::{Row, SECOND, WARM_UP, row, wait_under_load};
use crate::servers::{Launch, Server, command};
use crate::support::request;

/// Password that must never be logged.
const SECRET: &str = "open-sesame-4711";

/// Checks a store that rejects calls for four seconds: failure modes decide, one warning names the
/// reason, metrics show it, and the service recovers.
fn check_rejection(
    row: &mut Row,
    redis: &Server,
    store: &str,
    reason: &[&str],
    limits: usize,
    check_rejection: impl FnOnce(&mut redis::Connection),
    repair: impl FnOnce(&mut redis::Connection),
) -> Run {
    let fleet = Fleet::start(store);
    let mut connection = redis.connection();
    let load = Load::start(&fleet, default_streams());
    wait_under_load(WARM_UP);
    let written = fleet.written();
    let refused = Instant::now();
    check_rejection(&mut connection);
    wait_under_load(4 * SECOND);
    let warnings = fleet.warnings_since(&written);
    let mended = Instant::now();
    repair(&mut connection);
    wait_under_load(4 * SECOND);
    let run = load.finish();

    row.check(&run, &fleet, limits, &[redis]);
    let shown =
        run.shown_after(refused, |sample| sample.store_is_down() && sample.breaker_is_open());
    row.within("metric", shown, 5 * SECOND);
    // Until then the store may still deny, which needs no write.
    row.check_failure_modes(&run, refused + shown.unwrap_or(SECOND), mended);
    let counted = run.shown_after(refused, |sample: &Sample| {
        sample.value("tidegate_fallback_decisions_total") > 0.0
    });
    row.within("counted", counted, 5 * SECOND);
    for (instance, lines) in warnings.iter().enumerate() {
        let named = |line: &&String| reason.iter().any(|word| line.to_lowercase().contains(word));
        let clear = lines.iter().filter(named).count();
        row.require(clear == 1, || {
            format!("instance {instance} names the reason {clear} times: {lines:#?}")
        });
    }
    row.within("back", run.recovered_after(mended, |_| true), 3 * SECOND);
    row.check_store_decides(&run, &fleet, mended + 3 * SECOND, Instant::now());
    let is_logged = fleet.instances.iter().any(|service| service.output().contains(SECRET));
    row.require_always(!is_logged, || "the password is in the log".to_owned());
    run
}

/// Writes 20 MB and sets maxmemory 10 MB below the usage, so that expiring keys free too little.
fn fill(redis: &Server, connection: &mut redis::Connection) {
    let () = command(connection, &["DEBUG", "POPULATE", "20000", "junk", "1000"]);
    let used: u64 = redis.info("used_memory").parse().expect("a number");
    let () = command(connection, &["CONFIG", "SET", "maxmemory", &(used - 10_000_000).to_string()]);
}

#[test]
fn maxmemory_reached() {
    row("maxmemory reached", |row| {
        let redis = Launch::new()
            .with("maxmemory-policy", "noeviction")
            .with("enable-debug-command", "yes")
            .start();
        let full = |connection: &mut redis::Connection| fill(&redis, connection);
        let repair = |connection: &mut redis::Connection| {
            let () = command(connection, &["CONFIG", "SET", "maxmemory", "0"]);
        };
        check_rejection(row, &redis, &redis.store(), &["oom", "memory"], 2, full, repair);
    });
}

/// A full server deletes, but adds nothing: a reset succeeds, and its invalidation cannot be
/// written.
#[test]
fn reset_on_a_full_server_reaches_other_instances() {
    row("maxmemory reached, reset", |row| {
        let redis = Launch::new()
            .with("maxmemory-policy", "noeviction")
            .with("enable-debug-command", "yes")
            .start();
        let fleet = Fleet::start(&redis.store());
        // Nothing but the canary: requests would open the breaker, and the reset would not be
        // tried.
        let load = Load::start(&fleet, Vec::new());
        let key = json!({"policy": "ledger", "key": "reset"}).to_string();
        let all = json!({"policy": "ledger", "key": "reset", "cost": 100_000}).to_string();
        fleet.instances[0].post("/v1/acquire", &all);
        let other = &fleet.instances[1];
        redis.wait_until("the denial is cached", |_| {
            other.post("/v1/acquire", &key).json()["source"] == "deny-cache"
        });
        let mut connection = redis.connection();
        fill(&redis, &mut connection);
        let response = request(&fleet.instances[0].admin, "POST", "/v1/reset", &[], key.as_bytes());
        let reset = Instant::now();
        let () = command(&mut connection, &["CONFIG", "SET", "maxmemory", "0"]);
        let admitted = redis
            .wait_until("a request is allowed", |_| other.post("/v1/acquire", &key).status == 200);
        let run = load.finish();

        row.record_store_delay(run.max_delay());
        row.require_always(response.status == 204, || {
            format!("the reset on a full server: {}", response.status)
        });
        row.within("seen by another instance", Some(admitted - reset), SECOND + SECOND / 2);
        row.check_alive(&fleet);
        let eternal = redis.keys_without_expiry("rate_limit:*");
        row.require_always(eternal.is_empty(), || format!("without expiry: {eternal:?}"));
    });
}

#[test]
fn password_is_changed() {
    row("AUTH revoked, password", |row| {
        let redis = Server::start();
        let () = redis.query(&[
            "ACL",
            "SETUSER",
            "tide",
            "on",
            &format!(">{SECRET}"),
            "~*",
            "&*",
            "+@all",
        ]);
        let store = format!("redis: 'redis://tide:{SECRET}@127.0.0.1:{}'", redis.port);
        let revoke = |connection: &mut redis::Connection| {
            let () = command(connection, &["ACL", "SETUSER", "tide", "resetpass", ">another"]);
            let _: usize = command(connection, &["CLIENT", "KILL", "USER", "tide"]);
        };
        let repair = |connection: &mut redis::Connection| {
            let () = command(
                connection,
                &["ACL", "SETUSER", "tide", "resetpass", &format!(">{SECRET}")],
            );
        };
        check_rejection(
            row,
            &redis,
            &store,
            &["wrongpass", "password", "noauth"],
            2,
            revoke,
            repair,
        );
    });
}

#[test]
fn permission_is_revoked_from_a_live_connection() {
    row("AUTH revoked, permission", |row| {
        let redis = Server::start();
        let () = redis.query(&[
            "ACL",
            "SETUSER",
            "tide",
            "on",
            &format!(">{SECRET}"),
            "~*",
            "&*",
            "+@all",
        ]);
        let store = format!("redis: 'redis://tide:{SECRET}@127.0.0.1:{}'", redis.port);
        let revoke = |connection: &mut redis::Connection| {
            let () = command(connection, &["ACL", "SETUSER", "tide", "-@scripting"]);
        };
        let repair = |connection: &mut redis::Connection| {
            let () = command(connection, &["ACL", "SETUSER", "tide", "+@scripting"]);
        };
        check_rejection(row, &redis, &store, &["noperm", "permission"], 2, revoke, repair);
    });
}

#[test]
fn server_is_loading() {
    row("LOADING", |row| {
        let redis = Launch::new()
            .with("enable-debug-command", "yes")
            // While loading, Redis serves its clients after each kilobyte: after each key here.
            .with("loading-process-events-interval-bytes", "1024")
            .start();
        let () = redis.query(&["DEBUG", "POPULATE", "2000", "junk", "2000"]);
        let loader = redis.connection();
        let load = move |connection: &mut redis::Connection| {
            // 2,000 keys of 2 ms each; the connections stay.
            let () = command(connection, &["CONFIG", "SET", "key-load-delay", "2000"]);
            let mut loader = loader;
            std::thread::spawn(move || {
                let () = command(&mut loader, &["DEBUG", "RELOAD"]);
            });
        };
        let repair = |connection: &mut redis::Connection| {
            let () = command(connection, &["CONFIG", "SET", "key-load-delay", "0"]);
            redis.wait_until("the loading is complete", |redis| redis.info("loading") == "0");
        };
        check_rejection(row, &redis, &redis.store(), &["loading"], 2, load, repair);
    });
}

#[test]
fn another_client_runs_an_endless_script() {
    row("BUSY script", |row| {
        let redis = Launch::new().with("busy-reply-threshold", "20").start();
        let mut other = redis.connection();
        let run = move |_: &mut redis::Connection| {
            std::thread::spawn(move || {
                let ended: redis::RedisResult<()> =
                    redis::cmd("EVAL").arg("while true do end").arg(0).query(&mut other);
                assert!(ended.is_err(), "the script was killed");
            });
        };
        let repair = |connection: &mut redis::Connection| {
            let () = command(connection, &["SCRIPT", "KILL"]);
        };
        check_rejection(row, &redis, &redis.store(), &["busy"], 2, run, repair);
    });
}

#[test]
fn too_many_clients() {
    row("maxclients", |row| {
        let redis = Server::start();
        let fill = |connection: &mut redis::Connection| {
            // Only this test's own connection is left.
            let () = command(connection, &["CONFIG", "SET", "maxclients", "1"]);
            let _: usize =
                command(connection, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        };
        let repair = |connection: &mut redis::Connection| {
            let () = command(connection, &["CONFIG", "SET", "maxclients", "1000"]);
        };
        check_rejection(
            row,
            &redis,
            &redis.store(),
            &["max number of clients", "maxclients"],
            2,
            fill,
            repair,
        );
    });
}
