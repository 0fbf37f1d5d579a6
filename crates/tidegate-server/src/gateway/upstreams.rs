//! Round-robin choice of upstreams, with ejection of those that fail several times in a row.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use siphasher::sip::SipHasher13;
use tokio::sync::Semaphore;

use super::concurrency::{ConcurrencyLimit, Overload, RequestPermit, UpstreamLimits};
use super::metrics::UpstreamMetrics;
use crate::config::{ListenAddress, ListenAddressError};
use crate::duration;
use crate::logs::LogThrottle;

/// Number of consecutive failures that eject an upstream.
const MAX_FAILURES: u32 = 3;
/// Duration of an ejection, before jitter. After that, a single failure ejects it again.
const EJECTION_TIME: Duration = Duration::from_secs(5);
/// Maximum number of upstreams tried for one request.
const MAX_TRIES: usize = 3;

/// Server that requests are forwarded to.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) scheme: Scheme,
    /// Host and port; `localhost` for a Unix socket.
    pub(super) authority: Authority,
    /// Path of a Unix socket.
    pub(super) socket: Option<PathBuf>,
    /// Prefix of every path; empty or without a trailing slash.
    base: String,
    pub(super) protocol: Protocol,
    /// Number of consecutive failures.
    failures: AtomicU32,
    /// End of the ejection, in milliseconds since the start of the gateway.
    ejected_until: AtomicU64,
    pub(super) metrics: Arc<UpstreamMetrics>,
    pub(super) limit: Arc<ConcurrencyLimit>,
    /// Permits of connections over HTTP/1.1: a connection outlives its request.
    pub(super) connections: Arc<Semaphore>,
    /// Authority by which the client finds its connections, which differs between Unix sockets.
    pool: Authority,
}

/// HTTP version towards an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Reason why an upstream's URL is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UpstreamError {
    /// The URL is not printed: it may hold a password.
    #[error("the URL of an upstream must not contain a user or password")]
    Credentials,
    #[error(
        "{0:?} is not an upstream: write it like http://127.0.0.1:3000, https://…, \
         unix:/run/app.sock, or for HTTP/2 h2c://… and h2://…"
    )]
    Invalid(String),
    #[error(transparent)]
    Socket(#[from] ListenAddressError),
}

impl std::str::FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        if text.starts_with("unix:")
            && let ListenAddress::Unix(path) = text.parse()?
        {
            let localhost = Authority::from_static("localhost");
            let upstream = Self::new(text, Scheme::HTTP, localhost, Protocol::Http1);
            return Ok(Self { socket: Some(path), ..upstream });
        }
        if text.contains('@') {
            return Err(UpstreamError::Credentials);
        }
        let invalid = || UpstreamError::Invalid(text.chars().take(100).collect());
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        let (scheme, protocol) = match uri.scheme_str() {
            Some("http") => (Scheme::HTTP, Protocol::Http1),
            Some("https") => (Scheme::HTTPS, Protocol::Http1),
            Some("h2c") => (Scheme::HTTP, Protocol::Http2),
            Some("h2") => (Scheme::HTTPS, Protocol::Http2),
            _ => return Err(invalid()),
        };
        let authority = uri
            .authority()
            .filter(|authority| has_valid_host(authority) && has_valid_port(authority))
            .ok_or_else(invalid)?
            .clone();
        if uri.query().is_some() {
            return Err(invalid());
        }
        let base = uri.path().trim_end_matches('/').to_owned();
        Ok(Self { base, ..Self::new(text, scheme, authority, protocol) })
    }
}

/// Checks what the URI parser leaves open: a host in brackets must be an IPv6 address.
fn has_valid_host(authority: &Authority) -> bool {
    let host = authority.host();
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains(['[', ']']),
    }
}

/// A port after the host must be a number up to 65535, which the URI parser does not check.
fn has_valid_port(authority: &Authority) -> bool {
    let has_port = authority.as_str().len() > authority.host().len();
    !has_port || authority.port_u16().is_some()
}

impl Upstream {
    fn new(text: &str, scheme: Scheme, authority: Authority, protocol: Protocol) -> Self {
        let limits = UpstreamLimits::default();
        Self {
            scheme,
            socket: None,
            base: String::new(),
            protocol,
            failures: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            metrics: Arc::new(UpstreamMetrics::new(text)),
            limit: Arc::new(ConcurrencyLimit::new(limits)),
            connections: Arc::new(Semaphore::new(limits.max_connections)),
            pool: authority.clone(),
            authority,
        }
    }

