//! `Policies` of a file, and `PolicyLimiter`: decides by those that apply to a request.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use pyo3::prelude::*;
use tidegate::layer::CustomAttributes;

use crate::aio::Completions;
use crate::decision::Decisions;
use crate::error::value_error;
use crate::hold::{Held, Hold};
use crate::limiter::{Limiter, to_action};
use crate::query::{Query, Request};
use crate::quota::Units;

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

    /// Names of the policies that limit what is in flight.
    #[getter]
    fn in_flight(&self) -> Vec<&str> {
        let in_flight = self.0.iter().filter(|policy| policy.quota().is_concurrency());
        in_flight.map(tidegate::Policy::name).collect()
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

    /// Whether the headers of this peer are trusted.
    fn trusts(&self, peer: &str) -> PyResult<bool> {
        Ok(self.0.trusts(to_address(peer)?))
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
        cost: Option<Units>,
        hold: Option<&Hold>,
    ) -> PyResult<Decisions> {
        self.query(action, by(attributes, cost), hold)?.decide(py)
    }

    fn _start(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        action: &str,
        attributes: BTreeMap<String, String>,
        cost: Option<Units>,
        hold: Option<&Hold>,
    ) -> PyResult<bool> {
        self.query(action, by(attributes, cost), hold)?.start(completions, future)
    }

    fn _hold(
        &self,
        py: Python<'_>,
        attributes: BTreeMap<String, String>,
        cost: Option<Units>,
    ) -> PyResult<Held> {
        self.query("acquire", by(attributes, cost), None)?.hold(py)
    }

    fn _start_hold(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        attributes: BTreeMap<String, String>,
        cost: Option<Units>,
    ) -> PyResult<bool> {
        self.query("acquire", by(attributes, cost), None)?.start_hold(completions, future)
    }

    fn _acquire_request(&self, py: Python<'_>, request: HttpRequest) -> PyResult<Decisions> {
        self.query("acquire", self.http_request(request)?, None)?.decide(py)
    }

    fn _start_request(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
        request: HttpRequest,
    ) -> PyResult<bool> {
        self.query("acquire", self.http_request(request)?, None)?.start(completions, future)
    }
}

/// Method, target, headers, address of the peer, and custom attributes.
type HttpRequest =
    (String, Vec<u8>, Vec<(Vec<u8>, Vec<u8>)>, Option<String>, Option<BTreeMap<String, String>>);

impl PolicyLimiter {
    fn query(&self, action: &str, request: Request, hold: Option<&Hold>) -> PyResult<Query> {
        let (policies, action) = (Arc::clone(&self.policies), to_action(action)?);
        self.limiter.get().query(policies, action, request, hold)
    }

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

fn by(attributes: BTreeMap<String, String>, cost: Option<Units>) -> Request {
    Request::Attributes { attributes, cost: cost.map(|Units(cost)| cost) }
}

fn to_address(peer: &str) -> PyResult<IpAddr> {
    peer.parse().map_err(|_| value_error(format!("{peer:?} is not the address of a peer")))
}
