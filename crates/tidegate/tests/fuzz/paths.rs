//! Paths: one normal form, which is the one of a naive model, at a linear cost.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use tidegate::PathSpelling::{Decode, Keep, Reject};
use tidegate::{PathError, PathRules, PathSpelling, Policies, Policy, Quota, normalize_path};

use crate::fuzz;

const SEEDS: [&str; 14] = [
    "/",
    "",
    "/api/v1/users/7?page=2#top",
    "/a/./b/../c//d/",
    "/%2e%2E/%2f%5C\\a;b=c/..;/d",
    "/api/items/%%32e%%32e/7",
    "/caf%c3%A9/é/%zz%4",
    "//host/a/..//../.",
    "/.;x/..;y/%2e;z/a",
    "/a%2f..%2fb/%2e%2e%2fc",
    "/.hidden/..hidden/.../a.",
    "*",
    "a/b;/c",
    "/%25%32%35;%3b%3B",
];
const PIECES: [&str; 32] = [
    "/", "//", ".", "..", "/.", "/..", "/../", "%2e", "%2E", "%2f", "%2F", "%5c", "\\", ";", "%3b",
    "%", "%2", "%25", "a", "B", "é", "%C3%A9", "?", "#", "~", "%7E", "*", " ", ":", "%3A", "%2a",
    "%0A",
];

struct Combination {
    rules: PathRules,
    encoded_slashes: PathSpelling,
    parameters: PathSpelling,
    merge_slashes: bool,
    case_insensitive: bool,
    policies: Policies,
}

/// Returns every combination of rules, each with a policy that counts by the path.
fn all_rules() -> Vec<Combination> {
    let mut all = Vec::new();
    for encoded_slashes in [Reject, Decode, Keep] {
        for parameters in [Reject, Decode, Keep] {
            for (merge_slashes, case_insensitive) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let rules = PathRules::default()
                    .with_encoded_slashes(encoded_slashes)
                    .with_parameters(parameters)
                    .with_merge_slashes(merge_slashes)
                    .with_case_insensitive(case_insensitive);
                let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
                let policy = Policy::builder("p", quota).key(["path"]).build().expect("a policy");
                let policies = Policies::new(vec![policy]).expect("unique");
                let policies = policies.with_path_rules(rules).expect("no patterns");
                all.push(Combination {
                    rules,
                    encoded_slashes,
                    parameters,
                    merge_slashes,
                    case_insensitive,
                    policies,
                });
            }
        }
    }
    all
}

impl Combination {
    /// Returns the path that the policy counts by; `None` if it is too long or has a control
    /// character.
    fn counted(&self, path: &str) -> Option<String> {
        let attributes = BTreeMap::from([("path".to_owned(), path.to_owned())]);
        let selection = self.policies.select(&attributes, None).ok()?;
        selection.charges.first().expect("one policy").key().map(str::to_owned)
    }

