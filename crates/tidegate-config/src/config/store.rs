//! The `store` section: servers that hold the counters, and the connection settings.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::ServerName;
use serde_saphyr::Spanned;
use tidegate::RedisStore;
use tidegate::store::redis::{Builder, ClockSource, Tls};

use super::raw;
use crate::Secret;
use crate::policies::OneOrMany;
use crate::yaml::ConfigError;
use crate::yaml::{Document, Flag};
use tidegate_net::tls;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreConfig {
    /// The settings are for a Redis that a flag names.
    Memory(Box<StoreSettings>),
    Redis(Box<RedisConfig>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisConfig {
    servers: Servers,
    /// Password for the URLs, which then have none.
    password: Option<Secret>,
    pub settings: StoreSettings,
}

/// Redis deployment type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedisTopology {
    Single,
    Sentinel,
    Cluster,
}

/// Settings that do not depend on the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSettings {
    prefix: String,
    timeout: Duration,
    tls: Option<RedisTls>,
    cross_slot: bool,
    clock: ClockSource,
    /// Whether commands are sent to Redis without a request. Without it, this is the only instance.
    pub heartbeat: bool,
    /// Minimum number of instances that share the limits during an outage of Redis. If not set, a
    /// default is assumed until the instances have agreed on their number.
    pub instances: Option<usize>,
    /// Maximum number of keys in memory: of the memory store, or during an outage of Redis.
    pub max_keys: usize,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            prefix: DEFAULT_PREFIX.to_owned(),
            timeout: DEFAULT_TIMEOUT,
            tls: None,
            cross_slot: true,
            clock: ClockSource::Server,
            heartbeat: true,
            instances: None,
            max_keys: DEFAULT_MAX_KEYS,
        }
    }
}

const DEFAULT_MAX_KEYS: usize = 10_000_000;
const DEFAULT_PREFIX: &str = "rate_limit";
const DEFAULT_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Servers {
    One(Secret),
    Cluster(Vec<Secret>),
    Sentinel { master: String, nodes: Vec<Secret>, credentials: Option<(Option<String>, Secret)> },
}

/// TLS towards Redis; certificates and keys are PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RedisTls {
    ca: Option<String>,
    /// Client certificate and its key.
    identity: Option<(String, Secret)>,
    server_name: Option<String>,
    /// Whether the certificates must have that name, or the one of the address.
    verify_name: bool,
}

impl StoreConfig {
    /// Replaces the servers and their password with those of a flag, and keeps all other settings.
    #[must_use]
    pub fn with_redis(self, urls: &str) -> Self {
        let settings = match self {
            Self::Redis(redis) => redis.settings,
            Self::Memory(settings) => *settings,
        };
        let servers = Servers::parse(urls);
        Self::Redis(Box::new(RedisConfig { servers, password: None, settings }))
    }

    /// Sets the password for the URLs. Returns `None` if there is no Redis.
    pub fn with_password(self, password: Secret) -> Option<Self> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis) => Some(Self::Redis(Box::new(redis.with_password(password)))),
        }
    }
}

impl StoreConfig {
    /// Returns the settings that only a restart changes: all but passwords and certificates.
    #[must_use]
    pub fn without_credentials(&self) -> Self {
        match self {
            Self::Memory(settings) => Self::Memory(Box::new(settings.without_certificates())),
            Self::Redis(redis) => Self::Redis(Box::new(RedisConfig {
                servers: redis.servers.without_credentials(),
                password: None,
                settings: redis.settings.without_certificates(),
            })),
        }
    }
}

/// Shows the addresses, without users and passwords.
impl fmt::Display for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Redis(redis) = self else { return f.write_str("memory") };
        let addresses = |urls: &[Secret]| {
            let shown = urls.iter().map(|url| without_userinfo(url.reveal()));
            shown.collect::<Vec<_>>().join(", ")
        };
        match &redis.servers {
            Servers::One(url) => write!(f, "Redis at {}", without_userinfo(url.reveal())),
            Servers::Cluster(urls) => write!(f, "Redis Cluster at {}", addresses(urls)),
            Servers::Sentinel { master, nodes, .. } => {
                write!(f, "Redis primary {master:?} of the sentinels at {}", addresses(nodes))
            }
        }
    }
}

