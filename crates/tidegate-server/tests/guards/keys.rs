use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::{Service, request, with_free_ports};

const TOKEN: &str = "Bearer 5eCr3t-t0ken";

/// Returns the name of a key as an operator computes it.
fn looked_up(key: &str) -> String {
    let mut sum = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sha256sum runs");
    sum.stdin.take().expect("piped").write_all(key.as_bytes()).expect("written");
    let output = sum.wait_with_output().expect("it exits").stdout;
    format!("sha256:{}", &String::from_utf8(output).expect("text")[..16])
}

fn hot_keys(service: &Service) -> Vec<(String, String)> {
    let hot = service.admin("/v1/hot-keys").json();
    let lists = ["allowed", "denied"].map(|list| hot[list].as_array().expect("a list").clone());
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    lists.iter().flatten().map(|hot| (text(&hot["policy"]), text(&hot["key"]))).collect()
}

#[test]
fn credentials_are_shown_hashed() {
    let keys = [
        ("bearer", "header.authorization", ""),
        ("proxy", "header.Proxy-Authorization", ""),
        ("session", "cookie.session", ""),
        ("cookies", "header.cookie", ""),
        ("api-key", "header.x-api-key", ""),
        ("query", "query.api_key", ""),
        ("tenant", "header.x-tenant", ", show_keys: hashed"),
        ("user", "header.x-user-id", ""),
        ("open", "header.authorization", ", show_keys: plain"),
    ];
    let policies = keys.map(|(name, key, option)| {
        format!("  - {{name: {name}, key: [{key}], limit: 1, window: 1h{option}}}\n")
    });
    let service = Service::start(&format!("policies:\n{}", policies.concat()));
    for (name, ..) in keys {
        for _ in 0..2 {
            service.acquire(&json!({"policy": name, "key": TOKEN}));
        }
    }
    let hash = looked_up(TOKEN);
    let shown = hot_keys(&service);
    assert_eq!(shown.len(), 2 * keys.len(), "{shown:?}");
    for (policy, key) in &shown {
        let is_plain = ["user", "open"].contains(&policy.as_str());
        assert_eq!(key, if is_plain { TOKEN } else { &hash }, "{policy}");
    }
    let policies = service.admin("/v1/policies").json();
    assert_eq!(
        (&policies[0]["show_keys"], &policies[7]["show_keys"]),
        (&json!("hashed"), &json!("plain"))
    );
}

#[test]
fn hashed_hot_keys_can_be_reset_as_they_are_listed() {
    let policies = "policies: [{name: p, key: [header.authorization], limit: 1, window: 1h}]\n";
    let service = Service::start(policies);
    let payload = json!({"policy": "p", "key": TOKEN});
    assert_eq!([service.acquire(&payload).status, service.acquire(&payload).status], [200, 429]);
    let (policy, key) = hot_keys(&service).pop().expect("a hot key");
    assert!(!key.contains("5eCr3t"), "{key}");
    let reset = |key: &str| {
        let body = json!({"policy": policy, "key": key}).to_string();
        request(&service.admin, "POST", "/v1/reset", &[], body.as_bytes()).status
    };
    assert_eq!(reset(&key), 204);
    assert_eq!([service.acquire(&payload).status, service.acquire(&payload).status], [200, 429]);
    assert_eq!(reset(TOKEN), 204, "the plain key works as well");
    assert_eq!(service.acquire(&payload).status, 200);
}

#[test]
fn show_keys_has_two_values() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let policy = "policies: [{name: p, limit: 1, window: 1h, show_keys: hash}]\n";
    std::fs::write(&file, policy).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check"])
        .arg(&file)
        .output()
        .expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("one of plain, hashed (did you mean `hashed`?)"), "{text}");
}

#[test]
fn rules_with_credentials_in_their_descriptors_are_shown_hashed() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let rules = "domain: edge\ndescriptors:\n  - {key: authorization, rate_limit: {unit: hour, \
                 requests_per_unit: 1}}\n  - {key: tenant, rate_limit: {unit: hour, \
                 requests_per_unit: 1}}\n";
    std::fs::write(folder.path().join("ratelimit.yaml"), rules).expect("written");
    let file = folder.path().join("tidegate.yaml");
    let config = with_free_ports("envoy: {files: [ratelimit.yaml]}\n");
    std::fs::write(&file, config).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    let policies = service.admin("/v1/policies").json();
    let shown = |name: &str| {
        let mut rules = policies.as_array().expect("a list").iter();
        let rule = rules.find(|rule| rule["name"] == json!(name)).expect("a rule");
        rule["show_keys"].clone()
    };
    assert_eq!(shown("edge.authorization"), json!("hashed"));
    assert_eq!(shown("edge.tenant"), json!("plain"));
}
