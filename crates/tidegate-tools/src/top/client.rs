//! [`AdminClient`]: requests to the admin API of a service.

use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Method, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::Value;

use super::data::Lookup;
use super::events::{EventReader, ServerEvent};
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind, problem_detail, read_body};
use crate::tool::text::encoded;

/// Time without a byte of the stream after which the connection counts as lost. The service sends
/// one sample per second.
const STREAM_TIMEOUT: Duration = Duration::from_secs(20);

const HINT: &str = "is this the URL of the admin listener (listen.admin), such as \
                    http://127.0.0.1:8082?";

pub(crate) struct AdminClient(Endpoint);

impl AdminClient {
    pub(crate) fn new(options: &ClientOptions<'_>) -> anyhow::Result<Self> {
        Endpoint::parse(ServiceKind::Admin, options).map(Self)
    }

    /// Returns the host and port of the service.
    pub(super) fn authority(&self) -> &str {
        &self.0.authority
    }

    /// Opens the stream of events.
    pub(super) async fn live(&self) -> anyhow::Result<EventStream> {
        let response = self.get("/v1/live").await?;
        let kind = response.headers().get(header::CONTENT_TYPE);
        let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if !is_stream {
            bail!("{}/v1/live is not a stream of events: {HINT}", self.0.path);
        }
        Ok(EventStream { body: response.into_body(), reader: EventReader::default() })
    }

    /// Looks a key up in every policy.
    pub(super) async fn lookup(&self, key: &str) -> anyhow::Result<Lookup> {
        not_of_tidegate(serde_json::from_value(self.lookup_json(key, None).await?))
    }

    /// Looks a key up in every policy, or in one.
    pub(crate) async fn lookup_json(
        &self,
        key: &str,
        policy: Option<&str>,
    ) -> anyhow::Result<Value> {
        let policy = policy.map(|policy| format!("&policy={}", encoded(policy)));
        let path = format!("/v1/lookup?key={}{}", encoded(key), policy.unwrap_or_default());
        self.get_json(&path).await
    }

    /// Sends a GET request, and returns the JSON of the response.
    pub(crate) async fn get_json(&self, path: &str) -> anyhow::Result<Value> {
        let body = self.call(Method::GET, path, String::new()).await?;
        not_of_tidegate(serde_json::from_slice(&body))
    }

    /// Sends a request, and returns the body of a successful response.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> anyhow::Result<Bytes> {
        let response = self.send(method, path, body).await?;
        let body = tokio::time::timeout(self.0.timeout, read_body(response.into_body())).await;
        body.with_context(|| format!("no answer within {:?}", self.0.timeout))?
    }

    /// Sends a POST request with JSON.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<()> {
        self.send(Method::POST, path, body.to_string()).await.map(drop)
    }

    async fn get(&self, path: &str) -> anyhow::Result<Response<Incoming>> {
        self.send(Method::GET, path, String::new()).await
    }

    /// Sends a request, and returns a successful response.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> anyhow::Result<Response<Incoming>> {
        match tokio::time::timeout(self.0.timeout, self.send_without_timeout(method, path, body))
            .await
        {
            Ok(response) => response,
            Err(_) => bail!("no answer within {:?}", self.0.timeout),
        }
    }

    async fn send_without_timeout(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut connection = match self.0.open().await {
            Ok(connection) => connection,
            Err(error) => bail!("{error:#}: does the service run?"),
        };
        let request = self.0.request(method, self.0.call_path(path)?.as_str());
        let request = request.header(header::CONNECTION, "close");
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let response = connection.send_request(request.body(body.into())?).await;
        let response =
            response.with_context(|| format!("{} is not HTTP: {HINT}", self.authority()))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = read_body(response.into_body()).await.unwrap_or_default();
        let detail = problem_detail(&body).map(|detail| format!(": {detail}")).unwrap_or_default();
        let hint = match status {
            StatusCode::UNAUTHORIZED => {
                "; give the token with --token-file FILE or TIDEGATE_ADMIN_TOKEN"
            }
            StatusCode::NOT_FOUND => &format!("; {HINT}"),
            _ => "",
        };
        bail!("HTTP {status}{detail}{hint}")
    }
}

fn not_of_tidegate<T>(read: serde_json::Result<T>) -> anyhow::Result<T> {
    read.with_context(|| format!("not an answer of Tidegate: {HINT}"))
}

/// Open stream of events.
pub(super) struct EventStream {
    body: Incoming,
    reader: EventReader,
}

impl EventStream {
    /// Returns the next events.
    pub(super) async fn next(&mut self) -> anyhow::Result<Vec<ServerEvent>> {
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
