//! [`WebTarget`]: requests of clients to a gateway, or of a proxy to forward-auth.

use anyhow::{bail, ensure};
use bytes::Bytes;
use http::{HeaderName, Method, Request, StatusCode, header};
use http_body_util::Full;

use super::http::HttpConnections;
use super::keys::KEY;
use super::target::{Answer, LoadTarget, RequestError, within};
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind};

/// Separators of the attributes of a request in a key; see [`encode`].
const BETWEEN_ATTRIBUTES: char = '\u{1e}';
const BEFORE_VALUE: char = '\u{1f}';

/// Front door that decides the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Gateway,
    ForwardAuth,
}

/// Client of a gateway or of forward-auth, on HTTP/1.1. A connection has one request at a time.
pub(crate) struct WebTarget {
    door: Door,
    connections: HttpConnections,
    /// Path of forward-auth, or before those of requests to a gateway.
    path: String,
    /// Attributes of all requests, in whose values [`KEY`] stands for the key.
    attributes: Vec<(String, String)>,
    /// Whether keys are the attributes of requests in a log.
    is_replay: bool,
}

/// Writes the attributes of a request in a log as a key.
pub(super) fn encode<'a>(attributes: impl Iterator<Item = (&'a str, &'a str)>, key: &mut String) {
    for (name, value) in attributes {
        key.extend([name, BEFORE_VALUE.encode_utf8(&mut [0; 4]), value]);
        key.push(BETWEEN_ATTRIBUTES);
    }
}

fn decode(key: &str) -> impl Iterator<Item = (&str, &str)> {
    key.split(BETWEEN_ATTRIBUTES).filter_map(|pair| pair.split_once(BEFORE_VALUE))
}

impl WebTarget {
    /// Creates a client. A first connection shows whether the service is there.
    pub(crate) async fn connect(
        options: &ClientOptions<'_>,
        door: Door,
        policy: Option<&str>,
        attributes: &[(String, String)],
        is_replay: bool,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::parse(ServiceKind::Http, options)?;
        for (name, _) in attributes {
            let is_known = ["method", "path", "host", "ip"].contains(&name.as_str());
            let header = name.strip_prefix("header.").map(str::parse::<HeaderName>);
            ensure!(
                is_known || matches!(header, Some(Ok(_))),
                "--attribute {name}: requests have method, path with a query, host, ip and header.NAME"
            );
        }
        let path = match (door, policy) {
            (Door::Gateway, None) => endpoint.path.clone(),
            (Door::Gateway, Some(_)) => {
                bail!("--policy is not for --gateway: requests select them")
            }
            (Door::ForwardAuth, None) => endpoint.call_path("/v1/forward-auth?")?.to_string(),
            (Door::ForwardAuth, Some(policy)) => {
                endpoint.call_path(&format!("/v1/forward-auth?policy={policy}"))?.to_string()
            }
        };
        let connections = HttpConnections::new(endpoint);
        connections.check().await?;
        let attributes = attributes.to_vec();
        Ok(Self { door, connections, path, attributes, is_replay })
    }

    /// Returns whether the key is part of the requests.
    pub(crate) fn has_key(&self) -> bool {
        self.is_replay || self.attributes.iter().any(|(_, value)| value.contains(KEY))
    }

    fn request(&self, key: &str) -> Result<Request<Full<Bytes>>, RequestError> {
        let fixed = self.attributes.iter().map(|(name, value)| {
            let value = if self.is_replay { value.clone() } else { value.replace(KEY, key) };
            (name.as_str(), value)
        });
        let of_log = if self.is_replay { key } else { "" };
        let of_log = decode(of_log).map(|(name, value)| (name, value.to_owned()));
        let (mut method, mut target, mut host, mut address) =
            (Method::GET, "/".to_owned(), None, None);
        let mut headers = Vec::new();
        for (name, value) in of_log.chain(fixed) {
            match name {
                "method" => method = value.parse().unwrap_or_default(),
                "path" | "target" => target = value,
                "host" => host = Some(value),
                "ip" => address = Some(value),
                _ => headers.extend(name.strip_prefix("header.").map(|name| (name, value))),
            }
        }
        // The peer of the log is the last hop, behind those that the client claimed.
        headers.extend(address.map(|address| ("x-forwarded-for", address)));
        let endpoint = self.connections.endpoint();
        let mut request = match self.door {
            Door::Gateway => {
                let request = Request::builder().method(method).uri(self.path.clone() + &target);
                request.header(header::HOST, host.as_deref().unwrap_or(&endpoint.authority))
            }
            Door::ForwardAuth => {
                let mut request = endpoint.request(Method::GET, &self.path);
                let host = host.unwrap_or_else(|| endpoint.authority.clone());
                for (name, value) in [
                    ("x-forwarded-method", method.as_str()),
                    ("x-forwarded-uri", &target),
                    ("x-forwarded-host", &host),
                ] {
                    request = request.header(name, value);
                }
                request
            }
        };
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(Full::default()).map_err(|error| RequestError::new("invalid", error))
    }
}

impl LoadTarget for WebTarget {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        let timeout = self.connections.endpoint().timeout;
        let (status, _) = within(timeout, self.connections.send(self.request(key)?)).await?;
        match (status, self.door) {
            (StatusCode::TOO_MANY_REQUESTS, _) => Ok(Answer::Denied),
            (StatusCode::OK, Door::ForwardAuth) => Ok(Answer::Allowed),
            (status, Door::Gateway) if !status.is_server_error() => Ok(Answer::Allowed),
            (status, _) => {
                let kind = format!("HTTP {}", status.as_u16());
                Err(RequestError::new(kind, format_args!("HTTP {status}")))
            }
        }
    }
}
