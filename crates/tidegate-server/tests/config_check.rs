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
    let error = json!({"line": 2, "column": 22, "message": message});
    let mut expected = json!({"file": file, "good": false, "errors": [error]});
    expected.as_object_mut().expect("an object").extend(error_fields(&error));
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
    for command in ["check", "explain", "schema", "sample"] {
        let (code, help) = tidegate(&["config", command, "--help"]);
        assert_eq!(code, Some(0));
        let (_, examples) = help.split_once("Examples:\n").expect("examples");
        assert!(examples.contains(&format!("  tidegate config {command}")), "{help}");
    }
}

fn error_fields(error: &Value) -> serde_json::Map<String, Value> {
    error.as_object().expect("an object").clone()
}

/// Returns line and message of all errors.
fn all_errors(checked: &Value) -> Vec<(u64, String)> {
    let errors = checked["errors"].as_array().expect("a list").iter();
    let line = |error: &Value| error["line"].as_u64().unwrap_or_default();
    errors.map(|error| (line(error), error["message"].to_string())).collect()
}

#[test]
fn check_prints_all_errors_at_once() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let text = "\
listen:
  htp: 127.0.0.1:8080
policies:
  - name: a
    limit: 0
    window: 1s
  - name: b
    limt: 5
    wndow: 1s
    # a comment
  - {name: c, limit: 1, window: 1s}
  - name: d
    limit: 1
    window: soon
store:
  heartbeat: never
";
    let (code, checked) = check(&file, text);
    assert_eq!(code, Some(2));
    let found = all_errors(&checked);
    let mut lines: Vec<u64> = found.iter().map(|(line, _)| *line).collect();
    lines.sort_unstable();
    assert_eq!(lines, [2, 5, 8, 9, 14, 16], "{checked:#}");
    for (line, message) in [(2, "`http`"), (8, "`limit`"), (9, "`window`"), (16, "on or off")] {
        let is_found = |(at, text): &(u64, String)| *at == line && text.contains(message);
        assert!(found.iter().any(is_found), "{line}: {found:?}");
    }
    // As text, each has its place and its line of the file.
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check", file.to_str().expect("UTF-8")])
        .output()
        .expect("the binary runs");
    let printed = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(printed.matches("error: ").count(), 6, "{printed}");
    assert!(printed.contains("\n9 |     wndow"), "{printed}");
    // A part that is left out is no error of its own.
    let valid_rests =
        ["policies:\n  - name: a\n    limt: 5\n    window: 1s\n", "store:\n  heartbeet: on\n"];
    for valid_rest in valid_rests {
        assert_eq!(all_errors(&check(&file, valid_rest).1).len(), 1, "{valid_rest}");
    }
    assert_eq!(all_errors(&check(&file, "policies:\n  - name: [\n").1).len(), 1);
}

/// One line has several errors: the correction of each shows the next.
#[test]
fn check_prints_all_errors_of_a_line() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    for (text, expected) in [
        ("policies:\n  - {name: f, key: [ip], max: 5, interval: 1m}\n", &[26, 34][..]),
        (
            "policies:\n  - {name: d, key: [remote_addr], limit: 5, window: 1m, algorithm: gcra, \
             mode: dry-run}\n",
            &[21, 68, 80],
        ),
        ("policies:\n  - {name: a, key: [ipp], limit: 0, window: 1x}\n", &[21, 34, 45]),
        ("policies:\n  - {name: ö, limt: 5, windw: 1x}\n", &[15, 24, 31]),
    ] {
        let (code, checked) = check(&file, text);
        let errors = checked["errors"].as_array().expect("a list").iter();
        let mut columns: Vec<u64> = errors.filter_map(|error| error["column"].as_u64()).collect();
        columns.sort_unstable();
        assert_eq!((code, &columns[..]), (Some(2), expected), "{checked:#}");
    }
    // The lines are those of the file.
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check", file.to_str().expect("UTF-8")])
        .output()
        .expect("the binary runs");
    let printed = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(printed.matches("\n2 |   - {name: ö, limt").count(), 3, "{printed}");
}

#[test]
fn several_files_and_the_standard_input_are_checked() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("a.yaml"), "policies: [{name: a, limit: 1, window: 1s}]\n").expect("w");
    std::fs::write(path("b.yaml"), "policies: [{name: b, limit: 0, window: 1s}]\n").expect("w");
    let input = std::fs::File::open(path("a.yaml")).expect("a file");
    let run = |files: &[&str], input: std::process::Stdio| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check", "--json"])
            .args(files)
            .current_dir(folder.path())
            .stdin(input)
            .output()
            .expect("the binary runs");
        let lines = String::from_utf8(output.stdout).expect("UTF-8");
        let lines = lines.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        (output.status.code(), lines.collect::<Vec<Value>>())
    };
    let (code, results) = run(&["a.yaml", "b.yaml", "missing.yaml", "-"], input.into());
    assert_eq!(code, Some(2));
    let good: Vec<&Value> = results.iter().map(|result| &result["good"]).collect();
    assert_eq!(good, [&json!(true), &json!(false), &json!(false), &json!(true)], "{results:?}");
    assert_eq!(results[3]["file"], "standard input");
    assert_eq!(run(&["a.yaml"], std::process::Stdio::null()).0, Some(0));
}

