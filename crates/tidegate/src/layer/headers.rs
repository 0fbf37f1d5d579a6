//! Rate limit headers as typed HTTP headers.

use std::cell::{Cell, RefCell};

use bytes::{Bytes, BytesMut};
use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::templates::Template;
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
    RenderedHeaders::new(states, with_x_headers, false).for_each(|header, value| {
        insert(typed(header), value);
    });
}

/// Rate limit headers of one response, without the memory of a map. Their values share one buffer.
#[derive(Debug, Default)]
pub(super) enum RenderedHeaders {
    #[default]
    None,
    /// Those of an admitted request that one limit applies to.
    Usual(UsualHeaders),
    Other {
        text: Bytes,
        /// Length of each value, 0 if it is absent.
        lengths: [usize; RateLimitHeader::COUNT],
    },
}

/// Headers of an admitted request that one limit applies to, with the older ones.
#[derive(Debug)]
pub(super) struct UsualHeaders {
    template: &'static Template,
    /// Value of `ratelimit`, then that of `x-ratelimit-reset` if it is not small.
    text: Bytes,
    remaining: u64,
    reset: u64,
    /// Length of the value of `ratelimit`.
    state_length: usize,
    /// Length of the number of units left.
    remaining_length: usize,
}

/// Size of the memory that values are written to. A response that is kept keeps all of it.
const SHARED_BYTES: usize = 1_024;

thread_local! {
    /// Memory that the responses of a thread share, so that most of them allocate none.
    static SHARED: RefCell<BytesMut> = RefCell::new(BytesMut::with_capacity(SHARED_BYTES));
    static TEXT: Cell<String> = const { Cell::new(String::new()) };
}

/// Writes to the memory that the responses of a thread share. `write` calls no other code.
#[inline]
fn write_shared<T>(write: impl Fn(&mut BytesMut) -> T) -> T {
    let written = SHARED.try_with(|shared| write(&mut shared.borrow_mut()));
    // The thread is ending.
    written.unwrap_or_else(|_| write(&mut BytesMut::new()))
}

impl UsualHeaders {
    /// Renders the headers of an admitted request; `None` if there is no template.
    #[inline]
    fn new(state: &PolicyState<'_>, any_name: bool) -> Option<Self> {
        let template = Template::of(state, any_name)?;
        let (remaining, reset) = (state.decision.remaining, state.reset()?);
        let wait = state.more_after();
        let start = template.state_start.as_bytes();
        write_shared(|bytes| {
            bytes.reserve(start.len() + MAX_NUMBERS);
            bytes.extend_from_slice(start);
            push_number(bytes, remaining);
            let remaining_length = bytes.len() - start.len();
            if let Some(wait) = wait {
                bytes.extend_from_slice(headers::STATE_WAIT.as_bytes());
                push_number(bytes, wait);
            }
            let state_length = bytes.len();
            if small_number(reset).is_none() {
                push_number(bytes, reset);
            }
            let text = bytes.split().freeze();
            Some(Self { template, text, remaining, reset, state_length, remaining_length })
        })
    }

    /// Returns the value of `x-ratelimit-remaining`, which is a part of `ratelimit`.
    #[inline]
    fn remaining(&self) -> Option<HeaderValue> {
        if let Some(number) = small_number(self.remaining) {
            return Some(HeaderValue::from_static(number));
        }
        let start = self.template.state_start.len();
        shared(self.text.slice(start..start + self.remaining_length))
    }

    /// Returns the value of `x-ratelimit-reset`, and leaves only that of `ratelimit` in the text.
    #[inline]
    fn split_reset(&mut self) -> Option<HeaderValue> {
        match small_number(self.reset) {
            Some(number) => Some(HeaderValue::from_static(number)),
            None => shared(self.text.split_off(self.state_length)),
        }
    }

    /// Creates the map of a response that has no other headers.
    #[inline]
    fn create_map(&mut self, headers: &mut HeaderMap) {
        let (remaining, reset) = (self.remaining(), self.split_reset());
        let state = shared(std::mem::take(&mut self.text));
        let (Some(state), Some(remaining), Some(reset)) = (state, remaining, reset) else { return };
        headers.clone_from(&self.template.headers);
        let mut places = headers.values_mut();
        // In the order of the template.
        if let (_, Some(place)) = (places.next(), places.next()) {
            *place = state;
        }
        if let (_, Some(place)) = (places.next(), places.next()) {
            *place = remaining;
        }
        if let Some(place) = places.next() {
            *place = reset;
        }
    }
}

/// Length of the parts of [`UsualHeaders::text`] after its start: three numbers, and a name.
const MAX_NUMBERS: usize = 3 * 20 + headers::STATE_WAIT.len();

#[inline]
fn push_number(bytes: &mut BytesMut, number: u64) {
    match small_number(number) {
        Some(number) => bytes.extend_from_slice(number.as_bytes()),
        None => bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes()),
    }
}

/// Returns a value in shared memory. Its bytes are printable, so there always is one.
#[inline]
fn shared(bytes: Bytes) -> Option<HeaderValue> {
    HeaderValue::from_maybe_shared(bytes).ok()
}

