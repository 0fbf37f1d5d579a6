//! Reloads the configuration without a restart: when its files change, on SIGHUP, and when a control
//! plane sends other rules.
//!
//! Directories are watched, not files: editors and Kubernetes replace a file (or a symlink on the
//! way to it), and a watch on the file itself would keep following the old one. A changed file may
//! be half written, so it is loaded once two snapshots are equal; SIGHUP loads at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use ring::digest::{SHA256, digest};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use changes::{Changes, Contents};
use discovery::{DiscoveredRules, Discovery, RulesUpdate};

use crate::config_summary::ConfigChange;
use crate::journal::{EventKind, bounded};
use crate::logs::panics;
use crate::state::{ReloadError, ServerState};
use tidegate_config::{Config, ConfigOrigin, StoreConfig, XdsConfig, rule_files};
use tidegate_net::tls::ListenerTls;

mod changes;
mod discovery;
mod links;
mod restart_only;

pub use restart_only::RestartOnlyConfig;

/// Time between two snapshots that must be equal before a changed file is loaded.
const DEBOUNCE: Duration = Duration::from_millis(250);

/// Poll interval while a file is missing. Its directory may be missing as well, and then no event
/// reports its return.
const MISSING_FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of loads in a row when each names other files than the one before.
const MAX_LOADS: usize = 3;

/// Name of the rules of a control plane, in errors.
const XDS: &str = "envoy.xds";

/// Origin of the configuration, and flags for its store.
pub struct ConfigSource {
    pub origin: ConfigOrigin,
    /// Applies the flags to the store of the origin.
    pub with_flags: Box<dyn Fn(StoreConfig) -> anyhow::Result<StoreConfig> + Send + Sync>,
    /// File with a password that a flag names.
    pub password_file: Option<PathBuf>,
}

impl ConfigSource {
    /// Loads the configuration, with the flags for its store.
    pub fn load(&self) -> Result<Config, ReloadError> {
        let mut config = self.origin.load()?;
        config.store =
            (self.with_flags)(config.store).map_err(|error| self.error(format!("{error:#}")))?;
        config.files.extend(self.password_file.clone());
        Ok(config)
    }

    /// Returns an error about the configuration as a whole.
    fn error(&self, message: impl Into<String>) -> ReloadError {
        ReloadError::of_file(&self.origin.to_string(), message)
    }
}

/// Starts watching the files, and the rules of the control plane, until the process ends.
pub fn watch(
    source: ConfigSource,
    files: Vec<PathBuf>,
    xds: Option<XdsConfig>,
    restart_only: RestartOnlyConfig,
    warn: Box<dyn Fn(&Config) + Send + Sync>,
    state: Arc<ServerState>,
) -> anyhow::Result<()> {
    let (sender, changes) = mpsc::channel(1);
    let on_event = move |event: notify::Result<notify::Event>| {
        // Reading a file, as this process does, is not a change.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            // A full channel means that a change is already pending.
            let _ = sender.try_send(());
        }
    };
    let watcher =
        notify::recommended_watcher(on_event).context("cannot watch the configuration file")?;
    let mut watcher = ConfigWatcher {
        watcher,
        warn,
        source,
        files,
        folders: BTreeSet::new(),
        loaded: Vec::new(),
        applied: Contents::new(),
        discovered: None,
        discovered_in_use: None,
    };
    watcher.watch_folders();
    let hangup = signal(SignalKind::hangup())?;
    // Taken before the addresses are announced, because the files may change right after that.
    watcher.loaded = contents(watcher.snapshot());
    watcher.applied = watcher.loaded_files();
    let (updates, discovered) = mpsc::channel(1);
    if let Some(xds) = xds {
        tokio::spawn(Discovery::new(xds, updates, &state.metrics).run());
    }
    let triggers = Triggers { hangup, changes, discovered };
    tokio::spawn(watcher.run(triggers, restart_only, state));
    Ok(())
}

/// Events after which the configuration is loaded again.
struct Triggers {
    hangup: Signal,
    changes: mpsc::Receiver<()>,
    discovered: mpsc::Receiver<RulesUpdate>,
}

/// Reason of a reload.
enum Due {
    Files,
    Rules(RulesUpdate),
}

/// Watcher of the configuration file and all files and folders that it names.
struct ConfigWatcher {
    watcher: RecommendedWatcher,
    warn: Box<dyn Fn(&Config) + Send + Sync>,
    source: ConfigSource,
    files: Vec<PathBuf>,
    folders: BTreeSet<PathBuf>,
    /// Contents just before the last load: a change during the load differs from them.
    loaded: Vec<Option<Vec<u8>>>,
    /// Contents of the configuration in use.
    applied: Contents,
    /// Rules of the control plane, if it has sent some.
    discovered: Option<DiscoveredRules>,
    /// Those of the configuration in use, which may be older.
    discovered_in_use: Option<DiscoveredRules>,
}

