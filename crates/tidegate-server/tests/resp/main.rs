//! The Redis protocol of the real service: raw sockets, real clients, limits and outages.

#[path = "../support/mod.rs"]
mod support;

mod client;
mod clients;
mod crowd;
mod examples;
mod limits;
mod protocol;
mod redis_store;
mod tls;

use support::Service;

/// Policies of these tests.
const POLICIES: &str = "policies:
  - {name: per-user, limit: 3, window: 1h}
  - {name: wide, limit: 1000000, window: 366d, algorithm: fixed-window}
  - {name: observed, limit: 1, window: 1h, mode: shadow}
";

/// Starts a service with the Redis protocol on a free port. Returns it with the address.
fn start(config: &str) -> (Service, String) {
    let service = Service::start_with(config, &["--resp", "127.0.0.1:0"]);
    let address = resp_address(&service);
    (service, address)
}

/// Starts a service with these fields of `listen`.
fn start_with_listen(fields: &str) -> (Service, String) {
    start_with_fields(fields, "")
}

/// Starts a service with these fields of `listen`, and other sections.
fn start_with_fields(fields: &str, sections: &str) -> (Service, String) {
    let ports = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'";
    start(&format!("listen: {{{ports}, {fields}}}\n{sections}{POLICIES}"))
}

/// Returns the address that the service has logged.
fn resp_address(service: &Service) -> String {
    let output = service.output();
    let (_, rest) = output.split_once(" resp=").expect("the address in the log");
    rest.split([' ', '\n']).next().expect("an address").to_owned()
}

/// Returns the value of a metric.
fn metric(service: &Service, name: &str) -> u64 {
    let metrics = service.admin("/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {metrics}"))
}
