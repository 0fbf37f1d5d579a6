//! [`Builder`]: options of a [`RedisStore`], validated before it connects.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::RedisStore;
use super::batch::dispatch::Dispatcher;
use super::client::NodeSettings;
use super::client::connection::{Address, ConnectionOptions};
use super::client::server_clock::local_micros;
use super::client::stats::BucketCounters;
use super::client::tls::Tls;
use super::client::url::Url;
use super::coordination::heartbeat::Heartbeats;
use super::coordination::invalidation::{InvalidationSet, Publisher};
use super::coordination::overrides::Overrides;
use super::routing::{Seeds, Topology};
use super::script::{ClockSource, FORMAT, Script, format_mark};
use crate::clock::SystemClock;
use crate::key::HashSecret;
use crate::store::StoreError;

/// Builder of a [`RedisStore`]; [`RedisStore::builder`], [`RedisStore::cluster`] and
/// [`RedisStore::sentinel`] create it.
///
/// | option | default |
/// | --- | --- |
/// | [`prefix`](Self::prefix) | `rate_limit` |
/// | [`timeout`](Self::timeout) | 100 ms |
/// | [`password`](Self::password) | password of the URLs |
/// | [`credentials`](Self::credentials) | user and password of the URLs |
/// | [`tls`](Self::tls) | the certificates of the system, for `rediss://` |
/// | [`group_commit`](Self::group_commit) | on |
/// | [`cross_slot`](Self::cross_slot) | on |
/// | [`clock`](Self::clock) | that of the server |
/// | [`heartbeat`](Self::heartbeat) | on |
///
/// ```no_run
/// use std::time::Duration;
/// use tidegate::RedisStore;
///
/// # async fn connect() -> Result<(), tidegate::StoreError> {
/// let store = RedisStore::builder("rediss://redis.example.com:6380")
///     .credentials(Some("tidegate"), "password")
///     .prefix("api")
///     .timeout(Duration::from_millis(50))
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Builder {
    pub(super) deployment: Deployment,
    pub(super) urls: Vec<String>,
    pub(super) prefix: String,
    pub(super) timeout: Duration,
    pub(super) password: Option<String>,
    pub(super) credentials: Option<(Option<String>, String)>,
    pub(super) tls: Option<Tls>,
    pub(super) group_commit: bool,
    pub(super) cross_slot: bool,
    clock: ClockSource,
    heartbeat: bool,
    format: u32,
    #[cfg(feature = "testing")]
    pub(super) driven_by: Option<crate::clock::ManualClock>,
}

#[derive(Clone)]
pub(super) enum Deployment {
    Single,
    Cluster,
    Sentinel { primary: String },
}

/// Computes the values that are otherwise computed by the first call. A fork in between would copy
/// locks that no thread of the child releases.
fn prepare_statics() {
    Script::heartbeat();
    HashSecret::global();
    local_micros(Instant::now());
    let _ = SystemClock::new();
}

impl Builder {
    pub(super) fn new(
        deployment: Deployment,
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Self {
        Self {
            deployment,
            urls: urls.into_iter().map(|url| url.as_ref().to_owned()).collect(),
            prefix: "rate_limit".to_owned(),
            timeout: Duration::from_millis(100),
            password: None,
            credentials: None,
            tls: None,
            group_commit: true,
            cross_slot: true,
            clock: ClockSource::Server,
            heartbeat: true,
            format: FORMAT,
            #[cfg(feature = "testing")]
            driven_by: None,
        }
    }

    /// Sets the prefix of every key, `rate_limit` by default. It must not be empty or contain
    /// control characters, or braces, which would change the hash tag.
    ///
    /// Stores with the same prefix share their counts. Applications that use one Redis for
    /// different purposes need different prefixes.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the timeout of a decision, 100 ms by default: above zero and at most an hour. No call
    /// takes longer; it then fails with [`StoreError::Timeout`], and may have been counted or not.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the password for the user of the URLs, which must not have one. A URL with a password
    /// is easily logged or shown; this option allows to read it from a file.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Sets the user (`None` for the default user) and the password for the nodes that hold the
    /// counts, in place of those in the URLs. With sentinels, those in the URLs are then only for
    /// the sentinels.
    #[must_use]
    pub fn credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.credentials = Some((user.map(str::to_owned), password.to_owned()));
        self
    }

