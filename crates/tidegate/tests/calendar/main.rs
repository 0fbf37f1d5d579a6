//! Periods of calendars: a table around clock changes, compared with Python's zoneinfo; and a count
//! in each store, over a boundary.

#[path = "../support/mod.rs"]
mod support;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::Redis;
use tidegate::{
    Calendar, CalendarUnit, Charge, Limiter, ManualClock, MemoryStore, Quota, Store, Timestamp,
};

mod boundary;

/// Unit, time zone, anchor, an instant, and the start and the end of its period. The clocks change
/// at midnight in São Paulo, and went back over it in St. John's; Samoa has skipped 30 December
/// 2011.
const PERIODS: &str = "
day Europe/Berlin - 2024-03-30T23:00:00Z 2024-03-30T23:00:00Z 2024-03-31T22:00:00Z
day Europe/Berlin - 2024-03-31T01:00:00Z 2024-03-30T23:00:00Z 2024-03-31T22:00:00Z
day Europe/Berlin - 2024-10-27T00:30:00Z 2024-10-26T22:00:00Z 2024-10-27T23:00:00Z
day Europe/Berlin - 2024-10-27T01:30:00Z 2024-10-26T22:00:00Z 2024-10-27T23:00:00Z
day America/New_York - 2024-03-10T07:00:00Z 2024-03-10T05:00:00Z 2024-03-11T04:00:00Z
day America/New_York - 2024-11-03T05:30:00Z 2024-11-03T04:00:00Z 2024-11-04T05:00:00Z
day America/New_York - 2024-11-03T06:30:00Z 2024-11-03T04:00:00Z 2024-11-04T05:00:00Z
day America/Sao_Paulo - 2018-11-04T02:59:59Z 2018-11-03T03:00:00Z 2018-11-04T03:00:00Z
day America/Sao_Paulo - 2018-11-04T03:00:00Z 2018-11-04T03:00:00Z 2018-11-05T02:00:00Z
day America/Sao_Paulo - 2018-02-18T01:30:00Z 2018-02-17T02:00:00Z 2018-02-18T03:00:00Z
day America/Sao_Paulo - 2018-02-18T02:30:00Z 2018-02-17T02:00:00Z 2018-02-18T03:00:00Z
day America/St_Johns - 2009-11-01T02:29:59Z 2009-10-31T02:30:00Z 2009-11-01T02:30:00Z
day America/St_Johns - 2009-11-01T02:31:00Z 2009-11-01T02:30:00Z 2009-11-02T03:30:00Z
day America/St_Johns - 2009-11-01T03:00:00Z 2009-11-01T02:30:00Z 2009-11-02T03:30:00Z
day America/St_Johns - 2009-11-01T03:30:00Z 2009-11-01T02:30:00Z 2009-11-02T03:30:00Z
day Pacific/Apia - 2011-12-30T09:59:59Z 2011-12-29T10:00:00Z 2011-12-30T10:00:00Z
day Pacific/Apia - 2011-12-30T10:00:00Z 2011-12-30T10:00:00Z 2011-12-31T10:00:00Z
week Pacific/Apia friday 2011-12-30T09:59:59Z 2011-12-23T10:00:00Z 2011-12-30T10:00:00Z
week Pacific/Apia friday 2011-12-30T10:00:00Z 2011-12-30T10:00:00Z 2012-01-05T10:00:00Z
month Pacific/Apia 30 2011-12-30T10:00:00Z 2011-12-30T10:00:00Z 2012-01-29T10:00:00Z
month Pacific/Apia 1 2011-12-31T00:00:00Z 2011-12-01T10:00:00Z 2011-12-31T10:00:00Z
quarter Pacific/Apia 31 2011-12-15T00:00:00Z 2011-10-31T10:00:00Z 2012-01-30T10:00:00Z
year Pacific/Apia 1 2011-07-01T00:00:00Z 2011-01-01T10:00:00Z 2011-12-31T10:00:00Z
day Australia/Lord_Howe - 2024-04-06T15:30:00Z 2024-04-06T13:00:00Z 2024-04-07T13:30:00Z
day Australia/Lord_Howe - 2024-10-05T16:00:00Z 2024-10-05T13:30:00Z 2024-10-06T13:00:00Z
week Australia/Lord_Howe monday 2024-10-05T16:00:00Z 2024-09-29T13:30:00Z 2024-10-06T13:00:00Z
week Europe/Berlin monday 2024-03-31T21:59:59Z 2024-03-24T23:00:00Z 2024-03-31T22:00:00Z
week Europe/Berlin monday 2024-03-31T22:00:00Z 2024-03-31T22:00:00Z 2024-04-07T22:00:00Z
week America/New_York sunday 2024-11-03T03:59:59Z 2024-10-27T04:00:00Z 2024-11-03T04:00:00Z
week America/New_York sunday 2024-11-03T04:00:00Z 2024-11-03T04:00:00Z 2024-11-10T05:00:00Z
month Europe/Berlin 29 2023-02-27T22:59:59Z 2023-01-28T23:00:00Z 2023-02-27T23:00:00Z
month Europe/Berlin 29 2023-02-27T23:00:00Z 2023-02-27T23:00:00Z 2023-03-28T22:00:00Z
month Europe/Berlin 29 2024-02-28T23:00:00Z 2024-02-28T23:00:00Z 2024-03-28T23:00:00Z
month America/New_York 30 2024-02-29T05:00:00Z 2024-02-29T05:00:00Z 2024-03-30T04:00:00Z
month Europe/Berlin 31 2023-02-28T00:00:00Z 2023-02-27T23:00:00Z 2023-03-30T22:00:00Z
month Europe/Berlin 31 2023-03-31T00:00:00Z 2023-03-30T22:00:00Z 2023-04-29T22:00:00Z
month America/Sao_Paulo 31 2018-11-30T12:00:00Z 2018-11-30T02:00:00Z 2018-12-31T02:00:00Z
month America/St_Johns 15 2024-03-10T12:00:00Z 2024-02-15T03:30:00Z 2024-03-15T02:30:00Z
quarter America/New_York 30 2024-02-01T00:00:00Z 2024-01-30T05:00:00Z 2024-04-30T04:00:00Z
quarter Europe/Berlin 1 2024-03-31T22:00:00Z 2024-03-31T22:00:00Z 2024-06-30T22:00:00Z
year Europe/Berlin 29 2024-02-29T12:00:00Z 2024-01-28T23:00:00Z 2025-01-28T23:00:00Z
year Australia/Lord_Howe 31 2024-12-31T23:00:00Z 2024-01-30T13:00:00Z 2025-01-30T13:00:00Z
";

