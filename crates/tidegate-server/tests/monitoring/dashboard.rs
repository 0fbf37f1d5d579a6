use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::prometheus::{Load, Prometheus};
use crate::read;
use crate::support::{Redis, Service};

/// Queries that return no data in the test, by a part of their text, each with the reason.
const WITHOUT_DATA: [(&str, &str); 0] = [];

/// Query of the dashboard.
struct Query {
    place: String,
    text: String,
    legend: String,
}

fn dashboard() -> Value {
    serde_json::from_str(&read("deploy/grafana/tidegate.json")).expect("JSON")
}

fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().expect("panels").iter()
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} is missing in {value}"))
}

/// Returns the queries of panels, annotations and variables.
fn queries(dashboard: &Value) -> Vec<Query> {
    let mut queries = Vec::new();
    for panel in panels(dashboard).filter(|panel| panel["type"] != "row") {
        for target in panel["targets"].as_array().expect("targets") {
            queries.push(Query {
                place: format!("{} {}", text(panel, "title"), text(target, "refId")),
                text: text(target, "expr").to_owned(),
                legend: text(target, "legendFormat").to_owned(),
            });
        }
    }
    for annotation in dashboard["annotations"]["list"].as_array().expect("annotations") {
        if let Some(text) = annotation["expr"].as_str() {
            let place = format!("annotation {}", annotation["name"]);
            queries.push(Query { place, text: text.to_owned(), legend: String::new() });
        }
    }
    for variable in variables(dashboard).filter(|variable| variable["type"] == "query") {
        let query = text(&variable["query"], "query");
        let arguments = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (series, label) =
            arguments.and_then(|all| all.rsplit_once(", ")).expect("label_values");
        queries.push(Query {
            place: format!("variable {}", text(variable, "name")),
            text: format!("count by ({label}) ({series})"),
            legend: format!("{{{{{label}}}}}"),
        });
    }
    queries
}

fn variables(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["templating"]["list"].as_array().expect("variables").iter()
}

/// Replaces the variables, as Grafana does with "All" and a short range.
fn substituted(query: &str) -> String {
    let query = query.replace("$__rate_interval", "10s");
    ["$job", "$instance", "$policy"].iter().fold(query, |query, name| query.replace(name, ".*"))
}

/// Returns the names of our metrics in a query.
fn metrics_in(query: &str) -> impl Iterator<Item = &str> {
    query
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("tidegate_") || word.starts_with("process_"))
}

#[test]
fn dashboard_is_well_formed() {
    let dashboard = dashboard();
    assert!(dashboard["id"].is_null() && dashboard["uid"] == "tidegate");
    let (mut ids, mut titles) = (BTreeSet::new(), BTreeSet::new());
    let mut cells: BTreeMap<(u64, u64), &str> = BTreeMap::new();
    for panel in panels(&dashboard) {
        let title = text(panel, "title");
        assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{title}: its id is not unique");
        assert!(titles.insert(title), "{title} is the title of two panels");
        let [x, y, w, h] =
            ["x", "y", "w", "h"].map(|name| panel["gridPos"][name].as_u64().expect("a number"));
        assert!(w > 0 && h > 0 && x + w <= 24, "{title} is outside of the grid");
        for (column, line) in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            let other = cells.insert((column, line), title);
            assert!(other.is_none(), "{title} overlaps {other:?}");
        }
        if panel["type"] == "row" {
            continue;
        }
        let source = json!({"type": "prometheus", "uid": "${datasource}"});
        assert_eq!(panel["datasource"], source, "{title}");
        assert!(text(panel, "description").ends_with('.'), "{title} has no description");
        let mut references = BTreeSet::new();
        for target in panel["targets"].as_array().expect("targets") {
            assert_eq!(target["datasource"], source, "{title}");
            assert!(references.insert(text(target, "refId")), "{title}");
        }
    }
    let names: Vec<&str> = variables(&dashboard).map(|variable| text(variable, "name")).collect();
    assert_eq!(names, ["datasource", "job", "instance", "policy"]);
    for variable in variables(&dashboard).skip(1) {
        assert_eq!(variable["datasource"]["uid"], "${datasource}");
    }
    for query in queries(&dashboard) {
        assert!(!substituted(&query.text).contains('$'), "{}: {}", query.place, query.text);
        let is_filtered = query.text.contains("instance=~\"$instance\"");
        assert!(is_filtered || query.place.starts_with("variable"), "{}", query.place);
    }
}

/// Returns why a result is not what a panel can show.
fn missing(query: &Query, series: &[Value]) -> Option<String> {
    let is_number = |value: &Value| {
        value["value"][1]
            .as_str()
            .and_then(|value| value.parse::<f64>().ok())
            .is_some_and(f64::is_finite)
    };
    if !series.iter().any(is_number) {
        return Some(format!("{}: {} → {series:?}", query.place, query.text));
    }
    let labels = query.legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next());
    for label in labels {
        if series.iter().any(|series| series["metric"][label].is_null()) {
            return Some(format!("{}: no label {label} in {series:?}", query.place));
        }
    }
    None
}

#[test]
fn every_query_of_the_dashboard_returns_data_of_a_service_under_load() {
    let redis = Redis::start();
    let config = format!(
        "store: {{redis: '{}', timeout: 5s}}\npolicies:\n  \
         - {{name: per-user, key: [header.x-user-id], limit: 5, window: 1h}}\n  \
         - {{name: trial, limit: 1000000, window: 1h, mode: shadow}}\n  \
         - {{name: exports, algorithm: concurrency, limit: 1000, hold: {{ttl: 1s}}}}\n",
        redis.url()
    );
    let service = Service::start(&config);
    let upstream = format!("http://{}", service.http);
    let log = "gateway: {access_log: {path: access.log, format: combined}}\n";
    let gateway = Service::gateway(&format!("{log}{config}"), &[&upstream]);
    let prometheus = Prometheus::start(
        "groups: []\n",
        &[("tidegate", service.admin.as_str()), ("tidegate-gateway", gateway.admin.as_str())],
    );
    let _loads = [
        Load::start(&service.http, "per-user", 50, 20),
        // Its requests are allowed, so they reach Redis; denials are answered by the deny cache.
        Load::start(&service.http, "trial", 50, 20),
        Load::start(&service.http, "exports", 50, 20),
        Load::start(&gateway.http, "trial", 50, 20),
    ];
    let queries = queries(&dashboard());
    assert!(queries.len() > 60, "{} queries", queries.len());

    let scraped = service.admin("/metrics").body + &gateway.admin("/metrics").body;
    for query in &queries {
        for metric in metrics_in(&query.text) {
            let name = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| metric.strip_suffix(suffix))
                .filter(|name| scraped.contains(&format!("# TYPE {name} histogram\n")))
                .unwrap_or(metric);
            let is_known = scraped.contains(&format!("# TYPE {name} "));
            assert!(is_known, "{}: there is no metric {metric}", query.place);
        }
    }

    let mut has_reloaded = false;
    prometheus.wait_until(|prometheus| {
        // A reload that Prometheus sees as a change, once it has scraped the time before it.
        if !has_reloaded && !prometheus.query("tidegate_build_info{job=\"tidegate\"}").is_empty() {
            service.signal("HUP");
            has_reloaded = true;
        }
        let wanted = queries
            .iter()
            .filter(|query| !WITHOUT_DATA.iter().any(|(part, _)| query.text.contains(part)));
        let missing: Vec<String> = wanted
            .filter_map(|query| missing(query, &prometheus.query(&substituted(&query.text))))
            .collect();
        if missing.is_empty() { Ok(()) } else { Err(missing.join("\n")) }
    });
}
