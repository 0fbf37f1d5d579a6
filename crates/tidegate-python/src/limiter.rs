//! `Limiter`: decides charges in memory or on Redis.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tidegate::store::redis::Tls;
use tidegate::{
    Action, Charge, Clock as _, DEFAULT_QUERY_TIMEOUT, Error, Limiter as LibraryLimiter,
    OnStoreFailure, Outcome, Policies, PreparedCharge, RedisStore, Store as _, SystemClock,
    Timestamp,
};
use tokio::sync::OnceCell;

use crate::aio::Completions;
use crate::connection::{AnyLimiter, Connection, Settings, memory};
use crate::decision::{Decision, Decisions};
use crate::error::{limiter_error, value_error};
use crate::hold::{Held, Hold};
use crate::logs;
use crate::process::{PerProcess, driver};
use crate::query::{Query, Request, refund};
use crate::quota::{Quota, Units, seconds};
use crate::store::AnyStore;
use crate::wait::Wait;

#[pyclass(frozen, subclass, weakref, module = "tidegate")]
pub(crate) struct Limiter {
    backend: Backend,
    on_store_failure: OnStoreFailure,
    timeout: Duration,
}

enum Backend {
    Memory(AnyLimiter),
    Redis { settings: Arc<Settings>, connected: PerProcess<OnceCell<AnyLimiter>> },
}

/// URL of a server, or those of several nodes or sentinels.
#[derive(FromPyObject)]
enum Urls {
    One(String),
    Several(Vec<String>),
}