fn calendar(unit: &str, zone: &str, anchor: &str) -> Calendar {
    let calendar = Calendar::new(unit.parse().expect("a unit"), zone).expect("a zone");
    if anchor == "-" { calendar } else { calendar.with_anchor(anchor).expect("an anchor") }
}

fn seconds(text: &str) -> i64 {
    text.parse::<jiff::Timestamp>().expect("a time").as_second()
}

fn timestamp(seconds: i64) -> Timestamp {
    Timestamp::from_micros(u64::try_from(seconds).expect("after the epoch") * 1_000_000)
}

fn period(calendar: &Calendar, at: i64) -> [i64; 2] {
    let (start, end) = calendar.period_at(timestamp(at));
    [start, end].map(|time| i64::try_from(time.as_micros() / 1_000_000).expect("a time"))
}

/// Returns the periods by Python's zoneinfo.
fn by_zoneinfo(cases: &[(&str, &str, String, i64)]) -> Vec<[i64; 2]> {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/calendar/periods.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("`make setup` installs it");
    let lines =
        cases.iter().map(|(unit, zone, anchor, at)| format!("{unit} {zone} {anchor} {at}\n"));
    let input = lines.collect::<String>();
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no panic").expect("written");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let number = |text: &str| text.parse::<i64>().expect("a number");
    let lines = text.lines().map(|line| {
        let (start, end) = line.split_once(' ').expect("two numbers");
        [number(start), number(end)]
    });
    lines.collect()
}

#[test]
fn periods_around_clock_changes_are_those_of_the_table_and_of_zoneinfo() {
    let rows: Vec<Vec<&str>> = PERIODS
        .lines()
        .filter(|line| !line.is_empty())
        .map(|line| line.split(' ').collect())
        .collect();
    assert!(rows.len() >= 40);
    let mut cases = Vec::new();
    for row in &rows {
        let [unit, zone, anchor, at, start, end] = row[..] else { panic!("{row:?}") };
        let found = period(&calendar(unit, zone, anchor), seconds(at));
        assert_eq!(found, [seconds(start), seconds(end)], "{row:?}");
        cases.push((unit, zone, anchor.to_owned(), seconds(at)));
    }
    for (row, by_zoneinfo) in rows.iter().zip(by_zoneinfo(&cases)) {
        assert_eq!(by_zoneinfo, [seconds(row[4]), seconds(row[5])], "{row:?}");
    }
}

/// Every zone and anchor, at the edges of many periods. The years are those for which all versions
/// of the database agree.
#[test]
fn periods_of_many_years_are_those_of_zoneinfo() {
    let zones = [
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "America/Sao_Paulo",
        "America/St_Johns",
        "Pacific/Apia",
        "Australia/Lord_Howe",
        "Asia/Kolkata",
        "Antarctica/Troll",
    ];
    let (first, last) = (seconds("2006-03-01T00:00:00Z"), seconds("2023-03-01T00:00:00Z"));
    let mut cases = Vec::new();
    for zone in zones {
        for unit in CalendarUnit::ALL {
            let mut anchors = Calendar::anchors(unit);
            if anchors.is_empty() {
                anchors.push("-".to_owned());
            }
            for anchor in anchors {
                let calendar = calendar(unit.as_str(), zone, &anchor);
                let mut at = first;
                while at < last {
                    let [start, end] = period(&calendar, at);
                    assert!(start <= at && at < end, "{calendar} {at}");
                    cases.push((unit.as_str(), zone, anchor.clone(), end - 1));
                    cases.push((unit.as_str(), zone, anchor.clone(), end));
                    // Not every day and week, but all months of the year.
                    let skipped = (end - start) * if end - start < 10 * 86_400 { 4 } else { 0 };
                    at = end + skipped;
                }
            }
        }
    }
    let expected = by_zoneinfo(&cases);
    assert_eq!(expected.len(), cases.len());
    for ((unit, zone, anchor, at), expected) in cases.iter().zip(expected) {
        let found = period(&calendar(unit, zone, anchor), *at);
        assert_eq!(found, expected, "{unit} {zone} {anchor} {at}");
    }
}
