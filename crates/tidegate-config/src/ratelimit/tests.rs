use std::os::unix::ffi::OsStringExt as _;

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

/// Reads variables, of which the last one of a name counts.
fn environment(
    variables: &[(&str, &str)],
) -> Result<(EnvironmentConfig, RatelimitSettings), ConfigError> {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), OsString::from(value));
    Variables(variables.iter().map(own).collect()).read()
}

fn read(variables: &[(&str, &str)]) -> Read {
    let (config, settings) = environment(variables).map_err(|error| error.to_string())?;
    Ok((serde_json::from_str(&config.text).expect("JSON"), config.text, settings))
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
        ("REDIS_PERSECOND_URL", "h:1"),
    ])
    .expect("valid");
    let metrics = settings.prometheus.expect("metrics");
    assert_eq!(
        (&metrics.0.to_string()[metrics.0.to_string().len() - 6..], &*metrics.1),
        (":19001", "/metrics")
    );
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
    assert!(without_effect.contains("REDIS_PERSECOND_URL: REDIS_PERSECOND is off"));
}

#[test]
fn settings_that_cannot_hold_are_errors_that_say_what_to_do() {
    let tls = [
        ("GRPC_SERVER_USE_TLS", "true"),
        ("GRPC_SERVER_TLS_CERT", "/c"),
        ("GRPC_SERVER_TLS_KEY", "/k"),
        ("GRPC_CLIENT_TLS_SAN", "edge"),
    ];
    let traces = [("TRACING_ENABLED", "1"), ("TRACING_EXPORTER_PROTOCOL", "zipkin")];
    let address = "PROMETHEUS_ADDR=\"x\": must be HOST:PORT, or :PORT for all";
    for (variables, expected) in [
        (
            &[("BACKEND_TYPE", "memcache")][..],
            "BACKEND_TYPE=\"memcache\": is not supported: counts",
        ),
        (&[("REDIS_PERSECOND", "true")], "REDIS_PERSECOND=\"true\": a second Redis"),
        (
            &[("REDIS_TYPE", "RING")],
            "REDIS_TYPE=\"RING\": must be one of SINGLE, CLUSTER, SENTINEL",
        ),
        (
            &[("REDIS_TYPE", "SENTINEL"), ("REDIS_URL", "main")],
            "REDIS_URL=\"main\": names no sentinel",
        ),
        (&[("REDIS_SOCKET_TYPE", "udp")], "REDIS_SOCKET_TYPE=\"udp\": must be one of unix, tcp"),
        (&[("CONFIG_TYPE", "HTTP")], "CONFIG_TYPE=\"HTTP\": must be one of FILE, GRPC_XDS_SOTW"),
        (&[("SHADOW_MODE", "yes")], "SHADOW_MODE=\"yes\": must be true or false"),
        (&[("PORT", "http")], "PORT=\"http\": must be a port"),
        (&[("HOST", "no host")], "HOST=\"no host\": must be an IP address, or the name of a host"),
        (&[("LOG_LEVEL", "loud")], "LOG_LEVEL=\"loud\": must be one of warn"),
        (&[("LOG_FORMAT", "xml")], "LOG_FORMAT=\"xml\": must be one of text, json"),
        (&[("NEAR_LIMIT_RATIO", "nan")], "NEAR_LIMIT_RATIO=\"nan\": must be a number from 0 to 1"),
        (&[("NEAR_LIMIT_RATIO", "2")], "NEAR_LIMIT_RATIO=\"2\": must be a number from 0 to 1"),
        (&traces, "TRACING_EXPORTER_PROTOCOL=\"zipkin\": must be one of http, grpc"),
        (&[("PROMETHEUS_ADDR", "x"), ("USE_PROMETHEUS", "1")], address),
        (&[(ALGORITHM_VARIABLE, "foo")], "TIDEGATE_ENVOY_ALGORITHM=\"foo\": must be one of "),
        (
            &[(ALGORITHM_VARIABLE, "concurrency")],
            "TIDEGATE_ENVOY_ALGORITHM=\"concurrency\": must be",
        ),
        (&tls[..3], ""),
        (&tls, "GRPC_CLIENT_TLS_SAN=\"edge\": names of client certificates are not checked"),
        (&tls[..1], "GRPC_SERVER_TLS_CERT: is not set, but GRPC_SERVER_USE_TLS is true"),
    ] {
        match read(variables) {
            Ok(_) => assert_eq!(expected, "", "{variables:?}"),
            Err(error) => assert!(error.starts_with(expected) && !expected.is_empty(), "{error}"),
        }
    }
    let invalid = OsString::from_vec(b"a\xff".to_vec());
    let variables = Variables(BTreeMap::from([("CACHE_KEY_PREFIX".to_owned(), invalid)]));
    let error = variables.read().err().expect("not UTF-8").to_string();
    assert_eq!(error, "CACHE_KEY_PREFIX=\"a\u{fffd}\": must be UTF-8");
}