impl ConfigWatcher {
    async fn run(
        mut self,
        mut triggers: Triggers,
        restart_only: RestartOnlyConfig,
        state: Arc<ServerState>,
    ) {
        let mut pending = None;
        loop {
            let interval = if pending.is_some() { DEBOUNCE } else { MISSING_FILE_POLL_INTERVAL };
            let is_missing = self.loaded.contains(&None);
            let due = tokio::select! {
                _ = triggers.hangup.recv() => Some(Due::Files),
                Some(update) = triggers.discovered.recv(), if pending.is_none() => {
                    Some(Due::Rules(update))
                }
                Some(()) = triggers.changes.recv(), if pending.is_none() => {
                    pending = Some(self.snapshot());
                    None
                }
                () = tokio::time::sleep(interval), if pending.is_some() || is_missing => {
                    let current = self.snapshot();
                    let has_changed = contents(current.clone()) != self.loaded;
                    let is_stable = pending.as_ref() == Some(&current);
                    pending = has_changed.then_some(current);
                    (has_changed && is_stable).then_some(Due::Files)
                }
            };
            // Thousands of rules take a while, and other tasks of this thread must not wait for it. A
            // defect in the parser, met by one file, must not end all reloads.
            let survived = tokio::task::block_in_place(|| {
                panics::caught(|| {
                    match due {
                        None => {}
                        Some(Due::Files) => {
                            pending = None;
                            let _ = self.reload(self.discovered.clone(), &restart_only, &state);
                        }
                        Some(Due::Rules(update)) => {
                            let is_changed = self.discovered_in_use.as_ref() != Some(&update.rules);
                            let result = if is_changed {
                                self.reload(Some(update.rules), &restart_only, &state)
                            } else {
                                self.discovered = Some(update.rules);
                                state.metrics.count_reload(true);
                                Ok(())
                            };
                            let result = result.map(|()| is_changed);
                            let _ = update.reply.send(result.map_err(|error| error.to_string()));
                        }
                    }
                    // A symlink may have a new target, and a directory may have been replaced.
                    self.watch_folders();
                })
            });
            if survived.is_none() {
                state.metrics.count_reload(false);
                let message = "loading the configuration panicked: see the log";
                state.reloads.failed(self.source.error(message));
            }
        }
    }