impl RenderedHeaders {
    /// Renders the headers of all limits. `any_name` is that of [`Template::of`].
    #[inline]
    pub(super) fn new<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
        any_name: bool,
    ) -> Self {
        let mut all = states.clone();
        let Some(first) = all.next() else { return Self::None };
        if with_x_headers
            && first.decision.allowed
            && first.partition_key.is_none()
            && all.next().is_none()
            && let Some(usual) = UsualHeaders::new(&first, any_name)
        {
            return Self::Usual(usual);
        }
        Self::other(states, with_x_headers)
    }

    /// Renders the headers of one limit.
    #[inline]
    pub(super) fn of_one(state: PolicyState<'_>, with_x_headers: bool) -> Self {
        Self::new(std::iter::once(state), with_x_headers, true)
    }

    #[inline(never)]
    fn other<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
    ) -> Self {
        // Taken, not borrowed: `states` may call a closure of the caller, which may come here.
        let mut text = TEXT.try_with(Cell::take).unwrap_or_default();
        let (mut lengths, mut from) = ([0; RateLimitHeader::COUNT], 0);
        headers::write_headers(states, with_x_headers, &mut text, |header, text| {
            lengths[header as usize] = text.len() - from;
            from = text.len();
        });
        let bytes = write_shared(|bytes| {
            bytes.extend_from_slice(text.as_bytes());
            bytes.split().freeze()
        });
        if text.len() <= SHARED_BYTES {
            text.clear();
            let _ = TEXT.try_with(|kept| kept.set(text));
        }
        Self::Other { text: bytes, lengths }
    }

    fn for_each(&mut self, mut insert: impl FnMut(RateLimitHeader, HeaderValue)) {
        match self {
            Self::None => {}
            Self::Usual(usual) => {
                let (remaining, reset) = (usual.remaining(), usual.split_reset());
                let values = [
                    (RateLimitHeader::Policy, Some(usual.template.policy.clone())),
                    (RateLimitHeader::State, shared(std::mem::take(&mut usual.text))),
                    (RateLimitHeader::Limit, Some(usual.template.limit.clone())),
                    (RateLimitHeader::Remaining, remaining),
                    (RateLimitHeader::Reset, reset),
                ];
                for (header, value) in values {
                    if let Some(value) = value {
                        insert(header, value);
                    }
                }
            }
            Self::Other { text, lengths } => {
                for (header, length) in RateLimitHeader::ALL.into_iter().zip(lengths) {
                    if *length > 0
                        && let Some(value) = shared(text.split_to(*length))
                    {
                        insert(header, value);
                    }
                }
            }
        }
    }

    /// Adds the headers to a response. Lists are appended to those of an inner layer; of headers
    /// with a single value, that of the inner layer stays.
    #[inline]
    pub(super) fn add_to(&mut self, headers: &mut HeaderMap) {
        match self {
            Self::None => {}
            Self::Usual(usual) if headers.capacity() == 0 => usual.create_map(headers),
            other => other.add_one_by_one(headers),
        }
    }

    #[inline(never)]
    fn add_one_by_one(&mut self, headers: &mut HeaderMap) {
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

/// Returns a small number as text that needs no memory.
#[inline]
fn small_number(number: u64) -> Option<&'static str> {
    SMALL_NUMBERS.get(usize::try_from(number).ok()?).copied()
}

static SMALL_NUMBERS: [&str; 1_000] = {
    const DIGITS: [[u8; 3]; 1_000] = {
        let mut all = [[b'0'; 3]; 1_000];
        let mut number = 0;
        while number < all.len() {
            let digits = [number / 100, number / 10 % 10, number % 10];
            let mut at = 0;
            while at < digits.len() {
                all[number][at] = b"0123456789"[digits[at]];
                at += 1;
            }
            number += 1;
        }
        all
    };
    let mut all = [""; 1_000];
    let mut number = 0;
    while number < all.len() {
        let zeros = (number < 10) as usize + (number < 100) as usize;
        let digits: &'static [u8; 3] = &DIGITS[number];
        if let Ok(text) = str::from_utf8(digits.split_at(zeros).1) {
            all[number] = text;
        }
        number += 1;
    }
    all
};

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
        RenderedHeaders::of_one(state, true).add_to(&mut response);
        let text = |value: &HeaderValue| value.to_str().expect("text").to_owned();
        response.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    #[test]
    fn headers_from_a_template_equal_the_plain_ones() {
        let numbers = [0, 1, 9, 10, 99, 100, 999, 1_000, 9_999, u64::from(u32::MAX)];
        let day = Duration::from_secs(86_400);
        // Names that share a hash of their ends, and one that is too long for a template.
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

    #[test]
    fn small_numbers_are_their_text() {
        for number in 0..1_000 {
            assert_eq!(small_number(number), Some(number.to_string().as_str()));
        }
        assert_eq!(small_number(1_000), None);
        assert_eq!(small_number(u64::MAX), None);
    }
}
