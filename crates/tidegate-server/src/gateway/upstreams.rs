//! Which upstream takes a request: in turns, but for those that have failed several times in a row.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Uri;
use http::uri::{Authority, Scheme};
use siphasher::sip::SipHasher13;

use super::path;

/// So many failures in a row, and an upstream is left out.
const FAILURES: u32 = 3;
/// For about so long; then one more failure leaves it out again.
const LEFT_OUT: Duration = Duration::from_secs(5);
/// A request goes to so many upstreams at most.
const TRIES: usize = 3;

/// A server that requests are handed on to.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) scheme: Scheme,
    pub(super) authority: Authority,
    /// What every path begins with; empty or without a slash at its end.
    base: String,
    pub(super) speaks: Speaks,
    failures: AtomicU32,
    /// In milliseconds since the start of the gateway.
    out_until: AtomicU64,
}

/// What an upstream is spoken to in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaks {
    Http1,
    Http2,
}

/// Why a text names no upstream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UpstreamError {
    /// The text is not shown: it may hold a password.
    #[error("an upstream has no user and password in its URL")]
    Credentials,
    #[error(
        "{0:?} is no upstream: write it like http://127.0.0.1:3000, https://…, or for HTTP/2 h2c://… and h2://…"
    )]
    Wrong(String),
}

impl std::str::FromStr for Upstream {
    type Err = UpstreamError;

    fn from_str(text: &str) -> Result<Self, UpstreamError> {
        if text.contains('@') {
            return Err(UpstreamError::Credentials);
        }
        let wrong = || UpstreamError::Wrong(text.chars().take(100).collect());
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let (scheme, speaks) = match uri.scheme_str() {
            Some("http") => (Scheme::HTTP, Speaks::Http1),
            Some("https") => (Scheme::HTTPS, Speaks::Http1),
            Some("h2c") => (Scheme::HTTP, Speaks::Http2),
            Some("h2") => (Scheme::HTTPS, Speaks::Http2),
            _ => return Err(wrong()),
        };
        let authority = uri
            .authority()
            .filter(|authority| !authority.host().is_empty())
            .ok_or_else(wrong)?
            .clone();
        if uri.query().is_some() {
            return Err(wrong());
        }
        let base = uri.path().trim_end_matches('/').to_owned();
        let (failures, out_until) = (AtomicU32::new(0), AtomicU64::new(0));
        Ok(Self { scheme, authority, base, speaks, failures, out_until })
    }
}

impl Upstream {
    pub(super) fn has_answered(&self) {
        // Nearly always nothing to write, and a line of memory that all cores may share.
        if self.failures.load(Ordering::Relaxed) > 0
            && self.failures.swap(0, Ordering::Relaxed) >= FAILURES
        {
            self.out_until.store(0, Ordering::Relaxed);
            tracing::info!(upstream = %self.authority, "an upstream answers again");
        }
    }

    /// Where this request goes there.
    pub(super) fn uri(&self, request: &Uri) -> Option<Uri> {
        let path = path::forwarded(request)?;
        let path = if self.base.is_empty() {
            path
        } else {
            format!("{}{path}", self.base).parse().ok()?
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).ok()
    }
}

/// All upstreams, and whose turn it is.
#[derive(Debug)]
pub(crate) struct Upstreams {
    all: Vec<Upstream>,
    turn: AtomicUsize,
    start: Instant,
}

impl Upstreams {
    /// At least one.
    pub(crate) fn new(all: Vec<Upstream>) -> Option<Self> {
        (!all.is_empty()).then(|| Self { all, turn: AtomicUsize::new(0), start: Instant::now() })
    }

    /// Whom to try for one request, one after the other: those that do well, in turns, so that all
    /// of them share the turns of one that is left out. If none does, all: an answer that an
    /// upstream could not be reached takes as long as to try, and the first that is back is found
    /// at once.
    pub(super) fn candidates(&self) -> impl Iterator<Item = &Upstream> {
        let now = self.now();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let is_in = move |upstream: &&Upstream| upstream.out_until.load(Ordering::Relaxed) <= now;
        let all_out = !self.all.iter().any(|upstream| is_in(&upstream));
        let taking_part = self.all.iter().filter(move |upstream| all_out || is_in(upstream));
        let count = taking_part.clone().count();
        taking_part.cycle().skip(turn % count.max(1)).take(count.min(TRIES))
    }

