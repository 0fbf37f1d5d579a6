//! Parsers of the numbers, sizes and shares of a plan.

use crate::tool::text::whole;

/// Parses a whole number such as `1_000_000`, `150k`, `1.5M` or `1B`.
pub(super) fn count(text: &str) -> Result<u64, String> {
    let number = scaled(text, &AMOUNTS).filter(|number| number.fract() == 0.0);
    number
        .map(whole)
        .ok_or_else(|| format!("{text:?} is not a whole number like 5000, 150k, 20M or 1B"))
}

/// Parses a number of requests per second such as `0.5`, `5000` or `150k`.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    scaled(text, &AMOUNTS)
        .filter(|rate| *rate > 0.0)
        .ok_or_else(|| format!("{text:?} is not a number above 0 like 0.5, 5000, 150k or 2M"))
}

/// Parses a size such as `16GiB` or `500MB`.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    scaled(text, &SIZES)
        .map(whole)
        .filter(|size| *size >= 1 << 20)
        .ok_or_else(|| format!("{text:?} is not a size like 16GiB or 500MB, of at least 1 MiB"))
}

const AMOUNTS: [(&str, f64); 6] =
    [("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("B", 1e9), ("T", 1e12)];
const SIZES: [(&str, f64); 9] = [
    ("KiB", 1_024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];
const MAX_NUMBER: f64 = 1e15;

/// Parses a number with one of these units, up to [`MAX_NUMBER`].
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let with_unit = |(unit, factor): &(&str, f64)| Some((text.strip_suffix(unit)?, *factor));
    let (number, factor) = units.iter().find_map(with_unit).unwrap_or((text, 1.0));
    let number = number.trim_end().replace('_', "");
    // Neither signs, nor names such as "inf".
    let is_plain = number.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    let value = number.parse::<f64>().ok().filter(|_| is_plain)? * factor;
    (value <= MAX_NUMBER).then_some(value)
}

/// Parses a share such as `5%` or `0.05`.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let number = match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    number
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| format!("{text:?} is not a share from 0% to 100%, like 5% or 0.05"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_rates_sizes_and_shares_are_parsed() {
        for (text, expected) in [
            ("5000", Some(5_000)),
            ("1_000_000", Some(1_000_000)),
            ("150k", Some(150_000)),
            ("1.5M", Some(1_500_000)),
            ("1B", Some(1_000_000_000)),
            ("1e9", Some(1_000_000_000)),
            ("1000T", Some(1_000_000_000_000_000)),
            ("1001T", None),
            ("1.5", None),
            ("-1", None),
            ("+1", None),
            ("k", None),
            ("1e30", None),
            ("1e999", None),
            ("NaN", None),
            ("inf", None),
            ("", None),
        ] {
            assert_eq!(count(text).ok(), expected, "{text}");
        }
        assert_eq!((rate("0.5"), rate("2.5k")), (Ok(0.5), Ok(2_500.0)));
        assert!(rate("0").is_err() && rate("-1").is_err() && rate("many").is_err());
        assert_eq!(bytes("16GiB"), Ok(16 << 30));
        assert_eq!(bytes("500 MB"), Ok(500_000_000));
        assert!(bytes("1KiB").is_err() && bytes("GiB").is_err());
        assert_eq!(share("5%"), Ok(0.05));
        assert_eq!(share("0.5"), Ok(0.5));
        assert!(share("101%").is_err() && share("-0.1").is_err() && share("x").is_err());
        assert!(share("NaN").is_err());
    }
}
