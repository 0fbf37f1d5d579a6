//! Metrics, logs and the admin API, as an operator sees them.

use serde_json::{Value, json};
use tonic::Code as GrpcCode;

use super::support::{Redis, Service, request};
use super::{Client, FILES, descriptor, start, start_on, with_limit};
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;

/// Returns the policies in the decision metrics.
fn labels(metrics: &str) -> Vec<&str> {
    let counts = metrics.lines().filter(|line| line.starts_with("tidegate_decisions_total{"));
    counts
        .filter(|line| line.contains(r#"outcome="allowed""#))
        .filter_map(|line| line.split('"').nth(1))
        .collect()
}

#[tokio::test]
async fn limits_in_requests_create_few_labels() {
    let (service, mut client) = start(FILES).await;
    let before = labels(&service.admin("/metrics").body).len();
    for number in 0..50 {
        let address = format!("10.1.0.{number}");
        let request = with_limit(descriptor(&[("client_address", &address), ("path", "/x")]), 5);
        assert_eq!(client.send_all(vec![request]).await.overall_code(), Code::Ok);
    }
    let metrics = service.admin("/metrics").body;
    assert_eq!(labels(&metrics).len(), before + 1, "{metrics}");
    assert!(
        metrics.contains(r#"{policy="edge.client_address.path",outcome="allowed"} 50"#),
        "{metrics}"
    );
    for hundred in 0..10 {
        let each = (0..100)
            .map(|number| with_limit(descriptor(&[(&format!("key-{hundred}-{number}"), "x")]), 5));
        assert_eq!(client.send_all(each.collect()).await.overall_code(), Code::Ok);
    }
    let metrics = service.admin("/metrics").body;
    assert!(labels(&metrics).len() <= before + 201, "{}", labels(&metrics).len());
    assert!(
        metrics.contains(r#"{policy="override-fixed-window-hour",outcome="allowed"} 801"#),
        "{metrics}"
    );
}

#[tokio::test]
async fn store_failures_are_logged_once_per_minute() {
    let redis = Redis::start();
    let policy = "policies:\n  - {name: p, limit: 5, window: 1h}\n";
    let envoy = "envoy: {files: [ratelimit.yaml], on_store_failure: error}\n";
    let (service, mut client) =
        start(&format!("store: {{redis: '{}'}}\n{envoy}{policy}", redis.url())).await;
    assert_eq!(client.send(&[("path", "/x")]).await.code(), Code::Ok);
    drop(redis);
    let descriptors = vec![descriptor(&[("path", "/x")])];
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    for _ in 0..30 {
        assert_eq!(
            client.try_send(request.clone()).await.expect_err("the store is down").code(),
            GrpcCode::Unavailable
        );
        let refund = json!({"policy": "p", "key": "k", "age_ms": 9}).to_string();
        let refund = service.post("/v1/refund", &refund);
        assert_eq!(refund.status, 503, "{refund:?}");
    }
    service.wait_until_logged("the store failed to decide a request");
    let output = service.output();
    assert_eq!(output.matches("the store failed to decide a request").count(), 1, "{output}");
}

#[tokio::test]
async fn rules_are_listed_like_policies() {
    let rules = "
domain: edge
descriptors:
  - key: tenant
    descriptors:
      - key: user
        rate_limit: {name: each-user, unit: hour, unit_multiplier: 2, requests_per_unit: 1}
  - {key: shut, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: soft, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 5}}
  - {key: free, rate_limit: {unlimited: true}}
";
    let envoy = "envoy: {files: [ratelimit.yaml], on_store_failures: {each-user: deny}}\n";
    let (service, _client) = start_on(envoy, rules).await;
    let rule = |name: &str, limit: u64, window_ms: u64, key: &[&str], mode: &str| {
        json!({
            "name": name, "algorithm": "fixed-window", "limit": limit, "window_ms": window_ms,
            "burst": limit, "key": key, "mode": mode, "on_store_failure": "local",
            "show_keys": "plain", "overrides": [], "override_count": 0, "match": {}, "unless": [], "cost": 1,
            "missing_key": "skip", "count_denied": false, "block_for_ms": [], "encoding": null,
        })
    };
    let mut each_user = rule("edge.tenant.user", 1, 7_200_000, &["tenant", "user"], "enforce");
    each_user["rule"] = json!("each-user");
    each_user["on_store_failure"] = json!("deny");
    let soft = rule("edge.soft", 5, 86_400_000, &["soft"], "quota");
    assert_eq!(
        service.admin("/v1/policies").json(),
        json!([each_user, rule("edge.shut", 0, 86_400_000, &["shut"], "shadow"), soft])
    );
}

#[tokio::test]
async fn hot_keys_can_be_reset_by_their_listed_name() {
    let redis = Redis::start();
    for store in [String::new(), redis.healthy_store()] {
        let (service, mut client) = start(&format!("{store}{FILES}")).await;
        reset_hot_keys(&service, &mut client).await;
    }
}

async fn reset_hot_keys(service: &Service, client: &mut Client) {
    let requests = [
        vec![descriptor(&[("path", "/api/x")])],
        vec![with_limit(descriptor(&[("client", "x|y")]), 1)],
    ];
    for request in &requests {
        assert_eq!(client.send_all(request.clone()).await.overall_code(), Code::Ok);
        assert_eq!(client.send_all(request.clone()).await.overall_code(), Code::OverLimit);
    }
    let hot = service.admin("/v1/hot-keys").json();
    let denied = hot["denied"].as_array().expect("a list");
    assert_eq!(denied.len(), 2, "{hot}");
    let reset = |policy: &Value, key: &Value| {
        let body = json!({"policy": policy, "key": key}).to_string();
        request(&service.admin, "POST", "/v1/reset", &[], body.as_bytes()).status
    };
    // Both are found: the listed key of a counter, and the value of the rule's only entry.
    for key in ["edge%7Cpath=/api/x", "/api/x"] {
        let found = service.admin(&format!("/v1/lookup?key={key}")).json();
        assert_eq!(found["found"], json!(true), "{found}");
        let results = found["results"].as_array().expect("a list");
        let result = results.iter().find(|it| it["policy"] == json!("edge.path_/api/*"));
        let result = result.unwrap_or_else(|| panic!("{found}"));
        assert_eq!(results.iter().filter(|it| it["allowed"] == json!(false)).count(), 1);
        assert_eq!(result["key"], json!("edge|path=/api/x"), "{found}");
        assert_eq!((&result["allowed"], &result["remaining"]), (&json!(false), &json!(0)));
    }
    for hot in denied {
        assert_eq!(reset(&hot["policy"], &hot["key"]), 204, "{hot}");
    }
    for request in requests {
        assert_eq!(client.send_all(request).await.overall_code(), Code::Ok);
    }
    let shut = "203.0.113.66";
    assert_eq!(client.send(&[("remote_address", shut)]).await.code(), Code::OverLimit);
    let (rule, key) =
        (format!("edge.remote_address_{shut}"), format!("edge|remote_address={shut}"));
    assert_eq!(reset(&json!(rule), &json!(key)), 204, "the counter was already reset");
    assert_eq!(reset(&json!("edge.unknown"), &json!("edge|unknown=x")), 404);
}
