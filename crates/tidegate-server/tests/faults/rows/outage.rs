//! Outages of the whole store: stopped and resumed, or killed and restarted empty.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::check::Sample;
use crate::fleet::{Fleet, TIMEOUT, default_streams};
use crate::load::Load;
use crate::row::{MAX_LOCAL_LATENCY, SECOND, WARM_UP, row, wait_under_load};
use crate::servers::{Launch, Server};

#[test]
fn redis_stopped_for_ten_seconds() {
    row("SIGSTOP Redis 10 s", |row| {
        let redis = Server::start();
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        redis.signal("STOP");
        let stopped = Instant::now();
        wait_under_load(10 * SECOND);
        let resumed = Instant::now();
        redis.signal("CONT");
        wait_under_load(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 2, &[&redis]);
        row.check_outage(&run, stopped, resumed);
        row.within("back", run.recovered_after(resumed, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, resumed + 2 * SECOND, Instant::now());
        // Requests during the stop were decided without the store. The calls in its socket must not
        // be charged now.
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
        // The slow log records every command from the start.
        let logging =
            Launch::new().with("slowlog-log-slower-than", "0").with("slowlog-max-len", "100000");
        let mut redis = logging.start();
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let loads_before = fleet.metric("tidegate_redis_script_loads_total");
        redis.kill();
        let killed = Instant::now();
        wait_under_load(3 * SECOND / 2);
        let returning = Instant::now();
        redis.restart();
        let returned = Instant::now();
        wait_under_load(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 3, &[&redis]);
        row.within("breaker open", run.shown_after(killed, Sample::breaker_is_open), SECOND);
        row.within("p99 away", Some(run.p99(killed + SECOND / 2, returning)), MAX_LOCAL_LATENCY);
        row.within("back", run.recovered_after(returned, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, returned + 2 * SECOND, Instant::now());
        let seen = run.records.iter().filter(|record| {
            record.failure.as_deref().is_some_and(|text| text.contains("NOSCRIPT"))
        });
        let seen = seen.count();
        row.require_always(seen == 0, || format!("{seen} clients saw NOSCRIPT"));

        let scripts = scripts_sent(&redis);
        let max = scripts.values().max().copied().unwrap_or(0);
        row.figure("loads", format_args!("{max} per script"));
        row.require_always(!scripts.is_empty() && max <= 3, || {
            format!("three instances sent scripts too often: {scripts:?}")
        });
        let loads = fleet.metric("tidegate_redis_script_loads_total");
        for (before, after) in loads_before.iter().zip(&loads) {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let known = scripts.len() as f64;
            row.require(after - before <= known, || {
                format!("{} loads of {known} scripts by an instance", after - before)
            });
        }
    });
}

/// Returns how often each script was sent as text, by EVAL or SCRIPT LOAD.
fn scripts_sent(redis: &Server) -> BTreeMap<String, usize> {
    // Arguments of decisions are no text.
    type Entry = (i64, i64, i64, Vec<Vec<u8>>, String, String);
    let entries: Vec<Entry> = redis.query(&["SLOWLOG", "GET", "-1"]);
    let mut scripts = BTreeMap::new();
    for (.., words, _, _) in entries {
        let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let text = match words[0].to_ascii_lowercase().as_str() {
            "eval" => words.get(1),
            "script" if words[1].eq_ignore_ascii_case("load") => words.get(2),
            _ => None,
        };
        // The log truncates texts after 128 characters and adds the number of the rest, which is
        // enough to distinguish them.
        if let Some(text) = text {
            *scripts.entry(text.to_string()).or_default() += 1;
        }
    }
    scripts
}
