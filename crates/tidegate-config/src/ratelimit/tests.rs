use std::collections::BTreeMap;

use super::*;
use crate::{Config, StoreConfig};

/// Variables that Envoy Gateway sets, without those of TLS.
const GATEWAY: [(&str, &str); 11] = [
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
    ("RUNTIME_WATCH_ROOT", "false"),
    ("LOG_LEVEL", "info"),
    ("USE_STATSD", "false"),
    ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
    ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
    ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ("REDIS_SOCKET_TYPE", "tcp"),
];

type Read = Result<(Value, String, RatelimitSettings), String>;

fn read(variables: &[(&str, &str)]) -> Read {
    let variables: BTreeMap<_, _> = variables.iter().copied().collect();
    let lookup = |name: &str| variables.get(name).map(|&value| value.to_owned());
    let (text, settings) = RatelimitSettings::read(&lookup).map_err(|error| error.to_string())?;
    Ok((serde_json::from_str(&text).expect("JSON"), text, settings))
}

/// Returns the store of these variables, in addition to those of Envoy Gateway.
fn store(variables: &[(&str, &str)]) -> Value {
    read(&[&GATEWAY[..], variables].concat()).expect("valid").0["store"].take()
}

#[test]
fn variables_of_envoy_gateway_become_a_valid_configuration() {
    let (_, text, settings) =
        read(&[&GATEWAY[..], &[("REDIS_URL", "redis.svc:6379")]].concat()).expect("valid");
    let config = Config::parse("the environment", &text).expect("a valid configuration");
    let xds = config.envoy.xds.as_ref().expect("a control plane");
    assert_eq!((xds.server.as_str(), &*xds.node_id), ("envoy-gateway:18001", "envoy-ratelimit"));
    assert!(xds.tls.is_none() && config.tls.is_none());
    assert_eq!(config.listen.http.to_string(), "0.0.0.0:8080");
    assert_eq!(config.listen.grpc.to_string(), "0.0.0.0:8081");
    assert_eq!(config.store.to_string(), "Redis at redis://redis.svc:6379");
    assert_eq!(config.envoy.algorithm, tidegate::Algorithm::FixedWindow);
    assert_eq!(settings.debug.to_string(), "0.0.0.0:6070");
    assert_eq!((settings.prometheus, settings.needs_rules), (None, false));
    assert_eq!((settings.log_level, settings.without_effect.len()), ("info", 0));
}

#[test]
fn defaults_are_those_of_ratelimit() {
    let (config, _, settings) = read(&[]).expect("valid");
    assert_eq!(config["store"]["redis"], "unix:///var/run/nutcracker/ratelimit.sock");
    assert_eq!(config["envoy"]["files"], json!(["/srv/runtime_data/current/config/*"]));
    assert_eq!(config["envoy"]["near_limit_ratio"], 0.8);
    assert_eq!(config["listen"]["max_connection_age"], "24h");
    assert!(settings.needs_rules && !settings.needs_connection && settings.tracing.is_none());
    assert_eq!(settings.log_level, "warn");
    assert!(settings.without_effect.is_empty());
}

#[test]
fn servers_of_redis_have_every_form() {
    let url = |more: &[(&str, &str)]| store(more)["redis"].take();
    assert_eq!(url(&[("REDIS_URL", "h:1")]), "redis://h:1");
    let auth = ("REDIS_AUTH", "p@ss:w${rd}");
    assert_eq!(url(&[("REDIS_URL", "h:1"), auth]), "redis://p%40ss:w%24%7Brd%7D@h:1");
    assert_eq!(url(&[("REDIS_URL", "h:1"), ("REDIS_AUTH", "secret")]), "redis://:secret@h:1");
    assert_eq!(url(&[("REDIS_URL", "redis://u:p@h:1"), auth]), "redis://u:p@h:1");
    assert_eq!(
        url(&[("REDIS_URL", "a:1, b:2"), ("REDIS_TYPE", "cluster"), ("REDIS_TLS", "true")]),
        json!(["rediss://a:1", "rediss://b:2"])
    );
    let unix = [("REDIS_URL", "/run/r.sock"), ("REDIS_SOCKET_TYPE", "unix"), ("REDIS_AUTH", "u:p")];
    assert_eq!(url(&unix), "unix:///run/r.sock?user=u&pass=p");
    let sentinel = [
        ("REDIS_TYPE", "SENTINEL"),
        ("REDIS_URL", "main,a:1,b:2"),
        ("REDIS_AUTH", "u:p"),
        ("REDIS_SENTINEL_AUTH", "s"),
    ];
    assert_eq!(
        store(&sentinel)["sentinel"],
        json!({
            "master": "main", "nodes": ["redis://:s@a:1", "redis://:s@b:2"],
            "username": "u", "password": "p"
        })
    );
    let tls = [
        ("REDIS_TLS", "1"),
        ("REDIS_URL", "h:1"),
        ("REDIS_TLS_CACERT", "/ca.pem"),
        ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ("CACHE_KEY_PREFIX", "edge"),
    ];
    let expected = json!({
        "redis": "rediss://h:1", "prefix": "edge", "tls": {"ca": "/ca.pem", "verify_name": false}
    });
    assert_eq!(store(&tls), expected);
}

