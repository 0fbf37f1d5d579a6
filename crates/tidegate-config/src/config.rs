//! Configuration: parses YAML into a validated [`Config`]. Errors show the line and suggest a fix.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde_saphyr::Spanned;
use tidegate::{Algorithm, ClientIp, Encoding, OnStoreFailure, Policies, Policy};

use tidegate_net::ListenAddress;
use tidegate_net::tls::{self, ListenerTls, UpstreamTls};

use crate::envoy::{Limit, Rule, RuleHolds, Rules};
use crate::key_hash;
use crate::policies::{self, RawPolicy};
use crate::tokens::Tokens;
use crate::warning::{self, ConfigWarning};
use crate::yaml::{Bounded, BoundedDuration, ConfigError, Document, Ratio};

mod auth;
mod check;
mod cors;
mod environment;
mod gateway;
mod listen;
mod raw;
mod redaction;
pub mod rule_files;
mod schema;
mod store;
mod xds;

pub use auth::TOKEN_VARIABLES;
pub use cors::{AllowedOrigins, CorsConfig};
pub use environment::EnvironmentConfig;
pub use gateway::{
    AccessLogConfig, AccessLogFormat, GatewayConfig, LogDestination, UpstreamLimits,
    UpstreamProtocol, UpstreamUrl, UpstreamUrlError,
};
pub use listen::{AllowedHosts, Listen};
use rule_files::RuleFiles;
pub use store::{RedisConfig, RedisTopology, StoreConfig};
pub use xds::{XdsConfig, XdsTls};

/// Built-in configuration for `tidegate serve` and `tidegate gateway` without a file.
pub const SAMPLE: &str = include_str!("../sample.yaml");

/// Maximum number of log lines of denied requests per second.
const DEFAULT_DENIALS_PER_SECOND: u64 = 10;

/// Part of a limit from which on units count as near the limit, as in ratelimit.
const DEFAULT_NEAR_LIMIT_RATIO: f32 = 0.8;

#[derive(Debug)]
pub struct Config {
    pub listen: Listen,
    pub store: StoreConfig,
    pub client_ip: ClientIp,
    pub policies: Policies,
    pub envoy: EnvoyConfig,
    pub gateway: GatewayConfig,
    /// TLS towards upstreams by `gateway.ca`, which a reload renews.
    pub upstream_tls: Option<UpstreamTls>,
    /// Configuration file, all files that it names, and folders with files that it names by a
    /// folder or pattern. They are watched for changes.
    pub files: Vec<PathBuf>,
    /// Parts that are valid, but perhaps not as their author expects.
    pub warnings: Vec<ConfigWarning>,
    /// Warnings that a gateway does not have, whose upstreams may be arguments.
    pub warnings_without_gateway: Vec<ConfigWarning>,
    pub tls: Option<ListenerTls>,
    pub x_ratelimit_headers: bool,
    pub partition_keys: bool,
    pub tokens: Tokens,
    pub token_files: Vec<PathBuf>,
    pub log_denials: Option<LogDenials>,
    /// Hash of the file and of Envoy's rules as they are written, before variables are replaced.
    pub hash: String,
    /// Short hash of each section of the file, and of Envoy's rules. A hash is too short to find a
    /// secret by trying values.
    pub sections: BTreeMap<String, String>,
    /// Fields of each policy, by its name, as they are written.
    pub policy_fields: BTreeMap<String, serde_json::Map<String, serde_json::Value>>,
}

/// Sampling of the log lines of denied requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogDenials {
    /// Part of the denied requests that is logged.
    pub ratio: f32,
    pub max_per_second: u64,
}

/// Rules of envoyproxy/ratelimit, their default algorithm, and how requests are answered.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "these are settings that do not exclude others")]
pub struct EnvoyConfig {
    /// Rules of the files, or those that the control plane has sent.
    pub rules: Rules,
    /// Control plane that sends the rules.
    pub xds: Option<XdsConfig>,
    pub algorithm: Algorithm,
    /// Exceptions, by the name of a rule.
    algorithms: BTreeMap<String, Algorithm>,
    /// Holds of rules, by name.
    holds: BTreeMap<String, RuleHolds>,
    /// Key of the descriptor entry that has the id of a request.
    pub hold_id: Option<String>,
    pub on_store_failure: OnStoreFailure,
    /// Exceptions, by the name of a rule.
    on_store_failures: BTreeMap<String, OnStoreFailure>,
    /// Whether no request is denied.
    pub shadow_mode: bool,
    /// Whether responses have `dynamic_metadata`.
    pub dynamic_metadata: bool,
    /// Part of a limit from which on units count as near the limit.
    pub near_limit_ratio: f32,
    /// Whether the control plane has sent rules, if there is one.
    pub has_rules: bool,
    /// Whether requests are errors until the control plane has sent rules.
    pub needs_rules: bool,
    /// Whether metrics count units, as those of ratelimit do.
    pub counts_units: bool,
}

