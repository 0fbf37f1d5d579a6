//! Configuration as it is written in the file. `config.rs` validates it.

use std::collections::BTreeMap;
use std::fmt;

use crate::policies::{OneOrMany, RawPaths, RawPolicy};
use crate::yaml::{Bounded, BoundedDuration, Flag, Ratio, duration};
use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer};
use serde_json::json;
use serde_saphyr::Spanned;
use tidegate::{Algorithm, OnExpire, OnStoreFailure};

use super::AccessLogFormat;
use super::listen::UnixMode;
use super::schema::{
    ADDRESS, AUTHORITY, NETWORK, ORIGIN, PERMISSIONS, REDIS_URL, SCOPE, UPSTREAM, add_cors_rules,
    excludes, has, needs, redis_urls, rules,
};

/// Timeout of a decision, in microseconds: no request should wait longer than a minute.
pub(super) type StoreTimeout = BoundedDuration<1_000, 60_000_000>;

/// Timeout of the gateway, in microseconds: from a millisecond to a day.
pub(super) type GatewayTimeout = BoundedDuration<1_000, 86_400_000_000>;

/// Time for which a listener accepts requests after a signal to stop, in microseconds: at most five
/// minutes.
pub(super) type ShutdownDelay = BoundedDuration<0, 300_000_000>;

/// Idle timeout of connections, in microseconds: from a second to a day.
pub(super) type IdleTimeout = BoundedDuration<1_000_000, 86_400_000_000>;

/// Configuration of `tidegate serve` and `tidegate gateway`.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Config")]
pub(super) struct RawConfig {
    pub(super) listen: RawListen,
    pub(super) store: RawStore,
    pub(super) client_ip: RawClientIp,
    pub(super) auth: RawAuth,
    pub(super) tls: Option<RawTls>,
    pub(super) headers: RawHeaders,
    pub(super) envoy: RawEnvoy,
    pub(super) gateway: RawGateway,
    pub(super) paths: RawPaths,
    pub(super) log_denials: Option<RawLogDenials>,
    /// Attributes that API clients send in addition to the built-in ones, such as tenant. Any other
    /// name is an error.
    #[schemars(with = "Vec<String>", inner(length(min = 1)))]
    pub(super) attributes: Vec<Spanned<String>>,
    /// Rate limit policies. Every policy that applies to a request must allow it.
    pub(super) policies: Vec<RawPolicy>,
}

/// Addresses to listen on: `IP:PORT`, or `unix:PATH` for a Unix socket.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Listen")]
pub(super) struct RawListen {
    /// HTTP API; 127.0.0.1:8080 by default.
    #[schemars(with = "Option<String>", pattern(ADDRESS))]
    pub(super) http: Option<Spanned<String>>,
    /// Envoy's rate limit service; 127.0.0.1:8081 by default.
    #[schemars(with = "Option<String>", pattern(ADDRESS))]
    pub(super) grpc: Option<Spanned<String>>,
    /// Metrics and health; 127.0.0.1:8082 by default. Other than loopback only with
    /// `auth.admin_token`, or a token with the scope read or reset.
    #[schemars(with = "Option<String>", pattern(ADDRESS))]
    pub(super) admin: Option<Spanned<String>>,
    /// Requests of `tidegate gateway`; 127.0.0.1:8000 by default.
    #[schemars(with = "Option<String>", pattern(ADDRESS))]
    pub(super) gateway: Option<Spanned<String>>,
    /// Redis protocol, for any Redis client; off by default. Other than loopback only with
    /// `auth.api_token`, or a token with the scope acquire or refund.
    #[schemars(with = "Option<String>", pattern(ADDRESS))]
    pub(super) resp: Option<Spanned<String>>,
    /// Permissions of the files of Unix sockets, in octal; '660' by default: the user and the group
    /// of this process may connect.
    #[schemars(with = "Option<String>", pattern(PERMISSIONS))]
    pub(super) unix_mode: Option<UnixMode>,
    /// Age at which connections to http, grpc and gateway are closed after their requests in
    /// flight, so that clients distribute them again over the instances behind a load balancer; 1h
    /// by default, varied by 10 %; `off` for never.
    #[schemars(with = "Option<String>", pattern(format!("^off$|{}", duration::PATTERN)))]
    pub(super) max_connection_age: Option<Spanned<String>>,
    /// Time without a request after which a connection is closed, from 1s to 1d; 75s by default,
    /// and 5m on resp, whose clients keep pools of connections. Pings do not count. Must be longer than the time for which a load balancer keeps idle
    /// connections.
    pub(super) idle_timeout: Option<IdleTimeout>,
    /// Maximum number of connections of each listener; 16384 by default. A further one gets the
    /// place of the connection that has been idle for longest. If none is idle, it is refused.
    pub(super) max_connections: Option<Bounded<1, 1_000_000>>,
    /// Maximum number of connections of each listener from one IPv4 address, or from one network of
    /// IPv6 addresses (`client_ip.ipv6_prefix`); half of `max_connections` by default. Trusted
    /// proxies (`client_ip.trusted_proxies`) and Unix sockets are not limited.
    pub(super) max_connections_per_address: Option<Bounded<1, 1_000_000>>,
    /// Time after SIGTERM or SIGINT for which requests are still accepted, while `/readyz` is
    /// already 503; 0s by default. It lets load balancers notice before the listeners close. A
    /// second signal ends it.
    pub(super) shutdown_delay: Option<ShutdownDelay>,
    /// Host names by which http and admin are called, such as `tidegate.example.com` or
    /// `*.example.com`. On loopback, a listener without a token serves only these names, IP
    /// addresses and localhost; on other addresses this restricts only browsers.
    #[schemars(with = "Vec<String>", length(max = 100), inner(length(min = 1)))]
    pub(super) allowed_hosts: Vec<Spanned<String>>,
    /// Addresses or networks of balancers whose connections must start with a header of the PROXY
    /// protocol, version 1 or 2, on every listener. The client that it names is the peer of the
    /// connection. Other connections have no header.
    #[schemars(with = "Vec<String>", inner(pattern(NETWORK)))]
    pub(super) proxy_protocol: Vec<Spanned<String>>,
}