impl StoreSettings {
    fn without_certificates(&self) -> Self {
        let names = self.tls.as_ref().map(|tls| (tls.server_name.clone(), tls.verify_name));
        let names = names.filter(|(name, is_verified)| name.is_some() || !is_verified);
        let tls = names.map(|(server_name, verify_name)| RedisTls {
            ca: None,
            identity: None,
            server_name,
            verify_name,
        });
        Self { tls, ..self.clone() }
    }
}

/// Returns a URL without its user and password, which that of a Unix socket has in its query.
fn without_userinfo(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return String::new() };
    let authority = rest.find(['/', '?']).unwrap_or(rest.len());
    let rest = rest[..authority].rfind('@').map_or(rest, |at| &rest[at + 1..]);
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    let is_secret = |option: &&str| option.starts_with("user=") || option.starts_with("pass=");
    let options: Vec<&str> = query.split('&').filter(|option| !is_secret(option)).collect();
    let mark = if options.concat().is_empty() { "" } else { "?" };
    format!("{scheme}://{address}{mark}{}", options.join("&"))
}

impl Servers {
    fn without_credentials(&self) -> Self {
        let url = |url: &Secret| Secret::new(without_userinfo(url.reveal()));
        match self {
            Self::One(server) => Self::One(url(server)),
            Self::Cluster(nodes) => Self::Cluster(nodes.iter().map(url).collect()),
            Self::Sentinel { master, nodes, .. } => Self::Sentinel {
                master: master.clone(),
                nodes: nodes.iter().map(url).collect(),
                credentials: None,
            },
        }
    }

    /// Parses one URL, or several of a cluster separated by commas.
    fn parse(urls: &str) -> Self {
        let list: Vec<Secret> = urls.split(',').map(|url| Secret::new(url.trim())).collect();
        match <[Secret; 1]>::try_from(list) {
            Ok([url]) => Self::One(url),
            Err(list) => Self::Cluster(list),
        }
    }
}

impl RedisConfig {
    /// Sets the password for the URLs.
    #[must_use]
    pub fn with_password(self, password: Secret) -> Self {
        Self { password: Some(password), ..self }
    }

    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    #[must_use]
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.settings.prefix);
        self
    }

    /// Returns the prefix of every key.
    pub fn prefix(&self) -> &str {
        &self.settings.prefix
    }

    /// Returns the timeout of a decision.
    pub fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// Returns the name by which sentinels know the primary.
    pub fn sentinel_master(&self) -> Option<&str> {
        match &self.servers {
            Servers::Sentinel { master, .. } => Some(master),
            Servers::One(_) | Servers::Cluster(_) => None,
        }
    }

    /// Returns the topology by the configured addresses. A cluster that is configured by a single
    /// node counts as a single server here.
    pub fn topology(&self) -> RedisTopology {
        match &self.servers {
            Servers::One(_) => RedisTopology::Single,
            Servers::Cluster(_) => RedisTopology::Cluster,
            Servers::Sentinel { .. } => RedisTopology::Sentinel,
        }
    }

    /// Returns the builder of the store.
    pub fn builder(&self) -> Builder {
        let mut builder = match &self.servers {
            Servers::One(url) => RedisStore::builder(url.reveal()),
            Servers::Cluster(urls) => RedisStore::cluster(urls.iter().map(Secret::reveal)),
            Servers::Sentinel { master, nodes, credentials } => {
                let builder = RedisStore::sentinel(master, nodes.iter().map(Secret::reveal));
                match credentials {
                    Some((user, password)) => {
                        builder.credentials(user.as_deref(), password.reveal())
                    }
                    None => builder,
                }
            }
        };
        if let Some(password) = &self.password {
            builder = builder.password(password.reveal());
        }
        if let Some(files) = &self.settings.tls {
            let mut tls = Tls::new();
            if let Some(ca) = &files.ca {
                tls = tls.ca(ca.as_bytes());
            }
            if let Some(name) = &files.server_name {
                tls = tls.server_name(name);
            }
            if !files.verify_name {
                tls = tls.any_name();
            }
            if let Some((certificate, key)) = &files.identity {
                tls = tls.identity(certificate.as_bytes(), key.reveal().as_bytes());
            }
            builder = builder.tls(tls);
        }
        builder
            .prefix(&self.settings.prefix)
            .timeout(self.settings.timeout)
            .cross_slot(self.settings.cross_slot)
            .clock(self.settings.clock)
            .heartbeat(self.settings.heartbeat)
    }
}

