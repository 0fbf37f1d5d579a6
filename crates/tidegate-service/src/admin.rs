//! Admin API and dashboard: health, metrics, status, history, policies, hot keys, look-up, reset,
//! overrides, the fleet, events.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Router};
use http::{HeaderName, HeaderValue, header};
use tidegate::Policy;

use crate::api::browser::BrowserGuard;
use crate::api::problem::Problem;
use crate::api::{method_not_allowed, not_found};
use crate::auth::{self, AuthListener};
use crate::metrics;
use crate::state::{Caller, ServerState};
use tidegate_config::{Scope, Token};
use tidegate_net::listener::Peer;

mod dashboard;
mod events;
mod fleet;
mod health;
mod history;
mod hot_keys;
mod live;
mod lookup;
mod openapi;
mod overrides;
mod policies;
mod reset;
mod sampler;
mod status;

pub(crate) use fleet::Fleet;
pub(crate) use live::Live;

const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");

/// Error responses of every request that needs access.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "only for the schema; the responses are of type Problem")]
enum AccessProblems {
    /// The token is missing or wrong
    #[response(status = 401, content_type = "application/problem+json")]
    Unauthorized(Problem),
    /// The token lacks a scope; or a web page of another origin sent the request, or one that has
    /// no token
    #[response(status = 403, content_type = "application/problem+json")]
    WebPage(Problem),
}

#[derive(Clone)]
pub(crate) struct Admin {
    pub state: Arc<ServerState>,
    /// False from the start of the shutdown.
    pub ready: Arc<AtomicBool>,
    pub guard: Arc<BrowserGuard>,
    pub live: Arc<Live>,
    pub fleet: Arc<Fleet>,
}

impl Admin {
    /// Checks the token of a request or, without one, that no web page sent it. With a token, a
    /// page of another origin must not change anything either.
    fn authorize<B>(
        &self,
        peer: Peer,
        request: &http::Request<B>,
    ) -> Result<Option<Arc<Token>>, Problem> {
        let active = self.state.active();
        let Some(tokens) = active.tokens.of_admin() else {
            return self.guard.check(request).map(|()| None);
        };
        let given = auth::bearer(request.headers());
        let scope = if request.method().is_safe() { Scope::Read } else { Scope::Reset };
        let token = self.state.authorize(tokens, given, &[scope], AuthListener::Admin, peer)?;
        BrowserGuard::check_origin(request)?;
        Ok(Some(Arc::clone(token)))
    }
}

pub(crate) fn router(admin: Admin) -> Router {
    Router::new()
        .route("/metrics", get(all_metrics))
        .route("/v1/status", get(status::handle))
        .route("/v1/history", get(history::handle))
        .route("/v1/live", get(live::handle))
        .route("/v1/policies", get(policies::handle))
        .route("/v1/hot-keys", get(hot_keys::handle))
        .route("/v1/fleet", get(fleet::view::handle))
        .route("/v1/events", get(events::handle))
        .route("/v1/lookup", get(lookup::handle))
        .route("/v1/reset", post(reset::handle))
        .route("/v1/overrides", put(overrides::set).get(overrides::list).delete(overrides::remove))
        .route("/v1/overrides/audit", get(overrides::audit))
        .route_layer(middleware::from_fn_with_state(admin.clone(), authorize))
        .route("/healthz", get(health::healthz))
        .route("/openapi.json", get(openapi::handle))
        .route("/readyz", get(health::readyz))
        .route("/", get(dashboard::page))
        .route("/assets/{file}", get(dashboard::asset))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(admin)
}

async fn authorize(
    State(admin): State<Admin>,
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut response = match admin.authorize(peer, &request) {
        Ok(token) => {
            request.extensions_mut().insert(Caller { peer: peer.address, token });
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    };
    for (name, value) in [
        // A page of another origin must not get the response as an image or a script either.
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Metrics in the text format of Prometheus
#[utoipa::path(
    get, path = "/metrics",
    responses((status = 200, description = "Metrics", body = String), AccessProblems)
)]
async fn all_metrics(State(admin): State<Admin>) -> Response {
    let mut text = admin.state.metrics.text();
    let active = admin.state.active();
    let policies = active.policies().iter().map(Policy::name);
    admin.state.metrics.write_unmatched(&mut text, policies);
    admin.state.reloads.write_metrics(&mut text);
    metrics::write_config_info(&mut text, &admin.state.active_guard().hash);
    admin.live.write_metrics(&mut text);
    let process = tokio::task::spawn_blocking(|| {
        let mut text = String::new();
        metrics::process::write(&mut text);
        text
    });
    text.push_str(&process.await.unwrap_or_default());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
