//! Configuration as it is written in the file. `config.rs` validates it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer};
use serde_saphyr::Spanned;
use tidegate::internals::{Bounded, OneOrMany, RawPaths, RawPolicy};
use tidegate::{Algorithm, OnStoreFailure};

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
    /// Attributes that API clients send in addition to the built-in ones, such as tenant. Any other
    /// name is an error.
    #[schemars(
        with = "BTreeSet<String>",
        inner(regex(
            pattern = r"^(?!(ip|method|path|host|domain|header|query|cookie|descriptor)$|(header|query|cookie|descriptor)\.)\S+$"
        ))
    )]
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
    #[schemars(with = "Option<String>")]
    pub(super) http: Option<Spanned<String>>,
    /// Envoy's rate limit service; 127.0.0.1:8081 by default.
    #[schemars(with = "Option<String>")]
    pub(super) grpc: Option<Spanned<String>>,
    /// Metrics and health; 127.0.0.1:8082 by default. Other than loopback only with
    /// `auth.admin_token`.
    #[schemars(with = "Option<String>")]
    pub(super) admin: Option<Spanned<String>>,
    /// Requests of `tidegate gateway`; 127.0.0.1:8000 by default.
    #[schemars(with = "Option<String>")]
    pub(super) gateway: Option<Spanned<String>>,
    /// Permissions of the files of Unix sockets, in octal; '660' by default: the user and the group
    /// of this process may connect.
    #[schemars(with = "Option<String>", regex(pattern = r"^0?[0-7]{3}$"))]
    pub(super) unix_mode: Option<Spanned<String>>,
    /// Age at which connections to http, grpc and gateway are closed after their requests in
    /// flight, so that clients distribute them again over the instances behind a load balancer; 1h
    /// by default, varied by 10 %; `off` for never.
    #[schemars(with = "Option<String>")]
    pub(super) max_connection_age: Option<Spanned<String>>,
    /// Time without a request after which a connection is closed, from 1s to 1d; 75s by default.
    /// Pings do not count. Must be longer than the time for which a load balancer keeps idle
    /// connections.
    #[schemars(with = "Option<String>")]
    pub(super) idle_timeout: Option<Spanned<String>>,
    /// Maximum number of connections of each listener; 16384 by default. A further one gets the
    /// place of the connection that has been idle for longest. If none is idle, it is refused.
    pub(super) max_connections: Option<Bounded<1, 1_000_000>>,
    /// Maximum number of connections of each listener from one IPv4 address, or from one network of
    /// IPv6 addresses (`client_ip.ipv6_prefix`); half of `max_connections` by default. Trusted
    /// proxies (`client_ip.trusted_proxies`) and Unix sockets are not limited.
    pub(super) max_connections_per_address: Option<Bounded<1, 1_000_000>>,
}

/// Store of the counters. Without `redis` or `sentinel` they are kept in memory.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Store")]
pub(super) struct RawStore {
    /// `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS; a list of some
    /// nodes for a cluster.
    #[serde(deserialize_with = "present")]
    #[schemars(with = "Option<OneOrMany>")]
    pub(super) redis: Option<Spanned<Option<OneOrMany>>>,
    #[schemars(with = "Option<RawSentinel>")]
    pub(super) sentinel: Option<Spanned<RawSentinel>>,
    /// Certificates for `rediss://`. By default the system's roots are trusted, and no client
    /// certificate is sent.
    #[schemars(with = "Option<RawStoreTls>")]
    pub(super) tls: Option<Spanned<RawStoreTls>>,
    /// Prefix of every key in Redis; `rate_limit` by default.
    #[schemars(with = "Option<String>")]
    pub(super) prefix: Option<Spanned<String>>,
    /// Timeout of a decision by Redis; 100ms by default.
    #[schemars(with = "Option<String>")]
    pub(super) timeout: Option<Spanned<String>>,
    /// Minimum number of instances of Tidegate. During an outage of Redis, each instance enforces
    /// its share of the limits. Instances learn their number through Redis; this setting is for
    /// those that start during an outage, which otherwise assume 10.
    pub(super) instances: Option<Bounded<1, 10_000>>,
    /// Maximum number of keys in memory; 10,000,000 by default.
    pub(super) max_keys: Option<Bounded<1, 1_000_000_000_000>>,
}

/// Redis behind Sentinels.
#[derive(serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Sentinel")]
pub(super) struct RawSentinel {
    /// Name of the primary, as in `sentinel monitor NAME …`.
    pub(super) master: String,
    /// Sentinels, `redis://[user:password@]host[:port]`.
    #[schemars(with = "Vec<String>")]
    pub(super) nodes: Spanned<Vec<String>>,
    /// User on the Redis servers, if it differs from the one on the Sentinels.
    #[schemars(with = "Option<String>")]
    pub(super) username: Option<Spanned<String>>,
    /// Password on the Redis servers, if it differs from the one on the Sentinels.
    #[serde(default, deserialize_with = "present")]
    #[schemars(with = "Option<String>")]
    pub(super) password: Option<Spanned<Option<String>>>,
}

