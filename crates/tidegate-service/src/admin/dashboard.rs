//! The dashboard: a page with its script and style, compiled into the binary. They have no data, so
//! they need no token.

use std::io::Write as _;
use std::sync::LazyLock;

use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};

use super::CROSS_ORIGIN_RESOURCE_POLICY;
use crate::api::not_found;
use tidegate_config::key_hash;

/// The page may load only its own script and style, and call only this listener. Nothing may embed
/// it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";

const CROSS_ORIGIN_OPENER_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-opener-policy");

/// File of the dashboard.
struct Asset {
    content_type: &'static str,
    content: &'static str,
    compressed: Bytes,
    /// Hash of the content.
    etag: String,
}

impl Asset {
    fn new(content_type: &'static str, content: &'static str) -> Self {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        let compressed = encoder.write_all(content.as_bytes()).and_then(|()| encoder.finish());
        let compressed = compressed.unwrap_or_default().into();
        Self { content_type, content, compressed, etag: key_hash::of(content) }
    }

    fn response(&self, request: &HeaderMap) -> Response {
        let is_compressed = !self.compressed.is_empty() && accepts_gzip(request);
        let suffix = if is_compressed { "-gz" } else { "" };
        let etag = format!("\"{}{suffix}\"", self.etag);
        let is_known = request.get_all(header::IF_NONE_MATCH).iter().any(|tags| {
            let mut tags = tags.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            tags.any(|tag| tag.strip_prefix(b"W/").unwrap_or(tag) == etag.as_bytes())
        });
        let mut response = if is_known {
            StatusCode::NOT_MODIFIED.into_response()
        } else if is_compressed {
            Body::from(self.compressed.clone()).into_response()
        } else {
            Body::from(self.content).into_response()
        };
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, self.content_type),
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (CROSS_ORIGIN_OPENER_POLICY, "same-origin"),
            (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
            (header::CACHE_CONTROL, "no-cache"),
            (header::VARY, "Accept-Encoding"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if is_compressed && !is_known {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        if let Ok(etag) = HeaderValue::try_from(etag) {
            headers.insert(header::ETAG, etag);
        }
        response
    }
}

static PAGE: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("text/html; charset=utf-8", include_str!("../../dashboard/dist/index.html"))
});
static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("text/javascript; charset=utf-8", include_str!("../../dashboard/dist/app.js"))
});
static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("text/css; charset=utf-8", include_str!("../../dashboard/dist/app.css"))
});

pub(super) async fn page(headers: HeaderMap) -> Response {
    PAGE.response(&headers)
}

pub(super) async fn asset(Path(file): Path<String>, uri: Uri, headers: HeaderMap) -> Response {
    match file.as_str() {
        "app.js" => SCRIPT.response(&headers),
        "app.css" => STYLE.response(&headers),
        _ => not_found(uri).await.into_response(),
    }
}

/// Returns whether the client decodes gzip.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let all =
        headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    all.flat_map(|value| value.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let weight = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse::<f32>().ok());
        is_gzip && weight.is_none_or(|weight| weight > 0.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_only_to_clients_that_accept_it() {
        for (accepted, expected) in [
            ("gzip", true),
            ("br, GZIP;q=0.5", true),
            ("deflate", false),
            ("gzip; q=0, br", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted));
            assert_eq!(accepts_gzip(&headers), expected, "{accepted}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
