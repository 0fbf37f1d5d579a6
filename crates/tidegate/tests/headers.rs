//! Headers, read with an independent parser of structured fields (RFC 9651).

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use sfv::{BareItem, List, ListEntry, Parser};
use tidegate::headers::{PolicyState, to_headers};
use tidegate::{Algorithm, Charge, Clock as _, Decision, Limiter, ManualClock, MemoryStore, Quota};

/// Returns whether the algorithm does not report when its next unit is free.
fn is_sliding(quota: &Quota) -> bool {
    matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::SlidingCounter)
}

/// Applies the steps to one key. Returns the last decision.
fn play(quota: &Quota, steps: &[(u64, u64)]) -> (ManualClock, Limiter, Decision) {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let mut last = None;
    for (pause, cost) in steps {
        clock.advance(Duration::from_micros(*pause));
        let charge = Charge::new("k", quota).with_cost((*cost).min(quota.burst()));
        last = Some(limiter.blocking().acquire(&charge).expect("a decision"));
    }
    (clock, limiter, last.expect("a step"))
}

/// Item of a header: its name and its parameters.
#[derive(Debug)]
struct Parsed {
    name: String,
    numbers: Vec<(String, u64)>,
    partition_key: Option<Vec<u8>>,
}

impl Parsed {
    fn number(&self, wanted: &str) -> Option<u64> {
        self.numbers.iter().find(|(name, _)| name == wanted).map(|(_, number)| *number)
    }
}

fn parse(header: &str) -> Vec<Parsed> {
    let list: List =
        Parser::new(header).parse().unwrap_or_else(|error| panic!("{header}: {error}"));
    let item = |entry: &ListEntry| {
        let ListEntry::Item(item) = entry else { panic!("{header}: an inner list") };
        let BareItem::String(name) = &item.bare_item else { panic!("{header}: not a string") };
        let number = |value: &BareItem| match value {
            BareItem::Integer(number) => u64::try_from(i64::from(*number)).expect("not negative"),
            other => panic!("{header}: {other:?} is not an integer"),
        };
        let (bytes, numbers): (Vec<_>, Vec<_>) =
            item.params.iter().partition(|(name, _)| name.as_str() == "pk");
        let partition_key = bytes.first().map(|(_, value)| {
            value.as_byte_sequence().unwrap_or_else(|| panic!("{header}: not bytes")).to_vec()
        });
        let numbers = numbers.into_iter().map(|(name, value)| (name.to_string(), number(value)));
        Parsed { name: name.as_str().to_owned(), numbers: numbers.collect(), partition_key }
    };
    list.iter().map(item).collect()
}

fn header<'h>(headers: &'h [(&str, String)], name: &str) -> Option<&'h str> {
    headers.iter().find(|(found, _)| *found == name).map(|(_, value)| value.as_str())
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(&after[..2]).expect("two digits");
            bytes.push(u8::from_str_radix(digits, 16).expect("hexadecimal"));
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).expect("UTF-8")
}

fn quotas() -> impl Strategy<Value = Quota> {
    let algorithm = prop::sample::select(Algorithm::RATES.to_vec());
    let limit = prop_oneof![1..20_u64, 1..10_000_000_u64];
    let window = prop_oneof![1_000..120_000_000_u64, Just(60_000_000), Just(30 * 86_400_000_000)];
    (algorithm, limit, window, 1..500_u64).prop_map(|(algorithm, limit, window, burst)| {
        let quota = Quota::new(algorithm, limit, Duration::from_micros(window)).expect("valid");
        quota.clone().with_burst(burst).unwrap_or(quota)
    })
}

/// Names that could be mistaken for one another.
fn names() -> impl Strategy<Value = String> {
    let chars =
        prop::sample::select(vec!['a', ' ', '"', '\\', '%', '2', '5', '?', 'é', '漢', '\n']);
    prop_oneof![
        any::<String>(),
        prop::collection::vec(chars, 1..6).prop_map(|chars| chars.into_iter().collect()),
    ]
}

/// Steps of one key: the time that passes, and the cost.
fn steps() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec((prop_oneof![Just(0), 0..90_000_000_u64], 1..4_u64), 1..12)
}

