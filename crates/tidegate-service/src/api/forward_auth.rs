//! `/v1/forward-auth`, for nginx's `auth_request`, Caddy's `forward_auth` and Traefik's
//! `forwardAuth`: translates the headers of the proxy's subrequest into a query.

use axum::extract::Query;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Deserialize;
use tidegate::layer::RequestParts;
use tidegate::{Action, PolicyDecisions, Query as DecisionQuery};
use tidegate_config::duration;

use super::problem::Problem;
use super::{ApiResponse, add_rate_limit_headers, client_address};
use crate::auth::{self, AuthListener};
use crate::state::ServerState;
use tidegate_api::json::nearest_host;
use tidegate_config::{Scope, Tokens};
use tidegate_net::listener::{Peer, Request};

/// Header with the token, for proxies that cannot set `Authorization` or must forward the client's.
const TOKEN: &str = "x-tidegate-token";
/// Headers in which proxies describe the request.
const METHOD: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const URI: [&str; 3] = ["x-forwarded-uri", "x-original-uri", "x-original-url"];
const HOST: [&str; 2] = ["x-forwarded-host", "x-original-host"];

#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ForwardAuthParameters {
    /// Policy to apply, even if it does not match; by default all policies that match.
    policy: Option<String>,
    /// Status of a denial; by default 429. nginx accepts only 401 and 403.
    #[param(inline)]
    deny_status: Option<DenyStatus>,
}

#[derive(Clone, Copy, Deserialize, utoipa::ToSchema)]
enum DenyStatus {
    #[serde(rename = "401")]
    Unauthorized,
    #[serde(rename = "403")]
    Forbidden,
    #[serde(rename = "429")]
    TooManyRequests,
}

/// Decide whether a proxy may forward a request.
///
/// The proxy sends the headers of the request; its method, URI and host are in X-Forwarded-Method,
/// -Uri and -Host or X-Original-Method, -URI (-URL) and -Host.
#[utoipa::path(
    get, path = "/v1/forward-auth", params(ForwardAuthParameters),
    responses(
        (status = 200, description = "Allowed"),
        (
            status = 400, description = "The query is invalid",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 401,
            description = "The token is missing or wrong; or denied, with deny_status=401",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 403,
            description = "The token lacks a scope; or denied, with deny_status=403",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 404, description = "No such policy",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 429, description = "Denied",
            body = Problem, content_type = "application/problem+json"
        ),
        (
            status = 503, description = "The store is unavailable",
            body = Problem, content_type = "application/problem+json"
        ),
    )
)]
pub async fn forward_auth(
    state: &ServerState,
    peer: Peer,
    request: Request,
) -> Result<ApiResponse, Problem> {
    let active = state.active_guard();
    let (mut head, _) = request.into_parts();
    take_token(state, &active.tokens, peer, &mut head.headers)?;
    let address = client_address(&active.client_ip, peer, &head.headers)?;
    let method = proxy_header(&head.headers, &METHOD, Some)?;
    let uri = proxy_header(&head.headers, &URI, origin_form)?;
    let host = proxy_header(&head.headers, &HOST, Some)?.map(nearest_host);
    let request = RequestParts::forwarded(&head.headers, active.client_ip.group(address))
        .with_method(method)
        .with_path_and_query(uri)
        .with_host(host);
    // A proxy that forwards the client's query would let the client choose its policy.
    if head.uri.query().is_some_and(|query| !query.is_empty() && request.raw_query() == Some(query))
    {
        return Err(Problem::bad_request(
            "the query string is the client's: the proxy must send its own, at least a question \
             mark (Caddy: uri /v1/forward-auth?)",
        ));
    }
    let parameters: Result<Query<ForwardAuthParameters>, _> = Query::try_from_uri(&head.uri);
    let Query(parameters) = parameters.map_err(|error| Problem::bad_request(error.body_text()))?;
    let query = match &parameters.policy {
        Some(policy) => DecisionQuery::attributes_for(policy, &request),
        None => {
            let described = [uri.is_some(), method.is_some(), host.is_some()];
            active.forward_auth_parts.check(described, &state.metrics);
            DecisionQuery::attributes(&request)
        }
    };
    let answer = |decisions: &PolicyDecisions<'_>| {
        let denied = !decisions.is_allowed();
        let mut response = if denied {
            let status = parameters.deny_status.map_or(StatusCode::TOO_MANY_REQUESTS, Into::into);
            Problem::denied(status, denial_reason(decisions), decisions).into_http()
        } else {
            Response::new(Full::default())
        };
        add_rate_limit_headers(response.headers_mut(), decisions, &active, denied);
        response
    };
    Ok(active.decide(&head.headers, Action::Acquire, query, answer).await?)
}

