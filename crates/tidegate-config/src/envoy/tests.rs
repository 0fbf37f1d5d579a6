//! Tests of the rules: the sample file, further features of ratelimit, and invalid files.

use std::collections::HashMap;
use std::fmt::Write as _;

use tidegate::{Key, MAX_KEY_BYTES};

use super::error::RulesError;
use super::raw::{MAX_FILE_BYTES, MAX_TEXT_BYTES};
use super::*;

/// Random files and descriptors.
mod fuzz;
/// Texts that look like mistakes but are loaded by ratelimit; domains in several files.
mod loading;

const SAMPLE: &str = include_str!("../../../tidegate-server/tests/data/envoy-ratelimit.yaml");

fn load(text: &str) -> Result<Rules, RulesError> {
    Rules::load(
        &[("rules.yaml".to_owned(), text.to_owned())],
        Algorithm::FixedWindow,
        &BTreeMap::new(),
    )
}

fn sample() -> Rules {
    load(SAMPLE).expect("the sample loads")
}

/// Returns the rules of the domain `d` with these descriptors.
fn rules(descriptors: &str) -> Rules {
    load(&format!("domain: d\ndescriptors: {descriptors}")).expect("the rules load")
}

fn load_error(text: &str) -> String {
    load(text).expect_err("an error").to_string()
}

fn found<'a>(rules: &'a Rules, entries: &[(&str, &str)]) -> MatchedRule<'a> {
    rules.domains().find_map(|domain| rules.find(domain, entries.iter().copied())).expect("a rule")
}

fn metric(rules: &Rules, entries: &[(&str, &str)]) -> String {
    found(rules, entries).metric.into_owned()
}

fn requests_and_unit(limit: &Limit) -> (u64, Unit) {
    match limit {
        Limit::Unlimited => panic!("unlimited"),
        Limit::Zero(unit, _) => (0, *unit),
        Limit::Quota(unit, quota) => (quota.limit(), *unit),
    }
}

fn limit_of(rules: &Rules, entries: &[(&str, &str)]) -> (u64, Unit) {
    requests_and_unit(&found(rules, entries).rule.limit)
}

#[test]
fn exact_value_takes_precedence_over_the_key_alone() {
    let rules = sample();
    assert_eq!(limit_of(&rules, &[("remote_address", "198.51.100.1")]), (10, Unit::Second));
    assert_eq!(limit_of(&rules, &[("remote_address", "203.0.113.66")]), (0, Unit::Second));
    assert_eq!(found(&rules, &[("remote_address", "203.0.113.1")]).rule.limit, Limit::Unlimited);
}

#[test]
fn listed_value_without_a_limit_does_not_fall_back_to_the_key() {
    assert!(sample().find("edge", [("remote_address", "203.0.113.2")]).is_none());
}

#[test]
fn only_the_node_of_the_last_entry_limits() {
    let rules = sample();
    let (outer, inner) = (("message_type", "marketing"), ("to_number", "2065550100"));
    assert_eq!(limit_of(&rules, &[outer]), (100, Unit::Minute));
    assert_eq!(limit_of(&rules, &[outer, inner]), (5, Unit::Day));
    assert!(rules.find("edge", [outer, inner, ("more", "")]).is_none());
    assert!(rules.find("edge", [("message_type", "other")]).is_none());
    assert!(rules.find("edge", [inner]).is_none());
    assert!(rules.find("edge", []).is_none());
    assert!(rules.find("elsewhere", [outer]).is_none());
}

#[test]
fn search_never_backtracks() {
    let rules = sample();
    let language = ("language", "en");
    assert_eq!(limit_of(&rules, &[("message_type", "receipt"), language]), (7, Unit::Week));
    assert!(rules.find("edge", [("message_type", "marketing"), language]).is_none());
}

#[test]
fn wildcards_are_tried_after_the_exact_value_in_file_order() {
    let rules = sample();
    for (path, limit) in [
        ("/api/v2/items", (2, Unit::Minute)),
        ("/api/v1/items", (1, Unit::Minute)),
        ("/api/", (1, Unit::Minute)),
        ("/api", (60, Unit::Minute)),
        ("/users/7/orders/8/pay", (3, Unit::Hour)),
        ("/users//orders//pay", (3, Unit::Hour)),
        ("/users/7/orders/8/pays", (60, Unit::Minute)),
        ("/users/orders/pay", (60, Unit::Minute)),
    ] {
        assert_eq!(limit_of(&rules, &[("path", path)]), limit, "{path}");
    }
}

