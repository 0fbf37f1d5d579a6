use std::time::Duration;

use super::*;

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
    let small = |cost| policy("a").cost(cost).override_for(["small"], quota(5));
    assert!(small(cost(1, 10)).build().is_ok(), "the small one takes 5 at most");
    assert!(error(small(cost(6, 10))).contains("at most 5"));
    assert!(error(small(Cost::Fixed(6))).contains("at most 5"));
    let twice = policy("a").override_for(["k"], quota(1)).override_for(["k"], quota(2));
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