proptest! {
    #[test]
    fn headers_are_structured_fields_with_one_item_per_policy(
        policies in prop::collection::vec((names(), quotas(), steps()), 1..4),
        with_x_headers: bool,
        partition_key: Option<[u8; 16]>,
    ) {
        let decisions: Vec<(Decision, &str, &Quota)> = policies
            .iter()
            .map(|(name, quota, steps)| {
                let (_, _, decision) = play(quota, steps);
                (decision, name.as_str(), quota)
            })
            .collect();
        let states: Vec<PolicyState<'_>> = decisions
            .iter()
            .map(|(decision, policy, quota)| PolicyState {
                partition_key,
                ..PolicyState::new(policy, quota, *decision)
            })
            .collect();
        let headers = to_headers(&states, with_x_headers);
        let policy_items = parse(header(&headers, "ratelimit-policy").expect("always"));
        let items = parse(header(&headers, "ratelimit").expect("always"));
        prop_assert_eq!((policy_items.len(), items.len()), (policies.len(), policies.len()));
        let number = |name| header(&headers, name).map(|value| value.parse::<u64>().expect("whole"));
        let retry_after = number("retry-after");
        prop_assert_eq!(
            retry_after.is_some(),
            states.iter().any(|state| !state.decision.allowed)
        );
        for ((state, policy), item) in states.iter().zip(&policy_items).zip(&items) {
            prop_assert_eq!(&policy.name, &item.name);
            prop_assert_eq!(&policy.partition_key, &partition_key.map(|key| key.to_vec()));
            prop_assert_eq!(&policy.partition_key, &item.partition_key);
            prop_assert_eq!(percent_decoded(&item.name), state.policy);
            let (capacity, window) = (policy.number("q").expect("q"), policy.number("w").expect("w"));
            prop_assert!(window >= 1);
            prop_assert!(item.number("r").expect("r") <= capacity, "{:?} {:?}", policy, item);
            // q / w is the rate, rounded to whole seconds.
            let refill = u128::from(capacity) * state.quota.window().as_micros();
            let refill = refill.div_ceil(u128::from(state.quota.limit()) * 1_000_000);
            prop_assert_eq!(u128::from(window), refill);
            let wait = item.number("t");
            let Decision { allowed, reset_after, .. } = state.decision;
            prop_assert_eq!(wait.is_some(), !allowed || reset_after > Duration::ZERO);
            if let Some(wait) = wait {
                prop_assert!(wait >= 1 && wait <= retry_after.unwrap_or(u64::MAX));
                prop_assert!(u128::from(wait) <= reset_after.as_micros().div_ceil(1_000_000));
            }
        }
        let distinct = |names: Vec<&str>| names.into_iter().collect::<BTreeSet<_>>().len();
        prop_assert_eq!(
            distinct(items.iter().map(|item| item.name.as_str()).collect()),
            distinct(states.iter().map(|state| state.policy).collect())
        );
        if with_x_headers {
            let limit = number("x-ratelimit-limit").expect("a limit");
            prop_assert!(number("x-ratelimit-remaining").expect("a number") <= limit);
            prop_assert!(number("x-ratelimit-reset") >= retry_after);
        }
    }

    /// `t` is exact where the algorithm knows it: no unit more a second before, one more then.
    #[test]
    fn more_quota_is_available_after_t_and_not_before(quota in quotas(), steps in steps()) {
        let (clock, limiter, decision) = play(&quota, &steps);
        let state = PolicyState::new("p", &quota, decision);
        let headers = to_headers(&[state], false);
        let item = parse(header(&headers, "ratelimit").expect("always")).remove(0);
        let Some(wait) = item.number("t") else { return Ok(()) };
        let remaining = |limiter: &Limiter| {
            let charge = Charge::new("k", &quota);
            let peeked = limiter.blocking().peek(&charge).expect("a decision");
            peeked.remaining + u64::from(peeked.allowed)
        };
        let start = clock.now();
        // The next unit is known to the microsecond, and rounded up.
        clock.advance(Duration::from_secs(wait - 1).saturating_sub(Duration::from_micros(1)));
        if decision.allowed && !is_sliding(&quota) {
            prop_assert_eq!(remaining(&limiter), decision.remaining, "{:?} {:?}", decision, item);
        }
        clock.set(start.saturating_add(Duration::from_secs(wait)));
        prop_assert!(remaining(&limiter) > decision.remaining, "{:?} {:?}", decision, item);
    }
}
