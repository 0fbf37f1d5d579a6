//! Compares the JSON Schema with `config check`: the same documents must be valid for both, except
//! for texts of which the schema knows only the type.
//!
//! The documents are the examples of the documents with one change each, so a new field is
//! compared as soon as an example has it. An independent validator judges the schema.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::Config;
use door_probes::DOOR_PROBES;
use probes::{BASE, PROBES, Probe};

mod door_probes;
mod probes;

/// Rules that a JSON Schema cannot express: a part of the message, and the reason.
const INEXPRESSIBLE: [(&str, &str); 34] = [
    ("is longer than their max_ttl", "compares two durations"),
    ("unknown timezone", "depends on the database of time zones"),
    ("is not a day of the month", "depends on the unit of the calendar"),
    ("anchor of a week", "depends on the unit of the calendar"),
    ("an anchor is the day", "depends on the unit of the calendar"),
    ("has less than one unit", "multiplies a limit and a part of it"),
    ("would never match", "depends on the rules in `paths`"),
    ("is used twice", "compares the names of two policies"),
    ("another token has this name", "compares the names of two tokens"),
    ("is overridden twice", "compares the keys of two overrides"),
    ("is declared twice", "compares two names"),
    ("is there twice", "header names are compared without their case"),
    ("unknown attribute", "depends on the list in `attributes`"),
    ("is already in use", "compares two addresses"),
    ("can never be admitted", "compares two numbers"),
    ("is more than the max", "compares two numbers"),
    ("to refill at", "multiplies numbers and a duration"),
    ("would never apply", "compares the lengths of two lists, and forms of addresses"),
    ("has two limits", "compares two values"),
    ("bytes: at most", "maxLength counts characters, not bytes"),
    ("cannot be read", "reads a file"),
    ("cannot read", "reads a file"),
    ("envoy: ", "reads the rules of other files"),
    ("no rule is named", "reads the rules of other files"),
    ("no file matches", "reads a folder"),
    ("this folder has no files", "reads a folder"),
    ("must agree on", "compares two URLs"),
    ("already has a password", "looks into a URL"),
    ("TLS options are given", "looks into a URL"),
    ("is not on loopback", "looks into an address"),
    ("server_name must be", "a plain 5 is a text in YAML"),
    ("is too long", "adds the parts of a duration"),
    ("all parts together", "adds the parts of a duration"),
    ("in quotes, or 5.0 would be read as 5", "5.0 and 5 are the same number in JSON"),
];

/// Formats of texts that only `config check` knows in full: a part of each message.
const FORMATS: [&str; 22] = [
    "is not an address",
    "the path of a Unix socket must be absolute",
    "is not a network",
    "is not a host name",
    "would allow every name",
    "is not a Redis URL",
    "must have no fragment",
    "only database 0",
    "is not an upstream",
    "must not contain a user or password",
    "is not an origin",
    "is not the name of a header",
    "must be from",
    "is not an attribute name",
    "the name is built in",
    "has the control character",
    "is not usable",
    "** is not supported",
    "this token is empty",
    "this entry is empty",
    "path is empty",
    "this name is not valid",
];

/// Values of wrong types for every place of a document.
const WRONG_TYPES: [&str; 14] = [
    "null",
    "true",
    "1.5",
    "-1",
    "5.0",
    "[]",
    "[[]]",
    "[null]",
    "[5]",
    "[true]",
    "{}",
    r#"{"unknown": 1}"#,
    r#"{"unknown": "x"}"#,
    r#"["x", "x"]"#,
];

