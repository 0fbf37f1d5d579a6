//! Bearer tokens, compared in constant time.

use http::{HeaderMap, header};
use subtle::ConstantTimeEq;

use crate::config::Secret;

/// Checks the bearer token of a request.
pub(crate) fn check(token: &Secret, headers: &HeaderMap) -> Result<(), &'static str> {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token)
    });
    match given {
        Some(given) => check_plain(token, given.as_bytes()),
        None => Err("a bearer token is required: Authorization: Bearer …"),
    }
}

/// Checks a token without the `Bearer` scheme.
pub(crate) fn check_plain(token: &Secret, given: &[u8]) -> Result<(), &'static str> {
    let is_equal = bool::from(given.ct_eq(token.reveal().as_bytes()));
    is_equal.then_some(()).ok_or("the token is wrong")
}
