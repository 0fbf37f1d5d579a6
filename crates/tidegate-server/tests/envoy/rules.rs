//! Rules, descriptors and hits of envoyproxy/ratelimit.

use std::time::Duration;

use tonic::Code as GrpcCode;

use super::support::{Service, TEST_TIMEOUT};
use super::{FILES, RULES, channel, descriptor, start};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, rate_limit::Unit,
};
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_api::envoy::r#type::v3::RateLimitUnit;

#[tokio::test]
async fn sample_rules_apply_as_in_ratelimit() {
    let (_service, mut client) = start(FILES).await;
    let limit = |status: &DescriptorStatus| {
        status
            .current_limit
            .as_ref()
            .map(|limit| (limit.requests_per_unit, limit.unit(), limit.name.clone()))
    };
    // A rule with a key only has one counter per value.
    let status = client.send(&[("remote_address", "198.51.100.1")]).await;
    assert_eq!(
        (status.code(), limit(&status)),
        (Code::Ok, Some((10, Unit::Second, String::new())))
    );
    assert_eq!(status.limit_remaining, 9);
    assert_eq!(
        status.duration_until_reset.map(|duration| (duration.seconds, duration.nanos)),
        Some((1, 0))
    );
    // A limit of 0.
    let never = client.send(&[("remote_address", "203.0.113.66")]).await;
    assert_eq!((never.code(), never.limit_remaining), (Code::OverLimit, 0));
    // Unlimited, and a value without a limit, which does not fall back to the key-only rule.
    let unlimited = client.send(&[("remote_address", "203.0.113.1")]).await;
    assert_eq!(
        (unlimited.code(), limit(&unlimited), unlimited.limit_remaining),
        (Code::Ok, None, u32::MAX)
    );
    let unseen = client.send(&[("remote_address", "203.0.113.2")]).await;
    assert_eq!((unseen.code(), limit(&unseen)), (Code::Ok, None));
    // Nested rules: the depth equals the number of entries.
    let outer = client.send(&[("message_type", "marketing")]).await;
    assert_eq!(limit(&outer), Some((100, Unit::Minute, "marketing".to_owned())));
    let inner = client.send(&[("message_type", "marketing"), ("to_number", "1")]).await;
    assert_eq!(limit(&inner), Some((5, Unit::Day, "marketing-to-one".to_owned())));
    let too_deep =
        client.send(&[("message_type", "marketing"), ("to_number", "1"), ("x", "y")]).await;
    assert_eq!((too_deep.code(), limit(&too_deep)), (Code::Ok, None));
    let no_way_back = client.send(&[("message_type", "marketing"), ("language", "en")]).await;
    assert_eq!(
        limit(&no_way_back),
        None,
        "the rule of the exact value has no nested language, and there is no backtracking"
    );
    assert_eq!(
        limit(&client.send(&[("message_type", "x"), ("language", "en")]).await).map(|l| l.0),
        Some(7)
    );
    // Wildcards are tried in the order of the file, before the key-only rule.
    for (path, requests) in
        [("/api/v2/x", 2), ("/api/x", 1), ("/users/7/orders/8/pay", 3), ("/other", 60)]
    {
        assert_eq!(
            limit(&client.send(&[("path", path)]).await).map(|l| l.0),
            Some(requests),
            "{path}"
        );
    }
    assert_eq!(client.send(&[("path", "/api/x")]).await.code(), Code::OverLimit);
    assert_eq!(
        client.send(&[("path", "/api/y")]).await.code(),
        Code::Ok,
        "each value has its own counter"
    );
    // All matching values share one counter.
    let first = client.send(&[("file", "files/a")]).await;
    let second = client.send(&[("file", "files/b")]).await;
    assert_eq!((first.limit_remaining, second.limit_remaining), (999, 998));
    // No rule matches.
    let nothing = client.send(&[("unknown", "value")]).await;
    assert_eq!((nothing.code(), limit(&nothing)), (Code::Ok, None));
}

