use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::policy::PolicyBuilder;

fn quota(limit: u64) -> Quota {
    Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid")
}

fn builder(name: &str) -> PolicyBuilder {
    Policy::builder(name, quota(10))
}

fn set(policies: impl IntoIterator<Item = PolicyBuilder>) -> Policies {
    let built = policies.into_iter().map(|builder| builder.build().expect("valid"));
    Policies::new(built.collect()).expect("unique names")
}

fn by_tenant(declared: &[&str]) -> PolicyBuilder {
    builder("p").attributes(declared.iter().copied()).key(["tenant"])
}

fn request(attributes: &[(&str, &str)]) -> BTreeMap<String, String> {
    attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn names(policies: &Policies, attributes: &[(&str, &str)]) -> Vec<String> {
    let request = request(attributes);
    let selection = policies.select(&request, None).expect("sound keys");
    selection.charges.iter().map(|charge| charge.policy().to_owned()).collect()
}

#[test]
fn every_condition_must_match_and_a_list_means_any_of() {
    let api = builder("api").matches("path", ["/api/**"]).matches("method", ["GET", "POST"]);
    let policies = set([builder("all"), api]);
    assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "GET")]), ["all", "api"]);
    assert_eq!(names(&policies, &[("path", "/api"), ("method", "POST")]), ["all", "api"]);
    assert_eq!(names(&policies, &[("path", "/api/items"), ("method", "PUT")]), ["all"]);
    assert_eq!(names(&policies, &[("path", "/apis"), ("method", "GET")]), ["all"]);
    assert_eq!(
        names(&policies, &[("path", "/api/items")]),
        ["all"],
        "an absent attribute matches nothing"
    );
}

#[test]
fn attributes_of_callers_are_built_in_or_declared_by_a_policy() {
    let policies = set([builder("all"), by_tenant(&["tenant", "plan"])]);
    for known in ["tenant", "plan", "ip", "header.x", "descriptor.user", "query.any thing"] {
        assert_eq!(policies.check_attribute(known), Ok(()), "{known}");
    }
    let error = policies.check_attribute("tennant").expect_err("unknown").to_string();
    assert!(error.contains("\"tennant\"") && error.contains("did you mean `tenant`?"), "{error}");
    assert!(Policies::default().check_attribute("tenant").is_err());
}

#[test]
fn policy_is_bypassable_if_only_it_limits_its_requests_and_its_key_may_be_missing() {
    let api = |name: &str| builder(name).matches("path", ["/api/**"]);
    let user = || api("user").key(["header.x-user-id"]);
    for (others, bypassable) in [
        (vec![], true),
        (vec![api("ip").key(["ip"])], false),
        (vec![api("all")], false),
        (vec![builder("all")], false),
        (vec![builder("root").matches("path", ["/**"]).key(["ip"])], false),
        (vec![builder("login").matches("path", ["/login"]).key(["ip"])], true),
        (vec![api("posts").matches("method", ["POST"]).key(["ip"])], true),
        (vec![api("cookie").key(["cookie.sid"]).missing_key(MissingKey::Deny)], false),
        (vec![api("shadow").key(["ip"]).mode(Mode::Shadow)], true),
    ] {
        let names: Vec<String> =
            others.iter().map(|other| format!("{other:?}").chars().take(60).collect()).collect();
        let policies = set(others.into_iter().chain([user()]));
        let found = policies.bypassable().any(|policy| policy.name() == "user");
        assert_eq!(found, bypassable, "{names:?}");
    }
    assert_eq!(set([user().missing_key(MissingKey::Deny)]).bypassable().count(), 0);
    assert_eq!(set([api("ip").key(["ip"])]).bypassable().count(), 0);
}

#[test]
fn unknown_name_has_a_suggestion_if_it_is_short() {
    let many = (0..1_000).map(|number| builder(&format!("per-user-{number:03}")));
    let policies = set(many.chain([builder("login")]));
    assert_eq!(policies.nearest("logn").as_deref(), Some("login"));
    assert_eq!(policies.nearest("per-user-00l").as_deref(), Some("per-user-000"));
    assert_eq!(policies.nearest("something-else"), None);
    assert_eq!(policies.nearest(&"login".repeat(13_000)), None);
}

