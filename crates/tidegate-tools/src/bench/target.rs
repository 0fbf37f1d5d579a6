//! [`LoadTarget`]: what is loaded.

use std::borrow::Cow;
use std::future::Future;
use std::time::Duration;

/// A store, or a client of a service.
pub(crate) trait LoadTarget: Send + Sync + 'static {
    /// Asks for a decision on this key. It ends within the timeout of the target.
    fn acquire(&self, key: &str) -> impl Future<Output = Result<Answer, RequestError>> + Send;
}

/// Decision of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Allowed,
    /// Allowed, because no policy applies.
    Unlimited,
    Denied,
}

/// Request without a decision.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RequestError {
    /// Name by which errors are counted.
    pub(super) kind: Cow<'static, str>,
    pub message: String,
}

/// Kind of a request without an answer within its timeout.
pub(super) const TIMEOUT: &str = "timeout";

impl RequestError {
    pub(super) fn is_timeout(&self) -> bool {
        self.kind == TIMEOUT
    }

    pub(super) fn new(kind: impl Into<Cow<'static, str>>, message: impl std::fmt::Display) -> Self {
        Self { kind: kind.into(), message: message.to_string() }
    }

    pub(super) fn connect(error: &anyhow::Error) -> Self {
        Self::new("connect", format_args!("{error:#}"))
    }
}

/// Waits for an answer until the timeout.
pub(super) async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, RequestError>>,
) -> Result<T, RequestError> {
    let late = |_| {
        let message = format_args!("no answer within {timeout:?}");
        Err(RequestError::new(TIMEOUT, message))
    };
    tokio::time::timeout(timeout, call).await.unwrap_or_else(late)
}