/// Store of the counters. Without `redis` or `sentinel` they are kept in memory.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Store", transform = rules([
    excludes("redis", "sentinel"), needs("password_file", &["redis", "sentinel"]),
    json!({
        "if": {"required": ["heartbeat"], "properties": {"heartbeat": {"enum": ["off", false, "false"]}}},
        "then": {"properties": {"instances": {"maximum": 1}}}
    })
]))]
pub(super) struct RawStore {
    /// `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS; a list of some
    /// nodes for a cluster.
    #[serde(deserialize_with = "present")]
    #[schemars(schema_with = "redis_urls")]
    pub(super) redis: Option<Spanned<Option<OneOrMany>>>,
    #[schemars(with = "Option<RawSentinel>")]
    pub(super) sentinel: Option<Spanned<RawSentinel>>,
    /// Certificates for `rediss://`. By default the system's roots are trusted, and no client
    /// certificate is sent.
    #[schemars(with = "Option<RawStoreTls>")]
    pub(super) tls: Option<Spanned<RawStoreTls>>,
    /// File with the password for the URLs of `redis` or of `sentinel.nodes`, which then have none.
    /// The path is relative to the directory of this file.
    #[schemars(with = "Option<String>")]
    pub(super) password_file: Option<Spanned<String>>,
    /// Prefix of every key in Redis; `rate_limit` by default.
    #[schemars(with = "Option<String>", length(min = 1))]
    pub(super) prefix: Option<Spanned<String>>,
    /// Timeout of a decision by Redis; 100ms by default.
    pub(super) timeout: Option<StoreTimeout>,
    /// Whether one call may decide keys of several slots of a cluster node; true by default. It needs
    /// Redis 7 or Valkey, and a node that refuses it gets one call per slot.
    pub(super) cross_slot: Option<Flag>,
    /// Clock of decisions by Redis: `server`, which is the default, or `estimated` for servers that
    /// refuse TIME in scripts. A server that refuses it gets an estimated clock anyway.
    #[schemars(with = "Option<String>", pattern("^(server|estimated)$"))]
    pub(super) clock: Option<Spanned<String>>,
    /// Whether commands are sent to Redis without a request: heartbeats, health checks, polls; `on`
    /// by default. `off` is for a single instance, where each command is billed.
    #[schemars(extend("enum" = ["on", "off", true, false, "true", "false", null]))]
    #[schemars(with = "serde_json::Value")]
    pub(super) heartbeat: Option<Spanned<String>>,
    /// Minimum number of instances of Tidegate. During an outage of Redis, each instance enforces
    /// its share of the limits. Instances learn their number through Redis; this setting is for
    /// those that start during an outage, which otherwise assume 10.
    #[schemars(with = "Option<Bounded<1, 10_000>>")]
    pub(super) instances: Option<Spanned<Bounded<1, 10_000>>>,
    /// Maximum number of keys in memory; 10,000,000 by default.
    pub(super) max_keys: Option<Bounded<1, 1_000_000_000_000>>,
}