#[test]
fn offline_check_needs_no_certificates_tokens_or_variables() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let text = "\
listen: {http: '0.0.0.0:8080', admin: '0.0.0.0:8082'}
tls: {certificate: cert.pem, key: key.pem, client_ca: ca.pem}
auth:
  api_token_file: api-token
  admin_token: '${THE_ADMIN_TOKEN}'
  tokens: [{name: ci, token_file: ci-token, scopes: [acquire]}]
store:
  redis: 'rediss://redis:6379'
  password_file: redis-password
  tls: {ca: ca.pem}
gateway: {upstreams: ['https://upstream'], ca: ca.pem}
policies:
  - {name: a, limit: 5, window: '${THE_WINDOW}'}
  - {name: b, limit: 5, window: 1s}
  - {name: c, limit: '${THE_LIMIT}', window: 1s}
";
    let offline = |text: &str| {
        std::fs::write(&file, text).expect("written");
        let (code, response) =
            tidegate(&["config", "check", "--offline", "--json", file.to_str().expect("UTF-8")]);
        (code, serde_json::from_str::<Value>(&response).expect("JSON"))
    };
    assert_eq!(check(&file, text).0, Some(2));
    let (code, checked) = offline(text);
    assert_eq!((code, &checked["good"]), (Some(0), &json!(true)), "{checked:#}");
    // Everything else is checked.
    for (from, to, line) in [
        ("scopes: [acquire]", "scopes: [aquire]", 6),
        ("limit: 5, window: 1s", "limit: 0, window: 1s", 14),
        ("https://upstream", "upstream", 11),
    ] {
        let (code, checked) = offline(&text.replace(from, to));
        assert_eq!((code, &checked["line"]), (Some(2), &json!(line)), "{to}: {checked:#}");
    }
}

#[test]
fn names_of_other_programs_come_with_ours() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    for (field, meant) in [
        ("period: 1m", "window"),
        ("rate: 5", "limit"),
        ("requests_per_unit: 5", "limit"),
        ("dry-run: true", "mode: shadow"),
        ("exclude: {path: /}", "unless"),
        ("key: [remote_addr]", "ip"),
        ("key: [$remote_addr]", "ip"),
        ("match: {uri: /a}", "path"),
        ("algorithm: gcra", "token-bucket"),
        ("algorithm: sliding_window", "sliding-log"),
        ("mode: dry-run", "shadow"),
        ("on_store_failure: open", "allow"),
    ] {
        let text = format!("policies:\n  - name: a\n    limit: 5\n    window: 1m\n    {field}\n");
        let (code, checked) = check(&file, &text);
        let message = checked["message"].as_str().expect("a message");
        assert_eq!((code, &checked["line"]), (Some(2), &json!(5)), "{field}: {message}");
        assert!(message.ends_with(&format!("(did you mean `{meant}`?)")), "{field}: {message}");
    }
    let (_, checked) = check(&file, "rules:\n  - {name: a, limit: 5, window: 1m}\n");
    let message = checked["message"].as_str().expect("a message");
    assert!(
        message.contains("`rules`") && message.contains("did you mean `policies`"),
        "{message}"
    );
}

#[test]
fn many_overrides_are_loaded_and_the_limit_is_named() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let head = "policies:\n  - name: a\n    limit: 5\n    window: &w 1m\n    key: [header.u]\n    \
                overrides:\n";
    let overrides = |count: u32, window: &str| {
        let entry = |number| format!("      - {{key: u{number}, limit: 1, window: {window}}}\n");
        head.to_owned() + &(0..count).map(entry).collect::<String>()
    };
    for window in ["1m", "*w"] {
        assert_eq!(check(&file, &overrides(60_000, window)).0, Some(0), "{window}");
    }
    let (code, checked) = check(&file, &format!("attributes: [{}]\n", "a,".repeat(2_000_001)));
    let message = checked["message"].as_str().expect("a message");
    assert_eq!(code, Some(2));
    assert!(message.contains("more than 2000000 values"), "{message}");
}

