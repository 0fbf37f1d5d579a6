use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::key::KeyError;

fn quota(limit: u64) -> Quota {
    Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid")
}

fn policy(name: &str) -> PolicyBuilder {
    Policy::builder(name, quota(10))
}

/// Returns the text of the error that a builder ends in.
fn error(builder: PolicyBuilder) -> String {
    builder.build().expect_err("invalid").to_string()
}

#[test]
fn invalid_parts_are_errors_whatever_their_order() {
    assert_eq!(
        Policy::builder("", quota(1)).build().err(),
        Some(PolicyError::Name(KeyError::Empty))
    );
    let twice = vec![policy("a").build().expect("valid"), policy("a").build().expect("valid")];
    let twice = Policies::new(twice).expect_err("one name");
    assert!(twice.to_string().contains("used twice"));
    let no_patterns: [&str; 0] = [];
    assert!(policy("a").matches("path", no_patterns).build().is_err());
    assert!(policy("a").cost(Cost::Fixed(0)).build().is_err());
    assert!(error(policy("a").cost(Cost::Fixed(11))).contains("at most 10"));
    let cost = |default, max| Cost::Attribute { name: "header.c".to_owned(), default, max };
    assert!(error(policy("a").cost(cost(7, 5))).contains("more than the max 5"));
    assert!(error(policy("a").cost(cost(1, 11))).contains("at most 10"));
    let small = |cost| policy("a").key(["header.u"]).cost(cost).override_for(["small"], quota(5));
    assert!(small(cost(1, 10)).build().is_ok(), "the small one takes 5 at most");
    assert!(error(small(cost(6, 10))).contains("at most 5"));
    assert!(error(small(Cost::Fixed(6))).contains("at most 5"));
    let by_user = policy("a").key(["header.u"]);
    let twice = by_user.override_for(["k"], quota(1)).override_for(["k"], quota(2));
    assert!(error(twice).contains("overridden twice"));
    let unknown = Cost::Attribute { name: "heder.c".to_owned(), default: 1, max: 1 };
    for wrong in [
        policy("a").matches("heder.c", ["x"]),
        policy("a").key(["ip", "heder.c"]),
        policy("a").cost(unknown),
    ] {
        assert!(error(wrong).contains("did you mean `header.c`?"));
    }
    let mode = "shadwo".parse::<Mode>().expect_err("unknown").to_string();
    assert!(mode.contains("enforce, shadow"), "{mode}");
}

#[test]
fn lanes_have_at_least_one_unit() {
    let lanes = |percent| policy("a").key(["header.u"]).lanes("header.p", [("low", percent)], 100);
    assert!(lanes(10).build().is_ok());
    assert!(error(lanes(9)).contains("a lane of 9% of the limit 10 has less than one unit"));
    assert!(error(lanes(9).override_for(["k"], quota(1_000))).contains("limit 10"));
    assert!(error(lanes(50).override_for(["k"], quota(1))).contains("limit 1 has"));
    assert!(error(lanes(0)).contains("not 0%"));
    assert!(error(lanes(101)).contains("not 101%"));
    assert!(error(policy("a").lanes("path", [("/", 50)], 100)).contains("cannot be chosen by"));
    assert!(error(policy("a").lanes("header.p", [("x", 50), (" x", 60)], 100)).contains("twice"));
    let log = Quota::sliding_log(10, Duration::from_secs(60)).expect("valid");
    let counting = Policy::builder("a", log.with_count_denied(true).expect("valid"));
    assert!(error(counting.lanes("header.p", [("low", 50)], 100)).contains("count_denied"));
    let blocking = quota(10).with_block_for(&[Duration::from_secs(60)]).expect("valid");
    let blocking = Policy::builder("a", blocking).lanes("header.p", [("low", 50)], 100);
    assert!(error(blocking).contains("block_for"));
    assert!(error(lanes(50).cost(Cost::Fixed(6))).contains("at most 5"), "never in its lane");
    assert!(lanes(50).cost(Cost::Fixed(5)).build().is_ok());
}

#[test]
fn attributes_may_be_declared_after_their_use() {
    let policy = policy("a").key(["tenant"]).matches("plan", ["gold"]);
    assert!(policy.attributes(["tenant", "plan"]).build().is_ok());
}

#[test]
fn references_are_those_of_conditions_key_and_cost() {
    let cost = Cost::Attribute { name: "tenant".to_owned(), default: 1, max: 1 };
    let policy = policy("a").cost(cost).key(["ip", "header.X"]).matches("domain", ["edge"]);
    let policy = policy.attributes(["tenant"]).build().expect("valid");
    assert!(policy.references().eq(["domain", "ip", "header.x", "tenant"]));
}

