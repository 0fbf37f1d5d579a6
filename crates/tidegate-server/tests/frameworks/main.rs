//! The gateway in front of real frameworks: another spelling of a request must not have another
//! limit. The applications answer with what they read, and the tests count by that.

use std::collections::BTreeMap;
use std::fmt::Write as _;

#[path = "../support/mod.rs"]
mod support;

/// Applications of each framework.
mod app;
/// Random spellings.
mod generated;
/// Choices by a seed.
#[path = "../support/seeded.rs"]
mod seeded;
/// Known spellings.
mod spellings;

use app::{App, Request};
use seeded::Seeded;
use support::Service;

const LIMIT: usize = 3;

/// Fields of a request that identify its client. Each is the name of a policy, and of the member
/// in which the application answers with the value that it read.
const FIELDS: [&str; 5] = ["cookie", "header", "query", "token", "basic"];

/// Returns a configuration with the limit for each field, on a path of its own, and for the route
/// `/limited/x`.
fn config(paths: &str) -> String {
    let policy = |(name, key): (&str, &str)| {
        format!(
            "  - {{name: {name}, match: {{path: /{name}}}, key: [{key}], missing_key: deny, \
             limit: {LIMIT}, window: 24h}}\n"
        )
    };
    let keys = [
        "cookie.session_id",
        "header.x-user-id",
        "query.api_key",
        "header.authorization",
        "header.authorization",
    ];
    let policies: String = FIELDS.into_iter().zip(keys).map(policy).collect();
    format!(
        "paths: {{{paths}}}\npolicies:\n{policies}  - {{name: limited, match: {{path: /limited/x}}, \
         limit: {LIMIT}, window: 24h}}\n"
    )
}

/// Requests that reached the application, by what it read: field and value.
#[derive(Default)]
struct Reached(BTreeMap<(String, String), Vec<Request>>);

impl Reached {
    /// Sends a request and records it by the field that it is about.
    fn send(&mut self, gateway: &str, field: &str, request: Request) {
        let Some(seen) = request.send(gateway) else { return };
        let value = if field == "route" {
            (seen["route"] == "limited").then_some("limited")
        } else {
            seen[field].as_str()
        };
        if let Some(value) = value.filter(|value| is_issued(value)) {
            self.0.entry((field.to_owned(), value.to_owned())).or_default().push(request);
        }
    }

    fn assert_limit(&self, framework: &str) {
        let mut report = String::new();
        for ((field, value), requests) in &self.0 {
            if requests.len() > LIMIT {
                let _ = write!(report, "\n{field} {value}, {} times:", requests.len());
                let mut spellings: Vec<String> = requests.iter().map(Request::to_string).collect();
                spellings.dedup();
                report.extend(spellings.iter().map(|request| format!("\n    {request}")));
            }
        }
        assert!(report.is_empty(), "read by {framework} above the limit:{report}");
    }

    fn count(&self, field: &str, value: &str) -> usize {
        self.0.get(&(field.to_owned(), value.to_owned())).map_or(0, Vec::len)
    }
}

/// Returns whether an application would issue this value to a client: visible ASCII without quotes
/// and backslashes. A client that invents values has a new limit anyway.
fn is_issued(value: &str) -> bool {
    !value.is_empty()
        && value.bytes().all(|byte| byte.is_ascii_graphic() && !br#""\,;"#.contains(&byte))
}

/// Sends all spellings of the documentation, and random ones.
fn check(framework: &str) {
    let documented = app::documented(framework);
    let app = App::start(framework);
    for (path, is_same) in &documented.routes {
        let seen = Request::get(path).send(&app.address);
        let answers = seen.is_some_and(|seen| seen["route"] == "limited");
        assert_eq!(answers, *is_same, "docs/spellings.md: {framework}, {path}");
    }
    let mut settings = vec![documented.settings.as_str()];
    if !documented.settings.contains("case_insensitive") {
        settings.push("");
    }
    for settings in settings {
        let gateway = Service::gateway(&config(settings), &[&app.url()]);
        let mut reached = Reached::default();
        for (field, value, request) in spellings::usual() {
            for _ in 0..LIMIT {
                reached.send(&gateway.http, field, request.clone());
            }
            assert_eq!(reached.count(field, value), LIMIT, "{framework}: {request}");
        }
        for _ in 0..=LIMIT {
            for (field, request) in spellings::all() {
                reached.send(&gateway.http, field, request);
            }
        }
        reached.assert_limit(framework);
        let mut seeded = Seeded::new(seeded::seed());
        for _ in 0..seeded::cases(80) {
            for field in FIELDS.into_iter().chain(["route"]) {
                reached.send(&gateway.http, field, generated::request(field, &mut seeded));
            }
        }
        reached.assert_limit(framework);
        let metrics = gateway.admin("/metrics").body;
        assert!(metrics.contains("\ntidegate_panics_total 0"), "{metrics}");
    }
}

#[test]
fn flask_reads_no_identity_more_often_than_its_limit() {
    check("Flask");
}

#[test]
fn django_reads_no_identity_more_often_than_its_limit() {
    check("Django");
}

#[test]
fn fastapi_reads_no_identity_more_often_than_its_limit() {
    check("FastAPI");
}

#[test]
fn express_reads_no_identity_more_often_than_its_limit() {
    check("Express 5");
}

#[test]
fn express_4_reads_no_identity_more_often_than_its_limit() {
    check("Express 4");
}

#[test]
fn aiohttp_reads_no_identity_more_often_than_its_limit() {
    check("aiohttp");
}

#[test]
fn tornado_reads_no_identity_more_often_than_its_limit() {
    check("Tornado");
}

#[test]
fn php_reads_no_identity_more_often_than_its_limit() {
    check("PHP");
}

#[test]
fn rack_reads_no_identity_more_often_than_its_limit() {
    check("Rack");
}

#[test]
fn fastify_reads_no_identity_more_often_than_its_limit() {
    check("Fastify");
}
