//! Choice whether a failed request is sent again.

use std::error::Error as _;
use std::time::Duration;

use http::Method;
use hyper_util::client::legacy;
use tokio::sync::oneshot;

use super::body::RequestBody;
use super::connection::Progress;
use super::upstreams::Protocol;

/// Time limit for hyper to drop the body of a failed request.
const BODY_RETURN_TIMEOUT: Duration = Duration::from_secs(1);

/// What may follow a failed attempt to send a request.
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

    pub(super) fn after(error: &legacy::Error, method: &Method, protocol: Protocol) -> Self {
        if error.is_connect() {
            Self::OtherUpstream
        } else if is_refused(error) || method.is_idempotent() && is_idle_close(error, protocol) {
            // The pool must not use this connection again. Requests in flight on it continue.
            if let Some(connection) = error.connect_info() {
                connection.poison();
            }
            Self::OtherConnection
        } else {
            Self::No
        }
    }
}

/// Returns whether an HTTP/2 server has declared that it did not process the request: it refused
/// the stream, or sent a GOAWAY for an earlier one (RFC 9113, 8.7).
fn is_refused(error: &legacy::Error) -> bool {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(error) = source.downcast_ref::<h2::Error>() {
            return error.is_remote()
                && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM));
        }
        cause = source.source();
    }
    false
}

/// Returns whether the upstream closed a connection that it had kept alive, at the moment when the
/// request was sent. Nothing of the response has arrived.
fn is_idle_close(error: &legacy::Error, protocol: Protocol) -> bool {
    Progress::of(error).is_some_and(|progress| {
        progress.has_responded() && (protocol == Protocol::Http2 || progress.awaits_response())
    })
}

/// Returns the body of a failed request, if it can be sent again.
pub(super) async fn returned(body: oneshot::Receiver<RequestBody>) -> Option<RequestBody> {
    tokio::time::timeout(BODY_RETURN_TIMEOUT, body).await.ok()?.ok()
}
