//! [`Endpoint`]: address of a service, connections to it, and requests over HTTP/1.1.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Request, Response, Uri, header, request};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use self::any_certificate::AnyCertificate;
use super::text::printable;
use tidegate_config::Secret;
use tidegate_net::ListenAddress;
use tidegate_net::tls::{self, ClientTlsFiles};

mod any_certificate;

/// Maximum size of a response.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Maximum length of a message of the service in an error.
const MAX_MESSAGE_CHARS: usize = 300;

/// Kind of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceKind {
    Http,
    /// HTTP to the admin listener.
    Admin,
    Grpc,
    /// Redis protocol.
    Resp,
}

impl ServiceKind {
    fn flag(self) -> &'static str {
        match self {
            Self::Http => "--http",
            Self::Admin => "--admin",
            Self::Grpc => "--grpc",
            Self::Resp => "--resp",
        }
    }

    fn syntax(self) -> &'static str {
        match self {
            Self::Http => "it must look like http://127.0.0.1:8080, or https://HOST for TLS",
            Self::Admin => {
                "it must look like http://127.0.0.1:8082, https://HOST:PORT or unix:PATH"
            }
            Self::Grpc => "it must look like 127.0.0.1:8081, or grpcs://HOST:PORT for TLS",
            Self::Resp => "it must look like 127.0.0.1:8083, or rediss://HOST:PORT for TLS",
        }
    }
}

/// Options of a client of a service.
#[derive(Clone, Copy)]
pub struct ClientOptions<'a> {
    pub address: &'a str,
    pub token: Option<&'a Secret>,
    pub trust: Trust<'a>,
    pub timeout: Duration,
}

/// Certificates that a client accepts.
#[derive(Clone, Copy)]
pub enum Trust<'a> {
    /// Certificates of the authorities in this file, or else of those that the system trusts.
    Authorities(Option<&'a Path>),
    /// Every certificate: for a request without secrets to this host.
    Any,
}

/// Address of a service.
pub struct Endpoint {
    address: EndpointAddress,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Host and port, as in the `Host` header.
    pub authority: String,
    /// Path of the URL, without a slash at its end.
    pub path: String,
    /// Header with the token.
    pub authorization: Option<HeaderValue>,
    pub timeout: Duration,
}

#[derive(Debug, PartialEq, Eq)]
enum EndpointAddress {
    Tcp(String, u16),
    Unix(PathBuf),
}

/// Bytes from and to a service.
pub trait ServiceStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ServiceStream for S {}