/// Redis behind Sentinels.
#[derive(serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Sentinel", transform = rules([
    needs("username", &["password", "password_file"]), excludes("password", "password_file")
]))]
pub(super) struct RawSentinel {
    /// Name of the primary, as in `sentinel monitor NAME …`.
    #[schemars(with = "String", length(min = 1))]
    pub(super) master: Spanned<String>,
    /// Sentinels, `redis://[user:password@]host[:port]`.
    #[schemars(with = "Vec<String>", length(min = 1), inner(pattern(REDIS_URL)))]
    pub(super) nodes: Spanned<Vec<String>>,
    /// User on the Redis servers, if it differs from the one on the Sentinels.
    #[schemars(with = "Option<String>")]
    pub(super) username: Option<Spanned<String>>,
    /// Password on the Redis servers, if it differs from the one on the Sentinels.
    #[serde(default, deserialize_with = "present")]
    #[schemars(with = "String")]
    pub(super) password: Option<Spanned<Option<String>>>,
    /// File with that password, instead of `password`. The path is relative to the directory of
    /// this file.
    #[schemars(with = "Option<String>")]
    pub(super) password_file: Option<Spanned<String>>,
}

/// TLS towards Redis. Paths are relative to the directory of this file.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "StoreTls", transform = rules([
    needs("certificate", &["key"]), needs("key", &["certificate"])
]))]
pub(super) struct RawStoreTls {
    /// CA of the servers' certificates, in PEM; the system's roots by default.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// Client certificate, in PEM; requires `key`.
    #[schemars(with = "Option<String>")]
    pub(super) certificate: Option<Spanned<String>>,
    /// Private key of the client certificate, in PEM.
    #[schemars(with = "Option<String>")]
    pub(super) key: Option<Spanned<String>>,
    /// Name that the servers' certificates must have, for servers whose address is not in them. A
    /// cluster's announced host names have precedence. The host of the URL by default.
    #[schemars(with = "Option<String>", length(min = 1))]
    pub(super) server_name: Option<Spanned<String>>,
    /// Whether the servers' certificates must have that name; true by default. Without it, any
    /// certificate of the CA will do.
    pub(super) verify_name: Option<Flag>,
}

impl fmt::Debug for RawStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// Detection of the client's address, where the caller does not send it.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "ClientIp")]
pub(super) struct RawClientIp {
    /// Networks whose `X-Forwarded-For` (or `Forwarded`) is trusted. These proxies must set the
    /// header themselves: one that they only pass on comes from the client. Without any, the peer's
    /// address is used.
    #[schemars(with = "Vec<String>", inner(pattern(NETWORK)))]
    pub(super) trusted_proxies: Vec<Spanned<String>>,
    /// Prefix length by which IPv6 clients are grouped; 64 by default.
    pub(super) ipv6_prefix: Option<Bounded<1, 128>>,
}

/// Authentication of API and admin clients.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Auth", transform = rules([
    excludes("api_token", "api_token_file"), excludes("admin_token", "admin_token_file")
]))]
pub(super) struct RawAuth {
    /// Bearer token for the API, over HTTP and gRPC (`authorization: Bearer …`), and the password
    /// of Redis clients (`AUTH`): the short form of an entry of `tokens` with the scopes acquire
    /// and refund.
    #[serde(deserialize_with = "present")]
    #[schemars(with = "String", length(min = 1))]
    pub(super) api_token: Option<Spanned<Option<String>>>,
    /// File with that token, instead of `api_token`. The path is relative to the directory of this
    /// file. A changed file is reloaded.
    #[schemars(with = "Option<String>")]
    pub(super) api_token_file: Option<Spanned<String>>,
    /// Bearer token for the admin listener; /healthz and /readyz work without it. It is also the
    /// password of the user admin of the Redis protocol, who may reset counts. It has all scopes,
    /// but alone it does not close the API.
    #[serde(deserialize_with = "present")]
    #[schemars(with = "String", length(min = 1))]
    pub(super) admin_token: Option<Spanned<Option<String>>>,
    /// File with that token, instead of `admin_token`.
    #[schemars(with = "Option<String>")]
    pub(super) admin_token_file: Option<Spanned<String>>,
    /// Tokens with names and scopes. One with the scope acquire or refund closes the API to clients
    /// without a token, one with read or reset the admin listener.
    pub(super) tokens: Vec<RawToken>,
}

