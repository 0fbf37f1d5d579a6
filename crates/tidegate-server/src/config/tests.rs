use proptest::prelude::*;

use super::*;

#[test]
fn the_sample_is_valid() {
    let config = Config::parse("sample.yaml", SAMPLE).expect("valid");
    assert!(config.policies.iter().count() > 0);
}

#[test]
fn what_the_documents_show_is_valid() {
    for document in [
        include_str!("../../../../docs/configuration.md"),
        include_str!("../../../../docs/redis.md"),
        include_str!("../../../../docs/gateway.md"),
        include_str!("../../../../README.md"),
    ] {
        let blocks: Vec<&str> =
            document.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert!(!blocks.is_empty());
        for block in blocks {
            // Files that they name are the reader's own.
            let block = block.replace("files: [ratelimit.yaml]", "files: []");
            match Config::parse("the document", &block) {
                Err(error) if error.to_string().contains(".pem: no certificate can be read") => {}
                Err(error) if error.to_string().contains(".pem: cannot be read") => {}
                result => assert!(result.is_ok(), "{block}\n{}", result.expect_err("wrong")),
            }
        }
    }
}

#[test]
fn a_truncated_file_never_panics_and_never_half_loads() {
    let policies = Config::parse("sample.yaml", SAMPLE).expect("valid").policies.iter().count();
    for end in (0..SAMPLE.len()).filter(|end| SAMPLE.is_char_boundary(*end)) {
        if let Ok(config) = Config::parse("sample.yaml", &SAMPLE[..end]) {
            assert!(config.policies.iter().count() <= policies);
        }
    }
}

fn error(text: &str) -> String {
    Config::parse("tidegate.yaml", text).expect_err("wrong").to_string()
}

#[test]
fn an_error_shows_file_line_field_and_the_nearest_right_name() {
    let text = error("policies:\n  - name: a\n    limt: 5\n    window: 60s\n");
    assert!(text.starts_with("tidegate.yaml:3:5: unknown field `limt`"), "{text}");
    assert!(text.contains("did you mean `limit`?"), "{text}");
    assert!(text.ends_with("  |\n3 |     limt: 5\n  |     ^"), "{text}");
}

#[test]
fn what_parses_but_cannot_work_is_shown_in_its_place_too() {
    let policy = |lines: &str| format!("policies:\n  - name: a\n    limit: 5\n    window: 60s\n{lines}");
    for (text, place, message) in [
        (policy("").replace("limit: 5", "limit: 0"), "tidegate.yaml:3:12:", "from 1 to 1000000000000"),
        (policy("").replace("60s", "60"), "tidegate.yaml:4:13:", "write it like 500ms"),
        (policy("    algorithm: tokn-bucket\n"), "tidegate.yaml:5:16:", "did you mean `token-bucket`?"),
        (policy("    burst: 9\n"), "tidegate.yaml:5:12:", "has no burst"),
        (policy("    mode: shadwo\n"), "tidegate.yaml:5:11:", "did you mean `shadow`?"),
        (policy("    cost: 6\n"), "tidegate.yaml:5:11:", "at most 5 at once"),
        (policy("    name: b\n"), "tidegate.yaml:5:5:", "`name` is there twice"),
        (policy("  - name: a\n    limit: 5\n    window: 60s\n"), "tidegate.yaml:", "used twice"),
        ("listen: {http: localhost}\n".to_owned(), "tidegate.yaml:1:16:", "127.0.0.1:8080"),
        ("listen: {admin: 0.0.0.0:9}\n".to_owned(), "tidegate.yaml:", "auth.admin_token"),
        ("policies: 5\n".to_owned(), "tidegate.yaml:1:11:", "policies: must be a list"),
    ] {
        let found = error(&text);
        assert!(found.starts_with(place) && found.contains(message), "{text}\n{found}");
    }
}

#[test]
fn no_error_shows_a_secret() {
    for text in [
        "store: {redis: 'redis://:hunter2@h', prefx: x}\n",
        "auth: {api_token: hunter2, admin_tokn: hunter2}\n",
        "auth:\n  api_token: [hunter2]\n",
        "store:\n  redis: {a: hunter2}\n",
    ] {
        let found = error(text);
        assert!(!found.contains("hunter2"), "{found}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_config_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Config::parse("any", &String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_change_to_a_good_file_is_a_config_or_an_error(at in 0..SAMPLE.len(), text in "[ -~\n]{0,6}") {
        prop_assume!(SAMPLE.is_char_boundary(at));
        let _ = Config::parse("any", &format!("{}{text}{}", &SAMPLE[..at], &SAMPLE[at..]));
    }
}