    /// Sets the trusted certificates, the client certificate and the name of the servers for
    /// `rediss://` URLs. By default the store trusts the system's certificates, presents no client
    /// certificate, and verifies the host of the URL. TLS options with a `redis://` URL are an
    /// error.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Enables or disables group commit, which is on by default: decisions that arrive while a call
    /// to their node is in flight share the next call. Without it each decision is a separate call
    /// with the same result.
    #[must_use]
    pub fn group_commit(mut self, enabled: bool) -> Self {
        self.group_commit = enabled;
        self
    }

    /// Enables or disables calls that reach keys of several cluster slots, which are on by default.
    /// They need Redis 7 or Valkey; a node that refuses them gets one call per slot. Disable them if
    /// a service wants every key declared and does not say so.
    #[must_use]
    pub fn cross_slot(mut self, enabled: bool) -> Self {
        self.cross_slot = enabled;
        self
    }

    /// Sets the clock of decisions, that of the server by default. A node that refuses `TIME` in
    /// scripts gets an estimated clock after its first error, so that this is only needed if a
    /// server refuses it in a way that is not noticed. All instances need the same clock.
    #[must_use]
    pub fn clock(mut self, clock: ClockSource) -> Self {
        self.clock = clock;
        self
    }

    /// Enables or disables heartbeats, which are on by default. Without them the store sends nothing
    /// while it is idle: no health checks, no polls of the topology and of invalidations. It is for
    /// a single instance, and for services that bill each command.
    ///
    /// The instance then counts as the only one, with the whole limit during an outage, and a
    /// `DenyCache` does not notice refunds and resets of other processes for up to five seconds. A
    /// connection that was lost without a notice is found by the first call on it, which fails.
    #[must_use]
    pub fn heartbeat(mut self, enabled: bool) -> Self {
        self.heartbeat = enabled;
        self
    }

