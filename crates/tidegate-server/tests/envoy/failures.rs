//! Decisions while the store is unavailable.

use std::time::{Duration, Instant};

use tonic::Code as GrpcCode;

use super::support::Redis;
use super::{Client, descriptor, start_on, with_limit};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;

const RULES: &str = "
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: strict, rate_limit: {name: strict, unit: year, requests_per_unit: 3}}
  - {key: loose, rate_limit: {name: loose, unit: year, requests_per_unit: 3}}
  - {key: failing, rate_limit: {name: failing, unit: year, requests_per_unit: 3}}
  - {key: soft, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: soft-too, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 3}}
";

type Answer = Result<Code, GrpcCode>;

async fn ask(client: &mut Client, descriptors: Vec<RateLimitDescriptor>) -> Answer {
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    let response = client.try_send(request).await;
    response.map(|response| response.overall_code()).map_err(|status| status.code())
}

/// Sends one descriptor six times.
async fn ask_six_times(client: &mut Client, asked: &RateLimitDescriptor) -> Vec<Answer> {
    let mut answers = Vec::new();
    for _ in 0..6 {
        answers.push(ask(client, vec![asked.clone()]).await);
    }
    answers
}

fn first_three_pass() -> Vec<Answer> {
    [vec![Ok(Code::Ok); 3], vec![Ok(Code::OverLimit); 3]].concat()
}

const ALLOWED: Answer = Ok(Code::Ok);
const DENIED: Answer = Ok(Code::OverLimit);
const UNAVAILABLE: Answer = Err(GrpcCode::Unavailable);

#[tokio::test]
async fn rules_are_decided_by_on_store_failure() {
    for (mode, expected) in [
        ("", first_three_pass()),
        ("on_store_failure: local,", first_three_pass()),
        ("on_store_failure: allow,", vec![ALLOWED; 6]),
        ("on_store_failure: deny,", vec![DENIED; 6]),
        ("on_store_failure: error,", vec![UNAVAILABLE; 6]),
    ] {
        let redis = Redis::start();
        let config = format!(
            "
store: {{redis: '{}', instances: 1}}
envoy: {{{mode} on_store_failures: {{strict: deny, loose: allow, failing: error}},
  files: [ratelimit.yaml]}}
policies:
  - {{name: open, match: {{domain: edge}}, key: [descriptor.open], limit: 3, window: 1h,
     on_store_failure: allow}}
  - {{name: shut, match: {{domain: edge}}, key: [descriptor.shut], limit: 3, window: 1h,
     on_store_failure: deny}}
",
            redis.url()
        );
        let (_service, mut client) = start_on(&config, RULES).await;
        assert_eq!(ask(&mut client, vec![descriptor(&[("user", "before")])]).await, ALLOWED);
        redis.assert_every_key_expires();
        drop(redis);

        let user = descriptor(&[("user", "u")]);
        assert_eq!(ask_six_times(&mut client, &user).await, expected, "{mode:?}");
        let own = with_limit(descriptor(&[("own", "u")]), 3);
        assert_eq!(ask_six_times(&mut client, &own).await, expected, "{mode:?}");
        for (key, expected) in [
            ("strict", DENIED),
            ("loose", ALLOWED),
            ("failing", UNAVAILABLE),
            // Policies of Tidegate have their own setting.
            ("open", ALLOWED),
            ("shut", DENIED),
        ] {
            let asked = descriptor(&[(key, "u")]);
            assert_eq!(ask_six_times(&mut client, &asked).await, vec![expected; 6], "{key}");
        }
        let together = vec![descriptor(&[("loose", "x")]), descriptor(&[("strict", "x")])];
        assert_eq!(ask(&mut client, together).await, DENIED);
        let together = vec![descriptor(&[("loose", "x")]), descriptor(&[("failing", "x")])];
        assert_eq!(ask(&mut client, together).await, UNAVAILABLE);
    }
}

/// Redis accepts connections and answers nothing. A call of several steps has no time left for its
/// second step, which is decided by `on_store_failure`, too.
#[tokio::test]
async fn hanging_redis_causes_no_errors_and_no_long_waits() {
    for (mode, expected) in [
        ("local", first_three_pass()),
        ("allow", vec![ALLOWED; 6]),
        ("deny", vec![DENIED; 6]),
        ("error", vec![UNAVAILABLE; 6]),
    ] {
        let redis = Redis::start();
        let config = format!(
            "store: {{redis: '{}', instances: 1}}\n\
             envoy: {{files: [ratelimit.yaml], on_store_failure: {mode}}}\n",
            redis.url()
        );
        let (_service, mut client) = start_on(&config, RULES).await;
        assert_eq!(ask(&mut client, vec![descriptor(&[("user", "before")])]).await, ALLOWED);
        redis.signal("STOP");
        let mut answers = Vec::new();
        for _ in 0..6 {
            let steps = vec![
                descriptor(&[("soft", "u")]),
                descriptor(&[("soft-too", "u")]),
                RateLimitDescriptor { hits_addend: Some(1), ..descriptor(&[("user", "v")]) },
                descriptor(&[("user", "u")]),
            ];
            let started = Instant::now();
            answers.push(ask(&mut client, steps).await);
            // Three times the store's deadline of 100 ms and more, because the machine is busy.
            assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        }
        assert_eq!(answers, expected, "{mode}");
        redis.signal("CONT");
    }
}

/// The other descriptors of the call decide: an error would let the request pass.
#[tokio::test]
async fn failed_refund_is_an_error_only_if_configured() {
    for (mode, expected) in [("deny", [ALLOWED, DENIED]), ("error", [UNAVAILABLE; 2])] {
        let redis = Redis::start();
        let config = format!(
            "store: {{redis: '{}', instances: 1}}\n\
             envoy: {{files: [ratelimit.yaml], on_store_failure: {mode}}}\n",
            redis.url()
        );
        let (_service, mut client) = start_on(&config, RULES).await;
        let user = || descriptor(&[("user", "u")]);
        assert_eq!(ask(&mut client, vec![user()]).await, ALLOWED);
        drop(redis);
        let refund =
            || RateLimitDescriptor { hits_addend: Some(1), is_negative_hits: true, ..user() };
        let alone = ask(&mut client, vec![refund()]).await;
        let other = descriptor(&[("user", "v")]);
        let with_other = ask(&mut client, vec![refund(), other]).await;
        assert_eq!([alone, with_other], expected, "{mode}");
    }
}

/// A client that sends many different values must not open the limits of all others.
#[tokio::test]
async fn full_memory_denies_unless_configured_otherwise() {
    for (mode, expected) in
        [("local", DENIED), ("allow", ALLOWED), ("deny", DENIED), ("error", UNAVAILABLE)]
    {
        let config = format!(
            "store: {{max_keys: 1}}\n\
             envoy: {{files: [ratelimit.yaml], on_store_failure: {mode}}}\n"
        );
        let (_service, mut client) = start_on(&config, RULES).await;
        let mut answers = Vec::new();
        for number in 0..2_000 {
            // A key at its limit is not evicted for another one.
            let asked = descriptor(&[("user", &format!("u{number}"))]);
            let asked = RateLimitDescriptor { hits_addend: Some(3), ..asked };
            answers.push(ask(&mut client, vec![asked]).await);
        }
        assert_eq!(answers.first(), Some(&ALLOWED));
        let others: Vec<_> = answers.iter().filter(|answer| **answer != ALLOWED).collect();
        assert!(others.iter().all(|answer| **answer == expected), "{mode}: {others:?}");
        assert_eq!(others.is_empty(), mode == "allow", "the memory is full");
    }
}
