use serde_json::{Value, json};

use super::metric;
use super::support::{Service, request, with_free_ports};

const POLICIES: &str = "policies:\n  - {name: per-user, limit: 1, window: 1h}\n";

fn is_successful(service: &Service) -> bool {
    metric(service, "tidegate_config_last_reload_successful ") > 0.5
}

#[test]
fn failed_reload_shows_its_file_and_line_until_one_succeeds() {
    let service = Service::start(POLICIES);
    let loaded_at = || metric(&service, "tidegate_config_last_reload_success_timestamp_seconds ");
    let reload = || service.admin("/v1/status").json()["reload"].clone();
    assert!(is_successful(&service));
    let start = reload();
    let good = std::fs::read_to_string(service.file()).expect("the file");
    let bad = good.replace("limit: 1", "limit: many");
    std::fs::write(service.file(), &bad).expect("written");
    service.wait_until("the reload fails", |service| !is_successful(service));
    let failed = reload();
    assert_eq!(failed["ok"], json!(false));
    assert!(failed["at_ms"].as_u64() >= start["config_loaded_at_ms"].as_u64(), "{failed}");
    let error = &failed["error"];
    assert_eq!(error["file"], json!(service.file()), "{failed}");
    let line = 1 + bad.lines().position(|line| line.contains("many")).expect("the line");
    assert_eq!(error["line"], json!(line), "{failed}");
    assert!(error["column"].as_u64() > Some(1), "{failed}");
    assert!(error["message"].as_str().is_some_and(|it| it.contains("limit")), "{failed}");
    assert_eq!(failed["config_loaded_at_ms"], start["config_loaded_at_ms"]);
    assert!(loaded_at() > 1e9);
    assert_eq!(service.acquire(&json!({"policy": "per-user", "key": "k"})).status, 200);

    std::fs::write(service.file(), good.replace("limit: 1", "limit: 7")).expect("written");
    service.wait_until("the reload succeeds", is_successful);
    let succeeded = reload();
    assert_eq!((&succeeded["ok"], &succeeded["error"]), (&json!(true), &Value::Null));
    assert_eq!(succeeded["config_loaded_at_ms"], succeeded["at_ms"]);
    assert_eq!(service.admin("/v1/policies").json()[0]["limit"], json!(7));
}

#[test]
fn error_of_a_reload_that_needs_a_restart_has_no_line() {
    let config = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '0.0.0.0:0'}\n\
                  auth: {admin_token: hunter2}\n";
    let service = Service::start(&format!("{config}{POLICIES}"));
    let token = [("Authorization", "Bearer hunter2")];
    let status = |service: &Service| {
        let address = service.admin.replace("0.0.0.0", "127.0.0.1");
        request(&address, "GET", "/v1/status", &token, b"").json()
    };
    let open = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\n";
    std::fs::write(service.file(), format!("{open}{POLICIES}")).expect("written");
    service
        .wait_until("the reload fails", |service| status(service)["reload"]["ok"] == json!(false));
    let error = status(&service)["reload"]["error"].clone();
    assert_eq!((&error["line"], &error["file"]), (&Value::Null, &json!(service.file())), "{error}");
    assert!(error["message"].as_str().is_some_and(|it| it.contains("admin_token")), "{error}");
}

/// Returns the hash of the active configuration in the metrics.
fn config_hash(service: &Service) -> String {
    let metrics = service.admin("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix("tidegate_config_info{hash=\""));
    line.and_then(|line| line.strip_suffix("\"} 1")).expect("the metric").to_owned()
}

