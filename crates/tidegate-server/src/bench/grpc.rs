//! [`GrpcTarget`]: `ShouldRateLimit` of Envoy's rate limit service.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::bail;
use axum::body::Bytes;
use h2::client::{self, SendRequest};
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version, header};
use prost::Message as _;
use tokio::sync::Mutex;
use tonic::{Code as GrpcCode, Status};

use super::keys::{KEY, KeySpace};
use super::target::{Answer, LoadTarget, RequestError, within};
use super::template::Template;
use crate::envoy::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::envoy::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use crate::envoy::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::envoy::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind};

const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Bytes before a message: whether it is compressed, and its length.
const HEAD_BYTES: usize = 5;
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Receive windows that answers never fill, so that flow control costs no round trips.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Client of a rate limit service. Requests share a few connections.
pub(crate) struct GrpcTarget {
    endpoint: Endpoint,
    uri: Uri,
    message: Template,
    connections: Vec<ConnectionSlot>,
    next: AtomicUsize,
}

/// Place of a connection, locked while it is opened, so that there is only one.
type ConnectionSlot = Mutex<Option<SendRequest<Bytes>>>;

/// Domain and descriptors of all requests, and their cost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GrpcQuery<'a> {
    pub(crate) domain: &'a str,
    /// Entries of each descriptor, in whose values [`KEY`] stands for the key.
    pub(crate) descriptors: &'a [Vec<(String, String)>],
    pub(crate) cost: u32,
}

impl GrpcQuery<'_> {
    fn message(&self, key: &str) -> RateLimitRequest {
        let entry = |(name, value): &(String, String)| {
            let value = value.replace(KEY, key);
            Entry { key: name.clone(), value }
        };
        let descriptor = |entries: &Vec<(String, String)>| RateLimitDescriptor {
            entries: entries.iter().map(entry).collect(),
            ..RateLimitDescriptor::default()
        };
        RateLimitRequest {
            domain: self.domain.to_owned(),
            descriptors: self.descriptors.iter().map(descriptor).collect(),
            // Envoy leaves a cost of 1 out, and a service treats an explicit one differently.
            hits_addend: if self.cost == 1 { 0 } else { self.cost },
        }
    }

    /// Returns a request that spends nothing.
    fn peek(&self, key: &str) -> RateLimitRequest {
        let mut message = self.message(key);
        for descriptor in &mut message.descriptors {
            descriptor.hits_addend = Some(0);
        }
        message
    }
}

impl GrpcTarget {
    /// Opens the connections. A first request, which spends nothing, shows whether the service
    /// accepts it.
    pub(crate) async fn connect(
        options: &ClientOptions<'_>,
        query: GrpcQuery<'_>,
        keys: &KeySpace,
        connections: usize,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::parse(ServiceKind::Grpc, options)?;
        let uri = Uri::builder()
            .scheme(endpoint.scheme())
            .authority(endpoint.authority.as_str())
            .path_and_query(PATH)
            .build()?;
        let placeholder = keys.placeholder();
        let target = Self {
            endpoint,
            uri,
            message: Template::new(framed(&query.message(&placeholder)), &placeholder),
            connections: std::iter::repeat_with(ConnectionSlot::default)
                .take(connections)
                .collect(),
            next: AtomicUsize::new(0),
        };
        for _ in 0..connections {
            let peek = Bytes::from(framed(&query.peek(&keys.key(0))));
            if let Err(error) = target.call(peek).await {
                bail!("--grpc {}: {}", options.address, error.message);
            }
        }
        Ok(target)
    }

    /// Returns whether the key is part of the requests.
    pub(crate) fn has_key(&self) -> bool {
        self.message.has_key()
    }

    async fn call(&self, message: Bytes) -> Result<Answer, RequestError> {
        within(self.endpoint.timeout, self.call_without_timeout(message)).await
    }

    async fn call_without_timeout(&self, message: Bytes) -> Result<Answer, RequestError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let mut connection = self.connection(&self.connections[number]).await?;
        let sent = connection.send_request(self.request(), false);
        let (response, mut body) = sent.map_err(closed)?;
        body.send_data(message, true).map_err(closed)?;
        let (head, mut body) = response.await.map_err(closed)?.into_parts();
        if head.status != http::StatusCode::OK {
            let kind = format!("HTTP {}", head.status.as_u16());
            let message = format!("HTTP {}: this is not a gRPC service", head.status);
            return Err(RequestError::new(kind, message));
        }
        let mut received = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.map_err(closed)?;
            let _ = body.flow_control().release_capacity(data.len());
            received.extend_from_slice(&data);
            if received.len() > MAX_MESSAGE_BYTES {
                return Err(RequestError::new("not-grpc", "the answer is too large"));
            }
        }
        let trailers = body.trailers().await.map_err(closed)?;
        // An error may have headers only.
        answer(trailers.as_ref().unwrap_or(&head.headers), &received)
    }

    fn request(&self) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = self.uri.clone();
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        if let Some(authorization) = &self.endpoint.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        request
    }

    /// Returns the connection of a slot with room for a request, and opens it again if it was
    /// closed.
    async fn connection(&self, slot: &ConnectionSlot) -> Result<SendRequest<Bytes>, RequestError> {
        let mut slot = slot.lock().await;
        // A sender without a request of its own is ready, unless the connection is closed.
        if let Some(sender) = slot.clone()
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        let stream = self.endpoint.connect().await;
        let stream = stream.map_err(|error| RequestError::connect(&error))?;
        let (sender, connection) = client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .enable_push(false)
            .handshake(stream)
            .await
            .map_err(closed)?;
        tokio::spawn(connection);
        *slot = Some(sender.clone());
        sender.ready().await.map_err(closed)
    }
}

impl LoadTarget for GrpcTarget {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        self.call(self.message.with_key(key)).await
    }
}

/// Encodes a message with its length.
fn framed(message: &RateLimitRequest) -> Vec<u8> {
    let encoded = message.encode_to_vec();
    let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0], length.as_slice(), &encoded].concat()
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn closed(error: h2::Error) -> RequestError {
    let is_timeout = error.get_io().is_some_and(|io| io.kind() == std::io::ErrorKind::TimedOut);
    let kind = if is_timeout { "timeout" } else { "connection-closed" };
    let hint = match error.reason() {
        Some(h2::Reason::FRAME_SIZE_ERROR | h2::Reason::PROTOCOL_ERROR) => {
            ": this is not a gRPC service"
        }
        _ => "",
    };
    RequestError::new(kind, format_args!("{error}{hint}"))
}

/// Returns the decision in an answer, or the error of its status.
fn answer(status: &HeaderMap, received: &[u8]) -> Result<Answer, RequestError> {
    let unexpected = || RequestError::new("not-grpc", "this is not an answer of a gRPC service");
    let status = Status::from_header_map(status).ok_or_else(unexpected)?;
    if status.code() != GrpcCode::Ok {
        let hint = match status.code() {
            GrpcCode::Unauthenticated => "; give the token with --token-file",
            _ => "",
        };
        let name = format!("gRPC {:?}", status.code());
        let message = format!("{name}: {}{hint}", status.message());
        return Err(RequestError::new(name, message));
    }
    let message = received.get(HEAD_BYTES..).unwrap_or_default();
    let response = RateLimitResponse::decode(message).map_err(|_| unexpected())?;
    match response.overall_code() {
        Code::OverLimit => Ok(Answer::Denied),
        _ if response.statuses.iter().all(|status| status.current_limit.is_none()) => {
            Ok(Answer::Unlimited)
        }
        _ => Ok(Answer::Allowed),
    }
}
