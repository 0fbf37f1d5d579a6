//! Settings of envoyproxy/ratelimit, by the names and with the defaults of its environment:
//! translates them into the text of a [`Config`](crate::Config), and into [`RatelimitSettings`] for
//! what a configuration of Tidegate does not have.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};
use tidegate_net::ListenAddress;

/// Variable with the algorithm of the rules, in place of fixed-window.
pub const ALGORITHM_VARIABLE: &str = "TIDEGATE_ENVOY_ALGORITHM";

/// Variables that are accepted without an effect, each with what Tidegate has in its place.
const WITHOUT_EFFECT: [(&[&str], &str); 9] = [
    (
        &[
            "USE_STATSD",
            "USE_DOG_STATSD",
            "USE_DOG_STATSD_MOGRIFIERS",
            "STATSD_HOST",
            "STATSD_PORT",
            "EXTRA_TAGS",
            "STATS_FLUSH_INTERVAL",
            "DISABLE_STATS",
        ],
        "metrics are served for Prometheus (USE_PROMETHEUS), not sent by statsd",
    ),
    (&["PROMETHEUS_MAPPER_YAML"], "metrics have the names of the default mapper"),
    (
        &[
            "REDIS_POOL_SIZE",
            "REDIS_POOL_ON_EMPTY_BEHAVIOR",
            "REDIS_PIPELINE_WINDOW",
            "REDIS_PIPELINE_LIMIT",
            "REDIS_USE_EXPLICIT_PIPELINE",
        ],
        "decisions that wait share one call to Redis",
    ),
    (
        &[
            "EXPIRATION_JITTER_MAX_SECONDS",
            "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT",
            "LOCAL_CACHE_SIZE_IN_BYTES",
        ],
        "a denied request charges nothing, and denials are cached anyway",
    ),
    (
        &[
            "LIMIT_RESPONSE_HEADERS_ENABLED",
            "LIMIT_LIMIT_HEADER",
            "LIMIT_REMAINING_HEADER",
            "LIMIT_RESET_HEADER",
        ],
        "use enable_x_ratelimit_headers of Envoy's filter",
    ),
    (&["MERGE_DOMAIN_CONFIG"], "files of one domain are always merged"),
    (
        &["PROTO", "GRPC_MAX_CONNECTION_AGE_GRACE"],
        "listeners are TCP of any version, and old connections have 30s for their last calls",
    ),
    (
        &[
            "CONFIG_GRPC_XDS_NODE_METADATA",
            "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
            "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL",
            "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL",
            "XDS_CLIENT_BACKOFF_MAX_INTERVAL",
            "XDS_CLIENT_BACKOFF_RANDOM_FACTOR",
            "XDS_CLIENT_BACKOFF_JITTER",
            "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES",
        ],
        "only the node id is sent, retries wait from 1s to 30s, and messages have up to 64 MiB",
    ),
    (
        &[
            "MEMCACHE_HOST_PORT",
            "MEMCACHE_MAX_IDLE_CONNS",
            "MEMCACHE_SRV",
            "MEMCACHE_SRV_REFRESH",
            "MEMCACHE_TLS",
            "MEMCACHE_TLS_CLIENT_CERT",
            "MEMCACHE_TLS_CLIENT_KEY",
            "MEMCACHE_TLS_CACERT",
            "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION",
        ],
        "counts are kept in Redis",
    ),
];

/// Settings beside the configuration.
#[derive(Debug, Clone)]
pub struct RatelimitSettings {
    /// Address of `/rlconfig`.
    pub debug: ListenAddress,
    /// Address and path of the metrics, if they are on.
    pub prometheus: Option<(ListenAddress, String)>,
    /// Whether the process is unhealthy until it has rules.
    pub needs_rules: bool,
    /// Whether the process is unhealthy while Redis is not connected.
    pub needs_connection: bool,
    pub log_level: &'static str,
    pub logs_json: bool,
    /// Traces, if they are on.
    pub tracing: Option<TraceSettings>,
    /// Variables that are set, but have no effect, each with the reason.
    pub without_effect: Vec<String>,
}

