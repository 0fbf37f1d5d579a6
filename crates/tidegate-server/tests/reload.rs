//! A configuration that changes while the service runs: what is taken, when, and through which
//! links.

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

fn until_limit(service: &Service, expected: u64) {
    service.until(&format!("the limit is {expected}"), |service| limit(service) == expected);
}

/// A service on a link in a folder, and where that folder is.
fn on_link(prepare: impl FnOnce(&Path)) -> (Service, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path().to_owned();
    prepare(&root);
    (Service::start_on(folder, &root.join("tidegate.yaml"), &[]), root)
}

#[test]
fn a_file_that_is_emptied_and_then_written_is_taken_once_and_never_half() {
    let service = Service::start(&policy(3));
    // As a shell does it: `: > file`, and after a while the rest.
    fs::write(service.file(), "").expect("emptied");
    let emptied = Instant::now();
    while emptied.elapsed() < Duration::from_millis(100) {
        assert_eq!(limit(&service), 3, "the old one goes on");
    }
    fs::write(service.file(), policy(7)).expect("written");
    until_limit(&service, 7);
    assert_eq!(
        (reloads(&service, "taken"), reloads(&service, "refused")),
        (1, 0),
        "{}",
        service.output()
    );
}

#[test]
fn an_empty_file_is_no_configuration() {
    let service = Service::start(&policy(3));
    for (number, empty) in (1..).zip(["", "# nothing\n", "null\n", "{}\n"]) {
        fs::write(service.file(), empty).expect("written");
        service.until("it is refused", |service| reloads(service, "refused") == number);
        assert_eq!(limit(&service), 3, "the old one goes on");
    }
    assert!(
        service.output().contains("is empty: `tidegate config sample`"),
        "{}",
        service.output()
    );
    // Who asks for it by a signal is answered at once, and no better.
    let asked = Instant::now();
    service.signal("HUP");
    service.until("it is refused", |service| reloads(service, "refused") == 5);
    assert!(asked.elapsed() < Duration::from_secs(5));
    fs::write(service.file(), policy(7)).expect("written");
    service.signal("HUP");
    until_limit(&service, 7);
}

#[test]
fn the_file_that_a_link_leads_to_is_watched_and_the_next_one_too() {
    let (service, root) = on_link(|root| {
        for (folder, limit) in [("real", 3), ("other", 5)] {
            fs::create_dir(root.join(folder)).expect("a folder");
            fs::write(root.join(folder).join("t.yaml"), policy(limit)).expect("written");
        }
        symlink("real/t.yaml", root.join("tidegate.yaml")).expect("a link");
    });
    fs::write(root.join("real/t.yaml"), policy(4)).expect("written in place");
    until_limit(&service, 4);
    symlink("other/t.yaml", root.join("next")).expect("a link");
    fs::rename(root.join("next"), root.join("tidegate.yaml")).expect("swapped");
    until_limit(&service, 5);
    fs::write(root.join("other/new.yaml"), policy(6)).expect("written");
    fs::rename(root.join("other/new.yaml"), root.join("other/t.yaml")).expect("replaced");
    until_limit(&service, 6);
    assert_eq!(reloads(&service, "taken"), 3, "{}", service.output());
}

/// As Kubernetes does it; and then somebody edits what the links lead to.
#[test]
fn the_file_behind_kubernetes_links_is_watched_as_well() {
    let (service, root) = on_link(|root| {
        for (folder, limit) in [("..1", 3), ("..2", 5)] {
            fs::create_dir(root.join(folder)).expect("a folder");
            fs::write(root.join(folder).join("tidegate.yaml"), policy(limit)).expect("written");
        }
        symlink("..1", root.join("..data")).expect("a link");
        symlink("..data/tidegate.yaml", root.join("tidegate.yaml")).expect("a link");
    });
    fs::write(root.join("..1/tidegate.yaml"), policy(4)).expect("written");
    until_limit(&service, 4);
    symlink("..2", root.join("..data_tmp")).expect("a link");
    fs::rename(root.join("..data_tmp"), root.join("..data")).expect("swapped");
    until_limit(&service, 5);
    fs::remove_dir_all(root.join("..1")).expect("as Kubernetes does");
    fs::write(root.join("..2/tidegate.yaml"), policy(6)).expect("written");
    until_limit(&service, 6);
    assert_eq!(reloads(&service, "refused"), 0, "{}", service.output());
}

#[test]
fn a_file_that_it_names_is_watched_behind_its_link_from_when_it_is_named() {
    let rules = |limit: u64| {
        format!(
            "domain: d\ndescriptors:\n  - key: k\n    rate_limit: {{unit: hour, requests_per_unit: {limit}}}\n"
        )
    };
    let (service, root) = on_link(|root| {
        fs::create_dir(root.join("envoy")).expect("a folder");
        fs::write(root.join("envoy/rules.yaml"), rules(3)).expect("written");
        symlink("envoy/rules.yaml", root.join("rules.yaml")).expect("a link");
        fs::write(root.join("tidegate.yaml"), policy(3)).expect("written");
    });
    fs::write(root.join("tidegate.yaml"), format!("envoy: {{files: [rules.yaml]}}\n{}", policy(4)))
        .expect("written");
    until_limit(&service, 4);
    fs::write(root.join("envoy/rules.yaml"), rules(5)).expect("written");
    service.until("the rules are taken", |service| reloads(service, "taken") == 2);
    fs::write(root.join("envoy/rules.yaml"), "domain: [\n").expect("written");
    service.until("they are refused", |service| reloads(service, "refused") == 1);
}

#[test]
fn a_file_that_is_gone_is_said_once_and_taken_when_it_is_back() {
    let (service, root) = on_link(|root| {
        fs::create_dir(root.join("real")).expect("a folder");
        fs::write(root.join("real/t.yaml"), policy(3)).expect("written");
        symlink("real/t.yaml", root.join("tidegate.yaml")).expect("a link");
    });
    // With its folder: nothing is left that could be watched.
    fs::remove_dir_all(root.join("real")).expect("removed");
    service.until("it is refused", |service| reloads(service, "refused") == 1);
    assert_eq!(limit(&service), 3, "the old one goes on");
    fs::write(root.join("unrelated"), "").expect("written");
    fs::create_dir(root.join("real")).expect("a folder");
    fs::write(root.join("real/t.yaml"), policy(4)).expect("written");
    until_limit(&service, 4);
    let output = service.output();
    assert_eq!(output.matches("refused").count(), 1, "{output}");
    assert!(output.contains("tidegate.yaml: cannot be read"), "{output}");
    fs::write(root.join("real/t.yaml"), policy(5)).expect("written");
    until_limit(&service, 5);
}

#[test]
fn misspelt_attribute_is_refused_and_the_old_configuration_stays_active() {
    let config = |key: &str, limit: u64| {
        let policy = format!("{{name: p, key: [{key}], limit: {limit}, window: 1h}}");
        with_free_ports(&format!("attributes: [tenant]\npolicies:\n  - {policy}\n"))
    };
    let service = Service::start(&config("tenant", 3));
    fs::write(service.file(), config("tennant", 7)).expect("written");
    service.until("it is refused", |service| reloads(service, "refused") == 1);
    let output = service.output();
    assert!(
        output.contains("key: unknown attribute") && output.contains("did you mean `tenant`?"),
        "{output}"
    );
    let acquire = |name: &str| service.acquire(&json!({"attributes": {name: "acme"}}));
    assert_eq!(acquire("tenant").json()["limit"], 3);
    assert_eq!(acquire("tennant").status, 400);
    fs::write(service.file(), config("tenant", 7)).expect("written");
    until_limit(&service, 7);
}
