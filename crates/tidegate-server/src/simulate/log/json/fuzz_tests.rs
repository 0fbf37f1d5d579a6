//! Fuzzing of JSON lines: the fast scan finds what the plain one finds, and both find what a
//! general JSON parser reads.

use std::cell::RefCell;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::*;
use crate::fuzz;

/// Lines as servers write them.
const SERVER_LINES: [&str; 4] = [
    r#"{"level":"info","ts":1794815048.123,"logger":"http.log.access","request":{"remote_ip":"203.0.113.9","client_ip":"203.0.113.8","method":"GET","host":"example.com","uri":"/a?b=\"c\"","headers":{"User-Agent":["curl"],"X-Plan":["free","\"gold\""]}},"status":200}"#,
    r#"{"ClientHost":"203.0.113.9","Duration":1834,"RequestHost":"example.com","RequestMethod":"GET","RequestPath":"/","StartLocal":"2026-11-16T08:44:08+01:00","StartUTC":"2026-11-16T07:44:08.5Z","request_X-Plan":"gold","time":"2026-11-16T07:44:09Z"}"#,
    r#"{"time":"2026-11-16T07:44:08.123Z","client":"2001:db8::1","method":"POST","target":"/\u00e9","host":"h","status":429,"referer":"","user_agent":"a \\ b"}"#,
    r#"{"time_iso8601":"2026-11-16T07:44:08+00:00","remote_addr":"10.0.0.1","request_method":"GET","request_uri":"/","http_host":"h"}"#,
];
/// Unusual lines.
const OTHER_LINES: [&str; 6] = [
    r#" { "ts" : 1 , "method" : "GET" , "target" : "/" , "request" : { } } "#,
    r#"{"ts":1,"ts":2,"m\u0065thod":"GET","target":"/","request":{"method":"PUT"},"request":1}"#,
    r#"{"time":[],"StartUTC":{"a":[1,{"b":"}"}]},"method":null,"target":"/"}"#,
    r#"{"request":{"headers":{"x-plan":1,"X-PLAN":[1,"a"]},"uri":"","method":""},"ts":"5"}"#,
    r#"{"ts":1e9,"method":"\ud83c\udf0a","target":"\"","request_x-plan":["a\\"]}"#,
    r#"{"@timestamp":"1794815048123","method":"GET","target":"/","headers":{}}"#,
];
const PIECES: [&str; 30] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\\"",
    "\\\\",
    "\\u0041",
    "\\ud800",
    "null",
    "true",
    "17",
    "-1.5",
    "1e3",
    " ",
    "\t",
    "\"ts\":",
    "\"time\":",
    "\"method\":",
    "\"target\":",
    "\"request\":{",
    "\"uri\":\"/\"",
    "\"headers\":{",
    "\"X-Plan\":",
    "\"client_ip\":\"::1\",",
    "é",
    "\"a\"",
];

fn all_lines() -> Vec<&'static str> {
    SERVER_LINES.into_iter().chain(OTHER_LINES).collect()
}

#[test]
fn lines_of_servers_are_scanned_fast() {
    for line in SERVER_LINES {
        assert!(compact::scan(line.as_bytes(), &mut Shape::default()).is_some(), "{line}");
    }
}

#[test]
fn fuzz_fast_scan_finds_what_the_plain_one_finds() {
    // The shape of one line must not change what is found in the next.
    let shape = RefCell::new(Shape::default());
    fuzz::bytes(&all_lines(), &PIECES, |line| {
        let known = compact::scan(line, &mut shape.borrow_mut());
        let new = compact::scan(line, &mut Shape::default());
        assert_eq!(known, new);
        if let Some(members) = known {
            assert_eq!(Ok(members), scan(line));
        }
    });
}

#[test]
fn fuzz_fields_are_those_of_a_full_parser() {
    fuzz::bytes(&all_lines(), &PIECES, |line| {
        let Ok(Node::Object(members)) = serde_json::from_slice::<Node>(line) else { return };
        let expected = Expected::of(&members);
        match parse(line, &mut Shape::default()) {
            Ok(fields) => expected.compare(line, &fields),
            Err(reason) => match &expected {
                _ if reason == "its JSON is nested too deep" => {}
                Expected { time: None, .. } => assert!(reason.starts_with("it has no time")),
                Expected { method: Some(_), target: Some(_), .. } => {
                    assert!(reason.starts_with("its time is neither"), "{reason}");
                }
                _ => {}
            },
        }
    });
}

