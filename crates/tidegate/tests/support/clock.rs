//! A real server whose clock can be set, by a preloaded library that replaces `gettimeofday`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::server::Redis;

/// Clock of the server. A file has the number of seconds by which it is ahead of ours.
pub(crate) struct ServerClock {
    folder: tempfile::TempDir,
}

pub(crate) fn redis_with_settable_clock() -> (Redis, ServerClock) {
    let clock = ServerClock { folder: tempfile::tempdir().expect("a temporary folder") };
    clock.set(0);
    let (library, program) = (clock.path("clock.so"), clock.path("redis-server"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/clock.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(compiled.expect("a C compiler").success());
    let script = format!(
        "#!/bin/sh\nexport TIDEGATE_TEST_CLOCK='{}' LD_PRELOAD='{}'\nexec redis-server \"$@\"\n",
        clock.path("ahead").display(),
        library.display()
    );
    std::fs::write(&program, script).expect("written");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("ours");
    (Redis::start_program(&program, &[]), clock)
}

impl ServerClock {
    pub(crate) fn set(&self, seconds_ahead: i64) {
        self.write(&seconds_ahead.to_string());
    }

    /// Stops the clock at a time in microseconds since the Unix epoch.
    pub(crate) fn stop_at(&self, micros: u64) {
        self.write(&format!("={micros}"));
    }

    fn write(&self, text: &str) {
        // An atomic rename, so that the server never reads a partial number.
        let new_file = self.path("new");
        std::fs::write(&new_file, text).expect("written");
        std::fs::rename(new_file, self.path("ahead")).expect("renamed");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}
