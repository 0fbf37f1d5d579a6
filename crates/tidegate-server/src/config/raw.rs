//! The configuration as it is written, field by field. What the fields mean is decided in
//! `config.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer};
use serde_saphyr::Spanned;
use tidegate::Algorithm;
use tidegate::config::{Bounded, OneOrMany, RawPolicy};

/// Configuration of `tidegate serve` and `tidegate gateway`.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Config {
    pub(super) listen: Listen,
    pub(super) store: Store,
    pub(super) client_ip: ClientIp,
    pub(super) auth: Auth,
    pub(super) tls: Option<Tls>,
    pub(super) headers: Headers,
    pub(super) envoy: Envoy,
    pub(super) gateway: Gateway,
    /// Attributes that callers of the API send beside the built-in ones, such as tenant. Any other
    /// name is an error.
    #[schemars(
        with = "BTreeSet<String>",
        inner(regex(
            pattern = r"^(?!(ip|method|path|host|domain|header|query|cookie|descriptor)$|(header|query|cookie|descriptor)\.)\S+$"
        ))
    )]
    pub(super) attributes: Vec<Spanned<String>>,
    /// What is limited: every policy that applies to a request must allow it.
    pub(super) policies: Vec<RawPolicy>,
}

/// Addresses to listen on.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Listen {
    /// The HTTP API; 127.0.0.1:8080 by default.
    #[schemars(with = "Option<String>")]
    pub(super) http: Option<Spanned<String>>,
    /// Envoy's rate limit service; 127.0.0.1:8081 by default.
    #[schemars(with = "Option<String>")]
    pub(super) grpc: Option<Spanned<String>>,
    /// Metrics and health; 127.0.0.1:8082 by default. Beyond loopback only with `auth.admin_token`.
    #[schemars(with = "Option<String>")]
    pub(super) admin: Option<Spanned<String>>,
    /// Of `tidegate gateway`: where requests come in; 127.0.0.1:8000 by default.
    #[schemars(with = "Option<String>")]
    pub(super) gateway: Option<Spanned<String>>,
}

/// Where counts live. Without `redis` or `sentinel`: in memory.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Store {
    /// `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS; a list of some
    /// nodes for a cluster.
    #[serde(deserialize_with = "given")]
    #[schemars(with = "Option<OneOrMany>")]
    pub(super) redis: Option<Spanned<Option<OneOrMany>>>,
    #[schemars(with = "Option<Sentinel>")]
    pub(super) sentinel: Option<Spanned<Sentinel>>,
    /// Certificates for `rediss://`; without them the system's are trusted, and none is shown.
    #[schemars(with = "Option<StoreTls>")]
    pub(super) tls: Option<Spanned<StoreTls>>,
    /// What every key in Redis begins with; `rate_limit` by default.
    #[schemars(with = "Option<String>")]
    pub(super) prefix: Option<Spanned<String>>,
    /// How long Redis may take to decide; 100ms by default.
    #[schemars(with = "Option<String>")]
    pub(super) timeout: Option<Spanned<String>>,
    /// Minimum number of instances of Tidegate. While Redis is away, each takes its share of the
    /// limits. The instances know their number through Redis; this is for those that start while it
    /// is away. Not set: such an instance assumes 10.
    pub(super) instances: Option<Bounded<1, 10_000>>,
    /// The cap on keys in memory; 10,000,000 by default.
    pub(super) max_keys: Option<Bounded<1, 1_000_000_000_000>>,
}

/// Redis behind Sentinels: the primary that they know by a name.
#[derive(serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Sentinel {
    /// The name of the primary, as in `sentinel monitor NAME …`.
    pub(super) master: String,
    /// The Sentinels, `redis://[user:password@]host[:port]`.
    #[schemars(with = "Vec<String>")]
    pub(super) nodes: Spanned<Vec<String>>,
    /// For the servers that hold the counts, if not the same as for the Sentinels.
    #[schemars(with = "Option<String>")]
    pub(super) username: Option<Spanned<String>>,
    /// For the servers that hold the counts, if not the same as for the Sentinels.
    #[serde(default, deserialize_with = "given")]
    #[schemars(with = "Option<String>")]
    pub(super) password: Option<Spanned<Option<String>>>,
}