const EXPLAINED: &str = "
client_ip: {trusted_proxies: [10.0.0.0/8]}
attributes: [tenant]
policies:
  - name: per-user
    match: {path: '/api/**', method: [POST]}
    key: [header.x-user-id]
    limit: 100
    window: 1m
    overrides: [{key: ann, limit: 500}]
  - {name: per-ip, key: [ip], limit: 5, window: 1s, mode: shadow}
  - {name: search, match: {query.q: '*'}, limit: 5, window: 1s}
  - {name: tenants, key: [tenant], limit: 5, window: 1s}
";

#[test]
fn explain_shows_which_policies_apply_and_why_the_others_do_not() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    // Offline: nothing but the policies is read.
    let text = format!(
        "tls: {{certificate: missing.pem, key: missing.pem}}\n{EXPLAINED}  - {{name: sessions, \
         key: [cookie.sid], missing_key: deny, limit: 5, window: 1s}}\n"
    );
    std::fs::write(&file, text).expect("written");
    let config = ["config", "explain", "--config", file.to_str().expect("UTF-8")];
    let explained = |request: &[&str]| -> Vec<(bool, Value, String)> {
        let (code, found) = tidegate(&[&config[..], request, &["--json"]].concat());
        assert_eq!(code, Some(0), "{found}");
        let found: Value = serde_json::from_str(&found).expect("JSON");
        let policies = found["policies"].as_array().expect("a list").iter();
        let parts = |policy: &Value| {
            let reason = policy["reason"].as_str().expect("a text").to_owned();
            (policy["applies"] == json!(true), policy["key"].clone(), reason)
        };
        policies.map(parts).collect()
    };
    let user = ["--header", "x-user-id: ann", "--path", "/api/items?q=tea", "--ip", "203.0.113.9"];
    let found = explained(&[&user[..], &["--method", "POST"]].concat());
    let keys: Vec<(bool, &Value)> = found.iter().map(|(applies, key, _)| (*applies, key)).collect();
    let expected = [json!("ann"), json!("203.0.113.9"), json!("all"), Value::Null, Value::Null];
    let expected: Vec<(bool, &Value)> =
        [true, true, true, false, true].into_iter().zip(&expected).collect();
    assert_eq!(keys, expected, "{found:?}");
    assert!(found[0].2.contains("the limit is 500"), "{found:?}");
    assert_eq!(found[3].2, "key: the request has no tenant");
    assert_eq!(found[4].2, "key: the request has no cookie.sid, which denies it");
    let proxied = ["--header", "x-forwarded-for: 198.51.100.7", "--ip", "10.0.0.1"];
    let found = explained(&[&proxied[..], &["--attribute", "tenant=acme"]].concat());
    assert_eq!(found[0].2, "match: path does not match");
    assert_eq!(found[1].1, json!("198.51.100.7"));
    assert_eq!(found[3].1, json!("acme"));
    let (code, table) = tidegate(&[&config[..], &user].concat());
    assert_eq!(code, Some(0));
    assert!(table.starts_with("policy    applies  mode     key"), "{table}");
    assert!(table.contains("match: method does not match"), "{table}");
    let (code, _) = tidegate(&[&config[..], &["--attribute", "colour=red"]].concat());
    assert_eq!(code, Some(2));
}

#[test]
fn explain_counts_the_requests_of_a_log() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let [file, log] = ["tidegate.yaml", "access.log"].map(|name| folder.path().join(name));
    std::fs::write(&file, EXPLAINED).expect("written");
    let line = |number: u32| {
        let target = if number < 3 { "/?q=tea" } else { "/" };
        format!(
            "203.0.113.7 - - [16/Nov/2026:07:00:{number:02} +0000] \"GET {target} HTTP/1.1\" 200 5 \
             \"-\" \"curl\"\n"
        )
    };
    std::fs::write(&log, (0..10).map(line).collect::<String>()).expect("written");
    let [file, log] = [&file, &log].map(|path| path.to_str().expect("UTF-8"));
    let command = ["config", "explain", "--config", file, "--access-log", log];
    let (code, found) = tidegate(&[&command[..], &["--json"]].concat());
    let found: Value = serde_json::from_str(&found).expect("JSON");
    assert_eq!((code, &found["requests"]), (Some(0), &json!(10)));
    let reasons = |policy: usize| found["policies"][policy]["reasons"].clone();
    let reason = |applies, reason: &str, requests| json!({"applies": applies, "reason": reason, "requests": requests});
    assert_eq!(reasons(0), json!([reason(false, "match: path does not match", 10)]));
    assert_eq!(reasons(1), json!([reason(true, "it matches; the limit is 5", 10)]));
    let missing = reason(false, "match: the request has no query.q", 7);
    assert_eq!(reasons(2), json!([reason(true, "it matches; the limit is 5", 3), missing]));
    let (_, table) = tidegate(&command);
    assert!(table.contains("search    yes      enforce  it matches; the limit is 5"), "{table}");
    assert_eq!(tidegate(&[&command[..], &["--path", "/"]].concat()).0, Some(2));
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