    /// The naive model: characters, then segments, then a stack.
    fn model(&self, path: &str) -> Result<String, PathError> {
        let end = path.find(['?', '#']).unwrap_or(path.len());
        let characters: Vec<char> = path[..end].chars().collect();
        if path[..end].len() > 16 * 1024 {
            return Err(PathError::TooLong(16 * 1024));
        }
        let mut segments = vec![String::new()];
        let mut at = 0;
        while let Some(&character) = characters.get(at) {
            let digits: Option<String> =
                characters.get(at + 1..at + 3).map(|digits| digits.iter().collect());
            let digits = digits.filter(|digits| digits.chars().all(|it| it.is_ascii_hexdigit()));
            let code = digits.filter(|_| character == '%');
            let byte = code.as_ref().and_then(|code| u8::from_str_radix(code, 16).ok());
            at += if code.is_some() { 3 } else { 1 };
            let segment = segments.last_mut().expect("at least one");
            match byte {
                None if character == '/' => segments.push(String::new()),
                Some(byte) if byte.is_ascii_control() => return Err(PathError::ControlCharacter),
                None if character == '\\' && self.encoded_slashes == Keep => segment.push('\\'),
                None if character == '%' => segment.push_str("%25"),
                None if character != '\\' => segment.push(character),
                Some(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => {
                    segment.push(char::from(byte));
                }
                Some(byte) if b"/\\".contains(&byte) && self.encoded_slashes == Keep => {
                    let _ = write!(segment, "%{byte:02X}");
                }
                Some(byte) if !b"/\\".contains(&byte) => {
                    let _ = write!(segment, "%{byte:02X}");
                }
                _ if self.encoded_slashes == Reject => return Err(PathError::EncodedSlash),
                _ => segments.push(String::new()),
            }
        }
        // The first slash is that of the root, however it is written.
        if segments.len() > 1 && segments[0].is_empty() {
            segments.remove(0);
        }
        let mut stack: Vec<String> = Vec::new();
        let last = segments.len() - 1;
        for (position, mut segment) in segments.into_iter().enumerate() {
            if segment.contains(';') && self.parameters == Reject {
                return Err(PathError::Parameter);
            }
            if self.parameters == Decode {
                segment.truncate(segment.find(';').unwrap_or(segment.len()));
            }
            let is_last = position == last;
            match segment.as_str() {
                "." if is_last => stack.push(String::new()),
                "." => {}
                ".." => {
                    stack.pop();
                    stack.extend(is_last.then(String::new));
                }
                "" if self.merge_slashes && !is_last => {}
                _ => stack.push(segment),
            }
        }
        Ok(stack.iter().flat_map(|segment| ["/", segment]).collect())
    }
}

/// Returns all rules for a short path, and a few for a long one, which takes time.
fn some<'a>(all: &'a [Combination], path: &str) -> impl Iterator<Item = &'a Combination> {
    all.iter().step_by(if path.len() < 256 { 1 } else { 7 })
}

#[test]
fn fuzz_paths_have_the_normal_form_of_the_model() {
    let all = all_rules();
    fuzz::texts(&SEEDS, &PIECES, |path| {
        for rules in some(&all, path) {
            let normal = rules.rules.normalize(path).map(Cow::into_owned);
            assert_eq!(normal, rules.model(path), "of {path:?}");
            let Ok(normal) = normal else {
                assert_eq!(rules.counted(path), None);
                continue;
            };
            // The forwarded path is the matched one, and stays so at the next proxy.
            assert_eq!(rules.rules.normalize(&normal), Ok(Cow::Borrowed(&*normal)), "{path:?}");
            assert_eq!(rules.counted(path), rules.counted(&normal), "{path:?}");
            // Applications decode a colon.
            let respelt = normal.replace(':', "%3A");
            assert_eq!(rules.counted(path), rules.counted(&respelt), "{path:?}");
            assert!(normal.starts_with('/') && !normal.contains(['?', '#']), "{normal:?}");
            assert!(!normal.split('/').any(|segment| [".", ".."].contains(&segment)));
            assert!(!(rules.merge_slashes && normal.contains("//")), "{normal:?}");
            if rules.case_insensitive {
                assert_eq!(rules.counted(path), rules.counted(&path.to_ascii_lowercase()));
            }
        }
        let normal = normalize_path(path);
        assert_eq!(normalize_path(&normal), normal, "{path:?}");
    });
}

/// Memory is a measure of work that does not depend on the machine.
#[test]
fn fuzz_paths_take_linear_memory() {
    let all = all_rules();
    fuzz::texts(&SEEDS, &PIECES, |path| {
        for rules in some(&all, path) {
            let used = allocation_counter::measure(|| drop(rules.rules.normalize(path)));
            // A decoded path is at most three times as long, and a buffer grows by doubling.
            assert!(used.bytes_total <= 16 * path.len() as u64 + 64, "{used:?}: {path:?}");
        }
    });
}
