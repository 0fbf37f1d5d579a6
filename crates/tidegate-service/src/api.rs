//! The HTTP API: translates requests into queries and decisions into responses.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::body::{Body as AnyBody, Bytes};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body::Body as HttpBody;
use http_body_util::Full;
use hyper::service::{Service, service_fn};
use serde::Deserialize;
use tidegate::layer::for_each_header_value;
use tidegate::{
    Action, ChargeError, ClientIp, Policies, PolicyDecision, PolicyDecisions, Query, Timestamp,
};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::auth::{self, AuthListener};
use crate::observer::OWN_QUOTA;
use crate::state::{ActiveConfig, ServerState};
use tidegate_config::Scope;
use tidegate_net::listener::{Peer, Request};
use tidegate_net::{BodyError, BodyReader};

pub mod browser;
pub mod forward_auth;
mod openapi;
pub mod problem;

use browser::BrowserGuard;
use problem::Problem;
use tidegate_api::json::{
    self, AttributesBody, BindingBody, DecisionBody, DecisionsBody, Object, QueryBody, QuotaBody,
};
use tidegate_api::operation::{HoldAnswer, Operation};

const MAX_BODY_BYTES: usize = 64 * 1024;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tidegate",
        description = "Decides, exactly and fast, whether a request may pass now."
    ),
    paths(acquire, reserve, commit, renew, peek, refund, report, forward_auth::forward_auth),
    components(schemas(
        QueryBody<'static>, QuotaBody, DecisionsBody<'static>, DecisionBody<'static>, BindingBody,
        Problem
    )),
    modifiers(&BearerToken),
    security((), ("token" = []))
)]
struct Api;

/// Adds the bearer token to the schema. It is required if the configuration has tokens for the
/// listener.
pub struct BearerToken;

impl Modify for BearerToken {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let token = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        api.components.get_or_insert_default().add_security_scheme("token", token);
    }
}

/// Parameters of every query.
#[derive(utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "only for the schema")]
struct Explain {
    /// Whether each entry of `decisions` also names the key that it counted, in the form that the
    /// policy shows. `?explain` alone is the same as `?explain=true`.
    explain: Option<bool>,
}

/// Error responses of every query.
#[derive(utoipa::IntoResponses)]
pub enum Problems {
    /// The query is invalid
    #[response(status = 400, content_type = "application/problem+json")]
    InvalidQuery(Problem),
    /// The token is missing or wrong
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthorized(Problem),
    /// The token lacks a scope; or a web page sent the request, and the listener has no token
    #[response(status = 403, content_type = "application/problem+json")]
    WebPage(Problem),
    /// No such policy
    #[response(status = 404, content_type = "application/problem+json")]
    UnknownPolicy(Problem),
    /// The path does not support this method
    #[response(status = 405, content_type = "application/problem+json")]
    WrongMethod(Problem),
    /// The body was not sent in time
    #[response(status = 408, content_type = "application/problem+json")]
    BodyTimeout(Problem),
    /// The body has more than 64 KiB
    #[response(status = 413, content_type = "application/problem+json")]
    BodyTooLarge(Problem),
    /// The body has a Content-Encoding, or a browser sent a body that is not JSON
    #[response(status = 415, content_type = "application/problem+json")]
    UnsupportedBody(Problem),
    /// The store is unavailable
    #[response(status = 503, content_type = "application/problem+json")]
    StoreUnavailable(Problem),
}

/// The id is in use with another cost
#[derive(utoipa::IntoResponses)]
#[response(status = 409, content_type = "application/problem+json")]
#[expect(dead_code, reason = "only for the schema")]
struct IdConflict(Problem);

/// Response with a complete body.
pub type ApiResponse = Response<Full<Bytes>>;

/// Returns the API for one connection. It is a plain hyper service, because axum's router boxes the
/// body and future of each request, which took as long as the rest of a response.
pub fn service(
    state: &Arc<ServerState>,
    guard: &Arc<BrowserGuard>,
    peer: Peer,
) -> impl Service<Request, Response = ApiResponse, Error = Infallible, Future: Send> + use<> {
    // One reference count per request, for both.
    let shared = Arc::new((Arc::clone(state), Arc::clone(guard)));
    service_fn(move |mut request: Request| {
        let shared = Arc::clone(&shared);
        async move {
            let (state, guard) = &*shared;
            let connection = ApiConnection { state, guard, peer };
            let is_post = request.method() == Method::POST;
            let response = match Operation::of_path(request.uri().path()).filter(|_| is_post) {
                // A request is large, so it stays in its place.
                Some(operation) => decide(connection, operation, &mut request).await,
                None => Box::pin(respond(connection, request)).await,
            };
            Ok(response.unwrap_or_else(Problem::into_http))
        }
    })
}

