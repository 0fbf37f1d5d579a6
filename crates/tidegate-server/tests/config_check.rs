//! `tidegate config check` and `config schema`: JSON output and help.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
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
    let good = json!({"file": file, "good": true, "policies": 1, "envoy_rules": 0, "warnings": []});
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
fn settings_without_effect_are_errors() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(folder.path().join("password"), "secret\n").expect("written");
    for (text, column, message) in [
        (
            "store: {password_file: password}\n",
            24,
            "store.password_file is set, but store has no redis and no sentinel",
        ),
        (
            "store: {redis: 'redis://h', heartbeat: off, instances: 2}\n",
            40,
            "store.heartbeat: off is for a single instance, and store.instances is 2",
        ),
        ("store: {heartbeat: never}\n", 20, "store.heartbeat must be on or off"),
        ("store: {clock: local}\n", 16, "store.clock must be server or estimated"),
        ("envoy: {files: ['']}\n", 17, "envoy.files: this entry is empty"),
        ("envoy: {files: [' ']}\n", 17, "envoy.files: this entry is empty"),
    ] {
        let (code, found) = check(&file, text);
        assert_eq!((code, &found["line"], &found["column"]), (Some(2), &json!(1), &json!(column)));
        let found = found["message"].as_str().expect("a message");
        assert!(found.contains(message), "{text}: {found}");
    }
}

/// Rules that envoyproxy/ratelimit loads, but not as they are written.
const DOUBTFUL_RULES: &str = "\
domain: d
descriptors:
- key: k
  name: by-k
  rate_limit:
    unit: day
    shadow_mode: true
---
domain: e
";

#[test]
fn check_prints_warnings_with_their_lines() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::create_dir(folder.path().join("limits")).expect("a directory");
    let rules = folder.path().join("limits/d.yaml");
    std::fs::write(&rules, DOUBTFUL_RULES).expect("written");
    std::fs::write(folder.path().join("limits/notes.txt"), "").expect("written");
    let file = folder.path().join("tidegate.yaml");
    let (code, checked) = check(&file, "envoy: {files: [limits]}\n");
    assert_eq!(
        (code, &checked["good"], &checked["envoy_rules"]),
        (Some(0), &json!(true), &json!(1))
    );
    let lines: Vec<(bool, Option<u64>, &str)> = checked["warnings"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|warning| {
            let message = warning["message"].as_str().expect("a message");
            (warning["file"] == json!(rules), warning["line"].as_u64(), message)
        })
        .collect();
    let mut found = lines.iter().map(|(of_rules, line, message)| (*of_rules, *line, *message));
    for (of_rules, line, start) in [
        (false, None, "is not loaded: of a folder, only names"),
        (true, Some(9), "this document is not loaded"),
        (true, Some(4), "name has no effect here"),
        (true, Some(7), "shadow_mode has no effect here"),
        (true, Some(6), "rate_limit.requests_per_unit is missing and counts as 0"),
    ] {
        let matches = |found: (bool, Option<u64>, &str)| {
            found.0 == of_rules && found.1 == line && found.2.starts_with(start)
        };
        assert!(found.clone().any(matches), "{start}: {checked:#}");
    }
    assert_eq!(found.by_ref().count(), 5, "{checked:#}");
    // As text they go to the standard error.
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check", file.to_str().expect("UTF-8")])
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(0));
    let printed = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(printed.contains("d.yaml:7: shadow_mode has no effect here"), "{printed}");
    assert!(printed.lines().all(|line| line.starts_with("warning: ")), "{printed}");
}

#[test]
fn folders_and_patterns_without_files_are_errors() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::create_dir(folder.path().join("limits")).expect("a directory");
    let file = folder.path().join("tidegate.yaml");
    for (entry, message) in [
        ("limits", "limits: this folder has no files that end in .yaml or .yml"),
        ("'limits/*.yaml'", "limits/*.yaml: no file matches this pattern"),
        ("nowhere/", "nowhere/: cannot be read: No such file or directory"),
    ] {
        let (code, wrong) = check(&file, &format!("envoy:\n  files: [{entry}]\n"));
        assert_eq!((code, &wrong["line"], &wrong["column"]), (Some(2), &json!(2), &json!(11)));
        let found = wrong["message"].as_str().expect("a message");
        assert!(found.contains(message), "{found}");
    }
}

#[test]
fn help_of_each_subcommand_has_an_example() {
    for command in ["check", "schema", "sample"] {
        let (code, help) = tidegate(&["config", command, "--help"]);
        assert_eq!(code, Some(0));
        assert!(help.contains(&format!("Examples:\n  tidegate config {command}")), "{help}");
    }
}

