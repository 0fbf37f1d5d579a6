//! Manifests of Kubernetes and the chart. The chart is rendered by the real helm, and all manifests
//! are validated by the schemas of the oldest and the newest supported version.

use std::path::Path;

use serde_json::{Value, json};

use crate::service_monitor::{check_prometheus_rule, check_service_monitor};
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

/// Renders the chart.
fn template(values: &[&str]) -> String {
    let arguments = ["template", "edge", CHART, "--namespace", "limits"].into_iter();
    succeed("helm", arguments.chain(values.iter().copied()))
}

/// Renders and validates the chart, and returns its manifests.
fn render(values: &[&str]) -> Vec<Value> {
    let text = template(values);
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
    // Time for the delay and for the drain.
    let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64().expect("a number");
    let config = config_of(manifests);
    let delay = config.split("shutdown_delay: ").nth(1).and_then(|rest| rest.split('s').next());
    let delay: u64 = delay.and_then(|delay| delay.parse().ok()).expect("seconds");
    assert!(delay + 8 < grace, "{delay} s + 8 s must be less than {grace} s");
}

fn check_autoscaler(manifests: &[Value]) {
    let target = &of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"];
    assert_eq!(target, &of_kind(manifests, "Deployment")["metadata"]["name"]);
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
    check_autoscaler(&manifests);
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
    for kind in [SERVICE_MONITOR, "PrometheusRule"] {
        assert!(manifests.iter().all(|manifest| manifest["kind"] != kind), "{kind}");
    }

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

/// Counters in memory are not shared, so two replicas would admit twice the limit.
/// Memory of a pod whose listeners are full of connections with half a request, in KiB.
fn memory_when_full(config: &Value) -> u64 {
    let connections = config["listen"]["max_connections"].as_u64().expect("a number");
    // Measured: see docs/operations.md.
    let (process, redis_buffers) = (48 * 1024, 64 * 1024);
    let (of_http, of_grpc, of_resp) = (150, 150, 15);
    process + redis_buffers + connections * (of_http + of_grpc + of_resp)
}

#[test]
fn connections_fit_into_the_memory_limit() {
    let connections = |memory: &str| {
        let limit = format!("adminToken=t,resources.limits.memory={memory}");
        let text = template(&["--set", &limit, "-s", "templates/configmap.yaml"]);
        let manifest: Value = serde_saphyr::from_str(&text).expect("YAML");
        let config = manifest["data"]["tidegate.yaml"].as_str().expect("a text");
        serde_saphyr::from_str::<Value>(config).expect("YAML")
    };
    for (memory, kib) in [
        ("512Mi", 512 * 1024),
        ("1Gi", 1024 * 1024),
        ("1.5Gi", 1536 * 1024),
        ("512M", 500_000),
        ("4G", 3_900_000),
    ] {
        let full = memory_when_full(&connections(memory));
        assert!(full <= kib && full >= kib / 2, "{memory}: {full} KiB");
    }
    assert_eq!(connections("512Mi")["listen"]["max_connections"], 1_024);
    assert_eq!(connections("64Gi")["listen"]["max_connections"], 16_384);
    assert_eq!(connections("null")["listen"]["max_connections"], Value::Null, "no limit");
    let own = template(&["--set", "adminToken=t,config.listen.max_connections=77"]);
    assert!(own.contains("max_connections: 77\n"), "{own}");
    let manifest: Value =
        serde_saphyr::from_str(&read("deploy/kubernetes/configmap.yaml")).expect("YAML");
    let config = manifest["data"]["tidegate.yaml"].as_str().expect("a text");
    assert!(config.contains("max_connections: 1024\n"), "as for the same limit of the chart");
}

#[test]
fn chart_has_one_replica_unless_they_share_a_redis() {
    let replicas = |values: &[&str]| {
        let text = template(&[&["--set", "adminToken=t"], values].concat());
        let manifests: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
        let scales = manifests.iter().any(|it| it["kind"] == "HorizontalPodAutoscaler");
        if scales {
            check_autoscaler(&manifests);
        }
        (of_kind(&manifests, "Deployment")["spec"]["replicas"].clone(), scales)
    };
    assert_eq!(replicas(&[]), (json!(1), false));
    assert_eq!(replicas(&["--set", "replicaCount=0"]), (json!(0), false));
    for redis in [
        "config.store.redis=redis://h",
        "config.store.sentinel.master=m",
        "env[0].name=TIDEGATE_REDIS",
    ] {
        assert_eq!(replicas(&["--set", redis]), (Value::Null, true), "{redis}");
        let fixed = ["--set", redis, "--set", "autoscaling.enabled=false"];
        assert_eq!(replicas(&fixed), (json!(2), false), "{redis}");
    }
}

#[test]
fn chart_mounts_certificates_and_serves_redis_clients_with_a_token() {
    let listeners = "adminToken=t,apiToken=u,resp.enabled=true,config.tls.admin=true";
    let certificate = "config.tls.certificate=/run/certificates/server/tls.crt,\
                       config.tls.key=/run/certificates/server/tls.key";
    let volumes = "certificates[0].name=server,certificates[0].secret=tls,\
                   certificates[1].name=redis-ca,certificates[1].configMap=ca";
    let scraped = "serviceMonitor.enabled=true,serviceMonitor.tlsConfig.serverName=tidegate";
    let values = [listeners, certificate, volumes, scraped];
    let manifests = render(&values.map(|values| ["--set", values]).concat());
    check_deployment(&manifests);
    let config: Value = serde_saphyr::from_str(config_of(&manifests)).expect("YAML");
    assert_eq!(config["listen"]["resp"], "0.0.0.0:8083");
    assert_eq!(config["auth"]["api_token_file"], "/run/secrets/tidegate/api-token");
    assert_eq!(of_kind(&manifests, "Secret")["stringData"]["api-token"], "u");
    let pod = &of_kind(&manifests, "Deployment")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(container["readinessProbe"]["httpGet"]["scheme"], "HTTPS");
    let mounts = container["volumeMounts"].as_array().expect("mounts");
    for (name, source) in [
        ("server", json!({"secret": {"secretName": "tls"}})),
        ("redis-ca", json!({"configMap": {"name": "ca"}})),
    ] {
        let path = format!("/run/certificates/{name}");
        let mount = mounts.iter().find(|mount| mount["mountPath"] == *path).expect("a mount");
        let mut volumes = pod["volumes"].as_array().expect("volumes").iter();
        let volume = volumes.find(|volume| volume["name"] == mount["name"]).expect("its volume");
        for (kind, expected) in source.as_object().expect("a source") {
            assert_eq!(&volume[kind], expected, "{name}");
        }
    }
    let monitor = of_kind(&manifests, SERVICE_MONITOR);
    check_service_monitor(monitor, of_kind(&manifests, "Service"));
    assert_eq!(monitor["spec"]["endpoints"][0]["scheme"], "https");

    // Keys of a Secret that exists have names of their own.
    let own = "existingSecret=own,existingSecretKeys.adminToken=a,existingSecretKeys.apiToken=b";
    let manifests = render(&["--set", own]);
    let config: Value = serde_saphyr::from_str(config_of(&manifests)).expect("YAML");
    assert_eq!(config["auth"]["admin_token_file"], "/run/secrets/tidegate/a");
    assert_eq!(config["auth"]["api_token_file"], "/run/secrets/tidegate/b");
}

#[test]
fn chart_has_a_token_of_the_api_unless_it_is_turned_off() {
    let api_token = |values: &str| {
        let manifests = render(&["--set", &format!("adminToken=t,{values}")]);
        let config: Value = serde_saphyr::from_str(config_of(&manifests)).expect("YAML");
        let token = &of_kind(&manifests, "Secret")["stringData"]["api-token"];
        assert_eq!(config["auth"]["api_token_file"].is_null(), token.is_null(), "{values}");
        let volumes = &of_kind(&manifests, "Deployment")["spec"]["template"]["spec"]["volumes"];
        assert_eq!(volumes[1]["secret"]["defaultMode"], 0o440, "not for all users");
        token.as_str().map(str::to_owned)
    };
    let (generated, other) = (api_token("log=info"), api_token("log=info"));
    assert_eq!(generated.as_ref().map(String::len), Some(32));
    assert_ne!(generated, other);
    assert_eq!(api_token("apiToken=u"), Some("u".to_owned()));
    assert_eq!(api_token("apiToken=u,generateApiToken=false"), Some("u".to_owned()));
    assert_eq!(api_token("generateApiToken=false"), None);
}

/// Peers of other namespaces need an entry, except the clients of the gateway.
#[test]
fn chart_admits_its_own_namespace_by_default() {
    let rules = |values: &str| {
        let manifests = render(&["--set", &format!("adminToken=t,{values}")]);
        let rules = of_kind(&manifests, "NetworkPolicy")["spec"]["ingress"].clone();
        let rules = rules.as_array().expect("rules").iter().map(|rule| {
            let ports = rule["ports"].as_array().expect("ports").iter();
            let ports: Vec<_> = ports.filter_map(|port| port["port"].as_str()).collect();
            (ports.join(" "), rule["from"].clone())
        });
        rules.collect::<Vec<_>>()
    };
    let rule = |ports: &str, from: Value| (ports.to_owned(), from);
    let own = || json!([{"podSelector": {}}]);
    assert_eq!(rules("log=info"), [rule("http grpc", own()), rule("admin", own())]);
    let upstream = "command=gateway,config.gateway.upstreams={http://app:3000}";
    assert_eq!(rules(upstream), [rule("gateway", Value::Null), rule("admin", own())]);
    let expected = [rule("gateway", Value::Null), rule("resp", own()), rule("admin", own())];
    assert_eq!(rules(&format!("resp.enabled=true,{upstream}")), expected);
    let text = template(&["--set", "adminToken=t,networkPolicy.enabled=false"]);
    assert!(!text.contains("NetworkPolicy"), "{text}");
}

#[test]
fn chart_has_alerts_a_network_policy_and_an_account() {
    let manifests = render(&[
        "--set",
        "adminToken=t,prometheusRule.enabled=true",
        "--set",
        "networkPolicy.adminFrom[0].namespaceSelector.matchLabels.name=monitoring",
    ]);
    check_prometheus_rule(of_kind(&manifests, "PrometheusRule"));
    let pod = &of_kind(&manifests, "Deployment")["spec"]["template"];
    let account = &of_kind(&manifests, "ServiceAccount")["metadata"]["name"];
    assert_eq!(&pod["spec"]["serviceAccountName"], account);
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    let policy = &of_kind(&manifests, "NetworkPolicy")["spec"];
    for (name, value) in policy["podSelector"]["matchLabels"].as_object().expect("labels") {
        assert_eq!(&pod["metadata"]["labels"][name], value, "{name}");
    }
    let ports = pod["spec"]["containers"][0]["ports"].as_array().expect("ports");
    let rules = policy["ingress"].as_array().expect("rules");
    let permitted = rules.iter().flat_map(|rule| rule["ports"].as_array().expect("ports"));
    let mut permitted: Vec<&Value> = permitted.map(|port| &port["port"]).collect();
    let mut served: Vec<&Value> = ports.iter().map(|port| &port["name"]).collect();
    permitted.sort_by_key(ToString::to_string);
    served.sort_by_key(ToString::to_string);
    assert_eq!(permitted, served);
    assert_eq!(rules[1]["from"][0]["namespaceSelector"]["matchLabels"]["name"], "monitoring");

    let text = template(&["--set", "adminToken=t,serviceAccount.create=false"]);
    assert!(!text.contains("kind: ServiceAccount") && text.contains("Name: default\n"), "{text}");
}

#[test]
fn chart_rejects_wrong_values() {
    for (values, message) in [
        ("replicas=3", "Additional property replicas is not allowed"),
        ("autoscaling.max=3", "Additional property max is not allowed"),
        ("command=server", "command"),
        ("certificates[0].name=ca", "Must validate one and only one schema"),
        ("resp.enabled=true,generateApiToken=false", "resp.enabled needs a token"),
        ("resources.limits.memory=1000000000", "set config.listen.max_connections"),
    ] {
        let output =
            run("helm", ["template", "edge", CHART, "--set", "adminToken=t", "--set", values]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(message), "{values}: {error}");
    }
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
