//! Policies from a configuration text, and the cost that they charge.

use std::collections::BTreeMap;

use tidegate::Policies;

fn policies(lines: &str) -> Policies {
    let text = format!(
        "attributes: [tenant, c]\npolicies:\n  - name: p\n    limit: 100\n    window: 60s\n{lines}"
    );
    tidegate_config::parse_policies("limits.yaml", &text).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the cost of a request with these attributes.
fn cost(policies: &Policies, attributes: &[(&str, &str)]) -> u64 {
    let request: BTreeMap<String, String> =
        attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    policies.select(&request, None).expect("valid keys").charges.first().expect("a match").cost()
}

#[test]
fn cost_by_attribute_is_capped_by_the_quota_of_the_key() {
    let overrides = "    overrides: [{key: small, limit: 5}, {key: large, limit: 1000}]\n";
    let open = policies(&format!("    key: tenant\n    cost: {{attribute: c}}\n{overrides}"));
    let capped =
        policies(&format!("    key: tenant\n    cost: {{attribute: c, max: 50}}\n{overrides}"));
    for (tenant, by_quota, by_max) in [("small", 5, 5), ("other", 100, 50), ("large", 1000, 50)] {
        for much in ["5000", "18446744073709551616", "99999999999999999999999"] {
            let request = [("tenant", tenant), ("c", much)];
            assert_eq!(
                (cost(&open, &request), cost(&capped, &request)),
                (by_quota, by_max),
                "{tenant}, {much}"
            );
        }
        assert_eq!(cost(&open, &[("tenant", tenant), ("c", "nonsense")]), 1);
    }
}

#[test]
fn header_names_are_case_insensitive() {
    let policies = policies(
        "    match: {header.X-Plan: free}\n    key: header.X-User\n    cost: {attribute: header.X-Cost, max: 9}\n",
    );
    assert_eq!(
        cost(
            &policies,
            &[("header.x-plan", "free"), ("header.x-user", "u"), ("header.x-cost", "7")]
        ),
        7
    );
}

#[test]
fn errors_show_the_name_of_a_variable_and_not_its_value() {
    let value = std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    for field in ["window", "algorithm", "key", "missing_key"] {
        let usual =
            [("name", "p"), ("window", "60s")].into_iter().filter(|(name, _)| *name != field);
        let usual: Vec<String> = usual.map(|(name, value)| format!("{name}: {value}, ")).collect();
        let usual = usual.concat();
        let text =
            format!("policies:\n  - {{{usual}limit: 5, {field}: '${{CARGO_MANIFEST_DIR}} x'}}\n");
        let error = tidegate_config::parse_policies("limits.yaml", &text).err();
        let error = error.unwrap_or_else(|| panic!("{field} is valid")).to_string();
        assert!(!error.contains(&value) && error.contains("${CARGO_MANIFEST_DIR}"), "{error}");
    }
}

#[test]
fn empty_file_is_an_error() {
    let error =
        tidegate_config::parse_policies("limits.yaml", "# soon\n").expect_err("empty").to_string();
    assert!(error.starts_with("limits.yaml: is empty"), "{error}");
}

#[test]
fn sections_of_the_service_are_ignored_and_misspelt_own_sections_are_errors() {
    let text = "listen: {http: '127.0.0.1:8080'}\nanything: [1, 2]\npolicies: []\n";
    assert!(tidegate_config::parse_policies("tidegate.yaml", text).is_ok());
    assert!(error("polices: []\n").contains("did you mean `policies`?"));
    assert!(error("atributes: [tenant]\npolicies: []\n").contains("did you mean `attributes`?"));
    assert!(error("limits: []\n").contains("missing field `policies`"));
}

#[test]
fn errors_do_not_show_sections_of_the_service() {
    let found = error("policies: []\nstore: {redis: 'S3CR3T'\n");
    assert!(found.starts_with("limits.yaml:") && !found.contains("S3CR3T"), "{found}");
}

fn error(text: &str) -> String {
    tidegate_config::parse_policies("limits.yaml", text).expect_err("invalid").to_string()
}

#[test]
fn unknown_attribute_is_an_error_with_position_and_suggestion() {
    for (lines, position, message) in [
        ("match: {paths: /x}", "5:13: match: unknown attribute \"paths\"", "did you mean `path`?"),
        (
            "match:\n      ip: a\n      hots:\n        - b",
            "7:7: match: unknown attribute \"hots\"",
            "`host`",
        ),
        (
            "match: {tennant: acme}",
            "5:13: match: unknown attribute \"tennant\"",
            "did you mean `tenant`?",
        ),
        (
            "key: headers.x-user",
            "5:10: key: unknown attribute \"headers.x-user\"",
            "`header.x-user`",
        ),
        (
            "key: [ip, heder.x]",
            "5:15: key: unknown attribute \"heder.x\"",
            "did you mean `header.x`?",
        ),
        (
            "key:\n      - ip\n      - IP",
            "7:9: key: unknown attribute \"IP\"",
            "did you mean `ip`?",
        ),
        ("key: user", "5:10: key: unknown attribute \"user\"", "be declared in `attributes`\n"),
        (
            "cost: {max: 5, attribute: header-x}",
            "5:31: cost.attribute: unknown attribute \"header-x\"",
            "`header.x`",
        ),
        (
            "cost:\n      attribute: header.",
            "6:18: cost.attribute: \"header.\"",
            "a name is missing after the dot",
        ),
    ] {
        let text = format!(
            "attributes: [tenant]\npolicies:\n  - name: p\n    limit: 9\n    {lines}\n    window: 1s\n"
        );
        let found = error(&text);
        assert!(
            found.starts_with(&format!("limits.yaml:{position}")) && found.contains(message),
            "{lines}\n{found}"
        );
    }
}

#[test]
fn declared_attribute_names_are_checked() {
    for (list, position, message) in [
        ("[tenant, tenant]", "1:22:", "attributes: the attribute \"tenant\" is declared twice"),
        ("[tenant, '']", "1:22:", "is not an attribute name: it is empty"),
        ("[a b]", "1:14:", "it has a space or a control character"),
        ("[\"a\\u0007\"]", "1:14:", "it has a space or a control character"),
        ("[ip]", "1:14:", "\"ip\" cannot be declared: the name is built in"),
        ("[header.x-user]", "1:14:", "\"header.x-user\" cannot be declared: the name is built in"),
        ("[query]", "1:14:", "\"query\" cannot be declared: the name is built in"),
        ("tenant", "1:13:", "attributes: must be a list"),
    ] {
        let found = error(&format!("attributes: {list}\npolicies: []\n"));
        assert!(
            found.starts_with(&format!("limits.yaml:{position}")) && found.contains(message),
            "{list}\n{found}"
        );
    }
}

#[test]
fn declared_attributes_are_known_even_if_no_policy_uses_them() {
    let policies =
        tidegate_config::parse_policies("limits.yaml", "attributes: [tenant]\npolicies: []\n")
            .expect("valid");
    assert!(policies.check_attribute("tenant").is_ok());
    assert!(policies.check_attribute("plan").is_err());
}

#[test]
fn duplicate_condition_is_an_error() {
    let found = error("policies: [{name: p, limit: 1, window: 1s, match: {path: /a, path: /b}}]\n");
    assert!(found.contains("the field `path` is there twice"), "{found}");
}

/// A missing brace or quote makes the rest of the file one name or text.
#[test]
fn errors_do_not_quote_the_rest_of_the_file() {
    let rest = "words of the next lines\n".repeat(500);
    for text in [
        format!("policies:\n  - {{name: a, {rest}: 5}}\n"),
        format!("policies:\n  - {{name: a, limit: 5, window: \"60 {rest}\"}}\n"),
        format!("policies:\n  - {{name: a, limit: 5, window: 60s, key: \"{rest}\"}}\n"),
        format!("policies:\n  - {{name: a, {}x y: 5}}\n", "window: 60s, ".repeat(500)),
    ] {
        let error =
            tidegate_config::parse_policies("limits.yaml", &text).expect_err("wrong").to_string();
        assert!(error.len() < 2_000, "{} bytes: {error}", error.len());
    }
}
