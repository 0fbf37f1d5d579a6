//! Tokens of requests, and the counts of wrong ones.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use http::{HeaderMap, header};
use tidegate_net::LogThrottle;

/// Returns the bearer token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
}

/// Listener whose clients have tokens.
#[derive(Debug, Clone, Copy)]
pub enum AuthListener {
    Http,
    Grpc,
    Admin,
    Resp,
}

/// Wrong tokens of each listener: counts, and a log line once per minute.
#[derive(Debug, Default)]
pub struct AuthFailures([ListenerFailures; 4]);

#[derive(Debug, Default)]
struct ListenerFailures {
    count: AtomicU64,
    log: LogThrottle,
}

/// Labels, in the order of [`AuthListener`].
const LISTENERS: [&str; 4] = ["http", "grpc", "admin", "resp"];

impl AuthFailures {
    /// Counts a wrong token.
    pub fn count(&self, listener: AuthListener, peer: SocketAddr) {
        let failures = &self.0[listener as usize];
        failures.count.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = failures.log.should_log(Instant::now()) {
            tracing::warn!(
                listener = LISTENERS[listener as usize],
                %peer,
                count = suppressed + 1,
                "wrong tokens (logged once per minute, with the last client)"
            );
        }
    }

    /// Returns the number of wrong tokens by listener.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.0.iter().map(|failures| failures.count.load(Ordering::Relaxed));
        LISTENERS.into_iter().zip(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bearer_scheme_has_any_case() {
        let given = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, http::HeaderValue::from_static(value));
            bearer(&headers).map(|token| String::from_utf8_lossy(token).into_owned())
        };
        assert_eq!(given("Bearer a b").as_deref(), Some("a b"));
        assert_eq!(given("bEARER a").as_deref(), Some("a"));
        for other in ["Basic a", "Bearer", "Bearera", ""] {
            assert_eq!(given(other), None, "{other}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
