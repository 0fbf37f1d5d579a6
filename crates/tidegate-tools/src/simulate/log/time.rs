//! Times of log lines, in microseconds since the Unix epoch.

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

/// Latest time that is accepted, the start of the year 3000.
const MAX_TIME: i64 = 32_503_680_000_000_000;

/// Spellings besides those of ISO 8601, without a fraction of a second, a weekday and a zone. A
/// time without a zone is in UTC. Of `12/11/2026`, the month is first, unless another line shows
/// the day.
const SPELLINGS: [&str; 11] = [
    "%d/%b/%Y:%H:%M:%S",
    "%d/%b/%Y %H:%M:%S",
    "%d-%b-%y %H:%M:%S",
    "%d-%b-%Y %H:%M:%S",
    "%d %b %Y %H:%M:%S",
    "%b %d %H:%M:%S %Y",
    "%b %d %Y %H:%M:%S",
    "%m/%d/%Y %H:%M:%S",
    "%d/%m/%Y %H:%M:%S",
    "%d.%m.%Y %H:%M:%S",
    "%Y%m%d%H%M%S",
];
/// First letters of the weekdays.
const WEEKDAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];

/// Parser of the times of a file. Most lines have the second of the line before, and calendars are
/// slow, so it keeps the last one.
#[derive(Debug, Clone, Default)]
pub(super) struct TimeParser {
    /// Text before and after the fraction, and the time without it.
    last: (String, String, Option<u64>),
    /// Place of the spelling that was found last.
    spelling: usize,
}

impl TimeParser {
    /// Parses a number of seconds since the Unix epoch, or a time in any usual spelling.
    pub(super) fn parse(&mut self, text: &str) -> Option<u64> {
        let text = text.trim_matches(['[', ']', '"', ' ']);
        let is_number = text.bytes().all(|it| it.is_ascii_digit() || b".eE+".contains(&it));
        // 14 digits that are a date are one.
        if is_number && !(text.len() == 14 && self.spelled(text).is_some()) {
            return unix(text.parse().ok()?);
        }
        let (before, fraction, after) = split_fraction(text);
        let is_same = |known: &str, text: &str| {
            // glibc compares texts without a byte in 200 ns where it has AVX-512: their address is
            // of no page, and a masked load from it is slow.
            known.len() == text.len() && (text.is_empty() || known == text)
        };
        if !is_same(&self.last.0, before) || !is_same(&self.last.1, after) {
            self.last = (before.into(), after.into(), self.whole(&format!("{before}{after}")));
        }
        Some(self.last.2? + fraction)
    }

    /// Parses a time without a fraction of a second.
    fn whole(&mut self, text: &str) -> Option<u64> {
        // Java and JavaScript name the zone in brackets after its offset.
        let text = match (text.split_once('['), text.split_once(" (")) {
            (Some((time, _)), _) if !time.ends_with(' ') => time,
            (_, Some((time, _))) if text.ends_with(')') => time,
            _ => text,
        };
        let (mut words, mut offset) = (Vec::new(), None);
        for word in text.split([' ', ',', '@']) {
            let word = word.trim_start_matches("GMT").trim_start_matches("UTC");
            let word = word.strip_suffix("UTC").unwrap_or(word);
            let is_time = word.contains(':') && !word.starts_with(['+', '-']);
            let place = word.rfind(['+', '-']).filter(|at| *at == 0 || word[..*at].contains(':'));
            let zone = place.and_then(|at| Some((&word[..at], zone(&word[at..])?)));
            let bare = zone.map_or(word, |(bare, _)| bare);
            let bare = if is_time { bare.trim_end_matches(['Z', 'z']) } else { bare };
            offset = offset.or(zone.map(|(_, offset)| offset));
            let is_weekday = || WEEKDAYS.iter().any(|day| bare.starts_with(day));
            if !bare.is_empty() && bare != "-" && !bare.starts_with('#') && !is_weekday() {
                words.push(bare);
            }
        }
        let time = self.spelled(&words.join(" "))?;
        let time = time.to_zoned(TimeZone::UTC).ok()?.timestamp();
        micros(time.checked_sub(offset.unwrap_or_default()).ok()?.as_microsecond())
    }