/// Texts that are near the bounds of some field, for every place that has a text or a list.
const TEXTS: [&str; 73] = [
    "",
    " ",
    "x",
    "x y",
    "é",
    "a\u{1}b",
    "a\nb",
    "{x}",
    "5",
    "true",
    "null",
    "0s",
    "0h0m",
    "1us",
    "999us",
    "1ms",
    "60s",
    " 1m 5s ",
    "61s",
    "60000ms",
    "60001ms",
    "1d",
    "25h",
    "366d",
    "367d",
    "0367d",
    "60",
    "60 s",
    "1.5s",
    "1month",
    "127.0.0.1:9000",
    "127.0.0.1:65535",
    "127.0.0.1:65536",
    "127.0.0.1",
    "[::1]:9000",
    "[::]:9000",
    "[0:0:0:0:0:0:0:1]:9000",
    "[1:2:3]:9000",
    "256.0.0.1:80",
    "localhost:9000",
    "unix:/run/a.sock",
    "unix:a.sock",
    "660",
    "0660",
    "off",
    "https://app.example.com",
    "*",
    "a/**",
    "error",
    "0.0.0.0:9000",
    "10.0.0.0/8",
    "10.0.0.0/33",
    "2001:db8::/32",
    "::1/129",
    "redis://127.0.0.1",
    "redis://u:p%40ss@h:6380/2",
    "rediss://h:6380",
    "redis://h:70000",
    "redis://",
    "redis://h/x",
    "redis://h#insecure",
    "http://h:80/base",
    "http://h:70000",
    "http://u:p@h",
    "http://h?q=1",
    "h2c://h",
    "ftp://h",
    "ip",
    "IP",
    "header.x-user",
    "header.",
    "header.a(b",
    "tenant",
];

const DOCUMENTS: [&str; 5] = [
    include_str!("../../../../docs/configuration.md"),
    include_str!("../../../../docs/redis.md"),
    include_str!("../../../../docs/gateway.md"),
    include_str!("../../../../docs/spellings.md"),
    include_str!("../../../../README.md"),
];

/// Document to compare.
struct Candidate {
    /// Name for messages.
    name: String,
    document: Value,
    /// Whether a text was changed. Only then its format may be at fault.
    has_other_text: bool,
}

/// Documents without repetitions.
#[derive(Default)]
struct Corpus {
    documents: Vec<Candidate>,
    known: BTreeSet<String>,
    /// Places that were changed in an example, and whether they had a list or fields.
    changed: BTreeSet<(String, bool, bool)>,
}

impl Corpus {
    fn add(&mut self, name: &str, document: Value) {
        self.add_candidate(name, document, false);
    }

    fn add_text(&mut self, name: &str, document: Value) {
        self.add_candidate(name, document, true);
    }

    fn add_candidate(&mut self, name: &str, document: Value, has_other_text: bool) {
        if self.known.insert(document.to_string()) {
            self.documents.push(Candidate { name: name.to_owned(), document, has_other_text });
        }
    }
}

/// Returns the examples in the documents, and some fields that they show as comments. Each section
/// is a document of its own, and so is each policy.
fn examples() -> Vec<Value> {
    let blocks = DOCUMENTS.iter().flat_map(|document| {
        document.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next())
    });
    let commented = "store: {max_keys: 10000000}\ngateway: {ca: ca.pem}\n";
    let with_password = "store: {redis: 'redis://u@h', password_file: redis-password}\n";
    let with_sentinels = "store: {sentinel: {master: m, nodes: ['redis://h'], username: u, \
                          password_file: redis-password}}\n";
    let overridden = "attributes: [tenant]\npolicies: [{name: a, algorithm: token-bucket, limit: 10, \
                      window: 1s, key: tenant, overrides: [{key: k, limit: 20, window: 2s, burst: \
                      30}]}]\n";
    let holds = "envoy: {files: [rules], hold_id: id, holds: {export: {reserve: 1, ttl: 10m, \
                 on_expire: charge}}}\n";
    let others = [commented, with_password, with_sentinels, overridden, holds, super::SAMPLE];
    let mut examples = Vec::new();
    for block in blocks.chain(others) {
        let document: Value = serde_saphyr::from_str(block).expect("YAML");
        let attributes = document.get("attributes").cloned().unwrap_or(json!([]));
        for (section, content) in document.as_object().expect("sections") {
            let policies = content.as_array().filter(|_| section == "policies");
            let parts = policies.map_or_else(
                || vec![content.clone()],
                |policies| policies.iter().map(|policy| json!([policy])).collect(),
            );
            for part in parts {
                examples.push(json!({"attributes": attributes, section: part}));
            }
        }
    }
    examples
}

