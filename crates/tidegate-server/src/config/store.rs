//! Where counts live: which servers, and how they are reached.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_saphyr::Spanned;
use tidegate::RedisStore;
use tidegate::store::redis::{Builder, Tls};

use super::{ConfigError, Secret, duration, raw};
use crate::doctor::Kind;
use crate::tls;
use tidegate::config::{Document, OneOrMany};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreConfig {
    Memory { max_keys: usize },
    Redis(Box<RedisConfig>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RedisConfig {
    servers: Servers,
    prefix: String,
    timeout: Duration,
    tls: Option<RedisTls>,
    /// Minimum number of instances that share the limits while Redis is away. `None`: not set, and
    /// assumed until the instances have agreed on their number.
    pub(crate) instances: Option<usize>,
    /// The cap on keys in memory while Redis is away.
    pub(crate) max_keys: usize,
}

const MAX_KEYS: usize = 10_000_000;
const MAX_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Servers {
    One(Secret),
    Cluster(Vec<Secret>),
    Sentinel { master: String, nodes: Vec<Secret>, credentials: Option<(Option<String>, Secret)> },
}

/// In PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RedisTls {
    ca: Option<String>,
    /// A certificate and its key.
    identity: Option<(String, Secret)>,
}

impl StoreConfig {
    /// The servers that a flag names instead of the file's; everything else stays.
    pub(crate) fn on_redis(self, urls: &str) -> Self {
        let redis = match self {
            Self::Redis(redis) => *redis,
            Self::Memory { .. } => RedisConfig::at(urls),
        };
        Self::Redis(Box::new(RedisConfig { servers: Servers::of_urls(urls), ..redis }))
    }
}

impl Servers {
    /// One URL, or several of a cluster with commas between them.
    fn of_urls(urls: &str) -> Self {
        let list: Vec<Secret> = urls.split(',').map(|url| Secret::new(url.trim())).collect();
        match <[Secret; 1]>::try_from(list) {
            Ok([url]) => Self::One(url),
            Err(list) => Self::Cluster(list),
        }
    }
}

impl RedisConfig {
    /// With the usual options.
    pub(crate) fn at(urls: &str) -> Self {
        Self {
            servers: Servers::of_urls(urls),
            prefix: "rate_limit".to_owned(),
            timeout: Duration::from_millis(100),
            tls: None,
            instances: None,
            max_keys: MAX_KEYS,
        }
    }

    pub(crate) fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// What every key begins with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// How long a decision may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// As far as the addresses tell: a cluster may be named by one of its nodes.
    pub(crate) fn kind(&self) -> Kind {
        match &self.servers {
            Servers::One(_) => Kind::Single,
            Servers::Cluster(_) => Kind::Cluster,
            Servers::Sentinel { .. } => Kind::Sentinel,
        }
    }

    /// A store that is not connected yet.
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

/// The store, and the files that it names.
pub(super) fn validate(
    document: &Document<'_>,
    folder: &Path,
    raw: raw::Store,
) -> Result<(StoreConfig, Vec<PathBuf>), ConfigError> {
    let max_keys =
        raw.max_keys.map_or(MAX_KEYS, |keys| usize::try_from(keys.get()).unwrap_or(usize::MAX));
    let (servers, urls) = match (raw.redis, raw.sentinel) {
        (None, None) => return Ok((StoreConfig::Memory { max_keys }, Vec::new())),
        (Some(_), Some(sentinel)) => {
            return Err(document
                .error_at(&sentinel, "store has both redis and sentinel: take one of them out"));
        }
        (Some(redis), None) => {
            let place = place_of(&redis);
            let servers = match redis.value {
                Some(OneOrMany::One(url)) => Servers::One(Secret::new(url)),
                several => {
                    let urls = several.map_or_else(Vec::new, |urls| urls.texts().to_vec());
                    Servers::Cluster(some(
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
        (None, Some(sentinel)) => sentinels(document, sentinel.value)?,
    };
    let timeout = match &raw.timeout {
        None => Duration::from_millis(100),
        Some(text) => match duration(document, text)? {
            Duration::ZERO => {
                return Err(document
                    .error_at(text, "store.timeout must be more than 0: 100ms is a good start"));
            }
            long if long > MAX_TIMEOUT => {
                let message = "store.timeout is more than 60s, for which no request waits: 100ms is a good start";
                return Err(document.error_at(text, message));
            }
            timeout => timeout,
        },
    };
    let (tls, files) = tls(document, folder, raw.tls)?;
    let redis = RedisConfig {
        servers,
        prefix: raw
            .prefix
            .as_ref()
            .map_or_else(|| "rate_limit".to_owned(), |prefix| prefix.value.clone()),
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

/// Sentinels, and where their addresses stand.
fn sentinels(
    document: &Document<'_>,
    raw: raw::Sentinel,
) -> Result<(Servers, Spanned<()>), ConfigError> {
    let place = place_of(&raw.nodes);
    let credentials = match (raw.username, raw.password) {
        (Some(user), None) => {
            let message = "store.sentinel has a username but no password: write both, or neither";
            return Err(document.error_at(&user, message));
        }
        (_, Some(password)) if password.value.is_none() => {
            return Err(document.error_at(
                &password,
                "this password is empty: write it in quotes, if it begins with a sign",
            ));
        }
        (user, password) => {
            let password = password.and_then(|password| password.value).map(Secret::new);
            password.map(|password| (user.map(|user| user.value), password))
        }
    };
    let nodes =
        some(document, &place, raw.nodes.value, "store.sentinel.nodes", "redis://10.0.0.1:26379")?;
    Ok((Servers::Sentinel { master: raw.master, nodes, credentials }, place))
}

fn some(
    document: &Document<'_>,
    place: &Spanned<()>,
    urls: Vec<String>,
    field: &str,
    such_as: &str,
) -> Result<Vec<Secret>, ConfigError> {
    if urls.is_empty() {
        return Err(document.error_at(
            place,
            &format!("{field} is empty: write at least one address, such as {such_as}"),
        ));
    }
    Ok(urls.into_iter().map(Secret::new).collect())
}

/// Where a value stands, without the value.
fn place_of<T>(value: &Spanned<T>) -> Spanned<()> {
    Spanned { value: (), referenced: value.referenced, defined: value.defined }
}

fn tls(
    document: &Document<'_>,
    folder: &Path,
    raw: Option<Spanned<raw::StoreTls>>,
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