    /// Parses a time without a zone.
    fn spelled(&mut self, text: &str) -> Option<DateTime> {
        let is_dated = text.as_bytes().get(4) == Some(&b'/');
        let iso = if is_dated { text.replacen('/', "-", 2) } else { text.to_owned() };
        let places = (self.spelling..SPELLINGS.len()).chain(0..self.spelling);
        let half_day = text.ends_with(['M', 'm']);
        let time = iso.parse().ok().or_else(|| {
            places.into_iter().find_map(|place| {
                let spelling = SPELLINGS[place];
                let time = if half_day {
                    DateTime::strptime(spelling.replace("%H:%M:%S", "%I:%M:%S %p"), text).ok()?
                } else {
                    DateTime::strptime(spelling, text).ok()?
                };
                self.spelling = place;
                Some(time)
            })
        });
        // syslog leaves out the year, which is the last one that is possible.
        time.or_else(|| {
            let limit = Timestamp::now() + SignedDuration::from_hours(24);
            let limit = limit.to_zoned(TimeZone::UTC).datetime();
            [limit.year(), limit.year() - 1].into_iter().find_map(|year| {
                let text = format!("{year} {text}");
                DateTime::strptime("%Y %b %d %H:%M:%S", text).ok().filter(|time| *time < limit)
            })
        })
    }
}

/// Parses an offset from UTC, such as `+0100` or `-08:00`.
fn zone(text: &str) -> Option<SignedDuration> {
    let digits = text[1..].replace(':', "");
    let is_valid = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: i64 = digits.parse().ok().filter(|_| is_valid)?;
    let offset = SignedDuration::from_mins(number / 100 * 60 + number % 100);
    Some(if text.starts_with('-') { -offset } else { offset })
}