/// Returns the warnings of a valid configuration.
fn warnings(config: &str) -> String {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, config).expect("written");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check"])
        .arg(&file)
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(0));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn log_that_does_not_fit_the_memory_is_a_warning() {
    let config = |store: &str, limit: u64| {
        format!(
            "store: {store}\npolicies:\n  - {{name: all, algorithm: sliding-log, limit: {limit}, \
             window: 1h}}\n"
        )
    };
    let text = warnings(&config("{max_keys: 100000}", 600_000));
    assert!(
        text.contains("tidegate.yaml:3: policy \"all\": a key at its limit needs 9600000"),
        "{text}"
    );
    let overridden = config("{max_keys: 100000}", 5).replace(
        "window: 1h",
        "window: 1h, key: [ip], overrides: [{key: 10.0.0.1, limit: 600000}]",
    );
    assert!(warnings(&overridden).contains("sliding-log of 600000"));
    assert_eq!(warnings(&config("{max_keys: 100000}", 500_000)), "");
    assert_eq!(warnings(&config("{max_keys: 10000000}", 10_000_000)), "");
    assert_eq!(warnings(&config("{redis: 'redis://127.0.0.1', max_keys: 1}", 600_000)), "");
}

#[test]
fn policies_that_may_not_limit_as_meant_are_warnings() {
    let user = "policies:\n  - {name: user, key: [header.x-user-id], limit: 1, window: 1s}\n";
    let text = warnings(user);
    assert!(
        text.contains("tidegate.yaml:2: policy \"user\": a client that leaves out header"),
        "{text}"
    );
    let literal = "policies:\n  - {name: a, match: {path: '/users/{id}'}, limit: 1, window: 1s}\n  \
                   - {name: b, match: {path: ['/x', '/users/:id/**']}, limit: 1, window: 1s}\n";
    let text = warnings(literal);
    let first = "tidegate.yaml:2: policy \"a\": the path \"/users/{id}\" matches only itself: \
                 write \"/users/*\"";
    assert!(text.contains(first) && text.contains("write \"/users/*/**\""), "{text}");
    let chosen = "policies:\n  - {name: a, key: ip, limit: 1, window: 1s, unless: \
                  [{header.x-health-check: '*'}]}\n  - {name: b, key: ip, limit: 1, window: 1s, \
                  unless: [{ip: 10.0.0.0/8, header.x: '*'}, {path: /healthz}]}\n";
    let text = warnings(chosen);
    let right = "tidegate.yaml:2: policy \"a\": `unless` rests on header.x-health-check, which a \
                 client may choose";
    assert!(text.contains(right), "{text}");
    assert_eq!(text.matches("warning").count(), 1, "{text}");
    let short = "policies:\n  - {name: a, key: ip, limit: 1, window: 30s, block_for: [1s, 1m]}\n  \
                 - {name: b, key: ip, limit: 1, window: 30s, block_for: 30s}\n";
    let text = warnings(short);
    assert!(
        text.contains("policy \"a\": block_for 1s is shorter than the window of 30s"),
        "{text}"
    );
    assert_eq!(text.matches("warning").count(), 1, "{text}");
    let guarded = format!("{user}  - {{name: ip, key: [ip], limit: 9, window: 1s}}\n");
    assert_eq!(warnings(&guarded), "");
    let only_failures = guarded.replace("window: 1s}\n", "window: 1s, refund_on: {status: 2xx}}\n");
    assert!(warnings(&only_failures).contains("leaves out header"), "it does not limit successes");
}

#[test]
fn statuses_that_cannot_be_refunded_are_errors() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let status = "is not a status: write one from 100 to 599, such as 404, or a class of them, \
                  such as 2xx";
    let named = "must be fields, each as `name: value`";
    for (refund_on, column, message) in [
        ("{status: [2xx, 600]}", 25, format!("\"600\" {status}")),
        ("{status: [0xx]}", 25, format!("\"0xx\" {status}")),
        ("{status: ok}", 25, format!("\"ok\" {status}")),
        ("{status: 99}", 25, format!("\"99\" {status}")),
        ("{status: []}", 25, "refund_on has no status: write some, such as [2xx, 3xx]".to_owned()),
        ("{}", 16, "missing field `status`".to_owned()),
        ("{statuses: [2xx]}", 17, "did you mean `status`?".to_owned()),
        ("[2xx]", 16, named.to_owned()),
        ("2xx", 16, named.to_owned()),
    ] {
        let text =
            format!("policies:\n- name: a\n  limit: 1\n  window: 1s\n  refund_on:   {refund_on}\n");
        let (code, found) = check(&file, &text);
        let place = (code, &found["line"], &found["column"]);
        assert_eq!(place, (Some(2), &json!(5), &json!(column)), "{refund_on}: {found}");
        let text = found["message"].as_str().expect("a message");
        assert!(text.contains(&message), "{refund_on}: {found}");
    }
    for good in ["{status: 404}", "{status: [2xx, '3XX', 404, '500']}", "{status: 1xx}", "null"] {
        let text = format!("policies: [{{name: a, limit: 1, window: 1s, refund_on: {good}}}]\n");
        assert_eq!(check(&file, &text).0, Some(0), "{good}");
    }
}