impl EnvoyConfig {
    /// Returns how a rule is decided while the store is unavailable.
    pub fn on_store_failure_of(&self, rule: &Rule) -> OnStoreFailure {
        let named = rule.name.as_ref().filter(|_| !self.on_store_failures.is_empty());
        let own = named.and_then(|name| self.on_store_failures.get(name));
        own.copied().unwrap_or(self.on_store_failure)
    }
}

/// Properties of the policies that matter to the setup of a Redis.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreNeeds {
    /// Largest limit of a log that is stored as a sorted set; 0 without one.
    pub largest_log: u64,
    /// Longest window; zero without one.
    pub longest_window: Duration,
}

impl Config {
    /// Returns what the policies and rules need of a Redis.
    pub fn store_needs(&self) -> StoreNeeds {
        let policies = self.policies.iter().flat_map(Policy::quotas);
        let rules = self.envoy.rules.rules().filter_map(|rule| match &rule.limit {
            Limit::Quota(_, quota) => Some(quota),
            Limit::Unlimited | Limit::Zero(..) => None,
        });
        let mut needs = StoreNeeds::default();
        for quota in policies.chain(rules) {
            let is_sorted_set = quota.algorithm() == Algorithm::SlidingLog
                && quota.encoding() == Encoding::SortedSet;
            if is_sorted_set {
                needs.largest_log = needs.largest_log.max(quota.limit());
            }
            needs.longest_window = needs.longest_window.max(quota.window());
        }
        needs
    }

    /// Returns the listeners of the API, of these, that other hosts can use without a token or a
    /// certificate.
    pub fn open_listeners<'a>(
        &self,
        addresses: &'a [(&'a str, ListenAddress)],
    ) -> impl Iterator<Item = &'a (&'a str, ListenAddress)> {
        let has_client_ca = self.tls.as_ref().is_some_and(|tls| tls.has_client_ca);
        let is_open = self.tokens.of_api().is_none() && !has_client_ca;
        addresses.iter().filter(move |(_, address)| is_open && address.is_remote())
    }

    /// Loads and validates a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::from_io(&path.display().to_string(), &error))?;
        let folder = path.parent().unwrap_or_else(|| Path::new(""));
        let mut config = Self::parse_in(folder, &path.display().to_string(), &text, false)?;
        config.files.insert(0, path.to_owned());
        Ok(config)
    }

    /// Loads only the policies and the grouping of addresses, without the certificates, passwords
    /// and other files that the configuration names: another machine may not have them.
    pub fn load_policies(path: &Path) -> Result<(Policies, ClientIp), ConfigError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::from_io(&name, &error))?;
        let document = Document::new(&name, &text).with_redaction(&redaction::NAMES);
        // Another machine may lack the variables of other sections, too.
        let raw: raw::RawConfig = document.without_variables().parse()?;
        let ipv6_prefix = ipv6_prefix(&raw.client_ip);
        let client_ip = client_ip(&document, &raw.client_ip)?;
        let policies = if raw.policies.is_empty() {
            policies::from_raw(&document, &raw.attributes, &raw.paths, ipv6_prefix, raw.policies)?
        } else {
            policies::parse_for(&name, &text, ipv6_prefix)?
        };
        Ok((policies, client_ip))
    }

    /// Validates a text. Errors refer to it by `name`.
    pub fn parse(name: &str, text: &str) -> Result<Self, ConfigError> {
        Self::parse_in(Path::new(""), name, text, false)
    }

    fn parse_in(
        folder: &Path,
        name: &str,
        text: &str,
        is_offline: bool,
    ) -> Result<Self, ConfigError> {
        let document = Document::new(name, text).with_redaction(&redaction::NAMES);
        let document = if is_offline { document.offline() } else { document };
        let mut raw: raw::RawConfig = document.parse()?;
        if is_offline {
            check::without_files(&mut raw);
        }
        validate(folder, &document, text, raw)
    }

    pub fn log_warnings(&self) {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
    }

    /// Returns the JSON Schema, for editors.
    pub fn schema() -> schemars::Schema {
        schema::config_schema()
    }
}