#[test]
fn parts_of_a_wildcard_do_not_overlap() {
    let rules = rules("[{key: k, value: ab*ba, rate_limit: {unit: day, requests_per_unit: 1}}]");
    for (value, matches) in
        [("abba", true), ("ab-ba", true), ("aba", false), ("ab", false), ("abab", false)]
    {
        assert_eq!(rules.find("d", [("k", value)]).is_some(), matches, "{value}");
    }
}

#[test]
fn key_and_value_are_matched_as_one_text() {
    let rules = rules("[{key: a_b, rate_limit: {unit: day, requests_per_unit: 1}}]");
    let whole = rules.find("d", [("a_b", "x")]).expect("by the key");
    let split = rules.find("d", [("a", "b")]).expect("by key and value");
    assert_eq!(whole.rule.path, split.rule.path);
    assert_ne!(whole.key, split.key);
}

#[test]
fn values_of_a_wildcard_have_separate_counters() {
    let rules = sample();
    assert_eq!(found(&rules, &[("path", "/api/a")]).key, "edge|path=/api/a");
    assert_eq!(found(&rules, &[("path", "/api/b")]).key, "edge|path=/api/b");
}

#[test]
fn values_share_a_counter_with_share_threshold() {
    let rules = sample();
    let (a, b) = (("file", "files/a.pdf"), ("file", "files/b/c.csv"));
    assert_eq!(found(&rules, &[a]).key, "edge|file=files/*");
    assert_eq!(found(&rules, &[b]).key, "edge|file=files/*");
    assert_eq!(found(&rules, &[a, ("user", "ann")]).key, "edge|file=files/*|user=ann");
    assert_eq!(found(&rules, &[b, ("user", "ann")]).key, "edge|file=files/*|user=ann");
    assert_eq!(found(&rules, &[b, ("user", "bob")]).key, "edge|file=files/*|user=bob");
}

#[test]
fn metrics_are_named_like_the_statistics_of_ratelimit() {
    let rules = sample();
    for (entries, name) in [
        (&[("remote_address", "198.51.100.1")][..], "edge.remote_address"),
        (&[("remote_address", "203.0.113.66")], "edge.remote_address_203.0.113.66"),
        (
            &[("message_type", "marketing"), ("to_number", "1")],
            "edge.message_type_marketing.to_number",
        ),
        (&[("path", "/api/v1/items")], "edge.path_/api/*"),
        (&[("file", "files/a.pdf")], "edge.file_files/*"),
        // value_to_metric adds the value, except where values share a counter.
        (
            &[("route", "cart"), ("method", "POST"), ("user", "ann")],
            "edge.route_cart.method_POST.user",
        ),
        (&[("shared_route", "api/v1"), ("method", "GET")], "edge.shared_route_api/*.method"),
        // detailed_metric adds every value, except where values share a counter.
        (&[("tenant", "acme"), ("user", "ann")], "edge.tenant_acme.user_ann"),
        (&[("tenant", "acme"), ("user", "")], "edge.tenant_acme.user"),
        (&[("file", "files/a.pdf"), ("user", "ann")], "edge.file_files/*.user_ann"),
    ] {
        assert_eq!(metric(&rules, entries), name);
    }
}

#[test]
fn modes_names_and_replacements_are_loaded() {
    let rules = sample();
    let vip = found(&rules, &[("message_type", "marketing"), ("to_number", "2061234567")]).rule;
    assert_eq!(vip.mode, RuleMode::Shadow);
    assert_eq!(vip.name.as_deref(), Some("marketing-to-vip"));
    assert_eq!(vip.replaces, ["marketing", "marketing-to-one"]);
    let backend = found(&rules, &[("backend", "reserved")]).rule;
    assert_eq!(backend.mode, RuleMode::Quota);
    assert_eq!((backend.name.as_deref(), backend.replaces.as_slice()), (None, &[][..]));
}