/// Validates the section, and returns the store and the files that it names.
pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::RawStore,
) -> Result<(StoreConfig, Vec<PathBuf>), ConfigError> {
    let (tls, mut files) = tls(document, folder, raw.tls)?;
    let defaults = StoreSettings::default();
    let settings = StoreSettings {
        prefix: raw.prefix.as_ref().map_or(defaults.prefix, |prefix| prefix.value.clone()),
        timeout: raw.timeout.map_or(defaults.timeout, raw::StoreTimeout::get),
        tls,
        cross_slot: raw.cross_slot.map_or(defaults.cross_slot, Flag::get),
        clock: one_of(document, "clock", raw.clock.as_ref(), &CLOCKS)?,
        heartbeat: one_of(document, "heartbeat", raw.heartbeat.as_ref(), &HEARTBEATS)?,
        instances: raw
            .instances
            .as_ref()
            .and_then(|instances| usize::try_from(instances.value.get()).ok()),
        max_keys: raw
            .max_keys
            .map_or(defaults.max_keys, |keys| usize::try_from(keys.get()).unwrap_or(usize::MAX)),
    };
    if let Some(instances) = settings.instances.filter(|instances| *instances > 1)
        && let Some(heartbeat) = raw.heartbeat.as_ref().filter(|_| !settings.heartbeat)
    {
        let message = format!(
            "store.heartbeat: off is for a single instance, and store.instances is {instances}: \
             several instances need heartbeats to share the limits during an outage, and to learn \
             of refunds and resets; remove one of the two"
        );
        return Err(document.error_at(heartbeat, &message));
    }
    if let Some(prefix) = &raw.prefix {
        // With a URL that is surely valid, only the prefix can be wrong.
        RedisStore::builder("redis://127.0.0.1")
            .prefix(&prefix.value)
            .check()
            .map_err(|error| document.error_at(prefix, &format!("store: {error}")))?;
    }
    let (servers, urls) = match (raw.redis, raw.sentinel) {
        (None, None) => {
            if let Some(file) = &raw.password_file {
                let message = "store.password_file is set, but store has no redis and no \
                               sentinel: add one of them, or give --redis-password-file with \
                               --redis";
                return Err(document.error_at(file, message));
            }
            return Ok((StoreConfig::Memory(Box::new(settings)), files));
        }
        (Some(_), Some(sentinel)) => {
            return Err(document
                .error_at(&sentinel, "store has both redis and sentinel: remove one of them"));
        }
        (Some(redis), None) => {
            let place = place_of(&redis);
            let servers = match redis.value {
                Some(OneOrMany::One(url)) => Servers::One(Secret::new(url)),
                several => {
                    let urls = several.map_or_else(Vec::new, |urls| urls.texts().to_vec());
                    Servers::Cluster(non_empty(
                        document,
                        &place,
                        urls,
                        "store.redis",
                        "redis://10.0.0.1:6379",
                    )?)
                }
            };
            (servers, place)
        }
        (None, Some(sentinel)) => sentinels(document, folder, sentinel.value, &mut files)?,
    };
    let password = raw.password_file.as_ref();
    let password = password.map(|file| read_password(document, folder, file, &mut files));
    let redis = RedisConfig { servers, password: password.transpose()?, settings };
    redis
        .builder()
        .check()
        .map_err(|error| document.error_at(&urls, &format!("store: {error}")))?;
    Ok((StoreConfig::Redis(Box::new(redis)), files))
}

const CLOCKS: [(&str, ClockSource); 2] =
    [("server", ClockSource::Server), ("estimated", ClockSource::Estimated)];
/// To some readers of YAML, `on` and `off` are booleans.
const HEARTBEATS: [(&str, bool); 4] =
    [("on", true), ("off", false), ("true", true), ("false", false)];

/// Returns the value of a field that is one of these names: the first two are shown, and the first
/// one is the default.
fn one_of<T: Copy>(
    document: &Document<'_>,
    field: &str,
    name: Option<&Spanned<String>>,
    values: &[(&str, T)],
) -> Result<T, ConfigError> {
    let Some(name) = name else { return Ok(values[0].1) };
    let value = values.iter().find(|(value, _)| *value == name.value).map(|(_, value)| *value);
    value.ok_or_else(|| {
        let message = format!("store.{field} must be {} or {}", values[0].0, values[1].0);
        document.error_at(name, &message)
    })
}

