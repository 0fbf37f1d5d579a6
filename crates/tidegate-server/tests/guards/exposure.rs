use std::fs;

use crate::POLICY;
use crate::support::{Service, request};

const OPEN: &str = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '0.0.0.0:0'}\n";
const LOCAL: &str = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\n";
const DEFAULT: &str = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0'}\n";
const TOKEN: &str = "auth: {admin_token: sesame}\n";
const AUTHORIZED: [(&str, &str); 1] = [("Authorization", "Bearer sesame")];

fn failures(service: &Service) -> u64 {
    let metrics = request(&service.admin, "GET", "/metrics", &AUTHORIZED, b"").body;
    let name = "tidegate_config_reloads_total{outcome=\"failure\"} ";
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{metrics}")).parse().expect("a number")
}

#[test]
fn reload_without_a_token_does_not_open_the_bound_admin_listener() {
    let service = Service::start(&format!("{OPEN}{TOKEN}{POLICY}"));
    assert_eq!(service.admin("/metrics").status, 401);
    // The socket stays where it was bound, whatever the new file says.
    for (number, listen) in (1..).zip([LOCAL, DEFAULT, OPEN]) {
        fs::write(service.file(), format!("{listen}{POLICY}")).expect("written");
        service.signal("HUP");
        service.wait_until("the reload fails", |service| {
            service.output().matches("reloading the configuration failed").count() >= number
        });
        assert_eq!(service.admin("/metrics").status, 401, "{listen}");
        assert_eq!(failures(&service), number as u64);
    }
    let output = service.output();
    assert!(output.contains("until a restart") && !output.contains("reloaded"), "{output}");
    // The same change with a token is applied, except for the address.
    fs::write(service.file(), format!("{LOCAL}{TOKEN}{POLICY}")).expect("written");
    service.signal("HUP");
    service.wait_until("the reload succeeds", |service| service.output().contains("reloaded"));
    assert_eq!(service.admin("/metrics").status, 401);
}

#[test]
fn reload_of_a_gateway_does_not_open_its_admin_listener() {
    let gateway = Service::gateway(&format!("{OPEN}{TOKEN}{POLICY}"), &["http://127.0.0.1:9"]);
    fs::write(gateway.file(), format!("{LOCAL}{POLICY}")).expect("written");
    gateway.signal("HUP");
    gateway.wait_until("the reload fails", |gateway| {
        gateway.output().contains("reloading the configuration failed")
    });
    assert_eq!(gateway.admin("/metrics").status, 401);
}

#[test]
fn loopback_admin_may_lose_its_token() {
    let service = Service::start(&format!("{LOCAL}{TOKEN}{POLICY}"));
    fs::write(service.file(), format!("{LOCAL}{POLICY}")).expect("written");
    service.signal("HUP");
    service.wait_until("the reload succeeds", |service| service.output().contains("reloaded"));
    assert_eq!(service.admin("/metrics").status, 200);
}

#[test]
fn api_on_the_network_without_a_token_is_a_warning() {
    let warnings = |service: &Service| service.output().matches("without a token").count();
    let open = "listen: {http: '0.0.0.0:0', grpc: '[::]:0', admin: '127.0.0.1:0'}\n";
    let service = Service::start(open);
    assert_eq!(warnings(&service), 2, "{}", service.output());
    let output = service.output();
    assert!(output.contains("auth.api_token") && output.contains("listener=\"http\""), "{output}");
    assert!(output.contains("listener=\"grpc\""), "{output}");
    let guarded = Service::start(&format!("{open}auth: {{api_token: sesame}}\n"));
    assert_eq!(warnings(&guarded), 0, "{}", guarded.output());
    // A reload that removes the token is a warning, too.
    fs::write(guarded.file(), format!("{open}{POLICY}")).expect("written");
    guarded.signal("HUP");
    guarded.wait_until("the reload succeeds", |service| service.output().contains("reloaded"));
    assert_eq!(warnings(&guarded), 2, "{}", guarded.output());
    let local = Service::start(LOCAL);
    assert_eq!(warnings(&local), 0, "{}", local.output());
}