/// Returns a list of revoked certificates, which is empty.
fn revocation_list() -> String {
    let key = rcgen::KeyPair::generate().expect("a key");
    let issuer = rcgen::Issuer::new(rcgen::CertificateParams::default(), key);
    let list = rcgen::CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2026, 1, 1),
        next_update: rcgen::date_time_ymd(2100, 1, 1),
        crl_number: 1.into(),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: rcgen::KeyIdMethod::Sha256,
    };
    list.signed_by(&issuer).and_then(|list| list.pem()).expect("signed")
}

/// Writes the files that the examples name: keys, certificates, passwords and rules.
fn write_files(folder: &Path) {
    let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("signed");
    let revoked = revocation_list();
    let words = DOCUMENTS.iter().flat_map(|document| {
        document.split(|character: char| !character.is_alphanumeric() && !"-_.".contains(character))
    });
    for name in words.chain(["ca.pem", "ratelimit.yaml"]) {
        let content = match Path::new(name).extension().and_then(OsStr::to_str) {
            Some("pem") if name.ends_with("key.pem") => signed.signing_key.serialize_pem(),
            Some("pem") if name.starts_with("revoked") => revoked.clone(),
            Some("pem") => signed.cert.pem(),
            Some("yaml") => "domain: edge\n".to_owned(),
            _ => continue,
        };
        std::fs::write(folder.join(name), content).expect("written");
    }
    for name in ["redis-password", "api-token.txt", "admin-token.txt", "ci-token.txt"] {
        std::fs::write(folder.join(name), format!("s3cret of {name}\n")).expect("written");
    }
    std::fs::create_dir(folder.join("empty")).expect("created");
    let rule = "domain: named\ndescriptors:\n  - {key: k, rate_limit: {name: export, unit: day, \
                requests_per_unit: 1}}\n";
    std::fs::create_dir(folder.join("rules")).expect("created");
    std::fs::write(folder.join("rules/named.yaml"), rule).expect("written");
}

/// Returns the pointers to all places of a document.
fn places(value: &Value, place: &str, all: &mut Vec<String>) {
    all.push(place.to_owned());
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                places(item, &format!("{place}/{index}"), all);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                places(field, &format!("{place}/{}", name.replace('/', "~1")), all);
            }
        }
        _ => {}
    }
}

/// Adds the document with each of its places changed in each way.
fn add_mutations(corpus: &mut Corpus, document: &Value, numbers: &[Value]) {
    let mut all = Vec::new();
    places(document, "", &mut all);
    for place in all {
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut copy = document.clone();
            change(copy.pointer_mut(&place).expect("a place of the document"));
            copy
        };
        let is_list = document.pointer(&place).is_some_and(Value::is_array);
        let has_fields = document.pointer(&place).is_some_and(Value::is_object);
        let is_scalar = !is_list && !has_fields;
        // One example of a field is enough, except for the combinations of a policy.
        let is_new =
            corpus.changed.insert((place.replace(char::is_numeric, "0"), is_list, has_fields));
        if !is_new && !has_fields {
            continue;
        }
        for value in WRONG_TYPES.iter().map(|text| serde_json::from_str(text).expect("JSON")) {
            corpus.add(&place, changed(&|at| *at = Value::clone(&value)));
        }
        for text in if is_list || is_scalar { &TEXTS[..] } else { &[] } {
            let value = if is_list { json!([text]) } else { json!(text) };
            corpus.add_text(&place, changed(&|at| *at = value.clone()));
        }
        for number in if is_scalar { numbers } else { &[] } {
            corpus.add(&place, changed(&|at| *at = number.clone()));
        }
        let fields = document.pointer(&place).and_then(Value::as_object).cloned();
        for name in fields.iter().flat_map(serde_json::Map::keys) {
            corpus.add(
                &place,
                changed(&|at| drop(at.as_object_mut().and_then(|at| at.remove(name)))),
            );
        }
        if fields.is_some() {
            corpus.add(&place, changed(&|at| at["unknown"] = json!(1)));
        }
        if is_list {
            corpus.add(
                &place,
                changed(&|at| {
                    let items = at.as_array_mut().expect("a list");
                    items.extend(items.clone());
                }),
            );
        }
    }
}

