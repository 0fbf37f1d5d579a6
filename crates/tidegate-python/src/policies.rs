//! `Policies` of a file, and `PolicyLimiter`: decides by those that apply to a request.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use ipnet::IpNet;
use pyo3::prelude::*;
use tidegate::layer::{CustomAttributes, RequestParts};
use tidegate::{Action, PolicyDecisions, PreparedCharge, Query, QueryError};

use crate::aio::Completions;
use crate::decision::Decisions;
use crate::error::{query_error, value_error};
use crate::limiter::{Connection, Limiter, to_action};
use crate::logs;
use crate::process::driver;

#[pyclass(frozen, module = "tidegate")]
pub(crate) struct Policies(Arc<tidegate::Policies>);

#[pymethods]
impl Policies {
    /// Loads the policies of a file, such as the configuration of `tidegate serve`.
    #[staticmethod]
    fn load(path: PathBuf) -> PyResult<Self> {
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let message = format!("{}: {error}", path.display());
            std::io::Error::new(error.kind(), message)
        })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses policies; `name` is the file in error messages.
    #[staticmethod]
    #[pyo3(signature = (text, name = "policies"))]
    fn parse(text: &str, name: &str) -> PyResult<Self> {
        let policies = tidegate_config::parse_policies(name, text).map_err(value_error)?;
        Ok(Self(Arc::new(policies)))
    }

    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.iter().map(tidegate::Policy::name).collect()
    }
}

/// Finds the address of a client behind trusted proxies.
#[pyclass(frozen, module = "tidegate")]
pub(crate) struct ClientIp(Arc<tidegate::ClientIp>);

#[pymethods]
impl ClientIp {
    #[new]
    #[pyo3(signature = (trusted_proxies = Vec::new(), *, ipv6_prefix = 64))]
    fn new(trusted_proxies: Vec<String>, ipv6_prefix: u8) -> PyResult<Self> {
        let networks = trusted_proxies.iter().map(|text| {
            let address = text.parse::<IpAddr>().map(IpNet::from);
            text.parse().or(address).map_err(|_| {
                value_error(format!("{text:?} is not a network: write it like 10.0.0.0/8"))
            })
        });
        let networks = networks.collect::<PyResult<_>>()?;
        let client_ip = tidegate::ClientIp::new(networks, ipv6_prefix).map_err(value_error)?;
        Ok(Self(Arc::new(client_ip)))
    }

    /// Key of a client, by the address of the connection and the headers in their order.
    #[pyo3(signature = (peer, x_forwarded_for = Vec::new(), forwarded = Vec::new()))]
    fn key(
        &self,
        peer: &str,
        x_forwarded_for: Vec<Vec<u8>>,
        forwarded: Vec<Vec<u8>>,
    ) -> PyResult<String> {
        let (x_forwarded_for, forwarded) =
            (x_forwarded_for.iter().map(Vec::as_slice), forwarded.iter().map(Vec::as_slice));
        let resolved = self.0.resolve(to_address(peer)?, x_forwarded_for, forwarded);
        Ok(self.0.group(resolved.address))
    }
}

/// Whom and what a query is about.
pub(crate) enum Request {
    Charges(Vec<PreparedCharge<'static>>),
    Attributes { attributes: BTreeMap<String, String>, cost: Option<u64> },
    Http { parts: Box<Parts>, peer: Option<IpAddr>, client_ip: Arc<tidegate::ClientIp> },
}

#[pyclass(frozen, subclass, module = "tidegate")]
pub(crate) struct PolicyLimiter {
    limiter: Py<Limiter>,
    policies: Arc<tidegate::Policies>,
    client_ip: Arc<tidegate::ClientIp>,
}

#[pymethods]
impl PolicyLimiter {
    #[new]
    #[pyo3(signature = (limiter, policies, *, client_ip = None))]
    fn new(limiter: Py<Limiter>, policies: &Policies, client_ip: Option<&ClientIp>) -> Self {
        let client_ip = client_ip.map_or_else(Arc::default, |client_ip| Arc::clone(&client_ip.0));
        Self { limiter, policies: Arc::clone(&policies.0), client_ip }
    }

    #[getter]
    fn limiter(&self, py: Python<'_>) -> Py<Limiter> {
        self.limiter.clone_ref(py)
    }

    fn _decide(
        &self,
        py: Python<'_>,
        action: &str,
        attributes: BTreeMap<String, String>,
        cost: Option<u64>,
    ) -> PyResult<Decisions> {
        let request = Request::Attributes { attributes, cost };
        let policies = Arc::clone(&self.policies);
        decide_query(py, self.limiter.get(), policies, to_action(action)?, request)
    }

