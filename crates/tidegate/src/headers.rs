//! What a client is told: `RateLimit-Policy`, `RateLimit`, `Retry-After`, and the older
//! `X-RateLimit-*`.
//!
//! The first two follow the IETF draft on rate limit header fields: a list of items, each the
//! policy's name as a quoted string with its numbers as parameters. Seconds are rounded up, never
//! down: who waits them gets in.

use std::time::Duration;

use crate::decision::Decision;
use crate::quota::Quota;

/// One policy's decision about a request.
#[derive(Debug, Clone, Copy)]
pub struct Limited<'a> {
    /// The policy's name.
    pub policy: &'a str,
    /// Its quota.
    pub quota: &'a Quota,
    /// Its decision.
    pub decision: Decision,
}

/// The headers for these decisions: names in lower case, and their values. Empty if no policy
/// applied.
///
/// ```
/// # use std::time::Duration;
/// # use tidegate::{headers, Charge, Limiter, MemoryStore, Quota};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let decision = Limiter::new(MemoryStore::new()).blocking().acquire(&Charge::new("user123", &quota))?;
/// let limited = headers::Limited { policy: "per-user", quota: &quota, decision };
/// let headers = headers::all(&[limited], false);
/// assert_eq!(headers[0], ("ratelimit-policy", r#""per-user";q=100;w=60"#.to_owned()));
/// assert_eq!(headers[1], ("ratelimit", r#""per-user";r=99;t=60"#.to_owned()));
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn all(limited: &[Limited<'_>], with_x_headers: bool) -> Vec<(&'static str, String)> {
    let mut headers = Vec::with_capacity(6);
    each(limited.iter().copied(), with_x_headers, |name, value| {
        headers.push((name, value.to_owned()))
    });
    headers
}

/// The same, one by one in a buffer that they share: for front doors that answer many requests.
pub fn each<'a>(
    limited: impl Iterator<Item = Limited<'a>> + Clone,
    with_x_headers: bool,
    mut header: impl FnMut(&'static str, &str),
) {
    let leading = limited.clone().map(|limited| limited.decision).min_by_key(Decision::rank);
    let Some(leading) = leading else { return };
    let mut value = String::with_capacity(64);
    for Limited { policy, quota, .. } in limited.clone() {
        push_quoted(&mut value, policy);
        push_number(&mut value, ";q=", quota.limit());
        push_number(&mut value, ";w=", seconds(quota.window()));
    }
    header("ratelimit-policy", &value);
    value.clear();
    for Limited { policy, decision, .. } in limited {
        push_quoted(&mut value, policy);
        push_number(&mut value, ";r=", decision.remaining);
        push_number(&mut value, ";t=", seconds(decision.reset_after));
    }
    header("ratelimit", &value);
    let mut digits = itoa::Buffer::new();
    if !leading.allowed {
        header("retry-after", digits.format(seconds(leading.retry_after).max(1)));
    }
    if with_x_headers {
        header("x-ratelimit-limit", digits.format(leading.limit));
        header("x-ratelimit-remaining", digits.format(leading.remaining));
        header("x-ratelimit-reset", digits.format(seconds(leading.reset_after)));
    }
}

/// Whole seconds, rounded up.
pub(crate) fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

fn push_number(value: &mut String, name: &str, number: u64) {
    value.push_str(name);
    value.push_str(itoa::Buffer::new().format(number));
}

/// The next item of a list. A string of structured fields has only printable ASCII.
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
    use crate::decision::Source;

    fn decision(allowed: bool, retry_after: Duration) -> Decision {
        Decision {
            allowed,
            limit: 10,
            remaining: 3,
            retry_after,
            reset_after: Duration::from_millis(1_001),
            delay: Duration::ZERO,
            source: Source::Store,
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_a_denial_waits_at_least_one() {
        let quota = Quota::fixed_window(10, Duration::from_millis(1_500)).expect("valid");
        let limited = |decision| Limited { policy: "p", quota: &quota, decision };
        let headers = all(&[limited(decision(false, Duration::from_micros(1)))], true);
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
            all(&[limited(decision(true, Duration::ZERO)); 2], false)[1].1,
            "\"p\";r=3;t=2, \"p\";r=3;t=2"
        );
        assert!(all(&[], true).is_empty());
    }

    #[test]
    fn a_policys_name_cannot_break_out_of_its_header() {
        let mut value = String::new();
        push_quoted(&mut value, "a\"b\\c\r\né");
        push_quoted(&mut value, "plain");
        assert_eq!(value, r#""a\"b\\c???", "plain""#);
    }
}
