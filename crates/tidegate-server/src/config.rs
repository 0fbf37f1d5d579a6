//! The configuration: raw YAML becomes a validated [`Config`], or an error that shows the place and what would be right.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_saphyr::Spanned;
use tidegate::config::{Document, duration as durations};
use tidegate::{Algorithm, ClientIp, Policies};

use crate::envoy::rules::Rules;
use crate::tls;

mod gateway;
mod raw;
mod store;

pub(crate) use gateway::GatewayConfig;
pub(crate) use store::{RedisConfig, StoreConfig};
pub(crate) use tidegate::config::ConfigError;

/// What `tidegate serve` runs with when no file is given.
pub(crate) const SAMPLE: &str = include_str!("../sample.yaml");

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) listen: Listen,
    pub(crate) store: StoreConfig,
    pub(crate) client_ip: ClientIp,
    pub(crate) policies: Policies,
    pub(crate) envoy: Envoy,
    pub(crate) gateway: GatewayConfig,
    /// The file and all that it names: what to watch.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
    pub(crate) x_ratelimit_headers: bool,
    pub(crate) api_token: Option<Secret>,
    pub(crate) admin_token: Option<Secret>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listen {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) gateway: SocketAddr,
}

/// Rules of envoyproxy/ratelimit, and how they count.
#[derive(Debug)]
pub(crate) struct Envoy {
    pub(crate) rules: Rules,
    pub(crate) algorithm: Algorithm,
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// To be handed on, never to be shown.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Config {
    /// Reads and validates a file.
    pub(crate) fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::unreadable(&path.display().to_string(), &error.to_string()))?;
        let folder = path.parent().unwrap_or_else(|| Path::new(""));
        let mut config = Self::parse_in(folder, &path.display().to_string(), &text)?;
        config.files.insert(0, path.to_owned());
        Ok(config)
    }

    /// Validates a text; `name` is what errors call it.
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self, ConfigError> {
        Self::parse_in(Path::new(""), name, text)
    }

    fn parse_in(folder: &Path, name: &str, text: &str) -> Result<Self, ConfigError> {
        let document = Document::new(name, text);
        let raw: raw::Config = document.parse()?;
        validate(folder, &document, raw)
    }

    /// The JSON Schema, for editors.
    pub(crate) fn schema() -> schemars::Schema {
        schemars::schema_for!(raw::Config)
    }
}

fn validate(folder: &Path, document: &Document<'_>, raw: raw::Config) -> Result<Config, ConfigError> {
    let listen = Listen {
        http: address(document, raw.listen.http, 8080)?,
        grpc: address(document, raw.listen.grpc, 8081)?,
        admin: address(document, raw.listen.admin, 8082)?,
        gateway: address(document, raw.listen.gateway, 8000)?,
    };
    let admin_token = raw.auth.admin_token.map(Secret::new);
    let api_token = raw.auth.api_token.map(Secret::new);
    if !listen.admin.ip().is_loopback() && admin_token.is_none() {
        return Err(document.plain(
            "listen.admin is beyond loopback but auth.admin_token is not set: set a token, or listen on 127.0.0.1",
        ));
    }
    let policies = Policies::from_raw(document, raw.policies)?;
    let (store, store_files) = store::validate(document, folder, raw.store)?;
    let client_ip = client_ip(document, &raw.client_ip)?;
    let mut files: Vec<PathBuf> = raw.envoy.files.iter().map(|file| folder.join(file)).collect();
    let envoy = envoy(document, &raw.envoy, &files)?;
    let tls = raw.tls.map(|tls| {
        let named = tls::Files {
            certificate: folder.join(tls.certificate),
            key: folder.join(tls.key),
            client_ca: tls.client_ca.map(|file| folder.join(file)),
        };
        files.extend([named.certificate.clone(), named.key.clone()]);
        files.extend(named.client_ca.clone());
        tls::load(&named).map_err(|error| document.plain(&format!("tls: {error}")))
    });
    let tls = tls.transpose()?;
    files.extend(store_files);
    let gateway = gateway::validate(document, folder, &raw.gateway)?;
    files.extend(gateway.ca.clone());
    Ok(Config {
        listen,
        store,
        client_ip,
        policies,
        envoy,
        gateway,
        files,
        tls,
        x_ratelimit_headers: raw.headers.x_ratelimit,
        api_token,
        admin_token,
    })
}

