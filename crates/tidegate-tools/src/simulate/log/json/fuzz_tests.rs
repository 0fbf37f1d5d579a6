//! Fuzzing of JSON lines: the attributes are those of the members by their definition.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use tidegate::Attributes as _;

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

#[test]
fn fuzz_attributes_are_those_of_all_members() {
    let all_lines: Vec<&str> = SERVER_LINES.into_iter().chain(OTHER_LINES).collect();
    fuzz::bytes(&all_lines, &PIECES, |line| {
        let Ok(line) = str::from_utf8(line) else { return };
        let mut record = Record::default();
        let result = parse(line, &mut record);
        let Ok(Node::Object(members)) = serde_json::from_str::<Node>(line) else {
            // A full parser also decodes the members without a use.
            return;
        };
        let expected = Expected::of(&members);
        match result {
            Ok(()) => expected.compare(&record),
            Err(reason) => match &expected {
                Expected { time: None, .. } => assert!(reason.starts_with("it has no time")),
                Expected { method: Some(_), target: Some(_), .. } => {
                    assert!(reason.starts_with("its time is neither"), "{reason}");
                }
                _ => assert_ne!(reason, NOT_JSON),
            },
        }
    });
}

#[test]
fn lines_of_servers_are_requests() {
    for line in SERVER_LINES {
        assert_eq!(parse(line, &mut Record::default()), Ok(()), "{line}");
    }
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

    /// Sets a field to this value, if it is a text that is not empty.
    fn set<'n>(&'n self, field: &mut Option<&'n str>) {
        *field = self.text().filter(|text| !text.is_empty()).or(*field);
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
    /// Values of X-Plan.
    plans: Vec<&'n str>,
}

impl<'n> Expected<'n> {
    fn of(members: &'n [(String, Node)]) -> Self {
        let mut found = Self::default();
        let (mut start, mut line_time) = (None, None);
        for (name, value) in members {
            match name.as_str() {
                "request" => found.add_request(value),
                "StartUTC" => start = Some(value),
                "ts" | "time" | "time_iso8601" | "StartLocal" | "@timestamp" => {
                    line_time = line_time.or(Some(value));
                }
                "ClientHost" | "client" | "remote_addr" => value.set(&mut found.client),
                "RequestMethod" | "method" | "request_method" => value.set(&mut found.method),
                "RequestPath" | "target" | "request_uri" => value.set(&mut found.target),
                "RequestHost" | "host" | "http_host" => value.set(&mut found.host),
                _ => {
                    let header = name.strip_prefix("request_");
                    if header.is_some_and(|header| header.eq_ignore_ascii_case("x-plan")) {
                        found.add_plan(value);
                    }
                }
            }
        }
        found.time = start.or(line_time);
        found
    }

    fn add_request(&mut self, request: &'n Node) {
        let Node::Object(members) = request else { return };
        for (name, value) in members {
            match (name.as_str(), value) {
                ("client_ip", value) => value.set(&mut self.client),
                ("remote_ip", value) => value.set(&mut self.remote),
                ("method", value) => value.set(&mut self.method),
                ("uri", value) => value.set(&mut self.target),
                ("host", value) => value.set(&mut self.host),
                ("headers", Node::Object(headers)) => {
                    let plans =
                        headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("x-plan"));
                    plans.for_each(|(_, value)| self.add_plan(value));
                }
                _ => {}
            }
        }
    }

    fn add_plan(&mut self, value: &'n Node) {
        match value {
            Node::Text(text) => self.plans.push(text),
            Node::List(items) => items.iter().for_each(|item| self.add_plan(item)),
            _ => {}
        }
    }

    fn compare(&self, record: &Record) {
        for (text, name) in [
            (self.client, "ip"),
            (self.remote, "remote_ip"),
            (self.method, "method"),
            (self.target, "target"),
            (self.host, "host"),
        ] {
            assert_eq!(record.last(name), text, "{name}");
        }
        match self.time {
            Some(Node::Text(text)) => assert_eq!(Some(record.time), time::any(text)),
            Some(Node::Number(seconds)) if *seconds < 1e11 => {
                #[expect(clippy::cast_precision_loss, reason = "compared with a tolerance")]
                let found = record.time as f64 / 1e6;
                assert!((found - seconds).abs() < 1e-4, "{found} {seconds}");
            }
            Some(Node::Number(_)) => {}
            _ => panic!("a time that is neither text nor a number"),
        }
        let plans = (!self.plans.is_empty()).then(|| self.plans.join(", "));
        assert_eq!(record.get("header.x-plan").as_deref(), plans.as_deref());
        assert_eq!(record.is_ambiguous("header.x-plan"), self.plans.len() > 1);
    }
}