impl Endpoint {
    /// Parses the value of a flag.
    pub fn parse(kind: ServiceKind, options: &ClientOptions<'_>) -> anyhow::Result<Self> {
        let (flag, syntax, text) = (kind.flag(), kind.syntax(), options.address);
        if let Some(path) = text.strip_prefix("unix:").filter(|_| kind == ServiceKind::Admin) {
            return Self::unix(path.into(), false, options);
        }
        // The text may contain a password, which must not be printed.
        ensure!(!text.contains('@'), "{flag} must not contain a user or a password: {syntax}");
        let full = match kind {
            ServiceKind::Grpc if !text.contains("://") => format!("grpc://{text}"),
            ServiceKind::Resp if !text.contains("://") => format!("redis://{text}"),
            _ => text.to_owned(),
        };
        let uri: Uri = full.parse().ok().with_context(|| format!("{flag} {text}: {syntax}"))?;
        let secure = match (kind, uri.scheme_str()) {
            (ServiceKind::Resp, Some("redis")) | (ServiceKind::Grpc, Some("grpc")) => false,
            (ServiceKind::Resp, Some("rediss")) | (ServiceKind::Grpc, Some("grpcs")) => true,
            (ServiceKind::Resp, _) => bail!("{flag} {text}: {syntax}"),
            (_, Some("http")) => false,
            (_, Some("https")) => true,
            _ => bail!("{flag} {text}: {syntax}"),
        };
        ensure!(uri.query().is_none(), "{flag} {text} has a query: {syntax}");
        let path = uri.path().trim_end_matches('/').to_owned();
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.with_context(|| format!("{flag} {text}: {syntax}"))?;
        let has_port_text = uri.authority().is_some_and(|all| all.as_str() != host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = match (uri.port_u16(), kind) {
            (Some(0), _) => bail!("{flag} {text} has the port 0: {syntax}"),
            (Some(port), _) => port,
            // A port that is too large is parsed as no port.
            (None, _) if has_port_text => bail!("{flag} {text}: {syntax}"),
            (None, ServiceKind::Grpc | ServiceKind::Resp) => {
                bail!("{flag} {text} has no port: {syntax}")
            }
            (None, _) if secure => 443,
            (None, _) => 80,
        };
        let has_paths = matches!(kind, ServiceKind::Http | ServiceKind::Admin);
        ensure!(has_paths || path.is_empty(), "{flag} {text} has a path: {syntax}");
        let has_ca = matches!(options.trust, Trust::Authorities(Some(_)));
        ensure!(secure || !has_ca, "--ca is given, but {flag} {text} has no TLS");
        let tls = secure.then(|| connector(kind, &host, options.trust)).transpose()?;
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        let address = EndpointAddress::Tcp(host, port);
        let authorization = options.authorization()?;
        Ok(Self { address, tls, authority, path, authorization, timeout: options.timeout })
    }

    /// Returns the endpoint of an admin listener of this host.
    pub fn of_listener(
        listener: &ListenAddress,
        secure: bool,
        options: &ClientOptions<'_>,
    ) -> anyhow::Result<Self> {
        match listener {
            ListenAddress::Unix(path) => Self::unix(path.clone(), secure, options),
            ListenAddress::Tcp(_) => {
                let url = listener.url(if secure { "https" } else { "http" }, "");
                Self::parse(ServiceKind::Admin, &ClientOptions { address: &url, ..*options })
            }
        }
    }

    fn unix(path: PathBuf, secure: bool, options: &ClientOptions<'_>) -> anyhow::Result<Self> {
        let host = "localhost";
        let tls = secure.then(|| connector(ServiceKind::Admin, host, options.trust)).transpose()?;
        Ok(Self {
            address: EndpointAddress::Unix(path),
            tls,
            authority: host.to_owned(),
            path: String::new(),
            authorization: options.authorization()?,
            timeout: options.timeout,
        })
    }

    /// Returns the scheme of requests.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Returns the path of a call below the path of the URL.
    pub fn call_path(&self, call: &str) -> anyhow::Result<PathAndQuery> {
        let base = self.path.strip_suffix("/v1/acquire").unwrap_or(&self.path);
        Ok(format!("{base}{call}").parse()?)
    }

    /// Opens a connection. An error starts with the address.
    pub async fn connect(&self) -> anyhow::Result<Box<dyn ServiceStream>> {
        let connecting = async {
            let stream: Box<dyn ServiceStream> = match &self.address {
                EndpointAddress::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                EndpointAddress::Unix(path) => Box::new(UnixStream::connect(path).await?),
            };
            Ok::<Box<dyn ServiceStream>, std::io::Error>(match &self.tls {
                None => stream,
                Some((tls, name)) => Box::new(tls.connect(name.clone(), stream).await?),
            })
        };
        let connected = match tokio::time::timeout(self.timeout, connecting).await {
            Ok(connected) => connected.map_err(anyhow::Error::from),
            Err(_) => Err(anyhow::anyhow!("no connection within {:?}", self.timeout)),
        };
        connected.with_context(|| match &self.address {
            EndpointAddress::Tcp(..) => self.authority.clone(),
            EndpointAddress::Unix(path) => format!("unix:{}", path.display()),
        })
    }

    /// Opens a connection for requests over HTTP/1.1.
    pub async fn open(&self) -> anyhow::Result<SendRequest<Full<Bytes>>> {
        let (sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
        tokio::spawn(connection);
        Ok(sender)
    }

    /// Returns a request with the token.
    pub fn request(&self, method: Method, path: &str) -> request::Builder {
        let request =
            Request::builder().method(method).uri(path).header(header::HOST, &self.authority);
        match &self.authorization {
            Some(authorization) => request.header(header::AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// Sends a call of the API on a connection of its own, and returns the decision.
    pub async fn post(&self, call: &str, body: &Value) -> anyhow::Result<Bytes> {
        let request = self.request(Method::POST, self.call_path(call)?.as_str());
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::from(serde_json::to_vec(body)?))?;
        let exchange = async {
            let response = self.open().await?.send_request(request).await?;
            let status = response.status();
            Ok::<_, anyhow::Error>((status, read_body(response.into_body()).await?))
        };
        let (status, body) = tokio::time::timeout(self.timeout, exchange)
            .await
            .with_context(|| format!("no answer within {:?}", self.timeout))??;
        if body.starts_with(b"{\"allowed\":") {
            return Ok(body);
        }
        let foreign = || "this is not an answer of Tidegate's HTTP API".to_owned();
        bail!("HTTP {status}: {}", problem_detail(&body).unwrap_or_else(foreign))
    }

    /// Sends a GET request, the only one of a connection.
    pub async fn get(
        &self,
        mut connection: SendRequest<Full<Bytes>>,
        call: &str,
    ) -> anyhow::Result<Response<Incoming>> {
        let request = self.request(Method::GET, self.call_path(call)?.as_str());
        let request = request.header(header::CONNECTION, "close").body(Full::default())?;
        Ok(connection.send_request(request).await?)
    }
}

impl ClientOptions<'_> {
    fn authorization(&self) -> anyhow::Result<Option<HeaderValue>> {
        let Some(token) = self.token else { return Ok(None) };
        match HeaderValue::try_from(format!("Bearer {}", token.reveal())) {
            Ok(mut value) => {
                value.set_sensitive(true);
                Ok(Some(value))
            }
            Err(_) => bail!("--token-file: a token must not contain control characters"),
        }
    }
}

/// Reads the token of a service from the file of a flag.
pub fn read_token(file: &Path) -> anyhow::Result<Secret> {
    let token = Secret::read(file).map_err(anyhow::Error::msg);
    token.with_context(|| format!("--token-file {}", file.display()))
}

/// Reads the body of a response.
pub async fn read_body(body: Incoming) -> anyhow::Result<Bytes> {
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
    Ok(body.map_err(anyhow::Error::from_boxed)?.to_bytes())
}

/// Returns the message of the service in the body of an error, for a terminal.
pub fn problem_detail(body: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let detail = body["detail"].as_str().or_else(|| body["title"].as_str())?;
    Some(printable(&detail.chars().take(MAX_MESSAGE_CHARS).collect::<String>()))
}

fn connector(
    kind: ServiceKind,
    host: &str,
    trust: Trust<'_>,
) -> anyhow::Result<(TlsConnector, ServerName<'static>)> {
    let mut config = match trust {
        Trust::Any => AnyCertificate::config()?,
        Trust::Authorities(ca) => {
            let files = ClientTlsFiles::of_ca(ca);
            tls::client(&files).map_err(anyhow::Error::msg).context("--ca")?
        }
    };
    config.alpn_protocols = match kind {
        ServiceKind::Http | ServiceKind::Admin => vec![b"http/1.1".to_vec()],
        ServiceKind::Grpc => vec![b"h2".to_vec()],
        ServiceKind::Resp => Vec::new(),
    };
    let name = ServerName::try_from(host.to_owned());
    let name = name.with_context(|| format!("{}: {host} is not a host", kind.flag()))?;
    Ok((TlsConnector::from(Arc::new(config)), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: ServiceKind, address: &str) -> Result<Endpoint, String> {
        let (trust, timeout) = (Trust::Any, Duration::from_secs(1));
        let options = ClientOptions { address, token: None, trust, timeout };
        Endpoint::parse(kind, &options).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn addresses_are_parsed() {
        for (kind, text, host, port, scheme, path) in [
            (ServiceKind::Http, "http://localhost", "localhost", 80, "http", "/v1/peek"),
            (
                ServiceKind::Http,
                "https://api.example:8443/",
                "api.example",
                8443,
                "https",
                "/v1/peek",
            ),
            (
                ServiceKind::Http,
                "http://[::1]:8080/limits/",
                "::1",
                8080,
                "http",
                "/limits/v1/peek",
            ),
            (ServiceKind::Http, "http://h:1/v1/acquire", "h", 1, "http", "/v1/peek"),
            (ServiceKind::Admin, "https://[::1]/", "::1", 443, "https", "/v1/peek"),
            (ServiceKind::Grpc, "127.0.0.1:8081", "127.0.0.1", 8081, "http", "/v1/peek"),
            (ServiceKind::Grpc, "grpcs://rls.example:443", "rls.example", 443, "https", "/v1/peek"),
        ] {
            let endpoint = parse(kind, text).unwrap_or_else(|error| panic!("{error}"));
            let call = endpoint.call_path("/v1/peek").expect("a path");
            assert_eq!(endpoint.address, EndpointAddress::Tcp(host.to_owned(), port), "{text}");
            assert_eq!((endpoint.scheme(), call.as_str()), (scheme, path), "{text}");
        }
    }

    #[test]
    fn only_the_admin_listener_is_called_on_a_unix_socket() {
        let text = "unix:/run/admin.sock";
        let endpoint = parse(ServiceKind::Admin, text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(endpoint.address, EndpointAddress::Unix("/run/admin.sock".into()));
        assert!(parse(ServiceKind::Http, text).is_err());
    }

    #[test]
    fn wrong_addresses_are_errors_and_passwords_are_not_printed() {
        for (kind, text, message) in [
            (ServiceKind::Http, "127.0.0.1:8080", "it must look like http://"),
            (ServiceKind::Http, "localhost", "it must look like http://"),
            (ServiceKind::Http, "", "it must look like http://"),
            (ServiceKind::Http, "ftp://h", "it must look like http://"),
            (ServiceKind::Http, "http://", "it must look like http://"),
            (ServiceKind::Http, "http://h:99999", "it must look like http://"),
            (ServiceKind::Http, "http://h:", "it must look like http://"),
            (ServiceKind::Http, "http://h:0", "has the port 0"),
            (ServiceKind::Grpc, "h:99999", "it must look like 127.0.0.1:8081"),
            (ServiceKind::Http, "http://h/?a=b", "has a query"),
            (ServiceKind::Http, "http://u:secret@h", "must not contain a user"),
            (ServiceKind::Grpc, "h", "has no port"),
            (ServiceKind::Grpc, "redis://h:1", "it must look like 127.0.0.1:8081"),
            (ServiceKind::Grpc, "h:1/path", "has a path"),
        ] {
            let error = parse(kind, text).err().unwrap_or_else(|| panic!("{text} is valid"));
            assert!(error.contains(message), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