#[test]
fn patterns_that_no_request_matches_are_errors_with_the_right_spelling() {
    for (attribute, pattern, right) in [
        ("ip", "10.0.0.0/33", "neither an address nor a network"),
        ("ip", "10.0.0", "write `192.0.2.1`"),
        ("ip", "localhost*", "neither"),
        ("ip", "2001:DB8::1", "write `2001:db8::/64`, or set client_ip.ipv6_prefix to 128"),
        ("path", "^/api/.*$", "such as `/api/**`"),
        ("path", "^/users/[^/]+/posts", "such as `/users/*/posts`"),
        ("path", "^/(a|b)", "such as `/api/**`"),
        ("path", "!/health", "`unless: [{path: /health}]`"),
        ("path", "https://example.com/api/**", "write `/api/**`"),
        ("method", "GET|POST", "write a list, `[GET, POST]`"),
        ("method", "get, post", "write a list, `[GET, POST]`"),
        ("method", "!GET", "`unless: [{method: GET}]`"),
        ("method", "^GET$", "write `GET`"),
        ("method", "", "such as `GET`"),
        ("host", "https://example.com", "write `example.com`"),
        ("host", "example.com/api", "write `example.com`"),
        ("host", "a.example|b.example", "a list of some"),
    ] {
        let error = error(policy("a").matches(attribute, [pattern]));
        let expected = format!("{pattern:?} would never match: ");
        assert!(error.contains(&expected) && error.contains(right), "{attribute}: {error}");
    }
    for (attribute, pattern) in [
        ("ip", "192.0.2.7"),
        ("ip", "10.*"),
        ("ip", "2001:DB8::1/64"),
        ("ip", "2001:db8:*/64"),
        ("ip", "10.0.0.0/8"),
        ("ip", "0.0.0.0/0"),
        ("ip", "::ffff:10.0.0.0/104"),
        ("path", "/a^b"),
        ("path", "/users:login"),
        ("path", "/proxy/https://example.com"),
        ("method", "M-SEARCH"),
        ("method", "P*"),
        ("host", "[2001:db8::1]:8080"),
        ("host", "*.example.com:443"),
        ("header.x", "a|b, !c"),
    ] {
        let built = policy("a").matches(attribute, [pattern]).build();
        assert!(built.is_ok(), "{attribute}: {pattern}: {built:?}");
    }
}

#[test]
fn overrides_that_no_request_has_are_errors_with_the_right_spelling() {
    let of = |keys: &[&str], values: &[&str]| {
        error(policy("a").key(keys.to_vec()).override_for(values.to_vec(), quota(1)))
    };
    assert!(of(&[], &["acme"]).contains("would never apply: this policy counts all requests"));
    assert!(of(&["ip"], &["a", "b"]).contains("counts only by ip: write one value"));
    assert!(of(&["ip", "path"], &["a"]).contains("has 1 of the 2 values"));
    assert!(of(&["ip"], &["internal"]).contains("neither an address"));
    assert!(of(&["ip"], &["2001:db8::1"]).contains("write `2001:db8::/64`"));
    assert!(of(&["path", "ip"], &["/", "10.0.0.0/8"]).contains("counts by ip alone"));
    let twice = policy("a").key(["ip"]).override_for(["10.0.0.0/8"], quota(1));
    assert!(error(twice.override_for(["10.1.0.0/8"], quota(2))).contains("is overridden twice"));
    let ipv6 = policy("a").key(["ip"]).override_for(["2001:db8::/64"], quota(1));
    assert!(ipv6.build().is_ok(), "IPv6 addresses count by their network");
}

#[test]
fn get_covers_head() {
    for (patterns, methods) in [
        (&["GET"][..], &["GET", "HEAD"][..]),
        (&["post", "get"], &["GET", "HEAD", "POST"]),
        (&["G*"], &["GET", "HEAD"]),
        (&["HEAD"], &["HEAD"]),
        (&["POST"], &["POST"]),
    ] {
        let policy =
            policy("a").matches("method", patterns.iter().copied()).build().expect("valid");
        let policies = Policies::new(vec![policy]).expect("valid");
        let matched = ["GET", "HEAD", "POST", "PUT"].into_iter().filter(|method| {
            let request = BTreeMap::from([("method".to_owned(), (*method).to_owned())]);
            !policies.select(&request, None).expect("valid").charges.is_empty()
        });
        assert_eq!(matched.collect::<Vec<_>>(), methods, "{patterns:?}");
    }
}

#[test]
fn method_ignores_case() {
    let policy = policy("a").matches("method", ["get"]).key(["method"]);
    let policy = policy.override_for(["get"], quota(3)).build().expect("valid");
    let policies = Policies::new(vec![policy]).expect("valid");
    for (method, matches) in [("GET", true), ("get", true), ("Get", true), ("POST", false)] {
        let request = BTreeMap::from([("method".to_owned(), method.to_owned())]);
        let selection = policies.select(&request, None).expect("valid");
        assert_eq!(selection.charges.len(), usize::from(matches), "{method}");
        for charge in &selection.charges {
            assert_eq!((charge.key(), charge.quota().map(Quota::limit)), (Some("GET"), Some(3)));
        }
    }
}

#[test]
fn parameters_of_a_router_are_probably_not_meant_literally() {
    let paths = ["/users/{id}", "/users/:id/posts", "/u/<int:id>", "/api/.*", "/a$", "/b:c/**"];
    let policy = policy("a").matches("path", paths).build().expect("valid");
    let meant: Vec<String> = policy.literal_parameters().map(|(_, meant)| meant).collect();
    assert_eq!(meant, ["/users/*", "/users/*/posts", "/u/*", "/api/**", "/a"]);
}
