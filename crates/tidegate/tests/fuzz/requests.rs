//! Cookies, queries and headers: a spelling that an application reads as the same value is the same
//! key, and no key is part of an error.

use std::time::Duration;

use axum::extract::Query;
use http::request::Parts;
use http::{HeaderValue, Request, Uri};
use tidegate::layer::RequestParts;
use tidegate::{Attributes as _, ClientIp, Policy, Quota};

use crate::{fuzz, key_of};

/// Two headers in two lines, which an application may read as one.
const COOKIES: [&str; 16] = [
    "session=X; a=b\nsession=X",
    "session =X\nsession= X",
    "session=\"X\"\na; session=X;",
    "session=\"\\130\"\nsession=%58",
    "session=\"a\\04541\"\nsession=a%41",
    "session=X\u{a0}\nsession=X",
    "session\u{a0}=X\nsession=X",
    "session=\u{2003}X\nsession=X",
    "=; ;;session=X=Y\nsession=X=Y",
    "a=\"; session=X; b=\"\nsession=X",
    "session=X; session=Y\nsession=Y",
    "session=\"X\nsession=X\"",
    "session=\"\\X\\\"\"\nsession=X\\",
    "session=%FF%\nsession=%ff%",
    "Session=X\n$session=X",
    "session=\nsession",
];
const COOKIE_PIECES: [&str; 24] = [
    "session=X",
    "session",
    "=",
    ";",
    "; ",
    " ",
    "\t",
    "\"",
    "\\",
    "\\130",
    "%58",
    "%",
    "X",
    "a",
    "a=b",
    "\n",
    "\u{a0}",
    "\u{2003}",
    "\u{feff}",
    "é",
    "\\045",
    "%25",
    ",",
    "\\\"",
];