#[test]
fn password_with_a_dollar_is_no_variable_and_is_never_printed() {
    let password = ("REDIS_AUTH", "a${HOME}b");
    let sentinel = [("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main,a:1"), password];
    let (_, text, _) = read(&[&GATEWAY[..], &sentinel].concat()).expect("valid");
    let config = Config::parse("the environment", &text).expect("a valid configuration");
    assert!(matches!(config.store, StoreConfig::Redis(_)));
    assert!(text.contains("a$${HOME}b"), "{text}");
    let broken = text.replace("redis://a:1", "redis://a:b");
    let error = Config::parse("the environment", &broken).expect_err("no port").to_string();
    assert!(!error.contains("HOME"), "{error}");
}

#[test]
fn tracing_metrics_and_listeners_have_their_settings() {
    let (config, _, settings) = read(&[
        ("USE_PROMETHEUS", "true"),
        ("PROMETHEUS_ADDR", ":19001"),
        ("GRPC_UDS", "/run/rl.sock"),
        ("PORT", "9090"),
        ("DEBUG_PORT", "9091"),
        ("GRPC_MAX_CONNECTION_AGE", "0"),
        ("TRACING_ENABLED", "TRUE"),
        ("TRACING_SERVICE_NAME", "envoy-ratelimit"),
        ("TRACING_SAMPLING_RATE", "0.5"),
        ("LOG_FORMAT", "JSON"),
        (ALGORITHM_VARIABLE, "sliding-log"),
        ("REDIS_POOL_SIZE", "20"),
        ("STATSD_PORT", "9125"),
    ])
    .expect("valid");
    let metrics = settings.prometheus.expect("metrics");
    assert_eq!((metrics.0.to_string(), &*metrics.1), ("0.0.0.0:19001".to_owned(), "/metrics"));
    assert_eq!(config["listen"]["grpc"], "unix:/run/rl.sock");
    assert_eq!(config["listen"]["http"], "0.0.0.0:9090");
    assert_eq!(config["listen"]["max_connection_age"], "off");
    assert_eq!(config["envoy"]["algorithm"], "sliding-log");
    assert_eq!(settings.debug.to_string(), "0.0.0.0:9091");
    let tracing = settings.tracing.expect("traces");
    assert_eq!((&*tracing.service_name, tracing.is_grpc), ("envoy-ratelimit", false));
    assert!(settings.logs_json);
    let without_effect = settings.without_effect.join("\n");
    assert!(without_effect.contains("REDIS_POOL_SIZE: "), "{without_effect}");
    assert!(without_effect.contains("STATSD_PORT: "), "{without_effect}");
}

#[test]
fn settings_that_cannot_hold_are_errors_that_say_what_to_do() {
    let tls = [
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", "/c"),
        ("GRPC_SERVER_TLS_KEY", "/k"),
        ("GRPC_CLIENT_TLS_SAN", "edge"),
    ];
    for (variables, expected) in [
        (&[("BACKEND_TYPE", "memcache")][..], "BACKEND_TYPE: \"memcache\" is not supported"),
        (&[("REDIS_PERSECOND", "true")], "REDIS_PERSECOND: a second Redis"),
        (&[("REDIS_TYPE", "RING")], "REDIS_TYPE: \"RING\" is not SINGLE"),
        (&[("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main")], "REDIS_URL: names no sentinel"),
        (&[("CONFIG_TYPE", "HTTP")], "CONFIG_TYPE: \"HTTP\" is not FILE"),
        (&[("SHADOW_MODE", "yes")], "SHADOW_MODE: \"yes\" is not true or false"),
        (&[("PORT", "http")], "PORT: \"http\" is not a port"),
        (&[("LOG_LEVEL", "loud")], "LOG_LEVEL: \"loud\" is no level"),
        (&[("PROMETHEUS_ADDR", "x"), ("USE_PROMETHEUS", "1")], "PROMETHEUS_ADDR: "),
        (&tls[..3], ""),
        (&tls, "GRPC_CLIENT_TLS_SAN: names of client certificates are not checked"),
        (&tls[..1], "GRPC_SERVER_TLS_CERT: is missing"),
    ] {
        match read(variables) {
            Ok(_) => assert_eq!(expected, "", "{variables:?}"),
            Err(error) => assert!(error.starts_with(expected) && !expected.is_empty(), "{error}"),
        }
    }
}
