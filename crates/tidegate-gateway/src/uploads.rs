//! Uploads to an upstream, and the choice of one to end while other requests wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use tidegate_api::duration;

/// Rate, in bytes per second, below which an upload falls behind. Clients that keep all slots busy
/// at this rate need 16 MiB per second for 1,024 of them.
const MIN_RATE: u64 = 16 * 1024;
/// Time by which an upload must be behind before it is ended. Honest clients pause for less.
const END_AFTER: Duration = Duration::from_secs(1);
/// Start of a wait that has not begun.
const NOT_WAITING: u64 = 0;

/// Uploads to one upstream, by the addresses of their progress in memory.
#[derive(Debug, Default)]
pub(super) struct Uploads(Mutex<HashMap<usize, Arc<UploadProgress>>>);

/// Upload in flight, until it is dropped.
#[derive(Debug)]
pub(super) struct ActiveUpload {
    uploads: Arc<Uploads>,
    pub(super) progress: Arc<UploadProgress>,
}

/// Time by which a client is behind the minimum rate. Only the time counts in which the upload
/// waits for its client.
#[derive(Debug)]
pub(super) struct UploadProgress {
    start: Instant,
    /// Milliseconds by which the client was behind when its last data arrived.
    behind: AtomicU64,
    /// Start of the present wait for the client, in milliseconds after `start`, from 1.
    waits_since: AtomicU64,
    is_ended: AtomicBool,
    waker: AtomicWaker,
}

impl Uploads {
    pub(super) fn start(self: &Arc<Self>) -> ActiveUpload {
        let progress = Arc::new(UploadProgress {
            start: Instant::now(),
            behind: AtomicU64::new(0),
            waits_since: AtomicU64::new(NOT_WAITING),
            is_ended: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        self.all().insert(id(&progress), Arc::clone(&progress));
        ActiveUpload { uploads: Arc::clone(self), progress }
    }

    /// Ends the upload that is furthest behind, if one is.
    pub(super) fn end_slowest(&self) {
        let mut all = self.all();
        let waiting = all.values().filter(|upload| upload.is_waiting());
        let slowest = waiting.max_by_key(|upload| upload.behind()).cloned();
        let min_behind = duration::millis(END_AFTER);
        if let Some(upload) = slowest.filter(|upload| upload.behind() >= min_behind) {
            all.remove(&id(&upload));
            drop(all);
            upload.is_ended.store(true, Ordering::Release);
            upload.waker.wake();
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<usize, Arc<UploadProgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn id(progress: &Arc<UploadProgress>) -> usize {
    Arc::as_ptr(progress).addr()
}

impl UploadProgress {
    /// Records that bytes arrived, or that the upload waits no more.
    pub(super) fn receive(&self, bytes: usize) {
        let behind = self.behind();
        self.behind.store(behind.saturating_sub(bytes as u64 * 1000 / MIN_RATE), Ordering::Relaxed);
        self.waits_since.store(NOT_WAITING, Ordering::Relaxed);
    }

    /// Records that the upload waits for its client. Completes when the upload has to end.
    pub(super) fn poll_ended(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.is_waiting() {
            self.waits_since.store(self.now(), Ordering::Relaxed);
        }
        self.waker.register(cx.waker());
        if self.is_ended.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn is_waiting(&self) -> bool {
        self.waits_since.load(Ordering::Relaxed) != NOT_WAITING
    }

    /// Returns the milliseconds by which the client is behind now.
    fn behind(&self) -> u64 {
        let waited = match self.waits_since.load(Ordering::Relaxed) {
            NOT_WAITING => 0,
            since => self.now().saturating_sub(since),
        };
        self.behind.load(Ordering::Relaxed) + waited
    }

    fn now(&self) -> u64 {
        1 + duration::millis(self.start.elapsed())
    }
}

impl Drop for ActiveUpload {
    fn drop(&mut self) {
        self.uploads.all().remove(&id(&self.progress));
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    fn is_ended(upload: &ActiveUpload) -> bool {
        upload.progress.poll_ended(&Context::from_waker(Waker::noop())).is_ready()
    }

    async fn wait(upload: &ActiveUpload, millis: u64) {
        assert!(!is_ended(upload));
        tokio::time::advance(Duration::from_millis(millis)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn upload_that_is_furthest_behind_ends_first() {
        let uploads = Arc::new(Uploads::default());
        let [fast, slow, slower] = [(); 3].map(|()| uploads.start());
        for _ in 0..100 {
            for (upload, bytes) in [(&fast, 2_000), (&slow, 1_000), (&slower, 100)] {
                upload.progress.receive(bytes);
                assert!(!is_ended(upload), "it waits from now on");
            }
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        uploads.end_slowest();
        assert!(is_ended(&slower) && !is_ended(&slow) && !is_ended(&fast));
        uploads.end_slowest();
        assert!(is_ended(&slow));
        uploads.end_slowest();
        assert!(!is_ended(&fast), "it is not behind");
    }

    #[tokio::test(start_paused = true)]
    async fn only_waits_for_the_client_count() {
        let uploads = Arc::new(Uploads::default());
        let upload = uploads.start();
        wait(&upload, 900).await;
        uploads.end_slowest();
        upload.progress.receive(100);
        // The upstream takes its time.
        tokio::time::advance(Duration::from_secs(60)).await;
        uploads.end_slowest();
        wait(&upload, 50).await;
        uploads.end_slowest();
        wait(&upload, 100).await;
        uploads.end_slowest();
        assert!(is_ended(&upload));
        drop(upload);
        assert!(uploads.all().is_empty());
    }
}