#[test]
fn rules_are_listed_in_file_order_and_domains_by_name() {
    let rules = sample();
    assert_eq!(rules.rules().count(), SAMPLE.matches("rate_limit:").count());
    let first: Vec<&str> = rules.rules().take(2).map(|rule| rule.path.as_str()).collect();
    assert_eq!(first, ["edge.remote_address", "edge.remote_address_203.0.113.66"]);
    let files =
        ["domain: b", "domain: a\ndescriptors:\n"].map(|text| (text.to_owned(), text.to_owned()));
    let two = Rules::load(&files, Algorithm::FixedWindow, &BTreeMap::new()).expect("two domains");
    assert_eq!(two.domains().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn units_have_fixed_lengths() {
    for (unit, seconds) in
        Unit::ALL.into_iter().zip([1, 60, 3_600, 86_400, 604_800, 2_592_000, 31_536_000])
    {
        let name = unit.as_str();
        let rules =
            rules(&format!("[{{key: k, rate_limit: {{unit: {name}, requests_per_unit: 3}}}}]"));
        let quota = Quota::fixed_window(3, Duration::from_secs(seconds)).expect("valid");
        assert_eq!(found(&rules, &[("k", "v")]).rule.limit, Limit::Quota(unit, quota), "{name}");
    }
}

#[test]
fn window_may_span_several_units() {
    let rules = rules(
        "[{key: k, rate_limit: {unit: minute, unit_multiplier: 10, requests_per_unit: 3}},
          {key: never, rate_limit: {unit: hour, unit_multiplier: 2, requests_per_unit: 0}}]",
    );
    let quota = Quota::fixed_window(3, Duration::from_secs(600)).expect("valid");
    assert_eq!(found(&rules, &[("k", "v")]).rule.limit, Limit::Quota(Unit::Minute, quota));
    let two_hours = Limit::Zero(Unit::Hour, Duration::from_secs(7_200));
    assert_eq!(found(&rules, &[("never", "v")]).rule.limit, two_hours);
}

#[test]
fn algorithm_of_a_named_rule_takes_precedence() {
    let files = [("rules.yaml".to_owned(), SAMPLE.to_owned())];
    let algorithms = BTreeMap::from([("marketing".to_owned(), Algorithm::TokenBucket)]);
    let rules =
        Rules::load(&files, Algorithm::SlidingCounter, &algorithms).expect("the sample loads");
    for rule in rules.rules() {
        let Limit::Quota(_, quota) = &rule.limit else { continue };
        let named = rule.name.as_deref() == Some("marketing");
        assert_eq!(quota.algorithm() == Algorithm::TokenBucket, named, "{}", rule.path);
        assert_eq!(quota.algorithm() == Algorithm::SlidingCounter, !named, "{}", rule.path);
    }
}

#[test]
fn units_in_flight_have_a_lease_as_long_as_the_window_within_bounds() {
    let load = |unit: &str, requests: u64| {
        let rule = format!("{{name: n, unit: {unit}, requests_per_unit: {requests}}}");
        let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {rule}}}]");
        Rules::load(&[("f".to_owned(), text)], Algorithm::Concurrency, &BTreeMap::new())
    };
    for (unit, seconds) in [("second", 60), ("minute", 60), ("hour", 3_600), ("year", 3_600)] {
        let rules = load(unit, 5).expect("valid");
        let rule = &found(&rules, &[("k", "v")]).rule;
        let Limit::Quota(_, quota) = &rule.limit else { panic!("{rule:?}") };
        assert!(rule.limit.is_concurrency() && quota.limit() == 5);
        assert_eq!(quota.holds().ttl(), Duration::from_secs(seconds), "{unit}");
    }
    let none = load("hour", 0).expect("valid");
    assert!(matches!(found(&none, &[("k", "v")]).rule.limit, Limit::Zero(..)));
    let error = load("hour", 1_000_001).expect_err("too many").to_string();
    assert!(error.contains("rate_limit.requests_per_unit: limit 1000001 is too large"), "{error}");
}