/// JSON with all members of objects, in their order.
enum Node {
    Text(String),
    Number(f64),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
    Other,
}

impl Node {
    fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;
        #[expect(clippy::cast_precision_loss, reason = "compared with a tolerance")]
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
                Ok(Node::Other)
            }
            fn visit_u64<E>(self, number: u64) -> Result<Node, E> {
                Ok(Node::Number(number as f64))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Node, E> {
                Ok(Node::Number(number as f64))
            }
            fn visit_f64<E>(self, number: f64) -> Result<Node, E> {
                Ok(Node::Number(number))
            }
            fn visit_str<E>(self, text: &str) -> Result<Node, E> {
                Ok(Node::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(Node::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Node, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = object.next_entry()? {
                    members.push(member);
                }
                Ok(Node::Object(members))
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// Fields by their definition.
#[derive(Default)]
struct Expected<'n> {
    time: Option<&'n Node>,
    client: Option<&'n str>,
    remote: Option<&'n str>,
    method: Option<&'n str>,
    target: Option<&'n str>,
    host: Option<&'n str>,
    headers: Option<&'n [(String, Node)]>,
    members: &'n [(String, Node)],
}

impl<'n> Expected<'n> {
    fn of(members: &'n [(String, Node)]) -> Self {
        let mut found = Self { members, ..Self::default() };
        let (mut start, mut line_time) = (None, None);
        for (name, value) in members {
            match (name.as_str(), value) {
                ("request", Node::Object(request)) => found.add_request(request),
                ("StartUTC", value) => start = Some(value),
                ("ts" | "time" | "time_iso8601" | "StartLocal" | "@timestamp", value) => {
                    line_time = line_time.or(Some(value));
                }
                ("ClientHost" | "client" | "remote_addr", value) => found.remote = value.text(),
                ("RequestMethod" | "method" | "request_method", value) => {
                    found.method = value.text();
                }
                ("RequestPath" | "target" | "request_uri", value) => found.target = value.text(),
                ("RequestHost" | "host" | "http_host", value) => found.host = value.text(),
                _ => {}
            }
        }
        found.time = start.or(line_time);
        found
    }

    fn add_request(&mut self, members: &'n [(String, Node)]) {
        for (name, value) in members {
            match (name.as_str(), value) {
                ("client_ip", value) => self.client = value.text(),
                ("remote_ip", value) => self.remote = value.text(),
                ("method", value) => self.method = value.text(),
                ("uri", value) => self.target = value.text(),
                ("host", value) => self.host = value.text(),
                ("headers", Node::Object(headers)) => self.headers = Some(headers),
                ("headers", _) => self.headers = None,
                _ => {}
            }
        }
    }

    fn compare(&self, line: &[u8], fields: &Fields) {
        for (span, text, name) in [
            (fields.address, self.client.or(self.remote), "address"),
            (fields.method, self.method, "method"),
            (fields.target, self.target, "target"),
            (fields.host, self.host, "host"),
        ] {
            let found = (span != Span::default()).then(|| unescaped(span.of(line)));
            assert_eq!(found.as_deref(), text, "{name}");
        }
        match self.time {
            Some(Node::Text(text)) => assert_eq!(Some(fields.time), time::any(text.as_bytes())),
            Some(Node::Number(seconds)) if *seconds < 1e11 => {
                #[expect(clippy::cast_precision_loss, reason = "compared with a tolerance")]
                let found = fields.time as f64 / 1e6;
                assert!((found - seconds).abs() < 1e-4, "{found} {seconds}");
            }
            Some(Node::Number(_)) => {}
            _ => panic!("a time that is neither text nor a number"),
        }
        let mut values = Vec::new();
        for (name, value) in self.headers.unwrap_or(self.members) {
            let name =
                if self.headers.is_some() { Some(&**name) } else { name.strip_prefix("request_") };
            match value {
                _ if !name.is_some_and(|name| name.eq_ignore_ascii_case("x-plan")) => {}
                Node::Text(text) => values.push(&**text),
                Node::List(items) => values.extend(items.iter().filter_map(Node::text)),
                _ => {}
            }
        }
        let found = header(line, fields.headers, "x-plan");
        assert_eq!(found.0, values);
    }
}
