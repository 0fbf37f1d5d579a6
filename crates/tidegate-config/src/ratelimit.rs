//! Settings of envoyproxy/ratelimit, by the names and with the defaults of its environment:
//! translates them into the text of a [`Config`](crate::Config), and into [`RatelimitSettings`] for what a
//! configuration of Tidegate does not have.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::path::Path;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tidegate::Algorithm;
use tidegate_net::ListenAddress;

use crate::config::EnvironmentConfig;
use crate::yaml::ConfigError;

/// Variable with the algorithm of the rules, in place of fixed-window.
pub const ALGORITHM_VARIABLE: &str = "TIDEGATE_ENVOY_ALGORITHM";

/// Kind of the value of a variable.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    /// Text that has to be there, if its section is.
    Needed,
    Flag,
    /// Flag of a section, with the fields that follow.
    Section,
    Ratio,
    Duration,
}

/// Fields of the configuration, each with its variable, its kind and its default.
const FIELDS: [(&str, &str, Kind, &str); 20] = [
    ("listen.max_connection_age", "GRPC_MAX_CONNECTION_AGE", Kind::Duration, "24h"),
    ("tls.certificate", "GRPC_SERVER_TLS_CERT", Kind::Needed, ""),
    ("tls.key", "GRPC_SERVER_TLS_KEY", Kind::Needed, ""),
    // Not GRPC_SERVER_TLS_CA_CERT, which Envoy Gateway sets: ratelimit has no such setting.
    ("tls.client_ca", "GRPC_CLIENT_TLS_CACERT", Kind::Text, ""),
    ("store.prefix", "CACHE_KEY_PREFIX", Kind::Text, ""),
    ("store.timeout", "REDIS_TIMEOUT", Kind::Duration, ""),
    ("store.tls.ca", "REDIS_TLS_CACERT", Kind::Text, ""),
    ("store.tls.certificate", "REDIS_TLS_CLIENT_CERT", Kind::Text, ""),
    ("store.tls.key", "REDIS_TLS_CLIENT_KEY", Kind::Text, ""),
    ("envoy.algorithm", ALGORITHM_VARIABLE, Kind::Text, "fixed-window"),
    ("envoy.shadow_mode", "SHADOW_MODE", Kind::Flag, "false"),
    ("envoy.dynamic_metadata", "RESPONSE_DYNAMIC_METADATA", Kind::Flag, "false"),
    ("envoy.near_limit_ratio", "NEAR_LIMIT_RATIO", Kind::Ratio, "0.8"),
    ("envoy.xds.server", "CONFIG_GRPC_XDS_SERVER_URL", Kind::Text, "localhost:18000"),
    ("envoy.xds.node_id", "CONFIG_GRPC_XDS_NODE_ID", Kind::Text, "default"),
    ("envoy.xds.tls", "CONFIG_GRPC_XDS_SERVER_USE_TLS", Kind::Section, ""),
    ("envoy.xds.tls.ca", "CONFIG_GRPC_XDS_SERVER_TLS_CACERT", Kind::Text, ""),
    ("envoy.xds.tls.certificate", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT", Kind::Text, ""),
    ("envoy.xds.tls.key", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY", Kind::Text, ""),
    ("envoy.xds.tls.server_name", "CONFIG_GRPC_XDS_SERVER_TLS_SAN", Kind::Text, ""),
];

/// Fields that are made of several variables.
const COMBINED: [(&str, &str); 9] = [
    ("store.redis", "REDIS_URL"),
    ("store.sentinel", "REDIS_URL"),
    ("envoy.files", "RUNTIME_ROOT"),
    ("envoy.files", "RUNTIME_SUBDIRECTORY"),
    ("envoy.files", "RUNTIME_APPDIRECTORY"),
    ("listen.http", "PORT"),
    // Its port may be that of the other one.
    ("listen.grpc", "PORT"),
    ("listen.grpc", "GRPC_UDS"),
    ("listen.grpc", "GRPC_PORT"),
];

/// Variables that are accepted without an effect, by name or start of it, each with what Tidegate
/// has in its place.
const WITHOUT_EFFECT: [(&str, &str); 10] = [
    (
        "USE_STATSD USE_DOG_STATSD* STATSD_* EXTRA_TAGS STATS_FLUSH_INTERVAL DISABLE_STATS",
        "metrics are served for Prometheus (USE_PROMETHEUS), not sent by statsd",
    ),
    ("PROMETHEUS_MAPPER_YAML", "metrics have the names of the default mapper"),
    (
        "REDIS_POOL_* REDIS_PIPELINE_* REDIS_USE_EXPLICIT_PIPELINE",
        "decisions that wait share one call to Redis",
    ),
    ("REDIS_PERSECOND_*", "REDIS_PERSECOND is off: the Redis of REDIS_URL decides all limits"),
    (
        "EXPIRATION_JITTER_* STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT LOCAL_CACHE_SIZE_IN_BYTES",
        "a denied request charges nothing, and denials are cached anyway",
    ),
    (
        "LIMIT_RESPONSE_HEADERS_ENABLED LIMIT_LIMIT_* LIMIT_REMAINING_* LIMIT_RESET_*",
        "use enable_x_ratelimit_headers of Envoy's filter",
    ),
    ("MERGE_DOMAIN_CONFIG", "files of one domain are always merged"),
    (
        "PROTO GRPC_MAX_CONNECTION_AGE_GRACE",
        "listeners are TCP of any version, and old connections have 30s for their last calls",
    ),
    (
        "CONFIG_GRPC_XDS_NODE_METADATA CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS \
         CONFIG_GRPC_XDS_SERVER_CONNECT_* XDS_CLIENT_*",
        "only the node id is sent, retries wait from 1s to 30s, and messages have up to 64 MiB",
    ),
    ("MEMCACHE_*", "counts are kept in Redis"),
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

impl RatelimitSettings {
    /// Reads the variables of this process. Returns the configuration, and the settings beside it.
    pub fn from_environment() -> Result<(EnvironmentConfig, Self), ConfigError> {
        let named = |(name, value): (OsString, _)| Some((name.into_string().ok()?, value));
        Variables(std::env::vars_os().filter_map(named).collect()).read()
    }
}

const FORCE_START: &str = "FORCE_START_WITHOUT_INITIAL_CONFIG";

/// Variables of an environment. An empty one counts as missing.
struct Variables(BTreeMap<String, OsString>);

impl Variables {
    fn read(&self) -> Result<(EnvironmentConfig, RatelimitSettings), ConfigError> {
        let (config, settings) = (self.config()?, self.settings()?);
        let text = serde_json::to_string_pretty(&escaped(config)).unwrap_or_default();
        let fields = FIELDS.into_iter().filter(|(_, _, kind, _)| *kind != Kind::Section);
        let fields = fields.map(|(path, name, ..)| (path, name)).chain(COMBINED);
        let set = fields.filter(|(_, name)| self.get(name).is_some());
        let shown = set.map(|(path, name)| (path, self.shown(name))).collect();
        let needs_rules = !self.flag(FORCE_START, false)?;
        Ok((EnvironmentConfig { text, variables: shown, needs_rules }, settings))
    }

    fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(name).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &str) -> Result<Option<String>, ConfigError> {
        match self.get(name).map(OsStr::to_str) {
            None => Ok(None),
            Some(Some(text)) => Ok(Some(text.to_owned())),
            Some(None) => Err(self.error(name, "must be UTF-8")),
        }
    }

    fn text_or(&self, name: &str, default: &str) -> Result<String, ConfigError> {
        Ok(self.text(name)?.unwrap_or_else(|| default.to_owned()))
    }

    /// Returns a variable with its value, unless it may have a password.
    fn shown(&self, name: &str) -> String {
        let value = self.get(name).unwrap_or_default().to_string_lossy();
        let is_hidden = value.is_empty() || name.ends_with("_AUTH") || value.contains('@');
        if is_hidden { name.to_owned() } else { format!("{name}={value:?}") }
    }

    fn error(&self, name: &str, message: &str) -> ConfigError {
        ConfigError::of_subject(self.shown(name), message)
    }

    fn parsed<T: std::str::FromStr>(
        &self,
        name: &str,
        default: &str,
        kind: &str,
        is_valid: fn(&T) -> bool,
    ) -> Result<T, ConfigError> {
        let parsed = self.text_or(name, default)?.parse().ok().filter(is_valid);
        parsed.ok_or_else(|| self.error(name, &format!("must be {kind}")))
    }

    /// Returns one of these names, in lower case. The first one is the default.
    fn one_of(&self, name: &str, names: &[&'static str]) -> Result<&'static str, ConfigError> {
        let text = self.text_or(name, names[0])?;
        let found = names.iter().find(|name| text.eq_ignore_ascii_case(name));
        let message = || self.error(name, &format!("must be one of {}", names.join(", ")));
        found.copied().ok_or_else(message)
    }

    fn port(&self, name: &str, default: &str) -> Result<u16, ConfigError> {
        self.parsed(name, default, "a port, from 0 to 65535", |_| true)
    }

    fn ratio(&self, name: &str, default: &str) -> Result<f64, ConfigError> {
        self.parsed(name, default, "a number from 0 to 1", |it| (0.0..=1.0).contains(it))
    }

    /// Returns a flag, in any form of Go.
    fn flag(&self, name: &str, default: bool) -> Result<bool, ConfigError> {
        match self.text(name)?.as_deref() {
            None => Ok(default),
            Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
            Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
            Some(_) => Err(self.error(name, "must be true or false")),
        }
    }

    /// Returns the address of a listener. As in Go, no host stands for all addresses of this
    /// machine.
    fn address(&self, name: &str, host: &str, port: u16) -> Result<SocketAddr, ConfigError> {
        if host.is_empty() {
            let has_ipv6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
            let ipv4 = (Ipv4Addr::UNSPECIFIED, port).into();
            return Ok(if has_ipv6 { (Ipv6Addr::UNSPECIFIED, port).into() } else { ipv4 });
        }
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let found: Vec<_> = (host, port).to_socket_addrs().into_iter().flatten().collect();
        let ipv4 = found.iter().find(|address| address.is_ipv4());
        let message = "must be an IP address, or the name of a host that has one";
        ipv4.or(found.first()).copied().ok_or_else(|| self.error(name, message))
    }

    fn listener(
        &self,
        host: &str,
        port: &str,
        default_port: &str,
    ) -> Result<SocketAddr, ConfigError> {
        self.address(host, &self.text_or(host, "0.0.0.0")?, self.port(port, default_port)?)
    }

    fn config(&self) -> Result<Value, ConfigError> {
        self.check_supported()?;
        let mut config = json!({"store": self.servers()?});
        let grpc = match self.text("GRPC_UDS")? {
            Some(path) => format!("unix:{path}"),
            None => self.listener("GRPC_HOST", "GRPC_PORT", "8081")?.to_string(),
        };
        let http = self.listener("HOST", "PORT", "8080")?.to_string();
        config["listen"] = json!({"http": http, "grpc": grpc});
        let mut unused = Vec::new();
        if self.one_of("CONFIG_TYPE", &["FILE", "GRPC_XDS_SOTW"])? == "FILE" {
            config["envoy"]["files"] = json!([self.rule_files()?]);
            unused.push("envoy.xds");
        }
        for (section, is_on) in [
            ("tls.", "GRPC_SERVER_USE_TLS"),
            ("store.tls.", "REDIS_TLS"),
            ("envoy.xds.tls", "CONFIG_GRPC_XDS_SERVER_USE_TLS"),
        ] {
            if !self.flag(is_on, false)? {
                unused.push(section);
            }
        }
        for (path, name, kind, default) in FIELDS {
            if unused.iter().any(|unused| path.starts_with(unused)) {
                continue;
            }
            let text = self.text_or(name, default)?;
            let value = match kind {
                Kind::Needed if text.is_empty() => {
                    return Err(self.error(name, "is not set, but GRPC_SERVER_USE_TLS is true"));
                }
                Kind::Text | Kind::Needed | Kind::Duration if text.is_empty() => continue,
                Kind::Section => json!({}),
                Kind::Flag => self.flag(name, false)?.into(),
                Kind::Ratio => self.ratio(name, default)?.into(),
                Kind::Duration if text == "0" => "0s".into(),
                Kind::Text | Kind::Needed | Kind::Duration => text.into(),
            };
            *path.split('.').fold(&mut config, |node, name| &mut node[name]) = value;
        }
        if config["listen"]["max_connection_age"] == "0s" {
            config["listen"]["max_connection_age"] = "off".into();
        }
        if self.flag("REDIS_TLS", false)?
            && self.flag("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", false)?
        {
            config["store"]["tls"]["verify_name"] = false.into();
        }
        Ok(config)
    }

    /// Returns an error about settings that cannot hold, with what to do.
    fn check_supported(&self) -> Result<(), ConfigError> {
        let name = "BACKEND_TYPE";
        if self.text_or(name, "redis")? != "redis" {
            let message = "is not supported: counts are kept in Redis; set BACKEND_TYPE=redis and \
                           REDIS_URL, or unset both and use `tidegate serve`, which can count in \
                           memory";
            return Err(self.error(name, message));
        }
        let name = "REDIS_PERSECOND";
        if self.flag(name, false)? {
            let message = "a second Redis for limits per second is not supported: unset it, and \
                           REDIS_URL decides all limits; if one server is too slow for them, let \
                           REDIS_URL be a cluster";
            return Err(self.error(name, message));
        }
        let name = "GRPC_CLIENT_TLS_SAN";
        if self.flag("GRPC_SERVER_USE_TLS", false)? && self.get(name).is_some() {
            let message = "names of client certificates are not checked: unset it, and let \
                           GRPC_CLIENT_TLS_CACERT be a CA that only signs clients that may call";
            return Err(self.error(name, message));
        }
        // An algorithm that needs the ids of requests, which are no setting of ratelimit.
        let usable = Algorithm::ALL.into_iter().filter(|it| *it != Algorithm::Concurrency);
        let usable: Vec<&str> = usable.map(Algorithm::as_str).collect();
        let algorithm = self.text(ALGORITHM_VARIABLE)?;
        if algorithm.is_some_and(|name| !usable.contains(&name.as_str())) {
            let message = format!("must be one of {}", usable.join(", "));
            return Err(self.error(ALGORITHM_VARIABLE, &message));
        }
        Ok(())
    }

    fn servers(&self) -> Result<Value, ConfigError> {
        let socket = self.one_of("REDIS_SOCKET_TYPE", &["unix", "tcp", "tcp4", "tcp6"])?;
        let uses_tls = self.flag("REDIS_TLS", false)?;
        let text = self.text_or("REDIS_URL", "/var/run/nutcracker/ratelimit.sock")?;
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let credentials = Credentials::parse(self.text("REDIS_AUTH")?);
        let url = |address: &&str| credentials.url(address, uses_tls);
        let kind = self.one_of("REDIS_TYPE", &["SINGLE", "CLUSTER", "SENTINEL"])?;
        if kind == "SENTINEL" {
            let Some((master, nodes)) = parts.split_first().filter(|(_, nodes)| !nodes.is_empty())
            else {
                let message = "names no sentinel: write MASTER,HOST:PORT,HOST:PORT";
                return Err(self.error("REDIS_URL", message));
            };
            let own = Credentials::parse(self.text("REDIS_SENTINEL_AUTH")?);
            let nodes: Vec<_> = nodes.iter().map(|node| own.url(node, uses_tls)).collect();
            let mut sentinel = json!({"master": master, "nodes": nodes});
            for (field, value) in
                [("password", &credentials.password), ("username", &credentials.user)]
            {
                if let Some(value) = value {
                    sentinel[field] = value.as_str().into();
                }
            }
            return Ok(json!({"sentinel": sentinel}));
        }
        // Its addresses may have a scheme, also where the type of the socket is not set.
        if kind == "SINGLE" && socket == "unix" && !text.contains("://") {
            return Ok(json!({"redis": credentials.unix_url(&text)}));
        }
        let urls: Vec<String> = parts.iter().map(url).collect();
        Ok(match urls.as_slice() {
            [url] if kind == "SINGLE" => json!({"redis": url}),
            urls => json!({"redis": urls}),
        })
    }

    /// Returns the pattern of the files with rules: those in a folder below `RUNTIME_ROOT`.
    fn rule_files(&self) -> Result<String, ConfigError> {
        let root = self.text_or("RUNTIME_ROOT", "/srv/runtime_data/current")?;
        let app = self.text_or("RUNTIME_APPDIRECTORY", "config")?;
        let folder = if self.flag("RUNTIME_WATCH_ROOT", true)? { "config" } else { &app };
        let subdirectory = self.text_or("RUNTIME_SUBDIRECTORY", "")?;
        let folder = Path::new(&root).join(subdirectory.trim_matches('/')).join(folder);
        Ok(format!("{}/*", folder.display()))
    }

    fn settings(&self) -> Result<RatelimitSettings, ConfigError> {
        let path = self.text_or("PROMETHEUS_PATH", "/metrics")?;
        if !path.starts_with('/') || path.contains(['{', '}', ':', '*']) {
            return Err(self.error("PROMETHEUS_PATH", "must be a path such as /metrics"));
        }
        let uses_prometheus = self.flag("USE_PROMETHEUS", false)?;
        let prometheus = uses_prometheus.then(|| self.prometheus_address()).transpose()?;
        let levels = ["warn", "warning", "panic", "fatal", "error", "info", "debug", "trace"];
        let is_config_needed = !self.flag(FORCE_START, false)?;
        Ok(RatelimitSettings {
            debug: ListenAddress::Tcp(self.listener("DEBUG_HOST", "DEBUG_PORT", "6070")?),
            prometheus: prometheus.map(|address| (ListenAddress::Tcp(address), path)),
            needs_rules: is_config_needed
                || self.flag("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", false)?,
            needs_connection: self.flag("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", false)?,
            log_level: match self.one_of("LOG_LEVEL", &levels)? {
                "warning" => "warn",
                "panic" | "fatal" => "error",
                level => level,
            },
            logs_json: self.one_of("LOG_FORMAT", &["text", "json"])? == "json",
            tracing: self.tracing()?,
            without_effect: self.without_effect(),
        })
    }

    fn prometheus_address(&self) -> Result<SocketAddr, ConfigError> {
        let name = "PROMETHEUS_ADDR";
        let text = self.text_or(name, ":9090")?;
        let (host, port) = text.rsplit_once(':').unwrap_or((&text, ""));
        let message = "must be HOST:PORT, or :PORT for all addresses of this machine";
        self.address(name, host, port.parse().map_err(|_| self.error(name, message))?)
    }

    fn tracing(&self) -> Result<Option<TraceSettings>, ConfigError> {
        if !self.flag("TRACING_ENABLED", false)? {
            return Ok(None);
        }
        Ok(Some(TraceSettings {
            service_name: self.text_or("TRACING_SERVICE_NAME", "RateLimit")?,
            service_namespace: self.text_or("TRACING_SERVICE_NAMESPACE", "")?,
            service_instance: self.text_or("TRACING_SERVICE_INSTANCE_ID", "")?,
            is_grpc: self.one_of("TRACING_EXPORTER_PROTOCOL", &["http", "grpc"])? == "grpc",
            sampling_rate: self.ratio("TRACING_SAMPLING_RATE", "1")?,
        }))
    }

    fn without_effect(&self) -> Vec<String> {
        let matches = |name: &str, pattern: &str| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pattern,
        };
        // Switched off, it is as it would be anyway.
        let set =
            self.0.iter().filter(|(_, it)| !it.is_empty() && !it.eq_ignore_ascii_case("false"));
        let set: Vec<&str> = set.map(|(name, _)| name.as_str()).collect();
        let groups = WITHOUT_EFFECT.iter().filter_map(|(patterns, reason)| {
            let is_listed =
                |name: &&str| patterns.split_whitespace().any(|pattern| matches(name, pattern));
            let names: Vec<&str> = set.iter().copied().filter(is_listed).collect();
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
