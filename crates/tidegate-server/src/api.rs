//! The HTTP API: translates requests into queries and decisions into responses.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body as AnyBody, Bytes};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body::Body as HttpBody;
use http_body_util::{BodyExt as _, Full};
use hyper::service::{Service, service_fn};
use serde::Deserialize;
use tidegate::layer::for_each_header_value;
use tidegate::{Action, ChargeError, ClientIp, Policies, PolicyDecisions, Query, Timestamp};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::listener::{Peer, Request};
use crate::observer::OWN_QUOTA;
use crate::state::ServerState;

mod forward_auth;
pub(crate) mod json;
pub(crate) mod problem;
pub(crate) mod token;

use json::{AttributesBody, DecisionBody, DecisionsBody, Object, QueryBody, QuotaBody};
use problem::Problem;

/// Largest body that is read.
const MAX_BODY_BYTES: usize = 64 * 1024;
/// Time in which a client must send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(OpenApi)]
#[openapi(
    info(title = "Tidegate", description = "Decides, exactly and fast, whether a request may pass now."),
    paths(acquire, peek, refund, report, forward_auth::forward_auth),
    components(schemas(QueryBody<'static>, QuotaBody, DecisionsBody<'static>, DecisionBody<'static>, Problem)),
    modifiers(&Tokens),
    security((), ("token" = []))
)]
struct Api;

/// Describes the token, which is required if `auth.api_token` is set.
struct Tokens;

impl Modify for Tokens {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let token = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        api.components.get_or_insert_default().add_security_scheme("token", token);
    }
}