/// Settings of traces, in addition to the standard `OTEL_*` variables.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    pub service_name: String,
    pub service_namespace: String,
    pub service_instance: String,
    /// Whether spans are sent over gRPC, and not over HTTP.
    pub is_grpc: bool,
    /// Part of the traces that is sent.
    pub sampling_rate: f64,
}

/// Error in a variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {message}")]
pub struct SettingError {
    name: &'static str,
    message: String,
}

impl RatelimitSettings {
    /// Reads the variables of this process. Returns the text of the configuration, and the settings
    /// beside it.
    pub fn from_environment() -> Result<(String, Self), SettingError> {
        Self::read(&|name| std::env::var(name).ok())
    }

    fn read(lookup: &dyn Fn(&str) -> Option<String>) -> Result<(String, Self), SettingError> {
        let variables = Variables { lookup };
        let config = json!({
            "listen": variables.listen()?,
            "store": variables.store()?,
            "tls": variables.tls()?,
            "envoy": variables.envoy()?,
        });
        let config = serde_json::to_string_pretty(&escaped(config)).unwrap_or_default();
        Ok((config, variables.settings()?))
    }
}

/// Variables of an environment. An empty one counts as missing.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    fn text_or(&self, name: &str, default: &str) -> String {
        self.text(name).unwrap_or_else(|| default.to_owned())
    }

    fn parsed<T: std::str::FromStr>(
        &self,
        name: &'static str,
        default: T,
        kind: &str,
    ) -> Result<T, SettingError> {
        let Some(text) = self.text(name) else { return Ok(default) };
        text.parse().map_err(|_| error(name, format!("{text:?} is not {kind}")))
    }

    /// Returns a flag, in any form of Go.
    fn flag(&self, name: &'static str, default: bool) -> Result<bool, SettingError> {
        match self.text(name).as_deref() {
            None => Ok(default),
            Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
            Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
            Some(other) => Err(error(name, format!("{other:?} is not true or false"))),
        }
    }

    /// Returns the address of a listener.
    fn address(
        &self,
        host: &'static str,
        port: &'static str,
        default_port: u16,
    ) -> Result<SocketAddr, SettingError> {
        let ip = self.parsed(host, IpAddr::from([0; 4]), "an IP address")?;
        Ok(SocketAddr::new(ip, self.parsed(port, default_port, "a port")?))
    }

    fn listen(&self) -> Result<Value, SettingError> {
        let grpc = match self.text("GRPC_UDS") {
            Some(path) => format!("unix:{path}"),
            None => self.address("GRPC_HOST", "GRPC_PORT", 8081)?.to_string(),
        };
        let age = self.text_or("GRPC_MAX_CONNECTION_AGE", "24h");
        let age = if matches!(age.as_str(), "0" | "0s") { "off".to_owned() } else { age };
        let http = self.address("HOST", "PORT", 8080)?.to_string();
        Ok(json!({"http": http, "grpc": grpc, "max_connection_age": age}))
    }

    /// Returns the certificates of the gRPC listener. `GRPC_SERVER_TLS_CA_CERT`, which Envoy Gateway
    /// sets, is no setting of ratelimit: clients need no certificate because of it.
    fn tls(&self) -> Result<Value, SettingError> {
        if !self.flag("GRPC_SERVER_USE_TLS", false)? {
            return Ok(Value::Null);
        }
        if self.text("GRPC_CLIENT_TLS_SAN").is_some() {
            let message = "names of client certificates are not checked: unset it, and let \
                           GRPC_CLIENT_TLS_CACERT be a CA that only signs clients that may call";
            return Err(error("GRPC_CLIENT_TLS_SAN", message));
        }
        let file = |name: &'static str| {
            self.text(name).ok_or_else(|| error(name, "is missing: GRPC_SERVER_USE_TLS is true"))
        };
        let mut tls = json!({
            "certificate": file("GRPC_SERVER_TLS_CERT")?,
            "key": file("GRPC_SERVER_TLS_KEY")?,
        });
        if let Some(ca) = self.text("GRPC_CLIENT_TLS_CACERT") {
            tls["client_ca"] = ca.into();
        }
        Ok(tls)
    }

    fn store(&self) -> Result<Value, SettingError> {
        let backend = self.text_or("BACKEND_TYPE", "redis");
        if backend != "redis" {
            let message = format!(
                "{backend:?} is not supported: counts are kept in Redis; set BACKEND_TYPE=redis and \
                 REDIS_URL, or unset both and use `tidegate serve`, which can count in memory"
            );
            return Err(error("BACKEND_TYPE", message));
        }
        if self.flag("REDIS_PERSECOND", false)? {
            let message = "a second Redis for limits per second is not supported: unset it, and \
                           REDIS_URL decides all limits; if one server is too slow for them, let \
                           REDIS_URL be a cluster";
            return Err(error("REDIS_PERSECOND", message));
        }
        let uses_tls = self.flag("REDIS_TLS", false)?;
        let mut store = self.servers(uses_tls)?;
        if uses_tls {
            if self.flag("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", false)? {
                store.insert("tls".to_owned(), json!({"verify_name": false}));
            }
            for (field, name) in [
                ("ca", "REDIS_TLS_CACERT"),
                ("certificate", "REDIS_TLS_CLIENT_CERT"),
                ("key", "REDIS_TLS_CLIENT_KEY"),
            ] {
                if let Some(file) = self.text(name) {
                    let tls = store.entry("tls").or_insert_with(|| json!({}));
                    tls[field] = file.into();
                }
            }
        }
        for (field, name) in [("prefix", "CACHE_KEY_PREFIX"), ("timeout", "REDIS_TIMEOUT")] {
            if let Some(text) = self.text(name) {
                store.insert(field.to_owned(), text.into());
            }
        }
        Ok(Value::Object(store))
    }

    fn servers(&self, uses_tls: bool) -> Result<Map<String, Value>, SettingError> {
        let is_unix = self.text_or("REDIS_SOCKET_TYPE", "unix").eq_ignore_ascii_case("unix");
        let text = self.text_or("REDIS_URL", "/var/run/nutcracker/ratelimit.sock");
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let credentials = Credentials::parse(self.text("REDIS_AUTH"));
        let url = |address: &&str| credentials.url(address, uses_tls);
        let kind = self.text_or("REDIS_TYPE", "SINGLE").to_ascii_uppercase();
        let store = match kind.as_str() {
            // Its addresses may have a scheme, also where the type of the socket is not set.
            "SINGLE" if is_unix && !text.contains("://") => {
                json!({"redis": credentials.unix_url(&text)})
            }
            "SINGLE" if parts.len() == 1 => json!({"redis": url(&parts[0])}),
            "SINGLE" | "CLUSTER" => json!({"redis": parts.iter().map(url).collect::<Vec<_>>()}),
            "SENTINEL" => {
                let Some((master, nodes)) =
                    parts.split_first().filter(|(_, nodes)| !nodes.is_empty())
                else {
                    let message = "names no sentinel: write MASTER,HOST:PORT,HOST:PORT";
                    return Err(error("REDIS_URL", message));
                };
                let own = Credentials::parse(self.text("REDIS_SENTINEL_AUTH"));
                let nodes: Vec<_> = nodes.iter().map(|node| own.url(node, uses_tls)).collect();
                let mut sentinel = json!({"master": master, "nodes": nodes});
                if let Some(password) = &credentials.password {
                    sentinel["password"] = password.as_str().into();
                }
                if let Some(user) = &credentials.user {
                    sentinel["username"] = user.as_str().into();
                }
                json!({"sentinel": sentinel})
            }
            other => {
                let message = format!("{other:?} is not SINGLE, CLUSTER or SENTINEL");
                return Err(error("REDIS_TYPE", message));
            }
        };
        match store {
            Value::Object(store) => Ok(store),
            _ => Ok(Map::new()),
        }
    }

    fn envoy(&self) -> Result<Value, SettingError> {
        let mut envoy = json!({
            "algorithm": self.text_or(ALGORITHM_VARIABLE, "fixed-window"),
            "shadow_mode": self.flag("SHADOW_MODE", false)?,
            "dynamic_metadata": self.flag("RESPONSE_DYNAMIC_METADATA", false)?,
            "near_limit_ratio": self.parsed("NEAR_LIMIT_RATIO", 0.8_f64, "a number")?,
        });
        match self.text_or("CONFIG_TYPE", "FILE").as_str() {
            "FILE" => envoy["files"] = json!([self.rule_files()?]),
            "GRPC_XDS_SOTW" => envoy["xds"] = self.xds()?,
            other => {
                let message = format!("{other:?} is not FILE or GRPC_XDS_SOTW");
                return Err(error("CONFIG_TYPE", message));
            }
        }
        Ok(envoy)
    }

    /// Returns the pattern of the files with rules: those in a folder below `RUNTIME_ROOT`.
    fn rule_files(&self) -> Result<String, SettingError> {
        let root = self.text_or("RUNTIME_ROOT", "/srv/runtime_data/current");
        let app = self.text_or("RUNTIME_APPDIRECTORY", "config");
        let folder = if self.flag("RUNTIME_WATCH_ROOT", true)? { "config" } else { &app };
        let subdirectory = self.text("RUNTIME_SUBDIRECTORY").unwrap_or_default();
        let folder = Path::new(&root).join(subdirectory.trim_matches('/')).join(folder);
        Ok(format!("{}/*", folder.display()))
    }

    fn xds(&self) -> Result<Value, SettingError> {
        let mut xds = json!({
            "server": self.text_or("CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000"),
            "node_id": self.text_or("CONFIG_GRPC_XDS_NODE_ID", "default"),
        });
        if self.flag("CONFIG_GRPC_XDS_SERVER_USE_TLS", false)? {
            let fields = [
                ("ca", "CONFIG_GRPC_XDS_SERVER_TLS_CACERT"),
                ("certificate", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT"),
                ("key", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY"),
                ("server_name", "CONFIG_GRPC_XDS_SERVER_TLS_SAN"),
            ];
            let fields = fields.into_iter();
            let fields = fields.filter_map(|(field, name)| Some((field, self.text(name)?)));
            xds["tls"] =
                fields.map(|(field, text)| (field.to_owned(), Value::String(text))).collect();
        }
        Ok(xds)
    }

    fn settings(&self) -> Result<RatelimitSettings, SettingError> {
        let prometheus = self.flag("USE_PROMETHEUS", false)?.then(|| {
            let text = self.text_or("PROMETHEUS_ADDR", ":9090");
            // As in Go, an address without a host stands for all of this machine.
            let full = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text };
            let address = full.parse::<ListenAddress>();
            address.map_err(|reason| error("PROMETHEUS_ADDR", reason.to_string()))
        });
        let path = self.text_or("PROMETHEUS_PATH", "/metrics");
        if !path.starts_with('/') || path.contains(['{', '}', ':', '*']) {
            let reason = format!("{path:?} is not a path such as /metrics");
            return Err(error("PROMETHEUS_PATH", reason));
        }
        let is_config_needed = !self.flag("FORCE_START_WITHOUT_INITIAL_CONFIG", false)?;
        let format = self.text_or("LOG_FORMAT", "text");
        Ok(RatelimitSettings {
            debug: ListenAddress::Tcp(self.address("DEBUG_HOST", "DEBUG_PORT", 6070)?),
            prometheus: prometheus.transpose()?.map(|address| (address, path)),
            needs_rules: is_config_needed
                || self.flag("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", false)?,
            needs_connection: self.flag("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", false)?,
            log_level: self.log_level()?,
            logs_json: format.eq_ignore_ascii_case("json"),
            tracing: self.tracing()?,
            without_effect: self.without_effect(),
        })
    }

    fn log_level(&self) -> Result<&'static str, SettingError> {
        let text = self.text_or("LOG_LEVEL", "WARN").to_ascii_lowercase();
        match text.as_str() {
            "panic" | "fatal" | "error" => Ok("error"),
            "warn" | "warning" => Ok("warn"),
            "info" => Ok("info"),
            "debug" => Ok("debug"),
            "trace" => Ok("trace"),
            _ => Err(error("LOG_LEVEL", format!("{text:?} is no level"))),
        }
    }

    fn tracing(&self) -> Result<Option<TraceSettings>, SettingError> {
        if !self.flag("TRACING_ENABLED", false)? {
            return Ok(None);
        }
        let protocol = self.text_or("TRACING_EXPORTER_PROTOCOL", "http");
        Ok(Some(TraceSettings {
            service_name: self.text_or("TRACING_SERVICE_NAME", "RateLimit"),
            service_namespace: self.text_or("TRACING_SERVICE_NAMESPACE", ""),
            service_instance: self.text_or("TRACING_SERVICE_INSTANCE_ID", ""),
            is_grpc: protocol.eq_ignore_ascii_case("grpc"),
            sampling_rate: self.parsed("TRACING_SAMPLING_RATE", 1.0, "a number")?,
        }))
    }

    fn without_effect(&self) -> Vec<String> {
        let is_set = |name: &&&str| {
            // Switched off, it is as it would be anyway.
            self.text(name).is_some_and(|value| !value.eq_ignore_ascii_case("false"))
        };
        let groups = WITHOUT_EFFECT.iter().filter_map(|(names, reason)| {
            let names: Vec<&str> = names.iter().filter(is_set).copied().collect();
            (!names.is_empty()).then(|| format!("{}: {reason}", names.join(", ")))
        });
        groups.collect()
    }
}