/// Errors in values that only the whole configuration can judge.
#[test]
fn errors_name_the_variable_with_its_value_and_no_place_in_a_file() {
    let tls = ("REDIS_TLS", "true");
    let xds_tls = ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true");
    let redis = ("REDIS_URL", "h:1");
    for (variables, expected) in [
        (&[("REDIS_URL", "h:bad")][..], "REDIS_URL=\"h:bad\": "),
        (&[("REDIS_URL", "redis://u:S3CR3T@h:bad")], "REDIS_URL: "),
        (&[("REDIS_URL", "h:1,x:bad"), ("REDIS_TYPE", "cluster")], "REDIS_URL=\"h:1,x:bad\": "),
        (&[("REDIS_URL", "m,x:bad"), ("REDIS_TYPE", "sentinel")], "REDIS_URL=\"m,x:bad\": "),
        (&[redis, ("CACHE_KEY_PREFIX", "{a}")], "CACHE_KEY_PREFIX=\"{a}\": prefix is not usable"),
        (&[redis, ("REDIS_TIMEOUT", "0")], "REDIS_TIMEOUT=\"0\": must be from 1ms to 1m"),
        (
            &[redis, tls, ("REDIS_TLS_CACERT", "/no/ca")],
            "REDIS_TLS_CACERT=\"/no/ca\": this file: cannot be read",
        ),
        (
            &[redis, tls, ("REDIS_TLS_CLIENT_CERT", "/c")],
            "REDIS_TLS_CLIENT_CERT=\"/c\": store.tls needs certificate and key together",
        ),
        (
            &[redis, ("GRPC_MAX_CONNECTION_AGE", "500ms")],
            "GRPC_MAX_CONNECTION_AGE=\"500ms\": must be from 1s to 366d, or off for never",
        ),
        (
            &[redis, ("CONFIG_GRPC_XDS_SERVER_URL", "gateway")],
            "CONFIG_GRPC_XDS_SERVER_URL=\"gateway\": is not an address: write HOST:PORT",
        ),
        (
            &[redis, xds_tls, ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/no/ca")],
            "CONFIG_GRPC_XDS_SERVER_TLS_CACERT=\"/no/ca\": ",
        ),
        (&[redis, ("GRPC_UDS", "rl.sock")], "GRPC_UDS=\"rl.sock\": the path of a Unix socket must"),
        (&[redis, ("PORT", "8081")], "PORT=\"8081\": 0.0.0.0:8081 is already in use"),
        (
            &[redis, ("CONFIG_TYPE", "FILE"), ("RUNTIME_ROOT", "/nowhere")],
            "RUNTIME_ROOT=\"/nowhere\" RUNTIME_SUBDIRECTORY=\"ratelimit\": \
             /nowhere/ratelimit/config/*: no file matches",
        ),
        (
            &[redis, ("CONFIG_TYPE", "FILE"), ("RUNTIME_ROOT", "")],
            "RUNTIME_SUBDIRECTORY=\"ratelimit\": /srv",
        ),
    ] {
        let variables = [&GATEWAY[..], variables].concat();
        let (config, _) = environment(&variables).expect("each value is valid alone");
        let error = config.load().expect_err(expected).to_string();
        assert!(error.starts_with(expected) && !expected.is_empty(), "{error}");
        assert!(!error.contains('\n') && !error.contains("S3CR3T"), "{error}");
    }
}

#[test]
fn hosts_are_addresses_and_names_and_none_is_every_address() {
    let address = |value: &str| {
        let variables =
            [("USE_PROMETHEUS", "1"), ("PROMETHEUS_ADDR", value), ("HOST", "localhost")];
        let (config, _, settings) = read(&variables).expect("valid");
        assert_eq!(config["listen"]["http"], "127.0.0.1:8080");
        settings.prometheus.expect("metrics").0.to_string()
    };
    assert_eq!(address("localhost:19001"), "127.0.0.1:19001");
    assert_eq!(address("127.0.0.2:19001"), "127.0.0.2:19001");
    assert_eq!(address("[::1]:19001"), "[::1]:19001");
    // A system may have no IPv6.
    assert!(["[::]:19001", "0.0.0.0:19001"].contains(&&*address(":19001")));
}
