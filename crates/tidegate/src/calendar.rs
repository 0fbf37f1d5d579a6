//! [`Calendar`]: the periods of a calendar, such as months, in a time zone.

use std::fmt;

use jiff::ToSpan as _;
use jiff::civil::{Date, date};
use jiff::tz::TimeZone;

use crate::clock::Timestamp;
use crate::enum_names::{UnknownName, enum_names};

/// Unit of a [`Calendar`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CalendarUnit {
    /// From midnight to midnight: 23 or 25 hours when the clocks change.
    Day,
    /// From Monday, or from another weekday.
    Week,
    /// From the first of the month, or from another day.
    Month,
    /// From the first of January, April, July and October, or from another day of these months.
    Quarter,
    /// From the first of January, or from another day of January.
    Year,
}

enum_names!(
    CalendarUnit,
    "calendar",
    Day = "day",
    Week = "week",
    Month = "month",
    Quarter = "quarter",
    Year = "year"
);

/// Periods of a calendar in a time zone: all days, weeks, months, quarters or years.
///
/// A period starts at midnight, or at the first instant of a day that has no midnight because the
/// clocks change. Time zones are those of the IANA database, which is part of the program.
///
/// ```
/// use tidegate::{Calendar, CalendarUnit};
///
/// let calendar = Calendar::new(CalendarUnit::Month, "Europe/Berlin")?.with_anchor("31")?;
/// assert_eq!(calendar.to_string(), "month from day 31, Europe/Berlin");
/// assert!(Calendar::new(CalendarUnit::Month, "Europe/Berlim").is_err());
/// # Ok::<(), tidegate::CalendarError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calendar {
    unit: CalendarUnit,
    zone: TimeZone,
    /// Day of the month from 1 to 31; for weeks, days after Monday.
    anchor: i8,
}

/// The reason why a calendar is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalendarError {
    /// The time zone is not in the database.
    #[error("unknown timezone {0:?}: use a name such as Europe/Berlin, America/New_York or UTC")]
    Timezone(String),
    /// The anchor is not a day of a month.
    #[error("anchor {0:?} of a {1} is not a day of the month: it must be from 1 to 31")]
    Day(String, CalendarUnit),
    /// The anchor is not a weekday.
    #[error("anchor of a week: {0}")]
    Weekday(UnknownName),
    /// Days, and quotas without a calendar, have no anchor.
    #[error("an anchor is the day on which weeks, months, quarters or years start: leave it out")]
    NoAnchor,
}

const WEEKDAYS: [&str; 7] =
    ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];
const EPOCH: Date = date(1970, 1, 1);
/// Days from a Monday to the epoch.
const EPOCH_WEEKDAY: i64 = 3;
const HOUR: u64 = 3_600_000_000;
/// Latest time whose period is computed: the year 9000.
const MAX_TIME: u64 = 221_845_392_000_000_000;

impl Calendar {
    /// Creates the periods of this unit in a time zone, such as `Europe/Berlin`, from the first day
    /// of a month or from Monday.
    pub fn new(unit: CalendarUnit, timezone: &str) -> Result<Self, CalendarError> {
        let zone = TimeZone::get(timezone).ok().filter(|zone| !zone.is_unknown());
        let zone = zone.ok_or_else(|| CalendarError::Timezone(timezone.to_owned()))?;
        Ok(Self { unit, zone, anchor: i8::from(unit != CalendarUnit::Week) })
    }

    /// Sets the day on which periods start: a weekday such as `sunday` for weeks, else a day of the
    /// month from 1 to 31. In a shorter month, it is the last day.
    pub fn with_anchor(self, anchor: &str) -> Result<Self, CalendarError> {
        let day = || CalendarError::Day(anchor.to_owned(), self.unit);
        let weekday = || UnknownName::new("weekday", anchor, &WEEKDAYS);
        let position = match self.unit {
            CalendarUnit::Day => return Err(CalendarError::NoAnchor),
            CalendarUnit::Week => (0..)
                .zip(WEEKDAYS)
                .find_map(|(position, name)| (name == anchor).then_some(position))
                .ok_or_else(|| CalendarError::Weekday(weekday()))?,
            CalendarUnit::Month | CalendarUnit::Quarter | CalendarUnit::Year => {
                let parsed = anchor.parse().ok().filter(|day| (1..=31).contains(day));
                parsed.ok_or_else(day)?
            }
        };
        Ok(Self { anchor: position, ..self })
    }

    /// Returns the unit.
    #[must_use]
    pub fn unit(&self) -> CalendarUnit {
        self.unit
    }

    /// Returns the name of the time zone.
    #[must_use]
    pub fn timezone(&self) -> &str {
        self.zone.iana_name().unwrap_or("UTC")
    }