/// User and password of Redis: `PASSWORD` or `USER:PASSWORD`.
#[derive(Default)]
struct Credentials {
    user: Option<String>,
    password: Option<String>,
}

impl Credentials {
    fn parse(text: Option<String>) -> Self {
        let Some(text) = text else { return Self::default() };
        match text.split_once(':') {
            Some((user, password)) => {
                Self { user: Some(user.to_owned()), password: Some(password.to_owned()) }
            }
            None => Self { user: None, password: Some(text) },
        }
    }

    /// Returns the URL of a server, given by `HOST:PORT` or by a URL, whose own credentials stay.
    fn url(&self, address: &str, uses_tls: bool) -> String {
        let (scheme, rest) = match address.split_once("://") {
            Some(("redis", rest)) if uses_tls => ("rediss", rest),
            Some((scheme, rest)) => (scheme, rest),
            None => (if uses_tls { "rediss" } else { "redis" }, address),
        };
        let Some(password) = self.password.as_ref().filter(|_| !rest.contains('@')) else {
            return format!("{scheme}://{rest}");
        };
        let user = self.user.as_deref().map(encoded).unwrap_or_default();
        format!("{scheme}://{user}:{}@{rest}", encoded(password))
    }

    fn unix_url(&self, path: &str) -> String {
        let options = [("user", &self.user), ("pass", &self.password)].into_iter();
        let options = options
            .filter_map(|(name, value)| Some(format!("{name}={}", encoded(value.as_deref()?))));
        let options = options.collect::<Vec<_>>().join("&");
        let separator = if options.is_empty() { "" } else { "?" };
        format!("unix://{path}{separator}{options}")
    }
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn error(name: &'static str, message: impl Into<String>) -> SettingError {
    SettingError { name, message: message.into() }
}

/// Escapes `${` in all texts: they are values already, and name no variables.
fn escaped(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace("${", "$${")),
        Value::Array(list) => list.into_iter().map(escaped).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name, escaped(value))).collect()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
