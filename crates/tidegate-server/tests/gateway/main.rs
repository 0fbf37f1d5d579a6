//! `tidegate gateway` over the network, in front of real servers.

#[path = "../support/mod.rs"]
mod support;

/// Lines of the access log.
mod access_log;
/// Connections to upstreams: reuse, closes, clients that leave.
mod connections;
/// Cookies that HTTP/2 sends in several fields.
mod cookies;
/// Headers for scripts in browsers.
mod cors;
/// Slow, stalled and unreachable peers.
mod failures;
/// Headers, bodies and policies of forwarded requests.
mod forwarding;
/// HTTP/2 at the level of frames.
mod frames;
/// Random requests.
mod fuzz;
/// Bodies of GET and HEAD.
mod get_bodies;
/// HTTP/2 streams: early responses and stalled clients.
mod http2;
/// Requests in flight, and costs that the response settles.
mod in_flight;
/// Large bodies, many requests, killed upstreams.
mod load;
/// Informational responses, trailers and many headers.
mod messages;
/// Units that are returned by the status of the response.
mod refunds;
/// Requests that are sent again on another connection.
mod retries;
/// Choices by a seed.
#[path = "../support/seeded.rs"]
mod seeded;
/// Uploads that arrive too slowly.
mod slow_uploads;
/// Ambiguous requests, at the level of bytes.
mod smuggling;
/// Spellings of one key or path.
mod spellings;
/// Metrics, and upstreams in `/readyz`.
mod telemetry;
/// Upstream that records the received bytes.
mod upstream;
/// Limits of requests to an upstream, and a lack of file descriptors.
mod upstream_limits;
/// TLS and HTTP/2 on both sides.
mod versions;
/// Upgraded connections.
mod websocket;