    fn _start(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        action: &str,
        attributes: BTreeMap<String, String>,
        cost: Option<u64>,
    ) -> PyResult<bool> {
        let request = Request::Attributes { attributes, cost };
        let policies = Arc::clone(&self.policies);
        start_query(completions, future, self.limiter.get(), policies, to_action(action)?, request)
    }

    fn _acquire_request(&self, py: Python<'_>, request: HttpRequest) -> PyResult<Decisions> {
        let request = self.http_request(request)?;
        let policies = Arc::clone(&self.policies);
        decide_query(py, self.limiter.get(), policies, Action::Acquire, request)
    }

    fn _start_request(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        request: HttpRequest,
    ) -> PyResult<bool> {
        let request = self.http_request(request)?;
        let policies = Arc::clone(&self.policies);
        start_query(completions, future, self.limiter.get(), policies, Action::Acquire, request)
    }
}

/// Method, target, headers, address of the peer, and custom attributes.
type HttpRequest =
    (String, Vec<u8>, Vec<(Vec<u8>, Vec<u8>)>, Option<String>, Option<BTreeMap<String, String>>);

impl PolicyLimiter {
    fn http_request(&self, request: HttpRequest) -> PyResult<Request> {
        let (method, target, headers, peer, attributes) = request;
        let mut builder = http::Request::builder().method(method.as_str()).uri(target);
        for (name, value) in headers {
            builder = builder.header(name, value);
        }
        let (mut parts, ()) = builder.body(()).map_err(value_error)?.into_parts();
        if let Some(attributes) = attributes {
            parts.extensions.insert(CustomAttributes(attributes));
        }
        let peer = peer.as_deref().map(to_address).transpose()?;
        let client_ip = Arc::clone(&self.client_ip);
        Ok(Request::Http { parts: Box::new(parts), peer, client_ip })
    }
}

fn to_address(peer: &str) -> PyResult<IpAddr> {
    peer.parse().map_err(|_| value_error(format!("{peer:?} is not the address of a peer")))
}

/// Decides a query, without the GIL if it may wait for Redis.
pub(crate) fn decide_query(
    py: Python<'_>,
    limiter: &Limiter,
    policies: Arc<tidegate::Policies>,
    action: Action,
    request: Request,
) -> PyResult<Decisions> {
    let (connection, driver, timeout) = (limiter.connection()?, driver()?, limiter.timeout);
    let query = decide(connection, timeout, policies, action, request);
    let decided = limiter.detached(py, || driver.block_on(query));
    logs::flush(py)?;
    decided.map(Decisions).map_err(query_error)
}

/// Decides a query for a future of asyncio.
pub(crate) fn start_query(
    completions: &Completions,
    future: &Bound<'_, PyAny>,
    limiter: &Limiter,
    policies: Arc<tidegate::Policies>,
    action: Action,
    request: Request,
) -> PyResult<bool> {
    let query = decide(limiter.connection()?, limiter.timeout, policies, action, request);
    completions.start(future, query, |py, decided| {
        Ok(Py::new(py, decided.map(Decisions).map_err(query_error)?)?.into_any())
    })
}

async fn decide(
    connection: Connection,
    timeout: Duration,
    policies: Arc<tidegate::Policies>,
    action: Action,
    request: Request,
) -> Result<PolicyDecisions<'static>, QueryError> {
    let limiter = connection.limiter().await.map_err(tidegate::Error::from)?;
    let limiter = tidegate::PolicyLimiter::new(limiter, policies).with_timeout(timeout);
    let decisions = match request {
        Request::Charges(charges) => limiter.decide(action, Query::prepared(charges)).await,
        Request::Attributes { attributes, cost } => {
            limiter.decide(action, Query::attributes(&attributes).with_cost(cost)).await
        }
        Request::Http { parts, peer, client_ip } => {
            let attributes = RequestParts::new(&parts, peer, &client_ip);
            limiter.decide(action, Query::attributes(&attributes)).await
        }
    };
    Ok(decisions?.into_owned())
}

/// Returns the units of a request, or of its policies that `refund_on` this status.
pub(crate) async fn refund(
    connection: Connection,
    decisions: PolicyDecisions<'static>,
    status: Option<u16>,
) {
    let Ok(limiter) = connection.limiter().await else { return };
    let decisions = match status {
        Some(status) => decisions.refunded_on(status),
        None => decisions,
    };
    let limiter = tidegate::PolicyLimiter::new(limiter, tidegate::Policies::default());
    limiter.refund(&decisions).await;
}