/// TLS towards Redis. Paths are relative to the directory of this file.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "StoreTls")]
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
    #[schemars(with = "Vec<String>")]
    pub(super) trusted_proxies: Vec<Spanned<String>>,
    /// Prefix length by which IPv6 clients are grouped; 64 by default.
    pub(super) ipv6_prefix: Option<Bounded<1, 128>>,
}

/// Authentication of API and admin clients.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Auth")]
pub(super) struct RawAuth {
    /// Bearer token for the API, over HTTP and gRPC (`authorization: Bearer …`).
    #[serde(deserialize_with = "present")]
    #[schemars(with = "Option<String>")]
    pub(super) api_token: Option<Spanned<Option<String>>>,
    /// Bearer token for the admin listener; /healthz and /readyz work without it.
    #[serde(deserialize_with = "present")]
    #[schemars(with = "Option<String>")]
    pub(super) admin_token: Option<Spanned<Option<String>>>,
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

/// TLS on http, grpc and gateway. Paths are relative to the directory of this file. Changed files
/// are reloaded.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Tls")]
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
}

/// Headers of responses.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Headers")]
pub(super) struct RawHeaders {
    /// Also send the older `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    pub(super) x_ratelimit: bool,
}

impl Default for RawHeaders {
    fn default() -> Self {
        Self { x_ratelimit: true }
    }
}

/// Rules of envoyproxy/ratelimit, for Envoy's rate limit service.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Envoy")]
pub(super) struct RawEnvoy {
    /// YAML files of envoyproxy/ratelimit, unmodified. Paths are relative to the directory of this
    /// file.
    #[schemars(with = "Vec<String>")]
    pub(super) files: Vec<Spanned<String>>,
    /// Algorithm of the rules; fixed-window by default.
    #[schemars(with = "Option<Algorithm>")]
    pub(super) algorithm: Option<Spanned<String>>,
    /// Algorithms of single rules, by the name of the rule.
    #[schemars(with = "BTreeMap<String, Algorithm>")]
    pub(super) algorithms: BTreeMap<String, Spanned<String>>,
    /// Decision of the rules while the store is unavailable: local (default), allow, deny, or
    /// error, which ends the call with UNAVAILABLE, so that Envoy's `failure_mode_deny` decides.
    #[schemars(with = "Option<OnStoreFailure>")]
    pub(super) on_store_failure: Option<Spanned<String>>,
    /// Decisions of single rules while the store is unavailable, by the name of the rule.
    #[schemars(with = "BTreeMap<String, OnStoreFailure>")]
    pub(super) on_store_failures: BTreeMap<String, Spanned<String>>,
}

/// Upstreams of `tidegate gateway`.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Gateway")]
pub(super) struct RawGateway {
    /// `http://HOST[:PORT][/BASE]` or `https://…` for HTTP/1.1, `h2c://…` or `h2://…` for HTTP/2.
    /// Several are used in turns.
    #[schemars(with = "Vec<String>")]
    pub(super) upstreams: Vec<Spanned<String>>,
    /// CA of the upstreams' certificates, in PEM; the system's roots by default. The path is
    /// relative to the directory of this file.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// Timeout for connecting to an upstream, including TLS; 2s by default.
    #[schemars(with = "Option<String>")]
    pub(super) connect_timeout: Option<Spanned<String>>,
    /// Timeout for the response head of an upstream; 30s by default.
    #[schemars(with = "Option<String>")]
    pub(super) header_timeout: Option<Spanned<String>>,
    /// Idle timeout of bodies and upgraded connections; 60s by default.
    #[schemars(with = "Option<String>")]
    pub(super) idle_timeout: Option<Spanned<String>>,
    /// Forward CORS preflight requests (`OPTIONS` with `Origin` and
    /// `Access-Control-Request-Method`) without counting them. Browsers send them automatically and
    /// without credentials.
    pub(super) exempt_preflight: bool,
    /// CORS headers of the responses that the gateway makes itself, such as 429, so that scripts of
    /// these origins can read them.
    pub(super) cors: Option<RawCors>,
}

/// CORS headers of the gateway's own responses. Responses of an upstream keep its headers.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Cors")]
pub(super) struct RawCors {
    /// Origins whose scripts may read the responses, such as `https://app.example.com`; or `*`
    /// alone for all.
    #[schemars(with = "Vec<String>", length(min = 1, max = 100))]
    pub(super) allow_origins: Spanned<Vec<Spanned<String>>>,
    /// Also allow requests with cookies or other credentials. It requires a list of origins instead
    /// of `*`.
    #[serde(default)]
    pub(super) allow_credentials: bool,
    /// Headers that scripts may read; by default those that the gateway adds: `RateLimit`,
    /// `RateLimit-Policy`, `Retry-After` and `X-RateLimit-*`. They are also added to the list of an
    /// upstream that sends CORS headers.
    #[schemars(with = "Option<Vec<String>>", length(max = 100))]
    pub(super) expose_headers: Option<Spanned<Vec<Spanned<String>>>>,
}
