//! The clock of the new primary differs.

use std::time::{Duration, Instant};

use crate::check::Record;
use crate::fleet::{Fleet, WINDOW, default_streams};
use crate::load::{Load, Stream};
use crate::monitor::Monitor;
use crate::row::{Row, SECOND, WARM_UP, row, wait_under_load};
use crate::sentinel::SentinelDeployment;
use crate::servers::Launch;

/// Every algorithm, with traffic above its limit.
const ALGORITHMS: [&str; 6] = ["hot", "packed", "counter", "fixed", "token", "leaky"];

#[test]
fn new_primary_is_5_s_ahead() {
    row("clock +5 s on the new primary", |row| fail_over_to("+5", row));
}

#[test]
fn new_primary_is_5_s_behind() {
    row("clock -5 s on the new primary", |row| fail_over_to("-5", row));
}

#[test]
fn new_primary_is_an_hour_ahead() {
    row("clock +1 h on the new primary", |row| fail_over_to("+3600", row));
}

#[test]
fn new_primary_is_an_hour_behind() {
    row("clock -1 h on the new primary", |row| fail_over_to("-3600", row));
}

fn fail_over_to(clock: &'static str, row: &mut Row) {
    let watched = SentinelDeployment::start(Launch::new().clock(clock), 1);
    let difference = seconds(&watched.replica) - seconds(&watched.primary);
    let expected: i64 = clock.parse().expect("a number");
    assert!(
        (difference - expected).abs() <= 1,
        "the clock offset is {difference} s instead of {expected}"
    );
    let fleet = Fleet::start(&watched.store());
    let mut streams = default_streams();
    streams.extend(ALGORITHMS[1..].iter().map(|policy| Stream::policy(policy, "hot", 20)));
    let monitor = Monitor::of(&watched.primary);
    let load = Load::start(&fleet, streams);
    wait_under_load(WARM_UP);
    let promoted = watched.fail_over();
    wait_under_load(3 * WINDOW + SECOND);
    let run = load.finish();

    // A clock that is behind loses no counts. With a clock that is ahead by more than a window, all
    // counts have expired.
    let limits = if expected < 0 { 2 } else { 3 };
    row.check(&run, &fleet, limits, &[&watched.replica]);
    // The old primary still works, and would keep deciding for some seconds.
    let left = monitor.last_call().expect("an earlier call").max(promoted);
    let there = run.recovered_after(left, |_| true).map(|time| left + time - promoted);
    row.within("following", there, SECOND);
    row.check_store_decides(&run, &fleet, promoted + 2 * SECOND, Instant::now());
    let mut longest = Duration::ZERO;
    for policy in ALGORITHMS {
        let by_new_primary = |record: &&Record| record.by_store() && record.sent >= left;
        let first = run.of(policy).find(by_new_primary).map(|record| record.sent);
        let admitted = run.of(policy).filter(by_new_primary).find(|record| record.allowed);
        let locked = first.zip(admitted).map(|(first, admitted)| admitted.responded - first);
        longest = longest.max(locked.unwrap_or_default());
        row.require(locked.is_some(), || {
            format!("{policy}: nothing was admitted after the failover")
        });
    }
    // At 20 requests per second a change is seen up to 50 ms later, plus the response time.
    row.within("locked", Some(longest), WINDOW + Duration::from_millis(100));
}

fn seconds(redis: &crate::servers::Server) -> i64 {
    let (seconds, _): (i64, i64) = redis.query(&["TIME"]);
    seconds
}