fn address(document: &Document<'_>, raw: Option<Spanned<String>>, port: u16) -> Result<SocketAddr, ConfigError> {
    let Some(text) = raw else { return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)) };
    let wrong = || format!("{:?} is not an address: write it like 127.0.0.1:{port} or [::1]:{port}", text.value);
    text.value.parse().map_err(|_| document.at(&text, &wrong()))
}

fn envoy(document: &Document<'_>, raw: &raw::Envoy, files: &[PathBuf]) -> Result<Envoy, ConfigError> {
    let algorithm = raw.algorithm.as_ref().map_or(Ok(Algorithm::FixedWindow), |name| named(document, name))?;
    let algorithms = raw
        .algorithms
        .iter()
        .map(|(rule, name)| Ok((rule.clone(), named(document, name)?)))
        .collect::<Result<BTreeMap<String, Algorithm>, ConfigError>>()?;
    let mut texts = Vec::with_capacity(files.len());
    for file in files {
        let name = file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| ConfigError::unreadable(&name, &error.to_string()))?;
        texts.push((name, text));
    }
    let rules =
        Rules::load(&texts, algorithm, &algorithms).map_err(|error| document.plain(&format!("envoy: {error}")))?;
    Ok(Envoy { rules, algorithm })
}

fn client_ip(document: &Document<'_>, raw: &raw::ClientIp) -> Result<ClientIp, ConfigError> {
    let network = |text: &Spanned<String>| -> Result<IpNet, ConfigError> {
        let parsed = text.value.parse::<IpNet>().or_else(|_| text.value.parse::<IpAddr>().map(IpNet::from));
        parsed.map_err(|_| {
            let message = format!("{:?} is not a network: write it like 10.0.0.0/8 or 2001:db8::/32", text.value);
            document.at(text, &message)
        })
    };
    let networks = raw.trusted_proxies.iter().map(network).collect::<Result<_, _>>()?;
    let prefix = raw.ipv6_prefix.as_ref().map_or(64, |prefix| prefix.value);
    ClientIp::new(networks, prefix).map_err(|error| match &raw.ipv6_prefix {
        Some(value) => document.at(value, &error.to_string()),
        None => document.plain(&error.to_string()),
    })
}

fn duration(document: &Document<'_>, text: &Spanned<String>) -> Result<Duration, ConfigError> {
    durations::parse(&text.value).map_err(|error| document.at(text, &error))
}

fn named<T: std::str::FromStr<Err = tidegate::UnknownName>>(
    document: &Document<'_>,
    text: &Spanned<String>,
) -> Result<T, ConfigError> {
    text.value.parse().map_err(|error: tidegate::UnknownName| document.at_name(text, &error.to_string()))
}

