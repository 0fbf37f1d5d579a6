//! Drain of connections: at the shutdown, and once they have reached their maximum age.

use std::future::poll_fn;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Sleep;

use super::connection::Verdict;

/// Connections of a listener that are still open.
pub(super) struct OpenConnections {
    /// Closed when all guards are dropped.
    all: watch::Sender<()>,
}

/// Guard of an open connection.
pub(super) struct OpenConnection(#[expect(dead_code, reason = "held")] watch::Receiver<()>);

impl OpenConnections {
    pub(super) fn new() -> Self {
        Self { all: watch::Sender::new(()) }
    }

    pub(super) fn guard(&self) -> OpenConnection {
        OpenConnection(self.all.subscribe())
    }

    /// Waits until all connections are closed.
    pub(super) async fn closed(self) {
        self.all.closed().await;
    }
}

/// Maximum age of a connection, so that clients distribute their connections again over a fleet
/// behind a load balancer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaxAge {
    pub(crate) age: Duration,
    /// Time that in-flight requests have to complete after that.
    pub(crate) grace: Option<Duration>,
}

/// Drives a connection until it closes, or until its watcher closes it. When `stop` turns true, at
/// its maximum age, and when it is idle, it is drained: `start_drain` makes it accept no further
/// requests.
pub(super) async fn drive<C: Future>(
    connection: C,
    start_drain: impl Fn(Pin<&mut C>),
    stop: watch::Receiver<bool>,
    max_age: Option<MaxAge>,
    mut watch: impl FnMut(&mut Context<'_>) -> Verdict,
) {
    let mut connection = pin!(connection);
    let mut drain_signal = pin!(drain_signal(stop, max_age.map(|max| max.age)));
    let mut is_draining = false;
    let mut grace: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        let verdict = watch(cx);
        if verdict == Verdict::Drain && !is_draining {
            is_draining = true;
            start_drain(connection.as_mut());
        }
        if !is_draining && let Poll::Ready(reason) = drain_signal.as_mut().poll(cx) {
            is_draining = true;
            start_drain(connection.as_mut());
            if let (DrainReason::Age, Some(limit)) = (reason, max_age.and_then(|max| max.grace)) {
                grace = Some(Box::pin(tokio::time::sleep(limit)));
            }
        }
        if let Some(grace) = &mut grace
            && grace.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(());
        }
        // The last poll of a connection that has to close tells the client.
        let is_closed = connection.as_mut().poll(cx).is_ready() || verdict == Verdict::Close;
        if is_closed { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DrainReason {
    Stop,
    Age,
}

async fn drain_signal(mut stop: watch::Receiver<bool>, age: Option<Duration>) -> DrainReason {
    let stopped = async {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    match age {
        None => stopped.await,
        Some(age) => tokio::select! {
            biased;
            () = stopped => {}
            () = tokio::time::sleep(with_jitter(age, RandomState::new().hash_one(()))) => {
                return DrainReason::Age;
            }
        },
    }
    DrainReason::Stop
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

    const AGE: Duration = Duration::from_secs(600);
    const GRACE: Duration = Duration::from_secs(30);

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

    async fn lifetime(rest: Duration, stop: &watch::Sender<bool>, max_age: MaxAge) -> Duration {
        let start = Instant::now();
        let connection = Busy { rest, ends: None };
        let watch = |_: &mut Context<'_>| Verdict::Continue;
        drive(connection, Busy::start_drain, stop.subscribe(), Some(max_age), watch).await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn old_connection_completes_its_requests_within_the_grace_period() {
        let stop = watch::Sender::new(false);
        let max_age = MaxAge { age: AGE, grace: Some(GRACE) };
        let (earliest, latest) = (AGE * 9 / 10, AGE * 11 / 10);
        let rest = Duration::from_secs(20);
        let lived = lifetime(rest, &stop, max_age).await;
        assert!((earliest + rest..=latest + rest * 2).contains(&lived), "{lived:?}");
        let lived = lifetime(GRACE * 100, &stop, max_age).await;
        assert!((earliest + GRACE..=latest + GRACE * 2).contains(&lived), "{lived:?}");
        let unbounded = MaxAge { age: AGE, grace: None };
        assert!(lifetime(GRACE * 100, &stop, unbounded).await >= GRACE * 100);
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_has_no_grace_period_of_its_own() {
        let stop = watch::Sender::new(true);
        let max_age = MaxAge { age: AGE, grace: Some(GRACE) };
        let lived = lifetime(GRACE * 2, &stop, max_age).await;
        assert!((GRACE * 2..GRACE * 3).contains(&lived), "{lived:?}");
    }

    #[test]
    fn jitter_is_ten_percent() {
        for (random, seconds) in [(0, 540), (100, 600), (200, 660), (201, 540)] {
            assert_eq!(with_jitter(AGE, random), Duration::from_secs(seconds));
        }
    }
}
