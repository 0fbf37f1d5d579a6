//! Drain of connections: at the shutdown, and once they have reached their maximum age.

use std::future::poll_fn;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Version;
use tokio::sync::watch;
use tokio::time::Sleep;

use super::connection::Verdict;
use super::wakers::{CheckWaker, Wrapped};

/// Maximum age of a connection, so that clients distribute their connections again over a fleet
/// behind a load balancer.
#[derive(Debug, Clone, Copy)]
pub struct MaxAge {
    pub age: Duration,
    /// Time that in-flight requests have to complete after that.
    pub grace: Option<Duration>,
}

/// Age of a connection, which its driver shares with its service.
#[derive(Debug, Default)]
pub(super) struct ConnectionAge {
    is_old: AtomicBool,
    is_http2: AtomicBool,
}

impl ConnectionAge {
    /// Records the version of a request. Returns whether the connection must close after its
    /// response, because it is old.
    pub(super) fn closes_after(&self, version: Version) -> bool {
        if version == Version::HTTP_2 {
            self.is_http2.store(true, Ordering::Relaxed);
            return false;
        }
        self.is_old.load(Ordering::Relaxed)
    }

    /// Returns whether the connection is old, and its protocol has a message for that.
    fn can_send_goaway(&self) -> bool {
        self.is_old.load(Ordering::Relaxed) && self.is_http2.load(Ordering::Relaxed)
    }
}

