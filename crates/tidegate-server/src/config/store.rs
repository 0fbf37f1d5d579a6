//! The `store` section: servers that hold the counters, and the connection settings.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_saphyr::Spanned;
use tidegate::RedisStore;
use tidegate::store::redis::{Builder, Tls};

use super::{ConfigError, Secret, duration, raw};
use crate::doctor::Topology;
use crate::tls;
use tidegate::internals::{Document, OneOrMany};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreConfig {
    Memory { max_keys: usize },
    Redis(Box<RedisConfig>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisConfig {
    servers: Servers,
    /// Password for the URLs, which then have none.
    password: Option<Secret>,
    prefix: String,
    timeout: Duration,
    tls: Option<RedisTls>,
    /// Minimum number of instances that share the limits during an outage of Redis. If not set, a
    /// default is assumed until the instances have agreed on their number.
    pub(crate) instances: Option<usize>,
    /// Maximum number of keys in memory during an outage of Redis.
    pub(crate) max_keys: usize,
}

const DEFAULT_MAX_KEYS: usize = 10_000_000;
const DEFAULT_PREFIX: &str = "rate_limit";
const DEFAULT_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Servers {
    One(Secret),
    Cluster(Vec<Secret>),
    Sentinel { master: String, nodes: Vec<Secret>, credentials: Option<(Option<String>, Secret)> },
}

/// TLS towards Redis; all texts are PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RedisTls {
    ca: Option<String>,
    /// Client certificate and its key.
    identity: Option<(String, Secret)>,
}

impl StoreConfig {
    /// Replaces the servers and their password with those of a flag, and keeps all other settings.
    pub(crate) fn with_redis(self, urls: &str) -> Self {
        let redis = match self {
            Self::Redis(redis) => *redis,
            Self::Memory { .. } => RedisConfig::new(urls),
        };
        let servers = Servers::parse(urls);
        Self::Redis(Box::new(RedisConfig { servers, password: None, ..redis }))
    }

    /// Sets the password for the URLs. Returns `None` if there is no Redis.
    pub(crate) fn with_password(self, password: Secret) -> Option<Self> {
        match self {
            Self::Memory { .. } => None,
            Self::Redis(redis) => Some(Self::Redis(Box::new(redis.with_password(password)))),
        }
    }
}

impl Servers {
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
    /// Returns the default settings for these servers.
    pub(crate) fn new(urls: &str) -> Self {
        Self {
            servers: Servers::parse(urls),
            password: None,
            prefix: DEFAULT_PREFIX.to_owned(),
            timeout: DEFAULT_TIMEOUT,
            tls: None,
            instances: None,
            max_keys: DEFAULT_MAX_KEYS,
        }
    }

    /// Sets the password for the URLs.
    pub(crate) fn with_password(self, password: Secret) -> Self {
        Self { password: Some(password), ..self }
    }

    pub(crate) fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Returns the prefix of every key.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the timeout of a decision.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the topology by the configured addresses. A cluster that is configured by a single
    /// node counts as a single server here.
    pub(crate) fn topology(&self) -> Topology {
        match &self.servers {
            Servers::One(_) => Topology::Single,
            Servers::Cluster(_) => Topology::Cluster,
            Servers::Sentinel { .. } => Topology::Sentinel,
        }
    }

    /// Returns the builder of the store.
    pub(crate) fn builder(&self) -> Builder {
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
        if let Some(files) = &self.tls {
            let mut tls = Tls::new();
            if let Some(ca) = &files.ca {
                tls = tls.ca(ca.as_bytes());
            }
            if let Some((certificate, key)) = &files.identity {
                tls = tls.identity(certificate.as_bytes(), key.reveal().as_bytes());
            }
            builder = builder.tls(tls);
        }
        builder.prefix(&self.prefix).timeout(self.timeout)
    }
}

/// Validates the section, and returns the store and the files that it names.
pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::RawStore,
) -> Result<(StoreConfig, Vec<PathBuf>), ConfigError> {
    let max_keys = raw
        .max_keys
        .map_or(DEFAULT_MAX_KEYS, |keys| usize::try_from(keys.get()).unwrap_or(usize::MAX));
    let mut files = Vec::new();
    let (servers, urls) = match (raw.redis, raw.sentinel) {
        (None, None) => return Ok((StoreConfig::Memory { max_keys }, Vec::new())),
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
    let timeout = match &raw.timeout {
        None => DEFAULT_TIMEOUT,
        Some(text) => match duration(document, text)? {
            Duration::ZERO => {
                return Err(document
                    .error_at(text, "store.timeout must be more than 0: 100ms is a good start"));
            }
            long if long > MAX_TIMEOUT => {
                let message = "store.timeout is more than 60s, longer than any request should \
                               wait: 100ms is a good start";
                return Err(document.error_at(text, message));
            }
            timeout => timeout,
        },
    };
    let (tls, tls_files) = tls(document, folder, raw.tls)?;
    files.extend(tls_files);
    let redis = RedisConfig {
        servers,
        password: password.transpose()?,
        prefix: raw
            .prefix
            .as_ref()
            .map_or_else(|| DEFAULT_PREFIX.to_owned(), |prefix| prefix.value.clone()),
        timeout,
        tls,
        instances: raw.instances.and_then(|instances| usize::try_from(instances.get()).ok()),
        max_keys,
    };
    redis.builder().check().map_err(|error| {
        let message = format!("store: {error}");
        match &raw.prefix {
            Some(prefix) if message.contains("prefix") => document.error_at(prefix, &message),
            _ => document.error_at(&urls, &message),
        }
    })?;
    Ok((StoreConfig::Redis(Box::new(redis)), files))
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
    Ok((Servers::Sentinel { master: raw.master, nodes, credentials }, place))
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
    Ok((Some(RedisTls { ca, identity }), files))
}
