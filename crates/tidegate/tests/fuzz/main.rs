//! Fuzzing of the library's parsers. `make fuzz` runs it with many cases.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::{Policy, Quota};

#[path = "../support/fuzz.rs"]
mod fuzz;

mod addresses;
mod config;
mod paths;
mod patterns;
mod requests;
mod values;

/// Returns the key of a policy that counts by this attribute: the normal form of the value.
fn key_of(source: &str, value: &str) -> Option<String> {
    let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
    let policy = Policy::builder("p", quota).key([source]).build().expect("a policy");
    let attributes = BTreeMap::from([(source.to_owned(), value.to_owned())]);
    let selection = policy.select(&attributes, None).ok()?;
    selection.charges.first().and_then(|charge| charge.key().map(str::to_owned))
}

/// A fuzzer that cannot fail finds nothing.
#[test]
fn fuzz_failures_are_shrunk_and_printed() {
    let property = |input: &[u8]| assert!(!input.contains(&b'X'), "an X");
    let failed = std::panic::catch_unwind(|| fuzz::bytes(&["abcXdef"], &["a"], property));
    let panic = failed.expect_err("it fails");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains("fails: an X") && text.ends_with("b\"X\""), "{text}");
}