/// Token of some clients, which log lines name.
#[derive(serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Token", transform = rules([
    excludes("token", "token_file"), json!({"anyOf": [has("token"), has("token_file")]})
]))]
pub(super) struct RawToken {
    /// Name in log lines and errors, and of the user of Redis clients; unique.
    #[schemars(with = "String", length(min = 1))]
    pub(super) name: Spanned<String>,
    /// The token, such as `${CI_TOKEN}`.
    #[serde(default, deserialize_with = "present")]
    #[schemars(with = "String", length(min = 1))]
    pub(super) token: Option<Spanned<Option<String>>>,
    /// File with the token, instead of `token`. The path is relative to the directory of this file.
    /// A changed file is reloaded.
    #[schemars(with = "Option<String>")]
    pub(super) token_file: Option<Spanned<String>>,
    /// Permissions: `acquire` (acquire, report and peek), `refund`, `reset`, `read` (peek, and the
    /// data of the admin listener).
    #[schemars(with = "Vec<String>", length(min = 1), inner(pattern(SCOPE)))]
    pub(super) scopes: Spanned<Vec<Spanned<String>>>,
}

/// Deserializes a field so that a missing value differs from a missing field: in YAML, `!word` and
/// `&word` have no value.
fn present<'de, D, T>(deserializer: D) -> Result<Option<Spanned<Option<T>>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Spanned::deserialize(deserializer).map(Some)
}

impl fmt::Debug for RawAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").finish_non_exhaustive()
    }
}

/// TLS on http, grpc, gateway and resp, optionally on admin. Paths are relative to the directory of this
/// file. Changed files are reloaded.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Tls", transform = rules([needs("client_crl", &["client_ca"])]))]
pub(super) struct RawTls {
    /// Certificate chain, in PEM.
    #[schemars(with = "String")]
    pub(super) certificate: Spanned<String>,
    /// Private key, in PEM.
    #[schemars(with = "String")]
    pub(super) key: Spanned<String>,
    /// CA that must have signed the certificate of every client, in PEM. By default clients need no
    /// certificate.
    #[schemars(with = "Option<String>")]
    pub(super) client_ca: Option<Spanned<String>>,
    /// Lists of revoked client certificates (CRLs), in PEM: one of every CA in `client_ca`, and of
    /// every intermediate CA.
    #[schemars(with = "Option<String>")]
    pub(super) client_crl: Option<Spanned<String>>,
    /// Use the certificate on the admin listener, too; false by default. Its clients need no
    /// certificate, because probes have none.
    #[serde(default)]
    pub(super) admin: Flag,
}

/// Headers of responses.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Headers")]
pub(super) struct RawHeaders {
    /// Also send the older `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    pub(super) x_ratelimit: Flag,
    /// Also send the partition key (`pk`) in `RateLimit` and `RateLimit-Policy`: the first 16 bytes
    /// of the SHA-256 of the policy's key. By default it is not sent.
    pub(super) partition_key: Flag,
}

impl Default for RawHeaders {
    fn default() -> Self {
        Self { x_ratelimit: Flag::new(true), partition_key: Flag::new(false) }
    }
}

