//! [`Query`]: several limits on one request, decided together.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use pyo3::prelude::*;
use tidegate::layer::RequestParts;
use tidegate::{
    Action, ClientIp, Hold, Policies, PolicyDecisions, PolicyLimiter, PreparedCharge, QueryError,
};

use crate::aio::Completions;
use crate::connection::Connection;
use crate::decision::Decisions;
use crate::error::query_error;
use crate::hold::{Held, Permits};
use crate::logs;

/// Whom and what a query is about.
pub(crate) enum Request {
    Charges(Vec<PreparedCharge<'static>>),
    Attributes { attributes: BTreeMap<String, String>, cost: Option<u64> },
    Http { parts: Box<Parts>, peer: Option<IpAddr>, client_ip: Arc<ClientIp> },
}

pub(crate) struct Query {
    pub(crate) connection: Connection,
    pub(crate) timeout: Duration,
    pub(crate) policies: Arc<Policies>,
    pub(crate) action: Action,
    pub(crate) request: Request,
    pub(crate) hold: Option<Arc<Hold>>,
}

impl Query {
    /// Decides it on this thread.
    pub(crate) fn decide(self, py: Python<'_>) -> PyResult<Decisions> {
        let decided = self.connection.clone().block_on(py, self.decisions())?;
        logs::flush(py);
        decided.map(Decisions::from).map_err(query_error)
    }

    /// Decides it for a future of asyncio.
    pub(crate) fn start(
        self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        completions.start(future, self.decisions(), |py, decided| {
            Ok(Py::new(py, decided.map(Decisions::from).map_err(query_error)?)?.into_any())
        })
    }

    /// Decides it on this thread, and keeps what it has in flight.
    pub(crate) fn hold(self, py: Python<'_>) -> PyResult<Held> {
        let decided = self.connection.clone().block_on(py, self.permits())?;
        logs::flush(py);
        let (decisions, permits) = decided.map_err(query_error)?;
        Held::new(py, decisions, permits)
    }

    /// The same for a future of asyncio. If it is cancelled, the permits are dropped.
    pub(crate) fn start_hold(
        self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        completions.start(future, self.permits(), |py, decided| {
            let (decisions, permits) = decided.map_err(query_error)?;
            Ok(Py::new(py, Held::new(py, decisions, permits)?)?.into_any())
        })
    }

    async fn permits(self) -> Result<(PolicyDecisions<'static>, Permits), QueryError> {
        let (connection, holds_all) = (self.connection.clone(), self.hold.is_some());
        let decisions = self.decisions().await?;
        let limiter = connection.limiter().await.map_err(tidegate::Error::from)?;
        let permits = Permits::of(&limiter, &decisions, holds_all).await?;
        Ok((decisions, permits))
    }

    async fn decisions(self) -> Result<PolicyDecisions<'static>, QueryError> {
        let limiter = self.connection.limiter().await.map_err(tidegate::Error::from)?;
        let limiter = PolicyLimiter::new(limiter, self.policies).with_timeout(self.timeout);
        let (action, hold) = (self.action, self.hold);
        let decisions = match self.request {
            Request::Charges(charges) => {
                limiter.decide(action, with_hold(tidegate::Query::prepared(charges), hold)).await
            }
            Request::Attributes { attributes, cost } => {
                let query = tidegate::Query::attributes(&attributes).with_cost(cost);
                limiter.decide(action, with_hold(query, hold)).await
            }
            Request::Http { parts, peer, client_ip } => {
                let attributes = RequestParts::new(&parts, peer, &client_ip);
                limiter.decide(action, tidegate::Query::attributes(&attributes)).await
            }
        };
        Ok(decisions?.into_owned())
    }
}

fn with_hold<'a, 'q>(
    query: tidegate::Query<'a, 'q>,
    hold: Option<Arc<Hold>>,
) -> tidegate::Query<'a, 'q> {
    match hold {
        Some(hold) => query.with_hold(hold),
        None => query,
    }
}

/// Returns the units of a request.
pub(crate) async fn refund(connection: Connection, decisions: PolicyDecisions<'static>) {
    let Ok(limiter) = connection.limiter().await else { return };
    let limiter = PolicyLimiter::new(limiter, Policies::default());
    limiter.refund(&decisions).await;
}