#[tokio::test]
async fn shadow_rule_never_denies_and_replaces_others() {
    let (service, mut client) = start(FILES).await;
    let vip = descriptor(&[("message_type", "marketing"), ("to_number", "2061234567")]);
    let marketing = descriptor(&[("message_type", "marketing")]);
    let both = client.send_all(vec![marketing.clone(), vip.clone()]).await;
    assert_eq!(both.statuses[0].current_limit, None, "replaced by the other rule");
    assert_eq!(
        both.statuses[1].current_limit.as_ref().map(|limit| limit.requests_per_unit),
        Some(500)
    );
    let mut request =
        RateLimitRequest { domain: "edge".to_owned(), descriptors: vec![vip], hits_addend: 500 };
    let over = client.try_send(request.clone()).await.expect("a response");
    assert_eq!(
        (over.overall_code(), over.statuses[0].code()),
        (Code::Ok, Code::Ok),
        "500 hits exceed the remaining 499, but in shadow mode"
    );
    let metrics = service.admin("/metrics").body;
    let policy = "edge.message_type_marketing.to_number_2061234567";
    let line = format!(r#"policy="{policy}",outcome="shadow_denied"}} 1"#);
    assert!(metrics.contains(&line), "{metrics}");
    request.descriptors = vec![marketing];
    request.hits_addend = 100;
    let whole = client.try_send(request).await.expect("a response");
    assert_eq!(whole.statuses[0].limit_remaining, 0, "the replaced rule was not charged");
}

#[tokio::test]
async fn hits_of_descriptors_override_those_of_the_request() {
    let (_service, mut client) = start(FILES).await;
    let day = |hits: Option<u64>| RateLimitDescriptor {
        hits_addend: hits,
        ..descriptor(&[("message_type", "marketing"), ("to_number", "7")])
    };
    let send = |descriptors, hits_addend| RateLimitRequest {
        domain: "edge".to_owned(),
        descriptors,
        hits_addend,
    };
    let left = |response: RateLimitResponse| {
        (response.overall_code(), response.statuses[0].limit_remaining)
    };
    assert_eq!(
        left(client.try_send(send(vec![day(None)], 0)).await.expect("a response")),
        (Code::Ok, 4),
        "0 means 1"
    );
    assert_eq!(
        left(client.try_send(send(vec![day(None)], 2)).await.expect("a response")),
        (Code::Ok, 2)
    );
    assert_eq!(
        left(client.try_send(send(vec![day(Some(1))], 5)).await.expect("a response")),
        (Code::Ok, 1)
    );
    for _ in 0..3 {
        let peek = client.try_send(send(vec![day(Some(0))], 5)).await.expect("a response");
        assert_eq!(peek.overall_code(), Code::Ok);
    }
    let many = client.try_send(send(vec![day(Some(9))], 0)).await.expect("a response");
    assert_eq!(left(many), (Code::OverLimit, 0), "explicit hits are recorded beyond the limit");
    for _ in 0..2 {
        let peek = client.try_send(send(vec![day(Some(0))], 5)).await.expect("a response");
        assert_eq!(peek.overall_code(), Code::OverLimit, "the limit is exceeded");
    }
    assert_eq!(
        client.try_send(send(vec![day(None)], 0)).await.expect("a response").overall_code(),
        Code::OverLimit
    );
}

#[tokio::test]
async fn several_descriptors_are_charged_all_or_nothing() {
    let (_service, mut client) = start(FILES).await;
    let narrow = descriptor(&[("path", "/api/x")]);
    let wide = descriptor(&[("message_type", "marketing")]);
    let first = client.send_all(vec![wide.clone(), narrow.clone()]).await;
    assert_eq!(first.overall_code(), Code::Ok);
    for _ in 0..5 {
        let denied = client.send_all(vec![wide.clone(), narrow.clone()]).await;
        assert_eq!(denied.overall_code(), Code::OverLimit);
        assert_eq!(
            denied.statuses.iter().map(DescriptorStatus::code).collect::<Vec<_>>(),
            [Code::Ok, Code::OverLimit]
        );
        let header = &denied.response_headers_to_add[0];
        let wait: i64 = header.value.parse().expect("seconds");
        assert_eq!(header.key, "retry-after");
        assert_eq!(
            denied.statuses[1].duration_until_reset.map(|duration| duration.seconds),
            Some(wait)
        );
        assert!((1..=60).contains(&wait));
    }
    let after = client.send_all(vec![wide.clone()]).await;
    assert_eq!(
        after.statuses[0].limit_remaining, 98,
        "denied requests consumed nothing of the wide limit"
    );
    let twice = client.send_all(vec![wide.clone(), wide]).await;
    assert_eq!(twice.statuses[1].limit_remaining, 96, "the same descriptor twice counts twice");
}

#[tokio::test]
async fn limits_in_descriptors_are_applied() {
    let (_service, mut client) = start(FILES).await;
    let own = RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit: 2, unit: RateLimitUnit::Hour.into() }),
        ..descriptor(&[("remote_address", "203.0.113.66")])
    };
    for expected in [Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(client.send_all(vec![own.clone()]).await.overall_code(), expected);
    }
    let none = RateLimitDescriptor { limit: Some(RateLimitOverride::default()), ..own };
    let request =
        RateLimitRequest { domain: "edge".to_owned(), descriptors: vec![none], hits_addend: 0 };
    let response = client.try_send(request).await.expect("a denial");
    assert_eq!(response.overall_code(), Code::OverLimit, "a limit without a unit");
}

