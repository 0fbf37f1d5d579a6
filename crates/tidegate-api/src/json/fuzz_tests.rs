//! Fuzzing of the JSON bodies: what is read is what a general JSON parser reads, and what is
//! written is JSON.

use std::time::Duration;

use serde_json::Value;

use super::*;
use crate::fuzz;

const SEEDS: [&str; 12] = [
    r#"{"policy": "p", "key": "k", "cost": 3}"#,
    r#"{"attributes": {"header.X-User": "U", "host": "A.Example.com:80", "Path": "/"}}"#,
    r#"{"key": "k", "quota": {"limit": 5, "window": "1s", "algorithm": "token-bucket"}}"#,
    r#"{"policy": "\u0070\n\ud83c\udf0a", "key": "\\\"", "age_ms": 1000}"#,
    r#"{"policy": "p", "key": "k", "id": "\u0061!", "actual": 0, "ttl_ms": 5000}"#,
    r#"{"key": "k", "id": "a", "quota": {"limit": 5, "algorithm": "concurrency", "hold": {"ttl": "1s"}}}"#,
    r#"["p", "k", null, null, 1]"#,
    r#"{"key": "k", "quota": ["sliding-log", null, null, 5, "1s", null]}"#,
    r#"{"attributes": {"header.A": "1", "header.a": "2"}}"#,
    r#"{"policy": "a", "policy": "b", "key": null}"#,
    r#"{"cost": 18446744073709551616, "key": "\ud800"}"#,
    r#"{"key": "k", "quota": {"limit": 0, "window": "99999999999999d", "count_denied": true}}"#,
];
const PIECES: [&str; 33] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "null",
    "true",
    "1",
    "-1",
    "1e3",
    "1.0",
    "\"policy\":",
    "\"key\":",
    "\"attributes\":",
    "\"quota\":",
    "\"cost\":",
    "\"id\":",
    "\"ttl_ms\":",
    "\"actual\":",
    "\"hold\":{\"max_ttl\":\"2s\",\"on_expire\":\"release\"}",
    "\"algorithm\":\"concurrency\"",
    "\"a\"",
    " ",
    "\"limit\":",
    "\"window\":\"1s\"",
    "\"header.A\":\"x\"",
    "é",
    "\u{2028}",
];

#[test]
fn fuzz_json_of_queries_is_read_as_other_parsers_read_it() {
    fuzz::bytes(&SEEDS, &PIECES, |bytes| {
        let Ok(Object(query)) = serde_json::from_slice::<Object<QueryBody<'_>>>(bytes) else {
            return;
        };
        let value: Value = serde_json::from_slice(bytes).expect("JSON");
        let fields = value.as_object().expect("an object");
        let text = |name: &str| fields.get(name).and_then(Value::as_str);
        assert_eq!(query.policy.as_deref(), text("policy"));
        assert_eq!(query.key.as_deref(), text("key"));
        assert_eq!(query.id.as_deref(), text("id"));
        for (read, name) in [
            (query.cost, "cost"),
            (query.age_ms, "age_ms"),
            (query.id_ttl_ms, "id_ttl_ms"),
            (query.ttl_ms, "ttl_ms"),
            (query.actual, "actual"),
        ] {
            assert_eq!(read, fields.get(name).and_then(Value::as_u64), "{name}");
        }
        for operation in Operation::OF_API {
            // A hold has the id of the query, and no field that the operation does not know.
            match query.hold(operation) {
                Err(error) => assert!(error.len() <= 512, "{error}"),
                Ok(hold) => {
                    let is_new = operation == Operation::Reserve && query.id.is_none();
                    let id = hold.as_ref().map(|hold| hold.id()).filter(|_| !is_new);
                    assert_eq!(id, query.id.as_deref(), "{operation:?}");
                    assert_eq!(is_new, hold.is_some() && query.id.is_none());
                    for (name, is_given) in [
                        ("cost", query.cost.is_some()),
                        ("ttl_ms", query.ttl_ms.is_some()),
                        ("id_ttl_ms", query.id_ttl_ms.is_some()),
                        ("actual", query.actual.is_some()),
                    ] {
                        let is_known = !is_given || operation.fields().contains(&name);
                        assert!(is_known, "{operation:?}: {name}");
                    }
                }
            }
        }
        let attributes = fields.get("attributes").and_then(Value::as_object);
        assert_eq!(
            query.attributes.as_ref().map(|attributes| attributes.0.len()),
            attributes.map(serde_json::Map::len),
            "no attribute is lost"
        );
        if let Some(Object(quota)) = query.quota {
            // Errors say what is wrong, in a bounded text.
            let error = quota.quota().err().unwrap_or_default();
            assert!(error.len() <= 512 + bytes.len(), "{error}");
        }
    });
}

#[test]
fn fuzz_json_of_decisions_is_read_as_it_was_written() {
    const NAMES: [&str; 6] =
        ["p", "with \"quotes\" and \\", "naïve", "🌊", "\u{7f}\0\n", "\u{2028}"];
    const PARTS: [&str; 9] = ["a", "\"", "\\", "\n", "\0", "é", "\u{2028}", "\u{1f}", "\u{7f}"];
    fuzz::texts(&NAMES, &PARTS, |name| {
        let number = name.bytes().fold(7_u64, |sum, byte| sum.rotate_left(7) ^ u64::from(byte));
        let decision = Decision::deny(number, Duration::from_micros(number >> 3))
            .with_remaining(number >> 1)
            .with_reset_after(Duration::from_micros(number >> 2));
        let json: Value = serde_json::from_slice(&decision_body(name, &decision)).expect("JSON");
        for entry in [&json, &json["decisions"][0]] {
            assert_eq!(entry["policy"].as_str(), Some(name));
            assert_eq!(entry["limit"].as_u64(), Some(decision.limit));
            assert_eq!(entry["remaining"].as_u64(), Some(decision.remaining));
            let wait = entry["retry_after_ms"].as_u64().expect("a number");
            assert!(Duration::from_millis(wait) >= decision.retry_after);
        }
    });
}