    /// Returns the day on which periods start, as [`with_anchor`](Self::with_anchor) takes it;
    /// `None` for days.
    #[must_use]
    pub fn anchor(&self) -> Option<String> {
        match self.unit {
            CalendarUnit::Day => None,
            CalendarUnit::Week => {
                usize::try_from(self.anchor).ok().map(|at| WEEKDAYS[at % WEEKDAYS.len()].to_owned())
            }
            _ => Some(self.anchor.to_string()),
        }
    }

    /// Returns the valid anchors of a unit.
    #[must_use]
    pub fn anchors(unit: CalendarUnit) -> Vec<String> {
        match unit {
            CalendarUnit::Day => Vec::new(),
            CalendarUnit::Week => WEEKDAYS.map(str::to_owned).to_vec(),
            _ => (1..=31).map(|day| day.to_string()).collect(),
        }
    }

    /// Returns the start and the end of the period at a time; the end is the start of the next one.
    ///
    /// ```
    /// use tidegate::{Calendar, CalendarUnit, Timestamp};
    ///
    /// let calendar = Calendar::new(CalendarUnit::Month, "UTC")?;
    /// let (start, end) = calendar.period_at(Timestamp::from_micros(1_700_000_000_000_000));
    /// assert_eq!(start.as_micros(), 1_698_796_800_000_000); // 1 November 2023
    /// assert_eq!(end.as_micros(), 1_701_388_800_000_000); // 1 December 2023
    /// # Ok::<(), tidegate::CalendarError>(())
    /// ```
    #[must_use]
    pub fn period_at(&self, time: Timestamp) -> (Timestamp, Timestamp) {
        let (start, end) = self.span_at(time.as_micros());
        (Timestamp::from_micros(start), Timestamp::from_micros(end))
    }

    /// Returns a time as text in the time zone, such as `1 December 2026, 00:00 Europe/Berlin`.
    #[must_use]
    pub fn local_text(&self, time: Timestamp) -> String {
        let local = zoned(time.as_micros(), &self.zone);
        format!("{} {}", local.strftime("%-d %B %Y, %H:%M"), self.timezone())
    }

    /// Returns the start and the end of the period at a time, in microseconds.
    pub(crate) fn span_at(&self, at: u64) -> (u64, u64) {
        let at = at.min(MAX_TIME);
        let mut index = self.index_of(zoned(at, &self.zone).date());
        // The anchor may be later in this month. On a day that the zone skips, two periods start at
        // the same time, and around a clock that goes back over midnight, the date goes back, too.
        while self.start_of(index) > at {
            index -= 1;
        }
        while self.start_of(index + 1) <= at {
            index += 1;
        }
        (self.start_of(index), self.start_of(index + 1))
    }

    /// Returns the boundary that is nearest to a time, with the one before it and the one after it,
    /// in microseconds: a clock that differs by less than half a period is between them.
    #[cfg(feature = "redis")]
    pub(crate) fn boundaries_around(&self, at: u64) -> [u64; 3] {
        let (start, end) = self.span_at(at);
        if start > 0 && at - start < end.saturating_sub(at) {
            [self.span_at(start - 1).0, start, end]
        } else {
            [start, end, self.span_at(end).1]
        }
    }

    /// Returns the longest period without a change of the clocks, in microseconds.
    pub(crate) fn nominal_micros(&self) -> u64 {
        let days = match self.unit {
            CalendarUnit::Day => 1,
            CalendarUnit::Week => 7,
            CalendarUnit::Month => 31,
            CalendarUnit::Quarter => 92,
            CalendarUnit::Year => 366,
        };
        24 * days * HOUR
    }

    /// Returns an upper bound of the length of a period, in microseconds. Clocks are set back by
    /// two hours at most.
    pub(crate) fn max_micros(&self) -> u64 {
        self.nominal_micros() + 2 * HOUR
    }

    /// Returns the number of the period whose unit has this date.
    fn index_of(&self, date: Date) -> i64 {
        let months = (i64::from(date.year()) - 1970) * 12 + i64::from(date.month()) - 1;
        let days = date.duration_since(EPOCH).as_hours() / 24;
        match self.unit {
            CalendarUnit::Day => days,
            CalendarUnit::Week => (days + EPOCH_WEEKDAY - i64::from(self.anchor)).div_euclid(7),
            CalendarUnit::Month => months,
            CalendarUnit::Quarter => months.div_euclid(3),
            CalendarUnit::Year => months.div_euclid(12),
        }
    }

