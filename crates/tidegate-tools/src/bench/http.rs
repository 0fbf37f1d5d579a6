//! [`HttpTarget`]: `POST /v1/acquire` of a running service, on HTTP/1.1, and [`HttpConnections`].

use std::sync::{Mutex, PoisonError};

use anyhow::bail;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Method, Request, StatusCode, header};
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use memchr::memmem;
use serde_json::Value;

use super::keys::KeySpace;
use super::target::{Answer, LoadTarget, RequestError, within};
use super::template::Template;
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind, problem_detail, read_body};

/// Client of the HTTP API. A connection has one request at a time.
pub(crate) struct HttpTarget {
    connections: HttpConnections,
    acquire: PathAndQuery,
    body: Template,
}

/// Connections to a service with one request at a time each.
pub(super) struct HttpConnections {
    endpoint: Endpoint,
    /// Connections without a request, the last used one at the end.
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl HttpTarget {
    /// Creates a client whose requests have this body, with the placeholder in place of the key. A
    /// first request, which spends nothing, shows whether the service accepts it.
    pub(crate) async fn connect(
        options: &ClientOptions<'_>,
        body: &Value,
        keys: &KeySpace,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::parse(ServiceKind::Http, options)?;
        let target = Self {
            acquire: endpoint.call_path("/v1/acquire")?,
            body: Template::new(serde_json::to_vec(body)?, &keys.placeholder()),
            connections: HttpConnections::new(endpoint),
        };
        let peek = target.connections.endpoint.call_path("/v1/peek")?;
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
        let timeout = self.connections.endpoint.timeout;
        let request = self.request(path, key)?;
        let (status, body) = within(timeout, self.connections.send(request)).await?;
        answer(status, &body)
    }

    fn request(
        &self,
        path: &PathAndQuery,
        key: &str,
    ) -> Result<Request<Full<Bytes>>, RequestError> {
        let request = self.connections.endpoint.request(Method::POST, path.as_str());
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let body = Full::new(self.body.with_key(key));
        request.body(body).map_err(|error| RequestError::new("invalid", error))
    }
}

impl HttpConnections {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, idle: Mutex::default() }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Opens a first connection.
    pub(super) async fn check(&self) -> anyhow::Result<()> {
        let connection = self.endpoint.open().await?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        Ok(())
    }

    /// Sends a request, and returns the status and the body of the response.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), RequestError> {
        let mut connection = self.connection().await?;
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
        let body = read_body(body).await;
        let body = body.map_err(|error| RequestError::new("connection-closed", error))?;
        if !connection.is_closed() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
        Ok((head.status, body))
    }

    /// Returns an idle connection, or a new one.
    async fn connection(&self) -> Result<SendRequest<Full<Bytes>>, RequestError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut connection) = idle else { return self.open().await };
            if connection.ready().await.is_ok() {
                return Ok(connection);
            }
        }
    }

    async fn open(&self) -> Result<SendRequest<Full<Bytes>>, RequestError> {
        self.endpoint.open().await.map_err(|error| RequestError::connect(&error))
    }
}

impl LoadTarget for HttpTarget {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        self.call(&self.acquire, key).await
    }
}

fn closed(error: &hyper::Error) -> RequestError {
    let kind = if error.is_parse() { "not-http" } else { "connection-closed" };
    match std::error::Error::source(error) {
        Some(cause) => RequestError::new(kind, format_args!("{error}: {cause}")),
        None => RequestError::new(kind, error),
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
    let foreign = || "this is not an answer of Tidegate's HTTP API".to_owned();
    let detail = problem_detail(body).unwrap_or_else(foreign);
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