    /// Returns the name in logs: host and port, or the Unix socket.
    pub(super) fn name(&self) -> &str {
        if self.socket.is_some() { &self.metrics.url } else { self.authority.as_str() }
    }

    /// Resets the failure count and ends an ejection.
    pub(super) fn record_success(&self) {
        // The load avoids a write to a cache line that all cores share.
        if self.failures.load(Ordering::Relaxed) > 0
            && self.failures.swap(0, Ordering::Relaxed) >= MAX_FAILURES
        {
            self.ejected_until.store(0, Ordering::Relaxed);
            tracing::info!(upstream = self.name(), "upstream recovered");
        }
    }

    /// Counts and logs a request that is rejected because the upstream has too many.
    fn reject(&self, overload: Overload) {
        static THROTTLE: LogThrottle = LogThrottle::new();
        self.metrics.count_rejection(overload);
        if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
            tracing::warn!(
                upstream = self.name(),
                reason = overload.as_str(),
                suppressed,
                "request rejected: the upstream has gateway.max_connections requests in flight \
                 (logged once per minute)"
            );
        }
    }

    /// Returns the target of a request at this upstream. hyper sends its path over HTTP/1.1.
    pub(super) fn target(&self, request: &Uri) -> Option<Uri> {
        // An empty path also reads as `/`, but is written as an empty target.
        let path = match request.path_and_query() {
            Some(path) if path.as_str() != "/" => path.clone(),
            _ => PathAndQuery::from_static("/"),
        };
        let path = if self.base.is_empty() {
            path
        } else {
            format!("{}{path}", self.base).parse().ok()?
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.pool.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).ok()
    }

    /// Returns whether the last requests have not all failed.
    pub(super) fn is_up(&self) -> bool {
        self.failures.load(Ordering::Relaxed) < MAX_FAILURES
    }

    /// Returns the port; `None` for a Unix socket.
    pub(super) fn port(&self) -> Option<u16> {
        let default = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        self.socket.is_none().then(|| self.authority.port_u16().unwrap_or(default))
    }

    /// Returns whether both have the same connections.
    fn is_same_server(&self, other: &Self) -> bool {
        self.scheme == other.scheme
            && self.authority == other.authority
            && self.socket == other.socket
            && self.protocol == other.protocol
    }

    fn is_ejected_at(&self, now: u64) -> bool {
        self.ejected_until.load(Ordering::Relaxed) > now
    }
}

/// All upstreams and the round-robin counter.
#[derive(Debug)]
pub(crate) struct Upstreams {
    all: Vec<Upstream>,
    next: AtomicUsize,
    start: Instant,
}

impl Upstreams {
    /// Returns `None` without any upstream.
    pub(crate) fn new(mut all: Vec<Upstream>, limits: UpstreamLimits) -> Option<Self> {
        // An upstream may be listed several times, to give it more turns. Its metrics are one.
        for index in 0..all.len() {
            let (earlier, rest) = all.split_at_mut(index);
            let upstream = &mut rest[0];
            if let Some(same) =
                earlier.iter().find(|other| other.metrics.url == upstream.metrics.url)
            {
                upstream.metrics = Arc::clone(&same.metrics);
            }
            let same_server = earlier.iter().find(|other| other.is_same_server(upstream));
            if let Some(same) = same_server {
                upstream.limit = Arc::clone(&same.limit);
                upstream.connections = Arc::clone(&same.connections);
                upstream.pool = same.pool.clone();
            } else {
                upstream.limit = Arc::new(ConcurrencyLimit::new(limits));
                upstream.connections = Arc::new(Semaphore::new(limits.max_connections));
                if upstream.socket.is_some() {
                    // No host has a name that ends with a dot and a number.
                    let pool = format!("socket.{index}");
                    upstream.pool = pool.parse().unwrap_or_else(|_| upstream.pool.clone());
                }
            }
        }
        (!all.is_empty()).then(|| Self { all, next: AtomicUsize::new(0), start: Instant::now() })
    }

