//! Headers of a response: `RateLimit-Policy`, `RateLimit`, `Retry-After`, and the older
//! `X-RateLimit-*`.
//!
//! The first two follow the IETF draft on rate limit header fields: a list of items, each with the
//! policy's name as a quoted string and its numbers as parameters. Strings in such fields are
//! ASCII, so all other bytes of a name, and `%`, are percent-encoded. Seconds are rounded up, so a
//! client that waits them is admitted.

use std::time::Duration;

use crate::algorithm::{Algorithm, mul_div_rem};
use crate::clock::wall_clock;
use crate::decision::{Decision, Source};
use crate::quota::Quota;

/// Type URI of the problem details of a denial, from the IETF draft. Its member `violated-policies`
/// has the names of the policies that the request exceeds.
pub const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
/// Title of the problem type [`QUOTA_EXCEEDED`].
pub const QUOTA_EXCEEDED_TITLE: &str = "Quota Exceeded";

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
    /// Hash of the key, shown as the optional parameter `pk` of both lists; usually `None`. A key
    /// may be a secret, so the key itself is never shown.
    pub partition_key: Option<[u8; 16]>,
}

impl<'a> PolicyState<'a> {
    /// Creates the state of a policy, without its partition key.
    #[must_use]
    pub fn new(policy: &'a str, quota: &'a Quota, decision: Decision) -> Self {
        Self { policy, quota, decision, partition_key: None }
    }
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
/// let state = headers::PolicyState::new("per-user", &quota, decision);
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
/// | `ratelimit-policy` | capacity `q` and the seconds `w` in which it refills | always |
/// | `ratelimit` | units left `r` and the seconds `t` until there are more | always |
/// | `retry-after` | seconds to wait, at least 1 | denied, and a wait helps |
/// | `x-ratelimit-limit`, `-remaining` | capacity and units left | `with_x_headers` |
/// | `x-ratelimit-reset` | seconds until the capacity is full | the same, unless no wait helps |
///
/// The first two list all policies, the others are those of the binding policy.
///
/// * The capacity is the [burst](Quota::burst) of a bucket and the limit of the other algorithms.
///   `q` divided by `w` is the rate, and no number of units left exceeds `q`.
/// * `w` of a [calendar](Quota::calendar) is the length of the current period.
/// * `t` is the wait of a policy that denies, and is never longer than `retry-after`. Otherwise it
///   is the time until the next unit for a bucket, and until the end of a fixed window. The sliding
///   algorithms do not report when their oldest unit leaves: `t` is the time until all have left.
/// * A policy whose whole capacity is available has no `t`. Neither has a denial that no wait
///   helps, because the request lacks the policy's key.
///
/// ```
/// use std::time::Duration;
/// use tidegate::headers::{PolicyState, for_each_header};
/// use tidegate::{Decision, Quota};
///
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let decision = Decision::deny(100, Duration::from_millis(1_500));
/// let state = PolicyState::new("per-user", &quota, decision);
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
    let (mut text, mut from) = (String::with_capacity(64), 0);
    write_headers(states, with_x_headers, &mut text, |name, text| {
        header(name.as_str(), &text[from..]);
        from = text.len();
    });
}

/// Header that a response may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RateLimitHeader {
    Policy,
    State,
    RetryAfter,
    Limit,
    Remaining,
    Reset,
}

impl RateLimitHeader {
    #[cfg(feature = "tower")]
    pub(crate) const ALL: [Self; 6] =
        [Self::Policy, Self::State, Self::RetryAfter, Self::Limit, Self::Remaining, Self::Reset];
    #[cfg(feature = "tower")]
    pub(crate) const COUNT: usize = Self::ALL.len();

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Policy => "ratelimit-policy",
            Self::State => "ratelimit",
            Self::RetryAfter => "retry-after",
            Self::Limit => "x-ratelimit-limit",
            Self::Remaining => "x-ratelimit-remaining",
            Self::Reset => "x-ratelimit-reset",
        }
    }
}

