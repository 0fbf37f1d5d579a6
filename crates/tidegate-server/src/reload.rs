//! Takes a changed configuration without a restart: on a change of the file, and on SIGHUP.
//!
//! The directory is watched, not the file: editors and Kubernetes replace the file (or a link on the way to it), and a watch
//! on the file itself would go on looking at the old one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use notify::{RecursiveMode, Watcher};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::engine::Engine;
use crate::serve::Fixed;

/// Several events of one change are taken together.
const SETTLE: Duration = Duration::from_millis(50);

/// Watches until the process ends.
pub(crate) fn watch(file: PathBuf, mut files: Vec<PathBuf>, fixed: Fixed, engine: Arc<Engine>) -> anyhow::Result<()> {
    let (changed, mut changes) = mpsc::channel(1);
    let notice = move |event: notify::Result<notify::Event>| {
        // A read, such as our own, is no change.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // Full: a change is under way already.
            let _ = changed.try_send(());
        }
    };
    let mut watcher = notify::recommended_watcher(notice).context("the file cannot be watched")?;
    watch_folders(&mut watcher, &files)?;
    let mut hangup = signal(SignalKind::hangup())?;
    // Before anybody knows that we listen, and may change them.
    let mut last = contents(&files);
    tokio::spawn(async move {
        loop {
            let asked = tokio::select! {
                _ = hangup.recv() => true,
                _ = changes.recv() => false,
            };
            tokio::time::sleep(SETTLE).await;
            while changes.try_recv().is_ok() {}
            let found = contents(&files);
            // Something else in the folder changed; but who sends a signal wants an answer.
            if !asked && (found == last || found.contains(&None)) {
                continue;
            }
            // As they were before they are loaded: what changes meanwhile is still to be taken.
            last = found;
            if let Some(named) = take(&file, &fixed, &engine) {
                if named != files {
                    last.clear();
                }
                files = named;
                let _ = watch_folders(&mut watcher, &files);
            }
        }
    });
    Ok(())
}

fn watch_folders(watcher: &mut impl Watcher, files: &[PathBuf]) -> anyhow::Result<()> {
    for file in files {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        watcher.watch(folder, RecursiveMode::NonRecursive).with_context(|| format!("watching {}", folder.display()))?;
    }
    Ok(())
}

fn contents(files: &[PathBuf]) -> Vec<Option<Vec<u8>>> {
    files.iter().map(|file| std::fs::read(file).ok()).collect()
}

/// Whole or not at all. The files that the new one names.
fn take(file: &Path, fixed: &Fixed, engine: &Engine) -> Option<Vec<PathBuf>> {
    match Config::load(file) {
        Ok(config) => {
            if let Some(part) = fixed.differs(&config) {
                tracing::warn!("{part} has changed, which takes a restart; the rest is taken");
            }
            let files = config.files.clone();
            engine.reload(config);
            engine.metrics.count_reload(true);
            tracing::info!(file = %file.display(), "configuration reloaded");
            Some(files)
        }
        Err(error) => {
            engine.metrics.count_reload(false);
            tracing::error!(error = %error.line(), "configuration refused, the old one goes on");
            None
        }
    }
}
