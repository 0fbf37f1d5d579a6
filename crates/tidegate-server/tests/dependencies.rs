//! Checks that all dependencies have permissive licences, come from the registry, and need only a C
//! compiler.

use std::process::Command;

use serde_json::Value;

#[test]
fn dependencies_are_permissive_and_build_without_cmake() {
    let deny = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deny.toml"))
        .expect("deny.toml");
    let list = |start: &str| {
        deny.split_once(start).and_then(|(_, rest)| rest.split_once(']')).expect("a list").0
    };
    let allowed: Vec<&str> =
        list("allow = [").split(',').map(|name| name.trim().trim_matches('"')).collect();
    assert!(allowed.contains(&"MIT"));
    let denied: Vec<&str> = list("deny = [")
        .split("crate = \"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    assert!(denied.contains(&"aws-lc-sys"));

    let arguments = ["metadata", "--format-version", "1", "--locked", "--all-features"];
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    let output = output.expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 50);
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let licence = package["license"].as_str().unwrap_or("none");
        let permissive = |part: &str| allowed.contains(&part.trim_matches(['(', ')', ' ']));
        let every = licence
            .split(" AND ")
            .all(|choice| choice.replace('/', " OR ").split(" OR ").any(permissive));
        assert!(every, "{name} is under {licence}");
        assert!(!denied.contains(&name), "{name} is banned by deny.toml");
        let source = package["source"].as_str().unwrap_or("registry+");
        assert!(source.starts_with("registry+"), "{name} comes from {source}");
    }
}
