//! Rate limit headers as typed HTTP headers.

use std::cell::Cell;

use bytes::{Bytes, BytesMut};
use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::templates::{MAX_STATE_START, Template};
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
    RenderedHeaders::new(states, with_x_headers, true).for_each(|header, value| {
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
    state_length: u8,
    /// Length of the number of units left.
    remaining_length: u8,
}

/// Memory that the responses of a thread share, so that most of them allocate none.
#[derive(Default)]
struct Buffers {
    text: String,
    shared: BytesMut,
}

/// Size of the memory that values are written to. A response that is kept keeps all of it.
const SHARED_BYTES: usize = 1_024;

thread_local! {
    static BUFFERS: Cell<Option<Buffers>> = const { Cell::new(None) };
}

/// Takes the buffers of the thread. They are not borrowed, because `states` may call a closure of
/// the caller, which may come here.
#[inline]
fn take_buffers() -> Buffers {
    let kept = BUFFERS.try_with(Cell::take).ok().flatten();
    kept.unwrap_or_else(|| Buffers {
        text: String::with_capacity(256),
        shared: BytesMut::with_capacity(SHARED_BYTES),
    })
}

#[inline]
fn keep_buffers(buffers: Buffers) {
    let _ = BUFFERS.try_with(|place| place.set(Some(buffers)));
}

impl UsualHeaders {
    /// Renders the headers of an admitted request; `None` if there is no template.
    #[inline]
    fn new(state: &PolicyState<'_>, creates: bool) -> Option<Self> {
        let template = Template::of(state, creates)?;
        let (remaining, reset) = (state.decision.remaining, state.reset()?);
        let mut text = ShortText::new();
        text.push(template.state_start.as_bytes());
        text.push_number(remaining);
        let remaining_length = text.length - template.state_start.len();
        if let Some(wait) = state.more_after() {
            text.push(headers::STATE_WAIT.as_bytes());
            text.push_number(wait);
        }
        let state_length = text.length;
        if small_number(reset).is_none() {
            text.push_number(reset);
        }
        let mut buffers = take_buffers();
        buffers.shared.extend_from_slice(text.as_bytes());
        let text = buffers.shared.split().freeze();
        keep_buffers(buffers);
        Some(Self {
            template,
            text,
            remaining,
            reset,
            state_length: u8::try_from(state_length).ok()?,
            remaining_length: u8::try_from(remaining_length).ok()?,
        })
    }

    /// Returns the value of `x-ratelimit-remaining`, which is a part of `ratelimit`.
    #[inline]
    fn remaining(&self) -> Option<HeaderValue> {
        if let Some(number) = small_number(self.remaining) {
            return Some(HeaderValue::from_static(number));
        }
        let start = self.template.state_start.len();
        shared(self.text.slice(start..start + usize::from(self.remaining_length)))
    }

    /// Returns the value of `x-ratelimit-reset`, and leaves only that of `ratelimit` in the text.
    #[inline]
    fn split_reset(&mut self) -> Option<HeaderValue> {
        match small_number(self.reset) {
            Some(number) => Some(HeaderValue::from_static(number)),
            None => shared(self.text.split_off(usize::from(self.state_length))),
        }
    }

    #[inline]
    fn into_map(mut self) -> Option<HeaderMap> {
        let mut headers = self.template.headers.clone();
        let mut places = headers.values_mut();
        places.next();
        let state = places.next()?;
        places.next();
        *places.next()? = self.remaining()?;
        *places.next()? = self.split_reset()?;
        *state = shared(self.text)?;
        Some(headers)
    }
}

/// Text on the stack: the start of a state, and three numbers.
struct ShortText {
    bytes: [u8; MAX_STATE_START + 3 * 24],
    length: usize,
}

impl ShortText {
    #[inline]
    fn new() -> Self {
        Self { bytes: [0; MAX_STATE_START + 3 * 24], length: 0 }
    }

    #[inline]
    fn push(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        self.bytes[self.length..end].copy_from_slice(bytes);
        self.length = end;
    }

    #[inline]
    fn push_number(&mut self, number: u64) {
        match small_number(number) {
            Some(number) => self.push(number.as_bytes()),
            None => self.push(itoa::Buffer::new().format(number).as_bytes()),
        }
    }

    #[inline]
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Returns a value in shared memory. Its bytes are printable, so there always is one.
#[inline]
fn shared(bytes: Bytes) -> Option<HeaderValue> {
    HeaderValue::from_maybe_shared(bytes).ok()
}

impl RenderedHeaders {
    #[inline]
    pub(super) fn new<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
        creates_templates: bool,
    ) -> Self {
        let mut all = states.clone();
        let Some(first) = all.next() else { return Self::None };
        if with_x_headers
            && first.decision.allowed
            && first.partition_key.is_none()
            && all.next().is_none()
        {
            if let Some(usual) = UsualHeaders::new(&first, creates_templates) {
                return Self::Usual(usual);
            }
        }
        Self::other(states, with_x_headers)
    }

    /// Renders the headers of one limit.
    #[inline]
    pub(super) fn of_one(state: PolicyState<'_>, with_x_headers: bool) -> Self {
        Self::new(std::iter::once(state), with_x_headers, true)
    }

    #[cold]
    fn other<'a>(
        states: impl Iterator<Item = PolicyState<'a>> + Clone,
        with_x_headers: bool,
    ) -> Self {
        let Buffers { mut text, shared: mut bytes } = take_buffers();
        let (mut lengths, mut from) = ([0; RateLimitHeader::COUNT], 0);
        headers::write_headers(states, with_x_headers, &mut text, |header, text| {
            lengths[header as usize] = text.len() - from;
            from = text.len();
        });
        bytes.extend_from_slice(text.as_bytes());
        let rendered = Self::Other { text: bytes.split().freeze(), lengths };
        if text.len() <= SHARED_BYTES {
            text.clear();
            keep_buffers(Buffers { text, shared: bytes });
        }
        rendered
    }

    fn for_each(self, mut insert: impl FnMut(RateLimitHeader, HeaderValue)) {
        match self {
            Self::None => {}
            Self::Usual(mut usual) => {
                let (remaining, reset) = (usual.remaining(), usual.split_reset());
                let values = [
                    (RateLimitHeader::Policy, Some(usual.template.policy.clone())),
                    (RateLimitHeader::State, shared(usual.text)),
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
            Self::Other { mut text, lengths } => {
                for (header, length) in RateLimitHeader::ALL.into_iter().zip(lengths) {
                    if length > 0
                        && let Some(value) = shared(text.split_to(length))
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
    pub(super) fn add_to(self, headers: &mut HeaderMap) {
        match self {
            Self::Usual(usual) if headers.capacity() == 0 => {
                *headers = usual.into_map().unwrap_or_default();
            }
            other => other.add_one_by_one(headers),
        }
    }

    #[inline(never)]
    fn add_one_by_one(self, headers: &mut HeaderMap) {
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
                all[number][at] += digits[at] as u8;
                at += 1;
            }
            number += 1;
        }
        all
    };
    let mut all = [""; 1_000];
    let mut number = 0;
    while number < all.len() {
        let zeros = if number < 10 {
            2
        } else if number < 100 {
            1
        } else {
            0
        };
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
}
