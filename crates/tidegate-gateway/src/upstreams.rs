//! Round-robin choice of upstreams, with ejection of those that fail several times in a row.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use siphasher::sip::SipHasher13;
use tokio::sync::Semaphore;

use super::concurrency::{ConcurrencyLimit, Overload, RequestPermit};
use super::metrics::UpstreamMetrics;
use tidegate_api::duration;
use tidegate_config::{UpstreamLimits, UpstreamProtocol as Protocol, UpstreamUrl};
use tidegate_net::LogThrottle;

/// Number of consecutive failures that eject an upstream.
const MAX_FAILURES: u32 = 3;
/// Duration of an ejection, before jitter. After that, a single failure ejects it again.
const EJECTION_TIME: Duration = Duration::from_secs(5);
/// Maximum number of upstreams tried for one request.
const MAX_TRIES: usize = 3;

/// Server that requests are forwarded to.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) url: UpstreamUrl,
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

impl Upstream {
    pub(super) fn new(url: &UpstreamUrl) -> Self {
        let limits = UpstreamLimits::default();
        Self {
            url: url.clone(),
            failures: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            metrics: Arc::new(UpstreamMetrics::new(&url.text)),
            limit: Arc::new(ConcurrencyLimit::new(limits)),
            connections: Arc::new(Semaphore::new(limits.max_connections)),
            pool: url.authority.clone(),
        }
    }

    /// Returns the name in logs: host and port, or the Unix socket.
    pub(super) fn name(&self) -> &str {
        if self.url.socket.is_some() { &self.metrics.url } else { self.url.authority.as_str() }
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
        let path = if self.url.base.is_empty() {
            path
        } else {
            format!("{}{path}", self.url.base).parse().ok()?
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.url.scheme.clone());
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
        let default = if self.url.scheme == Scheme::HTTPS { 443 } else { 80 };
        self.url.socket.is_none().then(|| self.url.authority.port_u16().unwrap_or(default))
    }

    /// Returns whether both have the same connections.
    fn is_same_server(&self, other: &Self) -> bool {
        self.url.scheme == other.url.scheme
            && self.url.authority == other.url.authority
            && self.url.socket == other.url.socket
            && self.url.protocol == other.url.protocol
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
                if upstream.url.socket.is_some() {
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
            upstream.url.protocol == Protocol::Http1
                && uri.scheme() == Some(&upstream.url.scheme)
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
    use std::path::PathBuf;

    use tidegate_config::UpstreamUrlError;

    use super::*;

    fn upstream(text: &str) -> Upstream {
        Upstream::new(&text.parse().expect("valid"))
    }

    fn upstreams(texts: &[&str]) -> Upstreams {
        let all = texts.iter().map(|text| upstream(text)).collect();
        Upstreams::new(all, UpstreamLimits::default()).expect("some")
    }

    fn next(upstreams: &Upstreams) -> Vec<&str> {
        let candidates = upstreams.candidates().0.into_iter().flatten();
        candidates.map(|upstream| upstream.url.authority.as_str()).collect()
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
        let upstream = upstream("unix:/run/a@b.sock");
        assert_eq!(upstream.url.socket, Some(PathBuf::from("/run/a@b.sock")));
        assert_eq!((upstream.name(), upstream.port()), ("unix:/run/a@b.sock", None));
        let target = upstream.target(&"http://example.com/x?y=z".parse().expect("a URI"));
        assert_eq!(target.expect("a URI").to_string(), "http://localhost/x?y=z");
        let two = upstreams(&["unix:/run/a.sock", "unix:/run/b.sock"]);
        assert!(!two.all[0].is_same_server(&two.all[1]));
        assert_ne!(two.all[0].pool, two.all[1].pool, "they share no connections");
        for text in ["unix:app.sock", "unix:", &format!("unix:/{}", "a".repeat(107))] {
            assert!(
                matches!(text.parse::<UpstreamUrl>(), Err(UpstreamUrlError::Socket(_))),
                "{text}"
            );
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
            let upstream = super::tests::upstream(upstream);
            upstream.target(&request.parse().expect("a URI")).expect("a URI").to_string()
        };
        assert_eq!(target("http://a:1", "/x?y=z"), "http://a:1/x?y=z");
        assert_eq!(target("http://a:1/base/", "/x?y=z"), "http://a:1/base/x?y=z");
        assert_eq!(target("http://[::1]:80", "http://other"), "http://[::1]:80/");
        assert_eq!(target("h2c://a:1/base/", "/x?y=z"), "http://a:1/base/x?y=z");
        assert_eq!(target("h2://a", "http://other/x"), "https://a/x");
        assert_eq!(target("h2c://[::1]:80", "/"), "http://[::1]:80/");
        for wrong in ["", "a", "a:80", "ftp://a", "http://", "http://a?b=c", "/x", "http://a b"] {
            assert!(
                matches!(wrong.parse::<UpstreamUrl>(), Err(UpstreamUrlError::Invalid(_))),
                "{wrong}"
            );
        }
        assert_eq!(
            "http://u:secret@a".parse::<UpstreamUrl>().expect_err("wrong"),
            UpstreamUrlError::Credentials
        );
    }
}
