//! The doors that know ids, the HTTP API and the Redis protocol, answer the same.

use serde_json::{Value, json};

use crate::resp::{Client, Reply};
use crate::support::{Redis, Service};

const POLICIES: &str = "policies:
  - {name: tokens, limit: 100, window: 1d, hold: {ttl: 1h, max_ttl: 1h}}
  - {name: queue, algorithm: leaky-bucket, limit: 100, window: 30d, hold: {on_expire: release}}
  - {name: watched, limit: 10, window: 1d, mode: shadow}
  - {name: in-flight, algorithm: concurrency, limit: 20}
";

/// Operation, id, units and time to live, of one step.
type Step = (&'static str, &'static str, u64, Option<u64>);

const STEPS: [Step; 23] = [
    ("reserve", "a", 20, Some(60_000)),
    ("reserve", "a", 20, Some(60_000)),
    ("reserve", "a", 19, None),
    ("reserve", "b", 1, None),
    ("reserve", "b", 2, None),
    ("reserve", "c", 200, None),
    ("renew", "a", 0, Some(90_000)),
    ("renew", "c", 0, Some(90_000)),
    ("renew", "a", 0, Some(999)),
    ("commit", "a", 5, None),
    ("commit", "a", 6, None),
    ("renew", "a", 0, Some(5_000)),
    ("commit", "b", 3, None),
    ("commit", "unknown", 7, None),
    ("acquire", "d", 4, None),
    ("acquire", "d", 4, Some(600_000)),
    ("acquire", "d", 5, None),
    ("refund", "d", 0, None),
    ("refund", "d", 0, None),
    ("refund", "unknown", 0, None),
    ("reserve", "e", 90, Some(3_600_000)),
    ("commit", "e", 0, None),
    ("reserve", "", 1, None),
];

/// Answer of a door: an error, or the fields that do not depend on the time.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Error(String),
    Decision {
        allowed: bool,
        limit: u64,
        remaining: u64,
        id: Option<String>,
        /// Whether units are held.
        is_held: bool,
        is_replayed: bool,
        is_settled: bool,
    },
}

fn by_http(service: &Service, policy: &str, (operation, id, units, ttl): Step) -> Answer {
    let mut body = json!({"policy": policy, "key": "http", "id": id});
    match operation {
        "commit" => body["actual"] = json!(units),
        "acquire" | "reserve" => body["cost"] = json!(units),
        _ => {}
    }
    if let Some(ttl) = ttl {
        body[if operation == "acquire" { "id_ttl_ms" } else { "ttl_ms" }] = json!(ttl);
    }
    let response = service.post(&format!("/v1/{operation}"), &body.to_string());
    let body = response.json();
    if !matches!(response.status, 200 | 429) {
        return Answer::Error(body["detail"].as_str().expect("a reason").to_owned());
    }
    assert_eq!(body["allowed"], response.status == 200, "{response:?}");
    let number = |name: &str| body[name].as_u64().unwrap_or_default();
    Answer::Decision {
        allowed: response.status == 200,
        limit: number("limit"),
        remaining: number("remaining"),
        id: body["reservation"].as_str().map(str::to_owned),
        is_held: number("expires_after_ms") > 0,
        is_replayed: body["replayed"] == true,
        is_settled: body["settled"] == true,
    }
}

fn by_resp(client: &mut Client, policy: &str, (operation, id, units, ttl): Step) -> Answer {
    let command = format!("TG.{}", operation.to_uppercase());
    let (units, ttl) = (units.to_string(), ttl.map(|ttl| ttl.to_string()));
    let mut words = vec![command.as_str(), policy, "resp"];
    match operation {
        "commit" => words.extend([id, &units]),
        "renew" => words.extend([id, ttl.as_deref().expect("a renewal has a time")]),
        "refund" => words.extend(["ID", id]),
        _ => {
            words.extend(["COST", &units, "ID", id]);
            words.extend(ttl.iter().flat_map(|ttl| ["TTL", ttl.as_str()]));
        }
    }
    let fields = match client.ask(&words) {
        Reply::Error(error) => {
            return Answer::Error(error.strip_prefix("ERR ").expect("a code").to_owned());
        }
        Reply::Array(fields) => fields,
        other => panic!("{words:?}: {other:?}"),
    };
    let number = |reply: &Reply| match reply {
        Reply::Integer(number) => u64::try_from(*number).expect("a natural number"),
        other => panic!("{words:?}: {other:?}"),
    };
    let text = |reply: &Reply| match reply {
        Reply::Bulk(text) => Some(text.clone()),
        Reply::Null => None,
        other => panic!("{words:?}: {other:?}"),
    };
    let [allowed, limit, remaining, _, _, _, id, expires_after, status] = &fields[..] else {
        panic!("{words:?}: {fields:?}")
    };
    let status = text(status).unwrap_or_default();
    let expires_after = number(expires_after);
    assert!(status != "held" || expires_after > 0, "{words:?}: {fields:?}");
    Answer::Decision {
        allowed: number(allowed) == 1,
        limit: number(limit),
        remaining: number(remaining),
        id: text(id),
        is_held: expires_after > 0,
        is_replayed: status == "replayed",
        // An acquire with an id is always settled.
        is_settled: status == "settled" && operation != "acquire",
    }
}

#[test]
fn doors_that_know_ids_answer_the_same() {
    let redis = Redis::start();
    let on_redis = format!("store: {{redis: '{}', timeout: 1s, instances: 1}}\n", redis.url());
    for store in [String::new(), on_redis] {
        let service =
            Service::start_with(&format!("{store}{POLICIES}"), &["--resp", "127.0.0.1:0"]);
        let output = service.output();
        let address = output.split_once(" resp=").expect("the address in the log").1;
        let mut client = Client::connect(address.split([' ', '\n']).next().expect("an address"));
        for policy in ["tokens", "queue", "watched", "in-flight"] {
            for step in STEPS {
                let http = by_http(&service, policy, step);
                let resp = by_resp(&mut client, policy, step);
                assert_eq!(http, resp, "{policy}, {step:?}");
            }
        }
        let peek = |key: &str| {
            service.post("/v1/peek", &json!({"policy": "tokens", "key": key}).to_string())
        };
        let left: Vec<Value> =
            ["http", "resp"].map(|key| peek(key).json()["remaining"].clone()).into();
        assert_eq!(left, [json!(84), json!(84)], "5 + 3 + 7 of 100, and the peek");
    }
}