/// Appends the values of all headers to `text`, one after the other. `written` is called after
/// each, with the whole text.
#[inline]
pub(crate) fn write_headers<'a>(
    states: impl Iterator<Item = PolicyState<'a>> + Clone,
    with_x_headers: bool,
    text: &mut String,
    mut written: impl FnMut(RateLimitHeader, &str),
) {
    let binding = states.clone().min_by_key(|state| state.decision.rank());
    let Some(binding) = binding else { return };
    let retry_after = binding.retry_after();
    let mut separator = "";
    for PolicyState { policy, quota, partition_key, .. } in states.clone() {
        push_policy(text, separator, policy, quota);
        push_partition_key(text, partition_key);
        separator = SEPARATOR;
    }
    written(RateLimitHeader::Policy, text);
    separator = "";
    for state in states {
        push_state_name(text, separator, state.policy);
        push_number(text, state.decision.remaining);
        if let Some(wait) = state.more_after() {
            text.push_str(";t=");
            push_number(text, wait.min(retry_after.unwrap_or(u64::MAX)));
        }
        push_partition_key(text, state.partition_key);
        separator = SEPARATOR;
    }
    written(RateLimitHeader::State, text);
    if let Some(retry_after) = retry_after {
        push_number(text, retry_after);
        written(RateLimitHeader::RetryAfter, text);
    }
    if with_x_headers {
        push_number(text, binding.quota.burst());
        written(RateLimitHeader::Limit, text);
        push_number(text, binding.decision.remaining);
        written(RateLimitHeader::Remaining, text);
        if let Some(reset) = binding.reset() {
            push_number(text, reset);
            written(RateLimitHeader::Reset, text);
        }
    }
}

/// Separator of the items of a list.
const SEPARATOR: &str = ", ";

/// Appends an item of `ratelimit-policy`, without its partition key.
fn push_policy(text: &mut String, separator: &str, policy: &str, quota: &Quota) {
    push_name(text, separator, policy);
    text.push_str(";q=");
    push_number(text, quota.burst());
    if quota.is_concurrency() {
        text.push_str(";qu=\"concurrent-requests\"");
        return;
    }
    text.push_str(";w=");
    let has_calendar = quota.calendar().is_some();
    push_number(text, if has_calendar { period(quota) } else { drain_seconds(quota) });
}

fn drain_seconds(quota: &Quota) -> u64 {
    quota.drain_micros().div_ceil(1_000_000)
}

/// Returns the seconds of the current period of a calendar.
#[cold]
fn period(quota: &Quota) -> u64 {
    seconds(quota.window_at(wall_clock()))
}

/// Appends the start of an item of `ratelimit`, up to the number of units left.
fn push_state_name(text: &mut String, separator: &str, policy: &str) {
    push_name(text, separator, policy);
    text.push_str(";r=");
}

