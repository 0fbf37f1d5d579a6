use std::collections::BTreeSet;

use crate::read;
use crate::support::{Redis, Service};

/// Pages that list metrics.
const PAGES: [&str; 3] = ["docs/admin-api.md", "docs/gateway.md", "docs/configuration.md"];
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
    let pages = PAGES.map(read).concat();
    let named: BTreeSet<&str> = pages
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.starts_with("tidegate_") || code.starts_with("process_"))
        .filter_map(|code| code.split('{').next())
        // `process_*` stands for several.
        .filter(|name| !name.ends_with('*'))
        .collect();
    let missing: Vec<_> = known.difference(&named).collect();
    assert!(missing.is_empty(), "not in {PAGES:?}: {missing:?}");
    let unknown: Vec<_> = named.difference(&known).collect();
    assert!(unknown.is_empty(), "the service has no such metrics: {unknown:?}");
}
