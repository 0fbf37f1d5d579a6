//! Number of instructions per decision, on each code path of a request.
//!
//! `limits.txt` has the agreed counts; a count that exceeds its limit by more than 5 % fails. `make
//! bench-instructions` runs the benchmark, and `make bench-instructions-renew` updates the file.
//! The stores have a fixed clock, because the system clock recalibrates once per millisecond.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gungraun::{library_benchmark, library_benchmark_group, main};
use tidegate::headers::{self, PolicyState};
use tidegate::{
    Algorithm, Charge, Clock, Decision, Decisions, Limiter, MemoryStore, Policies, Policy, Quota,
    Timestamp,
};

mod limits;

use limits::limit;

const KEY: &str = "user:00000042";
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_700_049_612_345_678)
    }

    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    fn sleep_blocking(&self, _: Duration) {}
}

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::builder().clock(FixedClock).build())
}

fn quota(algorithm: Algorithm) -> Quota {
    Quota::new(algorithm, 1_000, MINUTE).expect("a valid quota")
}

/// Decides a charge. The key is not known to the compiler, and the frame of this function is not
/// counted.
#[inline(always)]
fn acquire(limiter: &Limiter, quota: &Quota) -> Decision {
    limiter.blocking().acquire(&Charge::new(black_box(KEY), quota)).expect("a decision")
}

/// A limiter and a quota in a box, so that moving them is not counted.
type Existing = Box<(Limiter, Quota)>;

/// Returns a store that has the key, with this many units left.
fn existing(algorithm: Algorithm, left: u64) -> Existing {
    let (limiter, quota) = (limiter(), quota(algorithm));
    for _ in left..1_000 {
        assert!(acquire(&limiter, &quota).allowed);
    }
    Box::new((limiter, quota))
}

fn empty(algorithm: Algorithm) -> Existing {
    Box::new((limiter(), quota(algorithm)))
}

macro_rules! acquire_of_one_key {
    ($($name:ident: $algorithm:ident,)*) => {
        $(
            #[library_benchmark]
            #[bench::allowed(
                args = (Algorithm::$algorithm, 500),
                setup = existing,
                config = limit(concat!(stringify!($name), "/allowed"))
            )]
            #[bench::denied(
                args = (Algorithm::$algorithm, 0),
                setup = existing,
                config = limit(concat!(stringify!($name), "/denied"))
            )]
            #[bench::new_key(
                args = (Algorithm::$algorithm),
                setup = empty,
                config = limit(concat!(stringify!($name), "/new_key"))
            )]
            fn $name(existing: Existing) -> (Existing, Decision) {
                let decision = acquire(black_box(&existing.0), black_box(&existing.1));
                (existing, decision)
            }
        )*
    };
}

acquire_of_one_key! {
    sliding_log: SlidingLog,
    sliding_counter: SlidingCounter,
    fixed_window: FixedWindow,
    token_bucket: TokenBucket,
    leaky_bucket: LeakyBucket,
}

// The same decision as `token_bucket/allowed`, by the async call.
#[library_benchmark]
#[bench::allowed(
    args = (Algorithm::TokenBucket, 500),
    setup = existing,
    config = limit("acquire_async/allowed")
)]
fn acquire_async(existing: Existing) -> (Existing, Decision) {
    let decision = poll_acquire(black_box(&existing.0), black_box(&existing.1));
    (existing, decision)
}

fn poll_acquire(limiter: &Limiter, quota: &Quota) -> Decision {
    let charge = Charge::new(black_box(KEY), quota);
    match pin!(limiter.acquire(&charge)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(decision) => decision.expect("a decision"),
        Poll::Pending => panic!("memory decides at once"),
    }
}

type Three = (Limiter, [Quota; 3]);

fn three(left: u64) -> Three {
    let algorithms = [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingCounter];
    let (limiter, quotas) = (limiter(), algorithms.map(quota));
    for _ in left..1_000 {
        let _ = acquire_three(&limiter, &quotas);
    }
    (limiter, quotas)
}

