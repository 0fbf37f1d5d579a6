//! Numbers, names and foreign texts in the output of the tools.

use std::fmt::Write as _;

use clap::ValueEnum;

/// Formats a number with commas between groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a text as a value of a URL's query.
pub fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

/// Returns a number for arithmetic whose result is an estimate, or shown with few digits.
#[expect(clippy::cast_precision_loss, reason = "an estimate, or below 2^53")]
pub fn float(number: u64) -> f64 {
    number as f64
}

/// Returns the whole part of a number from 0 on, or the highest number if it does not fit.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative; a cast saturates"
)]
pub fn whole(number: f64) -> u64 {
    number as u64
}

/// Returns the name of a value, as in the flag that has it.
pub fn flag_name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Formats a number by the largest of these units that fits, with three digits.
pub fn scaled(mut number: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // Half a digit less, so that no number is rounded up to a step.
    while number >= step - 0.5 && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    if unit == 0 && number.fract() == 0.0 {
        return format!("{number}{}", units[0]);
    }
    three_digits(number) + units[unit]
}

/// Formats a number with three digits, but all of those before the point.
pub fn three_digits(number: f64) -> String {
    match number {
        number if number >= 99.95 => format!("{number:.0}"),
        number if number >= 9.995 => format!("{number:.1}"),
        number => format!("{number:.2}"),
    }
}

/// Returns a text with its control characters, and all others that a terminal does not print, as
/// escapes such as `\u{1b}`. Clients choose the keys, and a key must not control the terminal.
pub fn printable(text: &str) -> String {
    let mut output = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\\' | '\'' | '"' => output.push(character),
            _ => output.extend(character.escape_debug()),
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn characters_that_control_a_terminal_become_escapes() {
        for (hostile, harmless) in [
            ("\x1b[2Jann", r"\u{1b}[2Jann"),
            ("a\r\nb\tc\0", r"a\r\nb\tc\0"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("\u{7f}", r"\u{7f}"),
            // Right-to-left override, zero width space, line separator, byte order mark.
            ("\u{202e}\u{200b}\u{2028}\u{feff}", r"\u{202e}\u{200b}\u{2028}\u{feff}"),
            // A combining accent would change the character before it.
            ("e\u{301}", r"e\u{301}"),
            ("\u{e000}\u{e0041}", r"\u{e000}\u{e0041}"),
        ] {
            assert_eq!(printable(hostile), harmless);
        }
        for harmless in ["ann", "10.0.0.1", r#"a "b" 'c' \d"#, "Zoë", "日本", "🦀", "{a}[b]"] {
            assert_eq!(printable(harmless), harmless);
        }
    }
}
