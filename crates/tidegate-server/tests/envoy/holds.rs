//! Units that requests hold until they end, by the ids of the requests.

use std::time::{Duration, Instant};

use super::charges::{hits, on_memory_and_on_redis_as};
use super::support::TEST_TIMEOUT;
use super::{Client, descriptor, start_on, with_limit};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};

const CONFIG: &str = "
envoy:
  files: [ratelimit.yaml]
  algorithms: {exports: concurrency, jobs: concurrency}
  hold_id: request_id
  holds:
    jobs: {ttl: 1s}
    tokens: {reserve: 2000, ttl: 10m}
";
const RULES: &str = "
domain: edge
descriptors:
  - {key: export, rate_limit: {name: exports, unit: minute, requests_per_unit: 2}}
  - {key: job, rate_limit: {name: jobs, unit: minute, requests_per_unit: 1}}
  - {key: tokens, rate_limit: {name: tokens, unit: year, requests_per_unit: 5000}}
  - {key: user, rate_limit: {unit: year, requests_per_unit: 10}}
";

/// Descriptor with the id of a request.
fn of(key: &str, id: &str) -> RateLimitDescriptor {
    descriptor(&[(key, "x"), ("request_id", id)])
}

/// Descriptor as Envoy sends it at the end of a request.
fn ended(descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..hits(descriptor, 1) }
}

impl Client {
    async fn status(&mut self, descriptor: RateLimitDescriptor) -> DescriptorStatus {
        self.send_all(vec![descriptor]).await.statuses.remove(0)
    }

    async fn code(&mut self, descriptor: RateLimitDescriptor) -> Code {
        self.status(descriptor).await.code()
    }
}

#[tokio::test]
async fn units_in_flight_are_free_when_their_request_ends() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        let first = client.status(of("export", "a")).await;
        let limit = first.current_limit.clone().expect("its limit");
        assert_eq!((limit.requests_per_unit, limit.unit()), (2, Unit::Unknown), "no window");
        assert_eq!((first.code(), first.limit_remaining), (Code::Ok, 1));
        assert_eq!(client.code(of("export", "b")).await, Code::Ok);

        let denied = client.send_all(vec![of("export", "c")]).await;
        assert_eq!(denied.overall_code(), Code::OverLimit);
        let wait = &denied.response_headers_to_add[0];
        assert_eq!((wait.key.as_str(), wait.value.as_str()), ("retry-after", "1"));
        // Envoy sends the end of denied requests, too.
        assert_eq!(client.code(ended(of("export", "c"))).await, Code::Ok);
        assert_eq!(client.code(of("export", "d")).await, Code::OverLimit, "two are in flight");

        for _ in 0..2 {
            assert_eq!(client.code(ended(of("export", "a"))).await, Code::Ok);
        }
        assert_eq!(client.code(of("export", "d")).await, Code::Ok);
        assert_eq!(client.code(of("export", "e")).await, Code::OverLimit, "an end counts once");
        assert_eq!(
            client.code(descriptor(&[("export", "y"), ("request_id", "a")])).await,
            Code::Ok
        );
    })
    .await;
}

#[tokio::test]
async fn requests_without_a_valid_id_are_held_until_their_lease_ends() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        let too_long = "i".repeat(65);
        let anonymous = || descriptor(&[("export", "x")]);
        assert_eq!(client.code(anonymous()).await, Code::Ok);
        assert_eq!(client.code(of("export", &too_long)).await, Code::Ok);
        for end in [ended(anonymous()), ended(of("export", &too_long)), ended(of("export", "a b"))]
        {
            assert_eq!(client.code(end).await, Code::Ok);
            assert_eq!(client.code(of("export", "c")).await, Code::OverLimit, "whose end is it?");
        }
        assert_eq!(client.code(of("job", "a")).await, Code::Ok);
        let start = Instant::now();
        while client.code(of("job", "b")).await == Code::OverLimit {
            assert!(start.elapsed() < TEST_TIMEOUT, "the lease of a second never ends");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(client.code(ended(of("job", "a"))).await, Code::Ok);
        assert_eq!(
            client.code(of("job", "c")).await,
            Code::OverLimit,
            "the late end frees nothing"
        );
    })
    .await;
}

#[tokio::test]
async fn reserved_units_are_settled_when_their_request_ends() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        let left = async |client: &mut Client| {
            client.status(hits(descriptor(&[("tokens", "x")]), 0)).await.limit_remaining
        };
        for (id, remaining) in [("a", 3_000), ("b", 1_000)] {
            let started = client.status(of("tokens", id)).await;
            assert_eq!((started.code(), started.limit_remaining), (Code::Ok, remaining));
        }
        assert_eq!(client.code(of("tokens", "c")).await, Code::OverLimit);
        for (id, used, remaining, reason) in [
            ("b", 300, 2_700, "the rest of 2000 returns"),
            ("b", 300, 2_700, "a repeated report changes nothing"),
            ("a", 2_500, 2_200, "more than reserved is charged"),
            ("c", 100, 2_100, "a denied request has used units nevertheless"),
        ] {
            client.status(hits(of("tokens", id), used)).await;
            assert_eq!(left(&mut client).await, remaining, "{id}: {reason}");
        }
        assert_eq!(client.code(of("tokens", "d")).await, Code::Ok);
        client.status(hits(of("tokens", "d"), 0)).await;
        assert_eq!(left(&mut client).await, 2_100, "nothing was used");
        assert_eq!(client.code(of("tokens", "e")).await, Code::Ok);
        client.status(ended(of("tokens", "e"))).await;
        assert_eq!(left(&mut client).await, 2_100, "negative hits return all of them");
    })
    .await;
}