    /// Whether every upstream is left out.
    pub(super) fn all_out(&self) -> bool {
        let now = self.now();
        self.all.iter().all(|upstream| upstream.out_until.load(Ordering::Relaxed) > now)
    }

    pub(super) fn has_failed(&self, upstream: &Upstream, reason: &str) {
        let failures = upstream.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures >= FAILURES {
            let now = self.now();
            let before =
                upstream.out_until.swap(now + jittered(LEFT_OUT, now, failures), Ordering::Relaxed);
            if before == 0 {
                tracing::warn!(upstream = %upstream.authority, reason, "an upstream is left out for some seconds");
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// From 80 % to 120 % of it, in milliseconds: gateways that saw the same failure do not come back
/// together.
fn jittered(duration: Duration, now: u64, failures: u32) -> u64 {
    use std::hash::Hasher as _;
    let mut hasher = SipHasher13::new_with_keys(now, u64::from(std::process::id()));
    hasher.write_u32(failures);
    let whole = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    whole * 4 / 5 + hasher.finish() % (whole * 2 / 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstreams(texts: &[&str]) -> Upstreams {
        Upstreams::new(texts.iter().map(|text| text.parse().expect("valid")).collect())
            .expect("some")
    }

    fn next(upstreams: &Upstreams) -> Vec<&str> {
        upstreams.candidates().map(|upstream| upstream.authority.as_str()).collect()
    }

    #[test]
    fn each_upstream_has_its_turn_and_the_next_ones_stand_by() {
        let three = upstreams(&["http://a", "http://b", "http://c"]);
        assert_eq!(next(&three), ["a", "b", "c"]);
        assert_eq!(next(&three), ["b", "c", "a"]);
        assert_eq!(next(&three), ["c", "a", "b"]);
        assert_eq!(next(&three), ["a", "b", "c"]);
    }

    #[test]
    fn failures_in_a_row_leave_an_upstream_out_and_an_answer_takes_it_back() {
        let two = upstreams(&["http://a", "http://b"]);
        for _ in 0..FAILURES - 1 {
            two.has_failed(&two.all[0], "refused");
        }
        two.all[0].has_answered();
        two.has_failed(&two.all[0], "refused");
        assert_eq!(next(&two), ["a", "b"], "not in a row");
        for _ in 0..FAILURES {
            two.has_failed(&two.all[0], "refused");
        }
        assert_eq!((next(&two), next(&two)), (vec!["b"], vec!["b"]));
        for _ in 0..FAILURES {
            two.has_failed(&two.all[1], "refused");
        }
        assert!(two.all_out());
        assert_eq!(next(&two).len(), 2, "all are tried if none is left");
        two.all[1].has_answered();
        assert_eq!(next(&two), ["b"]);
    }

    #[test]
    fn the_turns_of_one_that_is_left_out_are_spread() {
        let three = upstreams(&["http://a", "http://b", "http://c"]);
        for _ in 0..FAILURES {
            three.has_failed(&three.all[1], "refused");
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
    fn urls_are_read_whole_or_not_at_all() {
        let uri = |upstream: &str, request: &str| {
            let upstream: Upstream = upstream.parse().expect("valid");
            upstream.uri(&request.parse().expect("a URI")).expect("a URI").to_string()
        };
        assert_eq!(uri("http://a:1", "/x?y=z"), "http://a:1/x?y=z");
        assert_eq!(uri("http://a:1/base/", "/x?y=z"), "http://a:1/base/x?y=z");
        assert_eq!(uri("http://a:1/base/", "/x/../../y"), "http://a:1/base/y");
        assert_eq!(uri("h2://a", "http://other/x"), "https://a/x");
        assert_eq!(uri("http://[::1]:80", "/"), "http://[::1]:80/");
        for wrong in ["", "a", "a:80", "ftp://a", "http://", "http://a?b=c", "/x", "http://a b"] {
            assert!(matches!(wrong.parse::<Upstream>(), Err(UpstreamError::Wrong(_))), "{wrong}");
        }
        assert_eq!(
            "http://u:secret@a".parse::<Upstream>().expect_err("wrong"),
            UpstreamError::Credentials
        );
    }
}