/// Connection of a client, with all that its requests need.
#[derive(Clone, Copy)]
struct ApiConnection<'a> {
    state: &'a ServerState,
    guard: &'a BrowserGuard,
    peer: Peer,
}

/// Responds to a request that asks for no decision by POST.
async fn respond(connection: ApiConnection<'_>, request: Request) -> Result<ApiResponse, Problem> {
    let is_head = request.method() == Method::HEAD;
    let mut response =
        respond_with_body(connection, request).await.unwrap_or_else(Problem::into_http);
    if is_head {
        let length = HttpBody::size_hint(response.body()).lower();
        response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        *response.body_mut() = Full::default();
    }
    Ok(response)
}

async fn respond_with_body(
    connection: ApiConnection<'_>,
    request: Request,
) -> Result<ApiResponse, Problem> {
    let allowed = match (request.uri().path(), request.method()) {
        ("/v1/forward-auth", &Method::GET | &Method::HEAD) => {
            let ApiConnection { state, peer, .. } = connection;
            return forward_auth::forward_auth(state, peer, request).await;
        }
        ("/openapi.json", &Method::GET | &Method::HEAD) => {
            return Ok(json_response(StatusCode::OK, HeaderMap::new(), OPENAPI.clone()));
        }
        (path, _) if Operation::of_path(path).is_some() => "POST",
        ("/v1/forward-auth" | "/openapi.json", _) => "GET,HEAD",
        _ => return Err(not_found(request.uri().clone()).await),
    };
    let problem = method_not_allowed(request.method().clone(), request.uri().clone()).await;
    let mut response = problem.into_http();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    Ok(response)
}

/// Description of the API. It is large, so all responses share it.
static OPENAPI: LazyLock<Bytes> = LazyLock::new(|| openapi::document().into());

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Returns a response with these headers and the content type of JSON.
fn json_response(
    status: StatusCode,
    mut headers: HeaderMap,
    body: impl Into<Bytes>,
) -> ApiResponse {
    headers.insert(header::CONTENT_TYPE, JSON);
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

pub async fn not_found(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("{} does not exist", shown_path(&uri)))
}

pub async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not support {method}", shown_path(&uri));
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}

/// Maximum length of a path in an error, longer than every path of the API.
const MAX_SHOWN_PATH: usize = 200;

/// Returns the path of a request for an error, shortened.
fn shown_path(uri: &Uri) -> Cow<'_, str> {
    let path = uri.path();
    match path.char_indices().nth(MAX_SHOWN_PATH) {
        Some((end, _)) => format!("{}…", &path[..end]).into(),
        None => path.into(),
    }
}

/// Decide a request and, if it is allowed, charge its units.
#[utoipa::path(
    post, path = "/v1/acquire", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Allowed", body = DecisionsBody<'static>,
            headers(
                (
                    "RateLimit-Policy" = String,
                    description = "Limits that apply, in the format of the IETF draft"
                ),
                ("RateLimit" = String, description = "Remaining units of each limit"),
            )
        ),
        (
            status = 429, description = "Denied", body = DecisionsBody<'static>,
            headers(
                (
                    "RateLimit-Policy" = String,
                    description = "Limits that apply, in the format of the IETF draft"
                ),
                ("RateLimit" = String, description = "Remaining units of each limit"),
                ("Retry-After" = u64, description = "Seconds to wait, rounded up"),
            )
        ),
        IdConflict,
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn acquire() {}

/// Decide a request and, if it is allowed, charge its units until a commit settles those that were
/// used.
#[utoipa::path(
    post, path = "/v1/reserve", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Allowed: see `reservation` in the body",
            body = DecisionsBody<'static>
        ),
        (
            status = 429, description = "Denied: nothing is charged or remembered",
            body = DecisionsBody<'static>,
            headers(("Retry-After" = u64, description = "Seconds to wait, rounded up"))
        ),
        IdConflict,
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn reserve() {}

/// Settle a reservation: return the units that were not used to the time of its charge, or record
/// those that exceed it.
///
/// A second commit changes nothing. If the reservation is unknown or has ended, the units are
/// recorded, and `settled` is false.
#[utoipa::path(
    post, path = "/v1/commit", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Settled or recorded, with the remaining units",
            body = DecisionsBody<'static>
        ),
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn commit() {}

/// Extend a reservation. One that has ended stays so: `held` is then false.
#[utoipa::path(
    post, path = "/v1/renew", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "See `held` and `expires_after_ms` in the body",
            body = DecisionsBody<'static>
        ),
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn renew() {}

/// Return the decision that acquire would make, without a charge.
#[utoipa::path(
    post, path = "/v1/peek", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Allowed or denied: see `allowed` in the body",
            body = DecisionsBody<'static>
        ),
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn peek() {}

