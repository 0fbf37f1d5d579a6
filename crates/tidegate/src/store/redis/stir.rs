//! [`Stir`]: "look again, now", to every task that watches.

use std::time::Duration;

use tokio::sync::watch;

#[derive(Clone)]
pub(super) struct Stir(watch::Sender<()>);

pub(super) struct Stirred(watch::Receiver<()>);

impl Stir {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(()))
    }

    pub(super) fn stir(&self) {
        self.0.send_replace(());
    }

    pub(super) fn watcher(&self) -> Stirred {
        Stirred(self.0.subscribe())
    }
}

impl Stirred {
    /// Until somebody stirs, or has stirred since the last look.
    pub(super) async fn wait(&mut self) {
        let stirred = self.0.changed().await;
        debug_assert!(stirred.is_ok(), "who watches holds what stirs");
    }

    /// Until somebody stirs, or has stirred since the last look; `longest` at most.
    pub(super) async fn or_after(&mut self, longest: Duration) {
        let _ = tokio::time::timeout(longest, self.wait()).await;
    }
}
