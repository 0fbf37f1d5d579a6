//! Rate limit headers as typed HTTP headers.

use std::cell::Cell;

use bytes::{Bytes, BytesMut};
use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::headers::{self, PolicyState, RateLimitHeader};

/// Passes the headers for these decisions, those of [`headers::for_each_header`], to `insert`.
///
/// It is for a front door other than the Tower layer, which adds these headers itself. The three
/// `X-RateLimit-*` headers are left out unless `with_x_headers` is set. Nothing is inserted if
/// `states` is empty.
///
/// Their values share one buffer: an allocation for each would cost more than the decision.
///
/// ```
/// use std::time::Duration;
/// use http::HeaderMap;
/// use tidegate::layer::for_each_header_value;
/// use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyLimiter, Query, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policies = Policies::new(vec![Policy::builder("per-user", quota).build()?])?;
/// let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
/// let decisions = limiter.acquire(Query::policy("per-user", "ann")).await?;
///
/// let mut headers = HeaderMap::new();
/// for_each_header_value(decisions.header_states(), false, |name, value| {
///     headers.insert(name, value);
/// });
/// assert_eq!(headers["ratelimit-policy"], r#""per-user";q=100;w=60"#);
/// assert_eq!(headers["ratelimit"], r#""per-user";r=99;t=60"#);
/// # Ok(())
/// # }
/// ```
pub fn for_each_header_value<'a>(
    states: impl Iterator<Item = PolicyState<'a>> + Clone,
    with_x_headers: bool,
    mut insert: impl FnMut(HeaderName, HeaderValue),
) {
    RenderedHeaders::new(states, with_x_headers).for_each(|header, value| {
        insert(typed(header), value);
    });
}

/// Rate limit headers of one response, without the memory of a map. Their values share one buffer.
#[derive(Debug, Default)]
pub(super) struct RenderedHeaders {
    text: Bytes,
    /// Length of each value, 0 if it is absent.
    lengths: [usize; RateLimitHeader::COUNT],
}

/// Size of the memory that values are written to. A response that is kept keeps all of it.
const SHARED_BYTES: usize = 1_024;

thread_local! {
    /// Memory that the responses of a thread share, so that most of them allocate none: for the
    /// text of one, and for the values of many.
    static SHARED: Cell<(String, BytesMut)> = Cell::default();
}

impl RenderedHeaders {
    /// Renders the headers of all limits.
    pub(super) fn new<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
    ) -> Self {
        // Taken, not borrowed: `states` may call a closure of the caller, which may come here.
        let (mut text, mut values) = SHARED.try_with(Cell::take).unwrap_or_default();
        text.clear();
        let (mut lengths, mut from) = ([0; RateLimitHeader::COUNT], 0);
        headers::write_headers(states, with_x_headers, &mut text, |header, text| {
            lengths[header as usize] = text.len() - from;
            from = text.len();
        });
        if values.capacity() < text.len() {
            values.reserve(text.len().max(SHARED_BYTES));
        }
        values.extend_from_slice(text.as_bytes());
        let rendered = Self { text: values.split().freeze(), lengths };
        if text.len() <= SHARED_BYTES {
            // The thread may be ending.
            let _ = SHARED.try_with(|kept| kept.set((text, values)));
        }
        rendered
    }

    fn for_each(&mut self, mut insert: impl FnMut(RateLimitHeader, HeaderValue)) {
        for (header, length) in RateLimitHeader::ALL.into_iter().zip(self.lengths) {
            // The bytes are printable, so there always is a value.
            if length > 0
                && let Ok(value) = HeaderValue::from_maybe_shared(self.text.split_to(length))
            {
                insert(header, value);
            }
        }
    }

    /// Adds the headers to a response. Lists are appended to those of an inner layer; of headers
    /// with a single value, that of the inner layer stays.
    pub(super) fn add_to(&mut self, headers: &mut HeaderMap) {
        if self.text.is_empty() {
            return;
        }
        headers.reserve(RateLimitHeader::COUNT);
        self.for_each(|header, value| match header {
            RateLimitHeader::Policy | RateLimitHeader::State => {
                headers.append(typed(header), value);
            }
            _ => {
                headers.entry(typed(header)).or_insert(value);
            }
        });
    }
}

/// Returns a name that is known at compile time: parsing it again would cost as much as the
/// decision.
pub(super) fn typed(header: RateLimitHeader) -> HeaderName {
    const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
    const STATE: HeaderName = HeaderName::from_static("ratelimit");
    const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
    const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
    match header {
        RateLimitHeader::Policy => POLICY,
        RateLimitHeader::State => STATE,
        RateLimitHeader::RetryAfter => RETRY_AFTER,
        RateLimitHeader::Limit => LIMIT,
        RateLimitHeader::Remaining => REMAINING,
        RateLimitHeader::Reset => RESET,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::decision::Decision;
    use crate::quota::Quota;

    #[test]
    fn typed_headers_equal_the_plain_ones() {
        let quota = Quota::sliding_log(100, Duration::from_secs(60)).expect("valid");
        let denied = Decision::deny(100, Duration::from_millis(1_500)).with_remaining(3);
        let allowed = Decision::allow(100, 3).with_reset_after(Duration::from_secs(60));
        for (decision, with_x_headers) in
            [(allowed, true), (denied, true), (allowed, false), (denied, false)]
        {
            let states = [("per-user", decision), ("odd \"name\"", allowed)]
                .map(|(policy, decision)| PolicyState::new(policy, &quota, decision));
            let mut typed = Vec::new();
            for_each_header_value(states.iter().copied(), with_x_headers, |name, value| {
                typed.push((name.as_str().to_owned(), value.to_str().expect("text").to_owned()));
            });
            let plain = headers::to_headers(&states, with_x_headers).into_iter();
            let plain: Vec<_> = plain.map(|(name, value)| (name.to_owned(), value)).collect();
            assert_eq!(typed, plain);
            assert!(typed.len() <= RateLimitHeader::COUNT && !typed.is_empty());
        }
        for_each_header_value(std::iter::empty(), true, |name, _| panic!("{name} without a limit"));
    }

    /// Returns the headers that a response has, in their order.
    fn added(state: PolicyState<'_>, mut response: HeaderMap) -> Vec<(String, String)> {
        RenderedHeaders::new(std::iter::once(state), true).add_to(&mut response);
        let text = |value: &HeaderValue| value.to_str().expect("text").to_owned();
        response.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    #[test]
    fn headers_of_a_response_equal_the_plain_ones() {
        let numbers = [0, 1, 9, 10, 99, 100, 999, 1_000, 9_999, u64::from(u32::MAX)];
        let day = Duration::from_secs(86_400);
        let long = "n".repeat(300);
        for name in ["per-user", "x-per-user", "odd \"name\" 50%", "p", "", &long] {
            for (burst, reset_after) in numbers.into_iter().zip(numbers.into_iter().rev()) {
                let quota = Quota::token_bucket(burst.max(1), day).expect("valid");
                for remaining in numbers.into_iter().filter(|number| *number <= burst) {
                    let reset_after = Duration::from_secs(reset_after);
                    let decision = Decision::allow(burst, remaining).with_reset_after(reset_after);
                    let state = PolicyState::new(name, &quota, decision);
                    let plain = headers::to_headers(&[state], true).into_iter();
                    let plain: Vec<_> =
                        plain.map(|(name, value)| (name.to_owned(), value)).collect();
                    assert_eq!(added(state, HeaderMap::new()), plain);
                    // A response that has headers already.
                    assert_eq!(added(state, HeaderMap::with_capacity(1)), plain);
                }
            }
        }
    }
}
