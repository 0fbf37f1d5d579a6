//! The store is away as a whole: stopped, or killed and back with nothing in it.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::check::Sample;
use crate::fleet::{Fleet, TIMEOUT, usual_streams};
use crate::load::Load;
use crate::row::{AT_ONCE, SECOND, WARM_UP, let_pass, row};
use crate::servers::{Launch, Server};

#[test]
fn redis_stopped_for_ten_seconds() {
    row("SIGSTOP Redis 10 s", |row| {
        let redis = Server::start();
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, usual_streams());
        let_pass(WARM_UP);
        redis.signal("STOP");
        let stopped = Instant::now();
        let_pass(10 * SECOND);
        let resumed = Instant::now();
        redis.signal("CONT");
        let_pass(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 2, &[&redis]);
        row.check_outage(&run, stopped, resumed);
        row.within("back", run.back_after(resumed, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, resumed + 2 * SECOND, Instant::now());
        // Who asked while it was stopped was told that nobody could decide. What lay in its socket
        // must not be charged now.
        row.check_ledger(
            &run,
            fleet.charged("hot"),
            Some((stopped, resumed.checked_sub(TIMEOUT).expect("later"))),
        );
    });
}

#[test]
fn redis_killed_and_restarted_empty() {
    row("kill -9, empty restart", |row| {
        // Its slow log is a log of everything, from its first command on.
        let logging =
            Launch::new().with("slowlog-log-slower-than", "0").with("slowlog-max-len", "100000");
        let mut redis = logging.start();
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, usual_streams());
        let_pass(WARM_UP);
        let loads_before = fleet.metric("tidegate_redis_script_loads_total");
        redis.kill();
        let killed = Instant::now();
        let_pass(3 * SECOND / 2);
        let returning = Instant::now();
        redis.start_again();
        let returned = Instant::now();
        let_pass(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 3, &[&redis]);
        row.within("breaker open", run.shown_after(killed, Sample::breaker_is_open), SECOND);
        row.within("p99 away", Some(run.p99(killed + SECOND / 2, returning)), AT_ONCE);
        row.within("back", run.back_after(returned, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, returned + 2 * SECOND, Instant::now());
        let seen = run.records.iter().filter(|record| {
            record.trouble.as_deref().is_some_and(|text| text.contains("NOSCRIPT"))
        });
        let seen = seen.count();
        row.insist(seen == 0, || format!("{seen} clients saw NOSCRIPT"));

        let scripts = scripts_sent(&redis);
        let most = scripts.values().max().copied().unwrap_or(0);
        row.figure("loads", format_args!("{most} a script"));
        row.insist(!scripts.is_empty() && most <= 3, || {
            format!("three instances sent scripts so often: {scripts:?}")
        });
        let loads = fleet.metric("tidegate_redis_script_loads_total");
        for (before, after) in loads_before.iter().zip(&loads) {
            #[expect(clippy::cast_precision_loss, reason = "a handful")]
            let known = scripts.len() as f64;
            row.require(after - before <= known, || {
                format!("{} loads of {known} scripts by an instance", after - before)
            });
        }
    });
}

/// How often each script came as its text, by EVAL or SCRIPT LOAD, since the server's start.
fn scripts_sent(redis: &Server) -> BTreeMap<String, usize> {
    type Entry = (i64, i64, i64, Vec<String>, String, String);
    let entries: Vec<Entry> = redis.query(&["SLOWLOG", "GET", "-1"]);
    let mut scripts = BTreeMap::new();
    for (.., words, _, _) in entries {
        let text = match words[0].to_ascii_lowercase().as_str() {
            "eval" => words.get(1),
            "script" if words[1].eq_ignore_ascii_case("load") => words.get(2),
            _ => None,
        };
        // The log cuts a text after 128 characters and says how many there are more: enough to tell
        // them apart.
        if let Some(text) = text {
            *scripts.entry(text.clone()).or_default() += 1;
        }
    }
    scripts
}