fn acquire_three(limiter: &Limiter, quotas: &[Quota; 3]) -> Decisions {
    let [a, b, c] = quotas;
    let charges = [Charge::new(KEY, a), Charge::new(KEY, b), Charge::new(KEY, c)];
    limiter.blocking().acquire_all(&charges).expect("decisions")
}

#[library_benchmark]
#[bench::allowed(args = (500), setup = three, config = limit("acquire_all_of_three/allowed"))]
#[bench::denied(args = (0), setup = three, config = limit("acquire_all_of_three/denied"))]
fn acquire_all_of_three((limiter, quotas): Three) -> (Three, Decisions) {
    let decisions = acquire_three(black_box(&limiter), black_box(&quotas));
    ((limiter, quotas), black_box(decisions))
}

type Request = BTreeMap<String, String>;

/// Creates services with three policies each, and a request that two of a thousand policies match.
fn thousand_policies() -> (Policies, Request) {
    let policy = |number: usize| {
        let policy = Policy::builder(format!("policy-{number}"), quota(Algorithm::TokenBucket));
        let service = number / 3;
        let policy = match number % 3 {
            0 => policy.matches("path", [format!("/service-{service}/**")]),
            1 => policy.matches("path", [format!("/service-{service}/items/*")]),
            _ => policy.matches("domain", [format!("service-{service}")]),
        };
        policy.key(["ip"]).build().expect("a valid policy")
    };
    let policies = Policies::new((0..1_000).map(policy).collect()).expect("unique names");
    let request = [("ip", "203.0.113.9"), ("method", "GET"), ("path", "/service-2/items/7")];
    (policies, request.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
}

#[library_benchmark]
#[bench::among_a_thousand(
    args = (),
    setup = thousand_policies,
    config = limit("select_policies/among_a_thousand")
)]
fn select_policies((policies, request): (Policies, Request)) -> (Policies, Request) {
    let selected = policies.select(black_box(&request), None).expect("a valid request");
    assert_eq!(black_box(&selected).charges.len(), 2);
    drop(selected);
    (policies, request)
}

/// Creates a policy with overrides of a hundred thousand networks, and an address in one of them.
fn networks() -> (Policy, String) {
    let mut policy = Policy::builder("per-ip", quota(Algorithm::TokenBucket)).key(["ip"]);
    for number in 0..100_000_u32 {
        let network = format!("{}/24", std::net::Ipv4Addr::from_bits(number << 8));
        policy = policy.override_for([network], quota(Algorithm::TokenBucket));
    }
    (policy.build().expect("a valid policy"), "1.2.3.4".to_owned())
}

#[library_benchmark]
#[bench::of_100000(args = (), setup = networks, config = limit("find_network/of_100000"))]
fn find_network((policy, address): (Policy, String)) -> (Policy, String) {
    black_box(policy.quota_for(black_box(&address)));
    (policy, address)
}

fn denial() -> (Quota, Decision) {
    let (limiter, quota) = *existing(Algorithm::TokenBucket, 0);
    let decision = acquire(&limiter, &quota);
    // A free block of this size, so that the count does not depend on the allocator's state.
    drop(black_box(String::with_capacity(64)));
    (quota, decision)
}

#[library_benchmark]
#[bench::of_a_denial(args = (), setup = denial, config = limit("render_headers/of_a_denial"))]
fn render_headers((quota, decision): (Quota, Decision)) -> usize {
    let state = PolicyState::new("per-user", black_box(&quota), black_box(decision));
    let mut bytes = 0;
    headers::for_each_header(std::iter::once(state), true, |name, value| {
        bytes += name.len() + value.len()
    });
    black_box(bytes)
}

library_benchmark_group!(
    name = decisions,
    benchmarks = [
        sliding_log,
        sliding_counter,
        fixed_window,
        token_bucket,
        leaky_bucket,
        acquire_async,
        acquire_all_of_three,
        select_policies,
        find_network,
        render_headers
    ]
);
main!(library_benchmark_groups = decisions);
