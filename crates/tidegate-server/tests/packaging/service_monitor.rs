//! Objects of the Prometheus operator, of the manifests and of the chart, by its schemas.
//!
//! That schema checks types, formats and required fields. It permits unknown fields, which a
//! cluster would drop, so the fields are compared with a list as well.

use serde_json::{Value, json};

use crate::{read, root, run};

/// Validates the JSON document of its last argument.
const SCRIPT: &str = r#"
const object = JSON.parse(process.argv.at(-1));
const models = "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/" + object.kind;
const { [object.kind]: Model } = await import(models);
new Model(object).validate();
"#;

/// Fields of a `ServiceMonitor` in use here. `[]` is any entry of a list, and `*` any label.
const FIELDS: [&str; 14] = [
    "apiVersion",
    "kind",
    "metadata.name",
    "metadata.namespace",
    "metadata.labels.*",
    "spec.selector.matchLabels.*",
    "spec.endpoints.[].port",
    "spec.endpoints.[].path",
    "spec.endpoints.[].interval",
    "spec.endpoints.[].scheme",
    "spec.endpoints.[].tlsConfig.serverName",
    "spec.endpoints.[].authorization.type",
    "spec.endpoints.[].authorization.credentials.name",
    "spec.endpoints.[].authorization.credentials.key",
];

/// Returns the path of each value that has no parts.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    let inside = |name: &str| if path.is_empty() { name.into() } else { format!("{path}.{name}") };
    match value {
        Value::Object(fields) => {
            let has_labels = path.ends_with("abels");
            for (name, value) in fields {
                leaves(value, &inside(if has_labels { "*" } else { name }), found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| leaves(item, &inside("[]"), found)),
        _ => found.push(path.to_owned()),
    }
}

/// Returns what is wrong with a `ServiceMonitor`, if anything.
fn wrong(monitor: &Value) -> Option<String> {
    let mut found = Vec::new();
    leaves(monitor, "", &mut found);
    if let Some(unknown) = found.into_iter().find(|path| !FIELDS.contains(&path.as_str())) {
        return Some(format!("unknown field {unknown}"));
    }
    invalid(monitor)
}

/// Returns what the schema of the operator rejects, if anything.
fn invalid(object: &Value) -> Option<String> {
    // Modules are searched in the folder of the script.
    let folder = tempfile::tempdir().expect("a temporary directory");
    let modules = root().join(".venv/node_modules").canonicalize().expect("run `make setup`");
    std::os::unix::fs::symlink(modules, folder.path().join("node_modules")).expect("a link");
    let script = folder.path().join("validate.mjs");
    std::fs::write(&script, SCRIPT).expect("written");
    let output = run("node", [script.into_os_string(), object.to_string().into()]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(message)
}

/// Checks a `ServiceMonitor`: its schema, and that it selects the service and one of its ports.
pub(crate) fn check_service_monitor(monitor: &Value, service: &Value) {
    assert_eq!(wrong(monitor), None, "{monitor}");
    for (name, value) in monitor["spec"]["selector"]["matchLabels"].as_object().expect("labels") {
        assert_eq!(&service["metadata"]["labels"][name], value, "label {name} of the service");
    }
    let ports = service["spec"]["ports"].as_array().expect("ports");
    for endpoint in monitor["spec"]["endpoints"].as_array().expect("endpoints") {
        assert_eq!(endpoint["path"], "/metrics");
        assert!(ports.iter().any(|port| port["name"] == endpoint["port"]), "{endpoint}");
    }
}

/// Checks a `PrometheusRule`: its schema, and that it has the rules of the repository.
pub(crate) fn check_prometheus_rule(rule: &Value) {
    assert_eq!(invalid(rule), None, "{rule}");
    let rules: Value = serde_saphyr::from_str(&read("deploy/prometheus/rules.yaml")).expect("YAML");
    assert_eq!(rule["spec"], rules);
}

/// Mistakes are found, so that the check above can fail.
#[test]
fn mistakes_in_a_service_monitor_are_found() {
    let with = |endpoint: Value| {
        json!({
            "apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor",
            "metadata": {"name": "tidegate"},
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "endpoints": [endpoint]},
        })
    };
    assert_eq!(wrong(&with(json!({"port": "admin", "interval": "15s"}))), None);
    for (endpoint, message) in [
        (json!({"port": "admin", "intervall": "15s"}), "unknown field spec.endpoints.[].intervall"),
        (json!({"port": "admin", "interval": "15 sec"}), "interval must match pattern"),
        (json!({"port": 8082}), "port must be string"),
        (json!({"authorization": {"credentials": {"name": "a"}}}), "must have required property"),
    ] {
        let found = wrong(&with(endpoint)).unwrap_or_default();
        assert!(found.contains(message), "{found}");
    }
}