#[test]
fn another_spelling_of_a_path_does_not_bypass_its_policy() {
    let policies = set([builder("api").matches("path", ["/api/login"])]);
    for path in [
        "/api/login",
        "//api//login",
        "/api/./login",
        "/x/../api/login",
        "/%61pi/l%6Fgin",
        "/api/login/",
        "/api/login?x=1",
    ] {
        assert_eq!(names(&policies, &[("path", path)]), ["api"], "{path}");
    }
    assert!(names(&policies, &[("path", "/api/login2")]).is_empty());
}

#[test]
fn policy_selected_by_name_ignores_its_conditions() {
    let login = builder("login").matches("path", ["/login"]).key(["ip"]);
    let login = login.build().expect("valid");
    let elsewhere = request(&[("path", "/"), ("ip", "192.0.2.1")]);
    assert_eq!(
        login.select(&elsewhere, None).expect("a sound key").charges[0].key(),
        Some("192.0.2.1")
    );
    assert!(login.select(&request(&[]), None).expect("no key").charges.is_empty());
}

#[test]
fn request_without_the_key_is_skipped_or_rejected() {
    let skip = builder("skip").key(["header.x-user-id"]);
    let deny = builder("deny").key(["header.x-user-id"]).missing_key(MissingKey::Deny);
    let policies = set([skip, deny]);
    for absent in [request(&[]), request(&[("header.x-user-id", "")])] {
        let selection = policies.select(&absent, None).expect("sound");
        assert!(selection.charges.is_empty());
        assert_eq!(selection.rejected_by.map(Policy::name), Some("deny"));
        assert_eq!(selection.missing_key.len(), 2);
    }
    assert_eq!(names(&policies, &[("header.x-user-id", "u1")]), ["skip", "deny"]);
}

#[test]
fn shadow_policy_rejects_no_request() {
    let shadow = builder("shadow").key(["header.x"]).mode(Mode::Shadow);
    let policies = set([shadow.missing_key(MissingKey::Deny)]);
    for request in [request(&[]), request(&[("header.x", &"x".repeat(513))])] {
        let selection = policies.select(&request, None).expect("not rejected");
        assert!(selection.charges.is_empty() && selection.rejected_by.is_none());
        assert_eq!(selection.shadow_rejections.len(), 1);
    }
}

#[test]
fn different_lists_of_values_have_different_keys() {
    let policies = set([builder("both").key(["ip", "header.x"])]);
    let key = |ip: &str, value: &str| {
        let request = request(&[("ip", ip), ("header.x", value)]);
        policies.select(&request, None).expect("sound").charges[0].key().map(str::to_owned)
    };
    assert_eq!(key("1.2.3.4", "/a").as_deref(), Some("1.2.3.4|/a"));
    assert_ne!(key("a|b", "c"), key("a", "b|c"));
    assert_ne!(key("a\\", "b"), key("a", "\\b"));
    assert_ne!(key("a\\|b", "c"), key("a\\", "b|c"));
}

#[test]
fn invalid_key_is_an_error() {
    let policies = set([builder("p").key(["header.x"])]);
    let long = "x".repeat(513);
    for (value, reason) in [(long.as_str(), "has 513 bytes"), ("a\nb", "control character")] {
        let error = policies
            .select(&request(&[("header.x", value)]), None)
            .expect_err("no key")
            .to_string();
        assert!(
            error.contains("policy \"p\" counts by header.x") && error.contains(reason),
            "{error}"
        );
    }
}

#[test]
fn overrides_are_by_key_and_costs_by_attribute() {
    let cost = Cost::Attribute { name: "header.x-cost".to_owned(), default: 2, max: 8 };
    let policy = by_tenant(&["tenant"]).cost(cost).override_for(["acme"], quota(1_000));
    let policies = set([policy]);
    let charged = |attributes: &[(&str, &str)], cost| {
        let request = request(attributes);
        let selection = policies.select(&request, cost).expect("sound");
        let charge = selection.charges[0].charge().expect("a quota");
        (charge.quota().limit(), charge.cost())
    };
    assert_eq!(charged(&[("tenant", "acme")], None), (1_000, 2));
    assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], None), (10, 5));
    assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "99")], None), (10, 8));
    assert_eq!(
        charged(&[("tenant", "other"), ("header.x-cost", "99999999999999999999999")], None),
        (10, 8)
    );
    for nonsense in ["0", "-1", "NaN", "1e3", ""] {
        assert_eq!(
            charged(&[("tenant", "other"), ("header.x-cost", nonsense)], None),
            (10, 2),
            "{nonsense}"
        );
    }
    assert_eq!(charged(&[("tenant", "other"), ("header.x-cost", "5")], Some(7)), (10, 7));
}