/// Record units that were used already. They are always charged, even beyond the limit.
///
/// `allowed` is false if they exceed the limit. `remaining` is then 0, and `retry_after_ms` is the
/// wait until one unit is available again.
#[utoipa::path(
    post, path = "/v1/report", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Recorded, with the remaining units",
            body = DecisionsBody<'static>
        ),
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn report() {}

/// Return the units of an earlier charge, if they still count. `id` or `age_ms` is required: the id
/// of that charge, or its age.
#[utoipa::path(
    post, path = "/v1/refund", request_body = QueryBody<'static>, params(Explain),
    responses(
        (
            status = 200, description = "Refunded, with the remaining units",
            body = DecisionsBody<'static>
        ),
        Problems,
    )
)]
#[expect(dead_code, reason = "only for the schema")]
fn refund() {}

async fn decide(
    ApiConnection { state, guard, peer }: ApiConnection<'_>,
    operation: Operation,
    request: &mut Request,
) -> Result<ApiResponse, Problem> {
    let (active, action) = (state.active_guard(), operation.action());
    match active.tokens.of_api() {
        Some(tokens) => {
            let given = auth::bearer(request.headers());
            state.authorize(tokens, given, Scope::of_action(action), AuthListener::Http, peer)?;
        }
        None => guard.check(request)?,
    }
    check_encoding(request.headers())?;
    let explains = request.uri().query().map_or(Ok(false), asks_to_explain)?;
    let bytes = read(request.body_mut()).await?;
    let headers = request.headers();
    let Object(mut body) = parse::<Object<QueryBody<'_>>>(&bytes)?;
    if let Some(AttributesBody(attributes)) = &mut body.attributes {
        check_attributes(attributes, active.policies())?;
        set_client_ip(attributes, &active.client_ip, peer, headers)?;
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
    if body.age_ms.is_some_and(|age| age > json::MAX_AGE_MS) {
        let reason = format!("age_ms is more than {}, the longest time", json::MAX_AGE_MS);
        return Err(Problem::bad_request(reason));
    }
    let hold = body.hold(operation).map_err(Problem::bad_request)?;
    if body.cost == Some(0) {
        return Err(Problem::bad_request(ChargeError::ZeroCost.to_string()));
    }
    let charged_at = body.age_ms.map_or(Timestamp::ZERO, |age| {
        let charged_at = active.now().saturating_sub(Duration::from_millis(age));
        charged_at.max(Timestamp::from_micros(1))
    });
    let units = if operation == Operation::Commit { body.actual } else { body.cost };
    let query = query.with_cost(units).with_charged_at(charged_at);
    let query = match &hold {
        Some(hold) => query.with_hold(Arc::clone(hold)),
        None => query,
    };
    let answer = |decisions: &PolicyDecisions<'_>| {
        let explain = || {
            let attributes = body.attributes.as_ref().map(|AttributesBody(it)| it);
            let policies = attributes.map(|it| active.limiter.explain(it));
            let shown = |policy: &str, key: &str| active.shown_key(policy, key.to_owned());
            json::explained_body(decisions, shown, policies.as_deref())
        };
        let mut body = if explains { explain() } else { json::decisions_body(decisions) };
        if let Some(hold) = HoldAnswer::new(operation, hold.as_deref(), decisions) {
            json::push_hold(&mut body, operation, &hold);
        }
        decision_response(&active, action, decisions, body)
    };
    Ok(active.decide(headers, action, query, answer).await?)
}

fn decision_response(
    active: &ActiveConfig,
    action: Action,
    decisions: &PolicyDecisions<'_>,
    body: Vec<u8>,
) -> ApiResponse {
    let denied = action == Action::Acquire && !decisions.is_allowed();
    let status = if denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    let mut headers = HeaderMap::with_capacity(8);
    add_rate_limit_headers(&mut headers, decisions, active, denied);
    json_response(status, headers, body)
}

/// Returns whether a query string has `explain`, as a flag or as `explain=true`. Other parameters
/// are ignored.
fn asks_to_explain(query: &str) -> Result<bool, Problem> {
    let mut explains = false;
    for part in query.split('&') {
        explains = match part.split_once('=').unwrap_or((part, "true")) {
            ("explain", "true") => true,
            ("explain", "false") => false,
            ("explain", _) => {
                return Err(Problem::bad_request("explain is true or false: /v1/acquire?explain"));
            }
            _ => explains,
        };
    }
    Ok(explains)
}

/// Adds the rate limit headers. Only a denied request has `Retry-After`: the responses of peeks and
/// refunds have the wait in their body.
pub fn add_rate_limit_headers(
    headers: &mut HeaderMap,
    decisions: &PolicyDecisions<'_>,
    active: &ActiveConfig,
    denied: bool,
) {
    let partition_key =
        |entry: &PolicyDecision<'_>| active.partition_keys.then(|| partition_key(entry)).flatten();
    let states = decisions.header_states_with(partition_key);
    for_each_header_value(states, active.x_ratelimit_headers, |name, value| {
        if denied || name != header::RETRY_AFTER {
            headers.insert(name, value);
        }
    });
}