fn validate(
    folder: &Path,
    document: &Document<'_>,
    text: &str,
    raw: raw::RawConfig,
) -> Result<Config, ConfigError> {
    let auth = auth::validate(document, folder, raw.auth)?;
    let listen = listen::validate(document, &raw.listen, &auth.tokens)?;
    let lines: BTreeMap<String, u64> = raw.policies.iter().map(RawPolicy::line).collect();
    let (paths, ipv6_prefix) = (&raw.paths, ipv6_prefix(&raw.client_ip));
    let policies = policies::from_raw(document, &raw.attributes, paths, ipv6_prefix, raw.policies)?;
    let (store, store_files) = store::validate(document, folder, raw.store)?;
    let client_ip = client_ip(document, &raw.client_ip)?;
    let (envoy, rule_files) = envoy(document, folder, &raw.envoy)?;
    let mut warnings = auth.warnings;
    warnings.extend(rule_files.warnings);
    warnings.extend_from_slice(envoy.rules.warnings());
    let line = |policy: &str| lines.get(policy).copied();
    warnings.extend(warning::of_policies(document.name(), &policies, line));
    if envoy.hold_id.is_none() {
        warnings.extend(warning::of_ends_without_id(document.name(), &policies, line));
    }
    if let StoreConfig::Memory(settings) = &store {
        warnings.extend(warning::of_logs(document.name(), &policies, settings.max_keys, line));
        let rules = envoy.rules.rules().filter_map(|rule| match &rule.limit {
            Limit::Quota(_, quota) => Some((rule.path.as_str(), quota.window())),
            Limit::Zero(..) | Limit::Unlimited => None,
        });
        warnings.extend(warning::of_long_windows(document.name(), &policies, rules, line));
    }
    let mut files = rule_files.files;
    files.extend(rule_files.folders);
    let (tls, tls_files) = tls(document, folder, raw.tls)?;
    files.extend(tls_files);
    files.extend(store_files);
    let gateway = gateway::validate(document, folder, &raw.gateway)?;
    let (upstream_tls, ca) = gateway::upstream_tls(document, folder, &raw.gateway)?.unzip();
    files.extend(ca);
    let warnings_without_gateway = match gateway.upstreams[..] {
        [] => warning::of_responses(document.name(), &policies, line),
        _ => Vec::new(),
    };
    files.extend(auth.files.iter().cloned());
    let written = document.without_variables().parse::<JsonMap>().unwrap_or_default();
    Ok(Config {
        listen,
        store,
        client_ip,
        policies,
        envoy,
        gateway,
        upstream_tls,
        files,
        warnings,
        warnings_without_gateway,
        tls,
        x_ratelimit_headers: raw.headers.x_ratelimit.get(),
        partition_keys: raw.headers.partition_key.get(),
        tokens: auth.tokens,
        token_files: auth.files,
        log_denials: raw.log_denials.map(|raw| LogDenials {
            ratio: raw.ratio.map_or(1.0, Ratio::get),
            max_per_second: raw.max_per_second.map_or(DEFAULT_DENIALS_PER_SECOND, Bounded::get),
        }),
        hash: key_hash::of(&[text, &rule_files.texts].concat()),
        sections: section_hashes(&written, &rule_files.texts),
        policy_fields: policy_fields(&written),
    })
}

type JsonMap = serde_json::Map<String, serde_json::Value>;

fn section_hashes(sections: &JsonMap, rules: &str) -> BTreeMap<String, String> {
    let sections = sections.iter().map(|(name, value)| (name.clone(), value));
    let rules = (!rules.is_empty()).then(|| ("envoy.files".to_owned(), key_hash::short(rules)));
    sections.map(|(name, value)| (name, key_hash::short(&value.to_string()))).chain(rules).collect()
}

fn policy_fields(sections: &JsonMap) -> BTreeMap<String, JsonMap> {
    let policies = sections.get("policies").and_then(serde_json::Value::as_array);
    let fields = policies.into_iter().flatten().filter_map(serde_json::Value::as_object);
    fields.filter_map(|it| Some((it.get("name")?.as_str()?.to_owned(), it.clone()))).collect()
}

