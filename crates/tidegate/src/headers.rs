//! What a client is told: `RateLimit-Policy`, `RateLimit`, `Retry-After`, and the older `X-RateLimit-*`.
//!
//! The first two follow the IETF draft on rate limit header fields: a list of items, each the policy's name as a
//! quoted string with its numbers as parameters. Seconds are rounded up, never down: who waits them gets in.

use std::fmt::Write as _;
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

/// The headers for these decisions: names in lower case, and their values. Empty if no policy applied.
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
    let decisions: Vec<Decision> = limited.iter().map(|limited| limited.decision).collect();
    let Some(leading) = Decision::most_restrictive(&decisions) else { return Vec::new() };
    let (mut policies, mut states) = (String::new(), String::new());
    for Limited { policy, quota, decision } in limited {
        let separator = if policies.is_empty() { "" } else { ", " };
        let name = quoted(policy);
        let _ = write!(policies, "{separator}{name};q={};w={}", quota.limit(), seconds(quota.window()));
        let _ = write!(states, "{separator}{name};r={};t={}", decision.remaining, seconds(decision.reset_after));
    }
    let mut headers = vec![("ratelimit-policy", policies), ("ratelimit", states)];
    if !leading.allowed {
        headers.push(("retry-after", seconds(leading.retry_after).max(1).to_string()));
    }
    if with_x_headers {
        headers.push(("x-ratelimit-limit", leading.limit.to_string()));
        headers.push(("x-ratelimit-remaining", leading.remaining.to_string()));
        headers.push(("x-ratelimit-reset", seconds(leading.reset_after).to_string()));
    }
    headers
}

/// Whole seconds, rounded up.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

/// A string of structured fields has only printable ASCII.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            ' '..='~' => quoted.push(character),
            _ => quoted.push('?'),
        }
    }
    quoted.push('"');
    quoted
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
        assert_eq!(all(&[limited(decision(true, Duration::ZERO)); 2], false)[1].1, "\"p\";r=3;t=2, \"p\";r=3;t=2");
        assert!(all(&[], true).is_empty());
    }

    #[test]
    fn a_policys_name_cannot_break_out_of_its_header() {
        assert_eq!(quoted("a\"b\\c\r\né"), r#""a\"b\\c???""#);
    }
}
