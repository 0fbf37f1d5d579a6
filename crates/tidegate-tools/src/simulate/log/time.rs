//! Times of log lines, in microseconds since the Unix epoch.

use jiff::Timestamp;

/// Latest time that is accepted, the start of the year 3000.
const MAX_TIME: i64 = 32_503_680_000_000_000;

/// Parses `16/Nov/2026:07:44:08 +0000`.
pub(super) fn combined(text: &str) -> Option<u64> {
    micros(Timestamp::strptime("%d/%b/%Y:%H:%M:%S %z", text).ok()?.as_microsecond())
}

/// Parses a time by RFC 3339 or ISO 8601, or a number of seconds since the Unix epoch.
pub(super) fn any(text: &str) -> Option<u64> {
    let text = text.trim();
    if let Ok(number) = text.parse() {
        return unix(number);
    }
    let time = text.parse::<Timestamp>().or_else(|_| {
        // nginx separates the date by slashes, and a time without a zone is in UTC.
        let dashed = text.replacen('/', "-", 2);
        dashed.parse().or_else(|_| format!("{dashed}Z").parse())
    });
    micros(time.ok()?.as_microsecond())
}

/// Converts a number of seconds since the Unix epoch, or of milli-, micro- or nanoseconds: a number
/// of seconds above 10^11 would be after the year 5000.
#[expect(clippy::cast_possible_truncation, reason = "a cast saturates, and the result is checked")]
pub(super) fn unix(number: f64) -> Option<u64> {
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

    /// The expected values are those of `date -d TEXT +%s`.
    #[test]
    fn times_are_those_of_the_calendar() {
        for (text, seconds) in [
            ("16/Nov/2026:07:44:08 +0000", 1_794_815_048),
            ("16/Nov/2026:08:44:08 +0100", 1_794_815_048),
            ("15/Nov/2026:23:44:08 -0800", 1_794_815_048),
            ("29/Feb/2024:00:00:00 +0000", 1_709_164_800),
            ("01/Jan/1970:00:00:00 +0000", 0),
        ] {
            assert_eq!(combined(text), Some(seconds * 1_000_000), "{text}");
        }
        for text in [
            "29/Feb/2026:00:00:00 +0000",
            "00/Nov/2026:00:00:00 +0000",
            "16/Nov/2026:24:00:00 +0000",
            "16/Foo/2026:07:44:08 +0000",
            "16/Nov/2026:07:44:08 0000",
            "01/Jan/1970:00:00:00 +0100",
            "16/Nov/99999:07:44:08 +0000",
            "",
            "-",
        ] {
            assert_eq!(combined(text), None, "{text}");
        }
    }

    #[test]
    fn times_of_json_and_csv_have_several_forms() {
        let micros = 1_794_815_048_123_456;
        for (text, expected) in [
            ("2026-11-16T07:44:08.123456Z", micros),
            ("2026-11-16T07:44:08.123456789Z", micros),
            ("2026-11-16T08:44:08.123456+01:00", micros),
            ("2026-11-16T08:44:08.123456+0100", micros),
            ("2026-11-16t07:44:08.123456z", micros),
            ("2026-11-16 07:44:08,123456", micros),
            ("2026-11-16 07:44:08.123456", micros),
            ("2026/11/16 07:44:08.123456", micros),
            ("1794815048.123456", micros),
            ("1794815048.1234562", micros),
            ("1794815048123", micros - 456),
            ("1794815048123.456", micros),
            ("1794815048123456", micros),
            ("1794815048123456789", micros),
            ("0.5", 500_000),
            (" 1 ", 1_000_000),
            ("2026-11-16T07:44:08Z", micros - 123_456),
        ] {
            assert_eq!(any(text), Some(expected), "{text}");
        }
        for text in ["", "-1", "inf", "nan", "2026-11-16", "2026-13-16T07:44:08Z", "x"] {
            assert_eq!(any(text), None, "{text}");
        }
        assert_eq!(any("99999999999"), None, "after the year 3000");
    }
}