fn head(uri: &str, headers: &[(&'static str, &[u8])]) -> Option<Parts> {
    let mut request = Request::builder().uri(uri.parse::<Uri>().ok()?);
    for (name, value) in headers {
        request = request.header(*name, HeaderValue::from_bytes(value).ok()?);
    }
    Some(request.body(()).ok()?.into_parts().0)
}

/// Result of a policy for a request.
#[derive(Debug, PartialEq, Eq)]
enum Counted {
    Key(String),
    Missing,
    Rejected,
}

fn counted(policy: &Policy, head: &Parts) -> Counted {
    let client_ip = ClientIp::default();
    match policy.select(&RequestParts::new(head, None, &client_ip), None) {
        Err(error) => {
            assert!(!error.to_string().contains("S3CR3T"), "{error}");
            Counted::Rejected
        }
        Ok(selection) => selection
            .charges
            .first()
            .and_then(|charge| charge.key())
            .map_or(Counted::Missing, |key| Counted::Key(key.to_owned())),
    }
}

fn policy(source: &str) -> Policy {
    let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
    Policy::builder("p", quota).key([source]).build().expect("a policy")
}

/// Python's `str.strip`.
fn strip(text: &str) -> &str {
    text.trim_matches(|it: char| it.is_whitespace() || ('\x1c'..='\x1f').contains(&it))
}

/// Python's `http.cookies._unquote`.
fn unquote(value: &str) -> String {
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let Some(mut rest) = inner else { return value.to_owned() };
    let mut text = String::new();
    while let Some((before, after)) = rest.split_once('\\') {
        text.push_str(before);
        let octal = after.get(..3).filter(|digits| {
            digits.starts_with(['0', '1', '2', '3']) && digits.chars().all(|it| it.is_digit(8))
        });
        let code = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let (character, used) = match (code, after.chars().next()) {
            (Some(code), _) => (char::from(code), 3),
            (None, Some(next)) => (next, next.len_utf8()),
            (None, None) => ('\\', 0),
        };
        text.push(character);
        rest = &after[used..];
    }
    text + rest
}

/// JavaScript's `decodeURIComponent`; `None` if it throws.
fn decode_uri_component(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let digits = str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| !digits.contains('+'))?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

/// How applications read a cookie header: all values of `session`.
type Framework = fn(&[u8]) -> Vec<String>;

fn pairs(header: &str, trim: fn(&str) -> &str) -> Vec<&str> {
    let pairs = header.split(';').filter_map(move |pair| pair.split_once('='));
    pairs.filter(|(name, _)| trim(name) == "session").map(|(_, value)| value).collect()
}

fn latin_1(header: &[u8]) -> String {
    header.iter().copied().map(char::from).collect()
}

const FRAMEWORKS: [(&str, Framework); 4] = [
    ("Django", |header| {
        let text = String::from_utf8_lossy(header);
        pairs(&text, strip).into_iter().map(|value| unquote(strip(value))).collect()
    }),
    ("Starlette", |header| {
        let text = latin_1(header);
        pairs(&text, strip).into_iter().map(|value| unquote(strip(value))).collect()
    }),
    ("Express", |header| {
        let text = latin_1(header);
        let plain = pairs(&text, str::trim).into_iter().map(|value| {
            let value = value.trim();
            let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
            let value = inner.unwrap_or(value);
            decode_uri_component(value).unwrap_or_else(|| value.to_owned())
        });
        // Whether it decodes depends on other escapes of the value.
        plain.filter(|value| !value.contains('%')).collect()
    }),
    ("Go", |header| {
        let text = latin_1(header);
        let trim: fn(&str) -> &str = |text| text.trim_matches([' ', '\t']);
        let plain = pairs(&text, trim).into_iter().map(|value| {
            let value = value.trim_matches([' ', '\t']);
            let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
            inner.unwrap_or(value).to_owned()
        });
        plain.filter(|value| !value.contains(['"', '\\'])).collect()
    }),
];

/// Whether a server may set this value (RFC 6265, 4.1.1). Others have no common reading.
fn is_cookie_value(value: &str) -> bool {
    !value.is_empty()
        && value.bytes().all(|byte| byte.is_ascii_graphic() && !b"\",;\\".contains(&byte))
}

#[test]
fn fuzz_cookies_that_an_application_reads_as_one_are_one_key() {
    let policy = policy("cookie.session");
    fuzz::bytes(&COOKIES, &COOKIE_PIECES, |input| {
        let mut lines = input.splitn(2, |byte| *byte == b'\n');
        let lines = [lines.next().unwrap_or_default(), lines.next().unwrap_or_default()];
        let heads = lines.map(|line| head("/", &[("cookie", line)]));
        let [Some(first), Some(second)] = &heads else { return };
        let counts = [counted(&policy, first), counted(&policy, second)];
        for (name, read) in FRAMEWORKS {
            let [first, second] = lines.map(read);
            for (values, count) in [&first, &second].into_iter().zip(&counts) {
                let has_value = values.iter().any(|value| is_cookie_value(value));
                assert!(!(has_value && *count == Counted::Missing), "{name} reads {values:?}");
            }
            let same = first.iter().find(|value| is_cookie_value(value) && second.contains(value));
            if let (Some(value), [Counted::Key(first), Counted::Key(second)]) = (same, &counts) {
                assert_eq!(first, second, "{name} reads {value:?} in both");
            }
        }
    });
}

#[test]
fn fuzz_cookies_take_linear_memory() {
    let policy = policy("cookie.session");
    fuzz::bytes(&COOKIES, &COOKIE_PIECES, |input| {
        let Some(head) = head("/", &[("cookie", input)]) else { return };
        let used = allocation_counter::measure(|| drop(counted(&policy, &head)));
        assert!(used.bytes_total <= 16 * input.len() as u64 + 1_024, "{used:?}");
    });
}

#[test]
fn fuzz_queries_are_read_as_forms_are() {
    const QUERIES: [&str; 7] = [
        "k=1",
        "a=b&k=rate+limit%21&k=2",
        "k",
        "%6b=%4&=x&&k=%C3%A9",
        "k=100%&k=",
        "k=%FF",
        "k=a=b",
    ];
    const PIECES: [&str; 14] =
        ["k", "=", "&", "+", "%", "%6b", "%6B", "%20", "%C3%A9", "%F", "a", "k=v", "&k=", ";"];
    fuzz::texts(&QUERIES, &PIECES, |query| {
        let Some(head) = head(&format!("/?{query}"), &[]) else { return };
        let Ok(Query(pairs)) = Query::<Vec<(String, String)>>::try_from_uri(&head.uri) else {
            return;
        };
        let values: Vec<&str> =
            pairs.iter().filter(|(name, _)| name == "k").map(|(_, value)| value.as_str()).collect();
        if pairs.iter().any(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}'))
        {
            return;
        }
        let client_ip = ClientIp::default();
        let request = RequestParts::new(&head, None, &client_ip);
        assert_eq!(request.get("query.k").as_deref(), values.first().copied(), "{query:?}");
        let differ = values.iter().any(|value| *value != values[0]);
        // A name after a semicolon, or with other characters around it, which some servers read.
        let is_similar = |(index, part): (usize, &str)| {
            let uri = format!("/?{part}").parse().expect("a part of a query");
            let Ok(Query(pairs)) = Query::<Vec<(String, String)>>::try_from_uri(&uri) else {
                return false;
            };
            let name = pairs.first().map_or("", |(name, _)| name.as_str());
            let letters = name.split('\0').next().unwrap_or_default().to_lowercase();
            let is_mark = |letter: char| letter.is_whitespace() || "._[]".contains(letter);
            letters.replace(is_mark, "") == "k" && (name != "k" || index > 0)
        };
        let is_similar = query.split('&').any(|pair| pair.split(';').enumerate().any(is_similar));
        assert_eq!(request.is_ambiguous("query.k"), differ || is_similar, "{query:?}");
    });
}

#[test]
fn fuzz_headers_have_one_normal_form() {
    const VALUES: [&str; 8] = [
        "Bearer S3CR3T",
        "bearer  S3CR3T",
        "BASIC\tx",
        "AWS4 a  b",
        " x ",
        "é\u{a0}",
        "Token",
        "a\u{7f}",
    ];
    const PIECES: [&str; 12] =
        ["Bearer", "bearer", "Basic", " ", "\t", "x", "S3CR3T", "\"", "é", "\u{a0}", ",", "DPoP "];
    fuzz::texts(&VALUES, &PIECES, |value| {
        for source in ["header.authorization", "header.proxy-authorization", "header.x-user-id"] {
            let Some(key) = key_of(source, value) else { continue };
            assert_eq!(key_of(source, &key).as_ref(), Some(&key), "{source} {value:?}");
            for spaced in [format!(" {value}\t"), format!("\t {value} ")] {
                assert_eq!(key_of(source, &spaced).as_ref(), Some(&key), "{source} {value:?}");
            }
            if let (Some((scheme, token)), true) =
                (value.trim().split_once(char::is_whitespace), source.contains("auth"))
            {
                let respelt = format!("{} \t{token}", scheme.to_ascii_uppercase());
                assert_eq!(key_of(source, &respelt).as_ref(), Some(&key), "{source} {value:?}");
            }
        }
        let policy = policy("header.authorization");
        let Some(head) = head("/", &[("authorization", value.as_bytes())]) else { return };
        // Reading a request and reading the text agree.
        match counted(&policy, &head) {
            Counted::Key(key) => assert_eq!(key_of("header.authorization", value), Some(key)),
            _ => assert_eq!(key_of("header.authorization", value), None),
        }
    });
}
