//! [`Endpoint`]: address of a service, and connections to it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::Uri;
use http::uri::PathAndQuery;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::target::RequestError;

/// Protocol of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    /// HTTP to the admin listener.
    Admin,
    Grpc,
}

impl Protocol {
    fn flag(self) -> &'static str {
        match self {
            Self::Http => "--http",
            Self::Admin => "--admin",
            Self::Grpc => "--grpc",
        }
    }

    fn syntax(self) -> &'static str {
        match self {
            Self::Http => "it must look like http://127.0.0.1:8080, or https://HOST for TLS",
            Self::Admin => "it must look like http://127.0.0.1:8082, or https://HOST for TLS",
            Self::Grpc => "it must look like 127.0.0.1:8081, or grpcs://HOST:PORT for TLS",
        }
    }
}

/// Address of a service.
pub(crate) struct Endpoint {
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Host and port, as in the `Host` header.
    pub(crate) authority: String,
    /// Path of the URL, without a slash at its end.
    pub(crate) path: String,
    timeout: Duration,
}

/// Bytes from and to a service.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Endpoint {
    /// Parses the value of a flag. `ca` is a file with the certificates to trust in place of those
    /// of the system.
    pub(crate) fn parse(
        protocol: Protocol,
        text: &str,
        ca: Option<&Path>,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let (flag, syntax) = (protocol.flag(), protocol.syntax());
        // The text may contain a password, which must not be printed.
        ensure!(!text.contains('@'), "{flag} must not contain a user or a password: {syntax}");
        let full = match protocol {
            Protocol::Grpc if !text.contains("://") => format!("grpc://{text}"),
            _ => text.to_owned(),
        };
        let uri: Uri = full.parse().ok().with_context(|| format!("{flag} {text}: {syntax}"))?;
        let secure = match (protocol, uri.scheme_str()) {
            (_, Some("http")) | (Protocol::Grpc, Some("grpc")) => false,
            (_, Some("https")) | (Protocol::Grpc, Some("grpcs")) => true,
            _ => anyhow::bail!("{flag} {text}: {syntax}"),
        };
        ensure!(uri.query().is_none(), "{flag} {text} has a query: {syntax}");
        let path = uri.path().trim_end_matches('/').to_owned();
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.with_context(|| format!("{flag} {text}: {syntax}"))?;
        let has_port_text = uri.authority().is_some_and(|all| all.as_str() != host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = match (uri.port_u16(), protocol) {
            (Some(0), _) => anyhow::bail!("{flag} {text} has the port 0: {syntax}"),
            (Some(port), _) => port,
            // A port that is too large is parsed as no port.
            (None, _) if has_port_text => anyhow::bail!("{flag} {text}: {syntax}"),
            (None, Protocol::Http | Protocol::Admin) if secure => 443,
            (None, Protocol::Http | Protocol::Admin) => 80,
            (None, Protocol::Grpc) => anyhow::bail!("{flag} {text} has no port: {syntax}"),
        };
        ensure!(
            protocol != Protocol::Grpc || path.is_empty(),
            "{flag} {text} has a path: {syntax}"
        );
        ensure!(secure || ca.is_none(), "--ca is given, but {flag} {text} has no TLS");
        let tls = secure.then(|| connector(protocol, &host, ca)).transpose()?;
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        Ok(Self { host, port, tls, authority, path, timeout })
    }

    /// Returns the scheme of requests.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Returns the path of a call below the path of the URL.
    pub(crate) fn call_path(&self, call: &str) -> anyhow::Result<PathAndQuery> {
        let base = self.path.strip_suffix("/v1/acquire").unwrap_or(&self.path);
        Ok(format!("{base}{call}").parse()?)
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self) -> Result<Box<dyn Stream>, RequestError> {
        let connecting = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            stream.set_nodelay(true)?;
            Ok::<Box<dyn Stream>, std::io::Error>(match &self.tls {
                None => Box::new(stream),
                Some((tls, name)) => Box::new(tls.connect(name.clone(), stream).await?),
            })
        };
        match tokio::time::timeout(self.timeout, connecting).await {
            Ok(stream) => stream.map_err(|error| {
                RequestError::new("connect", format_args!("{}: {error}", self.authority))
            }),
            Err(_) => Err(RequestError::new(
                "connect",
                format_args!("{}: no connection within {:?}", self.authority, self.timeout),
            )),
        }
    }
}

fn connector(
    protocol: Protocol,
    host: &str,
    ca: Option<&Path>,
) -> anyhow::Result<(TlsConnector, ServerName<'static>)> {
    let mut config =
        crate::gateway::upstream_tls(ca).map_err(anyhow::Error::msg).context("--ca")?;
    config.alpn_protocols = match protocol {
        Protocol::Http | Protocol::Admin => vec![b"http/1.1".to_vec()],
        Protocol::Grpc => vec![b"h2".to_vec()],
    };
    let name = ServerName::try_from(host.to_owned());
    let name = name.with_context(|| format!("{}: {host} is not a host", protocol.flag()))?;
    Ok((TlsConnector::from(Arc::new(config)), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(protocol: Protocol, text: &str) -> Result<Endpoint, String> {
        let timeout = Duration::from_secs(1);
        Endpoint::parse(protocol, text, None, timeout).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn addresses_are_parsed() {
        for (protocol, text, host, port, scheme, path) in [
            (Protocol::Http, "http://localhost", "localhost", 80, "http", "/v1/peek"),
            (Protocol::Http, "https://api.example:8443/", "api.example", 8443, "https", "/v1/peek"),
            (Protocol::Http, "http://[::1]:8080/limits/", "::1", 8080, "http", "/limits/v1/peek"),
            (Protocol::Http, "http://h:1/v1/acquire", "h", 1, "http", "/v1/peek"),
            (Protocol::Grpc, "127.0.0.1:8081", "127.0.0.1", 8081, "http", "/v1/peek"),
            (Protocol::Grpc, "grpcs://rls.example:443", "rls.example", 443, "https", "/v1/peek"),
        ] {
            let endpoint = parse(protocol, text).unwrap_or_else(|error| panic!("{error}"));
            let call = endpoint.call_path("/v1/peek").expect("a path");
            assert_eq!(
                (endpoint.host.as_str(), endpoint.port, endpoint.scheme(), call.as_str()),
                (host, port, scheme, path),
                "{text}"
            );
        }
    }

    #[test]
    fn wrong_addresses_are_errors_and_passwords_are_not_printed() {
        for (protocol, text, message) in [
            (Protocol::Http, "127.0.0.1:8080", "it must look like http://"),
            (Protocol::Http, "localhost", "it must look like http://"),
            (Protocol::Http, "", "it must look like http://"),
            (Protocol::Http, "ftp://h", "it must look like http://"),
            (Protocol::Http, "http://", "it must look like http://"),
            (Protocol::Http, "http://h:99999", "it must look like http://"),
            (Protocol::Http, "http://h:", "it must look like http://"),
            (Protocol::Http, "http://h:0", "has the port 0"),
            (Protocol::Grpc, "h:99999", "it must look like 127.0.0.1:8081"),
            (Protocol::Http, "http://h/?a=b", "has a query"),
            (Protocol::Http, "http://u:secret@h", "must not contain a user"),
            (Protocol::Grpc, "h", "has no port"),
            (Protocol::Grpc, "redis://h:1", "it must look like 127.0.0.1:8081"),
            (Protocol::Grpc, "h:1/path", "has a path"),
        ] {
            let error = parse(protocol, text).err().unwrap_or_else(|| panic!("{text} is valid"));
            assert!(error.contains(message), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
