//! The exact log: the units that were admitted to a client in the last window, by their times.

use std::time::Duration;

/// Part of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) units: u64,
    pub(crate) limit: u64,
}

impl Part {
    pub(crate) const NONE: Self = Self { units: 0, limit: 1 };

    pub(crate) fn max(self, other: Self) -> Self {
        let is_larger = other.units * self.limit > self.units * other.limit;
        if is_larger { other } else { self }
    }

    /// Returns the part in percent, with a decimal place if it needs one.
    pub(crate) fn percent(self) -> String {
        let tenths = (self.units * 1_000 + self.limit / 2) / self.limit;
        let decimal =
            if tenths.is_multiple_of(10) { String::new() } else { format!(".{}", tenths % 10) };
        format!("{}{decimal} %", tenths / 10)
    }
}

/// Over- and under-admission of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) requests: u64,
    /// Most units that were admitted in any window, and the limit at that time.
    pub(crate) worst_window: Part,
    /// Most units beyond the limit in any window.
    pub(crate) over: Part,
    /// Most units that were free in a window when a request was denied.
    pub(crate) under: Part,
    /// Admitted requests for which the exact log had no room.
    pub(crate) wrongly_admitted: u64,
    /// Denied requests for which the exact log had room.
    pub(crate) wrongly_denied: u64,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            requests: 0,
            worst_window: Part::NONE,
            over: Part::NONE,
            under: Part::NONE,
            wrongly_admitted: 0,
            wrongly_denied: 0,
        }
    }
}

impl Figures {
    /// Counts a decision: `units` were in the window, without this request.
    pub(crate) fn record(&mut self, units: u64, limit: u64, is_allowed: bool) {
        self.requests += 1;
        let has_room = units < limit;
        if !is_allowed {
            self.wrongly_denied += u64::from(has_room);
            self.under = self.under.max(Part { units: limit.saturating_sub(units), limit });
            return;
        }
        self.wrongly_admitted += u64::from(!has_room);
        self.worst_window = self.worst_window.max(Part { units: units + 1, limit });
        self.over = self.over.max(Part { units: (units + 1).saturating_sub(limit), limit });
    }

    /// Adds the figures of another client.
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.worst_window = self.worst_window.max(other.worst_window);
        self.over = self.over.max(other.over);
        self.under = self.under.max(other.under);
        self.wrongly_admitted += other.wrongly_admitted;
        self.wrongly_denied += other.wrongly_denied;
    }
}

/// Exact log of one client.
#[derive(Debug, Default)]
pub(crate) struct ExactLog {
    /// Times of admitted requests, in their order.
    admissions: Vec<u64>,
}

impl ExactLog {
    /// Returns the units in (now − window, now].
    pub(crate) fn units(&self, now: u64, window: Duration) -> u64 {
        let start = now.saturating_sub(u64::try_from(window.as_micros()).expect("short"));
        let outside = self.admissions.partition_point(|time| *time <= start);
        (self.admissions.len() - outside) as u64
    }

    pub(crate) fn admit(&mut self, now: u64) {
        self.admissions.push(now);
    }
}

/// Decision in real time: made at some moment from `sent` to `responded`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observed {
    /// Microseconds.
    pub(crate) sent: u64,
    pub(crate) responded: u64,
    pub(crate) is_allowed: bool,
}

/// Returns the figures of a client in real time. Only what is certain is counted: an admission is
/// inside a window if both of its times are, and a denial was wrong if there was room even when
/// every admission that may have been inside its window is counted.
pub(crate) fn observed_figures(decisions: &[Observed], limit: u64, window: u64) -> Figures {
    let admitted: Vec<Observed> =
        decisions.iter().copied().filter(|decision| decision.is_allowed).collect();
    let mut figures = Figures::default();
    for decision in decisions {
        let Observed { sent, responded, is_allowed } = *decision;
        let units = if is_allowed {
            // The window ends with this response.
            let is_inside =
                |other: &&Observed| other.sent + window > responded && other.responded <= responded;
            admitted.iter().filter(is_inside).count().saturating_sub(1)
        } else {
            let may_be_inside =
                |other: &&Observed| other.responded + window > sent && other.sent <= responded;
            admitted.iter().filter(may_be_inside).count()
        };
        figures.record(units as u64, limit, is_allowed);
    }
    figures
}

#[test]
fn exact_log_is_open_at_its_start() {
    let mut log = ExactLog::default();
    for time in [100, 100, 150] {
        log.admit(time);
    }
    let units = |now| log.units(now, Duration::from_micros(100));
    assert_eq!([units(199), units(200), units(249), units(250)], [3, 1, 1, 0]);
}

#[test]
fn figures_are_in_percent_of_the_limit() {
    let mut figures = Figures::default();
    figures.record(99, 100, true);
    assert_eq!(figures.over.percent(), "0 %");
    figures.record(100, 100, true);
    assert_eq!((figures.over.percent(), figures.wrongly_admitted), ("1 %".to_owned(), 1));
    figures.record(100, 100, false);
    assert_eq!((figures.under.percent(), figures.wrongly_denied), ("0 %".to_owned(), 0));
    figures.record(17, 30, false);
    assert_eq!((figures.under.percent(), figures.wrongly_denied), ("43.3 %".to_owned(), 1));
    assert_eq!((figures.worst_window.units, figures.requests), (101, 4));
}

#[test]
fn in_real_time_only_certain_errors_are_counted() {
    let observed = |sent, responded, is_allowed| Observed { sent, responded, is_allowed };
    // The first may have been decided at 5, so that it has left the window of the last.
    let possible = [observed(5, 20, true), observed(30, 31, true), observed(104, 106, true)];
    assert_eq!(observed_figures(&possible, 2, 100).over.units, 0);
    let certain = [observed(7, 20, true), observed(30, 31, true), observed(104, 106, true)];
    assert_eq!(observed_figures(&certain, 2, 100).over.units, 1);
    // A denial is certainly wrong only after the first has left the window for sure.
    let denied = |at| [observed(5, 20, true), observed(at, at + 2, false)];
    assert_eq!(observed_figures(&denied(119), 1, 100).wrongly_denied, 0);
    assert_eq!(observed_figures(&denied(120), 1, 100).wrongly_denied, 1);
}
