//! Times of log lines, in UTC.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Date and time of day in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UtcTime {
    year: u64,
    /// 1 to 12.
    month: u64,
    day: u64,
    /// Milliseconds since midnight.
    millis: u64,
}

impl UtcTime {
    /// Converts a time. Those before 1970 become 1970.
    pub(crate) fn new(time: SystemTime) -> Self {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let days = since_epoch.as_secs() / 86_400;
        // The calendar of years that start in March, in eras of 400 years (Howard Hinnant's
        // `civil_from_days`).
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        Self {
            year: era * 400 + year_of_era + u64::from(month <= 2),
            month,
            day: day_of_year - (153 * shifted_month + 2) / 5 + 1,
            millis: since_epoch.as_secs() % 86_400 * 1_000 + u64::from(since_epoch.subsec_millis()),
        }
    }

    fn hour_minute_second(self) -> (u64, u64, u64) {
        let seconds = self.millis / 1_000;
        (seconds / 3_600, seconds / 60 % 60, seconds % 60)
    }

    /// Formats as in the combined format: `16/Nov/2026:07:44:08 +0000`.
    pub(super) fn combined(self) -> impl fmt::Display {
        let (hour, minute, second) = self.hour_minute_second();
        let Self { year, month, day, .. } = self;
        let month = usize::try_from(month - 1).ok().and_then(|index| MONTHS.get(index).copied());
        let month = month.unwrap_or_default();
        format!("{day:02}/{month}/{year:04}:{hour:02}:{minute:02}:{second:02} +0000")
    }

    /// Formats by RFC 3339: `2026-11-16T07:44:08.123Z`.
    pub(crate) fn rfc3339(self) -> impl fmt::Display {
        let (hour, minute, second) = self.hour_minute_second();
        let Self { year, month, day, millis } = self;
        let millis = millis % 1_000;
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> UtcTime {
        UtcTime::new(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(7))
    }

    /// The expected values are those of `date -u -d @SECONDS`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "01/Jan/1970:00:00:00 +0000"),
            (951_782_399, "28/Feb/2000:23:59:59 +0000"),
            (951_782_400, "29/Feb/2000:00:00:00 +0000"),
            (1_709_164_800, "29/Feb/2024:00:00:00 +0000"),
            (1_767_225_599, "31/Dec/2025:23:59:59 +0000"),
            (1_767_225_600, "01/Jan/2026:00:00:00 +0000"),
            (4_107_542_400, "01/Mar/2100:00:00:00 +0000"),
        ] {
            assert_eq!(at(seconds).combined().to_string(), expected);
        }
        assert_eq!(at(1_767_225_599).rfc3339().to_string(), "2025-12-31T23:59:59.007Z");
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for number in 0..100_000_u64 {
            let time = at(number * 86_400);
            assert_eq!((time.year, time.month, time.day), (year, month, day));
            let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + u64::from(is_leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > length {
                (month, day) = (month + 1, 1);
            }
            if month > 12 {
                (year, month) = (year + 1, 1);
            }
        }
    }
}
