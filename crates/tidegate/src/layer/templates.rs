//! [`Template`]: what all responses to the admitted requests of one limit have in common.

use std::sync::OnceLock;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::headers::typed;
use crate::headers::{self, PolicyState, RateLimitHeader};
use crate::quota::Quota;

/// Number of templates, which are kept for the life of the process. A limit that finds no place is
/// rendered without one.
const MAX_TEMPLATES: usize = 512;
/// Number of places that a limit may have.
const PROBES: usize = 4;
/// Length of the longest [`Template::state_start`].
const MAX_STATE_START: usize = 256;

/// Templates by a hash of their limits. Finding one writes to no memory, and a value of one has no
/// count of references that all threads would write to.
static TEMPLATES: [OnceLock<Template>; MAX_TEMPLATES] = [const { OnceLock::new() }; MAX_TEMPLATES];

/// Parts of the headers that only depend on the policy's name and quota.
#[derive(Debug)]
pub(super) struct Template {
    name: Box<str>,
    burst: u64,
    drain: u64,
    /// Start of `ratelimit`, up to the number of units left.
    pub(super) state_start: Box<str>,
    /// Headers of a response in their order, without those values that depend on the request. A
    /// copy of the map saves the hashes of five names.
    pub(super) headers: HeaderMap,
    pub(super) policy: HeaderValue,
    pub(super) limit: HeaderValue,
}

impl Template {
    /// Returns the template of a limit, and creates it if there is a place. The quota that a client
    /// brings has its default name, for which one is created only if `any_name` is set: clients
    /// must not use up the places.
    #[inline]
    pub(super) fn of(state: &PolicyState<'_>, any_name: bool) -> Option<&'static Self> {
        let home = hash(state.policy, state.quota);
        for probe in 0..PROBES {
            let place = &TEMPLATES[home.wrapping_add(probe) % MAX_TEMPLATES];
            match place.get() {
                Some(template) if template.is_of(state) => return Some(template),
                Some(_) => {}
                None if any_name || state.policy != state.quota.default_policy_name() => {
                    return Self::create(state, place);
                }
                None => return None,
            }
        }
        None
    }

    #[inline]
    fn is_of(&self, state: &PolicyState<'_>) -> bool {
        self.burst == state.quota.burst()
            && self.drain == state.quota.drain_micros()
            && *self.name == *state.policy
    }

    /// Creates a template in this place, unless another thread has taken it.
    #[cold]
    fn create(state: &PolicyState<'_>, place: &'static OnceLock<Self>) -> Option<&'static Self> {
        let mut state_start = String::new();
        headers::push_state_name(&mut state_start, "", state.policy);
        if state_start.len() > MAX_STATE_START {
            return None;
        }
        let template = place.get_or_init(|| Self::new(state, state_start.into()));
        template.is_of(state).then_some(template)
    }

    fn new(state: &PolicyState<'_>, state_start: Box<str>) -> Self {
        let mut policy = String::new();
        headers::push_policy(&mut policy, "", state.policy, state.quota);
        let limit = state.quota.burst().to_string();
        // The template stays in its place for the life of the process, and so may its values.
        let (policy, limit) =
            (HeaderValue::from_static(policy.leak()), HeaderValue::from_static(limit.leak()));
        let empty = || HeaderValue::from_static("");
        let values = [
            (RateLimitHeader::Policy, policy.clone()),
            (RateLimitHeader::State, empty()),
            (RateLimitHeader::Limit, limit.clone()),
            (RateLimitHeader::Remaining, empty()),
            (RateLimitHeader::Reset, empty()),
        ];
        let header = |(header, value)| -> (HeaderName, HeaderValue) { (typed(header), value) };
        Self {
            name: state.policy.into(),
            burst: state.quota.burst(),
            drain: state.quota.drain_micros(),
            state_start,
            headers: values.map(header).into_iter().collect(),
            policy,
            limit,
        }
    }
}

/// Returns a hash of a limit. Similar names differ most at their ends.
#[inline]
fn hash(policy: &str, quota: &Quota) -> usize {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let name = match policy.as_bytes().last_chunk() {
        Some(end) => u64::from_le_bytes(*end),
        None => policy.bytes().fold(0, |hash, byte| (hash << 8) | u64::from(byte)),
    };
    let hash = (name ^ policy.len() as u64).wrapping_mul(ODD) ^ quota.burst();
    let hash = hash.wrapping_mul(ODD) ^ quota.drain_micros();
    (hash.wrapping_mul(ODD) >> 48) as usize
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::decision::Decision;

    /// More limits than there are places: each still has its own values, or none.
    #[test]
    fn templates_are_bounded_and_belong_to_their_limit() {
        let is_same = |number: usize| {
            let limit = 1 + number as u64 % 7;
            let quota = Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid");
            let name = format!("bounded-{number}");
            let state = PolicyState::new(&name, &quota, Decision::allow(limit, 0));
            let template = Template::of(&state, true)?;
            assert_eq!(template.policy, format!("\"{name}\";q={limit};w=60"));
            assert_eq!(template.limit, limit.to_string());
            Some(())
        };
        let kept = (0..4 * MAX_TEMPLATES).filter_map(is_same).count();
        assert!((1..=MAX_TEMPLATES).contains(&kept), "{kept}");
    }

    #[test]
    fn quota_of_a_client_takes_no_place() {
        let quota = Quota::fixed_window(77, Duration::from_secs(77)).expect("valid");
        let name = quota.default_policy_name();
        let state = PolicyState::new(name, &quota, Decision::allow(77, 0));
        assert!(Template::of(&state, false).is_none());
    }
}