#[pymethods]
impl Limiter {
    #[new]
    #[pyo3(signature = (url = None, *, sentinel = None, prefix = None, timeout = None,
        password = None, tls_ca = None, tls_cert = None, tls_key = None,
        instances = None, on_store_failure = "local", clock = None, max_keys = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        url: Option<Urls>,
        sentinel: Option<&str>,
        prefix: Option<String>,
        timeout: Option<f64>,
        password: Option<String>,
        tls_ca: Option<Vec<u8>>,
        tls_cert: Option<Vec<u8>>,
        tls_key: Option<Vec<u8>>,
        instances: Option<Units>,
        on_store_failure: &str,
        clock: Option<&Bound<'_, ManualClock>>,
        max_keys: Option<Units>,
    ) -> PyResult<Self> {
        let on_store_failure = on_store_failure.parse().map_err(value_error)?;
        let at_least_one = |name: &str, units: Option<Units>| match units {
            Some(Units(0)) => Err(value_error(format!("{name} must be at least 1"))),
            units => Ok(units.map(|Units(units)| usize::try_from(units).unwrap_or(usize::MAX))),
        };
        let max_keys = at_least_one("max_keys", max_keys)?;
        let instances = at_least_one("instances", instances)?;
        let Some(url) = url else {
            let options = [sentinel.is_some(), prefix.is_some(), timeout.is_some()];
            let tls = tls_ca.is_some() || tls_cert.is_some() || tls_key.is_some();
            if options.contains(&true) || password.is_some() || tls || instances.is_some() {
                return Err(value_error("these options need the URL of a Redis server"));
            }
            let memory = memory(max_keys, clock.map(|clock| clock.get().0.clone()));
            let backend = Backend::Memory(LibraryLimiter::new(AnyStore::Memory(memory)));
            return Ok(Self { backend, on_store_failure, timeout: DEFAULT_QUERY_TIMEOUT });
        };
        if clock.is_some() {
            return Err(value_error("a clock is an option of memory: leave out the URL"));
        }
        let mut builder = match (sentinel, url) {
            (Some(primary), Urls::One(url)) => RedisStore::sentinel(primary, [url]),
            (Some(primary), Urls::Several(urls)) => RedisStore::sentinel(primary, urls),
            (None, Urls::One(url)) => RedisStore::builder(&url),
            (None, Urls::Several(urls)) => RedisStore::cluster(urls),
        };
        if let Some(prefix) = prefix {
            builder = builder.prefix(prefix);
        }
        let timeout = timeout.map_or(Ok(DEFAULT_QUERY_TIMEOUT), seconds)?;
        builder = builder.timeout(timeout);
        if let Some(password) = password {
            builder = builder.password(password);
        }
        if let Some(tls) = tls(tls_ca, tls_cert, tls_key)? {
            builder = builder.tls(tls);
        }
        builder.check().map_err(value_error)?;
        let settings = Arc::new(Settings { builder, instances, max_keys });
        let backend = Backend::Redis { settings, connected: PerProcess::new() };
        Ok(Self { backend, on_store_failure, timeout })
    }

    /// Takes units of the quota for this key, or denies. With an `id`, a retry is not charged again
    /// for `id_ttl` seconds.
    #[pyo3(
        signature = (key, quota, cost = Units(1), *, policy = None, on_store_failure = None,
            id = None, id_ttl = 600.0),
        text_signature = "($self, key, quota, cost=1, *, policy=None, on_store_failure=None, \
            id=None, id_ttl=600.0)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn acquire(
        &self,
        py: Python<'_>,
        key: &str,
        quota: &Bound<'_, Quota>,
        cost: Units,
        policy: Option<&str>,
        on_store_failure: Option<&str>,
        id: Option<&str>,
        id_ttl: f64,
    ) -> PyResult<Decision> {
        let failure = self.on_store_failure(on_store_failure)?;
        let charge = charge(key, quota.get(), cost, policy, failure, Timestamp::ZERO);
        let to_decision = |answer| Decision {
            answer,
            quota: Some(quota.clone().unbind()),
            policy: policy.map(Into::into),
            is_shadow: false,
        };
        if id.is_some() {
            let hold = Hold::new(id, None, Some(id_ttl))?;
            let charge = charge.with_hold(&hold.0);
            return self.decide_charge(py, Action::Acquire, &charge).map(to_decision);
        }
        self.decide_charge(py, Action::Acquire, &charge).map(to_decision)
    }

    /// Takes units as `acquire` does, and returns only whether the request may pass.
    #[pyo3(
        signature = (key, quota, cost = Units(1)),
        text_signature = "($self, key, quota, cost=1)"
    )]
    fn allow(
        &self,
        py: Python<'_>,
        key: &str,
        quota: &Bound<'_, Quota>,
        cost: Units,
    ) -> PyResult<bool> {
        let charge = charge(key, quota.get(), cost, None, self.on_store_failure, Timestamp::ZERO);
        self.decide_charge(py, Action::Acquire, &charge).map(|decision| decision.allowed)
    }

    /// Applies an action to one charge.
    #[expect(clippy::too_many_arguments, reason = "called by the Python part only")]
    fn _decide(
        &self,
        py: Python<'_>,
        action: &str,
        key: &str,
        quota: &Bound<'_, Quota>,
        cost: Units,
        policy: Option<&str>,
        on_store_failure: Option<&str>,
        charged_at: Option<f64>,
        hold: Option<Py<Hold>>,
    ) -> PyResult<Decision> {
        let (failure, charged_at) = (self.on_store_failure(on_store_failure)?, time(charged_at)?);
        let charge = charge(key, quota.get(), cost, policy, failure, charged_at);
        let charge = with_hold(charge, hold.as_ref());
        self.decide_charge(py, to_action(action)?, &charge).map(|answer| Decision {
            answer,
            quota: Some(quota.clone().unbind()),
            policy: policy.map(Into::into),
            is_shadow: false,
        })
    }

    /// Applies an action to one charge, for a future of asyncio.
    #[expect(clippy::too_many_arguments, reason = "called by the Python part only")]
    fn _start(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        action: &str,
        key: String,
        quota: Py<Quota>,
        cost: Units,
        policy: Option<String>,
        on_store_failure: Option<&str>,
        charged_at: Option<f64>,
        hold: Option<Py<Hold>>,
    ) -> PyResult<bool> {
        let (failure, charged_at) = (self.on_store_failure(on_store_failure)?, time(charged_at)?);
        let (action, connection) = (to_action(action)?, self.connection()?);
        let (owned, name) = (quota.get().clone(), policy.clone());
        let call = async move {
            let charge = charge(&key, &owned, cost, name.as_deref(), failure, charged_at);
            let charge = with_hold(charge, hold.as_ref());
            connection.limiter().await?.decide(action, &charge).await
        };
        completions.start(future, call, |py, decided| to_decision(py, decided, quota, policy))
    }

    /// Starts to wait until the charge is admitted, at most for `timeout` seconds.
    fn _wait(
        &self,
        key: String,
        quota: Py<Quota>,
        timeout: f64,
        cost: Units,
        policy: Option<String>,
        on_store_failure: Option<&str>,
    ) -> PyResult<Wait> {
        let (failure, timeout) = (self.on_store_failure(on_store_failure)?, seconds(timeout)?);
        let (connection, owned) = (self.connection()?, quota.get().clone());
        let name = policy.clone();
        let wait = async move {
            let policy = name.as_deref();
            let charge = charge(&key, &owned, cost, policy, failure, Timestamp::ZERO);
            connection.limiter().await?.wait(&charge, timeout).await
        };
        Wait::new(wait, quota, policy)
    }

    /// Decides several charges together, all or nothing.
    fn _decide_all(
        &self,
        py: Python<'_>,
        action: &str,
        charges: Vec<Bound<'_, PyTuple>>,
        on_store_failure: Option<&str>,
        hold: Option<&Hold>,
    ) -> PyResult<Decisions> {
        let action = to_action(action)?;
        self.prepare(action, charges, on_store_failure, hold)?.decide(py)
    }

    fn _start_all(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        action: &str,
        charges: Vec<Bound<'_, PyTuple>>,
        on_store_failure: Option<&str>,
        hold: Option<&Hold>,
    ) -> PyResult<bool> {
        let action = to_action(action)?;
        self.prepare(action, charges, on_store_failure, hold)?.start(completions, future)
    }

    /// Takes units until the answer is released.
    fn _hold(
        &self,
        py: Python<'_>,
        charges: Vec<Bound<'_, PyTuple>>,
        on_store_failure: Option<&str>,
        hold: &Hold,
    ) -> PyResult<Held> {
        self.prepare(Action::Acquire, charges, on_store_failure, Some(hold))?.hold(py)
    }

    fn _start_hold(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        charges: Vec<Bound<'_, PyTuple>>,
        on_store_failure: Option<&str>,
        hold: &Hold,
    ) -> PyResult<bool> {
        let query = self.prepare(Action::Acquire, charges, on_store_failure, Some(hold))?;
        query.start_hold(completions, future)
    }

    /// Returns the units of a request that failed, or those of the policies that refund this status.
    fn _refund_all(
        &self,
        py: Python<'_>,
        decisions: &Decisions,
        status: Option<u16>,
    ) -> PyResult<()> {
        let connection = self.connection()?;
        connection.clone().block_on(py, refund(connection, decisions.to_refund(status)))
    }

    fn _start_refund_all(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        decisions: &Decisions,
        status: Option<u16>,
    ) -> PyResult<bool> {
        let refund = refund(self.connection()?, decisions.to_refund(status));
        completions.start(future, refund, |py, ()| Ok(py.None()))
    }

    /// Time of the limiter's clock, in seconds since the Unix epoch.
    fn now(&self) -> PyResult<f64> {
        let now = match &self.connection()? {
            Connection::Ready(limiter) => limiter.now(),
            // The clock of the store starts at the same time.
            Connection::Pending { .. } => SystemClock::new().now(),
        };
        Ok(Duration::from_micros(now.as_micros()).as_secs_f64())
    }

    fn __repr__(&self) -> &'static str {
        if self.is_memory() { "<Limiter in memory>" } else { "<Limiter on Redis>" }
    }

    /// Whether the counts are in the memory of this process.
    #[getter]
    fn is_memory(&self) -> bool {
        matches!(self.backend, Backend::Memory(_))
    }
}

