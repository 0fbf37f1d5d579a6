//! Rules in several files, folders and patterns.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::support::{Service, with_free_ports};
use super::{Client, RateLimitServiceClient, channel, wait_for_time_in_the_minute};

/// Returns a file with one rule.
fn rule(domain: &str, key: &str, requests: u32) -> String {
    format!(
        "domain: {domain}\ndescriptors:\n  - key: {key}\n    \
         rate_limit: {{unit: hour, requests_per_unit: {requests}}}\n"
    )
}

async fn start_in(files: &str, prepare: impl FnOnce(&Path)) -> (Service, Client) {
    wait_for_time_in_the_minute().await;
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    fs::write(&file, with_free_ports(&format!("envoy: {{files: {files}}}\n"))).expect("written");
    prepare(folder.path());
    let service = Service::start_on(folder, &file, &[]);
    let client = Client(RateLimitServiceClient::new(channel(&service).await));
    (service, client)
}

/// Returns the limit of a key.
async fn limit(client: &mut Client, key: &str) -> Option<u32> {
    client.send(&[(key, "x")]).await.current_limit.map(|limit| limit.requests_per_unit)
}

async fn wait_for_limit(service: &Service, client: &mut Client, key: &str, expected: Option<u32>) {
    let deadline = std::time::Instant::now() + super::support::TEST_TIMEOUT;
    while limit(client, key).await != expected {
        assert!(
            std::time::Instant::now() < deadline,
            "{key} never has the limit {expected:?}: {}",
            service.output()
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn files_of_folders_and_patterns_are_merged_and_reloaded() {
    let (service, mut client) = start_in("[limits/, 'extra/*.yaml', one.yaml]", |root| {
        fs::create_dir(root.join("limits")).expect("a directory");
        fs::create_dir(root.join("extra")).expect("a directory");
        fs::write(root.join("limits/a.yaml"), rule("edge", "a", 1)).expect("written");
        fs::write(root.join("limits/.a.yaml.swp"), "not yaml: [").expect("written");
        fs::write(root.join("extra/b.yaml"), rule("edge", "b", 2)).expect("written");
        fs::write(root.join("one.yaml"), rule("edge", "one", 3)).expect("written");
    })
    .await;
    for (key, expected) in [("a", Some(1)), ("b", Some(2)), ("one", Some(3)), ("c", None)] {
        assert_eq!(limit(&mut client, key).await, expected, "{key}");
    }
    let root = service.folder();
    fs::write(root.join("limits/c.yml"), rule("edge", "c", 4)).expect("written");
    wait_for_limit(&service, &mut client, "c", Some(4)).await;
    fs::write(root.join("extra/d.yaml"), rule("edge", "d", 5)).expect("written");
    wait_for_limit(&service, &mut client, "d", Some(5)).await;
    // A file that was added is watched itself.
    fs::write(root.join("extra/d.yaml"), rule("edge", "d", 6)).expect("written");
    wait_for_limit(&service, &mut client, "d", Some(6)).await;
    fs::remove_file(root.join("limits/a.yaml")).expect("removed");
    wait_for_limit(&service, &mut client, "a", None).await;
    fs::remove_file(root.join("extra/b.yaml")).expect("removed");
    wait_for_limit(&service, &mut client, "b", None).await;
    // A hidden file is no change.
    let reloads = || {
        let metrics = service.admin("/metrics").body;
        let name = "tidegate_config_reloads_total{outcome=\"success\"} ";
        metrics.lines().find_map(|line| line.strip_prefix(name)).expect("the metric").to_owned()
    };
    let before = reloads();
    fs::write(root.join("limits/.c.yml.swp"), "not yaml: [").expect("written");
    // Without any file the rules would be gone, so the last ones stay.
    fs::remove_file(root.join("extra/d.yaml")).expect("removed");
    service.wait_until("the reload fails", |service| {
        service.output().contains("extra/*.yaml: no file matches this pattern")
    });
    assert_eq!(limit(&mut client, "d").await, Some(6));
    assert_eq!(reloads(), before, "{}", service.output());
}

/// Updates a `ConfigMap` as Kubernetes does: a new folder, a swap of `..data`, then the new names.
#[tokio::test]
async fn folder_of_a_kubernetes_config_map_is_followed() {
    let (service, mut client) = start_in("[limits]", |root| {
        fs::create_dir_all(root.join("limits/..1")).expect("a directory");
        fs::write(root.join("limits/..1/a.yaml"), rule("edge", "a", 1)).expect("written");
        symlink("..1", root.join("limits/..data")).expect("a symlink");
        symlink("..data/a.yaml", root.join("limits/a.yaml")).expect("a symlink");
    })
    .await;
    assert_eq!(limit(&mut client, "a").await, Some(1));
    let limits = service.folder().join("limits");
    fs::create_dir(limits.join("..2")).expect("a directory");
    fs::write(limits.join("..2/a.yaml"), rule("edge", "a", 7)).expect("written");
    fs::write(limits.join("..2/b.yaml"), rule("edge", "b", 8)).expect("written");
    symlink("..2", limits.join("..data_tmp")).expect("a symlink");
    fs::rename(limits.join("..data_tmp"), limits.join("..data")).expect("swapped");
    symlink("..data/b.yaml", limits.join("b.yaml")).expect("a symlink");
    fs::remove_dir_all(limits.join("..1")).expect("removed");
    wait_for_limit(&service, &mut client, "b", Some(8)).await;
    wait_for_limit(&service, &mut client, "a", Some(7)).await;
    // A key is removed.
    fs::create_dir(limits.join("..3")).expect("a directory");
    fs::write(limits.join("..3/b.yaml"), rule("edge", "b", 9)).expect("written");
    symlink("..3", limits.join("..data_tmp")).expect("a symlink");
    fs::rename(limits.join("..data_tmp"), limits.join("..data")).expect("swapped");
    fs::remove_file(limits.join("a.yaml")).expect("removed");
    wait_for_limit(&service, &mut client, "a", None).await;
    wait_for_limit(&service, &mut client, "b", Some(9)).await;
}

#[tokio::test]
async fn warnings_are_logged_at_start_and_at_a_reload() {
    let doubtful = |key: &str| rule("edge", key, 3).replace("{unit", "{shadow_mode: true, unit");
    let (service, mut client) = start_in("[rules.yaml]", |root| {
        fs::write(root.join("rules.yaml"), doubtful("a")).expect("written");
    })
    .await;
    let warnings = |service: &Service| {
        service.output().matches("rules.yaml:4: shadow_mode has no effect here").count()
    };
    service.wait_until("it is logged", |service| warnings(service) == 1);
    fs::write(service.folder().join("rules.yaml"), doubtful("b")).expect("written");
    wait_for_limit(&service, &mut client, "b", Some(3)).await;
    service.wait_until("it is logged again", |service| warnings(service) == 2);
    // The rule is enforced, as in ratelimit.
    let mut codes = Vec::new();
    for _ in 0..4 {
        codes.push(client.send(&[("b", "y")]).await.code().as_str_name());
    }
    assert_eq!(codes, ["OK", "OK", "OK", "OVER_LIMIT"]);
}
