//! The reference of metrics, compared with the metrics of the real service.

use std::collections::{BTreeMap, BTreeSet};

use crate::root;
use crate::support::{Redis, Service, request};

const CONFIG: &str = "policies:
  - {name: per-user, key: [header.x-user-id], limit: 10, window: 60s}
  - {name: exports, key: [header.x-user-id], algorithm: concurrency, limit: 5}
";

/// Returns the metrics of an output of Prometheus's text format, each with its labels. Those that
/// have a description but no series yet have no labels.
fn exposed(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut histograms = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and a type");
            all.entry(name.to_owned()).or_default();
            if kind == "histogram" {
                histograms.insert(name.to_owned());
            }
        } else if !line.starts_with('#') {
            let end = line.find([' ', '{']).expect("a value");
            let suffixes = ["_bucket", "_sum", "_count"];
            let base = suffixes.iter().find_map(|suffix| line[..end].strip_suffix(suffix));
            let name = base.filter(|base| histograms.contains(*base)).unwrap_or(&line[..end]);
            let labels = all.get_mut(name).unwrap_or_else(|| panic!("{line} has no type"));
            let names = line[end..].split("=\"").map(|part| part.rsplit(['{', ',']).next());
            let count = line[end..].matches("=\"").count();
            labels.extend(names.take(count).flatten().filter(|n| *n != "le").map(str::to_owned));
        }
    }
    all
}

/// Returns the metrics of the page, each with its labels: first column of the tables, such as
/// "`tidegate_decisions_total{policy,outcome}`".
fn documented(page: &str) -> BTreeMap<String, BTreeSet<String>> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut all = BTreeMap::new();
    for row in rows {
        let name = row.split('`').next().unwrap_or_default();
        if !name.starts_with("tidegate_") && !name.starts_with("process_") {
            continue;
        }
        let (name, labels) = name.split_once('{').unwrap_or((name, ""));
        let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
        let labels = labels.map(str::to_owned).collect();
        assert!(all.insert(name.to_owned(), labels).is_none(), "{name} is listed twice");
    }
    all
}

#[test]
fn the_reference_has_exactly_the_metrics_of_the_service() {
    let redis = Redis::start();
    let on_redis = format!("store: {{redis: '{}'}}\n{CONFIG}", redis.url());
    let access_log = "gateway: {access_log: {path: access.log}}\n";
    let upstream = "http://127.0.0.1:9";
    let services = [
        Service::start(CONFIG),
        Service::start(&on_redis),
        Service::gateway(&format!("{access_log}{CONFIG}"), &[upstream]),
        Service::gateway(&on_redis, &[upstream]),
        Service::start(&format!("envoy: {{xds: {{server: '127.0.0.1:9'}}}}\n{CONFIG}")),
    ];
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for service in &services {
        // A request creates the series of its status code and of its node.
        if service.grpc.is_some() {
            for policy in ["per-user", "exports"] {
                let query = format!(r#"{{"policy": "{policy}", "key": "a"}}"#);
                assert_eq!(service.post("/v1/acquire", &query).status, 200);
            }
        } else {
            assert_eq!(request(&service.http, "GET", "/", &[], b"").status, 502);
        }
        for (name, labels) in exposed(&service.admin("/metrics").body) {
            found.entry(name).or_default().extend(labels);
        }
    }
    let page = std::fs::read_to_string(root().join("docs/metrics.md")).expect("a page");
    let documented = documented(&page);
    let missing: Vec<_> = found.keys().filter(|name| !documented.contains_key(*name)).collect();
    let invented: Vec<_> = documented.keys().filter(|name| !found.contains_key(*name)).collect();
    assert!(missing.is_empty(), "not in docs/metrics.md: {missing:?}");
    assert!(invented.is_empty(), "only in docs/metrics.md: {invented:?}");
    assert_eq!(documented, found, "labels");
    let pages = std::fs::read_dir(root().join("docs")).expect("a folder");
    for path in pages.map(|entry| entry.expect("an entry").path()) {
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        let unknown: Vec<_> = named(&page).filter(|name| !found.contains_key(*name)).collect();
        assert!(unknown.is_empty(), "{}: no such metrics: {unknown:?}", path.display());
    }
}

/// Returns the metrics that the text of a page names as code, such as "`tidegate_store_up`".
fn named(page: &str) -> impl Iterator<Item = &str> {
    let code = page.split('`').skip(1).step_by(2);
    let names = code.map(|code| code.split('{').next().unwrap_or_default());
    names.filter(|name| {
        let has_prefix = name.starts_with("tidegate_") || name.starts_with("process_");
        has_prefix && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    })
}

#[test]
fn every_metric_has_a_meaning_and_an_action() {
    let page = std::fs::read_to_string(root().join("docs/metrics.md")).expect("a page");
    let mut rows = 0;
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" |").map(str::trim).collect();
        assert!(cells.len() == 3 && cells.iter().all(|cell| !cell.is_empty()), "{row}");
        rows += 1;
    }
    assert!(rows > 50, "{rows} metrics");
}