impl From<DenyStatus> for StatusCode {
    fn from(status: DenyStatus) -> Self {
        match status {
            DenyStatus::Unauthorized => Self::UNAUTHORIZED,
            DenyStatus::Forbidden => Self::FORBIDDEN,
            DenyStatus::TooManyRequests => Self::TOO_MANY_REQUESTS,
        }
    }
}

/// Checks the proxy's token and removes it, so that it cannot become a key and be listed among the
/// hot keys.
fn take_token(
    state: &ServerState,
    tokens: &Tokens,
    peer: Peer,
    headers: &mut HeaderMap,
) -> Result<(), Problem> {
    let own = headers.remove(TOKEN);
    let Some(tokens) = tokens.of_api() else { return Ok(()) };
    let given = own.as_ref().map(HeaderValue::as_bytes).or_else(|| auth::bearer(headers));
    state.authorize(tokens, given, &[Scope::Acquire], AuthListener::Http, peer)?;
    if own.is_none() {
        headers.remove(header::AUTHORIZATION);
    }
    Ok(())
}

/// Returns the explanation for the client, which Caddy and Traefik forward.
fn denial_reason(decisions: &PolicyDecisions<'_>) -> String {
    let Some(denial) = decisions.denied_by() else { return "denied".to_owned() };
    let (policy, wait) = (denial.policy(), denial.decision().retry_after);
    if let Some(key) = denial.missing_key() {
        return format!("the request lacks {key}, by which policy {policy:?} counts: send it");
    }
    if wait.is_zero() {
        return format!("policy {policy:?} does not allow this request");
    }
    format!("policy {policy:?} is over its limit: try again in {}", duration::readable(wait))
}

/// Returns the value that these headers have in common. Different values are an error, because one
/// may be the client's: a proxy that sets `X-Original-URI` may forward an `X-Forwarded-Uri`.
fn proxy_header<'h>(
    headers: &'h HeaderMap,
    names: &[&str],
    parse: impl Fn(&'h str) -> Option<&'h str>,
) -> Result<Option<&'h str>, Problem> {
    let mut found: Option<(&str, &str)> = None;
    for (name, value) in
        names.iter().flat_map(|name| headers.get_all(*name).iter().map(move |value| (*name, value)))
    {
        let text = str::from_utf8(value.as_bytes()).ok().and_then(&parse);
        let text = text.ok_or_else(|| Problem::bad_request(format!("{name} is invalid")))?;
        match found {
            Some((other, earlier)) if earlier != text => {
                return Err(Problem::bad_request(format!(
                    "{other} and {name} differ: the proxy must set one and remove the other"
                )));
            }
            _ => found = Some((name, text)),
        }
    }
    Ok(found.map(|(_, text)| text))
}

/// Returns the path and query of a URI, which may be an absolute URL.
fn origin_form(uri: &str) -> Option<&str> {
    if uri.starts_with('/') {
        return Some(uri);
    }
    let (_, after_scheme) = uri.split_once("://")?;
    Some(after_scheme.find(['/', '?']).map_or("/", |at| &after_scheme[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    #[test]
    fn uri_may_be_an_absolute_url_and_the_nearest_host_counts() {
        assert_eq!(origin_form("/a?b"), Some("/a?b"));
        assert_eq!(origin_form("https://example.com/a?b"), Some("/a?b"));
        assert_eq!(origin_form("https://example.com"), Some("/"));
        assert_eq!(origin_form("a"), None);
        assert_eq!(nearest_host("spoofed.example, Example.com"), "Example.com");
        assert_eq!(nearest_host("example.com:80"), "example.com:80");
    }

    #[test]
    fn headers_that_differ_are_rejected() {
        let uri = |lines: &[(&'static str, &str)]| {
            proxy_header(&headers(lines), &URI, origin_form).map(|uri| uri.map(str::to_owned))
        };
        let same = [("x-forwarded-uri", "/a"), ("x-original-url", "https://example.com/a")];
        assert_eq!(uri(&same).expect("the same").as_deref(), Some("/a"));
        assert!(uri(&[("x-forwarded-uri", "/a"), ("x-original-uri", "/b")]).is_err());
        assert!(uri(&[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")]).is_err());
        assert!(uri(&[("x-forwarded-uri", "nonsense")]).is_err());
        assert_eq!(uri(&[]).expect("nothing wrong"), None);
    }
}
