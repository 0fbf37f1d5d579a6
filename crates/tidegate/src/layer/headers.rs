//! Rate limit headers as typed HTTP headers.

use std::cell::Cell;
use std::sync::LazyLock;

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

/// Rate limit headers of one response. Their values share one buffer.
#[derive(Debug, Default)]
pub(super) struct RenderedHeaders {
    text: Bytes,
    /// Each header, and the length of its value.
    values: [Option<(RateLimitHeader, usize)>; RateLimitHeader::COUNT],
}

/// Memory that the responses of a thread share, so that most of them allocate none.
#[derive(Default)]
struct Buffers {
    text: String,
    shared: BytesMut,
}

/// Size of the memory that values are written to. A response that is kept keeps all of it.
const SHARED_BYTES: usize = 1_024;

const USUAL_HEADERS: [RateLimitHeader; 5] = [
    RateLimitHeader::Policy,
    RateLimitHeader::State,
    RateLimitHeader::Limit,
    RateLimitHeader::Remaining,
    RateLimitHeader::Reset,
];

/// Map with the usual headers in their order, and without their values.
static USUAL: LazyLock<HeaderMap> = LazyLock::new(|| {
    let empty = |header| (typed(header), HeaderValue::from_static(""));
    USUAL_HEADERS.map(empty).into_iter().collect()
});

thread_local! {
    static BUFFERS: Cell<Option<Buffers>> = const { Cell::new(None) };
}

impl RenderedHeaders {
    pub(super) fn new<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
    ) -> Self {
        // Taken, not borrowed: `states` may call a closure of the caller, which may come here.
        let kept = BUFFERS.try_with(Cell::take).ok().flatten();
        let Buffers { mut text, mut shared } = kept.unwrap_or_else(|| Buffers {
            text: String::with_capacity(256),
            shared: BytesMut::with_capacity(SHARED_BYTES),
        });
        let mut rendered = Self::default();
        let (mut slots, mut from) = (rendered.values.iter_mut(), 0);
        headers::write_headers(states, with_x_headers, &mut text, |header, text| {
            if let Some(slot) = slots.next() {
                *slot = Some((header, text.len() - from));
                from = text.len();
            }
        });
        if text.is_empty() {
            return rendered;
        }
        shared.extend_from_slice(text.as_bytes());
        rendered.text = shared.split().freeze();
        if text.len() <= SHARED_BYTES {
            text.clear();
            let _ = BUFFERS.try_with(|buffers| buffers.set(Some(Buffers { text, shared })));
        }
        rendered
    }

    fn for_each(mut self, mut insert: impl FnMut(RateLimitHeader, HeaderValue)) {
        for (header, length) in self.values.iter().flatten() {
            if let Ok(value) = HeaderValue::from_maybe_shared(self.text.split_to(*length)) {
                insert(*header, value);
            }
        }
    }

    /// Returns whether these are the headers of an admitted request, with the older ones.
    fn are_usual(&self) -> bool {
        let headers = self.values.iter().flatten().map(|(header, _)| *header);
        headers.eq(USUAL_HEADERS)
    }

    /// Adds the headers to a response. Lists are appended to those of an inner layer; of headers
    /// with a single value, that of the inner layer stays.
    pub(super) fn add_to(self, headers: &mut HeaderMap) {
        if headers.capacity() == 0 && self.are_usual() {
            // A copy of a map with the same names saves the hashes of five names.
            headers.clone_from(&USUAL);
            let mut values = headers.values_mut();
            self.for_each(|_, value| {
                if let Some(place) = values.next() {
                    *place = value;
                }
            });
            return;
        }
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
fn typed(header: RateLimitHeader) -> HeaderName {
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
}