/// Returns the bounds in the schema, each with its neighbours.
fn bounds(schema: &Value, numbers: &mut BTreeSet<i64>) {
    for name in ["minimum", "maximum"] {
        if let Some(bound) = schema.get(name).and_then(Value::as_i64) {
            numbers.extend([bound - 1, bound, bound + 1]);
        }
    }
    match schema {
        Value::Object(fields) => fields.values().for_each(|field| bounds(field, numbers)),
        Value::Array(items) => items.iter().for_each(|item| bounds(item, numbers)),
        _ => {}
    }
}

/// Removes from `unseen` the fields of the schema that the document has.
fn mark_seen(root: &Value, (name, schema): (&str, &Value), value: &Value, unseen: &mut Fields) {
    if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        let name = target.trim_start_matches("#/$defs/");
        return mark_seen(root, (name, &root["$defs"][name]), value, unseen);
    }
    let options = schema.get("anyOf").and_then(Value::as_array);
    for option in options.into_iter().flatten() {
        mark_seen(root, (name, option), value, unseen);
    }
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                if let Some(schema) = schema.get("properties").and_then(|all| all.get(field)) {
                    unseen.remove(&(name.to_owned(), field.clone()));
                    mark_seen(root, (field, schema), value, unseen);
                } else if let Some(schema) = schema.get("additionalProperties") {
                    mark_seen(root, (field, schema), value, unseen);
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                schema.get("items").inspect(|schema| mark_seen(root, (name, schema), item, unseen));
            }
        }
        _ => {}
    }
}

/// Names of a type and of its field.
type Fields = BTreeSet<(String, String)>;

/// Returns all fields of the schema.
fn fields(schema: &Value) -> Fields {
    let types = schema["$defs"].as_object().expect("types").iter();
    let types = types.map(|(name, of)| (name.as_str(), of)).chain([("Config", schema)]);
    let fields = types.flat_map(|(name, of)| {
        let fields = of["properties"].as_object().into_iter().flat_map(serde_json::Map::keys);
        fields.map(move |field| (name.to_owned(), field.clone()))
    });
    fields.collect()
}

/// Returns whether a value has a text anywhere.
fn has_text(value: &Value) -> bool {
    match value {
        Value::String(_) => true,
        Value::Array(items) => items.iter().any(has_text),
        Value::Object(fields) => fields.values().any(has_text),
        _ => false,
    }
}

