//! Headers of a response: `RateLimit-Policy`, `RateLimit`, `Retry-After`, and the older
//! `X-RateLimit-*`.
//!
//! The first two follow the IETF draft on rate limit header fields: a list of items, each with the
//! policy's name as a quoted string and its numbers as parameters. Seconds are rounded up, so a
//! client that waits them is admitted.

use std::time::Duration;

use crate::decision::Decision;
use crate::quota::Quota;

/// State of one policy after a request, as the headers show it.
///
/// [`PolicyDecisions::header_states`](crate::PolicyDecisions::header_states) returns those of a
/// request. Callers of a [`Limiter`](crate::Limiter) fill it in themselves, as in the example of
/// [`to_headers`].
#[derive(Debug, Clone, Copy)]
pub struct PolicyState<'a> {
    /// Name of the policy.
    pub policy: &'a str,
    /// Quota of the policy.
    pub quota: &'a Quota,
    /// Decision of the policy.
    pub decision: Decision,
}

/// Returns the headers for these decisions, with names in lower case. Empty if no policy applies.
///
/// ```
/// # use std::time::Duration;
/// # use tidegate::{headers, Charge, Limiter, MemoryStore, Quota};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let limiter = Limiter::new(MemoryStore::new());
/// let decision = limiter.blocking().acquire(&Charge::new("user123", &quota))?;
/// let state = headers::PolicyState { policy: "per-user", quota: &quota, decision };
/// let headers = headers::to_headers(&[state], false);
/// assert_eq!(headers[0], ("ratelimit-policy", r#""per-user";q=100;w=60"#.to_owned()));
/// assert_eq!(headers[1], ("ratelimit", r#""per-user";r=99;t=60"#.to_owned()));
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn to_headers(states: &[PolicyState<'_>], with_x_headers: bool) -> Vec<(&'static str, String)> {
    let mut headers = Vec::with_capacity(6);
    for_each_header(states.iter().copied(), with_x_headers, |name, value| {
        headers.push((name, value.to_owned()));
    });
    headers
}

/// Passes the headers of [`to_headers`] to `header` one by one, from one shared buffer: for front
/// doors that answer many requests.
///
/// | name | value | if |
/// | --- | --- | --- |
/// | `ratelimit-policy` | limit `q` and window `w` in seconds of each policy | always |
/// | `ratelimit` | units left `r` and reset `t` in seconds of each policy | always |
/// | `retry-after` | wait of the binding policy in seconds, at least 1 | it denies |
/// | `x-ratelimit-limit`, `-remaining`, `-reset` | those of the binding policy | `with_x_headers` |
///
/// ```
/// use std::time::Duration;
/// use tidegate::headers::{PolicyState, for_each_header};
/// use tidegate::{Decision, Quota};
///
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let decision = Decision::deny(100, Duration::from_millis(1_500));
/// let state = PolicyState { policy: "per-user", quota: &quota, decision };
/// let mut head = String::new();
/// for_each_header([state].into_iter(), false, |name, value| {
///     head.push_str(&format!("{name}: {value}\r\n"));
/// });
/// assert!(head.ends_with("retry-after: 2\r\n"));
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
pub fn for_each_header<'a>(
    states: impl Iterator<Item = PolicyState<'a>> + Clone,
    with_x_headers: bool,
    mut header: impl FnMut(&'static str, &str),
) {
    let binding = states.clone().map(|state| state.decision).min_by_key(Decision::rank);
    let Some(binding) = binding else { return };
    let mut value = String::with_capacity(64);
    for PolicyState { policy, quota, .. } in states.clone() {
        push_quoted(&mut value, policy);
        push_number(&mut value, ";q=", quota.limit());
        push_number(&mut value, ";w=", seconds(quota.window()));
    }
    header("ratelimit-policy", &value);
    value.clear();
    for PolicyState { policy, decision, .. } in states {
        push_quoted(&mut value, policy);
        push_number(&mut value, ";r=", decision.remaining);
        push_number(&mut value, ";t=", seconds(decision.reset_after));
    }
    header("ratelimit", &value);
    let mut digits = itoa::Buffer::new();
    if !binding.allowed {
        header("retry-after", digits.format(seconds(binding.retry_after).max(1)));
    }
    if with_x_headers {
        header("x-ratelimit-limit", digits.format(binding.limit));
        header("x-ratelimit-remaining", digits.format(binding.remaining));
        header("x-ratelimit-reset", digits.format(seconds(binding.reset_after)));
    }
}

/// Returns whole seconds, rounded up.
pub(crate) fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

fn push_number(value: &mut String, name: &str, number: u64) {
    value.push_str(name);
    value.push_str(itoa::Buffer::new().format(number));
}

/// Appends an item to a list. A string of structured fields has only printable ASCII.
fn push_quoted(value: &mut String, text: &str) {
    value.push_str(if value.is_empty() { "\"" } else { ", \"" });
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\')) {
        value.push_str(text);
    } else {
        for character in text.chars() {
            match character {
                '"' | '\\' => value.extend(['\\', character]),
                ' '..='~' => value.push(character),
                _ => value.push('?'),
            }
        }
    }
    value.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(allowed: bool, retry_after: Duration) -> Decision {
        Decision {
            allowed,
            ..Decision::deny(10, retry_after)
                .with_remaining(3)
                .with_reset_after(Duration::from_millis(1_001))
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_a_denial_has_at_least_one() {
        let quota = Quota::fixed_window(10, Duration::from_millis(1_500)).expect("valid");
        let state = |decision| PolicyState { policy: "p", quota: &quota, decision };
        let headers = to_headers(&[state(decision(false, Duration::from_micros(1)))], true);
        assert_eq!(
            headers,
            [
                ("ratelimit-policy", "\"p\";q=10;w=2".to_owned()),
                ("ratelimit", "\"p\";r=3;t=2".to_owned()),
                ("retry-after", "1".to_owned()),
                ("x-ratelimit-limit", "10".to_owned()),
                ("x-ratelimit-remaining", "3".to_owned()),
                ("x-ratelimit-reset", "2".to_owned()),
            ]
        );
        assert_eq!(
            to_headers(&[state(decision(true, Duration::ZERO)); 2], false)[1].1,
            "\"p\";r=3;t=2, \"p\";r=3;t=2"
        );
        assert!(to_headers(&[], true).is_empty());
    }

    #[test]
    fn policy_name_cannot_break_out_of_its_header() {
        let mut value = String::new();
        push_quoted(&mut value, "a\"b\\c\r\né");
        push_quoted(&mut value, "plain");
        assert_eq!(value, r#""a\"b\\c???", "plain""#);
    }
}