#[test]
fn cost_by_attribute_is_capped_by_the_quota_of_the_key() {
    let cost = Cost::Attribute { name: "cost".to_owned(), default: 1, max: 10 };
    let policy = by_tenant(&["tenant", "cost"]).cost(cost).override_for(["small"], quota(5));
    let policy = policy.build().expect("fits the larger");
    let charged = |tenant: &str| {
        let request = request(&[("tenant", tenant), ("cost", "100")]);
        policy.select(&request, None).expect("sound").charges[0].cost()
    };
    assert_eq!((charged("small"), charged("other")), (5, 10));
}

fn limit_of(policies: &Policies, attributes: &[(&str, &str)]) -> Option<u64> {
    let request = request(attributes);
    let selection = policies.select(&request, None).expect("sound keys");
    selection.charges.first().and_then(|charge| charge.quota().map(Quota::limit))
}

#[test]
fn networks_match_addresses_and_groups() {
    let networks = ["10.0.0.0/8", "fd00::/8", "192.0.2.7", "172.16.*"];
    let policies = set([builder("inside").matches("ip", networks)]);
    let any =
        set([builder("any").matches("ip", ["*"]), builder("v6").matches("ip", ["2001:DB8:*"])]);
    assert_eq!(names(&any, &[("ip", "2001:db8:0:1::/64")]), ["any", "v6"], "a group has a slash");
    for ip in ["10.1.2.3", "10.255.255.255", "fd00:1::/64", "192.0.2.7", "172.16.9.9"] {
        assert_eq!(names(&policies, &[("ip", ip)]), ["inside"], "{ip}");
    }
    for ip in ["11.0.0.0", "9.255.255.255", "fe00::/64", "192.0.2.8", "172.17.0.1", "x"] {
        assert!(names(&policies, &[("ip", ip)]).is_empty(), "{ip}");
    }
}

#[test]
fn longest_network_of_the_overrides_applies() {
    let policy = builder("per-ip").key(["ip"]);
    let policy = policy.override_for(["10.0.0.0/8"], quota(100));
    let policy = policy.override_for(["10.1.0.0/16"], quota(50));
    let policy = policy.override_for(["10.1.2.3"], quota(5));
    let policies = set([policy.override_for(["2001:db8::/32"], quota(7))]);
    for (ip, limit) in [
        ("10.2.0.1", 100),
        ("10.1.0.1", 50),
        ("10.1.2.3", 5),
        ("11.0.0.1", 10),
        ("2001:db8:1:2::/64", 7),
        ("2001:db9::/64", 10),
    ] {
        assert_eq!(limit_of(&policies, &[("ip", ip)]), Some(limit), "{ip}");
        let policy = policies.get("per-ip").expect("there");
        assert_eq!(policy.quota_for(ip).limit(), limit, "{ip} as a key");
    }
    let selected = request(&[("ip", "10.2.0.1")]);
    let selection = policies.select(&selected, None).expect("sound");
    assert_eq!(selection.charges[0].key(), Some("10.2.0.1"), "each address has its own count");
}

#[test]
fn any_entry_of_unless_that_matches_wholly_exempts() {
    let policy = builder("p").unless([("ip", ["10.0.0.0/8"])]);
    let policy = policy.unless([("path", ["/healthz"]), ("method", ["GET"])]);
    let policies = set([policy.unless([("header.x-internal", ["*"])])]);
    for (attributes, applies) in [
        (&[("ip", "10.1.2.3")][..], false),
        (&[("ip", "11.1.2.3")], true),
        (&[("path", "/healthz"), ("method", "GET")], false),
        (&[("path", "/./healthz/"), ("method", "HEAD")], false),
        (&[("path", "/healthz"), ("method", "POST")], true),
        (&[("path", "/healthz")], true),
        (&[("header.x-internal", "yes")], false),
        (&[], true),
    ] {
        assert_eq!(names(&policies, attributes) == ["p"], applies, "{attributes:?}");
    }
    let exemptible: Vec<_> = policies.exemptible().collect();
    assert_eq!(exemptible.len(), 1);
    assert_eq!(exemptible[0].1.as_str(), "header.x-internal");
    let verified = set([
        builder("a").unless([("header.x", ["1"]), ("ip", ["10.0.0.0/8"])]),
        builder("b").unless([("path", ["/healthz"])]),
    ]);
    assert_eq!(verified.exemptible().count(), 0, "no client chooses its address");
}

