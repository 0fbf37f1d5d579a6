//! All front doors decide the same: each case is sent through the HTTP API, forward-auth, the gateway,
//! Envoy's service and the Tower layer, and must have the same key, decision, headers, metrics and
//! span everywhere. Those that know ids also answer the same about reservations.

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/collector.rs"]
mod collector;

mod cases;
mod door;
mod envoy;
mod holds;
mod http;
#[path = "../resp/client.rs"]
#[allow(dead_code, reason = "the tests of the protocol use more of it")]
mod resp;
mod tower_layer;

use cases::{Case, cases};
use door::{Door, Record};

/// Requests per case: with a limit of 1, the second one is denied.
const REQUESTS_PER_CASE: usize = 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_front_doors_make_the_same_decisions() {
    let cases = cases();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let expected = record(tower_layer::TowerDoor::start(&cases).await, &cases).await;
    assert_eq!(expected.keys, expected_keys(&cases), "the keys of the table");
    assert_eq!(expected.allowed(), expected_outcomes(&cases), "the decisions of the table");
    compare("gateway", &expected, &record(http::Gateway::start(&cases).await, &cases).await);
    compare(
        "forward-auth",
        &expected,
        &record(http::ForwardAuth::start(&cases).await, &cases).await,
    );
    compare("HTTP API", &expected, &record(http::Api::start(&cases).await, &cases).await);
    compare("Envoy", &expected, &record(envoy::EnvoyDoor::start(&cases).await, &cases).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doors_that_know_the_address_agree_on_networks() {
    let cases = cases::networks();
    let expected = record(http::Gateway::start(&cases).await, &cases).await;
    assert_eq!(expected.keys, expected_keys(&cases), "the keys of the table");
    assert_eq!(expected.allowed(), expected_outcomes(&cases), "the decisions of the table");
    let forward_auth = http::ForwardAuth::start(&cases).await;
    compare("forward-auth", &expected, &record(forward_auth, &cases).await);
    compare("HTTP API", &expected, &record(http::Api::start(&cases).await, &cases).await);
}

/// The Tower layer refuses them; its own tests show that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doors_before_another_application_agree_on_dot_segments() {
    let cases = cases::dot_segments();
    let expected = record(http::Gateway::start(&cases).await, &cases).await;
    assert_eq!(expected.keys, expected_keys(&cases), "the keys of the table");
    assert_eq!(expected.allowed(), expected_outcomes(&cases), "the decisions of the table");
    let forward_auth = http::ForwardAuth::start(&cases).await;
    compare("forward-auth", &expected, &record(forward_auth, &cases).await);
    compare("HTTP API", &expected, &record(http::Api::start(&cases).await, &cases).await);
    compare("Envoy", &expected, &record(envoy::EnvoyDoor::start(&cases).await, &cases).await);
}

/// Sends every case through a door.
async fn record(mut door: impl Door, cases: &[Case]) -> Record {
    let mut answers = Vec::new();
    for case in cases {
        for _ in 0..REQUESTS_PER_CASE {
            answers.push((case.name, door.send(case).await));
        }
    }
    door.finish(answers).await
}

fn compare(door: &str, expected: &Record, found: &Record) {
    for ((case, expected), (_, found)) in expected.answers.iter().zip(&found.answers) {
        assert_eq!(found.outcome, expected.outcome, "{door}, {case}: the decision");
        // Only Envoy's service shows limits in shadow mode, as ratelimit does.
        if expected.limit.is_some() || door != "Envoy" {
            let [found, expected] = [found, expected].map(|answer| {
                // Envoy shows the units per window, the other doors the capacity.
                let shows_rate = door == "Envoy" && case.contains("burst");
                answer.limit.map(|(limit, left)| (Some(limit).filter(|_| !shows_rate), left))
            });
            assert_eq!(found, expected, "{door}, {case}: limit and remaining");
        }
        if let (Some(found), Some(expected)) = (&found.headers, &expected.headers) {
            assert_eq!(found, expected, "{door}, {case}: the headers");
        }
    }
    assert_eq!(found.keys, expected.keys, "{door}: the keys");
    assert_eq!(found.metrics, expected.metrics, "{door}: the metrics");
    assert_eq!(found.spans, expected.spans, "{door}: the spans");
}

/// Returns the keys that the table expects, with the policy that counts them.
fn expected_keys(cases: &[Case]) -> std::collections::BTreeSet<(String, String)> {
    let counted = cases.iter().filter_map(|case| Some((case.policy(), case.key?.to_owned())));
    counted.collect()
}

fn expected_outcomes(cases: &[Case]) -> Vec<door::Outcome> {
    cases.iter().flat_map(|case| case.outcomes).collect()
}