    /// Returns the upstreams to try for one request, in order. Ejected ones are skipped, and the
    /// others share their turns. If all are ejected, all are tried, so that the first one to
    /// recover is found at once.
    pub(super) fn candidates(&self) -> Candidates<'_> {
        let now = self.now();
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let all_ejected = self.all.iter().all(|upstream| upstream.is_ejected_at(now));
        let eligible =
            self.all.iter().filter(move |upstream| all_ejected || !upstream.is_ejected_at(now));
        let count = eligible.clone().count();
        let mut in_order = eligible.cycle().skip(turn % count.max(1)).take(count.min(MAX_TRIES));
        Candidates(std::array::from_fn(|_| in_order.next()))
    }

    /// Returns the upstream over HTTP/1.1 to which a client of hyper connects.
    pub(super) fn http1(&self, uri: &Uri) -> Option<&Upstream> {
        self.all.iter().find(|upstream| {
            upstream.protocol == Protocol::Http1
                && uri.scheme() == Some(&upstream.scheme)
                && uri.authority() == Some(&upstream.pool)
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Upstream> {
        self.all.iter()
    }

    pub(super) fn is_ejected(&self, upstream: &Upstream) -> bool {
        upstream.is_ejected_at(self.now())
    }

    /// Returns whether every upstream is ejected.
    pub(super) fn all_ejected(&self) -> bool {
        let now = self.now();
        self.all.iter().all(|upstream| upstream.is_ejected_at(now))
    }

    /// Counts a failure and ejects the upstream after too many in a row.
    pub(super) fn record_failure(&self, upstream: &Upstream, reason: &str) {
        let failures = upstream.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures >= MAX_FAILURES {
            let now = self.now();
            let until = now + jittered(EJECTION_TIME, now, failures);
            let previous = upstream.ejected_until.swap(until, Ordering::Relaxed);
            if previous <= now {
                upstream.metrics.count_ejection();
            }
            if previous == 0 {
                tracing::warn!(upstream = upstream.name(), reason, "upstream ejected");
            }
        }
    }

    /// Returns the milliseconds since the start.
    fn now(&self) -> u64 {
        duration::millis(self.start.elapsed())
    }
}

/// Upstreams that were not tried yet for a request, in order.
#[derive(Debug)]
pub(super) struct Candidates<'u>([Option<&'u Upstream>; MAX_TRIES]);

impl<'u> Candidates<'u> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Removes the first upstream that has a permit for the request, or `None` if all were tried.
    /// If none has one, the request waits for the first one whose queue has room.
    pub(super) async fn next(
        &mut self,
        client: IpAddr,
    ) -> Option<Result<(&'u Upstream, RequestPermit), Overload>> {
        for candidate in &mut self.0 {
            let permit = candidate.and_then(|upstream| upstream.limit.try_acquire(client));
            if let Some(permit) = permit {
                return candidate.take().map(|upstream| Ok((upstream, permit)));
            }
        }
        let mut rejected = None;
        for candidate in &mut self.0 {
            let Some(upstream) = *candidate else { continue };
            match upstream.limit.acquire(client).await {
                Ok(permit) => {
                    *candidate = None;
                    return Some(Ok((upstream, permit)));
                }
                Err(Overload::QueueFull) => {
                    rejected = rejected.or(Some((upstream, Overload::QueueFull)));
                }
                Err(overload) => {
                    rejected = Some((upstream, overload));
                    break;
                }
            }
        }
        let (upstream, overload) = rejected?;
        upstream.reject(overload);
        Some(Err(overload))
    }
}

