//! Manifests of Kubernetes and the chart. The chart is rendered by the real helm, and all manifests
//! are validated by the schemas of the oldest and the newest supported version.

use std::path::Path;

use serde_json::Value;

use crate::service_monitor::check_service_monitor;
use crate::{check_config, read, root, run, succeed};

const VERSIONS: [&str; 2] = ["1.25", "1.37"];
/// Kind of the Prometheus operator, whose schema is not among those of Kubernetes: see
/// [`check_service_monitor`].
const SERVICE_MONITOR: &str = "ServiceMonitor";

const CHART: &str = "deploy/helm/tidegate";

fn validate(file: &Path) {
    for version in VERSIONS {
        let arguments = ["--strict", "--no-warn", "-k", version].map(Into::into);
        let arguments = arguments.into_iter().chain([file.as_os_str().to_owned()]);
        succeed("kubernetes-validate", arguments);
    }
}

/// Renders the chart, and returns its manifests.
fn render(values: &[&str]) -> Vec<Value> {
    let arguments = ["template", "edge", CHART, "--namespace", "limits"].into_iter();
    let text = succeed("helm", arguments.chain(values.iter().copied()));
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("rendered.yaml");
    std::fs::write(&file, &text).expect("written");
    validate(&file);
    serde_saphyr::from_multiple(&text).expect("YAML")
}

fn of_kind<'a>(manifests: &'a [Value], kind: &str) -> &'a Value {
    let found = manifests.iter().find(|manifest| manifest["kind"] == kind);
    found.unwrap_or_else(|| panic!("no {kind}"))
}

/// Checks the rules that both the manifests and the chart must follow.
fn check_deployment(manifests: &[Value]) {
    let pod = &of_kind(manifests, "Deployment")["spec"]["template"];
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["capabilities"]["drop"][0], "ALL");
    assert_eq!(pod["spec"]["securityContext"]["runAsNonRoot"], true);
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/healthz");
    for mount in container["volumeMounts"].as_array().expect("mounts") {
        assert_eq!(mount["subPath"], Value::Null, "a changed ConfigMap would not be seen");
    }
    // Labels of the pods must be those that the others select.
    let labels = &pod["metadata"]["labels"];
    let selectors = [
        &of_kind(manifests, "Deployment")["spec"]["selector"]["matchLabels"],
        &of_kind(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        &of_kind(manifests, "Service")["spec"]["selector"],
    ];
    for selector in selectors {
        for (name, value) in selector.as_object().expect("labels") {
            assert_eq!(&labels[name], value, "{name}");
        }
    }
    let ports = container["ports"].as_array().expect("ports");
    for port in of_kind(manifests, "Service")["spec"]["ports"].as_array().expect("ports") {
        assert!(ports.iter().any(|of_pod| of_pod["name"] == port["targetPort"]), "{port}");
    }
    let target = &of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"];
    assert_eq!(target, &of_kind(manifests, "Deployment")["metadata"]["name"]);
    // Time for the delay and for the drain.
    let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64().expect("a number");
    let config = config_of(manifests);
    let delay = config.split("shutdown_delay: ").nth(1).and_then(|rest| rest.split('s').next());
    let delay: u64 = delay.and_then(|delay| delay.parse().ok()).expect("seconds");
    assert!(delay + 8 < grace, "{delay} s + 8 s must be less than {grace} s");
}

fn config_of(manifests: &[Value]) -> &str {
    of_kind(manifests, "ConfigMap")["data"]["tidegate.yaml"].as_str().expect("a text")
}

#[test]
fn manifests_match_the_schemas() {
    let folder = root().join("deploy/kubernetes");
    let kustomization: Value =
        serde_saphyr::from_str(&read("deploy/kubernetes/kustomization.yaml")).expect("YAML");
    let mut listed: Vec<&str> = kustomization["resources"]
        .as_array()
        .expect("resources")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    listed.push("servicemonitor.yaml");
    let count = std::fs::read_dir(&folder).expect("a folder").count();
    assert_eq!(listed.len() + 1, count, "every manifest is listed");
    let mut manifests = Vec::new();
    for name in listed {
        validate(&folder.join(name));
        let text = read(&format!("deploy/kubernetes/{name}"));
        manifests.push(serde_saphyr::from_str::<Value>(&text).expect("YAML"));
    }
    check_deployment(&manifests);
    check_config("the ConfigMap", config_of(&manifests), &[]);
    check_service_monitor(of_kind(&manifests, SERVICE_MONITOR), of_kind(&manifests, "Service"));
}

#[test]
fn chart_renders_valid_manifests() {
    succeed("helm", ["lint", "--strict", CHART, "--set", "adminToken=t"]);
    let manifests = render(&["--set", "adminToken=t"]);
    check_deployment(&manifests);
    check_config("the chart", config_of(&manifests), &[]);
    let version = env!("CARGO_PKG_VERSION");
    let image =
        &of_kind(&manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image, &format!("ghcr.io/tidegate/tidegate:{version}"));
    assert!(manifests.iter().all(|manifest| manifest["kind"] != SERVICE_MONITOR));

    let gateway = render(&[
        "--set",
        "existingSecret=own,command=gateway,serviceMonitor.enabled=true,autoscaling.enabled=false",
        "--set",
        "config.gateway.upstreams={http://app:3000},config.store.redis=${REDIS_URL}",
        "--set",
        "env[0].name=REDIS_URL,env[0].value=redis://h",
        "--set",
        "extraArgs={--access-log,stdout}",
    ]);
    check_config("the gateway", config_of(&gateway), &[("REDIS_URL", "redis://h")]);
    assert!(gateway.iter().all(|manifest| manifest["kind"] != "Secret"), "it has its own");
    let monitor = of_kind(&gateway, SERVICE_MONITOR);
    check_service_monitor(monitor, of_kind(&gateway, "Service"));
    let credentials = &monitor["spec"]["endpoints"][0]["authorization"]["credentials"];
    assert_eq!((&credentials["name"], &credentials["key"]), (&"own".into(), &"admin-token".into()));
    assert_eq!(of_kind(&gateway, "Deployment")["spec"]["replicas"], 2);
}

#[test]
fn chart_requires_a_token() {
    let output = run("helm", ["template", "edge", CHART]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("set adminToken"), "{message}");
}

/// A mistake in a manifest is found, so the tests above can fail.
#[test]
fn unknown_field_of_a_manifest_is_an_error() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("deployment.yaml");
    let text = read("deploy/kubernetes/deployment.yaml");
    std::fs::write(&file, text.replace("readOnlyRootFilesystem", "readOnlyRoot")).expect("written");
    let file = file.to_str().expect("UTF-8");
    let output = run("kubernetes-validate", ["--strict", "-k", VERSIONS[1], file]);
    assert!(!output.status.success());
}
