//! What a client is told, as fields of HTTP.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

use crate::headers::{self, Limited};

/// There are no more headers than these: two lists, `Retry-After`, three of the older ones.
const MOST: usize = 6;

/// The headers for these decisions, as [`headers::each`] has them, one by one.
///
/// Their values share one piece of memory: with one for each, a request would spend more on them
/// than on its decision.
pub fn each_field<'a>(
    limited: impl Iterator<Item = Limited<'a>> + Clone,
    with_x_headers: bool,
    mut field: impl FnMut(HeaderName, HeaderValue),
) {
    let mut text = Vec::with_capacity(128);
    let mut ends = [("", 0); MOST];
    let mut count = 0;
    headers::each(limited, with_x_headers, |name, value| {
        text.extend_from_slice(value.as_bytes());
        if let Some(end) = ends.get_mut(count) {
            *end = (name, text.len());
            count += 1;
        }
    });
    let (text, mut from) = (Bytes::from(text), 0);
    for (name, to) in &ends[..count] {
        if let Ok(value) = HeaderValue::from_maybe_shared(text.slice(from..*to)) {
            field(typed(name), value);
        }
        from = *to;
    }
}

/// Known at compile time: to look at each letter of a name again would take as long as the
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
    use crate::decision::{Decision, Source};
    use crate::quota::Quota;

    #[test]
    fn fields_are_what_the_headers_are() {
        let quota = Quota::sliding_log(100, Duration::from_secs(60)).expect("valid");
        let decision = |allowed| Decision {
            allowed,
            limit: 100,
            remaining: 3,
            retry_after: Duration::from_millis(1_500),
            reset_after: Duration::from_secs(60),
            delay: Duration::ZERO,
            source: Source::Store,
        };
        for (allowed, with_x_headers) in
            [(true, true), (false, true), (true, false), (false, false)]
        {
            let limited =
                [("per-user", allowed), ("odd \"name\"", true)].map(|(policy, allowed)| Limited {
                    policy,
                    quota: &quota,
                    decision: decision(allowed),
                });
            let mut fields = Vec::new();
            each_field(limited.iter().copied(), with_x_headers, |name, value| {
                fields.push((name.as_str().to_owned(), value.to_str().expect("text").to_owned()));
            });
            let headers = headers::all(&limited, with_x_headers);
            let headers: Vec<_> =
                headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            assert_eq!(fields, headers);
            assert!(fields.len() <= MOST && !fields.is_empty());
        }
        each_field(std::iter::empty(), true, |name, _| panic!("{name} without a limit"));
    }
}