/// Rules of envoyproxy/ratelimit, for Envoy's rate limit service.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Envoy", transform = rules([
    json!({"if": has("xds"), "then": {"properties": {"files": {"maxItems": 0}}}})
]))]
pub(super) struct RawEnvoy {
    /// YAML files of envoyproxy/ratelimit, unmodified: files, folders (their `.yaml` and `.yml`
    /// files) and patterns with `*` and `?`. Paths are relative to the directory of this file. Names
    /// that start with a dot are skipped. Files of one domain are merged.
    #[schemars(with = "Vec<String>", inner(length(min = 1)))]
    pub(super) files: Vec<Spanned<String>>,
    #[schemars(with = "Option<RawXds>")]
    pub(super) xds: Option<Spanned<RawXds>>,
    /// Algorithm of the rules; fixed-window by default.
    #[schemars(with = "Option<Algorithm>")]
    pub(super) algorithm: Option<Spanned<String>>,
    /// Algorithms of single rules, by the name of the rule.
    #[schemars(with = "BTreeMap<String, Algorithm>")]
    pub(super) algorithms: BTreeMap<String, Spanned<String>>,
    /// Key of the descriptor entry that has the id of a request. It is not a part of the descriptor:
    /// rules do not match it, and counts do not depend on it. Rules need it that hold units until a
    /// request ends: those of `holds`, and those with the algorithm concurrency.
    #[schemars(with = "Option<String>", length(min = 1))]
    pub(super) hold_id: Option<Spanned<String>>,
    /// Holds of single rules, by the name of the rule.
    #[schemars(with = "BTreeMap<String, RawRuleHolds>")]
    pub(super) holds: BTreeMap<String, Spanned<RawRuleHolds>>,
    /// Decision of the rules while the store is unavailable: local (default), allow, deny, or
    /// error, which ends the call with UNAVAILABLE, so that Envoy's `failure_mode_deny` decides.
    #[schemars(with = "Option<OnStoreFailure>")]
    pub(super) on_store_failure: Option<Spanned<String>>,
    /// Decisions of single rules while the store is unavailable, by the name of the rule.
    #[schemars(with = "BTreeMap<String, OnStoreFailure>")]
    pub(super) on_store_failures: BTreeMap<String, Spanned<String>>,
    /// Let every request pass: limits are decided and counted, but none denies; false by default.
    pub(super) shadow_mode: Flag,
    /// Send `dynamic_metadata` in responses: the domain, the descriptors, and the `metadata` of the
    /// rules that allow the request; false by default.
    pub(super) dynamic_metadata: Flag,
    /// Part of a limit from which on units count in `tidegate_near_limit_total`; 0.8 by default.
    pub(super) near_limit_ratio: Option<Ratio>,
}

/// Control plane that sends the rules by xDS, in place of `files`: a stream of aggregated discovery
/// (ADS) with all rules, one resource for each domain, as envoyproxy/ratelimit has it.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Xds")]
pub(super) struct RawXds {
    /// Address of the control plane, `HOST:PORT`.
    #[schemars(with = "String", pattern(AUTHORITY))]
    pub(super) server: Spanned<String>,
    /// Id of this node, by which the control plane selects the rules; `tidegate` by default.
    #[schemars(with = "Option<String>")]
    pub(super) node_id: Option<Spanned<String>>,
    #[schemars(with = "Option<RawXdsTls>")]
    pub(super) tls: Option<Spanned<RawXdsTls>>,
}

/// TLS towards the control plane; without it the connection is in plain text. Paths are relative to
/// the directory of this file. The files are read again for every connection.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "XdsTls", transform = rules([
    needs("certificate", &["key"]), needs("key", &["certificate"])
]))]
pub(super) struct RawXdsTls {
    /// CA of the control plane's certificate, in PEM; the system's roots by default.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// Client certificate, in PEM; requires `key`.
    #[schemars(with = "Option<String>")]
    pub(super) certificate: Option<Spanned<String>>,
    /// Private key of the client certificate, in PEM.
    #[schemars(with = "Option<String>")]
    pub(super) key: Option<Spanned<String>>,
    /// Name that the control plane's certificate must have; the host of `server` by default.
    #[schemars(with = "Option<String>", length(min = 1))]
    pub(super) server_name: Option<Spanned<String>>,
}

/// Units that requests hold until they end.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "RuleHolds")]
pub(super) struct RawRuleHolds {
    /// Units that a request takes when it starts. Those that it used are reported at its end, and
    /// the rest returns to the time of its start. For all algorithms but concurrency.
    pub(super) reserve: Option<Bounded<1, { u32::MAX as u64 }>>,
    /// Time after which a request holds nothing any more, from 1s to 24h; the window of the rule by
    /// default, but from 1m to 1h.
    pub(super) ttl: Option<BoundedDuration<1_000_000, 86_400_000_000>>,
    /// Treatment of the reserved units of a request that has not ended by then: charge (default) or
    /// release.
    #[schemars(with = "Option<OnExpire>")]
    pub(super) on_expire: Option<Spanned<String>>,
}

