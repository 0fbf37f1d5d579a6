//! Policies from a file, and what they charge.

use std::collections::BTreeMap;

use tidegate::Policies;

fn policies(lines: &str) -> Policies {
    let text = format!("policies:\n  - name: p\n    limit: 100\n    window: 60s\n{lines}");
    Policies::from_yaml("limits.yaml", &text).unwrap_or_else(|error| panic!("{error}"))
}

/// What a request with these attributes is charged.
fn cost(policies: &Policies, attributes: &[(&str, &str)]) -> u64 {
    let request: BTreeMap<String, String> =
        attributes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    policies.select(&request, None).expect("sound keys").charges.first().expect("it applies").cost()
}

#[test]
fn a_cost_by_attribute_goes_up_to_what_the_key_may_take() {
    let overrides = "    overrides: [{key: small, limit: 5}, {key: large, limit: 1000}]\n";
    let open = policies(&format!("    key: tenant\n    cost: {{attribute: c}}\n{overrides}"));
    let capped = policies(&format!("    key: tenant\n    cost: {{attribute: c, max: 50}}\n{overrides}"));
    for (tenant, by_quota, by_max) in [("small", 5, 5), ("other", 100, 50), ("large", 1000, 50)] {
        for much in ["5000", "18446744073709551616", "99999999999999999999999"] {
            let request = [("tenant", tenant), ("c", much)];
            assert_eq!((cost(&open, &request), cost(&capped, &request)), (by_quota, by_max), "{tenant}, {much}");
        }
        assert_eq!(cost(&open, &[("tenant", tenant), ("c", "nonsense")]), 1);
    }
}

#[test]
fn headers_are_written_in_either_case() {
    let policies = policies(
        "    match: {header.X-Plan: free}\n    key: header.X-User\n    cost: {attribute: header.X-Cost, max: 9}\n",
    );
    assert_eq!(cost(&policies, &[("header.x-plan", "free"), ("header.x-user", "u"), ("header.x-cost", "7")]), 7);
}

#[test]
fn an_empty_file_has_no_policies_to_load() {
    let error = Policies::from_yaml("limits.yaml", "# soon\n").expect_err("empty").to_string();
    assert!(error.starts_with("limits.yaml: is empty"), "{error}");
}