    /// Replaces the server's time in all scripts by this clock's. For tests only.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn driven_by(mut self, clock: crate::clock::ManualClock) -> Self {
        self.driven_by = Some(clock);
        self
    }

    /// Names counts like a release with this version of their forms. For tests of upgrades only.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn format(mut self, format: u32) -> Self {
        self.format = format;
        self
    }

    /// Connects, and fails if no node can decide within two seconds. Use it where a service must
    /// not start without its store.
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`] if an option is invalid, and the last error of the connection
    /// if no node answered.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.connect_in_background()?;
        store.dispatcher.topology.wait_until_ready().await?;
        Ok(store)
    }

    /// Returns a store that connects in the background, and fails only if an option is invalid.
    /// While Redis is down, calls fail with [`StoreError::Unreachable`].
    ///
    /// Together with a `Fallback` a service starts, and decides locally, while its Redis is down:
    ///
    /// ```no_run
    /// use tidegate::{Fallback, Limiter, RedisStore};
    ///
    /// # async fn start() -> Result<(), tidegate::StoreError> {
    /// let redis = RedisStore::builder("redis://127.0.0.1:6379").connect_in_background()?;
    /// let limiter = Limiter::new(Fallback::new(redis));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub fn connect_in_background(self) -> Result<RedisStore, StoreError> {
        let (seeds, options) = self.validate()?;
        let Self { timeout, clock, heartbeat, .. } = self;
        let settings = NodeSettings { timeout, clock, heartbeat };
        let topology = Arc::new(Topology::start(seeds, options, settings));
        let format_mark = format_mark(self.format);
        Ok(RedisStore {
            publisher: Arc::new(Publisher::new(InvalidationSet::new(&topology, &self.prefix))),
            heartbeats: Heartbeats::new(&topology, &self.prefix, &format_mark),
            overrides: Overrides::new(&topology, &self.prefix),
            dispatcher: Arc::new(Dispatcher {
                clock: SystemClock::new(),
                topology,
                prefix: self.prefix,
                timeout: self.timeout,
                group_commit: self.group_commit,
                cross_slot: self.cross_slot,
                format_mark,
                call_sizes: BucketCounters::of_call_sizes(),
                runtime: Handle::current(),
                #[cfg(feature = "testing")]
                driven_by: self.driven_by,
            }),
        })
    }

    /// Validates the options without connecting, for example while a configuration is read. It also
    /// computes the values that all stores of a process share, such as the hashes of the scripts: a
    /// process that may fork during its first call checks before it starts threads.
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`]. Its message does not quote the URL, which may contain a
    /// password.
    ///
    /// ```
    /// use tidegate::RedisStore;
    ///
    /// assert!(RedisStore::builder("redis://10.0.0.1:6379/2").check().is_ok());
    /// assert!(RedisStore::builder("http://10.0.0.1:6379").check().is_err());
    /// assert!(RedisStore::builder("redis://10.0.0.1").prefix("{api}").check().is_err());
    /// // A cluster has only database 0.
    /// assert!(RedisStore::cluster(["redis://10.0.0.1:6379/2"]).check().is_err());
    /// ```
    pub fn check(&self) -> Result<(), StoreError> {
        prepare_statics();
        self.validate().map(drop)
    }

    pub(super) fn validate(&self) -> Result<(Seeds, ConnectionOptions), StoreError> {
        self.check_prefix()?;
        let urls = self.urls.iter().map(|url| Url::parse(url)).collect::<Result<Vec<_>, _>>()?;
        let Some(first) = urls.first() else {
            return Err(misconfigured("no address was given: at least one URL is needed"));
        };
        let has_equal_options = |url: &Url| {
            (url.tls, &url.user, &url.password, url.database)
                == (first.tls, &first.user, &first.password, first.database)
        };
        if !urls.iter().all(has_equal_options) {
            let message = "the URLs of one store must agree on redis:// or rediss://, user, \
                           password and database";
            return Err(misconfigured(message));
        }
        let tls = if first.tls {
            Some(self.tls.clone().unwrap_or_default().client_tls()?)
        } else if self.tls.is_some() {
            return Err(misconfigured(
                "TLS options are given, but the URL is redis://: use rediss:// for TLS",
            ));
        } else {
            None
        };
        if self.password.is_some() && first.password.is_some() {
            return Err(misconfigured("the URL already has a password: remove one of the two"));
        }
        let url_options = ConnectionOptions {
            user: first.user.clone(),
            password: self.password.clone().or_else(|| first.password.clone()),
            database: first.database,
            tls,
        };
        let options = match self.credentials.clone() {
            Some((user, password)) => {
                ConnectionOptions { user, password: Some(password), ..url_options.clone() }
            }
            None => url_options.clone(),
        };
        let addresses: Vec<Address> = urls.into_iter().map(|url| url.address).collect();
        let seeds = match &self.deployment {
            Deployment::Single => Seeds::Single(addresses[0].clone()),
            Deployment::Cluster if options.database != 0 => {
                return Err(misconfigured(
                    "a cluster has only database 0: leave the database out of the URLs",
                ));
            }
            Deployment::Cluster => Seeds::Cluster(addresses),
            Deployment::Sentinel { primary } => {
                let options = ConnectionOptions { database: 0, ..url_options };
                Seeds::Sentinel { name: primary.clone(), sentinels: addresses, options }
            }
        };
        Ok((seeds, options))
    }

    fn check_prefix(&self) -> Result<(), StoreError> {
        if self.prefix.is_empty() || self.prefix.chars().any(|c| c.is_control() || "{}".contains(c))
        {
            return Err(StoreError::Misconfigured(format!(
                "prefix {:?} is not usable: it must not be empty and must have no braces and no \
                 control characters",
                self.prefix
            )));
        }
        if self.timeout.is_zero() || self.timeout > Duration::from_secs(3_600) {
            return Err(misconfigured(
                "the timeout is not usable: it must be above zero and at most an hour",
            ));
        }
        Ok(())
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

fn misconfigured(message: &str) -> StoreError {
    StoreError::Misconfigured(message.to_owned())
}