#[tokio::test]
async fn repeated_id_is_denied_and_charges_nothing() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        let user = || descriptor(&[("user", "u")]);
        let both = || vec![user(), of("export", "a")];
        assert_eq!(client.send_all(both()).await.overall_code(), Code::Ok);
        let repeated = client.send_all(both()).await;
        assert_eq!((repeated.overall_code(), repeated.statuses.len()), (Code::OverLimit, 2));
        assert_eq!(client.status(hits(user(), 0)).await.limit_remaining, 9, "it was returned");
        assert_eq!(client.code(hits(of("export", "a"), 2)).await, Code::OverLimit, "another cost");
        client.code(ended(of("export", "a"))).await;
        assert_eq!(client.code(of("export", "a")).await, Code::Ok, "the id is free again");

        assert_eq!(client.code(of("tokens", "a")).await, Code::Ok);
        client.code(hits(of("tokens", "a"), 10)).await;
        assert_eq!(client.code(of("tokens", "a")).await, Code::OverLimit, "the id is remembered");
    })
    .await;
}

#[tokio::test]
async fn request_may_take_several_units_and_bring_its_limit() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        assert_eq!(client.code(hits(of("export", "big"), 3)).await, Code::OverLimit);
        assert_eq!(client.status(hits(of("export", "two"), 2)).await.limit_remaining, 0);
        assert_eq!(client.code(of("export", "a")).await, Code::OverLimit);
        let raised = client.status(with_limit(of("export", "a"), 4)).await;
        assert_eq!((raised.code(), raised.limit_remaining), (Code::Ok, 1), "on the same count");
        client.code(ended(of("export", "two"))).await;
        assert_eq!(client.code(of("export", "b")).await, Code::Ok);
        assert_eq!(client.code(of("export", "c")).await, Code::OverLimit);
    })
    .await;
}

#[tokio::test]
async fn events_of_holds_are_counted_by_rule() {
    let (service, mut client) = start_on(CONFIG, RULES).await;
    for descriptor in [
        of("export", "a"),
        of("export", "b"),
        of("export", "denied"),
        of("export", "a"),
        ended(of("export", "a")),
        ended(of("export", "denied")),
        of("tokens", "a"),
        hits(of("tokens", "a"), 7),
        hits(of("tokens", "late"), 7),
    ] {
        client.code(descriptor).await;
    }
    let metrics = service.admin("/metrics").body;
    let events = |policy: &str| -> Vec<&str> {
        let prefix = format!("tidegate_holds_total{{policy=\"{policy}\",event=\"");
        let lines = metrics.lines().filter_map(|line| line.strip_prefix(prefix.as_str()));
        lines.filter(|line| !line.ends_with(" 0")).collect()
    };
    // Of the request that was denied, nothing is known.
    let in_flight = [r#"reserved"} 2"#, r#"replayed"} 1"#, r#"settled"} 1"#, r#"unknown"} 1"#];
    assert_eq!(events("edge.export"), in_flight, "{metrics}");
    assert_eq!(events("edge.tokens"), [r#"reserved"} 1"#, r#"settled"} 1"#, r#"unknown"} 1"#]);
    assert!(!metrics.contains(r#"tidegate_holds_total{policy="edge.user""#), "it has no holds");
}

#[tokio::test]
async fn other_limits_of_a_request_have_no_hold() {
    on_memory_and_on_redis_as(CONFIG, RULES, async |mut client| {
        let user = || descriptor(&[("user", "u")]);
        assert_eq!(client.code(hits(user(), 10)).await, Code::Ok);
        let anonymous = descriptor(&[("export", "x")]);
        let both = client.send_all(vec![ended(user()), anonymous]).await;
        assert_eq!(both.overall_code(), Code::Ok);
        assert_eq!(both.statuses[0].limit_remaining, 1, "a refund needs no hold");
        assert_eq!(client.send_all(vec![of("user", "a"), of("user", "a")]).await.statuses.len(), 2);
        assert_eq!(client.code(ended(of("user", "a"))).await, Code::Ok);
    })
    .await;
}

#[tokio::test]
async fn policies_on_descriptors_do_not_see_the_id() {
    let policy = "
policies:
  - {name: per-tenant, match: {domain: edge}, key: [descriptor.tenant], limit: 1, window: 1d}
  - {name: uploads, match: {domain: edge}, key: [descriptor.upload], algorithm: concurrency, limit: 1}
";
    let (_service, mut client) = start_on(&format!("{CONFIG}{policy}"), RULES).await;
    assert_eq!(client.code(of("tenant", "a")).await, Code::Ok);
    assert_eq!(client.code(of("tenant", "b")).await, Code::OverLimit);
    assert_eq!(client.send(&[("request_id", "a")]).await.current_limit, None);
    assert_eq!(client.code(of("upload", "a")).await, Code::Ok);
    assert_eq!(client.code(of("upload", "b")).await, Code::OverLimit);
    assert_eq!(client.code(ended(of("upload", "b"))).await, Code::Ok);
    assert_eq!(client.code(of("upload", "c")).await, Code::OverLimit);
    assert_eq!(client.code(ended(of("upload", "a"))).await, Code::Ok);
    assert_eq!(client.code(of("upload", "c")).await, Code::Ok);
}
