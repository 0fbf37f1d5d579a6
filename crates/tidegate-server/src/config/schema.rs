//! Parts of the JSON Schema that the types alone do not express: patterns of addresses and URLs, and
//! rules between fields. `schema_tests.rs` compares the result with `config check`.

use std::borrow::Cow;

use schemars::transform::{RecursiveTransform, Transform as _};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};
use tidegate::internals::duration;
use tidegate::internals::schema::{HEADER_NAME, TEXT_TYPES, YamlForms, number_pattern};

use super::auth::MAX_TOKEN_NAME_BYTES;
use super::listen::{CONNECTION_AGES, MAX_NAME_BYTES, MAX_UNIX_PATH_BYTES};
use super::raw::RawConfig;

/// Returns the JSON Schema of the configuration.
pub(super) fn config_schema() -> Schema {
    let mut schema = schemars::schema_for!(RawConfig);
    YamlForms.transform(&mut schema);
    RecursiveTransform(allow_variables).transform(&mut schema);
    schema
}

/// Variable in a text, whose value is not known here.
const VARIABLE: &str = r"\$\{[A-Za-z_]";

/// Allows variables in texts that must match an expression.
fn allow_variables(schema: &mut Schema) {
    // A rule that forbids a password must not forbid a variable.
    let pattern = schema.get("pattern").and_then(Value::as_str).filter(|text| *text != PASSWORD);
    if let Some(pattern) = pattern.map(|pattern| format!("{pattern}|{VARIABLE}")) {
        schema.insert("pattern".to_owned(), json!(pattern));
    }
}

const OCTET: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

fn ipv4() -> String {
    format!(r"(?:{OCTET}\.){{3}}{OCTET}")
}

/// Returns the expression of IPv6 addresses by the grammar of RFC 3986.
fn ipv6() -> String {
    const GROUP: &str = "[0-9A-Fa-f]{1,4}";
    let last = format!("(?:{GROUP}:{GROUP}|{})", ipv4());
    let mut forms = vec![format!("(?:{GROUP}:){{6}}{last}"), format!("::(?:{GROUP}:){{5}}{last}")];
    // At most this many groups before the colons, and exactly the others after them.
    forms.extend((0..=4).map(|before| {
        let after = 4 - before;
        format!("(?:(?:{GROUP}:){{0,{before}}}{GROUP})?::(?:{GROUP}:){{{after}}}{last}")
    }));
    forms.push(format!("(?:(?:{GROUP}:){{0,5}}{GROUP})?::{GROUP}"));
    forms.push(format!("(?:(?:{GROUP}:){{0,6}}{GROUP})?::"));
    format!("(?:{})", forms.join("|"))
}

fn port() -> String {
    number_pattern(0, u64::from(u16::MAX))
}

/// Returns the expression of listen addresses.
fn address_pattern() -> String {
    let scope = format!("(?:%{})?", number_pattern(0, u64::from(u32::MAX)));
    format!(r"^(?:(?:{}|\[{}{scope}\]):{}|{})$", ipv4(), ipv6(), port(), unix_socket())
}

/// Returns the expression of a Unix socket. Its path has at most this many characters. If some are
/// not ASCII, it may have even fewer.
fn unix_socket() -> String {
    format!(r"unix:/[^\u0000]{{0,{}}}", MAX_UNIX_PATH_BYTES - 1)
}

/// Loopback, in any spelling, and Unix sockets among the listen addresses.
const LOOPBACK: &str = r"^(?:unix:|127\.|\[[0:]*:(?:0{0,3}1|0\.0\.0\.1)(?:%[0-9]+)?\]:)";

fn network_pattern() -> String {
    let ipv4_prefix = "(?:0?[0-9]|[12][0-9]|3[0-2])";
    let ipv6_prefix = "(?:[0-9]{1,2}|0[0-9]{2}|1[01][0-9]|12[0-8])";
    format!(r"^(?:{}(?:/{ipv4_prefix})?|{}(?:/{ipv6_prefix})?)$", ipv4(), ipv6())
}

