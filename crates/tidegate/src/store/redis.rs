//! [`RedisStore`]: counts that a fleet shares, decided inside Redis by atomic Lua scripts.
//!
//! One decision is one round trip, however many charges it has. The time is the server's, so clients' clocks never matter.

use std::fmt;
use std::time::Duration;

use ::redis::aio::{ConnectionLike, ConnectionManager, ConnectionManagerConfig};
use ::redis::io::tcp::TcpSettings;
use ::redis::{Client, ErrorKind, IntoConnectionInfo, RedisError, ServerErrorKind, Value};

use self::script::{Request, Script};
use super::{Action, Store, StoreError};
use crate::algorithm::Verdict;
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Source};
use crate::key::redis_key;

mod script;

/// Counts that all processes on one Redis share.
///
/// ```no_run
/// use tidegate::{Limiter, RedisStore};
///
/// # async fn connect() -> Result<(), tidegate::StoreError> {
/// let limiter = Limiter::new(RedisStore::connect("redis://127.0.0.1:6379").await?);
/// # Ok(())
/// # }
/// ```
pub struct RedisStore {
    connection: ConnectionManager,
    prefix: String,
    timeout: Duration,
    clock: SystemClock,
    /// Tests drive the script's time by this clock.
    #[cfg(feature = "testing")]
    driven_by: Option<crate::clock::ManualClock>,
}

/// Options of a [`RedisStore`].
#[derive(Clone)]
pub struct Builder {
    url: String,
    prefix: String,
    timeout: Duration,
    #[cfg(feature = "testing")]
    driven_by: Option<crate::clock::ManualClock>,
}

impl Builder {
    /// What every key begins with; `rate_limit` by default. No braces: they would choose the hash tag.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long a decision may take; 100 ms by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Hands this clock's time to the scripts instead of the server's. For tests only.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn driven_by(mut self, clock: crate::clock::ManualClock) -> Self {
        self.driven_by = Some(clock);
        self
    }

    /// Connects.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        if self.prefix.is_empty() || self.prefix.chars().any(|c| c.is_control() || "{}".contains(c)) {
            return Err(StoreError::Misconfigured(format!(
                "prefix {:?} is not usable: it must not be empty and must have no braces and no control characters",
                self.prefix
            )));
        }
        if self.url.starts_with("rediss://") {
            let message = "rediss:// (TLS) is not supported yet: use redis://, on a network that you trust";
            return Err(StoreError::Misconfigured(message.to_owned()));
        }
        // The URL may hold a password: no error repeats it.
        let info = self.url.as_str().into_connection_info().map_err(|_| {
            StoreError::Misconfigured(
                "this is not a Redis URL: it must look like redis://[user:password@]host[:port][/database]".to_owned(),
            )
        })?;
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let address = info.addr().to_string();
        let named = |error: &RedisError| match failure(error, self.timeout) {
            StoreError::Unreachable(reason) => StoreError::Unreachable(format!("{address}: {reason}")),
            StoreError::Refused(reason) => StoreError::Refused(format!("{address}: {reason}")),
            other => other,
        };
        let config = ConnectionManagerConfig::new()
            .set_response_timeout(Some(self.timeout))
            .set_connection_timeout(Some(Duration::from_secs(1)))
            .set_number_of_retries(1)
            .set_min_delay(Duration::from_millis(20));
        let client = Client::open(info).map_err(|error| named(&error))?;
        let connection = client.get_connection_manager_with_config(config).await.map_err(|error| named(&error))?;
        Ok(RedisStore {
            connection,
            prefix: self.prefix,
            timeout: self.timeout,
            clock: SystemClock::new(),
            #[cfg(feature = "testing")]
            driven_by: self.driven_by,
        })
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("prefix", &self.prefix).field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl RedisStore {
    /// Connects to the server at this URL, `redis://[user:password@]host[:port][/database]`.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// A store with options.
    #[must_use]
    pub fn builder(url: &str) -> Builder {
        Builder {
            url: url.to_owned(),
            prefix: "rate_limit".to_owned(),
            timeout: Duration::from_millis(100),
            #[cfg(feature = "testing")]
            driven_by: None,
        }
    }

    /// The key under which Redis keeps a charge's count.
    #[must_use]
    pub fn redis_key(&self, charge: &Charge<'_>) -> String {
        redis_key(&self.prefix, charge.key(), charge.policy_name())
    }

    /// Decides independent requests in one call, within the timeout: a connection that must be made first, and a script
    /// that must be sent again, have no time of their own.
    async fn run(&self, requests: &[Request<'_>]) -> Result<Vec<Verdict>, StoreError> {
        let call = tokio::time::timeout(self.timeout, self.call(requests)).await;
        call.unwrap_or(Err(StoreError::Timeout(self.timeout)))
    }

    async fn call(&self, requests: &[Request<'_>]) -> Result<Vec<Verdict>, StoreError> {
        let script = Script::for_requests(requests);
        let time = self.driven_time();
        let key = |charge: &Charge<'_>| self.redis_key(charge);
        let mut connection = self.connection.clone();
        let mut ask =
            async |command: ::redis::Cmd| connection.req_packed_command(&command).await.and_then(Value::extract_error);
        let reply = match ask(script.evalsha(requests, key, &time)).await {
            // The server was restarted or its scripts flushed. It did not run, so it may be sent again.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                ask(script.eval(requests, key, &time)).await
            }
            reply => reply,
        };
        let reply = reply.map_err(|error| failure(&error, self.timeout))?;
        script::verdicts(requests, reply)
    }

    /// The script's first argument: empty in production.
    #[cfg(feature = "testing")]
    fn driven_time(&self) -> String {
        self.driven_by.as_ref().map_or_else(String::new, |clock| clock.now().to_string())
    }

    #[cfg(not(feature = "testing"))]
    #[expect(clippy::unused_self, reason = "the twin for tests uses it")]
    fn driven_time(&self) -> String {
        String::new()
    }
}

impl Store for RedisStore {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let charges = std::slice::from_ref(charge);
        let verdicts = self.run(&[Request { action, charges }]).await?;
        Ok(verdicts[0].into_decision(charge.quota(), Source::Store))
    }

    async fn decide_all(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, StoreError> {
        if charges.is_empty() {
            return Ok(Vec::new());
        }
        let verdicts = self.run(&[Request { action, charges }]).await?;
        let dress = |(verdict, charge): (Verdict, &Charge<'_>)| verdict.into_decision(charge.quota(), Source::Store);
        Ok(verdicts.into_iter().zip(charges).map(dress).collect())
    }

    fn clock(&self) -> &dyn Clock {
        #[cfg(feature = "testing")]
        if let Some(clock) = &self.driven_by {
            return clock;
        }
        &self.clock
    }
}

fn failure(error: &RedisError, timeout: Duration) -> StoreError {
    if error.is_timeout() {
        StoreError::Timeout(timeout)
    } else if error.is_io_error() {
        StoreError::Unreachable(one_line(error))
    } else {
        StoreError::Refused(one_line(error))
    }
}

/// Some errors quote what they could not read, line breaks and all.
fn one_line(error: &RedisError) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
