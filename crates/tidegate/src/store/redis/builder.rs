//! [`Builder`]: the options of a [`RedisStore`], checked before anything is connected.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionAddr, IntoConnectionInfo};

use super::access::{Access, Address};
use super::heartbeat::CachedInstances;
use super::publisher::Publisher;
use super::tls::Tls;
use super::topology::{Plan, Topology};
use super::{RedisStore, Shared};
use crate::clock::SystemClock;
use crate::store::StoreError;

/// Options of a [`RedisStore`].
#[derive(Clone)]
pub struct Builder {
    pub(super) kind: Kind,
    pub(super) urls: Vec<String>,
    pub(super) prefix: String,
    pub(super) timeout: Duration,
    pub(super) credentials: Option<(Option<String>, String)>,
    pub(super) tls: Option<Tls>,
    pub(super) group_commit: bool,
    #[cfg(feature = "testing")]
    pub(super) driven_by: Option<crate::clock::ManualClock>,
}

#[derive(Clone)]
pub(super) enum Kind {
    Single,
    Cluster,
    Sentinel { primary: String },
}

/// One URL, taken apart.
struct Url {
    address: Address,
    tls: bool,
    user: Option<String>,
    password: Option<String>,
    database: i64,
}

const URL: &str =
    "it must look like redis://[user:password@]host[:port][/database], or rediss:// for TLS";

impl Builder {
    pub(super) fn new(kind: Kind, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        Self {
            kind,
            urls: urls.into_iter().map(|url| url.as_ref().to_owned()).collect(),
            prefix: "rate_limit".to_owned(),
            timeout: Duration::from_millis(100),
            credentials: None,
            tls: None,
            group_commit: true,
            #[cfg(feature = "testing")]
            driven_by: None,
        }
    }

    /// What every key begins with; `rate_limit` by default. No braces: they would choose the hash
    /// tag.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long a decision may take; 100 ms by default. No call takes longer, whatever happens.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The user (`None`: the default user) and the password for the nodes that hold the counts,
    /// instead of those in the URLs. With sentinels, those in the URLs are then for the sentinels
    /// alone.
    #[must_use]
    pub fn credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.credentials = Some((user.map(str::to_owned), password.to_owned()));
        self
    }

    /// Which certificates are trusted, and which is shown, on `rediss://` URLs. Without it: the
    /// system's, and none.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Whether decisions that come while calls to their node are under way go together in the next;
    /// they do by default. Without it each decision is a call of its own. The answers are the same.
    #[must_use]
    pub fn group_commit(mut self, together: bool) -> Self {
        self.group_commit = together;
        self
    }

    /// Hands this clock's time to the scripts instead of the server's. For tests only.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn driven_by(mut self, clock: crate::clock::ManualClock) -> Self {
        self.driven_by = Some(clock);
        self
    }

    /// Connects. An error if nobody who could decide is reached within two seconds.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.connect_in_background()?;
        store.shared.topology.settle().await?;
        Ok(store)
    }

    /// A store that connects by itself, now or whenever Redis is there; an error only if an option
    /// is wrong. Until then its calls fail with [`StoreError::Unreachable`].
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime.
    pub fn connect_in_background(self) -> Result<RedisStore, StoreError> {
        let (plan, access) = self.plan()?;
        Ok(RedisStore {
            shared: Arc::new(Shared {
                clock: SystemClock::new(),
                topology: Topology::start(plan, access, self.timeout),
                publisher: Publisher::new(),
                prefix: self.prefix,
                timeout: self.timeout,
                group_commit: self.group_commit,
                instances: CachedInstances::default(),
                #[cfg(feature = "testing")]
                driven_by: self.driven_by,
            }),
        })
    }

    /// Whether the options are right, as far as that can be told without a connection.
    pub fn check(&self) -> Result<(), StoreError> {
        self.plan().map(drop)
    }

    fn plan(&self) -> Result<(Plan, Access), StoreError> {
        self.check_prefix()?;
        let urls = self.urls.iter().map(|url| Url::parse(url)).collect::<Result<Vec<_>, _>>()?;
        let Some(first) = urls.first() else {
            return Err(misconfigured("no address was given: at least one URL is needed"));
        };
        let alike = |url: &Url| {
            (url.tls, &url.user, &url.password, url.database)
                == (first.tls, &first.user, &first.password, first.database)
        };
        if !urls.iter().all(alike) {
            let message = "the URLs of one store must agree on redis:// or rediss://, user, password and database";
            return Err(misconfigured(message));
        }
        let tls = if first.tls {
            Some(self.tls.clone().unwrap_or_default().client_config()?)
        } else if self.tls.is_some() {
            return Err(misconfigured(
                "TLS options are given, but the URL is redis://: use rediss:// for TLS",
            ));
        } else {
            None
        };
        let at_the_urls = Access {
            user: first.user.clone(),
            password: first.password.clone(),
            database: first.database,
            tls,
        };
        let access = match self.credentials.clone() {
            Some((user, password)) => {
                Access { user, password: Some(password), ..at_the_urls.clone() }
            }
            None => at_the_urls.clone(),
        };
        let addresses: Vec<Address> = urls.into_iter().map(|url| url.address).collect();
        let plan = match &self.kind {
            Kind::Single => Plan::Single(addresses[0].clone()),
            Kind::Cluster if access.database != 0 => {
                return Err(misconfigured(
                    "a cluster has only database 0: leave the database out of the URLs",
                ));
            }
            Kind::Cluster => Plan::Cluster(addresses),
            Kind::Sentinel { primary } => {
                let access = Arc::new(Access { database: 0, ..at_the_urls });
                Plan::Sentinel { name: primary.clone(), sentinels: addresses, access }
            }
        };
        Ok((plan, access))
    }

    fn check_prefix(&self) -> Result<(), StoreError> {
        if self.prefix.is_empty() || self.prefix.chars().any(|c| c.is_control() || "{}".contains(c))
        {
            return Err(StoreError::Misconfigured(format!(
                "prefix {:?} is not usable: it must not be empty and must have no braces and no control characters",
                self.prefix
            )));
        }
        if self.timeout.is_zero() || self.timeout > Duration::from_secs(3_600) {
            return Err(misconfigured(
                "the timeout is not usable: it must be above zero, and an hour at most",
            ));
        }
        Ok(())
    }
}

impl Url {
    /// The URL may hold a password: no error repeats it.
    fn parse(url: &str) -> Result<Self, StoreError> {
        let no_url = || StoreError::Misconfigured(format!("this is not a Redis URL: {URL}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(no_url)?;
        let (tls, scheme) = match scheme {
            "redis" | "valkey" => (false, "redis"),
            "rediss" | "valkeys" => (true, "redis"),
            "unix" | "redis+unix" | "valkey+unix" => (false, "redis+unix"),
            _ => return Err(no_url()),
        };
        if rest.contains('#') {
            let message = "a Redis URL must have no fragment: #insecure, TLS without verification, is not supported \
                           (a # in a password is written %23)";
            return Err(misconfigured(message));
        }
        let info = format!("{scheme}://{rest}").into_connection_info().map_err(|_| no_url())?;
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Address::tcp(host, *port),
            ConnectionAddr::Unix(path) => Address::Unix(path.clone()),
            _ => return Err(no_url()),
        };
        let settings = info.redis_settings();
        Ok(Self {
            address,
            tls,
            user: settings.username().map(str::to_owned),
            password: settings.password().map(str::to_owned),
            database: settings.db(),
        })
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