#[test]
fn holds_of_a_rule_fit_its_algorithm_and_its_limit() {
    let rule = "{name: n, unit: hour, requests_per_unit: 5}";
    let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {rule}}}]");
    let set = |algorithm: Algorithm, holds: RuleHolds| {
        let files = [("f".to_owned(), text.clone())];
        let mut rules = Rules::load(&files, algorithm, &BTreeMap::new()).expect("valid");
        rules.set_holds("n", holds).map(|()| rules)
    };
    let (window, in_flight) = (Algorithm::FixedWindow, Algorithm::Concurrency);
    let second = Some(Duration::from_secs(1));
    let release = Some(OnExpire::Release);
    for (algorithm, reserve, ttl, on_expire, seconds) in [
        (window, Some(5), None, release, 3_600),
        (window, Some(1), second, None, 1),
        (in_flight, None, second, None, 1),
        (in_flight, None, None, None, 3_600),
    ] {
        let rules = set(algorithm, RuleHolds { reserve, ttl, on_expire }).expect("valid");
        let rule = &found(&rules, &[("k", "v")]).rule;
        let Limit::Quota(_, quota) = &rule.limit else { panic!("{rule:?}") };
        assert_eq!(rule.reserve, reserve);
        assert_eq!(quota.holds().ttl(), Duration::from_secs(seconds));
        assert_eq!(quota.holds().on_expire(), on_expire.unwrap_or_default());
    }
    for (algorithm, reserve, on_expire, message) in [
        (window, Some(6), None, "reserve is 6, but the rule admits at most 5"),
        (window, None, release, "reserve is missing"),
        (window, None, None, "reserve is missing"),
        (in_flight, Some(1), None, "has no reserve and no on_expire"),
        (in_flight, None, release, "has no reserve and no on_expire"),
    ] {
        let error = set(algorithm, RuleHolds { reserve, ttl: None, on_expire });
        let error = error.expect_err("invalid");
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn algorithm_for_an_unknown_rule_is_an_error_with_the_known_names() {
    let error = |text: &str| {
        let algorithms = BTreeMap::from([("exprot".to_owned(), Algorithm::TokenBucket)]);
        let files = [("rules.yaml".to_owned(), text.to_owned())];
        Rules::load(&files, Algorithm::FixedWindow, &algorithms).expect_err("an error").to_string()
    };
    assert_eq!(
        error(SAMPLE),
        "envoy.algorithms: no rule is named \"exprot\": \
         the names in the files are marketing, marketing-to-one, marketing-to-vip"
    );
    assert!(error("domain: d").ends_with("no rule of the files has a rate_limit.name"));
}

#[test]
fn limit_that_the_algorithm_does_not_support_is_an_error() {
    let text = "domain: d\ndescriptors:\n- key: k\n  rate_limit:\n    unit: day\n    \
                requests_per_unit: 10000001\n";
    let files = [("rules.yaml".to_owned(), text.to_owned())];
    assert!(Rules::load(&files, Algorithm::FixedWindow, &BTreeMap::new()).is_ok());
    let error = Rules::load(&files, Algorithm::SlidingLog, &BTreeMap::new())
        .expect_err("too large")
        .to_string();
    assert!(
        error.starts_with(
            "rules.yaml:5: rate_limit.requests_per_unit: limit 10000001 is too large for"
        ),
        "{error}"
    );
}

#[test]
fn errors_have_the_line_and_a_fix() {
    let limit =
        |fields: &str| format!("domain: d\ndescriptors:\n- key: k\n  rate_limit:\n{fields}");
    for (text, error) in [
        (String::new(), "rules.yaml: domain is missing or empty: write the domain"),
        ("domain: ''".to_owned(), "rules.yaml: domain is missing or empty"),
        ("domain: d\ndescriptors:\n- value: v".to_owned(), "rules.yaml:3: key is missing or empty"),
        ("domain: d\ndescriptors:\n- key:".to_owned(), "rules.yaml:3: key is missing or empty"),
        (
            "domain: d\ndescriptors:\n- key: k\n  value: v\n- key: k_v".to_owned(),
            "rules.yaml:5: descriptor \"d.k_v\" is already defined at rules.yaml:3: merge the two",
        ),
        (
            "domain: d\ndescriptors:\n- {key: k, value: v, share_threshold: true}".to_owned(),
            "rules.yaml:3: share_threshold needs a wildcard to share: write a value with a *",
        ),
        (
            limit("    requests_per_unit: 1"),
            "rules.yaml:5: rate_limit.unit is missing: it must be one of second, minute,",
        ),
        (
            limit("    unit: ''\n    requests_per_unit: 1"),
            "rules.yaml:5: rate_limit.unit is missing",
        ),
        (
            limit("    unit: fortnight"),
            "rules.yaml:5: unit: \"fortnight\" is not a unit: it must be one of second, minute,",
        ),
        (
            limit("    unit: day\n    requests_per_unit: -1"),
            "rules.yaml:6: requests_per_unit: must be a whole number from 0 to 4294967295",
        ),
        (
            limit("    unit: day\n    requests_per_unit: 4294967296"),
            "rules.yaml:6: requests_per_unit: must be a whole number",
        ),
        (
            limit("    unit: day\n    requests_per_unit: many"),
            "rules.yaml:6: requests_per_unit: must be a whole number",
        ),
        (
            limit("    unit: day\n    unit_multiplier: 0\n    requests_per_unit: 1"),
            "rules.yaml:6: unit_multiplier: must be a whole number from 1 to 4294967295",
        ),
        (
            limit("    unit: year\n    unit_multiplier: 2\n    requests_per_unit: 1"),
            "rules.yaml:5: rate_limit.unit and unit_multiplier: window",
        ),
        (
            limit("    unlimited: true\n    unit: day"),
            "rules.yaml:5: rate_limit has both unlimited and the unit day: remove one of them",
        ),
        (
            limit("    unlimited: true\n    replaces: [{}]"),
            "rules.yaml:5: rate_limit.replaces has an entry without a name",
        ),
        (
            limit("    unlimited: true\n    name: n\n    replaces: [{name: n}]"),
            "rules.yaml:5: rate_limit.replaces has the rule's own name \"n\"",
        ),
        (
            limit("    unlimted: true"),
            "rules.yaml:5: unknown field `unlimted`, expected one of unit, requests_per_unit,",
        ),
        (
            "domain: d\ndescriptors:\n- key: k\n  shadow_mode: maybe".to_owned(),
            "rules.yaml:4: shadow_mode: must be true or false",
        ),
        (
            "domain: d\ndescriptors: [{key: é, quota_mode: 3}]".to_owned(),
            "rules.yaml:2: quota_mode: must be true or false",
        ),
        (
            "domain: d\ndescriptors: none".to_owned(),
            "rules.yaml:2: descriptors: expected sequence start",
        ),
        ("domain: d\ndescriptors:\n- k".to_owned(), "rules.yaml:3: expected mapping start"),
        ("domain: [".to_owned(), "rules.yaml:1: "),
    ] {
        let message = load_error(&text);
        assert!(message.starts_with(error), "{text}\n{message}");
        assert!(!message.contains('\n') && !message.contains("column"), "{message}");
    }
}

#[test]
fn yaml_that_ratelimit_accepts_is_accepted() {
    let text = "\
domain: 7
descriptors:
- key: on
  value: 0.50
  shadow_mode: yes
  rate_limit: &default {unit: Hour, requests_per_unit: 010}
  descriptors:
- key: other
  value:
  quota_mode: ~
  rate_limit:
    <<: *default
    requests_per_unit: 1_000
- key: none
  rate_limit:
";
    let rules = load(&format!("\u{feff}{}", text.replace('\n', "\r\n"))).expect("it loads");
    assert_eq!(rules.domains().collect::<Vec<_>>(), ["7"]);
    assert_eq!(limit_of(&rules, &[("on", "0.50")]), (8, Unit::Hour));
    assert_eq!(limit_of(&rules, &[("other", "x")]), (1000, Unit::Hour));
    assert!(rules.find("7", [("none", "x")]).is_none());
}

#[test]
fn alias_may_be_used_by_a_thousand_rules() {
    let mut text = "domain: d\ndescriptors:\n".to_owned();
    text.push_str(&"# a comment\n".repeat(100));
    for number in 0..1000 {
        let limit = if number == 0 { "&limit {unit: day, requests_per_unit: 9}" } else { "*limit" };
        let _ = writeln!(text, "- key: k{number}\n  rate_limit: {limit}");
    }
    assert_eq!(limit_of(&load(&text).expect("it loads"), &[("k999", "")]), (9, Unit::Day));
}

#[test]
fn files_that_would_exhaust_memory_are_rejected() {
    let deep = format!("domain: d\ndescriptors: {}", "[{key: k, descriptors: ".repeat(10_000));
    assert!(
        load_error(&deep).starts_with("rules.yaml:2: YAML document too large or too complex"),
        "{}",
        load_error(&deep)
    );
    let mut deep_block = "domain: d\ndescriptors:\n".to_owned();
    for indent in (0..200).map(|depth| " ".repeat(2 * depth)) {
        let _ = writeln!(deep_block, "{indent}- key: k\n{indent}  descriptors:");
    }
    assert!(load_error(&deep_block).contains("YAML document too large or too complex"));

    let mut bomb =
        "domain: d\ndescriptors:\n- key: k0\n  descriptors: &a0 [{key: a}, {key: b}]\n".to_owned();
    for level in 1..25 {
        let twice = ["a", "b"]
            .map(|key| format!("{{key: {key}, descriptors: *a{}}}", level - 1))
            .join(", ");
        let _ = writeln!(bomb, "- key: k{level}\n  descriptors: &a{level} [{twice}]");
    }
    assert!(
        load_error(&bomb).contains("YAML document too large or too complex"),
        "{}",
        load_error(&bomb)
    );

    let long = format!("domain: d\ndescriptors:\n- key: {}", "k".repeat(MAX_TEXT_BYTES + 1));
    assert_eq!(load_error(&long), "rules.yaml:3: key: has 4097 bytes: at most 4096 are allowed");
    let large = "#".repeat(MAX_FILE_BYTES + 1);
    assert_eq!(load_error(&large), "rules.yaml: has 16777217 bytes: at most 16777216 are allowed");
}

#[test]
fn different_descriptors_have_different_keys() {
    let parts = [
        "", "a", "b", "|", "=", "%", "a=b", "a|b", "a|b=c", "%7C", "%25", "\n", "%0A", "\u{85}",
        "é",
    ];
    let mut descriptors = Vec::new();
    for (first, second) in parts.iter().flat_map(|first| parts.map(|second| (*first, second))) {
        descriptors.push(("d", vec![(first, second)]));
        descriptors.push(("d|a=b", vec![(first, second)]));
        descriptors.extend(parts.map(|third| ("d", vec![(first, second), (third, "a")])));
        descriptors.extend(parts.map(|third| ("d", vec![("a", first), (second, third)])));
    }
    let mut descriptor_of_key = HashMap::new();
    for descriptor in &descriptors {
        let key = counter_key(descriptor.0, descriptor.1.iter().copied());
        assert!(Key::new(&key).is_ok(), "{key:?}");
        let other = descriptor_of_key.insert(key, descriptor);
        assert!(other.is_none_or(|other| other == descriptor), "{other:?} and {descriptor:?}");
    }
}

#[test]
fn long_keys_are_shortened_and_stay_distinct() {
    let key = |value: &str| counter_key("d", [("k", value)]);
    let fits = "v".repeat(MAX_KEY_BYTES - "d|k=".len());
    assert_eq!(key(&fits), format!("d|k={fits}"));
    let long = format!("{fits}!");
    assert_ne!(key(&long), key(&format!("{fits}?")));
    assert_ne!(
        key(&long),
        key(key(&long).trim_start_matches("d|k=")),
        "a value that imitates a shortened key"
    );
    for value in
        [long.as_str(), &"é".repeat(300), &"\u{10ffff}".repeat(10_000), &"\n".repeat(10_000)]
    {
        assert!(key(value).len() > MAX_KEY_BYTES - 40);
        assert!(Key::new(&key(value)).is_ok());
    }
}

#[test]
fn shortened_keys_are_stable_across_releases() {
    let key = counter_key("d", [("k", "v".repeat(600).as_str())]);
    assert_eq!(key, format!("d|k={}%~261ffdbf111bf32794a8e110ea38ae30", "v".repeat(474)));
}

#[test]
fn paths_and_metrics_are_valid_policy_names() {
    let long = "v".repeat(1000);
    let by_path = format!("{{key: \"k\\n\", value: {long}, rate_limit: {{unlimited: true}}}}");
    let by_metric = "{key: m, detailed_metric: true, rate_limit: {unlimited: true}}";
    let rules = rules(&format!("[{by_path}, {by_metric}]"));
    for entries in [[("k\n", long.as_str())], [("m", long.as_str())], [("m", "\r\n")]] {
        let found = found(&rules, &entries);
        assert!(Key::new(&found.rule.path).is_ok() && Key::new(&found.metric).is_ok(), "{found:?}");
    }
}
