//! Fast parser of the most frequent query: `{"policy": "…", "key": "…"}` without escapes. Serde
//! takes four times as long.

use std::borrow::Cow;

use super::{QueryBody, Text};

/// Parses a query that has only a policy and a key. Returns `None` for any other body, which is
/// left to serde: other fields, escapes, and everything that is an error.
pub(super) fn parse(body: &[u8]) -> Option<QueryBody<'_>> {
    let mut rest = expect(body, b'{')?;
    let (mut policy, mut key) = (None, None);
    loop {
        let (name, after) = string(rest)?;
        let (value, after) = string(expect(after, b':')?)?;
        let field = match name {
            b"policy" => &mut policy,
            b"key" => &mut key,
            _ => return None,
        };
        if field.replace(Text(Cow::Borrowed(str::from_utf8(value).ok()?))).is_some() {
            return None;
        }
        match expect(after, b',') {
            Some(next) => rest = next,
            None => {
                rest = expect(after, b'}')?;
                break;
            }
        }
    }
    if !skip_whitespace(rest).is_empty() {
        return None;
    }
    Some(QueryBody { policy, key, attributes: None, quota: None, cost: None, age_ms: None })
}

/// Returns what follows a byte, after whitespace.
fn expect(text: &[u8], byte: u8) -> Option<&[u8]> {
    skip_whitespace(text).strip_prefix(&[byte])
}

/// Returns a string without escapes, and what follows it.
fn string(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = expect(text, b'"')?;
    let end = text.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..0x20))?;
    if text[end] == b'"' { Some((&text[..end], &text[end + 1..])) } else { None }
}

fn skip_whitespace(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..] = text {
        text = rest;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::Object;
    use super::*;

    /// Returns the debug output of the fast and of serde's result.
    fn parsed(body: &[u8]) -> (Option<String>, Option<String>) {
        let fast = parse(body).map(|query| format!("{query:?}"));
        let serde = serde_json::from_slice::<Object<QueryBody<'_>>>(body).ok();
        (fast, serde.map(|Object(query)| format!("{query:?}")))
    }

    #[test]
    fn frequent_queries_are_parsed() {
        for body in [
            r#"{"policy": "p", "key": "user123"}"#,
            r#"{"policy":"p","key":"user123"}"#,
            r#"{"key":"ü \u007f","policy":""}"#.replace("\\u007f", "\u{7f}").as_str(),
            "\n{\t\"key\" :\r\"k\" }  ",
        ] {
            let (fast, serde) = parsed(body.as_bytes());
            assert!(fast.is_some() && fast == serde, "{body}: {fast:?}, {serde:?}");
        }
    }

    #[test]
    fn other_bodies_are_left_to_serde() {
        for body in [
            "{}",
            r#"{"policy": "p", "key": "k", "cost": 1}"#,
            r#"{"policy": "p", "policy": "p"}"#,
            r#"{"policy": null, "key": "k"}"#,
            r#"{"policy": "p", "key": "\u0041"}"#,
            r#"{"policy": "p", "key": "k"} x"#,
            r#"{"policy": "p", "key": "k",}"#,
            r#"{"policy": "p" "key": "k"}"#,
            r#"{"pol\u0069cy": "p"}"#,
            r#"["p", "k"]"#,
            "{\"key\": \"a\nb\"}",
            "",
        ] {
            assert_eq!(parsed(body.as_bytes()).0, None, "{body}");
        }
        assert_eq!(parsed(b"{\"key\": \"\xff\"}"), (None, None));
    }

    #[test]
    fn mutated_queries_are_parsed_as_by_serde() {
        let valid = br#"{"policy": "p", "key": "user123"}"#;
        let bytes = b"{}\":,\\ \n\t\r\x00\x1f\x7f\xc3\xa9[]pkey0";
        for at in 0..valid.len() {
            for byte in bytes {
                let (mut changed, mut longer) = (valid.to_vec(), valid.to_vec());
                changed[at] = *byte;
                longer.insert(at, *byte);
                for body in [changed, longer, valid[..at].to_vec(), valid[at..].to_vec()] {
                    if let (Some(fast), serde) = parsed(&body) {
                        let body = String::from_utf8_lossy(&body);
                        assert_eq!(Some(fast), serde, "{body}");
                    }
                }
            }
        }
    }
}
