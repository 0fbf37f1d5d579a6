//! Warnings about proxies that do not describe the original request. Policies that use the missing
//! part match nothing, so that requests pass without a limit.

use std::time::Instant;

use tidegate::Policies;

use crate::metrics::{Metrics, PARTS};
use tidegate_net::LogThrottle;

/// Part of the original request that a proxy describes in a header.
struct RequestPart {
    header: &'static str,
    /// Attributes that it provides.
    attributes: &'static str,
    provides: fn(&str) -> bool,
    /// Its value in nginx's and in Caddy's configuration.
    nginx: &'static str,
    caddy: &'static str,
}

const DESCRIPTIONS: [RequestPart; PARTS] = [
    RequestPart {
        header: "X-Forwarded-Uri",
        attributes: "path or query",
        provides: |name| name == "path" || name.starts_with("query."),
        nginx: "$request_uri",
        caddy: "{uri}",
    },
    RequestPart {
        header: "X-Forwarded-Method",
        attributes: "method",
        provides: |name| name == "method",
        nginx: "$request_method",
        caddy: "{method}",
    },
    RequestPart {
        header: "X-Forwarded-Host",
        attributes: "host",
        provides: |name| name == "host",
        nginx: "$host",
        caddy: "{host}",
    },
];

/// For each part of the original request, the name of a policy that uses it.
#[derive(Debug)]
pub struct UsedParts([Option<String>; PARTS]);

impl UsedParts {
    pub fn of(policies: &Policies) -> Self {
        Self(DESCRIPTIONS.map(|part| {
            let mut policies =
                policies.iter().filter(|policy| policy.non_http_attribute().is_none());
            let user = policies.find(|policy| policy.references().any(part.provides));
            user.map(|policy| policy.name().to_owned())
        }))
    }

    /// Counts each part that the proxy should have described, and warns about it once per minute.
    pub(crate) fn check(&self, described: [bool; PARTS], metrics: &Metrics) {
        static THROTTLES: [LogThrottle; PARTS] = [const { LogThrottle::new() }; PARTS];
        for (number, part) in DESCRIPTIONS.iter().enumerate() {
            let Some(policy) = self.0[number].as_ref().filter(|_| !described[number]) else {
                continue;
            };
            metrics.count_incomplete_forward_auth(number);
            let Some(suppressed) = THROTTLES[number].should_log(Instant::now()) else { continue };
            let RequestPart { header, attributes, nginx, caddy, .. } = part;
            tracing::warn!(
                policy,
                suppressed,
                "forward-auth request without {header}: policies that use {attributes} do not \
                 apply to it (logged once per minute). nginx: write \"proxy_set_header {header} \
                 {nginx};\" in the location that asks Tidegate. Caddy: use forward_auth, which \
                 sends it, or write \"header_up {header} {caddy}\". Traefik: use forwardAuth, \
                 which sends it"
            );
        }
    }
}
