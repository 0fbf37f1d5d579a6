//! Takes a changed configuration without a restart: on a change of its files, and on SIGHUP.
//!
//! Folders are watched, not files: editors and Kubernetes replace a file (or a link on the way to
//! it), and a watch on the file itself would go on looking at the old one. A file that has just
//! changed may be half written: it is read once two looks at it have found the same. Who sends a
//! signal is done writing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tidegate::Policies;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::config::{Config, ConfigError};
use crate::engine::Engine;
use crate::serve::Fixed;

mod links;

/// Between the two looks.
const SETTLE: Duration = Duration::from_millis(250);

/// With a file its folder may be gone, and nothing be left that tells of its return.
const LOOK_FOR_THE_LOST: Duration = Duration::from_secs(1);

/// Watches until the process ends.
pub(crate) fn watch(
    file: PathBuf,
    files: Vec<PathBuf>,
    fixed: Fixed,
    warn: fn(&Policies),
    engine: Arc<Engine>,
) -> anyhow::Result<()> {
    let (changed, changes) = mpsc::channel(1);
    let notice = move |event: notify::Result<notify::Event>| {
        // A read, such as our own, is no change.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // Full: a change is under way already.
            let _ = changed.try_send(());
        }
    };
    let watcher = notify::recommended_watcher(notice).context("the file cannot be watched")?;
    let mut watched =
        Watched { watcher, warn, file, files, folders: BTreeSet::new(), last: Vec::new() };
    watched.watch_folders();
    let hangup = signal(SignalKind::hangup())?;
    // Before anybody knows that we listen, and may change them.
    watched.last = contents(look(&watched.files));
    tokio::spawn(watched.follow(hangup, changes, fixed, engine));
    Ok(())
}

/// The configuration and all files that it names.
struct Watched {
    watcher: RecommendedWatcher,
    warn: fn(&Policies),
    file: PathBuf,
    files: Vec<PathBuf>,
    folders: BTreeSet<PathBuf>,
    /// As they were before they were loaded: what changes meanwhile is still to be taken.
    last: Vec<Option<Vec<u8>>>,
}

impl Watched {
    async fn follow(
        mut self,
        mut hangup: Signal,
        mut changes: mpsc::Receiver<()>,
        fixed: Fixed,
        engine: Arc<Engine>,
    ) {
        let mut settling = None;
        loop {
            let pause = if settling.is_some() { SETTLE } else { LOOK_FOR_THE_LOST };
            let lost = self.last.contains(&None);
            let due = tokio::select! {
                _ = hangup.recv() => true,
                Some(()) = changes.recv(), if settling.is_none() => {
                    settling = Some(look(&self.files));
                    false
                }
                () = tokio::time::sleep(pause), if settling.is_some() || lost => {
                    let found = look(&self.files);
                    let changed = contents(found.clone()) != self.last;
                    let settled = settling.as_ref() == Some(&found);
                    settling = changed.then_some(found);
                    changed && settled
                }
            };
            if due {
                settling = None;
                self.take(&fixed, &engine);
            }
            // A link may lead elsewhere now, and a folder be another of the same name.
            self.watch_folders();
        }
    }

    /// Whole or not at all.
    fn take(&mut self, fixed: &Fixed, engine: &Engine) {
        match self.load() {
            Ok(config) => {
                if let Some(part) = fixed.differs(&config) {
                    tracing::warn!("{part} has changed, which takes a restart; the rest is taken");
                }
                (self.warn)(&config.policies);
                engine.reload(config);
                engine.metrics.count_reload(true);
                tracing::info!(file = %self.file.display(), "configuration reloaded");
            }
            Err(error) => {
                engine.metrics.count_reload(false);
                tracing::error!(error = %error.line(), "configuration refused, the old one goes on");
            }
        }
    }

    /// Once more if it names other files than before: they are watched before they are read.
    fn load(&mut self) -> Result<Config, ConfigError> {
        let mut tries = 0;
        loop {
            tries += 1;
            self.watch_folders();
            self.last = contents(look(&self.files));
            let config = Config::load(&self.file)?;
            if config.files == self.files || tries == 3 {
                return Ok(config);
            }
            self.files.clone_from(&config.files);
        }
    }

    fn watch_folders(&mut self) {
        let folders: BTreeSet<PathBuf> =
            self.files.iter().flat_map(|file| links::folders(file)).collect();
        for left in self.folders.difference(&folders) {
            // With a folder its watch is gone.
            let _ = self.watcher.unwatch(left);
        }
        for folder in &folders {
            let watched = self.watcher.watch(folder, RecursiveMode::NonRecursive);
            if let Some(error) = watched.err().filter(|_| !self.folders.contains(folder)) {
                tracing::warn!(folder = %folder.display(), %error, "not watched: changes there take a SIGHUP");
            }
        }
        self.folders = folders;
    }
}

/// A file as it is found, if it is there.
type Look = Option<(SystemTime, Vec<u8>)>;

fn look(files: &[PathBuf]) -> Vec<Look> {
    let read = |file: &Path| {
        std::io::Result::Ok((std::fs::metadata(file)?.modified()?, std::fs::read(file)?))
    };
    files.iter().map(|file| read(file).ok()).collect()
}

/// Without the times: a file that was only touched says what it said.
fn contents(looks: Vec<Look>) -> Vec<Option<Vec<u8>>> {
    looks.into_iter().map(|look| look.map(|(_, content)| content)).collect()
}
