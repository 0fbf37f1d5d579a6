//! Times of log lines, in microseconds since the Unix epoch.

use jiff::civil::DateTime;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

/// Latest time that is accepted, the start of the year 3000.
const MAX_TIME: i64 = 32_503_680_000_000_000;

/// Spellings besides those of ISO 8601, without fractions of a second. A time without a zone is in
/// UTC.
const SPELLINGS: [&str; 13] = [
    "%d/%b/%Y:%H:%M:%S %z",
    "%d/%b/%Y:%H:%M:%S",
    "%Y-%m-%d %H:%M:%S %z",
    "%Y-%m-%d %H:%M:%S %z UTC",
    "%Y-%m-%d %H:%M:%S UTC",
    "%Y-%m-%d - %H:%M:%S",
    "%d/%b/%Y %H:%M:%S",
    "%a, %d %b %Y %H:%M:%S GMT",
    "%a, %d %b %Y %H:%M:%S %z",
    "%a %b %d %H:%M:%S %Y",
    "%d-%b-%Y %H:%M:%S",
    "%m/%d/%Y %I:%M:%S %p",
    "%m/%d/%Y %H:%M:%S",
];

/// Parser of the times of a file. Most lines have the second of the line before, and calendars are
/// slow, so it keeps the last one.
#[derive(Debug, Clone, Default)]
pub(super) struct TimeParser {
    /// Last text and its time.
    last: (String, Option<u64>),
    /// Text before and after the fraction, and the time without it.
    known: (String, String, Option<u64>),
    /// Place of the spelling that was found last.
    spelling: usize,
}

impl TimeParser {
    /// Parses a number of seconds since the Unix epoch, or a time in any usual spelling.
    pub(super) fn parse(&mut self, text: &str) -> Option<u64> {
        if self.last.0 != text || text.is_empty() {
            self.last.1 = self.parse_new(text);
            self.last.0.clear();
            self.last.0.push_str(text);
        }
        self.last.1
    }

    fn parse_new(&mut self, text: &str) -> Option<u64> {
        let text = text.trim_matches(['[', ']', '"', ' ']);
        if text.bytes().all(|byte| byte.is_ascii_digit() || b".eE+".contains(&byte)) {
            return unix(text.parse().ok()?);
        }
        let (before, fraction, after) = split_fraction(text);
        if self.known.0 != before || self.known.1 != after {
            self.known.0.clear();
            self.known.1.clear();
            self.known.0.push_str(before);
            self.known.1.push_str(after);
            self.known.2 = self.whole(&format!("{before}{after}"));
        }
        Some(self.known.2? + fraction)
    }

    fn whole(&mut self, text: &str) -> Option<u64> {
        let is_dated = text.as_bytes().get(4) == Some(&b'/');
        let text = if is_dated { text.replacen('/', "-", 2) } else { text.to_owned() };
        let utc = |time: DateTime| Some(time.to_zoned(TimeZone::UTC).ok()?.timestamp());
        let spelled = |format: &str, text: &str| {
            let parts = strtime::parse(format, text).ok()?;
            parts.to_timestamp().ok().or_else(|| utc(parts.to_datetime().ok()?))
        };
        let time = text.parse::<Timestamp>().ok();
        let time = time.or_else(|| text.parse().ok().and_then(utc)).or_else(|| {
            let places = (self.spelling..SPELLINGS.len()).chain(0..self.spelling);
            places.into_iter().find_map(|place| {
                let time = spelled(SPELLINGS[place], &text)?;
                self.spelling = place;
                Some(time)
            })
        });
        // syslog leaves out the year, which is the last one that is possible.
        let time = time.or_else(|| {
            let limit = Timestamp::now() + SignedDuration::from_hours(24);
            let year = limit.to_zoned(TimeZone::UTC).year();
            let mut years = [year, year - 1].into_iter();
            years.find_map(|year| {
                let time = spelled("%Y %b %d %H:%M:%S", &format!("{year} {text}"))?;
                (time < limit).then_some(time)
            })
        });
        micros(time?.as_microsecond())
    }
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
