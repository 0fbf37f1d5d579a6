//! Choice whether a failed request is sent again.

use std::error::Error as _;
use std::time::Duration;

use http::Method;
use tokio::sync::oneshot;

use super::body::RequestBody;
use super::client::ClientError;
use tidegate_config::UpstreamProtocol as Protocol;

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

impl Retry {
    /// Returns whether a request may be sent again after it was sent.
    pub(super) fn is_possible(method: &Method, protocol: Protocol) -> bool {
        method.is_idempotent() || protocol == Protocol::Http2
    }

    pub(super) fn after(error: &ClientError, method: &Method, protocol: Protocol) -> Self {
        if error.is_connect() {
            return Self::OtherUpstream;
        }
        if matches!(error, ClientError::ManyHeaders) {
            return Self::OtherConnection;
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
pub(super) async fn returned(
    body: oneshot::Receiver<Box<RequestBody>>,
) -> Option<Box<RequestBody>> {
    tokio::time::timeout(BODY_RETURN_TIMEOUT, body).await.ok()?.ok()
}
