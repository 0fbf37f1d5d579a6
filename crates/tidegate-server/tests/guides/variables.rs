//! The reference of environment variables, compared with those of the real binary.

use std::collections::BTreeSet;
use std::process::Command;

use crate::root;

/// Returns the variables of the flags of a command, as its help shows them.
fn variables_of(command: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args([command, "--help"])
        .output()
        .expect("the binary runs");
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = help.split("[env: ").skip(1);
    found.map(|rest| rest.split(['=', ']']).next().expect("a name").to_owned()).collect()
}

#[test]
fn install_page_has_the_variables_of_the_services() {
    let page = std::fs::read_to_string(root().join("docs/install.md")).expect("a page");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let listed: BTreeSet<&str> = rows.filter_map(|row| row.split('`').next()).collect();
    let known: BTreeSet<String> = ["serve", "gateway"].into_iter().flat_map(variables_of).collect();
    assert!(known.len() >= 10, "{known:?}");
    let missing: Vec<_> = known.iter().filter(|name| !listed.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "not in the table of docs/install.md: {missing:?}");
    // Those without a flag: tokens, the level of the logs, the collector.
    let others = |name: &&&str| name.ends_with("_TOKEN") || **name == "TIDEGATE_LOG";
    let invented: Vec<_> = listed
        .iter()
        .filter(|name| name.starts_with("TIDEGATE_") && !others(name))
        .filter(|name| !known.contains(**name))
        .collect();
    assert!(invented.is_empty(), "only in docs/install.md: {invented:?}");
}