/// Returns the expression of Redis URLs. `database` is the expression of the database.
fn redis_pattern(schemes: &str, database: &str) -> String {
    const USER: &str = r"(?:[^/?#\u0000-\u001f\u007f-\u009f]*@)?";
    const HOST: &str = r"(?!0\.0\.0\.0(?:[:/?]|$))[^\s/?#@:<>\[\]\\^|\u0000-\u001f\u007f-\u009f]+";
    const QUERY: &str = r"(?:\?[^#\u0000-\u001f\u007f-\u009f]*)?(?!\s)";
    let ipv6 = format!(r"\[(?![0:]*\]){}\]", ipv6());
    format!(
        r"^(?:{schemes})://{USER}(?:{HOST}|{ipv6})(?::(?:{port})?)?(?:/+(?:{database}/*)?)?{QUERY}$",
        port = port()
    )
}

/// Expression of the sockets of a Redis server on this host.
const UNIX_PATTERN: &str =
    r"^(?:unix|redis\+unix|valkey\+unix)://(?:localhost)?/[^#\u0000-\u001f\u007f-\u009f]*$";

const REDIS_SCHEMES: &str = "rediss?|valkeys?";
const TLS_SCHEME: &str = "^(?:rediss|valkeys)://";
/// Password in a URL.
const PASSWORD: &str = "://[^/?#:]*:[^/?#]+@";

/// Returns the expression of the URL of a single server.
fn server_pattern() -> String {
    format!("{}|{UNIX_PATTERN}", redis_pattern(REDIS_SCHEMES, "[0-9]{1,9}"))
}

/// Returns the expression of the URL of a node. A cluster has only database 0.
fn node_pattern() -> String {
    format!("{}|{UNIX_PATTERN}", redis_pattern(REDIS_SCHEMES, "0+"))
}

fn upstream_pattern() -> String {
    const HOST: &str = r"[0-9A-Za-z._~!$&'()*+,;=-]+";
    const PATH: &str = r"(?:/[^\s?#<>`\u0000-\u001f\u007f]*)?";
    let ipv6 = format!(r"\[{}\]", ipv6());
    let (port, unix) = (port(), unix_socket());
    let url =
        format!("(?:[hH][tT][tT][pP][sS]?|h2c?)://(?:{HOST}|{ipv6})(?::{port})?{PATH}(?:#.*)?");
    format!("^(?:{url}|{unix})$")
}

/// Returns the expression of the origins of scripts.
fn origin_pattern() -> String {
    let ipv6 = format!(r"\[{}\]", ipv6());
    let port = port();
    format!(r"^(?:\*|[A-Za-z][0-9A-Za-z+.-]*://(?:[0-9A-Za-z._-]+|{ipv6})(?::{port})?)$")
}

fn connection_age_pattern() -> String {
    let [min, max] = CONNECTION_AGES.map(std::time::Duration::from_micros);
    format!("^off$|{}", duration::pattern(min, max))
}

/// Returns the expression of host names, with `*.` for all names below one.
fn host_pattern() -> String {
    const LABEL: &str = "[0-9A-Za-z_-]+";
    format!(r"^(?:\*\.)?(?=.{{1,{MAX_NAME_BYTES}}}\.?$){LABEL}(?:\.{LABEL})*\.?$")
}

/// Returns the expression of names in certificates: host names and addresses.
fn server_name_pattern() -> String {
    const LABEL: &str = "[0-9A-Za-z_](?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?";
    const NUMBER: &str = r"[0-9]+\.?$";
    let name = format!(r"(?=.{{1,253}}$)(?!(?:.*\.)?{NUMBER})(?:{LABEL}\.)*{LABEL}\.?");
    format!("^(?:{}|{}|{name})$", ipv4(), ipv6())
}

/// Expression of files, folders and patterns of Envoy's rules.
const RULE_FILE: &str = r"^(?!(?:[\s\S]*/)?\*\*(?:/|$))\s*\S";

