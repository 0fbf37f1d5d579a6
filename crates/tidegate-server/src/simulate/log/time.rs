//! Times of log lines, in microseconds since the Unix epoch.

/// Latest time that is accepted, the start of the year 3000.
const MAX_TIME: u64 = 32_503_680_000_000_000;

/// Parser of the times of a combined log, which are the same in many lines.
#[derive(Debug, Default)]
pub(super) struct CombinedTime {
    last: Vec<u8>,
    micros: u64,
}

impl CombinedTime {
    /// Parses `16/Nov/2026:07:44:08 +0000`.
    pub(super) fn parse(&mut self, text: &[u8]) -> Option<u64> {
        if self.last.is_empty() || self.last != text {
            self.micros = combined(text)?;
            self.last.clear();
            self.last.extend_from_slice(text);
        }
        Some(self.micros)
    }
}

fn combined(text: &[u8]) -> Option<u64> {
    const MONTHS: &[u8; 36] = b"JanFebMarAprMayJunJulAugSepOctNovDec";
    let [d0, d1, b'/', m @ .., b':', _, _, b':', _, _, b':', _, _, b' ', _, _, _, _, _] = text
    else {
        return None;
    };
    let [month @ .., b'/', _, _, _, _] = m else { return None };
    let month = MONTHS.chunks(3).position(|name| name == month)? + 1;
    let date = (number(&m[4..])?, month as u64, number(&[*d0, *d1])?);
    let clock = &text[text.len() - 14..];
    let seconds = clock_time(&clock[..8])?;
    to_micros(date, seconds, 0, offset(&clock[9..])?)
}

/// Parses a time by RFC 3339, with `T` or a space, or ISO 8601 with an offset without colon.
pub(super) fn rfc3339(text: &[u8]) -> Option<u64> {
    let (date, rest) = text.split_at_checked(10)?;
    let [y0, y1, y2, y3, b'-' | b'/', m0, m1, b'-' | b'/', d0, d1] = date else { return None };
    let date = (number(&[*y0, *y1, *y2, *y3])?, number(&[*m0, *m1])?, number(&[*d0, *d1])?);
    let ([b'T' | b't' | b' '], rest) = rest.split_at_checked(1)? else { return None };
    let (clock, rest) = rest.split_at_checked(8)?;
    let seconds = clock_time(clock)?;
    let (fraction, zone) = match rest.strip_prefix(b".").or_else(|| rest.strip_prefix(b",")) {
        None => (0, rest),
        Some(rest) => {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            (fraction(&rest[..digits])?, &rest[digits..])
        }
    };
    let offset = match zone {
        b"" | b"Z" | b"z" => 0,
        zone => offset(zone)?,
    };
    to_micros(date, seconds, fraction, offset)
}

/// Parses a number of seconds since the Unix epoch, or of milli-, micro- or nanoseconds: a number
/// of seconds above 10^11 would be after the year 5000.
pub(super) fn unix(text: &[u8]) -> Option<u64> {
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let whole = number(parts.next()?)?;
    let part = parts.next().map_or(Some(0), fraction)?;
    let micros = match whole {
        0..100_000_000_000 => whole * 1_000_000 + part,
        100_000_000_000..100_000_000_000_000 => whole * 1_000 + part / 1_000,
        100_000_000_000_000..100_000_000_000_000_000 => whole,
        _ => whole / 1_000,
    };
    (micros <= MAX_TIME).then_some(micros)
}

/// Parses either form.
pub(super) fn any(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii();
    unix(text).or_else(|| rfc3339(text))
}

fn to_micros(
    (year, month, day): (u64, u64, u64),
    seconds: u64,
    micros: u64,
    offset: i64,
) -> Option<u64> {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let length = match month {
        2 => 28 + u64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if !(1970..3_000).contains(&year) || !(1..=12).contains(&month) || !(1..=length).contains(&day)
    {
        return None;
    }
    // The calendar of years that start in March (Howard Hinnant's `days_from_civil`).
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    let seconds = (days * 86_400 + seconds).checked_add_signed(-offset)?;
    Some(seconds * 1_000_000 + micros)
}

/// Parses `07:44:08` to seconds.
fn clock_time(text: &[u8]) -> Option<u64> {
    let [h0, h1, b':', m0, m1, b':', s0, s1] = text else { return None };
    let (hour, minute) = (number(&[*h0, *h1])?, number(&[*m0, *m1])?);
    let second = number(&[*s0, *s1])?;
    // 60 is a leap second.
    (hour < 24 && minute < 60 && second <= 60).then_some(hour * 3_600 + minute * 60 + second)
}

/// Parses `+0100` or `+01:00` to seconds.
fn offset(text: &[u8]) -> Option<i64> {
    let (sign, hour, minute) = match text {
        [sign, h0, h1, m0, m1] | [sign, h0, h1, b':', m0, m1] => {
            (sign, number(&[*h0, *h1])?, number(&[*m0, *m1])?)
        }
        _ => return None,
    };
    let seconds = i64::try_from(hour * 3_600 + minute * 60).ok()?;
    match sign {
        b'+' => Some(seconds),
        b'-' => Some(-seconds),
        _ => None,
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 19 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}

/// Parses the digits after the decimal point to microseconds. Further digits are cut.
fn fraction(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let six = digits.iter().copied().chain(std::iter::repeat(b'0')).take(6);
    Some(six.fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
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
            let mut parser = CombinedTime::default();
            assert_eq!(parser.parse(text.as_bytes()), Some(seconds * 1_000_000), "{text}");
            assert_eq!(parser.parse(text.as_bytes()), Some(seconds * 1_000_000), "{text}");
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
            assert_eq!(CombinedTime::default().parse(text.as_bytes()), None, "{text}");
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
            ("2026-11-16 07:44:08.123456", micros),
            ("2026/11/16 07:44:08.123456", micros),
            ("1794815048.123456", micros),
            ("1794815048.1234567", micros),
            ("1794815048123", micros - 456),
            ("1794815048123.456", micros),
            ("1794815048123456", micros),
            ("1794815048123456789", micros),
            ("0.5", 500_000),
            ("2026-11-16T07:44:08Z", micros - 123_456),
        ] {
            assert_eq!(any(text.as_bytes()), Some(expected), "{text}");
        }
        for text in ["", "1.", ".5", "-1", "1e9", "2026-11-16", "2026-13-16T07:44:08Z", "x"] {
            assert_eq!(any(text.as_bytes()), None, "{text}");
        }
        assert_eq!(any(b"99999999999"), None, "after the year 3000");
    }
}