/// Returns the sentinels and the position of their addresses.
fn sentinels(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::RawSentinel,
    files: &mut Vec<PathBuf>,
) -> Result<(Servers, Spanned<()>), ConfigError> {
    let place = place_of(&raw.nodes);
    let password = match (raw.password, &raw.password_file) {
        (None, None) => None,
        (None, Some(file)) => Some(read_password(document, folder, file, files)?),
        (Some(_), Some(file)) => {
            let message = "store.sentinel has both password and password_file: remove one of them";
            return Err(document.error_at(file, message));
        }
        (Some(password), None) if password.value.is_none() => {
            return Err(document.error_at(
                &password,
                "this password is empty: write it in quotes, if it starts with a special character",
            ));
        }
        (Some(password), None) => password.value.map(Secret::new),
    };
    let credentials = match (raw.username, password) {
        (Some(user), None) => {
            let message = "store.sentinel has a username but no password: write both, or neither";
            return Err(document.error_at(&user, message));
        }
        (user, password) => password.map(|password| (user.map(|user| user.value), password)),
    };
    let nodes = non_empty(
        document,
        &place,
        raw.nodes.value,
        "store.sentinel.nodes",
        "redis://10.0.0.1:26379",
    )?;
    if raw.master.value.is_empty() {
        let message = "store.sentinel.master is empty: write the name in `sentinel monitor NAME …`";
        return Err(document.error_at(&raw.master, message));
    }
    Ok((Servers::Sentinel { master: raw.master.value, nodes, credentials }, place))
}

/// Reads the password in a file that the configuration names, and adds the file to `files`.
fn read_password(
    document: &Document<'_>,
    folder: &Path,
    file: &Spanned<String>,
    files: &mut Vec<PathBuf>,
) -> Result<Secret, ConfigError> {
    let path = folder.join(&file.value);
    let password = Secret::read(&path)
        .map_err(|reason| document.error_at(file, &format!("{}: {reason}", tls::shown(&path))))?;
    files.push(path);
    Ok(password)
}

/// Rejects an empty list of addresses.
fn non_empty(
    document: &Document<'_>,
    place: &Spanned<()>,
    urls: Vec<String>,
    field: &str,
    example: &str,
) -> Result<Vec<Secret>, ConfigError> {
    if urls.is_empty() {
        return Err(document.error_at(
            place,
            &format!("{field} is empty: write at least one address, such as {example}"),
        ));
    }
    Ok(urls.into_iter().map(Secret::new).collect())
}

/// Returns the position of a value, without the value.
fn place_of<T>(value: &Spanned<T>) -> Spanned<()> {
    Spanned { value: (), referenced: value.referenced, defined: value.defined }
}

fn tls(
    document: &Document<'_>,
    folder: &Path,
    raw: Option<Spanned<raw::RawStoreTls>>,
) -> Result<(Option<RedisTls>, Vec<PathBuf>), ConfigError> {
    let Some(raw) = raw else { return Ok((None, Vec::new())) };
    let mut files = Vec::new();
    let mut read = |name: &Spanned<String>| {
        let file = folder.join(&name.value);
        let text = std::fs::read_to_string(&file).map_err(|error| {
            document.error_at(name, &format!("{}: cannot be read: {error}", tls::shown(&file)))
        })?;
        files.push(file);
        Ok::<String, ConfigError>(text)
    };
    let ca = raw.value.ca.as_ref().map(&mut read).transpose()?;
    let identity = match (&raw.value.certificate, &raw.value.key) {
        (Some(certificate), Some(key)) => Some((read(certificate)?, Secret::new(read(key)?))),
        (None, None) => None,
        _ => {
            return Err(
                document.error_at(&raw, "store.tls needs certificate and key together, or neither")
            );
        }
    };
    let server_name = raw.value.server_name.as_ref();
    if let Some(name) = server_name.filter(|name| ServerName::try_from(&*name.value).is_err()) {
        let message = "store.tls.server_name must be a host name or an address, without a port";
        return Err(document.error_at(name, message));
    }
    let server_name = server_name.map(|name| name.value.clone());
    let verify_name = raw.value.verify_name.is_none_or(Flag::get);
    Ok((Some(RedisTls { ca, identity, server_name, verify_name }), files))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_shown_without_users_and_passwords() {
        for (url, shown) in [
            ("redis://user:p@ss@host:1/2?a=b", "redis://host:1/2?a=b"),
            ("unix:///x.sock?user=user&pass=topsecret", "unix:///x.sock"),
            ("unix:///x.sock?db=3&pass=topsecret", "unix:///x.sock?db=3"),
            ("redis://host", "redis://host"),
            ("no URL: topsecret", ""),
        ] {
            assert_eq!(without_userinfo(url), shown);
        }
    }
}