/// Drives a connection until it closes, or until its watcher closes it. When `stop` turns true, and
/// when it is idle, it is drained: `start_drain` makes it accept no further requests.
///
/// At its maximum age, an HTTP/2 connection is drained, too. One of HTTP/1.1 closes after its next
/// response, which says so: closing it while it is idle could cross a request of the client.
pub(super) async fn drive<C: Future>(
    connection: C,
    start_drain: impl Fn(Pin<&mut C>),
    mut stop: watch::Receiver<bool>,
    max_age: Option<MaxAge>,
    state: &ConnectionAge,
    mut watch: impl FnMut(&mut Context<'_>) -> Verdict,
) {
    let mut connection = pin!(connection);
    let mut stopped = pin!(async { stop.wait_for(|stop| *stop).await.is_ok() });
    let mut is_draining = false;
    let sleep = |duration| Box::pin(tokio::time::sleep(duration));
    let mut age: Option<Pin<Box<Sleep>>> =
        max_age.map(|max| sleep(with_jitter(max.age, RandomState::new().hash_one(()))));
    let mut grace: Option<Pin<Box<Sleep>>> = None;
    let mut waker: Option<Wrapped<CheckWaker>> = None;
    poll_fn(|cx| {
        let checks = Wrapped::<CheckWaker>::of(&mut waker, cx);
        let check_cx = &mut Context::from_waker(&checks.waker);
        let mut verdict = Verdict::Continue;
        let mut is_due = checks.inner.take_due();
        if is_due {
            verdict = watch(check_cx);
            let is_stopped = !is_draining && stopped.as_mut().poll(check_cx).is_ready();
            if is_stopped || (!is_draining && verdict == Verdict::Drain) {
                is_draining = true;
                start_drain(connection.as_mut());
            }
            if age.as_mut().is_some_and(|age| age.as_mut().poll(check_cx).is_ready()) {
                age = None;
                state.is_old.store(true, Ordering::Relaxed);
            }
        }
        loop {
            if !is_draining && state.can_send_goaway() {
                is_draining = true;
                start_drain(connection.as_mut());
                grace = max_age.and_then(|max| max.grace).map(sleep);
                is_due = true;
            }
            if is_due && grace.as_mut().is_some_and(|one| one.as_mut().poll(check_cx).is_ready()) {
                return Poll::Ready(());
            }
            match connection.as_mut().poll(cx) {
                // This poll has sent the last frame.
                Poll::Pending if verdict == Verdict::Close => return Poll::Ready(()),
                // The first request of an old connection has just shown its version.
                Poll::Pending if !is_draining && state.can_send_goaway() => {}
                polled => return polled.map(|_| ()),
            }
        }
    })
    .await;
}

/// Returns from 90 % to 110 % of a duration, so that connections that were opened together do not
/// close together.
fn with_jitter(duration: Duration, random: u64) -> Duration {
    let permille = 900 + u32::try_from(random % 201).unwrap_or(0);
    duration * permille / 1_000
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(600);
    const GRACE_TIMEOUT: Duration = Duration::from_secs(30);

    /// Connection with one request that takes this long after the drain started.
    struct Busy {
        rest: Duration,
        ends: Option<Pin<Box<Sleep>>>,
    }

    impl Future for Busy {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            self.ends.as_mut().map_or(Poll::Pending, |ends| ends.as_mut().poll(cx))
        }
    }

    impl Busy {
        fn start_drain(mut self: Pin<&mut Self>) {
            let ends = Box::pin(tokio::time::sleep(self.rest));
            self.ends = Some(ends);
        }
    }

    async fn lifetime(
        rest: Duration,
        stop: &watch::Sender<bool>,
        max_age: MaxAge,
        version: Version,
    ) -> Duration {
        let start = Instant::now();
        let state = ConnectionAge::default();
        assert!(!state.closes_after(version), "the connection is not old yet");
        let busy = Busy { rest, ends: None };
        let watch = |_: &mut Context<'_>| Verdict::Continue;
        drive(busy, Busy::start_drain, stop.subscribe(), Some(max_age), &state, watch).await;
        assert_eq!(state.closes_after(Version::HTTP_11), start.elapsed() >= MAX_AGE * 9 / 10);
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn old_connection_completes_its_requests_within_the_grace_period() {
        let stop = watch::Sender::new(false);
        let max_age = MaxAge { age: MAX_AGE, grace: Some(GRACE_TIMEOUT) };
        let (earliest, latest) = (MAX_AGE * 9 / 10, MAX_AGE * 11 / 10);
        let rest = Duration::from_secs(20);
        let lived = lifetime(rest, &stop, max_age, Version::HTTP_2).await;
        assert!((earliest + rest..=latest + rest * 2).contains(&lived), "{lived:?}");
        let lived = lifetime(GRACE_TIMEOUT * 100, &stop, max_age, Version::HTTP_2).await;
        assert!(
            (earliest + GRACE_TIMEOUT..=latest + GRACE_TIMEOUT * 2).contains(&lived),
            "{lived:?}"
        );
        let unbounded = MaxAge { age: MAX_AGE, grace: None };
        assert!(
            lifetime(GRACE_TIMEOUT * 100, &stop, unbounded, Version::HTTP_2).await
                >= GRACE_TIMEOUT * 100
        );
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_drains_at_any_age_and_has_no_grace_period_of_its_own() {
        let max_age = MaxAge { age: MAX_AGE, grace: Some(GRACE_TIMEOUT) };
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let stop = watch::Sender::new(true);
            let lived = lifetime(GRACE_TIMEOUT * 2, &stop, max_age, version).await;
            assert!(
                (GRACE_TIMEOUT * 2..GRACE_TIMEOUT * 3).contains(&lived),
                "{version:?}: {lived:?}"
            );
        }
        let stop = watch::Sender::new(false);
        let lived = async {
            let lived = lifetime(GRACE_TIMEOUT, &stop, max_age, Version::HTTP_11);
            let stops = async {
                tokio::time::sleep(MAX_AGE * 2).await;
                stop.send_replace(true);
            };
            tokio::join!(lived, stops).0
        };
        let lived = lived.await;
        assert!(
            (MAX_AGE * 2 + GRACE_TIMEOUT..MAX_AGE * 3).contains(&lived),
            "an old idle one: {lived:?}"
        );
    }

    #[test]
    fn jitter_is_ten_percent() {
        for (random, seconds) in [(0, 540), (100, 600), (200, 660), (201, 540)] {
            assert_eq!(with_jitter(MAX_AGE, random), Duration::from_secs(seconds));
        }
    }
}
