//! Why there is no answer of an upstream, and what the client is told instead.

use std::error::Error as _;
use std::io;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use hyper_util::client::legacy;

use super::body::Stalled;
use crate::api::problem::Problem;

/// What went wrong on the way to an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request can be read in two ways, or makes no sense here.
    Ambiguous(&'static str),
    Method(&'static str),
    /// It has been here before, and more than once.
    Loop,
    /// The client stopped in the middle of its body.
    SlowBody,
    /// The client broke off, or its body is broken.
    BrokenBody,
    /// Could not be reached.
    Unreachable,
    /// None could be reached, and not for the first time.
    NoneLeft,
    ConnectTimeout,
    /// The connection broke, or what came is no answer.
    Broken,
    /// Nothing came in time.
    NoAnswer,
}

impl Refusal {
    pub(super) fn of(error: &legacy::Error) -> Self {
        let mut cause = error.source();
        let (mut timed_out, mut stalled, mut body) = (false, false, false);
        while let Some(found) = cause {
            timed_out |= found
                .downcast_ref::<io::Error>()
                .is_some_and(|io| io.kind() == io::ErrorKind::TimedOut);
            stalled |= found.is::<Stalled>();
            // What we hand on to the upstream's connection fails there as the user's fault.
            body |= found.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_user);
            cause = found.source();
        }
        match (error.is_connect(), timed_out) {
            (true, true) => Self::ConnectTimeout,
            (true, false) => Self::Unreachable,
            _ if stalled => Self::SlowBody,
            _ if body => Self::BrokenBody,
            _ => Self::Broken,
        }
    }

    /// Whether it speaks against the upstream.
    pub(super) fn is_upstreams(self) -> bool {
        !matches!(
            self,
            Self::Ambiguous(_) | Self::Method(_) | Self::Loop | Self::SlowBody | Self::BrokenBody
        )
    }

    fn status(self) -> StatusCode {
        match self {
            Self::Ambiguous(_) | Self::BrokenBody => StatusCode::BAD_REQUEST,
            Self::Method(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::Unreachable | Self::Broken => StatusCode::BAD_GATEWAY,
            Self::NoneLeft => StatusCode::SERVICE_UNAVAILABLE,
            Self::ConnectTimeout | Self::NoAnswer => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Ambiguous(reason) | Self::Method(reason) => reason,
            Self::Loop => {
                "the request goes round in circles: an upstream leads back to this gateway"
            }
            Self::SlowBody => "the body of the request stopped coming",
            Self::BrokenBody => "the body of the request broke off",
            Self::Unreachable => "the upstream cannot be reached",
            Self::NoneLeft => "no upstream can be reached; try again in a moment",
            Self::ConnectTimeout => "the upstream cannot be reached in time",
            Self::Broken => "the upstream broke off before it answered",
            Self::NoAnswer => "the upstream did not answer in time",
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = Problem::new(self.status(), self.reason()).into_response();
        if self == Self::NoneLeft {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