/// A request with two values of each attribute.
struct Repeated;

impl Attributes for Repeated {
    fn get(&self, _: &str) -> Option<Cow<'_, str>> {
        Some("internal".into())
    }

    fn is_ambiguous(&self, _: &str) -> bool {
        true
    }
}

#[test]
fn ambiguous_value_neither_exempts_nor_chooses_a_limit() {
    let exempting = set([builder("p").unless([("cookie.staff", ["internal"])])]);
    let selected = exempting.select(&Repeated, None).expect("only limited");
    assert_eq!(selected.charges.len(), 1);
    let by_plan = builder("p").limits("header.x-plan", [("internal", quota(1_000))]);
    let error = set([by_plan]).select(&Repeated, None).expect_err("ambiguous");
    assert!(matches!(error, SelectError::Ambiguous { .. }), "{error}");
}

#[test]
fn limits_follow_the_value_of_an_attribute() {
    let values = [("free", quota(100)), ("pro", quota(1_000)), ("", quota(7))];
    let policy = builder("p").key(["header.x-user"]).limits("header.x-plan", values);
    let policies = set([policy.override_for(["vip"], quota(5_000))]);
    for (user, plan, limit, is_other) in [
        ("ann", Some("free"), 100, false),
        ("ann", Some(" pro "), 1_000, false),
        ("ann", Some(""), 7, false),
        ("ann", Some("Pro"), 10, true),
        ("ann", Some("other"), 10, true),
        ("ann", Some("free, pro"), 10, true),
        ("ann", None, 10, true),
        ("vip", Some("free"), 5_000, false),
    ] {
        let mut attributes = vec![("header.x-user", user)];
        attributes.extend(plan.map(|plan| ("header.x-plan", plan)));
        let request = request(&attributes);
        let selection = policies.select(&request, None).expect("sound");
        assert_eq!(selection.charges[0].quota().map(Quota::limit), Some(limit), "{attributes:?}");
        assert_eq!(selection.other_limit.len(), usize::from(is_other), "{attributes:?}");
    }
    let error = |policy: PolicyBuilder| policy.build().expect_err("invalid").to_string();
    let twice = builder("p").limits("header.x", [("a", quota(1)), (" a", quota(2))]);
    assert!(error(twice).contains("\"a\" has two limits"));
    assert!(error(builder("p").limits("ip", [("a", quota(1))])).contains("use `overrides`"));
    assert!(error(builder("p").limits("plan", [("a", quota(1))])).contains("unknown attribute"));
}

#[test]
fn explanation_names_what_decided() {
    let policies = set([
        builder("path").matches("path", ["/api/**"]),
        builder("inside").unless([("ip", ["10.0.0.0/8"])]),
        builder("user").key(["header.x-user"]),
        builder("per-ip").key(["ip"]).override_for(["10.0.0.0/8"], quota(5)),
        builder("plan").limits("header.x-plan", [("pro", quota(5))]),
        builder("cookie").matches("cookie.sid", ["*"]),
    ]);
    let attributes = request(&[("path", "/x"), ("ip", "10.1.2.3"), ("header.x-plan", "pro")]);
    let explanations = policies.explain(&attributes);
    let shown = explanations.iter().map(|it| (it.policy, it.applies, it.reason.as_str()));
    let expected = [
        ("path", false, "match: path does not match"),
        ("inside", false, "unless: entry 1 (ip) matches"),
        ("user", false, "key: the request has no header.x-user"),
        ("per-ip", true, "it matches; an override applies; the limit is 5"),
        ("plan", true, "it matches; limits: header.x-plan is \"pro\"; the limit is 5"),
        ("cookie", false, "match: the request has no cookie.sid"),
    ];
    assert_eq!(shown.collect::<Vec<_>>(), expected);
}
