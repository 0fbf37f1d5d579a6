//! Fuzzing of rules: errors have a line, and the rule of a descriptor is that of a naive search.

use super::*;
use crate::fuzz::{self, Random};

const FILES: [&str; 8] = [
    SAMPLE,
    concat!(
        "domain: d\ndescriptors:\n  - key: a\n    value: b*\n    share_threshold: true\n",
        "    rate_limit: {unit: minute, requests_per_unit: 5}\n",
    ),
    "domain: d\ndescriptors: [{key: a, rate_limit: {unlimited: true}}, {key: a, value: b}]\n",
    concat!(
        "domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: hour\n",
        "    unit_multiplier: 3\n    requests_per_unit: 0\n    name: x\n",
        "    replaces: [{name: y}]\n",
    ),
    concat!(
        "domain: d\ndescriptors:\n",
        "- {key: a, shadow_mode: yes, quota_mode: true, detailed_metric: true, ",
        "metadata: {x: [1, 2.5, ~]}}\n",
    ),
    concat!(
        "x: &l {unit: day, requests_per_unit: 010}\ndomain: d\n",
        "descriptors: [{key: a, rate_limit: *l}]\n---\nb",
    ),
    "domain: \"d\ndescriptors:\n",
    "domain: d\ndescriptors: {key: a}\n",
];
const PIECES: [&str; 32] = [
    "domain: d\n",
    "descriptors:\n",
    "\n  ",
    "\n    ",
    "- ",
    "key: a\n",
    "value: b\n",
    "value: \"*\"\n",
    "rate_limit:",
    "{unit: minute, requests_per_unit: 5}\n",
    "unlimited: true",
    "name: x",
    "replaces: ",
    "{",
    "}",
    "[",
    "]",
    ",",
    ": ",
    "\"",
    "'",
    "#",
    "\t",
    "&l ",
    "*l",
    "~",
    "-1",
    "4294967296",
    "1e3",
    "!!str ",
    "---\n",
    "\u{a0}",
];

#[test]
fn fuzz_rls_rules_have_errors_with_a_line_of_the_file() {
    let generate = |random: &mut Random| {
        let mut text = random.pick(&FILES).as_bytes().to_vec();
        random.mutate(&mut text, &PIECES, &FILES);
        text
    };
    fuzz::run(&FILES, 10, generate, |text| {
        let text = String::from_utf8_lossy(text);
        let shown: Vec<String> = match load(&text) {
            Ok(rules) => {
                for rule in rules.rules() {
                    assert!(Key::new(&rule.path).is_ok(), "{:?} is a policy name", rule.path);
                }
                rules.warnings().iter().map(ToString::to_string).collect()
            }
            Err(error) => vec![error.to_string()],
        };
        let lines = text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count();
        for shown in shown {
            assert!(shown.len() < 8_192, "{} bytes", shown.len());
            let place = shown.strip_prefix("rules.yaml:").unwrap_or_else(|| panic!("{shown}"));
            let line = place.split([':', ' ']).next().and_then(|line| line.parse::<usize>().ok());
            assert!(
                line.is_none_or(|line| (1..=lines + 1).contains(&line)),
                "{shown}: {lines} lines"
            );
        }
    });
}

/// The definition of a wildcard: `*` is any text.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|end| matches(rest, &text[end..])),
        [first, rest @ ..] => text.strip_prefix(&[*first]).is_some_and(|text| matches(rest, text)),
    }
}

#[test]
fn fuzz_rls_wildcards_match_as_the_model_does() {
    const SEEDS: [&str; 5] = ["a_b*\na_bc", "a_*b*c\na_bbcc", "*\n", "a*a\na", "a**b\naxb"];
    const PARTS: [&str; 7] = ["*", "**", "a", "b", "_", "é", "\n"];
    fuzz::texts(&SEEDS, &PARTS, |input| {
        let (pattern, text) = input.split_once('\n').unwrap_or((input, ""));
        if pattern.matches('*').count() > 6 || text.len() > 60 {
            return;
        }
        let expected = matches(pattern.as_bytes(), text.as_bytes());
        let found = Wildcard::new(pattern).map(|wildcard| wildcard.matches(text));
        assert_eq!(found, pattern.contains('*').then_some(expected), "{pattern:?} {text:?}");
    });
}

#[test]
fn fuzz_rls_counters_of_different_descriptors_differ() {
    const SEEDS: [&str; 4] = ["a=b|c=d", "a|b=", "%7C=%", "\u{85}=x"];
    const PARTS: [&str; 8] = ["a", "b", "|", "=", "%", "%7C", "%3D", "é"];
    // The text is split in two ways: two descriptors of the same characters.
    fuzz::texts(&SEEDS, &PARTS, |text| {
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).take(12).collect();
        let mut keys = std::collections::HashSet::new();
        for at in &cuts {
            let (key, value) = text.split_at(*at);
            let name = counter_key("d", [(key, value)]);
            assert!(Key::new(&name).is_ok(), "{name:?}");
            assert!(keys.insert(name), "{key:?} and {value:?}");
            assert!(keys.insert(counter_key("d", [(key, ""), (value, "")])));
        }
    });
}