/// Returns the partition key of a decision: the first half of the SHA-256 of its key.
pub fn partition_key(decision: &PolicyDecision<'_>) -> Option<[u8; 16]> {
    let hash = ring::digest::digest(&ring::digest::SHA256, decision.key()?.as_bytes());
    hash.as_ref().first_chunk().copied()
}

/// Rejects unknown attributes: a policy would never match a misspelt one.
fn check_attributes(
    attributes: &BTreeMap<String, String>,
    policies: &Policies,
) -> Result<(), Problem> {
    let unknown = attributes.keys().find_map(|name| policies.check_attribute(name).err());
    unknown.map_or(Ok(()), |error| Err(Problem::bad_request(format!("attributes: {error}"))))
}

/// Sets the attribute `ip` to the address of the query, or else of the client, grouped by prefix.
fn set_client_ip(
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
pub fn client_address(
    client_ip: &ClientIp,
    peer: Peer,
    headers: &HeaderMap,
) -> Result<IpAddr, Problem> {
    let values = |name: &str| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let resolved =
        client_ip.resolve(peer.address.ip(), values("x-forwarded-for"), values("forwarded"));
    if resolved.unparsable {
        return Err(Problem::bad_request(
            "X-Forwarded-For or Forwarded has a hop that is not an address: send addresses, or \
             attributes.ip",
        ));
    }
    Ok(resolved.address)
}

/// Rejects a compressed body, which would be a syntax error otherwise.
pub fn check_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    // Most requests have few headers, and comparing their names is faster than hashing one.
    if headers.keys().all(|name| name != header::CONTENT_ENCODING) {
        return Ok(());
    }
    let all = headers.get_all(header::CONTENT_ENCODING);
    let is_identity = |value: &HeaderValue| {
        let codings = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        codings.into_iter().all(|one| one.is_empty() || one.eq_ignore_ascii_case(b"identity"))
    };
    if all.iter().all(is_identity) { Ok(()) } else { Err(Problem::encoded_body()) }
}

/// Rejects a body that is declared as something else than JSON, such as a form.
pub fn check_json(headers: &HeaderMap) -> Result<(), Problem> {
    if !headers.contains_key(header::CONTENT_TYPE) || browser::is_json(headers) {
        return Ok(());
    }
    let detail = "the body must be JSON: send Content-Type: application/json";
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail))
}

/// Reads a JSON body, bounded in size and time.
pub async fn read_json<T: serde::de::DeserializeOwned>(body: AnyBody) -> Result<T, Problem> {
    parse(&read(body).await?)
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|error| {
        if !error.is_data() {
            return Problem::bad_request(format!("the body is not JSON: {error}"));
        }
        // Parse again to find the field.
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let field = serde_path_to_error::deserialize::<_, T>(&mut deserializer)
            .err()
            .map(|error| error.path().to_string());
        let field =
            field.filter(|path| path != ".").map(|path| format!("{path}: ")).unwrap_or_default();
        let reason = error.to_string().replace("expected u64", "expected a whole number");
        Problem::bad_request(format!("the body is not a query: {field}{reason}"))
    })
}

/// Reads a body, bounded in size and time.
async fn read<B>(body: B) -> Result<Bytes, Problem>
where
    B: HttpBody<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    let mut reader = BodyReader::new(body);
    // Nearly every body arrives in one chunk, which is not copied.
    let first = next_chunk(&mut reader, 0).await?.unwrap_or_default();
    if reader.is_end() {
        return Ok(first);
    }
    let mut all = first.to_vec();
    while let Some(chunk) = next_chunk(&mut reader, all.len()).await? {
        all.extend_from_slice(&chunk);
    }
    Ok(all.into())
}

/// Returns the next chunk of a body of which `length` bytes were read.
async fn next_chunk<B>(reader: &mut BodyReader<B>, length: usize) -> Result<Option<Bytes>, Problem>
where
    B: HttpBody<Data = Bytes, Error: std::fmt::Display> + Unpin,
{
    let chunk = reader.next_chunk().await.map_err(|error| match error {
        BodyError::TimedOut => {
            Problem::new(StatusCode::REQUEST_TIMEOUT, "the body was not sent within 10 seconds")
        }
        BodyError::Failed(error) => {
            Problem::bad_request(format!("the body could not be read: {error}"))
        }
    })?;
    if chunk.as_ref().is_some_and(|chunk| length + chunk.len() > MAX_BODY_BYTES) {
        let reason = format!("the body has more than {MAX_BODY_BYTES} bytes");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, reason));
    }
    Ok(chunk)
}
