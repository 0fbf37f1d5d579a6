//! `tidegate config check` and `config schema`: JSON output and help.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

fn tidegate(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .output()
        .expect("the binary runs");
    (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"))
}

fn check(file: &Path, text: &str) -> (Option<i32>, Value) {
    std::fs::write(file, text).expect("written");
    let (code, response) = tidegate(&["config", "check", "--json", file.to_str().expect("UTF-8")]);
    (code, serde_json::from_str(&response).unwrap_or_else(|error| panic!("{error}: {response}")))
}

#[test]
fn check_prints_json() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let good = json!({"file": file, "good": true, "policies": 1, "envoy_rules": 0});
    assert_eq!(check(&file, "policies:\n  - {name: a, limit: 1, window: 1s}\n"), (Some(0), good));
    let (code, wrong) = check(&file, "policies:\n  - {name: a, limit: 0, window: 1s}\n");
    let message = "limit: must be a whole number from 1 to 1000000000000";
    let expected =
        json!({"file": file, "good": false, "line": 2, "column": 22, "message": message});
    assert_eq!((code, wrong), (Some(2), expected));
    let (code, unknown) =
        check(&file, "policies:\n  - {name: a, limit: 1, window: 1s, key: [ip, heder.x]}\n");
    assert_eq!((code, &unknown["line"], &unknown["column"]), (Some(2), &json!(2), &json!(47)));
    let message = unknown["message"].as_str().expect("a message");
    assert!(message.starts_with("key: unknown attribute \"heder.x\""), "{message}");
    assert!(message.ends_with("(did you mean `header.x`?)"), "{message}");
    let (code, empty) = check(&file, "");
    assert_eq!((code, &empty["good"], &empty["line"]), (Some(2), &json!(false), &Value::Null));
}

#[test]
fn help_of_each_subcommand_has_an_example() {
    for command in ["check", "schema", "sample"] {
        let (code, help) = tidegate(&["config", command, "--help"]);
        assert_eq!(code, Some(0));
        assert!(help.contains(&format!("Examples:\n  tidegate config {command}")), "{help}");
    }
}