impl Limiter {
    fn connection(&self) -> PyResult<Connection> {
        let (settings, connected) = match &self.backend {
            Backend::Memory(limiter) => return Ok(Connection::Ready(limiter.clone())),
            Backend::Redis { settings, connected } => {
                (settings, connected.get(|| Ok(OnceCell::new()))?)
            }
        };
        Ok(match connected.get() {
            Some(limiter) => Connection::Ready(limiter.clone()),
            None => {
                Connection::Pending { settings: Arc::clone(settings), connected, driver: driver()? }
            }
        })
    }

    pub(crate) fn query(
        &self,
        policies: Arc<Policies>,
        action: Action,
        request: Request,
        hold: Option<&Hold>,
    ) -> PyResult<Query> {
        let (connection, timeout) = (self.connection()?, self.timeout);
        let hold = hold.map(|hold| Arc::clone(&hold.0));
        Ok(Query { connection, timeout, policies, action, request, hold })
    }

    fn on_store_failure(&self, given: Option<&str>) -> PyResult<OnStoreFailure> {
        given.map_or(Ok(self.on_store_failure), |name| name.parse().map_err(value_error))
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller computes only the fields that it uses")]
    fn decide_charge(
        &self,
        py: Python<'_>,
        action: Action,
        charge: &Charge<'_>,
    ) -> PyResult<tidegate::Decision> {
        if let Backend::Memory(limiter) = &self.backend {
            // It validates acquires itself, and answers without waiting.
            if let (Action::Acquire, AnyStore::Memory(store)) = (action, limiter.store())
                && let Outcome::Ready(Ok(answer)) = store.decide(Action::Acquire, charge)
            {
                return Ok(answer);
            }
            return limiter.blocking().decide(action, charge).map_err(limiter_error);
        }
        let connection = self.connection()?;
        let driver = connection.driver()?;
        let decided = py.detach(|| {
            // The fallback starts its recovery there.
            let _entered = driver.handle().enter();
            connection.limiter_blocking()?.blocking().decide(action, charge)
        });
        logs::flush(py);
        decided.map_err(limiter_error)
    }

    fn prepare(
        &self,
        action: Action,
        charges: Vec<Bound<'_, PyTuple>>,
        on_store_failure: Option<&str>,
        hold: Option<&Hold>,
    ) -> PyResult<Query> {
        let failure = self.on_store_failure(on_store_failure)?;
        let charges = charges.iter().map(|charge| {
            if !(2..=4).contains(&charge.len()) {
                let message = "a charge is (key, quota), (key, quota, cost) or \
                               (key, quota, cost, policy)";
                return Err(value_error(message));
            }
            let key: String = charge.get_item(0)?.extract()?;
            let quota = charge.get_item(1)?.cast::<Quota>()?.get().0.clone();
            let Units(cost) = match charge.get_item(2) {
                Ok(cost) => cost.extract()?,
                Err(_) => Units(1),
            };
            let policy = match charge.get_item(3) {
                Ok(policy) => policy.extract()?,
                Err(_) => quota.default_policy_name().to_owned(),
            };
            Ok(PreparedCharge::with_own_quota(policy, key, quota)
                .with_cost(cost)
                .with_action(action)
                .with_on_store_failure(failure))
        });
        let charges = charges.collect::<PyResult<_>>()?;
        self.query(Arc::default(), action, Request::Charges(charges), hold)
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "48 ns per decision, as a goal wants")]
fn charge<'a>(
    key: &'a str,
    quota: &'a Quota,
    Units(cost): Units,
    policy: Option<&'a str>,
    on_store_failure: OnStoreFailure,
    charged_at: Timestamp,
) -> Charge<'a> {
    let charge = Charge::new(key, &quota.0)
        .with_cost(cost)
        .with_on_store_failure(on_store_failure)
        .with_charged_at(charged_at);
    match policy {
        Some(policy) => charge.with_policy(policy),
        None => charge,
    }
}