/// The file that flags and environment name, if any.
pub(crate) fn describe(path: Option<&PathBuf>) -> String {
    path.map_or_else(|| "the built-in sample".to_owned(), |path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_sample_is_valid() {
        let config = Config::parse("sample.yaml", SAMPLE).expect("valid");
        assert!(config.policies.iter().count() > 0);
    }

    #[test]
    fn what_the_documents_show_is_valid() {
        for document in [
            include_str!("../../../docs/configuration.md"),
            include_str!("../../../docs/redis.md"),
            include_str!("../../../docs/gateway.md"),
            include_str!("../../../README.md"),
        ] {
            let blocks: Vec<&str> =
                document.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
            assert!(!blocks.is_empty());
            for block in blocks {
                // Files that they name are the reader's own.
                let block = block.replace("files: [ratelimit.yaml]", "files: []");
                match Config::parse("the document", &block) {
                    Err(error) if error.to_string().contains(".pem: no certificate can be read") => {}
                    Err(error) if error.to_string().contains(".pem: cannot be read") => {}
                    result => assert!(result.is_ok(), "{block}\n{}", result.expect_err("wrong")),
                }
            }
        }
    }

    #[test]
    fn a_truncated_file_never_panics_and_never_half_loads() {
        let policies = Config::parse("sample.yaml", SAMPLE).expect("valid").policies.iter().count();
        for end in (0..SAMPLE.len()).filter(|end| SAMPLE.is_char_boundary(*end)) {
            if let Ok(config) = Config::parse("sample.yaml", &SAMPLE[..end]) {
                assert!(config.policies.iter().count() <= policies);
            }
        }
    }

    fn error(text: &str) -> String {
        Config::parse("tidegate.yaml", text).expect_err("wrong").to_string()
    }

    #[test]
    fn an_error_shows_file_line_field_and_the_nearest_right_name() {
        let text = error("policies:\n  - name: a\n    limt: 5\n    window: 60s\n");
        assert!(text.starts_with("tidegate.yaml:3:5: unknown field `limt`"), "{text}");
        assert!(text.contains("did you mean `limit`?"), "{text}");
        assert!(text.ends_with("  |\n3 |     limt: 5\n  |     ^"), "{text}");
    }

    #[test]
    fn what_parses_but_cannot_work_is_shown_in_its_place_too() {
        let policy = |lines: &str| format!("policies:\n  - name: a\n    limit: 5\n    window: 60s\n{lines}");
        for (text, place, message) in [
            (policy("").replace("limit: 5", "limit: 0"), "tidegate.yaml:3:12:", "from 1 to 1000000000000"),
            (policy("").replace("60s", "60"), "tidegate.yaml:4:13:", "write it like 500ms"),
            (policy("    algorithm: tokn-bucket\n"), "tidegate.yaml:5:16:", "did you mean `token-bucket`?"),
            (policy("    burst: 9\n"), "tidegate.yaml:5:12:", "has no burst"),
            (policy("    mode: shadwo\n"), "tidegate.yaml:5:11:", "did you mean `shadow`?"),
            (policy("    cost: 6\n"), "tidegate.yaml:2:11:", "at most 5 at once"),
            (policy("    name: b\n"), "tidegate.yaml:5:5:", "duplicate"),
            (policy("  - name: a\n    limit: 5\n    window: 60s\n"), "tidegate.yaml:", "used twice"),
            ("listen: {http: localhost}\n".to_owned(), "tidegate.yaml:1:16:", "127.0.0.1:8080"),
            ("listen: {admin: 0.0.0.0:9}\n".to_owned(), "tidegate.yaml:", "auth.admin_token"),
            ("policies: 5\n".to_owned(), "tidegate.yaml:1", "sequence"),
        ] {
            let found = error(&text);
            assert!(found.starts_with(place) && found.contains(message), "{text}\n{found}");
        }
    }

    #[test]
    fn no_error_shows_a_secret() {
        for text in [
            "store: {redis: 'redis://:hunter2@h', prefx: x}\n",
            "auth: {api_token: hunter2, admin_tokn: hunter2}\n",
            "auth:\n  api_token: [hunter2]\n",
            "store:\n  redis: {a: hunter2}\n",
        ] {
            let found = error(text);
            assert!(!found.contains("hunter2"), "{found}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_config_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Config::parse("any", &String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn any_change_to_a_good_file_is_a_config_or_an_error(at in 0..SAMPLE.len(), text in "[ -~\n]{0,6}") {
            prop_assume!(SAMPLE.is_char_boundary(at));
            let _ = Config::parse("any", &format!("{}{text}{}", &SAMPLE[..at], &SAMPLE[at..]));
        }
    }
}
