//! Bodies of the admin API.

use serde::Serialize;

/// Health of an upstream of the gateway, judged by the requests to it.
#[derive(Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct UpstreamHealth {
    pub url: String,
    /// False after three failures in a row, until a request succeeds.
    pub up: bool,
    /// Whether it gets no requests for some seconds, unless all others are ejected, too.
    pub ejected: bool,
}