/// Upstreams of `tidegate gateway`.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Gateway")]
pub(super) struct RawGateway {
    /// `http://HOST[:PORT][/BASE]`, `https://…` or `unix:PATH` for HTTP/1.1, `h2c://…` or `h2://…`
    /// for HTTP/2. Several are used in turns.
    #[schemars(with = "Vec<String>", inner(pattern(UPSTREAM)))]
    pub(super) upstreams: Vec<Spanned<String>>,
    /// CA of the upstreams' certificates, in PEM; the system's roots by default. The path is
    /// relative to the directory of this file. A changed file is reloaded.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// Timeout for connecting to an upstream, including TLS; 2s by default.
    pub(super) connect_timeout: Option<GatewayTimeout>,
    /// Timeout for the response head of an upstream; 30s by default.
    pub(super) header_timeout: Option<GatewayTimeout>,
    /// Idle timeout of bodies and upgraded connections; 60s by default.
    pub(super) idle_timeout: Option<GatewayTimeout>,
    /// Minimum rate of request bodies, in bytes per second; 240 by default, 0 for none. A client
    /// that falls behind it by `idle_timeout` gets 408. Time in which the upstream does not read is
    /// not counted. Streams of gRPC, and bodies during the upstream's response, have no minimum.
    pub(super) min_upload_rate: Option<Bounded<0, 1_000_000_000>>,
    /// Maximum number of requests in flight to each upstream, which over HTTP/1.1 is also that of
    /// its connections; 1024 by default.
    pub(super) max_connections: Option<Bounded<1, 1_000_000>>,
    /// Maximum number of requests that wait for an upstream with `max_connections`; 1024 by
    /// default. Any further one gets 503.
    pub(super) max_pending: Option<Bounded<0, 1_000_000>>,
    /// Time for which such a request waits before it gets 503; 5s by default.
    pub(super) pending_timeout: Option<GatewayTimeout>,
    /// Forward headers with an underscore in their name; false by default, because many
    /// applications cannot distinguish `X_User_Id` from `X-User-Id`.
    pub(super) underscore_headers: Flag,
    /// Forward CORS preflight requests (`OPTIONS` with `Origin` and
    /// `Access-Control-Request-Method`) without counting them. Browsers send them automatically and
    /// without credentials.
    pub(super) exempt_preflight: Flag,
    /// CORS headers of the responses that the gateway makes itself, such as 429, so that scripts of
    /// these origins can read them.
    pub(super) cors: Option<RawCors>,
    pub(super) access_log: Option<RawAccessLog>,
}

/// CORS headers of the gateway's own responses. Responses of an upstream keep its headers.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Cors", transform = add_cors_rules)]
pub(super) struct RawCors {
    /// Origins whose scripts may read the responses, such as `https://app.example.com`; or `*`
    /// alone for all.
    #[schemars(with = "Vec<String>", length(min = 1, max = 100), inner(pattern(ORIGIN)))]
    pub(super) allow_origins: Spanned<Vec<Spanned<String>>>,
    /// Also allow requests with cookies or other credentials. It requires a list of origins instead
    /// of `*`.
    #[serde(default)]
    pub(super) allow_credentials: Flag,
    /// Headers that scripts may read; by default those that the gateway adds: `RateLimit`,
    /// `RateLimit-Policy`, `Retry-After` and `X-RateLimit-*`. They are also added to the list of an
    /// upstream that sends CORS headers.
    #[schemars(with = "Option<Vec<String>>", length(max = 100), inner(length(min = 1)))]
    pub(super) expose_headers: Option<Spanned<Vec<Spanned<String>>>>,
}

/// Access log of `tidegate gateway`: one line per request, written when its response has ended.
/// Off by default.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "AccessLog")]
pub(super) struct RawAccessLog {
    /// File to append to, relative to the directory of this file; or `stdout` or `stderr`. A file
    /// that was moved is opened again.
    #[schemars(with = "String", length(min = 1))]
    pub(super) path: Spanned<String>,
    /// Format of a line; `combined` by default.
    #[schemars(with = "Option<AccessLogFormat>")]
    pub(super) format: Option<Spanned<String>>,
    /// Whether query strings are logged, in the request line and in the referer; true by default.
    /// Queries may contain secrets.
    #[serde(default = "enabled")]
    pub(super) query: Flag,
}

fn enabled() -> Flag {
    Flag::new(true)
}

/// Log lines of denied requests, with the policy and the key. Off by default.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "LogDenials")]
pub(super) struct RawLogDenials {
    /// Part of the denied requests that is logged, from 0 to 1; 1 by default.
    pub(super) ratio: Option<Ratio>,
    /// Maximum number of lines per second; 10 by default. The next line has the number of those
    /// that were suppressed.
    pub(super) max_per_second: Option<Bounded<1, 10_000>>,
}