/// TLS to Redis. Files are from the folder of this one.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct StoreTls {
    /// Who signs the servers' certificates, in PEM; the system's roots by default.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// The certificate to show, in PEM; with `key`.
    #[schemars(with = "Option<String>")]
    pub(super) certificate: Option<Spanned<String>>,
    /// Its private key, in PEM.
    #[schemars(with = "Option<String>")]
    pub(super) key: Option<Spanned<String>>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// Which address a request comes from, where the caller does not say it.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ClientIp {
    /// Networks whose `X-Forwarded-For` (or `Forwarded`) is believed. They must set that header
    /// themselves: one that they only pass on is the client's own. None: the peer's address.
    #[schemars(with = "Vec<String>")]
    pub(super) trusted_proxies: Vec<Spanned<String>>,
    /// IPv6 clients count together by this many bits; 64 by default.
    pub(super) ipv6_prefix: Option<Bounded<1, 128>>,
}

/// Who may ask.
#[derive(Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Auth {
    /// Callers of the API, over HTTP and gRPC, must send it as a bearer token (`authorization:
    /// Bearer …`).
    #[serde(deserialize_with = "given")]
    #[schemars(with = "Option<String>")]
    pub(super) api_token: Option<Spanned<Option<String>>>,
    /// Callers of the admin listener must send it as a bearer token (but for /healthz and /readyz).
    #[serde(deserialize_with = "given")]
    #[schemars(with = "Option<String>")]
    pub(super) admin_token: Option<Spanned<Option<String>>>,
}

/// A field that is there without a value is not the same as one that is not there: `!word` and
/// `&word` have none.
fn given<'de, D, T>(deserializer: D) -> Result<Option<Spanned<Option<T>>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Spanned::deserialize(deserializer).map(Some)
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").finish_non_exhaustive()
    }
}

/// TLS on http, grpc and gateway. Files are from the folder of this one, and taken anew when they
/// change.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Tls {
    /// The certificate, and those that lead to its root, in PEM.
    #[schemars(with = "String")]
    pub(super) certificate: Spanned<String>,
    /// Its private key, in PEM.
    #[schemars(with = "String")]
    pub(super) key: Spanned<String>,
    /// If given, clients must show a certificate that one of these has signed.
    #[schemars(with = "Option<String>")]
    pub(super) client_ca: Option<Spanned<String>>,
}

/// Which headers answers have.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Headers {
    /// The older `X-RateLimit-Limit`, `-Remaining` and `-Reset`, beside `RateLimit`.
    pub(super) x_ratelimit: bool,
}

impl Default for Headers {
    fn default() -> Self {
        Self { x_ratelimit: true }
    }
}

/// Rules of envoyproxy/ratelimit, for Envoy's rate limit service.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Envoy {
    /// Its YAML files, unmodified; from the folder of this file.
    #[schemars(with = "Vec<String>")]
    pub(super) files: Vec<Spanned<String>>,
    /// How their rules count; fixed-window by default.
    #[schemars(with = "Option<Algorithm>")]
    pub(super) algorithm: Option<Spanned<String>>,
    /// The same for single rules, by their names.
    #[schemars(with = "BTreeMap<String, Algorithm>")]
    pub(super) algorithms: BTreeMap<String, Spanned<String>>,
}

/// Where `tidegate gateway` hands requests on to.
#[derive(Debug, Default, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Gateway {
    /// `http://HOST[:PORT][/BASE]` or `https://…`, which are spoken to in HTTP/1.1; in HTTP/2 with
    /// `h2c://` and `h2://`. Several take turns.
    #[schemars(with = "Vec<String>")]
    pub(super) upstreams: Vec<Spanned<String>>,
    /// Who signs the upstreams' certificates, in PEM; the system's roots by default. From the
    /// folder of this file.
    #[schemars(with = "Option<String>")]
    pub(super) ca: Option<Spanned<String>>,
    /// How long a connection to an upstream may take, with TLS; 2s by default.
    #[schemars(with = "Option<String>")]
    pub(super) connect_timeout: Option<Spanned<String>>,
    /// How long an upstream may take to begin its answer; 30s by default.
    #[schemars(with = "Option<String>")]
    pub(super) header_timeout: Option<Spanned<String>>,
    /// How long a body or an upgraded connection may stand still; 60s by default.
    #[schemars(with = "Option<String>")]
    pub(super) idle_timeout: Option<Spanned<String>>,
}
