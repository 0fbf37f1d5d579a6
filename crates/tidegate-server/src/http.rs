//! The HTTP API: translates questions and answers, decides nothing.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body as HttpBody, Bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tidegate::{Action, ClientIp, headers};
use utoipa::OpenApi;

use crate::body::{self, AskBody, Body, DecisionBody, QuotaBody};
use crate::engine::{Answer, Ask, Engine};
use crate::forward_auth;
use crate::listener::Peer;
use crate::problem::Problem;
use crate::token;

/// The largest body that is read.
const MAX_BODY: usize = 64 * 1024;
/// How long a client may take to send it.
const BODY_TIME: Duration = Duration::from_secs(10);

#[derive(OpenApi)]
#[openapi(
    info(title = "Tidegate", description = "Decides, exactly and fast, whether a request may pass now."),
    paths(acquire, peek, refund, forward_auth::forward_auth),
    components(schemas(AskBody, QuotaBody, Body<'static>, DecisionBody<'static>, Problem))
)]
struct Api;

/// What each question may be answered with instead of a decision.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "it describes the API; Problem itself is what is sent")]
enum Problems {
    /// The question is wrong
    #[response(status = 400, content_type = "application/problem+json")]
    Wrong(#[to_schema] Problem),
    /// No token, or a wrong one
    #[response(status = 401, content_type = "application/problem+json")]
    NoToken(#[to_schema] Problem),
    /// No such policy
    #[response(status = 404, content_type = "application/problem+json")]
    NoPolicy(#[to_schema] Problem),
    /// The body took too long
    #[response(status = 408, content_type = "application/problem+json")]
    Slow(#[to_schema] Problem),
    /// More than 64 KiB
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(#[to_schema] Problem),
    /// Nobody could decide
    #[response(status = 503, content_type = "application/problem+json")]
    NoDecision(#[to_schema] Problem),
}

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/v1/acquire", post(acquire))
        .route("/v1/peek", post(peek))
        .route("/v1/refund", post(refund))
        .route("/v1/forward-auth", get(forward_auth::forward_auth))
        .route("/openapi.json", get(async || axum::Json(Api::openapi())))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .with_state(engine)
}

pub(crate) async fn not_found(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path()))
}

pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

/// Decide and, if allowed, spend.
#[utoipa::path(
    post, path = "/v1/acquire", request_body = AskBody,
    responses(
        (status = 200, description = "Allowed", body = Body<'static>),
        (status = 429, description = "Denied", body = Body<'static>),
        Problems,
    )
)]
async fn acquire(State(engine): State<Arc<Engine>>, request: Request) -> Result<Response, Problem> {
    answer(&engine, Action::Acquire, request).await
}

/// What acquire would answer; writes nothing.
#[utoipa::path(
    post, path = "/v1/peek", request_body = AskBody,
    responses(
        (status = 200, description = "Allowed or denied, as the body says", body = Body<'static>),
        Problems,
    )
)]
async fn peek(State(engine): State<Arc<Engine>>, request: Request) -> Result<Response, Problem> {
    answer(&engine, Action::Peek, request).await
}

/// Give units back, the newest first.
#[utoipa::path(
    post, path = "/v1/refund", request_body = AskBody,
    responses(
        (status = 200, description = "Given back; what is left now", body = Body<'static>),
        Problems,
    )
)]
async fn refund(State(engine): State<Arc<Engine>>, request: Request) -> Result<Response, Problem> {
    answer(&engine, Action::Refund, request).await
}

async fn answer(engine: &Engine, action: Action, request: Request) -> Result<Response, Problem> {
    let live = engine.live();
    let (head, body) = request.into_parts();
    token::check(live.api_token.as_ref(), &head.headers).map_err(Problem::unauthorized)?;
    let mut body: AskBody = read_json(body).await?;
    if let Some(attributes) = &mut body.attributes {
        add_address(attributes, &live.client_ip, &head)?;
    }
    let quota = body.quota.as_ref().map(QuotaBody::quota).transpose().map_err(Problem::bad_request)?;
    let ask = match (&body.policy, &body.key, &body.attributes, &quota) {
        (Some(policy), Some(key), None, None) => Ask::Policy { policy, key, cost: body.cost },
        (None, None, Some(attributes), None) => Ask::Attributes { attributes, only: None, cost: body.cost },
        (None, Some(key), None, Some(quota)) => Ask::Quota { key, quota, cost: body.cost.unwrap_or(1) },
        _ => {
            return Err(Problem::bad_request(
                "a question has one of three forms: policy and key; attributes alone; key and quota (each with an \
                 optional cost)",
            ));
        }
    };
    let answer = engine.ask(action, ask).await?;
    let denied = action == Action::Acquire && !answer.allowed();
    let mut response = Response::new(HttpBody::from(body::of_answer(&answer)));
    *response.status_mut() = if denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    // With room for those that the server adds, and none to grow.
    let mut fields = HeaderMap::with_capacity(12);
    fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    add_limits(&mut fields, &answer, live.x_ratelimit_headers, denied);
    *response.headers_mut() = fields;
    Ok(response)
}

/// What a client is told of its limits. `Retry-After` is for a request that was turned away: a peek or a refund tells of a
/// wait in its body.
pub(crate) fn add_limits(fields: &mut HeaderMap, answer: &Answer, with_x_headers: bool, denied: bool) {
    headers::each(answer.limited(), with_x_headers, |name, value| {
        if (name != "retry-after" || denied)
            && let Ok(value) = HeaderValue::from_str(value)
        {
            fields.insert(header_name(name), value);
        }
    });
}

/// Known at compile time: to look at each letter of a name again would take as long as the decision.
fn header_name(name: &'static str) -> HeaderName {
    const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
    const STATE: HeaderName = HeaderName::from_static("ratelimit");
    const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
    const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
    match name {
        "ratelimit-policy" => POLICY,
        "ratelimit" => STATE,
        "x-ratelimit-limit" => LIMIT,
        "x-ratelimit-remaining" => REMAINING,
        "x-ratelimit-reset" => RESET,
        other => HeaderName::from_static(other),
    }
}

/// The attribute `ip`: as the caller says, otherwise where the request comes from; in both cases grouped by prefix.
fn add_address(attributes: &mut BTreeMap<String, String>, client_ip: &ClientIp, head: &Parts) -> Result<(), Problem> {
    let address = match attributes.get("ip") {
        Some(text) => text.parse::<IpAddr>().map_err(|_| {
            let text: String = text.chars().take(60).collect();
            Problem::bad_request(format!("attributes.ip: {text:?} is not an address, such as 192.0.2.1 or 2001:db8::1"))
        })?,
        None => {
            let Some(address) = client_address(client_ip, head)? else { return Ok(()) };
            address
        }
    };
    attributes.insert("ip".to_owned(), client_ip.group(address));
    Ok(())
}

/// Where a request comes from, as far as trusted proxies tell.
pub(crate) fn client_address(client_ip: &ClientIp, head: &Parts) -> Result<Option<IpAddr>, Problem> {
    let Some(Peer { address: peer, .. }) = head.extensions.get::<Peer>() else { return Ok(None) };
    let values = |name: &str| head.headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let resolved = client_ip.resolve(peer.ip(), values("x-forwarded-for"), values("forwarded"));
    if resolved.unparsable {
        return Err(Problem::bad_request(
            "X-Forwarded-For or Forwarded has a hop that is not an address: send addresses, or attributes.ip",
        ));
    }
    Ok(Some(resolved.address))
}

/// Reads a body of JSON, bounded in size and time.
pub(crate) async fn read_json<T: serde::de::DeserializeOwned>(body: HttpBody) -> Result<T, Problem> {
    let Ok(read) = tokio::time::timeout(BODY_TIME, read(body)).await else {
        return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come within 10 seconds"));
    };
    serde_json::from_slice(&read?).map_err(|error| {
        let kind = if error.is_data() { "the body is not a question" } else { "the body is not JSON" };
        Problem::bad_request(format!("{kind}: {error}"))
    })
}

async fn read(mut body: HttpBody) -> Result<Bytes, Problem> {
    // Nearly every body comes in one piece, which is not copied.
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

async fn next_piece(body: &mut HttpBody, before: usize) -> Result<Option<Bytes>, Problem> {
    let Some(frame) = body.frame().await else { return Ok(None) };
    let frame = frame.map_err(|error| Problem::bad_request(format!("the body could not be read: {error}")))?;
    // Trailers say nothing here.
    let piece = frame.into_data().unwrap_or_default();
    if before + piece.len() > MAX_BODY {
        let reason = format!("the body has more than {MAX_BODY} bytes");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, reason));
    }
    Ok(Some(piece))
}
