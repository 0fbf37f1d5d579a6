//! Errors of the proxy and the responses to the client.

use std::error::Error as _;
use std::io;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};

use super::body::{SlowUpload, TooSlow};
use super::client::{ClientError, NoFreeConnection};
use super::concurrency::Overload;
use super::cors::OwnResponse;
use super::local_error::LocalResource;
use crate::api::problem::Problem;

/// Common methods that are forwarded, for the `Allow` of a 405. Others are forwarded, too.
const ALLOWED_METHODS: &str = "GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS";

/// Reason why a request got no response from an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProxyError {
    /// The request is ambiguous or invalid for a gateway.
    Ambiguous(&'static str),
    Method(&'static str),
    Trace,
    /// The request passed through this gateway too often.
    Loop,
    /// A GET or HEAD has a body of unknown length.
    LengthRequired,
    /// The client stopped sending its body, or sends it too slowly.
    RequestBodyTimeout,
    /// The client closed the connection within its body, or the body is malformed.
    RequestBodyBroken,
    /// Connecting to the upstream failed.
    Unreachable,
    /// All upstreams are ejected, and none could be reached.
    NoUpstream,
    /// The upstream has too many requests.
    Overloaded(Overload),
    /// No connection could be opened, because of this host.
    LocalResource(LocalResource),
    ConnectTimeout,
    /// The upstream closed the connection.
    ConnectionLost,
    /// The upstream sent no valid HTTP.
    InvalidResponse,
    /// The head of the response has too many headers or bytes.
    ResponseTooLarge,
    /// The upstream sent no response head in time.
    ResponseTimeout,
}

impl ProxyError {
    /// Returns the reason for the error of a request to a host.
    pub(super) fn new(error: &ClientError, host: &str) -> Self {
        if matches!(error, ClientError::Timeout) {
            return Self::ResponseTimeout;
        }
        let mut cause = error.source();
        let mut system_error = None;
        let mut timed_out = false;
        let mut is_busy = false;
        let mut stalled = false;
        let mut ended = false;
        let mut body_failed = false;
        let mut invalid = false;
        let mut too_large = false;
        while let Some(source) = cause {
            if let Some(error) = source.downcast_ref::<io::Error>() {
                timed_out |= error.kind() == io::ErrorKind::TimedOut;
                system_error = Some(error).filter(|error| error.raw_os_error().is_some());
            }
            is_busy |= source.is::<NoFreeConnection>();
            stalled |= source.is::<TooSlow>();
            ended |= source.is::<SlowUpload>();
            if let Some(error) = source.downcast_ref::<hyper::Error>() {
                // hyper reports errors of a body that we provide as user errors.
                body_failed |= error.is_user();
                invalid |= error.is_parse();
                too_large |= error.is_parse_too_large();
            }
            cause = source.source();
        }
        match (error.is_connect(), timed_out) {
            (true, _) if is_busy => Self::Overloaded(Overload::QueueTimeout),
            (true, true) => Self::ConnectTimeout,
            (true, false) => LocalResource::missing(system_error, host)
                .map_or(Self::Unreachable, Self::LocalResource),
            _ if stalled => Self::RequestBodyTimeout,
            _ if ended => Self::Overloaded(Overload::SlowUpload),
            _ if body_failed => Self::RequestBodyBroken,
            _ if too_large => Self::ResponseTooLarge,
            _ if invalid => Self::InvalidResponse,
            _ => Self::ConnectionLost,
        }
    }

    /// Returns whether the error counts as a failure of the upstream.
    pub(super) fn is_upstream_failure(self) -> bool {
        !matches!(
            self,
            Self::Ambiguous(_)
                | Self::Method(_)
                | Self::Trace
                | Self::Loop
                | Self::LengthRequired
                | Self::RequestBodyTimeout
                | Self::RequestBodyBroken
                | Self::Overloaded(_)
                | Self::LocalResource(_)
        )
    }

    fn status(self) -> StatusCode {
        match self {
            Self::Ambiguous(_) | Self::RequestBodyBroken => StatusCode::BAD_REQUEST,
            Self::Method(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Trace => StatusCode::METHOD_NOT_ALLOWED,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::LengthRequired => StatusCode::LENGTH_REQUIRED,
            Self::RequestBodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Unreachable
            | Self::ConnectionLost
            | Self::InvalidResponse
            | Self::ResponseTooLarge => StatusCode::BAD_GATEWAY,
            Self::NoUpstream | Self::Overloaded(_) | Self::LocalResource(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::ConnectTimeout | Self::ResponseTimeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Ambiguous(reason) | Self::Method(reason) => reason,
            Self::Trace => {
                "TRACE is not forwarded: its response would repeat the request's headers"
            }
            Self::Loop => "forwarding loop: an upstream leads back to this gateway",
            Self::LengthRequired => {
                "the body of a GET or HEAD needs a Content-Length: without one, servers ignore it"
            }
            Self::RequestBodyTimeout => "the request body arrives too slowly, or not at all",
            Self::RequestBodyBroken => "the request body is incomplete or malformed",
            Self::Unreachable => "the upstream is unreachable",
            Self::NoUpstream => "no upstream is reachable; try again in a moment",
            Self::Overloaded(Overload::SlowUpload) => {
                "the upload is slow, and other requests wait for the upstream; try again later"
            }
            Self::Overloaded(_) => "the upstream has too many requests; try again in a moment",
            Self::LocalResource(_) => {
                "the gateway cannot open a connection to the upstream; try again in a moment"
            }
            Self::ConnectTimeout => "timeout while connecting to the upstream",
            Self::ConnectionLost => "the upstream closed the connection before it responded",
            Self::InvalidResponse => "the upstream sent an invalid response",
            Self::ResponseTooLarge => {
                "the upstream's response has more than 256 headers or 400 KiB of them"
            }
            Self::ResponseTimeout => "the upstream did not respond in time",
        }
    }
}

impl IntoResponse for ProxyError {
    fn into_response(self) -> Response {
        let mut response = Problem::new(self.status(), self.reason()).into_response();
        response.extensions_mut().insert(OwnResponse);
        let headers = response.headers_mut();
        match self {
            Self::NoUpstream | Self::Overloaded(_) | Self::LocalResource(_) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::Trace => {
                headers.insert(header::ALLOW, HeaderValue::from_static(ALLOWED_METHODS));
            }
            _ => {}
        }
        response
    }
}
