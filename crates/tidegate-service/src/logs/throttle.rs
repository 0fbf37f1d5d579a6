//! Throttled log lines of failed stores.

use std::time::Instant;

use tidegate::StoreError;
use tidegate_net::LogThrottle;

/// Logs, throttled, that the store failed to decide a request. Clients do not see the error itself.
pub fn store_failed(error: &StoreError) {
    static THROTTLE: LogThrottle = LogThrottle::new();
    if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
        tracing::warn!(
            %error,
            suppressed,
            "the store failed to decide a request (logged once per minute)"
        );
    }
}