/// Returns the error of each document by the JSON Schema, if it has one.
fn errors_by_schema(schema: &Value, candidates: &[Candidate]) -> Vec<Option<String>> {
    const JUDGE: &str = "
import json, sys, jsonschema_rs
schema, documents = json.load(sys.stdin)
validator = jsonschema_rs.validator_for(schema)
def error(document):
    errors = (f'{list(error.instance_path)}: {error.message}' for error in validator.iter_errors(document))
    return next(errors, None)
print(json.dumps([error(document) for document in documents]))
";
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
    let mut judge = Command::new(python)
        .args(["-c", JUDGE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{python} ({error}): `make setup` installs it"));
    let documents: Vec<&Value> = candidates.iter().map(|candidate| &candidate.document).collect();
    let input = json!([schema, documents]).to_string();
    judge.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the judge reads");
    let output = judge.wait_with_output().expect("the judge exits");
    serde_json::from_slice(&output.stdout).expect("a list of errors")
}

fn add_long_hosts(corpus: &mut Corpus) {
    for length in [253, 254] {
        let name = ["a.".repeat(126), "b".repeat(length - 252)].concat();
        for host in [format!("*.{name}."), name.clone()] {
            corpus.add_text("/listen/allowed_hosts", json!({"listen": {"allowed_hosts": [host]}}));
        }
    }
}

#[test]
fn schema_agrees_with_config_check() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    write_files(folder.path());
    let schema = serde_json::to_value(Config::schema()).expect("JSON");
    let check = |document: &Value| {
        let parsed = Config::parse_in(folder.path(), "probe.yaml", &document.to_string(), false);
        parsed.map(drop).map_err(|error| error.message().to_owned())
    };
    let mut wrong = Vec::new();
    let mut corpus = Corpus::default();
    let base: Value = serde_json::from_str(BASE).expect("JSON");
    for Probe { place, valid, invalid } in PROBES.into_iter().chain(DOOR_PROBES) {
        for (values, is_valid) in [(valid, true), (invalid, false)] {
            for text in values {
                let mut document = base.clone();
                let (parent, name) = place.rsplit_once('/').unwrap_or_default();
                let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
                let has_text = has_text(&value);
                match document.pointer_mut(parent).filter(|_| !place.is_empty()) {
                    Some(parent) if parent.is_object() => parent[name] = value,
                    _ => document = value,
                }
                let checked = check(&document);
                if checked.is_ok() != is_valid {
                    wrong.push(format!("{place}: {text}: config check says {checked:?}"));
                }
                corpus.add_candidate(&format!("{place} = {text}"), document, has_text);
            }
        }
    }
    for name in ["x".repeat(512), "x".repeat(513), "é".repeat(300)] {
        let policy = json!({"name": name, "limit": 1, "window": "1s"});
        corpus.add("/policies/0/name", json!({"policies": [policy]}));
    }
    for path in ["d".repeat(106), "d".repeat(107), "é".repeat(53), "é".repeat(54)] {
        corpus.add_text("/listen/http", json!({"listen": {"http": format!("unix:/{path}")}}));
    }
    add_long_hosts(&mut corpus);
    for count in [100, 101] {
        let hosts: Vec<String> = (0..count).map(|n| format!("{n}.example")).collect();
        corpus.add("/listen/allowed_hosts", json!({"listen": {"allowed_hosts": hosts}}));
        let origins: Vec<String> = (0..count).map(|n| format!("https://{n}.example")).collect();
        let headers: Vec<String> = (0..count).map(|n| format!("x-{n}")).collect();
        for cors in [
            json!({"allow_origins": origins}),
            json!({"allow_origins": ["*"], "expose_headers": headers}),
        ] {
            corpus.add("/gateway/cors", json!({"gateway": {"cors": cors}}));
        }
    }
    assert!(corpus.documents.len() >= 250, "{}", corpus.documents.len());
    let mut numbers = BTreeSet::new();
    bounds(&schema, &mut numbers);
    let numbers: Vec<Value> = numbers.into_iter().map(Value::from).collect();
    let mut unseen = fields(&schema);
    for example in examples() {
        assert_eq!(check(&example), Ok(()), "{example}");
        mark_seen(&schema, ("Config", &schema), &example, &mut unseen);
        add_mutations(&mut corpus, &example, &numbers);
    }
    assert!(
        unseen.is_empty(),
        "no example has these fields, so they were not compared: add them to \
         docs/configuration.md, or to `examples`: {unseen:?}"
    );
    let by_schema = errors_by_schema(&schema, &corpus.documents);
    let mut used = BTreeSet::new();
    let (mut valid, mut invalid) = (0, 0);
    for (candidate, by_schema) in corpus.documents.iter().zip(by_schema) {
        let Candidate { name: place, document, has_other_text } = candidate;
        match (check(document), by_schema) {
            (Ok(()), None) => valid += 1,
            (Err(_), Some(_)) => invalid += 1,
            (Err(message), None) => {
                let formats = FORMATS.iter().filter(|_| *has_other_text);
                let excuses = INEXPRESSIBLE.iter().map(|(part, _)| part).chain(formats);
                match excuses.into_iter().find(|part| message.contains(**part)) {
                    Some(part) => drop(used.insert(*part)),
                    None => wrong.push(format!("{place}: schema is laxer: {message}: {document}")),
                }
            }
            (Ok(()), Some(error)) => {
                wrong.push(format!("{place}: schema is stricter: {error}: {document}"));
            }
        }
    }
    let count = wrong.len();
    let shown: Vec<String> = wrong.into_iter().take(40).collect();
    assert!(
        count == 0,
        "{count} of {} documents differ:\n{}",
        corpus.documents.len(),
        shown.join("\n")
    );
    assert!(valid > 300 && invalid > 3_000, "{valid} valid, {invalid} invalid documents");
    let excuses = INEXPRESSIBLE.iter().map(|(part, _)| part).chain(&FORMATS);
    let unused: Vec<_> = excuses.filter(|part| !used.contains(*part)).collect();
    assert!(unused.is_empty(), "no document needs these exceptions: {unused:?}");
}
