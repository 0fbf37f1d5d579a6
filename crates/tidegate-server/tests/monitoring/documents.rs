use std::collections::BTreeSet;

use crate::read;
use crate::support::{Redis, Service};

const POLICY: &str = "policies:\n  - {name: p, limit: 1000000, window: 1h}\n";

#[test]
fn documents_name_every_metric_and_no_other() {
    let redis = Redis::start();
    let config = format!(
        "gateway: {{access_log: {{path: access.log, format: combined}}}}\n\
         store: {{redis: '{}'}}\n{POLICY}",
        redis.url()
    );
    let gateway = Service::gateway(&config, &["http://127.0.0.1:1"]);
    let metrics = gateway.admin("/metrics").body;
    let known: BTreeSet<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let pages = read("docs/monitoring.md") + &read("docs/gateway.md");
    let named: BTreeSet<&str> = pages
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.starts_with("tidegate_") || code.starts_with("process_"))
        .filter_map(|code| code.split('{').next())
        .collect();
    let missing: Vec<_> = known.difference(&named).collect();
    assert!(missing.is_empty(), "not in docs/monitoring.md or docs/gateway.md: {missing:?}");
    let unknown: Vec<_> = named.difference(&known).collect();
    assert!(unknown.is_empty(), "the service has no such metrics: {unknown:?}");
}
