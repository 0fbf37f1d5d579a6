//! Reloads of the configuration: partial writes, symlinks, missing and invalid files.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use support::{Service, with_free_ports};

fn policy(limit: u64) -> String {
    with_free_ports(&format!("policies:\n  - {{name: p, limit: {limit}, window: 1h}}\n"))
}

fn limit(service: &Service) -> u64 {
    service.acquire(&json!({"policy": "p", "key": "u"})).json()["limit"].as_u64().expect("a limit")
}

fn reloads(service: &Service, outcome: &str) -> u64 {
    let metrics = service.admin("/metrics").body;
    let name = format!("tidegate_config_reloads_total{{outcome=\"{outcome}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&name)).expect("the metric");
    line.parse().expect("a number")
}

fn wait_for_limit(service: &Service, expected: u64) {
    service.wait_until(&format!("the limit is {expected}"), |service| limit(service) == expected);
}

/// Starts a service on a symlink in a directory and returns both.
fn start_on_symlink(prepare: impl FnOnce(&Path)) -> (Service, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let root = folder.path().to_owned();
    prepare(&root);
    (Service::start_on(folder, &root.join("tidegate.yaml"), &[]), root)
}

#[test]
fn truncated_then_written_file_is_loaded_once() {
    let service = Service::start(&policy(3));
    // As a shell does: `: > file`, and the contents later.
    fs::write(service.file(), "").expect("emptied");
    let emptied = Instant::now();
    while emptied.elapsed() < Duration::from_millis(100) {
        assert_eq!(limit(&service), 3, "the old configuration stays active");
    }
    fs::write(service.file(), policy(7)).expect("written");
    wait_for_limit(&service, 7);
    assert_eq!(
        (reloads(&service, "success"), reloads(&service, "failure")),
        (1, 0),
        "{}",
        service.output()
    );
}

/// A defect of the error message's excerpt once ended all reloads, and printed the password.
#[test]
fn multi_byte_space_in_an_invalid_file_does_not_end_reloads() {
    let service = Service::start(&policy(3));
    fs::write(service.file(), "gateway:\n  upstreams:\u{a0}u:S3CR3T@h\n").expect("written");
    service.wait_until("the reload fails", |service| reloads(service, "failure") == 1);
    fs::write(service.file(), policy(7)).expect("written");
    wait_for_limit(&service, 7);
    let output = service.output();
    assert!(!output.contains("S3CR3T") && !output.contains("panic"), "{output}");
}

#[test]
fn empty_file_is_rejected() {
    let service = Service::start(&policy(3));
    for (number, empty) in (1..).zip(["", "# nothing\n", "null\n", "{}\n"]) {
        fs::write(service.file(), empty).expect("written");
        service.wait_until("the reload fails", |service| reloads(service, "failure") == number);
        assert_eq!(limit(&service), 3, "the old configuration stays active");
    }
    assert!(
        service.output().contains("is empty: `tidegate config sample`"),
        "{}",
        service.output()
    );
    // A signal reloads at once, with the same result.
    let signalled = Instant::now();
    service.signal("HUP");
    service.wait_until("the reload fails", |service| reloads(service, "failure") == 5);
    assert!(signalled.elapsed() < Duration::from_secs(5));
    fs::write(service.file(), policy(7)).expect("written");
    service.signal("HUP");
    wait_for_limit(&service, 7);
}

#[test]
fn symlink_target_is_watched_also_after_a_swap() {
    let (service, root) = start_on_symlink(|root| {
        for (folder, limit) in [("real", 3), ("other", 5)] {
            fs::create_dir(root.join(folder)).expect("a directory");
            fs::write(root.join(folder).join("t.yaml"), policy(limit)).expect("written");
        }
        symlink("real/t.yaml", root.join("tidegate.yaml")).expect("a symlink");
    });
    fs::write(root.join("real/t.yaml"), policy(4)).expect("written in place");
    wait_for_limit(&service, 4);
    symlink("other/t.yaml", root.join("next")).expect("a symlink");
    fs::rename(root.join("next"), root.join("tidegate.yaml")).expect("swapped");
    wait_for_limit(&service, 5);
    fs::write(root.join("other/new.yaml"), policy(6)).expect("written");
    fs::rename(root.join("other/new.yaml"), root.join("other/t.yaml")).expect("replaced");
    wait_for_limit(&service, 6);
    assert_eq!(reloads(&service, "success"), 3, "{}", service.output());
}

/// Swaps symlinks as Kubernetes does, then edits the target file.
#[test]
fn file_behind_kubernetes_symlinks_is_watched() {
    let (service, root) = start_on_symlink(|root| {
        for (folder, limit) in [("..1", 3), ("..2", 5)] {
            fs::create_dir(root.join(folder)).expect("a directory");
            fs::write(root.join(folder).join("tidegate.yaml"), policy(limit)).expect("written");
        }
        symlink("..1", root.join("..data")).expect("a symlink");
        symlink("..data/tidegate.yaml", root.join("tidegate.yaml")).expect("a symlink");
    });
    fs::write(root.join("..1/tidegate.yaml"), policy(4)).expect("written");
    wait_for_limit(&service, 4);
    symlink("..2", root.join("..data_tmp")).expect("a symlink");
    fs::rename(root.join("..data_tmp"), root.join("..data")).expect("swapped");
    wait_for_limit(&service, 5);
    fs::remove_dir_all(root.join("..1")).expect("a removed directory");
    fs::write(root.join("..2/tidegate.yaml"), policy(6)).expect("written");
    wait_for_limit(&service, 6);
    assert_eq!(reloads(&service, "failure"), 0, "{}", service.output());
}

#[test]
fn newly_named_file_is_watched_behind_its_symlink() {
    let rules = |limit: u64| {
        format!(
            "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {{unit: hour, \
             requests_per_unit: {limit}}}\n"
        )
    };
    let (service, root) = start_on_symlink(|root| {
        fs::create_dir(root.join("envoy")).expect("a directory");
        fs::write(root.join("envoy/rules.yaml"), rules(3)).expect("written");
        symlink("envoy/rules.yaml", root.join("rules.yaml")).expect("a symlink");
        fs::write(root.join("tidegate.yaml"), policy(3)).expect("written");
    });
    fs::write(root.join("tidegate.yaml"), format!("envoy: {{files: [rules.yaml]}}\n{}", policy(4)))
        .expect("written");
    wait_for_limit(&service, 4);
    fs::write(root.join("envoy/rules.yaml"), rules(5)).expect("written");
    service.wait_until("the rules are loaded", |service| reloads(service, "success") == 2);
    fs::write(root.join("envoy/rules.yaml"), "domain: [\n").expect("written");
    service.wait_until("the reload fails", |service| reloads(service, "failure") == 1);
}

#[test]
fn missing_file_is_logged_once_and_loaded_when_it_returns() {
    let (service, root) = start_on_symlink(|root| {
        fs::create_dir(root.join("real")).expect("a directory");
        fs::write(root.join("real/t.yaml"), policy(3)).expect("written");
        symlink("real/t.yaml", root.join("tidegate.yaml")).expect("a symlink");
    });
    // Removed with its directory, so that no watch is left.
    fs::remove_dir_all(root.join("real")).expect("removed");
    service.wait_until("the reload fails", |service| reloads(service, "failure") == 1);
    assert_eq!(limit(&service), 3, "the old configuration stays active");
    fs::write(root.join("unrelated"), "").expect("written");
    fs::create_dir(root.join("real")).expect("a directory");
    fs::write(root.join("real/t.yaml"), policy(4)).expect("written");
    wait_for_limit(&service, 4);
    service.wait_until_logged("tidegate.yaml: cannot be read");
    let output = service.output();
    assert_eq!(output.matches("reloading the configuration failed").count(), 1, "{output}");
    assert!(output.contains("tidegate.yaml: cannot be read"), "{output}");
    fs::write(root.join("real/t.yaml"), policy(5)).expect("written");
    wait_for_limit(&service, 5);
}

#[test]
fn misspelt_attribute_is_rejected() {
    let config = |key: &str, limit: u64| {
        let policy = format!("{{name: p, key: [{key}], limit: {limit}, window: 1h}}");
        with_free_ports(&format!("attributes: [tenant]\npolicies:\n  - {policy}\n"))
    };
    let service = Service::start(&config("tenant", 3));
    fs::write(service.file(), config("tennant", 7)).expect("written");
    service.wait_until("the reload fails", |service| reloads(service, "failure") == 1);
    service.wait_until("the reason is logged", |service| {
        let output = service.output();
        output.contains("key: unknown attribute") && output.contains("did you mean `tenant`?")
    });
    let acquire = |name: &str| service.acquire(&json!({"attributes": {name: "acme"}}));
    assert_eq!(acquire("tenant").json()["limit"], 3);
    assert_eq!(acquire("tennant").status, 400);
    fs::write(service.file(), config("tenant", 7)).expect("written");
    wait_for_limit(&service, 7);
}