/// Returns 80 % to 120 % of a duration, in milliseconds, so that gateways that saw the same failure
/// do not retry at the same time.
fn jittered(duration: Duration, now: u64, failures: u32) -> u64 {
    use std::hash::Hasher as _;
    let mut hasher = SipHasher13::new_with_keys(now, u64::from(std::process::id()));
    hasher.write_u32(failures);
    let millis = duration::millis(duration);
    millis * 4 / 5 + hasher.finish() % (millis * 2 / 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstreams(texts: &[&str]) -> Upstreams {
        let all = texts.iter().map(|text| text.parse().expect("valid")).collect();
        Upstreams::new(all, UpstreamLimits::default()).expect("some")
    }

    fn next(upstreams: &Upstreams) -> Vec<&str> {
        let candidates = upstreams.candidates().0.into_iter().flatten();
        candidates.map(|upstream| upstream.authority.as_str()).collect()
    }

    #[test]
    fn upstreams_take_turns_and_the_others_follow_in_order() {
        let three = upstreams(&["http://a", "http://b", "http://c"]);
        assert_eq!(next(&three), ["a", "b", "c"]);
        assert_eq!(next(&three), ["b", "c", "a"]);
        assert_eq!(next(&three), ["c", "a", "b"]);
        assert_eq!(next(&three), ["a", "b", "c"]);
    }

    #[test]
    fn consecutive_failures_eject_an_upstream_and_a_success_restores_it() {
        let two = upstreams(&["http://a", "http://b"]);
        for _ in 0..MAX_FAILURES - 1 {
            two.record_failure(&two.all[0], "refused");
        }
        two.all[0].record_success();
        two.record_failure(&two.all[0], "refused");
        assert_eq!(next(&two), ["a", "b"], "the failures are not consecutive");
        for _ in 0..MAX_FAILURES {
            two.record_failure(&two.all[0], "refused");
        }
        assert_eq!((next(&two), next(&two)), (vec!["b"], vec!["b"]));
        for _ in 0..MAX_FAILURES {
            two.record_failure(&two.all[1], "refused");
        }
        assert!(two.all_ejected());
        assert_eq!(next(&two).len(), 2, "all are tried if all are ejected");
        two.all[1].record_success();
        assert_eq!(next(&two), ["b"]);
    }

    #[test]
    fn unix_socket_is_an_upstream() {
        let upstream: Upstream = "unix:/run/a@b.sock".parse().expect("valid");
        assert_eq!(upstream.socket, Some(PathBuf::from("/run/a@b.sock")));
        assert_eq!((upstream.name(), upstream.port()), ("unix:/run/a@b.sock", None));
        let target = upstream.target(&"http://example.com/x?y=z".parse().expect("a URI"));
        assert_eq!(target.expect("a URI").to_string(), "http://localhost/x?y=z");
        let two = upstreams(&["unix:/run/a.sock", "unix:/run/b.sock"]);
        assert!(!two.all[0].is_same_server(&two.all[1]));
        assert_ne!(two.all[0].pool, two.all[1].pool, "they share no connections");
        for text in ["unix:app.sock", "unix:", &format!("unix:/{}", "a".repeat(107))] {
            assert!(matches!(text.parse::<Upstream>(), Err(UpstreamError::Socket(_))), "{text}");
        }
    }

    #[test]
    fn other_upstreams_share_the_turns_of_an_ejected_one() {
        let three = upstreams(&["http://a", "http://b", "http://c"]);
        for _ in 0..MAX_FAILURES {
            three.record_failure(&three.all[1], "refused");
        }
        let turns: Vec<&str> = (0..6).map(|_| next(&three)[0]).collect();
        assert_eq!(
            ["a", "c"].map(|name| turns.iter().filter(|turn| **turn == name).count()),
            [3, 3],
            "{turns:?}"
        );
        assert_eq!(next(&three).len(), 2);
    }

    #[test]
    fn urls_are_parsed_strictly() {
        let target = |upstream: &str, request: &str| {
            let upstream: Upstream = upstream.parse().expect("valid");
            upstream.target(&request.parse().expect("a URI")).expect("a URI").to_string()
        };
        assert_eq!(target("http://a:1", "/x?y=z"), "http://a:1/x?y=z");
        assert_eq!(target("http://a:1/base/", "/x?y=z"), "http://a:1/base/x?y=z");
        assert_eq!(target("http://[::1]:80", "http://other"), "http://[::1]:80/");
        assert_eq!(target("h2c://a:1/base/", "/x?y=z"), "http://a:1/base/x?y=z");
        assert_eq!(target("h2://a", "http://other/x"), "https://a/x");
        assert_eq!(target("h2c://[::1]:80", "/"), "http://[::1]:80/");
        for wrong in ["", "a", "a:80", "ftp://a", "http://", "http://a?b=c", "/x", "http://a b"] {
            assert!(matches!(wrong.parse::<Upstream>(), Err(UpstreamError::Invalid(_))), "{wrong}");
        }
        assert_eq!(
            "http://u:secret@a".parse::<Upstream>().expect_err("wrong"),
            UpstreamError::Credentials
        );
    }
}