impl PolicyState<'_> {
    /// Returns the seconds of `retry-after`: those of a denial, unless no wait helps. Units in flight
    /// may be released at any time before their holds end.
    #[inline]
    fn retry_after(&self) -> Option<u64> {
        let wait = self.decision.retry_after;
        let seconds = || if self.quota.is_concurrency() { 1 } else { seconds(wait) };
        (!self.decision.allowed && !wait.is_zero()).then(seconds)
    }

    /// Returns the seconds of `x-ratelimit-reset`. `None` if no wait helps.
    #[inline]
    fn reset(&self) -> Option<u64> {
        if self.quota.is_concurrency() {
            return self.retry_after();
        }
        let Decision { allowed, retry_after, reset_after, .. } = self.decision;
        (allowed || !retry_after.is_zero()).then(|| seconds(reset_after.max(retry_after)))
    }

    /// Returns the seconds until more quota becomes available. `None` if all of it is available, or
    /// if no wait helps.
    #[inline]
    fn more_after(&self) -> Option<u64> {
        if self.quota.is_concurrency() {
            return self.retry_after();
        }
        let Decision { allowed, remaining, retry_after, reset_after, source, .. } = self.decision;
        let is_bucket =
            matches!(self.quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
        let wait = if !allowed {
            retry_after
        // While the store is unavailable, the bucket that decides is a share of the quota.
        } else if is_bucket && source != Source::Local {
            self.next_unit_after(remaining, reset_after)
        } else {
            reset_after
        };
        Some(seconds(wait)).filter(|wait| *wait > 0)
    }

    /// Returns the time until a bucket has one unit more: the time until it is full, less the time
    /// in which all further units arrive.
    #[inline]
    fn next_unit_after(&self, remaining: u64, reset_after: Duration) -> Duration {
        let Some(further) = self.quota.burst().saturating_sub(remaining).checked_sub(1) else {
            return Duration::ZERO;
        };
        if further == 0 {
            return reset_after;
        }
        let (refill, _) = mul_div_rem(further, self.quota.window_micros(), self.quota.limit());
        reset_after.saturating_sub(Duration::from_micros(refill))
    }
}

/// Returns whole seconds, rounded up.
#[inline]
pub(crate) fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

#[inline]
fn push_number(text: &mut String, number: u64) {
    text.push_str(itoa::Buffer::new().format(number));
}

/// Appends the parameter `pk`, a byte sequence in Base64.
fn push_partition_key(value: &mut String, partition_key: Option<[u8; 16]>) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let Some(bytes) = partition_key else { return };
    value.push_str(";pk=:");
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().fold(0, |group, byte| (group << 8) | usize::from(*byte));
        let group = group << (8 * (3 - chunk.len()));
        for position in 0..=chunk.len() {
            value.push(DIGITS[(group >> (18 - 6 * position)) & 63].into());
        }
    }
    value.push_str("==:");
}