/// Defines a type that only has a schema.
macro_rules! schema_type {
    ($(#[$doc:meta])* $name:ident, $schema:expr) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

schema_type!(
    /// Address to listen on.
    Address,
    json_schema!({"type": "string", "pattern": address_pattern()})
);
schema_type!(
    /// Permissions of a file, in octal.
    Permissions,
    json_schema!({"type": "string", "pattern": "^0?[0-7]{3}$"})
);
schema_type!(
    /// Age of a connection, or `off`.
    ConnectionAge,
    json_schema!({"type": "string", "pattern": connection_age_pattern()})
);
schema_type!(
    /// Name of a host, or `*.` and a name.
    HostName,
    json_schema!({"type": TEXT_TYPES, "pattern": host_pattern()})
);
schema_type!(
    /// Address or network of proxies.
    Network,
    json_schema!({"type": "string", "pattern": network_pattern()})
);
schema_type!(
    /// URL of a Redis server or Sentinel.
    RedisUrl,
    json_schema!({"type": "string", "pattern": server_pattern()})
);
schema_type!(
    /// URL of a Redis server, or those of some nodes of a cluster.
    RedisUrls,
    json_schema!({
        "type": ["string", "array"],
        "pattern": server_pattern(),
        "items": {"type": "string", "pattern": node_pattern()},
        "minItems": 1
    })
);
schema_type!(
    /// URL of an upstream.
    UpstreamUrl,
    json_schema!({"type": "string", "pattern": upstream_pattern()})
);
schema_type!(
    /// Origin of scripts, or `*`.
    Origin,
    json_schema!({"type": "string", "pattern": origin_pattern()})
);
schema_type!(
    /// Name of a header, or `*`.
    HeaderName,
    json_schema!({"type": TEXT_TYPES, "pattern": format!("^{HEADER_NAME}+$")})
);
schema_type!(
    /// File, folder or pattern of Envoy's rules.
    RuleFile,
    json_schema!({"type": TEXT_TYPES, "pattern": RULE_FILE})
);
schema_type!(
    /// Prefix of the keys in Redis.
    Prefix,
    json_schema!({"type": TEXT_TYPES, "pattern": r"^[^{}\u0000-\u001f\u007f-\u009f]+$"})
);
schema_type!(
    /// Name of a primary.
    Master,
    json_schema!({"type": TEXT_TYPES, "minLength": 1})
);
schema_type!(
    /// Name in a certificate.
    ServerName,
    json_schema!({"type": ["string", "boolean"], "pattern": server_name_pattern()})
);
schema_type!(
    /// Text that must not be blank, such as a token.
    NotBlank,
    json_schema!({"type": TEXT_TYPES, "pattern": r"\S"})
);

schema_type!(
    /// Name of a token.
    TokenName,
    json_schema!({
        "type": TEXT_TYPES,
        "pattern": format!("^[0-9A-Za-z._-]{{1,{MAX_TOKEN_NAME_BYTES}}}$")
    })
);
schema_type!(
    /// Permission of a token.
    TokenScope,
    json_schema!({"type": "string", "pattern": "^(?:acquire|refund|reset|read)$"})
);

/// Requires a token for an admin listener, or a Redis protocol, that others can reach.
pub(super) fn add_config_rules(schema: &mut Schema) {
    let rule = |listener: &str, token: &str, scopes: &str| {
        let with_scope = json!({"scopes": {"contains": {"type": "string", "pattern": scopes}}});
        json!({
            "if": {
                "required": ["listen"],
                "properties": {"listen": {
                    "type": "object",
                    "required": [listener],
                    "properties": {listener: {"type": "string", "not": {"pattern": LOOPBACK}}}
                }}
            },
            "then": {
                "required": ["auth"],
                "properties": {"auth": {
                    "type": "object",
                    "anyOf": [
                        {"required": [token]},
                        has(&format!("{token}_file")),
                        {
                            "required": ["tokens"],
                            "properties": {"tokens": {"contains": {"properties": with_scope}}}
                        }
                    ]
                }}
            }
        })
    };
    let rules = json!([
        rule("admin", "admin_token", "^(?:read|reset)$"),
        rule("resp", "api_token", "^(?:acquire|refund)$")
    ]);
    // A file that is being written is empty at first.
    schema.insert("minProperties".to_owned(), json!(1));
    schema.insert("allOf".to_owned(), rules);
}

/// Forbids a token that is also in a file.
pub(super) fn add_auth_rules(schema: &mut Schema) {
    let rules = ["api_token", "admin_token"].map(in_one_place);
    schema.insert("allOf".to_owned(), json!(rules));
}

/// Requires a token, in one place.
pub(super) fn add_token_rules(schema: &mut Schema) {
    let one = json!({"anyOf": [{"required": ["token"]}, has("token_file")]});
    schema.insert("allOf".to_owned(), json!([in_one_place("token"), one]));
}

fn in_one_place(token: &str) -> Value {
    let file = format!("{token}_file");
    json!({"if": {"required": [token]}, "then": {"properties": {file: {"type": "null"}}}})
}

/// Forbids two kinds of servers or two passwords at once, certificates without TLS, and a password
/// without servers.
pub(super) fn add_store_rules(schema: &mut Schema) {
    let with_tls = json!({"pattern": TLS_SCHEME, "items": {"pattern": TLS_SCHEME}});
    let has_password = json!({"type": "string", "pattern": PASSWORD});
    let no_password = json!({"not": has_password, "items": {"not": has_password}});
    let rules = json!([
        {
            "if": {"required": ["redis"]},
            "then": {"properties": {"sentinel": {"type": "null"}}}
        },
        {
            "if": has("tls"),
            "then": {"properties": {
                "redis": with_tls,
                "sentinel": {"properties": {"nodes": with_tls}}
            }}
        },
        {
            "if": has("password_file"),
            "then": {
                "anyOf": [has("redis"), has("sentinel")],
                "properties": {
                    "redis": no_password,
                    "sentinel": {"properties": {"nodes": no_password}}
                }
            }
        }
    ]);
    schema.insert("allOf".to_owned(), rules);
}

/// Requires a password with a user, and forbids two.
pub(super) fn add_sentinel_rules(schema: &mut Schema) {
    let rules = json!([
        {
            "if": has("username"),
            "then": {"anyOf": [has("password"), has("password_file")]}
        },
        {
            "if": {"required": ["password"]},
            "then": {"properties": {"password_file": {"type": "null"}}}
        }
    ]);
    schema.insert("allOf".to_owned(), rules);
}

/// Requires certificates of clients with lists of revoked ones.
pub(super) fn add_listener_tls_rules(schema: &mut Schema) {
    schema.insert("allOf".to_owned(), json!([requires("client_crl", "client_ca")]));
}

/// Requires certificate and key together.
pub(super) fn add_tls_rules(schema: &mut Schema) {
    let rules = [requires("certificate", "key"), requires("key", "certificate")];
    schema.insert("allOf".to_owned(), json!(rules));
}

/// Forbids `*` beside other origins, and with credentials.
pub(super) fn add_cors_rules(schema: &mut Schema) {
    let without_any = || json!({"items": {"not": {"const": "*"}}});
    let rules = json!([
        {
            "if": {"properties": {"allow_origins": {"contains": {"const": "*"}}}},
            "then": {"properties": {"allow_origins": {"maxItems": 1}}}
        },
        {
            "if": {
                "required": ["allow_credentials"],
                "properties": {"allow_credentials": {"const": true}}
            },
            "then": {"properties": {
                "allow_origins": without_any(),
                "expose_headers": without_any()
            }}
        }
    ]);
    schema.insert("allOf".to_owned(), rules);
}

/// Returns the condition that a field has a value.
fn has(field: &str) -> Value {
    json!({"required": [field], "properties": {field: {"not": {"type": "null"}}}})
}

fn requires(field: &str, other: &str) -> Value {
    json!({"if": has(field), "then": has(other)})
}
