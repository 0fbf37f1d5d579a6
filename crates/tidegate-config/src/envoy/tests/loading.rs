//! The expected limits are those of ratelimit's own loader with `gopkg.in/yaml.v2`, which was run on
//! these texts.

use prost_types::Value;
use prost_types::value::Kind;

use super::*;

fn load_files(files: &[(&str, &str)]) -> Result<Rules, RulesError> {
    let files: Vec<(String, String)> =
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
    Rules::load(&files, Algorithm::FixedWindow, &BTreeMap::new())
}

/// Returns the warnings about a text, and the limits of its rules.
fn loaded(text: &str) -> (Vec<String>, Vec<Option<(u64, Unit)>>) {
    let rules = load(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let limit = |rule: &Rule| match &rule.limit {
        Limit::Unlimited => None,
        limit => Some(requests_and_unit(limit)),
    };
    let warnings = rules.warnings().iter().map(ToString::to_string).collect();
    (warnings, rules.rules().map(limit).collect())
}

#[test]
fn what_ratelimit_loads_is_loaded_with_a_warning() {
    let below_k = |fields: &str| format!("domain: d\ndescriptors:\n- key: k\n{fields}");
    let (three, four) = (Some((3, Unit::Day)), Some((4, Unit::Day)));
    for (text, warning, limits) in [
        (
            below_k(
                "  rate_limit:\n    shadow_mode: true\n    unit: day\n    requests_per_unit: 3",
            ),
            "rules.yaml:5: shadow_mode has no effect here: it belongs to a descriptor",
            vec![three],
        ),
        (
            below_k("  name: n\n  rate_limit: {unit: day, requests_per_unit: 3}"),
            "rules.yaml:4: name has no effect here: it belongs into rate_limit",
            vec![three],
        ),
        (
            below_k("  domain: {key: 1}\n  rate_limit: {unit: day, requests_per_unit: 3}"),
            "rules.yaml:4: domain has no effect here: it belongs at the top of the file",
            vec![three],
        ),
        (
            format!("name: n\n{}", below_k("  rate_limit: {unit: day, requests_per_unit: 3}")),
            "rules.yaml:1: name has no effect here: it belongs into rate_limit",
            vec![three],
        ),
        (
            below_k("  rate_limit:\n    unit: day"),
            "rules.yaml:5: rate_limit.requests_per_unit is missing and counts as 0: every request",
            vec![Some((0, Unit::Day))],
        ),
        (
            below_k("  rate_limit: {unit: day, requests_per_unit: , unit_multiplier: }"),
            "rules.yaml:4: rate_limit.requests_per_unit is missing and counts as 0: every request",
            vec![Some((0, Unit::Day))],
        ),
        (
            below_k(
                "  rate_limit:\n    unit: day\n    requests_per_unit: 3\n    requests_per_unit: 4",
            ),
            "rules.yaml:7: requests_per_unit is written more than once: the last one counts",
            vec![four],
        ),
        (
            below_k("  rate_limit: {unit: hour, requests_per_unit: 3}\n  rate_limit: {unit: day}"),
            "rules.yaml:5: rate_limit is written more than once: each field counts as it is",
            vec![three],
        ),
        (
            below_k(
                "  rate_limit: {unit: day, requests_per_unit: 4, name: n}\n  \
                 rate_limit: {requests_per_unit: 3, name: }",
            ),
            "rules.yaml:5: rate_limit is written more than once: each field counts as it is",
            vec![three],
        ),
        (
            below_k("  rate_limit: {unit: hour, requests_per_unit: 3}\n  rate_limit:"),
            "rules.yaml:5: rate_limit is written more than once",
            vec![],
        ),
        (
            below_k("descriptors:\n- key: l\n  rate_limit: {unit: day, requests_per_unit: 3}"),
            "rules.yaml:4: descriptors is written more than once: the last one counts",
            vec![three],
        ),
        (
            below_k("  rate_limit: {unit: day, requests_per_unit: 3}\n---\ndomain: e"),
            "rules.yaml:6: this document is not loaded: only the first document of a file is",
            vec![three],
        ),
        (
            below_k("  rate_limit: {unit: day, requests_per_unit: 3}\n---\nfoo: [bar"),
            "rules.yaml:6: this document is not loaded: only the first document of a file is",
            vec![three],
        ),
        (
            below_k("  rate_limit: {unit: day, requests_per_unit: 3}\n...\ngarbage: ["),
            "rules.yaml:",
            vec![three],
        ),
        (
            below_k("  rate_limit: {unlimited: true, unit: bogus, requests_per_unit: 7}"),
            "rules.yaml:4: unit \"bogus\" has no effect: the limit is unlimited",
            vec![None],
        ),
    ] {
        let (warnings, found) = loaded(&text);
        assert_eq!(found, limits, "{text}");
        assert!(
            warnings.len() == 1 && warnings[0].starts_with(warning),
            "{text}\n{warnings:#?}\n{warning}"
        );
    }
}

#[test]
fn rule_with_a_misplaced_shadow_mode_is_enforced_as_in_ratelimit() {
    let misplaced = "[{key: k, rate_limit: {unit: day, requests_per_unit: 1, shadow_mode: true}}]";
    assert_eq!(found(&rules(misplaced), &[("k", "v")]).rule.mode, RuleMode::Enforce);
    let right = "[{key: k, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}]";
    assert_eq!(found(&rules(right), &[("k", "v")]).rule.mode, RuleMode::Shadow);
}

#[test]
fn numbers_and_words_are_read_as_in_ratelimit() {
    for (number, requests) in
        [("1_000", 1_000), ("010", 8), ("0x10", 16), ("0o10", 8), ("+5", 5), ("0", 0)]
    {
        let rules =
            rules(&format!("[{{key: k, rate_limit: {{unit: DAY, requests_per_unit: {number}}}}}]"));
        assert_eq!(limit_of(&rules, &[("k", "v")]), (requests, Unit::Day), "{number}");
        assert!(rules.warnings().is_empty());
    }
    for yes in ["true", "yes", "On", "y"] {
        let rules =
            rules(&format!("[{{key: k, shadow_mode: {yes}, rate_limit: {{unlimited: true}}}}]"));
        assert_eq!(found(&rules, &[("k", "v")]).rule.mode, RuleMode::Shadow, "{yes}");
    }
    for value in ["12", "true", "yes", "0x1F", "2001-01-01", "!!str 7", "\"a\\tb\""] {
        let rules =
            rules(&format!("[{{key: k, value: {value}, rate_limit: {{unlimited: true}}}}]"));
        let text = match value {
            "!!str 7" => "7",
            "\"a\\tb\"" => "a\tb",
            plain => plain,
        };
        assert!(rules.find("d", [("k", text)]).is_some(), "{value}");
    }
    for text in
        ["%YAML 1.1\n---\ndomain: d", "---\ndomain: d\n---\n", "domain: d\t\n", "\"domain\": d"]
    {
        assert_eq!(load(text).expect("it loads").warnings(), [], "{text}");
    }
}

#[test]
fn what_ratelimit_refuses_is_refused() {
    let below_k = |fields: &str| format!("domain: d\ndescriptors:\n- key: k\n{fields}");
    for text in [
        below_k("  rate_limit: {unit: day, requests_per_unit: -1}"),
        below_k("  rate_limit: {unit: day, requests_per_unit: 3.5}"),
        below_k("  rate_limit: {unit: day, requests_per_unit: 5000000000}"),
        below_k("  rate_limit: {}"),
        below_k("  rate_limit: {unlimited: true, unit: day}"),
        below_k("  value: [a]"),
        below_k("  metadata: [a]"),
        below_k("  shadow_mode: 1"),
        below_k("  Value: v"),
        below_k("  1: v"),
        "domain: d\ndescriptors:\n-\n- key: k".to_owned(),
        "domain: d\ndescriptors:\n  key: k".to_owned(),
        "Domain: d".to_owned(),
        String::new(),
    ] {
        assert!(load(&text).is_err(), "{text}");
    }
}

/// The features of ratelimit's own examples and tests.
#[test]
fn every_feature_of_ratelimit_is_loaded_without_a_warning() {
    let text = "
# Nested wildcards: only the outer one is shared, or both are.
domain: features
descriptors:
  - key: team
    value: team/*
    share_threshold: true
    descriptors:
      - key: file
        value: doc/*
        share_threshold: false
        descriptors:
          - {key: kind, rate_limit: {unit: minute, requests_per_unit: 1}}
      - key: picture
        value: p*g*f
        share_threshold: true
        rate_limit: {unit: minute, requests_per_unit: 2}
  - key: route
    value: /v1*end
    share_threshold: true
    value_to_metric: true
    rate_limit: {unit: minute, unit_multiplier: 5, requests_per_unit: 3}
  - {key: route, value: /v1-exact-end, rate_limit: {unit: minute, requests_per_unit: 4}}
  - key: tier
    value: gold
    quota_mode: true
    metadata: {name: gold, pool: {weight: 1}}
    rate_limit: {unit: year, requests_per_unit: 5, name: gold, replaces: [{name: x}, {name: y}]}
  - {key: open, rate_limit: {unlimited: true, name: open}}
  - {key: closed, rate_limit: {unit: second, requests_per_unit: 0}}
  - {key: listed, value: without-a-limit}
  - {key: tried, shadow_mode: true, detailed_metric: true, rate_limit: {unit: week, requests_per_unit: 6}}
";
    let rules = load(text).expect("it loads");
    assert_eq!(rules.warnings(), []);
    let key = |entries: &[(&str, &str)]| found(&rules, entries).key;
    assert_eq!(
        key(&[("team", "team/a"), ("file", "doc/b"), ("kind", "c")]),
        "features|team=team/*|file=doc/b|kind=c"
    );
    assert_eq!(
        key(&[("team", "team/a"), ("picture", "pngif")]),
        "features|team=team/*|picture=p*g*f"
    );
    assert_eq!(key(&[("route", "/v1/x/end")]), "features|route=/v1*end");
    assert_eq!(limit_of(&rules, &[("route", "/v1-exact-end")]).0, 4);
    let empty = load_files(&[("1.yaml", "domain: a\ndescriptors:\n"), ("2.yaml", "domain: b\n")]);
    assert_eq!(empty.expect("it loads").domains().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn files_of_a_domain_are_merged() {
    let key = |key: &str, requests: u64| {
        format!("- {{key: {key}, rate_limit: {{unit: day, requests_per_unit: {requests}}}}}\n")
    };
    let file =
        |domain: &str, descriptors: &str| format!("domain: {domain}\ndescriptors:\n{descriptors}");
    let first = file("d", &(key("one", 1) + &key("path_/a*", 10)));
    let other = file("e", &key("one", 5));
    let second = file("d", &(key("two", 2) + &key("path_/ab*", 20) + &key("path", 30)));
    let rules =
        load_files(&[("1.yaml", &first), ("2.yaml", &other), ("3.yaml", &second)]).expect("loaded");
    assert_eq!(rules.domains().collect::<Vec<_>>(), ["d", "e"]);
    let limit = |domain: &str, entry: (&str, &str)| {
        requests_and_unit(&rules.find(domain, [entry]).expect("a rule").rule.limit).0
    };
    assert_eq!((limit("d", ("one", "x")), limit("d", ("two", "x"))), (1, 2));
    assert_eq!(limit("e", ("one", "x")), 5);
    // Wildcards are tried in the order of the files.
    assert_eq!((limit("d", ("path", "/abc")), limit("d", ("path", "/b"))), (10, 30));
    assert!(rules.find("e", [("two", "x")]).is_none());
}

#[test]
fn descriptor_in_two_files_is_an_error_with_both_locations() {
    let first = "domain: d\n\ndescriptors:\n- key: k\n  value: v\n  descriptors: [{key: a}]";
    let second = "domain: d\ndescriptors:\n- key: l\n- key: k_v\n  descriptors: [{key: b}]";
    let error = load_files(&[("1.yaml", first), ("2.yaml", second)]).expect_err("twice");
    assert_eq!(
        error.to_string(),
        "2.yaml:4: descriptor \"d.k_v\" is already defined at 1.yaml:4: merge the two"
    );
}

#[test]
fn warnings_are_bounded_and_those_of_an_alias_are_shown_once() {
    let mut text = "domain: d\ndescriptors:\n".to_owned();
    for number in 0..1_000 {
        let limit = if number == 0 { "&limit {unlimited: true, key: x}" } else { "*limit" };
        let _ = writeln!(text, "- key: k{number}\n  rate_limit: {limit}");
    }
    let (warnings, _) = loaded(&text);
    assert_eq!(warnings, ["rules.yaml:4: key has no effect here: it belongs to a descriptor"]);
    let mut text = "domain: d\ndescriptors:\n".to_owned();
    for number in 0..500 {
        let _ = writeln!(text, "- key: k{number}\n  name: n");
    }
    let (warnings, _) = loaded(&text);
    assert_eq!(warnings.len(), 101);
    assert_eq!(warnings.last().expect("some"), "rules.yaml: 400 more warnings are not shown");
}

#[test]
fn metadata_is_loaded_as_a_protobuf_struct() {
    let rules = load(
        "domain: d
descriptors:
- key: k
  metadata: {a: 1, b: [true, x, {c: null}], 3: 1.5, t: 2001-01-01, a: 2}
  metadata: {z: last}
  rate_limit: {unlimited: true}
- key: l
  metadata:
  rate_limit: {unlimited: true}
",
    )
    .expect("it loads");
    let metadata = found(&rules, &[("k", "v")]).rule.metadata.clone().expect("metadata");
    let kind = |name: &str| metadata.fields[name].kind.clone().expect("a value");
    assert_eq!(kind("a"), Kind::NumberValue(2.0));
    assert_eq!(kind("3"), Kind::NumberValue(1.5));
    assert_eq!(kind("t"), Kind::StringValue("2001-01-01".to_owned()));
    assert_eq!(kind("z"), Kind::StringValue("last".to_owned()));
    let Kind::ListValue(list) = kind("b") else { panic!("a list") };
    assert_eq!(list.values[0], Value { kind: Some(Kind::BoolValue(true)) });
    assert_eq!(found(&rules, &[("l", "v")]).rule.metadata, None);
    let large =
        format!("domain: d\ndescriptors:\n- key: k\n  metadata: {{a: {}}}", "x".repeat(20_000));
    assert!(
        load_error(&large).starts_with("rules.yaml:4: metadata: has 20"),
        "{}",
        load_error(&large)
    );
}