/// Appends an item to a list: the name as a string of structured fields, which has only printable
/// ASCII. Names that differ stay different.
fn push_name(value: &mut String, separator: &str, name: &str) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    value.push_str(separator);
    value.push('"');
    let is_plain = |byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\' | b'%');
    if name.bytes().all(is_plain) {
        value.push_str(name);
    } else {
        for byte in name.bytes() {
            match byte {
                b'"' | b'\\' => value.extend(['\\', byte.into()]),
                _ if is_plain(byte) => value.push(byte.into()),
                _ => {
                    let digit = |number: u8| char::from(HEX[usize::from(number)]);
                    value.extend(['%', digit(byte >> 4), digit(byte & 15)]);
                }
            }
        }
    }
    value.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

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
        let state = |decision| PolicyState::new("p", &quota, decision);
        let headers = to_headers(&[state(decision(false, Duration::from_micros(1)))], true);
        assert_eq!(
            headers,
            [
                ("ratelimit-policy", "\"p\";q=10;w=2".to_owned()),
                ("ratelimit", "\"p\";r=3;t=1".to_owned()),
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
    fn burst_is_the_limit_shown_and_the_window_keeps_the_rate() {
        let minute = 60 * SECOND;
        let quota = |limit, burst| {
            Quota::token_bucket(limit, minute).and_then(|quota| quota.with_burst(burst))
        };
        for (limit, burst, policy) in
            [(10, 50, "q=50;w=300"), (10, 2, "q=2;w=12"), (7, 8, "q=8;w=69"), (1_000, 1, "q=1;w=1")]
        {
            let quota = quota(limit, burst).expect("valid");
            let decision = Decision::allow(burst, burst - 1).with_reset_after(SECOND);
            let headers = to_headers(&[PolicyState::new("p", &quota, decision)], true);
            assert_eq!(headers[0].1, format!("\"p\";{policy}"));
            assert_eq!(headers[2], ("x-ratelimit-limit", burst.to_string()));
        }
    }

    #[test]
    fn units_in_flight_have_a_unit_of_their_own_and_no_window() {
        let quota = Quota::concurrency(20).expect("valid");
        let headers = |decision| to_headers(&[PolicyState::new("exports", &quota, decision)], true);
        let denied = Decision::deny(20, 45 * SECOND).with_reset_after(60 * SECOND);
        assert_eq!(
            headers(denied),
            [
                ("ratelimit-policy", "\"exports\";q=20;qu=\"concurrent-requests\"".to_owned()),
                ("ratelimit", "\"exports\";r=0;t=1".to_owned()),
                ("retry-after", "1".to_owned()),
                ("x-ratelimit-limit", "20".to_owned()),
                ("x-ratelimit-remaining", "0".to_owned()),
                ("x-ratelimit-reset", "1".to_owned()),
            ]
        );
        let allowed = headers(Decision::allow(20, 3).with_reset_after(60 * SECOND));
        let names: Vec<&str> = allowed.iter().map(|(name, _)| *name).collect();
        assert_eq!(
            names,
            ["ratelimit-policy", "ratelimit", "x-ratelimit-limit", "x-ratelimit-remaining"]
        );
        assert_eq!(allowed[1].1, "\"exports\";r=3");
    }

    #[test]
    fn t_is_at_most_retry_after_for_every_policy() {
        let hour = Quota::fixed_window(10, 3_600 * SECOND).expect("valid");
        let minute = Quota::token_bucket(10, 60 * SECOND).expect("valid");
        let allowed = Decision::allow(10, 4).with_reset_after(1_800 * SECOND);
        let denied = Decision::deny(10, 6 * SECOND).with_reset_after(18 * SECOND);
        let states =
            [PolicyState::new("hour", &hour, allowed), PolicyState::new("minute", &minute, denied)];
        let headers = to_headers(&states, false);
        assert_eq!(headers[1].1, "\"hour\";r=4;t=6, \"minute\";r=0;t=6");
        assert_eq!(headers[2], ("retry-after", "6".to_owned()));
    }

    #[test]
    fn nothing_is_said_about_a_wait_that_does_not_help() {
        let quota = Quota::token_bucket(10, 60 * SECOND).expect("valid");
        let headers = |decision| {
            to_headers(&[PolicyState::new("p", &quota, decision)], true)
                .into_iter()
                .skip(1)
                .map(|(name, value)| format!("{name}: {value}"))
                .collect::<Vec<_>>()
        };
        // The key is missing.
        let rejected = Decision::deny(10, Duration::ZERO).with_source(Source::MissingKey);
        assert_eq!(
            headers(rejected),
            ["ratelimit: \"p\";r=0", "x-ratelimit-limit: 10", "x-ratelimit-remaining: 0"]
        );
        // Everything is available.
        assert_eq!(
            headers(Decision::allow(10, 10)),
            [
                "ratelimit: \"p\";r=10",
                "x-ratelimit-limit: 10",
                "x-ratelimit-remaining: 10",
                "x-ratelimit-reset: 0"
            ]
        );
        // The store is unavailable and the policy fails closed.
        let closed = Decision::deny(10, SECOND).with_reset_after(Duration::ZERO);
        assert_eq!(
            headers(closed.with_source(Source::Deny)),
            [
                "ratelimit: \"p\";r=0;t=1",
                "retry-after: 1",
                "x-ratelimit-limit: 10",
                "x-ratelimit-remaining: 0",
                "x-ratelimit-reset: 1"
            ]
        );
    }

    #[test]
    fn policy_name_cannot_break_out_of_its_header() {
        let mut value = String::new();
        push_name(&mut value, "", "a\"b\\c\r\né");
        push_name(&mut value, ", ", "50%");
        push_name(&mut value, ", ", "plain");
        assert_eq!(value, r#""a\"b\\c%0D%0A%C3%A9", "50%25", "plain""#);
    }
}