/// Splits a time into the text before its fraction of a second, microseconds, and the text after.
fn split_fraction(text: &str) -> (&str, u64, &str) {
    let bytes = text.as_bytes();
    let is_point = |at: &usize| {
        let is_after_seconds = at.checked_sub(3).is_some_and(|colon| bytes[colon] == b':');
        matches!(bytes[*at], b'.' | b',') && is_after_seconds
    };
    let Some(point) = (0..bytes.len()).find(is_point) else { return (text, 0, "") };
    let digits = bytes[point + 1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 {
        return (text, 0, "");
    }
    let fraction = &text[point + 1..=point + digits];
    let micros = fraction.bytes().chain(std::iter::repeat(b'0')).take(6);
    let micros = micros.fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    (&text[..point], micros, &text[point + 1 + digits..])
}

/// Converts a number of seconds since the Unix epoch, or of milli-, micro- or nanoseconds: a number
/// of seconds above 10^11 would be after the year 5000.
#[expect(clippy::cast_possible_truncation, reason = "a cast saturates, and the result is checked")]
fn unix(number: f64) -> Option<u64> {
    let time = match number {
        seconds if seconds < 1e11 => seconds * 1e6,
        millis if millis < 1e14 => millis * 1e3,
        micros if micros < 1e17 => micros,
        nanos => (nanos / 1e3).floor(),
    };
    if time.is_nan() { None } else { micros(time.round() as i64) }
}

fn micros(micros: i64) -> Option<u64> {
    u64::try_from(micros).ok().filter(|_| micros <= MAX_TIME)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> Option<u64> {
        TimeParser::default().parse(text)
    }

    /// The expected values are those of `date -d TEXT +%s`.
    #[test]
    fn times_have_all_usual_spellings() {
        let micros = 1_794_815_048_123_456;
        for text in [
            "16/Nov/2026:07:44:08.123456 +0000",
            "16/Nov/2026:08:44:08.123456 +0100",
            "15/Nov/2026:23:44:08.123456 -0800",
            "[16/Nov/2026:07:44:08.123456]",
            "2026-11-16T07:44:08.123456Z",
            "2026-11-16T07:44:08.123456789Z",
            "2026-11-16T08:44:08.123456+01:00",
            "2026-11-16T08:44:08.123456+0100",
            "2026-11-16t07:44:08.123456z",
            "2026-11-16 07:44:08,123456",
            "2026-11-16 07:44:08.123456",
            "2026-11-16 08:44:08.123456 +0100",
            "2026-11-16 07:44:08.123456789 +0000 UTC",
            "2026/11/16 07:44:08.123456",
            "2026/11/16 - 07:44:08.123456",
            "2026-11-16 08:44:08.123456 +01:00",
            "2026-11-16T08:44:08.123456+01:00[Europe/Berlin]",
            "2026-11-16T07:44:08.123456UTC",
            "2026-11-16 07:44:08.123456 GMT",
            "16/Nov/2026:07:44:08.123456 UTC",
            "16/Nov/2026 07:44:08.123456",
            "16-Nov-2026 07:44:08.123456 +0000",
            "16 Nov 2026 07:44:08.123456",
            "16.11.2026 07:44:08.123456",
            "16/11/2026 07:44:08.123456",
            "Monday, 16-Nov-26 07:44:08.123456 UTC",
            "Mon Nov 16 07:44:08.123456 UTC 2026",
            "Mon Nov 16 2026 08:44:08.123456 GMT+0100 (Central European Standard Time)",
            "Nov 16, 2026 @ 07:44:08.123456",
            "Nov 16, 2026 7:44:08.123456 AM",
            "11/16/2026, 7:44:08.123456 AM",
            "Mon, 16 Nov 2026 07:44:08.123456 GMT",
            "Mon Nov 16 07:44:08.123456 2026",
            "11/16/2026 7:44:08.123456 AM",
            "1794815048.123456",
            "1794815048.1234562",
            "1.794815048123456e9",
            "1794815048123.456",
            "1794815048123456",
            "1794815048123456789",
        ] {
            assert_eq!(time(text), Some(micros), "{text}");
        }
        assert_eq!(time("29/Feb/2024:00:00:00 +0000"), Some(1_709_164_800_000_000));
        assert_eq!(time("0.5"), Some(500_000));
        assert_eq!(time("20261116074408"), Some(1_794_815_048_000_000));
        assert_eq!(time("17948150481234"), Some(17_948_150_481_234_000));
        for text in [
            "",
            "-",
            "-1",
            "inf",
            "nan",
            "x",
            "29/Feb/2026:00:00:00 +0000",
            "16/Nov/2026:24:00:00 +0000",
            "16/Foo/2026:07:44:08 +0000",
            "01/Jan/1970:00:00:00 +0100",
            "16/Nov/99999:07:44:08 +0000",
            "2026-13-16T07:44:08Z",
            "99999999999",
        ] {
            assert_eq!(time(text), None, "{text}");
        }
    }

    #[test]
    fn fractions_of_one_second_differ_and_a_year_may_be_left_out() {
        let mut times = TimeParser::default();
        let first = times.parse("2026-11-16T07:44:08.9Z").expect("a time");
        assert_eq!(times.parse("2026-11-16T07:44:08.95Z"), Some(first + 50_000));
        assert_eq!(times.parse("2026-11-16T07:44:08Z"), Some(first - 900_000));
        assert_eq!(times.parse("2026-11-16T07:44:08.5+01:00"), Some(first - 3_600_400_000));
        assert_eq!(times.parse("2026-11-16T07:44:99.5Z"), None);
        let now = u64::try_from(Timestamp::now().as_microsecond()).expect("after 1970");
        let found = times.parse("Jan  2 03:04:05").expect("a time");
        assert!(found < now + 86_400_000_000 && found + 367 * 86_400_000_000 > now);
    }
}