fn with_hold<'a>(charge: Charge<'a>, hold: Option<&'a Py<Hold>>) -> Charge<'a> {
    match hold {
        Some(hold) => charge.with_hold(&hold.get().0),
        None => charge,
    }
}

fn to_decision(
    py: Python<'_>,
    decided: Result<tidegate::Decision, Error>,
    quota: Py<Quota>,
    policy: Option<String>,
) -> PyResult<Py<PyAny>> {
    let decision = Decision {
        answer: decided.map_err(limiter_error)?,
        quota: Some(quota),
        policy: policy.map(Into::into),
        is_shadow: false,
    };
    Ok(Py::new(py, decision)?.into_any())
}

pub(crate) fn to_action(name: &str) -> PyResult<Action> {
    Ok(match name {
        "acquire" => Action::Acquire,
        "peek" => Action::Peek,
        "report" => Action::Report,
        "refund" => Action::Refund,
        "reset" => Action::Reset,
        "commit" => Action::Commit,
        _ => return Err(value_error(format!("{name:?} is not an action"))),
    })
}

/// Converts a time of [`Limiter::now`].
fn time(seconds_since_epoch: Option<f64>) -> PyResult<Timestamp> {
    let Some(time) = seconds_since_epoch else { return Ok(Timestamp::ZERO) };
    let since_epoch = Duration::try_from_secs_f64(time)
        .map_err(|_| value_error(format!("{time} is not a time: use that of limiter.now()")))?;
    // A double is precise to less than half a microsecond.
    let micros = (since_epoch + Duration::from_nanos(500)).as_micros();
    Ok(Timestamp::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
}

fn tls(
    ca: Option<Vec<u8>>,
    certificate: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
) -> PyResult<Option<Tls>> {
    let mut tls = match (&ca, &certificate) {
        (None, None) if key.is_none() => return Ok(None),
        _ => Tls::new(),
    };
    if let Some(ca) = ca {
        tls = tls.ca(ca);
    }
    match (certificate, key) {
        (Some(certificate), Some(key)) => tls = tls.identity(certificate, key),
        (None, None) => {}
        _ => return Err(value_error("tls_cert and tls_key belong together")),
    }
    Ok(Some(tls))
}

/// Clock that moves only when a test moves it.
#[pyclass(frozen, module = "tidegate")]
pub(crate) struct ManualClock(tidegate::ManualClock);

#[pymethods]
impl ManualClock {
    #[new]
    fn new() -> Self {
        Self(tidegate::ManualClock::new())
    }

    /// Advances the clock by seconds.
    fn advance(&self, by: f64) -> PyResult<()> {
        self.0.advance(seconds(by)?);
        Ok(())
    }

    /// Steps the clock back by seconds, as the correction of a wrong clock does.
    fn step_back(&self, by: f64) -> PyResult<()> {
        self.0.step_back(seconds(by)?);
        Ok(())
    }

    /// Seconds since the Unix epoch.
    fn now(&self) -> f64 {
        Duration::from_micros(self.0.now().as_micros()).as_secs_f64()
    }
}
