//! Bearer tokens, compared in constant time.

use http::{HeaderMap, StatusCode, header};
use subtle::ConstantTimeEq;

use crate::config::Secret;
use crate::problem::Problem;

/// Whether a request may ask: always if no token is set.
pub(crate) fn check(token: Option<&Secret>, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(token) = token else { return Ok(()) };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token)
    });
    match given {
        Some(given) if bool::from(given.as_bytes().ct_eq(token.reveal().as_bytes())) => Ok(()),
        Some(_) => Err(Problem::new(StatusCode::UNAUTHORIZED, "the bearer token is not the right one")),
        None => Err(Problem::new(StatusCode::UNAUTHORIZED, "a bearer token is needed: Authorization: Bearer …")),
    }
}
