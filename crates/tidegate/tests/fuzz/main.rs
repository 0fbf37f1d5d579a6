//! Fuzzing of the library's parsers. `make fuzz` runs it with many cases.

#[path = "../support/fuzz.rs"]
mod fuzz;

mod addresses;
mod config;
mod paths;
mod patterns;
mod requests;
mod values;

/// Returns the keys of a policy for these attributes: the normal form of each value.
fn key_of(source: &str, value: &str) -> Option<String> {
    use std::collections::BTreeMap;
    use std::time::Duration;
    use tidegate::{Policy, Quota};

    let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
    let policy = Policy::builder("p", quota).key([source]).build().expect("a policy");
    let attributes = BTreeMap::from([(source.to_owned(), value.to_owned())]);
    let selection = policy.select(&attributes, None).ok()?;
    selection.charges.first().map(|selected| selected.key().to_owned())
}