    /// Returns the start of a period in microseconds, or the epoch if it is earlier. It is computed
    /// from the anchor and not from another period, which may have started on an earlier day.
    fn start_of(&self, index: i64) -> u64 {
        let days_later = |days: i64| EPOCH.saturating_add(days.days());
        let day = match self.unit {
            CalendarUnit::Day => days_later(index),
            CalendarUnit::Week => days_later(7 * index + i64::from(self.anchor) - EPOCH_WEEKDAY),
            CalendarUnit::Month => self.day_of_month(index),
            CalendarUnit::Quarter => self.day_of_month(3 * index),
            CalendarUnit::Year => self.day_of_month(12 * index),
        };
        let start = day.to_zoned(self.zone.clone()).map(|start| start.timestamp().as_microsecond());
        u64::try_from(start.unwrap_or(i64::MAX)).unwrap_or(0)
    }

    /// Returns the anchor in a month, which is counted from the epoch.
    fn day_of_month(&self, months: i64) -> Date {
        let first = EPOCH.saturating_add(months.months());
        first.saturating_add(i64::from(self.anchor.min(first.days_in_month()) - 1).days())
    }
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.unit.as_str())?;
        match self.anchor().filter(|anchor| anchor != "1" && anchor != WEEKDAYS[0]) {
            Some(anchor) if self.unit == CalendarUnit::Week => write!(f, " from {anchor}")?,
            Some(anchor) => write!(f, " from day {anchor}")?,
            None => {}
        }
        write!(f, ", {}", self.timezone())
    }
}

/// Returns a time in a time zone.
fn zoned(at: u64, zone: &TimeZone) -> jiff::Zoned {
    let micros = i64::try_from(at.min(MAX_TIME)).unwrap_or_default();
    jiff::Timestamp::from_microsecond(micros).unwrap_or_default().to_zoned(zone.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_calendars_have_specific_errors() {
        let error = |unit, zone, anchor| {
            let calendar = Calendar::new(unit, zone);
            let anchored = calendar.and_then(|calendar| calendar.with_anchor(anchor));
            anchored.expect_err("invalid").to_string()
        };
        let month = CalendarUnit::Month;
        assert!(
            error(month, "Europe/Berlim", "1").starts_with("unknown timezone \"Europe/Berlim\"")
        );
        assert!(error(month, "Etc/Unknown", "1").starts_with("unknown timezone"), "not UTC");
        for anchor in ["0", "32", "-1", "monday", "1.5", ""] {
            assert!(error(month, "UTC", anchor).contains("must be from 1 to 31"), "{anchor}");
        }
        assert!(error(CalendarUnit::Week, "UTC", "1").contains("one of monday, tuesday"));
        assert!(error(CalendarUnit::Day, "UTC", "1").contains("leave it out"));
    }

    #[test]
    fn texts_name_the_anchor_unless_it_is_the_first_day() {
        let text = |unit, anchor: Option<&str>| {
            let calendar = Calendar::new(unit, "Europe/Berlin").expect("a zone");
            let anchored = anchor.map(|anchor| calendar.clone().with_anchor(anchor));
            anchored.unwrap_or(Ok(calendar)).expect("an anchor").to_string()
        };
        assert_eq!(text(CalendarUnit::Day, None), "day, Europe/Berlin");
        assert_eq!(text(CalendarUnit::Week, Some("monday")), "week, Europe/Berlin");
        assert_eq!(text(CalendarUnit::Week, Some("sunday")), "week from sunday, Europe/Berlin");
        assert_eq!(text(CalendarUnit::Quarter, Some("31")), "quarter from day 31, Europe/Berlin");
        let calendar = Calendar::new(CalendarUnit::Month, "Europe/Berlin").expect("a zone");
        let (_, end) = calendar.period_at(Timestamp::from_micros(1_700_000_000_000_000));
        assert_eq!(calendar.local_text(end), "1 December 2023, 00:00 Europe/Berlin");
    }

    #[test]
    fn any_time_has_a_period() {
        for unit in CalendarUnit::ALL {
            let calendar = Calendar::new(unit, "Pacific/Apia").expect("a zone");
            for at in [0, 1, HOUR, 1_700_000_000_000_000, MAX_TIME, u64::MAX] {
                let (start, end) = calendar.span_at(at);
                assert!(start <= at && end > at.min(MAX_TIME), "{unit} {at}");
                assert!(end - start <= calendar.max_micros(), "{unit} {at}");
            }
        }
    }

    /// A clock that is wrong by less than half a period is between the boundaries.
    #[cfg(feature = "redis")]
    #[test]
    fn the_middle_boundary_is_the_nearest() {
        for unit in CalendarUnit::ALL {
            let calendar = Calendar::new(unit, "Europe/Berlin").expect("a zone");
            let (start, end) = calendar.span_at(1_700_000_000_000_000);
            let after = calendar.boundaries_around(start + HOUR);
            assert_eq!(after, [calendar.span_at(start - 1).0, start, end]);
            let before = calendar.boundaries_around(end - 1);
            assert_eq!(before, [start, end, calendar.span_at(end).1]);
            assert_eq!(calendar.boundaries_around(end)[1], end);
        }
    }
}