/// Problems that each query may be answered with.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "it describes the API; Problem itself is what is sent")]
enum Problems {
    /// The query is invalid
    #[response(status = 400, content_type = "application/problem+json")]
    Wrong(#[to_schema] Problem),
    /// The token is missing or wrong
    #[response(status = 401, content_type = "application/problem+json")]
    NoToken(#[to_schema] Problem),
    /// No such policy
    #[response(status = 404, content_type = "application/problem+json")]
    NoPolicy(#[to_schema] Problem),
    /// The path does not have this method
    #[response(status = 405, content_type = "application/problem+json")]
    WrongMethod(#[to_schema] Problem),
    /// The body was not sent in time
    #[response(status = 408, content_type = "application/problem+json")]
    Slow(#[to_schema] Problem),
    /// More than 64 KiB
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(#[to_schema] Problem),
    /// The store is unavailable
    #[response(status = 503, content_type = "application/problem+json")]
    NoDecision(#[to_schema] Problem),
}

/// Response with a complete body.
pub(crate) type Reply = Response<Full<Bytes>>;

/// Returns the API for one connection. It is a plain hyper service: a router for five paths, with a
/// boxed body and future per request, took as long as the rest of a response.
pub(crate) fn service(
    state: &Arc<ServerState>,
    peer: Peer,
) -> impl Service<Request, Response = Reply, Error = Infallible, Future: Send> + Send + use<> {
    let state = Arc::clone(state);
    service_fn(move |request| {
        let state = Arc::clone(&state);
        async move {
            let only_head = request.method() == Method::HEAD;
            let mut reply = reply(&state, peer, request).await.unwrap_or_else(Problem::into_http);
            if only_head {
                let length = HttpBody::size_hint(reply.body()).lower();
                reply.headers_mut().insert(header::CONTENT_LENGTH, length.into());
                *reply.body_mut() = Full::default();
            }
            Ok(reply)
        }
    })
}

async fn reply(state: &ServerState, peer: Peer, request: Request) -> Result<Reply, Problem> {
    let allowed = match (request.uri().path(), request.method()) {
        ("/v1/acquire", &Method::POST) => return acquire(state, peer, request).await,
        ("/v1/peek", &Method::POST) => return peek(state, peer, request).await,
        ("/v1/refund", &Method::POST) => return refund(state, peer, request).await,
        ("/v1/report", &Method::POST) => return report(state, peer, request).await,
        ("/v1/forward-auth", &Method::GET | &Method::HEAD) => {
            return Box::pin(forward_auth::forward_auth(state, peer, request)).await;
        }
        ("/openapi.json", &Method::GET | &Method::HEAD) => {
            return Ok(json_response(
                StatusCode::OK,
                HeaderMap::new(),
                serde_json::to_vec(&Api::openapi()).unwrap_or_default(),
            ));
        }
        ("/v1/acquire" | "/v1/peek" | "/v1/refund" | "/v1/report", _) => "POST",
        ("/v1/forward-auth" | "/openapi.json", _) => "GET,HEAD",
        _ => return Err(not_found(request.uri().clone()).await),
    };
    let mut refused =
        wrong_method(request.method().clone(), request.uri().clone()).await.into_http();
    refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    Ok(refused)
}

fn json_response(status: StatusCode, mut headers: HeaderMap, body: Vec<u8>) -> Reply {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

pub(crate) async fn not_found(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("{} does not exist", uri.path()))
}

pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

/// Decide and, if allowed, take the units.
#[utoipa::path(
    post, path = "/v1/acquire", request_body = QueryBody<'static>,
    responses(
        (
            status = 200, description = "Allowed", body = DecisionsBody<'static>,
            headers(
                ("RateLimit-Policy" = String, description = "The limits that apply, as in the IETF's draft"),
                ("RateLimit" = String, description = "The units that are left of each"),
            )
        ),
        (
            status = 429, description = "Denied", body = DecisionsBody<'static>,
            headers(
                ("RateLimit-Policy" = String, description = "The limits that apply, as in the IETF's draft"),
                ("RateLimit" = String, description = "The units that are left of each"),
                ("Retry-After" = u64, description = "Seconds to wait, rounded up"),
            )
        ),
        Problems,
    )
)]
async fn acquire(state: &ServerState, peer: Peer, request: Request) -> Result<Reply, Problem> {
    decide(state, Action::Acquire, peer, request).await
}

/// Return the decision that acquire would make, without taking units.
#[utoipa::path(
    post, path = "/v1/peek", request_body = QueryBody<'static>,
    responses(
        (status = 200, description = "Allowed or denied, as the body says", body = DecisionsBody<'static>),
        Problems,
    )
)]
async fn peek(state: &ServerState, peer: Peer, request: Request) -> Result<Reply, Problem> {
    decide(state, Action::Peek, peer, request).await
}

/// Record units that were used already: always charges, even beyond the limit.
///
/// `allowed` says whether they fitted. If not, `remaining` is 0 and `retry_after_ms` is the wait
/// until one unit is free again.
#[utoipa::path(
    post, path = "/v1/report", request_body = QueryBody<'static>,
    responses(
        (status = 200, description = "Recorded; the units that are left now", body = DecisionsBody<'static>),
        Problems,
    )
)]
async fn report(state: &ServerState, peer: Peer, request: Request) -> Result<Reply, Problem> {
    decide(state, Action::Report, peer, request).await
}

/// Return the units of an earlier charge: with `age_ms` of that charge, otherwise the oldest that
/// still count.
#[utoipa::path(
    post, path = "/v1/refund", request_body = QueryBody<'static>,
    responses(
        (status = 200, description = "Refunded; the units that are left now", body = DecisionsBody<'static>),
        Problems,
    )
)]
async fn refund(state: &ServerState, peer: Peer, request: Request) -> Result<Reply, Problem> {
    decide(state, Action::Refund, peer, request).await
}

async fn decide(
    state: &ServerState,
    action: Action,
    peer: Peer,
    request: Request,
) -> Result<Reply, Problem> {
    let active = state.active();
    let (head, body) = request.into_parts();
    token::check(active.api_token.as_ref(), &head.headers).map_err(Problem::unauthorized)?;
    let bytes = read(body).await?;
    let Object(mut body): Object<QueryBody<'_>> = parse(&bytes)?;
    if let Some(AttributesBody(attributes)) = &mut body.attributes {
        check_names(attributes, active.policies())?;
        add_address(attributes, &active.client_ip, peer, &head.headers)?;
    }
    let quota = body
        .quota
        .as_ref()
        .map(|Object(quota)| quota.quota())
        .transpose()
        .map_err(Problem::bad_request)?;
    let query = match (&body.policy, &body.key, &body.attributes, &quota) {
        (Some(policy), Some(key), None, None) => Query::policy(policy, key),
        (None, None, Some(AttributesBody(attributes)), None) => Query::attributes(attributes),
        (None, Some(key), None, Some(quota)) => {
            Query::quota(key, quota).with_metric_name(OWN_QUOTA)
        }
        _ => {
            return Err(Problem::bad_request(
                "a query has one of three forms: policy and key; attributes alone; key and quota \
                 (each with an optional cost)",
            ));
        }
    };
    if body.cost == Some(0) {
        return Err(Problem::bad_request(ChargeError::ZeroCost.to_string()));
    }
    let charged_at = body.age_ms.map_or(Timestamp::ZERO, |age| {
        let charged_at = active.now().saturating_sub(Duration::from_millis(age));
        charged_at.max(Timestamp::from_micros(1))
    });
    let query = query.with_cost(body.cost).with_charged_at(charged_at);
    let decisions = active.decide(&head.headers, action, query).await?;
    let denied = action == Action::Acquire && !decisions.is_allowed();
    let status = if denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    // With room for the headers that the server adds.
    let mut headers = HeaderMap::with_capacity(12);
    add_limits(&mut headers, &decisions, active.x_ratelimit_headers, denied);
    Ok(json_response(status, headers, json::of_decisions(&decisions)))
}

/// Adds the rate limit headers. `Retry-After` is only for a denied request: peeks and refunds have
/// the wait in their body.
pub(crate) fn add_limits(
    headers: &mut HeaderMap,
    decisions: &PolicyDecisions<'_>,
    with_x_headers: bool,
    denied: bool,
) {
    for_each_header_value(decisions.header_states(), with_x_headers, |name, value| {
        if denied || name != header::RETRY_AFTER {
            headers.insert(name, value);
        }
    });
}

/// Rejects unknown attributes: a limit on a misspelt one would never apply.
fn check_names(attributes: &BTreeMap<String, String>, policies: &Policies) -> Result<(), Problem> {
    let unknown = attributes.keys().find_map(|name| policies.check_attribute(name).err());
    unknown.map_or(Ok(()), |error| Err(Problem::bad_request(format!("attributes: {error}"))))
}

/// Sets the attribute `ip`: that of the caller, otherwise the address of the client; in both cases
/// grouped by prefix.
fn add_address(
    attributes: &mut BTreeMap<String, String>,
    client_ip: &ClientIp,
    peer: Peer,
    headers: &HeaderMap,
) -> Result<(), Problem> {
    let address = match attributes.get("ip") {
        Some(text) => text.parse::<IpAddr>().map_err(|_| {
            let text: String = text.chars().take(60).collect();
            Problem::bad_request(format!(
                "attributes.ip: {text:?} is not an address, such as 192.0.2.1 or 2001:db8::1"
            ))
        })?,
        None => client_address(client_ip, peer, headers)?,
    };
    attributes.insert("ip".to_owned(), client_ip.group(address));
    Ok(())
}

/// Returns the address of the client, as reported by trusted proxies.
pub(crate) fn client_address(
    client_ip: &ClientIp,
    peer: Peer,
    headers: &HeaderMap,
) -> Result<IpAddr, Problem> {
    let values = |name: &str| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let resolved =
        client_ip.resolve(peer.address.ip(), values("x-forwarded-for"), values("forwarded"));
    if resolved.unparsable {
        return Err(Problem::bad_request(
            "X-Forwarded-For or Forwarded has a hop that is not an address: send addresses, or attributes.ip",
        ));
    }
    Ok(resolved.address)
}

/// Reads a body of JSON, bounded in size and time.
pub(crate) async fn read_json<T: serde::de::DeserializeOwned>(body: AnyBody) -> Result<T, Problem> {
    parse(&read(body).await?)
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|error| {
        if !error.is_data() {
            return Problem::bad_request(format!("the body is not JSON: {error}"));
        }
        // Parse again to find the field.
        let mut again = serde_json::Deserializer::from_slice(body);
        let field = serde_path_to_error::deserialize::<_, T>(&mut again)
            .err()
            .map(|error| error.path().to_string());
        let field =
            field.filter(|path| path != ".").map(|path| format!("{path}: ")).unwrap_or_default();
        let reason = error.to_string().replace("expected u64", "expected a whole number");
        Problem::bad_request(format!("the body is not a query: {field}{reason}"))
    })
}

/// Reads a body, bounded in size and time.
async fn read<B: HttpBody<Data = Bytes, Error: std::fmt::Display> + Unpin>(
    body: B,
) -> Result<Bytes, Problem> {
    let mut reading = pin!(read_all(body));
    // Nearly every body arrives with its head: no timer is needed.
    if let Poll::Ready(read) = poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await {
        return read;
    }
    let late = |_| {
        Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body was not sent within 10 seconds"))
    };
    tokio::time::timeout(BODY_TIMEOUT, reading).await.unwrap_or_else(late)
}

async fn read_all<B: HttpBody<Data = Bytes, Error: std::fmt::Display> + Unpin>(
    mut body: B,
) -> Result<Bytes, Problem> {
    // Nearly every body arrives in one piece, which is not copied.
    let first = next_piece(&mut body, 0).await?.unwrap_or_default();
    if body.is_end_stream() {
        return Ok(first);
    }
    let mut all = first.to_vec();
    while let Some(piece) = next_piece(&mut body, all.len()).await? {
        all.extend_from_slice(&piece);
    }
    Ok(all.into())
}

async fn next_piece<B>(body: &mut B, before: usize) -> Result<Option<Bytes>, Problem>
where
    B: HttpBody<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    let Some(frame) = body.frame().await else { return Ok(None) };
    let frame = frame
        .map_err(|error| Problem::bad_request(format!("the body could not be read: {error}")))?;
    // Trailers say nothing here.
    let piece = frame.into_data().unwrap_or_default();
    if before + piece.len() > MAX_BODY_BYTES {
        let reason = format!("the body has more than {MAX_BODY_BYTES} bytes");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, reason));
    }
    Ok(Some(piece))
}