#[tokio::test]
async fn configuration_sets_algorithms_and_adds_policies() {
    let config = "
envoy:
  files: [ratelimit.yaml]
  algorithm: sliding-log
  algorithms: {marketing: token-bucket}
policies:
  - name: tenants
    match: {domain: edge}
    key: [descriptor.tenant-id]
    limit: 2
    window: 1h
  - {name: api-only, limit: 1, window: 1h}
";
    let (service, mut client) = start(config).await;
    client.send(&[("message_type", "marketing")]).await;
    let bucket = client.send(&[("message_type", "marketing")]).await;
    assert_eq!(
        bucket.duration_until_reset.map(|duration| duration.seconds),
        Some(2),
        "0.6 s per token, rounded up"
    );
    let log = client.send(&[("message_type", "marketing"), ("to_number", "7")]).await;
    assert_eq!(log.duration_until_reset.map(|duration| duration.seconds), Some(86_400));
    for expected in [Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(client.send(&[("tenant-id", "acme")]).await.code(), expected);
    }
    let metrics = service.admin("/metrics").body;
    assert!(metrics.contains(r#"policy="tenants",outcome="denied"} 1"#), "{metrics}");
    assert!(
        metrics.contains(r#"policy="api-only",outcome="allowed"} 0"#),
        "the policy has no descriptor attribute: {metrics}"
    );
}

#[tokio::test]
async fn invalid_requests_are_rejected() {
    let (_service, mut client) = start(FILES).await;
    let request = |domain: &str, count: usize| RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: vec![descriptor(&[("a", "b")]); count],
        hits_addend: 0,
    };
    for (bad, message) in
        [(request("", 1), "the domain is empty"), (request("edge", 0), "there are no descriptors")]
    {
        let status = client.try_send(bad).await.expect_err("an error");
        assert_eq!(status.code(), GrpcCode::InvalidArgument);
        assert!(status.message().contains(message), "{status}");
    }
    assert!(
        client.try_send(request("elsewhere", 100)).await.is_ok(),
        "an unknown domain has no limits"
    );
    let long = descriptor(&[("remote_address", &"x\n{}".repeat(1_000))]);
    assert_eq!(
        client.send_all(vec![long]).await.overall_code(),
        Code::Ok,
        "long and unusual values are accepted"
    );
}

#[tokio::test]
async fn api_token_protects_grpc() {
    let auth = "auth: {api_token: open-sesame, tokens: [{name: grafana, token: reads, scopes: \
                [read]}]}\n";
    let (service, mut client) = start(auth).await;
    let mut send = async |token: Option<&str>| {
        let mut request = tonic::Request::new(RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![descriptor(&[("unlimited", "value")])],
            hits_addend: 0,
        });
        if let Some(token) = token {
            request.metadata_mut().insert("authorization", token.parse().expect("ascii"));
        }
        client.0.should_rate_limit(request).await.map_err(|status| status.code())
    };
    assert_eq!(send(None).await.err(), Some(GrpcCode::Unauthenticated));
    assert_eq!(send(Some("Bearer wrong")).await.err(), Some(GrpcCode::Unauthenticated));
    assert_eq!(send(Some("Bearer reads")).await.err(), Some(GrpcCode::PermissionDenied));
    assert!(send(Some("Bearer open-sesame")).await.is_ok());
    service.wait_until_logged("listener=\"grpc\" peer=127.0.0.1:");
}

#[tokio::test]
async fn changed_rules_are_reloaded_and_invalid_ones_rejected() {
    let (service, mut client) = start(FILES).await;
    let rules = service.folder().join("ratelimit.yaml");
    std::fs::write(&rules, RULES.replace("requests_per_unit: 60\n", "requests_per_unit: 77\n"))
        .expect("written");
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    loop {
        let status = client.send(&[("path", "/other")]).await;
        if status.current_limit.map(|limit| limit.requests_per_unit) == Some(77) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "it is never taken: {}", service.output());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    std::fs::write(&rules, RULES.replace("unit: week", "unit: fortnight")).expect("written");
    service.wait_until("the reload fails", |service| {
        service.output().contains("reloading the configuration failed")
    });
    service.wait_until_logged("ratelimit.yaml:");
    let status = client.send(&[("path", "/other")]).await;
    assert_eq!(
        status.current_limit.map(|limit| limit.requests_per_unit),
        Some(77),
        "the old configuration stays active"
    );
}

#[tokio::test]
async fn health_and_reflection_work() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_request, server_reflection_response,
    };

    let (service, _client) = start(FILES).await;
    let mut health = HealthClient::new(channel(&service).await);
    for name in ["", "envoy.service.ratelimit.v3.RateLimitService", "ratelimit"] {
        let request = HealthCheckRequest { service: name.to_owned() };
        let status = health.check(request).await.expect("a response").into_inner().status();
        assert_eq!(status, ServingStatus::Serving, "{name}");
    }
    let mut watched = health
        .watch(HealthCheckRequest { service: "ratelimit".to_owned() })
        .await
        .expect("a response")
        .into_inner();
    let mut next = async || watched.message().await.expect("a message").expect("a status").status();
    assert_eq!(next().await, ServingStatus::Serving);
    let mut reflection = ServerReflectionClient::new(channel(&service).await);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(server_reflection_request::MessageRequest::ListServices(
            String::new(),
        )),
    };
    let mut responses = reflection
        .server_reflection_info(tokio_stream::once(request))
        .await
        .expect("a response")
        .into_inner();
    let response = responses.message().await.expect("a message").expect("one message");
    let Some(server_reflection_response::MessageResponse::ListServicesResponse(services)) =
        response.message_response
    else {
        panic!("a list of services");
    };
    let names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    assert!(names.contains(&"envoy.service.ratelimit.v3.RateLimitService".to_owned()), "{names:?}");
    service.signal("TERM");
    assert_eq!(next().await, ServingStatus::NotServing, "the service shuts down");
}

#[tokio::test]
async fn health_is_not_serving_during_the_shutdown_delay() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

    let service = Service::start(
        "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
         shutdown_delay: 5m}\npolicies: [{name: a, limit: 1, window: 1s}]\n",
    );
    let mut health = HealthClient::new(channel(&service).await);
    let mut watched = health
        .watch(HealthCheckRequest { service: "ratelimit".to_owned() })
        .await
        .expect("a response")
        .into_inner();
    let mut next = async || watched.message().await.expect("a message").expect("a status").status();
    assert_eq!(next().await, ServingStatus::Serving);
    service.signal("TERM");
    assert_eq!(next().await, ServingStatus::NotServing);
    // New connections are still accepted.
    let mut health = HealthClient::new(channel(&service).await);
    let request = HealthCheckRequest { service: String::new() };
    let status = health.check(request).await.expect("a response").into_inner().status();
    assert_eq!(status, ServingStatus::NotServing);
}
