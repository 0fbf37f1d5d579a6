//! Rate limit headers as typed HTTP headers.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

use crate::headers::{self, PolicyState};

/// Two lists, `Retry-After`, and three older headers.
const MAX_HEADERS: usize = 6;

/// Passes the headers for these decisions, those of [`headers::for_each_header`], to `insert`.
///
/// It is for a front door other than the Tower layer, which adds these headers itself. The three
/// `X-RateLimit-*` headers are left out unless `with_x_headers` is set. Nothing is inserted if
/// `states` is empty.
///
/// Their values share one allocation: one per value would cost more than the decision.
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
    let mut text = Vec::with_capacity(128);
    let mut ends = [("", 0); MAX_HEADERS];
    let mut count = 0;
    headers::for_each_header(states, with_x_headers, |name, value| {
        text.extend_from_slice(value.as_bytes());
        if let Some(end) = ends.get_mut(count) {
            *end = (name, text.len());
            count += 1;
        }
    });
    let (text, mut from) = (Bytes::from(text), 0);
    for (name, to) in &ends[..count] {
        if let Ok(value) = HeaderValue::from_maybe_shared(text.slice(from..*to)) {
            insert(typed(name), value);
        }
        from = *to;
    }
}

/// Returns a name that is known at compile time: parsing it again would cost as much as the
/// decision.
fn typed(name: &'static str) -> HeaderName {
    const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
    const STATE: HeaderName = HeaderName::from_static("ratelimit");
    const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
    const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
    match name {
        "ratelimit-policy" => POLICY,
        "ratelimit" => STATE,
        "x-ratelimit-limit" => LIMIT,
        "x-ratelimit-remaining" => REMAINING,
        "x-ratelimit-reset" => RESET,
        other => HeaderName::from_static(other),
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
            assert!(typed.len() <= MAX_HEADERS && !typed.is_empty());
        }
        for_each_header_value(std::iter::empty(), true, |name, _| panic!("{name} without a limit"));
    }
}
