//! Patterns: the matches of a naive model, the same with and without the index.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::{Policies, Policy, Quota, normalize_path};

use crate::fuzz;

/// Patterns, one per line, and the path of a request in the last line.
const SEEDS: [&str; 9] = [
    "/a/*/c\n/a/b/c",
    "/a/**\n/a",
    "/a/**/c\n/a/**/b/**\n/a/b/b/c",
    "**.png\n/**.png\n/a/b.png",
    "/v*/x\n/*\n**\n/v2/x",
    "/**/**/a*b*c**\n/xaabbcc",
    "/%7Euser/*\n/~user/x",
    "/t/*/\n/t//*\n/t/a/",
    "api/*\n/é*\n/é/ü",
];
const PIECES: [&str; 14] =
    ["*", "**", "***", "/", "//", "/a", "/b", "a", "b", "é", "\n", "%7E", ".png", "/**"];

fn policy(name: &str, pattern: &str) -> Option<Policy> {
    let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
    let policy = Policy::builder(name, quota).matches("path", [pattern]).build();
    match policy.and_then(|policy| Ok((Policies::new(vec![policy.clone()])?, policy))) {
        Ok((_, policy)) => Some(policy),
        Err(error) => {
            assert!(error.to_string().contains(&format!("{pattern:?}")), "{error}");
            None
        }
    }
}

fn selected(policies: Vec<Policy>, path: &str) -> Vec<String> {
    let policies = Policies::new(policies).expect("unique names");
    let attributes = BTreeMap::from([("path".to_owned(), path.to_owned())]);
    let selection = policies.select(&attributes, None).expect("a valid path");
    selection.charges.iter().map(|charge| charge.policy().to_owned()).collect()
}

/// The definition: `*` is any text without a slash, `**` any text, `/**` at the end may be absent.
fn matches(pattern: &[u8], path: &[u8]) -> bool {
    match pattern {
        [] => path.is_empty(),
        b"/**" if path.is_empty() => true,
        [b'*', b'*', rest @ ..] => (0..=path.len()).any(|end| matches(rest, &path[end..])),
        [b'*', rest @ ..] => {
            let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
            (0..=end).any(|end| matches(rest, &path[end..]))
        }
        [first, rest @ ..] => {
            path.split_first().is_some_and(|(byte, path)| byte == first && matches(rest, path))
        }
    }
}

/// Whether the model applies: the pattern is normal, and short enough for exponential work.
fn is_simple(pattern: &str) -> bool {
    let is_path = pattern.starts_with('/') || pattern.starts_with("**");
    is_path
        && pattern.len() <= 12
        && pattern.contains('*')
        && pattern.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/*".contains(&byte))
        && !pattern.contains("//")
        && !pattern.contains("***")
        && !pattern.ends_with('/')
}

#[test]
fn fuzz_patterns_match_as_the_model_does() {
    fuzz::texts(&SEEDS, &PIECES, |input| {
        let (patterns, path) = input.rsplit_once('\n').unwrap_or(("", input));
        let path: String =
            path.chars().filter(|it| !it.is_control() && !"\\;%".contains(*it)).take(40).collect();
        let patterns: Vec<&str> = patterns.split('\n').take(5).collect();
        let mut one_by_one = Vec::new();
        let mut policies = Vec::new();
        for (number, pattern) in patterns.iter().enumerate() {
            let Some(policy) = policy(&format!("p{number}"), pattern) else { continue };
            let alone = selected(vec![policy.clone()], &path);
            if is_simple(pattern) {
                let expected = matches(pattern.as_bytes(), normalize_path(&path).as_bytes());
                assert_eq!(!alone.is_empty(), expected, "{pattern:?} and {path:?}");
            }
            one_by_one.extend(alone);
            policies.push(policy);
        }
        assert_eq!(selected(policies, &path), one_by_one, "{patterns:?} and {path:?}");
        // A path matches itself, in any spelling.
        if !path.contains('*') {
            let itself = policy("p", &path).expect("a path");
            assert_eq!(selected(vec![itself.clone()], &path), ["p"], "{path:?}");
            let respelt = format!("/.//{}", path.replace('a', "%61"));
            assert_eq!(selected(vec![itself], &respelt), ["p"], "{path:?}");
        }
    });
}
