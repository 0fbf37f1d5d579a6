//! Texts of the view: hostile characters, widths, numbers and durations.

use std::fmt::Write as _;

use unicode_width::UnicodeWidthChar as _;

/// Escapes characters of a JSON text that serde leaves as they are, but a terminal may obey.
pub(crate) fn printable_json(json: &str) -> String {
    let mut output = String::with_capacity(json.len());
    for character in json.chars() {
        let is_hidden = !character.is_ascii() && character.escape_debug().len() > 1;
        if !is_hidden {
            output.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(output, "\\u{unit:04x}");
        }
    }
    output
}

/// Returns the number of columns of a printable text.
pub(super) fn width(text: &str) -> usize {
    text.chars().map(|character| character.width().unwrap_or(0)).sum()
}

/// Cuts a printable text to this number of columns, with an ellipsis in place of the rest.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (mut used, mut output) = (0, String::new());
    for character in text.chars() {
        used += character.width().unwrap_or(0);
        if used + 1 > columns {
            break;
        }
        output.push(character);
    }
    if columns > 0 {
        output.push('…');
    }
    output
}

/// Formats a number of requests per second in at most five characters.
pub(crate) fn rate(rate: f64) -> String {
    match rate {
        rate if !rate.is_finite() || rate <= 0.0 => "0".to_owned(),
        rate if rate < 9.95 => format!("{rate:.1}"),
        rate if rate < 9_999.5 => format!("{rate:.0}"),
        rate if rate < 999_500.0 => format!("{:.0}k", rate / 1e3),
        rate => format!("{:.1}M", rate / 1e6),
    }
}

/// Formats a latency in milliseconds.
pub(super) fn latency(ms: f64) -> String {
    match ms {
        ms if !ms.is_finite() || ms < 0.0 => "?".to_owned(),
        ms if ms < 0.095 => format!("{:.0} µs", ms * 1e3),
        ms if ms < 9.95 => format!("{ms:.1} ms"),
        ms if ms < 999.5 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

/// Formats a duration by its two largest units, such as `3h 12m`.
pub(crate) fn duration(ms: u64) -> String {
    let seconds = ms / 1_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match () {
        () if seconds == 0 && ms > 0 => format!("{ms}ms"),
        () if minutes == 0 => format!("{seconds}s"),
        () if hours == 0 => format!("{minutes}m {}s", seconds % 60),
        () if days == 0 => format!("{hours}h {}m", minutes % 60),
        () => format!("{days}d {}h", hours % 24),
    }
}

/// Formats the time of day of a Unix time.
pub(super) fn time_of_day(ms: u64) -> String {
    let seconds = ms / 1_000;
    format!("{:02}:{:02}:{:02} UTC", seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_no_character_that_controls_a_terminal() {
        let key = "\x1b[2J\u{9b}1m\u{202e}\u{e0041}Zoë日";
        let json = printable_json(&serde_json::to_string(key).expect("a text"));
        assert_eq!(json, r#""\u001b[2J\u009b1m\u202e\udb40\udc41Zoë日""#);
        assert_eq!(serde_json::from_str::<String>(&json).expect("valid"), key);
    }

    #[test]
    fn texts_are_cut_by_columns() {
        assert_eq!(width("日本x"), 5);
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdef", 5), "abcd…");
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!(cut("abc", 1), "…");
        assert_eq!(cut("abc", 0), "");
    }

    #[test]
    fn numbers_are_short() {
        let rates = [0.0, 0.04, 1.25, 9.96, 999.4, 9_999.0, 12_345.0, 999_600.0, f64::NAN];
        let shown = ["0", "0.0", "1.2", "10", "999", "9999", "12k", "1.0M", "0"];
        assert_eq!(rates.map(rate), shown);
        let latencies = [0.021, 0.21, 9.96, 12.3, 1_234.0, -1.0];
        assert_eq!(latencies.map(latency), ["21 µs", "0.2 ms", "10 ms", "12 ms", "1.2 s", "?"]);
        let durations = [0, 950, 59_999, 61_000, 11_520_000, 100_800_000];
        assert_eq!(durations.map(duration), ["0s", "950ms", "59s", "1m 1s", "3h 12m", "1d 4h"]);
        assert_eq!(time_of_day(1_700_000_000_123), "22:13:20 UTC");
    }
}
