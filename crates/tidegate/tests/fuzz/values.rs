//! Durations, numbers and names of attributes: what is written is what is read.

use std::time::Duration;

use tidegate::{Algorithm, Key, KeySource, MAX_KEY_BYTES};
use tidegate_config::duration;
use tidegate_config::yaml::{Bounded, BoundedDuration, Document, Ratio};

use crate::fuzz;

const UNITS: [(&str, u128); 6] = [
    ("us", 1),
    ("ms", 1_000),
    ("s", 1_000_000),
    ("m", 60_000_000),
    ("h", 3_600_000_000),
    ("d", 86_400_000_000),
];

/// The naive model: a sum of numbers with units, with spaces only between them.
fn model(text: &str) -> Option<u128> {
    let mut sum = 0_u128;
    let mut rest = text.trim();
    let mut is_empty = true;
    while !rest.is_empty() {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        rest = &rest[digits.len()..];
        let unit: String = rest.chars().take_while(char::is_ascii_alphabetic).collect();
        rest = rest[unit.len()..].trim_start();
        let (_, size) = UNITS.iter().find(|(name, _)| *name == unit)?;
        let number: u64 = digits.parse().ok()?;
        sum += u128::from(number) * size;
        is_empty = false;
    }
    (!is_empty && sum <= u128::from(u64::MAX)).then_some(sum)
}

#[test]
fn fuzz_durations_are_those_of_the_model() {
    const SEEDS: [&str; 9] = [
        "500ms",
        " 1m 5s ",
        "1h30m",
        "30d",
        "0s",
        "60",
        "99999999999999d",
        "18446744073709551615us",
        "1s1s1s",
    ];
    const PIECES: [&str; 16] =
        ["1", "0", "9", "59", "us", "ms", "s", "m", "h", "d", " ", "-", ".", "é", "1d", "\u{2003}"];
    fuzz::texts(&SEEDS, &PIECES, |text| {
        let parsed = duration::parse(text);
        assert_eq!(parsed.as_ref().ok().map(Duration::as_micros), model(text), "{text:?}");
        let Ok(parsed) = parsed else { return };
        // Rounded up, to a text that is read as itself.
        let readable = duration::readable(parsed);
        let rounded = duration::parse(&readable);
        if parsed.as_micros() < u128::from(u64::MAX) / 2 {
            let rounded = rounded.expect("a duration");
            assert!(rounded >= parsed, "{readable} is less than {text:?}");
            assert!(rounded.as_micros() <= parsed.as_micros() * 25 / 24 + 1, "{readable} {text:?}");
            assert_eq!(duration::readable(rounded), readable);
        }
    });
}

#[test]
fn fuzz_numbers_are_within_their_bounds() {
    const SEEDS: [&str; 12] = [
        "42",
        "1e3",
        "0x10",
        "007",
        "1_000",
        "-0",
        ".5",
        "1.0",
        "\"5\"",
        "18446744073709551616",
        ".nan",
        "-.inf",
    ];
    const PIECES: [&str; 17] = [
        "0", "1", "9", ".", "e", "E+", "-", "+", "_", "x", "o", "\"", " ", "nan", "inf", "~", "99",
    ];
    fuzz::texts(&SEEDS, &PIECES, |text| {
        if let Ok(number) = Document::new("n", text).parse::<Bounded<3, 1_000>>() {
            assert!((3..=1_000).contains(&number.get()), "{text:?}");
        }
        let is_plain = !text.is_empty()
            && text.bytes().all(|byte| byte.is_ascii_digit())
            && (!text.starts_with('0') || text == "0");
        let plain = text.parse::<u64>().ok().filter(|_| is_plain && text.len() < 19);
        if let Some(plain) = plain {
            let number = Document::new("n", text).parse::<Bounded<0, { u64::MAX }>>();
            assert_eq!(number.expect("a number").get(), plain);
        }
        if let Ok(ratio) = Document::new("n", text).parse::<Ratio>() {
            assert!((0.0..=1.0).contains(&ratio.get()), "{text:?}");
        }
        if let Ok(duration) = Document::new("n", text).parse::<BoundedDuration<1_000, 60_000_000>>()
        {
            assert!((1_000..=60_000_000).contains(&duration.get().as_micros()), "{text:?}");
        }
    });
}

#[test]
fn fuzz_names_of_attributes_are_read_as_they_are_written() {
    const SEEDS: [&str; 9] = [
        "ip",
        "header.X-User-Id",
        "query.a.b",
        "cookie.SID",
        "descriptor.k",
        "heder.x",
        "domain",
        "tenant",
        "header.é",
    ];
    const PIECES: [&str; 16] = [
        "header",
        "query",
        "cookie",
        ".",
        "x",
        "X",
        "-",
        "_",
        " ",
        "é",
        "\u{2003}",
        "ip",
        "path",
        "\0",
        "host",
        "descriptor.",
    ];
    fuzz::texts(&SEEDS, &PIECES, |name| {
        match name.parse::<KeySource>() {
            Ok(source) => {
                assert_eq!(source.to_string().parse(), Ok(source.clone()));
                assert!(source.as_str().eq_ignore_ascii_case(name));
            }
            // The error shows the start of the name.
            Err(error) => assert!(error.to_string().len() < 1_000, "{}", error.to_string().len()),
        }
        if let Ok(custom) = KeySource::custom(name) {
            assert!(name.parse::<KeySource>().is_err() && custom.as_str() == name);
        }
        if let Ok(algorithm) = name.parse::<Algorithm>() {
            assert_eq!(algorithm.as_str(), name);
        }
        let is_key = (1..=MAX_KEY_BYTES).contains(&name.len()) && !name.contains(char::is_control);
        assert_eq!(Key::new(name).is_ok(), is_key, "{name:?}");
    });
}
