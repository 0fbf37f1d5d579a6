//! Number of instructions for input that a client chooses to be expensive, beside ordinary input.
//!
//! The work is linear in the length of the input: a quadratic step would exceed the limit by far.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gungraun::{library_benchmark, library_benchmark_group, main};
use http::request::Parts;
use tidegate::layer::RequestParts;
use tidegate::{
    ClientIp, Limiter, MemoryStore, PathRules, PathSpelling, Policies, Policy, PolicyLimiter,
    Query, Quota,
};

mod limits;

use limits::limit;

/// The longest path by default.
const MAX_PATH: usize = 16 * 1024;

fn quota() -> Quota {
    Quota::token_bucket(1_000, Duration::from_secs(60)).expect("a valid quota")
}

/// Creates a hundred policies: of services, and three that every path is compared with.
fn policies() -> Policies {
    let policy = |number: usize| {
        let pattern = match number {
            97 => "/**".to_owned(),
            98 => "**.png".to_owned(),
            99 => "/*/**/items/*".to_owned(),
            _ if number % 2 == 0 => format!("/service-{number}/**"),
            _ => format!("/service-{number}/*/items"),
        };
        let policy = Policy::builder(format!("policy-{number}"), quota());
        policy.matches("path", [pattern]).key(["ip"]).build().expect("a valid policy")
    };
    let policies = Policies::new((0..100).map(policy).collect()).expect("unique names");
    let rules = PathRules::default()
        .with_encoded_slashes(PathSpelling::Decode)
        .with_parameters(PathSpelling::Decode);
    policies.with_path_rules(rules).expect("valid patterns")
}

type Request = BTreeMap<String, String>;

/// Returns the policies, and a request whose path repeats a text up to a length.
fn path(start: &str, repeated: &str, length: usize) -> (Policies, Request) {
    let path = format!("{start}{}", repeated.repeat(length / repeated.len().max(1)));
    let path = path[..path.len().min(MAX_PATH)].to_owned();
    let request = [("ip", "203.0.113.9"), ("path", &path)];
    (policies(), request.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
}

#[library_benchmark]
#[bench::ordinary(
    args = ("/service-8/users/42", "x", 0),
    setup = path,
    config = limit("select_by_path/ordinary")
)]
#[bench::of_8192_segments(
    args = ("", "/a", MAX_PATH),
    setup = path,
    config = limit("select_by_path/of_8192_segments")
)]
#[bench::of_escapes(
    args = ("/", "%2e%2e%2f%61;", MAX_PATH),
    setup = path,
    config = limit("select_by_path/of_escapes")
)]
#[bench::of_slashes(
    args = ("", "/", MAX_PATH),
    setup = path,
    config = limit("select_by_path/of_slashes")
)]
fn select_by_path((policies, request): (Policies, Request)) -> (Policies, Request) {
    let selected = policies.select(black_box(&request), None).expect("a valid path");
    assert!(!black_box(&selected).charges.is_empty());
    drop(selected);
    (policies, request)
}

/// Returns a policy that counts by a cookie, and a request with this header, which repeats a text.
fn cookies(start: &str, repeated: &str, count: usize) -> (Policy, Parts) {
    let policy = Policy::builder("by-session", quota()).key(["cookie.session"]).build();
    let header = format!("{start}{}", repeated.repeat(count));
    let request = http::Request::get("/").header("cookie", header).body(()).expect("a request");
    (policy.expect("a valid policy"), request.into_parts().0)
}

#[library_benchmark]
#[bench::ordinary(
    args = ("theme=dark; session=31d4d96e407aad42", "", 0),
    setup = cookies,
    config = limit("read_cookie/ordinary")
)]
#[bench::among_4096(
    args = ("session=x", ";a=b", 4_096),
    setup = cookies,
    config = limit("read_cookie/among_4096")
)]
#[bench::of_escapes(
    args = ("session=", "%41%2541", 2_048),
    setup = cookies,
    config = limit("read_cookie/of_escapes")
)]
fn read_cookie((policy, head): (Policy, Parts)) -> (Policy, Parts) {
    let client_ip = ClientIp::default();
    let request = RequestParts::new(black_box(&head), None, &client_ip);
    let _ = black_box(policy.select(&request, None).is_ok());
    (policy, head)
}

/// Returns a thousand policies, and the name of none of them.
fn unknown_policy(start: &str, repeated: &str, count: usize) -> (PolicyLimiter, String) {
    let policy = |number: usize| {
        Policy::builder(format!("policy-{number}"), quota()).build().expect("a valid policy")
    };
    let policies = Policies::new((0..1_000).map(policy).collect()).expect("unique names");
    let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
    (limiter, format!("{start}{}", repeated.repeat(count)))
}

#[library_benchmark]
#[bench::misspelt(
    args = ("polcy-7", "", 0),
    setup = unknown_policy,
    config = limit("name_unknown_policy/misspelt")
)]
#[bench::of_64_kib(
    args = ("policy-", "7", 65_536),
    setup = unknown_policy,
    config = limit("name_unknown_policy/of_64_kib")
)]
fn name_unknown_policy((limiter, name): (PolicyLimiter, String)) -> (PolicyLimiter, String) {
    let answer = {
        let mut call = pin!(limiter.acquire(Query::policy(black_box(&name), "key")));
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => error.to_string(),
            _ => String::new(),
        }
    };
    assert!(black_box(answer).contains("policy"), "an unknown policy is an error at once");
    (limiter, name)
}

library_benchmark_group!(
    name = hostile,
    benchmarks = [select_by_path, read_cookie, name_unknown_policy]
);
main!(library_benchmark_groups = hostile);
