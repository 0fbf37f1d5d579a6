//! Retry policy: whether a failed request is sent again, and to which upstream.

use std::error::Error as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use tokio::sync::oneshot;

use super::body::RequestBody;
use super::client::ClientError;
use super::concurrency::RequestPermit;
use super::error::ProxyError;
use super::upstreams::{Candidates, Protocol, Upstream, Upstreams};

/// Time limit for hyper to drop the body of a failed request.
const BODY_RETURN_TIMEOUT: Duration = Duration::from_secs(1);

/// Next step after a failed attempt to send a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// The request may have been processed.
    No,
    /// Another upstream: the connection to this one failed.
    OtherUpstream,
    /// The same upstream, on another connection.
    OtherConnection,
}

/// One attempt to send a request.
#[derive(Debug)]
pub(super) struct Attempt<'u> {
    pub(super) upstream: &'u Upstream,
    pub(super) permit: Arc<RequestPermit>,
    /// Whether the request was sent before, on a connection that the upstream had closed.
    pub(super) is_repeated: bool,
}

/// Failed attempt, and what is needed for the next one.
#[derive(Debug)]
pub(super) struct FailedAttempt {
    pub(super) error: ProxyError,
    pub(super) retry: Retry,
    /// Receiver that gets the client's body back, if the request has one.
    pub(super) body: Option<oneshot::Receiver<Box<RequestBody>>>,
}

/// Retry policy of one request: it is sent to one upstream after the other, until one is reached,
/// and once more if an upstream closed the connection without processing the request.
#[derive(Debug)]
pub(super) struct RetryPolicy<'u> {
    upstreams: &'u Upstreams,
    candidates: Candidates<'u>,
    client: IpAddr,
}

impl Attempt<'_> {
    /// Returns whether the request may be sent again after it was sent.
    pub(super) fn may_repeat(&self, method: &Method) -> bool {
        !self.is_repeated && (method.is_idempotent() || self.upstream.protocol == Protocol::Http2)
    }
}

impl FailedAttempt {
    pub(super) fn invalid_target() -> Self {
        let error = ProxyError::Ambiguous("the request target is not a path");
        Self { error, retry: Retry::No, body: None }
    }
}

impl<'u> RetryPolicy<'u> {
    pub(super) fn new(upstreams: &'u Upstreams, client: IpAddr) -> Self {
        Self { upstreams, candidates: upstreams.candidates(), client }
    }

    pub(super) async fn first(&mut self) -> Result<Attempt<'u>, ProxyError> {
        self.next_upstream(false).await?.ok_or(ProxyError::NoUpstream)
    }

    /// Returns whether no other attempt can follow.
    pub(super) fn is_last(&self, attempt: &Attempt<'_>, method: &Method) -> bool {
        !attempt.may_repeat(method) && self.candidates.is_empty()
    }

    /// Returns the next attempt with the body to send, or the error of the request.
    pub(super) async fn next(
        &mut self,
        last: Attempt<'u>,
        failure: FailedAttempt,
    ) -> Result<(Attempt<'u>, Option<Box<RequestBody>>), ProxyError> {
        let FailedAttempt { error, mut retry, body } = failure;
        if last.is_repeated && retry == Retry::OtherConnection {
            retry = Retry::No;
        }
        let mut returned_body = None;
        if let (Some(body), true) = (body, retry != Retry::No) {
            returned_body = returned(body).await;
            if returned_body.is_none() {
                retry = Retry::No;
            }
        }
        // A connection that was closed while it was idle is no failure of the upstream.
        if retry != Retry::OtherConnection && error.is_upstream_failure() {
            self.upstreams.record_failure(last.upstream, error.reason());
        }
        let next = match retry {
            Retry::No => return Err(error),
            Retry::OtherConnection => Attempt { is_repeated: true, ..last },
            Retry::OtherUpstream => {
                let is_repeated = last.is_repeated;
                // The request may have to wait for the next upstream, but not at this one.
                drop(last);
                match self.next_upstream(is_repeated).await? {
                    Some(next) => next,
                    None if self.upstreams.all_ejected() => return Err(ProxyError::NoUpstream),
                    None => return Err(error),
                }
            }
        };
        Ok((next, returned_body))
    }

    /// Returns an attempt at the next upstream that has room for the request, or `None` if all were
    /// tried.
    async fn next_upstream(
        &mut self,
        is_repeated: bool,
    ) -> Result<Option<Attempt<'u>>, ProxyError> {
        let Some(next) = self.candidates.next(self.client).await else { return Ok(None) };
        let (upstream, permit) = next.map_err(ProxyError::Overloaded)?;
        Ok(Some(Attempt { upstream, permit: Arc::new(permit), is_repeated }))
    }
}

impl Retry {
    pub(super) fn after(error: &ClientError, method: &Method, protocol: Protocol) -> Self {
        if error.is_connect() {
            return Self::OtherUpstream;
        }
        let http2_error = http2_error(error);
        let is_repeatable = http2_error.is_some_and(is_refused)
            || method.is_idempotent()
                && http2_error.is_none_or(h2::Error::is_io)
                && is_idle_close(error, protocol);
        if !is_repeatable {
            return Self::No;
        }
        error.forget_connection();
        Self::OtherConnection
    }
}

fn http2_error(error: &ClientError) -> Option<&h2::Error> {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(error) = source.downcast_ref() {
            return Some(error);
        }
        cause = source.source();
    }
    None
}

/// Returns whether an HTTP/2 server has declared that it did not process the request: it refused
/// the stream, or sent a GOAWAY for an earlier one (RFC 9113, 8.7).
fn is_refused(error: &h2::Error) -> bool {
    let is_refused = error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM);
    error.is_remote() && is_refused
}

/// Returns whether the upstream closed a connection that it had kept alive, when the request was
/// sent. Nothing of the response has arrived.
fn is_idle_close(error: &ClientError, protocol: Protocol) -> bool {
    error.progress().is_some_and(|progress| {
        progress.has_responded() && (protocol == Protocol::Http2 || progress.awaits_response())
    })
}

/// Returns the body of a failed request, if it can be sent again.
async fn returned(body: oneshot::Receiver<Box<RequestBody>>) -> Option<Box<RequestBody>> {
    tokio::time::timeout(BODY_RETURN_TIMEOUT, body).await.ok()?.ok()
}