#[test]
fn hash_of_the_configuration_is_that_of_the_active_files() {
    let rules = |limit: u32| {
        format!(
            "domain: d\ndescriptors:\n  - {{key: k, rate_limit: {{unit: hour, requests_per_unit: \
             {limit}}}}}\n"
        )
    };
    let start = |limit| {
        let folder = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(folder.path().join("rules.yaml"), rules(limit)).expect("written");
        let config = with_free_ports(&format!("envoy: {{files: [rules.yaml]}}\n{POLICIES}"));
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, config).expect("written");
        Service::start_on(folder, &file, &[])
    };
    let [service, same, other] = [start(1), start(1), start(2)];
    let hash = config_hash(&service);
    assert_eq!(service.admin("/v1/status").json()["reload"]["config_hash"], json!(hash));
    assert_eq!(config_hash(&same), hash, "files in other folders");
    assert_ne!(config_hash(&other), hash, "another limit of a rule");

    // A file that is rejected is not active.
    let good = std::fs::read_to_string(service.file()).expect("the file");
    std::fs::write(service.file(), good.replace("limit: 1", "limit: many")).expect("written");
    service.wait_until("the reload fails", |service| !is_successful(service));
    assert_eq!(config_hash(&service), hash);
    std::fs::write(service.file(), good.replace("limit: 1", "limit: 7")).expect("written");
    service.wait_until("the reload succeeds", is_successful);
    assert_ne!(config_hash(&service), hash);
    std::fs::write(service.file(), good).expect("written");
    service.wait_until("the first one is active again", |service| config_hash(service) == hash);
    std::fs::write(service.folder().join("rules.yaml"), rules(2)).expect("written");
    service.wait_until("the new rules are active", |service| {
        config_hash(service) == config_hash(&other)
    });
}

#[test]
fn log_of_a_reload_names_what_changed() {
    let old = "  - {name: old, limit: 1, window: 1h}\n";
    let same = "  - {name: same, limit: 1, window: 1h}\n";
    let service = Service::start(&format!("{POLICIES}{old}{same}"));
    let config = std::fs::read_to_string(service.file()).expect("the file");
    let changed = config
        .replace("per-user, limit: 1", "per-user, limit: 2")
        .replace("name: old", "name: new");
    let changed = format!("{changed}auth: {{api_token: S3CR3T}}\n");
    std::fs::write(service.file(), changed).expect("written");
    service.wait_until("it is reloaded", |service| {
        service.output().contains("configuration reloaded")
    });
    let output = service.output();
    let line = output.lines().find(|line| line.contains("reloaded")).expect("the line");
    for field in [
        "sections=\"auth, policies\"",
        "added_policies=\"new\"",
        "removed_policies=\"old\"",
        "changed_policies=\"per-user\"",
    ] {
        assert!(line.contains(field), "{field}: {line}");
    }
    assert!(!line.contains("same") && !output.contains("S3CR3T"), "{output}");
}

#[test]
fn pending_restart_shows_in_status_and_metrics_until_it_is_not_needed() {
    let service = Service::start(POLICIES);
    let is_pending = |service: &Service, sections: Value| {
        let status = service.admin("/v1/status").json();
        let gauge = metric(service, "tidegate_restart_pending ") > 0.5;
        status["reload"]["restart_pending"] == sections && gauge == (sections != json!([]))
    };
    assert!(is_pending(&service, json!([])));
    let config = std::fs::read_to_string(service.file()).expect("the file");
    let other = format!("{config}store: {{redis: 'redis://127.0.0.1:1'}}\n");
    std::fs::write(service.file(), other).expect("written");
    service.wait_until("a restart is pending", |service| is_pending(service, json!(["store"])));
    service.wait_until_logged("changes in store need a restart");
    std::fs::write(service.file(), config).expect("written");
    service.wait_until("no restart is pending", |service| is_pending(service, json!([])));
}

#[test]
fn policy_that_no_request_has_matched_shows_in_metrics_and_in_the_list() {
    let service = Service::start(
        "policies:\n  - {name: used, limit: 9, window: 1h}\n  \
         - {name: keyless, key: header.x-user, limit: 9, window: 1h}\n  \
         - {name: never, match: {path: /never}, limit: 9, window: 1h}\n",
    );
    let unmatched = |policy: &str| {
        metric(&service, &format!("tidegate_policy_unmatched{{policy=\"{policy}\"}} ")) > 0.5
    };
    let names = ["used", "keyless", "never"];
    assert_eq!(names.map(unmatched), [true, true, true]);
    assert_eq!(service.acquire(&super::attributes(&[("path", "/x")])).status, 200);
    assert_eq!(names.map(unmatched), [false, false, true], "one lacks only its key");
    let listed = service.admin("/v1/policies").json();
    let matched: Vec<_> =
        listed.as_array().expect("a list").iter().map(|it| &it["matched"]).collect();
    assert_eq!(matched, [&json!(true), &json!(true), &json!(false)], "{listed}");
}
