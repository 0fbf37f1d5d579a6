//! [`OnResponse`]: effect of a response on the units of its request.

use super::key_source::is_token;
use super::{PolicyError, StatusSet};

/// Effect of a response on the units of its request.
#[derive(Debug)]
pub(super) struct OnResponse {
    /// Statuses that return all units.
    pub(super) refund_on: Option<StatusSet>,
    /// Name of the header that has the units which were used, in lower case.
    pub(super) settled_by: Option<String>,
}

/// Returns the name of a response header in lower case.
pub(super) fn header_name(name: &str) -> Result<String, PolicyError> {
    let name = name.to_ascii_lowercase();
    // Those of the response are this limiter's own.
    let is_own = name.starts_with("ratelimit") || name.starts_with("x-ratelimit-");
    if name.is_empty() || !name.chars().all(is_token) || is_own {
        return Err(PolicyError::ResponseHeader(name));
    }
    Ok(name)
}
