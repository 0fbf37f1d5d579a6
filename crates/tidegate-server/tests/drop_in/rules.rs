//! Trees as Envoy Gateway makes them, one for each of its documented cases, and the descriptors that
//! its routes send.

use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate_config::envoy::RateLimitDescriptor;

use crate::{HOUR, descriptor, limited, node, rules_of, send, send_all, start};

const DOMAIN: &str = "default/eg/http";
/// Descriptor of a route, which comes first in every chain.
const ROUTE: (&str, &str) = ("route-a", "route-a");

/// Case: the tree below the route, and the entries of requests after the route, each with the limit
/// that applies, if one does.
struct Case {
    name: &'static str,
    tree: Vec<RateLimitDescriptor>,
    requests: Vec<(Vec<Pair>, Option<u32>)>,
}

/// Key and value of an entry.
type Pair = (&'static str, &'static str);

/// Entry whose value is its key, as for all matches but those of distinct values.
fn same(name: &'static str) -> Pair {
    (name, name)
}

fn cases() -> Vec<Case> {
    [cases_of_headers(), cases_of_other_matches()].into_iter().flatten().collect()
}

fn cases_of_headers() -> Vec<Case> {
    let matched = |name: &str, children| node(name, name, children);
    vec![
        Case {
            name: "all traffic of a route",
            tree: vec![limited("rule-0-match--1", "rule-0-match--1", 3)],
            requests: vec![
                (vec![same("rule-0-match--1")], Some(3)),
                (vec![same("rule-1-match--1")], None),
            ],
        },
        Case {
            name: "exact header",
            tree: vec![limited("rule-0-match-0", "rule-0-match-0", 4)],
            requests: vec![(vec![same("rule-0-match-0")], Some(4)), (vec![], None)],
        },
        Case {
            name: "distinct header, with limits of their own for some values",
            tree: vec![
                limited("rule-0-match-0", "", 5),
                limited("rule-0-match-0", "client-a", 15),
                limited("rule-0-match-0", "client-b", 20),
            ],
            requests: vec![
                (vec![("rule-0-match-0", "client-a")], Some(15)),
                (vec![("rule-0-match-0", "client-b")], Some(20)),
                (vec![("rule-0-match-0", "client-c")], Some(5)),
            ],
        },
        Case {
            name: "several headers, method and path",
            tree: vec![matched(
                "rule-0-match-0",
                vec![node(
                    "rule-0-match-1",
                    "",
                    vec![matched("rule-0-method", vec![limited("rule-0-path", "rule-0-path", 6)])],
                )],
            )],
            requests: vec![
                (
                    vec![
                        same("rule-0-match-0"),
                        ("rule-0-match-1", "ann"),
                        same("rule-0-method"),
                        same("rule-0-path"),
                    ],
                    Some(6),
                ),
                (vec![same("rule-0-match-0"), ("rule-0-match-1", "ann")], None),
            ],
        },
    ]
}