/// Returns the TLS settings of the listeners, and the files that they were loaded from.
fn tls(
    document: &Document<'_>,
    folder: &Path,
    raw: Option<raw::RawTls>,
) -> Result<(Option<ListenerTls>, Vec<PathBuf>), ConfigError> {
    let Some(raw) = raw else { return Ok((None, Vec::new())) };
    let path = |file: &Spanned<String>| folder.join(&file.value);
    let paths = tls::TlsFiles {
        certificate: path(&raw.certificate),
        key: path(&raw.key),
        client_ca: raw.client_ca.as_ref().map(path),
        client_crl: raw.client_crl.as_ref().map(path),
    };
    let error_at =
        |field: &Spanned<String>, error: String| document.error_at(field, &format!("tls: {error}"));
    tls::certificates(&paths.certificate).map_err(|error| error_at(&raw.certificate, error))?;
    if let (Some(field), Some(file)) = (&raw.client_ca, &paths.client_ca) {
        tls::certificates(file).map_err(|error| error_at(field, error))?;
    }
    if let (Some(field), Some(file)) = (&raw.client_crl, &paths.client_crl) {
        if paths.client_ca.is_none() {
            let message = "client_crl needs client_ca: without it, clients have no certificates";
            return Err(error_at(field, message.to_owned()));
        }
        tls::revocation_lists(file).map_err(|error| error_at(field, error))?;
    }
    let service = tls::load(&paths).map_err(|error| error_at(&raw.key, error))?;
    let has_client_ca = paths.client_ca.is_some();
    let admin_files = tls::TlsFiles { client_ca: None, client_crl: None, ..paths.clone() };
    let admin = raw.admin.get().then(|| tls::load(&admin_files)).transpose();
    let admin = admin.map_err(|error| error_at(&raw.key, error))?;
    let client_files = paths.client_ca.into_iter().chain(paths.client_crl);
    let files = [paths.certificate, paths.key].into_iter().chain(client_files).collect();
    Ok((Some(ListenerTls { service, admin, has_client_ca }), files))
}

fn envoy(
    document: &Document<'_>,
    folder: &Path,
    raw: &raw::RawEnvoy,
) -> Result<(EnvoyConfig, RuleFiles), ConfigError> {
    let algorithm =
        raw.algorithm.as_ref().map_or(Ok(Algorithm::FixedWindow), |name| named(document, name))?;
    let algorithms = raw
        .algorithms
        .iter()
        .map(|(rule, name)| Ok((rule.clone(), named(document, name)?)))
        .collect::<Result<BTreeMap<String, Algorithm>, ConfigError>>()?;
    let mut files = RuleFiles::default();
    let mut texts = Vec::with_capacity(raw.files.len());
    for field in &raw.files {
        files.add(folder, &field.value).map_err(|error| document.error_at(field, &error))?;
        for file in &files.files[texts.len()..] {
            let name = file.display().to_string();
            let text = std::fs::read_to_string(file).map_err(|error| {
                document.error_at(field, &format!("{name}: cannot be read: {error}"))
            })?;
            files.texts.push_str(&text);
            texts.push((name, text));
        }
    }
    let xds = xds::validate(document, folder, raw)?;
    // The names are those of rules that are not known yet.
    let checked_algorithms = if xds.is_some() { &BTreeMap::new() } else { &algorithms };
    let mut rules = Rules::load(&texts, algorithm, checked_algorithms).map_err(|error| {
        let message = format!("envoy: {error}");
        let unknown = raw
            .algorithms
            .iter()
            .find(|(rule, _)| message.contains(&format!("no rule is named {rule:?}")));
        unknown
            .map_or_else(|| document.error(&message), |(_, name)| document.error_at(name, &message))
    })?;
    let on_store_failure = raw
        .on_store_failure
        .as_ref()
        .map_or(Ok(OnStoreFailure::Local), |it| named(document, it))?;
    let mut on_store_failures = BTreeMap::new();
    for (name, failure) in &raw.on_store_failures {
        if xds.is_none() {
            check_rule_name(document, &rules, "on_store_failures", name, failure)?;
        }
        on_store_failures.insert(name.clone(), named(document, failure)?);
    }
    let holds = set_holds(document, raw, &mut rules)?;
    let envoy = EnvoyConfig {
        rules,
        has_rules: xds.is_none(),
        needs_rules: false,
        counts_units: false,
        xds,
        algorithm,
        algorithms,
        holds,
        hold_id: raw.hold_id.as_ref().map(|key| key.value.clone()),
        on_store_failure,
        on_store_failures,
        shadow_mode: raw.shadow_mode.get(),
        dynamic_metadata: raw.dynamic_metadata.get(),
        near_limit_ratio: raw.near_limit_ratio.map_or(DEFAULT_NEAR_LIMIT_RATIO, Ratio::get),
    };
    Ok((envoy, files))
}