#[test]
fn refund_without_a_gateway_is_a_warning() {
    let policies = "policies:\n  - {name: a, limit: 1, window: 1s, refund_on: {status: 2xx}}\n";
    let text = warnings(policies);
    let expected = "tidegate.yaml:2: policy \"a\": refund_on has no effect, so every request counts; \
                    only the gateway sees responses, and this file has no gateway.upstreams";
    assert!(text.contains(expected), "{text}");
    let gateway = "gateway: {upstreams: ['http://127.0.0.1:3000']}\n";
    assert_eq!(warnings(&format!("{gateway}{policies}")), "");
}

#[test]
fn cost_that_no_response_settles_is_a_warning() {
    let cost = "cost: {reserve: 5, actual: {response_header: x-tokens-used}}";
    let policies = format!("policies:\n  - {{name: a, limit: 9, window: 1s, {cost}}}\n");
    let text = warnings(&policies);
    let expected = "tidegate.yaml:2: policy \"a\": cost.actual has no effect, so every request \
                    costs its reserve; only the gateway sees responses";
    assert!(text.contains(expected) && text.contains("POST /v1/reserve"), "{text}");
    let gateway = "gateway: {upstreams: ['http://127.0.0.1:3000']}\n";
    assert_eq!(warnings(&format!("{gateway}{policies}")), "");
}

#[test]
fn weak_tokens_and_open_listeners_are_warnings() {
    let policy = "policies: [{name: all, limit: 5, window: 1h}]\n";
    let short = "auth:\n  api_token: 0123456789abcde\n  tokens:\n    - {name: ci, token: abc, \
                 scopes: [read]}\n";
    let text = warnings(&format!("{short}{policy}"));
    let expected = "tidegate.yaml:2: auth.api_token: a token of fewer than 16 characters";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("tidegate.yaml:4: auth.tokens: ci: a token of fewer"), "{text}");
    assert!(!text.contains("abc"), "{text}");
    let long = "auth: {api_token: 0123456789abcdef}\n";
    assert_eq!(warnings(&format!("{long}{policy}")), "");
    let open = "listen: {http: '0.0.0.0:8080', grpc: '127.0.0.1:8081'}\n";
    let text = warnings(&format!("{open}{policy}"));
    assert!(text.contains("listen.http is 0.0.0.0:8080: other hosts can use"), "{text}");
    assert!(!text.contains("listen.grpc"), "{text}");
    assert_eq!(warnings(&format!("{open}{long}{policy}")), "");
}

#[test]
fn token_file_that_all_users_can_read_is_a_warning() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let (file, token) = (folder.path().join("tidegate.yaml"), folder.path().join("token"));
    std::fs::write(&token, "0123456789abcdef").expect("written");
    for (mode, count) in [(0o640, 0), (0o644, 1)] {
        std::fs::set_permissions(&token, Permissions::from_mode(mode)).expect("set");
        let (code, result) = check(&file, "auth: {api_token_file: token}\n");
        let warnings = result["warnings"].as_array().expect("warnings");
        assert_eq!((code, warnings.len()), (Some(0), count), "{mode:o}: {result}");
        let message = warnings.first().and_then(|warning| warning["message"].as_str());
        assert!(message.is_none_or(|it| it.contains("every user of this host can read")));
    }
}

#[test]
fn a_month_of_an_envoy_rule_in_memory_is_a_warning() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let rule = |unit: &str| {
        format!(
            "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {{unit: {unit}, requests_per_unit: 5}}\n"
        )
    };
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, "envoy: {files: [rules.yaml]}\n").expect("written");
    for (unit, is_warned) in [("month", true), ("hour", false)] {
        std::fs::write(folder.path().join("rules.yaml"), rule(unit)).expect("written");
        let checked = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check"])
            .arg(&file)
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(text.contains("its counts of 30d end with this process"), is_warned, "{text}");
    }
}