fn cases_of_other_matches() -> Vec<Case> {
    let matched = |name: &str, children| node(name, name, children);
    let cidr = |children| node("masked_remote_address", "192.168.0.0/16", children);
    vec![
        Case {
            name: "network of the client",
            tree: vec![limited("masked_remote_address", "192.168.0.0/16", 7)],
            requests: vec![
                (vec![("masked_remote_address", "192.168.0.0/16")], Some(7)),
                (vec![("masked_remote_address", "10.0.0.0/16")], None),
            ],
        },
        Case {
            name: "each address of a network, below a header",
            tree: vec![matched(
                "rule-0-match-0",
                vec![cidr(vec![limited("remote_address", "", 8)])],
            )],
            requests: vec![(
                vec![
                    same("rule-0-match-0"),
                    ("masked_remote_address", "192.168.0.0/16"),
                    ("remote_address", "192.168.7.9"),
                ],
                Some(8),
            )],
        },
        Case {
            name: "query parameter, exact and distinct",
            tree: vec![matched(
                "rule-0-match-0",
                vec![
                    limited("rule-0-match-1", "", 9),
                    limited("rule-0-match-1", "rule-0-match-1", 10),
                ],
            )],
            requests: vec![
                (vec![same("rule-0-match-0"), ("rule-0-match-1", "page-2")], Some(9)),
                (vec![same("rule-0-match-0"), same("rule-0-match-1")], Some(10)),
            ],
        },
        Case {
            name: "shared rule with a name",
            tree: vec![node(
                "default/policy/rule/by-user",
                "default/policy/rule/by-user",
                vec![limited("rule-match-0", "", 11)],
            )],
            requests: vec![(
                vec![same("default/policy/rule/by-user"), ("rule-match-0", "ann")],
                Some(11),
            )],
        },
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_documented_case_limits_the_requests_that_it_is_about() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    for (version, case) in cases().into_iter().enumerate() {
        // A domain of its own, so that no case counts for another one.
        let domain = format!("{DOMAIN}-{version}");
        let tree = rules_of(&domain, vec![node(ROUTE.0, ROUTE.1, case.tree)]);
        plane.accept(&version.to_string(), &[tree]).await;
        for (entries, expected) in case.requests {
            let entries = [&[ROUTE][..], &entries].concat();
            let admitted = expected.unwrap_or(1);
            for _ in 0..admitted {
                let decided = send(&mut client, &domain, &entries).await;
                assert_eq!(decided, (true, expected), "{}: {entries:?}", case.name);
            }
            let is_allowed = send(&mut client, &domain, &entries).await.0;
            assert_eq!(is_allowed, expected.is_none(), "{}: {entries:?}", case.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn distinct_values_count_apart_and_other_domains_do_not_count() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    let user = node(ROUTE.0, ROUTE.1, vec![limited("rule-0-match-0", "", 1)]);
    let other = node(ROUTE.0, ROUTE.1, vec![limited("rule-0-match-0", "", 2)]);
    plane.accept("1", &[rules_of(DOMAIN, vec![user]), rules_of("other", vec![other])]).await;
    for user in ["ann", "bob"] {
        let entries = [ROUTE, ("rule-0-match-0", user)];
        assert_eq!(send(&mut client, DOMAIN, &entries).await, (true, Some(1)));
        assert_eq!(send(&mut client, DOMAIN, &entries).await, (false, Some(1)));
        assert_eq!(send(&mut client, "other", &entries).await, (true, Some(2)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cost_of_requests_and_of_responses_counts_and_shadow_rules_pass() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    let mut shadow = limited("rule-1-match-0", "", 1);
    shadow.shadow_mode = true;
    let tree = node(ROUTE.0, ROUTE.1, vec![limited("rule-0-match-0", "", 100), shadow]);
    plane.accept("1", &[rules_of(DOMAIN, vec![tree])]).await;
    let costs = |units: u64| {
        let mut cost = descriptor(&[ROUTE, ("rule-0-match-0", "ann")]);
        cost.hits_addend = Some(units);
        vec![cost]
    };
    // Its check before the request, then the cost of the response when the stream is done.
    for (units, allowed, remaining) in
        [(0, true, 100), (60, true, 40), (0, true, 40), (60, false, 0), (0, false, 0)]
    {
        let response = send_all(&mut client, DOMAIN, costs(units)).await;
        let code = if allowed { Code::Ok } else { Code::OverLimit };
        let status = &response.statuses[0];
        assert_eq!((response.overall_code, status.limit_remaining), (code.into(), remaining));
    }
    for _ in 0..3 {
        let entries = [ROUTE, ("rule-1-match-0", "ann")];
        assert!(send(&mut client, DOMAIN, &entries).await.0, "a rule in shadow mode");
    }
    // A limit that the request brings itself.
    let mut own = descriptor(&[ROUTE, ("rule-2-match-0", "ann")]);
    own.limit = Some(RateLimitOverride { requests_per_unit: 1, unit: HOUR });
    let first = send_all(&mut client, DOMAIN, vec![own.clone()]).await;
    let second = send_all(&mut client, DOMAIN, vec![own]).await;
    let codes = [first.overall_code, second.overall_code];
    assert_eq!(codes, [Code::Ok, Code::OverLimit].map(i32::from));
}

/// As Envoy AI Gateway uses it: one of several budgets is enough.
#[tokio::test(flavor = "multi_thread")]
async fn rules_in_quota_mode_deny_only_together() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    let quota = |key: &str, units| {
        let mut rule = limited(key, "", units);
        rule.quota_mode = true;
        rule
    };
    let domain = "ai-gateway-quota";
    plane.accept("1", &[rules_of(domain, vec![quota("own", 1), quota("shared", 2)])]).await;
    assert!(program.rules().contains("shadow_mode: false, quota_mode: true"));
    let request = || vec![descriptor(&[("own", "ann")]), descriptor(&[("shared", "team")])];
    let mut codes = Vec::new();
    for _ in 0..3 {
        codes.push(send_all(&mut client, domain, request()).await.overall_code);
    }
    assert_eq!(codes, [Code::Ok, Code::Ok, Code::OverLimit].map(i32::from));
}
