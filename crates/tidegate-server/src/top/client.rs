//! [`Client`]: requests to the admin API of a service.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail};
use axum::body::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;

use super::data::Lookup;
use super::events::{Event, EventReader};
use super::text;
use crate::bench::connect::{Endpoint, Protocol};
use crate::bench::http::ClientOptions;

/// Maximum size of a response other than the stream.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Maximum length of a message of the service in an error.
const MAX_MESSAGE_CHARS: usize = 300;
/// Time without a byte of the stream after which the connection counts as lost. The service sends
/// one sample per second.
const STREAM_TIMEOUT: Duration = Duration::from_secs(20);

const HINT: &str = "is this the URL of the admin listener (listen.admin), such as \
                    http://127.0.0.1:8082?";

pub(crate) struct Client {
    endpoint: Endpoint,
    authorization: Option<HeaderValue>,
    timeout: Duration,
}

impl Client {
    pub(crate) fn new(options: &ClientOptions<'_>) -> anyhow::Result<Self> {
        let endpoint =
            Endpoint::parse(Protocol::Admin, options.address, options.ca, options.timeout)?;
        let authorization = options.authorization()?;
        Ok(Self { endpoint, authorization, timeout: options.timeout })
    }

    /// Returns the host and port of the service.
    pub(super) fn authority(&self) -> &str {
        &self.endpoint.authority
    }

    /// Opens the stream of events.
    pub(super) async fn live(&self) -> anyhow::Result<LiveStream> {
        let response = self.get("/v1/live").await?;
        let kind = response.headers().get(header::CONTENT_TYPE);
        let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !is_stream {
            bail!("{}/v1/live is not a stream of events: {HINT}", self.endpoint.path);
        }
        Ok(LiveStream { body: response.into_body(), reader: EventReader::default() })
    }

    /// Looks a key up in every policy.
    pub(super) async fn lookup(&self, key: &str) -> anyhow::Result<Lookup> {
        let mut path = "/v1/lookup?key=".to_owned();
        for byte in key.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                    path.push(char::from(byte));
                }
                _ => {
                    let _ = write!(path, "%{byte:02X}");
                }
            }
        }
        let response = self.get(&path).await?;
        let body = tokio::time::timeout(self.timeout, read(response)).await;
        let body = body.with_context(|| format!("no answer within {:?}", self.timeout))??;
        serde_json::from_slice(&body).with_context(|| format!("not an answer of Tidegate: {HINT}"))
    }

    /// Sends a request, and returns a response with the status 200.
    async fn get(&self, path: &str) -> anyhow::Result<Response<Incoming>> {
        match tokio::time::timeout(self.timeout, self.get_without_timeout(path)).await {
            Ok(response) => response,
            Err(_) => bail!("no answer within {:?}", self.timeout),
        }
    }

    async fn get_without_timeout(&self, path: &str) -> anyhow::Result<Response<Incoming>> {
        let stream = match self.endpoint.connect().await {
            Ok(stream) => TokioIo::new(stream),
            Err(error) => bail!("{}: does the service run?", error.message),
        };
        let (mut sender, connection) = http1::handshake(stream).await?;
        tokio::spawn(connection);
        let mut request = Request::get(self.endpoint.call_path(path)?.as_str())
            .header(header::HOST, &self.endpoint.authority)
            .header(header::CONNECTION, "close");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await;
        let response =
            response.with_context(|| format!("{} is not HTTP: {HINT}", self.authority()))?;
        match response.status() {
            StatusCode::OK => Ok(response),
            status => bail!("{}", problem(status, &read(response).await.unwrap_or_default())),
        }
    }
}

async fn read(response: Response<Incoming>) -> anyhow::Result<Bytes> {
    let body = Limited::new(response.into_body(), MAX_BODY_BYTES).collect().await;
    Ok(body.map_err(anyhow::Error::from_boxed)?.to_bytes())
}

/// Describes a response without data.
fn problem(status: StatusCode, body: &[u8]) -> String {
    let body: Option<Value> = serde_json::from_slice(body).ok();
    let field = |name| body.as_ref().and_then(|body| body[name].as_str());
    let mut message = format!("HTTP {status}");
    if let Some(detail) = field("detail").or_else(|| field("title")) {
        message.push_str(": ");
        let detail: String = detail.chars().take(MAX_MESSAGE_CHARS).collect();
        text::push_printable(&mut message, &detail);
    }
    match status {
        StatusCode::UNAUTHORIZED => {
            message.push_str("; give the token with --token-file FILE or TIDEGATE_ADMIN_TOKEN");
        }
        StatusCode::NOT_FOUND => {
            let _ = write!(message, "; {HINT}");
        }
        _ => {}
    }
    message
}

/// Open stream of events.
pub(super) struct LiveStream {
    body: Incoming,
    reader: EventReader,
}

impl LiveStream {
    /// Returns the next events.
    pub(super) async fn next(&mut self) -> anyhow::Result<Vec<Event>> {
        loop {
            let frame = tokio::time::timeout(STREAM_TIMEOUT, self.body.frame()).await;
            let frame = frame.with_context(|| format!("no data for {STREAM_TIMEOUT:?}"))?;
            let Some(frame) = frame.transpose().context("the connection was lost")? else {
                bail!("the service closed the connection");
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let events = self.reader.push(bytes)?;
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }
}
