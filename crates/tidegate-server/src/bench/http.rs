//! [`HttpTarget`]: `POST /v1/acquire` of a running service, on HTTP/1.1.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::bail;
use axum::body::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use memchr::memmem;
use serde_json::Value;

use super::connect::{Endpoint, Protocol};
use super::keys::KeySpace;
use super::target::{Answer, RequestError, Target};
use super::template::Template;
use crate::config::Secret;

/// Maximum size of an answer.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Maximum length of a message of the service in an error.
const MAX_MESSAGE_CHARS: usize = 200;

/// Client of the HTTP API. A connection has one request at a time.
pub(crate) struct HttpTarget {
    endpoint: Endpoint,
    acquire: PathAndQuery,
    authorization: Option<HeaderValue>,
    body: Template,
    timeout: Duration,
    /// Connections without a request, the last used one at the end.
    idle: Mutex<Vec<Connection>>,
}

type Connection = SendRequest<Full<Bytes>>;

/// Options of a client of a service.
pub(crate) struct ClientOptions<'a> {
    pub(crate) address: &'a str,
    pub(crate) token: Option<&'a Secret>,
    /// File with the certificates to trust, in place of those of the system.
    pub(crate) ca: Option<&'a Path>,
    pub(crate) timeout: Duration,
}

impl ClientOptions<'_> {
    /// Returns the header with the token.
    pub(crate) fn authorization(&self) -> anyhow::Result<Option<HeaderValue>> {
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

impl HttpTarget {
    /// Creates a client whose requests have this body, with the placeholder in place of the key. A
    /// first request, which spends nothing, shows whether the service accepts it.
    pub(crate) async fn connect(
        options: &ClientOptions<'_>,
        body: &Value,
        keys: &KeySpace,
    ) -> anyhow::Result<Self> {
        let endpoint =
            Endpoint::parse(Protocol::Http, options.address, options.ca, options.timeout)?;
        let target = Self {
            acquire: endpoint.call_path("/v1/acquire")?,
            authorization: options.authorization()?,
            body: Template::new(serde_json::to_vec(body)?, &keys.placeholder()),
            timeout: options.timeout,
            idle: Mutex::default(),
            endpoint,
        };
        let peek = target.endpoint.call_path("/v1/peek")?;
        match target.call(&peek, &keys.key(0)).await {
            Ok(_) => Ok(target),
            Err(error) => bail!("--http {}: {}", options.address, error.message),
        }
    }

    /// Returns whether the key is part of the requests.
    pub(crate) fn has_key(&self) -> bool {
        self.body.has_key()
    }

    async fn call(&self, path: &PathAndQuery, key: &str) -> Result<Answer, RequestError> {
        match tokio::time::timeout(self.timeout, self.call_without_timeout(path, key)).await {
            Ok(answer) => answer,
            Err(_) => Err(RequestError::timeout(self.timeout)),
        }
    }

    async fn call_without_timeout(
        &self,
        path: &PathAndQuery,
        key: &str,
    ) -> Result<Answer, RequestError> {
        let mut connection = self.connection().await?;
        let request = self.request(path, key)?;
        let response = match connection.try_send_request(request).await {
            Ok(response) => response,
            Err(mut error) => {
                // The service closed the connection while it was idle: nothing was sent.
                let Some(unsent) = error.take_message() else { return Err(closed(error.error())) };
                connection = self.open().await?;
                connection.send_request(unsent).await.map_err(|error| closed(&error))?
            }
        };
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
        let body = body.map_err(|error| RequestError::new("connection-closed", error))?;
        if !connection.is_closed() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
        answer(head.status, &body.to_bytes())
    }

    fn request(
        &self,
        path: &PathAndQuery,
        key: &str,
    ) -> Result<Request<Full<Bytes>>, RequestError> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(path.as_str())
            .header(header::HOST, &self.endpoint.authority)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let body = Full::new(self.body.with_key(key));
        request.body(body).map_err(|error| RequestError::new("invalid", error))
    }

    /// Returns an idle connection, or a new one.
    async fn connection(&self) -> Result<Connection, RequestError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut connection) = idle else { return self.open().await };
            if connection.ready().await.is_ok() {
                return Ok(connection);
            }
        }
    }

    async fn open(&self) -> Result<Connection, RequestError> {
        let stream = TokioIo::new(self.endpoint.connect().await?);
        let (sender, connection) =
            http1::handshake(stream).await.map_err(|error| RequestError::new("connect", error))?;
        tokio::spawn(connection);
        Ok(sender)
    }
}

impl Target for HttpTarget {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        self.call(&self.acquire, key).await
    }
}

fn closed(error: &hyper::Error) -> RequestError {
    let kind = if error.is_parse() { "not-http" } else { "connection-closed" };
    RequestError::new(kind, describe(error))
}

/// Returns the message of an error with that of its cause.
fn describe(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Returns the decision in a response. It is recognized by its start: to parse all of it would cost
/// more than the rest of the request.
fn answer(status: StatusCode, body: &[u8]) -> Result<Answer, RequestError> {
    let is_decision = body.starts_with(b"{\"allowed\":");
    match status {
        StatusCode::TOO_MANY_REQUESTS if is_decision => Ok(Answer::Denied),
        StatusCode::OK if is_decision => {
            let is_unlimited = memmem::find(body, b"\"policy\":null").is_some();
            Ok(if is_unlimited { Answer::Unlimited } else { Answer::Allowed })
        }
        _ => Err(RequestError::new(format!("HTTP {}", status.as_u16()), problem(status, body))),
    }
}

/// Returns the status and the message of a response without a decision.
fn problem(status: StatusCode, body: &[u8]) -> String {
    let body: Option<Value> = serde_json::from_slice(body).ok();
    let field = |name| body.as_ref().and_then(|body| body[name].as_str());
    let detail = match field("detail").or_else(|| field("title")) {
        Some(detail) => {
            detail.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect()
        }
        None => "this is not an answer of Tidegate's HTTP API".to_owned(),
    };
    let hint = match status {
        StatusCode::UNAUTHORIZED => "; give the token with --token-file",
        _ => "",
    };
    format!("HTTP {status}: {detail}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_recognized_by_status_and_body() {
        let ok = |status: u16, body: &str| {
            answer(StatusCode::from_u16(status).expect("valid"), body.as_bytes())
        };
        let allowed = r#"{"allowed":true,"policy":"a","decisions":[{"allowed":true}]}"#;
        assert_eq!(ok(200, allowed), Ok(Answer::Allowed));
        assert_eq!(ok(200, r#"{"allowed":true,"policy":null}"#), Ok(Answer::Unlimited));
        assert_eq!(ok(429, r#"{"allowed":false,"policy":"a"}"#), Ok(Answer::Denied));
        for (status, body, kind, message) in [
            (429, "slow down", "HTTP 429", "not an answer of Tidegate"),
            (200, "<html>", "HTTP 200", "not an answer of Tidegate"),
            (404, r#"{"detail":"no policy \"a\""}"#, "HTTP 404", "no policy"),
            (401, r#"{"title":"Unauthorized"}"#, "HTTP 401", "--token-file"),
            (503, "", "HTTP 503", "503 Service Unavailable"),
        ] {
            let error = ok(status, body).expect_err("no decision");
            assert_eq!(error.kind, kind);
            assert!(error.message.contains(message), "{error:?}");
        }
    }
}