/// Checks that a rule has this name.
fn check_rule_name<T>(
    document: &Document<'_>,
    rules: &Rules,
    field: &str,
    name: &str,
    at: &Spanned<T>,
) -> Result<(), ConfigError> {
    if rules.rules().any(|rule| rule.name.as_deref() == Some(name)) {
        return Ok(());
    }
    let message = format!(
        "envoy.{field}: no rule is named {name:?}: write the rate_limit.name of a rule of \
         envoy.files"
    );
    Err(document.error_at(at, &message))
}

/// Sets what the rules hold until a request ends, and checks that requests have ids. Returns the
/// holds by the names of rules.
fn set_holds(
    document: &Document<'_>,
    raw: &raw::RawEnvoy,
    rules: &mut Rules,
) -> Result<BTreeMap<String, RuleHolds>, ConfigError> {
    let mut all = BTreeMap::new();
    for (name, field) in &raw.holds {
        if raw.xds.is_none() {
            check_rule_name(document, rules, "holds", name, field)?;
        }
        let raw::RawRuleHolds { reserve, ttl, on_expire } = &field.value;
        let holds = RuleHolds {
            reserve: reserve.map(Bounded::get),
            ttl: ttl.map(BoundedDuration::get),
            on_expire: on_expire.as_ref().map(|name| named(document, name)).transpose()?,
        };
        let set = rules.set_holds(name, holds);
        set.map_err(|error| document.error_at(field, &format!("envoy: holds.{name}: {error}")))?;
        all.insert(name.clone(), holds);
    }
    let holds = |rule: &&Rule| rule.reserve.is_some() || rule.limit.is_concurrency();
    match (&raw.hold_id, rules.rules().find(holds)) {
        (Some(key), _) if key.value.is_empty() => {
            Err(document.error_at(key, "envoy: hold_id is empty: write the key of an entry"))
        }
        (None, Some(rule)) => Err(document.error(&format!(
            "envoy: hold_id is missing: the rule {:?} holds units until a request ends, so write \
             the key of the descriptor entry that has the id of the request",
            rule.path
        ))),
        _ => Ok(all),
    }
}

fn ipv6_prefix(raw: &raw::RawClientIp) -> u8 {
    let prefix = raw.ipv6_prefix.and_then(|prefix| u8::try_from(prefix.get()).ok());
    prefix.unwrap_or(policies::DEFAULT_IPV6_PREFIX)
}

fn client_ip(document: &Document<'_>, raw: &raw::RawClientIp) -> Result<ClientIp, ConfigError> {
    let networks = networks(document, &raw.trusted_proxies)?;
    ClientIp::new(networks, ipv6_prefix(raw)).map_err(|error| document.error(&error.to_string()))
}

/// Parses networks and addresses.
fn networks(document: &Document<'_>, texts: &[Spanned<String>]) -> Result<Vec<IpNet>, ConfigError> {
    let network = |text: &Spanned<String>| -> Result<IpNet, ConfigError> {
        let parsed =
            text.value.parse::<IpNet>().or_else(|_| text.value.parse::<IpAddr>().map(IpNet::from));
        parsed.map_err(|_| {
            let message = format!(
                "{:?} is not a network: write it like 10.0.0.0/8 or 2001:db8::/32",
                text.value
            );
            document.error_at(text, &message)
        })
    };
    texts.iter().map(network).collect()
}

fn named<T: std::str::FromStr<Err = tidegate::UnknownName>>(
    document: &Document<'_>,
    text: &Spanned<String>,
) -> Result<T, ConfigError> {
    text.value
        .parse()
        .map_err(|error: tidegate::UnknownName| document.unknown_name_at(text, &error.to_string()))
}

/// Origin of a configuration.
#[derive(Clone)]
pub enum ConfigOrigin {
    /// Built-in sample.
    Sample,
    File(PathBuf),
    /// Variables of the environment, with the names of envoyproxy/ratelimit.
    Environment(EnvironmentConfig),
}

impl ConfigOrigin {
    /// Returns the origin of a file or, without one, the sample.
    pub fn of_file(file: Option<PathBuf>) -> Self {
        file.map_or(Self::Sample, Self::File)
    }

    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(file) => Some(file),
            Self::Sample | Self::Environment(_) => None,
        }
    }

    /// Loads and validates the configuration.
    pub fn load(&self) -> Result<Config, ConfigError> {
        match self {
            Self::Sample => Config::parse("sample.yaml", SAMPLE),
            Self::File(file) => Config::load(file),
            Self::Environment(environment) => environment.load(),
        }
    }
}

impl fmt::Display for ConfigOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sample => f.write_str("the built-in sample"),
            Self::File(file) => file.display().fmt(f),
            Self::Environment(_) => f.write_str("the environment"),
        }
    }
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod schema_tests;
#[cfg(test)]
mod tests;