    /// Applies the new configuration as a whole, with these rules of the control plane, or keeps the
    /// current one.
    fn reload(
        &mut self,
        rules: Option<DiscoveredRules>,
        restart_only: &RestartOnlyConfig,
        state: &ServerState,
    ) -> Result<(), ReloadError> {
        let checked = self.load(rules.clone()).and_then(|config| {
            let tls = || check_tls(state.active().tls.as_ref(), config.tls.as_ref());
            let allowed = restart_only.check(&config).and_then(|()| tls());
            allowed.map_err(|error| self.source.error(error))?;
            let pending = restart_only.changed_sections(&config);
            // The credentials of other servers are of no use for those that are connected.
            if !pending.contains(&"store") {
                let renewed = state.backend.renew_credentials(&config.store);
                renewed.map_err(|error| self.source.error(format!("store: {error}")))?;
            }
            Ok((config, pending))
        });
        let (config, pending) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                state.metrics.count_reload(false);
                tracing::error!(
                    %error,
                    "reloading the configuration failed, keeping the current one"
                );
                state.journal.record(EventKind::ReloadFailed { error: bounded(error.to_string()) });
                state.reloads.failed(error.clone());
                return Err(error);
            }
        };
        if !pending.is_empty() {
            tracing::warn!(
                "changes in {} need a restart, all other changes are applied",
                pending.join(", ")
            );
        }
        (self.warn)(&config);
        config.log_warnings();
        let config_hash = config.hash.clone();
        let mut changes = state.reload(config);
        self.discovered_in_use = rules;
        state.metrics.count_reload(true);
        state.reloads.succeeded(pending.clone());
        changes.extend(self.log_changes().map(ConfigChange::of_files));
        state.journal.record(EventKind::Reloaded { config_hash, changes });
        if !pending.is_empty() {
            state.journal.record(EventKind::RestartPending { sections: pending });
        }
        Ok(())
    }

    /// Logs what differs from the configuration before, which this one replaces. Returns the names
    /// of the other files that changed.
    fn log_changes(&mut self) -> Option<String> {
        let applied = self.loaded_files();
        let changes = Changes::between(self.source.origin.file(), &self.applied, &applied);
        self.applied = applied;
        tracing::info!(
            file = %self.source.origin,
            sections = changes.sections,
            added_policies = changes.added_policies,
            removed_policies = changes.removed_policies,
            changed_policies = changes.changed_policies,
            files = changes.files,
            "configuration reloaded"
        );
        changes.files
    }

    /// Returns the files with their contents just before the last load.
    fn loaded_files(&self) -> Contents {
        self.files.iter().cloned().zip(self.loaded.iter().cloned()).collect()
    }

    /// Loads the configuration, again if it names other files than before: files must be watched
    /// before they are read. Sets the rules of the control plane. They are kept, unless they are
    /// what is wrong, so that they apply as soon as the files are valid again.
    fn load(&mut self, rules: Option<DiscoveredRules>) -> Result<Config, ReloadError> {
        let loaded = self.load_files();
        let Some(rules) = rules else { return loaded };
        let checked = loaded.map(|mut config| {
            let set = config.set_discovered_rules(&rules);
            set.map(|()| config).map_err(|error| ReloadError::of_file(XDS, error))
        });
        if !matches!(checked, Ok(Err(_))) {
            self.discovered = Some(rules);
        }
        checked.flatten()
    }

    fn load_files(&mut self) -> Result<Config, ReloadError> {
        let mut loads = 0;
        loop {
            loads += 1;
            self.watch_folders();
            self.loaded = contents(self.snapshot());
            let config = self.source.load()?;
            if config.files == self.files || loads == MAX_LOADS {
                return Ok(config);
            }
            self.files.clone_from(&config.files);
        }
    }

    fn snapshot(&self) -> Vec<FileSnapshot> {
        snapshot(self.source.origin.file(), &self.files)
    }

    fn watch_folders(&mut self) {
        let folders: BTreeSet<PathBuf> =
            self.files.iter().flat_map(|file| watched_folders(file)).collect();
        for unused in self.folders.difference(&folders) {
            // Fails if the directory was removed, because its watch is gone with it.
            let _ = self.watcher.unwatch(unused);
        }
        for folder in &folders {
            let watched = self.watcher.watch(folder, RecursiveMode::NonRecursive);
            if let Some(error) = watched.err().filter(|_| !self.folders.contains(folder)) {
                tracing::warn!(
                    folder = %folder.display(),
                    %error,
                    "watching a directory failed, changes in it need a SIGHUP"
                );
            }
        }
        self.folders = folders;
    }
}

/// Returns an error if a listener would use plain text from now on. Certificates are replaced by a
/// reload, but their removal is more likely a mistake than a wish to send tokens in plain text.
fn check_tls(current: Option<&ListenerTls>, new: Option<&ListenerTls>) -> Result<(), String> {
    let restart = "or restart to turn TLS off";
    match (current, new) {
        (Some(_), None) => {
            Err(format!("tls is missing, but the listeners use TLS: put it back, {restart}"))
        }
        (Some(current), Some(new)) if current.admin.is_some() && new.admin.is_none() => Err(
            format!("tls.admin is off, but the admin listener uses TLS: put it back, {restart}"),
        ),
        _ => Ok(()),
    }
}

/// Returns the directories to watch for changes of a file, or of the names in a folder.
fn watched_folders(file: &Path) -> BTreeSet<PathBuf> {
    if file.is_dir() { links::folders(&file.join("any name")) } else { links::folders(file) }
}

/// Modification time and contents of a file, or its hash, or the names in a folder, if it exists.
type FileSnapshot = Option<(SystemTime, Vec<u8>)>;

/// Reads the files. Of all but the configuration itself only the hash is kept: some are secrets.
fn snapshot(main: Option<&Path>, files: &[PathBuf]) -> Vec<FileSnapshot> {
    let read = |file: &Path| {
        let metadata = std::fs::metadata(file)?;
        if metadata.is_dir() {
            // The time of a folder also changes with names that are skipped.
            let names = rule_files::names(file)?.join("\n");
            return std::io::Result::Ok((SystemTime::UNIX_EPOCH, names.into_bytes()));
        }
        let mut content = std::fs::read(file)?;
        if Some(file) != main {
            content = digest(&SHA256, &content).as_ref().to_vec();
        }
        Ok((metadata.modified()?, content))
    };
    files.iter().map(|file| read(file).ok()).collect()
}

/// Drops the modification times: a file that was only touched has not changed.
fn contents(snapshots: Vec<FileSnapshot>) -> Vec<Option<Vec<u8>>> {
    snapshots.into_iter().map(|snapshot| snapshot.map(|(_, content)| content)).collect()
}
