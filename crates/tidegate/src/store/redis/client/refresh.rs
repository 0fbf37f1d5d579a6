//! [`RefreshTrigger`]: asks every task that follows the topology to refresh it now.

use std::time::Duration;

use tokio::sync::watch;

/// Sender side: any number of triggers before the next wait count as one.
#[derive(Clone)]
pub(crate) struct RefreshTrigger(watch::Sender<()>);

/// Receiver side, one per task.
pub(crate) struct RefreshListener(watch::Receiver<()>);

impl RefreshTrigger {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(()))
    }

    pub(crate) fn trigger(&self) {
        self.0.send_replace(());
    }

    pub(crate) fn listener(&self) -> RefreshListener {
        RefreshListener(self.0.subscribe())
    }
}

impl RefreshListener {
    /// Waits for a trigger; returns at once if there was one since the last wait.
    pub(crate) async fn wait(&mut self) {
        let triggered = self.0.changed().await;
        debug_assert!(triggered.is_ok(), "every listening task holds the trigger, too");
    }

    /// Waits like [`wait`](Self::wait), at most for `timeout`.
    pub(crate) async fn wait_timeout(&mut self, timeout: Duration) {
        let _ = tokio::time::timeout(timeout, self.wait()).await;
    }
}
